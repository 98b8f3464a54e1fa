"""`doctor`: what is wrong with this machine and how to fix it, before a run finds out the expensive way.

Facts are gathered in one place and judged in another: every `_check_*` is a pure function of plain values, so each
fault has a test that needs no broken machine. Version limits are read off the package's own metadata, as pip does.
Nothing is started: querying an accelerator through torch or torch_xla takes it, or some of its memory, from a program
that is running on it; the driver's own tool and the files of the bus say as much without that. The Hub gets one short
request, because a machine without a network is not broken.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import click
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from qat_lora.commands.repository import load_program
from qat_lora.errors import QatLoraError, one_line
from qat_lora.plan.devices import KNOWN
from qat_lora.registry import COMMANDS, Requirements
from qat_lora.runtime.launch.select import Found, choose, count_tpu_chips, free_memory_bytes, look, select_runtime
from qat_lora.terminal import echo

GIB = 2**30
HUB_TIMEOUT_S = 3.0
_TPU_PCI_KINDS = {"0x0063": "v5e", "0x006f": "v6e"}
_TPU_TYPES = {"v5litepod": "v5e", "v5p": "v5p", "v6e": "v6e"}
LOW_DISK_GIB, LOW_RAM_GIB = 5, 2  # a small cache with a small student still fits above these
BACKENDS = ("TPU", "CPU")  # values of PJRT_DEVICE that our XLA runtime starts
MARKS = {"ok": "✓", "note": "–", "problem": "✗"}

VARIABLES = Path(__file__).with_name("variables.yaml")  # that do nothing or harm wherever they are set
_NUMBERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CPU_NUM_DEVICES")


class Accelerator(NamedTuple):
    """Equal chips or cards of this machine."""

    name: str
    number: int
    memory_gib: float | None  # of one


class Finding(NamedTuple):
    """One thing that was looked at."""

    name: str
    state: Literal["ok", "note", "problem"]  # `note` is worth knowing and needs no action
    found: str
    fix: str | None = None  # what to do; only for problems, and for all of them


def examine(environ: Mapping[str, str], needs: Requirements | None = None) -> list[Finding]:
    """Look at everything, starting nothing; disk and memory are held against `needs`, or else those of a small run."""
    found = look(environ)
    installed = importlib.metadata.distributions()
    versions: dict[str, str] = {canonicalize_name(d.metadata["Name"]): d.version for d in installed}
    try:
        required = [Requirement(line) for line in importlib.metadata.requires("qat-lora") or []]
        extras = importlib.metadata.metadata("qat-lora").get_all("Provides-Extra") or []
        package = [Finding("qat-lora", "ok", versions["qat-lora"])]
    except importlib.metadata.PackageNotFoundError:
        required, extras = [], []
        package = [Finding("qat-lora", "problem", "is not installed", "pip install -e . in its folder")]
    python = Finding("python", "ok", platform.python_version())  # an older one than we need could not import this
    packages = [*_check_packages(required, versions), _check_xla_fit(versions, found, libtpu_specifier())]
    devices = _check_device(found, Path("/proc/driver/nvidia/version").exists(), needs)
    devices = [*devices, *_check_accelerators(accelerators(environ, found), needs), *_check_variables(environ, found)]
    room = [_check_disk(shutil.disk_usage(Path.cwd()).free / GIB, Path.cwd(), needs)]
    room += [_check_ram(free_memory_bytes(), needs), _check_hub(environ)]
    return [python, *package, *packages, *devices, *room, *_check_extras(required, extras, versions)]


def findings_text(findings: Sequence[Finding]) -> str:
    """Return one line a finding, with a tick; the fix below each problem, and the count at the end."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{MARKS[finding.state]} {finding.name:<{width}}  {finding.found}")
        if finding.fix:
            lines.append(f"  {'':<{width}}  fix: {finding.fix}")
    problems = sum(finding.fix is not None for finding in findings)
    lines.append(f"{problems} to fix" if problems else "nothing to fix")
    return "\n".join(lines)


def _check_packages(required: Sequence[Requirement], versions: Mapping[str, str]) -> list[Finding]:
    findings = []
    for wanted in (requirement for requirement in required if requirement.marker is None):
        version = versions.get(canonicalize_name(wanted.name))
        wrong = f"{version}, which is not {wanted.specifier}" if version else "is not installed"
        if version is not None and wanted.specifier.contains(version, prereleases=True):
            findings.append(Finding(wanted.name, "ok", version))
        else:
            findings.append(Finding(wanted.name, "problem", wrong, f"pip install '{wanted}'"))
    return findings


def _check_xla_fit(versions: Mapping[str, str], found: Found, libtpu_wanted: str = "") -> Finding:
    """torch_xla is compiled against one minor version of torch and one of libtpu, and crashes with others."""
    xla, torch, libtpu = (versions.get(name) for name in ("torch-xla", "torch", "libtpu"))
    install = f"pip install 'qat-lora[{'tpu' if found.tpu else 'xla'}]'"
    if xla is None and not (found.tpu or found.pjrt_device):
        return Finding("torch_xla", "note", "not installed; only TPUs need it")
    if xla is None:
        wrong, fix = f"not installed ({found.tpu or f'PJRT_DEVICE={found.pjrt_device}'})", install
    elif torch is not None and Version(torch).release[:2] != Version(xla).release[:2]:
        minor = ".".join(map(str, Version(xla).release[:2]))
        wrong, fix = f"{xla} does not fit torch {torch}", f"{install} for a fitting pair (or 'torch=={minor}.*')"
    elif found.tpu and libtpu is None:
        wrong, fix = f"{xla} without libtpu ({found.tpu})", install
    elif libtpu is not None and not SpecifierSet(libtpu_wanted).contains(libtpu, prereleases=True):
        wrong = f"{xla} with libtpu {libtpu}, but it was made for libtpu{libtpu_wanted}"
        fix = f"pip install 'libtpu{libtpu_wanted}'"
    else:
        return Finding("torch_xla", "ok", xla + (f", libtpu {libtpu}" if libtpu else ""))
    return Finding("torch_xla", "problem", wrong, fix)


def _check_device(found: Found, nvidia_driver: bool, needs: Requirements | None = None) -> list[Finding]:
    """Say what is here, what `--device auto` takes, and where the device of the planned run is not here."""
    findings = []
    if nvidia_driver and not found.cuda_devices:
        fix = "check nvidia-smi and CUDA_VISIBLE_DEVICES; install a CUDA build of torch"
        findings.append(Finding("cuda", "problem", "an NVIDIA driver is here, but torch sees no GPU", fix))
    asked = {"auto": f"found: {found}"}
    if needs is not None:
        asked.setdefault(needs.device, f"{needs.what} asks for --device {needs.device}")
    for device, what in asked.items():
        try:
            choice = choose(device, False, found)
            taken = f"XLA on {choice.backend}" if choice.kind == "xla" else choice.kind
            findings.append(Finding("device", "ok", f"--device {device} takes {taken}; found: {found}"))
        except QatLoraError as error:
            findings.append(Finding("device", "problem", what, str(error)))
    return findings


def _check_accelerators(there: Sequence[Accelerator], needs: Requirements | None) -> list[Finding]:
    """Say how many chips there are, how much memory each has, and whether the planned run fits one."""
    findings = []
    for chip in there:
        text, fix = f"{chip.number} x {chip.name}", None
        if chip.memory_gib is None:
            findings.append(Finding("chips", "note", f"{text}; `qat-lora smoke` says what they are"))
            continue
        if needs is not None and needs.memory > 0.9 * chip.memory_gib * GIB:
            fix = "lower --batch-size and raise --accumulation-steps, or give --gradient-checkpointing"
        text += f", {chip.memory_gib:.0f} GiB of memory each"
        text += f"; {needs.what} is estimated to need {needs.memory / GIB:.1f} GiB" if needs and fix else ""
        findings.append(Finding("chips", "problem" if fix else "ok", text, fix))
    return findings


def _check_hub(environ: Mapping[str, str]) -> Finding:
    """The Hub is needed for names only; whoever has folders needs none, so this is never a problem."""
    from huggingface_hub import constants, get_token

    if environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):  # the user's own wish
        return Finding("hub", "note", "HF_HUB_OFFLINE is set: only folders and what was fetched before")
    login = "logged in" if get_token() else "not logged in (gated models and push need `hf auth login`)"
    if error := _unreachable(constants.ENDPOINT):
        return Finding("hub", "note", f"cannot be reached ({error}): give folders instead of names; {login}")
    return Finding("hub", "ok", f"reached; {login}")


def _check_variables(environ: Mapping[str, str], found: Found) -> list[Finding]:
    """Name the variables that do nothing, harm, or hold a value that nothing understands."""
    findings = []

    def add(name: str, fix: str | None, text: str = "") -> None:
        """Add a note, or a problem where there is a fix."""
        findings.append(Finding(name, "problem" if fix else "note", f"is set to {environ[name]!r}{text}", fix))

    known: dict[str, dict[str, str]] = yaml.safe_load(VARIABLES.read_text(encoding="utf-8"))
    for name in filter(environ.get, known):
        add(name, known[name].get("fix"), f": {known[name]['note']}" if "note" in known[name] else "")
    chips = environ.get("TPU_NUM_DEVICES")
    if chips is not None and (chips == "all" or (chips.isdecimal() and int(chips))):
        taken = f": taken as --num-chips {chips} and translated into the variables that libtpu reads"
        add("TPU_NUM_DEVICES", None, f"{taken}; torch_xla itself never reads it, so in other programs it does nothing")
    elif chips is not None:
        fix = "unset it, or set it to a number of chips; dead in torch_xla, and taken as --num-chips here"
        add("TPU_NUM_DEVICES", fix, ", which is no number of chips")
    for name in (n for n in _NUMBERS if n in environ and not environ[n].isdecimal()):
        add(name, f"unset {name}, or start through torchrun, which sets it", ", which is no number")
    for name in sorted(n for n in environ if n.startswith("XRT_")):
        add(name, "torch_xla no longer reads it; unset it (PJRT_DEVICE took its place)")
    backend = found.pjrt_device
    if backend and backend not in BACKENDS:
        fix = f"unset PJRT_DEVICE, or set it to one of {', '.join(BACKENDS)}"
        findings.append(Finding("PJRT_DEVICE", "problem", f"is set to {backend!r}, which we cannot start", fix))
    elif backend == "TPU" and not found.tpu:
        findings.append(Finding("PJRT_DEVICE", "note", "is TPU, and no TPU can be seen here; runs will try to use one"))
    elif backend:
        findings.append(Finding("PJRT_DEVICE", "ok", f"{backend}: --tpu and --device xla run on it"))
    return findings or [Finding("variables", "ok", "none that is dead or wrong")]


def _check_disk(free_gib: float, folder: Path, needs: Requirements | None = None) -> Finding:
    wanted, what = (LOW_DISK_GIB, "a small cache") if needs is None else (needs.disk / GIB, needs.what)
    text = f"{free_gib:.1f} GiB free in {folder}; {what} wants {wanted:.1f} GiB"
    fix = "free some space, or choose another --out"
    return Finding("disk", "problem", text, fix) if free_gib < wanted else Finding("disk", "ok", text)


def _check_ram(free: int | None, needs: Requirements | None = None) -> Finding:
    if free is None:
        return Finding("memory", "note", "this system does not say how much is free")
    wanted, what = (LOW_RAM_GIB, "a small student") if needs is None else (needs.host / GIB, needs.what)
    text = f"{free / GIB:.1f} GiB free; {what} is estimated to need {wanted:.1f} GiB of it"
    fix = "end other programs; `qat-lora estimate` says what a run needs"
    return Finding("memory", "problem", text, fix) if free / GIB < wanted else Finding("memory", "ok", text)


def _check_extras(required: Sequence[Requirement], extras: Sequence[str], versions: Mapping[str, str]) -> list[Finding]:
    findings = []
    for extra in (extra for extra in extras if extra not in ("dev", "docs", "tpu", "xla")):  # judged as torch_xla
        marked = [r for r in required if r.marker is not None and "extra" in str(r.marker)]  # not by platform alone
        names = [r.name for r in marked if r.marker is not None and r.marker.evaluate({"extra": extra})]
        missing = ", ".join(name for name in names if canonicalize_name(name) not in versions)
        hint = f"{missing} not installed; pip install 'qat-lora[{extra}]' to have it"
        findings.append(Finding(f"extra {extra}", *(("note", hint) if missing else ("ok", ", ".join(names)))))
    return findings


def accelerators(environ: Mapping[str, str], found: Found, root: Path = Path("/")) -> list[Accelerator]:
    """Return TPU chips and NVIDIA cards, without touching them."""
    there = []
    if found.tpu:
        kind = tpu_kind(environ, root)
        memory_gib = KNOWN[kind].memory_gb * 1e9 / GIB if kind else None
        there.append(Accelerator(f"TPU {kind or 'of unknown kind'}", count_tpu_chips(root) or 1, memory_gib))
    if found.cuda_devices and shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
        there += nvidia_cards(done.stdout if done.returncode == 0 else "")
    return there


def nvidia_cards(table: str) -> list[Accelerator]:
    """Return the cards of `nvidia-smi`'s table `name, MiB`."""
    cards = Counter(tuple(line.rsplit(", ", 1)) for line in table.splitlines() if ", " in line)
    memory_gib = {mib: int(mib) / 1024 if mib.strip().isdecimal() else None for _, mib in cards}
    return [Accelerator(name, count, memory_gib[mib]) for (name, mib), count in cards.items()]


def tpu_kind(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """Return the chip's name in `estimate`, empty where neither the bus nor the variables tell."""
    said = environ.get("TPU_ACCELERATOR_TYPE", "").split("-")[0].lower()
    if said in _TPU_TYPES:
        return _TPU_TYPES[said]
    for device in root.glob("sys/bus/pci/devices/*/device"):
        with contextlib.suppress(OSError, KeyError):
            return _TPU_PCI_KINDS[device.read_text(encoding="utf-8").strip()]
    return ""


def libtpu_specifier() -> str:
    """Return the versions of libtpu that the installed torch_xla names, empty where it names none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for line in importlib.metadata.requires("torch_xla") or []:
            if (requirement := Requirement(line)).name == "libtpu":
                return str(requirement.specifier)
    return ""


def _unreachable(url: str) -> str:
    """Return why a server does not answer, empty if it does, whatever it says."""
    from huggingface_hub import get_session

    try:
        get_session().request("HEAD", url, timeout=HUB_TIMEOUT_S)
        return ""
    except Exception as error:  # those of its HTTP client
        return one_line(error, 80)


def doctor(planned: tuple[str, ...], compile_for: str | None) -> None:
    """Check this machine, or look into a model's file; exit code 1 where something needs fixing."""
    if compile_for is not None:
        command = load_program("compiled.report", "doctor --compile-for").command
        raise SystemExit(command.main(planned, "doctor --compile-for", standalone_mode=False, obj=compile_for))
    if planned and planned[0] not in COMMANDS and (os.sep in planned[0] or Path(planned[0]).exists()):
        select_runtime("cpu")  # before transformers is imported, as for every command
        from qat_lora.plan.inspect_file import inspect, inspection_text

        files = [word for word in planned if word != "--json"]
        if len(files) > 2:
            raise click.UsageError(f"doctor: {' '.join(files)} are more than a model and an adapter")
        report = inspect(*files)
        echo(json.dumps(report, indent=2) if len(files) < len(planned) else inspection_text(report))
        raise SystemExit(int(bool(report["problems"])))
    findings = examine(os.environ, _requirements(planned) if planned else None)
    echo(findings_text(findings))
    if any(finding.fix for finding in findings):
        raise SystemExit(1)


def _requirements(planned: Sequence[str]) -> Requirements:
    from qat_lora.cli import OptionsCommand  # the parser of the planned command

    count = 1 + (" ".join(planned[:2]) in COMMANDS)
    command = COMMANDS.get(words := " ".join(planned[:count]))
    if command is None or not command.plan:
        allowed = " or ".join(name for name, other in COMMANDS.items() if other.plan)
        raise click.UsageError(f"doctor: {' '.join(planned)!r} is not planned from shapes; give {allowed}, or nothing")
    select_runtime("cpu")  # before transformers is imported, as for every command
    parser = OptionsCommand(command)
    options = parser.options(parser.make_context(words, list(planned[count:])))
    return command.load("plan")(options).requirements._replace(device="tpu" if options.run.tpu else options.run.device)

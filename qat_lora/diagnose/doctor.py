"""What is wrong with this machine, and how to put it right, before a run finds out the expensive way.

Gathering facts and judging them are apart: every `_check_*` is a pure function of plain values, so each fault has
a test that needs no broken machine. Version limits are not repeated here; they are read off the package's own
metadata, which pip used too. Nothing is started: torch_xla is not imported, because that takes the TPU away from
a program that is running on it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

from qat_lora.errors import QatLoraError
from qat_lora.runtime.select import Found, choose, look

GIB = 2**30
LOW_DISK_GIB, LOW_RAM_GIB = 5, 2  # a small cache with a small student still fits above these
BACKENDS = ("TPU", "CPU")  # values of PJRT_DEVICE that our XLA runtime starts
MARKS = {"ok": "✓", "note": "–", "problem": "✗"}

_DEAD = {
    "TPU_NUM_DEVICES": "nothing reads it; unset it, and leave chips out with TPU_VISIBLE_CHIPS",
    "XLA_USE_BF16": "it is deprecated and changes every float32 behind the program's back; unset it, give "
    "--dtype bfloat16",
    "XLA_DOWNCAST_BF16": "it is deprecated and changes every float32 behind the program's back; unset it, give "
    "--dtype bfloat16",
}


class Finding(NamedTuple):
    """One thing that was looked at."""

    name: str
    state: Literal["ok", "note", "problem"]
    """`note` is worth knowing and needs no action."""
    found: str
    fix: str | None = None
    """What to do; only for problems, and for all of them."""


def examine(environ: Mapping[str, str]) -> list[Finding]:
    """Look at everything; changes nothing and starts nothing.

    Args:
        environ: the environment to judge, usually `os.environ`.
    """
    found = look(environ)
    versions = {_key(d.metadata["Name"]): d.version for d in importlib.metadata.distributions()}
    try:
        required = [Requirement(line) for line in importlib.metadata.requires("qat-lora") or []]
        extras = importlib.metadata.metadata("qat-lora").get_all("Provides-Extra") or []
        package = [Finding("qat-lora", "ok", versions["qat-lora"])]
    except importlib.metadata.PackageNotFoundError:
        required, extras = [], []
        package = [Finding("qat-lora", "problem", "is not installed", "pip install -e . in its folder")]
    return [
        _check_python(platform.python_version()),
        *package,
        *_check_packages(required, versions),
        _check_xla_fit(versions, found),
        *_check_device(found, nvidia_driver=Path("/proc/driver/nvidia/version").exists()),
        *_check_variables(environ, found),
        _check_disk(shutil.disk_usage(Path.cwd()).free / GIB, Path.cwd()),
        _check_ram(_free_ram_gib()),
        *_check_extras(required, extras, versions),
    ]


def render(findings: Sequence[Finding]) -> str:
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


def _check_python(version: str) -> Finding:
    if Version(version) < Version("3.11"):
        return Finding("python", "problem", version, "make an environment with Python 3.11 or newer")
    return Finding("python", "ok", version)


def _check_packages(required: Sequence[Requirement], versions: Mapping[str, str]) -> list[Finding]:
    """Compare what is installed with what the package requires without any extra."""
    findings = []
    for requirement in required:
        if requirement.marker is not None:
            continue
        name, version = requirement.name, versions.get(_key(requirement.name))
        if version is None:
            findings.append(Finding(name, "problem", "is not installed", f"pip install '{requirement}'"))
        elif not requirement.specifier.contains(version, prereleases=True):
            wanted = f"{version}, which is not {requirement.specifier}"
            findings.append(Finding(name, "problem", wanted, f"pip install '{requirement}'"))
        else:
            findings.append(Finding(name, "ok", version))
    return findings


def _check_xla_fit(versions: Mapping[str, str], found: Found) -> Finding:
    """torch_xla is compiled against one minor version of torch and crashes with others."""
    xla, torch = versions.get("torch-xla"), versions.get("torch")
    extra = "tpu" if found.tpu else "xla"
    if xla is None:
        if found.tpu or found.pjrt_device:
            reason = found.tpu or f"PJRT_DEVICE={found.pjrt_device}"
            return Finding("torch_xla", "problem", f"not installed ({reason})", f"pip install 'qat-lora[{extra}]'")
        return Finding("torch_xla", "note", "not installed; only TPUs need it")
    if torch is not None and Version(torch).release[:2] != Version(xla).release[:2]:
        minor = ".".join(map(str, Version(xla).release[:2]))
        fix = f"pip install 'qat-lora[{extra}]' for a fitting pair (or 'torch=={minor}.*')"
        return Finding("torch_xla", "problem", f"{xla} does not fit torch {torch}", fix)
    libtpu = versions.get("libtpu")
    if found.tpu and libtpu is None:
        return Finding("torch_xla", "problem", f"{xla} without libtpu ({found.tpu})", "pip install 'qat-lora[tpu]'")
    return Finding("torch_xla", "ok", f"{xla}" + (f", libtpu {libtpu}" if libtpu else ""))


def _check_device(found: Found, nvidia_driver: bool) -> list[Finding]:
    """Say what is here and what `--device auto` takes."""
    findings = []
    if nvidia_driver and not found.cuda_devices:
        findings.append(
            Finding(
                "cuda",
                "problem",
                "an NVIDIA driver is here, but torch sees no GPU",
                "check nvidia-smi and CUDA_VISIBLE_DEVICES; install a CUDA build of torch",
            )
        )
    try:
        choice = choose("auto", False, found)
    except QatLoraError as error:
        return [*findings, Finding("device", "problem", f"found: {found}", str(error))]
    taken = f"XLA on {choice.backend}" if choice.kind == "xla" else choice.kind
    return [*findings, Finding("device", "ok", f"--device auto takes {taken}; found: {found}")]


def _check_variables(environ: Mapping[str, str], found: Found) -> list[Finding]:
    """Name the variables that do nothing, harm, or hold a value that nothing understands."""
    findings = [
        Finding(name, "problem", f"is set to {environ[name]!r}", fix) for name, fix in _DEAD.items() if name in environ
    ]
    for name in sorted(n for n in environ if n.startswith("XRT_")):
        fix = "torch_xla no longer reads it; unset it (PJRT_DEVICE took its place)"
        findings.append(Finding(name, "problem", f"is set to {environ[name]!r}", fix))
    backend = found.pjrt_device
    if backend and backend not in BACKENDS:
        fix = f"unset PJRT_DEVICE, or set it to one of {', '.join(BACKENDS)}"
        findings.append(Finding("PJRT_DEVICE", "problem", f"is set to {backend!r}, which we cannot start", fix))
    elif backend == "TPU" and not found.tpu:
        findings.append(Finding("PJRT_DEVICE", "note", "is TPU, and no TPU can be seen here; runs will try to use one"))
    elif backend:
        findings.append(Finding("PJRT_DEVICE", "ok", f"{backend}: --tpu and --device xla run on it"))
    return findings or [Finding("variables", "ok", "none that is dead or wrong")]


def _check_disk(free_gib: float, folder: Path) -> Finding:
    text = f"{free_gib:.1f} GiB free in {folder}"
    if free_gib < LOW_DISK_GIB:
        return Finding("disk", "problem", text, f"free some space (a cache wants {LOW_DISK_GIB} GiB and more)")
    return Finding("disk", "ok", text)


def _check_ram(free_gib: float | None) -> Finding:
    if free_gib is None:
        return Finding("memory", "note", "this system does not say how much is free")
    text = f"{free_gib:.1f} GiB free"
    if free_gib < LOW_RAM_GIB:
        return Finding("memory", "problem", text, "end other programs; `qat-lora estimate` says what a run needs")
    return Finding("memory", "ok", text)


def _check_extras(required: Sequence[Requirement], extras: Sequence[str], versions: Mapping[str, str]) -> list[Finding]:
    """Say which optional features are there; none has to be."""
    findings = []
    for extra in extras:
        if extra in ("dev", "tpu", "xla"):  # for developers; judged as torch_xla
            continue
        names = [r.name for r in required if r.marker is not None and r.marker.evaluate({"extra": extra})]
        missing = [name for name in names if _key(name) not in versions]
        if missing:
            hint = f"{', '.join(missing)} not installed; pip install 'qat-lora[{extra}]' to have it"
            findings.append(Finding(f"extra {extra}", "note", hint))
        else:
            findings.append(Finding(f"extra {extra}", "ok", ", ".join(names)))
    return findings


def _key(name: str) -> str:
    """Return a distribution's name as it is compared: `torch_xla` and `Torch-XLA` are one."""
    return name.lower().replace("_", "-").replace(".", "-")


def _free_ram_gib() -> float | None:
    """Return memory that programs can still get, None where the system does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 / GIB
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    except (AttributeError, OSError, ValueError):
        return None

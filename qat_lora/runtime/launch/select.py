"""Choose the device and plan the start: what was asked for, what is there, and what to say when they differ.

Looking (`look`) is separate from deciding (`choose`, `plan_chips`), so every combination of flags, environment and
hardware is a line of a test's table. Looking imports nothing: torch_xla takes seconds, and the TPU from other programs.

`TPU_NUM_DEVICES`, which torch_xla's own error message recommends, is read nowhere in torch_xla 2.9, and `xmp.spawn`
takes no number but 1. What decides is the topology that libtpu is told: `TPU_VISIBLE_CHIPS` and bounds for one process
over some chips, process bounds alone for a process per chip (with TPU_VISIBLE_CHIPS all would take the same one).
Source: torch_xla/_internal/tpu.py and pjrt.py (2.9). The TPU variables are untested on hardware.
"""

import contextlib
import importlib.util
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, cast

import torch

from qat_lora.config import HELP, common, option
from qat_lora.errors import ConfigError, DeviceError
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.host.collectives import group_size, whole_number

DEVICES = ("auto", "cpu", "cuda", "mps", "tpu", "xla")
ROW_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}  # the grid of TPU chips of one host, in libtpu's notation
_GOOGLE_PCI_VENDOR = "0x1ae0"
# v2 and v3, v4, two unnamed in torch_xla's own list (tpu.py), v5e, v6e, 7x.
_TPU_PCI_DEVICES = {"0x0027", "0x005e", "0x0056", "0x0062", "0x0063", "0x006f", "0x0076"}
_TPU_VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID")


@dataclass(frozen=True)
class Found:
    """What this machine offers, as far as it can be seen without starting anything."""

    cuda_devices: int = 0
    mps: bool = False
    torch_xla: bool = False
    tpu: str = ""  # what points to a TPU, for example `/dev/accel0`; empty if nothing does
    pjrt_device: str = ""  # PJRT_DEVICE, empty if unset
    cores: int = 1
    tpu_chips: int = 0  # of this host, 0 if unknown

    def __str__(self) -> str:
        parts = {f"cuda ({self.cuda_devices})": self.cuda_devices, "mps": self.mps, f"a TPU ({self.tpu})": self.tpu}
        parts["torch_xla" if self.torch_xla else "no torch_xla"] = True
        parts[f"PJRT_DEVICE={self.pjrt_device}"] = self.pjrt_device
        return ", ".join(["cpu", *(part for part, there in parts.items() if there)])


@dataclass(frozen=True)
class DeviceChoice:
    """The kind of runtime to make, XLA's backend, and a note for the user."""

    kind: Literal["cpu", "cuda", "mps", "xla"]
    backend: str = ""
    note: str = ""

    @property
    def name(self) -> str:
        """What `--device` calls it; `xla` is XLA on something else than a TPU."""
        return "tpu" if self.backend.startswith("TPU") else self.kind


@dataclass(frozen=True)
class ChipsConfig:
    """How many chips, and how they are driven."""

    num_chips: str | None = common(None, HELP["num_chips"])
    parallel: Literal["spawn", "spmd"] = option("spawn", "on XLA: a process a chip (spawn), or one over all (spmd)")
    shard_base: bool = option(False, HELP["shard_base"])

    def __post_init__(self) -> None:
        if self.num_chips not in (None, "all") and not (self.num_chips.isdecimal() and int(self.num_chips)):
            raise ConfigError(f"num_chips: {self.num_chips!r} is no number of chips; allowed: 1 or more, or all")


Start = Literal["here", "group", "torch_xla"]
_Start = tuple[int, Start, Mapping[str, str]]  # the fields of a `LaunchPlan` after the device


class LaunchPlan(NamedTuple):
    """The device of a run, and how its processes are started."""

    device: DeviceChoice
    chips: int = 1  # replicas on this machine; 0 where only the device itself will tell (all of an unseen number)
    start: Start = "here"  # in this process; as processes of our own; or by PyTorch/XLA, a process per chip
    variables: Mapping[str, str] = {}  # to set, where nothing is set yet, before the device is touched


def find_tpu(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """Return what points to a TPU: a device file (not `/dev/vfio`, which GPUs have too), a PCI device or a variable."""
    # Not /dev/accel/accel0, which is the kernel's folder for other makers' accelerators.
    if files := sorted(root.glob("dev/accel[0-9]*")):
        return str(files[0])
    for vendor in sorted(root.glob("sys/bus/pci/devices/*/vendor")):
        with contextlib.suppress(OSError):
            ids = vendor.read_text().strip(), vendor.with_name("device").read_text().strip()
            if ids[0] == _GOOGLE_PCI_VENDOR and ids[1] in _TPU_PCI_DEVICES:
                return f"PCI device {vendor.parent.name}"
    return next((name for name in _TPU_VARIABLES if environ.get(name)), "")


def look(environ: Mapping[str, str] = os.environ) -> Found:
    """Look at the machine."""
    cuda, mps = torch.cuda.device_count() if torch.cuda.is_available() else 0, torch.backends.mps.is_available()
    has_xla, pjrt = importlib.util.find_spec("torch_xla") is not None, environ.get("PJRT_DEVICE", "").strip().upper()
    return Found(cuda, mps, has_xla, find_tpu(environ), pjrt, os.cpu_count() or 1, count_tpu_chips())


def check_device(device: str, tpu: bool) -> None:
    """Raise ConfigError where `--tpu` contradicts another device."""
    if tpu and device not in ("auto", "tpu", "xla"):
        raise ConfigError(f"--tpu with --device {device}: they contradict each other; give one of the two")


def choose(device: str, tpu: bool, found: Found) -> DeviceChoice:
    """Decide which runtime to make; a pure function.

    `auto` takes a TPU, then CUDA, then MPS, then the CPU. PJRT_DEVICE=TPU turns `auto` into `tpu`; any value of
    it decides what `tpu` and `xla` run on, so that `--tpu` with PJRT_DEVICE=CPU tries a TPU run without one.

    ConfigError: an unknown device, or `--tpu` with another one.
    DeviceError: a device that was asked for and is not there.
    """
    if device not in DEVICES:
        hint = " (choose among several GPUs by CUDA_VISIBLE_DEVICES)" if device.startswith("cuda") else ""
        raise ConfigError(f"--device {device}: no such device; allowed: {', '.join(DEVICES)}{hint}")
    check_device(device, tpu)
    asked = f"--device {device}"
    if tpu:
        device, asked = "tpu", "--tpu"
    elif device == "auto" and found.pjrt_device == "TPU":
        device, asked = "tpu", "PJRT_DEVICE=TPU"

    if device == "auto":
        return _choose_any(found)
    if device in ("tpu", "xla"):
        return _choose_xla(device, asked, found)
    if device == "cuda" and not found.cuda_devices:
        remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES, install a CUDA build of torch, or use --device auto"
        raise DeviceError(f"{asked}: torch {torch.__version__} sees no CUDA device; found: {found}; {remedy}")
    if device == "mps" and not found.mps:
        raise DeviceError(f"{asked}: torch sees no Apple GPU; found: {found}; use --device auto")
    return DeviceChoice(cast(Literal["cpu", "cuda", "mps"], device))


def _choose_any(found: Found) -> DeviceChoice:
    note = ""
    if found.tpu and not found.pjrt_device:
        if found.torch_xla:
            return DeviceChoice("xla", "TPU")
        note = f"a TPU seems to be here ({found.tpu}) but torch_xla is not; pip install 'qat-lora[tpu]' to use it"
    return DeviceChoice("cuda" if found.cuda_devices else "mps" if found.mps else "cpu", note=note)


def _choose_xla(device: str, asked: str, found: Found) -> DeviceChoice:
    backend = found.pjrt_device or ("TPU" if device == "tpu" or found.tpu else "CPU")
    if not found.torch_xla:
        extra = "tpu" if backend == "TPU" else "xla"
        remedy = f"pip install 'qat-lora[{extra}]', or use --device auto"
        raise DeviceError(f"{asked}: needs PyTorch/XLA, which is not installed; found: {found}; {remedy}")
    # PJRT_DEVICE=TPU may name a TPU that is not seen from here; if there is none, the launch says so.
    if backend == "TPU" and not found.tpu and found.pjrt_device != "TPU":
        looked = f"no /dev/accel*, no TPU on the PCI bus, none of {', '.join(_TPU_VARIABLES)}"
        remedy = "set PJRT_DEVICE=TPU if there is one, PJRT_DEVICE=CPU to try XLA on the CPU, or use --device auto"
        raise DeviceError(f"{asked}: no TPU on this machine ({looked}); found: {found}; {remedy}")
    return DeviceChoice("xla", backend)


def count_tpu_chips(root: Path = Path("/")) -> int:
    """Return the TPU chips of this host, 0 where none can be seen."""
    vfio = [file for file in root.glob("dev/vfio/[0-9]*") if file.name.isdecimal()]
    return len(list(root.glob("dev/accel[0-9]*")) or vfio)


def plan_chips(config: ChipsConfig, device: DeviceChoice, found: Found, environ: Mapping[str, str]) -> LaunchPlan:
    """Decide how a run on a chosen device is started; a pure function. ConfigError lists the possible numbers."""
    on_tpu = device.kind == "xla" and device.backend == "TPU"
    asked = config.num_chips
    if asked is None and on_tpu and (count := whole_number(environ, "TPU_NUM_DEVICES", 0, least=1)):
        asked = str(count)
    if config.parallel == "spmd" and device.kind != "xla":
        raise ConfigError("parallel: spmd exists on XLA only; give --tpu (or --device xla), or leave it out")
    if config.shard_base and config.parallel != "spmd" and device.kind == "xla":
        raise ConfigError("shard_base: on XLA only one process over all chips can share weights; add --parallel spmd")
    if group_size(environ) > 1:
        _check_group(config, asked, environ)
        return LaunchPlan(device)
    if on_tpu:
        return LaunchPlan(device, *_on_tpu(config, asked, environ, found.tpu_chips))
    if device.kind == "xla":
        return LaunchPlan(device, *_on_xla_cpu(config, asked, environ))
    counts = {"cuda": (found.cuda_devices, found.cuda_devices), "mps": (1, 1)}
    everything, most = counts.get(device.kind, (found.cores, max(8, 4 * found.cores)))
    count = _pick(asked, list(range(1, most + 1)), everything, device.kind)
    if config.shard_base and count == 1:
        raise ConfigError("shard_base: one process has none to share with; give --num-chips 2 or more, or leave it out")
    return LaunchPlan(device, count, "group" if count > 1 else "here")


def _pick(asked: str | None, possible: list[int], everything: int, what: str) -> int:
    if asked is None:
        return 1
    if asked == "all":
        return everything
    if not asked.isdecimal() or int(asked) not in possible:
        whole_range = len(possible) > 2 and possible[-1] - possible[0] == len(possible) - 1
        allowed = f"{possible[0]} to {possible[-1]}" if whole_range else ", ".join(map(str, possible))
        raise ConfigError(f"num_chips: {asked} is not possible here ({what}); possible: {allowed}, or all")
    return int(asked)


def _check_group(config: ChipsConfig, asked: str | None, environ: Mapping[str, str]) -> None:
    """Check that a number of chips confirms that of the processes that were started already (torchrun)."""
    size = group_size(environ)
    here = whole_number(environ, "LOCAL_WORLD_SIZE", size, least=1)
    if config.parallel == "spmd":
        remedy = "leave torchrun out, or --parallel spmd"
        raise ConfigError(f"parallel: spmd is one process a machine, but WORLD_SIZE={size}; {remedy}")
    if asked not in (None, "all") and int(asked) not in (size, here):
        what = f"{asked}, but this is one of {size} processes that were started already (WORLD_SIZE)"
        raise ConfigError(f"num_chips: {what}; leave --num-chips out, or start without torchrun")


def _on_xla_cpu(config: ChipsConfig, asked: str | None, environ: Mapping[str, str]) -> _Start:
    if config.parallel == "spmd":
        there = whole_number(environ, "CPU_NUM_DEVICES", 0, least=1)
        count = _pick(asked or "all", [there] if there else list(range(1, 9)), there or 1, "XLA on CPU")
        return count, "here", {"CPU_NUM_DEVICES": str(count)}
    count = _pick(asked, [1], 1, "XLA on CPU has no exchange between processes; --parallel spmd takes up to 8")
    return count, "torch_xla" if asked else "here", {}


def _on_tpu(config: ChipsConfig, asked: str | None, environ: Mapping[str, str], chips: int) -> _Start:
    part = {4: 2, 8: 4}.get(chips)
    possible = sorted({1, *([part] if part else []), *([chips] if chips else [])})
    if config.parallel == "spmd":
        asked = asked or "all"
    count = _pick(asked, possible, chips, f"{chips or 'an unknown number of'} TPU chips")
    if asked in (None, "1") or (config.parallel == "spmd" and count == part):  # one process over some chips
        visible = ",".join(map(str, range(count)))
        bounds = {"TPU_CHIPS_PER_PROCESS_BOUNDS": ROW_BOUNDS[count], "TPU_PROCESS_BOUNDS": ROW_BOUNDS[1]}
        return count, "here", {"TPU_VISIBLE_CHIPS": visible, **bounds}
    if config.parallel == "spmd":
        return count, "here", {}
    if environ.get("TPU_VISIBLE_CHIPS"):
        what = "every process would take the same chip"
        remedy = "unset it and give --num-chips, or use --parallel spmd"
        raise ConfigError(f"TPU_VISIBLE_CHIPS={environ['TPU_VISIBLE_CHIPS']}: {what}; {remedy}")
    return count, "torch_xla", {"TPU_PROCESS_BOUNDS": ROW_BOUNDS[count]} if count == part else {}


def runs_on_host(device: str, tpu: bool) -> bool:
    """Tell whether a run's memory is the host's; False too where its device is not here."""
    try:
        return choose(device, tpu, look()).kind in ("cpu", "mps")
    except DeviceError:
        return False


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return memory that programs of this host can still get, None where the system does not tell."""
    told = meminfo.read_text(encoding="utf-8") if meminfo.is_file() else ""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", told, re.M)
    return int(found[1]) * 1024 if found else None


def plan_run(device: str = "auto", tpu: bool = False, chips: ChipsConfig | None = None) -> LaunchPlan:
    """Choose the device of a run, and how it is started; touches no device, raises as `choose` and `plan_chips`."""
    found = look()
    return plan_chips(chips or ChipsConfig(), choose(device, tpu, found), found, os.environ)


def make_runtime(device: DeviceChoice, chips: ChipsConfig | None = None) -> Runtime:
    """Make the runtime of a chosen device; call it before anything imports transformers.

    That imports torch_xla wherever it is installed, which takes seconds, prints a warning and settles PJRT_DEVICE. So
    the choice is written to the environment: PJRT_DEVICE for an XLA run, USE_TORCH_XLA=0 for every other. Large
    tensors get pages of 2 MB on Linux, if none came before: those of 4 kB cost a quarter of a host's step in faults.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    chips = chips or ChipsConfig()
    if device.note:
        logging.getLogger(__name__).warning(device.note)
    if device.kind == "xla" and chips.parallel == "spmd":
        from qat_lora.runtime.xla.spmd import XlaSpmdRuntime

        return XlaSpmdRuntime(device.backend, chips.shard_base)
    if device.kind == "xla":
        from qat_lora.runtime.xla.runtime import XlaRuntime

        return XlaRuntime(device.backend)
    from qat_lora.runtime.native import NativeRuntime

    os.environ.setdefault("USE_TORCH_XLA", "0")
    return NativeRuntime(device.kind, chips.shard_base)


def select_runtime(device: str = "auto", tpu: bool = False, chips: ChipsConfig | None = None) -> Runtime:
    """Return a runtime for this process or its part of a group; `tpu` is `device="tpu"`; raises as `choose`."""
    return make_runtime(choose(device, tpu, look()), chips)


def status_line(runtime: Runtime, dtype: torch.dtype, effective_batch: int) -> str:
    """Return the line a run starts with, inside `launch`: `TPU v6e detected · 1 chip · bf16 · effective batch 32`."""
    name = {torch.bfloat16: "bf16"}.get(dtype, str(dtype).removeprefix("torch."))
    return f"{runtime.description} · {name} · effective batch {effective_batch}"

"""Choose the device: what was asked for, what is there, and what to say when they differ.

Looking at the machine (`look`) and deciding (`choose`) are apart, so that every combination of flags,
environment and hardware is a line of a table in the tests. Looking is cheap and imports nothing: torch_xla costs
seconds to import, and starting it takes the TPU away from other programs.
"""

from __future__ import annotations

import glob
import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch

from qat_lora.errors import ConfigError, DeviceError
from qat_lora.runtime.launch.chips import ChipsConfig, Plan, count_tpu_chips, plan_chips

if TYPE_CHECKING:
    from qat_lora.runtime.base import Runtime

DEVICES = ("auto", "cpu", "cuda", "mps", "tpu", "xla")
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
    tpu: str = ""
    """What points to a TPU, for example `/dev/accel0`; empty if nothing does."""
    pjrt_device: str = ""
    """PJRT_DEVICE, empty if unset."""

    def __str__(self) -> str:
        parts = ["cpu"]
        if self.cuda_devices:
            parts.append(f"cuda ({self.cuda_devices})")
        if self.mps:
            parts.append("mps")
        if self.tpu:
            parts.append(f"a TPU ({self.tpu})")
        parts.append("torch_xla" if self.torch_xla else "no torch_xla")
        if self.pjrt_device:
            parts.append(f"PJRT_DEVICE={self.pjrt_device}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Choice:
    """A runtime to make: its kind, XLA's backend, and what the user should be told about it."""

    kind: Literal["cpu", "cuda", "mps", "xla"]
    backend: str = ""
    note: str = ""


def find_tpu(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """Return what points to a TPU here, or an empty text.

    A device file, a PCI device of Google's that is a TPU, or a variable that TPU machines set. `/dev/vfio` alone
    says nothing, since passed-through GPUs have it too; on newer TPUs it comes with the PCI device.
    """
    # Not /dev/accel/accel0, which is the kernel's folder for other makers' accelerators.
    files = sorted(glob.glob(str(root / "dev/accel[0-9]*")))
    if files:
        return files[0]
    for vendor in sorted(glob.glob(str(root / "sys/bus/pci/devices/*/vendor"))):
        try:
            if Path(vendor).read_text().strip() == _GOOGLE_PCI_VENDOR:
                device = Path(vendor).with_name("device").read_text().strip()
                if device in _TPU_PCI_DEVICES:
                    return f"PCI device {Path(vendor).parent.name}"
        except OSError:
            continue
    return next((name for name in _TPU_VARIABLES if environ.get(name)), "")


def look(environ: Mapping[str, str] = os.environ) -> Found:
    """Look at the machine."""
    return Found(
        cuda_devices=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        mps=torch.backends.mps.is_available(),
        torch_xla=importlib.util.find_spec("torch_xla") is not None,
        tpu=find_tpu(environ),
        pjrt_device=environ.get("PJRT_DEVICE", "").strip().upper(),
    )


def check_device(device: str, tpu: bool) -> None:
    """Raise ConfigError where `--tpu` stands beside another device."""
    if tpu and device not in ("auto", "tpu", "xla"):
        raise ConfigError(f"--tpu with --device {device}: they contradict each other; give one of the two")


def choose(device: str, tpu: bool, found: Found) -> Choice:
    """Decide which runtime to make; a pure function.

    `auto` takes a TPU, then CUDA, then MPS, then the CPU. PJRT_DEVICE=TPU turns `auto` into `tpu`; any value of
    it decides what `tpu` and `xla` run on, so that `--tpu` with PJRT_DEVICE=CPU tries a TPU run without one.

    Raises:
        ConfigError: an unknown device, or `--tpu` beside another one.
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
        raise DeviceError(
            f"{asked}: torch {torch.__version__} sees no CUDA device; found: {found}; check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, install a CUDA build of torch, or use --device auto"
        )
    if device == "mps" and not found.mps:
        raise DeviceError(f"{asked}: torch sees no Apple GPU; found: {found}; use --device auto")
    return Choice(cast(Literal["cpu", "cuda", "mps"], device))


def _choose_any(found: Found) -> Choice:
    note = ""
    if found.tpu and not found.pjrt_device:
        if found.torch_xla:
            return Choice("xla", "TPU")
        note = f"a TPU seems to be here ({found.tpu}) but torch_xla is not; pip install 'qat-lora[tpu]' to use it"
    if found.cuda_devices:
        return Choice("cuda", note=note)
    return Choice("mps" if found.mps else "cpu", note=note)


def _choose_xla(device: str, asked: str, found: Found) -> Choice:
    backend = found.pjrt_device or ("TPU" if device == "tpu" or found.tpu else "CPU")
    if not found.torch_xla:
        extra = "tpu" if backend == "TPU" else "xla"
        raise DeviceError(
            f"{asked}: needs PyTorch/XLA, which is not installed; found: {found}; pip install "
            f"'qat-lora[{extra}]', or use --device auto"
        )
    # Who sets PJRT_DEVICE=TPU knows of a TPU that we may not see; if it is not there, the launch says so.
    if backend == "TPU" and not found.tpu and found.pjrt_device != "TPU":
        raise DeviceError(
            f"{asked}: no TPU on this machine (no /dev/accel*, no TPU on the PCI bus, none of "
            f"{', '.join(_TPU_VARIABLES)}); found: {found}; set PJRT_DEVICE=TPU if there is one, PJRT_DEVICE=CPU "
            "to try XLA on the CPU, or use --device auto"
        )
    return Choice("xla", backend)


def runs_on_host(device: str, tpu: bool) -> bool:
    """Tell whether a run's memory is the host's; False too where its device is not here."""
    try:
        return choose(device, tpu, look()).kind in ("cpu", "mps")
    except DeviceError:
        return False


def plan_run(device: str = "auto", tpu: bool = False, chips: ChipsConfig | None = None) -> Plan:
    """Decide on how many chips a run starts, and how; touches no device and sets nothing.

    Raises:
        ConfigError: an unknown device, or a number of chips that is not possible; the possible ones are named.
        DeviceError: the device is not there; the message says what is.
    """
    found = look()
    choice = choose(device, tpu, found)
    return plan_chips(
        chips or ChipsConfig(),
        choice.kind,
        choice.backend,
        os.environ,
        cores=os.cpu_count() or 1,
        gpus=found.cuda_devices,
        tpu_chips=count_tpu_chips() if choice.backend == "TPU" else 0,
    )


def select_runtime(device: str = "auto", tpu: bool = False, chips: ChipsConfig | None = None) -> Runtime:
    """Return the runtime for a device; call it before anything imports transformers.

    transformers imports torch_xla wherever that is installed, which takes seconds, prints a warning and settles
    PJRT_DEVICE. So the choice is written to the environment, where nothing is yet: PJRT_DEVICE for an XLA run,
    USE_TORCH_XLA=0 (read by transformers and accelerate) for every other.

    Args:
        device: one of `DEVICES`.
        tpu: the `--tpu` flag, the same as `device="tpu"`.
        chips: how several chips are driven; how many there are is settled before, by `plan_run`.

    Raises:
        ConfigError: an unknown device, or `tpu` beside another one.
        DeviceError: the device is not there; the message says what is.
    """
    choice = choose(device, tpu, look())
    chips = chips or ChipsConfig()
    if choice.note:
        logging.getLogger(__name__).warning(choice.note)
    if choice.kind == "xla" and chips.parallel == "spmd":
        from qat_lora.runtime.xla.spmd import XlaSpmdRuntime

        return XlaSpmdRuntime(choice.backend, chips.shard_base)
    if choice.kind == "xla":
        from qat_lora.runtime.xla.runtime import XlaRuntime

        return XlaRuntime(choice.backend)
    from qat_lora.runtime.native import NativeRuntime

    os.environ.setdefault("USE_TORCH_XLA", "0")
    return NativeRuntime(choice.kind)


def status_line(runtime: Runtime, dtype: torch.dtype, effective_batch: int) -> str:
    """Return the line a run starts with: `TPU v6e detected · 1 chip · bf16 · effective batch 32`.

    Call it inside `launch`, where the runtime knows its device.
    """
    name = {torch.bfloat16: "bf16"}.get(dtype, str(dtype).removeprefix("torch."))
    return f"{runtime.description} · {name} · effective batch {effective_batch}"

"""Facts from outside this process, for the doctor: chips and their memory, the Hub, which libtpu torch_xla needs.

Querying an accelerator through torch or torch_xla takes it, or some of its memory, from a program that is running on
it; the driver's own tool and the files of the bus say as much without that. The Hub gets one short request, because a
machine without a network is not broken.
"""

import contextlib
import importlib.metadata
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from qat_lora.plan.devices import KNOWN
from qat_lora.runtime.launch.select import Found, count_tpu_chips

GIB = 2**30
HUB_TIMEOUT_S = 3.0
_TPU_PCI_KINDS = {"0x0063": "v5e", "0x006f": "v6e"}
_TPU_TYPES = {"v5litepod": "v5e", "v5p": "v5p", "v6e": "v6e"}


class Accelerator(NamedTuple):
    """Equal chips or cards of this machine."""

    name: str
    number: int
    memory_gib: float | None  # of one


class HubState(NamedTuple):
    """Whether the Hub can be reached."""

    offline: bool = False  # by the user's own wish
    error: str = ""  # why it does not answer
    token: bool = False


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
    return [
        Accelerator(name, count, int(mib) / 1024 if mib.strip().isdecimal() else None)
        for (name, mib), count in cards.items()
    ]


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


def hub_state(environ: Mapping[str, str]) -> HubState:
    """Ask the Hub whether it is there."""
    from huggingface_hub import constants, get_token

    token = get_token() is not None
    if environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return HubState(offline=True, token=token)
    return HubState(error=_unreachable(constants.ENDPOINT), token=token)


def _unreachable(url: str) -> str:
    """Return why a server does not answer, empty if it does, whatever it says."""
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=HUB_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return " ".join(str(reason).split())[:80] or type(error).__name__

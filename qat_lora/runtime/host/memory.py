"""How much memory a process has used at most: the device's where it counts its own, else the host's."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most bytes in use so far on a CUDA or MPS device or a TPU, of this process's memory elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    if device.type == "xla":
        from qat_lora.runtime.xla.runtime import device_peak_bytes

        on_device = device_peak_bytes(device)
        if on_device is not None:
            return on_device
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

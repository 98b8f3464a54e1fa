"""Move a module to a device without breaking what it shares.

`Module.to` keeps a Parameter object on CUDA, but on XLA makes a new one for every module that registers it: a tied
embedding silently becomes two tensors, one of which then trains alone (or wastes memory). Only transformers models
can tie themselves again, and that forgets the weights that we tied or untied; so the sharing is recorded before the
move and restored after it.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from qat_lora.errors import DeviceError

M = TypeVar("M", bound=torch.nn.Module)


def _sharing(module: torch.nn.Module) -> list[list[tuple[dict, str]]]:
    """Return the registrations of every parameter and buffer that has several, as (table, name)."""
    places: dict[int, list[tuple[dict, str]]] = {}
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((table, name))
    return [shared for shared in places.values() if len(shared) > 1]


def _size(module: torch.nn.Module) -> tuple[int, int]:
    parameters = list(module.parameters())
    return len(parameters), sum(p.numel() for p in parameters)


def move_module(module: M, device: torch.device) -> M:
    """Move a module to a device, restore shared parameters and buffers, and check that none was lost or added.

    Raises:
        DeviceError: the module's parameters are not the same in number and size after the move.
    """
    before, sharing = _size(module), _sharing(module)
    module = module.to(device)
    for (first_table, first_name), *others in sharing:
        for table, name in others:
            table[name] = first_table[first_name]
    after = _size(module)
    if after != before:
        raise DeviceError(
            f"moving the model to {device}: {before[0]} parameters with {before[1]:,} values became {after[0]} "
            f"with {after[1]:,}; a move may change neither, so a weight was split, lost or added by "
            f"{type(module).__name__}; share weights by registering one Parameter twice"
        )
    return module

"""Frozen weights spread over the processes of a group: a student that outgrows one device.

Every process keeps an equal part of each decoder layer's frozen bytes. A layer is whole only around its own forward
and backward: one all-gather makes it so, and its memory is freed as the next layer begins, whose own all-gather is
under way by then. So a device holds its part of the model and two whole layers. What trains is small and stays whole.

Not torch's `fully_shard`, which does this for floating-point parameters only: here most bytes are integer codes and
formed weights, which are buffers. Its hooks also run inside a layer, so that a compiled one falls into pieces; these
run around it, its compilation and its recomputation. Reading a layer's frozen tensors at another time is an error that
nothing catches: their memory is not there.

Source: ZeRO stage 3 (Rajbhandari et al., 2020, arXiv 1910.02054); freed as in FSDP (Zhao et al., 2023,
arXiv 2304.11277).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qat_lora.errors import DeviceError
from qat_lora.runtime.host.collectives import among_peers

ALIGNED = 16
"""Bytes at whose multiples a tensor begins, as kernels that load several numbers at once want it."""


def shard_layers(module: nn.Module, device: torch.device) -> None:
    """Spread the frozen tensors of a module's decoder layers over the default group; done once, later calls do nothing.

    The module is on the host; afterwards its layers' frozen tensors are on the device, the others where they were.

    Raises:
        DeviceError: the module has no lists of layers that offer gradient checkpointing, as decoder layers do.
    """
    lists = [list(owner) for owner in module.modules() if isinstance(owner, nn.ModuleList) and len(owner)]
    decoders = [layers for layers in lists if all(hasattr(layer, "gradient_checkpointing") for layer in layers)]
    if not decoders:
        raise DeviceError(f"shard_base: {type(module).__name__} has no decoder layers to shard; leave it out")
    for layers in decoders:
        if not isinstance(layers[0], _Sharded):
            _Layers(layers, device)


def sharded_bytes(module: nn.Module) -> tuple[int, int]:
    """Return the bytes of sharded tensors that this process holds, and those that all do together."""
    sharded = [layer for layer in module.modules() if isinstance(layer, _Sharded)]
    parts = [layer._together.parts[layer._number] for layer in sharded]
    return sum(len(part.mine) for part in parts), sum(part.size for part in parts)


class _Layers:
    """Decoder layers that are called one after the other, and which of them are whole."""

    def __init__(self, layers: list[nn.Module], device: torch.device) -> None:
        self.parts = [_Part(layer, device) for layer in layers]
        for number, layer in enumerate(layers):
            kind: Any = type(layer)
            layer.__class__ = _sharded(kind)
            vars(layer).update(_together=self, _number=number)

    def hold(self, *numbers: int) -> None:
        """Have the first of these layers whole and the others on their way, and no others; no host waits for CUDA."""
        wanted = [number for number in numbers if 0 <= number < len(self.parts)]
        with among_peers():
            for number, part in enumerate(self.parts):
                if number not in wanted:
                    part.free()
            for number in wanted:
                self.parts[number].gather()
            for number in wanted[:1]:
                self.parts[number].wait()


class _Sharded:
    """Around a decoder layer: whole before it computes, also in the backward pass."""

    _together: _Layers
    _number: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        together, number = self._together, self._number
        is_last = number == len(together.parts) - 1
        together.hold(number, number + 1)
        output = super().__call__(*args, **kwargs)  # type: ignore[misc] # of the layer's own class

        def before_backward(_gradient: Tensor) -> None:
            together.hold(number, number - 1)
            if is_last:  # the first that the backward pass meets
                torch.autograd.Variable._execution_engine.queue_callback(together.hold)

        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(before_backward)
        if is_last:
            together.hold()
        return output


@functools.cache
def _sharded(kind: Any) -> Any:
    """Return the class of sharded layers of a kind: one, since a compiler compiles anew for another."""
    return type(f"Sharded{kind.__name__}", (_Sharded, kind), {})


class _Part:
    """A layer's frozen tensors: this process's part of their bytes, and the memory where they are whole at times."""

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        rank, count = dist.get_rank(), dist.get_world_size()
        places = _frozen_places(layer)
        tensors = [table[name].detach() for (table, name), *_ in places]
        ends = [0, *itertools.accumulate(-(-t.nbytes // ALIGNED) * ALIGNED for t in tensors)]
        line = torch.zeros(-(-ends[-1] // (count * ALIGNED)) * count * ALIGNED, dtype=torch.uint8)
        self.whole, self._under_way = torch.empty(len(line), dtype=torch.uint8, device=device), None
        for start, tensor, registered in zip(ends, tensors, places, strict=False):
            line[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
            # Not a view, which would share a version with all others, and be more to a compiler than a tensor.
            here = torch.empty(0, dtype=tensor.dtype, device=device)
            here.set_(self.whole.untyped_storage(), start // tensor.itemsize, tensor.shape)  # type: ignore[call-overload]
            for table, name in registered:
                if isinstance(table[name], nn.Parameter):
                    table[name].data = here
                else:
                    table[name] = here
        self.mine = line.view(count, -1)[rank].to(device, copy=True)
        self.size = len(line)
        self.free()

    def gather(self) -> None:
        """Begin to make the layer whole, unless that was done."""
        memory = self.whole.untyped_storage()
        if not memory.size():
            memory.resize_(self.size)
            self._under_way = dist.all_gather_into_tensor(self.whole, self.mine, async_op=True)

    def wait(self) -> None:
        """Let what is computed next wait until the layer is whole."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None

    def free(self) -> None:
        """Give the memory back in which the layer is whole."""
        self.wait()
        self.whole.untyped_storage().resize_(0)


def _frozen_places(layer: nn.Module) -> list[list[tuple[dict[str, Any], str]]]:
    """Return where each frozen parameter and buffer of a layer is registered, in an order that all processes share."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for owner in layer.modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                if tensor is not None and not tensor.requires_grad and tensor.numel():
                    places.setdefault(id(tensor), []).append((table, name))
    return list(places.values())

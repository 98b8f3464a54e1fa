"""Frozen weights spread over the processes of a group: for a student that outgrows one device.

Every process keeps an equal part of each decoder layer's frozen bytes. A layer is whole only around its own forward
and backward: one all-gather makes it so, and its memory is freed as the next layer begins, whose own all-gather is
under way by then. So a device holds its part and two whole layers. What trains is small and stays whole.

Not torch's `fully_shard`, which takes floating-point parameters only: here most bytes are integer codes and formed
weights, which are buffers. Its hooks also break a compiled layer; these run around compilation and recomputation.
Nothing may read a layer's frozen tensors at another time: their memory is not there. Sources: ZeRO stage 3 (Rajbhandari
et al., 2020, arXiv 1910.02054); memory as in FSDP (Zhao et al., 2023, 2304.11277).
"""

import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qat_lora.errors import DeviceError
from qat_lora.runtime.base import registrations
from qat_lora.runtime.host.collectives import among_peers

ALIGNED = 16  # bytes at whose multiples a tensor begins, as kernels that load several numbers at once want it


def shard_layers(module: nn.Module, device: torch.device) -> None:
    """Spread frozen tensors of decoder layers over the default group, in place; DeviceError: no layers, or tied."""
    lists = [list(owner) for owner in module.modules() if isinstance(owner, nn.ModuleList) and len(owner)]
    decoders = [layers for layers in lists if all(hasattr(layer, "gradient_checkpointing") for layer in layers)]
    if not decoders:
        raise DeviceError(f"shard_base: {type(module).__name__} has no decoder layers to shard; leave it out")
    for layers in decoders:
        tensors = [id(tensor) for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
        if len(set(tensors)) < len(tensors):
            raise DeviceError(f"shard_base: layers of {type(module).__name__} share weights; leave it out")
        if not isinstance(layers[0], _Sharded):
            parts = [_Part(layer, device) for layer in layers]
            for number, layer in enumerate(layers):
                kind: Any = type(layer)
                layer.__class__ = _sharded(kind)
                vars(layer).update(_parts=parts, _number=number)


def sharded_bytes(module: nn.Module) -> tuple[int, int]:
    """Return the bytes of sharded tensors that this process holds, and those that all do together."""
    parts = [layer._parts[layer._number] for layer in module.modules() if isinstance(layer, _Sharded)]
    return sum(len(part.mine) for part in parts), sum(part.size for part in parts)


class _Part:
    """A layer's frozen tensors: this process's part of their bytes, and the memory where they are whole at times."""

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        rank, count = dist.get_rank(), dist.get_world_size()
        frozen = [places for places in registrations(layer) if not places[0][0][places[0][1]].requires_grad]
        tensors = [table[name].detach() for (table, name), *_ in frozen]
        ends = [0, *itertools.accumulate(-(-t.nbytes // ALIGNED) * ALIGNED for t in tensors)]
        self.size = -(-ends[-1] // (count * ALIGNED)) * count * ALIGNED
        line = torch.zeros(self.size, dtype=torch.uint8)
        self.whole = torch.empty_like(line, device=device)
        for start, tensor, places in zip(ends, tensors, frozen, strict=False):
            line[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
            # Not a view, which would share a version with all others, and be more to a compiler than a tensor.
            here = torch.empty(0, dtype=tensor.dtype, device=device)
            here.set_(self.whole.untyped_storage(), start // tensor.itemsize, tensor.shape)  # type: ignore[call-overload]
            for table, name in places:
                if isinstance(table[name], nn.Parameter):
                    table[name].data = here
                else:
                    table[name] = here
        self.mine, self._under_way = line.view(count, -1)[rank].to(device, copy=True), None
        self.free()

    def gather(self) -> None:
        """Begin to make the layer whole, unless that was done."""
        if not self.whole.untyped_storage().size():
            self.whole.untyped_storage().resize_(self.size)
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


def _hold(parts: list[_Part], *numbers: int) -> None:
    """Have the first of these layers whole, the others on their way, and no others; no host waits for CUDA."""
    wanted = [parts[number] for number in numbers if 0 <= number < len(parts)]
    with among_peers():
        for part in parts:
            if part not in wanted:
                part.free()
        for part in wanted:
            part.gather()
        for part in wanted[:1]:
            part.wait()


class _Sharded:
    """Around a decoder layer: whole before it computes, also in the backward pass."""

    _parts: list[_Part]
    _number: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parts, number = self._parts, self._number
        _hold(parts, number, number + 1)
        output = super().__call__(*args, **kwargs)  # type: ignore[misc] # of the layer's own class

        def before_backward(_gradient: Tensor) -> None:
            _hold(parts, number, number - 1)
            if number == len(parts) - 1:  # the first that the backward pass meets
                torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_hold, parts))

        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(before_backward)
        if number == len(parts) - 1:
            _hold(parts)
        return output


@functools.cache
def _sharded(kind: Any) -> Any:
    """Return the class of sharded layers of a kind: one, since a compiler compiles anew for another."""
    return type(f"Sharded{kind.__name__}", (_Sharded, kind), {})

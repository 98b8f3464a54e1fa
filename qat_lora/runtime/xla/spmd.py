"""PyTorch/XLA with one process over all chips of a host: SPMD, data-parallel.

The batch is sharded over a mesh of all devices, all else is replicated, and the compiler inserts the all-reduce: one
copy of the model in host memory, one compilation per host, no rendezvous. It can be tried in full on virtual CPU
devices (`CPU_NUM_DEVICES`). With `shard_base` frozen weights are sharded too and gathered layer by layer. A loss or
gradient summed over rows is a sum over all replicas' rows already; so "the mean over replicas" is a division. The loss
takes its chunks along the rows, so that each device has its part of every one.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from qat_lora.runtime.host import collectives
from qat_lora.runtime.host.transfer import host_tensors
from qat_lora.runtime.xla.loop import LayerScan
from qat_lora.runtime.xla.runtime import RUNS_ON_REAL_CHIPS, XlaRuntime
from qat_lora.types import Batch

AXIS = "data"


class XlaSpmdRuntime(XlaRuntime):
    """All XLA devices of a host in this process; with `shard_base`, frozen weights are spread over them."""

    def __init__(self, backend: str, shard_base: bool = False) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # else XLA warns, graph by graph, that GSPMD will go
        super().__init__(backend)
        self._shard_base = shard_base
        self._mesh: Any = None
        self._processes = 1

    def _parts(self) -> int:
        return self.replicas

    @property
    def processes(self) -> int:
        """One a host."""
        return self._processes

    def loss_chunk_mb(self, asked: int | None) -> int:
        """Return as much as all devices hold together, each its rows' part of every chunk."""
        return super().loss_chunk_mb(asked) * self.replicas

    def _driven_by(self) -> str:
        shared = ", frozen weights sharded" if self._shard_base else ""
        return f"SPMD{shared} (run on {RUNS_ON_REAL_CHIPS['spmd']} real chips so far)"

    def _before_device(self) -> None:
        import torch_xla.runtime as xr

        xr.use_spmd()

    def _chip_kind(self, xm: Any) -> str:
        return ""  # the one virtual device of SPMD has no kind

    def _join(self) -> None:
        import numpy as np
        import torch_xla.distributed.spmd as xs
        import torch_xla.runtime as xr

        self.replicas = xr.global_runtime_device_count()
        self.rank, self._processes = xr.process_index(), xr.process_count()
        self._mesh = xs.Mesh(np.arange(self.replicas), (self.replicas,), (AXIS,))
        if self._processes > 1:
            collectives.join(init_method="xla://")

    def shard_frozen(self, module: torch.nn.Module) -> None:
        """With `shard_base`, spread every frozen matrix of the layers, a stack's within them, if a dimension divides.

        Embedding and LM head stay whole: each chunk of the loss would gather one, the other exchange more than weights.
        """
        if not self._shard_base or self.replicas == 1:
            return
        import torch_xla

        ends = [getattr(module, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
        whole = {id(tensor) for end in ends if end is not None for tensor, _ in _frozen_tensors(end)}
        for tensor, is_stack in _frozen_tensors(module):
            sizes = list(enumerate(tensor.shape))[-2:]
            even = [dim for dim, size in sizes if size % self.replicas == 0 and size]
            if id(tensor) in whole or tensor.ndim < 2 + is_stack or not even:
                continue
            if torch_xla._XLAC._get_xla_sharding_spec(tensor) == "":
                self._shard(tensor, tuple(AXIS if d == even[0] else None for d in range(tensor.ndim)))

    def layer_scan(self) -> Callable[..., Any]:
        """Return the loop over layers, each round of which gathers its own layer's frozen matrices."""
        # Left to itself the compiler multiplies parts of a matrix and exchanges activations, which are larger.
        if not self._shard_base or self.replicas == 1:
            return LayerScan
        import torch_xla

        def gathered(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad or tensor.ndim < 2:
                return tensor
            whole = tensor.clone()
            sharding = self._mesh.get_op_sharding((None,) * tensor.ndim)
            torch_xla._XLAC._xla_annotate_custom_sharding(whole, sharding)
            return whole

        def scan(body: Callable[..., torch.Tensor], recompute: bool) -> LayerScan:
            def gather(carry: torch.Tensor, slices: Sequence[torch.Tensor], shared: Sequence[torch.Tensor]) -> Any:
                return body(carry, [gathered(tensor) for tensor in slices], shared)

            return LayerScan(gather, recompute)

        return scan

    def _shard(self, tensor: torch.Tensor, axes: tuple[str | None, ...]) -> None:
        """Spread a tensor over the mesh; apart, for runtimes whose tensors have no data (`benchmarks/compiled`)."""
        import torch_xla.distributed.spmd as xs

        xs.mark_sharding(tensor, self._mesh, axes)

    def _call_by_rows(self, computation: Any, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call a computation on each device's rows; the compiler, which cannot cut a kernel, sees one of them."""
        import torch_xla

        xla = torch_xla._XLAC
        own, whole = [], []
        for tensor in given:
            # Of a placeholder only a computed value can be marked.
            tensor = tensor + torch.zeros((), dtype=tensor.dtype, device=tensor.device)
            xla._xla_mark_sharding(tensor, self._by_rows(tensor))
            own.append(xla._spmd_full_to_shard_shape(tensor))
        for tensor in super()._call_by_rows(computation, own):
            shape = (tensor.shape[0] * self.replicas, *tensor.shape[1:])
            xla._mark_manual_sharding(tensor, xla.OpSharding([], [], [], 4))
            whole.append(xla._spmd_shard_to_full_shape(tensor, self._by_rows(tensor), shape, tensor.dtype))
        return whole

    def _by_rows(self, tensor: torch.Tensor) -> Any:
        return self._mesh.get_op_sharding((AXIS, *[None] * (tensor.ndim - 1)))

    def _send(self, batch: Batch) -> Batch:
        """Make the tensors and start their transfer, each device its rows; rows that do not divide go to all."""
        import torch_xla.core.xla_model as xm
        import torch_xla.distributed.spmd as xs

        tensors = host_tensors(batch)
        for name, value in tensors.items():
            if isinstance(value, torch.Tensor):
                is_even = value.ndim and value.shape[0] % (self.replicas // self.processes) == 0
                axes = (AXIS if is_even else None, *[None] * (value.ndim - 1))
                spec = xs.ShardingSpec(self._mesh, axes, minibatch=self.processes > 1) if value.ndim else None
                tensors[name] = xm.send_cpu_data_to_device([value], self.device, spec)[0]
        return tensors

    def reduce_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Divide the gradients, which are sums over all replicas' rows, by the replicas."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / self.replicas)

    def all_reduce_mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return a sum over all replicas' rows divided by the replicas."""
        return collectives.mean_form(value) / self.replicas

    def barrier(self, tag: str) -> None:
        """Run what was deferred, then wait until every host is here."""
        self._flush()
        self.agree(False)


def _frozen_tensors(module: torch.nn.Module) -> list[tuple[torch.Tensor, bool]]:
    """Return what does not train, parameters, buffers and plain attributes, and whether it is a stack of layers'."""
    found: dict[int, tuple[torch.Tensor, bool]] = {}
    for owner in module.modules():
        for tensor in [*owner._parameters.values(), *owner._buffers.values(), *vars(owner).values()]:
            if isinstance(tensor, torch.Tensor) and not tensor.requires_grad and tensor.device.type == "xla":
                found[id(tensor)] = tensor, getattr(owner, "is_stack", False)
    return list(found.values())

"""Runtimes that record the graphs of PyTorch/XLA instead of compiling and running them.

What a chip will be given is decided when it is traced, and tracing needs shapes only. So a model is built on torch's
meta device and placed as *placeholders*: XLA tensors without a buffer, which enter a graph as its parameters, as
weights do (zeros made on the device would enter as constants and be folded away). No weight exists anywhere, so an 8 B
student is traced in the memory of its graph. At a sync, everything that is pending is written down as HLO and then
replaced by placeholders, as if it had run; what the host could read at once is replaced by zeros. Dumping what XLA:CPU
compiles needs weights and hours; listing a graph's outputs by hand drifts from what a run does.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qat_lora.runtime.base import M
from qat_lora.runtime.xla.runtime import XlaRuntime
from qat_lora.runtime.xla.spmd import XlaSpmdRuntime

READABLE = 4 << 20  # bytes of a result that becomes zeros for the host to read: logits of some positions, sums, norms


class Graph(NamedTuple):
    """What was pending at a sync."""

    hlo: bytes  # a serialised HloModuleProto
    text: str
    trace_cpu_s: float  # of this process since the last sync: what the host spends before the device can begin


class TracingRuntime(XlaRuntime):
    """One chip, whose syncs record."""

    graphs: list[Graph] | None = None  # filled while `record` works
    _begun = 0.0
    _annotated: tuple[Tensor, ...] = ()

    @property
    def _compiles_for_tpu(self) -> bool:
        return True

    def record(self, work: Callable[[], Any]) -> list[Graph]:
        """Return the graphs of `work`, called twice: the first call pays for what Python and torch_xla do only once."""
        work()
        self._sync()
        self.graphs = []
        self._begun = time.process_time()
        work()
        self._sync()
        graphs, self.graphs = self.graphs, None
        return graphs

    def place(self, module: M) -> M:
        """Replace the tensors of a module on the meta device by placeholders; what was shared stays shared."""
        made: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor itself, whose id is then its own
        for owner in module.modules():
            tables: list[dict[str, Any]] = [owner._parameters, owner._buffers, vars(owner)]
            for table in tables:
                for name, tensor in list(table.items()):
                    if isinstance(tensor, Tensor) and tensor.is_meta:
                        made.setdefault(id(tensor), (tensor, _placeholder(tensor)))
                        table[name] = made[id(tensor)][1]
        self.shard_frozen(module)
        return module

    def defer(self, fn: Callable[..., None], *tensors: Tensor) -> None:
        """Forget it: there are no values."""

    def _sync(self) -> None:
        """Write down what is pending, if anybody records, and go on as if it had run."""
        import torch_xla

        traced = time.process_time() - self._begun
        gc.collect()
        kept = {id(tensor) for tensor in self._annotated}
        pending = [tensor for tensor in _pending() if id(tensor) not in kept]
        if pending and self.graphs is not None:
            hlo = torch_xla._XLAC._get_xla_tensors_hlo_proto(pending)
            self.graphs.append(Graph(hlo, torch_xla._XLAC._get_xla_tensors_hlo(pending), traced))
        for tensor in pending:
            readable = math.prod(tensor.shape) * tensor.element_size() <= READABLE
            made = torch.zeros(tensor.shape, dtype=tensor.dtype).to(self.device) if readable else _placeholder(tensor)
            torch_xla._XLAC._replace_xla_tensor(tensor, made.detach())
        self._begun = time.process_time()


class TracingSpmdRuntime(TracingRuntime, XlaSpmdRuntime):
    """All chips of a host, traced only ; CPU_NUM_DEVICES says how many."""

    def _shard(self, tensor: torch.Tensor, axes: tuple[str | None, ...]) -> None:
        """Note the sharding in the graph: torch_xla shards data, and a placeholder has none."""
        import torch_xla

        torch_xla._XLAC._xla_annotate_custom_sharding(tensor, self._mesh.get_op_sharding(axes))
        self._annotated += (tensor,)


def _placeholder(tensor: Tensor) -> Tensor:
    """Return an XLA tensor of a tensor's shape and type that has no buffer; of a parameter, a parameter."""
    import torch_xla.core.xla_builder as xb

    made: Tensor = xb.create_placeholder_tensor(tensor.shape, tensor.dtype)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made


def _pending() -> list[Tensor]:
    """Return the XLA tensors that a sync would compute: all that live and have no value yet."""
    import torch_xla

    def living() -> Iterator[Tensor]:
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor) and thing.device.type == "xla":
                yield thing
                if thing.is_leaf and thing.grad is not None:
                    yield thing.grad

    tensors = list({id(tensor): tensor for tensor in list(living())}.values())
    needed = torch_xla._XLAC._check_tensor_need_materialization(tensors)
    unique = {
        torch_xla._XLAC._xla_get_tensor_id(t): t for t, is_needed in zip(tensors, needed, strict=True) if is_needed
    }
    return list(unique.values())

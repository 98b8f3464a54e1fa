"""The runtime of plain PyTorch: CPU, CUDA or MPS; one process, or one of a `torch.distributed` group.

Only a few small tensors are trained, so gradients are averaged by one explicit all-reduce per optimizer step, the same
arithmetic on every runtime, without DistributedDataParallel's buckets, `no_sync` and second copy of the forward call.
DDP would hide the exchange, of some megabytes and a thousandth of the step.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils._triton import has_triton
from torch.utils.checkpoint import checkpoint

from qat_lora.errors import DeviceError
from qat_lora.runtime.base import M, Runtime
from qat_lora.runtime.host import collectives
from qat_lora.runtime.host.transfer import DeferredCalls, host_tensors, host_value
from qat_lora.runtime.precision import tf32
from qat_lora.runtime.sharded import shard_layers
from qat_lora.types import AttentionForm, Batch, LossWalk

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_OLDEST_GPU = 8, 0  # compute capability (A100) from which on the loss has its kernel, as the tests compile it


class NativeRuntime(Runtime):
    """CPU, CUDA or MPS; with torchrun's variables one replica of a group, over gloo on CPU and NCCL on CUDA."""

    def __init__(self, kind: Literal["cpu", "cuda", "mps"], shard_base: bool = False) -> None:
        self.shard_base = shard_base
        if kind not in _BACKENDS and collectives.group_size() > 1:
            group = f"WORLD_SIZE={collectives.group_size()} asks for a process group"
            what = f"{group}, which exists for {' and '.join(_BACKENDS)} only"
            raise DeviceError(f"device {kind}: {what}; start one process, or choose another device")
        self.rank, self.replicas, local_rank = collectives.rank_info()
        self.device = torch.device(kind)
        self.loss_walk: LossWalk = "vocabulary" if kind == "cpu" else "positions"
        self.attention: AttentionForm = "tiled" if kind == "cpu" else "library"
        self.piece_bytes = 4 << 20 if kind == "cpu" else None  # fits most caches, twice; less, and calls cost more
        if kind == "cuda":
            self.device = torch.device(kind, local_rank)
            if local_rank >= max(1, torch.cuda.device_count()):
                what = f"this machine shows {torch.cuda.device_count()} CUDA devices"
                raise DeviceError(f"LOCAL_RANK={local_rank}: {what}; start at most one process for each")
            own = torch.cuda.is_available() and not torch.version.hip and importlib.util.find_spec("triton") is not None
            if own and torch.cuda.get_device_capability(self.device) >= _OLDEST_GPU:
                self.loss_walk = "kernel"
        self._deferred = DeferredCalls()
        self._copy_stream: torch.cuda.Stream | None = None

    @property
    def description(self) -> str:
        """`CPU · 2 threads`, `NVIDIA H200 · 1 GPU`, `Apple GPU (MPS)`; with the processes, if several."""
        sharded = ", frozen weights sharded" if self.shard_base else ""
        if self.device.type == "cuda":
            return f"{torch.cuda.get_device_name(self.device)} · {_count(self.replicas, 'GPU')}{sharded}"
        if self.device.type == "mps":
            return "Apple GPU (MPS)"
        threads = f"CPU · {_count(torch.get_num_threads(), 'thread')}"
        return threads if self.replicas == 1 else f"{threads} · {self.replicas} processes{sharded}"

    def launch(self, main: Callable[[], Any]) -> Any:
        """Run `main` inside the process group of torchrun's variables, where there is one."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            from torch._dynamo import config  # a second and a half, and only a run that compiles wants it

            self.attention = "flex" if has_triton() and not config.disable else "library"
        if self.replicas > 1:
            collectives.join(_BACKENDS[self.device.type], device_id=self.device if self.device.type == "cuda" else None)
            # Decisions between hosts do not pass through the GPU: no host ever waits for a device to decide.
            self._control = collectives.gloo_group() if self.device.type == "cuda" else None
        with tf32(self.device.type == "cuda"):
            result = main()
        self._deferred.run_ready(wait=True)
        if self.replicas > 1:  # not after an error: it may wait for the others for ever, the cause unsaid
            dist.destroy_process_group()
        return result

    def place(self, module: M) -> M:
        """Move a module to the device; with `shard_base` a part of its decoder layers' frozen tensors."""
        if self.shard_base:
            shard_layers(module, self.device)
        return super().place(module)

    def exact_products(self) -> contextlib.AbstractContextManager[None]:
        """Return a context without TF32."""
        return tf32(False)

    def check_device_map(self) -> None:
        """Raise DeviceError where other processes would spread theirs over the same devices."""
        if self.replicas > 1:
            what = f"{self.replicas} processes would each spread the model over all devices"
            raise DeviceError(f"device_map: {what}; run one process, or leave out --device-map")

    def _send(self, batch: Batch) -> tuple[Batch, Any]:
        """Make the tensors and, on CUDA, start their copy on a stream of its own; runs in the prefetch thread."""
        tensors = host_tensors(batch)
        if self.device.type != "cuda":
            return tensors, None
        if self._copy_stream is None:
            torch.cuda.set_device(self.device)  # this thread's: it began on the first one, and would pin memory for it
            self._copy_stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._copy_stream):
            for name, value in tensors.items():
                if isinstance(value, torch.Tensor):
                    # Pinned memory is what makes the copy asynchronous; torch keeps it until the copy is done.
                    tensors[name] = value.pin_memory().to(self.device, non_blocking=True)
            return tensors, self._copy_stream.record_event()

    def _receive(self, sent: tuple[Batch, Any]) -> Batch:
        """Let the computing stream wait for the copy, and tell the allocator who uses it; no host wait."""
        batch, copied = sent
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied)
            for value in batch.values():
                if isinstance(value, torch.Tensor):
                    value.record_stream(stream)
        elif self.device.type == "mps":
            return {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        return batch

    def numbers(self, values: Sequence[float]) -> torch.Tensor:
        """Return numbers as float32 data on the device; on CUDA from pinned memory, or the copy would be waited for."""
        if self.device.type != "cuda":
            return super().numbers(values)
        return torch.tensor(values, dtype=torch.float32).pin_memory().to(self.device, non_blocking=True)

    def checkpoint_function(self) -> Callable[..., Any]:
        """Return torch's own, in the form that is not re-entrant."""
        return functools.partial(checkpoint, use_reentrant=False)

    def reduce_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average the gradients over the replicas by one all-reduce of one flat float32 tensor."""
        trained = [p for p in parameters if p.requires_grad]
        if self.replicas > 1 and trained:
            gradients, flat = collectives.flat_gradients(trained)
            collectives.put_back(gradients, self._mean(flat))

    def all_reduce_mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean of a tensor over the replicas by an all-reduce of gloo or NCCL."""
        value = collectives.mean_form(value)
        return value if self.replicas == 1 else self._mean(value.clone())

    def _mean(self, value: torch.Tensor) -> torch.Tensor:
        with collectives.among_peers():
            dist.all_reduce(value)
        return value / self.replicas

    def step_end(self) -> None:
        """Run the deferred callbacks whose values have arrived; waits for nothing."""
        self._deferred.run_ready()

    def defer(self, fn: Callable[..., None], *tensors: torch.Tensor) -> None:
        """Call `fn` with numbers (no dimensions) or numpy arrays, in the order of the calls.

        CUDA: at a later `defer`, `step_end`, `barrier` or the end of `launch`, when the copy that is started here has
        arrived. Else now; MPS waits for the device, since its asynchronous copies promise no order.
        """
        if self.device.type != "cuda":
            fn(*[host_value(t.detach().cpu()) for t in tensors])
            return
        pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for host, tensor in zip(pinned, tensors, strict=True):
            host.copy_(tensor.detach(), non_blocking=True)
        copied = torch.cuda.current_stream(self.device).record_event()

        def values() -> list[Any]:
            copied.synchronize()
            return [host_value(host) for host in pinned]

        self._deferred.add(fn, copied.query, values)
        self._deferred.run_ready()

    def barrier(self, tag: str) -> None:
        """Run what was deferred, then wait until every process is here. `tag` names the place in stack dumps."""
        self._deferred.run_ready(wait=True)
        if self.replicas > 1:
            with collectives.among_peers():
                dist.barrier(self._control)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"

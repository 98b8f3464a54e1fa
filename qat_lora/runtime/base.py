"""What a device, or many of them, must be able to do: the only seam between the training loop and hardware.

Methods are named by meaning, not by mechanism, so that one process, a process group, PyTorch/XLA with a process per
chip and SPMD can all implement them; one with a body is the same on most devices. Only `mark_step` and `step_end` may
synchronise with the device: all between is queued, which keeps an XLA graph whole and a GPU busy.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from qat_lora.errors import DeviceError
from qat_lora.files.folders import atomic_file, fsync
from qat_lora.runtime.host import collectives
from qat_lora.runtime.host.transfer import prefetch
from qat_lora.types import AttentionForm, Batch, LossWalk

M = TypeVar("M", bound=torch.nn.Module)

_LOSS_CHUNK_MB = {"cuda": 2048, "tpu": 512, "xla": 512}


@runtime_checkable
class Runtime(Protocol):
    """A place to compute. Valid only inside `launch`: XLA forbids touching a device earlier."""

    device: torch.device
    rank: int  # this process, 0-based: names files and logs
    replicas: int  # data-parallel copies of the model over all processes (not the process count under SPMD)
    loss_walk: LossWalk  # the faster of two equal walks through the logits on this device (`losses/fused/op.py`)
    piece_bytes: int | None = None  # of a large result that elementwise work takes at a time, for caches; None: all
    shares_memory: bool = True  # whether several tensors can be parts of one; on XLA each is a value of its own
    auto_dtype: bool = False  # whether `--dtype auto` was given, so that a run may keep the type that it began with
    shard_base: bool = False  # whether frozen weights are spread over devices: whoever trains forms them on the host
    attention: AttentionForm  # the form of attention that keeps no scores on this device (`layers/attention.py`)
    attention_kernel: Any = None  # what computes "blocked" attention in a kernel of the device's, where it has one
    _control: dist.ProcessGroup | None = None  # for decisions, where the default group's exchanges go through devices

    def loss_chunk_mb(self, asked: int | None) -> int:
        """Return the MiB of float32 logits that this process's loss holds at once, `asked` being a device's."""
        is_cuda = self.device.type == "cuda"
        memory_bytes = torch.cuda.get_device_properties(self.device).total_memory if is_cuda else None
        return asked or default_loss_chunk_mb(self.device.type, memory_bytes)

    @property
    def processes(self) -> int:
        """Number of processes that read data, this one being number `rank`; each feeds replicas / processes rows."""
        return self.replicas

    @property
    def is_main(self) -> bool:
        """True in the one process that writes shared files and prints."""
        return self.rank == 0

    @property
    def description(self) -> str:
        """One line for people, for example `CPU · 2 threads` or `XLA on CPU · 1 device`."""

    def launch(self, main: Callable[[], Any]) -> Any:
        """Run `main` in the process group, if any, and deferred callbacks; after an error the group is not left."""

    def place(self, module: M) -> M:
        """Move a module as `move_module` does; on XLA its parameters are new objects, so make the optimizer later."""
        return move_module(module, self.device)

    def for_hooks(self) -> Runtime:
        """Return the runtime for passes that hooks read layer by layer: the host's where a read would end a graph."""
        return self

    def exact_products(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the device does not round the factors of float32 products."""
        return contextlib.nullcontext()

    def check_device_map(self) -> None:
        """Raise DeviceError where a loader must not spread one model over several devices instead of `place`."""

    def feed(self, batches: Iterable[Batch]) -> Generator[Batch, None, None]:
        """Yield the batches, which are of this process's rows, as tensors on the device; the next is sent meanwhile."""
        with contextlib.closing(prefetch(batches, self._send)) as ready:
            for sent in ready:
                yield self._receive(sent)

    def _send(self, batch: Batch) -> Any:
        """Make the tensors and start their transfer; runs in the prefetch thread."""

    def _receive(self, sent: Any) -> Batch:
        """Return what `_send` sent, usable by the computation that is called next; no host wait."""
        return sent

    def numbers(self, values: Sequence[float]) -> torch.Tensor:
        """Return numbers that change from step to step as float32 data on the device; no host wait."""
        return torch.tensor(values, dtype=torch.float32).to(self.device)

    def autocast(self, dtype: torch.dtype) -> Any:
        """Return a context manager that runs matrix products in `dtype` (nothing for float32)."""
        return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype=dtype)

    def checkpoint_function(self) -> Callable[..., Any]:
        """Return the function that recomputes a layer in the backward pass instead of keeping its activations."""

    def layer_scan(self) -> Callable[..., Any] | None:
        """Return the loop over stacked layers (`layers/stacked.py`); None where operations run as they are called."""
        return None

    def kept(self, compute: Callable[[], tuple[torch.Tensor, ...]], count: int) -> tuple[torch.Tensor, ...]:
        """Return `count` results of a computation that a scanned layer's backward pass shall not repeat."""
        return compute()

    def mark_step(self) -> None:
        """End a micro-batch: queued work may be dispatched now."""
        return

    def reduce_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average gradients over replicas, once per optimizer step; under SPMD that divides the sum that they are."""

    def all_reduce_mean(self, value: torch.Tensor) -> torch.Tensor:
        """Average a sum over rows over replicas; stays on the device. Integers become float32."""

    def agree(self, flag: bool) -> bool:
        """Return True in every process if the flag is set in any; all call it at the same place, no device waits."""
        return flag if self.processes == 1 else collectives.agree(flag, self._control)

    def shard_frozen(self, module: torch.nn.Module) -> None:
        """Spread frozen weights over the devices of this process, where that was asked for."""
        return

    def step_end(self) -> None:
        """End an optimizer step."""

    def defer(self, fn: Callable[..., None], *tensors: torch.Tensor) -> None:
        """Call `fn` with the tensors' host values once they are there, without stopping the device."""

    def barrier(self, tag: str) -> None:
        """Run what was deferred, then wait until every process is here."""

    def save(self, tensors: Mapping[str, torch.Tensor], path: str | Path) -> None:
        """Write tensors of any device to a safetensors file, which is there for every process when this returns.

        Every process calls it, at the same place and with the same names: on XLA reading a tensor runs the work that
        is queued for it, which every process must do. The main process writes the file, whole or not at all.
        """
        self.mark_step()  # all at once: reading a tensor with work pending would compile a graph for it alone
        if self.is_main:
            save_tensors(tensors, path)
        self.barrier(f"save {Path(path).name}")

    def compile_report(self) -> dict[str, int | float]:
        """Return graphs compiled, cache hits and seconds compiling so far (empty where nothing compiles)."""
        return {}


def save_tensors(tensors: Mapping[str, torch.Tensor], path: str | Path) -> None:
    """Write a safetensors file, whole or not at all, as `pt`, for transformers; shared tensors are written twice."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as draft:
        save_file(_unshared(tensors), draft, metadata={"format": "pt"})
    fsync(path.parent)


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous CPU tensors of which no two share memory, as safetensors demands."""
    seen: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return plain


def random_states() -> dict[str, str]:
    """Return the state of the CPU's generator, and of CUDA's where it is in use, by device, in base64."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def set_random_states(texts: Mapping[str, str]) -> None:
    """Restore what `random_states` returned; a state for a device that is not in use here is left out."""
    data = {name: bytearray(base64.b64decode(text)) for name, text in texts.items()}
    states = {name: torch.frombuffer(state, dtype=torch.uint8) for name, state in data.items()}
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])


def default_loss_chunk_mb(device: str, memory_bytes: float | None = None) -> int:
    """Return the MiB of float32 logits to hold at once on a `--device`, with this much memory if that is known.

    Every chunk reads the output head twice and is some kernels, so a GPU wants few: 2 GiB, or a 32nd of its memory.
    """
    most = _LOSS_CHUNK_MB.get(device, 32)
    return most if device != "cuda" or memory_bytes is None else max(32, min(most, int(memory_bytes / 2**25)))


def move_module(module: M, device: torch.device) -> M:
    """Move a module to a device, restore shared parameters and buffers, and check that none was lost or added.

    `Module.to` keeps a Parameter object on CUDA, but on XLA makes a new one for every module that registers it: a tied
    embedding silently becomes two tensors, one of which then trains alone. Only transformers models can tie themselves
    again, and that forgets the weights that we tied or untied; so the sharing is recorded before the move. DeviceError
    where the parameters are not the same in number and size after it.
    """
    before, registered = _size(module), registrations(module)
    module = module.to(device)
    for (first_table, first_name), *others in registered:
        for table, name in others:
            table[name] = first_table[first_name]
    after = _size(module)
    if after != before:
        change = f"{before[0]} parameters with {before[1]:,} values became {after[0]} with {after[1]:,}"
        cause = f"a move may change neither, so a weight was split, lost or added by {type(module).__name__}"
        remedy = "share weights by registering one Parameter twice"
        raise DeviceError(f"moving the model to {device}: {change}; {cause}; {remedy}")
    return module


def registrations(module: torch.nn.Module) -> list[list[tuple[dict[str, Any], str]]]:
    """Return where each parameter and buffer is registered, as (table, name), in the order of the module."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((table, name))
    return list(places.values())


def _size(module: torch.nn.Module) -> tuple[int, int]:
    parameters = list(module.parameters())
    return len(parameters), sum(p.numel() for p in parameters)

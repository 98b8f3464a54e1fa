"""What a device, or many of them, must be able to do: the only seam between the training loop and hardware.

Named by meaning, not by mechanism, so that one process, a process group, PyTorch/XLA with a process per chip
and SPMD can all fill it. Only `cut` and `step_end` may synchronise with the device: everything between them is
queued, which is what keeps an XLA graph whole and a GPU busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import torch

    from qat_lora.types import Batch

M = TypeVar("M", bound="torch.nn.Module")


@runtime_checkable
class Runtime(Protocol):
    """A place to compute. Valid only inside `launch`: XLA forbids touching a device earlier."""

    device: torch.device
    rank: int
    """This process, 0-based: names files and logs."""
    replicas: int
    """Data-parallel copies of the model over all processes (not the process count under SPMD)."""

    @property
    def is_main(self) -> bool:
        """True in the one process that writes shared files and prints."""

    @property
    def description(self) -> str:
        """One line for people, for example `CPU · 2 threads` or `XLA on CPU · 1 device`."""

    def launch(self, main: Callable[[], Any]) -> Any:
        """Run `main` on every replica's process and return what it returned on this one."""

    def place(self, module: M) -> M:
        """Move a module here and tie again the weights that were tied; the parameter count must not change."""

    def feed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches as tensors on the device (this replica's rows), transfer overlapped with work."""

    def autocast(self, dtype: torch.dtype) -> Any:
        """Return a context manager that runs matrix products in `dtype` (nothing for float32)."""

    def cut(self) -> None:
        """End a micro-batch: queued work may be dispatched now."""

    def reduce_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average gradients over replicas, once per optimizer step."""

    def all_reduce_mean(self, value: torch.Tensor) -> torch.Tensor:
        """Average a tensor over replicas; stays on the device."""

    def step_end(self) -> None:
        """End an optimizer step."""

    def defer(self, fn: Callable[..., None], *tensors: torch.Tensor) -> None:
        """Call `fn` with the tensors' host values once they are there, without stopping the device."""

    def barrier(self, tag: str) -> None:
        """Wait until every process is here."""

    def save(self, state: dict[str, torch.Tensor], path: str | Path) -> None:
        """Write tensors as safetensors; called by every process, written by the main one."""

    def compile_report(self) -> dict[str, int | float]:
        """Return graphs compiled, cache hits and seconds compiling so far (empty where nothing compiles)."""

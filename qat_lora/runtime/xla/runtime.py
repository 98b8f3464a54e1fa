"""The runtime of PyTorch/XLA: a TPU chip in each of one or more processes, or XLA on the CPU; and their start.

PyTorch/XLA is to be replaced, so all that is known about it is here and in `spmd.py` (one process over all chips). It
is imported inside functions, so that these modules can be imported where torch_xla is not installed.

XLA traces what is called and compiles it at a sync; a graph that was seen before runs at once. `mark_step` syncs after
every micro-batch and `step_end` after the optimizer, so a step is two kinds of graph whatever the accumulation count.
Without the sync before the optimizer, one graph would hold the whole accumulation; with syncs only between
micro-batches, the large one would be compiled twice. The counts hold if the caller keeps gradients as zeroed tensors
(`zero_grad(set_to_none=False)`, before the first step too), makes the optimizer's state before it, and keeps shapes.
"""

import contextlib
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Literal

import torch
import torch.distributed as dist

from qat_lora.errors import DeviceError, one_line
from qat_lora.extras import require
from qat_lora.runtime.base import M, Runtime
from qat_lora.runtime.host import collectives
from qat_lora.runtime.host.signals import install_for_good, passed_on
from qat_lora.runtime.host.transfer import DeferredCalls, host_tensors, host_value
from qat_lora.runtime.native import NativeRuntime
from qat_lora.runtime.xla.loop import LayerScan, highest_precision, kept
from qat_lora.runtime.xla.splash import SplashAttention, has_splash
from qat_lora.types import AttentionForm, Batch, LossWalk

RUNS_ON_REAL_CHIPS = {"spawn": 0, "spmd": 0}  # on how many each way has been run so far; printed for several
PORT_VARIABLE = "QAT_LORA_GROUP_PORT"  # the port of one host's group; not MASTER_PORT, which torch_xla reads for itself


def is_xla_device(device: torch.device | torch.Tensor | str | None = None) -> bool:
    """Return True for an XLA device (or a tensor on one); with None, whether this process computes on XLA."""
    if device is None:
        torch_xla = sys.modules.get("torch_xla")
        # Loaded is not used: importing transformers loads torch_xla wherever it is installed.
        return torch_xla is not None and bool(torch_xla._XLAC._xla_runtime_is_initialized())
    if isinstance(device, torch.Tensor):
        device = device.device
    return torch.device(device).type == "xla"


def xla_mark_step() -> None:
    """Compile and start what is queued on the XLA device; nothing in a process that does not compute on XLA."""
    if is_xla_device():
        import torch_xla

        torch_xla.sync()


def device_peak_bytes(device: torch.device) -> int | None:
    """Return the most device memory in use so far, None where the backend does not count it (XLA on the CPU)."""
    import torch_xla.core.xla_model as xm

    try:
        info = xm.get_memory_info(device)
    except RuntimeError:
        return None
    return int(info.get("peak_bytes_used") or info["bytes_used"])


class XlaRuntime(Runtime):
    """One XLA device in this process, alone or in a group.

    The backend, `TPU` or `CPU`, is written to PJRT_DEVICE if that is unset: the first import of torch_xla settles it.
    """

    loss_walk: LossWalk = "positions"  # the many small steps of the other one would make a long graph
    attention: AttentionForm = "blocked"
    shares_memory = False

    def __init__(self, backend: str) -> None:
        self.backend = os.environ["PJRT_DEVICE"] = os.environ.get("PJRT_DEVICE") or backend  # empty is unset
        self.rank, self.replicas = 0, 1
        self.device = torch.device("xla")
        self._chip = ""
        self._by_gloo = False
        self._deferred = DeferredCalls()
        self._unread: list[Callable[[], None]] = []
        self._reader: ThreadPoolExecutor | None = None
        self._counting = threading.Lock()
        self._deferred_reads = 0

    @property
    def _compiles_for_tpu(self) -> bool:
        return self.backend.startswith("TPU")

    @property
    def description(self) -> str:
        """`TPU v6e detected · 1 chip` (known inside `launch`), `XLA on CPU · 1 device`; and how, if several."""
        on_tpu, plural = self.backend == "TPU", "s" if self.replicas > 1 else ""
        found, unit = (f"{self._chip or 'TPU'} detected", "chip") if on_tpu else (f"XLA on {self.backend}", "device")
        line = f"{found} · {self.replicas} {unit}{plural}"
        return line if self.replicas == 1 else f"{line} · {self._driven_by()}"

    def _driven_by(self) -> str:
        if self._by_gloo:
            return "a process each, exchange by gloo"
        return f"spawn (run on {RUNS_ON_REAL_CHIPS['spawn']} real chips so far)"

    def launch(self, main: Callable[[], Any]) -> Any:
        """Run `main` in this process; MissingExtraError, or DeviceError where the backend does not start."""
        self._open()
        self._deferred = DeferredCalls()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="qat-lora-read")
        try:
            result = main()
            self._flush()
        finally:
            self._unread.clear()
            self._reader.shutdown(wait=False)  # after an error a read may never end, nor may leaving the group
        if dist.is_initialized():
            dist.destroy_process_group()
        return result

    def _open(self) -> None:
        """Start the backend and join the group; only here, since nothing may touch the device before `launch`."""
        torch_xla = require("torch_xla", "tpu" if self._compiles_for_tpu else "xla")
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr

        try:
            self._before_device()
            self.device = torch_xla.device()
        except (RuntimeError, OSError) as error:
            tpu = "on a TPU machine pip install 'qat-lora[tpu]' and end other programs that hold the TPU"
            what = f"PyTorch/XLA could not start it ({one_line(error, 200)}); {tpu}"
            raise DeviceError(f"PJRT_DEVICE={self.backend}: {what}; for XLA on the CPU set PJRT_DEVICE=CPU") from error
        running = xr.device_type()
        if running != self.backend.split("_")[0]:
            what = f"this process already runs XLA on {running}, and a process has one backend"
            raise DeviceError(f"PJRT_DEVICE={self.backend}: {what}; start a new process")
        self._chip = self._chip_kind(xm)
        self._join()
        self.attention_kernel = self._kernel()

    def _kernel(self) -> SplashAttention | None:
        if self._compiles_for_tpu and has_splash():
            return SplashAttention(self._call_by_rows, self._parts())
        if self._compiles_for_tpu:
            what = "jax is not installed; without it attention moves its scores through the TPU's memory"
            warnings.warn(f"{what}, about twice the bytes of a step; pip install 'qat-lora[tpu]'", stacklevel=2)
        return None

    def _parts(self) -> int:
        """Return the number of chips that one call of a computation runs on, each with its rows."""
        return 1

    def _call_by_rows(self, computation: Any, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call a computation that knows only the rows of one chip."""
        import torch_xla

        results: list[torch.Tensor] = torch_xla._XLAC._xla_user_computation("xla::kernel", list(given), computation)
        return results

    def _chip_kind(self, xm: Any) -> str:
        return _chip_name(xm.xla_device_kind(self.device))

    def _before_device(self) -> None:
        """Under torchrun on a TPU, let torch_xla tell libtpu the chip of this process."""
        if self.backend == "TPU" and dist.is_torchelastic_launched():
            import torch_xla.distributed.xla_backend  # noqa: F401

            dist.init_process_group("xla", init_method="xla://")

    def _join(self) -> None:
        """Learn this process's rank, and meet the others by gloo."""
        import torch_xla.runtime as xr

        self.rank, self.replicas = xr.global_ordinal(), xr.world_size()
        mine = collectives.rank_info()
        if self.backend == "CPU" and mine.size > 1:
            self.rank, self.replicas, self._by_gloo = mine.rank, mine.size, True
            collectives.join()
        elif self.replicas > 1 and dist.is_initialized():
            self._control = collectives.gloo_group()
        elif self.replicas > 1 and xr.world_size() == xr.local_device_count():  # one host: the port is `spawn`'s
            port = os.environ[PORT_VARIABLE]
            collectives.join(init_method=f"tcp://127.0.0.1:{port}", rank=self.rank, world_size=self.replicas)
        elif self.replicas > 1:  # several hosts: torch_xla knows where they meet
            collectives.join(init_method="xla://")

    def place(self, module: M) -> M:
        """Move a module to the device; shared weights stay shared. Its parameters are new objects, so do this first."""
        import torch_xla

        module = super().place(module)
        self.shard_frozen(module)  # before the sync: nothing has been sent yet, so each device gets its part only
        torch_xla.sync()  # a custom move's computations must not become part of the first step's graph
        return module

    def for_hooks(self) -> NativeRuntime:
        """Return the host: Fisher information is read at every layer of every batch, each time another graph here."""
        return NativeRuntime("cpu")

    def exact_products(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a TPU takes six passes; it is for whole graphs, so read in it what is computed."""
        return highest_precision()

    def check_device_map(self) -> None:
        """Raise DeviceError always."""
        why = "PyTorch/XLA compiles what runs on one device, so each module would be a program and a transfer"
        raise DeviceError(f"device_map: {why}; leave out --device-map, or build the cache with --device cuda or cpu")

    def _send(self, batch: Batch) -> Batch:
        """Make the tensors and start their transfer. Not `MpDeviceLoader`, which syncs at every batch."""
        import torch_xla.core.xla_model as xm

        tensors = host_tensors(batch)
        names = [name for name, value in tensors.items() if isinstance(value, torch.Tensor)]
        # One call for all, and at once: `Tensor.to` would leave the transfer to the next sync.
        sent = xm.send_cpu_data_to_device([tensors[name] for name in names], self.device)
        return {**tensors, **dict(zip(names, sent, strict=True))}

    def checkpoint_function(self) -> Callable[..., Any]:
        """Return torch_xla's (utils/checkpoint.py, 2.9), re-entrant.

        torch's own fails on XLA tensors, and recomputing without the optimisation barriers of torch_xla's is undone by
        the compiler. Of its two forms only the re-entrant one works, and that gives no gradient at all if no input
        requires one, as after a frozen embedding; hence the wrapper, which makes the first floating input require one.
        """
        from torch_xla.utils.checkpoint import checkpoint

        def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            inputs = list(args)
            floating = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_floating_point()]
            if torch.is_grad_enabled() and floating and not any(args[i].requires_grad for i in floating):
                inputs[floating[0]] = args[floating[0]].detach().requires_grad_()
            return checkpoint(function, *inputs, use_reentrant=True, **kwargs)

        return run

    def layer_scan(self) -> Callable[..., Any]:
        """Return the While loop of `loop.py`: host time and graph do not grow with the layers."""
        return LayerScan

    def kept(self, compute: Callable[[], tuple[torch.Tensor, ...]], count: int) -> tuple[torch.Tensor, ...]:
        """Return results that the loop's backward pass finds again."""
        return kept(compute, count)

    def mark_step(self) -> None:
        """Compile (if new) and start the micro-batch."""
        self._sync()

    def reduce_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average the gradients over the replicas by one all-reduce in the graph; nothing for one replica.

        `optimizer.step()` follows it, since `xm.optimizer_step` would reduce a second time. XLA on the CPU has no
        exchange between processes; there gloo carries the gradients: slow, and enough to try everything else.
        """
        trained = [p for p in parameters if p.requires_grad]
        if self.replicas > 1 and trained and self._by_gloo:
            gradients, flat = collectives.flat_gradients(trained)
            collectives.put_back(gradients, self._mean(flat))
        elif self.replicas > 1 and trained:
            import torch_xla.core.xla_model as xm

            # It takes an optimizer only to find its parameters; this one exists for that.
            xm.reduce_gradients(torch.optim.SGD(trained, lr=0.0))

    def all_reduce_mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean of a tensor over the replicas, by an all-reduce in the graph or by gloo."""
        value = collectives.mean_form(value)
        if self.replicas == 1:
            return value
        if self._by_gloo:
            return self._mean(value)
        import torch_xla.core.xla_model as xm

        return xm.all_reduce(xm.REDUCE_SUM, value, scale=1.0 / self.replicas)

    def _mean(self, value: torch.Tensor) -> torch.Tensor:
        self._sync()
        total = value.cpu()
        with collectives.among_peers():
            dist.all_reduce(total)
        return (total / self.replicas).to(self.device)

    def step_end(self) -> None:
        """Compile (if new) and start the optimizer step, then run the deferred callbacks that can be."""
        self._sync()
        self._deferred.run_ready()

    def defer(self, fn: Callable[..., None], *tensors: torch.Tensor) -> None:
        """Call `fn` with numbers (no dimensions) or numpy arrays at a later `step_end` or `barrier`.

        The values are read by a thread, after the next sync. A copy on the device would be one more graph; so a
        deferred tensor must not be changed in place afterwards (`total = total + loss`, not `total += loss`), which is
        checked. One that only some steps defer should be alive at the sync of all, or those steps are another graph.
        """
        assert self._reader is not None, "defer is called inside launch"
        submit, versions = self._reader.submit, [t._version for t in tensors]
        reading: list[Future[list[Any]]] = []  # one, from the next sync on
        self._unread.append(lambda: reading.append(submit(self._read, tensors, versions)))
        self._deferred.add(fn, lambda: bool(reading) and reading[0].done(), lambda: reading[0].result())

    def barrier(self, tag: str) -> None:
        """Run what was deferred, then wait until every process is here: `xm.rendezvous`."""
        self._flush()
        if self._by_gloo:
            self.agree(False)
        elif self.replicas > 1:
            import torch_xla.core.xla_model as xm

            xm.rendezvous(tag)

    def compile_report(self) -> dict[str, int | float]:
        """Return what XLA has done in this process so far; `host_reads` are tensors that the device stopped for."""
        import torch_xla.debug.metrics as metrics

        compile_times = metrics.metric_data("CompileTime")
        with self._counting:
            reads = metrics.metric_data("TransferFromDeviceTime")
            host_reads = (reads[0] if reads else 0) - self._deferred_reads
        return {
            "graphs_compiled": metrics.counter_value("UncachedCompile") or 0,
            "graph_cache_hits": metrics.counter_value("CachedCompile") or 0,
            "compile_s": compile_times[1] / 1e9 if compile_times else 0.0,
            "host_reads": host_reads,
        }

    def _sync(self) -> None:
        """Start all that is queued, then let the reader fetch what was deferred before it."""
        import torch_xla

        torch_xla.sync()
        for start_reading in self._unread:
            start_reading()
        self._unread.clear()

    def _flush(self) -> None:
        if self._unread:
            self._sync()
        self._deferred.run_ready(wait=True)

    def _read(self, tensors: tuple[torch.Tensor, ...], versions: list[int]) -> list[Any]:
        """Return tensors as values of the host; runs in the reader's thread."""
        values: list[Any] = []
        for tensor in tensors:
            with self._counting:
                values.append(host_value(tensor.detach().cpu()))
                self._deferred_reads += is_xla_device(tensor)
        if [t._version for t in tensors] != versions:
            raise RuntimeError("a deferred tensor was changed in place before it was read; make a new one instead")
        return values


def _chip_name(kind: str) -> str:
    """Turn PJRT's device kind into the name people rent: `TPU v6 lite` is v6e, `TPU v5` is v5p."""
    return {"TPU v5": "TPU v5p"}.get(kind, kind.replace(" lite", "e"))


_inherited: list[Callable[[int], None]] = []  # the work of forked processes; what goes through the pool is pickled


class _Worker:
    """Called in every process. Unpickled in its main thread, the only place where signal handlers can be set."""

    def __init__(self, work: Callable[[int], None] | None) -> None:
        self._work = work

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if multiprocessing.parent_process() is not None:
            os.setpgid(0, 0)  # Ctrl-C reaches the process that started us, which passes it on once
            install_for_good()

    def __call__(self, ordinal: int) -> None:
        import torch_xla.runtime as xr

        (self._work or _inherited[0])(xr.global_ordinal())


def spawn(work: Callable[[int], None], start_method: Literal["spawn", "fork"]) -> tuple[dict[int, int | None], str]:
    """Call `work(rank)` in a process for every chip that the variables of libtpu leave, through `torch_xla.launch`.

    That is a process for two cores on v2 and v3, with a thread each. torch_xla waits for its first process first, so a
    failure in another one would wait for ever in a collective. Work therefore ends its process when it fails
    (`launch/start.py:attend`), which breaks the pool; the others end themselves soon after. Returns exit codes by rank,
    as far as they are known, and the name of the stop signal that came.

    MissingExtraError without torch_xla; DeviceError where this process has used a device, on which children crash.
    """
    torch_xla = require("torch_xla", "tpu")
    if is_xla_device():
        what = "this process has used an XLA device already, and the processes that it starts cannot"
        remedy = "restart the notebook's kernel (or the program) and start the chips first, or use --parallel spmd"
        raise DeviceError(f"num_chips: {what}; {remedy}")
    os.environ[PORT_VARIABLE] = str(collectives.free_port())
    forked = start_method == "fork"
    _inherited[:] = [work] if forked else []
    with passed_on(lambda: [child.pid for child in multiprocessing.active_children()]) as seen:
        try:
            torch_xla.launch(_Worker(None if forked else work), start_method=start_method)
            code = 0
        except BrokenProcessPool:
            code = -9
    return {0: code}, seen[0] if seen else ""

"""Trace every graph that a recovery compiles, at its real shape, without weights and without running anything.

The calls are those of a run (`train/step.py`, the evaluation of `setup/training.py`, the cache builder, the text
generator) on the runtime of `trace.py`, so whatever changes there changes here. A process has one backend
of PyTorch/XLA and one number of devices, and the caller may want another; hence a program of its own:

    cd benchmarks; PJRT_DEVICE=CPU python -m compiled.graphs '{"model": "folder"}' OUT      # NAME.pb and NAME.json each
"""

import gc
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from qat_lora.cache.build.builder import ForwardSettings, teacher_arrays
from qat_lora.cache.format.layout import Contents
from qat_lora.generate.sample import stream_ids
from qat_lora.layers.convert import add_lora
from qat_lora.layers.stacked import parameters_at
from qat_lora.losses.objective import weight_tensors
from qat_lora.models.load import DTYPES, CausalLM
from qat_lora.options import CacheBuildOptions, RunConfig
from qat_lora.plan.memory import meta_student
from qat_lora.quant.presets import preset
from qat_lora.runtime.base import Runtime
from qat_lora.setup.common import fit_attention, place_teacher
from qat_lora.setup.trainable import recovery_parts
from qat_lora.setup.training import TrainingData, evaluation, place_student, prepare
from qat_lora.train.loop import LoopConfig
from qat_lora.train.optim import OptimConfig, TrainState, build_optimizer, optimized
from qat_lora.train.step import add_sums, micro_batch, optimizer_step, zero_sums
from qat_lora.types import Batch

from . import NAMES, Asked
from .hlo import instruction_count
from .trace import Graph, TracingRuntime, TracingSpmdRuntime


class _Rows:
    """Rows of the shapes of a KD cache, all alike: what a graph knows of its data."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        contents = SimpleNamespace(top_k=asked.head_k, tail_entropy=False)
        self.fingerprint = SimpleNamespace(contents=contents)

    def rows(self, indices: list[int]) -> Batch:
        """Return rows by number."""
        count, length, k = len(indices), self._asked.length, self._asked.head_k
        positions = (count, length - 1)
        ids = np.zeros((count, length), np.int32)
        topk_ids = np.broadcast_to(np.arange(k, dtype=np.int32), (*positions, k))
        logits = np.broadcast_to(-np.linspace(0, 8, k, dtype=np.float32), (*positions, k))
        lse, tail = np.full(positions, 2, np.float32), np.full(positions, -3, np.float32)
        teacher = {"head_ids": topk_ids.copy(), "head_logits": logits.copy(), "lse": lse, "log_tail": tail}
        return {"input_ids": ids, "document_ids": ids, "target_mask": np.ones(positions, np.bool_), **teacher}

    def batches(self, start: int, steps: int, batch_rows: int, *_: Any, **__: Any) -> Iterator[Batch]:
        """Yield as many batches as there are steps."""
        return itertools.repeat(self.rows([0] * batch_rows), steps)

    def steps_per_epoch(self, batch_rows: int) -> int:
        """Return the batches of an epoch."""
        return 1


def trace_graphs(asked: Asked, write: Callable[[str, Graph], None]) -> None:
    """Trace the graphs that are asked for, on one chip or several by SPMD, and hand each to `write`; or ModelError."""
    runtime = TracingRuntime("CPU") if asked.chips == 1 else TracingSpmdRuntime("CPU", asked.shard_base)

    def record(name: str, work: Callable[[], Any], which: int = 0) -> None:
        if name in asked.graphs:
            write(name, runtime.record(work)[which])

    def main() -> None:
        _student_graphs(asked, runtime, record)
        gc.collect()
        _model_graphs(asked, runtime, record)

    runtime.launch(main)


def _dense_or_quantised(asked: Asked) -> torch.nn.Module:
    """Return a model on the meta device, without an adapter."""
    student = asked.estimate
    chosen = None if student.preset is None else preset(student.preset, student.keep)
    return meta_student(str(student.model), chosen, DTYPES[student.run.dtype])[1]


def _student_graphs(asked: Asked, runtime: Runtime, record: Callable[..., None]) -> None:
    """Trace what training compiles: the same calls as `setup/training.py` and `train/loop.py`."""
    loop, optim, rows = LoopConfig(batch_size=asked.batch_size), OptimConfig(), _Rows(asked)
    module = _dense_or_quantised(asked)
    add_lora(module, asked.estimate.lora)
    model = CausalLM(module, Path())
    fit_attention(model, runtime)
    dtype = DTYPES[asked.dtype]
    paths = place_student(model, lambda: recovery_parts(model, asked.train_scales, False, dtype), runtime, RunConfig())
    state = TrainState(model, parameters_at(model.module, paths))
    if asked.gradient_checkpointing:
        model.checkpoint_gradients(runtime.checkpoint_function())
    runtime.shard_frozen(model.module)
    prepared = prepare(asked.objective, rows, model, loop, 0, runtime)
    data = TrainingData(rows, rows, prepared.objective, {})
    evaluate = evaluation(data, model, loop, runtime, prepared.teacher_lm_head)
    optimizer = build_optimizer(optim, state.groups, runtime)
    weights = weight_tensors(prepared.objective.weights_at(0.0), runtime.numbers)
    zeros = zero_sums(prepared.objective, runtime.device)
    runtime.mark_step()
    sums = zeros
    (batch,) = runtime.feed(rows.batches(0, 1, asked.batch_size * (runtime.replicas // runtime.processes)))

    def micro() -> None:
        nonlocal sums
        sums = add_sums(zeros, micro_batch(model, batch, prepared.objective, weights, prepared.teacher_lm_head))

    def step() -> None:
        means.update(optimizer_step(optimizer, optimized(optimizer), sums, optim.clip_grad_norm, runtime))

    means: dict[str, torch.Tensor] = {}
    record("micro-batch", micro)
    record("optimizer step", step)
    if evaluate is not None:
        record("evaluation", evaluate)


def _model_graphs(asked: Asked, runtime: Runtime, record: Callable[..., None]) -> None:
    """Trace what a model without an adapter compiles: as the teacher of a cache, and continuing a prompt."""

    def made() -> CausalLM:
        return CausalLM(_dense_or_quantised(asked).requires_grad_(False).eval(), Path())

    teacher, model = made(), made()
    place_teacher(teacher, runtime)
    fit_attention(teacher, runtime)
    runtime.place(model.module)
    held = Contents(asked.length, asked.head_k, model.vocab_size)
    (batch,) = runtime.feed(_Rows(asked).batches(0, 1, CacheBuildOptions.teacher_batch_size * runtime.replicas))
    settings = ForwardSettings(CacheBuildOptions.teacher_batch_size, runtime.device, piece_bytes=runtime.piece_bytes)
    kept: list[Any] = []

    def build() -> None:
        kept[:] = [teacher_arrays(teacher, batch["input_ids"], batch["document_ids"], held, {}, settings)]

    def decode() -> None:
        kept[:] = stream_ids(model, [0], 2, device=runtime.device, row_length=asked.length, mark_step=runtime.mark_step)

    record("cache build", build)
    record("prompt", decode)
    record("decoding step", decode, 1)


def main() -> None:
    """Write the graphs to a folder."""
    asked, out = json.loads(sys.argv[1]), Path(sys.argv[2])

    def write(name: str, graph: Graph) -> None:
        (out / f"{name}.pb").write_bytes(graph.hlo)
        counted = {"instructions": instruction_count(graph.text), "trace_cpu_s": graph.trace_cpu_s}
        (out / f"{name}.json").write_text(json.dumps(counted), encoding="utf-8")

    trace_graphs(Asked(**asked | {"graphs": tuple(asked.get("graphs", NAMES))}), write)


if __name__ == "__main__":
    main()

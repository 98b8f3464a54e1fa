"""What one training step asks of a GPU, counted without one, and the least time that an H200 would take for it.

Claims, for a rank-8 adapter on a `q4_r32` student in bfloat16 with a frozen base, K = 128: with compiled decoder
layers, FlexAttention and the Triton loss, a micro-batch of Qwen3-0.6B (16 x 1,024 tokens) launches at most 2,000
kernels and its roofline is at least 110,000 tokens/s; Qwen3-8B reaches 14,000; an optimizer step launches at most 40.

Nothing is run: the step is traced at real shape on meta tensors, which have no memory. A figure is one of two kinds:

* `eager`: every operation that PyTorch calls is a kernel (`roofline/counts.py`, with the assumed rates of a GPU).
* `compiled`, a model and called so: the decoder layer's graphs under a written fusion rule (`roofline/fusion.py`). The
  loss by the Triton kernel is a model too: per chunk two products and `LOSS_KERNELS` kernels, of which one reads the
  logits twice and writes their gradient once.

The host launches a kernel in `HOST_S` (compiled: `HOST_COMPILED_S`); a step takes the longer of device and host, which
is named. A step that is traced may not stop a GPU's queue: reading a value back, `nonzero` and a copy from memory that
is not pinned raise `Sync`.

    python benchmarks/cuda_roofline.py --model 0.6b 8b --out benchmarks/results/cuda_roofline.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from roofline.counts import RANK, Count, Kernel, Work, count_attention, no_autocast, total, touched
from roofline.fusion import fused, layer_program
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer

from qat_lora.layers.convert import add_lora, make_quant_skeleton
from qat_lora.layers.lora import LoraConfig
from qat_lora.losses import objective as objective_module
from qat_lora.losses.objective import ObjectiveConfig, objective_loss
from qat_lora.models.load import CausalLM, make_qwen3
from qat_lora.quant.presets import preset
from qat_lora.runtime.native import NativeRuntime
from qat_lora.setup.trainable import recovery_parts
from qat_lora.train.optim import OptimConfig, build_optimizer, optimized
from qat_lora.train.step import optimizer_step, zero_sums

SIZES = {
    "0.6b": {"hidden": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 128, "mlp": 3072},
    "8b": {"hidden": 4096, "layers": 36, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp": 12288},
    "toy": {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 192},
}
VOCABULARY, TOP_K, DRAWS = 151_936, 128, 8
HOST_S, HOST_COMPILED_S = 7e-6, 5e-6
LOSS_KERNELS, LOSS_CHUNK_BYTES = 6, 2**30


class Student(NamedTuple):
    """A student on tensors without memory, ready to train, and a batch for it."""

    model: CausalLM
    trained: dict[str, dict[str, nn.Parameter]]
    batch: dict[str, Tensor]


def make_student(
    size: str, rows: int, length: int, vocabulary: int = VOCABULARY, device: str | torch.device = "meta"
) -> Student:
    """Return the student of a size with a rank-8 adapter, and a batch of rows."""
    with torch.device(device):
        model = make_qwen3(Path("."), vocabulary, **SIZES[size], max_position_embeddings=length)
        model.module.to(torch.bfloat16)
        make_quant_skeleton(model.module, preset("q4_r32"))
        add_lora(model.module, LoraConfig(recovery_r=RANK))
        trained = recovery_parts(model, False, False, torch.bfloat16)
        positions = (rows, length - 1)
        batch = {
            "input_ids": torch.zeros(rows, length, dtype=torch.int64),
            "document_ids": torch.zeros(rows, length, dtype=torch.int32),
            "target_mask": torch.ones(positions, dtype=torch.bool),
            "head_ids": torch.zeros(*positions, TOP_K, dtype=torch.int64),
            "head_logits": torch.zeros(*positions, TOP_K),
            "lse": torch.zeros(positions),
            "log_tail": torch.zeros(positions),
            "tail_draw_ids": torch.zeros(*positions, DRAWS, dtype=torch.int64),
        }
    for parameters in trained.values():
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
    return Student(model, trained, batch)


def tag_parts(model: CausalLM, count: Count) -> None:
    """Count norms, base products and adapters apart."""
    kinds = {"QuantLinear": "base products", "LoraLinear": "adapters"}
    outer: list[str] = []

    def enter(part: str) -> None:
        outer.append(count.part)
        count.part = part

    def leave(*_: Any) -> None:
        count.part = outer.pop()

    for module in model.module.modules():
        name = type(module).__name__
        part = "norms" if name.endswith("RMSNorm") else kinds.get(name)
        if part is not None:
            module.register_forward_pre_hook(lambda *_, part=part: enter(part))
            module.register_forward_hook(leave)


def micro_batch_eager(student: Student, chunk_mb: int, watch: bool = False) -> Count:
    """Trace forward, loss and backward of a micro-batch as eager PyTorch calls them."""
    count, (model, _, batch) = Count(watch), student
    AttentionInterface.register("counted", count_attention(count))
    AttentionMaskInterface.register("counted", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.module.set_attn_implementation("counted")
    tag_parts(model, count)
    real = objective_module.fused_linear_kd

    def loss(*args: Any, **kwargs: Any) -> Any:
        with count.of("loss"):
            return real(*args, **kwargs)

    config = ObjectiveConfig("hybrid", loss_chunk_mb=chunk_mb)
    weights = {"kd": torch.ones(1, device="meta")}
    with no_autocast(), mock.patch.object(objective_module, "fused_linear_kd", loss), count:
        hidden = model.hidden(batch["input_ids"], batch["document_ids"])
        with count.of("loss inputs"):
            result = objective_loss(hidden, model.lm_head(), batch, config, weights)
        with count.of("backward"):
            result.loss_sum.backward()
    return count


class MetaRuntime(NativeRuntime):
    """The native runtime on a device without memory, with the exchange between two replicas counted as a kernel."""

    def __init__(self, count: Count, replicas: int = 2) -> None:
        super().__init__("cpu")
        self.device, self.replicas, self._count = count.device, replicas, count

    def numbers(self, values: Sequence[float]) -> Tensor:
        """Send numbers as the native runtime does to a GPU, from memory that is only said to be pinned."""
        host = torch.tensor(values, dtype=torch.float32)
        self._count.pinned.append(host)
        return host.to(self.device, non_blocking=True)

    def defer(self, fn: Callable[..., None], *tensors: Tensor) -> None:
        """Start the copies that the native runtime does; without values `fn` is not called."""
        for tensor in tensors:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            self._count.pinned.append(host)
            host.copy_(tensor.detach(), non_blocking=True)

    def _mean(self, total: Tensor) -> Tensor:
        self._count.parts[self._count.part].add(Kernel("all_reduce", 1, 2 * touched(total), 0))
        return total / self.replicas


def optimizer_eager(student: Student, replicas: int, watch: bool = False) -> Count:
    """Trace an optimizer step, with clipping, moving average and the exchange between replicas."""
    count = Count(watch)
    count.part = "optimizer"
    runtime = MetaRuntime(count, replicas)
    optimizer = build_optimizer(OptimConfig(ema=0.99), student.trained, runtime)
    sums = zero_sums(ObjectiveConfig(), runtime.device)
    with count:
        optimizer_step(optimizer, optimized(optimizer), sums, 1.0, runtime)
    return count


def triton_loss(rows: int, length: int, width: int, vocabulary: int) -> Work:
    """Return the work of the loss with one kernel over the logits, a model."""
    work, positions = Work(), rows * (length - 1)
    chunks = -(-positions * vocabulary * 2 // LOSS_CHUNK_BYTES)
    count = -(-positions // chunks)
    logits, hidden, head = 2 * count * vocabulary, 2 * count * width, 2 * vocabulary * width
    for _ in range(chunks):
        for _ in range(2):
            work.add(Kernel("mm", 1, logits + hidden + head, 2 * count * vocabulary * width))
        work.add(Kernel("triton", 1, 3 * logits, 0))
        work.add(Kernel("small", LOSS_KERNELS - 1, 20 * count * TOP_K, 0))
    return work


def around_layers(student: Student) -> Work:
    """Trace what is left of a micro-batch without its layers and its loss: embedding, masks, rotations, last norm."""
    count, (model, _, batch) = Count(), student
    layers = [module for module in model.module.modules() if isinstance(module, GradientCheckpointingLayer)]
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(mock.patch.object(layer, "forward", lambda hidden, **_: hidden))
        stack.enter_context(no_autocast())
        stack.enter_context(count)
        hidden = model.hidden(batch["input_ids"], batch["document_ids"])
        hidden.backward(hidden.detach())
    return count.parts["other forward"]


def compiled(student: Student) -> dict[str, Work]:
    """Return the work of a micro-batch by part, layers compiled and loss by the Triton kernel; a model."""
    program, config = layer_program(student.model, student.batch), student.model.config
    rows, length = student.batch["input_ids"].shape
    layers = config.num_hidden_layers
    build_optimizer(OptimConfig(), student.trained, MetaRuntime(Count()))
    count, made = Count(), [p for parameters in student.trained.values() for p in parameters.values()]
    with count:
        torch._foreach_add_([p.grad for p in made], [p.detach() for p in made])  # `gradients_apart`
    return {
        "layers forward": Work().plus(fused(program.forward), layers),
        "layers backward": Work().plus(fused(program.backward), layers),
        "gradients added": count.parts["other forward"],
        "around the layers": around_layers(student),
        "loss": triton_loss(rows, length, config.hidden_size, student.model.vocab_size),
    }


def verdict(parts: dict[str, Work], tokens: int) -> dict[str, Any]:
    """Return the figures of a micro-batch by part, their sum, and what it is bound by."""
    whole = total(parts.values())
    in_layers = sum(work.kernels for name, work in parts.items() if name.startswith("layers"))
    host_s = in_layers * HOST_COMPILED_S + (whole.kernels - in_layers) * HOST_S
    return {
        "parts": {name: work.report() for name, work in parts.items()},
        "all": whole.report(),
        "host_ms": round(1e3 * host_s, 1),
        "bound_by": "host" if host_s > whole.seconds else "device",
        "tokens_per_s": round(tokens / max(host_s, whole.seconds)),
    }


def measure(size: str, rows: int, length: int, chunk_mb: int) -> dict[str, Any]:
    """Return the counts and rooflines of a size."""
    student = make_student(size, rows, length)
    began = time.perf_counter()
    parts = micro_batch_eager(student, chunk_mb).parts
    optimizer = {f"{n} GPUs": optimizer_eager(student, n).parts["optimizer"] for n in (1, 2)}
    return {
        "rows": rows,
        "length": length,
        "loss_chunk_mb": chunk_mb,
        "trace_s": round(time.perf_counter() - began, 1),
        "eager": verdict(parts, rows * length),
        "compiled": verdict(compiled(make_student(size, rows, length)), rows * length),
        "optimizer": {name: work.report() for name, work in optimizer.items()},
    }


def main() -> None:
    """Measure the sizes asked for, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=SIZES, default=["0.6b"])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--chunk-mb", type=int, default=ObjectiveConfig().loss_chunk_mb)
    parser.add_argument("--machine", default="no GPU: traced")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sizes = {size: measure(size, arguments.rows, arguments.length, arguments.chunk_mb) for size in arguments.model}
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "command": " ".join(["python", *sys.argv]),
        "models": sizes,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

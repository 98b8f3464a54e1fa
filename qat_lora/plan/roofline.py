"""Time of a micro-batch as a roofline, from shapes: operations, bytes and launches, each over a device's rate.

Operations alone, as an assumed share of the peak, would call a step of small matrices, or a card with slow memory,
several times too fast. So a step is cut into parts that run one after another: products, adapters, attention, the
elementwise work between them, and the loss. A part takes the longer of its operations and its bytes, each at the share
of the device's rate that is reached. Meanwhile the host launches kernels (CUDA) or traces the graph (XLA): the step
takes the longer of device and host. It is bound by what would take longest if nothing else took time.

Bytes are those of fused code: a kernel reads what it needs and writes its result once. Backward, a tensor's gradient
moves as the tensor did, and elementwise work is done again (`runtime/xla/scan.py`, compiled layers on CUDA). Not in it:
exchanges between chips, the optimizer (some thousandths), compiling, reading data. `benchmarks/cuda_roofline.py` counts
traced kernels, `benchmarks/tpu_compile.py` compiled programs; `tests/plan/test_plan_roofline.py` compares.

Source: Williams, Waterman, Patterson (2009), "Roofline: an insightful visual performance model".
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from qat_lora.layers.attention import BLOCK, TILE
from qat_lora.layers.convert import lora_layers
from qat_lora.models.load import DTYPES
from qat_lora.options import EstimateOptions
from qat_lora.plan.activations import loss_chunks, widths
from qat_lora.plan.devices import Attention, Device
from qat_lora.plan.shapes import Shapes

BLOCKS: dict[Attention, int] = {"tiled": TILE, "fused": 128, "xla": BLOCK}
"""Queries that meet only the keys up to their own end; without one (`plain`) all meet all."""
LAUNCH_S, FORWARD_KERNELS, BACKWARD_KERNELS, OTHER_KERNELS, CHUNK_KERNELS = 5e-6, 27, 36, 90, 8
"""Seconds to launch a kernel; kernels of a layer, around the layers, of a chunk of the loss."""
MEMORY_SHARE = 0.8  # of a memory's rate, what long reads and writes reach
TRACE_S = 0.015  # host seconds to trace a micro-batch with stacked layers, whatever their number


class Part(NamedTuple):
    """Operations and bytes of a part of a micro-batch."""

    operations: float
    bytes: float


class StepTime(NamedTuple):
    """Seconds of a micro-batch, and those that each bound alone would take."""

    seconds: float
    limits: dict[str, float]

    @property
    def bound(self) -> str:
        """What takes longest: compute, memory, kernel launches or host tracing."""
        return max(self.limits, key=self.limits.__getitem__)


def step_time(shapes: Shapes, options: EstimateOptions, attention: Attention, device: Device) -> StepTime:
    """Return the time of one micro-batch on one chip; the settings' `loss_chunk_mb` is the device's."""
    rate = device.tflops * 1e12 * options.utilisation
    rate *= device.float32_share if options.run.dtype == "float32" else 1
    parts, bandwidth = step_parts(shapes, options, attention).values(), device.gbps * 1e9 * MEMORY_SHARE
    limits = {
        "compute": sum(part.operations for part in parts) / rate,
        "memory": sum(part.bytes for part in parts) / bandwidth,
        **_host_s(shapes, options, device.device),
    }
    on_device = sum(max(part.operations / rate, part.bytes / bandwidth) for part in parts)
    return StepTime(max(on_device, *limits.values()), limits)


def operations(shapes: Shapes, options: EstimateOptions, attention: Attention) -> int:
    """Return the floating-point operations of one micro-batch."""
    return int(sum(part.operations for part in step_parts(shapes, options, attention).values()))


def step_parts(shapes: Shapes, options: EstimateOptions, attention: Attention) -> dict[str, Part]:
    """Return what a micro-batch computes and moves: 4 N operations a token for what is frozen, 6 N for what trains.

    A frozen weight is multiplied once forward and once for the gradient of its input, one that trains (or whose scales
    do) once more for its own. Checkpointing adds the layers' products and attention again.
    """
    layers, tokens = shapes.config.num_hidden_layers, options.batch_size * options.length
    width, size, passes = DTYPES[options.run.dtype].itemsize, widths(shapes.config), 2 + options.gradient_checkpointing
    output, modules = shapes.module.get_output_embeddings(), shapes.module.modules()
    linear = [m for m in modules if isinstance(m, nn.Linear) and m is not output]
    weights = sum(m.in_features * m.out_features for m in linear)
    adapted = [adapter.base for adapter in lora_layers(shapes.module).values()]
    trains = sum(shapes.quantised) if shapes.weight_gradients else 0
    formed = trains * (2 * (4 + width) + 12)  # codes read and weights written, twice; a gradient, and its reduction
    # Scores, and what they weigh, [L, L] of every head; backward twice as many, and the scores again if none were kept.
    blocks = -(-options.length // BLOCKS.get(attention, options.length))
    attended = (
        4 * options.length * size.queries * (1 + 1 / blocks) / 2 * (passes + (1 if attention == "plain" else 1.5))
    )
    kept_scores = 24 * size.heads * options.length if attention == "plain" else 0  # written and read, three times
    elementwise = 9 * size.hidden + 2 * (size.queries + size.keys) + 3 * size.mlp
    chunks, _ = loss_chunks(options, tokens, shapes.vocab_size)
    lm_head = shapes.vocab_size * size.hidden
    return {
        "products": Part(
            2 * tokens * (passes * weights + trains),
            width * passes * (weights + tokens * sum(m.in_features + m.out_features for m in linear)) + formed,
        ),
        "adapters": Part(
            2 * tokens * (passes + 1) * sum(p.numel() for p in shapes.adapter),
            width * passes * tokens * sum(m.in_features + 2 * m.out_features for m in adapted),
        ),
        "attention": Part(
            tokens * layers * attended,
            tokens * layers * ((passes + 1) * width * 2 * (size.queries + size.keys) + kept_scores),
        ),
        "elementwise": Part(0, 3 * tokens * layers * width * elementwise),
        # Logits are written and read twice, their gradient written and read.
        "loss": Part(4 * tokens * lm_head, width * (2 * chunks * lm_head + 5 * tokens * shapes.vocab_size)),
    }


def _host_s(shapes: Shapes, options: EstimateOptions, device: str) -> dict[str, float]:
    """Return the host's seconds by what it does; a CPU is host and device at once."""
    if device in ("tpu", "xla"):
        return {"host tracing": TRACE_S}
    if device != "cuda":
        return {}
    layer = FORWARD_KERNELS * (1 + options.gradient_checkpointing) + BACKWARD_KERNELS
    chunks, _ = loss_chunks(options, options.batch_size * options.length, shapes.vocab_size)
    return {
        "kernel launches": LAUNCH_S * (shapes.config.num_hidden_layers * layer + OTHER_KERNELS + chunks * CHUNK_KERNELS)
    }

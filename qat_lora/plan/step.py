"""What a training step takes, from shapes: memory beyond what a run holds, and the time of a micro-batch.

*Memory* is formulas over a model's config, for layers of Qwen's and Llama's kind; every term stands for tensors that a
trace of a step shows. Tracing would be exact but needs model and device, as what autograd keeps depends on attention:

* `tiled` (`layers/attention.py`, CPUs) keeps keys and values as they are and no scores.
* `blocked` (where no kernel fits: Apple's GPU) keeps the same.
* `fused` (torch's kernels on CUDA) keeps no scores, but repeats keys and values for every query head.
* `xla` is one loop over stacked layers, forward and backward. What a layer keeps is chosen there, not by autograd.

*Time* is a roofline. Operations alone would call a step of small matrices, or a card with slow memory, several times
too fast. So a step is cut into parts that run one after another, each of which takes the longer of its operations and
its bytes, at the share of the device's rate that is reached. Meanwhile the host launches kernels (CUDA) or traces the
graph (XLA): the step takes the longer of device and host. Bytes are those of fused code: a kernel reads what it needs
and writes its result once. Backward, a tensor's gradient moves as the tensor did, and elementwise work is done again
(`runtime/xla/loop.py`, compiled layers on CUDA). Not in it: exchanges between chips, optimizer, compiling, reading.

`benchmarks/estimate.py` compares both with peaks and compilers' counts. Source: Roofline, Williams et al. 2009.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from qat_lora.layers.attention import BLOCK, TILE
from qat_lora.layers.convert import lora_layers, quant_layers
from qat_lora.models.load import DTYPES
from qat_lora.options import EstimateOptions
from qat_lora.plan.devices import Device
from qat_lora.runtime.base import default_loss_chunk_mb

PIECE_BYTES = 2 * 2**21  # logits of two vocabulary pieces (`losses/fused/by_vocab`): this one and the one before it
SCORES = 3  # of a block of queries, at once, in float32: shares and gradients of `blocked_attention`, no TPU kernel's
BLOCKS = {"tiled": TILE, "fused": 128, "blocked": BLOCK, "xla": BLOCK}  # queries that meet keys up to their end
LAUNCH_S, FORWARD_KERNELS, BACKWARD_KERNELS, OTHER_KERNELS, CHUNK_KERNELS = 5e-6, 27, 36, 90, 8
"""Seconds to launch a kernel; kernels of a layer, around the layers, of a chunk of the loss."""
MEMORY_SHARE = 0.8  # of a memory's rate, what long reads and writes reach
TRACE_S = 0.015  # host seconds to trace a micro-batch with stacked layers, whatever their number


@dataclass(frozen=True)
class Shapes:
    """A student on the meta device, in its training state."""

    config: Any  # of its text model
    module: Any
    trained: Mapping[str, Mapping[str, nn.Parameter]]  # by kind and name
    adapter_rank: int
    weight_gradients: bool  # whether the backward pass forms a gradient of every quantised weight
    formed_bytes: int  # weights that a forward forms anew from codes and scales and keeps for its backward pass
    averaged: bool = False  # whether the optimizer keeps an average of what trains
    passes: int = 2  # of the layers' products: forward, and gradients of activations; 1: a forward alone

    @property
    def trained_by_kind(self) -> dict[str, int]:
        """How many numbers train."""
        return {kind: sum(p.numel() for p in tensors.values()) for kind, tensors in self.trained.items()}

    @property
    def quantised(self) -> list[int]:
        """Numbers of each quantised weight."""
        return [layer.in_features * layer.out_features for layer in quant_layers(self.module).values()]

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return int(self.module.get_output_embeddings().weight.shape[0])

    @property
    def adapter(self) -> list[nn.Parameter]:
        """The factors of the adapters."""
        return [p for layer in lora_layers(self.module).values() for p in (layer.lora_A, layer.lora_B)]


class Widths(NamedTuple):
    """Numbers of one token in a layer."""

    hidden: int
    mlp: int
    queries: int
    keys: int
    heads: int


class Part(NamedTuple):
    """Operations and bytes of a part of a micro-batch."""

    operations: float
    bytes: float


def token_share(module: nn.Module, config: Any, name: str) -> float:
    """Return the share of tokens that a layer computes: of an expert's, those that choose it."""
    found = re.match(r"(.*\bexperts)\.\d+\.", name)
    experts = len(module.get_submodule(found[1])) if found else 1  # type: ignore[arg-type]
    return getattr(config, "num_experts_per_tok", experts) / experts if found else 1.0


def widths(config: Any) -> Widths:
    """Return the widths of a model's layers."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim, key_heads = getattr(config, "head_dim", None), getattr(config, "num_key_value_heads", None)
    head_dim, mlp = head_dim or hidden // heads, getattr(config, "intermediate_size", None) or 4 * hidden
    return Widths(hidden, mlp, heads * head_dim, head_dim * (key_heads or heads), heads)


def step_bytes(shapes: Shapes, options: EstimateOptions) -> dict[str, int]:
    """Return the bytes of a step beyond what is held: `formed weights`, `activations`, `working memory`."""
    tokens, layers = options.batch_size * options.length, shapes.config.num_hidden_layers
    width, sizes, is_loop = DTYPES[options.run.dtype].itemsize, widths(shapes.config), options.attention == "xla"
    layer = _layer(shapes, options)
    other = (4 + width) * sizes.hidden  # the last norm
    backward = tokens * width * (3 * sizes.mlp + 2 * sizes.hidden)  # gradients of a layer's widest tensors
    if shapes.weight_gradients:  # of the largest, a gradient and its product with the codes
        backward += 8 * max(shapes.quantised, default=0)
    kept = layers * (width * sizes.hidden if options.gradient_checkpointing else layer) + other
    if options.gradient_checkpointing or is_loop:
        # One layer at a time is recomputed, or cut from the stacks; by the third gradient, one kept tensor is freed.
        backward += tokens * (layer - width * sizes.mlp)
    if is_loop and width == 4:
        backward += tokens * SCORES * 4 * sizes.heads * min(BLOCK, options.length)
    # A loop forms each layer's weights as it comes to them.
    formed = shapes.formed_bytes // (layers if is_loop or options.gradient_checkpointing else 1)
    loss = _loss(options, tokens, sizes.hidden, shapes.vocab_size)
    kept *= shapes.passes > 1  # a forward alone keeps nothing
    return {"formed weights": formed, "activations": tokens * kept, "working memory": max(loss, backward)}


def _layer(shapes: Shapes, options: EstimateOptions) -> int:
    """Return the bytes that are kept of a layer for one token.

    Autograd keeps of a linear layer with a frozen base the product A x and, for its adapter's A, its input (once for
    layers that share it); norms keep their input in float32. XLA's loop keeps what `runtime/xla/loop.py` names: a
    layer's input, the wide products that its backward pass reads (not the last one), and attention's result and sums.
    """
    width, (hidden, mlp, queries, keys, heads) = DTYPES[options.run.dtype].itemsize, widths(shapes.config)
    if options.attention == "xla":
        return width * (hidden + (queries + 2 * keys) + queries + hidden + 2 * mlp) + 4 * heads
    inputs = 2 * hidden + mlp + 7 * shapes.adapter_rank
    # Queries, keys and values for every head, and the result; or that twice: per head, and concatenated.
    fused = options.attention == "fused"
    attended = width * 4 * queries if fused else width * (3 * queries + 2 * keys) + 4 * heads
    normed = queries + keys if "3" in shapes.config.model_type else 0  # Qwen3 and Gemma 3 norm both
    return width * (inputs + 3 * mlp) + attended + 4 * (2 * hidden + normed)


def _loss(options: EstimateOptions, tokens: int, hidden: int, vocab: int) -> int:
    width = DTYPES[options.run.dtype].itemsize
    _, logits = loss_chunks(options, tokens, vocab)
    if options.attention == "tiled":  # logits in the products' type; states and their summed gradient; top-K entries
        states = hidden * (4 + 3 * width) + 48 * options.head_k
        return logits * width // 4 + min(PIECE_BYTES, logits) + tokens * states
    if options.attention == "xla":
        # In the products' type: the logits, by lanes for the top-K entries, and their gradient.
        return 3 * logits * width // 4 + tokens * hidden * (4 + width)
    # Logits and their gradient in float32, a copy in the products' type.
    return 2 * logits + (logits // 2 if width < 4 else 0) + tokens * hidden * (4 + width)


def loss_chunks(options: EstimateOptions, tokens: int, vocab: int) -> tuple[int, int]:
    """Return how many chunks a loss over the vocabulary takes, all alike, and the bytes of one in float32."""
    chunks = -(-4 * tokens * vocab // ((options.loss_chunk_mb or default_loss_chunk_mb("cpu")) * 2**20))
    return chunks, 4 * tokens * vocab // chunks


def step_time(shapes: Shapes, options: EstimateOptions, device: Device) -> tuple[float, dict[str, float]]:
    """Return the seconds of one micro-batch on one chip, and those that each bound alone would take."""
    rate = device.tflops * 1e12 * options.utilisation
    rate *= device.float32_share if options.run.dtype == "float32" else 1
    parts, bandwidth = step_parts(shapes, options).values(), device.gbps * 1e9 * MEMORY_SHARE
    limits = {"compute": sum(p.operations for p in parts) / rate, "memory": sum(p.bytes for p in parts) / bandwidth}
    if device.device in ("tpu", "xla"):  # what the host does meanwhile; a CPU is host and device at once
        limits["host tracing"] = TRACE_S
    elif device.device == "cuda":
        kernels = FORWARD_KERNELS * (1 + (shapes.passes > 1) * options.gradient_checkpointing)
        kernels += (shapes.passes > 1) * BACKWARD_KERNELS
        chunks, _ = loss_chunks(options, options.batch_size * options.length, shapes.vocab_size)
        kernels = shapes.config.num_hidden_layers * kernels + OTHER_KERNELS + chunks * CHUNK_KERNELS
        limits["kernel launches"] = LAUNCH_S * kernels
    return max(sum(max(p.operations / rate, p.bytes / bandwidth) for p in parts), *limits.values()), limits


def operations(shapes: Shapes, options: EstimateOptions) -> int:
    """Return the floating-point operations of one micro-batch."""
    return int(sum(part.operations for part in step_parts(shapes, options).values()))


def step_parts(shapes: Shapes, options: EstimateOptions) -> dict[str, Part]:
    """Return what a micro-batch computes and moves: 4 N operations a token for what is frozen, 6 N for what trains.

    Checkpointing repeats the layers' forward products. Where nothing trains there is no backward pass: 2 N operations.
    """
    layers, tokens = shapes.config.num_hidden_layers, options.batch_size * options.length
    width, size, back = DTYPES[options.run.dtype].itemsize, widths(shapes.config), int(shapes.passes > 1)
    passes = shapes.passes + back * options.gradient_checkpointing
    output = shapes.module.get_output_embeddings()
    named = [(n, m) for n, m in shapes.module.named_modules() if isinstance(m, nn.Linear) and m is not output]
    linear = [(m, 1 if options.attention == "xla" else token_share(shapes.module, shapes.config, n)) for n, m in named]
    weights = sum(m.in_features * m.out_features for m, _ in linear)
    computed = sum(share * m.in_features * m.out_features for m, share in linear)
    adapted = sum(x.base.in_features + 2 * x.base.out_features for x in lora_layers(shapes.module).values())
    trains = sum(shapes.quantised) if shapes.weight_gradients else 0
    formed = trains * (2 * (4 + width) + 12)  # codes read and weights written, twice; a gradient, and its reduction
    # Scores, and what they weigh, [L, L] of every head; backward twice as many, and the scores again.
    blocks = -(-options.length // BLOCKS[options.attention])
    attended = 4 * options.length * size.queries * (1 + 1 / blocks) / 2 * (passes + 1.5 * back)
    elementwise = 9 * size.hidden + 2 * (size.queries + size.keys) + 3 * size.mlp
    chunks, _ = loss_chunks(options, tokens, shapes.vocab_size)
    lm_head = shapes.vocab_size * size.hidden
    moved = sum(share * (m.in_features + m.out_features) for m, share in linear)
    factors = sum(p.numel() for p in shapes.adapter)
    parts = {"elementwise": Part(0, (1 + 2 * back) * tokens * layers * width * elementwise)}
    products = 2 * tokens * computed * (passes + trains / weights), width * passes * (weights + tokens * moved) + formed
    adapters = 2 * tokens * (passes + 1) * factors, width * passes * tokens * adapted
    scores = (passes + back) * width * 2 * (size.queries + size.keys)
    # Logits are written and read twice, their gradient written and read.
    of_logits = width * ((1 + back) * chunks * lm_head + (3 + 2 * back) * tokens * shapes.vocab_size)
    parts |= {"products": Part(*products), "adapters": Part(*adapters)}
    parts["attention"] = Part(tokens * layers * attended, tokens * layers * scores)
    return parts | {"loss": Part(2 * (1 + back) * tokens * lm_head, of_logits)}

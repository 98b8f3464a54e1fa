"""Memory of one training step beyond what a run holds: activations for the backward pass, and working memory.

Formulas over a model's config, for layers of Qwen's and Llama's kind; every term stands for tensors that a trace of a
step shows. Tracing would be exact but needs model and device, because what autograd keeps depends on the attention:

* `tiled` (`layers/attention.py`, CPUs) keeps keys and values as they are and no scores.
* `fused` (torch's kernels on CUDA) keeps no scores, but repeats keys and values for every query head.
* `plain` (where no kernel fits: Apple's GPU) keeps the probabilities of a softmax in float32.
* `xla` is one loop over stacked layers, forward and backward. What a layer keeps is chosen there, not by autograd.

`benchmarks/estimate.py` compares the sums with measured peaks, and with the memory that the TPU's compiler gives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from qat_lora.layers.attention import BLOCK
from qat_lora.models.load import DTYPES
from qat_lora.options import EstimateOptions
from qat_lora.plan.devices import Attention
from qat_lora.runtime.base import default_loss_chunk_mb

PIECE_BYTES = 2 * 2**21
"""Logits of two vocabulary pieces (`losses/fused/by_vocab`): the current one and the one before it."""

SCORES = 3
"""Of a block of queries, at once: shares and gradients of `blocked_attention`, where a model computes in float32, which
the TPU's kernel does not."""


class Widths(NamedTuple):
    """Numbers of one token in a layer."""

    hidden: int
    mlp: int
    queries: int
    keys: int
    heads: int


def widths(config: Any) -> Widths:
    """Return the widths of a model's layers."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    mlp = getattr(config, "intermediate_size", None) or 4 * hidden
    return Widths(
        hidden, mlp, heads * head_dim, head_dim * (getattr(config, "num_key_value_heads", None) or heads), heads
    )


def step_bytes(
    config: Any,
    options: EstimateOptions,
    attention: Attention,
    vocab: int,
    adapter_rank: int,
    formed: int = 0,
    largest: int = 0,
) -> dict[str, int]:
    """Return the bytes that a step needs beyond what is held: `formed weights`, `activations`, `working memory`.

    `formed` are the bytes of weights that a forward forms anew from codes and scales and keeps for its backward pass,
    `largest` are the numbers of the largest of them.
    """
    tokens, layers = options.batch_size * options.length, config.num_hidden_layers
    width, sizes = DTYPES[options.run.dtype].itemsize, widths(config)
    layer = _layer(config, options, attention, adapter_rank)
    other = (4 + width) * sizes.hidden + width * options.length  # the last norm, and the mask
    backward = tokens * width * (3 * sizes.mlp + 2 * sizes.hidden)  # gradients of a layer's widest tensors
    backward += 8 * largest  # a weight's gradient, and its product with the codes
    kept = layers * (width * sizes.hidden if options.gradient_checkpointing else layer) + other
    if options.gradient_checkpointing or attention == "xla":
        # One layer at a time is recomputed, or cut from the stacks; by the third gradient, one kept tensor is freed.
        backward += tokens * (layer - width * sizes.mlp)
    if attention == "xla" and width == 4:
        backward += tokens * SCORES * 4 * sizes.heads * min(BLOCK, options.length)
    # A loop forms each layer's weights as it comes to them.
    formed //= layers if attention == "xla" or options.gradient_checkpointing else 1
    loss = _loss(options, attention, tokens, sizes.hidden, vocab)
    return {"formed weights": formed, "activations": tokens * kept, "working memory": max(loss, backward)}


def _layer(config: Any, options: EstimateOptions, attention: Attention, adapter_rank: int) -> int:
    """Return the bytes that are kept of a layer for one token.

    Autograd keeps of a linear layer with a frozen base the product A x and, for its adapter's A, its input (once for
    layers that share it); norms keep their input in float32. XLA's loop keeps what `runtime/xla/scan.py` names: a
    layer's input, the wide products that its backward pass reads (not the last one), and attention's result and sums.
    """
    width, (hidden, mlp, queries, keys, heads) = DTYPES[options.run.dtype].itemsize, widths(config)
    if attention == "xla":
        return width * (hidden + (queries + 2 * keys) + queries + hidden + 2 * mlp) + 4 * heads
    inputs = 2 * hidden + mlp + 7 * adapter_rank
    if attention == "tiled":  # the result twice: per head, and concatenated
        attended = width * (3 * queries + 2 * keys) + 4 * heads
    elif attention == "fused":  # queries, keys and values for every head, and the result
        attended = width * 4 * queries
    else:  # in float32 whatever the model's dtype, with the scores
        attended = 4 * (3 * queries + heads * options.length) + width * queries
    normed = queries + keys if "3" in config.model_type else 0  # Qwen3 and Gemma 3 norm both
    return width * (inputs + 3 * mlp) + attended + 4 * (2 * hidden + normed)


def _loss(options: EstimateOptions, attention: Attention, tokens: int, hidden: int, vocab: int) -> int:
    width = DTYPES[options.run.dtype].itemsize
    _, logits = loss_chunks(options, tokens, vocab)
    if attention == "tiled":  # logits in the products' type; states and their summed gradient; top-K ids and logits
        states = hidden * (4 + 3 * width) + 48 * options.head_k
        return logits * width // 4 + min(PIECE_BYTES, logits) + tokens * states
    if attention == "xla":
        # In the products' type: the logits, by lanes for the top-K entries, and their gradient.
        return 3 * logits * width // 4 + tokens * hidden * (4 + width)
    # Logits and their gradient in float32, a copy in the products' type.
    return 2 * logits + (logits // 2 if width < 4 else 0) + tokens * hidden * (4 + width)


def loss_chunks(options: EstimateOptions, tokens: int, vocab: int) -> tuple[int, int]:
    """Return how many chunks a loss over the vocabulary takes, all alike, and the bytes of one in float32."""
    most = (options.loss_chunk_mb or default_loss_chunk_mb("cpu")) * 2**20
    chunks = -(-4 * tokens * vocab // most)
    return chunks, 4 * tokens * vocab // chunks

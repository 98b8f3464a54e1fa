"""What comes and goes in a training step: bytes that autograd keeps for the backward pass, and bytes for a moment.

Formulas over a model's config, for layers of Qwen's and Llama's kind, and counted by hand: every line here stands for
tensors that a trace of a step shows. Counting a real step's tensors instead would need the model in memory, and the
device: what is kept depends on who computes attention.

* `tiled`: ours, on CPUs (`layers/attention.py`). Keys and values as they are, no scores, and a head that is walked
  through by vocabulary.
* `fused`: torch's kernels on CUDA. No scores, but keys and values repeated for every query head.
* `plain`: products and a softmax in float32, the probabilities kept, as torch does where no kernel fits (Apple's GPU).
* `xla`: that again, traced by PyTorch/XLA, which would keep the masked scores beside the probabilities. So attention is
  computed again, one layer's at a time. Of a layer with an adapter XLA keeps both summands instead of their sum.

`benchmarks/estimate.py` compares the sums with measured peaks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from qat_lora.models.load import DTYPES
from qat_lora.options import EstimateOptions
from qat_lora.plan.devices import Attention

PIECE_BYTES = 2 * 2**21
"""Wide logits of the walk through the vocabulary (`losses/fused/by_vocab`): the piece in work, and the one before."""


class Widths(NamedTuple):
    """Sizes of a token in a layer."""

    hidden: int
    mlp: int
    queries: int
    keys: int
    heads: int


class Weights(NamedTuple):
    """Weights of the quantised layers."""

    total: int
    largest: int
    """Of one layer's."""


def widths(config: Any) -> Widths:
    """Return hidden size, MLP width, and the sizes of a token's queries and keys in a layer."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    mlp = getattr(config, "intermediate_size", None) or 4 * hidden
    return Widths(
        hidden, mlp, heads * head_dim, head_dim * (getattr(config, "num_key_value_heads", None) or heads), heads
    )


def step_bytes(
    config: Any, options: EstimateOptions, attention: Attention, vocab: int, quantised: Weights
) -> dict[str, int]:
    """Return the bytes of a step beside what is held: `formed weights`, `activations`, `working memory`."""
    tokens, layers = options.batch_size * options.length, config.num_hidden_layers
    width, sizes = DTYPES[options.run.dtype].itemsize, widths(config)
    layer = _layer(config, options, attention)
    other = (4 + width) * sizes.hidden + width * options.length  # the last norm, and the mask
    formed = width * quantised.total if options.train_scales else 0
    backward = tokens * width * (3 * sizes.mlp + 2 * sizes.hidden)  # gradients of a layer's widest tensors
    if options.train_scales:  # a weight's gradient, and its product with the codes
        backward += 8 * quantised.largest
    again = _attention_again(config, options) if attention == "xla" else 0
    if options.gradient_checkpointing:  # a layer's input is kept, and one layer is computed again at a time
        kept = layers * width * sizes.hidden + other
        layer -= width * (sizes.queries + 2 * sizes.keys) if again else 0  # kept for attention alone
        backward += tokens * (
            layer + again - width * sizes.mlp
        )  # when there are three gradients, one that was kept is gone
        # XLA sees that a weight is formed twice from the same numbers, and keeps the first.
        formed //= 1 if attention == "xla" else layers
    else:
        kept, backward = layers * layer + other, max(backward, tokens * again)
    head = _head(options, attention, tokens, sizes.hidden, vocab)
    return {"formed weights": formed, "activations": tokens * kept, "working memory": max(head, backward)}


def _layer(config: Any, options: EstimateOptions, attention: Attention) -> int:
    """Return what autograd keeps of a layer for one token.

    With a frozen base a linear layer keeps its input only for its adapter's A, once for layers that share it, and
    the product A x; norms keep their input in float32.
    """
    width, (hidden, mlp, queries, keys, heads) = DTYPES[options.run.dtype].itemsize, widths(config)
    inputs = 2 * hidden + mlp + 7 * options.lora.recovery_r
    if attention == "tiled":  # the result twice: as computed, and with its heads side by side
        attended = width * (3 * queries + 2 * keys) + 4 * heads
    elif attention == "fused":  # queries, keys and values for every head, and the result
        attended = width * 4 * queries
    elif attention == "xla":  # queries, keys and values as they are, and the result; the rest is computed again
        attended = width * (2 * queries + 2 * keys)
    else:  # in float32 whatever the model computes in, with the scores beside them
        attended = 4 * (3 * queries + heads * options.length) + width * queries
    normed = queries + keys if "3" in config.model_type else 0  # Qwen3 and Gemma 3 norm both
    if attention == "xla":  # both halves of what base and adapter add up to, and the sigmoid
        return width * (inputs + 6 * mlp + 2 * normed) + attended + 4 * 2 * hidden
    return width * (inputs + 3 * mlp) + attended + 4 * (2 * hidden + normed)


def _attention_again(config: Any, options: EstimateOptions) -> int:
    """Return what attention that is computed again needs for one token: in float32, masked scores and probabilities."""
    _, _, queries, _, heads = widths(config)
    return 4 * (3 * queries + 2 * heads * options.length)


def _head(options: EstimateOptions, attention: Attention, tokens: int, hidden: int, vocab: int) -> int:
    """Return what the loss needs at once."""
    width = DTYPES[options.run.dtype].itemsize
    logits = min(options.loss_chunk_mb * 2**20, 4 * tokens * vocab)
    if (
        attention == "tiled"
    ):  # logits in the products' type; states, their gradient added up; ids and logits of the head
        return (
            logits * width // 4 + min(PIECE_BYTES, logits) + tokens * (hidden * (4 + 3 * width) + 48 * options.head_k)
        )
    # Logits and their gradient in float32, a copy in the products' type.
    return 2 * logits + (logits // 2 if width < 4 else 0) + tokens * hidden * (4 + width)

"""Attention on a TPU by a kernel that keeps scores in the chip's own memory: jax's splash attention.

Written as products, attention moves its float32 scores through HBM, 268 MB a layer for 4 rows of 1,024: half of all
that a micro-batch of Qwen3-0.6B moves. The splash kernel forms them tile by tile, skips tiles above the diagonal,
blocks other documents by segment ids and reads a key head once for all its query heads. torch_xla's own wrapper wants
equal numbers of heads and computes the forward pass again in every backward one; here the two kernels are called as
they are, and the log-sums go from one to the other. jax only lowers them, on the host, once for each shape.

Documents are contiguous, so the first position that each one sees tells all: the one that sees itself alone begins a
document, with a sliding window too. Under SPMD the compiler cannot cut a kernel, so each chip is given its rows.

Sources: jax 0.7.1 (which torch_xla 2.9 pins), experimental/pallas/ops/tpu/splash_attention; FlashAttention-2 (2023).
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qat_lora.types import Scores

LANES = 128  # numbers in a row of a TPU's registers: rows of tokens are cut at multiples of it
BLOCK_Q, BLOCK_KV = 512, 1024  # queries and keys of a tile at most
FUSED_LENGTH = 4096  # tokens up to which one backward kernel makes all gradients, queries' once for each block of keys
Call = Callable[[Any, Sequence[Tensor]], list[Tensor]]  # (computation on one chip's rows, [B, ...]) -> [B, ...]


def has_splash() -> bool:
    """Return whether jax is there to lower the kernel."""
    return importlib.util.find_spec("jax") is not None


class SplashAttention:
    """The forward and the backward kernel, called on the rows of each chip (`AttentionKernel` of `layers/`)."""

    def __init__(self, call: Call, replicas: int) -> None:
        self._call, self._replicas = call, replicas

    def __call__(self, query_BHLD: Tensor, key_BGLD: Tensor, scores: Scores) -> "SplashAttention | None":
        """Return itself for what it computes: bfloat16 (float32 scores need exact products), whole tiles, no cap."""
        rows, _, length, width = query_BHLD.shape
        is_exact = {query_BHLD.dtype, key_BGLD.dtype} == {torch.bfloat16} and scores.softcap is None
        return self if is_exact and not (length % LANES or width % 64 or rows % self._replicas) else None

    def outputs(self, query: Tensor, key: Tensor, value: Tensor, first_BL: Tensor, scores: Scores) -> Sequence[Tensor]:
        """Return the result [B, H, L, D] and the scores' log-sums, float32 [B, H, L]."""
        given = [query * scores.scale, key, value, _documents(first_BL)]
        output, log_sum = self._call(_lowered("forward", scores.window, self._shapes(given)), given)
        return output, log_sum

    def gradients(
        self, tensors: Sequence[Tensor], first_BL: Tensor, d_output: Tensor, scores: Scores
    ) -> Sequence[Tensor]:
        """Return the gradients: `tensors` are queries, keys, values, and what `outputs` returned."""
        query, key, value, *kept = tensors
        given = [query * scores.scale, key, value, _documents(first_BL), *kept, d_output]
        d_query, d_key, d_value = self._call(_lowered("backward", scores.window, self._shapes(given)), given)
        return d_query * scores.scale, d_key, d_value

    def _shapes(self, given: Sequence[Tensor]) -> tuple[tuple[tuple[int, ...], str], ...]:
        return tuple(((len(t) // self._replicas, *t.shape[1:]), str(t.dtype).removeprefix("torch.")) for t in given)


def _documents(first_BL: Tensor) -> Tensor:
    """Return each token's document, int32 [B, L], from the first position that each one sees."""
    own_L = torch.arange(first_BL.shape[1], device=first_BL.device)
    return (first_BL == own_L).to(torch.int32).cumsum(1, dtype=torch.int32)


@functools.lru_cache
def _lowered(which: str, window: int | None, shapes: tuple[tuple[tuple[int, ...], str], ...]) -> Any:
    """Return a kernel over a batch as a computation of XLA, lowered for TPUs."""
    import jax
    import torch_xla.core.xla_builder as xb

    jax.config.update("jax_platforms", "cpu")  # it only lowers here, and must not take the chip from torch_xla
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    run: Any = functools.partial(forward if which == "forward" else backward, window=window)
    lowered = jax.jit(run, keep_unused=True).trace(*given).lower(lowering_platforms=("tpu",))
    return xb.computation_from_module_proto(which, lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())


def forward(query: Any, key: Any, value: Any, documents: Any, window: int | None, interpret: bool = False) -> Any:
    """Return the result and the log-sums of jax arrays; queries are scaled already."""
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    def row(query: Any, key: Any, value: Any, document: Any) -> Any:
        kernel = _kernel(query.shape, window, save_residuals=True, interpret=interpret)
        output, (log_sum,) = kernel(query, key, value, splash.SegmentIds(document, document))
        return output, log_sum

    return jax.vmap(row)(query, key, value, documents)


def backward(query: Any, *others: Any, window: int | None, interpret: bool = False) -> Any:
    """Return gradients of scaled queries, of keys and values; `others` as `SplashAttention.gradients` gives them."""
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    def row(query: Any, key: Any, value: Any, document: Any, output: Any, log_sum: Any, d_output: Any) -> Any:
        kernel = _kernel(query.shape, window, interpret=interpret)
        ids = splash.SegmentIds(document, document)
        kept = (query, key, value, ids, None, output, log_sum, kernel.dq_mask_info, kernel.dkv_mask_info)
        return splash._splash_attention_bwd(res=kept, do=d_output, **kernel.kwargs)[3:6]

    return jax.vmap(row)(query, *others)


def _kernel(shape: tuple[int, ...], window: int | None, **how: Any) -> Any:
    """Return jax's kernel for queries [H, L, D]: its mask, tiles and settings; `how` as `make_splash_mha` has them."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    heads, length, _ = shape
    mask: Any = masks.CausalMask((length, length))
    if window is not None and window < length:
        mask = masks.LocalMask((length, length), (window - 1, 0), 0)
    queries, keys = (_divisor(length, most) for most in (BLOCK_Q, BLOCK_KV))
    is_fused = length <= FUSED_LENGTH
    of_queries = dict.fromkeys(("block_q", "block_q_dkv", *(() if is_fused else ("block_q_dq",))), queries)
    of_keys = dict.fromkeys(("block_kv", "block_kv_dkv", *(() if is_fused else ("block_kv_dq",))), keys)
    inner = dict.fromkeys(("block_kv_compute", "block_kv_dkv_compute"), _divisor(keys, BLOCK_Q))
    sizes = splash.BlockSizes(**of_queries, **of_keys, **inner, use_fused_bwd_kernel=is_fused)
    every = masks.MultiHeadMask([mask] * heads)
    return splash.make_splash_mha(every, block_sizes=sizes, head_shards=1, q_seq_shards=1, **how)


def _divisor(length: int, most: int) -> int:
    """Return the largest multiple of LANES up to `most` that divides a length."""
    return max(size for size in range(LANES, min(most, length) + 1, LANES) if length % size == 0)

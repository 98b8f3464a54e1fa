"""Attention that keeps no scores for the backward pass: in tiles of queries on CPUs, in a few large blocks under XLA.

Documents are contiguous and all attention is causal, so one number a token says what it sees: everything from its
`first` position to its own. No mask of L x L is made, 4 GB for a row of 32,768: torch's own kernel, where it is used,
gets that of a block of queries at a time. Given a 2-D mask or none, transformers would inspect it on the host in each
forward, which stops an XLA device. So `attention_inputs` builds what every token sees in the graph, from document ids;
transformers' models pass the numbers on unread, as they have the shape of a finished mask: int32 [B, 1, 1, L].

torch's fused attention for CPUs wants that mask, with which it also multiplies the blocked half of the scores. Here a
tile of queries of one row, for all query heads of one key head, meets the keys from the begin of its document (or
window) up to its own end in one product; the backward pass forms the tile's probabilities again. Scores are float32
whatever the model computes in: bfloat16 ones are five times as far off. torch's kernel called for each document by
itself was measured too (AVX-512, rows of 512, 9 / 3 heads of 64 and 16 / 8 of 128): it takes 1.1 to 1.5 times as long
for one document a row, the same for 4, three quarters for 16, and with gradients 1.3 to 2.8 times as long at each.
Softmax, since `exp` of MKL is slow where it underflows, as at masked scores. Under PyTorch/XLA small tiles make a long
graph, writes in place copies (`blocked_attention`).

Devices with a compiler of their own kernels (CUDA) take FlexAttention, as a mask in memory rules out torch's flash
kernels. Its *block mask* says which tiles of 128 x 128 scores hold anything, which are whole, and a rule for the rest:
documents, windows and causality become tiles never visited. Variable-length flash attention would count on the host.

Sources: FlashAttention-2 (Dao, 2023), Algorithms 1 and 2, without its tiles of keys; FlexAttention (arXiv 2412.05496).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from qat_lora.errors import ModelError
from qat_lora.types import Scores

TILE = 64  # queries of a tile: smaller ones repack the keys more often, larger ones compute more that the mask blocks


def tiled_attention(
    query_BHLD: Tensor, key_BGLD: Tensor, value_BGLE: Tensor, first_BL: Tensor, scores: Scores
) -> Tensor:
    """Return the attention of every query head to its key head, [B, H, L, E]: H is a multiple of G.

    `first_BL` is the first position that each sees; under autocast scores stay float32.
    """
    key, value = key_BGLD.to(query_BHLD.dtype), value_BGLE.to(query_BHLD.dtype)
    output: Tensor = _Attention.apply(query_BHLD, key, value, first_BL, (scores, compute_anew, _Tiles()))
    return output


def dense_mask(first_B11L: Tensor, dtype: torch.dtype, rows: slice = slice(None), keys: slice = slice(None)) -> Tensor:
    """Return first positions as an additive mask, [B, 1, L, L], or that of some queries and keys."""
    own = torch.arange(first_B11L.shape[-1], device=first_B11L.device)
    seen = (own[keys] >= first_B11L[..., rows].mT) & (own[keys] <= own[rows, None])
    blocked = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=seen.device)
    return torch.where(seen, torch.zeros_like(blocked), blocked)


def tiled_or(otherwise: Callable[..., Any], attention: Callable[..., Tensor] = tiled_attention) -> Callable[..., Any]:
    """Return an attention function for transformers: ours for first positions; ModelError: with dropout or sinks."""

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **others: Any) -> Any:
        if not isinstance(attention_mask, Tensor) or attention_mask.dtype != torch.int32:
            return otherwise(module, query, key, value, attention_mask, **others)
        if others.get("dropout") or others.get("s_aux") is not None:
            raise ModelError(f"model: attention with dropout or sinks, as of {type(module).__name__}, is not supported")
        scores = Scores(others["scaling"], others.get("sliding_window"), others.get("softcap"))
        return attention(query, key, value, attention_mask[:, 0, 0], scores).transpose(1, 2), None

    return attend


def library_or_blocked(library: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function for transformers: its own, a block of queries at a time, or `blocked_attention`.

    The latter computes what needs gradients, since every block's mask would be kept for them, and capped scores.
    """
    blocked = tiled_or(library, blocked_attention)

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **others: Any) -> Any:
        is_first = isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.int32
        if not is_first or torch.is_grad_enabled() or others.get("softcap") is not None:
            return blocked(module, query, key, value, attention_mask, **others)
        outputs, window = [], others.get("sliding_window") or query.shape[2]
        for rows in _slices(query.shape[2], BLOCK):
            keys = slice(max(0, rows.start - window + 1), rows.stop)
            mask = dense_mask(attention_mask, query.dtype, rows, keys)
            outputs.append(library(module, query[:, :, rows], key[:, :, keys], value[:, :, keys], mask, **others)[0])
        return torch.cat(outputs, 1), None

    return attend


BLOCK = 512  # queries of a block: more keep more scores at a time, fewer make a longer graph
BLOCKED_SCORE = -1e30  # of a position that is not seen; finite, since infinities less infinities are no numbers
# `Runtime.kept`: (computation, how many results) -> its results, without computing them a second time.
Keep = Callable[[Callable[[], tuple[Tensor, ...]], int], tuple[Tensor, ...]]


def compute_anew(computation: Callable[[], tuple[Tensor, ...]], _count: int) -> tuple[Tensor, ...]:
    """Return the results of a computation, of which a recomputed layer makes them a second time: a `Keep`."""
    return computation()


Outputs = tuple[Tensor, Tensor]  # the result [B, H, L, D], and what the gradients need of the scores
Gradients = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values


class AttentionMethod(Protocol):
    """What computes attention and its gradients."""

    def outputs(self, query: Tensor, key: Tensor, value: Tensor, first_BL: Tensor, scores: Scores) -> Outputs:
        """Return the outputs; `first_BL` is the first position that each sees."""

    def gradients(self, tensors: Sequence[Tensor], first_BL: Tensor, d_output: Tensor, scores: Scores) -> Gradients:
        """Return the gradients; `tensors` are queries, keys and values, and what `outputs` returned."""


# A device's own (`runtime/xla/splash.py`): (queries, keys, scores) -> whether, and how, it computes these.
AttentionKernel = Callable[[Tensor, Tensor, Scores], AttentionMethod | None]


class _Blocks:
    """R: query heads of a key head. C: queries of a block. E: keys up to its end. M: R C."""

    def outputs(self, query: Tensor, key: Tensor, value: Tensor, first_BL: Tensor, scores: Scores) -> Outputs:
        """Return the result and the scores' log-sums, [B, G, R, L, 1]."""
        query_BGRLD = query.unflatten(1, (key.shape[1], -1))
        outputs, log_sums = [], []
        for rows in _slices(query.shape[2], BLOCK):
            score_BGME = _block_scores(query_BGRLD, key, first_BL, scores, rows)
            top_BGM1 = score_BGME.amax(-1, keepdim=True)
            share_BGME = (score_BGME - top_BGM1).exp().to(value.dtype)
            sum_BGM1 = share_BGME.float().sum(-1, keepdim=True)
            product_BGMD = _product(share_BGME, value[:, :, : rows.stop]) / sum_BGM1
            split = (query_BGRLD.shape[2], -1)
            outputs.append(product_BGMD.to(value.dtype).unflatten(2, split))
            log_sums.append((top_BGM1 + sum_BGM1.log()).unflatten(2, split))
        return torch.cat(outputs, 3).flatten(1, 2), torch.cat(log_sums, 3)

    def gradients(self, tensors: Sequence[Tensor], first_BL: Tensor, d_output: Tensor, scores: Scores) -> Gradients:
        query, key, value, output, log_sum = tensors
        split = (key.shape[1], -1)
        query_BGRLD, d_output_BGRLD = query.unflatten(1, split), d_output.unflatten(1, split)
        pull_BGRL1 = (d_output.float() * output.float()).sum(-1, keepdim=True).unflatten(1, split)
        d_queries: list[Tensor] = []
        d_key, d_value = torch.zeros_like(key, dtype=torch.float32), torch.zeros_like(value, dtype=torch.float32)
        for rows in _slices(query.shape[2], BLOCK):
            keys, rest = slice(rows.stop), (0, 0, 0, key.shape[2] - rows.stop)
            query_BGMD, d_out_BGMD, log_sum_BGM1, pull_BGM1 = (
                tensor[:, :, :, rows].flatten(2, 3) for tensor in (query_BGRLD, d_output_BGRLD, log_sum, pull_BGRL1)
            )
            # Keys first: so two of the three products read what is formed here as it is.
            score_BGEM = _block_scores(query_BGRLD, key, first_BL, scores, rows).mT
            share_BGEM = (score_BGEM - log_sum_BGM1.mT).exp()
            d_share_BGEM = _product(value[:, :, keys], d_out_BGMD.mT)
            d_score_BGEM = (share_BGEM * (d_share_BGEM - pull_BGM1.mT) * scores.slope(score_BGEM)).to(query.dtype)
            d_query_BGMD = _product(d_score_BGEM.mT, key[:, :, keys]).to(query.dtype)
            d_queries.append(d_query_BGMD.unflatten(2, (query_BGRLD.shape[2], -1)))
            d_key = d_key + nn.functional.pad(_product(d_score_BGEM, query_BGMD), rest)
            d_value = d_value + nn.functional.pad(_product(share_BGEM.to(value.dtype), d_out_BGMD), rest)
        return torch.cat(d_queries, 3).flatten(1, 2), d_key.to(key.dtype), d_value.to(value.dtype)


def blocked_attention(
    query_BHLD: Tensor,
    key_BGLD: Tensor,
    value_BGLE: Tensor,
    first_BL: Tensor,
    scores: Scores,
    *,
    keep: Keep = compute_anew,
    kernel: AttentionKernel | None = None,
) -> Tensor:
    """Return what `tiled_attention` does in few, large blocks without writes in place, or by a kernel that fits."""
    own = kernel and key_BGLD.shape == value_BGLE.shape and kernel(query_BHLD, key_BGLD, scores)
    output: Tensor = _Attention.apply(query_BHLD, key_BGLD, value_BGLE, first_BL, (scores, keep, own or _Blocks()))
    return output


_How = tuple[Scores, Keep, AttentionMethod]


class _Attention(torch.autograd.Function):
    """Attention by any method, whose results are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, first_BL: Tensor, how: _How) -> Tensor:
        scores, keep, method = how

        def compute() -> tuple[Tensor, Tensor]:
            with torch.autocast(query.device.type, enabled=False):  # which would round the scores
                return method.outputs(query, key, value, first_BL, scores)

        output, log_sum = keep(compute, 2)
        ctx.save_for_backward(query, key, value, first_BL, output, log_sum)
        ctx.method, ctx.scores = method, scores
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, first_BL, output, log_sum = ctx.saved_tensors
        with torch.autocast(d_output.device.type, enabled=False):
            tensors = query, key, value, output, log_sum
            gradients = ctx.method.gradients(tensors, first_BL, d_output, ctx.scores)
        return *gradients, None, None


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return a product in float32; the chip multiplies numbers that were bfloat16 as such, and adds in float32."""
    return torch.matmul(left.float(), right.float())


def _block_scores(query_BGRLD: Tensor, key: Tensor, first_BL: Tensor, scores: Scores, rows: slice) -> Tensor:
    """Return a block's masked scores in float32, [B, G, M, E]."""
    heads, keys = query_BGRLD.shape[2], torch.arange(rows.stop, device=key.device)
    first_BM, own_M = first_BL[:, rows].repeat(1, heads), keys[rows].repeat(heads)
    score_BGME = scores.of(_product(query_BGRLD[:, :, :, rows].flatten(2, 3), key[:, :, : rows.stop].mT))
    allowed_BME = (keys >= first_BM[:, :, None]) & (keys <= own_M[:, None])
    return score_BGME.masked_fill(~allowed_BME[:, None], BLOCKED_SCORE)


class _Tiles:
    """A row at a time. G: key heads. R: query heads of a key head. C: queries of a tile. E: keys it meets. M: R C."""

    def outputs(self, query: Tensor, key: Tensor, value: Tensor, first_BL: Tensor, scores: Scores) -> Outputs:
        """Return the result, and nothing of the scores: their softmax is as cheap as what their log-sums would save."""
        batch, heads, length, _ = query.shape
        query_BGRLD, wide_BGLD, value_BGLE = query.unflatten(1, (key.shape[1], -1)), _wide(key), value.contiguous()
        output = query.new_empty(batch, length, heads, value.shape[3]).transpose(1, 2)  # as the next layer reads it
        output_BGRLE = output.unflatten(1, (key.shape[1], -1))
        for tile in _tiles(first_BL, query.shape):
            share_GRCE = torch.softmax(_tile_scores(query_BGRLD, wide_BGLD, first_BL, scores, tile), -1)
            share_GME = share_GRCE.to(query.dtype).flatten(1, 2)
            product_GMD = torch.bmm(share_GME, value_BGLE[tile.row, :, tile.keys])
            output_BGRLE[tile.row, :, :, tile.queries] = product_GMD.unflatten(1, share_GRCE.shape[1:3])
        return output, query.new_empty(0)

    def gradients(self, tensors: Sequence[Tensor], first_BL: Tensor, d_output: Tensor, scores: Scores) -> Gradients:
        query, key, value, output, _ = tensors
        split = (key.shape[1], -1)
        query_BGRLD, d_output_BGRLE = query.unflatten(1, split), d_output.unflatten(1, split)
        wide_BGLD, key, value = _wide(key), key.contiguous(), value.contiguous()
        pull_BGRL1 = (d_output.float() * output).sum(-1, keepdim=True).unflatten(1, split)
        d_query = torch.empty_like(query)
        d_query_BGRLD = d_query.unflatten(1, split)
        d_key, d_value = torch.zeros_like(key, dtype=torch.float32), torch.zeros_like(value, dtype=torch.float32)
        for tile in _tiles(first_BL, query.shape):
            row, queries, keys = tile
            score_GRCE = _tile_scores(query_BGRLD, wide_BGLD, first_BL, scores, tile)
            slope = scores.slope(score_GRCE)
            share_GRCE = torch.softmax(score_GRCE, -1)
            d_out_GME, query_GMD = (of[row, :, :, queries].flatten(1, 2) for of in (d_output_BGRLE, query_BGRLD))
            share_GME = share_GRCE.to(query.dtype).flatten(1, 2)
            d_value[row, :, keys] += torch.bmm(share_GME.mT, d_out_GME)
            d_share_GRCE = torch.bmm(d_out_GME, value[row, :, keys].mT).unflatten(1, share_GRCE.shape[1:3])
            d_score_GRCE = share_GRCE.mul_(d_share_GRCE - pull_BGRL1[row, :, :, queries]).mul_(slope)
            d_score_GME = d_score_GRCE.to(query.dtype).flatten(1, 2)
            d_query_GMD = torch.bmm(d_score_GME, key[row, :, keys])
            d_query_BGRLD[row, :, :, queries] = d_query_GMD.unflatten(1, share_GRCE.shape[1:3])
            d_key[row, :, keys] += torch.bmm(d_score_GME.mT, query_GMD)
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype)


class _Tile(NamedTuple):
    row: int
    queries: slice
    keys: slice


def _tiles(first_BL: Tensor, shape: Sequence[int]) -> Iterator[_Tile]:
    """Yield the tiles of queries [B, H, L, D], each with the keys from the first that its first query sees.

    What a row's tiles are follows from this row alone: so its last bit does not depend on its batch. Keys begin at a
    tile too: products come in few shapes, of which oneDNN prepares each when it is new.
    """
    batch, _, length, _ = shape
    for row, firsts in enumerate(first_BL[:, ::TILE].expand(batch, -1).tolist()):
        for first, queries in zip(firsts, _slices(length, TILE), strict=True):
            yield _Tile(row, queries, slice(first // TILE * TILE, queries.stop))


def _wide(key: Tensor) -> Tensor:
    return key.float().contiguous()


def _tile_scores(query_BGRLD: Tensor, wide_BGLD: Tensor, first_BL: Tensor, scores: Scores, tile: _Tile) -> Tensor:
    """Return a tile's masked scores in float32, [G, R, C, E]."""
    row, queries, keys = tile
    query_GRCD = query_BGRLD[row, :, :, queries].float()
    score_GME = scores.of(torch.bmm(query_GRCD.flatten(1, 2), wide_BGLD[row, :, keys].mT))
    own_E = torch.arange(keys.start, keys.stop)
    first_C1 = first_BL[row % len(first_BL), queries, None]
    unseen_CE = (own_E < first_C1) | (own_E > own_E[queries.start - keys.start :, None])
    mask_CE = torch.zeros(unseen_CE.shape).masked_fill_(unseen_CE, BLOCKED_SCORE)
    return score_GME.unflatten(1, query_GRCD.shape[1:3]).add_(mask_CE)  # adding takes half the time of filling


MASK_TILE = 128  # tokens on either side of a tile; rows of other lengths than multiples have no block mask


def document_block_mask(first_BL: Tensor) -> BlockMask:
    """Return packed rows' block mask, reading nothing back; L is a multiple of `MASK_TILE`, `first` never falls."""
    length = first_BL.shape[1]
    tile = torch.arange(length // MASK_TILE, device=first_BL.device)
    begin_BQ, end_BQ = first_BL[:, ::MASK_TILE] // MASK_TILE, first_BL[:, MASK_TILE - 1 :: MASK_TILE]
    seen_BQK = (tile >= begin_BQ[:, :, None]) & (tile <= tile[:, None])
    whole_BQK = (tile * MASK_TILE >= end_BQ[:, :, None]) & (tile < tile[:, None])

    def rule(row: Tensor, _of_head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (key >= first_BL[row, query])

    tiles = *_listed((seen_BQK & ~whole_BQK)[:, None]), *_listed(whole_BQK[:, None])  # those in part, and whole ones
    return BlockMask.from_kv_blocks(*tiles, BLOCK_SIZE=MASK_TILE, mask_mod=rule, seq_lengths=(length, length))


def _listed(tiles_B1QK: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many tiles each row of tiles has, and the numbers of these first."""
    marks = tiles_B1QK.to(torch.int32)
    return marks.sum(-1, dtype=torch.int32), marks.argsort(dim=-1, descending=True, stable=True).to(torch.int32)


def flex_or(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function for transformers: FlexAttention for a block mask, else `otherwise`."""

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **others: Any) -> Any:
        if not isinstance(attention_mask, BlockMask) or others.get("dropout"):
            return otherwise(module, query, key, value, attention_mask, **others)
        how: dict[str, Any] = {"scale": others.get("scaling"), "enable_gqa": query.shape[1] != key.shape[1]}
        if (softcap := others.get("softcap")) is not None:
            how["score_mod"] = lambda score, *_at: softcap * torch.tanh(score / softcap)
        output: Any = flex_attention(query, key, value, block_mask=attention_mask, **how)
        return output.transpose(1, 2), None

    return attend


MaskForm = Literal["first", "blocks", "dense"]
# Kinds of layers that carry a state from token to token (`layers/recurrent.py`), and need no mask.
STATEFUL = {"linear_attention", "conv", "hybrid"}


def attention_inputs(config: Any, document_ids_BL: Tensor, dtype: torch.dtype, form: MaskForm) -> tuple[Any, Tensor]:
    """Return attention masks and positions for packed rows, without reading anything back.

    A mask holds first positions [B, 1, 1, L], is additive [B, 1, L, L], or a block mask; where the model mixes kinds of
    layers there is one for each. Positions count a document's earlier tokens. ModelError: an unsupported kind.
    """
    begin_BL, own_L = document_begins(document_ids_BL)

    def make(window: int | None) -> Any:
        first_BL = begin_BL if window is None else torch.maximum(begin_BL, own_L - window + 1)
        if form == "blocks" and first_BL.shape[1] % MASK_TILE == 0:
            return document_block_mask(first_BL)
        return dense_mask(first_BL[:, None, None], dtype) if form == "dense" else first_BL[:, None, None]

    return _by_kind(config, make), own_L - begin_BL


def document_begins(document_ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each token's document begins, by a running maximum of doublings, int32 [B, L], and positions [L]."""
    length = document_ids_BL.shape[1]
    own_L = torch.arange(length, dtype=torch.int32, device=document_ids_BL.device)
    is_begin = torch.nn.functional.pad(document_ids_BL[:, 1:] != document_ids_BL[:, :-1], (1, 0))
    begin_BL, reach = own_L * is_begin, 1
    while reach < length:
        begin_BL = torch.maximum(begin_BL, torch.nn.functional.pad(begin_BL[:, :-reach], (reach, 0)))
        reach *= 2
    return begin_BL, own_L


def step_masks(config: Any, position_1: Tensor, length: int, dtype: torch.dtype, pad_B: Tensor | None = None) -> Any:
    """Return additive masks [B or 1, 1, 1, L] of one token at a position, by kind of layers; `pad_B` are unseen."""
    distance_L = position_1 - torch.arange(length, device=position_1.device)

    def make(window: int | None) -> Tensor:
        seen_L = (distance_L >= 0) & (distance_L < (length if window is None else window))
        seen_BL = seen_L[None] if pad_B is None else seen_L & (position_1 - distance_L >= pad_B[:, None])
        return torch.where(seen_BL, 0.0, torch.finfo(dtype).min).to(dtype)[:, None, None]

    return _by_kind(config, make)


def keeps_state(config: Any) -> bool:
    """Return whether some layers carry a state from token to token."""
    return bool(STATEFUL & set(getattr(config, "layer_types", None) or ()))


def _by_kind(config: Any, make: Callable[[int | None], Any]) -> Any:
    """Return what `make` makes of the window of a kind of layers; by kind where there are several."""
    window: Any = getattr(config, "sliding_window", None)
    # Mistral, Mixtral, Phi 3 and Starcoder 2 name no kinds: with a window, all their layers slide.
    one_kind = "full_attention" if window is None else "sliding_attention"
    kinds = set(getattr(config, "layer_types", None) or [one_kind])
    unknown = kinds - {"full_attention", "sliding_attention"} - STATEFUL
    if unknown:
        raise ModelError(f"model: attention of kind {', '.join(sorted(unknown))} is not supported")
    if "hybrid" in kinds:  # layers that have both
        kinds |= {"full_attention", "linear_attention"}
    is_sliding = {"sliding_attention": None if window is None else int(window)}
    masks = {kind: None if kind in STATEFUL else make(is_sliding.get(kind)) for kind in kinds}
    return masks if len(masks) > 1 else next(iter(masks.values()))

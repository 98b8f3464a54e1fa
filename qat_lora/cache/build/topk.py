"""What is kept of a position's logits: the K largest, sums at each temperature, draws. Tensors only, on any device.

Ranking, softmax and sums over 151,936 entries cost as much as the forward of a 0.6 B teacher. Two things make that a
few per cent: only the K groups of entries with the largest maxima are ranked, and on a device with a small cache
(`piece_bytes`) all passes over a few positions follow one another. The tail's sum runs over the tail alone, relative to
its own largest entry: as 1 - Σ of the top K it would be rounding noise wherever it is small, which is the usual case.

Tokens are drawn from the tail (estimator `hybrid`) or the whole teacher (`sampled`). A draw is a pure function of seed,
row and probabilities, so that a resumed build stores the same, which a device's own random numbers would not. With
draws from the tail comes their `tail_entropy`, which makes a KL of their cross-entropy. It is -m/D Σ log t(d) of the
draws themselves: Σ t log t over the tail has the same mean, but costs a pass, and the noise of log t would stay.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qat_lora.data.packing import PackedRow
from qat_lora.runtime.xla.runtime import is_xla_device
from qat_lora.types import temperature_key

_RANKED = 24  # entries for each one wanted up to which ranking all of them is quicker than dividing them up
Uniforms = Mapping[str, Tensor]  # random numbers [N, D, 2] for `tail_draw_ids` and `draw_ids`, where they are drawn


def top_k_entries(logits_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of each row and their int64 indices, largest first, as `torch.topk` does.

    The vocabulary is divided into groups; the K largest are all in the K groups with the largest maxima. Not on XLA:
    there groups are gathered one scalar at a time, 4,000 a position, and a TPU's compiler has a ranking of its own.
    """
    return _largest(logits_NV, k, in_order=True)


def _largest(logits_NV: Tensor, k: int, in_order: bool) -> tuple[Tensor, Tensor]:
    """Return the k largest entries, `in_order` or not: the groups of the largest need none."""
    count, vocab = logits_NV.shape
    if vocab < _RANKED * k or is_xla_device(logits_NV):
        return torch.topk(logits_NV, k, dim=-1, sorted=in_order)
    size = math.isqrt(vocab // (2 * k))
    groups = vocab // size
    # Group g holds the entries g, g + groups, ...: so its largest is found by whole vectors.
    maxima_NG = logits_NV[:, : size * groups].unflatten(1, (size, groups)).amax(1)
    chosen_NK = _largest(maxima_NG, k, in_order=False)[1]
    steps_S1 = groups * torch.arange(size, device=logits_NV.device)[:, None]
    rest = torch.arange(size * groups, vocab, device=logits_NV.device).expand(count, -1)
    indices = torch.cat([(chosen_NK[:, None] + steps_S1).flatten(1), rest], 1)
    values, places = _largest(logits_NV.gather(1, indices), k, in_order)
    return values, indices.gather(1, places)


def sparse_arrays(
    logits_NV: Tensor, top_k: int, temperatures: Sequence[float], uniforms: Uniforms, piece_bytes: int | None = None
) -> dict[str, Tensor]:
    """Return what is kept of logits, which may be overwritten, `piece_bytes` of float32 at a time; K is 0 for draws."""
    vocab = logits_NV.shape[-1]
    if piece_bytes is None:
        return _piece(logits_NV.float(), top_k, temperatures, uniforms)
    rows = min(len(logits_NV), max(1, piece_bytes // (4 * vocab)))
    # Two buffers for all pieces: fresh memory costs a page fault for every 4 kB, more than what is done in it.
    copy_RV, weights_RV = (logits_NV.new_empty(rows, vocab, dtype=torch.float32) for _ in ("logits", "weights"))
    pieces = []
    for start in range(0, len(logits_NV), rows):
        part_RV = logits_NV[start : start + rows]
        count = len(part_RV)
        numbers = {name: values[start : start + rows] for name, values in uniforms.items()}
        part_RV = part_RV if part_RV.dtype == torch.float32 else copy_RV[:count].copy_(part_RV)
        pieces.append(_piece(part_RV, top_k, temperatures, numbers, weights_RV[:count]))
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _piece(
    logits_NV: Tensor, top_k: int, temperatures: Sequence[float], uniforms: Uniforms, weights_NV: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the arrays of a piece; `weights_NV` is scratch memory."""
    arrays = {"draw_ids": draw(logits_NV, uniforms["draw_ids"])} if "draw_ids" in uniforms else {}
    if "entropy" in uniforms:
        logs_NV = torch.log_softmax(logits_NV, dim=-1)
        arrays["entropy"] = -(logs_NV.exp() * logs_NV.clamp(min=-1e4)).sum(-1)
    if not top_k:
        return arrays
    vocab = logits_NV.shape[-1]
    ranked, indices = top_k_entries(logits_NV, min(top_k + 1, vocab))  # one more: the tail's largest
    topk_NK, ids_NK = ranked[:, :top_k], indices[:, :top_k].contiguous()
    shifted_NK = topk_NK - topk_NK[:, :1]
    arrays |= {"head_ids": ids_NK.to(torch.int32), "head_logits": shifted_NK}
    largest_N1 = ranked[:, -1:] if top_k < vocab else torch.full_like(ranked[:, -1:], -torch.inf)
    tail_NV = logits_NV.scatter_(-1, ids_NK, -torch.inf)
    for temperature in temperatures:
        # softmax and not exp: on a CPU it costs half of the subtraction and the exp that it takes the place of. What
        # its rounding leaves out of one, the sum puts back.
        softened_NV = tail_NV if temperature == 1.0 else tail_NV / temperature
        weights_NV = torch.softmax(softened_NV, dim=-1, out=weights_NV)
        masses_NG = block_masses(weights_NV)
        if temperature == 1.0 and "tail_draw_ids" in uniforms:
            arrays["tail_draw_ids"] = _draw(weights_NV, masses_NG, uniforms["tail_draw_ids"])
        log_sum_N = (masses_NG.sum(-1) / weights_NV.gather(-1, indices[:, -1:])[:, 0]).log()
        log_tail_N = (largest_N1 - topk_NK[:, :1])[:, 0] / temperature + log_sum_N
        log_tail_N = torch.where(largest_N1[:, 0] == -torch.inf, -torch.inf, log_tail_N)
        # Not logaddexp, whose last bit depends on the place in the vector: a resumed build must give the same bytes.
        lse_N = torch.logsumexp(torch.cat([shifted_NK / temperature, log_tail_N[:, None]], 1), dim=-1)
        if temperature == 1.0 and "tail_draw_ids" in arrays:
            # -m/D Σ log t(d), d drawn: so the draws' cross-entropy less this is m/D Σ log (t/p), 0 at p = t.
            mass_N = (log_tail_N - lse_N).exp()
            log_t_ND = tail_NV.gather(-1, arrays["tail_draw_ids"].long()) - topk_NK[:, :1] - lse_N[:, None]
            tail_entropy_N = -mass_N * log_t_ND.mean(-1)
            arrays["tail_entropy"] = torch.where(mass_N > 0, tail_entropy_N, torch.zeros_like(mass_N))
        arrays[temperature_key("lse", temperature)] = lse_N
        arrays[temperature_key("log_tail", temperature)] = log_tail_N - lse_N
    return arrays


def draw(log_weights_NV: Tensor, uniforms_ND2: Tensor) -> Tensor:
    """Draw tokens int32 [N, D] with repetition, in proportion to exp(log_weights): float32, -inf for none."""
    largest_N1 = log_weights_NV.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    return draw_weighted(torch.exp(log_weights_NV - largest_N1), uniforms_ND2)


def draw_weighted(weights_NV: Tensor, uniforms_ND2: Tensor) -> Tensor:
    """Draw tokens int32 [N, D] with repetition, in proportion to weights of which the largest is 1; 0 without any.

    Two numbers in [0, 1) a draw invert the cumulative distribution in two steps: a block of about √V tokens, then a
    token of it. One float32 cumulative sum over 151,936 tokens errs by 1e-4 of the whole, and one 24-bit number cannot
    tell apart tokens below 6e-8; sums of 390 numbers are exact to 1e-6. Gumbel noise would need V numbers a draw.
    """
    return _draw(weights_NV, block_masses(weights_NV), uniforms_ND2)


def block_masses(weights_NV: Tensor) -> Tensor:
    """Return the sums of weights in blocks of about √V tokens, [N, G]."""
    blocks_NGS, rest_NS = _blocks(weights_NV)
    masses_NG = blocks_NGS.sum(-1)
    return torch.cat([masses_NG, rest_NS.sum(-1, keepdim=True)], 1) if rest_NS.shape[1] else masses_NG


def _blocks(weights_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the whole blocks, [N, G, S], and what is left of the vocabulary behind them: views, no copies."""
    vocab_size = weights_NV.shape[-1]
    width = math.isqrt(vocab_size - 1) + 1 if vocab_size > 1 else 1
    whole = vocab_size // width * width
    return weights_NV[:, :whole].unflatten(1, (-1, width)), weights_NV[:, whole:]


def _draw(weights_NV: Tensor, masses_NG: Tensor, uniforms_ND2: Tensor) -> Tensor:
    blocks_NGS, rest_NS = _blocks(weights_NV)
    count, width = blocks_NGS.shape[1:]
    block_ND = _invert(masses_NG.cumsum(-1)[:, None], uniforms_ND2[..., 0])
    chosen_NDS = blocks_NGS.gather(1, block_ND.clamp(max=count - 1)[..., None].expand(-1, -1, width))
    if rest_NS.shape[1]:
        last_N1S = torch.nn.functional.pad(rest_NS, (0, width - rest_NS.shape[1]))[:, None]
        chosen_NDS = torch.where(block_ND[..., None] == count, last_N1S, chosen_NDS)
    drawn_ND = block_ND * width + _invert(chosen_NDS.cumsum(-1), uniforms_ND2[..., 1])
    return torch.where(masses_NG.sum(-1, keepdim=True) > 0, drawn_ND, 0).to(torch.int32)


def _invert(cumulative: Tensor, uniform_ND: Tensor) -> Tensor:
    """Return the first index at which a cumulative sum [N, 1 or D, n] exceeds a part of its end."""
    # Counted, not searched: every device counts, and no entry without weight is the first to exceed anything.
    return (cumulative <= uniform_ND[..., None] * cumulative[..., -1:]).sum(-1).clamp(max=cumulative.shape[-1] - 1)


def row_uniforms(
    seed: int, name: str, rows: Sequence[PackedRow], shape: tuple[int, int, int], stratified: bool = False
) -> np.ndarray:
    """Return the random numbers of some rows: float32 [batch_rows, L-1, D, 2] in [0, 1); rows not given get 0.

    They depend on the tokens, not on the row's number, since several builders count their own rows, and not on a
    generator's state, since a resumed build would have to replay it. `name`: the array's; `shape`: batch_rows, L and D.
    Each of D `stratified` draws is distributed as an independent one, but together they vary less (12 draws: by 43 %):
    the i-th finds its block of tokens by (i + u)/D, its token in it by golden-ratio steps.
    """
    batch_rows, length, draws = shape
    numbers = np.zeros((batch_rows, length - 1, draws, 2), np.float32)
    for place, row in enumerate(rows):
        tokens = row.input_ids.astype("<i4").tobytes() + row.doc_starts.astype("u1").tobytes()
        key = np.frombuffer(hashlib.sha256(f"{seed}/{name}/".encode() + tokens).digest()[:16], "<u8")
        raw = np.random.Philox(key=key).random_raw(numbers[place].size)  # NumPy keeps raw streams as they are
        uniform = ((raw >> np.uint64(40)) * 2.0**-24).reshape(numbers[place].shape)
        if stratified:
            steps = uniform[:, :1] * (1 / draws, 1) + np.arange(draws)[:, None] * (1 / draws, (5**0.5 - 1) / 2)
            uniform = np.minimum(steps % 1, 1 - 2.0**-24)
        numbers[place] = uniform
    return numbers


def position_weights(targets_BP: Any, entropy_BP: Any, share: float, uniforms_B: Any) -> np.ndarray:
    """Return weights float32 [B, P] for a loss over a share of the targets that is unbiased: 1/p where drawn, else 0.

    p, equal for all or in proportion to entropy and a tenth of the row's mean, is at most 1. Rows draw equally many.
    """
    chances = targets_BP.astype(np.float64)
    wanted_B1 = share * chances.sum(-1, keepdims=True)
    if entropy_BP is not None:
        chances *= entropy_BP + 0.1 * entropy_BP.mean(-1, keepdims=True) + 1e-9
    chances /= np.maximum(chances.max(-1, keepdims=True), 1e-30)
    for _ in range(20):  # what is cut off at 1 goes to the others
        chances = np.minimum(1, chances * wanted_B1 / np.maximum(chances.sum(-1, keepdims=True), 1e-30))
    weights = np.maximum(1, (1 / np.maximum(chances, 1e-4)).astype(np.float16)).astype(np.float64)
    steps = np.floor(np.cumsum(targets_BP / weights, axis=-1) + uniforms_B[:, None])
    return np.where(np.diff(steps, prepend=0, axis=-1) > 0, weights, 0).astype(np.float32)

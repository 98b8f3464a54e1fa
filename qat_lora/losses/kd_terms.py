"""From a batch to terms: which arrays an estimator reads, and the teacher's log-probabilities made of them.

| estimator | reads | flag of `cache build` |
|---|---|---|
| ghost, renorm, reverse | top K and tail mass | (always there, but for `--top-k 0`) |
| hybrid | the same, and draws from the tail | `--tail-draws D` |
| sampled | draws from the whole teacher | `--draws D` |
| full | last hidden states, and the teacher's output head | `--hidden` |

`auto` is `hybrid` where the cache has draws from the tail, and `ghost` elsewhere: our study (`docs/numerics.md`) found
`hybrid` better at every K, and the more so the smaller K is.

Draws are only right at the temperature at which they were drawn, which is 1: at another one each would have to be
weighted by the ratio of the two distributions at its token, whose spread undoes what drawing saves.

A sparse teacher is only correct together with the mass of its tail at the same temperature, 1 - Σ_topK exp(z/T)/Z_T.
That needs Z_T, a sum over the whole vocabulary that only the builder of the cache saw. Guessing it from the mass at
T = 1 (leftover^(1/T), say, as if the tail were one token) is wrong by orders of magnitude, so a temperature that the
batch does not carry is refused.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Literal, get_args

import torch
from torch import Tensor

from qat_lora.errors import CacheError, ConfigError
from qat_lora.losses.estimators import ESTIMATORS, DenseTerm, Term, TopKTerm, hybrid_terms, log_add, sampled_term
from qat_lora.losses.fused.gradients import lm_head_logits, real_vocabulary, wide_dtype
from qat_lora.types import Batch, LMHead, SparseTeacher, temperature_key

EstimatorName = Literal["auto", "ghost", "renorm", "reverse", "hybrid", "sampled", "full"]

OPTIONAL_ARRAYS: dict[str, tuple[str, ...]] = {
    "hybrid": ("tail_draw_ids",),
    "sampled": ("draw_ids",),
    "full": ("teacher_hidden",),
}
"""Keys of a batch that an estimator needs beyond top K and tail mass; a cache has them on request only."""

BUILD_FLAGS = {"tail_draw_ids": "--tail-draws 8", "draw_ids": "--draws 32", "teacher_hidden": "--hidden"}

DRAW_FLAGS = {"tail_draw_ids": "--tail-draws", "draw_ids": "--draws"}


def check_estimator(name: str, temperature: float) -> None:
    """Refuse an estimator that is unknown, or that cannot be right at a temperature.

    Raises:
        ConfigError: says why.
    """
    known = get_args(EstimatorName)
    if name not in known:
        raise ConfigError(f"estimator: {name!r} is unknown; allowed: {', '.join(known)}")
    if name in ("hybrid", "sampled") and temperature != 1.0:
        raise ConfigError(
            f"temperature: {temperature:g} does not go with estimator {name}, whose tokens were drawn from the teacher "
            "at temperature 1; give --temperature 1, or --estimator ghost or full"
        )


def choose_estimator(name: EstimatorName, arrays: Container[str], temperature: float) -> EstimatorName:
    """Return the estimator that `auto` means for a cache with these arrays; any other name as it is."""
    if name != "auto":
        return name
    return "hybrid" if "tail_draw_ids" in arrays and temperature == 1.0 else "ghost"


def wanted(batch: Batch, key: str, user: str) -> Tensor:
    """Return an optional array of a batch.

    Raises:
        CacheError: it is not there; names the build flag.
    """
    if key not in batch:
        raise CacheError(
            f"{key}: {user} needs it, and the KD cache was built without; build one with {BUILD_FLAGS[key]}"
        )
    return batch[key].flatten(0, 1)


def cached_terms(
    batch: Batch,
    estimator: EstimatorName,
    temperature: float,
    draws: int | None,
    weight: float | Tensor,
    teacher_lm_head: LMHead | None,
) -> list[Term]:
    """Return the terms named `kd` that compare a student with a batch's teacher.

    Raises:
        CacheError: the batch lacks an array, a temperature, or enough draws.
    """
    estimator = choose_estimator(estimator, batch, temperature)
    if estimator == "full":
        hidden_NH = wanted(batch, "teacher_hidden", "estimator full")
        if teacher_lm_head is None:
            raise CacheError("teacher_head: estimator full needs the teacher's output head; build with --hidden")
        return [DenseTerm(hidden_NH, teacher_lm_head, weight, "kd", temperature)]
    if estimator == "sampled":
        ids_ND = first_draws(wanted(batch, "draw_ids", "estimator sampled"), draws, DRAW_FLAGS["draw_ids"])
        return [sampled_term(ids_ND, torch.ones_like(ids_ND), weight)]
    teacher = sparse_teacher_from_batch(batch, temperature)
    if estimator == "hybrid":
        held_ND = wanted(batch, "tail_draw_ids", "estimator hybrid")
        ids_ND = first_draws(held_ND, draws, DRAW_FLAGS["tail_draw_ids"])
        share_N1 = teacher.log_tail_N.exp()[:, None] / ids_ND.shape[1]
        return [*hybrid_terms(teacher, ids_ND, share_N1.expand(ids_ND.shape), weight)]
    return [TopKTerm(teacher, ESTIMATORS[estimator], weight, "kd")]


def first_draws(ids_ND: Tensor, draws: int | None, flag: str) -> Tensor:
    """Return the first draws; they are independent, so any number of them is a sample.

    Raises:
        CacheError: there are fewer; names the build flag.
    """
    held = ids_ND.shape[1]
    if draws is not None and draws > held:
        raise CacheError(f"draws: {draws} are asked for, the KD cache holds {held}; build one with {flag} {draws}")
    return ids_ND[:, :draws].long()


def sparse_teacher_from_batch(batch: Batch, temperature: float = 1.0) -> SparseTeacher:
    """Return the cached teacher at every position of a batch, flattened to N = B·(L-1).

    The top-K logits are stored in half precision, their mass and the tail's in full. The rounding error is spread over
    all K+1 outcomes, so that they add up to one and no loss can drop below zero.

    Raises:
        CacheError: the batch holds no normaliser for this temperature.
    """
    lse_key, tail_key = temperature_key("lse", temperature), temperature_key("log_tail", temperature)
    if lse_key not in batch or tail_key not in batch:
        held = sorted(float(k.partition("@")[2] or 1) for k in batch if k.partition("@")[0] == "lse")
        names = ",".join(f"{t:g}" for t in held)
        wanted = ",".join(f"{t:g}" for t in sorted({*held, temperature}))
        raise CacheError(
            f"temperature {temperature:g}: the KD cache has the teacher's normaliser for {names or 'none'} only, "
            f"and the tail's mass cannot be derived from another one; train with one of those, or build the cache "
            f"with --temperatures {wanted}"
        )
    ids_BLK = batch["head_ids"]
    entries = ids_BLK.shape[-1]
    log_t_NK = (batch["head_logits"].float() / temperature - batch[lse_key].float()[..., None]).reshape(-1, entries)
    log_tail_N = batch[tail_key].float().reshape(-1)
    log_mass_N = log_add(log_t_NK.logsumexp(-1), log_tail_N)
    return SparseTeacher(
        ids_BLK.reshape(-1, entries).long(), log_t_NK - log_mass_N[:, None], log_tail_N - log_mass_N, temperature
    )


@torch.no_grad()
def sparse_teacher_from_logits(logits_NV: Tensor, k: int, temperature: float = 1.0) -> SparseTeacher:
    """Return the top-k entries of each position and the exact log mass of the others.

    Holds one copy of the logits, so pass chunks; slice padding off first.

    Raises:
        ValueError: k is not between 1 and the vocabulary.
    """
    if not 1 <= k <= logits_NV.shape[-1]:
        raise ValueError(f"k {k}: expected 1 to {logits_NV.shape[-1]}, the number of logits")
    z_NV = logits_NV.to(wide_dtype(logits_NV.dtype)) / temperature
    top = z_NV.topk(k, dim=-1)
    log_tail_N = z_NV.scatter(-1, top.indices, float("-inf")).logsumexp(-1)
    log_total_N = log_add(top.values.logsumexp(-1), log_tail_N)
    return SparseTeacher(top.indices, top.values - log_total_N[:, None], log_tail_N - log_total_N, temperature)


@torch.no_grad()
def sparse_teacher_from_hidden(hidden_NH: Tensor, lm_head: LMHead, k: int, chunk_bytes: int) -> SparseTeacher:
    """Return the same from hidden states, with `chunk_bytes` of float32 logits at a time; at most the vocabulary."""
    vocab, dtype = lm_head.vocab_size, lm_head.weight_VH.dtype
    wide = wide_dtype(dtype)
    real = real_vocabulary(lm_head, dtype, wide)
    chunks = hidden_NH.to(dtype).split(max(1, chunk_bytes // (4 * vocab)))
    parts = [sparse_teacher_from_logits(lm_head_logits(x_CH, real, wide)[0], min(k, vocab)) for x_CH in chunks]
    return SparseTeacher(
        torch.cat([part.ids_NK for part in parts]),
        torch.cat([part.log_probs_NK for part in parts]),
        torch.cat([part.log_tail_N for part in parts]),
    )

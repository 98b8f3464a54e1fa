"""From an estimator's name and a cache's batch to terms: which arrays each one reads, and what it says without them.

| estimator | reads | flag of `cache build` |
|---|---|---|
| ghost, renorm, reverse | head and tail mass | (always there, but for `--top-k 0`) |
| hybrid | the same, and draws from the tail | `--tail-draws D` |
| sampled | draws from the whole teacher | `--draws D` |
| full | last hidden states, and the teacher's output head | `--hidden` |

`auto` is `hybrid` where the cache has draws from the tail, and `ghost` elsewhere: our study (`docs/numerics.md`) found
`hybrid` the better at every K, and more so the fewer entries the head has.

Draws are only right at the temperature at which they were drawn, which is 1: at another one each would have to be
weighted by the ratio of the two distributions at its token, whose spread undoes what drawing saves.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Literal, get_args

import torch
from torch import Tensor

from qat_lora.errors import CacheError, ConfigError
from qat_lora.losses.estimators import ESTIMATORS
from qat_lora.losses.loss_terms import DenseTerm, HeadTerm, Term, hybrid_terms, sampled_term
from qat_lora.losses.teacher import sparse_teacher_from_batch
from qat_lora.types import Batch, LMHead

EstimatorName = Literal["auto", "ghost", "renorm", "reverse", "hybrid", "sampled", "full"]

OPTIONAL_ARRAYS: dict[str, tuple[str, ...]] = {
    "hybrid": ("tail_draw_ids",),
    "sampled": ("draw_ids",),
    "full": ("teacher_hidden",),
}
"""Keys of a batch that an estimator needs beyond head and tail mass; a cache has them on request only."""

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
    return [HeadTerm(teacher, ESTIMATORS[estimator], weight, "kd")]


def first_draws(ids_ND: Tensor, draws: int | None, flag: str) -> Tensor:
    """Return the first draws; they are independent, so any number of them is a sample.

    Raises:
        CacheError: there are fewer; names the build flag.
    """
    held = ids_ND.shape[1]
    if draws is not None and draws > held:
        raise CacheError(f"draws: {draws} are asked for, the KD cache holds {held}; build one with {flag} {draws}")
    return ids_ND[:, :draws].long()

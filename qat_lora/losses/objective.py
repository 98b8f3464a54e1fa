"""The training objective: a weighted sum of named terms, from one config and one pass over the logits.

`kd` is the distance to the cached teacher (`kd_terms`), `ce` the cross-entropy with the text's next token, `hard_top1`
that with the teacher's top-1 token, `hidden` the relative squared error of the last hidden states. Only `kd` is
softened, so only `kd` carries T². `anchor`, the distance to the student as it was before training, has rows of its
own: `train/anchor.py` runs it as a micro-batch through the same function.

The config alone decides which terms exist. Their weights at a step come in separately: a term that disappeared once
its weight had annealed to 0 would change the compiled graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qat_lora.config import option
from qat_lora.errors import CacheError, ConfigError
from qat_lora.losses.estimators import Term, label_term
from qat_lora.losses.full_vocab import hidden_error_sum
from qat_lora.losses.fused.op import LossSum, fused_linear_kd
from qat_lora.losses.kd_terms import OPTIONAL_ARRAYS, EstimatorName, cached_terms, check_estimator, wanted
from qat_lora.types import Batch, LMHead, LossWalk


@dataclass(frozen=True)
class ObjectiveConfig:
    """What a recovery run minimises."""

    estimator: EstimatorName = option(
        "auto",
        "distance to the cached teacher: ghost (tail as one bucket), renorm (head only), reverse (KL), hybrid (head "
        "and draws from the tail), sampled (draws only), full (exact, from hidden states), or auto (hybrid where the "
        "cache has draws from the tail, else ghost)",
    )
    draws: int | None = option(
        None, "with hybrid and sampled: use only the first of the cached draws; default: all", unit="draws"
    )
    temperature: float = option(1.0, "softening of student and teacher; the cache must have been built with it")
    kd_weight: float = option(1.0, "weight of the distance to the cached teacher")
    ce_weight: float = option(0.0, "weight of the cross-entropy with the text's next token")
    hard_top1_weight: float = option(
        0.0, "weight of the cross-entropy with the teacher's likeliest token, at the start"
    )
    hard_top1_end: float | None = option(None, "that weight at the end of training, linear in between; none: constant")
    hidden_weight: float = option(0.0, "weight of the relative squared error of the last hidden states")
    anchor_weight: float = option(
        0.0, "weight of the distance to the student as it was before training", alias="anchor_kl_weight"
    )
    anchor_samples: int = option(32, "training rows on which that student is remembered", unit="rows")
    loss_chunk_mb: int = option(32, "logits held at once while the loss is computed", unit="MiB")
    loss_walk: Literal["auto", LossWalk] = option(
        "auto",
        "how the logits are walked through: positions, vocabulary (frozen heads on CPUs), or as the device likes",
    )

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(f"temperature: {self.temperature} is not allowed; give a number above 0, such as 1 or 2")
        check_estimator(self.estimator, self.temperature)
        weights = ("kd_weight", "ce_weight", "hard_top1_weight", "hard_top1_end", "hidden_weight", "anchor_weight")
        for name in weights:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}: {value} is not allowed; give 0 (off) or a number above 0")
        for name in ("loss_chunk_mb", "draws", "anchor_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: {value} is not allowed; give 1 or more")
        if self.draws is not None and self.estimator not in ("hybrid", "sampled"):
            raise ConfigError(
                f"draws: for estimators hybrid and sampled only, and it is {self.estimator}; leave it out, or name one"
            )
        if not self.weights_at(0.0).keys() - {"anchor"}:
            raise ConfigError(
                "kd_weight, ce_weight, hard_top1_weight, hidden_weight: all are 0, which leaves nothing to learn; set "
                "one above 0"
            )

    @property
    def optional_arrays(self) -> tuple[str, ...]:
        """Keys of a batch that these terms need and that a cache has on request only."""
        names = OPTIONAL_ARRAYS.get(self.estimator, ()) if self.kd_weight > 0 else ()
        return (*names, *(("teacher_hidden",) if self.hidden_weight > 0 and "teacher_hidden" not in names else ()))

    @property
    def cached_temperatures(self) -> tuple[float, ...]:
        """Temperatures whose normalisers are read: 1 for evaluations, and its own; the exact KL makes its own."""
        uses = self.kd_weight > 0 and self.estimator != "full"
        return tuple(sorted({1.0, self.temperature})) if uses else (1.0,)

    @property
    def topk_user(self) -> str | None:
        """The setting of a term that reads the teacher's top K; None where none does."""
        if self.kd_weight > 0 and self.estimator not in ("sampled", "full"):
            return f"estimator {self.estimator}"
        return "hard_top1_weight" if "hard_top1" in self.weights_at(0.0) else None

    @property
    def needs_teacher_lm_head(self) -> bool:
        """True if a term needs the teacher's output head."""
        return self.kd_weight > 0 and self.estimator == "full"

    def weights_at(self, progress: float) -> dict[str, float]:
        """Return the weight of every term at a progress of training from 0 to 1; same names at any progress."""
        start = self.hard_top1_weight
        end = start if self.hard_top1_end is None else self.hard_top1_end
        weights = {
            "kd": self.kd_weight,
            "ce": self.ce_weight,
            "hard_top1": start + (end - start) * min(max(progress, 0.0), 1.0),
            "hidden": self.hidden_weight,
            "anchor": self.anchor_weight,
        }
        largest = weights | {"hard_top1": max(start, end)}
        return {name: weight for name, weight in weights.items() if largest[name] > 0}


def weight_tensors(weights: Mapping[str, float], device: torch.device) -> dict[str, Tensor]:
    """Return weights as data on a device, tensors of one entry.

    PyTorch/XLA compiles Python numbers and tensors without dimensions into the graph where they are 0 or 1, and merges
    them with any other equal number, so an annealed weight would recompile on its way.
    """
    return {name: torch.tensor([value]).to(device) for name, value in weights.items()}


def objective_loss(
    hidden_BLH: Tensor,
    lm_head: LMHead,
    batch: Batch,
    config: ObjectiveConfig,
    weights: Mapping[str, float | Tensor] | None = None,
    teacher_lm_head: LMHead | None = None,
) -> LossSum:
    """Return the objective of a micro-batch, added up over the positions that its `target_mask` keeps.

    Shifted here, once: position p of a row has seen tokens 0..p and is scored on token p+1.

    Args:
        hidden_BLH: the student's last hidden states.
        lm_head: the student's output head.
        batch: tensors with the keys of `qat_lora.types.Batch`, on the device of the hidden states.
        config: which terms there are; `anchor` is not for this batch and left out.
        weights: what `config.weights_at` returned for this step, as numbers or `weight_tensors`; by default those at 0.
        teacher_lm_head: the teacher's output head, for estimator `full`, on the same device.

    Raises:
        CacheError: the batch lacks the temperature, or an array that a term needs; names the build flag.
    """
    names = config.weights_at(0.0)
    given = names if weights is None else weights
    weights = {name: w.reshape(()) if isinstance(w, Tensor) else w for name, w in given.items()}
    if config.topk_user and "head_ids" not in batch:
        raise CacheError(
            f"head_ids: {config.topk_user} needs the teacher's likeliest tokens, and the batch holds none; train from "
            "a KD cache built with --top-k 1 or more, or set only ce_weight above 0"
        )
    hidden_NH = hidden_BLH[:, :-1].reshape(-1, hidden_BLH.shape[-1])
    mask_N = batch["target_mask"].reshape(-1)
    terms: list[Term] = []
    if "kd" in names:
        terms += cached_terms(batch, config.estimator, config.temperature, config.draws, weights["kd"], teacher_lm_head)
    if "ce" in names:
        terms.append(label_term(batch["input_ids"][:, 1:].reshape(-1), weights["ce"], "ce"))
    if "hard_top1" in names:
        terms.append(label_term(batch["head_ids"][..., 0].reshape(-1), weights["hard_top1"], "hard_top1"))
    parts: list[LossSum] = []
    if terms:
        walk = "positions" if config.loss_walk == "auto" else config.loss_walk
        chunk_bytes = config.loss_chunk_mb * 2**20
        parts.append(fused_linear_kd(hidden_NH, lm_head, terms, mask_N, chunk_bytes=chunk_bytes, walk=walk))
    if "hidden" in names:
        teacher_NH = wanted(batch, "teacher_hidden", "hidden_weight")
        if teacher_NH.shape != hidden_NH.shape:
            raise ConfigError(
                f"hidden_weight: the teacher's hidden states are {teacher_NH.shape[-1]} wide, the student's "
                f"{hidden_NH.shape[-1]}; only equal widths can be compared, so set it to 0"
            )
        error_sum, count = hidden_error_sum(hidden_NH, teacher_NH, mask_N)
        parts.append(LossSum(error_sum * weights["hidden"], count, {"hidden": error_sum.detach()}))
    loss_sum = parts[0].loss_sum if len(parts) == 1 else parts[0].loss_sum + parts[1].loss_sum
    return LossSum(loss_sum, parts[0].token_count, {name: x for part in parts for name, x in part.terms.items()})

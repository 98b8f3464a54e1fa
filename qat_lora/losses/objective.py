"""The training objective: a weighted sum of named terms, from one config and one pass over the logits.

`kd` is the distance to the cached teacher, `ce` the cross-entropy with the text's next token, `hard_top1` the
cross-entropy with the teacher's likeliest token. Only `kd` is softened, so only `kd` carries T².

Which terms exist is decided by the config alone; what they weigh at a step comes in separately, because a weight
that annealed to nothing and took its term along would change the compiled graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qat_lora.config import option
from qat_lora.errors import CacheError, ConfigError
from qat_lora.losses.estimators import ESTIMATORS, EstimatorName
from qat_lora.losses.fused import LossSum, fused_linear_kd
from qat_lora.losses.teacher import sparse_teacher_from_batch
from qat_lora.losses.terms import HeadTerm, Term, label_term
from qat_lora.types import Batch, OutputHead

ObjectiveResult = LossSum


@dataclass(frozen=True)
class ObjectiveConfig:
    """What a recovery run minimises."""

    estimator: EstimatorName = option(
        "ghost", "distance to the cached teacher: ghost (tail as one bucket), renorm (head only) or reverse (KL)"
    )
    temperature: float = option(1.0, "softening of student and teacher; the cache must have been built with it")
    kd_weight: float = option(1.0, "weight of the distance to the cached teacher")
    ce_weight: float = option(0.0, "weight of the cross-entropy with the text's next token")
    hard_top1_weight: float = option(
        0.0, "weight of the cross-entropy with the teacher's likeliest token, at the start"
    )
    hard_top1_end: float | None = option(None, "that weight at the end of training, linear in between; none: constant")
    loss_chunk_mb: int = option(32, "logits held at once while the loss is computed", unit="MiB")

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(f"temperature: {self.temperature} is not allowed; give a number above 0, such as 1 or 2")
        if self.estimator not in ESTIMATORS:
            raise ConfigError(f"estimator: {self.estimator!r} is unknown; allowed: {', '.join(ESTIMATORS)}")
        for name in ("kd_weight", "ce_weight", "hard_top1_weight", "hard_top1_end"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}: {value} is not allowed; give 0 (off) or a number above 0")
        if self.loss_chunk_mb < 1:
            raise ConfigError(f"loss_chunk_mb: {self.loss_chunk_mb} is not allowed; give 1 or more")
        if not self.weights_at(0.0):
            raise ConfigError(
                "kd_weight, ce_weight, hard_top1_weight: all are 0, which leaves nothing to learn; set one above 0"
            )

    def weights_at(self, progress: float) -> dict[str, float]:
        """Return the weight of every term at a progress of training from 0 to 1; same names at any progress."""
        progress = min(max(progress, 0.0), 1.0)
        start = self.hard_top1_weight
        end = start if self.hard_top1_end is None else self.hard_top1_end
        weights = {}
        if self.kd_weight > 0:
            weights["kd"] = self.kd_weight
        if self.ce_weight > 0:
            weights["ce"] = self.ce_weight
        if start > 0 or end > 0:
            weights["hard_top1"] = start + (end - start) * progress
        return weights


def weight_tensors(weights: Mapping[str, float], device: torch.device) -> dict[str, Tensor]:
    """Return weights as data on a device, tensors of one entry.

    As Python numbers, and as tensors without dimensions, PyTorch/XLA compiles them into the graph where they are 0
    or 1, and merges them with any other equal number, so an annealed weight would compile anew on its way.
    """
    return {name: torch.tensor([value]).to(device) for name, value in weights.items()}


def objective_loss(
    hidden_BLH: Tensor,
    head: OutputHead,
    batch: Batch,
    config: ObjectiveConfig,
    weights: Mapping[str, float | Tensor] | None = None,
) -> ObjectiveResult:
    """Return the objective of a micro-batch, added up over the positions that its `target_mask` keeps.

    Shifted here, once: position p of a row has seen tokens 0..p and is scored on token p+1.

    Args:
        hidden_BLH: the student's last hidden states.
        head: the student's output head.
        batch: tensors with the keys of `qat_lora.types.Batch`, on the device of the hidden states.
        config: which terms there are.
        weights: what `config.weights_at` returned for this step, as numbers or `weight_tensors`; by default those at 0.

    Raises:
        CacheError: the batch lacks the temperature, or the teacher's head.
    """
    weights = config.weights_at(0.0) if weights is None else weights
    weights = {name: w.reshape(()) if isinstance(w, Tensor) else w for name, w in weights.items()}
    names = config.weights_at(0.0)
    if ("kd" in names or "hard_top1" in names) and "head_ids" not in batch:
        raise CacheError("head_ids: the batch holds no teacher; train from a KD cache, or set only ce_weight above 0")
    terms: list[Term] = []
    if "kd" in names:
        teacher = sparse_teacher_from_batch(batch, config.temperature)
        terms.append(HeadTerm(teacher, ESTIMATORS[config.estimator], weights["kd"], "kd"))
    if "ce" in names:
        terms.append(label_term(batch["input_ids"][:, 1:].reshape(-1), weights["ce"], "ce"))
    if "hard_top1" in names:
        terms.append(label_term(batch["head_ids"][..., 0].reshape(-1), weights["hard_top1"], "hard_top1"))
    return fused_linear_kd(
        hidden_BLH[:, :-1].reshape(-1, hidden_BLH.shape[-1]),
        head,
        terms,
        batch["target_mask"].reshape(-1),
        chunk_bytes=config.loss_chunk_mb * 2**20,
    )

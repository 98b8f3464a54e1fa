"""What an objective needs before step 1, outside the loop: the walk of the device, a teacher's output head, an anchor.

The commands that train call `check_arrays` before a model is loaded, and `prepare` when the student is as it will be
before its first step, also where a checkpoint will be loaded over it afterwards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from qat_lora.cache.format.codec import OPTIONAL
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.errors import CacheError, ConfigError
from qat_lora.losses.objective import OPTIONAL_ARRAYS, EstimatorName, ObjectiveConfig, choose_estimator, wanted
from qat_lora.models.load import CausalLM
from qat_lora.runtime.base import Runtime
from qat_lora.train.anchor import remember
from qat_lora.train.loop import LoopConfig
from qat_lora.train.step import PreparedObjective
from qat_lora.types import LMHead


def check_arrays(dataset: KDCacheDataset, objective: ObjectiveConfig) -> None:
    """Refuse a cache that lacks what the objective reads, and let it serve nothing else.

    Raises:
        CacheError: names the array and the build flag, or how many draws there are.
    """
    if objective.topk_user and not dataset.k:
        advice = "give --estimator full" if objective.topk_user.startswith("estimator") else "set it to 0"
        raise CacheError(
            f"top_k: {objective.topk_user} needs the teacher's likeliest tokens, and the KD cache was built with "
            f"--top-k 0; {advice}, or build one with --top-k 64"
        )
    if objective.kd_weight == 0 or choose_estimator(objective.estimator, OPTIONAL, objective.temperature) != "hybrid":
        dataset.leave_out_all_but([name for name in OPTIONAL if name != "tail_draw_ids"])  # refused behind --head-k
    held = {name: torch.empty(1, 1, *array.shape[2:]) for name, array in dataset.rows([0]).items()}
    objective = replace(objective, estimator=choose_estimator(objective.estimator, held, objective.temperature))
    own = OPTIONAL_ARRAYS.get(objective.estimator, ()) if objective.kd_weight > 0 else ()
    for name in objective.optional_arrays:
        user = f"estimator {objective.estimator}" if name in own else "hidden_weight"
        wanted(held, name, user, objective.draws if name.endswith("draw_ids") else None)
    dataset.leave_out_all_but(objective.optional_arrays)


def prepare(
    objective: ObjectiveConfig, dataset: Any, model: CausalLM, loop: LoopConfig, seed: int, runtime: Runtime
) -> PreparedObjective:
    """Return what `train` takes; the model is placed and holds the weights that it has before step 1.

    Raises:
        ConfigError: more anchor rows than there are training rows, or a walk that this device does not have.
    """
    if objective.loss_walk == "auto":
        objective = replace(objective, loss_walk=runtime.loss_walk)
    objective = replace(objective, loss_chunk_mb=runtime.loss_chunk_mb(objective.loss_chunk_mb))
    if objective.loss_walk == "kernel" != runtime.loss_walk:
        raise ConfigError(
            f"loss_walk: kernel needs Triton and an NVIDIA GPU, A100 or later, and this is {runtime.description}; "
            "give auto, positions or vocabulary"
        )
    if objective.kd_weight > 0:
        name = choose_estimator(objective.estimator, dataset.rows([0]), objective.temperature)
        objective = replace(objective, estimator=name)
    teacher_lm_head = anchor = None
    no_topk = isinstance(dataset, KDCacheDataset) and not dataset.k  # then evaluations need the teacher's output head
    if no_topk or (objective.kd_weight > 0 and objective.estimator == "full"):
        held = dataset.teacher_lm_head()
        bias_V = None if held.bias_V is None else held.bias_V.to(runtime.device)
        teacher_lm_head = replace(held, weight_VH=held.weight_VH.to(runtime.device), bias_V=bias_V)
    if objective.anchor_weight > 0:
        if objective.anchor_samples > len(dataset):
            raise ConfigError(
                f"anchor_samples: {objective.anchor_samples} rows are more than the {len(dataset)} that there are to "
                f"train on; give at most {len(dataset)}"
            )
        was_training = model.module.training
        model.module.eval()
        with runtime.autocast(torch.bfloat16 if loop.autocast else torch.float32):
            anchor = remember(model, dataset, objective, loop.batch_size, seed, runtime)
        model.module.train(was_training)
    return PreparedObjective(objective, teacher_lm_head, anchor)


def evaluation_objective(objective: ObjectiveConfig, teacher_lm_head: LMHead | None) -> ObjectiveConfig:
    """Return the distance to the teacher at temperature 1 that evaluations report.

    It is exact where the teacher's output head is there, and else `ghost`, a lower bound that is blind to the tail's
    shape: comparable within a run, not between heads of different K.
    """
    estimator: EstimatorName = "ghost" if teacher_lm_head is None else "full"
    return ObjectiveConfig(estimator=estimator, loss_chunk_mb=objective.loss_chunk_mb, loss_walk=objective.loss_walk)

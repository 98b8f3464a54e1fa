"""One micro-batch and one optimizer step: the arithmetic of training, without a loop around it.

Every micro-batch backpropagates the *sum* of its losses. Gradients and token counts are both averaged over
replicas and gradients divided by the count once, so the update is that of one big batch exactly, however many
micro-batches, replicas or masked tokens there are. Dividing by each micro-batch's own count, as most trainers
do, weighs tokens of short batches more. No value is read back from the device.

*The anchor*: some training rows on which the student is held near what it was before training. Before step 1 its
outputs on these rows are remembered in the arrays of a KD cache's batch, so the loss on a cache serves the anchor too.
(A copy of the old student would cost a second model.) Every optimizer step gets one more micro-batch, of as many anchor
rows as the others have, in turn; so with an anchor the micro-batch size is part of a run's identity. The weight is per
token: since a step's sums are divided by the cache's tokens, the anchor's gradient is scaled by tokens / anchor tokens.
No checkpoint stores the anchor: a resumed run remembers the student that it has just built from its start again. The
rows come from the run's seed; dropout is off, and no random number is drawn.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qat_lora.data.shuffle import micro_batches
from qat_lora.losses.objective import KL_NAMES, ObjectiveConfig, objective_loss, sparse_teacher_from_hidden
from qat_lora.runtime.base import Runtime
from qat_lora.types import Batch, LanguageModel, LMHead

Weights = Mapping[str, Tensor]  # of the terms in one optimizer step, and a moving temperature (`weight_tensors`)
LEAST = 1e-20  # of a sum that is divided by: one of weights may be far below 1, and 0 goes with gradients of 0
Sums = dict[
    str, Tensor
]  # running sums of one optimizer step: `loss`, `tokens`, one of `KL_NAMES` and one per loss term


class TrainingRows(Protocol):
    """The rows that are trained on, a KD cache or a text, in the order that `qat_lora.data.shuffle` computes."""

    def batches(
        self,
        start_step: int,
        steps: int,
        batch_rows: int,
        accumulation: int,
        seed: int,
        replica: int,
        replicas: int,
        held_out: int | None = None,
    ) -> Iterator[Batch]:
        """Yield this replica's micro-batches, `accumulation` for each of `steps` steps.

        The rows of step `held_out` are in no other step.
        """


class PreparedObjective(NamedTuple):
    """An objective and what its terms need from outside a batch."""

    objective: ObjectiveConfig
    teacher_lm_head: LMHead | None = None  # on the device, for estimator `full`
    kl_name: str | None = None  # the log's name of the KL, or of its bound, that batches give (`objective.kl_name`)
    anchor: Batch | None = None  # the student's outputs before step 1 (`remember`), for the term `anchor`


def micro_batch(
    model: LanguageModel, batch: Batch, objective: ObjectiveConfig, weights: Weights, teacher_head: LMHead | None = None
) -> Sums:
    """Run forward and backward on one micro-batch; gradients add up, returned are sums over its counted tokens."""
    hidden_BLH = model.hidden(batch["input_ids"], batch["document_ids"])
    result = objective_loss(hidden_BLH, model.lm_head(), batch, objective, weights, teacher_head)
    result.loss_sum.backward()
    sums = {"loss": result.loss_sum.detach(), "tokens": result.token_count.detach()}
    named = {name if name in KL_NAMES else f"loss_{name}": value.detach() for name, value in result.terms.items()}
    return sums | named


def zero_sums(objective: ObjectiveConfig, device: torch.device, kl_name: str | None = None) -> Sums:
    """Return what every step's sums start from: made once, and a tensor each, or XLA compiles one graph more."""
    names = ["loss", "tokens", *([] if kl_name is None else [kl_name])]
    names += [f"loss_{term}" for term in objective.weights_at(0.0)]
    return {name: torch.zeros((), device=device) for name in names}


def add_sums(total: Sums, sums: Sums) -> Sums:
    """Add one micro-batch's sums to those of its step; a term that the micro-batch lacks stays as it is."""
    return {name: value + sums[name] if name in sums else value for name, value in total.items()}


def optimizer_step(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], sums: Sums, clip_grad_norm: float, runtime: Runtime
) -> Sums:
    """Update from averages over replicas and tokens; return these, global tokens, and the norm before clipping."""
    runtime.reduce_gradients(parameters)
    together = runtime.all_reduce_mean(torch.stack([value.float() for value in sums.values()]))  # one exchange for all
    sums = dict(zip(sums, together.unbind(), strict=True))
    tokens = sums["tokens"].clamp_min(LEAST)
    gradients = [p.grad for p in parameters if p.grad is not None]
    # By rows first: one sum of millions of squares loses the small ones.
    rows = [(g * g).sum(-1).flatten() for g in gradients]  # not `vector_norm`: twelve operations of a graph each
    norm = (torch.cat(rows) if len(rows) > 1 else rows[0]).sum().sqrt() / tokens
    factor = (clip_grad_norm / (norm + 1e-6)).clamp_max(1.0) / tokens
    for gradient in gradients:
        gradient.mul_(factor)
    optimizer.step()
    for gradient in gradients:
        gradient.zero_()  # kept, not dropped: a gradient that appears anew is a new graph on XLA
    means = {name: value / tokens for name, value in sums.items() if name != "tokens"}
    return means | {"tokens": sums["tokens"] * runtime.replicas, "grad_norm": norm}


ANCHOR_K = 64  # tokens remembered at every position; the others form one bucket
_ORDER = 0x616E63686F72  # mixed into the seed, or the anchor's rows would be those of the first steps
_TEXT = ("input_ids", "document_ids", "target_mask")


@torch.no_grad()
def remember(
    model: LanguageModel, rows: TrainingRows, objective: ObjectiveConfig, batch_rows: int, seed: int, runtime: Runtime
) -> Batch:
    """Return the model's present outputs on some training rows: numpy arrays with the keys of a cache's batch.

    The model is the student before its first step, in evaluation mode, placed. Every process remembers all rows; the
    run's seed draws them, and `batch_rows` go through the model at once.
    """
    samples = objective.anchor_samples
    drawn = rows.batches(0, -(-samples // batch_rows), batch_rows, 1, seed ^ _ORDER, 0, 1)
    kept: list[Batch] = []
    for batch in runtime.feed({name: batch[name] for name in _TEXT} for batch in drawn):
        hidden_BLH = model.hidden(batch["input_ids"], batch["document_ids"])[:, :-1]
        states_NH, chunk_bytes = hidden_BLH.flatten(0, 1), objective.loss_chunk_bytes
        teacher = sparse_teacher_from_hidden(states_NH, model.lm_head(), ANCHOR_K, chunk_bytes)
        log_probs_NK = teacher.log_probs_NK
        arrays = {"head_ids": teacher.ids_NK.int(), "lse": -log_probs_NK[:, 0], "log_tail": teacher.log_tail_N}
        arrays["head_logits"] = log_probs_NK - log_probs_NK[:, :1]
        arrays = {name: value.unflatten(0, hidden_BLH.shape[:2]) for name, value in arrays.items()}
        runtime.mark_step()
        kept.append({name: value.cpu().numpy() for name, value in (batch | arrays).items()})
    return {name: np.concatenate([part[name] for part in kept])[:samples] for name in kept[0]}


def anchor_batches(
    rows: Batch, start_step: int, steps: int, batch_rows: int, replica: int, replicas: int
) -> Iterator[Batch]:
    """Yield this replica's anchor micro-batch of each step; rows go round, and a round's last batch is masked."""
    for numbers in micro_batches(len(rows["input_ids"]), start_step, steps, batch_rows, 1, 0, replica, replicas):
        batch = {name: value[numbers] for name, value in rows.items()}
        batch["target_mask"] = batch["target_mask"] & (numbers >= 0)[:, None]
        yield batch


def anchor_micro_batch(
    model: LanguageModel, batch: Batch, objective: ObjectiveConfig, weights: Weights, sums: Sums, runtime: Runtime
) -> Sums:
    """Run forward and backward on a batch of `anchor_batches`; return the step's `sums` with its own added."""
    counts = torch.stack([sums["tokens"].float(), batch["target_mask"].sum(dtype=torch.float32)])
    tokens, own_tokens = runtime.all_reduce_mean(counts).unbind()
    ratio = tokens / own_tokens.clamp_min(LEAST)
    distance = ObjectiveConfig("ghost", loss_chunk_mb=objective.loss_chunk_mb, loss_walk=objective.loss_walk)
    own = micro_batch(model, batch, distance, {"kd": weights["anchor"] * ratio})
    return sums | {"loss": sums["loss"] + own["loss"], "loss_anchor": sums["loss_anchor"] + own["loss_kd"] * ratio}

"""The anchor: some training rows on which the student is held near what it was before training.

Before step 1 the student's outputs on these rows are remembered in the arrays of a KD cache's batch, so the loss on a
cache serves the anchor too. (Remembering the *teacher's* outputs would be a second KD term under another name; keeping
a copy of the old student costs a second model.) Every optimizer step gets one more micro-batch, of as many anchor rows
as the others have, in turn; so with an anchor the micro-batch size is part of a run's identity. The weight is per
token: since a step's sums are divided by the cache's tokens, the anchor's gradient is scaled by tokens / anchor tokens,
all of it on the device.

No checkpoint stores the anchor: a resumed run has just built the student from its start again when it loads the
checkpoint, and remembers that. The rows come from the run's seed; dropout is off, and no random number is drawn.
"""

from collections.abc import Iterator

import numpy as np
import torch

from qat_lora.data.shuffle import micro_batches
from qat_lora.losses.objective import ObjectiveConfig, sparse_teacher_from_hidden
from qat_lora.runtime.base import Runtime
from qat_lora.train.step import Sums, TrainingRows, Weights, micro_batch
from qat_lora.types import Batch, LanguageModel

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
        arrays = {
            "head_ids": teacher.ids_NK.int(),
            "head_logits": teacher.log_probs_NK - teacher.log_probs_NK[:, :1],
            "lse": -teacher.log_probs_NK[:, 0],
            "log_tail": teacher.log_tail_N,
        }
        arrays = {name: value.unflatten(0, hidden_BLH.shape[:2]) for name, value in arrays.items()}
        runtime.mark_step()
        kept.append({name: value.cpu().numpy() for name, value in (batch | arrays).items()})
    return {name: np.concatenate([part[name] for part in kept])[:samples] for name in kept[0]}


def anchor_batches(
    rows: Batch, start_step: int, steps: int, batch_rows: int, replica: int, replicas: int
) -> Iterator[Batch]:
    """Yield this replica's anchor micro-batch of each step; rows go round, and a round's last batch is masked."""
    count = len(rows["input_ids"])
    for numbers in micro_batches(count, start_step, steps, batch_rows, 1, 0, replica, replicas):
        batch = {name: value[numbers] for name, value in rows.items()}
        batch["target_mask"] = batch["target_mask"] & (numbers >= 0)[:, None]
        yield batch


def anchor_micro_batch(
    model: LanguageModel, batch: Batch, objective: ObjectiveConfig, weights: Weights, sums: Sums, runtime: Runtime
) -> Sums:
    """Run forward and backward on a batch of `anchor_batches`; return the step's `sums` with its own added."""
    counts = torch.stack([sums["tokens"].float(), batch["target_mask"].sum(dtype=torch.float32)])
    tokens, own_tokens = runtime.all_reduce_mean(counts).unbind()
    ratio = tokens / own_tokens.clamp_min(1.0)
    distance = ObjectiveConfig("ghost", loss_chunk_mb=objective.loss_chunk_mb, loss_walk=objective.loss_walk)
    own = micro_batch(model, batch, distance, {"kd": weights["anchor"] * ratio})
    return sums | {"loss": sums["loss"] + own["loss"], "loss_anchor": sums["loss_anchor"] + own["loss_kd"] * ratio}

"""One micro-batch and one optimizer step: the arithmetic of training, without a loop around it.

Every micro-batch backpropagates the *sum* of its losses. Gradients and token counts are both averaged over
replicas and gradients divided by the count once, so the update is that of one big batch exactly, however many
micro-batches, replicas or masked tokens there are. Dividing by each micro-batch's own count, as most trainers
do, weighs tokens of short batches more. No value is read back from the device.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qat_lora.losses.objective import ObjectiveConfig, objective_loss
from qat_lora.runtime.base import Runtime
from qat_lora.types import Batch, LanguageModel, LMHead

Weights = Mapping[str, Tensor]  # of the terms in one optimizer step (`weight_tensors`)
Sums = dict[str, Tensor]  # running sums of one optimizer step: `loss`, `tokens`, `kl` and one per loss term


class TrainingRows(Protocol):
    """The rows that are trained on, a KD cache or a text, in the order that `qat_lora.data.shuffle` computes."""

    def batches(
        self, start_step: int, steps: int, batch_rows: int, accumulation: int, seed: int, replica: int, replicas: int
    ) -> Iterator[Batch]:
        """Yield this replica's micro-batches, `accumulation` for each of `steps` steps."""


class PreparedObjective(NamedTuple):
    """An objective and what its terms need from outside a batch."""

    objective: ObjectiveConfig
    teacher_lm_head: LMHead | None = None  # on the device, for estimator `full`
    logs_kl: bool = False  # whether batches hold what the log's `kl` is made of (`objective.logs_kl`)
    anchor: Batch | None = None  # the student's outputs before step 1 (`anchor.remember`), for the term `anchor`


def micro_batch(
    model: LanguageModel,
    batch: Batch,
    objective: ObjectiveConfig,
    weights: Weights,
    teacher_lm_head: LMHead | None = None,
) -> Sums:
    """Run forward and backward on one micro-batch; gradients add up, returned are sums over its counted tokens."""
    hidden_BLH = model.hidden(batch["input_ids"], batch["document_ids"])
    result = objective_loss(hidden_BLH, model.lm_head(), batch, objective, weights, teacher_lm_head)
    result.loss_sum.backward()
    sums = {"loss": result.loss_sum.detach(), "tokens": result.token_count.detach()}
    named = {name if name == "kl" else f"loss_{name}": value.detach() for name, value in result.terms.items()}
    return sums | named


def zero_sums(objective: ObjectiveConfig, device: torch.device, kl: bool = False) -> Sums:
    """Return what every step's sums start from: made once, and a tensor each, or XLA compiles one graph more."""
    names = ["loss", "tokens", *(["kl"] if kl else []), *(f"loss_{term}" for term in objective.weights_at(0.0))]
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
    tokens = sums["tokens"].clamp_min(1.0)
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

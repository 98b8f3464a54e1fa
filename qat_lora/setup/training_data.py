"""What a run learns from and is measured on: a KD cache, or a text alone.

Both serve batches in the same order and shapes, so the loop knows no difference. What differs is the objective (a
text has no teacher, so only the cross-entropy is left), the number that evaluations report, and what identifies the
data in a run's settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.data.packing import make_encoder, pack_rows, take_eval
from qat_lora.data.sources import describe_source, open_documents
from qat_lora.data.text_dataset import ENCODERS, TextDataset
from qat_lora.losses.objective import ObjectiveConfig, objective_loss
from qat_lora.models.load import CausalLM, load_tokenizer, tokenizer_sha256
from qat_lora.options import QatOptions, RecoverOptions
from qat_lora.runtime.base import Runtime
from qat_lora.setup.common import fits_positions
from qat_lora.setup.objective import check_arrays, evaluation_objective
from qat_lora.train.loop import LoopConfig
from qat_lora.types import LMHead


@dataclass(frozen=True)
class TrainingData:
    """Training rows, evaluation rows, and what is minimised on them."""

    rows: Any  # of training: `KDCacheDataset` or `TextDataset`
    evaluation: Any  # rows kept apart, None where there are none
    objective: ObjectiveConfig
    identity: dict[str, Any]  # what tells this data from other data, for the run's settings

    @property
    def metric(self) -> str:
        """What evaluations report: `kl` to the teacher, or `nll` of the text."""
        return "nll" if isinstance(self.rows, TextDataset) else "kl"

    def with_vocabulary(self, model: CausalLM) -> CausalLM:
        """Return the model with the vocabulary of the cache, without padded rows."""
        return model.with_vocabulary(self.rows.manifest.fingerprint.vocab_size)


def cache_training_data(options: RecoverOptions | QatOptions) -> TrainingData:
    """Open the KD cache of a run.

    Raises:
        CacheError: no cache, damage, or it lacks what the objective reads.
    """
    objective, path = options.objective, str(options.kd_cache_dir)
    if isinstance(options, RecoverOptions) and options.learn == "kd+ce" and not objective.ce_weight:
        objective = replace(objective, ce_weight=1.0)
    temperatures, checked = objective.cached_temperatures, options.verify_rows
    rows = KDCacheDataset(path, options.preload, options.head_k, temperatures=temperatures, verify_rows=checked)
    check_arrays(rows, objective)
    kept = None
    if rows.manifest.rows("eval"):
        kept = KDCacheDataset(path, k=options.head_k, split="eval", verify_rows=checked)
        kept.leave_out_all_but(["teacher_hidden"])  # evaluations read no draws
    return TrainingData(rows, kept, objective, {"cache": rows.manifest.fingerprint.sha256})


def text_training_data(options: RecoverOptions, model: CausalLM) -> TrainingData:
    """Pack the text of a run into rows, with whole documents kept apart for evaluation.

    Raises:
        TextError: no text, too little of it, or plain text where chats are needed.
        ConfigError: rows longer than the model has positions.
    """
    fits_positions(model, options.length)
    tokenizer = load_tokenizer(model.tokenizer_folder, options.hub.trust_remote_code)
    encode = ENCODERS[options.learn](make_encoder(tokenizer))
    documents = partial(open_documents, options.text)
    kept, first = take_eval(documents, encode, options.length, options.eval_rows)
    objective, ce_weight = options.objective, options.objective.ce_weight or 1.0
    objective = replace(objective, kd_weight=0.0, ce_weight=ce_weight, hard_top1_weight=0.0, hard_top1_end=None)
    objective = replace(objective, hidden_weight=0.0)
    identity = {
        "text": describe_source(options.text),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        **{name: getattr(options, name) for name in ("learn", "length", "num_rows", "eval_rows")},
    }
    rows = TextDataset(pack_rows(documents(first), encode, options.length), options.num_rows)
    return TrainingData(rows, TextDataset(kept) if kept else None, objective, identity)


def evaluation(
    data: TrainingData, model: CausalLM, loop: LoopConfig, runtime: Runtime, teacher_lm_head: LMHead | None = None
) -> Callable[[], float] | None:
    """Return the function that measures the mean loss per token on rows kept apart, None where there are none.

    The data's objective is as `setup.objective.prepare` left it. Batches have training's shape, the last one filled
    with masked rows, so that XLA compiles one graph more.
    """
    rows = data.evaluation
    if rows is None:
        return None
    objective = evaluation_objective(data.objective, teacher_lm_head)
    if data.metric == "nll":
        objective = replace(objective, kd_weight=0.0, ce_weight=1.0)
    batch_rows = loop.batch_size * runtime.replicas
    # Made once, and two: zeros made in every evaluation, or one tensor in both places, are more graphs on XLA.
    no_loss, no_tokens = (torch.zeros((), device=runtime.device) for _ in range(2))
    share = {"replica": runtime.rank, "replicas": runtime.processes}
    batches = partial(rows.batches, 0, rows.steps_per_epoch(batch_rows), batch_rows // runtime.processes, **share)

    def evaluate() -> float:
        was_training = model.module.training
        model.module.eval()
        total, count = no_loss, no_tokens
        with torch.no_grad():
            for batch in runtime.feed(batches()):
                with runtime.autocast(torch.bfloat16 if loop.autocast else torch.float32):
                    hidden = model.hidden(batch["input_ids"], batch["document_ids"])
                    result = objective_loss(hidden, model.lm_head(), batch, objective, teacher_lm_head=teacher_lm_head)
                total, count = total + result.loss_sum, count + result.token_count
                runtime.mark_step()
            if runtime.replicas > 1:
                total, count = runtime.all_reduce_mean(torch.stack([total, count])).unbind()
        model.module.train(was_training)
        return float(total) / max(float(count), 1.0)

    return evaluate

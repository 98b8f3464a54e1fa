"""Train a transformers or PEFT model from a KD cache with transformers.Trainer: `python kd_trainer.py MODEL CACHE OUT`.

TRL's trainers take the same `compute_loss`. Needs accelerate: pip install 'qat-lora[big]'.
"""

import sys

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from qat_lora import KDCacheDataset
from qat_lora.losses.objective import ObjectiveConfig, objective_loss
from qat_lora.models.load import CausalLM


class KDTrainer(Trainer):
    """A Trainer whose loss is the KL to the cached teacher, without logits of the whole vocabulary in memory."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the mean over the batch's tokens; rows hold several documents, which do not see each other."""
        module = getattr(model, "get_base_model", lambda: model)()
        student = CausalLM(module, None, vocab_limit=self.train_dataset.fingerprint.vocab_size)
        hidden = student.hidden(inputs["input_ids"], inputs["document_ids"])
        loss = objective_loss(hidden, student.lm_head(), inputs, ObjectiveConfig())
        return (loss.loss_sum / loss.token_count, None) if return_outputs else loss.loss_sum / loss.token_count


def main(model: str, cache: str, out: str, **arguments) -> KDTrainer:
    """Train and save; `arguments` are TrainingArguments."""
    settings = TrainingArguments(out, remove_unused_columns=False, label_names=["target_mask"], **arguments)
    trainer = KDTrainer(AutoModelForCausalLM.from_pretrained(model), settings, train_dataset=KDCacheDataset(cache))
    trainer.train()
    trainer.save_model(out)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:4])

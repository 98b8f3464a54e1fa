"""A toy student, toy rows and a run over them, small enough to train a hundred times in a test."""

import contextlib
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from qat_lora.data.shuffle import ShuffledRows
from qat_lora.files import folders as files
from qat_lora.files.folders import atomic_dir
from qat_lora.losses.objective import ObjectiveConfig
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.train.callbacks import LoopHooks, RunSettings
from qat_lora.train.loop import LoopConfig, train
from qat_lora.train.optim import OptimConfig, TrainState
from qat_lora.train.step import PreparedObjective
from qat_lora.types import LMHead

VOCABULARY, WIDTH, RANK, LENGTH, HEAD, POOL = 23, 8, 2, 7, 5, 40


class Toy(nn.Module):
    """A frozen embedding and head, between them a trained low-rank map with dropout and a trained scale."""

    def __init__(self, dropout=0.0, dtype=torch.float32):
        super().__init__()
        draw = torch.Generator().manual_seed(3)

        def normal(*shape):
            return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

        self.embed = nn.Parameter(normal(VOCABULARY, WIDTH), requires_grad=False)
        self.table = nn.Parameter(normal(VOCABULARY, WIDTH), requires_grad=False)
        self.a = nn.Parameter(normal(RANK, WIDTH) * 0.3)
        self.b = nn.Parameter(normal(WIDTH, RANK) * 0.3)
        self.scale = nn.Parameter(1 + normal(WIDTH) * 0.1)
        self.dropout = nn.Dropout(dropout)
        self.before_forward = lambda: None

    vocab_size = VOCABULARY

    def hidden(self, input_ids_BL, document_ids_BL):
        self.before_forward()
        x = self.embed[input_ids_BL] * self.scale
        return x + self.dropout(x) @ self.a.T @ self.b.T

    def lm_head(self):
        return LMHead(self.table, VOCABULARY)

    def train_state(self):
        return TrainState(self, {"adapter": {"a": self.a, "b": self.b}, "scales": {"scale": self.scale}})


def row(number):
    """One cached row, a pure function of its number; -1 is a masked row."""
    draw = np.random.default_rng(max(number, 0))
    logits = draw.normal(size=(LENGTH - 1, VOCABULARY)) * 2
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-log_probs, axis=-1)[:, :HEAD]
    head = np.take_along_axis(log_probs, ids, -1)
    best = head[:, :1]
    return {
        "input_ids": draw.integers(0, VOCABULARY, LENGTH).astype(np.int32),
        "document_ids": np.zeros(LENGTH, np.int32),
        "target_mask": (draw.random(LENGTH - 1) < 0.6) & (number >= 0),
        "head_ids": ids.astype(np.int32),
        "head_logits": (head - best).astype(np.float32),
        "lse": (-best[:, 0]).astype(np.float32),
        "log_tail": np.log1p(-np.exp(head).sum(-1)).astype(np.float32),
    }


def rows(numbers):
    made = [row(number) for number in numbers]
    return {name: np.stack([r[name] for r in made]) for name in made[0]}


def tensors(numbers):
    batch = {name: torch.from_numpy(value) for name, value in rows(numbers).items()}
    return batch | {name: batch[name].long() for name in ("input_ids", "head_ids")}


class ToyData(ShuffledRows):
    """Rows in order, like a KD cache's training split; every seventh row is masked."""

    def __len__(self):
        return POOL

    def rows(self, numbers):
        return rows(numbers)

    def order(self, step, global_batch_rows, seed):
        numbers = np.arange(step * global_batch_rows, (step + 1) * global_batch_rows)
        return np.where(numbers % 7 == 3, -1, numbers % POOL)


LOOP = LoopConfig(batch_size=2, accumulation_steps=2, max_steps=10, log_steps=4, eval_steps=3, save_steps=1)
OPTIM = OptimConfig(lr=0.05, scale_lr=0.02, warmup_steps=3, clip_grad_norm=0.5, weight_decay=0.01)
SETTINGS = {"seed": 5, "cache": "abc", "nested": {"r": 2}, "list": (1, 2)}


def evaluation(toy):
    """KL-like number of the student as it is now; no randomness."""
    toy.eval()
    with torch.no_grad():
        batch = tensors(range(30, 36))
        logits = toy.hidden(batch["input_ids"], batch["document_ids"])[:, :-1] @ toy.table.T
        value = -torch.log_softmax(logits, -1).gather(-1, batch["head_ids"][..., :1]).mean()
    toy.train()
    return float(value)


@contextlib.contextmanager
def held(out):
    """Hold a folder as a command holds its run's; everything in it is the run's."""
    out.mkdir(parents=True, exist_ok=True)
    there = {path.relative_to(out).as_posix() for path in files.tree(out)} - {files.LIST}
    files.begin_list(out, "recover", there | files.listed(out)[1])
    try:
        yield
    finally:
        files.release(out)


def run(
    out,
    toy=None,
    *,
    settings=SETTINGS,
    evaluate=True,
    metric="kl",
    data=None,
    objective=None,
    optim=OPTIM,
    quiet=True,
    **changed,
):
    """Train a fresh toy under `out`, or go on there; return (result, toy)."""
    runtime = select_runtime("cpu")
    torch.manual_seed(11)
    toy = toy or Toy(dropout=0.3)

    def export(name):
        with atomic_dir(out / name) as draft:
            torch.save({k: v.detach() for k, v in toy.train_state().trained.items()}, draft / "weights.pt")

    measure = evaluate if callable(evaluate) else (lambda: evaluation(toy)) if evaluate else None

    def main():
        return train(
            toy.train_state(),
            data or ToyData(),
            PreparedObjective(objective or ObjectiveConfig(hard_top1_weight=0.2, hard_top1_end=0.0)),
            optim,
            replace(LOOP, **changed),
            LoopHooks(measure, export, metric),
            runtime,
            RunSettings(out, 5, settings, quiet),
        )

    with held(out):
        return runtime.launch(main), toy

"""The check that a small training loop is right and compiles no more than it must, on every runtime."""

import numpy as np
import torch
from torch import nn

from qat_lora.runtime.xla.runtime import XlaRuntime

VOCABULARY, WIDTH, ROWS, LENGTH, ACCUMULATION, STEPS = 23, 8, 4, 6, 2, 21


class Toy(nn.Module):
    """A frozen tied embedding and output head with a small trained part between them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def loss_sum(self, input_ids, mask):
        hidden = self.embed(input_ids)
        logits = self.head(hidden + self.up(torch.tanh(self.down(hidden))))[:, :-1]
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), input_ids[:, 1:], reduction="none")
        return (losses * mask).sum()


def toy_model():
    torch.manual_seed(7)
    return Toy()


def toy_rows(step, micro):
    rng = np.random.default_rng([step, micro])
    ids = rng.integers(0, VOCABULARY, (ROWS, LENGTH), dtype=np.int32)
    return ids, rng.random((ROWS, LENGTH - 1)) < 0.7


def learning_rate(step):
    return 0.05 * min(1.0, (step + 1) / 5)


def plain_training():
    """The oracle: whole batches, one process, plain CPU, nothing of ours."""
    model = toy_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        parts = [toy_rows(step, micro) for micro in range(ACCUMULATION)]
        ids = torch.from_numpy(np.concatenate([p[0] for p in parts])).long()
        mask = torch.from_numpy(np.concatenate([p[1] for p in parts])).float()
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        optimizer.zero_grad()
        loss = model.loss_sum(ids, mask) / mask.sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in trained]


def check_training_compiles_in_step_one_only_and_equals_plain_training(runtime, folder):
    start = runtime.compile_report()
    model = runtime.place(toy_model())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, weight_decay=0.01)
    for p in trained:  # nothing may appear later: whatever appears later is another graph
        p.grad = torch.zeros_like(p)
        optimizer.state[p] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    no_loss, no_tokens = (torch.zeros((), device=runtime.device) for _ in range(2))  # one for both: one more graph
    runtime.mark_step()

    mine = slice(runtime.rank * ROWS // runtime.replicas, (runtime.rank + 1) * ROWS // runtime.replicas)

    def batches():
        for step in range(STEPS):
            for micro in range(ACCUMULATION):
                ids, mask = toy_rows(step, micro)
                yield {"input_ids": ids[mine], "target_mask": mask[mine]}

    logged, reports, pending = [], [], []
    feed = runtime.feed(batches())
    for step in range(STEPS):
        total, tokens = no_loss, no_tokens
        for _ in range(ACCUMULATION):
            batch = next(feed)
            mask = batch["target_mask"].float()
            loss = model.loss_sum(batch["input_ids"], mask)
            loss.backward()
            total, tokens = total + loss.detach(), tokens + mask.sum()
            runtime.mark_step()
        runtime.reduce_gradients(trained)
        total, tokens = runtime.all_reduce_mean(total), runtime.all_reduce_mean(tokens)
        for p in trained:
            p.grad.div_(tokens)
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        pending.append(total / tokens)
        runtime.step_end()
        if step % 5 == 0:
            runtime.defer(lambda *losses: logged.extend(losses), *pending)
            pending = []
        if step == 10:
            runtime.save({str(i): p for i, p in enumerate(trained)}, folder / "adapter.safetensors")
        reports.append(runtime.compile_report())
    feed.close()
    runtime.barrier("trained")

    losses, weights = plain_training()
    np.testing.assert_allclose(logged, losses, rtol=1e-5, atol=1e-5)
    for p, expected in zip(trained, weights, strict=True):
        torch.testing.assert_close(p.detach().cpu(), expected, rtol=1e-4, atol=1e-5)

    if not isinstance(runtime, XlaRuntime):
        assert start == {} and reports == [{}] * STEPS
        return
    compiled = [report["graphs_compiled"] for report in reports]
    assert compiled[0] - start["graphs_compiled"] <= 3, (start, reports[0])
    assert compiled == [compiled[0]] * STEPS, compiled
    reads = [report["host_reads"] for report in reports]
    # The only reads are those of the checkpoint in step 10.
    assert reads == [start["host_reads"]] * 10 + [start["host_reads"] + len(trained)] * 11, reads
    assert reports[-1]["compile_s"] == reports[0]["compile_s"] > 0
    assert reports[-1]["graph_cache_hits"] - reports[0]["graph_cache_hits"] == (STEPS - 1) * (ACCUMULATION + 1)

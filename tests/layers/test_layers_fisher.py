"""Fisher information against gradients formed token by token, and against the KL that it predicts."""

import numpy as np
import pytest
import torch
from torch import nn

from qat_lora.layers.calibrate import fisher as sensitivity
from qat_lora.layers.calibrate.fisher import drawn_in_pieces, drawn_log_likelihood, sensitivities, zeros_in


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 6)
        self.head = nn.Linear(6, 9, bias=False)

    def hidden(self, ids):
        h = self.embed(ids)
        return h + self.second(torch.tanh(self.first(h)))

    def forward(self, ids):
        return self.head(self.hidden(ids))


NAMES = ["first", "second"]


@pytest.fixture
def toy():
    torch.manual_seed(0)
    model = Toy()
    nn.init.normal_(model.head.weight, std=2.0)
    return model.requires_grad_(False)


BATCHES = [torch.arange(12).reshape(3, 4) % 9, torch.arange(8).reshape(2, 4) * 5 % 9]


def test_it_is_the_mean_over_tokens_of_gradients_taken_one_by_one(toy):
    labels = [torch.arange(b.numel()) * 7 % 9 for b in BATCHES]
    drawn = iter(labels)

    def log_likelihood(batch):
        return toy(batch).flatten(0, 1).log_softmax(-1).gather(1, next(drawn)[:, None]).sum()

    found = sensitivities(toy, NAMES, BATCHES, log_likelihood, quiet=True)
    with torch.enable_grad():
        for name in NAMES:
            gradients = []
            for batch, label in zip(BATCHES, labels, strict=True):
                for token, target in zip(batch.flatten(), label, strict=True):
                    h = toy.embed(token)
                    inner = toy.first(h).requires_grad_()
                    outer = toy.second(torch.tanh(inner)).requires_grad_() if name == "first" else None
                    if name == "second":
                        outer = toy.second(torch.tanh(inner)).detach().requires_grad_()
                    loss = toy.head(h + outer).log_softmax(-1)[target]
                    gradients.append(torch.autograd.grad(loss, inner if name == "first" else outer)[0])
            g = torch.stack(gradients).double().numpy()
            assert np.allclose(found[name].numpy(), g.T @ g / 20, atol=1e-5)
    assert not any(m._forward_hooks for m in toy.modules()) and not any(p.requires_grad for p in toy.parameters())


def test_wide_layers_keep_the_diagonal(toy, monkeypatch):
    def run():
        draws = torch.Generator().manual_seed(1)
        return sensitivities(toy, NAMES, BATCHES, lambda b: drawn_log_likelihood(toy(b).flatten(0, 1), draws), True)

    whole = run()
    monkeypatch.setattr(sensitivity, "MOST_OUTPUTS", 6)
    narrow = run()
    assert narrow["first"].shape == (7,)
    assert torch.allclose(narrow["first"], whole["first"].diagonal())
    assert torch.equal(narrow["second"], whole["second"])


def test_it_predicts_the_kl_of_a_small_change(toy):
    """KL = dyᵀ G dy / 2 for a change dy of one output, the same at every token, averaged over many draws."""
    draws = torch.Generator().manual_seed(2)
    many = [torch.randint(0, 9, (50, 8), generator=draws) for _ in range(20)]
    found = sensitivities(toy, ["second"], many, lambda b: drawn_log_likelihood(toy(b).flatten(0, 1), draws), True)
    change = torch.randn(6, generator=draws) * 0.02
    predicted = float(change @ found["second"] @ change) / 2
    ids = torch.cat(many)
    before = toy(ids).double().log_softmax(-1)
    toy.second.bias += change
    after = toy(ids).double().log_softmax(-1)
    kl = float((before.exp() * (before - after)).sum(-1).mean())
    assert predicted == pytest.approx(kl, rel=0.1)


def test_blocks_are_computed_again_and_matrices_lie_on_disk_with_the_same_bits(tmp_path):
    """The number of forwards counts: one that keeps nothing, one in the backward pass."""
    calls = []

    class Block(Toy):
        def forward(self, h):
            calls.append(torch.is_grad_enabled())
            return self.second(torch.tanh(self.first(h)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
            self.layers = nn.ModuleList([Block() for _ in range(3)])

        def hidden(self, ids):
            h = self.embed(ids)
            for layer in self.layers:
                h = h + layer(h)
            return h

    torch.manual_seed(0)
    model = Model().requires_grad_(False)
    names = [f"layers.{i}.{part}" for i in range(3) for part in NAMES]

    def found(**where):
        draws = torch.Generator().manual_seed(1)

        def log_likelihood(ids):
            return drawn_in_pieces(model.hidden(ids).flatten(0, 1), model.head, 9, draws)

        return sensitivities(model, names, BATCHES, log_likelihood, True, **where)

    on_disk = found(zeros=zeros_in(tmp_path))
    assert len(calls) == 2 * 3 * len(BATCHES) and "forward" not in vars(model.layers[0])
    calls.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sensitivity, "block_of", lambda name: None)
        kept = found()
    assert len(calls) == 3 * len(BATCHES)
    for name in names:
        assert torch.equal(on_disk[name], kept[name])


def test_logits_in_pieces_have_the_gradient_of_all_at_once(toy, monkeypatch):
    hidden = toy.hidden(torch.arange(24) % 9).requires_grad_()
    labels = torch.arange(24) * 5 % 9

    def drawn(logits, draws):
        mine = labels[next(draws) :][: len(logits), None]
        return logits.log_softmax(-1).gather(1, mine).sum()

    (whole,) = torch.autograd.grad(drawn(toy.head(hidden), iter([0])), hidden)
    monkeypatch.setattr(sensitivity, "drawn_log_likelihood", drawn)
    monkeypatch.setattr(sensitivity, "MOST_LOGITS", 10 * 9)
    (pieces,) = torch.autograd.grad(drawn_in_pieces(hidden, toy.head, 9, iter([0, 10, 20])), hidden)
    assert torch.allclose(pieces, whole, atol=1e-6)

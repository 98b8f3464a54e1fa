"""The walk by blocks of vocabulary: every block size, logits that grow from block to block, empty tails and blocks."""

import numpy as np
import pytest
import torch
from losses_oracle import dense_ghost, dense_head, make_teacher

from qat_lora.losses.estimators import PointTerm, TopKTerm, label_term
from qat_lora.losses.fused import by_vocab
from qat_lora.losses.fused.gradients import Task, Wanted, group_terms, real_vocabulary
from qat_lora.losses.fused.op import fused_linear_kd
from qat_lora.types import LMHead, SparseTeacher

COUNT, VOCAB, WIDTH = 7, 41, 5


def swept(hidden, head, terms, mask, block_vocab, want=True):
    """Run this walk alone; one group, scales as the fused pass makes them."""
    task = Task(
        hidden.masked_fill(~mask[:, None], 0),
        real_vocabulary(head, hidden.dtype, hidden.dtype),
        group_terms(terms),
        [term.weight * term.temperature**2 for term in terms],
        mask,
        Wanted(want, False, False),
    )
    return by_vocab.walk_vocabulary(task, block_vocab)


def problem(k=4, temperature=1.0, growth=0.0, seed=0):
    rng = np.random.default_rng(seed)
    _, teacher = make_teacher(rng, COUNT, VOCAB, k, temperature)
    hidden = torch.tensor(rng.normal(size=(COUNT, WIDTH)))
    hidden[:, 0] = 1.0
    weight = torch.tensor(rng.normal(size=(VOCAB, WIDTH)))
    weight[:, 0] += growth * torch.arange(VOCAB)
    return hidden, weight, teacher, torch.tensor(rng.integers(0, VOCAB, size=COUNT))


@pytest.mark.parametrize("block_vocab", [1, 3, 40, 41, 100])
@pytest.mark.parametrize("growth", [0.0, 30.0, -30.0])  # logits up to 1,200, rising or falling block by block
@pytest.mark.parametrize(
    "temperature,scale,cap", [(1.0, 1.0, None), (2.0, 0.5, None), (2.0, 2.0, None), (1.0, 1.0, 5.0), (2.0, 0.5, 30.0)]
)
def test_every_block_size_equals_dense_autograd(block_vocab, growth, temperature, scale, cap, monkeypatch):
    monkeypatch.setattr(by_vocab, "PIECE_BYTES", 2 * 8 * min(block_vocab, VOCAB))  # two positions a piece
    hidden, weight, teacher, labels = problem(temperature=temperature, growth=growth)
    bias = torch.linspace(-1, 1, VOCAB, dtype=torch.float64)
    draws = PointTerm(
        torch.stack([labels, teacher.ids_NK[:, 0]], 1), torch.full((COUNT, 2), 0.3), temperature=temperature
    )
    terms = [TopKTerm(teacher, weight=0.7), draws]
    everywhere = torch.ones(COUNT, dtype=torch.bool)
    head = LMHead(weight, VOCAB, bias, scale, cap)
    got = swept(hidden, head, terms, everywhere, block_vocab)
    leaf = hidden.clone().requires_grad_()
    logits = dense_head(leaf, weight, VOCAB, bias, scale, cap)
    kd = dense_ghost(logits, teacher).sum()
    log_p = (logits / temperature).log_softmax(-1)
    ce = -(0.3 * log_p.gather(1, draws.ids_ND)).sum() * temperature**2
    (expected,) = torch.autograd.grad(0.7 * kd + ce, leaf)
    assert got.sums[0].item() * temperature**2 == pytest.approx(kd.item(), rel=1e-11)
    assert got.sums[1].item() * temperature**2 == pytest.approx(ce.item(), rel=1e-6)  # 0.3 is held in float32
    torch.testing.assert_close(got.hidden_NH, expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("block_vocab", [4, 41])
def test_a_head_that_fills_blocks_or_the_vocabulary_leaves_no_nan(block_vocab):
    for k in (VOCAB - 1, VOCAB):
        hidden, weight, teacher, _ = problem(k=k)
        head, everywhere = LMHead(weight, VOCAB), torch.ones(COUNT, dtype=torch.bool)
        got = swept(hidden, head, [TopKTerm(teacher)], everywhere, block_vocab)
        leaf = hidden.clone().requires_grad_()
        if k == VOCAB:  # the plain KL over the vocabulary
            log_p = (leaf @ weight.T).log_softmax(-1).gather(1, teacher.ids_NK)
            dense = (teacher.log_probs_NK.exp() * (teacher.log_probs_NK - log_p)).sum()
        else:
            dense = dense_ghost(leaf @ weight.T, teacher).sum()
        assert got.sums[0].item() == pytest.approx(dense.item(), rel=1e-9)
        torch.testing.assert_close(got.hidden_NH, torch.autograd.grad(dense, leaf)[0], rtol=1e-9, atol=1e-11)


def test_masked_positions_get_nothing_whatever_their_targets_hold():
    hidden, weight, teacher, _ = problem()
    mask = torch.arange(COUNT) % 2 == 0
    spoiled = SparseTeacher(
        teacher.ids_NK.masked_fill(~mask[:, None], -100),
        teacher.log_probs_NK.masked_fill(~mask[:, None], float("nan")),
        teacher.log_tail_N.masked_fill(~mask, float("nan")),
    )
    head = LMHead(weight, VOCAB)
    got = swept(hidden, head, [TopKTerm(spoiled)], mask, 10)
    expected = swept(hidden, head, [TopKTerm(teacher)], mask, 10)
    assert (got.hidden_NH[~mask] == 0).all()
    torch.testing.assert_close(got.hidden_NH, expected.hidden_NH, rtol=0, atol=0)


@pytest.mark.parametrize("train_head", [False, True])
def test_the_two_walks_agree_also_on_a_padded_head(train_head):
    hidden, weight, teacher, labels = problem(growth=1.0)
    weight = torch.cat([weight, torch.full((3, WIDTH), float("nan"), dtype=torch.float64)])
    gradients = []
    for walk in ("positions", "vocabulary"):
        leaf = hidden.clone().requires_grad_()
        head = LMHead(weight.clone().requires_grad_(train_head), VOCAB)
        terms = [TopKTerm(teacher), label_term(labels)]
        fused_linear_kd(leaf, head, terms, chunk_tokens=2, walk=walk).loss_sum.backward()
        assert (head.weight_VH.grad is not None) == train_head
        gradients.append([leaf.grad, head.weight_VH.grad])
    for one, other in zip(*gradients, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    assert not train_head or (gradients[1][1][VOCAB:] == 0).all()


def test_a_gradient_that_nobody_wants_is_not_made():
    hidden, weight, teacher, _ = problem()
    everywhere = torch.ones(COUNT, dtype=torch.bool)
    got = swept(hidden, LMHead(weight, VOCAB), [TopKTerm(teacher)], everywhere, 10, want=False)
    assert got[1:] == (None, None, None)
    assert got.sums[0].item() == pytest.approx(dense_ghost(hidden @ weight.T, teacher).sum().item(), rel=1e-11)


def test_terms_of_one_head_and_temperature_share_a_softmax():
    _, _, teacher, labels = problem()
    soft = problem(temperature=2.0)[2]
    terms = [TopKTerm(teacher), TopKTerm(teacher, name="again"), TopKTerm(soft), label_term(labels)]
    groups = group_terms(terms)
    assert [[index for index, _ in group.topk] for group in groups] == [[0, 1], [2]]
    assert [[index for index, _ in group.points] for group in groups] == [[3], []]


@pytest.mark.parametrize("terms,train_head,serves", [("one", False, True), ("one", True, False), ("two", False, False)])
def test_one_softmax_over_a_frozen_head_is_walked_by_vocabulary(terms, train_head, serves):
    hidden, weight, teacher, labels = problem()
    given = [TopKTerm(teacher), label_term(labels)] + [TopKTerm(problem(temperature=2.0)[2])] * (terms == "two")
    mask = torch.ones(COUNT, dtype=torch.bool)
    task = Task(hidden, LMHead(weight, VOCAB), group_terms(given), [1.0] * 3, mask, Wanted(True, train_head, False))
    assert by_vocab.vocabulary_serves(task) == serves

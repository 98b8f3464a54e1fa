"""The walk by positions alone: groups with and without a teacher's logits, any chunk, gradients only where wanted."""

import numpy as np
import pytest
import torch
from losses_oracle import dense_ghost, make_teacher

from qat_lora.losses.estimators import DenseTerm, TopKTerm, label_term
from qat_lora.losses.fused.by_token import walk_positions
from qat_lora.losses.fused.gradients import Task, Wanted, full_logits, group_terms, lm_head_logits
from qat_lora.types import LMHead

COUNT, VOCAB, WIDTH = 7, 41, 5


def task(terms, hidden, weight, want):
    scales = [term.weight * term.temperature**2 for term in terms]
    everywhere = torch.ones(COUNT, dtype=torch.bool)
    return Task(hidden, LMHead(weight, VOCAB), group_terms(terms), scales, everywhere, Wanted(want, want))


@pytest.mark.parametrize("chunk", [1, 3, 7, 50])
def test_sums_and_gradients_of_all_groups_add_up(chunk):
    rng = np.random.default_rng(0)
    _, teacher = make_teacher(rng, COUNT, VOCAB, 4, 2.0)
    hidden, other = (torch.tensor(rng.normal(size=(COUNT, WIDTH))) for _ in range(2))
    weight, labels = torch.tensor(rng.normal(size=(VOCAB, WIDTH))), torch.tensor(rng.integers(0, VOCAB, COUNT))
    terms = [TopKTerm(teacher, weight=0.5), label_term(labels, 0.2), DenseTerm(other, LMHead(weight, VOCAB), 0.3)]
    walked = walk_positions(task(terms, hidden, weight, True), chunk)
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    logits = leaves[0] @ leaves[1].T
    log_p, log_t = logits.log_softmax(-1), (other @ weight.T).log_softmax(-1)
    parts = [dense_ghost(logits, teacher).sum(), -log_p.gather(1, labels[:, None]).sum()]
    parts.append((log_t.exp() * (log_t - log_p)).sum())
    for index, (part, term) in enumerate(zip(parts, terms, strict=True)):
        assert walked.sums[index].item() * term.temperature**2 == pytest.approx(part.item(), rel=1e-11)
    expected = torch.autograd.grad(0.5 * parts[0] + 0.2 * parts[1] + 0.3 * parts[2], leaves)
    torch.testing.assert_close(walked.hidden_NH, expected[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(walked.weight_VH, expected[1], rtol=1e-10, atol=1e-12)
    assert walked.bias_V is None
    without = walk_positions(task(terms, hidden, weight, False), chunk)
    assert without[1:] == (None, None, None)
    assert without.sums[2].item() == walked.sums[2].item()


def test_projection_has_its_slope_only_where_it_is_wanted():
    hidden, weight = torch.randn(3, WIDTH), torch.randn(VOCAB, WIDTH)
    plain, none = full_logits(hidden @ weight.T, LMHead(weight, VOCAB), torch.float32, True)
    torch.testing.assert_close(plain, hidden @ weight.T)
    head = LMHead(weight, VOCAB, None, 0.5, 2.0)
    capped, slope = full_logits(hidden @ weight.T, head, torch.float32, True)
    torch.testing.assert_close(capped, 2 * torch.tanh(plain / 4))
    torch.testing.assert_close(slope, 1 - torch.tanh(plain / 4) ** 2)
    assert none is None is full_logits(hidden @ weight.T, head, torch.float32)[1]
    torch.testing.assert_close(lm_head_logits(hidden, head, torch.float32), capped)

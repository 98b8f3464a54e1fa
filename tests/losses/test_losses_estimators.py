"""Every estimator against its definition in plain loops, its gradient by gradcheck, and its known identities."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from losses_oracle import identity_head, log_softmax, make_teacher, numpy_loss

from qat_lora.losses.estimators import (
    ESTIMATORS,
    MIXTURES,
    DenseTerm,
    PointTerm,
    TopKTerm,
    hidden_error_sum,
    hybrid_terms,
    kd_soft_ce,
    label_term,
    sampled_term,
    topk_part,
)
from qat_lora.losses.fused.op import fused_linear_kd
from qat_lora.losses.objective import sparse_teacher_from_logits
from qat_lora.types import LMHead, SparseTeacher

SHAPES = [(1, 31, 1), (3, 31, 7), (127, 31, 30), (3, 1009, 64), (2, 31, 31), (1, 1009, 1009), (2, 8192, 64)]


def loss_and_gradient(logits_NV, terms, mask=None):
    logits = torch.as_tensor(logits_NV).clone().requires_grad_()
    result = fused_linear_kd(logits, identity_head(logits.shape[1], logits.dtype), terms, mask)
    (gradient,) = torch.autograd.grad(result.loss_sum, logits)
    return result.loss_sum.detach(), gradient


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["ghost", "renorm", "reverse"])
def test_value_is_the_definition(name, shape, temperature):
    count, vocab, k = shape
    rng = np.random.default_rng(count + vocab + k)
    teacher_logits, teacher = make_teacher(rng, count, vocab, k, temperature)
    student = teacher_logits + rng.normal(size=(count, vocab))
    loss, _ = loss_and_gradient(student, [TopKTerm(teacher, ESTIMATORS[name])])
    pairs = zip(student, teacher_logits, strict=True)
    expected = math.fsum(numpy_loss(name, s, t, k, temperature) for s, t in pairs) * temperature**2
    assert loss.item() == pytest.approx(expected, rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name,share", [("jsd", 0.5), ("jsd", 0.9), ("skew", 0.1), ("skew_reverse", 0.1)])
def test_value_and_gradient_of_mixtures_are_the_definition(name, share, shape, temperature):
    count, vocab, k = shape
    rng = np.random.default_rng(count + vocab + k)
    teacher_logits, teacher = make_teacher(rng, count, vocab, k, temperature)
    student = teacher_logits + rng.normal(size=(count, vocab))
    mask = torch.tensor(rng.random(count) < 0.7)
    terms = [TopKTerm(teacher, partial(MIXTURES[name][0], share=share))]
    loss, gradient = loss_and_gradient(student, terms, mask)

    def by_definition(row, n):
        return numpy_loss(name, row, teacher_logits[n], k, temperature, share) * temperature**2

    kept = np.flatnonzero(mask)
    expected = math.fsum(by_definition(student[n], n) for n in kept)
    assert loss.item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    assert not gradient[~mask].any()
    for n in kept[:2]:  # by differences, at a top-K id, the last one and another
        for j in {int(teacher.ids_NK[n, 0]), int(teacher.ids_NK[n, -1]), vocab // 2}:
            step = np.zeros(vocab)
            step[j] = 1e-5
            slope = (by_definition(student[n] + step, n) - by_definition(student[n] - step, n)) / 2e-5
            assert gradient[n, j].item() == pytest.approx(slope, abs=2e-8, rel=1e-5)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_stay_finite_where_one_side_has_nothing(name):
    """And at the end of the range: the KL forward or reverse would be infinite."""
    log_t = torch.tensor([[0.0, -math.inf]], dtype=torch.float64)
    teacher = SparseTeacher(torch.tensor([[0, 1]]), log_t, torch.tensor([-math.inf], dtype=torch.float64))
    mixture, share = MIXTURES[name]
    loss, gradient = loss_and_gradient(
        np.array([[-900.0, 900.0, -900.0]]), [TopKTerm(teacher, partial(mixture, share=share))]
    )
    assert math.isfinite(loss.item()) and torch.isfinite(gradient).all()


@pytest.mark.parametrize("walk", ["positions", "vocabulary", "kernel"])
@pytest.mark.parametrize("name", ["ghost", "jsd", "hybrid", "full"])
def test_weights_of_positions_multiply_sums_count_and_gradients(name, walk):
    rng = np.random.default_rng(9)
    hidden = torch.tensor(rng.normal(size=(7, 5)))
    teacher_logits, teacher = make_teacher(rng, 7, 31, 4)
    head = LMHead(torch.tensor(rng.normal(size=(31, 5))), 31)
    weights = torch.tensor([0.0, 0.5, 1.0, 3.0, 0.0, 2.0, 0.25])
    draws = torch.tensor(rng.integers(0, 31, size=(7, 3)))

    def terms(rows):
        sparse = SparseTeacher(*(x[rows] for x in teacher[:3]))
        if name == "hybrid":
            return hybrid_terms(sparse, draws[rows])
        if name == "full":
            return [DenseTerm(torch.tensor(teacher_logits)[rows], identity_head(31))]
        return [TopKTerm(sparse, partial(MIXTURES[name][0], share=0.3) if name == "jsd" else ESTIMATORS[name])]

    def run(rows, mask):
        states = hidden[rows].clone().requires_grad_()
        result = fused_linear_kd(states, head, terms(rows), mask, walk=walk)
        return result, torch.autograd.grad(result.loss_sum, states)[0]

    together, gradient = run(slice(None), weights)
    alone = [run(slice(n, n + 1), None) for n in range(7)]
    expected = math.fsum(w * x.loss_sum.item() for w, (x, _) in zip(weights.tolist(), alone, strict=True))
    assert together.loss_sum.item() == pytest.approx(expected, rel=1e-12)
    assert together.token_count.item() == weights.sum().item()
    by_row = torch.cat([w * grad for w, (_, grad) in zip(weights, alone, strict=True)])
    torch.testing.assert_close(gradient, by_row, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["ghost", "reverse"])
@pytest.mark.parametrize("vocab", [31, 1009, 8192])
def test_whole_vocabulary_is_the_dense_kl(name, vocab):
    rng = np.random.default_rng(1)
    teacher_logits, teacher = make_teacher(rng, 3, vocab, vocab)
    student = torch.tensor(teacher_logits + rng.normal(size=(3, vocab)))
    loss, gradient = loss_and_gradient(student, [TopKTerm(teacher, ESTIMATORS[name])])
    student.requires_grad_()
    log_p, log_t = student.log_softmax(-1), torch.tensor(teacher_logits).log_softmax(-1)
    first, second = (log_t, log_p) if name == "ghost" else (log_p, log_t)
    dense = (first.exp() * (first - second)).sum()
    assert loss.item() == pytest.approx(dense.item(), rel=1e-10)
    torch.testing.assert_close(gradient, torch.autograd.grad(dense, student)[0], rtol=1e-10, atol=1e-12)


def test_ghost_gradient_is_p_minus_t_on_the_head_and_the_loss_a_lower_bound():
    rng = np.random.default_rng(2)
    teacher_logits, teacher = make_teacher(rng, 40, 101, 9)
    student = torch.tensor(teacher_logits + 2 * rng.normal(size=(40, 101)))
    loss, gradient = loss_and_gradient(student, [TopKTerm(teacher)])
    p = student.softmax(-1)
    torch.testing.assert_close(
        gradient.gather(1, teacher.ids_NK),
        p.gather(1, teacher.ids_NK) - teacher.log_probs_NK.exp(),
        rtol=0,
        atol=1e-14,
    )
    off = torch.ones_like(p, dtype=torch.bool).scatter(1, teacher.ids_NK, False)
    rest = (p * off).sum(-1, keepdim=True)
    expected = p * (1 - teacher.log_tail_N.exp()[:, None] / rest)
    torch.testing.assert_close(gradient[off], expected[off], rtol=0, atol=1e-14)
    for s, t in zip(student.numpy(), teacher_logits, strict=True):
        assert 0 <= numpy_loss("ghost", s, t, 9) <= numpy_loss("full", s, t, 9)
    assert loss.item() <= math.fsum(
        numpy_loss("full", s, t, 9) for s, t in zip(student.numpy(), teacher_logits, strict=True)
    )


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("kind", ["ghost", "renorm", "reverse", "hybrid", "sampled", "ce"])
def test_gradcheck(kind, temperature):
    rng = np.random.default_rng(3)
    teacher_logits, teacher = make_teacher(rng, 3, 13, 4, temperature)
    ids = torch.tensor(rng.integers(0, 13, size=(3, 5)))  # may repeat, may hit the head
    weights = torch.tensor(rng.random((3, 5)))
    if kind == "hybrid":
        points = PointTerm(ids, weights, 0.7, temperature=temperature)
        terms = [TopKTerm(teacher, topk_part, 0.7), points, *hybrid_terms(teacher, ids, 0.2)]
    elif kind == "sampled":
        terms = [sampled_term(ids, 0.7, temperature)]
    elif kind == "ce":
        terms = [label_term(ids[:, 0], 0.7)]
    else:
        terms = [TopKTerm(teacher, ESTIMATORS[kind], 0.7)]
    student = torch.tensor(teacher_logits + rng.normal(size=(3, 13)), requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda z: fused_linear_kd(z, identity_head(13), terms, chunk_tokens=2).loss_sum, student
    )


@pytest.mark.parametrize("name", ["ghost", "renorm", "reverse"])
def test_gradient_is_exact_for_a_teacher_that_does_not_add_up_to_one(name):
    rng = np.random.default_rng(4)
    teacher_logits, teacher = make_teacher(rng, 3, 13, 4)
    rounded = teacher._replace(log_probs_NK=teacher.log_probs_NK + 0.05)
    student = torch.tensor(teacher_logits + rng.normal(size=(3, 13)), requires_grad=True)
    terms = [TopKTerm(rounded, ESTIMATORS[name])]
    assert torch.autograd.gradcheck(lambda z: fused_linear_kd(z, identity_head(13), terms).loss_sum, student)


def test_point_terms_are_the_dense_cross_entropy_with_repeats_and_beside_a_head():
    rng = np.random.default_rng(5)
    teacher_logits, teacher = make_teacher(rng, 4, 31, 5)
    student = torch.tensor(teacher_logits + rng.normal(size=(4, 31)))
    ids = teacher.ids_NK[:, [0, 0, 3]]
    weights = torch.tensor(rng.random((4, 3)))
    terms = [TopKTerm(teacher), label_term(teacher.ids_NK[:, 1], 0.5), PointTerm(ids, weights, 2.0, "draws")]
    loss, gradient = loss_and_gradient(student, terms)
    student.requires_grad_()
    log_p = student.log_softmax(-1)
    alone, ghost_gradient = loss_and_gradient(student.detach(), [TopKTerm(teacher)])
    dense = -0.5 * log_p.gather(1, teacher.ids_NK[:, 1:2]).sum() - 2 * (weights * log_p.gather(1, ids)).sum()
    assert (loss - alone).item() == pytest.approx(dense.item(), rel=1e-12)
    torch.testing.assert_close(gradient - ghost_gradient, torch.autograd.grad(dense, student)[0], rtol=0, atol=1e-13)


def draws_from_the_tail(rng, logits, teacher, draws):
    """Return ids [trials, draws] drawn from one position's tail."""
    probs = np.exp(logits - np.logaddexp.reduce(logits))
    probs[teacher.ids_NK[0].numpy()] = 0
    return torch.tensor(rng.choice(len(probs), size=draws, p=probs / probs.sum()))


def test_hybrid_and_sampled_are_unbiased_and_ghost_is_not():
    rng = np.random.default_rng(6)
    trials, vocab = 10_000, 31
    teacher_logits, teacher = make_teacher(rng, 1, vocab, 3, spread=1.5)
    student = torch.tensor(teacher_logits + 1.5 * rng.normal(size=(1, vocab)))
    expected = student.softmax(-1) - torch.tensor(teacher_logits).softmax(-1)
    many = student.expand(trials, -1)
    wide = SparseTeacher(*(x.expand(trials, *x.shape[1:]) for x in teacher[:3]), 1.0)

    def worst_deviation(terms):
        _, gradient = loss_and_gradient(many, terms)
        error = gradient.std(0) / math.sqrt(trials) + 1e-12
        return ((gradient.mean(0) - expected[0]).abs() / error).max().item()

    hybrid = hybrid_terms(wide, draws_from_the_tail(rng, teacher_logits[0], teacher, (trials, 4)))
    probs = np.exp(teacher_logits[0] - np.logaddexp.reduce(teacher_logits[0]))
    drawn = torch.tensor(rng.choice(vocab, size=(trials, 8), p=probs / probs.sum()))
    # 31 coordinates at once: the largest of 31 standard normals exceeds 3 by chance in 8% of seeds
    assert worst_deviation(hybrid) < 3
    assert worst_deviation([sampled_term(drawn)]) < 3
    assert worst_deviation([TopKTerm(wide)]) > 100  # positive control


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tail_mass_stays_accurate_as_the_head_takes_everything(dtype):
    vocab, k = 1009, 5
    rng = np.random.default_rng(7)
    for gap in (10, 35, 60, 80, 200, 1e4):
        logits = rng.normal(size=(2, vocab))
        logits[:, :k] += gap
        student = torch.tensor(logits, dtype=dtype)
        exact = student.double().numpy()
        tail = np.logaddexp.reduce(exact[:, k:], axis=1) - np.logaddexp.reduce(exact, axis=1)
        # a teacher with half its mass in the tail: loss = Σ t log t - Σ t log p + m (log m - log(1-b))
        ids = torch.arange(k).expand(2, k)
        teacher = SparseTeacher(ids, torch.full((2, k), math.log(0.5 / k)), torch.full((2,), math.log(0.5)))
        loss, gradient = loss_and_gradient(student, [TopKTerm(teacher)])
        log_p = exact[:, :k] - np.logaddexp.reduce(exact, axis=1)[:, None]
        expected = 0.5 * (math.log(0.5 / k) * 2 - 2 * log_p.mean(1).mean()) + (math.log(0.5) * 2 - tail.sum()) * 0.5
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        share = np.exp(exact[:, k:] - np.logaddexp.reduce(exact[:, k:], axis=1)[:, None])
        expected_tail = share * (np.exp(tail) - 0.5)[:, None]
        np.testing.assert_allclose(gradient[:, k:].numpy(), expected_tail, rtol=1e-3)
        assert torch.isfinite(gradient).all()


def test_tail_mass_of_1e_12_in_float32_has_three_digits():
    vocab, k = 31, 3
    student = torch.zeros(1, vocab)
    student[:, :k] = 29.0
    true = (vocab - k) / (vocab - k + k * math.exp(29.0))
    assert 1e-12 < true < 1e-11
    ids = torch.arange(k)[None]
    only_tail = SparseTeacher(ids, torch.full((1, k), -math.inf), torch.zeros(1))  # loss = -log(1 - b)
    loss, _ = loss_and_gradient(student, [TopKTerm(only_tail)])
    assert math.exp(-loss.item()) == pytest.approx(true, rel=1e-3)
    naive = 1 - student.softmax(-1)[:, :k].sum()
    assert abs(naive.item() - true) > 0.1 * true  # positive control


@pytest.mark.parametrize("name", ["ghost", "renorm", "reverse"])
def test_extreme_logits_stay_finite(name):
    student = torch.zeros(4, 31)
    student[0, 0], student[1, 5], student[2, :] = 1e4, 1e4, -1e4
    student[3, :15] = -1e4
    rng = np.random.default_rng(8)
    _, teacher = make_teacher(rng, 4, 31, 4)
    loss, gradient = loss_and_gradient(student, [TopKTerm(teacher, ESTIMATORS[name])])
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


def test_minus_infinity_outside_the_head_counts_as_no_token():
    rng = np.random.default_rng(9)
    teacher_logits, teacher = make_teacher(rng, 3, 31, 4)
    student = torch.tensor(teacher_logits + rng.normal(size=(3, 31)))
    padded = torch.cat([student, torch.full((3, 6), -math.inf, dtype=torch.float64)], 1)
    # the identity head would turn -inf · 0 into NaN; a bias carries the -inf instead
    bias = torch.zeros(37, dtype=torch.float64)
    bias[31:] = -math.inf
    hidden = padded.masked_fill(padded == -math.inf, 0).requires_grad_()
    head = LMHead(torch.eye(37, dtype=torch.float64), 37, bias)
    result = fused_linear_kd(hidden, head, [TopKTerm(teacher)])
    (gradient,) = torch.autograd.grad(result.loss_sum, hidden)
    loss, expected = loss_and_gradient(student, [TopKTerm(teacher)])
    assert result.loss_sum.item() == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(gradient[:, :31], expected, rtol=0, atol=1e-14)
    assert (gradient[:, 31:] == 0).all()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("k", [1, 7, 31])
def test_sparse_teacher_from_logits(k, temperature):
    rng = np.random.default_rng(10)
    logits, expected = make_teacher(rng, 5, 31, k, temperature)
    teacher = sparse_teacher_from_logits(torch.tensor(logits), k, temperature)
    assert torch.equal(teacher.ids_NK, expected.ids_NK)
    torch.testing.assert_close(teacher.log_probs_NK, expected.log_probs_NK, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(teacher.log_tail_N, expected.log_tail_N, rtol=1e-10, atol=1e-12)
    assert teacher.temperature == temperature


def test_anchor_of_an_unchanged_student_is_zero():
    logits = torch.randn(6, 57, generator=torch.Generator().manual_seed(0))
    loss, gradient = loss_and_gradient(logits, [TopKTerm(sparse_teacher_from_logits(logits, 8), name="anchor")])
    assert abs(loss.item()) < 1e-5
    assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
def test_kd_soft_ce_is_the_mean_over_all_positions_times_t_squared(temperature):
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(2, 3, 31)), rng.normal(size=(2, 3, 31))
    value = kd_soft_ce(torch.tensor(student), torch.tensor(teacher), temperature)
    total = 0.0
    for s, t in zip(student.reshape(-1, 31), teacher.reshape(-1, 31), strict=True):
        log_p, log_t = log_softmax(list(s / temperature)), log_softmax(list(t / temperature))
        total -= math.fsum(math.exp(b) * a for a, b in zip(log_p, log_t, strict=True))
    assert value.shape == ()
    assert value.item() == pytest.approx(total / 6 * temperature**2, rel=1e-12)


def test_kd_soft_ce_gradient_goes_to_the_student_only_and_survives_padding():
    student = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    teacher = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: kd_soft_ce(s, teacher, 2.0), student)
    pad = torch.full((4, 3), -math.inf, dtype=torch.float64)
    loss = kd_soft_ce(torch.cat([student, pad], 1), torch.cat([teacher, pad], 1))
    loss.backward()
    assert loss.item() == pytest.approx(kd_soft_ce(student, teacher).item(), rel=1e-12)
    assert torch.isfinite(student.grad).all()
    assert teacher.grad is None


def test_kd_soft_ce_computes_in_float32_for_bfloat16():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert kd_soft_ce(logits, logits).dtype == torch.float32


def test_shapes_and_temperature_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        kd_soft_ce(torch.zeros(2, 5), torch.zeros(2, 7))
    with pytest.raises(ValueError, match="temperature 0"):
        kd_soft_ce(torch.zeros(2, 5), torch.zeros(2, 5), 0)


def test_hidden_error_sum():
    rng = np.random.default_rng(3)
    student, teacher = rng.normal(size=(4, 6)), rng.normal(size=(4, 6))
    mask = torch.tensor([True, False, True, True])
    dirty = torch.tensor(student)
    dirty[1] = math.nan
    dirty.requires_grad_()
    total, count = hidden_error_sum(dirty, torch.tensor(teacher), mask)
    expected = sum(
        sum((student[i, j] - teacher[i, j]) ** 2 for j in range(6)) / sum(teacher[i, j] ** 2 for j in range(6))
        for i in (0, 2, 3)
    )
    assert total.item() == pytest.approx(expected, rel=1e-12)
    assert count.item() == 3
    total.backward()
    assert (dirty.grad[1] == 0).all()
    assert torch.isfinite(dirty.grad).all()
    clean = torch.tensor(student)
    times_ten, _ = hidden_error_sum(10 * clean, 10 * torch.tensor(teacher), mask)
    assert times_ten.item() == pytest.approx(expected, rel=1e-12)  # one meaning at any scale
    assert hidden_error_sum(torch.zeros(4, 6), torch.tensor(teacher), torch.ones(4))[0].item() == pytest.approx(4)
    nothing = torch.zeros(4, 6, requires_grad=True)
    hidden_error_sum(nothing, torch.zeros(4, 6), torch.ones(4))[0].backward()
    assert torch.isfinite(nothing.grad).all()

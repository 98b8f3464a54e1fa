"""The fused pass against dense autograd, and what it must not do: hold logits, serve a frozen head, read back."""

import math

import numpy as np
import pytest
import torch
from losses_oracle import dense_ghost, dense_head, make_teacher, numpy_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from qat_lora.losses.estimators import DenseTerm, KLTerm, TopKTerm, label_term, renorm, sampled_term
from qat_lora.losses.fused.op import fused_linear_kd
from qat_lora.losses.objective import sparse_teacher_from_logits
from qat_lora.types import LMHead, SparseTeacher


def problem(count=9, vocab=31, width=6, k=5, padding=0, temperature=1.0, dtype=torch.float64, seed=0):
    rng = np.random.default_rng(seed)
    _, teacher = make_teacher(rng, count, vocab, k, temperature)
    hidden = torch.tensor(rng.normal(size=(count, width)), dtype=dtype)
    weight = torch.tensor(rng.normal(size=(vocab + padding, width)), dtype=dtype)
    bias = torch.tensor(rng.normal(size=vocab + padding), dtype=dtype)
    labels = torch.tensor(rng.integers(0, vocab, size=count))
    if dtype != torch.float64:
        teacher = SparseTeacher(
            teacher.ids_NK, teacher.log_probs_NK.float(), teacher.log_tail_N.float(), teacher.temperature
        )
    return hidden, weight, bias, teacher, labels


@pytest.mark.parametrize("walk", ["positions", "vocabulary"])
@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(
    "scale,cap,with_bias", [(1.0, None, False), (0.25, None, True), (1.0, 3.0, True), (0.5, 2.0, False)]
)
def test_equals_dense_autograd(scale, cap, with_bias, temperature, padding, walk):
    hidden, weight, bias, teacher, labels = problem(padding=padding, temperature=temperature)
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    for leaf in leaves:
        leaf.requires_grad_()
    head = LMHead(weight, 31, bias if with_bias else None, scale, cap)
    terms = [TopKTerm(teacher, weight=0.8), label_term(labels, 0.3)]
    if temperature != 1:  # one softmax, so that the vocabulary is walked
        terms[1] = sampled_term(labels[:, None], 0.3, temperature, "ce")
    result = fused_linear_kd(hidden, head, terms, chunk_tokens=4, walk=walk)
    logits = dense_head(hidden, weight, 31, bias if with_bias else None, scale, cap)
    kd = dense_ghost(logits, teacher).sum()
    ce = torch.nn.functional.cross_entropy(logits / temperature, labels, reduction="sum") * temperature**2
    dense = 0.8 * kd + 0.3 * ce
    assert result.loss_sum.item() == pytest.approx(dense.item(), rel=1e-11)
    assert result.terms["kd"].item() == pytest.approx(kd.item(), rel=1e-11)
    assert result.terms["ce"].item() == pytest.approx(ce.item(), rel=1e-11)
    assert result.token_count.item() == 9
    actual = torch.autograd.grad(result.loss_sum * 1.7, leaves)
    expected = torch.autograd.grad(dense * 1.7, leaves)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("count", [1, 3, 127])
@pytest.mark.parametrize("vocab,k", [(31, 1), (31, 31), (1009, 64)])
def test_odd_shapes_equal_dense_autograd(count, vocab, k):
    hidden, weight, _, teacher, _ = problem(count, vocab, k=k)
    hidden.requires_grad_()
    result = fused_linear_kd(hidden, LMHead(weight, vocab), [TopKTerm(teacher, renorm)], chunk_tokens=50)
    log_p = (hidden @ weight.T).gather(1, teacher.ids_NK).log_softmax(-1)
    log_t = teacher.log_probs_NK.log_softmax(-1)
    dense = (log_t.exp() * (log_t - log_p)).sum()
    assert result.loss_sum.item() == pytest.approx(dense.item(), rel=1e-10)
    (got,), (want,) = torch.autograd.grad(result.loss_sum, hidden), torch.autograd.grad(dense, hidden)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


def dense_term(count, vocab, padding=0, temperature=1.0, weight=1.0, seed=3):
    """A teacher of another width, with bias, logit scale and soft-cap; and its logits."""
    rng = np.random.default_rng(seed)
    hidden = torch.tensor(rng.normal(size=(count, 4)))
    head = LMHead(
        torch.tensor(rng.normal(size=(vocab + padding, 4))), vocab, torch.tensor(rng.normal(size=vocab + padding)), 2, 9
    )
    logits = dense_head(hidden, head.weight_VH, vocab, head.bias_V, 2.0, 9.0)
    return DenseTerm(hidden, head, weight, temperature=temperature), logits


@pytest.mark.parametrize("walk", ["positions", "vocabulary"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("count,vocab,chunk", [(1, 31, 1), (3, 1009, 2), (127, 31, 50), (3, 8192, 3)])
def test_full_kl_equals_dense_autograd_beside_labels_and_another_head(count, vocab, chunk, temperature, walk):
    hidden, weight, bias, anchor, labels = problem(count, vocab, padding=7)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    term, teacher_logits = dense_term(count, vocab, 2, temperature, 0.8)
    points = sampled_term(labels[:, None], 0.2, temperature, "same")
    terms = [term, label_term(labels, 0.3), points, TopKTerm(anchor, weight=0.1, name="anchor")]
    result = fused_linear_kd(hidden, LMHead(weight, vocab, bias, 0.5, 3.0), terms, chunk_tokens=chunk, walk=walk)
    logits = dense_head(hidden, weight, vocab, bias, 0.5, 3.0)
    log_p, log_t = (x.div(temperature).log_softmax(-1) for x in (logits, teacher_logits))
    kl = (log_t.exp() * (log_t - log_p)).sum() * temperature**2
    ce = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    same = -log_p.gather(1, labels[:, None]).sum() * temperature**2
    dense = 0.8 * kl + 0.3 * ce + 0.2 * same + 0.1 * dense_ghost(logits, anchor).sum()
    assert result.terms["kd"].item() == pytest.approx(kl.item(), rel=1e-10)
    assert result.loss_sum.item() == pytest.approx(dense.item(), rel=1e-10)
    actual, expected = torch.autograd.grad(result.loss_sum, leaves), torch.autograd.grad(dense, leaves)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_full_kl_gradcheck_and_no_gradient_for_the_teacher():
    hidden, weight, _, _, _ = problem(3, 13, 4)
    term, _ = dense_term(3, 13, temperature=1.3)
    term.hidden_NH.requires_grad_()
    term.lm_head.weight_VH.requires_grad_()

    def loss(h, w):
        return fused_linear_kd(h, LMHead(w, 13), [term], chunk_tokens=2).loss_sum

    assert torch.autograd.gradcheck(loss, (hidden.requires_grad_(), weight.requires_grad_()))
    loss(hidden, weight).backward()
    assert term.hidden_NH.grad is None is term.lm_head.weight_VH.grad


def test_full_kl_of_one_and_the_same_model_is_zero_and_extreme_logits_stay_finite():
    hidden, weight, bias, _, _ = problem(dtype=torch.float32)
    head = LMHead(weight, 31, bias)
    same = fused_linear_kd(hidden.requires_grad_(), head, [DenseTerm(hidden.detach(), head)])
    (gradient,) = torch.autograd.grad(same.loss_sum, hidden)
    assert abs(same.loss_sum.item()) < 1e-5 and gradient.abs().max() < 1e-5
    bias[:5] = -math.inf  # on both sides: no token
    none = fused_linear_kd(hidden, head, [DenseTerm(hidden.detach(), head)])
    (gradient,) = torch.autograd.grad(none.loss_sum, hidden)
    assert abs(none.loss_sum.item()) < 1e-5 and torch.isfinite(gradient).all()
    wild = (hidden.detach() * 3e3).requires_grad_()
    far = fused_linear_kd(wild, LMHead(weight, 31), [DenseTerm(hidden.detach() * -3e3, head)])
    (gradient,) = torch.autograd.grad(far.loss_sum, wild)
    assert torch.isfinite(far.loss_sum) and torch.isfinite(gradient).all()


def test_full_kl_with_half_precision_teacher_and_student_is_near_float64():
    hidden, weight, _, _, _ = problem(count=40, vocab=1009, width=32, dtype=torch.float32)
    weight = (weight * 0.3).bfloat16()
    teacher = (hidden + 0.3 * hidden.roll(1, 0)).half()  # as a cache keeps it
    low = hidden.bfloat16().requires_grad_()
    result = fused_linear_kd(low, LMHead(weight, 1009), [DenseTerm(teacher, LMHead(weight, 1009))])
    result.loss_sum.backward()
    exact = low.detach().double().requires_grad_()
    log_p = (exact @ weight.double().T).log_softmax(-1)
    log_t = (teacher.double() @ weight.double().T).log_softmax(-1)
    dense = (log_t.exp() * (log_t - log_p)).sum()
    dense.backward()
    assert result.loss_sum.dtype == torch.float32
    assert result.loss_sum.item() == pytest.approx(dense.item(), rel=1e-2)
    assert (low.grad.double() - exact.grad).norm() / exact.grad.norm() < 2e-2


def test_full_kl_holds_a_chunk_of_each_sides_logits_and_splits_like_any_term():
    hidden, weight, _, _, _ = problem(count=40, vocab=1009, dtype=torch.float32)
    term, _ = dense_term(40, 1009)
    hidden.requires_grad_()
    mask = torch.arange(40) % 3 > 0
    with Watch() as watch:
        whole = fused_linear_kd(hidden, LMHead(weight, 1009), [term], mask, chunk_bytes=4 * 1009 * 8)
        whole.loss_sum.backward()
    assert watch.largest <= 4 * 1009
    assert not watch.operators & READS
    gradient, hidden.grad = hidden.grad, None
    parts = [
        fused_linear_kd(hidden[rows], LMHead(weight, 1009), [DenseTerm(term.hidden_NH[rows], term.lm_head)], mask[rows])
        for rows in (slice(0, 13), slice(13, 40))
    ]
    (parts[0].loss_sum + parts[1].loss_sum).backward()
    count = mask.sum()
    torch.testing.assert_close(hidden.grad / count, gradient / count, rtol=0, atol=1e-6)
    together = sum(part.loss_sum for part in parts)
    torch.testing.assert_close(together.detach(), whole.loss_sum.detach(), rtol=1e-6, atol=0)


def test_two_temperatures_and_two_heads_in_one_call():
    hidden, weight, _, soft, labels = problem(temperature=2.0)
    other = problem(k=3, seed=1)[3]
    hidden.requires_grad_()
    terms = [TopKTerm(soft, name="kd"), TopKTerm(other, name="anchor", weight=0.5), label_term(labels, 0.1)]
    result = fused_linear_kd(hidden, LMHead(weight, 31), terms, chunk_tokens=2)
    logits = hidden @ weight.T
    dense = (
        dense_ghost(logits, soft).sum()
        + 0.5 * dense_ghost(logits, other).sum()
        + 0.1 * torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    )
    assert result.loss_sum.item() == pytest.approx(dense.item(), rel=1e-11)
    (got,), (want,) = torch.autograd.grad(result.loss_sum, hidden), torch.autograd.grad(dense, hidden)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_ragged_mask_equals_leaving_the_positions_out_whatever_they_hold():
    hidden, weight, _, teacher, labels = problem()
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0, 1], dtype=torch.bool)
    dirty = hidden.masked_fill(~mask[:, None], float("nan")).requires_grad_()
    ids = teacher.ids_NK.masked_fill(~mask[:, None], -100)
    log_t = teacher.log_probs_NK.masked_fill(~mask[:, None], float("nan"))
    spoiled = SparseTeacher(ids, log_t, teacher.log_tail_N.masked_fill(~mask, float("inf")))
    bad_labels = labels.masked_fill(~mask, -100)
    weight.requires_grad_()
    head = LMHead(weight, 31)
    result = fused_linear_kd(dirty, head, [TopKTerm(spoiled), label_term(bad_labels)], mask, chunk_tokens=4)
    kept = SparseTeacher(*(x[mask] for x in teacher[:3]))
    clean = hidden[mask].clone().requires_grad_()
    expected = fused_linear_kd(clean, head, [TopKTerm(kept), label_term(labels[mask])])
    assert result.loss_sum.item() == pytest.approx(expected.loss_sum.item(), rel=1e-13)
    assert result.token_count.item() == 5
    got, got_weight = torch.autograd.grad(result.loss_sum, [dirty, weight])
    want, want_weight = torch.autograd.grad(expected.loss_sum, [clean, weight])
    torch.testing.assert_close(got[mask], want, rtol=0, atol=1e-13)
    assert (got[~mask] == 0).all()
    torch.testing.assert_close(got_weight, want_weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("walk", ["positions", "vocabulary"])
@pytest.mark.parametrize("kind", ["top K", "whole vocabulary", "softened", "hot", "beside labels", "labels", "draws"])
@pytest.mark.parametrize("train_head", [False, True])
def test_kl_is_added_up_at_temperature_1_and_changes_no_bit_of_a_gradient(kind, walk, train_head):
    count, vocab, k = 11, 31, 31 if kind == "whole vocabulary" else 5
    rng = np.random.default_rng(4)
    logits, teacher = make_teacher(rng, count, vocab, k)
    hidden, weight = (torch.tensor(rng.normal(size=shape)) for shape in ((count, 6), (vocab + 2, 6)))
    mask = torch.tensor(rng.random(count) < 0.6)
    bias, points = torch.tensor(rng.normal(size=vocab + 2)), torch.tensor(rng.integers(0, vocab, (count, 3)))
    own = dense_head(hidden, weight, vocab, bias, 0.5, 3.0).numpy()
    wanted = sum(numpy_loss("ghost", own[i], logits[i], k) for i in range(count) if mask[i])
    for x in (teacher.ids_NK, teacher.log_probs_NK, points):
        x[~mask] = 0
    softened = teacher._replace(temperature={"softened": 2.0, "hot": 0.6, "beside labels": 2.0}.get(kind, 1.0))
    terms = [] if kind in ("labels", "draws") else [TopKTerm(softened, renorm, 0.7)]
    terms += [sampled_term(points)] if kind == "draws" else []
    terms += [label_term(points[:, 0], 0.3)] if kind in ("labels", "draws", "beside labels") else []
    leaves = [hidden.masked_fill(~mask[:, None], math.nan).requires_grad_(), weight.requires_grad_(train_head)]
    head = LMHead(weight, vocab, bias.requires_grad_(train_head), 0.5, 3.0)
    leaves = [*leaves, bias] if train_head else leaves[:1]
    both = [*terms, KLTerm(teacher)]
    plain, logged = (
        fused_linear_kd(leaves[0], head, given, mask, chunk_tokens=4, walk=walk) for given in (terms, both)
    )
    assert logged.terms.pop("kl").item() == pytest.approx(wanted, rel=1e-11)
    assert logged.terms == plain.terms and logged.loss_sum == plain.loss_sum
    first, second = (torch.autograd.grad(result.loss_sum, leaves) for result in (plain, logged))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    without = fused_linear_kd(leaves[0].detach(), head, both, mask, walk=walk)
    assert without.terms["kl"].item() == pytest.approx(wanted, rel=1e-11)


@pytest.mark.parametrize("walk", ["positions", "vocabulary"])
@pytest.mark.parametrize("kind", ["top K", "softened", "beside draws", "labels", "beside labels"])
def test_kl_by_draws_is_added_up_at_temperature_1_and_changes_no_bit_of_a_gradient(kind, walk):
    count, vocab, k = 11, 31, 5
    rng = np.random.default_rng(4)
    logits, teacher = make_teacher(rng, count, vocab, k)
    hidden, weight = (torch.tensor(rng.normal(size=shape)) for shape in ((count, 6), (vocab + 2, 6)))
    mask = torch.tensor(rng.random(count) < 0.6)
    bias, points = torch.tensor(rng.normal(size=vocab + 2)), torch.tensor(rng.integers(0, vocab, (count, 3)))
    log_p = dense_head(hidden, weight, vocab, bias, 0.5, 3.0).log_softmax(-1)
    topk = (teacher.log_probs_NK.exp() * (teacher.log_probs_NK - log_p.gather(1, teacher.ids_NK))).sum(1)
    values = topk - teacher.log_tail_N.exp() * log_p.gather(1, points).mean(1)
    for x in (teacher.ids_NK, teacher.log_probs_NK, points):
        x[~mask] = 0
    softened = teacher._replace(temperature=2.0 if kind in ("softened", "beside labels") else 1.0)
    terms = [] if kind == "labels" else [TopKTerm(softened, renorm, 0.7)]
    terms += [label_term(points[:, 0], 0.3)] if kind in ("labels", "beside labels") else []
    terms += [sampled_term(points[:, :2])] if kind == "beside draws" else []
    leaf = hidden.masked_fill(~mask[:, None], math.nan).requires_grad_()
    head = LMHead(weight, vocab, bias, 0.5, 3.0)
    both = [*terms, KLTerm(teacher, draw_ids_ND=points)]
    plain, logged = (fused_linear_kd(leaf, head, given, mask, chunk_tokens=4, walk=walk) for given in (terms, both))
    assert logged.terms.pop("kl").item() == pytest.approx(values[mask].sum().item(), rel=1e-11)
    assert logged.terms == plain.terms and logged.loss_sum == plain.loss_sum
    first, second = (torch.autograd.grad(result.loss_sum, leaf)[0] for result in (plain, logged))
    assert torch.equal(first, second)
    with pytest.raises(ValueError, match="term kl: .* do not fit 11 positions"):
        fused_linear_kd(hidden, head, [*terms, KLTerm(teacher, draw_ids_ND=points[1:])], mask)


def test_kl_of_ids_that_no_softmax_reads_is_refused():
    hidden, weight, _, teacher, _ = problem()
    other = teacher._replace(ids_NK=teacher.ids_NK.clone())
    with pytest.raises(ValueError, match="kl: no term has its top-K ids"):
        fused_linear_kd(hidden, LMHead(weight, 31), [TopKTerm(teacher), KLTerm(other)])


def test_nothing_counts_gives_exactly_zero():
    hidden, weight, _, teacher, labels = problem(dtype=torch.float32)
    hidden.requires_grad_()
    mask = torch.zeros(9, dtype=torch.bool)
    result = fused_linear_kd(hidden, LMHead(weight, 31), [TopKTerm(teacher), label_term(labels)], mask)
    result.loss_sum.backward()
    assert result.loss_sum.item() == 0 == result.token_count.item()
    assert (hidden.grad == 0).all()


@pytest.mark.parametrize("walk", ["positions", "vocabulary"])
@pytest.mark.parametrize("parts", [2, 3, 9])
def test_any_split_of_a_batch_adds_up_to_the_same(parts, walk):
    hidden, weight, _, teacher, labels = problem(count=36, vocab=1009, width=16, k=8, dtype=torch.float32)
    mask = torch.rand(36, generator=torch.Generator().manual_seed(0)) < 0.6
    weight = (weight * 0.3).requires_grad_()

    def run(rows):
        piece = SparseTeacher(*(x[rows] for x in teacher[:3]))
        source = hidden[rows].clone().requires_grad_()
        result = fused_linear_kd(
            source, LMHead(weight, 1009), [TopKTerm(piece), label_term(labels[rows])], mask[rows], walk=walk
        )
        result.loss_sum.backward()
        return result.loss_sum.detach(), result.token_count, source.grad

    loss, count, gradient = run(slice(None))
    whole, weight.grad = weight.grad / count, None
    size = 36 // parts
    pieces = [run(slice(i * size, (i + 1) * size)) for i in range(parts)]
    assert sum(c for _, c, _ in pieces) == count
    torch.testing.assert_close(sum(x for x, _, _ in pieces) / count, loss / count, rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.cat([g for _, _, g in pieces]) / count, gradient / count, rtol=0, atol=1e-6)
    torch.testing.assert_close(weight.grad / count, whole, rtol=0, atol=1e-6)


def test_chunk_size_does_not_change_the_result():
    hidden, weight, _, teacher, _ = problem(count=127)
    losses = [
        fused_linear_kd(hidden, LMHead(weight, 31), [TopKTerm(teacher)], chunk_tokens=c).loss_sum.item()
        for c in (1, 3, 64, 126, 127, 1000)
    ]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-12)


READS = {"_local_scalar_dense", "nonzero", "masked_select", "index", "is_nonzero", "unique"}


class Watch(TorchDispatchMode):
    """Records the largest tensor made and every operator called."""

    def __init__(self):
        super().__init__()
        self.largest, self.operators = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operators.add(func.overloadpacket.__name__)
        if isinstance(out, torch.Tensor) and func.overloadpacket.__name__ not in ("t", "slice", "detach"):
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize("walk", ["positions", "vocabulary"])
@pytest.mark.parametrize("train_head", [False, True])
def test_holds_no_logits_does_no_work_for_a_frozen_head_and_reads_nothing_back(train_head, walk):
    count, vocab, width = 40, 1009, 8
    hidden, weight, bias, teacher, labels = problem(count, vocab, width, dtype=torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_(train_head)
    mask = torch.arange(count) % 3 > 0
    terms = [TopKTerm(teacher), label_term(labels, torch.tensor(0.2))]
    with Watch() as watch, FlopCounterMode(display=False) as flops:
        result = fused_linear_kd(hidden, LMHead(weight, vocab, bias), terms, mask, chunk_tokens=5, walk=walk)
        result.loss_sum.backward()
    product = 2 * count * vocab * width
    assert flops.get_total_flops() == product * 2
    assert ("addmm_" in watch.operators) == train_head  # in place, which the flop counter does not see
    assert watch.largest <= max(5 * vocab, (vocab * width) if train_head else 0)
    assert not watch.operators & READS
    assert (weight.grad is not None) == train_head
    assert hidden.grad is not None


def test_without_gradients_only_the_projection_is_computed():
    hidden, weight, _, teacher, _ = problem(dtype=torch.float32)
    with FlopCounterMode(display=False) as flops:
        result = fused_linear_kd(hidden, LMHead(weight, 31), [TopKTerm(teacher)])
    assert flops.get_total_flops() == 2 * 9 * 31 * 6
    assert not result.loss_sum.requires_grad


def test_default_chunk_keeps_logits_below_the_limit():
    hidden, weight, _, teacher, _ = problem(count=40, vocab=1009, dtype=torch.float32)
    with Watch() as watch:
        fused_linear_kd(hidden, LMHead(weight, 1009), [TopKTerm(teacher)], chunk_bytes=4 * 1009 * 7)
    assert watch.largest <= 7 * 1009


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_activation_checkpointing(reentrant):
    hidden, weight, _, teacher, _ = problem()
    first = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def block(x):
        return fused_linear_kd(torch.tanh(x @ first), LMHead(weight, 31), [TopKTerm(teacher)]).loss_sum

    hidden.requires_grad_()
    plain = torch.autograd.grad(block(hidden), [hidden, first])
    first.grad = None
    checkpoint(block, hidden, use_reentrant=reentrant).backward()
    torch.testing.assert_close(hidden.grad, plain[0])
    torch.testing.assert_close(first.grad, plain[1])


def test_bfloat16_is_near_float64_and_sums_in_float32():
    hidden, weight, _, teacher, _ = problem(count=40, vocab=1009, width=32, dtype=torch.float32)
    hidden, weight = hidden.bfloat16().requires_grad_(), (weight * 0.3).bfloat16()
    result = fused_linear_kd(hidden, LMHead(weight, 1009), [TopKTerm(teacher)])
    result.loss_sum.backward()
    exact = hidden.detach().double().requires_grad_()
    dense = dense_ghost(exact @ weight.double().T, teacher).sum()
    dense.backward()
    assert result.loss_sum.dtype == torch.float32
    assert hidden.grad.dtype == torch.bfloat16
    assert result.loss_sum.item() == pytest.approx(dense.item(), rel=2e-3)
    error = (hidden.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 1e-2


def test_trained_bfloat16_head_gets_its_gradient_summed_in_float32():
    hidden, weight, bias, teacher, _ = problem(count=120, dtype=torch.float32)
    low = weight.bfloat16().requires_grad_()
    low_bias = bias.bfloat16().requires_grad_()
    terms = [TopKTerm(teacher)]
    fused_linear_kd(hidden.bfloat16(), LMHead(low, 31, low_bias), terms, chunk_tokens=1).loss_sum.backward()
    exact, exact_bias = low.detach().double().requires_grad_(), low_bias.detach().double().requires_grad_()
    dense_ghost(hidden.bfloat16().double() @ exact.T + exact_bias, teacher).sum().backward()
    assert low.grad.dtype == low_bias.grad.dtype == torch.bfloat16
    assert (low.grad.double() - exact.grad).norm() / exact.grad.norm() < 1e-2
    assert (low_bias.grad.double() - exact_bias.grad).norm() / exact_bias.grad.norm() < 1e-2


def test_under_autocast_projects_in_its_dtype_and_keeps_the_softmax_wide():
    hidden, weight, _, teacher, _ = problem(count=40, vocab=1009, width=32, dtype=torch.float32)
    weight = weight * 0.3
    hidden.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        result = fused_linear_kd(hidden, LMHead(weight, 1009), [TopKTerm(teacher)])
    result.loss_sum.backward()
    assert result.loss_sum.dtype == hidden.grad.dtype == torch.float32
    low = hidden.detach().bfloat16().requires_grad_()
    expected = fused_linear_kd(low, LMHead(weight.bfloat16(), 1009), [TopKTerm(teacher)])
    expected.loss_sum.backward()
    assert result.loss_sum.item() == expected.loss_sum.item()
    torch.testing.assert_close(hidden.grad, low.grad.float(), rtol=0, atol=0)


def test_weight_as_number_and_as_tensor_are_the_same():
    hidden, weight, _, teacher, _ = problem()
    hidden.requires_grad_()
    head = LMHead(weight, 31)
    gradients = [
        torch.autograd.grad(fused_linear_kd(hidden, head, [TopKTerm(teacher, weight=w)]).loss_sum, hidden)[0]
        for w in (0.3, torch.tensor(0.3, dtype=torch.float64))
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_descent_recovers_a_student_from_a_sparse_teacher():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(57, 12, generator=generator)
    truth = torch.randn(20, 12, generator=generator)
    teacher = sparse_teacher_from_logits(truth @ weight.T, 16)
    student = (truth + torch.randn(20, 12, generator=generator)).requires_grad_()
    optimizer = torch.optim.Adam([student], lr=0.05)
    losses = []
    for _ in range(150):
        result = fused_linear_kd(student, LMHead(weight, 57), [TopKTerm(teacher)])
        optimizer.zero_grad()
        result.loss_sum.backward()
        optimizer.step()
        losses.append(result.loss_sum.item())
    assert losses[-1] < 1e-2 * losses[0]


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(hidden=torch.zeros(2, 3, 6)), "flatten"),
        (dict(terms=[]), "none given"),
        (dict(mask=torch.ones(4, dtype=torch.bool)), "mask"),
        (dict(vocab=99), "vocab_size 99"),
        (dict(terms=[label_term(torch.zeros(4))]), "term ce"),
        (dict(terms=[dense_term(8, 31)[0]]), "term kd.*9 positions"),
        (dict(terms=[dense_term(9, 30)[0]]), "teacher's vocabulary has 30"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    hidden, weight, _, teacher, _ = problem(dtype=torch.float32)
    given = dict(hidden=hidden, terms=[TopKTerm(teacher)], mask=None, vocab=31) | change
    with pytest.raises(ValueError, match=message):
        fused_linear_kd(given["hidden"], LMHead(weight, given["vocab"]), given["terms"], given["mask"])

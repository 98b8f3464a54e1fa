"""The objective: what it reads from a batch, how it shifts and masks, and what it refuses."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from losses_oracle import numpy_loss

from qat_lora.config import from_dict
from qat_lora.errors import CacheError, ConfigError
from qat_lora.losses.objective import (
    KL_NAMES,
    EstimatorName,
    ObjectiveConfig,
    choose_estimator,
    objective_loss,
    sparse_teacher_from_batch,
)
from qat_lora.types import LMHead

ROWS, LENGTH, VOCAB, K, WIDTH, DRAWS = 2, 6, 41, 5, 8, 7


def cached_batch(rng, temperatures=(1.0,), half=False):
    """Return teacher logits and a batch as the cache would serve it, made by plain numpy."""
    logits = rng.normal(size=(ROWS, LENGTH - 1, VOCAB)) * 3
    shifted = logits - logits.max(-1, keepdims=True)
    ids = np.argsort(-shifted, axis=-1, kind="stable")[..., :K]
    head = np.take_along_axis(shifted, ids, -1)
    batch = {
        "input_ids": torch.tensor(rng.integers(0, VOCAB, size=(ROWS, LENGTH)), dtype=torch.int32),
        "document_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int32),
        "target_mask": torch.tensor(rng.random((ROWS, LENGTH - 1)) < 0.7),
        "head_ids": torch.tensor(ids, dtype=torch.int32),
        "head_logits": torch.tensor(head.astype(np.float16) if half else head).float(),
    }
    table = rng.normal(size=(VOCAB, VOCAB)) + 4 * np.eye(
        VOCAB
    )  # a teacher as wide as its vocabulary, so that any logits
    batch["teacher_hidden"] = torch.tensor(np.linalg.solve(table, logits[..., None])[..., 0])  # are its own
    batch["teacher_table"] = torch.tensor(table)
    probs = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    outside = probs.copy()
    np.put_along_axis(outside, ids, 0, -1)
    for name, p in {"draw_ids": probs, "tail_draw_ids": outside}.items():
        flat = (p / p.sum(-1, keepdims=True)).reshape(-1, VOCAB)
        drawn = np.stack([rng.choice(VOCAB, size=DRAWS, p=row) for row in flat])
        batch[name] = torch.tensor(drawn.reshape(ROWS, LENGTH - 1, DRAWS), dtype=torch.int32)
    for t in temperatures:
        weights = np.exp(shifted / t)
        outside = weights.copy()
        np.put_along_axis(outside, ids, 0, -1)
        suffix = "" if t == 1 else f"@{t:g}"
        batch["lse" + suffix] = torch.tensor(np.log(weights.sum(-1))).float()
        batch["log_tail" + suffix] = torch.tensor(np.log(outside.sum(-1) / weights.sum(-1))).float()
    return logits, batch


def with_tail_entropy(batch, logits):
    """Return the batch with the tail draws' own entropy, a row's mean over its targets, by plain loops."""
    means = []
    for b in range(len(logits)):
        weighted = []
        for p in range(logits.shape[1]):
            log_t = logits[b, p] - np.logaddexp.reduce(logits[b, p])
            mass = np.exp(np.delete(log_t, batch["head_ids"][b, p])).sum()
            weight = float(batch["target_mask"][b, p]) * float(
                batch.get("weights", torch.ones(logits.shape))[b, p].max()
            )
            weighted.append((weight, -mass * log_t[batch["tail_draw_ids"][b, p]].mean()))
        means.append([sum(w * x for w, x in weighted) / max(1e-9, sum(w for w, _ in weighted))])
    return batch | {"tail_entropy": torch.tensor(means, dtype=torch.float32)}


def student(rng):
    hidden = torch.tensor(rng.normal(size=(ROWS, LENGTH, WIDTH)), dtype=torch.float32, requires_grad=True)
    return hidden, LMHead(torch.tensor(rng.normal(size=(VOCAB + 3, WIDTH)), dtype=torch.float32), VOCAB)


def teacher_lm_head(batch):
    return LMHead(batch["teacher_table"], VOCAB)


def log_probs(hidden, head):
    logits = (hidden.detach().double() @ head.weight_VH.double().T)[..., :VOCAB].numpy()
    return logits - np.logaddexp.reduce(logits, axis=-1)[..., None]


def kept_positions(batch):
    return [(b, p) for b in range(ROWS) for p in range(LENGTH - 1) if batch["target_mask"][b, p]]


@pytest.mark.parametrize("temperature", [1.0, 2.0, 1.5])
@pytest.mark.parametrize("estimator", ["ghost", "renorm", "reverse"])
def test_every_term_at_every_kept_position(estimator, temperature):
    rng = np.random.default_rng(0)
    logits, batch = cached_batch(rng, (1.0, temperature))
    hidden, head = student(rng)
    config = ObjectiveConfig(
        estimator=estimator, temperature=temperature, kd_weight=0.5, ce_weight=0.25, hard_top1_weight=2.0
    )
    result = objective_loss(hidden, head, batch, config)
    own = (hidden.detach().double() @ head.weight_VH.double().T)[..., :VOCAB].numpy()
    kd = ce = top1 = 0.0
    for b, p in kept_positions(batch):
        kd += numpy_loss(estimator, own[b, p], logits[b, p], K, temperature) * temperature**2
        log_p = own[b, p] - np.logaddexp.reduce(own[b, p])
        ce -= log_p[int(batch["input_ids"][b, p + 1])]
        top1 -= log_p[logits[b, p].argmax()]
    assert result.token_count.item() == len(kept_positions(batch))
    assert set(result.terms) == {"kd", "ce", "hard_top1", "kl_bound"}
    assert result.terms["kd"].item() == pytest.approx(kd, rel=2e-5)
    assert result.terms["ce"].item() == pytest.approx(ce, rel=1e-5)
    assert result.terms["hard_top1"].item() == pytest.approx(top1, rel=1e-5)
    assert result.loss_sum.item() == pytest.approx(0.5 * kd + 0.25 * ce + 2 * top1, rel=2e-5)
    assert not any(term.requires_grad for term in result.terms.values())


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_full_is_the_dense_kl_at_any_temperature(temperature):
    rng = np.random.default_rng(10)
    logits, batch = cached_batch(rng)
    hidden, head = student(rng)
    config = ObjectiveConfig(estimator="full", temperature=temperature, ce_weight=0.5)
    sparse_free = {name: value for name, value in batch.items() if name not in ("head_ids", "head_logits", "lse")}
    result = objective_loss(hidden, head, sparse_free, config, teacher_lm_head=teacher_lm_head(batch))
    own = (hidden.detach().double() @ head.weight_VH.double().T)[..., :VOCAB].numpy()
    kept = kept_positions(batch)
    expected = sum(numpy_loss("full", own[at], logits[at], K, temperature) for at in kept) * temperature**2
    assert result.terms["kd"].item() == pytest.approx(expected, rel=2e-5)
    ce = -sum(log_probs(hidden, head)[b, p, int(batch["input_ids"][b, p + 1])] for b, p in kept)
    assert result.loss_sum.item() == pytest.approx(expected + 0.5 * ce, rel=2e-5)


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0, 1.6])
def test_a_temperature_that_moves_is_data_of_the_step(progress):
    """Up to its end: the step that measures a trial of `--lr auto` lies behind it."""
    rng = np.random.default_rng(12)
    logits, batch = cached_batch(rng)
    hidden, head = student(rng)
    config = ObjectiveConfig(estimator="full", temperature=1.0, temperature_end=3.0, ce_weight=0.5)
    now = {name: torch.tensor([value]) for name, value in config.numbers_at(progress).items()}
    result = objective_loss(hidden, head, batch, config, now, teacher_lm_head(batch))
    result.loss_sum.backward()
    temperature = 1 + 2 * min(progress, 1.0)
    own = (hidden.detach().double() @ head.weight_VH.double().T)[..., :VOCAB].numpy()
    for name, t in {"kd": temperature, "kl": 1.0}.items():
        expected = sum(numpy_loss("full", own[at], logits[at], K, t) for at in kept_positions(batch)) * t**2
        assert result.terms[name].item() == pytest.approx(expected, rel=2e-5)
    fixed, moved = ObjectiveConfig(estimator="full", temperature=temperature, ce_weight=0.5), hidden.grad.clone()
    hidden.grad = None
    objective_loss(hidden, head, batch, fixed, None, teacher_lm_head(batch)).loss_sum.backward()
    torch.testing.assert_close(moved, hidden.grad, rtol=1e-5, atol=1e-7)
    assert config.cached_temperatures == (1.0,) and config.temperatures == (1.0,)


@pytest.mark.parametrize("draws", [None, 1, 3])
def test_draws_weigh_what_they_stand_for(draws):
    rng = np.random.default_rng(11)
    logits, batch = cached_batch(rng)
    hidden, head = student(rng)
    log_p, used = log_probs(hidden, head), draws or DRAWS
    hybrid = sampled = 0.0
    for at in kept_positions(batch):
        log_t = logits[at] - np.logaddexp.reduce(logits[at])
        order = np.argsort(-log_t)
        mass = np.exp(log_t[order[K:]]).sum()
        hybrid += sum(np.exp(log_t[j]) * (log_t[j] - log_p[at][j]) for j in order[:K])
        hybrid -= sum(mass / used * log_p[at][j] for j in batch["tail_draw_ids"][at][:used].tolist())
        sampled -= sum(log_p[at][j] / used for j in batch["draw_ids"][at][:used].tolist())
    for name, expected in {"hybrid": hybrid, "sampled": sampled}.items():
        result = objective_loss(hidden, head, batch, ObjectiveConfig(estimator=name, draws=draws))
        assert result.terms["kd"].item() == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(
    "settings",
    [
        *({"estimator": name, "temperature": t} for name in ("ghost", "renorm", "reverse", "full") for t in (1.0, 2.5)),
        *({"estimator": name, "ce_weight": 0.5} for name in ("hybrid", "sampled", "auto")),
        {"kd_weight": 0.0, "ce_weight": 1.0},
        {"kd_weight": 0.0, "hard_top1_weight": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("walk", ["positions", "vocabulary"])
@pytest.mark.parametrize("held", [True, False], ids=["entropy", "none"])
def test_kl_of_the_log_is_that_of_evaluations_whatever_is_minimised(settings, walk, held):
    rng = np.random.default_rng(15)
    logits, batch = cached_batch(rng, (1.0, settings.get("temperature", 1.0)))
    if held:
        batch = with_tail_entropy(batch | {"weights": torch.tensor(rng.random((ROWS, LENGTH - 1)) * 3).float()}, logits)
    hidden, head = student(rng)
    config = ObjectiveConfig(**settings, loss_walk=walk)
    result = objective_loss(hidden, head, batch, config, teacher_lm_head=teacher_lm_head(batch))
    own, log_p = (hidden.detach().double() @ head.weight_VH.double().T)[..., :VOCAB].numpy(), log_probs(hidden, head)
    exact, expected = settings.get("estimator") == "full", 0.0
    for at in kept_positions(batch):
        weight = float(batch["weights"][at]) if held else 1.0
        if exact or not held:
            expected += weight * numpy_loss("full" if exact else "ghost", own[at], logits[at], K)
            continue
        log_t = logits[at] - np.logaddexp.reduce(logits[at])
        mass = np.exp(np.delete(log_t, batch["head_ids"][at])).sum()
        ratio, drawn = log_t - log_p[at], batch["tail_draw_ids"][at].numpy()
        expected += weight * (sum(np.exp(log_t[j]) * ratio[j] for j in batch["head_ids"][at].tolist()))
        expected += weight * mass * ratio[drawn].mean()
    name = "kl" if exact or held else "kl_bound"
    assert config.kl_name(batch) == name and {*KL_NAMES} & set(result.terms) == {name}
    assert result.terms[name].item() == pytest.approx(expected, rel=2e-5)
    measure = ObjectiveConfig("full" if exact else "ghost")
    evaluated = objective_loss(hidden, head, batch, measure, teacher_lm_head=teacher_lm_head(batch))
    assert result.terms[name].item() == pytest.approx(evaluated.terms[name].item(), rel=1e-6)
    result.loss_sum.backward()
    plain, own_terms = hidden.grad.clone(), {name: value for name, value in batch.items() if name != "tail_entropy"}
    hidden.grad = None
    objective_loss(hidden, head, own_terms, config, teacher_lm_head=teacher_lm_head(batch)).loss_sum.backward()
    assert torch.equal(plain, hidden.grad)  # what is measured beside it moves no gradient


@pytest.mark.parametrize("settings", [{}, {"estimator": "ghost"}, {"kd_weight": 0.0, "ce_weight": 1.0}], ids=str)
def test_kl_of_every_possible_draw_by_its_probability_is_the_kl_of_the_whole_vocabulary(settings):
    """A row for each token of the tail, drawn alone, with the teacher's probability as its weight."""
    rng = np.random.default_rng(17)
    logits, batch = cached_batch(rng)
    hidden, head = student(rng)
    kept = [[b, p] for b, p in kept_positions(batch)]
    own = (hidden.detach().double() @ head.weight_VH.double().T)[..., :VOCAB].numpy()
    exact = bound = found = 0.0
    for b, p in kept:
        exact += numpy_loss("full", own[b, p], logits[b, p], K)
        bound += numpy_loss("ghost", own[b, p], logits[b, p], K)
        probs = np.exp(logits[b, p] - np.logaddexp.reduce(logits[b, p]))
        tail = np.setdiff1d(np.arange(VOCAB), batch["head_ids"][b, p].numpy())
        one = {
            name: value[b : b + 1, p : p + 1].expand(len(tail), *value[b : b + 1, p : p + 1].shape[1:])
            for name, value in batch.items()
            if name not in ("teacher_table", "input_ids", "document_ids")
        }
        one |= {name: batch[name][b : b + 1, p : p + 2].expand(len(tail), 2) for name in ("input_ids", "document_ids")}
        one["tail_draw_ids"] = torch.tensor(tail, dtype=torch.int32)[:, None, None]
        one["weights"] = torch.tensor(probs[tail] / probs[tail].sum(), dtype=torch.float32)[:, None]
        one = with_tail_entropy(one, np.broadcast_to(logits[b : b + 1, p : p + 1], (len(tail), 1, VOCAB)))
        states = hidden[b : b + 1, p : p + 2].expand(len(tail), -1, -1)
        found += objective_loss(states, head, one, ObjectiveConfig(**settings)).terms["kl"].item()
    assert found == pytest.approx(exact, rel=1e-5)
    assert bound < 0.95 * exact  # positive control: what was logged as the KL before


def test_kl_of_draws_is_unbiased_and_zero_for_the_teacher_itself():
    rng = np.random.default_rng(18)
    logits, batch = cached_batch(rng)
    hidden, head = student(rng)
    own = (hidden.detach().double() @ head.weight_VH.double().T)[..., :VOCAB].numpy()
    kept, count, values = kept_positions(batch), 200, []
    exact = sum(numpy_loss("full", own[at], logits[at], K) for at in kept)
    for _ in range(count):
        for at in kept:
            probs = np.exp(logits[at] - np.logaddexp.reduce(logits[at]))
            probs[batch["head_ids"][at].numpy()] = 0
            drawn = rng.choice(VOCAB, size=DRAWS, p=probs / probs.sum())
            batch["tail_draw_ids"][at] = torch.tensor(drawn, dtype=torch.int32)
        given = with_tail_entropy(batch, logits)
        values.append(objective_loss(hidden, head, given, ObjectiveConfig()).terms["kl"].item())
    error = np.std(values) / math.sqrt(count)
    assert abs(np.mean(values) - exact) < 4 * error < 0.02 * exact
    bound = sum(numpy_loss("ghost", own[at], logits[at], K) for at in kept)
    assert exact - bound > 20 * error  # positive control
    table = LMHead(batch["teacher_table"].float(), VOCAB)
    states = torch.nn.functional.pad(batch["teacher_hidden"].float(), (0, 0, 0, 1))
    assert objective_loss(states, table, given, ObjectiveConfig()).terms["kl"].item() == pytest.approx(0, abs=1e-3)


def test_fewer_draws_in_the_loss_leave_the_logs_kl_that_of_all():
    rng = np.random.default_rng(19)
    logits, batch = cached_batch(rng)
    batch = with_tail_entropy(batch, logits)
    hidden, head = student(rng)
    found = [objective_loss(hidden, head, batch, ObjectiveConfig("hybrid", draws=n)).terms for n in (None, 2)]
    assert found[0]["kl"].item() == pytest.approx(found[1]["kl"].item(), rel=1e-5)
    assert found[0]["kd"].item() != pytest.approx(found[1]["kd"].item(), rel=1e-3)


def test_kl_of_the_log_needs_a_teacher_and_logits():
    rng = np.random.default_rng(16)
    _, batch = cached_batch(rng)
    hidden, head = student(rng)
    text = {name: batch[name] for name in ("input_ids", "document_ids", "target_mask")}
    for config, given in (
        (ObjectiveConfig(kd_weight=0.0, ce_weight=1.0), text),
        (ObjectiveConfig(estimator="sampled"), text | {"draw_ids": batch["draw_ids"]}),
        (ObjectiveConfig(kd_weight=0.0, hidden_weight=1.0), batch | {"teacher_hidden": hidden.detach()[:, 1:]}),
    ):
        assert config.kl_name(given) is None
        assert not {*KL_NAMES} & set(objective_loss(hidden, head, given, config).terms)


def test_draws_of_an_empty_tail_count_for_nothing():
    rng = np.random.default_rng(12)
    _, batch = cached_batch(rng)
    hidden, head = student(rng)
    batch["log_tail"] = torch.full_like(batch["log_tail"], -math.inf)
    batch["tail_draw_ids"] = torch.zeros_like(batch["tail_draw_ids"])
    first = objective_loss(hidden, head, batch, ObjectiveConfig(estimator="hybrid")).loss_sum
    batch["tail_draw_ids"] += 3
    assert objective_loss(hidden, head, batch, ObjectiveConfig(estimator="hybrid")).loss_sum == first


def test_hidden_error_is_relative_to_the_teacher():
    rng = np.random.default_rng(13)
    _, batch = cached_batch(rng)
    hidden, head = student(rng)
    batch["teacher_hidden"] = torch.tensor(rng.normal(size=(ROWS, LENGTH - 1, WIDTH)) * 50).half()
    config = ObjectiveConfig(kd_weight=0.0, hidden_weight=0.5)
    result = objective_loss(hidden, head, batch, config)
    result.loss_sum.backward()
    own, teacher = hidden.detach().double().numpy(), batch["teacher_hidden"].double().numpy()
    expected = sum(((own[at] - teacher[at]) ** 2).sum() / (teacher[at] ** 2).sum() for at in kept_positions(batch))
    assert set(result.terms) == {"hidden"}
    assert result.terms["hidden"].item() == pytest.approx(expected, rel=1e-6)
    assert result.loss_sum.item() == pytest.approx(0.5 * expected, rel=1e-6)
    assert torch.equal(hidden.grad[:, :-1].abs().sum(-1) > 0, batch["target_mask"])
    with pytest.raises(ConfigError, match=r"hidden_weight: .* 41 wide.*8"):
        objective_loss(hidden, head, cached_batch(rng)[1], config)
    both = objective_loss(hidden, head, batch, ObjectiveConfig(hidden_weight=0.5))
    assert both.loss_sum.item() == pytest.approx((both.terms["kd"] + 0.5 * both.terms["hidden"]).item())


@pytest.mark.parametrize(
    "settings,missing,message",
    [
        ({"estimator": "hybrid"}, "tail_draw_ids", r"tail_draw_ids.*--tail-draws 8"),
        ({"estimator": "sampled"}, "draw_ids", r"draw_ids.*--draws 32"),
        ({"estimator": "full"}, "teacher_hidden", r"teacher_hidden.*--hidden"),
        ({"hidden_weight": 1.0}, "teacher_hidden", r"teacher_hidden.*hidden_weight.*--hidden"),
        ({"estimator": "full"}, "", r"teacher_head.*--hidden"),
        ({"estimator": "sampled", "draws": 8}, "", r"draws: 8 .* holds 7.*--draws 8"),
        ({"estimator": "hybrid", "draws": 9}, "", r"draws: 9 .* holds 7.*--tail-draws 9"),
    ],
)
def test_what_the_cache_lacks_is_named_with_its_flag(settings, missing, message):
    rng = np.random.default_rng(14)
    _, batch = cached_batch(rng)
    hidden, head = student(rng)
    config = ObjectiveConfig(**settings)
    assert not missing or missing in config.optional_arrays
    batch.pop(missing, None)
    with pytest.raises(CacheError, match=message):
        objective_loss(hidden, head, batch, config)


def test_the_anchor_is_no_term_of_the_cached_batch():
    rng = np.random.default_rng(15)
    _, batch = cached_batch(rng)
    hidden, head = student(rng)
    config = ObjectiveConfig(anchor_weight=0.5)
    assert set(config.weights_at(0.3)) == {"kd", "anchor"}
    assert set(objective_loss(hidden, head, batch, config).terms) == {"kd", "kl_bound"}


@pytest.mark.parametrize("settings", [{}, {"estimator": "full"}, {"estimator": "hybrid"}, {"hidden_weight": 1.0}])
def test_gradient_reaches_kept_positions_only_and_never_the_last(settings):
    rng = np.random.default_rng(1)
    _, batch = cached_batch(rng)
    hidden, head = student(rng)
    head_of_teacher = teacher_lm_head(batch)
    if "hidden_weight" in settings:
        batch["teacher_hidden"] = torch.tensor(rng.normal(size=(ROWS, LENGTH - 1, WIDTH)))
    batch["teacher_hidden"][~batch["target_mask"]] = math.nan
    result = objective_loss(hidden, head, batch, ObjectiveConfig(**settings), teacher_lm_head=head_of_teacher)
    result.loss_sum.backward()
    moved = hidden.grad.abs().sum(-1) > 0
    assert torch.equal(moved[:, :-1], batch["target_mask"])
    assert not moved[:, -1].any()


def test_all_masked_batch_of_zeros_gives_exactly_zero():
    rng = np.random.default_rng(2)
    _, batch = cached_batch(rng)
    hidden, head = student(rng)
    empty = {name: torch.zeros_like(value) for name, value in batch.items()}
    empty["teacher_hidden"] = torch.zeros(ROWS, LENGTH - 1, WIDTH)
    for estimator in get_args(EstimatorName):
        config = ObjectiveConfig(estimator=estimator, ce_weight=1.0, hard_top1_weight=1.0, hidden_weight=1.0)
        table = LMHead(torch.zeros(VOCAB, WIDTH), VOCAB)
        result = objective_loss(hidden, head, empty, config, teacher_lm_head=table)
        (gradient,) = torch.autograd.grad(result.loss_sum, hidden)
        assert result.loss_sum.item() == 0 == result.token_count.item(), estimator
        assert (gradient == 0).all()


def test_half_precision_head_loses_no_mass():
    rng = np.random.default_rng(3)
    _, batch = cached_batch(rng, half=True)
    teacher = sparse_teacher_from_batch(batch)
    total = teacher.log_probs_NK.double().exp().sum(-1) + teacher.log_tail_N.double().exp()
    assert (total - 1).abs().max() < 1e-6
    raw = (batch["head_logits"] - batch["lse"][..., None]).double().exp().sum(-1) + batch["log_tail"].double().exp()
    assert (raw - 1).abs().max() > 2e-5  # positive control: what the rounding did


def test_temperature_that_the_cache_lacks_is_refused_with_the_flag():
    rng = np.random.default_rng(4)
    _, batch = cached_batch(rng, (1.0, 2.0))
    hidden, head = student(rng)
    with pytest.raises(CacheError, match=r"temperature 4: .*1,2 only.*--temperatures 1,2,4"):
        objective_loss(hidden, head, batch, ObjectiveConfig(temperature=4.0))


def test_batch_without_a_teacher():
    rng = np.random.default_rng(5)
    _, batch = cached_batch(rng)
    hidden, head = student(rng)
    plain = {name: batch[name] for name in ("input_ids", "document_ids", "target_mask")}
    with pytest.raises(CacheError, match="head_ids"):
        objective_loss(hidden, head, plain, ObjectiveConfig())
    result = objective_loss(hidden, head, plain, ObjectiveConfig(kd_weight=0.0, ce_weight=1.0))
    assert result.loss_sum.item() == pytest.approx(result.terms["ce"].item())


def test_annealing_is_linear_and_keeps_the_names():
    config = ObjectiveConfig(hard_top1_weight=1.0, hard_top1_end=0.0, ce_weight=0.1)
    assert [config.weights_at(x)["hard_top1"] for x in (-1, 0, 0.25, 1, 2)] == pytest.approx([1.0, 1.0, 0.75, 0.0, 0.0])
    assert {tuple(config.weights_at(x)) for x in (0, 0.5, 1)} == {("kd", "ce", "hard_top1")}
    assert ObjectiveConfig(hard_top1_weight=1.0).weights_at(0.0)["hard_top1"] == 1.0
    assert ObjectiveConfig(hard_top1_weight=0.3).weights_at(0.9)["hard_top1"] == 0.3


def test_weights_of_a_step_are_used_as_numbers_or_tensors():
    rng = np.random.default_rng(6)
    _, batch = cached_batch(rng)
    hidden, head = student(rng)
    config = ObjectiveConfig(hard_top1_weight=1.0, hard_top1_end=0.0)
    weights = config.weights_at(0.5)
    result = objective_loss(hidden, head, batch, config, weights)
    expected = result.terms["kd"] + 0.5 * result.terms["hard_top1"]
    torch.testing.assert_close(result.loss_sum.detach(), expected)
    tensors = {name: torch.tensor(value) for name, value in weights.items()}
    again = objective_loss(hidden, head, batch, config, tensors)
    torch.testing.assert_close(again.loss_sum, result.loss_sum)


@pytest.mark.parametrize(
    "settings,field",
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"kd_weight": -1.0}, "kd_weight"),
        ({"ce_weight": math.nan}, "ce_weight"),
        ({"hard_top1_end": -0.5}, "hard_top1_end"),
        ({"kd_weight": 0.0}, "nothing to learn"),
        ({"loss_chunk_mb": 0}, "loss_chunk_mb"),
        ({"estimator": "gost"}, "ghost"),
        ({"estimator": "hybrid", "temperature": 2.0}, "temperature 1"),
        ({"estimator": "sampled", "temperature": 2.0}, "temperature 1"),
        ({"hidden_weight": -1.0}, "hidden_weight"),
        ({"anchor_weight": math.inf}, "anchor_weight"),
        ({"kd_weight": 0.0, "anchor_weight": 1.0}, "nothing to learn"),
        ({"anchor_samples": 0}, "anchor_samples"),
        ({"draws": 0}, "draws"),
        ({"mixture": 0.3}, "mixture: for estimators jsd, skew, skew_reverse only"),
        ({"estimator": "hybrid", "mixture": 0.3}, "mixture: for .* it is hybrid"),
        ({"estimator": "jsd", "mixture": 1.0}, "mixture"),
        ({"estimator": "jsd", "draws": 4}, "draws: for estimators hybrid, sampled only"),
        ({"estimator": "sampled", "temperature_schedule": "2,1"}, "whose draws are at temperature 1"),
        ({"temperature": 2.0, "temperature_schedule": "2,1"}, "leave --temperature out"),
        ({"temperature_schedule": "2,0"}, "numbers above 0"),
        ({"draws": 4}, "draws: for estimators hybrid, sampled only"),
        ({"temperature_end": 2.0}, "temperature_end: .* only estimator full makes it at any; give --estimator full"),
        ({"estimator": "full", "temperature_end": 0.0}, "temperature_end"),
        ({"estimator": "full", "temperature_end": 2.0, "temperature_schedule": "2,1"}, "temperature_end"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, field):
    with pytest.raises(ConfigError, match=field):
        from_dict(ObjectiveConfig, settings)


def test_auto_is_hybrid_where_there_are_draws_from_the_tail_and_ghost_elsewhere():
    for arrays, temperature, chosen in (
        ({}, 1.0, "ghost"),
        ({"tail_draw_ids"}, 1.0, "hybrid"),
        ({"tail_draw_ids"}, 2.0, "ghost"),
    ):
        assert choose_estimator(ObjectiveConfig(temperature=temperature), arrays) == chosen
    assert choose_estimator(ObjectiveConfig("renorm"), {"tail_draw_ids"}) == "renorm"
    assert choose_estimator(ObjectiveConfig(temperature_schedule=(0.5, 1.0)), {"tail_draw_ids"}) == "ghost"


def test_a_schedule_steps_among_temperatures_by_progress_alone():
    config = ObjectiveConfig("ghost", temperature_schedule=(2.0, 2.0, 1.0))
    assert config.cached_temperatures == (1.0, 2.0)
    steps = [config.at(step / 9) for step in range(9)]
    assert [now.temperature for now in steps] == [2.0] * 6 + [1.0] * 3
    assert config.at(1.0).temperature == 1.0 and not steps[0].temperature_schedule
    assert ObjectiveConfig().at(0.5) == ObjectiveConfig()


@pytest.mark.parametrize("name", ["jsd", "skew", "skew_reverse"])
def test_mixtures_are_settings_and_the_share_is_theirs(name):
    rng = np.random.default_rng(8)
    _, batch = cached_batch(rng)
    hidden, head = student(rng)
    values = [objective_loss(hidden, head, batch, ObjectiveConfig(name, share)).loss_sum for share in (None, 0.1, 0.5)]
    default = 2 if name == "jsd" else 1
    torch.testing.assert_close(values[0], values[default])
    assert values[1] != values[2]


def test_weights_of_a_batch_weigh_its_positions():
    rng = np.random.default_rng(8)
    _, batch = cached_batch(rng)
    hidden, head = student(rng)
    config = ObjectiveConfig("ghost", ce_weight=0.5, hard_top1_weight=0.1)
    mask = batch["target_mask"].float()
    halves = [objective_loss(hidden, head, batch | {"weights": mask * w}, config) for w in (0.5, 2.0)]
    whole = objective_loss(hidden, head, batch, config)
    for half, factor in zip(halves, (0.5, 2.0), strict=True):
        torch.testing.assert_close(half.loss_sum, whole.loss_sum * factor)
        assert half.token_count == whole.token_count * factor

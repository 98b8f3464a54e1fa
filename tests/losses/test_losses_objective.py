"""The objective: what it reads from a batch, how it shifts and masks, and what it refuses."""

import math

import numpy as np
import pytest
import torch
from losses_oracle import numpy_loss

from qat_lora.config import from_dict
from qat_lora.errors import CacheError, ConfigError
from qat_lora.losses.objective import ObjectiveConfig, objective_loss
from qat_lora.losses.teacher import sparse_teacher_from_batch
from qat_lora.types import OutputHead

ROWS, LENGTH, VOCAB, K, WIDTH = 2, 6, 41, 5, 8


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
    for t in temperatures:
        weights = np.exp(shifted / t)
        outside = weights.copy()
        np.put_along_axis(outside, ids, 0, -1)
        suffix = "" if t == 1 else f"@{t:g}"
        batch["lse" + suffix] = torch.tensor(np.log(weights.sum(-1))).float()
        batch["log_tail" + suffix] = torch.tensor(np.log(outside.sum(-1) / weights.sum(-1))).float()
    return logits, batch


def student(rng):
    hidden = torch.tensor(rng.normal(size=(ROWS, LENGTH, WIDTH)), dtype=torch.float32, requires_grad=True)
    return hidden, OutputHead(torch.tensor(rng.normal(size=(VOCAB + 3, WIDTH)), dtype=torch.float32), VOCAB)


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
    assert set(result.terms) == {"kd", "ce", "hard_top1"}
    assert result.terms["kd"].item() == pytest.approx(kd, rel=2e-5)
    assert result.terms["ce"].item() == pytest.approx(ce, rel=1e-5)
    assert result.terms["hard_top1"].item() == pytest.approx(top1, rel=1e-5)
    assert result.loss_sum.item() == pytest.approx(0.5 * kd + 0.25 * ce + 2 * top1, rel=2e-5)
    assert not any(term.requires_grad for term in result.terms.values())


def test_gradient_reaches_kept_positions_only_and_never_the_last():
    rng = np.random.default_rng(1)
    _, batch = cached_batch(rng)
    hidden, head = student(rng)
    objective_loss(hidden, head, batch, ObjectiveConfig()).loss_sum.backward()
    moved = hidden.grad.abs().sum(-1) > 0
    assert torch.equal(moved[:, :-1], batch["target_mask"])
    assert not moved[:, -1].any()


def test_all_masked_batch_of_zeros_gives_exactly_zero():
    rng = np.random.default_rng(2)
    _, batch = cached_batch(rng)
    hidden, head = student(rng)
    empty = {name: torch.zeros_like(value) for name, value in batch.items()}
    config = ObjectiveConfig(ce_weight=1.0, hard_top1_weight=1.0)
    result = objective_loss(hidden, head, empty, config)
    result.loss_sum.backward()
    assert result.loss_sum.item() == 0 == result.token_count.item()
    assert (hidden.grad == 0).all()


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
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, field):
    with pytest.raises(ConfigError, match=field):
        from_dict(ObjectiveConfig, settings)

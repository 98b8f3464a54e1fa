"""Dense losses against plain loops."""

import math

import numpy as np
import pytest
import torch
from losses_oracle import log_softmax

from qat_lora.losses.full_vocab import hidden_error_sum, kd_soft_ce


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

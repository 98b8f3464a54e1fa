"""Schedule values by hand, the optimizer against torch's, refusals."""

import math

import pytest
import torch
from torch import nn

from qat_lora.errors import ConfigError
from qat_lora.runtime.native import NativeRuntime
from qat_lora.train.optim import (
    RATES,
    OptimConfig,
    averaged,
    build_optimizer,
    follows_lr,
    gradients_apart,
    lr_factor,
    optimized,
    rates,
    set_lr,
)
from qat_lora.train.step import optimizer_step


def groups(**tensors):
    """Trained tensors by kind, named by their number."""
    return {kind: {f"{kind}{i}": p for i, p in enumerate(listed)} for kind, listed in tensors.items()}


class OneByOne(NativeRuntime):
    """A runtime whose tensors share no memory, as on XLA."""

    shares_memory = False


@pytest.fixture(params=[NativeRuntime, OneByOne])
def runtime(request):
    return request.param("cpu")


def test_schedule_by_hand():
    cosine = OptimConfig(warmup_steps=4, min_lr_ratio=0.2)
    values = [lr_factor(cosine, step, 9) for step in range(9)]
    half = math.sqrt(0.5) / 2
    by_hand = [0.25, 0.5, 0.75, 1.0, 1.0, 0.2 + 0.8 * (0.5 + half), 0.6, 0.2 + 0.8 * (0.5 - half), 0.2]
    assert values == pytest.approx(by_hand, abs=1e-12)
    constant = OptimConfig(warmup_steps=2, schedule="constant")
    assert [lr_factor(constant, step, 5) for step in range(5)] == [0.5, 1, 1, 1, 1]


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 2), (1, 1), (5, 5), (9, 5), (4, 5)])
def test_schedule_at_its_edges_stays_above_zero_and_at_most_one(warmup, steps):
    factors = [lr_factor(OptimConfig(warmup_steps=warmup), step, steps) for step in range(steps)]
    assert all(0 < factor <= 1 for factor in factors)


def test_the_last_step_has_the_least_rate():
    config = OptimConfig(warmup_steps=20, min_lr_ratio=0.1)
    assert lr_factor(config, 999, 1000) == pytest.approx(0.1)
    assert lr_factor(config, 5000, 1000) == pytest.approx(0.1)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_optimizer_is_adamw_with_two_groups(decay, runtime):
    torch.manual_seed(0)
    adapter = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))]
    scales = [nn.Parameter(torch.randn(6))]
    twins = [nn.Parameter(p.detach().double()) for p in adapter + scales]
    config = OptimConfig(lr=0.1, scale_lr=0.03, weight_decay=decay, adam_beta2=0.97)
    ours = build_optimizer(config, groups(adapter=adapter, scales=scales), runtime)
    theirs_groups = [
        {"params": twins[:2], "lr": 0.1, "weight_decay": decay},
        {"params": twins[2:], "lr": 0.03, "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(theirs_groups, betas=(0.9, 0.97))
    for step in range(30):
        factor = lr_factor(OptimConfig(warmup_steps=5), step, 30)
        set_lr(ours, factor)
        assert rates(ours) == pytest.approx({"lr": 0.1 * factor, "lr_scales": 0.03 * factor})
        for group, peak in zip(theirs.param_groups, (0.1, 0.03), strict=True):
            group["lr"] = peak * factor
        for parameter, twin in zip(adapter + scales, twins, strict=True):
            gradient = torch.randn(parameter.shape) * 10.0 ** (step % 5 - 3)
            parameter.grad.copy_(gradient)
            twin.grad = gradient.double()
        ours.step()
        theirs.step()
    for parameter, twin in zip(adapter + scales, twins, strict=True):
        torch.testing.assert_close(parameter.detach().double(), twin.detach(), rtol=1e-5, atol=1e-6)


def test_state_and_gradients_exist_before_the_first_step_and_keep_their_names(runtime):
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = build_optimizer(OptimConfig(), groups(adapter=parameters[:1], scales=parameters[1:]), runtime)
    before = {id(value) for p in parameters for value in optimizer.state[p].values()}
    assert all(p.grad is not None and not p.grad.any() for p in parameters)
    optimizer.step()
    assert {id(value) for p in parameters for value in optimizer.state[p].values()} == before
    assert all(set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"} for p in parameters)


def test_scales_alone_and_adapters_alone_train(runtime):
    one = nn.Parameter(torch.ones(1))
    assert len(build_optimizer(OptimConfig(), groups(adapter=[one]), runtime).param_groups) == 1
    scales = build_optimizer(OptimConfig(scale_lr=7), groups(adapter=[], scales=[one]), runtime)
    assert scales.param_groups[0]["peak_lr"] == 7
    with pytest.raises(ConfigError, match="nothing to train"):
        build_optimizer(OptimConfig(), groups(adapter=[]), runtime)


def test_each_kind_has_its_rate_and_only_weights_decay(runtime):
    config = OptimConfig(lr=1.0, scale_lr=2.0, norm_lr=3.0, weight_decay=0.5)
    kinds = {kind: [nn.Parameter(torch.ones(1))] for kind in RATES}
    made = build_optimizer(config, groups(**kinds), runtime).param_groups
    assert [group["peak_lr"] for group in made] == [1.0, 1.0, 2.0, 2.0 / 32, 2.0, 3.0]
    assert [group["weight_decay"] for group in made] == [0.5, 0.5, 0, 0, 0, 0]


def test_a_log_has_the_rate_that_each_kind_has(runtime):
    kinds = {kind: [nn.Parameter(torch.ones(1))] for kind in RATES}
    made = rates(build_optimizer(OptimConfig(lr=1.0, scale_lr=2.0), groups(**kinds), runtime))
    assert made == {"lr": 1.0, "lr_scales": 2.0, "lr_block_scales": 2.0 / 32, "lr_lut": 2.0, "lr_norms": 1 / 3}
    assert rates(build_optimizer(OptimConfig(lr=1.0), groups(scales=kinds["scales"]), runtime)) == {"lr_scales": 0.5}


def test_what_has_a_rate_of_its_own_does_not_follow_lr():
    assert all(follows_lr(OptimConfig(), kind) for kind in RATES)
    own = OptimConfig(scale_lr=1e-4, norm_lr=1e-4)
    assert {kind for kind in RATES if follows_lr(own, kind)} == {"adapter", "weights"}


@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_the_average_is_the_bias_corrected_one(decay, runtime):
    """Against the textbook form in float64: m = d m + (1 - d) p from zero, divided by 1 - d^t."""
    torch.manual_seed(1)
    parameter = nn.Parameter(torch.randn(5))
    optimizer = build_optimizer(OptimConfig(lr=0.1, ema=decay), groups(adapter=[parameter]), runtime)
    start = parameter.detach().clone()
    with averaged(optimizer):
        assert torch.equal(parameter, start)  # before the first step the average is the start
    m = torch.zeros(5, dtype=torch.float64)
    for step in range(1, 8):
        parameter.grad.copy_(torch.randn(5))
        optimizer.step()
        raw = parameter.detach().clone()
        m = decay * m + (1 - decay) * raw.double()
        with averaged(optimizer):
            torch.testing.assert_close(parameter.detach().double(), m / (1 - decay**step), rtol=1e-5, atol=1e-6)
            assert torch.equal(optimizer.state[parameter]["average"], raw)
        assert torch.equal(parameter, raw)


def test_an_error_while_averaged_puts_the_raw_tensors_back(runtime):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = build_optimizer(OptimConfig(ema=0.9), groups(adapter=[parameter]), runtime)
    parameter.data.fill_(3.0)
    with pytest.raises(RuntimeError), averaged(optimizer):
        assert (parameter == 1).all()
        raise RuntimeError
    assert (parameter == 3).all()


def test_gradients_that_are_made_apart_add_up(runtime, monkeypatch):
    """Over two backward passes, with a large tensor among them, and one that the second pass does not reach."""
    monkeypatch.setattr("qat_lora.train.optim.SMALL", 50)
    tensors = [nn.Parameter(torch.randn(size)) for size in (4, 49, 60)]
    optimizer = build_optimizer(OptimConfig(), groups(adapter=tensors), runtime)
    places = [p.grad.data_ptr() for p in tensors]
    for reached in (tensors, tensors[1:]):
        with gradients_apart(optimizer):
            sum((p * p.detach()).sum() for p in reached).backward()
    assert [p.grad.data_ptr() for p in tensors] == places
    for p, times in zip(tensors, (1, 2, 2), strict=True):
        torch.testing.assert_close(p.grad, times * p.detach())
    whole = sum(p.grad.abs().sum() for p in optimized(optimizer))
    torch.testing.assert_close(whole, sum(p.grad.abs().sum() for p in tensors))
    with pytest.raises(RuntimeError, match="in the middle"), gradients_apart(optimizer):
        raise RuntimeError("in the middle")
    assert [p.grad.data_ptr() for p in tensors] == places


def test_one_flat_tensor_is_many_tensors_bit_for_bit():
    """The whole step: clipping, both groups, weight decay, average; odd shapes, two types, one kind empty."""
    results = []
    for kind in (NativeRuntime, OneByOne):
        torch.manual_seed(2)
        adapter = [nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (129,), (64,), (7, 300), ())]
        norms = [nn.Parameter(torch.randn(33, dtype=torch.bfloat16)), nn.Parameter(torch.randn(5))]
        runtime, config = kind("cpu"), OptimConfig(lr=0.1, ema=0.9, weight_decay=0.1)
        optimizer = build_optimizer(config, groups(adapter=adapter, scales=[], norms=norms), runtime)
        tensors, norm = adapter + norms, []
        for _ in range(4):
            for p in tensors:
                p.grad.add_(torch.randn(p.shape).to(p.dtype))
            sums = {"loss": torch.tensor(3.0), "tokens": torch.tensor(2.0)}
            norm.append(optimizer_step(optimizer, optimized(optimizer), sums, 1e9, runtime)["grad_norm"])
            assert not any(p.grad.any() for p in tensors)
        states = [optimizer.state[p] for p in tensors]
        assert all(int(state["step"]) == 4 for state in states)
        with averaged(optimizer):
            averages = [p.detach().clone() for p in tensors]
        results.append((tensors + averages + [s[name] for s in states for name in ("exp_avg", "exp_avg_sq")], norm))
    (flat, flat_norms), (single, norms) = results
    assert all(torch.equal(a, b) for a, b in zip(flat, single, strict=True))
    torch.testing.assert_close(flat_norms, norms, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            (name, bad)
            for name in ("lr", "scale_lr", "norm_lr", "clip_grad_norm")
            for bad in (0, -1, math.nan, math.inf)
        ],
        *[("weight_decay", bad) for bad in (-0.1, math.nan, math.inf)],
        *[(name, bad) for name in ("adam_beta2", "ema") for bad in (-0.1, 1.0, 1.5, math.nan)],
        *[("min_lr_ratio", bad) for bad in (-0.1, 1.1, math.nan)],
        ("warmup_steps", -1),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"^{field}: "):
        OptimConfig(**{field: value})

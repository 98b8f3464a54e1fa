"""Second moments by direct computation; the adapter's start against the Eckart-Young bound."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import nn

from qat_lora.errors import ConfigError
from qat_lora.layers.calibrate.fit import Metric
from qat_lora.layers.calibrate.quantize import QuantizeConfig, quantize_model, second_moments
from qat_lora.layers.convert import add_lora, quant_layers
from qat_lora.layers.lora import LoraConfig
from qat_lora.options import QatOptions, QuantizeOptions
from qat_lora.quant.presets import preset


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(12, 8)
        self.o_proj = nn.Linear(8, 12)

    def forward(self, x):
        return self.o_proj(torch.tanh(self.q_proj(x)) * self.k_proj(x) + self.v_proj(x))


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"self_attn": Attention()}) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["self_attn"](x)
        return x


NAMES = [f"layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qkvo"]


def toy():
    torch.manual_seed(0)
    return Toy()


def batches():
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(b, 5, 12, generator=draw) for b in (3, 1, 4)]  # unequal: a mean of means would differ


def test_moments_are_means_over_all_tokens_and_shared_by_equal_inputs():
    model = toy()
    moments = second_moments(model, NAMES, iter(batches()), model)
    assert set(moments) == set(NAMES)
    seen = {"layers.0.self_attn.q_proj": [], "layers.0.self_attn.o_proj": [], "layers.1.self_attn.v_proj": []}
    with torch.no_grad():
        for x in batches():
            first, second = (layer["self_attn"] for layer in model.layers)
            middle = torch.tanh(first.q_proj(x)) * first.k_proj(x) + first.v_proj(x)
            seen["layers.0.self_attn.q_proj"].append(x)
            seen["layers.0.self_attn.o_proj"].append(middle)
            seen["layers.1.self_attn.v_proj"].append(x + first.o_proj(middle))
    for name, inputs in seen.items():
        rows = torch.cat([x.reshape(-1, x.shape[-1]) for x in inputs]).double().numpy()
        assert len(rows) == 40
        assert np.allclose(moments[name].numpy(), rows.T @ rows / 40, atol=1e-5)
    for i in (0, 1):
        shared = [moments[f"layers.{i}.self_attn.{p}_proj"] for p in "qkv"]
        assert shared[0] is shared[1] is shared[2]
    assert moments["layers.0.self_attn.q_proj"] is not moments["layers.1.self_attn.q_proj"]


def test_no_hook_stays_behind_even_when_the_forward_fails():
    model = toy()
    with pytest.raises(RuntimeError):
        second_moments(model, NAMES, [torch.randn(1, 5, 13)], model)
    assert not any(m._forward_pre_hooks for m in model.modules())


def problem(rows=20, columns=16, seed=0):
    draw = np.random.default_rng(seed)
    x = (
        draw.normal(size=(500, columns))
        * np.geomspace(5, 0.2, columns)
        @ np.linalg.qr(draw.normal(size=(columns, columns)))[0]
    )
    return draw.normal(size=(rows, columns)), x


def correction(error, moment, rank):
    return Metric.of(error, moment).correction(error, rank)[0]


@pytest.mark.parametrize("rank", [1, 4, 10])
def test_the_start_reaches_the_eckart_young_bound_in_output_error(rank):
    """The least output error of any rank-r correction is the tail of the singular values of E Xᵀ."""
    error, x = problem()
    moment = x.T @ x / len(x)
    moment += 1e-4 * np.diag(moment).mean() * np.eye(16)  # the floor: what counts as never seen
    bound = np.square(np.linalg.svd(error @ np.linalg.cholesky(moment), compute_uv=False)[rank:]).sum()
    given = torch.from_numpy(x.T @ x / len(x))
    factors = correction(torch.from_numpy(error), given, rank)
    assert factors.a_RI.shape == (rank, 16) and factors.b_OR.shape == (20, rank)
    left = error - factors.b_OR.double().numpy() @ factors.a_RI.double().numpy()
    assert np.trace(left @ moment @ left.T) == pytest.approx(bound, rel=1e-4)

    u, s, vh = np.linalg.svd(error)
    plain = error - (u[:, :rank] * s[:rank]) @ vh[:rank]
    ours, theirs = (np.square(x @ e.T).sum() for e in (left, plain))
    assert ours < 0.8 * theirs


def test_without_moments_it_is_the_plain_svd():
    error, _ = problem()
    factors = correction(torch.from_numpy(error), None, 4)
    u, s, vh = np.linalg.svd(error, full_matrices=False)
    ours = factors.b_OR.double().numpy() @ factors.a_RI.double().numpy()
    assert np.allclose(ours, (u[:, :4] * s[:4]) @ vh[:4], atol=1e-5)


def test_a_smaller_rank_is_a_slice_of_a_larger_one():
    error, x = problem()
    moment = torch.from_numpy(x.T @ x / len(x))
    large, small = (correction(torch.from_numpy(error), moment, rank) for rank in (9, 3))
    assert torch.allclose(large.b_OR[:, :3] @ large.a_RI[:3], small.b_OR @ small.a_RI, atol=1e-5)


def test_inputs_that_were_never_seen_get_no_infinite_weight():
    error, x = problem()
    x[:, 3] = 0
    for moment in (torch.from_numpy(x.T @ x / len(x)), torch.zeros(16, 16)):
        factors = correction(torch.from_numpy(error), moment, 4)
        assert all(torch.isfinite(f.half()).all() for f in (factors.a_RI, factors.b_OR))
        assert (factors.b_OR @ factors.a_RI).abs().max() < 10


def test_a_quantised_model_with_its_starts_is_nearer_than_without():
    x = torch.cat(batches())
    model = toy()
    expected = model(x).detach()
    moments = second_moments(model, NAMES, batches(), model)
    left = {}
    for method in ("absmax", "mse", "gptq"):
        model = toy()
        starts = quantize_model(model, preset("w2g64"), method, moments, start_rank=3, quiet=True)
        assert sorted(quant_layers(model)) == sorted(starts) == sorted(NAMES)
        assert all(f.a_RI.shape[0] == 3 and f.a_RI.dtype == torch.float16 for f in starts.values())
        plain = (model(x) - expected).square().mean().item()
        add_lora(model, LoraConfig(recovery_r=3, recovery_alpha=1.0), starts)
        left[method] = (model(x) - expected).square().mean().item() / plain
    assert all(share < 0.7 for share in left.values()), left


def test_a_start_rank_beyond_the_matrix_is_cut():
    starts = quantize_model(toy(), preset("w2g64"), "mse", None, start_rank=100, quiet=True)
    assert {f.a_RI.shape[0] for f in starts.values()} == {8}
    assert quantize_model(toy(), preset("w2g64"), "mse", quiet=True) == {}


def test_gptq_without_moments_is_refused():
    with pytest.raises(ConfigError, match="gptq needs calibration text"):
        quantize_model(toy(), preset("w2g64"), "gptq", None, quiet=True)


def test_quantize_and_qat_share_every_setting_of_how_codes_are_made():
    shared = {field.name: field for field in fields(QuantizeConfig)}
    for command in (QuantizeOptions, QatOptions):
        own = {field.name: field for field in fields(command)}
        assert set(shared) <= set(own)
        differ = {name for name in shared if own[name].default != shared[name].default}
        assert differ <= {"preset"}, differ

"""A finished layer that was kept computes, to the bit, what it computed before."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from qat_lora.layers.calibrate.fit import Fit, FitSettings, fit_layers
from qat_lora.layers.calibrate.quantize import Finished, finished_of, kept_of
from qat_lora.quant.presets import PRESETS

SPECS = {name: entry.rules[0][1] for name, entry in PRESETS.items()}


def model(i=96, o=80):
    torch.manual_seed(0)
    return nn.ModuleDict({"up": nn.Linear(i, o), "down": nn.Linear(o, i, bias=False)}).requires_grad_(False)


@pytest.mark.parametrize("name", SPECS)
def test_what_was_kept_computes_the_same_bits(name, tmp_path):
    sizes = (256, 256) if SPECS[name].step_bits else (96, 80)
    layers, specs = model(*sizes), dict.fromkeys(("up", "down"), SPECS[name])
    found = {}
    for path, rank in (("up", 24), ("down", 0)):
        fit = fit_layers([layers[path].weight], specs[path], FitSettings("mse", rank), [None], [None])[0]
        found[path] = Finished.of(layers[path], specs[path], fit)
    tensors, facts = kept_of(found)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "file")
    again = finished_of((load_file(tmp_path / "file"), facts), model(*sizes), specs)
    x = torch.randn(7, sizes[0])
    assert torch.equal(again["up"].layer(x), found["up"].layer(x)) and again["down"].factors is None
    for path in found:
        state, wanted = again[path].layer.state_dict(), found[path].layer.state_dict()
        assert all(torch.equal(state[key], wanted[key]) for key in wanted)
        assert torch.equal(again[path].corrected(16), found[path].corrected(16))


def test_factors_are_brought_into_the_form_in_which_they_are_kept():
    """As `fit_layers` gives them they are transposed, and a product of the same numbers can round differently then."""
    linear, spec = model()["up"], SPECS["w2g64"]
    fit = fit_layers([linear.weight], spec, FitSettings("mse", 24), [None], [None])[0]
    transposed = fit.factors._replace(a_RI=fit.factors.a_RI.T.contiguous().T, b_OR=fit.factors.b_OR.T.contiguous().T)
    found = Finished.of(linear, spec, Fit(fit.quantised, transposed))
    assert found.factors.a_RI.is_contiguous() and found.factors.b_OR.is_contiguous()
    assert torch.equal(found.corrected(24), Finished.of(linear, spec, fit).corrected(24))

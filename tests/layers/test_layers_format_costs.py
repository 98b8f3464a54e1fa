"""What a format costs, against sums formed weight by weight and KL formed token by token."""

import numpy as np
import torch
from torch import nn

from qat_lora.layers.calibrate.fisher import Sensitivity
from qat_lora.layers.calibrate.format_costs import SOLVED, input_squares, layer_costs, lm_head_costs
from qat_lora.quant.allocate import KEPT, spec_of
from qat_lora.quant.initialize import quantize_weight


def test_a_layer_costs_the_diagonal_of_its_metric():
    torch.manual_seed(0)
    weight, squares = torch.randn(6, 64), torch.rand(64) + 0.1
    root = torch.randn(6, 6)
    whole = root @ root.T
    found = layer_costs(weight, ["q2_0", "q4_0", "q8_0"], squares, whole)
    assert found == layer_costs(weight, ["q2_0", "q4_0", "q8_0"], squares, whole.diagonal())
    for name, cost in found.items():
        rounded = quantize_weight(weight, spec_of(name), "mse", torch.diag(squares)).dense(spec_of(name))
        error = (rounded - weight).double().numpy()
        wanted = sum(float(whole[i, i]) * float(squares[j]) * error[i, j] ** 2 / 2 for i in range(6) for j in range(64))
        assert np.isclose(cost, SOLVED * wanted, rtol=1e-5)
    assert found["q2_0"] > found["q4_0"] > found["q8_0"] > 0


def test_inputs_are_weighed_by_their_tokens():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    batches = [torch.randn(2, 3, 5), torch.randn(1, 3, 5)]
    tokens = [torch.rand(6), torch.rand(3)]
    costs = {name: Sensitivity(torch.eye(3), tokens) for name in ("0", "2")}
    found = input_squares(model, costs, batches, model)
    weights = torch.cat(tokens).double().numpy()
    inputs = {"0": torch.cat([b.flatten(0, 1) for b in batches])}
    inputs["2"] = torch.tanh(model[0](inputs["0"])).detach()
    for name, x in inputs.items():
        wanted = (weights[:, None] * np.square(x.double().numpy())).sum(0) / weights.sum()
        assert np.allclose(found[name].numpy(), wanted, rtol=1e-5)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_head_costs_its_kl_with_the_embedding_that_is_tied_to_it(monkeypatch):
    monkeypatch.setattr("qat_lora.layers.calibrate.format_costs.MOST_LOGITS", 40 * 7)  # pieces of seven tokens
    torch.manual_seed(2)
    embedding, middle, head = nn.Embedding(40, 64), nn.Linear(64, 64), nn.Linear(64, 40, bias=False)
    head.weight = embedding.weight
    before, address = head.weight.data.clone(), head.weight.data_ptr()

    def hidden(ids):
        return torch.tanh(middle(embedding(ids)))

    batches = [torch.arange(12).reshape(3, 4), torch.arange(5, 13).reshape(2, 4)]
    found = lm_head_costs(head, [KEPT, "q4_0", "q2_0"], batches, hidden, head)
    assert head.weight.data_ptr() == address and torch.equal(head.weight.data, before)
    assert found[KEPT] == 0.0 and found["q2_0"] > found["q4_0"] > 0
    with torch.no_grad():
        exact = [hidden(batch).flatten(0, 1) for batch in batches]
        squares = torch.cat(exact).square().mean(0)
        p = [head(states).double().log_softmax(-1) for states in exact]
        head.weight.data = quantize_weight(before, spec_of("q4_0"), "mse", torch.diag(squares)).dense(spec_of("q4_0"))
        q = [head(hidden(batch).flatten(0, 1)).double().log_softmax(-1) for batch in batches]
    wanted = sum(float((a.exp() * (a - b)).sum()) for a, b in zip(p, q, strict=True)) / 20
    assert np.isclose(found["q4_0"], wanted, rtol=1e-4)

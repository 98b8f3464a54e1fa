"""One optimizer step against plain dense autograd in float64."""

import math

import pytest
import torch
from train_toys import HEAD, VOCABULARY, Toy, rows, tensors

from qat_lora.losses.objective import ObjectiveConfig, objective_loss
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.train.step import add_sums, micro_batch, optimizer_step, zero_sums

OBJECTIVE = ObjectiveConfig(kd_weight=0.7, ce_weight=0.3)
WEIGHTS = OBJECTIVE.weights_at(0.0)
EIGHT = [0, 1, -1, 3, 4, 5, 6, 7]


def step(numbers_of_micro_batches, clip=1e9, toy=None, optimizer=None):
    """Our step with plain gradient descent at rate 1, so that the weights show the gradient."""
    toy = toy or Toy()
    parameters = list(toy.train_state().trained.values())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = optimizer or torch.optim.SGD(parameters, lr=1.0)
    sums = zero_sums(OBJECTIVE, torch.device("cpu"))
    for numbers in numbers_of_micro_batches:
        sums = add_sums(sums, micro_batch(toy, tensors(numbers), OBJECTIVE, WEIGHTS))
    means = optimizer_step(optimizer, parameters, sums, clip, select_runtime("cpu"))
    return toy, means


def dense_oracle(numbers):
    """Gradient, mean loss and tokens of all rows at once, from the definition on full float64 logits."""
    toy = Toy(dtype=torch.float64)
    batch = rows(numbers)
    hidden = toy.hidden(torch.from_numpy(batch["input_ids"]).long(), None)[:, :-1]
    log_p = torch.log_softmax(hidden @ toy.table.T, -1)
    kd = ce = tokens = 0
    for b, p in zip(*batch["target_mask"].nonzero(), strict=True):
        tokens += 1
        ids = batch["head_ids"][b, p]
        log_t = [float(batch["head_logits"][b, p, k] - batch["lse"][b, p]) for k in range(HEAD)]
        rest = math.exp(batch["log_tail"][b, p])
        outside = sum(log_p[b, p, j].exp() for j in range(VOCABULARY) if j not in ids)
        kd = kd + sum(math.exp(t) * (t - log_p[b, p, j]) for t, j in zip(log_t, ids, strict=True))
        kd = kd + rest * (math.log(rest) - outside.log())
        ce = ce - log_p[b, p, batch["input_ids"][b, p + 1]]
    (0.7 * kd / tokens + 0.3 * ce / tokens).backward()
    return toy, kd.item() / tokens, ce.item() / tokens, tokens


@pytest.mark.parametrize("portions", [1, 2, 4, 8])
def test_accumulation_equals_one_dense_batch(portions):
    size = 8 // portions
    toy, means = step([EIGHT[i * size : (i + 1) * size] for i in range(portions)])
    oracle, kd, ce, tokens = dense_oracle(EIGHT)
    for name, parameter in toy.train_state().trained.items():
        wanted = oracle.get_parameter(name).detach() - oracle.get_parameter(name).grad
        assert (parameter.detach().double() - wanted).abs().max() < 1e-6, name
    assert means["tokens"].item() == tokens
    assert means["loss_kd"].item() == pytest.approx(kd, abs=1e-6)
    assert means["loss_ce"].item() == pytest.approx(ce, abs=1e-6)
    assert means["loss"].item() == pytest.approx(0.7 * kd + 0.3 * ce, abs=1e-6)
    flat = torch.cat([oracle.get_parameter(n).grad.flatten() for n in toy.train_state().trained])
    assert means["grad_norm"].item() == pytest.approx(flat.norm().item(), rel=1e-6)


def test_dividing_each_micro_batch_by_its_own_tokens_fails_this_check():
    """The positive control: what most trainers do is off by far more than the tolerance above."""
    oracle, *_ = dense_oracle(EIGHT)
    toy = Toy()
    for numbers in (EIGHT[:3], EIGHT[3:]):
        batch = tensors(numbers)
        result = objective_loss(toy.hidden(batch["input_ids"], None), toy.lm_head(), batch, OBJECTIVE, WEIGHTS)
        (result.loss_sum / result.token_count / 2).backward()
    assert (toy.scale.grad.double() - oracle.scale.grad).abs().max() > 1e-3


def test_a_masked_micro_batch_changes_nothing():
    plain, means = step([[0, 1], [3, 4]])
    padded, means_padded = step([[0, 1], [-1, -1], [3, 4]])
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), padded.parameters(), strict=True))
    assert all(torch.equal(means[name], means_padded[name]) for name in means)


def test_a_step_of_masked_rows_only_is_finite_and_moves_nothing():
    toy, means = step([[-1, -1]])
    assert all(torch.equal(a, b) for a, b in zip(Toy().parameters(), toy.parameters(), strict=True))
    assert means["tokens"] == 0 and all(torch.isfinite(value) for value in means.values())


def test_clipping_bounds_the_norm_of_the_mean_gradient():
    free, means = step([EIGHT])
    start = Toy()
    norm = means["grad_norm"].item()
    clipped, clipped_means = step([EIGHT], clip=norm / 4)
    assert clipped_means["grad_norm"].item() == norm  # what is logged is the norm before clipping
    for name, parameter in clipped.train_state().trained.items():
        whole, part = free.get_parameter(name) - start.get_parameter(name), parameter - start.get_parameter(name)
        torch.testing.assert_close(part, whole / 4, rtol=1e-4, atol=1e-7)
    loose, _ = step([EIGHT], clip=norm * 1.01)
    assert all(torch.equal(a, b) for a, b in zip(free.parameters(), loose.parameters(), strict=True))


def test_gradients_are_kept_zeroed_and_frozen_weights_untouched():
    toy, _ = step([EIGHT])
    for parameter in toy.train_state().trained.values():
        assert parameter.grad is not None and not parameter.grad.any()
    assert toy.embed.grad is None and toy.table.grad is None
    assert torch.equal(toy.table, Toy().table)


def test_nothing_is_read_back_from_the_device(monkeypatch):
    """The step alone, with torch's own readers booby-trapped."""

    def trap(self, *args):
        raise AssertionError("a value was read back")

    for reader in ("item", "__bool__", "__float__", "__int__", "tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, reader, trap)
    step([EIGHT[:4], EIGHT[4:]], clip=0.1)


@pytest.mark.parametrize("weight", [1e-4, 0.25, 3.0])
def test_a_step_is_the_mean_by_weight_however_small_the_weights_are(weight):
    """Equal weights change nothing: also where they add up to less than one."""
    plain, expected = step([EIGHT])
    toy = Toy()
    parameters = list(toy.train_state().trained.values())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    batch = tensors(EIGHT)
    batch["weights"] = torch.full(batch["target_mask"].shape, weight)
    sums = add_sums(zero_sums(OBJECTIVE, torch.device("cpu")), micro_batch(toy, batch, OBJECTIVE, WEIGHTS))
    means = optimizer_step(torch.optim.SGD(parameters, lr=1.0), parameters, sums, 1e9, select_runtime("cpu"))
    assert means["loss"].item() == pytest.approx(expected["loss"].item(), rel=1e-5)
    for name, parameter in toy.train_state().trained.items():
        torch.testing.assert_close(parameter, plain.train_state().trained[name], rtol=1e-5, atol=1e-6)

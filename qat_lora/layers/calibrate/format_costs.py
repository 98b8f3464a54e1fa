"""What storing a layer in a format costs the predictions, in nats of KL, before anything is solved for it.

Rounding errors of different weights are nearly independent, so of tr(G E H Eᵀ) / 2 (`fisher`) the diagonals of G and H
are what counts: a sum over weights, which needs no matrix of a layer's inputs and so fits any model. Solvers and an
adapter lower all formats of a layer alike, to about `SOLVED` at 2 to 4 bits; allocation needs costs in proportion.

The output head has no such form, since an error in it moves all logits, and in the embedding that is tied to it the
inputs of every layer: there the KL itself is measured, on a few rows, with the rest of the model as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qat_lora.layers.calibrate.fisher import MOST_LOGITS, Sensitivity
from qat_lora.quant.allocate import spec_of
from qat_lora.quant.initialize import quantize_weight

SOLVED = 0.4  # of a rounded layer's cost, what descent leaves beside a small adapter


@torch.no_grad()
def input_squares(
    model: nn.Module, costs: Mapping[str, Sensitivity], batches: Iterable[Any], forward: Callable[[Any], Any]
) -> dict[str, Tensor]:
    """Return the mean square of every input [I] of the layers in `costs`, tokens weighted as these say."""
    sums: dict[str, Tensor] = {}
    seen = 0

    def watch(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].reshape(-1, args[0].shape[-1]).float()
            sums[name] = sums.get(name, 0.0) + costs[name].tokens[seen] @ x.square()

        return hook

    with contextlib.ExitStack() as hooks:
        for name in costs:
            hooks.enter_context(model.get_submodule(name).register_forward_pre_hook(watch(name)))
        for batch in batches:
            forward(batch)
            seen += 1
    return {name: total / sum(part.sum() for part in costs[name].tokens) for name, total in sums.items()}


@torch.no_grad()
def layer_costs(weight_OI: Tensor, names: Iterable[str], squares_I: Tensor, outputs_OO: Tensor) -> dict[str, float]:
    """Return the cost of a layer in every format, from its inputs' mean squares and its outputs' Fisher information."""
    outputs_O = (outputs_OO if outputs_OO.dim() == 1 else outputs_OO.diagonal()).to(weight_OI.device)
    found = {}
    for name in names:
        error_OI = _rounded(weight_OI, name, squares_I) - weight_OI.float()
        found[name] = SOLVED * float(outputs_O @ (error_OI.square() @ squares_I)) / 2
    return found


@torch.no_grad()
def lm_head_costs(
    lm_head: nn.Linear,
    names: Sequence[str],
    batches: Sequence[Any],
    hidden: Callable[[Any], Tensor],
    logits: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """Return the KL of the model with its output head, and what is tied to it, in every format.

    `hidden` goes from a batch to its last hidden states [.., H], `logits` from [N, H] to [N, V] by the head as it is.
    """
    weight_VH, exact = lm_head.weight.data, [hidden(batch).flatten(0, -2) for batch in batches]
    squares_H = torch.cat(exact).float().square().mean(0)
    rows = max(1, MOST_LOGITS // len(weight_VH))

    def kl(name: str) -> float:
        rounded_VH = _rounded(weight_VH, name, squares_H).to(weight_VH.dtype)
        total = 0.0
        for batch, states in zip(batches, exact, strict=True):
            lm_head.weight.data = rounded_VH
            changed = hidden(batch).flatten(0, -2)
            for now, then in zip(changed.split(rows), states.split(rows), strict=True):
                lm_head.weight.data = rounded_VH
                log_q = logits(now).float().log_softmax(-1)
                lm_head.weight.data = weight_VH
                log_p = logits(then).float().log_softmax(-1)
                total += float((log_p.exp() * (log_p - log_q)).sum())
        return total / sum(map(len, exact))

    try:
        return {name: 0.0 if spec_of(name) is None else kl(name) for name in names}
    finally:
        lm_head.weight.data = weight_VH


def _rounded(weight_OI: Tensor, name: str, squares_I: Tensor) -> Tensor:
    """Return a weight as a format holds it, float32, each clip chosen by the inputs' mean squares."""
    spec = spec_of(name)
    assert spec is not None
    return quantize_weight(weight_OI, spec, "mse", torch.diag(squares_I)).dense(spec)

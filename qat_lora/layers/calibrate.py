"""Quantise a model by what its layers really see: second moments of inputs, codes, and the adapter's start.

One pass over calibration rows collects E[x xᵀ] for every distinct layer input (q, k and v share one matrix, gate
and up another). Layer by layer then: codes and scales by the chosen method, and the best low-rank correction of
what was lost, in the closed form of QERA: with R = E[x xᵀ]^(1/2), the rank-r matrix that least disturbs the
output is SVD_r((W - Ŵ) R) R⁻¹. Its columns come in order of importance and are kept to `start_rank`, so a later
recovery takes any smaller rank as a slice. LoftQ's SVD of the plain weight error ignores which inputs matter; on
our saturated teacher it closes less than half as much.

Source: QERA (arXiv 2410.06040), EoRA (arXiv 2410.21271).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qat_lora.layers.convert import quantise_targets
from qat_lora.layers.lora import Factors
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.quant.initialise import Method, quantise_weight
from qat_lora.quant.spec import Preset

EIGENVALUE_FLOOR = 1e-4  # of the mean: inputs that calibration never saw must not get infinite weight


def second_moments(
    model: nn.Module, names: Iterable[str], batches: Iterable[Any], forward: Callable[[Any], Any]
) -> dict[str, Tensor]:
    """Return the mean of x xᵀ over all tokens, float32 [I, I], for the input of every named layer.

    Layers that are given the same tensor share one matrix.

    Args:
        model: the full-precision model.
        names: linear layers to watch.
        batches: calibration batches.
        forward: runs the model on one batch.
    """
    sums: dict[str, Tensor] = {}
    tokens: dict[str, int] = {}
    owner: dict[str, str] = {}
    last: dict[str, Any] = {"input": None, "name": ""}

    def watch(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if args[0] is last["input"]:
                owner[name] = last["name"]
                return
            last.update(input=args[0], name=name)
            x = args[0].reshape(-1, args[0].shape[-1]).float()
            moment = x.T @ x
            sums[name] = sums[name] + moment if name in sums else moment
            tokens[name] = tokens.get(name, 0) + x.shape[0]

        return hook

    handles = [model.get_submodule(name).register_forward_pre_hook(watch(name)) for name in names]
    try:
        with torch.no_grad():
            for batch in batches:
                forward(batch)
    finally:
        for handle in handles:
            handle.remove()
    means = {name: total / tokens[name] for name, total in sums.items()}
    return means | {name: means[shared] for name, shared in owner.items() if shared in means}


def error_factors(error_OI: Tensor, second_moment_II: Tensor | None, rank: int) -> Factors:
    """Return the best rank-r correction of a weight error; by its effect on outputs where moments are known."""
    error = error_OI.double()
    if second_moment_II is None:
        root = inverse = torch.eye(error.shape[1], dtype=torch.float64, device=error.device)
    else:
        moment = second_moment_II.double()
        eigenvalues, basis = torch.linalg.eigh(moment)
        eigenvalues = eigenvalues.clamp_min(0) + EIGENVALUE_FLOOR * moment.diagonal().mean().clamp_min(1e-12)
        root = basis * eigenvalues.sqrt() @ basis.T
        inverse = basis * eigenvalues.rsqrt() @ basis.T
    u, s, vh = torch.linalg.svd(error @ root, full_matrices=False)
    half = s[:rank].sqrt()
    return Factors((half[:, None] * vh[:rank] @ inverse).float(), (u[:, :rank] * half).float())


def quantise_model(
    model: nn.Module,
    preset: Preset,
    method: Method,
    moments: dict[str, Tensor] | None = None,
    start_rank: int = 0,
    quiet: bool = False,
) -> dict[str, Factors]:
    """Quantise every layer that the preset reaches, in place; return the adapter starts by layer name.

    Args:
        model: the full-precision model.
        preset: which layers, and how.
        method: `absmax`, `mse` or `gptq`.
        moments: second moments by layer name, from `second_moments`.
        start_rank: columns of the adapter start to keep; 0 for none.
        quiet: no progress bar.

    Raises:
        ConfigError: a pattern without a match, or a method without the calibration it needs.
    """
    starts: dict[str, Factors] = {}
    targets = quantise_targets(model, preset)
    for name, spec in tqdm(targets.items(), desc=f"quantise {preset.name} ({method})", unit="layer", disable=quiet):
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        moment = (moments or {}).get(name)
        quantised = quantise_weight(linear.weight.data, spec, method, moment)
        if start_rank:
            error = linear.weight.data.float() - quantised.dense(spec)
            starts[name] = error_factors(error, moment, min(start_rank, *error.shape))
        model.set_submodule(name, QuantLinear.from_linear(linear, spec, quantised))
    return starts

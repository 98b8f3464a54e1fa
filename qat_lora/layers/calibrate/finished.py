"""What is kept of finished layers, so that an interrupted run resumes after them and ends with the same bytes.

Later layers are fitted to the outputs of the finished ones, so a resumed run must compute with the very same tensors.
It does by construction: a fitted layer is first brought into the form in which it is kept (packed codes, float16
scales, float32 factors, contiguous), and the run that fitted it continues from that form as well. A product of the
same numbers in another memory layout is rounded differently.

Activations are not kept but recomputed: two forwards through the finished blocks take seconds where their fit took
minutes, and the states of all calibration rows would outgrow the student on disk.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qat_lora.layers.calibrate.fit import Fit
from qat_lora.layers.lora import Factors
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.quant.spec import QuantSpec

Kept = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors by name, and a JSON value for every part (layer, block) that they finish."""


class Work:
    """Where finished pieces of work are kept until the whole is done; this one keeps nothing and never stops."""

    def take(self, name: str) -> Kept | None:
        """Return a piece that was kept, None where it is still to be done."""
        return None

    def keep(self, name: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Keep a finished piece."""

    def may_stop(self) -> None:
        """Raise InterruptedRunError where the run was asked to stop."""


NOT_KEPT = Work()


class Finished(NamedTuple):
    """A quantised layer and its adapter start."""

    layer: QuantLinear
    factors: Factors | None

    @classmethod
    def of(cls, linear: nn.Linear, spec: QuantSpec, fit: Fit) -> Finished:
        """Return the layer that replaces a linear one, with its adapter start made contiguous."""
        factors = fit.factors and Factors(*(f.clone(memory_format=torch.contiguous_format) for f in fit.factors))
        return cls(QuantLinear.from_linear(linear, spec, fit.quantised), factors)

    def corrected(self, rank: int) -> Tensor:
        """Return the weight with the leading columns of the adapter start in place, float32 [O, I]."""
        dense = self.layer.effective()
        return dense if self.factors is None else dense + self.factors.b_OR[:, :rank] @ self.factors.a_RI[:rank]


def kept_of(layers: Mapping[str, Finished], unreached: Container[str] = ()) -> Kept:
    """Return finished layers in the form in which they are kept; the facts say which calibration did not reach."""
    tensors: dict[str, Tensor] = {}
    for name, (layer, factors) in layers.items():
        factor = {} if factors is None else {"a_RI": factors.a_RI.cpu(), "b_OR": factors.b_OR.cpu()}
        tensors |= {f"{name}.{part}": tensor for part, tensor in (layer.stored() | factor).items()}
    return tensors, {name: name in unreached for name in layers}


def finished_of(kept: Kept, model: nn.Module, specs: Mapping[str, QuantSpec]) -> dict[str, Finished]:
    """Return the finished layers that `kept_of` described, to replace the model's linear ones."""
    tensors, names = kept
    found = {}
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        mine = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
        device = linear.weight.device
        a, b = (mine.pop(part, None) for part in ("a_RI", "b_OR"))
        # Copies: a file's tensors may start at any address, and products round differently there.
        factors = None if a is None or b is None else Factors(a.to(device, copy=True), b.to(device, copy=True))
        found[name] = Finished(QuantLinear.from_stored(linear, specs[name], mine), factors)
    return found

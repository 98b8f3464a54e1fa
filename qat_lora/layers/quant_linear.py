"""A linear layer whose weight is stored as packed codes and scales.

The effective weight W = Q * S is formed and then used in one matrix product, however the scales are shared. The
predecessor ran one product per rank of its low-rank scales (32 a layer) and detached the base, so that no
gradient reached the layers below; here autograd sees an ordinary `linear`.

Six states, one forward:

* as loaded: packed codes only; W is formed anew in every forward. Least memory.
* `hold_dense()`: W formed once and kept. For a frozen base: the cost of a plain linear layer.
* `train_scales()`: code values kept unpacked, W formed once per forward, gradients reach the scales.
* `train_range()`: the same through the ends of the range of asymmetric codes, so zero points train too.
* `train_table()`: codes kept unpacked, and gradients reach the look-up table.
* `train_weight()`: codes train too, through a float weight that every forward rounds (`latent`).

Whatever trains, the forward uses scales and tables as they will be stored, in float16: `stored()` is at any moment
the layer that computes, bit for bit, and `settle()` makes it that.

The class is a `torch.nn.Linear` to PEFT and transformers (`weight`, `in_features`, `isinstance`), but `weight` is
computed: assigning it, or its `data`, is refused rather than lost. (PEFT merges by `weight.data += delta`; on a
computed tensor that would give back a model without its adapter, and no word of it.)
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qat_lora.errors import ModelError
from qat_lora.layers.latent import Latent, LatentChange, LookUp, Range, as_stored, nearest_start
from qat_lora.quant.codes import code_values, decode, nearest, pack, packed_width, unpack
from qat_lora.quant.fake_quantize import Gradient, fake_quantise
from qat_lora.quant.initialize import QuantisedWeight, pack_zeros, unpack_zeros, zeros_shape
from qat_lora.quant.scales import away_from_zero, expand, scale_shapes
from qat_lora.quant.spec import QuantSpec

COMPUTED = (
    "weight: a quantised weight is made of codes and scales and cannot be assigned or merged into; "
    "`qat-lora export` writes merged dense models"
)


class ComputedWeight(Tensor):
    """A quantised weight as others see it: an ordinary tensor, save that nothing can be written to its `data`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # results are plain tensors

    def _refuse(self, *_: Any) -> Any:
        raise ModelError(COMPUTED)

    data = property(_refuse, _refuse)


class QuantLinear(nn.Linear):
    """y = x (Q * S)ᵀ + b, for x [..., I] and y [..., O].

    Stored tensors: `codes` uint8 [O, ceil(I bits / 8)], `scale` (or `scale_a`, `scale_b`), `zeros` packed like codes
    where they are asymmetric, `values` for look-up tables, `bias` where the layer has one. Scales and tables are
    float32 whatever the default type is, so that loading a model in bfloat16 rounds activations only.
    """

    codes: Tensor
    zeros: Tensor

    def __init__(
        self, in_features: int, out_features: int, spec: QuantSpec, *, bias: bool = False, device: Any = None
    ) -> None:
        nn.Module.__init__(self)  # not Linear's: that would make a dense weight
        self.in_features = in_features
        self.out_features = out_features
        self.spec = spec
        width = packed_width(in_features, spec.bits)
        self.register_buffer("codes", torch.zeros(out_features, width, dtype=torch.uint8, device=device))
        for name, shape in scale_shapes(spec, out_features, in_features).items():
            self.register_parameter(name, self._stored(torch.ones(shape, dtype=torch.float32, device=device)))
        if spec.code == "asymmetric":
            shape = zeros_shape(spec, out_features, in_features)
            self.register_buffer("zeros", torch.zeros(shape, dtype=torch.uint8, device=device))
        if spec.code == "lut":
            self.values = self._stored(torch.zeros(2**spec.bits, dtype=torch.float32, device=device))
        self.register_parameter("bias", self._stored(torch.zeros(out_features, device=device)) if bias else None)
        self.latent: Latent | LatentChange | None = None
        self.range: Range | None = None
        self.gradient: Gradient = "lsq"
        self._values_OI: Tensor | None = None
        self._codes_OI: Tensor | None = None
        self._dense_OI: Tensor | None = None

    @staticmethod
    def _stored(tensor: Tensor) -> nn.Parameter:
        return nn.Parameter(tensor, requires_grad=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear, spec: QuantSpec, quantised: QuantisedWeight) -> QuantLinear:
        """Build the layer that stands for `linear` once its weight is quantised."""
        tensors = dict(zip(scale_shapes(spec, *quantised.codes_OI.shape), quantised.scales, strict=True))
        tensors["codes"] = pack(quantised.codes_OI, spec.bits)
        if quantised.zeros is not None:
            tensors["zeros"] = pack_zeros(quantised.zeros, spec.bits)
        if spec.code == "lut":
            tensors["values"] = quantised.values
        return cls.from_stored(linear, spec, tensors)

    @classmethod
    def from_stored(cls, linear: nn.Linear, spec: QuantSpec, tensors: Mapping[str, Tensor]) -> QuantLinear:
        """Build the layer that stands for `linear` from what `stored` gives."""
        bias = linear.bias is not None
        layer = cls(linear.in_features, linear.out_features, spec, bias=bias, device=linear.weight.device)
        for name, tensor in tensors.items():
            getattr(layer, name).data.copy_(tensor)
        if bias:
            layer.bias.data = linear.bias.data.clone()
        return layer.train(linear.training)

    @property
    def scales(self) -> tuple[nn.Parameter, ...]:
        """The stored scale parameters, in the order of `quant.scales`."""
        return tuple(self.named_scales().values())

    def named_scales(self) -> dict[str, nn.Parameter]:
        """Return the stored scale parameters by name."""
        names = scale_shapes(self.spec, self.out_features, self.in_features)
        return {name: self.get_parameter(name) for name in names}

    @property
    def weight(self) -> Tensor:
        """The effective weight Q * S, [O, I], formed when asked for."""
        return self.effective().as_subclass(ComputedWeight)

    @weight.setter
    def weight(self, value: Any) -> None:
        raise ModelError(COMPUTED)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter; assigning one to `weight` comes here, past the property."""
        if name == "weight":
            raise ModelError(COMPUTED)
        super().register_parameter(name, param)

    def effective(self) -> Tensor:
        """Return Q * S as the layer computes now, [O, I], for those inside this package that only read it."""
        if self._dense_OI is not None:
            return self._dense_OI
        scale = self._scale()
        if self.latent is not None:
            weight = self.latent(away_from_zero(scale))
            return fake_quantise(weight, scale, self.spec, self._book(), self._zero(), self.gradient)
        if self._codes_OI is not None:
            return LookUp.apply(self._book(), self._codes_OI) * scale
        chosen, zero = self._code_values() if self._values_OI is None else self._values_OI, self._zero()
        return (chosen if zero is None else chosen - zero) * scale

    def _scale(self) -> Tensor:
        """Return the scale of every weight, [O, I] or what broadcasts to it."""
        stored = tuple(as_stored(scale) for scale in self.scales) if self.range is None else self.range()[:1]
        return expand(stored, self.spec.group_size, self.out_features, self.in_features)

    def _book(self) -> Tensor:
        """Return the code book in the scales' type; a table that trains beside its codes may change its order."""
        if self.spec.code != "lut":
            return code_values(self.spec).to(self.scales[0])
        book = as_stored(self.values)
        return book if self.latent is None else book.sort().values

    def _zero(self) -> Tensor | None:
        """Return the zero point of every weight, [O, I] or what broadcasts to it; None where codes have none."""
        if self.spec.code != "asymmetric":
            return None
        zeros = unpack_zeros(self.zeros, self.spec, self.in_features) if self.range is None else self.range()[1]
        return expand((zeros,), self.spec.group_size, self.out_features, self.in_features)

    def _code_values(self) -> Tensor:
        """Decode the packed codes to [O, I] in the scales' type."""
        return decode(unpack(self.codes, self.spec.bits, self.in_features), self._book().detach())

    def hold_dense(self, dtype: torch.dtype | None = None) -> None:
        """Form the weight once and keep it; the scales are frozen from here on."""
        self.settle()
        self._dense_OI = self.effective().detach().to(dtype or self.scales[0].dtype)

    def train_scales(self) -> None:
        """Let the scales train (in float32); code values are kept unpacked, unless codes or table train as well."""
        self._dense_OI = None
        for scale in self.scales:
            scale.requires_grad_(True)
        if self.latent is None and self._codes_OI is None:
            self._values_OI = self._code_values().detach()

    def train_range(self) -> Range:
        """Let scales and zero points train as the ends of their ranges (in float32); return those.

        Raises:
            ModelError: the codes have no zero points.
        """
        if self.spec.code != "asymmetric":
            raise ModelError(f"ranges: a layer with {self.spec.code} codes has no zero points to train")
        self._dense_OI = None
        zeros = unpack_zeros(self.zeros, self.spec, self.in_features)
        self.range = Range(self.scales[0].detach(), zeros, self.spec.bits)
        if self.latent is None:
            self._values_OI = self._code_values().detach()
        return self.range

    def train_table(self) -> None:
        """Let the look-up table train (in float32).

        Raises:
            ModelError: the layer has none.
        """
        if self.spec.code != "lut":
            raise ModelError(f"lut: a layer with {self.spec.code} codes has no look-up table to train")
        self._dense_OI = self._values_OI = None
        self.values.requires_grad_(True)
        if self.latent is None:
            self._codes_OI = unpack(self.codes, self.spec.bits, self.in_features)

    def train_weight(
        self,
        weight_OI: Tensor | None = None,
        rank: int = 0,
        alpha: float | None = None,
        gradient: Gradient = "lsq",
    ) -> Latent | LatentChange:
        """Let the codes train through a float weight, or through a low-rank change of it; return that.

        Args:
            weight_OI: the full-precision weight; without it, the start lies in the middle of every code's cell.
            rank: of the change that trains; 0: the whole weight does.
            alpha: the change counts alpha / rank; default: rank.
            gradient: of weights beyond the range: none (`lsq`) or as inside (`ste`).
        """
        self.gradient = gradient
        self._dense_OI = self._values_OI = self._codes_OI = None
        with torch.no_grad():
            codes = unpack(self.codes, self.spec.bits, self.in_features)
            if weight_OI is None:
                start = self.effective()
            else:
                zero, scale = self._zero(), self._scale()
                shift = 0.0 if zero is None else zero * scale
                start = nearest_start(weight_OI.to(codes.device) + shift, codes, scale, self._book()) - shift
            scale = away_from_zero(self._scale())
            start = start.detach().clone()
            self.latent = LatentChange(start / scale, scale.abs().mean(), rank, alpha) if rank else Latent(start)
        return self.latent

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors that stand for the layer as it is now: packed codes and zeros, float16 scales and table.

        Computed on the host: on XLA this makes no graphs of its own.
        """
        here = self if self.latent is None and self.range is None else copy.deepcopy(self).cpu()
        with torch.no_grad():
            tensors = {name: scale.detach().cpu().half() for name, scale in here.named_scales().items()}
            if here.range is not None:
                scale, zero = here.range()
                tensors = {"scale": scale.half(), "zeros": pack_zeros(zero, self.spec.bits)}
            elif self.spec.code == "asymmetric":
                tensors["zeros"] = here.zeros.cpu()
            if self.spec.code == "lut":
                tensors["values"] = (here.values if here.latent is None else here._book()).detach().cpu().half()
            return {"codes": here._codes(), **tensors}

    def _codes(self) -> Tensor:
        """Return the packed codes of the layer as it computes now."""
        if self.latent is None:
            return self.codes.cpu()
        scale, zero = away_from_zero(self._scale()), self._zero()
        position = self.latent(scale) / scale
        position = position if zero is None else position + zero
        return pack(nearest(position, self._book(), self.spec)[1], self.spec.bits)

    @torch.no_grad()
    def settle(self) -> None:
        """End all training: codes, scales and table become what is stored, and nothing trains any more."""
        if self.latent is not None or self.range is not None:
            for name, tensor in self.stored().items():
                getattr(self, name).copy_(tensor)
            self.latent = self.range = None
        self.release()
        for name, parameter in self.named_parameters(recurse=False):
            parameter.requires_grad_(False)
            if name != "bias":
                parameter.copy_(as_stored(parameter))

    def release(self) -> None:
        """Drop what was kept beside the stored tensors."""
        self._values_OI = self._codes_OI = self._dense_OI = None

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer; the weight takes the input's type, or autocast's."""
        device = input.device.type
        autocast = torch.is_autocast_enabled(device)
        # Autocast would multiply the factors of low-rank scales in bfloat16: another weight than `hold_dense` keeps.
        with torch.autocast(device, enabled=False) if autocast else contextlib.nullcontext():
            weight = self.effective()
        bias: Tensor | None = self.bias
        if not autocast and weight.dtype != input.dtype:
            weight = weight.to(input.dtype)
            bias = None if bias is None else bias.to(input.dtype)
        return nn.functional.linear(input, weight, bias)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantLinear:
        """Move or convert the stored tensors; what was kept beside them moves along."""
        super()._apply(fn, recurse)
        for name in ("_values_OI", "_codes_OI", "_dense_OI"):
            kept = getattr(self, name)
            if kept is not None:
                setattr(self, name, fn(kept))
        return self

    @property
    def kept_bytes(self) -> int:
        """Bytes of what is kept beside the stored tensors."""
        kept = (self._values_OI, self._codes_OI, self._dense_OI)
        return sum(tensor.numel() * tensor.element_size() for tensor in kept if tensor is not None)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.release()
        super()._load_from_state_dict(*args, **kwargs)

    def reset_parameters(self) -> None:
        """Do nothing: codes come from a quantiser or a checkpoint, never from a random generator."""

    def extra_repr(self) -> str:
        """Describe the layer in a printed model."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.spec}"

    @property
    def stored_bits(self) -> int:
        """Bits that codes, scales and table take on disk."""
        return self.spec.stored_bits(self.out_features, self.in_features)

"""A linear layer whose weight is stored as packed codes and scales.

The weight W = Q * S is formed first and used in one matrix product: low-rank scales rank by rank would cost a product
each. Where W comes from is the layer's `source`, a module per state. Whatever trains, the forward rounds scales and
tables to float16: `stored()` describes the layer that computes, bit for bit; `materialize()` turns the layer into it.

To PEFT and transformers the class is a `torch.nn.Linear`, but `weight` is computed: assigning to it, or to its `data`,
raises. PEFT merges by `weight.data += delta`, which on a computed tensor would silently lose the adapter.

`TiedEmbedding` looks its rows up in a quantised LM head. Small models tie the two, and their matrix is a large share of
all weights (a quarter in Qwen3-0.6B); as codes for the one and floats for the other it would take more room than
before. So the LM head holds codes, scales and whatever trains. transformers ties *parameters* by name and would expect
one here; so a checkpoint's config says `tie_word_embeddings: false`, and the preset in it that the two are one.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qat_lora.errors import ConfigError, ModelError
from qat_lora.layers.calibrate.upcast import UpcastEmbedding
from qat_lora.layers.latent import Gradient, Latent, LatentChange, LookUp, Range, as_stored, fake_quantize, start_near
from qat_lora.quant.codes import code_values, decode, nearest, pack, packed_width, unpack
from qat_lora.quant.initialize import QuantizedWeight
from qat_lora.quant.scales import Meaning, away_from_zero, meaning, pack_whole, scale_shapes, unpack_whole, whole_shapes
from qat_lora.quant.spec import QuantSpec


class TiedEmbedding(nn.Module):
    """Rows of a quantised LM head, [..., H], for token ids [...]."""

    like: Tensor

    def __init__(self, lm_head: QuantLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self._lm_head = (lm_head,)  # a tuple hides the submodule: the state dict names its tensors once
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def computes_in(self) -> torch.dtype:
        """Type of the rows, and so of the model's activations."""
        return self.like.dtype

    @classmethod
    def put(cls, model: nn.Module, name: str, lm_head: QuantLinear) -> None:
        """Let an embedding of a model look its rows up in a quantised LM head."""
        table = model.get_submodule(name)
        assert isinstance(table, nn.Embedding)
        dtype = torch.float32 if isinstance(table, UpcastEmbedding) else table.weight.dtype
        model.set_submodule(name, cls(lm_head, dtype))

    @property
    def weight(self) -> Tensor:
        """The effective weight [V, H], formed on access."""
        return self._lm_head[0].weight

    def forward(self, ids: Tensor) -> Tensor:
        """Look rows up, in the type that the model computes in."""
        return nn.functional.embedding(ids, self._lm_head[0].effective()).to(self.like.dtype)


def embedding_of(model: nn.Module, lm_head: nn.Linear) -> str | None:
    """Return the name of the embedding that an LM head is tied to, if any; ConfigError: it does more than look up."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.weight is lm_head.weight:
            if type(module) not in (nn.Embedding, UpcastEmbedding):
                what = f"{name}, a {type(module).__name__}, which does more than to look rows up"
                raise ConfigError(f"quantize_head: the head is tied to {what}; leave --quantize-head out")
            return name
    return None


COMPUTED = (
    "weight: a quantised weight is made of codes and scales and cannot be assigned or merged into; "
    "`qat-lora export` writes merged dense models"
)


class ComputedWeight(Tensor):
    """A quantised weight as others see it: an ordinary tensor, except that its `data` cannot be written."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # results are plain tensors

    def _refuse(self, *_: Any) -> Any:
        raise ModelError(COMPUTED)

    data = property(_refuse, _refuse)


class Packed(nn.Module):
    """The stored codes, unpacked in every forward; or values `kept` for `train_scales` and `train_range`."""

    kept: Any

    def __init__(self, kept: Tensor | None = None) -> None:
        """Take what is kept in memory, [O, I]: a buffer outside the state dict moves with the layer, unsaved."""
        super().__init__()
        self.register_buffer("kept", kept, persistent=False)

    def effective(self, layer: QuantLinear) -> Tensor:
        """Return the weight Q * S, [O, I], differentiable in what this source lets train."""
        return layer.times_scale(layer.code_values() if self.kept is None else self.kept)

    def packed_codes(self, layer: QuantLinear) -> Tensor:
        """Return the packed codes of this weight."""
        return layer.codes


class Dense(Packed):
    """W, formed once (`hold_dense`): a frozen base then costs what an ordinary linear layer does."""

    def effective(self, layer: QuantLinear) -> Tensor:
        """Return the weight that is kept."""
        return self.kept


class Part(Dense):
    """Some rows of a weight that several layers have together, so that one product serves them all (`join_dense`)."""

    def __init__(self, whole: Dense, rows: slice) -> None:
        super().__init__()
        self.whole, self.rows = whole, rows

    def effective(self, layer: QuantLinear) -> Tensor:
        """Return this layer's rows."""
        return self.whole.kept[self.rows]


class Indexed(Packed):
    """Codes as indices, so that gradients reach the look-up table (`train_table`)."""

    def effective(self, layer: QuantLinear) -> Tensor:
        """Return the table's values times the scales of now."""
        return layer.times_scale(LookUp.apply(layer.book(), self.kept))


class Rounded(Packed):
    """A float weight that every forward rounds (`train_weight`), and its book: sent anew it would stop a GPU queue."""

    def __init__(self, latent: Latent | LatentChange, gradient: Gradient, book: Tensor | None) -> None:
        super().__init__(book)
        self.latent, self.gradient = latent, gradient

    def effective(self, layer: QuantLinear) -> Tensor:
        """Return the weight as it rounds now."""
        scale, zero, _ = layer.meaning()
        return fake_quantize(self.latent(away_from_zero(scale)), scale, layer.spec, layer.book(), zero, self.gradient)

    def packed_codes(self, layer: QuantLinear) -> Tensor:
        """Return the codes that the weight rounds to now."""
        scale, zero, _ = layer.meaning()
        scale = away_from_zero(scale)
        position = self.latent(scale) / scale
        position = position if zero is None else position + zero
        return pack(nearest(position, layer.book(), layer.spec)[1], layer.spec.bits)


class QuantLinear(nn.Linear):
    """y = x (Q * S)ᵀ + b, for x [..., I] and y [..., O].

    Stored tensors: `codes` uint8 [O, ceil(I bits / 8)], `scale` (or `scale_a`, `scale_b`), packed like codes `zeros`
    where they are asymmetric and `steps` in K-quants, with `minimum` and `minima` where groups have one, `values` of
    tables, `bias` if there is one. Scales and tables are always float32: a model in bfloat16 rounds activations only.
    """

    codes: Tensor
    zeros: Tensor
    _is_hf_initialized = True  # transformers would form every weight twice, to draw it anew

    def __init__(
        self, in_features: int, out_features: int, spec: QuantSpec, *, bias: bool = False, device: Any = None
    ) -> None:
        nn.Module.__init__(self)  # not Linear's, which would make a dense weight
        self.in_features = in_features
        self.out_features = out_features
        self.spec = spec
        width = packed_width(in_features, spec.bits)
        self.register_buffer("codes", torch.zeros(out_features, width, dtype=torch.uint8, device=device))
        for name, shape in scale_shapes(spec, out_features, in_features).items():
            self.register_parameter(name, self._frozen(torch.ones(shape, dtype=torch.float32, device=device)))
        for name, shape in whole_shapes(spec, out_features, in_features).items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.uint8, device=device))
        if spec.code == "lut":
            self.values = self._frozen(torch.zeros(2**spec.bits, dtype=torch.float32, device=device))
        self.register_parameter("bias", self._frozen(torch.zeros(out_features, device=device)) if bias else None)
        self.source: Packed = Packed()
        self.range: Range | None = None

    @staticmethod
    def _frozen(tensor: Tensor) -> nn.Parameter:
        return nn.Parameter(tensor, requires_grad=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear, spec: QuantSpec, quantised: QuantizedWeight) -> QuantLinear:
        """Build the layer that replaces `linear`, whose weight has been quantised; `dense_linear` is the way back."""
        tensors = dict(zip(scale_shapes(spec, *quantised.codes_OI.shape), quantised.scales, strict=True))
        tensors["codes"] = pack(quantised.codes_OI, spec.bits)
        tensors |= {name: pack_whole(x, spec) for name, x in zip(spec.whole, quantised.whole, strict=True)}
        if spec.code == "lut":
            tensors["values"] = quantised.values
        return cls.from_stored(linear, spec, tensors)

    @classmethod
    def from_stored(cls, linear: nn.Linear, spec: QuantSpec, tensors: Mapping[str, Tensor]) -> QuantLinear:
        """Build the layer that replaces `linear` from the tensors of `stored`."""
        bias = linear.bias is not None
        layer = cls(linear.in_features, linear.out_features, spec, bias=bias, device=linear.weight.device)
        for name, tensor in tensors.items():
            getattr(layer, name).data.copy_(tensor)
        if bias:
            layer.bias.data = linear.bias.data.clone()
        return layer.train(linear.training)

    @torch.no_grad()
    def stored(self) -> dict[str, Tensor]:
        """Return the tensors that describe the layer now, codes packed, floats float16; computed on the host."""
        here = copy.deepcopy(self).cpu() if self._codes_may_change else self
        tensors: dict[str, Tensor] = {"codes": here.source.packed_codes(here), **here.named_scales()}
        tensors |= {name: getattr(here, name) for name in self.spec.whole}
        if self.spec.code == "lut":
            tensors["values"] = here.values if here is self else here.book()
        if here.range is not None:
            tensors["scale"], zeros = here.range()
            tensors["zeros"] = pack_whole(zeros, self.spec)
        tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        return {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}

    @property
    def _codes_may_change(self) -> bool:
        return isinstance(self.source, Rounded) or self.range is not None

    @property
    def scales(self) -> tuple[nn.Parameter, ...]:
        """The stored scale parameters, in the order of `quant.scales`."""
        return tuple(self.named_scales().values())

    def named_scales(self) -> dict[str, nn.Parameter]:
        """Return the stored scale parameters by name."""
        names = scale_shapes(self.spec, self.out_features, self.in_features)
        return {name: getattr(self, name) for name in names}  # plain tensors while layers are stacked

    @property
    def weight(self) -> Tensor:
        """The effective weight Q * S, [O, I], formed on access."""
        return self.effective().as_subclass(ComputedWeight)

    @weight.setter
    def weight(self, value: Any) -> None:
        raise ModelError(COMPUTED)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter; torch assigns one to `weight` through this method, past the property."""
        if name == "weight":
            raise ModelError(COMPUTED)
        super().register_parameter(name, param)

    def effective(self) -> Tensor:
        """Return Q * S as the layer computes now, [O, I], for readers inside this package."""
        return self.source.effective(self)

    def times_scale(self, values_OI: Tensor) -> Tensor:
        """Return the weight that code values make, by the scales of now."""
        return self.meaning().of(values_OI)

    def meaning(self) -> Meaning:
        """Return what code values stand for now."""
        if self.range is not None:
            # Called twice: gradients of scale and zero point reach the ends apart, and are rounded so.
            scales, whole = self.range()[:1], self.range()[1:]
        else:
            scales = tuple(map(as_stored, self.scales))
            whole = tuple(unpack_whole(getattr(self, name), self.spec, self.in_features) for name in self.spec.whole)
        return meaning(self.spec, scales, whole, self.out_features, self.in_features)

    def book(self) -> Tensor:
        """Return the code book in the scales' type; where codes train too, sorted: training may reorder the table."""
        if self.spec.code != "lut":
            return self.source.kept if isinstance(self.source, Rounded) else code_values(self.spec).to(self.scales[0])
        book = as_stored(self.values)
        return book.sort().values if isinstance(self.source, Rounded) else book

    def code_values(self) -> Tensor:
        """Decode the packed codes to [O, I] in the scales' type."""
        return decode(unpack(self.codes, self.spec.bits, self.in_features), self.book().detach())

    def hold_dense(self, dtype: torch.dtype | None = None) -> None:
        """Form the weight once and keep it; the scales are frozen from here on."""
        self.materialize()
        self.source = Dense(self.effective().detach().to(dtype or self.scales[0].dtype))

    def train_scales(self) -> None:
        """Let the scales train (in float32)."""
        for scale in self.scales:
            scale.requires_grad_(True)
        self._unpack()

    def train_range(self) -> Range:
        """Let scales and zero points train as ends of ranges (float32); ModelError: the codes have no zero points."""
        if self.spec.code != "asymmetric":
            raise ModelError(f"ranges: a layer with {self.spec.code} codes has no zero points to train")
        zeros = unpack_whole(self.zeros, self.spec, self.in_features)
        self.range = Range(self.scales[0].detach(), zeros, self.spec.bits)
        self._unpack()
        return self.range

    def _unpack(self) -> None:
        if not isinstance(self.source, Rounded | Indexed):  # there codes or table train as well
            self.source = Packed(self.code_values().detach())

    def train_table(self) -> None:
        """Let the look-up table train (in float32); ModelError: the layer has none."""
        if self.spec.code != "lut":
            raise ModelError(f"lut: a layer with {self.spec.code} codes has no look-up table to train")
        self.values.requires_grad_(True)
        if not isinstance(self.source, Rounded):
            self.source = Indexed(unpack(self.codes, self.spec.bits, self.in_features))

    def train_weight(
        self, weight_OI: Tensor | None = None, rank: int = 0, alpha: float | None = None, gradient: Gradient = "lsq"
    ) -> Latent | LatentChange:
        """Let the codes train through a float weight, or through a low-rank change of it where a rank is given.

        The start is as near to a full-precision weight as the codes allow; without one, the middle of every code's
        cell. The change counts alpha / rank, by default 1; `gradient` as in `fake_quantize`. Returns what trains.
        """
        self.source = Packed()
        with torch.no_grad():
            scale, zero, _ = self.meaning()
            if weight_OI is None:
                start = self.effective()
            else:
                codes = unpack(self.codes, self.spec.bits, self.in_features)
                shift = 0.0 if zero is None else zero * scale
                start = start_near(weight_OI.to(codes.device) + shift, codes, scale, self.book()) - shift
            start, scale = start.detach().clone(), away_from_zero(scale)
            latent = LatentChange(start / scale, scale.abs().mean(), rank, alpha) if rank else Latent(start)
        self.source = Rounded(latent, gradient, None if self.spec.code == "lut" else self.book())
        return latent

    @torch.no_grad()
    def materialize(self) -> None:
        """End all training: codes, scales and table become what is stored, and nothing trains any more."""
        if self._codes_may_change:
            for name, tensor in self.stored().items():
                getattr(self, name).copy_(tensor)
            self.range = None
        self.source = Packed()
        for name, parameter in self.named_parameters(recurse=False):
            parameter.requires_grad_(False)
            if name != "bias":
                parameter.copy_(as_stored(parameter))

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer; the weight takes the input's type, or autocast's."""
        device = input.device.type
        autocast = torch.is_autocast_enabled(device)
        # Autocast would multiply the factors of low-rank scales in bfloat16: another weight than `hold_dense` keeps.
        with torch.autocast(device, enabled=False) if autocast else contextlib.nullcontext():
            weight = self.effective()
        dtype = weight.dtype if autocast else input.dtype
        bias = self.bias if autocast or self.bias is None else self.bias.to(dtype)
        return nn.functional.linear(input, weight.to(dtype), bias)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self.source, Rounded):  # what is kept is of the codes before
            self.source = Packed()
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


def join_dense(layers: Sequence[nn.Linear]) -> None:
    """Keep the formed weights of layers that read one input as one tensor; nothing where some are not formed."""
    of_codes = [layer for layer in layers if isinstance(layer, QuantLinear)]
    formed = [layer for layer in of_codes if type(layer.source) is Dense and layer.bias is None]
    if len(formed) < len(layers):
        return
    whole, start = Dense(torch.cat([layer.effective() for layer in formed])), 0
    for layer in formed:
        layer.source = Part(whole, slice(start, start + layer.out_features))
        start += layer.out_features


def joined_weight(layers: Sequence[nn.Linear]) -> Tensor | None:
    """Return the weight that layers have together, [sum of O, I]; None where they have none."""
    wholes = [x.source.whole if isinstance(x, QuantLinear) and isinstance(x.source, Part) else None for x in layers]
    first = wholes[0]
    return None if first is None or any(whole is not first for whole in wholes) else first.kept


def dense_linear(layer: nn.Linear, delta_OI: Tensor | float = 0.0) -> nn.Linear:
    """Return an ordinary linear layer with the same effective weight plus `delta_OI`, rounded once."""
    weight = layer.weight.detach()
    # On meta: a random start would cost time and shift the random numbers that follow.
    dense = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    dense.weight = nn.Parameter((weight.float() + delta_OI).to(weight.dtype))
    if layer.bias is not None:
        dense.bias = nn.Parameter(layer.bias.detach().clone())
    return dense

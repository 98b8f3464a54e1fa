"""Quantise a model by what its layers see, every layer on its own: second moments, codes, adapter starts.

One pass over calibration rows collects E[x xᵀ] for every distinct layer input (q, k and v share one matrix, gate
and up another); then `fit` does the rest, layer by layer. No layer knows that its inputs will no longer be those of
the full-precision model: `sequential` cures that, at the price of running every block several times. Both fit layers
through one `LayerFitter`, which keeps finished blocks for a run that is interrupted.

A resumed run must compute with the very same tensors, since later layers are fitted to the outputs of the finished
ones. So a fitted layer is first brought into the form in which it is kept (packed codes, float16 scales, float32
factors, contiguous: another layout is rounded differently), and the run that fitted it goes on from that form too.
Activations are recomputed: two forwards take seconds, a fit minutes, and states kept would outgrow the student.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from qat_lora.config import HELP, option
from qat_lora.layers.calibrate.fit import EFFORTS, EffortName, Fit, FitSettings, fit_layers, together
from qat_lora.layers.convert import LM_HEAD, block_of, put_quantized, quantize_targets
from qat_lora.layers.experts import siblings_of
from qat_lora.layers.lora import Factors
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.quant.initialize import Method
from qat_lora.quant.presets import Preset
from qat_lora.quant.spec import QuantSpec
from qat_lora.runtime.host.machine import give_back

FEWEST_TOKENS = 16
"""Of the calibration text, that tell anything of an expert's inputs."""
MOST_TOGETHER = 64
"""Layers that are fitted in one go: the second moments of all experts would not fit a device."""
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


@dataclass(frozen=True)
class QuantizeConfig:
    """How weights become codes and scales: `quantize` and `qat --from-scratch` inherit it."""

    model: str | None = option(None, "full-precision model: Hugging Face folder or Hub name")
    preset: str | None = option(None, "how weights are stored", alias="config")
    keep: tuple[str, ...] = option((), "patterns of layers that stay unquantised", unit="regular expressions")
    override: tuple[str, ...] = option((), HELP["override"], unit="list of PATTERN=PRESET")
    quantize_head: str | None = option(None, HELP["quantize_head"])
    init: Method = option("descent", HELP["init"])
    calibrate_on: Literal["student", "teacher"] = option("student", HELP["calibrate_on"])
    metric: Literal["fisher", "outputs"] = option("fisher", HELP["metric"])
    effort: EffortName = option("default", HELP["effort"])
    calibration_rows: int | None = option(None, HELP["calibration_rows"], unit="rows", min=1)

    def rows_of(self, length: int) -> int:
        """Return the rows of calibration text, of `length` tokens: as many as were asked for, or the effort's."""
        return self.calibration_rows or max(1, EFFORTS[self.effort].calibration_tokens // length)


def second_moments(
    model: nn.Module, names: Iterable[str], batches: Iterable[Any], forward: Callable[[Any], Any]
) -> dict[str, Tensor]:
    """Return the mean of x xᵀ over all tokens, float32 [I, I], for the input of every named layer.

    Layers with the same input tensor share one matrix. Experts that fewer than `FEWEST_TOKENS` reach have none.
    `forward` runs the model on one batch; where the LM head is named, it returns the last hidden states, the LM head's
    input, and spares the logits of a whole batch.
    """
    sums: dict[str, Tensor] = {}
    owner: dict[str, str] = {}
    tokens = dict[str, int]()
    last: dict[str, Any] = {"input": None, "name": ""}

    def watch(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if args[0] is last["input"]:
                owner[name] = last["name"]
                return
            last.update(input=args[0], name=name)
            x = args[0].reshape(-1, args[0].shape[-1]).float()
            if name not in sums:
                sums[name] = x.new_zeros(x.shape[1], x.shape[1])
            sums[name].addmm_(x.T, x)
            tokens[name] = tokens.get(name, 0) + len(x)

        return hook

    hooks = {name: watch(name) for name in names}
    lm_heads = {name: hooks.pop(name) for name in list(hooks) if LM_HEAD.search(name)}
    with contextlib.ExitStack() as stack, torch.no_grad():
        for name, hook in hooks.items():
            stack.enter_context(model.get_submodule(name).register_forward_pre_hook(hook))
        for batch in batches:
            hidden = forward(batch)
            for name, hook in lm_heads.items():
                hook(model.get_submodule(name), (hidden,))
    means = {
        name: total.div_(max(1, tokens[name]))
        for name, total in sums.items()
        if tokens[name] >= FEWEST_TOKENS or not siblings_of(name)
    }
    return means | {name: means[shared] for name, shared in owner.items() if shared in means}


@dataclass(frozen=True)
class LayerFitter:
    """Fits the layers of one model: what is the same for all of them."""

    model: nn.Module  # the full-precision model, which becomes the quantised one
    targets: Mapping[str, QuantSpec]  # which layers, and how: `convert.check_reach`
    settings: FitSettings
    costs: Mapping[str, Tensor] | None = None  # `sensitivities` by layer name
    work: Work = NOT_KEPT  # keeps the layers of every finished block, and has those that an interrupted run finished
    bar: tqdm[Any] = field(default_factory=lambda: tqdm(disable=True))  # counts finished layers
    ranks: Mapping[str, int] = field(default_factory=dict)  # of adapter starts, by name, where less than the settings'
    unreached: set[str] = field(default_factory=set)  # of experts that calibration hardly reaches: fitted by stand-ins

    def linear(self, name: str) -> nn.Linear:
        """Return a full-precision layer."""
        linear = self.model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        return linear

    def groups(self, names: Iterable[str]) -> list[list[str]]:
        """Return layers in groups that can be fitted together, each in a group of its own where nothing is gained."""
        found: dict[Any, list[str]] = {}
        for name in names:
            spec, alone = self.targets[name], LM_HEAD.search(name) or not together(self.targets[name], self.settings)
            alike = spec, self.linear(name).weight.shape, self.ranks.get(name)
            found.setdefault(name if alone else alike, []).append(name)
        return [of[i : i + MOST_TOGETHER] for of in found.values() for i in range(0, len(of), MOST_TOGETHER)]

    def stand_in(self, name: str, moments_II: Mapping[str, Tensor]) -> Tensor:
        """Return a second moment for an expert that hardly a token reaches, and remember its name.

        It is the mean of the experts that tokens reach; for `down_proj`, whose inputs are its own, all count alike.
        """
        self.unreached.add(name)
        weight, own = self.linear(name).weight, siblings_of(name)
        known = [] if name.endswith("down_proj") else [m for n, m in moments_II.items() if siblings_of(n) == own]
        return sum(known[1:], known[0]) / len(known) if known else torch.eye(weight.shape[1], device=weight.device)

    def _outputs(self, name: str) -> Tensor | None:
        given = (self.costs or {}).get(name)
        if given is None or name not in self.unreached:
            return given
        return torch.ones_like(given) if given.dim() == 1 else torch.eye(len(given))  # all outputs cost alike

    def fit(
        self,
        names: Sequence[str],
        moments_II: list[Tensor | None],
        weights_OI: Sequence[Tensor] | None = None,
        rows: Sequence[Tensor | None] | None = None,
    ) -> dict[str, Finished]:
        """Fit one of the `groups` to its inputs' second moments, which the list loses, or to other weights if given.

        `rows` are what the rows of those weights have been multiplied by, [O]: an error there costs less by as much.
        """
        self.work.may_stop()
        linears = [self.linear(name) for name in names]
        spec = self.targets[names[0]]
        outputs_OO = [self._outputs(name) for name in names]
        if rows is not None:
            outputs_OO = [_over_rows(cost, scale) for cost, scale in zip(outputs_OO, rows, strict=True)]
        rank = self.ranks.get(names[0], self.settings.start_rank)
        rank = 0 if LM_HEAD.search(names[0]) else rank  # which has no adapter
        settings = self.settings._replace(start_rank=rank, joint_rank=min(rank, self.settings.joint_rank))
        weights_OI = [linear.weight.data for linear in linears] if weights_OI is None else weights_OI
        fits = fit_layers(weights_OI, spec, settings, moments_II, outputs_OO)
        found = {name: Finished.of(linear, spec, fit) for name, linear, fit in zip(names, linears, fits, strict=True)}
        give_back()
        self.bar.update(len(found))
        return found

    def fit_all(self, layers: Sequence[str], known: Mapping[str, Tensor]) -> dict[str, Finished]:
        """Fit layers to the second moments of their inputs, as far as they are known."""
        moments: dict[str, Tensor | None] = {
            name: self.stand_in(name, known) if known and name not in known and siblings_of(name) else known.get(name)
            for name in layers
        }
        found = dict[str, Finished]()
        for names in self.groups(moments):
            found |= self.fit(names, [moments[name] for name in names])
        return {name: found[name] for name in moments}

    def finish(
        self, block: str, fit: Callable[[], dict[str, Finished]], gains: dict[str, Tensor] | None = None
    ) -> dict[str, Finished]:
        """Return a block's layers as an interrupted run finished them, or else fit and keep them now.

        `gains` are the weights of norms that go with them, by name: `fit` fills them, or what was kept does.
        """
        gains = {} if gains is None else gains
        kept = self.work.take(f"block-{block}")
        if kept is None:
            found = fit()
            tensors, unreached = kept_of(found, self.unreached)
            self.work.keep(f"block-{block}", tensors | gains, unreached)
        else:
            found = finished_of(kept, self.model, self.targets)
            of_layers = tuple(f"{name}." for name in found)
            gains |= {key: gain for key, gain in kept[0].items() if not key.startswith(of_layers)}
            self.unreached.update(name for name, unreached in kept[1].items() if unreached)
            self.bar.update(len(found))
        return found

    def put(self, block: str, found: Mapping[str, Finished]) -> dict[str, Factors]:
        """Put finished layers into the model; return adapter starts, float16. Both become views of kept files."""
        starts = {name: of.factors and Factors(*(factor.half() for factor in of.factors)) for name, of in found.items()}
        halves = {f"{name}.{part}": half for name, of in starts.items() if of for part, half in of._asdict().items()}
        if self.work.take(f"start-{block}") is None:
            self.work.keep(f"start-{block}", halves, {})
        for name, finished in found.items():
            put_quantized(self.model, name, finished.layer)
        for piece in ("block", "start"):
            for key, view in (self.work.take(f"{piece}-{block}") or ({}, {}))[0].items():
                if piece == "start":
                    halves[key] = view.to(halves[key].device)
                    continue
                held = getattr(self.model.get_submodule(key.rpartition(".")[0]), key.rpartition(".")[2], None)
                if held is not None and (held.dtype, held.device) == (view.dtype, view.device):
                    held.data = view
        return {name: Factors(halves[f"{name}.a_RI"], halves[f"{name}.b_OR"]) for name, of in starts.items() if of}


def _over_rows(cost: Tensor | None, scale: Tensor | None) -> Tensor | None:
    """Return what errors cost in outputs that are multiplied by a scale, [O, O] or [O]: G / (s sᵀ)."""
    if cost is None or scale is None:
        return cost
    inverse = 1 / scale.to(cost)
    return cost * inverse.square() if cost.dim() == 1 else inverse[:, None] * cost * inverse


def quantize_layers(fitter: LayerFitter, moments: Mapping[str, Tensor] | None = None) -> dict[str, Factors]:
    """Quantise every target layer, in place, by its `second_moments`; return the adapter starts by layer name."""
    adapter_init: dict[str, Factors] = {}
    for block, names in itertools.groupby(fitter.targets, lambda name: block_of(name) or name):
        layers = list(names)
        known = {name: moments[name] for name in layers if name in moments} if moments else {}
        fit = functools.partial(fitter.fit_all, layers, known)
        adapter_init |= fitter.put(block, fitter.finish(block, fit))
    return adapter_init


def quantize_model(
    model: nn.Module,
    preset: Preset,
    method: Method,
    moments: Mapping[str, Tensor] | None = None,
    start_rank: int = 0,
    quiet: bool = False,
) -> dict[str, Factors]:
    """Quantise what a preset reaches, in place; return adapter starts; ConfigError: no match, or moments needed."""
    targets = quantize_targets(model, preset)
    with tqdm(total=len(targets), desc=f"quantise {preset.name} ({method})", unit="layer", disable=quiet) as bar:
        return quantize_layers(LayerFitter(model, targets, FitSettings(method, start_rank), bar=bar), moments)


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

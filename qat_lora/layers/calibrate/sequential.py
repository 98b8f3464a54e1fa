"""Quantise decoder block by decoder block, each layer on the inputs that the quantised layers before it produce.

Fitted to the full-precision model's inputs, every layer has a small error, and all of them add up. Here two streams of
activations go up the model together, the full-precision one x and the student's y, both kept for all calibration
rows at one depth. A layer of the student should put out W x but receives y, so its target is not W but

    W* = W E[x yᵀ] E[y yᵀ]⁻¹,

the least-squares map from what it receives to what it should give; codes and adapter start are then fitted to W* on
E[y yᵀ]. GPTQ's usual W on the student's inputs won nothing on our teacher, W* a sixth of the KL. A block is held twice.

A layer that adds to the hidden states can do more: with r what the student lacks just before, it aims at W x + LACK r,

    W* = (W E[x yᵀ] + LACK · E[r yᵀ]) E[y yᵀ]⁻¹,

and so takes back what its inputs tell of all earlier errors. At 2 bits this is a sixth of the KL of a model of 135 M
weights. Which layers add is solved for: what a block adds to its input, in terms of its layers' outputs, or of the
outputs of norms behind them (Gemma 2 and 3). Blocks with experts keep the plain target.

Weights are fitted as `equalize` scales them.

Blocks compute in the model's type; moments and differences are summed in float32. The full-precision block runs once
for all batches, and what its layers get is kept until they are fitted; the student's runs up to the layer that is next.

Masks, positions and rotary embeddings are recorded while the model runs (`capture_calls`); they do not depend on what
the blocks compute, which hand on what they get. Source: GPTAQ (arXiv 2504.02692); W* is its least-squares form.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qat_lora.errors import ModelError
from qat_lora.layers.calibrate.equalize import MOVED, NormCall, Scales, block_scales, gain_of
from qat_lora.layers.calibrate.fisher import computing_by
from qat_lora.layers.calibrate.quantize import FEWEST_TOKENS, Finished, LayerFitter
from qat_lora.layers.convert import block_of
from qat_lora.layers.experts import Experts, siblings_of
from qat_lora.layers.lora import Starts
from qat_lora.layers.quant_linear import embedding_of
from qat_lora.quant.gptq import cholesky, damped, invert

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of one block's forward after the hidden states, which come first."""


@torch.no_grad()
def quantize_sequential(fitter: LayerFitter, batches: Sequence[Any], forward: Callable[[Any], Tensor]) -> Starts:
    """Quantise every target layer, in place; return the adapter starts by layer name.

    The errors that later layers see are those with the adapter start of rank `joint_rank` in place. Batches are read
    several times, and sensitivities must be theirs; `forward` runs the model on one and returns the last hidden states.
    ModelError: the layers are not in one stack of blocks that are called one after the other, hidden states first.
    """
    blocks, outside = by_block(fitter.targets)
    stack = [fitter.model.get_submodule(name) for name in blocks]
    adapter_init: Starts = {}
    tied = [name for name in outside if embedding_of(fitter.model, fitter.linear(name))] if blocks else []
    if blocks:
        exact, calls = capture_calls(stack, batches, forward)
        if any(args for of_block in calls for args, _ in of_block):
            why = "its blocks are not called with hidden states alone and named arguments"
            raise ModelError(f"model: {why}, so it cannot be calibrated in order; give --calibrate-on teacher")
        student = [*exact]
    for name in tied:  # first: the embedding's rows are what the first block gets
        _quantize_lm_head(fitter, name, batches, forward)
        student = capture_calls(stack, batches, forward)[0]
    for i, (name, layers) in enumerate(blocks.items()):
        block = _Block(fitter, name, layers, calls[i], exact[0].dtype)
        gains: dict[str, Tensor] = {}
        found = fitter.finish(name, functools.partial(block.fit, exact, student, gains), gains)
        block.put_gains(gains)
        for layer, finished in found.items():
            block.correct(layer, finished)
        if not block.is_reference_run:  # its layers were fitted by an interrupted run
            _advance(block.reference, exact, calls[i])
        _advance(block.student, student, calls[i])
        adapter_init |= fitter.put(name, found)
        calls[i].clear()
    for name in outside:  # an untied LM head gets what the quantised model puts out
        if name not in tied:
            _quantize_lm_head(fitter, name, batches, forward)
    return adapter_init


def _advance(block: nn.Module, states: list[Tensor], calls: list[Call]) -> None:
    """Replace the hidden states of every batch by what a block makes of them; in place, as they are large."""
    for j, call in enumerate(calls):
        states[j] = run_block(block, states[j], call)


def by_block(targets: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the layers by block, in order, and those outside of all blocks."""
    found: dict[str, list[str]] = {}
    outside: list[str] = []
    for name in targets:
        block = block_of(name)
        (outside if block is None else found.setdefault(block, [])).append(name)
    stacks = {name.rsplit(".", 1)[0] for name in found}
    if len(stacks) > 1:
        raise ModelError(
            f"model: its layers lie in several stacks of blocks ({', '.join(sorted(stacks))}), which cannot be "
            "calibrated in order; give --calibrate-on teacher"
        )
    return dict(sorted(found.items(), key=lambda item: int(item[0].rsplit(".", 1)[1]))), outside


def _quantize_lm_head(fitter: LayerFitter, name: str, batches: Sequence[Any], forward: Callable[[Any], Tensor]) -> None:
    """Quantise the LM head, in place, on the hidden states that the model puts out now."""

    def fit() -> dict[str, Finished]:
        weight = fitter.linear(name).weight
        moment = torch.zeros(weight.shape[1], weight.shape[1], device=weight.device)
        for batch in batches:
            x = forward(batch).reshape(-1, len(moment)).float()
            moment += x.T @ x / (x.shape[0] * len(batches))
        return fitter.fit([name], [moment])

    fitter.put(name, fitter.finish(name, fit))


class _Block:
    """A decoder block, twice: `reference` at full precision, and `student`, whose layers are fitted one by one."""

    def __init__(
        self, fitter: LayerFitter, name: str, layers: Sequence[str], calls: list[Call], dtype: torch.dtype
    ) -> None:
        self.fitter = fitter
        self.dtype = dtype  # that it computes in, which may be wider than that of its stored weights
        self.name = name
        self.calls = calls
        self.student = fitter.model.get_submodule(name)
        own = {id(p): p for p in self.student.parameters()}  # shared: weights are replaced below, never written to
        self.reference = copy.deepcopy(self.student, own)
        self.paths = [layer.removeprefix(f"{name}.") for layer in layers]
        self.is_reference_run = False
        self.writers: dict[str, _Writer] = {}  # layers that add to the hidden states
        self.scales = Scales({}, {}, {})

    def fit(self, exact: list[Tensor], student: list[Tensor], gains: dict[str, Tensor]) -> dict[str, Finished]:
        """Fit the layers to the hidden states that enter reference and student; leave them dense and corrected.

        The states in `exact` become those that leave the reference; `gains` get the norms' new weights, by name.
        """
        found: dict[str, Finished] = {}
        first = exact[0]
        stages, norms, output = self._stages(first)
        reference = self._run_reference(stages, exact)
        squares = {}
        for first_path, *_ in stages:
            if all(first_path in run.given for run in reference):
                by_batch = [run.given[first_path].float().square().mean(0) for run in reference]
                squares[first_path] = torch.stack(by_batch).mean(0)
        unmoved = functools.partial(self._is_unmoved, first, output)
        self.scales = block_scales(self.reference, stages, norms, squares, unmoved)
        gains |= {f"{self.name}.{path}.weight": gain for path, gain in self.scales.norms.items()}
        self.put_gains(gains)
        for paths in stages:
            moments = self._moments(paths, reference, student)
            for run in reference:  # no later stage reads them
                for path in paths:
                    run.given.pop(path, None)
            for path in paths:
                if (name := f"{self.name}.{path}") not in moments:
                    alike = self.fitter.stand_in(name, {other: of.inputs_II for other, of in moments.items()})
                    moments[name] = Moments(alike, alike.new_zeros(()).expand_as(alike), math.inf)
            for names in self.fitter.groups(moments):
                wanted = [aimed_weight(self._scaled(name), moments[name]) for name in names]
                inputs: list[Tensor | None] = [moments.pop(name).inputs_II for name in names]  # no other is kept
                rows = [self.scales.rows.get(self._path(name)) for name in names]
                found |= self.fitter.fit(names, inputs, wanted, rows)
                for name in names:
                    self.correct(name, found[name])
        return found

    def _path(self, name: str) -> str:
        return name.removeprefix(f"{self.name}.")

    def _scaled(self, name: str) -> Tensor:
        """Return a layer's full-precision weight in the scales of the student, float32."""
        path = self._path(name)
        return self.scales.weight(path, self.reference.get_parameter(f"{path}.weight").data)

    def put_gains(self, gains: Mapping[str, Tensor]) -> None:
        """Put new weights into the student's norms, by name; the reference keeps its own."""
        for name, gain in gains.items():
            norm = self.fitter.model.get_submodule(name.removesuffix(".weight"))
            device = self.fitter.model.get_parameter(name).device
            norm.weight = nn.Parameter(gain.to(device), requires_grad=False)

    def _is_unmoved(self, states: Tensor, output: Tensor, scales: Scales) -> bool:
        """Return whether the block computes the same of a batch when its weights are scaled."""
        trial = copy.deepcopy(self.reference, {id(p): p for p in self.reference.parameters()})
        for path in {*scales.columns, *scales.rows}:
            scaled = scales.weight(path, trial.get_parameter(f"{path}.weight").data).to(self.dtype)
            trial.get_submodule(path).weight = nn.Parameter(scaled, requires_grad=False)
        for path, weight in scales.norms.items():
            trial.get_submodule(path).weight = nn.Parameter(weight, requires_grad=False)
        found = run_block(trial, states, self.calls[0])
        moved = _relative(found.float() - output.float(), output).square().mean().sqrt()
        change = _relative(output.float() - states.float(), output).square().mean().sqrt()
        return bool(moved < MOVED * change + torch.finfo(output.dtype).eps)

    def correct(self, name: str, finished: Finished) -> None:
        """Let a layer compute as its quantised weight with the adapter start, for the layers that follow."""
        corrected = finished.corrected(self.fitter.settings.joint_rank).to(self.dtype)
        self.fitter.linear(name).weight = nn.Parameter(corrected, requires_grad=False)

    def _stages(self, states: Tensor) -> tuple[list[list[str]], dict[str, NormCall], Tensor]:
        """Run the reference on one batch; return its layers in order, its norms and its output.

        Layers of one input are together, as all experts' gates and ups are, and their downs. A norm is given by the
        first layer that reads it.
        """
        order: list[tuple[str, Tensor]] = []
        outputs: dict[str, Tensor] = {}
        norms: list[NormCall] = []

        def note_layer(path: str, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            order.append((path, args[0]))
            outputs[path] = output

        def note_norm(path: str, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            norms.append(NormCall(path, args[0], output))

        with contextlib.ExitStack() as hooks:
            for path, module in self.reference.named_modules():
                if path in self.paths:
                    hook = functools.partial(note_layer, path)
                elif type(module).__name__.endswith("Norm"):
                    hook = functools.partial(note_norm, path)
                else:
                    continue
                hooks.enter_context(module.register_forward_hook(hook))
            output = run_block(self.reference, states, self.calls[0])
        if not any(siblings_of(path) for path in self.paths):
            alike = {path: y for path, y in outputs.items() if y.shape == states.shape}
            self.writers = self._writers(states, output, alike, norms)
        stages: dict[Any, list[str]] = {}
        for path, given in order:
            if _mixture_stage(path) is None:
                stages.setdefault(id(given), []).append(path)
            else:  # with the experts that this batch does not reach
                stages[_mixture_stage(path)] = [p for p in self.paths if _mixture_stage(p) == _mixture_stage(path)]
        of_norms = {stages[id(call.output)][0]: call for call in norms if id(call.output) in stages}
        return list(stages.values()), of_norms, output

    def _writers(
        self, states: Tensor, output: Tensor, outputs: Mapping[str, Tensor], norms: Sequence[NormCall]
    ) -> dict[str, _Writer]:
        """Return the layers that add to the hidden states; none where a norm behind one is of an unknown kind."""
        behind = {id(call.given): call for call in norms}
        calls = {path: behind[id(y)] for path, y in outputs.items() if id(y) in behind}
        added = {path: calls[path].output if path in calls else y for path, y in outputs.items()}
        found = {}
        for path, factor in _factors_of(states, output, added).items():
            if path not in calls:
                found[path] = _Writer(factor, path, None)
                continue
            gain = gain_of(self.reference.get_submodule(calls[path].path), calls[path])
            if gain is None:
                return {}
            found[path] = _Writer(factor, calls[path].path, gain)
        return found

    def _run_reference(self, stages: list[list[str]], exact: list[Tensor]) -> list[_ReferenceRun]:
        """Run the reference on all batches; return what its layers get and the states that they add to, by batch."""
        sources = [path for paths in stages for path in dict.fromkeys(_source_of(path, paths) for path in paths)]
        runs = []
        for j, call in enumerate(self.calls):
            routes: list[Tensor] = []
            before = exact[j]
            modules = [*self.writers, *(writer.adds for writer in self.writers.values())]
            outputs = dict.fromkeys(modules, before)
            given, exact[j] = _inputs_of(sources, self.reference, before, call, routes, outputs, to_the_end=True)
            sizes = {}
            for path in self.writers:
                sizes[path] = outputs[path].float().square().mean(-1).sqrt().view(-1, 1)
            runs.append(_ReferenceRun(given, routes, self._added_to(before, outputs), sizes))
        self.is_reference_run = True
        return runs

    def _added_to(self, states: Tensor, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the hidden states that every writer adds to, [tokens, O], by path, as far as `outputs` go."""
        found = {}
        for path, writer in self.writers.items():
            found[path] = states.reshape(-1, states.shape[-1])
            if writer.adds not in outputs:
                break
            states = states + writer.factor * outputs[writer.adds]
        return found

    def _lack(self, path: str, run: _ReferenceRun, states: Tensor) -> Tensor:
        """Return what a layer would have to put out more for the student's states to be right, [tokens, O]."""
        writer = self.writers[path]
        lack = (run.added_to.pop(path).float() - states.float()) / writer.factor
        if writer.gain is None:
            return lack
        # A norm behind the layer adds g y / size, so y takes lack · size / g, with 1 / g damped for faint outputs.
        gain = writer.gain
        least = FAINT * gain.square().mean().sqrt()
        return lack * run.sizes[path] * gain / (gain.square() + least.square())

    def _moments(self, paths: list[str], reference: list[_ReferenceRun], student: list[Tensor]) -> dict[str, Moments]:
        """Return the moments of the inputs of one stage's layers, by name; layers of one input share theirs.

        An expert gets the tokens that the reference sends it; with fewer than `FEWEST_TOKENS` it is left out.
        """
        sources = {path: _source_of(path, paths) for path in paths}
        sums: dict[str, Moments] = {}
        lacks: dict[str, Tensor] = {}
        earlier = list(itertools.takewhile(lambda path: path not in paths, self.writers))
        for j, call in enumerate(self.calls):
            run = reference[j]
            outputs = {self.writers[path].adds: student[j] for path in earlier}
            ys, _ = _inputs_of([*dict.fromkeys(sources.values())], self.student, student[j], call, run.routes, outputs)
            for source, y_stored in ys.items():
                x = run.given[source].float()
                if source in self.scales.columns:
                    x = x / self.scales.columns[source]
                y = y_stored.float()
                if source not in sums:
                    zeros = y.new_zeros(y.shape[1], y.shape[1])
                    sums[source] = Moments(zeros, zeros.clone(), 0)
                total = sums[source]
                total.inputs_II.addmm_(y.T, y)
                total.shift_II.addmm_((x - y).T, y)
                sums[source] = total._replace(tokens=total.tokens + len(y))
            states = self._added_to(student[j], outputs)
            for path in paths:
                if path in self.writers:
                    lack = self._lack(path, run, states[path])
                    product = lack.T @ ys[sources[path]].float()
                    lacks[path] = lacks[path].add_(product) if path in lacks else product
        for total in sums.values():
            total.inputs_II.div_(max(1, total.tokens))
            total.shift_II.div_(max(1, total.tokens))
        for path, lack_OI in lacks.items():
            lack_OI.div_(sums[sources[path]].tokens)
        return {
            f"{self.name}.{path}": sums[source]._replace(lack_OI=lacks.get(path))
            for path, source in sources.items()
            if source in sums and (sums[source].tokens >= FEWEST_TOKENS or not siblings_of(path))
        }


class _ReferenceRun(NamedTuple):
    """What a batch is to the reference."""

    given: dict[str, Tensor]  # its layers' inputs, by path
    routes: list[Tensor]  # of its experts
    added_to: dict[str, Tensor]  # the hidden states that a writer adds to, by path
    sizes: dict[str, Tensor]  # root mean squares of a writer's outputs, [tokens, 1], by path


class _Writer(NamedTuple):
    """A layer that adds to the hidden states."""

    factor: float  # of what it adds
    adds: str  # the path of the module whose output that is: the layer, or a norm behind it
    gain: Tensor | None  # of that norm, [O]


FAINT = 0.1  # of the root mean square gain of a norm: outputs that it all but drops are not asked to correct much


def _relative(values: Tensor, output: Tensor) -> Tensor:
    """Return values over the root mean square of each token's output, so that every token counts alike."""
    size = output.float().square().mean(-1, keepdim=True).sqrt()
    return values.float() / size.clamp_min(1e-12)


def _factors_of(states: Tensor, output: Tensor, outputs: Mapping[str, Tensor]) -> dict[str, float]:
    """Return which outputs a block adds to the hidden states, with their factors; none if it does more.

    output = states + Σ c y is solved for c by least squares; a layer whose output goes elsewhere has a c of 0.
    """
    if not outputs:
        return {}
    change = _relative(output.float() - states.float(), output).flatten()
    columns = torch.stack([_relative(y, output).flatten() for y in outputs.values()], 1)
    products = (columns.T @ torch.cat([columns, change[:, None]], 1)).double().cpu()
    factors = torch.linalg.lstsq(products[:, :-1], products[:, -1:]).solution
    left = change - (columns @ factors.to(columns))[:, 0]
    rounding = 0.5 * torch.finfo(output.dtype).eps
    if left.square().mean().sqrt() > MOVED * change.square().mean().sqrt() + rounding:
        return {}
    of_outputs = zip(outputs, factors[:, 0].tolist(), strict=True)
    return {path: round(factor, 2) for path, factor in of_outputs if abs(factor) > 0.05}


def _mixture_stage(path: str) -> tuple[str, bool] | None:
    """Return mixture and stage of an expert's layer, None for a layer of no expert."""
    found = siblings_of(path)
    return found and (found[0], found[1] == "down_proj")


def _source_of(path: str, paths: list[str]) -> str:
    """Return the layer at which a layer's input is read, for others of the stage as well."""
    return path.replace("up_proj", "gate_proj") if siblings_of(path) else paths[0]


class _Stop(Exception):
    """Ends a forward whose rest is not needed."""


def _inputs_of(
    sources: list[str],
    block: nn.Module,
    x: Tensor,
    call: Call,
    routes: list[Tensor],
    outputs: dict[str, Tensor],
    to_the_end: bool = False,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs of layers for one batch, [tokens, I], by path, and what the block returns.

    Without `to_the_end` the block stops at a layer that is no expert's, and what it returns is `x`. A mixture sends its
    tokens where `routes` says, or notes there where it sends them. The values of `outputs` become those of its layers.
    """
    seen: dict[str, Tensor] = {}
    output = x
    known = iter([] if to_the_end else routes)

    def keep(path: str, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen[path] = args[0].reshape(-1, args[0].shape[-1])
        if not (to_the_end or siblings_of(path)):
            raise _Stop

    def keep_output(path: str, _module: nn.Module, _args: Any, output: Tensor) -> None:
        outputs[path] = output

    def route(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not to_the_end:
            return (args[0], next(known), *args[2:])
        routes.append(args[1])
        return None

    with contextlib.ExitStack() as hooks, contextlib.suppress(_Stop):
        for path in sources:
            hooks.enter_context(block.get_submodule(path).register_forward_pre_hook(functools.partial(keep, path)))
        for path in outputs:
            hooks.enter_context(block.get_submodule(path).register_forward_hook(functools.partial(keep_output, path)))
        for module in (module for module in block.modules() if isinstance(module, Experts)):
            hooks.enter_context(module.register_forward_pre_hook(route))
        output = run_block(block, x, call)
    return seen, output


class Moments(NamedTuple):
    """What a layer's inputs tell: the student's y and how far the reference's x are from them."""

    inputs_II: Tensor  # E[y yᵀ]
    shift_II: Tensor  # E[(x - y) yᵀ]
    tokens: float  # that all are means over
    lack_OI: Tensor | None = None  # E[r yᵀ], of a layer that adds to the hidden states: what they lack before


LACK = 0.7  # the share of it that is aimed at; half of it and all of it were alike (docs/log.md)
RIDGE = 4.0  # of inputs over tokens: what a fit of so many unknowns to so few equations overstates


def aimed_weight(weight_OI: Tensor, moments: Moments) -> Tensor:
    """Return W* = W + (W E[(x - y) yᵀ] + LACK E[r yᵀ]) E[y yᵀ]⁻¹, damped the more, the fewer tokens an input has.

    The diagonal gets a share of itself, `RIDGE` · I / tokens, since W* has I unknowns an output: without it, W* of a
    layer with 2 to 20 tokens per input is farther from what the layer should be than W.
    """
    weight = weight_OI.to(moments.inputs_II.dtype)
    ridge = RIDGE * weight.shape[1] / max(1.0, moments.tokens)
    root = invert(cholesky(damped(moments.inputs_II, own=ridge)))
    shift = weight @ moments.shift_II
    if moments.lack_OI is not None:
        shift.add_(moments.lack_OI, alpha=LACK)
    return (shift @ root.T @ root).add_(weight).float()


def capture_calls(
    blocks: Sequence[nn.Module], batches: Iterable[Any], forward: Callable[[Any], Any]
) -> tuple[list[Tensor], list[list[Call]]]:
    """Return the hidden states that enter the first block, by batch, and the calls by block and batch.

    `forward` runs the model on one batch; all blocks pass on their input then, but those of the first batch.
    """
    states: list[Tensor] = []
    calls: list[list[Call]] = [[] for _ in blocks]
    rest: list[Any] = []  # of what a block returns: behind the hidden states in a tuple, False for these alone

    def watch(number: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if number == 0:
                states.append(args[0].detach())
            calls[number].append((args[1:], kwargs))

        return hook

    with contextlib.ExitStack() as undo:
        for number, block in enumerate(blocks):
            undo.enter_context(block.register_forward_pre_hook(watch(number), with_kwargs=True))
        for batch in batches:
            if not rest:
                with blocks[0].register_forward_hook(lambda _m, _i, out: rest.append(type(out) is tuple and out[1:])):
                    forward(batch)
                for block in blocks:  # their hidden states, as they come
                    undo.enter_context(computing_by(block, lambda x, *_, **_k: x if rest[0] == 0 else (x, *rest[0])))
            else:
                forward(batch)
    return states, calls


def run_block(block: nn.Module, states: Tensor, call: Call) -> Tensor:
    """Return a block's output for one batch."""
    output = block(states, *call[0], **call[1])
    return output if isinstance(output, Tensor) else output[0]

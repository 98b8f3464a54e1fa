"""Quantise decoder block by decoder block, each layer on the inputs that the quantised layers before it produce.

Fitted to the full-precision model's inputs, every layer has a small error, and all of them add up. Here two streams of
activations go up the model together, the full-precision one x and the student's y, both kept for all calibration
rows at one depth. A layer of the student should put out W x but receives y, so its target is not W but

    W* = W E[x yᵀ] E[y yᵀ]⁻¹,

the least-squares map from what it receives to what it should give; codes and adapter start are then fitted to W* on
E[y yᵀ]. GPTQ's usual W on the student's inputs won nothing on our teacher, W* a sixth of the KL. A block is held twice.

Blocks compute in the model's type; moments and differences are summed in float32. The full-precision block runs once
for all batches, and what its layers get is kept until they are fitted; the student's runs up to the layer that is next.

Masks, positions and rotary embeddings are recorded while the model runs (`capture_calls`); they do not depend on what
the blocks compute, which hand on what they get. Source: GPTAQ (arXiv 2504.02692); W* is its least-squares form.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qat_lora.errors import ModelError
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
        found = fitter.finish(name, functools.partial(block.fit, exact, student))
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

    def fit(self, exact: list[Tensor], student: list[Tensor]) -> dict[str, Finished]:
        """Fit the layers to the hidden states that enter reference and student; leave them dense and corrected.

        The states in `exact` become those that leave the reference.
        """
        found: dict[str, Finished] = {}
        stages = self._stages(exact[0])
        given_by_batch, routes_by_batch = self._run_reference(stages, exact)
        for paths in stages:
            moments = self._moments(paths, given_by_batch, routes_by_batch, student)
            for given in given_by_batch:  # no later stage reads them
                for path in paths:
                    given.pop(path, None)
            for path in paths:
                if (name := f"{self.name}.{path}") not in moments:
                    alike = self.fitter.stand_in(name, {other: of.inputs_II for other, of in moments.items()})
                    moments[name] = Moments(alike, alike.new_zeros(()).expand_as(alike), math.inf)
            for names in self.fitter.groups(moments):
                wanted = [aimed_weight(self.fitter.linear(name).weight.data, moments[name]) for name in names]
                inputs: list[Tensor | None] = [moments.pop(name).inputs_II for name in names]  # no other is kept
                found |= self.fitter.fit(names, inputs, wanted)
                for name in names:
                    self.correct(name, found[name])
        return found

    def correct(self, name: str, finished: Finished) -> None:
        """Let a layer compute as its quantised weight with the adapter start, for the layers that follow."""
        corrected = finished.corrected(self.fitter.settings.joint_rank).to(self.dtype)
        self.fitter.linear(name).weight = nn.Parameter(corrected, requires_grad=False)

    def _stages(self, states: Tensor) -> list[list[str]]:
        """Return layers in order, those of one input together, as all experts' gates and ups are, and their downs."""
        order: list[tuple[str, Tensor]] = []
        with contextlib.ExitStack() as hooks:
            for path in self.paths:
                layer = self.reference.get_submodule(path)
                hook = functools.partial(lambda path, _module, args: order.append((path, args[0])), path)
                hooks.enter_context(layer.register_forward_pre_hook(hook))
            run_block(self.reference, states, self.calls[0])
        stages: dict[Any, list[str]] = {}
        for path, given in order:
            if _mixture_stage(path) is None:
                stages.setdefault(id(given), []).append(path)
            else:  # with the experts that this batch does not reach
                stages[_mixture_stage(path)] = [p for p in self.paths if _mixture_stage(p) == _mixture_stage(path)]
        return list(stages.values())

    def _run_reference(
        self, stages: list[list[str]], exact: list[Tensor]
    ) -> tuple[list[dict[str, Tensor]], list[list[Tensor]]]:
        """Run the reference on all batches; return the inputs of all stages' layers and the routes, by batch."""
        sources = [path for paths in stages for path in dict.fromkeys(_source_of(path, paths) for path in paths)]
        given_by_batch = []
        routes_by_batch = []
        for j, call in enumerate(self.calls):
            routes: list[Tensor] = []
            inputs, exact[j] = _inputs_of(sources, self.reference, exact[j], call, routes, to_the_end=True)
            given_by_batch.append(inputs)
            routes_by_batch.append(routes)
        self.is_reference_run = True
        return given_by_batch, routes_by_batch

    def _moments(
        self,
        paths: list[str],
        given_by_batch: list[dict[str, Tensor]],
        routes_by_batch: list[list[Tensor]],
        student: list[Tensor],
    ) -> dict[str, Moments]:
        """Return the moments of the inputs of one stage's layers, by name; layers of one input share theirs.

        An expert gets the tokens that the reference sends it; with fewer than `FEWEST_TOKENS` it is left out.
        """
        sources = {path: _source_of(path, paths) for path in paths}
        sums: dict[str, Moments] = {}
        for j, call in enumerate(self.calls):
            ys, _ = _inputs_of([*dict.fromkeys(sources.values())], self.student, student[j], call, routes_by_batch[j])
            for source, y_stored in ys.items():
                x = given_by_batch[j][source].float()
                y = y_stored.float()
                if source not in sums:
                    zeros = y.new_zeros(y.shape[1], y.shape[1])
                    sums[source] = Moments(zeros, zeros.clone(), 0)
                total = sums[source]
                total.inputs_II.addmm_(y.T, y)
                total.shift_II.addmm_((x - y).T, y)
                sums[source] = total._replace(tokens=total.tokens + len(y))
        for total in sums.values():
            total.inputs_II.div_(max(1, total.tokens))
            total.shift_II.div_(max(1, total.tokens))
        return {
            f"{self.name}.{path}": sums[source]
            for path, source in sources.items()
            if source in sums and (sums[source].tokens >= FEWEST_TOKENS or not siblings_of(path))
        }


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
    sources: list[str], block: nn.Module, x: Tensor, call: Call, routes: list[Tensor], to_the_end: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs of layers for one batch, [tokens, I], by path, and what the block returns.

    Without `to_the_end` the block stops at a layer that is no expert's, and what it returns is `x`. A mixture sends its
    tokens where `routes` says, or notes there where it sends them.
    """
    seen: dict[str, Tensor] = {}
    output = x
    known = iter([] if to_the_end else routes)

    def keep(path: str, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen[path] = args[0].reshape(-1, args[0].shape[-1])
        if not (to_the_end or siblings_of(path)):
            raise _Stop

    def route(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not to_the_end:
            return (args[0], next(known), *args[2:])
        routes.append(args[1])
        return None

    with contextlib.ExitStack() as hooks, contextlib.suppress(_Stop):
        for path in sources:
            hooks.enter_context(block.get_submodule(path).register_forward_pre_hook(functools.partial(keep, path)))
        for module in (module for module in block.modules() if isinstance(module, Experts)):
            hooks.enter_context(module.register_forward_pre_hook(route))
        output = run_block(block, x, call)
    return seen, output


class Moments(NamedTuple):
    """What a layer's inputs tell: the student's y and how far the reference's x are from them."""

    inputs_II: Tensor  # E[y yᵀ]
    shift_II: Tensor  # E[(x - y) yᵀ]
    tokens: float  # that both are means over


RIDGE = 4.0  # of inputs over tokens: what a fit of so many unknowns to so few equations overstates


def aimed_weight(weight_OI: Tensor, moments: Moments) -> Tensor:
    """Return W* = W + W E[(x - y) yᵀ] E[y yᵀ]⁻¹, damped where it is inverted: the more, the fewer tokens an input has.

    The diagonal gets a share of itself, `RIDGE` · I / tokens, since W* has I unknowns an output: without it, W* of a
    layer with 2 to 20 tokens per input is farther from what the layer should be than W.
    """
    weight = weight_OI.to(moments.inputs_II.dtype)
    ridge = RIDGE * weight.shape[1] / max(1.0, moments.tokens)
    root = invert(cholesky(damped(moments.inputs_II, own=ridge)))
    return (weight @ moments.shift_II @ root.T @ root).add_(weight).float()


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

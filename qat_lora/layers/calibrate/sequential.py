"""Quantise decoder block by decoder block, each layer on the inputs that the quantised layers before it produce.

Fitted to the full-precision model's inputs, every layer has a small error, and all of them add up. Here two streams of
activations go up the model together, the full-precision one x and the student's y, both kept for all calibration
rows at one depth. A layer of the student should put out W x but receives y, so its target is not W but

    W* = W E[x yᵀ] E[y yᵀ]⁻¹,

the least-squares map from what it receives to what it should give; codes and adapter start are then fitted to W* on
E[y yᵀ]. Usual GPTQ practice (W on the student's inputs) sees the errors of earlier layers but does not aim at them: on
our saturated teacher it won nothing, and W* a sixth of the KL. One block at a time is held twice.

Source: GPTAQ (arXiv 2504.02692) for asymmetric calibration; the target W* is its least-squares form.
"""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qat_lora.errors import ModelError
from qat_lora.layers.calibrate.blocks import Call, capture_calls, run_block
from qat_lora.layers.calibrate.finished import Finished
from qat_lora.layers.calibrate.quantize import LayerFitter
from qat_lora.layers.convert import block_of
from qat_lora.layers.lora import Factors
from qat_lora.layers.tied_embedding import embedding_of
from qat_lora.quant.gptq import damped


@torch.no_grad()
def quantize_sequential(
    fitter: LayerFitter, batches: Sequence[Any], forward: Callable[[Any], Tensor]
) -> dict[str, Factors]:
    """Quantise every target layer, in place; return the adapter starts by layer name.

    The errors that later layers see are those with the adapter start of rank `joint_rank` in place. Batches are read
    several times, and sensitivities must be theirs; `forward` runs the model on one and returns the last hidden states.
    ModelError: the layers are not in one stack of blocks that are called one after the other, hidden states first.
    """
    blocks, outside = _by_block(fitter.targets)
    stack = [fitter.model.get_submodule(name) for name in blocks]
    adapter_init: dict[str, Factors] = {}
    tied = [name for name in outside if embedding_of(fitter.model, fitter.linear(name))] if blocks else []
    if blocks:
        exact, calls = capture_calls(stack, batches, forward)
        if any(args for of_block in calls for args, _ in of_block):
            why = "its blocks are not called with hidden states alone and named arguments"
            raise ModelError(f"model: {why}, so it cannot be calibrated in order; give --calibrate-on teacher")
        student = exact
    for name in tied:  # first: the embedding's rows are what the first block gets
        _quantize_lm_head(fitter, name, batches, forward)
        student = capture_calls(stack, batches, forward)[0]
    for i, (name, layers) in enumerate(blocks.items()):
        block = _Block(fitter, name, layers, calls[i])
        found = fitter.finish(name, functools.partial(block.fit, exact, student))
        for layer, finished in found.items():
            block.correct(layer, finished)
        student = [run_block(block.student, states, call) for states, call in zip(student, calls[i], strict=True)]
        exact = [run_block(block.reference, states, call) for states, call in zip(exact, calls[i], strict=True)]
        adapter_init |= fitter.put(found)
        calls[i].clear()
    for name in outside:  # an untied LM head gets what the quantised model puts out
        if name not in tied:
            _quantize_lm_head(fitter, name, batches, forward)
    return adapter_init


def _by_block(targets: Mapping[str, Any]) -> tuple[dict[str, list[str]], list[str]]:
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

    fitter.put(fitter.finish(name, fit))


class _Block:
    """A decoder block, twice: `reference` at full precision, and `student`, whose layers are fitted one by one."""

    def __init__(self, fitter: LayerFitter, name: str, layers: Sequence[str], calls: list[Call]) -> None:
        self.fitter, self.name, self.calls = fitter, name, calls
        self.student = fitter.model.get_submodule(name)
        own = {id(p): p for p in self.student.parameters()}  # shared: weights are replaced below, never written to
        self.reference = copy.deepcopy(self.student, own)
        self.paths = [layer.removeprefix(f"{name}.") for layer in layers]

    def fit(self, exact: list[Tensor], student: list[Tensor]) -> dict[str, Finished]:
        """Fit the layers to the hidden states that enter reference and student; leave them dense and corrected."""
        found: dict[str, Finished] = {}
        for paths in self._stages(exact[0]):
            moments = self._moments(paths, exact, student)
            for names in self.fitter.groups(moments):
                given = [moments[name] for name in names]
                weights = [self.fitter.linear(name).weight.data for name in names]
                wanted = [aimed_weight(weight, *pair) for weight, pair in zip(weights, given, strict=True)]
                found |= self.fitter.fit(names, [moment for moment, _ in given], wanted)
                for name in names:
                    self.correct(name, found[name])
        return found

    def correct(self, name: str, finished: Finished) -> None:
        """Let a layer compute as its quantised weight with the adapter start, for the layers that follow."""
        corrected = finished.corrected(self.fitter.settings.joint_rank)
        self.fitter.linear(name).weight = nn.Parameter(corrected, requires_grad=False)

    def _stages(self, states: Tensor) -> list[list[str]]:
        """Return the layers in the order in which they run, those with the same input together."""
        order: list[tuple[str, Tensor]] = []
        with contextlib.ExitStack() as hooks:
            for path in self.paths:
                layer = self.reference.get_submodule(path)
                hook = functools.partial(lambda path, _module, args: order.append((path, args[0])), path)
                hooks.enter_context(layer.register_forward_pre_hook(hook))
            run_block(self.reference, states, self.calls[0])
        return [[path for path, _ in group] for _, group in itertools.groupby(order, key=lambda item: id(item[1]))]

    def _moments(
        self, paths: list[str], exact: list[Tensor], student: list[Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return E[y yᵀ] and E[x yᵀ] of the input that some layers share, by name: costs weigh tokens for each."""
        costs, sums = self.fitter.costs, dict[str, list[Tensor]]()
        for i, call in enumerate(self.calls):
            x = _input_of(paths[0], self.reference, exact[i], call)
            y = _input_of(paths[0], self.student, student[i], call)
            for path in paths:
                counts = y.new_ones(len(y)) if costs is None else costs[f"{self.name}.{path}"].tokens[i]
                weighted = y * counts[:, None]
                parts = [weighted.T @ y, x.T @ weighted, counts.sum()]
                sums[path] = [a + b for a, b in zip(sums[path], parts, strict=True)] if path in sums else parts
        return {f"{self.name}.{path}": (moment / count, cross / count) for path, (moment, cross, count) in sums.items()}


class _Stop(Exception):
    """Ends a forward whose rest is not needed."""


def _input_of(path: str, block: nn.Module, states: Tensor, call: Call) -> Tensor:
    """Return the input of a layer of the block for one batch, [tokens, I]."""
    seen: list[Tensor] = []

    def stop(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])
        raise _Stop

    with block.get_submodule(path).register_forward_pre_hook(stop), contextlib.suppress(_Stop):
        run_block(block, states, call)
    return seen[0].reshape(-1, seen[0].shape[-1]).float()


def aimed_weight(weight_OI: Tensor, moment_II: Tensor, cross_II: Tensor) -> Tensor:
    """Return W* = W + W (E[x yᵀ] - E[y yᵀ]) E[y yᵀ]⁻¹, from E[y yᵀ], damped where it is inverted, and E[x yᵀ]."""
    weight = weight_OI.double()
    change = weight @ (cross_II.double() - moment_II.double())
    return (weight + torch.linalg.solve(damped(moment_II), change, left=False)).float()

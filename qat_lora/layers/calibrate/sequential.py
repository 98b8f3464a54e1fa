"""Quantise decoder block by decoder block, each layer on the inputs that the quantised layers before it produce.

Chosen on the full-precision model's inputs, every layer's error is small and all of them add up. Here two streams of
activations go up the model side by side, the full-precision one x and the student's y, both kept for all calibration
rows at one depth. A layer of the student should put out W x but is given y, so its weight to aim at is not W but

    W* = W E[x yᵀ] E[y yᵀ]⁻¹,

the least-squares map from what it gets to what it should give; codes and adapter start are then chosen for W* on
E[y yᵀ]. Layers that come before thus leave their errors to those that follow, and each gives back what it can. The
plain GPTQ practice (W on the student's inputs) knows of the errors but aims past them; on our saturated teacher it
won nothing, and W* a sixth of the KL.

One block's layers are held twice, at full precision and quantised; a block runs once for every distinct input of its
layers.

Source: GPTAQ (arXiv 2504.02692) for asymmetric calibration; the target W* is its least-squares form.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qat_lora.errors import ModelError
from qat_lora.layers.calibrate.finished import NOT_KEPT, Finished, Work, finished_of, kept_of
from qat_lora.layers.calibrate.fisher import Sensitivity
from qat_lora.layers.calibrate.fit import StartMethod, fit_layer
from qat_lora.layers.convert import block_of, put_quantised, quantise_targets
from qat_lora.layers.lora import Factors
from qat_lora.layers.tied_embedding import embedding_of
from qat_lora.quant.gptq import damped
from qat_lora.quant.initialize import Method
from qat_lora.quant.presets import Preset
from qat_lora.quant.spec import QuantSpec
from qat_lora.runtime.host.heap import give_back


class _Stop(Exception):
    """Ends a forward whose rest is not needed."""


class _Stream:
    """Hidden states of all batches at one depth, with what every block is called with beside them."""

    def __init__(self, states: list[Tensor]) -> None:
        self.states = states

    def run(self, block: nn.Module, calls: list[dict[str, Any]], number: int) -> Tensor:
        """Return a block's output for one batch."""
        output = block(self.states[number], **calls[number])
        return output[0] if isinstance(output, tuple) else output

    def input_of(self, layer: nn.Module, block: nn.Module, calls: list[dict[str, Any]], number: int) -> Tensor:
        """Return what a layer of the block is given for one batch, [tokens, I]."""
        seen: list[Tensor] = []

        def stop(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.append(args[0])
            raise _Stop

        handle = layer.register_forward_pre_hook(stop)
        try:
            self.run(block, calls, number)
        except _Stop:
            pass
        finally:
            handle.remove()
        return seen[0].reshape(-1, seen[0].shape[-1]).float()


class Plan(NamedTuple):
    """How layers are to be fitted; the arguments of `fit_layer` that are the same for all."""

    method: Method
    start_rank: int = 0
    joint_rank: int = 0
    start_method: StartMethod = "qera"
    held_out: int = 0
    """Last batches that nothing is fitted to, on which the start method `best` compares."""


@torch.no_grad()
def quantise_in_order(
    model: nn.Module,
    preset: Preset,
    plan: Plan,
    batches: Sequence[Any],
    forward: Callable[[Any], Tensor],
    costs: dict[str, Sensitivity] | None = None,
    quiet: bool = False,
    work: Work = NOT_KEPT,
) -> dict[str, Factors]:
    """Quantise every layer that the preset reaches, in place; return the adapter starts by layer name.

    The errors that later layers see are those with the adapter start of rank `plan.joint_rank` in place.

    Args:
        model: the full-precision model; its blocks must be called one after the other, hidden states first.
        preset: which layers, and how.
        plan: how.
        batches: calibration batches, read several times.
        forward: runs the model on one batch and returns the last hidden states.
        costs: sensitivities by layer name, of the same batches.
        quiet: no progress bar.
        work: keeps every finished block, and has those that an interrupted run finished.

    Raises:
        InterruptedRunError: the run was asked to stop.
        ModelError: the layers do not lie in one stack of blocks.
        ConfigError: a pattern without a match, or what `fit_layer` refuses.
    """
    targets = quantise_targets(model, preset)
    blocks, outside = _blocks(targets)
    starts: dict[str, Factors] = {}
    with tqdm(total=len(targets), desc=f"quantise {preset.name} ({plan.method})", unit="layer", disable=quiet) as bar:
        tied = [name for name in outside if embedding_of(model, _linear(model, name))]
        if blocks:
            stack = [model.get_submodule(name) for name in blocks]
            states, calls = _capture(stack, batches, forward)
            exact, student = _Stream(list(states)), _Stream(list(states))
            if tied:  # first, since what it looks up is what the first block gets
                _head(model, tied[0], targets, plan, batches, forward, work)
                student = _Stream(_capture(stack, batches, forward)[0])
                bar.update()
            for (name, layers), block, call in zip(blocks.items(), stack, calls, strict=True):
                own = {id(p): p for p in block.parameters()}  # shared: weights are replaced below, never written to
                reference = copy.deepcopy(block, own)
                kept = work.take(f"block-{name}")
                if kept is None:
                    inside = {layer.removeprefix(name + "."): layer for layer in layers}
                    found = _block(block, reference, inside, targets, plan, exact, student, call, costs, work, bar)
                    work.keep(f"block-{name}", *kept_of(found))
                else:
                    found = finished_of(kept, model, targets)
                    for layer, finished in found.items():
                        _correct(_linear(model, layer), finished, plan)
                    bar.update(len(found))
                student.states = [student.run(block, call, i) for i in range(len(batches))]
                exact.states = [exact.run(reference, call, i) for i in range(len(batches))]
                for layer, finished in found.items():
                    model.set_submodule(layer, finished.layer)
                    if finished.factors is not None:
                        starts[layer] = finished.factors.half()
                call.clear()
        for name in outside:  # the output head: it gets what the quantised model puts out
            if not (blocks and name in tied):
                _head(model, name, targets, plan, batches, forward, work)
                bar.update()
    return starts


def _linear(model: nn.Module, name: str) -> nn.Linear:
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    return linear


def _head(
    model: nn.Module,
    name: str,
    targets: dict[str, QuantSpec],
    plan: Plan,
    batches: Sequence[Any],
    forward: Callable[[Any], Tensor],
    work: Work,
) -> None:
    """Quantise the output head, in place, on the hidden states that the model puts out now."""
    linear = _linear(model, name)
    kept = work.take(f"block-{name}")
    if kept is not None:
        put_quantised(model, name, finished_of(kept, model, targets)[name].layer)
        return
    moment = torch.zeros(linear.in_features, linear.in_features, device=linear.weight.device)
    for batch in batches:
        x = forward(batch).reshape(-1, linear.in_features).float()
        moment += x.T @ x / (x.shape[0] * len(batches))
    fit = fit_layer(linear.weight.data, targets[name], plan.method, moment)
    finished = Finished.of(linear, targets[name], fit)
    work.keep(f"block-{name}", *kept_of({name: finished}))
    put_quantised(model, name, finished.layer)


def _correct(linear: nn.Linear, finished: Finished, plan: Plan) -> None:
    """Let a layer compute as its quantised weight with the adapter start: what later layers of its block will see."""
    linear.weight = nn.Parameter(finished.corrected(plan.joint_rank), requires_grad=False)


def _blocks(targets: dict[str, QuantSpec]) -> tuple[dict[str, list[str]], list[str]]:
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


def _capture(
    stack: list[nn.Module], batches: Sequence[Any], forward: Callable[[Any], Any]
) -> tuple[list[Tensor], list[list[dict[str, Any]]]]:
    """Return the hidden states that enter the first block, by batch, and the other arguments by block and batch."""
    states: list[Tensor] = []
    calls: list[list[dict[str, Any]]] = [[] for _ in stack]

    def watch(number: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if len(args) != 1:
                raise ModelError(
                    "model: its blocks are not called with hidden states alone and named arguments, so it cannot be "
                    "calibrated in order; give --calibrate-on teacher"
                )
            if number == 0:
                states.append(args[0].detach())
            calls[number].append(kwargs)

        return hook

    handles = [block.register_forward_pre_hook(watch(i), with_kwargs=True) for i, block in enumerate(stack)]
    try:
        for batch in batches:
            forward(batch)
    finally:
        for handle in handles:
            handle.remove()
    return states, calls


def _block(
    block: nn.Module,
    reference: nn.Module,
    inside: dict[str, str],
    targets: dict[str, QuantSpec],
    plan: Plan,
    exact: _Stream,
    student: _Stream,
    calls: list[dict[str, Any]],
    costs: dict[str, Sensitivity] | None,
    work: Work,
    bar: tqdm[Any],
) -> dict[str, Finished]:
    """Fit the layers of a block, leaving them dense and corrected; return what stands for them."""
    found: dict[str, Finished] = {}
    for paths in _stages(reference, list(inside), exact, calls):
        sums: dict[str, list[Tensor]] = {}
        fresh: dict[str, Tensor] = {}
        for i in range(len(calls)):
            x = exact.input_of(reference.get_submodule(paths[0]), reference, calls, i)
            y = student.input_of(block.get_submodule(paths[0]), block, calls, i)
            for path in paths:
                counts = y.new_ones(len(y)) if costs is None else costs[inside[path]].tokens[i]
                weighted = y * counts[:, None]
                if i >= len(calls) - plan.held_out:
                    fresh[path] = weighted.T @ y + fresh.get(path, 0.0)
                    continue
                parts = [weighted.T @ y, x.T @ weighted, counts.sum()]
                known = sums.get(path)
                sums[path] = parts if known is None else [a + b for a, b in zip(known, parts, strict=True)]
        for path in paths:
            work.may_stop()
            linear, name = _linear(block, path), inside[path]
            moment, cross = sums[path][0] / sums[path][2], sums[path][1] / sums[path][2]
            wanted = aimed_weight(linear.weight.data, moment, cross)
            outputs = None if costs is None else costs[name].outputs_OO
            ranks = plan.start_rank, plan.joint_rank
            fit = fit_layer(
                wanted, targets[name], plan.method, moment, outputs, *ranks, plan.start_method, fresh.get(path)
            )
            found[name] = Finished.of(linear, targets[name], fit)
            _correct(linear, found[name], plan)
            give_back()
            bar.update()
    return found


def aimed_weight(weight_OI: Tensor, moment_II: Tensor, cross_II: Tensor) -> Tensor:
    """Return W* = W + W (E[x yᵀ] - E[y yᵀ]) E[y yᵀ]⁻¹, with E[y yᵀ] damped where it is inverted.

    Args:
        weight_OI: the full-precision weight.
        moment_II: E[y yᵀ] of the student's inputs y.
        cross_II: E[x yᵀ], x being the full-precision inputs.
    """
    weight = weight_OI.double()
    change = weight @ (cross_II.double() - moment_II.double())
    return (weight + torch.linalg.solve(damped(moment_II), change, left=False)).float()


def _stages(block: nn.Module, paths: list[str], stream: _Stream, calls: list[dict[str, Any]]) -> list[list[str]]:
    """Return the layers of a block in the order in which they run, those with the same input together."""
    order: list[tuple[str, Tensor]] = []
    handles = [
        block.get_submodule(path).register_forward_pre_hook(lambda _m, args, path=path: order.append((path, args[0])))
        for path in paths
    ]
    try:
        stream.run(block, calls, 0)
    finally:
        for handle in handles:
            handle.remove()
    return [[path for path, _ in group] for _, group in itertools.groupby(order, key=lambda item: id(item[1]))]

"""Quantise a model by what its layers see, every layer on its own: second moments, codes, adapter starts.

One pass over calibration rows collects E[x xᵀ] for every distinct layer input (q, k and v share one matrix, gate
and up another); then layer by layer, `fit` does the rest. No layer knows that the inputs it will get are no longer
the full-precision model's: `in_order` cures that, at the price of running every block several times.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qat_lora.layers.calibrate.finished import NOT_KEPT, Finished, Work, finished_of, kept_of
from qat_lora.layers.calibrate.fisher import Sensitivity
from qat_lora.layers.calibrate.fit import StartMethod, fit_layer
from qat_lora.layers.convert import HEAD, block_of, put_quantised, quantise_targets
from qat_lora.layers.lora import Factors
from qat_lora.quant.initialize import Method
from qat_lora.quant.presets import Preset
from qat_lora.runtime.host.heap import give_back


def second_moments(
    model: nn.Module,
    names: Iterable[str],
    batches: Iterable[Any],
    forward: Callable[[Any], Any],
    costs: dict[str, Sensitivity] | None = None,
) -> dict[str, Tensor]:
    """Return the mean of x xᵀ over all tokens, float32 [I, I], for the input of every named layer.

    Layers that are given the same tensor share one matrix, unless tokens count differently for each.

    Args:
        model: the full-precision model.
        names: linear layers to watch.
        batches: calibration batches.
        forward: runs the model on one batch; where the output head is among the names, it returns the last hidden
            states, which are the head's input (running the head would cost the logits of a whole batch).
        costs: by layer, how much each token counts; without them all count alike.
    """
    sums: dict[str, Tensor] = {}
    mass: dict[str, Tensor | float] = {}
    owner: dict[str, str] = {}
    last: dict[str, Any] = {"input": None, "name": "", "batch": 0}

    def watch(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if costs is None and args[0] is last["input"]:
                owner[name] = last["name"]
                return
            last.update(input=args[0], name=name)
            x = args[0].reshape(-1, args[0].shape[-1]).float()
            weights = x.new_ones(x.shape[0])
            if costs is not None and name in costs:
                weights = costs[name].tokens[last["batch"]]
            moment = (x * weights[:, None]).T @ x
            sums[name] = sums[name] + moment if name in sums else moment
            mass[name] = mass.get(name, 0.0) + weights.sum()

        return hook

    hooks = {name: watch(name) for name in names}
    heads = {name: hooks.pop(name) for name in list(hooks) if HEAD.search(name)}
    handles = [model.get_submodule(name).register_forward_pre_hook(hook) for name, hook in hooks.items()]
    try:
        with torch.no_grad():
            for number, batch in enumerate(batches):
                last["batch"] = number
                hidden = forward(batch)
                for name, hook in heads.items():
                    hook(model.get_submodule(name), (hidden,))
    finally:
        for handle in handles:
            handle.remove()
    means = {name: total / mass[name] for name, total in sums.items()}
    return means | {name: means[shared] for name, shared in owner.items() if shared in means}


def quantise_model(
    model: nn.Module,
    preset: Preset,
    method: Method,
    moments: dict[str, Tensor] | None = None,
    start_rank: int = 0,
    quiet: bool = False,
    *,
    costs: dict[str, Sensitivity] | None = None,
    joint_rank: int = 0,
    start_method: StartMethod = "qera",
    fresh: dict[str, Tensor] | None = None,
    work: Work = NOT_KEPT,
) -> dict[str, Factors]:
    """Quantise every layer that the preset reaches, in place; return the adapter starts by layer name.

    Args:
        model: the full-precision model.
        preset: which layers, and how.
        method: how codes and scales are chosen.
        moments: second moments by layer name, from `second_moments`.
        start_rank: columns of the adapter start to keep; 0 for none.
        quiet: no progress bar.
        costs: sensitivities by layer name.
        joint_rank: rank of the adapter that codes are chosen together with; 0: codes first.
        start_method: metric of the adapter start.
        fresh: second moments over held-out rows by layer name, for the start method `best`.
        work: keeps the layers of every finished block, and has those that an interrupted run finished.

    Raises:
        InterruptedRunError: the run was asked to stop.
        ConfigError: a pattern without a match, or a method without the calibration it needs.
    """
    starts: dict[str, Factors] = {}
    targets = quantise_targets(model, preset)
    with tqdm(total=len(targets), desc=f"quantise {preset.name} ({method})", unit="layer", disable=quiet) as bar:
        for block, names in itertools.groupby(targets, lambda name: block_of(name) or name):
            kept = work.take(f"block-{block}")
            found = {} if kept is None else finished_of(kept, model, targets)
            for name in () if kept else names:
                work.may_stop()
                linear, spec = model.get_submodule(name), targets[name]
                assert isinstance(linear, nn.Linear)
                outputs = None if costs is None or name not in costs else costs[name].outputs_OO
                moment = (moments or {}).get(name)
                ranks = (0, 0) if HEAD.search(name) else (start_rank, joint_rank)  # no adapter sits on the head
                held_out = (fresh or {}).get(name)
                fit = fit_layer(linear.weight.data, spec, method, moment, outputs, *ranks, start_method, held_out)
                found[name] = Finished.of(linear, spec, fit)
                give_back()
                bar.update()
            if kept is None:
                work.keep(f"block-{block}", *kept_of(found))
            else:
                bar.update(len(found))
            for name, (layer, factors) in found.items():
                if factors is not None:
                    starts[name] = factors.half()
                put_quantised(model, name, layer)
    return starts

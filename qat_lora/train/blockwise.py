"""Block-wise reconstruction: codes and scales of one decoder layer at a time, by what the layer puts out.

Before the whole model trains on the teacher's logits, each decoder layer in turn learns to give the full-precision
layer's output *from the inputs that the quantised layers before it produce*, so it also makes up for what they lost.
Only one layer's weights, gradients and moments are in memory, and its output is a far richer target than the logits:
at 2 bits this is the step that moves codes at all in a budget of a few thousand rows.

Source: BRECQ (arXiv 2102.05426); Block-AP of EfficientQAT (arXiv 2407.11062).
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qat_lora.config import option, settings
from qat_lora.errors import ModelError
from qat_lora.layers.calibrate.blocks import Call, capture_calls, run_block
from qat_lora.layers.calibrate.finished import Work
from qat_lora.layers.convert import block_of, linear_layers, quant_layers, scales_by_kind
from qat_lora.runtime.base import Runtime
from qat_lora.train.optim import OptimConfig, build_optimizer, set_lr
from qat_lora.types import Batch


@settings
class BlockwiseConfig:
    """How long and how fast every decoder layer is reconstructed."""

    blockwise_steps: int = option(
        0, "optimizer steps for each decoder layer alone, before the model trains as a whole", unit="steps", min=0
    )
    blockwise_lr: float = option(1e-4, "peak learning rate of the weights in it", above=0)
    blockwise_scale_lr: float = option(1e-4, "peak learning rate of the scales in it", above=0)


_Fit = tuple[BlockwiseConfig, Runtime, Any, Work]  # how a block is trained, the progress bar, and what keeps it


def blocks_of(module: nn.Module) -> str:
    """Return the name of the list of decoder layers that holds all quantised layers; ModelError if none does."""
    names = [*quant_layers(module)]
    lists = {(block_of(name) or name).rpartition(".")[0] for name in names}
    lists = {name for name in lists if isinstance(module.get_submodule(name), nn.ModuleList)}
    if len(lists) != 1 or not all(name.startswith(f"{next(iter(lists))}.") for name in names):
        there = ", ".join(sorted(lists)) or "none"
        needs = "needs one list of decoder layers that holds all quantised ones"
        raise ModelError(f"blockwise_steps: {needs}; found {there}")
    return lists.pop()


def reconstruct(
    student: nn.Module,
    full: nn.Module,
    forward: Callable[[Batch], Any],
    batches: Iterable[Batch],
    config: BlockwiseConfig,
    runtime: Runtime,
    quiet: bool,
    work: Work,
) -> list[dict[str, float]]:
    """Train the codes and scales of a quantised model block by block, in place; packed codes again at the end.

    A block that training did not bring nearer keeps its start. Returned is for every block the mean squared error of
    its output `before` and `after`, as a share of the output's own. Both models are placed and in float32, `forward`
    runs `full` on one of the batches, which have one shape; `work` keeps every finished block. InterruptedRunError: the
    run was asked to stop. ModelError: no rows, or no list of decoder layers that holds all quantised ones.
    """
    where = blocks_of(student)
    pairs = list(zip(student.get_submodule(where).children(), full.get_submodule(where).children(), strict=True))

    def run(batch: Batch) -> None:
        forward(batch)
        runtime.mark_step()

    with torch.no_grad():
        hidden, calls = capture_calls([model for _, model in pairs], batches, run)
    if not hidden:
        raise ModelError("blockwise_steps: there are no calibration rows")
    exact, shares = list(hidden), []
    with tqdm(total=len(pairs) * config.blockwise_steps, desc="block by block", unit="step", disable=quiet) as bar:
        for index, (block, model) in enumerate(pairs):
            call, name = calls[index], str(index)
            exact = _push(model, exact, call, runtime)
            kept = work.take(f"block-{name}")
            if kept is None:
                share, hidden = _reconstruct(block, model, hidden, exact, call, (config, runtime, bar, work))
                work.keep(f"block-{name}", block.state_dict(), {name: share})
            else:
                block.load_state_dict(kept[0])
                share = kept[1][name]
                hidden = _push(block, hidden, call, runtime)
                bar.update(config.blockwise_steps)
            shares.append(share)
            bar.set_postfix_str("layer {}: error {before:.3f} -> {after:.3f}".format(index, **share))
    return shares


def _reconstruct(
    block: nn.Module, model: nn.Module, hidden: list[Tensor], exact: list[Tensor], calls: list[Call], fit: _Fit
) -> tuple[dict[str, float], list[Tensor]]:
    """Train one block, unless its start is better; return its error `before` and `after`, and its outputs."""
    config, runtime, bar, work = fit
    started, start = _push(block, hidden, calls, runtime), copy.deepcopy(block.state_dict())
    dense = dict(linear_layers(model))
    weights: dict[str, nn.Parameter] = {}
    scales: dict[str, nn.Parameter] = {}
    layers = quant_layers(block)
    for name, layer in layers.items():
        weights[name] = layer.train_weight(dense[name].weight.detach()).weight
        layer.train_scales()
        scales |= {f"{name}.{i}": scale for i, scale in enumerate(layer.scales)}
    rates = OptimConfig(lr=config.blockwise_lr, scale_lr=config.blockwise_scale_lr)
    optimizer = build_optimizer(rates, {"weights": weights, **scales_by_kind(block, scales)}, runtime)
    for step in range(config.blockwise_steps):
        work.may_stop()
        index = step % len(hidden)
        difference = run_block(block, hidden[index], calls[index]).float() - exact[index].float()
        (difference.square().sum() / exact[index].float().square().sum()).backward()
        set_lr(optimizer, 1 - step / config.blockwise_steps)  # to zero, or weights near a border keep crossing it
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        runtime.mark_step()
        bar.update()
    for layer in layers.values():
        for parameter in layer.parameters():
            parameter.grad = None
        layer.materialize()
    fitted = _push(block, hidden, calls, runtime)
    before, after = _error(started, exact), _error(fitted, exact)
    if after < before:
        return {"before": before, "after": after}, fitted
    block.load_state_dict(start)  # too few steps for its learning rate: codes found by calibration were better
    return {"before": before, "after": before}, started


@torch.no_grad()
def _push(block: nn.Module, hidden: list[Tensor], calls: list[Call], runtime: Runtime) -> list[Tensor]:
    out = []
    for states, call in zip(hidden, calls, strict=True):
        out.append(run_block(block, states, call))
        runtime.mark_step()
    return out


def _error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the squared error as a share of the reference's own square."""
    wrong = torch.stack([(a.float() - b.float()).square().sum() for a, b in zip(ours, theirs, strict=True)]).sum()
    return float(wrong / torch.stack([b.float().square().sum() for b in theirs]).sum())

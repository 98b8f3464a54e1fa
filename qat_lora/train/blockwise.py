"""Block-wise reconstruction: one decoder layer at a time learns to put out what the full-precision layer does.

Each layer in turn is trained *on the inputs that the student's layers before it produce*, so it also makes up for what
they lost. Only its own weights, gradients and moments are in memory, and its output is a far richer target than the
logits. `qat --blockwise-steps` moves codes and scales so before the whole model trains: at 2 bits only this moves codes
in a budget of a few thousand rows. `recover --blockwise` trains adapters so where the model's activations do not fit;
its last layer, whose output gives the logits, learns from the cache instead.

Source: BRECQ (arXiv 2102.05426); Block-AP of EfficientQAT (arXiv 2407.11062).
"""

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from qat_lora.config import option, settings
from qat_lora.errors import ModelError
from qat_lora.layers.calibrate.fisher import Zeros
from qat_lora.layers.calibrate.quantize import Work
from qat_lora.layers.calibrate.sequential import Call, capture_calls, run_block
from qat_lora.layers.convert import block_of, linear_layers, quant_layers, scales_by_kind
from qat_lora.runtime.base import Runtime
from qat_lora.train.optim import FIRST_LR, Groups, OptimConfig, build_optimizer, set_lr
from qat_lora.types import Batch

if TYPE_CHECKING:  # options import this module, and a device is chosen before transformers loads
    from qat_lora.models.load import CausalLM


@settings
class BlockwiseConfig:
    """How long and how fast every decoder layer is reconstructed."""

    blockwise_steps: int = option(0, "optimizer steps of each layer alone, before all train", unit="steps", min=0)
    blockwise_lr: float = option(1e-4, "peak learning rate of the weights in it", above=0)
    blockwise_scale_lr: float = option(1e-4, "peak learning rate of the scales in it", above=0)


BLOCK_LR = 4 * FIRST_LR
"""Of adapters in one layer: its error has far less noise than the logits' loss, and a worse end is not kept."""


class BlockTraining(NamedTuple):
    """How each decoder layer trains."""

    prepare: Callable[[str, nn.Module, nn.Module], Groups]
    """Puts a layer, given by its name, itself and its full-precision twin, into training; returns what trains."""
    rates: OptimConfig
    steps: int
    zeros: Zeros
    """Where hidden states are kept."""
    runtime: Runtime
    work: Work
    """Keeps every finished layer."""
    quiet: bool = False


def blocks_of(module: nn.Module) -> str:
    """Return the name of the list of decoder layers that holds all quantised layers; ModelError if none does."""
    names = [*quant_layers(module)]
    lists = {(block_of(name) or name).rpartition(".")[0] for name in names}
    lists = {name for name in lists if isinstance(module.get_submodule(name), nn.ModuleList)}
    if len(lists) != 1 or not all(name.startswith(f"{next(iter(lists))}.") for name in names):
        there = ", ".join(sorted(lists)) or "none"
        needs = "needs one list of decoder layers that holds all quantised ones"
        raise ModelError(f"blockwise: {needs}; found {there}")
    return lists.pop()


def reconstruct(
    student: "CausalLM", full: "CausalLM", batches: Sequence[Batch], training: BlockTraining, leave: int = 0
) -> list[dict[str, float]]:
    """Train a quantised model block by block, in place, but for the last `leave` blocks; packed codes at the end.

    A block that training did not bring nearer keeps its start. Returned is for every block the mean squared error of
    its output `before` and `after`, as a share of the output's own. The student is placed, `full` on the host in any
    dtype, the batches too and of one shape. InterruptedRunError: the run was asked to stop. ModelError: no rows, or no
    list of decoder layers that holds all quantised ones.
    """
    where, work, runtime = blocks_of(student.module), training.work, training.runtime
    pairs = list(zip(*(m.module.get_submodule(where).children() for m in (student, full)), strict=True))
    count = len(pairs) - leave
    kept = [work.take(f"block-{index}") for index in range(count)]
    shares = [piece[1][str(index)] for index, piece in enumerate(kept) if piece]
    for (block, _), piece in zip(pairs, kept, strict=False):
        if piece:
            block.load_state_dict(piece[0])
    if len(shares) == count:
        return shares
    with torch.no_grad():
        hidden, calls = _record(student, [block for block, _ in pairs], runtime.device, batches, training)
        exact, _ = _record(full, [block for _, block in pairs], torch.device("cpu"), batches, training)
    if not hidden:
        raise ModelError("blockwise: there are no rows to train on")
    with tqdm(total=count * training.steps, desc="block by block", unit="step", disable=training.quiet) as bar:
        for index, ((block, model), call) in enumerate(zip(pairs[:count], calls, strict=False)):
            model = runtime.place(copy.deepcopy(model).float())
            exact = _push(model, exact, call, training)
            if kept[index] is None:
                share, hidden = _reconstruct(f"{where}.{index}", (block, model), hidden, exact, call, training, bar)
                work.keep(f"block-{index}", block.state_dict(), {str(index): share})
                shares.append(share)
            else:
                hidden = _push(block, hidden, call, training)
                bar.update(training.steps)
            bar.set_postfix_str("layer {}: error {before:.3f} -> {after:.3f}".format(index, **shares[index]))
    return shares


def _reconstruct(
    name: str,
    pair: tuple[nn.Module, nn.Module],
    hidden: list[Tensor],
    exact: list[Tensor],
    calls: list[Call],
    training: BlockTraining,
    bar: Any,
) -> tuple[dict[str, float], list[Tensor]]:
    """Train one block, unless its start is better; return its error `before` and `after`, and its outputs."""
    (block, _), runtime = pair, training.runtime
    started, start = _push(block, hidden, calls, training), copy.deepcopy(block.state_dict())
    optimizer = build_optimizer(training.rates, training.prepare(name, *pair), runtime)
    for step in range(training.steps):
        training.work.may_stop()
        index = step % len(hidden)
        wanted = exact[index].to(runtime.device)
        difference = run_block(block, hidden[index].to(runtime.device), calls[index]).float() - wanted
        (difference.square().sum() / wanted.square().sum()).backward()
        set_lr(optimizer, 1 - step / training.steps)  # to zero, or weights near a border keep crossing it
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        runtime.mark_step()
        bar.update()
    for parameter in block.parameters():
        parameter.grad = None
    for layer in quant_layers(block).values():
        layer.materialize()
    fitted = _push(block, hidden, calls, training)
    before, after = _error(started, exact), _error(fitted, exact)
    if after < before:
        return {"before": before, "after": after}, fitted
    block.load_state_dict(start)  # too few steps for its learning rate: what calibration found was better
    return {"before": before, "after": before}, started


def _record(
    model: "CausalLM", blocks: list[nn.Module], device: torch.device, batches: Sequence[Batch], training: BlockTraining
) -> tuple[list[Tensor], list[list[Call]]]:
    """Return the hidden states that enter the first block, where they are kept, and all blocks' other arguments."""

    def forward(batch: Batch) -> None:
        training.work.may_stop()
        model.hidden(*(torch.as_tensor(batch[name]).to(device) for name in ("input_ids", "document_ids")))
        training.runtime.mark_step()

    states, calls = capture_calls(blocks, batches, forward)
    return [_kept(x, training) for x in states], calls


def weights_and_scales(_name: str, block: nn.Module, full: nn.Module) -> Groups:
    """Let codes, through float weights that start at the full-precision ones, and scales of a block train."""
    dense, weights, scales = dict(linear_layers(full)), dict[str, nn.Parameter](), dict[str, nn.Parameter]()
    for name, layer in quant_layers(block).items():
        weights[name] = layer.train_weight(dense[name].weight.detach()).weight
        layer.train_scales()
        scales |= {f"{name}.{i}": scale for i, scale in enumerate(layer.scales)}
    return {"weights": weights, **scales_by_kind(block, scales)}


def _kept(states: Tensor, training: BlockTraining) -> Tensor:
    """Return hidden states in float32 where they are kept."""
    return training.zeros(*states.shape).copy_(states)


@torch.no_grad()
def _push(block: nn.Module, hidden: list[Tensor], calls: list[Call], training: BlockTraining) -> list[Tensor]:
    out = []
    for states, call in zip(hidden, calls, strict=True):
        out.append(_kept(run_block(block, states.to(training.runtime.device), call), training))
        training.runtime.mark_step()
    return out


def _error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the squared error as a share of the reference's own square."""
    wrong = sum(float((a - b).square().sum()) for a, b in zip(ours, theirs, strict=True))
    return wrong / sum(float(b.square().sum()) for b in theirs)

"""What an error in a layer's output costs the model: the Fisher information of every layer's outputs.

Equal output errors of two layers, or in two outputs of one, can differ a hundredfold in the harm they do to the
predictions. To second order the KL that a change dy of a layer's output causes is E[(g · dy)²] / 2, with g the gradient
of log p(v) for a token v drawn from the model's own predictions. With y = W x and the usual factorisation (K-FAC) the
cost of a weight error E is tr(G E H Eᵀ): G = E[g gᵀ] over outputs, H the second moment of inputs. One backward pass
over some calibration rows gives G; the labels of the text are not used.

Each factor may weigh a token by the size of the other one there (YAQA): H by its g², G by its x². On a model of 135 M
weights this left H of early layers a twentieth of its tokens, of some values' projections a three-hundredth, and
students were 10 % farther from their teacher than with all tokens alike. G needs few tokens and a high floor.

Memory that would grow with the model is bounded: decoder blocks recompute their activations in the backward pass, G
may be on disk (`zeros_in`), as it takes several times the room of a bfloat16 model, and logits are computed for a few
positions at a time. A file is unlinked as soon as it is mapped; what a killed run was making the next one removes.

Sources: K-FAC (arXiv 1503.05671); Fisher weights in rounding, GuidedQuant (arXiv 2505.07004).
"""

import contextlib
import errno
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm

from qat_lora.cache.build.topk import draw
from qat_lora.errors import ConfigError
from qat_lora.files.folders import ours
from qat_lora.layers.convert import LM_HEAD, block_of, quant_layers
from qat_lora.quant.initialize import NEED_TEXT
from qat_lora.runtime.host.machine import give_back

SCRATCH = ".scratch"
Zeros = Callable[..., Tensor]  # from a shape to a float32 tensor of zeros on the host


def zeros_in(folder: Path) -> Zeros:
    """Return the equivalent of `torch.zeros` for tensors on the folder's disk; it raises ConfigError on a full disk."""

    def zeros(*shape: int) -> Tensor:
        count = math.prod(shape)
        path = ours(folder / SCRATCH)
        path.unlink(missing_ok=True)  # of a run that was killed right here
        try:
            with path.open("xb") as file:
                _reserve(file.fileno(), 4 * count, folder)
            return torch.from_file(str(path), shared=True, size=count, dtype=torch.float32).view(shape)
        finally:
            path.unlink(missing_ok=True)

    return zeros


def _reserve(descriptor: int, size: int, folder: Path) -> None:
    """Allocate a file's blocks now: on a full disk, writing to a mapping without them would kill the process."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.truncate(descriptor, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ConfigError(
            f"out: {error.strerror}: {folder} has no room for {size / 1e6:,.0f} MB more of what --metric fisher keeps "
            "of every layer, or --blockwise of every row; free some, choose another --out, give --metric outputs or "
            "leave --blockwise out"
        ) from None


MOST_LOGITS = 2**25  # at a time: 128 MB in float32, and a few times that while tokens are drawn
MOST_OUTPUTS = 4096  # layers wider than this keep only the diagonal of G: the matrix would outgrow the weight


def kept_shape(outputs: int) -> tuple[int, ...]:
    """Return the shape of the G that is kept, in float32, of a layer with so many outputs."""
    return (outputs, outputs) if outputs <= MOST_OUTPUTS else (outputs,)


def fisher_bytes(module: nn.Module, init: str, metric: str) -> int:
    """Return what `--metric fisher` keeps of every layer on disk while a student is made."""
    if metric != "fisher" or init not in NEED_TEXT:
        return 0
    inside = (layer for name, layer in quant_layers(module).items() if not LM_HEAD.search(name))
    return sum(4 * math.prod(kept_shape(layer.out_features)) for layer in inside)


def sensitivities(
    model: nn.Module,
    names: Iterable[str],
    batches: Iterable[Any],
    log_likelihood: Callable[[Any], Tensor],
    quiet: bool = False,
    zeros: Zeros = torch.zeros,
) -> dict[str, Tensor]:
    """Return G = E[g gᵀ] at the output of every named linear layer, float32 [O, O] on the host, or [O] of a wide one.

    The model is a full-precision one in which nothing trains. `log_likelihood` leads from a batch to the summed log
    likelihood of tokens drawn from the model's predictions, or to any number with the same gradient; `zeros` makes the
    matrices. An expert that no token reaches has zeros.
    """
    sums: dict[str, Tensor] = {}
    tokens = dict.fromkeys(names, 0)

    def watch(name: str) -> Callable[..., None]:
        def on_gradient(gradient: Tensor) -> None:
            g = gradient.reshape(-1, gradient.shape[-1]).float()
            shape = kept_shape(g.shape[1])
            if name not in sums:
                sums[name] = zeros(*shape)
            sums[name] += (g.T @ g if len(shape) == 2 else g.square().sum(0)).cpu()
            tokens[name] += len(g)

        def on_output(_module: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> None:
            output.register_hook(on_gradient)

        return on_output

    blocks = dict.fromkeys(block for name in tokens if (block := block_of(name)) is not None)
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    with contextlib.ExitStack() as hooks:
        for name in tokens:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(watch(name)))
        hooks.enter_context(embedding.register_forward_hook(lambda _m, _i, output: output.detach().requires_grad_()))
        for decoder in map(model.get_submodule, blocks):  # which keep only their inputs; gradients stay the same
            again = functools.partial(_after_giving_back, decoder.forward)
            again = functools.partial(checkpoint, again, use_reentrant=False, preserve_rng_state=False)
            hooks.enter_context(computing_by(decoder, again))
        for batch in tqdm(batches, desc="sensitivity", unit="batch", disable=quiet):
            log_likelihood(batch).backward()
    return {name: sums[name].div_(max(1, count)) for name, count in tokens.items()}


@contextlib.contextmanager
def computing_by(block: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module compute by another function for a while."""
    own = vars(block).get("forward")
    vars(block)["forward"] = forward
    try:
        yield
    finally:
        del vars(block)["forward"]
        vars(block).update({} if own is None else {"forward": own})


def _after_giving_back(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    give_back()
    return forward(*args, **kwargs)


def drawn_in_pieces(
    hidden_NH: Tensor, logits: Callable[[Tensor], Tensor], vocab_size: int, generator: torch.Generator
) -> Tensor:
    """Return a number with the gradient of `drawn_log_likelihood`, without holding the logits of all positions."""
    gradient = torch.empty_like(hidden_NH)
    rows = max(1, MOST_LOGITS // vocab_size)
    for states, found in zip(hidden_NH.detach().split(rows), gradient.split(rows), strict=True):
        states = states.detach().requires_grad_()
        found.copy_(torch.autograd.grad(drawn_log_likelihood(logits(states), generator), states)[0])
    return (hidden_NH * gradient).sum()


def drawn_log_likelihood(logits_NV: Tensor, generator: torch.Generator) -> Tensor:
    """Return the summed log likelihood of one token per position, drawn from the predictions themselves."""
    log_probs = logits_NV.float().log_softmax(-1)
    uniforms_N12 = torch.rand(len(logits_NV), 1, 2, generator=generator).to(logits_NV.device)
    drawn_N1 = draw(log_probs.detach(), uniforms_N12).cpu()  # so that under XLA a piece at a time is in memory
    return log_probs.gather(1, drawn_N1.long().to(logits_NV.device)).sum()

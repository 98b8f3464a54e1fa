"""Optimizer and learning-rate schedule, counted in optimizer steps.

AdamW with one group per kind of tensor, because adapters and scales want different learning rates. Three details
matter on XLA and cost nothing elsewhere: the moments exist before the first step (a state that appears in step 1
changes the graph of step 2), warm-up starts at 1/n, not at 0 (PyTorch/XLA compiles exact zeros into the graph), and
numbers that change from step to step are tensors (see `AdamW`). The moving average of the trained tensors (EMA) is
optimizer state instead of a second copy of the model: updated by its graph, saved and restored with the moments.

Where tensors can share memory, all tensors of a kind lie in one, and so do their gradients and moments (`_flatten`): a
GPU then launches some thirty kernels a step, however many adapters there are. torch's own multi-tensor kernels take at
most 30 to 110 tensors a launch, which is a hundred launches for 392, and 21 million numbers, which an 8 B student has.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from qat_lora.config import HELP, common, option, settings
from qat_lora.errors import ConfigError
from qat_lora.runtime.base import Runtime
from qat_lora.types import LanguageModel

# By kind of trained tensors (LoRA factors, latent weights, scales, tables, norms), the setting of their
# peak learning rate; and the kinds that weight decay pulls to 0: it would only shrink scales and norms.
FIRST_LR = 4e-4  # the first that `auto` tries (`lr_probe`)
_SCALES = dict.fromkeys(("scales", "block_scales", "lut"), "scale_lr")
RATES = {"adapter": "lr", "weights": "lr", **_SCALES, "norms": "norm_lr"}
DECAYING = ("adapter", "weights")
SHARES = {"block_scales": 1 / 32}  # of that rate: the scale of a K-quant's group is some 15 to 128 of its block's
_decay = functools.partial(option, min=0, below=1)


@settings
class OptimConfig:
    """How the trained tensors move."""

    lr: float | Literal["auto"] = common("auto", HELP["lr"], above=0)
    scale_lr: float | None = option(None, "peak learning rate of scales and tables; default: half of --lr", above=0)
    norm_lr: float | None = option(None, "peak learning rate of norms; default: a third of --lr", above=0)
    schedule: Literal["cosine", "constant"] = option("cosine", "learning rate after warm-up")
    warmup_steps: int = option(20, "optimizer steps of linear warm-up, from 1/n of the peak", unit="steps", min=0)
    min_lr_ratio: float = option(0.1, "learning rate at the end, as a share of the peak (cosine)", min=0, max=1)
    weight_decay: float = option(0.0, "decoupled weight decay of adapter and weights, not of scales and norms", min=0)
    clip_grad_norm: float = option(1.0, "largest gradient norm over all trained tensors", above=0)
    adam_beta2: float = _decay(0.99, "decay of the second moment; short runs want less than 0.999")
    ema: float = _decay(0.0, HELP["ema"], on=0.999)


def peak_lr(config: OptimConfig, kind: str) -> float:
    """Return the largest learning rate of a kind of `RATES`; while `lr` is `auto`, that of the first trial."""
    lr = FIRST_LR if config.lr == "auto" else config.lr
    own = {"scale_lr": config.scale_lr or lr / 2, "norm_lr": config.norm_lr or lr / 3}
    return own.get(RATES[kind], lr) * SHARES.get(kind, 1.0)


def follows_lr(config: OptimConfig, kind: str) -> bool:
    """Return whether the learning rate of a kind of `RATES` depends on the setting `lr`."""
    return RATES[kind] == "lr" or getattr(config, RATES[kind]) is None


def lr_factor(config: OptimConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of an optimizer step (0-based) as a share of its peak."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, max_steps - 1 - config.warmup_steps)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


Groups = dict[str, dict[str, nn.Parameter]]  # what trains, by kind (`RATES`) and name


class TrainState(NamedTuple):
    """The model and the tensors of it that train."""

    model: LanguageModel
    groups: Groups

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """All tensors that train."""
        return {name: tensor for tensors in self.groups.values() for name, tensor in tensors.items()}


class AdamW(torch.optim.Optimizer):
    """AdamW whose step-dependent numbers go to the device as data.

    torch's AdamW passes them as Python scalars. PyTorch/XLA compiles a scalar of 0 or 1 into the graph and merges equal
    ones: with beta2 = 0.99 that is another graph in step 2 (the root of 1 - beta2 equals 1 - beta1 in step 1 only) and
    near step 1600 (1 - beta2^t rounds to 1). The `capturable` form computes them on the device, but does not run on a
    CPU. A parameter's state is `step` (on the host), `exp_avg` and `exp_avg_sq`, as in torch, and with `ema` also its
    `average` (see `averaged`). `send` is `Runtime.numbers`.
    """

    def __init__(
        self, groups: list[dict[str, Any]], beta2: float, send: Callable[[Sequence[float]], Tensor], ema: float
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": (0.9, beta2), "eps": 1e-8, "ema": ema})
        self._send = send
        self.flats: list[_Flat] = []
        for parameter in optimized(self):
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            average = {"average": parameter.detach().clone()} if ema else {}
            self.state[parameter] = {"step": torch.tensor(0.0), **moments, **average}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter from its gradient; all of a group's steps are equal."""
        for group in self.param_groups:
            (beta1, beta2), states = group["betas"], [self.state[parameter] for parameter in group["params"]]
            torch._foreach_add_([s["step"] for s in states], 1.0)
            count = int(states[0]["step"].max())
            keep = 1 - group["lr"] * group["weight_decay"]
            # The bias-corrected average as a recursion: its first step takes the parameter as it is.
            share = (1 - group["ema"]) / (1 - group["ema"] ** count)
            numbers = (keep, math.sqrt(1 - beta2**count), -group["lr"] / (1 - beta1**count), share)
            keep_0, root_0, rate_0, share_0 = self._send(numbers).unbind()
            for parameter, state in zip(group["params"], states, strict=True):
                mean, square, gradient = state["exp_avg"], state["exp_avg_sq"], parameter.grad
                mean.lerp_(gradient, 1 - beta1)
                square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                update = (mean / square.sqrt().div_(root_0).add_(group["eps"])).mul_(rate_0)
                if group["weight_decay"]:
                    parameter.mul_(keep_0)
                parameter.add_(update)
                if group["ema"]:
                    state["average"].add_((parameter - state["average"]).mul_(share_0))


def build_optimizer(config: OptimConfig, groups: Mapping[str, Mapping[str, nn.Parameter]], runtime: Runtime) -> AdamW:
    """Return AdamW over the trained tensors (by name, by kind of `RATES`), with gradients and state allocated.

    Where memory can be shared, the optimizer's own parameters (`optimized`) are flat tensors that the trained ones are
    parts of; its `state` has an entry for either. ConfigError: nothing to train.
    """
    made, flats = [], []
    for kind, tensors in groups.items():
        if not tensors:
            continue
        rates = {"kind": kind, "weight_decay": config.weight_decay * (kind in DECAYING)}
        if runtime.shares_memory:
            by_type = itertools.groupby(sorted(tensors.values(), key=lambda p: str(p.dtype)), key=lambda p: p.dtype)
            of_kind = [_flatten(list(parameters)) for _, parameters in by_type]
            flats += of_kind
            made.append({"params": [flat.whole for flat in of_kind], **rates})
        else:
            for parameter in tensors.values():
                parameter.grad = torch.zeros_like(parameter)
            made.append({"params": list(tensors.values()), **rates})
    if not made:
        raise ConfigError("nothing to train: no adapter, no scales, nothing else")
    optimizer = AdamW(made, config.adam_beta2, runtime.numbers, config.ema)
    set_peaks(optimizer, config)
    for flat in flats:  # every part has its part of the state, by which checkpoints know it
        whole = optimizer.state[flat.whole]
        whole["step"] = torch.zeros(len(flat.parts))
        named = {name: flat.views(value) for name, value in whole.items() if name != "step"}
        for i, parameter in enumerate(flat.parts):
            optimizer.state[parameter] = {"step": whole["step"][i], **{name: views[i] for name, views in named.items()}}
    optimizer.flats = flats
    return optimizer


def optimized(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the tensors that the optimizer moves: those that train, or the flat ones that these are parts of."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextmanager
def gradients_apart(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let a backward pass leave gradients apart, added to the flat ones together, not by a kernel for each."""
    flats = optimizer.flats if isinstance(optimizer, AdamW) else ()
    small = [(p, p.grad) for flat in flats for p in flat.parts if p.numel() < SMALL]
    for parameter, _ in small:
        parameter.grad = None
    try:
        yield
    finally:
        made = [(gradient, p.grad.to(p.dtype)) for p, gradient in small if p.grad is not None and gradient is not None]
        if made:
            torch._foreach_add_([gradient for gradient, _ in made], [new for _, new in made])
        for parameter, gradient in small:
            parameter.grad = gradient


SMALL = 2**20  # numbers in a tensor below which it is the number of kernels that costs, not what they do
ROW, ALIGNED = 1024, 32  # numbers in a row of a flat tensor, and those whose multiples begin a part


class _Flat(NamedTuple):
    """One tensor [rows, ROW] that holds others, with zeros between them."""

    whole: nn.Parameter
    parts: list[nn.Parameter]
    starts: list[int]

    def views(self, whole: Tensor) -> list[Tensor]:
        """Return the parts of a tensor that is laid out like this one."""
        line = whole.detach().view(-1)
        places = zip(self.starts, self.parts, strict=True)
        return [line[start : start + part.numel()].view(part.shape) for start, part in places]


def _flatten(parameters: list[nn.Parameter]) -> _Flat:
    """Move parameters of one type into one, and their gradients, zeros, as well; autograd adds to these in place."""
    ends = [0, *itertools.accumulate(-(-p.numel() // ALIGNED) * ALIGNED for p in parameters)]
    whole = nn.Parameter(parameters[0].detach().new_zeros(max(1, -(-ends[-1] // ROW)), ROW))
    whole.grad = torch.zeros_like(whole)
    flat = _Flat(whole, parameters, ends[:-1])
    for parameter, view, gradient in zip(parameters, flat.views(whole), flat.views(whole.grad), strict=True):
        parameter.data = view.copy_(parameter.detach())
        parameter.grad = gradient
    return flat


def set_peaks(optimizer: torch.optim.Optimizer, config: OptimConfig, factor: float = 1.0) -> None:
    """Set every group's learning rate, and its peak, to the settings' times a factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] = peak_lr(config, group["kind"]) * factor


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every group to a share of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


def rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the learning rates as they are, by name in the log: `lr` of adapter and weights, `lr_KIND` of others."""
    by_kind = {group["kind"]: group["lr"] for group in optimizer.param_groups}
    return {("lr" if RATES[kind] == "lr" else f"lr_{kind}"): rate for kind, rate in by_kind.items()}


@contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Swap pointers to the moving averages, if any, in for the trained tensors (no new graph), and back at the end."""
    pairs = [(p, state) for p, state in optimizer.state.items() if "average" in state]

    def exchange() -> None:
        for parameter, state in pairs:
            raw: Tensor = parameter.data
            parameter.data, state["average"] = state["average"], raw

    exchange()
    try:
        yield
    finally:
        exchange()

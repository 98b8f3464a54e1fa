"""Optimizer and learning-rate schedule, counted in optimizer steps.

AdamW with one group per kind of tensor, because adapters and scales want different learning rates. Two details
matter on XLA and harm nowhere: the moments exist before the first step (a state that appears in step 1 changes
the graph of step 2), and warm-up starts at 1/n, not at 0 (PyTorch/XLA compiles exact zeros into the graph).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from qat_lora.config import option
from qat_lora.errors import ConfigError


@dataclass(frozen=True)
class OptimConfig:
    """How the trained tensors move."""

    lr: float = option(3e-4, "peak learning rate of the adapter")
    scale_lr: float = option(3e-4, "peak learning rate of the quantiser's scales, where they train")
    schedule: Literal["cosine", "constant"] = option("cosine", "learning rate after warm-up")
    warmup_steps: int = option(20, "optimizer steps of linear warm-up, from 1/n of the peak", unit="steps")
    min_lr_ratio: float = option(0.1, "learning rate at the end, as a share of the peak (cosine)")
    weight_decay: float = option(0.0, "decoupled weight decay of the adapter; scales have none")
    clip_grad_norm: float = option(1.0, "largest gradient norm over all trained tensors")
    adam_beta2: float = option(0.99, "decay of the second moment; short runs want less than 0.999")

    def __post_init__(self) -> None:
        for name in ("lr", "scale_lr", "clip_grad_norm"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps: {self.warmup_steps} is below 0")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"min_lr_ratio: {self.min_lr_ratio} is not between 0 and 1")


def lr_factor(config: OptimConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of an optimizer step (0-based) as a share of its peak."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, max_steps - 1 - config.warmup_steps)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def build_optimizer(
    config: OptimConfig, adapter: Iterable[nn.Parameter], scales: Iterable[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """Return AdamW over adapter and scales, its state already there.

    Raises:
        ConfigError: nothing to train.
    """
    groups = [
        {"params": list(adapter), "lr": config.lr, "weight_decay": config.weight_decay},
        {"params": list(scales), "lr": config.scale_lr, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError("nothing to train: no adapter and no scales")
    optimizer = torch.optim.AdamW(groups, betas=(0.9, config.adam_beta2))
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            parameter.grad = torch.zeros_like(parameter)
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Set every group's learning rate to a share of its peak; return that of the first group."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    return optimizer.param_groups[0]["lr"]

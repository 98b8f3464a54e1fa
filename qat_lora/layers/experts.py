"""Mixtures of experts as linear layers, expert by expert, under the names that checkpoint files have.

transformers holds the experts of a layer in two stacked parameters, `gate_up_proj` and `down_proj`, which no code book,
adapter or hook for linear layers reaches. Here each expert has its own `gate_proj`, `up_proj` and `down_proj`
(`experts.3.gate_proj`): quantised by what its own tokens are, corrected by its own adapter, exported by its own name.
A quantised form of stacked parameters would need a second of everything. The price is a loop over experts where
transformers has one grouped product. All experts' `gate_proj` and `up_proj` run before the first `down_proj`, so that
calibration fits a mixture in two stages. Routers, a thousandth of the weights, decide everything and stay as they are.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from qat_lora.runtime.xla.runtime import is_xla_device

ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of layers beside `experts` that choose or weigh them: never quantised, never adapted."""
EXPERT = re.compile(r"^(.*\bexperts)\.(\d+)\.((?:gate|up|down)_proj)$")
"""Mixture, expert and part in the name of an expert's layer."""


class Expert(nn.Module):
    """A gated MLP, whose mixture calls its layers."""

    def __init__(self, gate_up_JH: Tensor, down_HI: Tensor) -> None:
        super().__init__()
        gate_IH, up_IH = gate_up_JH.chunk(2)
        self.gate_proj, self.up_proj, self.down_proj = map(_linear, (gate_IH, up_IH, down_HI))


class Experts(nn.ModuleList):
    """The experts of one layer; computes what transformers' fused module computes, up to the order of sums."""

    def __init__(self, fused: Any) -> None:
        super().__init__(map(Expert, fused.gate_up_proj.detach(), fused.down_proj.detach()))
        for name in ("gate_up_proj", "down_proj"):
            setattr(fused, name, nn.Parameter(getattr(fused, name).detach().to("meta"), requires_grad=False))
        self.fused = (fused,)
        """The module that these replace, without its weights; in a tuple, so that it is none of the experts."""
        self.tokens: tuple[Tensor, ...] = ()
        """By expert, which tokens it got in the last forward."""

    def __iter__(self) -> Iterator[Any]:
        """Return the experts in order."""
        return super().__iter__()

    def forward(self, hidden_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the weighted sum of what each token's K experts make of it, [T, H]."""
        activation = self.fused[0].act_fn
        if is_xla_device(hidden_TH):
            # Every expert computes every token: E / K times the work, but no shape, and so no program, is the data's.
            result = torch.zeros_like(hidden_TH)
            for number, expert in enumerate(self):
                weight_T1 = (weights_TK * (index_TK == number)).sum(-1, keepdim=True)
                inner = activation(expert.gate_proj(hidden_TH)) * expert.up_proj(hidden_TH)
                result = result + (expert.down_proj(inner) * weight_T1).to(result.dtype)
            return result
        expert_S, order_S = index_TK.flatten().sort(stable=True)
        self.tokens = (order_S // index_TK.shape[1]).split(expert_S.bincount(minlength=len(self)).tolist())
        # With gradients all experts run, those of no token too: each gets a gradient on every replica.
        called = [(e, t) for e, t in zip(self, self.tokens, strict=True) if len(t) or torch.is_grad_enabled()]
        inputs = [hidden_TH[tokens] for _, tokens in called]
        inner = [activation(e.gate_proj(x)) * e.up_proj(x) for (e, _), x in zip(called, inputs, strict=True)]
        outputs_SH = torch.cat([e.down_proj(x) for (e, _), x in zip(called, inner, strict=True)])
        weighted_SH = outputs_SH * weights_TK.flatten()[order_S, None]
        back_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
        return weighted_SH[back_S].unflatten(0, index_TK.shape).sum(1).to(hidden_TH.dtype)


def _linear(weight_OI: Tensor) -> nn.Linear:
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight_OI.clone(), requires_grad=False)  # its own memory: quantised, it frees it
    return linear


def split_experts(model: nn.Module) -> None:
    """Replace the fused experts of a model, in place; those of another form stay, and `check_reach` refuses them."""
    for name, module in list(model.named_modules()):
        if _is_fused(module):
            model.set_submodule(name, Experts(module).train(module.training))


def _is_fused(module: nn.Module) -> bool:
    """Return True for gated experts [E, 2 I, H] and [E, H, I] without biases, norms or gates of their own."""
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not (isinstance(gate_up, nn.Parameter) and isinstance(down, nn.Parameter) and gate_up.dim() == 3):
        return False
    plain = getattr(type(module), "_apply_gate", None)
    odd = ("is_transposed", "has_bias", "has_post_expert_norm")
    experts, hidden, inner = down.shape
    joined = gate_up.shape == (experts, 2 * inner, hidden) and getattr(module, "is_concatenated", False)
    usual = getattr(plain, "__name__", "") == "_default_apply_gate"
    return joined and usual and not any(getattr(module, name, False) for name in odd)


def join_experts(model: nn.Module) -> None:
    """Put back the fused modules, in place, with the weights that the dense experts have now."""
    for name, experts in [(n, m) for n, m in model.named_modules() if isinstance(m, Experts)]:
        fused = experts.fused[0]
        gate_up = torch.stack([torch.cat([e.gate_proj.weight, e.up_proj.weight]) for e in experts])
        down = torch.stack([e.down_proj.weight for e in experts])
        for part, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
            setattr(fused, part, nn.Parameter(weight.detach(), requires_grad=False))
        model.set_submodule(name, fused)


def is_router(model: nn.Module, layer: str) -> bool:
    """Return True for a layer that chooses or weighs experts, by name and place."""
    mixture, _, name = layer.rpartition(".")
    return name in ROUTERS and hasattr(model.get_submodule(mixture), "experts")


def has_split_experts(model: nn.Module) -> bool:
    """Return True for a model with experts that `split_experts` made."""
    return any(isinstance(module, Experts) for module in model.modules())


def tokens_of(model: nn.Module, layer: str) -> Tensor | None:
    """Return which tokens a layer of an expert got in the model's last forward, in order; None where it got all."""
    found = EXPERT.match(layer)
    experts = model.get_submodule(found[1]) if found else None
    return experts.tokens[int(found[2])] if found and isinstance(experts, Experts) else None


def siblings_of(layer: str) -> tuple[str, str] | None:
    """Return what the same layers of one mixture's experts have in common, None for a layer of no expert."""
    found = EXPERT.match(layer)
    return None if found is None else (found[1], found[3])

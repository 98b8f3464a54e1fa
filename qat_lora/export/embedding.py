"""The embedding and the LM head on a grid of few bits: in a 2-bit model of 0.6 B they would be most of the file.

The quantiser is the layers' own (`quantize_weight`, weighted clip search), so codes and steps go into a container as
they are. Plain rounding treats all columns alike. What an LM head's error does to a logit, though, is weighted by the
hidden state that meets it, so column i counts by E[x_i²] of the final norm's output: measured on text, or without any
the square of the norm's gain, which is that mean for states of equal variance. A table that only embeds has no such
weights: each of its rows is used as it is. A head that the preset quantised keeps its codes and is not seen here.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from qat_lora.layers.convert import LM_HEAD
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.models.load import CausalLM
from qat_lora.quant.initialize import QuantizedWeight, quantize_weight
from qat_lora.quant.spec import QuantSpec
from qat_lora.types import Batch

PIECE = 1 << 17  # weights quantised at once: the clip search runs four times as fast inside a CPU's cache


def dense_tables(module: nn.Module) -> dict[str, nn.Embedding | nn.Linear]:
    """Return the embedding and, where it has a weight of its own, the LM head, by name; without what holds codes."""
    found: dict[int, tuple[str, nn.Embedding | nn.Linear]] = {}
    for name, part in module.named_modules():
        is_head = isinstance(part, nn.Linear) and not isinstance(part, QuantLinear) and LM_HEAD.search(name)
        if isinstance(part, nn.Embedding) or (isinstance(part, nn.Linear) and is_head):
            found.setdefault(id(part.weight), (name, part))
    return dict(found.values())


@torch.no_grad()
def head_importance(model: CausalLM, batches: Iterable[Batch] | None) -> Tensor:
    """Return the mean square of what the LM head reads, float32 [H] on the host, over the tokens of some batches.

    Without text: the square of the final norm's gain, which is its output for a constant input.
    """
    if batches is None:
        backbone = getattr(model.module, model.module.base_model_prefix)
        norm = backbone.norm
        return norm(torch.ones_like(norm.weight)).float().square().cpu()
    total, count = torch.zeros(model.config.hidden_size), 0
    for batch in batches:
        hidden = model.hidden(batch["input_ids"], batch["document_ids"])[:, :-1][batch["target_mask"]]
        total += hidden.float().square().sum(0).cpu()
        count += len(hidden)
    return total / max(1, count)


def quantized_table(weight_VH: Tensor, spec: QuantSpec, importance_H: Tensor | None) -> QuantizedWeight:
    """Return a table on the grid of `spec`, with scales by group; ConfigError: a weight not finite or too large."""
    moment = None if importance_H is None else torch.diag(importance_H.to(weight_VH.device))
    parts = weight_VH.detach().split(max(1, PIECE // weight_VH.shape[1]))
    return QuantizedWeight.joined([quantize_weight(part, spec, "mse", moment) for part in parts])

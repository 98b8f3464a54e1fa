"""A student as shapes: on torch's meta device, in its training state, without memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from qat_lora.layers.convert import lora_layers, quant_layers


@dataclass(frozen=True)
class Shapes:
    """A student on the meta device, in its training state."""

    config: Any  # of its text model
    module: Any
    trained: Mapping[str, Mapping[str, nn.Parameter]]  # by kind and name
    adapter_rank: int
    weight_gradients: bool  # whether the backward pass forms a gradient of every quantised weight
    formed_bytes: int  # weights that a forward forms anew from codes and scales and keeps for its backward pass
    averaged: bool = False  # whether the optimizer keeps an average of what trains

    @property
    def trained_by_kind(self) -> dict[str, int]:
        """How many numbers train."""
        return {kind: sum(p.numel() for p in tensors.values()) for kind, tensors in self.trained.items()}

    @property
    def quantised(self) -> list[int]:
        """Numbers of each quantised weight."""
        return [layer.in_features * layer.out_features for layer in quant_layers(self.module).values()]

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return int(self.module.get_output_embeddings().weight.shape[0])

    @property
    def adapter(self) -> list[nn.Parameter]:
        """The factors of the adapters."""
        return [p for layer in lora_layers(self.module).values() for p in (layer.lora_A, layer.lora_B)]

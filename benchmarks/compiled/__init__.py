"""What the compilers of chips make of a recovery, on a machine without the chips; and the recovery that is asked for.

It is plain values, so that it can be handed to another program as JSON, and by default Qwen3-0.6B at the size of the
guides, so that `qat-lora doctor --compile-for v6e-1` says something without a model and without a network.
"""

from dataclasses import dataclass
from typing import Literal

from qat_lora.layers.lora import LoraConfig
from qat_lora.losses.objective import ObjectiveConfig
from qat_lora.options import EstimateOptions, RunConfig
from qat_lora.runtime.launch.select import ChipsConfig

NAMES = ("micro-batch", "optimizer step", "evaluation", "cache build", "prompt", "decoding step")
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}


@dataclass(frozen=True)
class Asked:
    """The recovery whose graphs are asked for; beyond these, a run's defaults."""

    model: str = ""  # a folder with a config.json; none for Qwen3-0.6B's shape
    batch_size: int = 4  # rows of a micro-batch on one chip
    length: int = 1024
    head_k: int = 128
    rank: int = 8
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    preset: str | None = None  # of a student whose config says nothing of quantisation; without one it is dense
    train_scales: bool = False
    gradient_checkpointing: bool = False
    chips: int = 1  # more than one: SPMD
    shard_base: bool = False
    loss_chunk_mb: int | None = None
    graphs: tuple[str, ...] = NAMES

    @property
    def estimate(self) -> EstimateOptions:
        """The same recovery for `plan/memory.py`."""
        same = ("model", "preset", "train_scales", "gradient_checkpointing", "batch_size", "length", "head_k")
        chips = ChipsConfig(shard_base=self.shard_base, parallel="spmd" if self.shard_base else "spawn")
        return EstimateOptions(
            **{name: getattr(self, name) for name in same},
            lora=LoraConfig(recovery_r=self.rank),
            run=RunConfig(dtype=self.dtype, device="tpu", chips=chips),
            loss_chunk_mb=self.loss_chunk_mb,
        )

    @property
    def objective(self) -> ObjectiveConfig:
        """The default objective on a cache of top K."""
        return ObjectiveConfig(loss_chunk_mb=self.loss_chunk_mb)

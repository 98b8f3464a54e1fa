"""The public names, for type checkers and editors; the module itself loads each when it is first used."""

from qat_lora.api import (
    build_kd_cache,
    evaluate_models,
    export_student,
    generate_text,
    quantize_model,
    train_recovery_lora,
)
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.losses.estimators import kd_soft_ce
from qat_lora.losses.fused.op import fused_linear_kd
from qat_lora.quant.spec import QuantSpec
from qat_lora.runtime.launch.start import notebook_launch
from qat_lora.runtime.xla.runtime import is_xla_device, xla_mark_step

__all__ = [
    "KDCacheDataset",
    "QuantSpec",
    "build_kd_cache",
    "evaluate_models",
    "export_student",
    "fused_linear_kd",
    "generate_text",
    "is_xla_device",
    "kd_soft_ce",
    "notebook_launch",
    "quantize_model",
    "train_recovery_lora",
    "xla_mark_step",
]

__version__: str

"""The predecessor's module, for scripts that import from it; its training functions are commands (`qat_lora.api`)."""

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.losses.estimators import kd_soft_ce
from qat_lora.runtime.xla.runtime import is_xla_device, xla_mark_step

__all__ = ["KDCacheDataset", "is_xla_device", "kd_soft_ce", "xla_mark_step"]

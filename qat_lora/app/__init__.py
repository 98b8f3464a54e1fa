"""The composition root: one function per command, which builds every part from its options and runs it.

This is the only place that knows all rooms at once; scripts, notebooks, the demo and the command line call these
functions, through `launch.run`, and nothing below them.
"""

from qat_lora.app.caches import audit_cache, build_cache, cache_decoder
from qat_lora.app.evaluation import evaluate
from qat_lora.app.exporting import export
from qat_lora.app.qat import qat
from qat_lora.app.quantising import quantize
from qat_lora.app.recovery import recover

__all__ = ["audit_cache", "build_cache", "cache_decoder", "evaluate", "export", "qat", "quantize", "recover"]

"""`quantize --dry-run`: what a quantised model would weigh, and what making it takes."""

from __future__ import annotations

import math
from typing import Any

import torch

from qat_lora.errors import ModelError
from qat_lora.layers.calibrate.fisher import kept_shape
from qat_lora.layers.convert import LM_HEAD, bits_per_weight, check_reach, make_quant_skeleton, quant_layers
from qat_lora.options import QuantizeOptions
from qat_lora.plan.memory import GIB, meta_model
from qat_lora.quant.initialize import NEED_TEXT
from qat_lora.quant.presets import preset
from qat_lora.registry import DryRun, Requirements


def plan_quantize(options: QuantizeOptions) -> DryRun:
    """Plan the quantisation of a model.

    Raises:
        ModelError: the model has no config.json here or on the Hub, or is quantised already.
        ConfigError: an unknown preset, or patterns that match no layer.
    """
    config, module = meta_model(str(options.model))
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"model: {options.model} is quantised already; give the full-precision model")
    parameters = sum(p.numel() for p in module.parameters())
    chosen = preset(options.preset, options.keep, options.override, options.quantize_head)
    check_reach(module, chosen)
    make_quant_skeleton(module, chosen)
    layers, bits = quant_layers(module).values(), bits_per_weight(module)
    quantised = sum(layer.in_features * layer.out_features for layer in layers)
    codes_bytes = int(bits["base"] * quantised) // 8
    width = config.dtype.itemsize if isinstance(getattr(config, "dtype", None), torch.dtype) else 4  # in its files
    has_text = options.text.dataset is not None or options.kd_cache_dir is not None
    report: dict[str, Any] = {
        "model": str(options.model),
        "preset": options.preset,
        "parameters": parameters,
        "quantised": quantised,
        "layers": len(layers),
        "bits_per_weight": bits["base"],
        "bits_per_weight_model": bits["model"],
        "stored_bytes": int(bits["model"] * parameters) // 8,
        "weights_bytes": max(width * parameters, 4 * (parameters - quantised) + codes_bytes),
        "scratch_bytes": fisher_bytes(module, options.init, options.metric) if has_text else 0,
        "inputs_and_outputs": sum(layer.in_features + layer.out_features for layer in layers),
    }
    text = (
        f"dry run: shapes alone; nothing is written\n"
        f"model    {options.model}: {parameters:,} parameters, {quantised:,} of them in {len(layers)} "
        f"layers that {options.preset} stores\n"
        f"stored   {bits['base']:.2f} bits a weight in these layers, {bits['model']:.2f} in the model, "
        f"{report['stored_bytes'] / GIB:.3f} GiB on disk without adapter starts\n"
        f"memory   {report['weights_bytes'] / GIB:.3f} GiB for the weights, each layer as stored until its turn, "
        f"and the calibration beside them\n"
        f"scratch  {report['scratch_bytes'] / GIB:.3f} GiB on disk while it is quantised"
    )
    starts = 4 * options.start_rank * report["inputs_and_outputs"]
    # Twice: finished blocks are kept until the whole is written.
    disk = 2 * (report["stored_bytes"] + starts) + report["scratch_bytes"]
    memory = report["weights_bytes"]
    return DryRun(report, text, Requirements("this quantisation", memory, memory, disk))


def fisher_bytes(module: torch.nn.Module, init: str, metric: str) -> int:
    """Return what `--metric fisher` keeps of every layer on disk while a student is made."""
    if metric != "fisher" or init not in NEED_TEXT:
        return 0
    inside = (layer for name, layer in quant_layers(module).items() if not LM_HEAD.search(name))
    return sum(4 * math.prod(kept_shape(layer.out_features)) for layer in inside)

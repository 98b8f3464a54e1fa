"""The command that makes a quantised student."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from qat_lora import outputs
from qat_lora.app.shared import check_fits, fits_positions, load, say, text_batches
from qat_lora.cache.dataset import KDCacheDataset
from qat_lora.config import save_yaml, to_dict
from qat_lora.errors import ConfigError
from qat_lora.evaluate.report import save_json
from qat_lora.export.adapter import save_starts
from qat_lora.layers.calibrate import quantise_model, second_moments
from qat_lora.layers.convert import bits_per_weight, quant_layers, quantise_targets
from qat_lora.models import CausalLM, checkpoint_sha256, load_tokenizer, save_quantised
from qat_lora.options import QuantizeOptions
from qat_lora.quant.spec import preset
from qat_lora.runtime.base import Runtime
from qat_lora.types import Batch


def quantize(options: QuantizeOptions, runtime: Runtime) -> Path:
    """Quantise a model, with the adapter starts beside it; return its folder."""
    run = options.run
    chosen = preset(options.preset, options.keep)
    out = Path(run.out or f"runs/{Path(str(options.model)).name}_{options.preset}")
    has_text = bool(options.text.dataset or options.kd_cache_dir)
    if options.init == "gptq" and not has_text:
        raise ConfigError("init: gptq needs calibration text; give --dataset or --kd-cache-dir, or choose --init mse")
    model = load(str(options.model), options.hub, "float32")
    if quant_layers(model.module):
        raise ConfigError(f"model: {options.model} is quantised already; give the full-precision model")
    targets = quantise_targets(model.module, chosen)
    settings = to_dict(options) | {"run": {"seed": run.seed}, "model_sha256": checkpoint_sha256(model.folder)}
    batches = _calibration_batches(options, model) if options.init != "absmax" and has_text else None
    if outputs.claim(out, "quantize", settings, run.overwrite):
        say(run, f"{out} is complete already")
        return out
    runtime.place(model.module)
    say(run, f"{runtime.description} · {chosen.name}, {len(targets)} layers · {out}")
    moments = None
    if batches is not None:
        moments = second_moments(
            model.module,
            targets,
            runtime.feed(batches),
            lambda batch: model.hidden(batch["input_ids"], batch["document_ids"]),
        )
    starts = quantise_model(model.module, chosen, options.init, moments, options.start_rank, run.quiet)
    bits = bits_per_weight(model.module)["base"]
    model.module.to("cpu")
    details = {"init": options.init, "bits_per_weight": round(bits, 4), "model": str(options.model)}
    save_quantised(model, out, chosen, details)
    if starts:
        save_starts(starts, out)
    save_yaml(options, out / "config.yaml")
    save_json({"preset": chosen.name, "layers": len(targets), **details}, out / "result.json")
    outputs.complete(out)
    say(run, f"{bits:.2f} bits per weight in {len(targets)} layers, written to {out}")
    return out


def _calibration_batches(options: QuantizeOptions, model: CausalLM) -> Iterator[Batch]:
    batch_rows = 8
    if options.kd_cache_dir is not None:
        dataset = KDCacheDataset(options.kd_cache_dir)
        check_fits(dataset, model)
        rows = min(options.calibration_rows, len(dataset))
        return dataset.batches(0, math.ceil(rows / batch_rows), batch_rows, seed=options.run.seed)
    fits_positions(model, options.calibration_length)
    tokenizer = load_tokenizer(model.folder, options.hub.trust_remote_code)
    return text_batches(options.text, tokenizer, options.calibration_length, options.calibration_rows, batch_rows)

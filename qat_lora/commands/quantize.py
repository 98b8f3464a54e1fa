"""The command that makes a quantised student."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from qat_lora.config import save_yaml, to_dict
from qat_lora.errors import ConfigError
from qat_lora.evaluate.report import save_json
from qat_lora.export.gguf_model import architecture
from qat_lora.files import outputs
from qat_lora.files.checksums import checkpoint_sha256
from qat_lora.files.folders import moved_into
from qat_lora.layers.calibrate.fisher import drawn_in_pieces, sensitivities, zeros_in
from qat_lora.layers.calibrate.fit import EFFORTS, FitSettings
from qat_lora.layers.calibrate.quantize import FEWEST_TOKENS, Kept, LayerFitter, Work, quantize_layers, second_moments
from qat_lora.layers.calibrate.sequential import quantize_sequential
from qat_lora.layers.calibrate.upcast import upcast
from qat_lora.layers.convert import LM_HEAD, bits_per_weight, check_reach, quant_layers, reach_of, rule_bits
from qat_lora.layers.lora import Starts
from qat_lora.models.adapter import joint_ranks, ranks_text, save_starts
from qat_lora.models.load import CausalLM, cast, load_model, save_quantised
from qat_lora.options import QuantizeOptions
from qat_lora.quant.initialize import NEED_TEXT
from qat_lora.quant.presets import preset
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.host.machine import large_tensors_apart
from qat_lora.runtime.host.signals import stop_signals
from qat_lora.setup.allocation import allocated, choices, measured_costs
from qat_lora.setup.common import calibration, keep_dtype, say, text_inputs
from qat_lora.setup.unfinished import Unfinished, remove_pieces
from qat_lora.types import Batch

# Settings that say where things lie; what lies there counts instead.
NO_PART_OF_THE_RESULT = ("model", "text", "kd_cache_dir", "dry_run", "hub", "run")


def quantize(options: QuantizeOptions, runtime: Runtime) -> Path:
    """Quantise a model, with the adapter starts beside it; return its folder."""
    run = options.run
    label = options.target.name or options.preset
    # A target's own preset is measured later; any reaches the same layers.
    chosen = preset(options.preset, options.keep, options.override, options.quantize_head)
    out = Path(run.out or f"runs/{Path(str(options.model)).name}_{label}")
    options = keep_dtype(options, runtime, outputs.settings_of(out, "quantize").get("dtype"))
    has_text = bool(options.text.dataset or options.kd_cache_dir)
    if options.init in NEED_TEXT and not has_text:
        raise ConfigError(f"init: {options.init} needs calibration text; give --dataset, --kd-cache-dir or --init mse")
    model = load_model(str(options.model), options.hub, "stored")
    dtype = model.module.dtype  # of its files: what is not quantised leaves in it
    in_bfloat16 = computes_in_bfloat16(options, dtype)
    if not in_bfloat16:
        upcast(model.module)
    if quant_layers(model.module):
        raise ConfigError(f"model: {options.model} is quantised already; give the full-precision model")
    targets = check_reach(model.module, chosen)
    found = choices(options, model.module, dtype.itemsize) if options.target.name else None
    if options.target.engine == "llama.cpp":
        architecture(model)
    if options.start_method is not None:
        say(run, "start_method: no longer does anything; adapter starts are qera's, in the metric of --metric")
    batches, text = calibration(options, model) if options.init != "absmax" and has_text else (None, None)
    settings = {name: value for name, value in to_dict(options).items() if name not in NO_PART_OF_THE_RESULT}
    settings |= {"seed": run.seed, "model_sha256": checkpoint_sha256(model.folder)}
    settings |= {"start_method": "qera", "calibration": text}
    settings["dtype"] = "bfloat16" if in_bfloat16 else "float32"
    inputs = [options.model, model.folder, options.kd_cache_dir, *text_inputs(options.text)]
    with outputs.claimed(out, "quantize", settings, run.overwrite, inputs) as complete:
        if complete:
            say(run, f"{out} is complete already")
            remove_pieces(out)
            return out
        say(run, f"{runtime.description} · {label}, {len(targets)} layers · {out}")
        exact, solver_device = runtime.exact_products(), runtime.device if runtime.piece_bytes is None else None
        runtime = runtime.for_hooks()
        runtime.place(model.module)
        if runtime.attention == "tiled":
            model.tile_attention()
        with stop_signals() as stopped, large_tensors_apart(16), exact:
            work = Unfinished(out, "layers", len(targets), stopped)
            if work.parts:
                say(run, f"goes on after {work.parts} of {len(targets)} layers, which an interrupted run finished")
            rows = None if batches is None else list(runtime.feed(batches))
            costs = None
            if rows is not None and options.metric == "fisher" and options.init in NEED_TEXT:
                some = _first_batches(rows, EFFORTS[options.effort].fisher_tokens)
                costs = _sensitivities(options, model, targets, some, out, work)
            joint, facts = options.rank_of_codes, dict[str, Any]()
            if found is not None:
                assert rows is not None and costs is not None  # `choices` saw to that
                measured = measured_costs(options, model, found, rows, costs, runtime, work)
                chosen, facts = allocated(options, found, measured)
                targets, joint = check_reach(model.module, chosen), options.start_rank if joint else 0
            ranks = {} if options.joint_rank == 0 else facts.get("adapter_ranks", {})
            share, reach = reach_of(model.module, chosen, targets)
            effort = EFFORTS[options.effort]
            fits = FitSettings(options.init, options.start_rank, joint, solver_device, effort)
            bar = tqdm(total=len(targets), desc=f"quantise {label} ({options.init})", unit="layer", disable=run.quiet)
            with bar:
                fitter = LayerFitter(model.module, targets, fits, costs, work, bar, ranks)
                starts = _fit(options, model, fitter, rows)
        rules = rule_bits(model.module, chosen)
        model.module.to("cpu")
        cast(model.module, dtype)
        bits = {name: round(value, 4) for name, value in bits_per_weight(model.module).items()}
        details: dict[str, Any] = {"init": options.init, "joint_rank": options.rank_of_codes}
        details |= {"bits_per_weight": bits["base"], "bits_per_weight_model": bits["model"]}
        details |= {"quantised_share": round(share, 4), "model": str(options.model), **facts}
        with moved_into(out) as draft:
            if starts:
                save_starts(starts, draft)
            save_quantised(model, draft, chosen, details)
        save_yaml(options, out / "config.yaml")
        result = {"preset": chosen.name, "layers": len(targets), **details, "unreached": sorted(fitter.unreached)}
        save_json({**result, "rules": rules}, out / "result.json")
        outputs.complete(out)
        remove_pieces(out)
    of_adapter = joint_ranks(out)
    if facts:
        counted = f"adapters on {len(of_adapter)} layers included" if of_adapter else "no adapter"
        say(run, f"{facts['bytes'] / 1e6:.3f} MB, {counted}")
    if of_adapter:
        beside = f"codes were chosen for an adapter of {ranks_text(of_adapter.values())}"
        instead = "give --joint-rank 0 for codes that stand alone"
        say(run, f"{beside}, with whose start this folder opens; {instead}")
    for rule in rules if len(rules) > 1 else ():
        say(run, f"  {rule['bits_per_weight'] or 'kept':>6}  {rule['layers']:>4} layers  {rule['pattern']}")
    if experts := sorted({name.rpartition(".")[0] for name in fitter.unreached}):
        named = ", ".join(experts[:6]) + (f" and {len(experts) - 6} more" if len(experts) > 6 else "")
        few = f"fewer than {FEWEST_TOKENS} calibration tokens reach {len(experts)} experts ({named})"
        instead = "fitted by what the other experts of their layer get; more --calibration-rows reach more"
        say(run, f"warning: {few}: {instead}")
    say(run, reach)
    say(run, f"{bits['base']:.2f} bits per weight in {len(targets)} layers, {bits['model']:.2f} in the model, at {out}")
    return out


def computes_in_bfloat16(options: QuantizeOptions, stored: torch.dtype) -> bool:
    """Return whether the model runs on calibration text in bfloat16: if it is stored so and the device multiplies it.

    Sums and solvers are float32 in any case, and a model that is stored in another type runs in float32.
    """
    return options.run.dtype == "bfloat16" and stored == torch.bfloat16


def _fit(options: QuantizeOptions, model: CausalLM, fitter: LayerFitter, batches: list[Batch] | None) -> Starts:
    """Quantise the model in place, by the batches where there are any; return the adapter starts."""

    def forward(batch: Batch) -> torch.Tensor:
        fitter.work.may_stop()
        return model.hidden(batch["input_ids"], batch["document_ids"])

    if batches is None:
        return quantize_layers(fitter)
    if options.calibrate_on == "student" and options.init in NEED_TEXT:
        return quantize_sequential(fitter, batches, forward)
    return quantize_layers(fitter, second_moments(model.module, fitter.targets, batches, forward))


def _first_batches(batches: list[Batch], tokens: int) -> list[Batch]:
    """Return as many batches as hold so many tokens; all where they hold fewer."""
    held = 0
    for count, batch in enumerate(batches, 1):
        held += batch["input_ids"].numel()
        if held >= tokens:
            return batches[:count]
    return batches


def _sensitivities(
    options: QuantizeOptions, model: CausalLM, targets: Iterable[str], batches: list[Batch], out: Path, work: Work
) -> dict[str, torch.Tensor]:
    """Return what an error costs at the output of every layer; kept for a run that goes on, because it takes long."""
    names = [name for name in targets if not LM_HEAD.search(name)]
    draws = torch.Generator().manual_seed(options.run.seed)

    def log_likelihood(batch: Batch) -> torch.Tensor:
        work.may_stop()
        hidden = model.hidden(batch["input_ids"], batch["document_ids"])
        return drawn_in_pieces(hidden.flatten(0, 1), model.logits, model.vocab_size, draws)

    def kept() -> list[Kept]:
        return [piece for name in names if (piece := work.take(f"sensitivity-{name}")) is not None]

    pieces = kept()
    if len(pieces) < len(names):
        found = sensitivities(model.module, names, batches, log_likelihood, options.run.quiet, zeros_in(out))
        for name in names:  # a matrix's place on the disk is free before the next one is written
            work.keep(f"sensitivity-{name}", {"outputs": found.pop(name)}, {})
        pieces = kept()
    return {name: tensors["outputs"] for name, (tensors, _) in zip(names, pieces, strict=True)}

"""The command that trains a recovery adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from qat_lora import outputs
from qat_lora.app.shared import check_fits, load, picture, say
from qat_lora.cache.dataset import KDCacheDataset
from qat_lora.cache.store import read_manifest
from qat_lora.config import save_yaml, to_dict
from qat_lora.errors import ConfigError
from qat_lora.evaluate.report import save_json
from qat_lora.export.adapter import load_starts, save_adapter, starts_sha256
from qat_lora.layers.convert import add_lora, lora_layers, prepare_base, quant_layers
from qat_lora.losses.objective import ObjectiveConfig, objective_loss
from qat_lora.models import DTYPES, CausalLM, checkpoint_sha256, save_with_scales
from qat_lora.options import RecoverOptions
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.select import status_line
from qat_lora.train.folders import whole_folder
from qat_lora.train.loop import LoopHooks, Trainee, train
from qat_lora.train.metrics import plot_curve


def recover(options: RecoverOptions, runtime: Runtime) -> Path:
    """Train a recovery adapter from a KD cache; return the run's folder."""
    run, loop = options.run, options.loop
    name = Path(str(options.checkpoint or options.model)).with_suffix("").name
    out = Path(run.out or f"runs/recovery_{name}")
    temperatures = tuple(sorted({1.0, options.objective.temperature}))
    dataset = KDCacheDataset(str(options.kd_cache_dir), options.preload, options.head_k, temperatures=temperatures)
    model = load(str(options.checkpoint or options.model), options.hub, run.dtype)
    check_fits(dataset, model)
    model = model.with_vocabulary(dataset.manifest.fingerprint.vocab_size)
    if options.train_scales and not quant_layers(model.module):
        raise ConfigError("train_scales: the student has no quantised layers; leave it out")
    plain = to_dict(options)
    effective = loop.batch_size * loop.accumulation(runtime.replicas) * runtime.replicas
    settings = {
        "base_sha256": checkpoint_sha256(model.folder),
        "starts_sha256": starts_sha256(model.folder),
        "cache": dataset.manifest.fingerprint.sha256,
        "dtype": run.dtype,
        "seed": run.seed,
        "max_steps": loop.max_steps,
        "global_batch_rows": effective,
        **{key: plain[key] for key in ("head_k", "train_scales", "start", "lora", "objective", "train")},
    }
    starts = load_starts(model.folder) if options.start == "auto" else {}
    torch.manual_seed(run.seed)
    add_lora(model.module, options.lora, starts)
    if outputs.claim(out, "recover", settings, run.overwrite):
        say(run, f"{out} is complete already")
        return out
    save_yaml(options, out / "config.yaml")
    runtime.place(model.module)
    trainee = _trainee(model, options.train_scales)
    say(run, status_line(runtime, DTYPES[run.dtype], effective))
    trained = sum(parameter.numel() for parameter in trainee.trained.values())
    begin = "from the quantisation error" if starts else "at zero"
    say(run, f"{trained:,} numbers train, adapters start {begin} · {out}")
    result = train(
        trainee,
        dataset,
        options.objective,
        options.train,
        loop,
        LoopHooks(
            _cache_evaluation(options, model, runtime), lambda name: _export_student(trainee, options, out / name)
        ),
        runtime,
        out=out,
        seed=run.seed,
        fingerprint=settings,
        quiet=run.quiet,
    )
    save_json(result, out / "result.json")
    picture(run, lambda: plot_curve(out / "metrics.jsonl", out / "evaluations.jsonl", out / "curve.png"))
    outputs.complete(out)
    say(run, f"{result['step']} steps, best adapter (step {result['best_step']}) in {out / 'best'}")
    return out


def _trainee(model: CausalLM, train_scales: bool) -> Trainee:
    """Put the student into its training state and collect what trains."""
    scales = prepare_base(model.module, train_scales, model.module.dtype)
    factors: dict[str, nn.Parameter] = {}
    for name, adapter in lora_layers(model.module).items():
        factors |= {f"{name}.lora_A": adapter.lora_A, f"{name}.lora_B": adapter.lora_B}
    model.module.train()
    return Trainee(model, factors, scales)


def _export_student(trainee: Trainee, options: RecoverOptions, folder: Path) -> None:
    """Write the student as an adapter folder; with trained scales, their base in it. All of it appears together."""
    assert isinstance(trainee.model, CausalLM)
    base = trainee.model.folder
    with whole_folder(folder) as draft:
        sha256 = checkpoint_sha256(base)
        if trainee.scales:
            sha256 = checkpoint_sha256(save_with_scales(base, draft / "base", trainee.scales))
            base = folder / "base"
        save_adapter(trainee.model.module, options.lora, draft, base, sha256)


def _cache_evaluation(options: RecoverOptions, model: CausalLM, runtime: Runtime) -> Callable[[], float] | None:
    """Return the function that measures mean KL on the cache's evaluation split, None where there is none."""
    cache = str(options.kd_cache_dir)
    if not read_manifest(cache).rows("eval"):
        return None
    split = KDCacheDataset(cache, k=options.head_k, split="eval")
    objective = ObjectiveConfig(loss_chunk_mb=options.objective.loss_chunk_mb)
    rows = options.loop.batch_size
    # Made once, and two: zeros made in every evaluation, or one tensor in both places, are more graphs on XLA.
    no_loss, no_tokens = (torch.zeros((), device=runtime.device) for _ in range(2))

    def evaluate() -> float:
        was_training = model.module.training
        model.module.eval()
        total, count = no_loss, no_tokens
        with torch.no_grad():
            for batch in runtime.feed(split.batches(0, split.steps_per_epoch(rows), rows)):
                hidden = model.hidden(batch["input_ids"], batch["document_ids"])
                result = objective_loss(hidden, model.head(), batch, objective)
                total, count = total + result.loss_sum, count + result.token_count
                runtime.cut()
        model.module.train(was_training)
        return float(total) / max(float(count), 1.0)

    return evaluate

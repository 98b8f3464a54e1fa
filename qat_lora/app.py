"""The composition root: one function per command, which builds every part from its options and runs it.

This is the only place that knows all rooms at once; scripts, notebooks, the demo and the command line call these
functions and nothing below them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qat_lora import outputs
from qat_lora.cache.audit import audit, check_teacher, summary
from qat_lora.cache.audit import table_rows as audit_rows
from qat_lora.cache.build import build_kd_cache
from qat_lora.cache.dataset import KDCacheDataset
from qat_lora.cache.forecast import forecast
from qat_lora.cache.records import Fingerprint
from qat_lora.cache.shares import Share
from qat_lora.cache.store import read_manifest
from qat_lora.cache.writer import CacheWriter
from qat_lora.config import save_yaml, to_dict
from qat_lora.errors import CacheError, ConfigError, InterruptedRunError, MissingExtraError
from qat_lora.evaluate.report import markdown_table, plot_scores, save_json, table_rows, text_table
from qat_lora.evaluate.score import score
from qat_lora.export.adapter import load_starts, save_adapter, save_starts, starts_sha256
from qat_lora.export.merged import check_mergeable, save_merged
from qat_lora.layers.calibrate import quantise_model, second_moments
from qat_lora.layers.convert import (
    add_lora,
    bits_per_weight,
    lora_layers,
    prepare_base,
    quant_layers,
    quantise_targets,
)
from qat_lora.losses.objective import ObjectiveConfig, objective_loss
from qat_lora.models import (
    DTYPES,
    CausalLM,
    checkpoint_sha256,
    copy_tokenizer,
    load_model,
    load_tokenizer,
    save_quantised,
    save_with_scales,
    tokenizer_sha256,
)
from qat_lora.options import (
    AuditOptions,
    CacheBuildOptions,
    EvalOptions,
    ExportOptions,
    HubConfig,
    QuantizeOptions,
    RecoverOptions,
    RunConfig,
)
from qat_lora.quant.spec import preset
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.select import status_line
from qat_lora.students import open_student
from qat_lora.text.packing import PackedRow, make_encoder, pack_rows, share, take_eval
from qat_lora.text.sources import Document, TextConfig, describe_source, open_documents
from qat_lora.train.folders import whole_folder
from qat_lora.train.loop import LoopHooks, Trainee, train
from qat_lora.train.metrics import plot_curve
from qat_lora.types import Batch


def _say(run: RunConfig, line: str) -> None:
    if not (run.quiet or run.json):
        print(line, flush=True)


def _picture(run: RunConfig, draw: Callable[[], None]) -> None:
    """Draw a picture if matplotlib is there; without it a run is complete all the same."""
    try:
        draw()
    except MissingExtraError as error:
        _say(run, f"no picture: {error}")


def build_cache(options: CacheBuildOptions, runtime: Runtime) -> Any:
    """Build (or go on building) a KD cache; return its folder, or with `dry_run` the forecast as a dict.

    Raises:
        QatLoraError: see the rooms; nothing in an existing cache is lost.
        InterruptedRunError: SIGTERM; what is committed stays.
    """
    run, text, part = options.run, options.text, Share.parse(options.builder)
    default = f"caches/{Path(str(text.dataset)).name.replace('.', '-')}_L{options.length}_K{options.top_k}"
    out = Path(run.out or default)
    teacher = _load(str(options.teacher), options.hub, run.dtype)
    _fits_positions(teacher, options.length)
    tokenizer = load_tokenizer(teacher.folder, options.hub.trust_remote_code)
    template = getattr(tokenizer, "chat_template", None)
    fingerprint = Fingerprint(
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        vocab_size=teacher.vocab_size,
        teacher=str(options.teacher),
        teacher_sha256=checkpoint_sha256(teacher.folder),
        chat_template_sha256=hashlib.sha256(str(template).encode()).hexdigest() if template else None,
        dataset=describe_source(text) + (f" first {options.num_rows} rows" if options.num_rows else ""),
        packing="documents with bos and eos; attention and positions restart at each"
        + (f"; dealt out to {part.builders} builders" if part.builders > 1 else ""),
        length=options.length,
        top_k=options.top_k,
        temperatures=tuple(sorted(set(options.temperatures))),
        seed=run.seed,
        eval_rows=options.eval_rows,
        builder=f"torch {torch.__version__}, {runtime.device.type}, {run.dtype}",
    )
    encode = make_encoder(tokenizer)
    _say(run, f"{runtime.description} · {run.dtype} · cache in {out}")

    def documents(start: int) -> Iterator[Document]:
        return open_documents(text, start)

    evaluation, first = take_eval(documents, encode, options.length, options.eval_rows)
    rest = share(documents, first, part.builder, part.builders)
    max_rows = options.num_rows and part.of(options.num_rows)
    rest(0)  # refuses a blank text before the folder is made
    if options.dry_run:
        runtime.place(teacher.module)
        cost = forecast(
            teacher,
            pack_rows(rest(0), encode, options.length),
            fingerprint,
            out,
            eval_rows=0 if part.builder else options.eval_rows,
            batch_rows=options.teacher_batch_size,
            device=runtime.device,
            max_rows=max_rows,
            shard_rows=options.shard_rows,
            quiet=run.quiet,
        )
        if not run.json:
            print(cost.lines(), flush=True)
        return cost._asdict()
    with CacheWriter(out, fingerprint, options.shard_rows, overwrite=run.overwrite, share=part) as writer:
        done = writer.resume_state()
        if done.finished:
            _say(run, f"{out} is complete already")
            return out
        runtime.place(teacher.module)
        cursor = done.cursor if done.rows else None
        report = build_kd_cache(
            teacher,
            pack_rows(rest(cursor["document"] if cursor else 0), encode, options.length, cursor),
            writer,
            eval_rows=[] if part.builder else evaluation,
            batch_rows=options.teacher_batch_size,
            device=runtime.device,
            max_rows=max_rows,
            quiet=run.quiet,
        )
    if not report.finished:
        raise InterruptedRunError(f"stopped after {report.train_rows} rows; the same command goes on from there")
    _say(run, f"{report.train_rows} rows, {report.bytes_per_token:.0f} bytes a token, written to {out}")
    if report.waiting_for:
        others = ", ".join(map(str, report.waiting_for))
        _say(run, f"builder {part} has ended; the cache is complete when these have too: {others} of {part.builders}")
    return out


def _load(name: str, hub: HubConfig, dtype: str) -> CausalLM:
    return load_model(name, revision=hub.revision, trust_remote_code=hub.trust_remote_code, dtype=dtype)


def audit_cache(options: AuditOptions, runtime: Runtime) -> dict[str, Any]:
    """Run the teacher again on some rows of a cache and report how far the cache is from it; with --out, kept there."""
    run, path = options.run, str(options.kd_cache_dir)
    held = read_manifest(path).fingerprint  # refuses what is no cache before a model is loaded
    teacher = _load(str(options.teacher), options.hub, run.dtype)
    sha256 = checkpoint_sha256(teacher.folder)
    check_teacher(held, path, sha256, teacher.vocab_size)
    out = Path(run.out) if run.out else None
    settings = {"cache": held.sha256, "rows": options.rows, "dtype": run.dtype, "device": runtime.device.type}
    if out and outputs.claim(out, "cache audit", settings, run.overwrite):
        report = json.loads((out / "audit.json").read_text(encoding="utf-8"))
    else:
        runtime.place(teacher.module)
        _say(run, f"{runtime.description} · {run.dtype} · {path} · built with {held.builder}")
        report = audit(teacher, path, sha256, rows=options.rows, device=runtime.device)
        if out:
            save_json(report, out / "audit.json")
            outputs.complete(out)
    _say(run, f"{text_table(audit_rows(report))}\n{summary(report)}")
    return report


def cache_decoder(cache: str, folder: str) -> Callable[[list[int]], str]:
    """Return what turns a cache's token ids into text.

    Raises:
        ModelError: the folder has no tokenizer.
        CacheError: it is not the tokenizer that the cache was made with.
    """
    tokenizer = load_tokenizer(Path(folder))
    held = read_manifest(cache).fingerprint.tokenizer_sha256
    if tokenizer_sha256(tokenizer) != held:
        raise CacheError(
            f"tokenizer: the one in {folder} is {tokenizer_sha256(tokenizer)[:16]}…, the cache {cache} was made with "
            f"{held[:16]}…; give the folder of its teacher or leave --tokenizer out"
        )
    return lambda ids: tokenizer.decode(ids)


def _check_fits(dataset: KDCacheDataset, model: CausalLM) -> None:
    tokenizer = load_tokenizer(model.folder)
    dataset.check_student(tokenizer_sha256(tokenizer), model.vocab_size, model.max_positions)


def _fits_positions(model: CausalLM, length: int) -> None:
    if model.max_positions is not None and length > model.max_positions:
        limit = model.max_positions
        raise ConfigError(f"length: {length} tokens are more than the model's {limit} positions; give {limit} or less")


def _text_batches(text: TextConfig, tokenizer: Any, length: int, rows: int, batch_rows: int) -> Iterator[Batch]:
    """Return packed rows of a text as numpy batches of one fixed shape; missing rows of the last are masked.

    A text that is missing or blank is refused here, not at the first batch.
    """
    packed = pack_rows(open_documents(text), make_encoder(tokenizer), length)
    return _stacked(itertools.islice(packed, rows or None), length, batch_rows)


def _stacked(taken: Iterator[PackedRow], length: int, batch_rows: int) -> Iterator[Batch]:
    while chunk := list(itertools.islice(taken, batch_rows)):
        batch = {
            "input_ids": np.zeros((batch_rows, length), np.int32),
            "document_ids": np.zeros((batch_rows, length), np.int32),
            "target_mask": np.zeros((batch_rows, length - 1), np.bool_),
        }
        for i, row in enumerate(chunk):
            batch["input_ids"][i] = row.input_ids
            batch["document_ids"][i] = np.cumsum(row.doc_starts) - 1
            batch["target_mask"][i] = row.loss_mask[1:] > 0
        yield batch


def quantize(options: QuantizeOptions, runtime: Runtime) -> Path:
    """Quantise a model, with the adapter starts beside it; return its folder."""
    run = options.run
    chosen = preset(options.preset, options.keep)
    out = Path(run.out or f"runs/{Path(str(options.model)).name}_{options.preset}")
    has_text = bool(options.text.dataset or options.kd_cache_dir)
    if options.init == "gptq" and not has_text:
        raise ConfigError("init: gptq needs calibration text; give --dataset or --kd-cache-dir, or choose --init mse")
    model = _load(str(options.model), options.hub, "float32")
    if quant_layers(model.module):
        raise ConfigError(f"model: {options.model} is quantised already; give the full-precision model")
    targets = quantise_targets(model.module, chosen)
    settings = to_dict(options) | {"run": {"seed": run.seed}, "model_sha256": checkpoint_sha256(model.folder)}
    batches = _calibration_batches(options, model) if options.init != "absmax" and has_text else None
    if outputs.claim(out, "quantize", settings, run.overwrite):
        _say(run, f"{out} is complete already")
        return out
    runtime.place(model.module)
    _say(run, f"{runtime.description} · {chosen.name}, {len(targets)} layers · {out}")
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
    _say(run, f"{bits:.2f} bits per weight in {len(targets)} layers, written to {out}")
    return out


def _calibration_batches(options: QuantizeOptions, model: CausalLM) -> Iterator[Batch]:
    batch_rows = 8
    if options.kd_cache_dir is not None:
        dataset = KDCacheDataset(options.kd_cache_dir)
        _check_fits(dataset, model)
        rows = min(options.calibration_rows, len(dataset))
        return dataset.batches(0, math.ceil(rows / batch_rows), batch_rows, seed=options.run.seed)
    _fits_positions(model, options.calibration_length)
    tokenizer = load_tokenizer(model.folder, options.hub.trust_remote_code)
    return _text_batches(options.text, tokenizer, options.calibration_length, options.calibration_rows, batch_rows)


def recover(options: RecoverOptions, runtime: Runtime) -> Path:
    """Train a recovery adapter from a KD cache; return the run's folder."""
    run, loop = options.run, options.loop
    name = Path(str(options.checkpoint or options.model)).with_suffix("").name
    out = Path(run.out or f"runs/recovery_{name}")
    temperatures = tuple(sorted({1.0, options.objective.temperature}))
    dataset = KDCacheDataset(str(options.kd_cache_dir), options.preload, options.head_k, temperatures=temperatures)
    model = _load(str(options.checkpoint or options.model), options.hub, run.dtype)
    _check_fits(dataset, model)
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
        _say(run, f"{out} is complete already")
        return out
    save_yaml(options, out / "config.yaml")
    runtime.place(model.module)
    trainee = _trainee(model, options.train_scales)
    _say(run, status_line(runtime, DTYPES[run.dtype], effective))
    trained = sum(parameter.numel() for parameter in trainee.trained.values())
    begin = "from the quantisation error" if starts else "at zero"
    _say(run, f"{trained:,} numbers train, adapters start {begin} · {out}")
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
    _picture(run, lambda: plot_curve(out / "metrics.jsonl", out / "evaluations.jsonl", out / "curve.png"))
    outputs.complete(out)
    _say(run, f"{result['step']} steps, best adapter (step {result['best_step']}) in {out / 'best'}")
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


def evaluate(options: EvalOptions, runtime: Runtime) -> dict[str, Any]:
    """Score models side by side on held-out text; write table, JSON and picture; return the scores."""
    run = options.run
    teacher = _load(str(options.teacher), options.hub, run.dtype)
    _fits_positions(teacher, options.length)
    tokenizer = load_tokenizer(teacher.folder, options.hub.trust_remote_code)
    opened = {}
    for word in options.students:
        name, equals, folder = word.rpartition("=")
        name = name if equals else Path(folder).name
        if name in opened or name == "teacher":
            raise ConfigError(f"students: two are named {name!r}; give each a name as NAME=FOLDER")
        opened[name] = open_student(folder, options.hub, run.dtype)
        other = tokenizer_sha256(load_tokenizer(opened[name].model.folder))
        if other != tokenizer_sha256(tokenizer):
            raise ConfigError(
                f"students: {name} has another tokenizer than the teacher, so KL between them means nothing"
            )
    rows = min([teacher.vocab_size, *(s.model.vocab_size for s in opened.values())])
    out = Path(run.out or "runs/eval")
    identity = {name: student.sha256 for name, student in opened.items()}
    identity["teacher"] = checkpoint_sha256(teacher.folder)
    text = describe_source(options.text)
    settings = to_dict(options) | {"run": {"dtype": run.dtype}, "weights": identity, "text": text}
    texts = _text_batches(options.text, tokenizer, options.length, options.eval_rows, options.batch_size)
    if outputs.claim(out, "eval", settings, run.overwrite):
        _say(run, f"{out} is complete already")
        known = json.loads((out / "scores.json").read_text(encoding="utf-8"))
        _say(run, text_table(table_rows(known)))
        return known
    models = {name: student.model.with_vocabulary(rows) for name, student in opened.items()}
    for model in (teacher, *models.values()):
        runtime.place(model.module)
    _say(run, f"{runtime.description} · {run.dtype} · {len(models) + 1} models")
    results = score(teacher.with_vocabulary(rows), models, runtime.feed(texts), run.quiet, runtime.cut)
    scores: dict[str, Any] = {}
    for name, result in results.items():
        scores[name] = result.as_dict()
        if name in opened:
            scores[name]["bits_per_weight"] = opened[name].bits_per_weight
    table = table_rows(scores)
    save_json(scores, out / "scores.json")
    (out / "scores.md").write_text(markdown_table(table) + "\n", encoding="utf-8")
    _picture(run, lambda: plot_scores(scores, out / "scores.png"))
    outputs.complete(out)
    _say(run, text_table(table))
    return scores


def export(options: ExportOptions, runtime: Runtime) -> Path:
    """Write a student in a form that other tools load; return the folder."""
    run = options.run
    student = open_student(str(options.student), options.hub)
    check_mergeable(student.model.module)
    out = Path(run.out or f"runs/export_{Path(str(options.student)).name}_{options.form}")
    settings = {"form": options.form, "student": str(options.student), "weights": student.sha256}
    if not outputs.claim(out, "export", settings, run.overwrite):
        save_merged(student.model.module, out)
        copy_tokenizer(student.model.folder, out)
        outputs.complete(out)
    _say(run, f"written to {out}")
    return out

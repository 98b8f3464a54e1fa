"""The commands that make and question a KD cache."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qat_lora.cache.build.builder import ForwardSettings, Size, build_kd_cache, bytes_per_token, forecast
from qat_lora.cache.build.served import ServedTeacher
from qat_lora.cache.build.writer import CacheWriter, Partition
from qat_lora.cache.format.lm_head import LMHeadFile, lm_head_file
from qat_lora.cache.format.records import Fingerprint, optional_arrays
from qat_lora.cache.storage.location import LocalFolder, RemoteFolder, locate
from qat_lora.cache.storage.store import noted_fingerprint, read_manifest
from qat_lora.cache.tools import audit, overlap
from qat_lora.data.framing import describe_packing
from qat_lora.data.packing import PackedRow, make_encoder, pack_rows, share, take_eval
from qat_lora.data.sources import TextConfig, describe_source, open_documents, own_documents, units
from qat_lora.errors import ConfigError, InterruptedRunError, OvertakenError
from qat_lora.evaluate.report import save_json, text_table
from qat_lora.files import outputs
from qat_lora.files.checksums import WEIGHTS, checkpoint_sha256, read_object
from qat_lora.files.gguf_header import GGUF, read_header
from qat_lora.models.from_gguf import check_tokens
from qat_lora.models.load import PATTERNS, CausalLM, load_model, load_tokenizer, resolve_model, tokenizer_sha256
from qat_lora.models.teachers import DispatchedCausalLM, LlamaCppModel, load_dispatched
from qat_lora.options import AuditOptions, CacheBuildOptions
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.host.machine import made_with
from qat_lora.setup.common import fetch, fit_attention, fits_positions, keep_dtype, place_teacher, say, text_inputs
from qat_lora.terminal import redact

_Teacher = CausalLM | LlamaCppModel | ServedTeacher


def build_cache(options: CacheBuildOptions, runtime: Runtime) -> Any:
    """Build (or go on building) a KD cache; return its folder (an `RemoteFolder` for a URL), or with `dry_run` a dict.

    InterruptedRunError: SIGTERM, SIGINT or SIGHUP; what is committed stays.
    """
    options = as_builder(options, runtime)
    run, text, part = options.run, options.text, Partition.parse(options.builder)
    default = f"caches/{Path(str(text.dataset)).name.replace('.', '-')}_L{options.length}_K{options.top_k}"
    place = locate(run.out or default)
    out = place.path if isinstance(place, LocalFolder) else place
    if isinstance(place, RemoteFolder):
        place.require_create()  # before a teacher is loaded
    noted = None if run.overwrite else noted_fingerprint(place)
    options = keep_dtype(options, runtime, noted and noted.builder.rpartition(", ")[2])
    run = options.run
    teacher, tokenizer, folder, about = _open_teacher(options, runtime, noted)
    lm_head = lm_head_file(teacher.lm_head()) if options.hidden and not isinstance(teacher, ServedTeacher) else None
    dealt = units(text, part.builders)
    fingerprint = _fingerprint(options, about, lm_head, noted)
    encode = make_encoder(tokenizer)
    say(run, f"{runtime.description} · {run.dtype} · cache in {out}")
    documents = own_documents(text, dealt) if dealt else partial(open_documents, text)
    evaluation, first = take_eval(documents, encode, options.length, options.eval_rows)
    evaluation = [] if part.builder else evaluation
    rest = own_documents(text, dealt, first, *part) if dealt else share(documents, first, *part)
    max_rows = options.num_rows and part.of(options.num_rows)
    batch_rows = 1 if isinstance(teacher, LlamaCppModel) else options.teacher_batch_size  # it computes them one by one
    device = runtime.device if isinstance(teacher, CausalLM) else "cpu"
    drawn = (options.positions, options.position_share)
    settings = ForwardSettings(batch_rows, device, piece_bytes=runtime.piece_bytes, positions=drawn)

    def rows(cursor: Any = None) -> Iterator[PackedRow]:
        return pack_rows(rest(cursor["document"] if cursor else 0), encode, options.length, cursor)

    rest(0)  # refuses a blank text before the folder is made
    if options.dry_run:
        _place(teacher, runtime)
        lm_head_bytes = sum(map(len, lm_head.parts)) if lm_head else 0
        size = Size(0 if part.builder else options.eval_rows, max_rows, options.shard_rows, lm_head_bytes)
        cost = forecast(teacher, rows(), fingerprint, out, size, settings, quiet=run.quiet)
        if not run.json:
            print(redact(cost.lines()), flush=True)
        return cost._asdict()
    if run.overwrite and isinstance(place, LocalFolder):
        outputs.refuse_inputs(place.path, [options.teacher, folder, *text_inputs(text)], place.names())
    overwrite = run.overwrite
    while True:
        try:
            with CacheWriter(
                out, fingerprint, options.shard_rows, overwrite=overwrite, partition=part, lm_head=lm_head
            ) as writer:
                overwrite = False  # once: what is there from now on is of this build
                done = writer.resume_state()
                if done.finished:
                    say(run, f"{out} is complete already")
                    return out
                _place(teacher, runtime)
                given = teacher, rows(done.cursor if done.rows else None), writer, settings
                build_kd_cache(*given, eval_rows=evaluation, max_rows=max_rows, quiet=run.quiet)
            break
        except OvertakenError:
            say(run, f"another start of builder {part} is ahead; going on behind its last shard")
    done = writer.resume_state()
    if writer.stopped:
        raise InterruptedRunError(f"stopped after {done.rows} rows; the same command goes on from there")
    say(run, f"{done.rows} rows, {bytes_per_token(fingerprint):.0f} bytes a token, written to {out}")
    if waiting := writer.waiting_for():
        others = ", ".join(map(str, waiting))
        say(run, f"builder {part} has ended; the cache is complete when these have too: {others} of {part.builders}")
    return out


def as_builder(options: CacheBuildOptions, runtime: Runtime) -> CacheBuildOptions:
    """Return the options of chip r of N of builder i/n: builder (i N + r)/(n N); ConfigError: one of several chips."""
    if runtime.replicas != runtime.processes:
        raise ConfigError("parallel: a cache is built by a process a chip, which share nothing; leave spmd out")
    if runtime.processes == 1:
        return options
    share = Partition.parse(options.builder)
    mine = Partition(share.builder * runtime.processes + runtime.rank, share.builders * runtime.processes)
    return replace(options, builder=str(mine))


def _open_teacher(
    options: CacheBuildOptions, runtime: Runtime, noted: Fingerprint | None
) -> tuple[_Teacher, Any, Path, dict[str, Any]]:
    """Return teacher, tokenizer, its folder, and the fingerprint's fields; a served teacher may be as `noted`."""
    served, hub = options.served, options.hub
    teacher: _Teacher
    if served.teacher_url is not None:
        teacher = ServedTeacher(served, options.teacher, options.top_k)
    else:
        fetch(runtime, str(options.teacher), hub)
        teacher = _teacher(options, runtime, options.length)
        fits_positions(teacher, options.length)
    if isinstance(teacher, CausalLM):
        folder = teacher.folder
    else:
        folder = resolve_model(str(served.tokenizer), hub.revision, [name for name in PATTERNS if name not in WEIGHTS])
    tokenizer = load_tokenizer(folder, hub.trust_remote_code)
    if isinstance(teacher, ServedTeacher):
        size = int(read_object(folder / "config.json").get("vocab_size") or max(tokenizer.get_vocab().values()) + 1)
        name, (sha256, software) = teacher.name, teacher.identify(tokenizer, size, noted)
    else:
        software = f"torch {torch.__version__}, {runtime.device.type}, {options.run.dtype}"
        if isinstance(teacher, LlamaCppModel):
            software = teacher.version
            check_tokens(read_header(teacher.folder), tokenizer, folder)
        name = str(Path(str(options.teacher)))  # T/ and ./T are T
        sha256 = checkpoint_sha256(teacher.folder)
    teacher = _with_vocabulary(teacher, tokenizer, options.vocab_size)
    template = getattr(tokenizer, "chat_template", None)
    about = {"tokenizer_sha256": tokenizer_sha256(tokenizer), "vocab_size": teacher.vocab_size}
    about |= {"teacher": name, "teacher_sha256": sha256, "builder": software}
    about["packing"] = describe_packing(tokenizer)
    about["chat_template_sha256"] = hashlib.sha256(str(template).encode()).hexdigest() if template else None
    return teacher, tokenizer, folder, about


def _fingerprint(
    options: CacheBuildOptions, about: dict[str, Any], lm_head: LMHeadFile | None, noted: Fingerprint | None
) -> Fingerprint:
    """Return what the cache is to hold; `about` are the fields of teacher and tokenizer.

    A build `noted` by a version that knew no `tail_entropy` goes on without.
    """
    run, builders = options.run, Partition.parse(options.builder).builders
    dealt = units(options.text, builders)
    packing = about["packing"]
    if options.positions != "all":
        packing += f"; {options.position_share:g} of the positions drawn by {options.positions}"
    lzma, weights = options.row_codec == "lzma", bool(options.positions != "all" or options.text.weight_field)
    width, sha256 = (lm_head.width, lm_head.sha256) if lm_head else (0, None)
    about |= {name: getattr(options, name) for name in ("length", "top_k", "value_dtype", "eval_rows")}
    about["dataset"] = describe_source(options.text, dealt)
    about["dataset"] += f" first {options.num_rows} rows" if options.num_rows else ""
    packing += f"; {'units ' * bool(dealt)}dealt out to {builders} builders" if builders > 1 else ""
    about |= {"packing": packing, "temperatures": tuple(sorted(set(options.temperatures))), "seed": run.seed}
    drawn = options.draws_from_tail
    began_without = noted is not None and noted.contents.tail_draws > 0 and not noted.contents.tail_entropy
    tail_entropy = drawn > 0 and not began_without
    arrays = optional_arrays(drawn, options.draws, width, sha256, weights, lzma, tail_entropy)
    return Fingerprint(**about, optional_arrays=arrays)


def _with_vocabulary(teacher: _Teacher, tokenizer: Any, rows: int | None) -> _Teacher:
    """Return the teacher with the first rows of its LM head alone: models of a family may differ in padding."""
    if rows is None:
        return teacher
    fewest = max(tokenizer.get_vocab().values()) + 1
    if not fewest <= rows <= teacher.vocab_size:
        held = f"the tokenizer's ids take {fewest}, the teacher's output head has {teacher.vocab_size} rows"
        raise ConfigError(f"vocab_size: {rows} is not allowed; {held}: give a number between these")
    if isinstance(teacher, CausalLM):
        return teacher.with_vocabulary(rows)
    teacher.vocab_size = rows
    return teacher


def audit_cache(options: AuditOptions, runtime: Runtime) -> dict[str, Any]:
    """Run the teacher again on some rows of a cache and report how far the cache is from it; with --out, kept there."""
    path = str(options.kd_cache_dir)
    out = Path(options.run.out) if options.run.out else None
    options = keep_dtype(options, runtime, out and outputs.settings_of(out, "cache audit").get("dtype"))
    run = options.run
    held = read_manifest(path).fingerprint  # refuses what is no cache before a model is loaded
    teacher = _teacher(options, runtime, held.length)
    sha256 = checkpoint_sha256(teacher.folder)
    audit.check_teacher(held, path, sha256, teacher.vocab_size)
    settings = {"cache": held.sha256, "rows": options.rows, "dtype": run.dtype, "device": runtime.device.type}
    seen: dict[str, Any] = {}
    if options.text is not None:
        tokenizer = load_tokenizer(teacher.folder, options.hub.trust_remote_code)
        text = TextConfig(dataset=options.text)
        rows = list(pack_rows(open_documents(text), make_encoder(tokenizer), held.length))
        seen["overlap"] = overlap.overlap(path, {Path(options.text).name: rows}, tokenizer_sha256(tokenizer))
    inputs = [path, options.teacher, teacher.folder, options.text]
    claimed = outputs.claimed(out, "cache audit", settings | seen, run.overwrite, inputs) if out else nullcontext(False)
    with claimed as complete:
        if out and complete:
            report = json.loads((out / "audit.json").read_text(encoding="utf-8"))
        else:
            _place(teacher, runtime)
            say(run, f"{runtime.description} · {run.dtype} · {path} · built with {held.builder}")
            report = made_with() | audit.audit(teacher, path, sha256, rows=options.rows, device=runtime.device) | seen
            if out:
                save_json(report, out / "audit.json")
                outputs.complete(out)
    say(run, f"{text_table(audit.table_rows(report))}\n{audit.summary(report)}")
    if seen:
        say(run, overlap.summary(seen["overlap"]))
    return report


def _teacher(options: CacheBuildOptions | AuditOptions, runtime: Runtime, length: int) -> CausalLM | LlamaCppModel:
    file = resolve_model(str(options.teacher), options.hub.revision)
    if file.suffix == GGUF:
        return LlamaCppModel(file, length)
    if options.device_map == "none":
        return load_model(str(options.teacher), options.hub, options.run.dtype)
    runtime.check_device_map()
    return load_dispatched(str(options.teacher), options.device_map, options.hub, options.run.dtype)


def _place(teacher: object, runtime: Runtime) -> None:
    """Move the teacher to the device, unless it has been spread over several; on a CPU it attends in tiles."""
    if not isinstance(teacher, CausalLM):
        return
    if not isinstance(teacher, DispatchedCausalLM):
        place_teacher(teacher, runtime)
    fit_attention(teacher, runtime)

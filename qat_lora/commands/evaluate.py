"""The command that scores students against their teacher."""

import json
from collections.abc import Iterator, Set
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from qat_lora.cache.tools import overlap
from qat_lora.config import to_dict
from qat_lora.data.framing import describe_packing
from qat_lora.data.packing import make_encoder, pack_rows
from qat_lora.data.sources import Document, TextConfig, describe_source, open_documents
from qat_lora.errors import ConfigError
from qat_lora.evaluate.damage import Damage, damage_report
from qat_lora.evaluate.health import continue_greedily, health, take_prompts
from qat_lora.evaluate.protocols import block_rows, sliding_rows
from qat_lora.evaluate.report import SCHEMA, html_report, markdown_report, plot_report, save_json, terminal_report
from qat_lora.evaluate.score import measure
from qat_lora.evaluate.tally import Tally, bootstrap, interval, join, pairs
from qat_lora.evaluate.tasks import check_tasks, run_tasks
from qat_lora.files import outputs
from qat_lora.files.checksums import checkpoint_sha256
from qat_lora.files.folders import write_text
from qat_lora.files.gguf_header import ADAPTER, GGUF
from qat_lora.layers.calibrate.upcast import upcast
from qat_lora.models.end_tokens import end_ids
from qat_lora.models.load import CausalLM, load_model, load_tokenizer, tokenizer_sha256
from qat_lora.models.student import Student, open_student, stored_sizes
from qat_lora.options import EvalOptions
from qat_lora.runtime.base import Runtime
from qat_lora.setup.common import batches_of, fits_positions, keep_dtype, picture, say, text_inputs
from qat_lora.terminal import redact

SAMPLES = 2  # continuations that the page shows of each model


def evaluate(options: EvalOptions, runtime: Runtime) -> dict[str, Any]:
    """Score models side by side on held-out text; write scores and report card; return the scores by model."""
    out = Path(options.run.out or "runs/eval")
    options = keep_dtype(options, runtime, outputs.settings_of(out, "eval").get("run", {}).get("dtype"))
    run = options.run
    manager = check_tasks(options.harness) if options.harness.tasks else None
    teacher = load_model(str(options.teacher), options.hub, "stored" if run.dtype == "float32" else run.dtype)
    if run.dtype == "float32":  # the same numbers; embedding and head serve every piece of the logits
        upcast(teacher.module)
        for table in (teacher.module.get_input_embeddings(), teacher.module.get_output_embeddings()):
            table.float()
    fits_positions(teacher, options.row_length)
    written, positions = options.health.prompt_tokens + options.health.generate_tokens, teacher.max_positions
    if options.health.generate and positions is not None and written > positions:
        taken = f"prompt and continuation take {written} of {positions} positions"
        raise ConfigError(f"generate_tokens: {taken}; give fewer")
    tokenizer = load_tokenizer(teacher.folder, options.hub.trust_remote_code)
    students = _open_students(options, tokenizer, teacher.folder)
    main = options.text
    shown = redact(main.dataset or "")
    first = Path(shown).name or shown
    domains = _named(options.domain, "domain", first)
    texts = {first: main} if main.dataset else {}
    texts |= {name: replace(main, dataset=path, files_from=None) for name, path in domains.items()}
    damages = {name: _rows(text, tokenizer, options) for name, text in texts.items()}
    rows = {name: damage.rows for name, damage in damages.items()}
    prompts = take_prompts(chain(*rows.values()), options.health) if options.health.generate else None
    cache = options.kd_cache_dir
    seen = overlap.overlap(cache, rows, tokenizer_sha256(tokenizer)) if cache else None
    identity = {name: student.sha256 for name, student in students.items()}
    identity["teacher"] = checkpoint_sha256(teacher.folder)
    sources = {name: describe_source(text) for name, text in texts.items()}
    settings = {key: value for key, value in to_dict(options).items() if key != "dry_run"}
    settings |= {"weights": identity, "text": sources, "overlap": seen}
    settings |= {"packing": describe_packing(tokenizer)}
    settings |= {"run": {"dtype": run.dtype, "seed": run.seed}, "kd_cache_dir": cache and redact(cache)}
    inputs = [
        *(word.rpartition("=")[2] for word in (*options.students, *options.domain)),
        *(student.model.folder for student in students.values()),
        *(teacher.folder, options.teacher, cache, options.harness.tasks_path, *text_inputs(options.text)),
    ]
    with outputs.claimed(out, "eval", settings, run.overwrite, inputs) as complete:
        if complete:
            say(run, f"{out} is complete already")
            report = json.loads((out / "report.json").read_text(encoding="utf-8"))
        else:
            models = {"teacher": teacher, **{name: student.model for name, student in students.items()}}
            vocabulary = min(model.vocab_size for model in models.values())  # the one that all share
            models = {name: model.with_vocabulary(vocabulary) for name, model in models.items()}
            for model in models.values():
                runtime.place(model.module)
                if runtime.attention == "tiled":  # elsewhere a compiler would take longer than it saves
                    model.tile_attention()
            say(run, f"{runtime.description} · {run.dtype} · {len(models)} models · {options.protocol} rows")
            report = _report(models, damages, options, runtime) | {"overlap": seen}
            decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
            report["damage"] = damage_report(list(students), damages, decode)
            report["models"]["teacher"] |= stored_sizes(teacher)
            for name, student in students.items():
                report["models"][name] |= {"bits_per_weight": student.bits_per_weight, **student.sizes}
            for name, source in sources.items():
                report["texts"][name]["source"] = json.loads(source)
            if prompts is not None:
                ends = end_ids(teacher, tokenizer)
                report |= _generate(models, prompts, ends, decode, options, runtime)
            tasks: dict[str, Any] = {}
            for name, model in models.items() if manager else ():
                say(run, f"{name}: {', '.join(options.harness.tasks)}")
                how = manager, options.batch_size, model.max_positions, run.seed
                tasks[name] = run_tasks(model.module, tokenizer, options.harness, *how)
            report["tasks"] = tasks or None
            save_json(report["models"], out / "scores.json")
            save_json(report, out / "report.json")
            drawing = out / "scores.png"
            picture(run, lambda: plot_report(report, drawing))
            write_text(out / "scores.md", markdown_report(report, drawing.name if drawing.is_file() else None))
            write_text(out / "report.html", html_report(report, "Evaluation", drawing))
            outputs.complete(out)
    say(run, f"\n{terminal_report(report)}\nreport card: {out / 'scores.md'}; as a page: {out / 'report.html'}")
    return report["models"]


def _named(words: tuple[str, ...], setting: str, known: str) -> dict[str, str]:
    """Return the paths of NAME=PATH or PATH by name; raise a ConfigError for a name that is taken."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, path = word.rpartition("=")
        name = name if equals else Path(path).name
        if name in found or name == known:
            raise ConfigError(f"{setting}: two are named {name!r}; give each a name as NAME=FOLDER")
        found[name] = path
    return found


def _open_students(options: EvalOptions, tokenizer: Any, shared: Path) -> dict[str, Student]:
    opened, expected = {}, tokenizer_sha256(tokenizer)
    for name, folder in _named(options.students, "students", "teacher").items():
        opened[name] = open_student(folder, options.hub, options.run.dtype, shared)
        file = opened[name].model.folder
        if opened[name].start:
            say(options.run, f"{name} is scored {opened[name].start_text}")
        if Path(folder).suffix == GGUF and (file.parent / ADAPTER).is_file():
            say(options.run, f"{name} is scored without the {ADAPTER} beside it; for both, name {file.parent}")
        if tokenizer_sha256(load_tokenizer(opened[name].model.tokenizer_folder)) != expected:
            other = f"{name} has another tokenizer than the teacher"
            raise ConfigError(f"students: {other}, so KL between them means nothing")
    return opened


def _rows(text: TextConfig, tokenizer: Any, options: EvalOptions) -> Damage:
    names: list[str] = []

    def noted() -> Iterator[Document]:
        for document in open_documents(text):
            if not document.is_blank:
                names.append(document.name)
                yield document

    encode = make_encoder(tokenizer)
    if options.protocol == "sliding":
        rows = sliding_rows(noted(), encode, options.length, options.stride or options.length // 2)
    elif options.protocol == "blocks2048":
        rows = block_rows(open_documents(text), tokenizer)
    else:
        rows = pack_rows(noted(), encode, options.length)
    return Damage(islice(rows, options.eval_rows or None), names)


def _report(
    models: dict[str, CausalLM], damages: dict[str, Damage], options: EvalOptions, runtime: Runtime
) -> dict[str, Any]:
    """Score the models on every text; return a report (`report.SCHEMA`) whose optional parts are None."""
    run, length = options.run, options.row_length
    students = {name: model for name, model in models.items() if name != "teacher"}
    teacher, tallies = models["teacher"], dict[str, dict[str, Tally]]()
    for text, damage in damages.items():
        batches = runtime.feed(batches_of(iter(damage.rows), length, options.batch_size))
        given = (run.quiet, runtime.mark_step, f"evaluate {text}", runtime.piece_bytes, damage.observe)
        tallies[text] = measure(teacher, students, batches, *given)
    whole = {name: join([of[name] for of in tallies.values()]) for name in models}
    drawn = bootstrap(list(tallies.values()), options.resamples, run.seed)
    domains = {text: _figures(of, bootstrap([of], options.resamples, run.seed)) for text, of in tallies.items()}
    stride = (options.stride or options.length // 2) if options.protocol == "sliding" else None
    setup = {"teacher": str(options.teacher), "protocol": options.protocol, "length": length, "stride": stride}
    setup |= {"dtype": run.dtype, "device": runtime.description, "resamples": options.resamples}
    sizes = {t: {"rows": len(of.rows), "tokens": domains[t]["teacher"]["tokens"]} for t, of in damages.items()}
    report: dict[str, Any] = {"schema": SCHEMA, "setup": setup, "texts": sizes, "models": _figures(whole, drawn)}
    report["calibration"] = {name: tally.calibration for name, tally in whole.items()}
    report |= {"pairs": pairs(whole, drawn, list(students)), "domains": domains}
    return report | dict.fromkeys(("generation", "overlap", "tasks"))


def _figures(tallies: dict[str, Tally], drawn: dict[str, Any]) -> dict[str, dict[str, Any]]:
    limits = {name: {figure: interval(values) for figure, values in of.items()} for name, of in drawn.items()}
    return {name: {**tally.figures, "interval": limits[name]} for name, tally in tallies.items()}


def _generate(
    models: dict[str, CausalLM], prompts: Any, ends: Set[int], decode: Any, options: EvalOptions, runtime: Runtime
) -> dict[str, dict[str, Any]]:
    found, samples, new = {}, {}, options.health.generate_tokens
    for name, model in models.items():
        say(options.run, f"{name}: {len(prompts)} continuations of {new} tokens")
        ids = continue_greedily(model, prompts, new, runtime, options.run.quiet)
        found[name] = health(ids.tolist(), ends)
        pairs_of_ids = zip(prompts[:SAMPLES], ids[:SAMPLES].tolist(), strict=True)
        samples[name] = [decode([*prompt, *new_ids]) for prompt, new_ids in pairs_of_ids]
    return {"generation": found, "samples": samples}

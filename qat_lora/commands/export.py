"""The commands that write a student for other tools, and that upload what was written to the Hugging Face Hub.

Everything that can be refused is refused before the output folder is touched. Then the files are made under another
name and moved in, last those without which nothing loads: a kill never leaves half a model that loads.
"""

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.config import to_dict
from qat_lora.errors import ConfigError, QatLoraError
from qat_lora.evaluate.report import save_json
from qat_lora.evaluate.score import measure
from qat_lora.export.card import Card, cache_of_run, labelled, model_card, read_origin, read_scores
from qat_lora.export.containers import head_importance, with_containers
from qat_lora.export.forms import FORMS, SEEING, ExportJob, ExportPlan, display_name, usage
from qat_lora.export.hub import check_repo, files_to_upload, upload, upload_summary
from qat_lora.files import outputs
from qat_lora.files.checksums import checkpoint_sha256, seal
from qat_lora.files.folders import moved_into
from qat_lora.files.gguf_header import ADAPTER, GGUF
from qat_lora.layers.convert import LM_HEAD, quant_layers, weight_count
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.models.copies import copy_tokenizer
from qat_lora.models.load import CausalLM, load_tokenizer, stored_dtype
from qat_lora.models.multimodal import REST, auto_class
from qat_lora.models.student import Student, adapter_folder, open_student
from qat_lora.options import ExportOptions, PushOptions
from qat_lora.runtime.base import Runtime
from qat_lora.setup.common import cached_calibration_rows, check_fits, fits_positions, say, text_batches, text_inputs
from qat_lora.types import Batch

EMBEDDING_BITS = 4.5


def export(options: ExportOptions, runtime: Runtime) -> Path:
    """Write a student in a form that other tools load, with a model card; return the folder."""
    run, name = options.run, display_name(str(Path(str(options.student)).expanduser().absolute()))
    out = Path(run.out or f"runs/export_{name}_{options.form}")
    student = open_student(str(options.student), options.hub)
    adapter, base = adapter_folder(str(options.student)), student.model.folder
    if base.suffix == GGUF and options.form not in ("merged", "pt"):
        serve = f"llama-server -m {base}" + (f" --lora {adapter / ADAPTER}" if adapter else "")
        raise ConfigError(f"form: {options.form} would copy {base}; it serves as it is: {serve}; allowed: merged, pt")
    if student.model.rest and options.form not in SEEING:
        raise ConfigError(f"form: {options.form} is not written for models that see; allowed: {', '.join(SEEING)}")
    tokenizer = load_tokenizer(student.model.tokenizer_folder, options.hub.trust_remote_code)
    module = student.model.module
    origin, weights = read_origin(module.config, adapter), weight_count(module)  # before merging forgets it
    if student.start:
        say(run, f"{options.student} is exported {student.start_text}")
        origin["data of the recovery"] = "none, its adapter is not trained"
    has_adapter = adapter is not None or student.start is not None
    scores = None if options.scores is None else read_scores(options.scores)
    dtype = (FORMS[options.form].dtype or stored_dtype(base)) if options.dtype == "auto" else options.dtype
    rows = functools.cache(lambda: _text_rows(options, student, adapter, tokenizer))
    states: list[Tensor] = []  # [B, L, H] of the first batches, where `importance` has computed them

    def importance() -> Tensor:
        runtime.place(module)
        bar: dict[str, Any] = {"desc": "hidden states", "unit": "batch", "total": len(rows()[1]), "disable": run.quiet}
        found = head_importance(student.model, tqdm(runtime.feed(rows()[1]), **bar) if rows()[0] else None, states)
        module.to("cpu")
        return found

    of_form = dtype, options.container_bits, options.exact_only, options.embedding_bits or EMBEDDING_BITS, importance
    plan = FORMS[options.form].plan(ExportJob(str(options.student), student, adapter, tokenizer, *of_form, run.quiet))
    settings = {key: value for key, value in to_dict(options).items() if key not in ("run", "hub", "dry_run")}
    settings |= {"dtype": dtype, "weights": student.sha256}
    inputs = [options.student, student.model.folder, adapter, *text_inputs(options.text), options.scores]
    with outputs.claimed(out, "export", settings, run.overwrite, inputs) as complete:
        if complete:
            say(run, f"{out} is complete already")
            return out
        result = _measure(plan, quant_layers(module))
        if result.get("kl_of_rounding") and rows()[0]:
            held = {**plan.containers, **plan.tables}
            result |= _rounding_kl(student.model, held, rows()[1], states, run.quiet, runtime)
            result["measured_on"] += f" of {rows()[0]}"
        with moved_into(out) as draft:
            plan.write(draft)
            copy_tokenizer(student.model.tokenizer_folder, draft)
            seal(draft)
            result |= _sizes(draft, weights)
            card = Card(
                name, options.form, origin, checkpoint_sha256(base), student.bits_per_weight, result,
                _command(options, name),
                usage(options.form, has_adapter).replace("AutoModelForCausalLM", auto_class(module.config)),
                plan.notes, scores, options.license,
            )  # fmt: skip
            (draft / "README.md").write_text(model_card(card), encoding="utf-8")
            made = {"form": options.form, "bits_per_weight": student.bits_per_weight}
            save_json(made | result, draft / "result.json")
        outputs.complete(out)
    for line in (*(f"{name}: {value}" for name, value in labelled(result).items()), *plan.notes):
        say(run, line)
    say(run, f"written to {out}")
    return out


def _text_rows(
    options: ExportOptions, student: Student, adapter: Path | None, tokenizer: Any
) -> tuple[str | None, list[Batch]]:
    """Return a name and numpy batches of text to measure on: `--dataset`, or the run's own cache; None without any."""
    if options.text.dataset:
        fits_positions(student.model, options.length)
        batches = text_batches(options.text, tokenizer, options.length, options.eval_rows, 4)
        return display_name(options.text.dataset), list(batches)
    if cache := cache_of_run(adapter):
        with contextlib.suppress(QatLoraError):  # gone, or another by now: the result says that nothing was measured
            dataset = KDCacheDataset(cache)
            check_fits(dataset, student.model)
            count = -(-options.eval_rows * options.length // dataset.fingerprint.length)  # as many tokens as of text
            rows = cached_calibration_rows(dataset, count, seed=0)
            return f"{display_name(cache)}, on which it was trained", list(rows)
    return None, []


def _measure(plan: ExportPlan, layers: Mapping[str, QuantLinear]) -> dict[str, Any]:
    """Return the cost of the containers: bits, layers rounded again, and their weight error."""
    held = {name: container for name, container in plan.containers.items() if container is not None}
    result: dict[str, Any] = {}
    rounded = [container.error for container in held.values() if container.error]
    if held:
        counts = {name: layers[name].in_features * layers[name].out_features for name in held}
        bits = sum(container.bits_per_weight * counts[name] for name, container in held.items())
        stored, whole = sum(layers[name].stored_bits for name in held), sum(counts.values())
        result["bits_per_weight_in_the_container"] = round(bits / whole, 3)
        result["bits_per_weight_of_the_codes"] = round(stored / whole, 3)
        result |= {"layers_exact": len(held) - len(rounded), "layers_rounded": len(rounded)}
    if rounded:
        result["weight_error_mean"] = round(sum(rounded) / len(rounded), 4)
        result["weight_error_worst"] = round(max(rounded), 4)
    for name, table in plan.tables.items():
        words = f"{table.bits_per_weight:g} bits a weight, weight error {table.error:.4f}"
        result["head" if LM_HEAD.search(name) else "embedding"] = words
    if rounded or any(table.error for table in plan.tables.values()):
        result["kl_of_rounding"] = "not measured: give --dataset"
    return result


def _sizes(draft: Path, weights: int) -> dict[str, Any]:
    """Return the sizes of the files of weights, and their bits over all weights of the model, embedding included."""
    sizes = {x: x.stat().st_size for x in sorted(draft.rglob("*")) if x.suffix in (".safetensors", ".gguf", ".pt")}
    total, rest = sum(sizes.values()), sum(size for file, size in sizes.items() if file.name == REST)
    files = ", ".join(f"{file.relative_to(draft).as_posix()} {size / 1e6:.3f} MB" for file, size in sizes.items())
    found = {"weights_mb": round(total / 1e6, 3), "bits_over_all_weights": round(8 * (total - rest) / weights, 3)}
    return found | ({"files": files} if len(sizes) > 1 else {})


def _rounding_kl(
    model: CausalLM, found: Mapping[str, Any], batches: list[Batch], states: list[Tensor], quiet: bool, runtime: Runtime
) -> dict[str, Any]:
    """Return the mean KL(student || what the container holds), adapter on both sides, in nats; takes known `states`."""
    student: Any = SimpleNamespace(vocab_size=model.vocab_size, logits=model.logits)
    student.hidden = lambda *given: states.pop(0) if states else model.hidden(*given)
    rounded = replace(model, module=with_containers(model.module, found))
    for placed in (model, rounded):
        runtime.place(placed.module)
    how = runtime.feed(batches), quiet, runtime.mark_step
    tallies = measure(student, {"rounded": rounded}, *how, piece_bytes=runtime.piece_bytes)
    before, after = tallies["teacher"].figures, tallies["rounded"].figures
    model.module.to("cpu")
    return {
        "kl_of_rounding": round(after["kl"], 6),
        "perplexity_before_and_after": f"{before['ppl']:.3f}, {after['ppl']:.3f}",
        "measured_on": f"{after['tokens']} tokens",
    }


def _command(options: ExportOptions, name: str) -> str:
    """Return the command that makes this export, without the paths of this machine."""
    command = f"qat-lora export --student {name} --form {options.form} --dtype {options.dtype}"
    command += f" --container-bits {options.container_bits}" if options.container_bits else ""
    command += " --exact-only" if options.exact_only else ""
    command += f" --embedding-bits {options.embedding_bits:g}" if options.embedding_bits else ""
    return command + (f" --dataset {display_name(options.text.dataset)}" if options.text.dataset else "")


def push(options: PushOptions, runtime: Runtime, api: Any = None) -> dict[str, object]:
    """Check a folder, and upload it from the main process unless it is a dry run; ModelError, ConfigError: why not."""
    run, folder, repo = options.run, Path(str(options.folder)), str(options.repo)
    check_repo(repo)
    files = files_to_upload(folder)
    result = upload_summary(folder, files) | {"repo": repo, "uploaded": False}
    for name, size_bytes in files.items():
        say(run, f"{size_bytes:>14,}  {name}")
    size = f"{len(files)} files, {result['size_bytes']:,} bytes"
    if options.dry_run:
        say(run, f"{size}, fit to go to {repo}; nothing was uploaded (--dry-run)")
    elif runtime.is_main:
        url = upload(folder, files, repo, options.private, api)
        say(run, f"{size}, uploaded: {url}")
        result |= {"uploaded": True, "url": url}
    return result

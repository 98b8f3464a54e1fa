"""The command that writes a student for other tools.

Everything that can be refused is refused before the output folder is touched. Then the files are made under another
name and moved in, last those without which nothing loads: a kill never leaves half a model that loads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qat_lora.config import to_dict
from qat_lora.errors import ConfigError
from qat_lora.evaluate.report import save_json
from qat_lora.evaluate.score import measure
from qat_lora.export.card import Card, labelled, model_card, read_origin, read_scores
from qat_lora.export.forms import FORMS, ExportJob, display_name
from qat_lora.export.integers import Integers, with_integers
from qat_lora.files import outputs
from qat_lora.files.checksums import seal
from qat_lora.files.folders import moved_into
from qat_lora.files.gguf_header import GGUF
from qat_lora.files.identity import checkpoint_sha256
from qat_lora.generate.backends import ADAPTER
from qat_lora.layers.convert import quant_layers
from qat_lora.models.load import copy_tokenizer, load_tokenizer
from qat_lora.models.student import Student, adapter_folder, open_student
from qat_lora.options import ExportOptions
from qat_lora.runtime.base import Runtime
from qat_lora.setup.common import fits_positions, say, text_batches, text_inputs


def export(options: ExportOptions, runtime: Runtime) -> Path:
    """Write a student in a form that other tools load, with a model card; return the folder."""
    run = options.run
    name = display_name(str(Path(str(options.student)).expanduser().absolute()))
    out = Path(run.out or f"runs/export_{name}_{options.form}")
    student = open_student(str(options.student), options.hub, noted=None if run.overwrite else outputs.noted(out))
    adapter, base = adapter_folder(str(options.student)), student.model.folder
    if base.suffix == GGUF and options.form not in ("merged", "pt"):
        serve = f"llama-server -m {base}" + (f" --lora {adapter / ADAPTER}" if adapter else "")
        raise ConfigError(f"form: {options.form} would copy {base}; it serves as it is: {serve}; allowed: merged, pt")

    tokenizer = load_tokenizer(student.model.tokenizer_folder, options.hub.trust_remote_code)
    origin = read_origin(student.model.module.config, adapter)  # before merging forgets it
    scores = None if options.scores is None else read_scores(options.scores)
    of_form = options.dtype, options.container_bits, options.exact_only
    plan = FORMS[options.form].plan(ExportJob(str(options.student), student, adapter, tokenizer, *of_form))
    settings = {key: value for key, value in to_dict(options).items() if key not in ("run", "hub")}
    settings |= {"weights": student.sha256}
    inputs = [options.student, student.model.folder, adapter, *text_inputs(options.text), options.scores]
    with outputs.claimed(out, "export", settings, run.overwrite, inputs) as complete:
        if complete:
            say(run, f"{out} is complete already")
            return out
        result = _measure(options, student, plan.containers, tokenizer, runtime)
        base_sha256 = checkpoint_sha256(student.model.folder)
        with moved_into(out) as draft:
            plan.write(draft)
            copy_tokenizer(student.model.tokenizer_folder, draft)
            seal(draft)
            weights = (file for file in draft.rglob("*") if file.suffix in (".safetensors", ".gguf", ".pt"))
            result["weights_mb"] = round(sum(file.stat().st_size for file in weights) / 1e6, 3)
            card = Card(
                name, options.form, origin, base_sha256, student.bits_per_weight, result, _command(options, name),
                plan.notes, scores, options.license, adapter is not None,
            )  # fmt: skip
            (draft / "README.md").write_text(model_card(card), encoding="utf-8")
            kept = {"form": options.form, "bits_per_weight": student.bits_per_weight, **result}
            save_json(kept, draft / "result.json")
        outputs.complete(out)
    for line in (*(f"{name}: {value}" for name, value in labelled(result).items()), *plan.notes):
        say(run, line)
    say(run, f"written to {out}")
    return out


def _measure(
    options: ExportOptions, student: Student, found: Mapping[str, Integers | None], tokenizer: Any, runtime: Runtime
) -> dict[str, Any]:
    """Return the cost of the containers: bits, layers rounded again, their weight error, and KL where text is given."""
    held = {name: integers for name, integers in found.items() if integers is not None}
    if not held:
        return {}
    weights = sum(integers.codes_OI.numel() for integers in held.values())
    bits = sum(integers.bits_per_weight * integers.codes_OI.numel() for integers in held.values()) / weights
    layers = quant_layers(student.model.module)
    own = sum(layers[name].stored_bits for name in held) / weights
    rounded = [integers.error for integers in held.values() if integers.error]
    result: dict[str, Any] = {
        "bits_per_weight_in_the_container": round(bits, 3),
        "bits_per_weight_of_the_codes": round(own, 3),
        "layers_exact": len(held) - len(rounded),
        "layers_rounded": len(rounded),
    }
    if rounded:
        result["weight_error_mean"] = round(sum(rounded) / len(rounded), 4)
        result["weight_error_worst"] = round(max(rounded), 4)
        result["kl_of_rounding"] = "not measured: give --dataset"
        if options.text.dataset:
            result |= _rounding_kl(options, student, dict(found), tokenizer, runtime)
    return result


def _rounding_kl(
    options: ExportOptions, student: Student, found: dict[str, Integers | None], tokenizer: Any, runtime: Runtime
) -> dict[str, Any]:
    """Return the mean KL(student || what the container holds), adapter on both sides, in nats."""
    own, quiet = student.model, options.run.quiet
    fits_positions(own, options.length)
    rounded = replace(own, module=with_integers(copy.deepcopy(own.module), found))
    batches = text_batches(options.text, tokenizer, options.length, options.eval_rows, 4)
    for model in (own, rounded):
        runtime.place(model.module)
    held_out, piece_bytes = runtime.feed(batches), runtime.piece_bytes
    tallies = measure(own, {"rounded": rounded}, held_out, quiet, runtime.mark_step, piece_bytes=piece_bytes)
    before, after = tallies["teacher"].figures, tallies["rounded"].figures
    own.module.to("cpu")
    return {
        "kl_of_rounding": round(after["kl"], 6),
        "perplexity_before_and_after": f"{before['ppl']:.3f}, {after['ppl']:.3f}",
        "measured_on": f"{after['tokens']} tokens of {display_name(str(options.text.dataset))}",
    }


def _command(options: ExportOptions, name: str) -> str:
    """Return the command that makes this export, without the paths of this machine."""
    command = f"qat-lora export --student {name} --form {options.form} --dtype {options.dtype}"
    command += f" --container-bits {options.container_bits}" if options.container_bits else ""
    command += " --exact-only" if options.exact_only else ""
    return command + (f" --dataset {display_name(options.text.dataset)}" if options.text.dataset else "")

"""The command that writes a student for other tools.

Everything that can be refused is refused before the output folder is touched; then the files are made under another
name and move in, those last without which nothing loads: a kill leaves no half of a model that loads.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qat_lora.config import to_dict
from qat_lora.errors import ModelError
from qat_lora.evaluate.report import save_json
from qat_lora.evaluate.score import score
from qat_lora.export.card import Card, labelled, read_origin, read_scores, render, shown
from qat_lora.export.compressed import notes, save_compressed, to_integers
from qat_lora.export.gguf_file import check_architecture, save_base, save_lora, to_blocks
from qat_lora.export.gguf_vocab import vocabulary
from qat_lora.export.integers import Integers, with_integers
from qat_lora.export.merged import check_mergeable, save_merged
from qat_lora.export.pair import copy_generation, save_pair, save_settings
from qat_lora.extras import require
from qat_lora.files import outputs
from qat_lora.files.checksums import seal
from qat_lora.files.folders import moved_into
from qat_lora.files.identity import checkpoint_sha256
from qat_lora.layers.convert import lora_layers, quant_layers
from qat_lora.models.adapter import WEIGHTS
from qat_lora.models.load import copy_tokenizer, load_tokenizer
from qat_lora.models.student import Student, adapter_folder, open_student
from qat_lora.options import ExportOptions
from qat_lora.runtime.base import Runtime
from qat_lora.setup.common import fits_positions, say, text_batches, text_inputs


@dataclass
class Plan:
    """What an export will write, once nothing speaks against it."""

    write: Callable[[Path], None]
    found: Mapping[str, Integers | None] = field(default_factory=dict)
    """Quantised layers in the form of their container."""
    notes: list[str] = field(default_factory=list)


def export(options: ExportOptions, runtime: Runtime) -> Path:
    """Write a student in a form that other tools load, with a model card; return the folder."""
    run = options.run
    name = shown(str(Path(str(options.student)).expanduser().absolute()))
    out = Path(run.out or f"runs/export_{name}_{options.form}")
    student = open_student(str(options.student), options.hub, noted=None if run.overwrite else outputs.noted(out))
    adapter = adapter_folder(str(options.student))
    tokenizer = load_tokenizer(student.model.folder, options.hub.trust_remote_code)
    origin = read_origin(student.model.module.config, adapter)  # before merging forgets it
    scores = None if options.scores is None else read_scores(options.scores)
    plan = PLANS[options.form](options, student, adapter, tokenizer)
    settings = {key: value for key, value in to_dict(options).items() if key not in ("run", "hub")}
    settings |= {"dtype": run.dtype, "weights": student.sha256}
    inputs = [options.student, student.model.folder, adapter, *text_inputs(options.text), options.scores]
    with outputs.claimed(out, "export", settings, run.overwrite, inputs) as complete:
        if complete:
            say(run, f"{out} is complete already")
            return out
        result = _measure(options, student, plan.found, tokenizer, runtime)
        base_sha256 = checkpoint_sha256(student.model.folder)
        with moved_into(out) as draft:
            plan.write(draft)
            copy_tokenizer(student.model.folder, draft)
            if options.form in ("merged", "compressed-tensors"):
                copy_generation(student.model.folder, draft)
            seal(draft)
            result["weights_mb"] = round(sum(_sizes(draft)) / 1e6, 3)
            card = Card(
                name, options.form, origin, base_sha256, student.bits_per_weight, result, _command(options, name),
                plan.notes, scores, options.license, adapter is not None,
            )  # fmt: skip
            (draft / "README.md").write_text(render(card), encoding="utf-8")
            kept = {"form": options.form, "bits_per_weight": student.bits_per_weight, **result}
            save_json(kept, draft / "result.json")
        outputs.complete(out)
    for line in (*(f"{name}: {value}" for name, value in labelled(result).items()), *plan.notes):
        say(run, line)
    say(run, f"written to {out}")
    return out


def _merged(options: ExportOptions, student: Student, adapter: Path | None, tokenizer: Any) -> Plan:
    module = student.model.module
    check_mergeable(module)
    return Plan(lambda out: save_merged(module, out, options.run.dtype))


def _pair(options: ExportOptions, student: Student, adapter: Path | None, tokenizer: Any) -> Plan:
    if adapter is None:
        raise ModelError(f"student: {options.student} has no adapter; give the folder of a `qat-lora recover` run")
    return Plan(lambda out: save_pair(adapter, student.model.folder, out))


def _compressed(options: ExportOptions, student: Student, adapter: Path | None, tokenizer: Any) -> Plan:
    require("compressed_tensors", "export")
    module = student.model.module
    found = to_integers(module, options.container_bits)

    def write(out: Path) -> None:
        save_compressed(module, found, out, options.run.dtype)
        if adapter is not None:
            (out / "adapter").mkdir()
            shutil.copyfile(adapter / WEIGHTS, out / "adapter" / WEIGHTS)
            save_settings(adapter, out / "adapter", "..", checkpoint_sha256(out))

    return Plan(write, found, notes(module, found))


def _gguf(options: ExportOptions, student: Student, adapter: Path | None, tokenizer: Any) -> Plan:
    require("gguf", "export")
    model = student.model
    check_architecture(model)
    vocabulary(tokenizer, int(model.module.get_input_embeddings().weight.shape[0]))
    found = to_blocks(model, options.exact_only)
    name = shown(str(options.student))

    def write(out: Path) -> None:
        save_base(model, found, tokenizer, out / "base.gguf", options.run.dtype, name)
        if lora_layers(model.module):
            save_lora(model, out / "adapter.gguf", name)

    said = ["llama.cpp rounds activations to 8 bits in its products with Q4_0 on a CPU; the weights are these"]
    if dense := [layer for layer, integers in found.items() if integers is None]:
        said.append(f"{len(dense)} quantised layers are stored dense, since no Q4_0 block holds them")
    return Plan(write, found, said)


PLANS: dict[str, Callable[[ExportOptions, Student, Path | None, Any], Plan]] = {
    "merged": _merged,
    "adapter": _pair,
    "compressed-tensors": _compressed,
    "gguf": _gguf,
}


def _measure(
    options: ExportOptions, student: Student, found: Mapping[str, Integers | None], tokenizer: Any, runtime: Runtime
) -> dict[str, Any]:
    """Return what the containers cost: bits, layers rounded anew, their weight error, and KL where text is given."""
    held = {name: integers for name, integers in found.items() if integers is not None}
    if not held:
        return {}
    weights = {name: integers.codes_OI.numel() for name, integers in held.items()}
    bits = sum(integers.bits_per_weight * weights[name] for name, integers in held.items()) / sum(weights.values())
    layers = quant_layers(student.model.module)
    own = sum(layers[name].stored_bits for name in held) / sum(weights.values())
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
    fits_positions(student.model, options.length)
    rounded = replace(student.model, module=with_integers(copy.deepcopy(student.model.module), found))
    batches = text_batches(options.text, tokenizer, options.length, options.eval_rows, 4)
    for model in (student.model, rounded):
        runtime.place(model.module)
    held_out = runtime.feed(batches)
    scores = score(student.model, {"rounded": rounded}, held_out, options.run.quiet, runtime.cut, runtime.piece_bytes)
    student.model.module.to("cpu")
    return {
        "kl_of_rounding": round(scores["rounded"].kl, 6),
        "perplexity_before_and_after": f"{scores['teacher'].ppl:.3f}, {scores['rounded'].ppl:.3f}",
        "measured_on": f"{scores['rounded'].tokens} tokens of {shown(str(options.text.dataset))}",
    }


def _sizes(folder: Path) -> list[int]:
    return [file.stat().st_size for file in folder.rglob("*") if file.suffix in (".safetensors", ".gguf")]


def _command(options: ExportOptions, name: str) -> str:
    """Return the command that makes this export, without the paths of this machine."""
    words = ["qat-lora export", f"--student {name}", f"--form {options.form}", f"--dtype {options.run.dtype}"]
    if options.container_bits:
        words.append(f"--container-bits {options.container_bits}")
    if options.exact_only:
        words.append("--exact-only")
    if options.text.dataset:
        words.append(f"--dataset {shown(options.text.dataset)}")
    return " ".join(words)

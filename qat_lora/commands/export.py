"""The command that writes a student for other tools.

Everything that can be refused is refused before the output folder is touched. Then the files are made under another
name and moved in, last those without which nothing loads: a kill never leaves half a model that loads.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.config import to_dict
from qat_lora.errors import QatLoraError
from qat_lora.evaluate.report import save_json
from qat_lora.evaluate.score import measure
from qat_lora.export.card import Card, cache_of_run, labelled, model_card, read_origin, read_scores
from qat_lora.export.embedding import head_importance
from qat_lora.export.forms import FORMS, ExportJob, ExportPlan, display_name
from qat_lora.export.integers import Container, other_tensors, with_integers
from qat_lora.files import outputs
from qat_lora.files.checksums import seal
from qat_lora.files.folders import moved_into
from qat_lora.files.identity import checkpoint_sha256
from qat_lora.layers.convert import LM_HEAD, quant_layers
from qat_lora.models.load import copy_tokenizer, load_tokenizer
from qat_lora.models.student import Student, adapter_folder, open_student
from qat_lora.options import ExportOptions
from qat_lora.runtime.base import Runtime
from qat_lora.setup.common import cached_calibration_rows, check_fits, fits_positions, say, text_batches, text_inputs
from qat_lora.types import Batch

EMBEDDING_BITS = 4.5


def export(options: ExportOptions, runtime: Runtime) -> Path:
    """Write a student in a form that other tools load, with a model card; return the folder."""
    run = options.run
    name = display_name(str(Path(str(options.student)).expanduser().absolute()))
    out = Path(run.out or f"runs/export_{name}_{options.form}")
    student = open_student(str(options.student), options.hub, noted=None if run.overwrite else outputs.noted(out))
    adapter = adapter_folder(str(options.student))
    tokenizer = load_tokenizer(student.model.folder, options.hub.trust_remote_code)
    module = student.model.module
    origin = read_origin(module.config, adapter)  # before merging forgets it
    weights = sum(tensor.numel() for tensor in other_tensors(module, torch.float32).values())
    weights += sum(layer.in_features * layer.out_features for layer in quant_layers(module).values())
    scores = None if options.scores is None else read_scores(options.scores)
    dtype = FORMS[options.form].dtype if options.dtype == "auto" else options.dtype
    rows = _Rows(options, student, adapter, tokenizer, runtime)
    of_form = dtype, options.container_bits, options.exact_only, options.embedding_bits or EMBEDDING_BITS
    plan = FORMS[options.form].plan(
        ExportJob(str(options.student), student, adapter, tokenizer, *of_form, rows.moments)
    )
    settings = {key: value for key, value in to_dict(options).items() if key not in ("run", "hub")} | {"dtype": dtype}
    settings |= {"weights": student.sha256}
    inputs = [options.student, student.model.folder, adapter, *text_inputs(options.text), options.scores]
    with outputs.claimed(out, "export", settings, run.overwrite, inputs) as complete:
        if complete:
            say(run, f"{out} is complete already")
            return out
        result = _measure(options, student, plan, rows)
        base_sha256 = checkpoint_sha256(student.model.folder)
        with moved_into(out) as draft:
            plan.write(draft)
            copy_tokenizer(student.model.folder, draft)
            seal(draft)
            result |= _sizes(draft, weights)
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


class _Rows:
    """Rows of text to measure on: `--dataset`, else the run's own cache where that is there."""

    def __init__(
        self, options: ExportOptions, student: Student, adapter: Path | None, tokenizer: Any, runtime: Runtime
    ) -> None:
        self.options, self.student, self.tokenizer, self.runtime = options, student, tokenizer, runtime
        self.name, self.cache = options.text.dataset and display_name(options.text.dataset), None
        if self.name is None and (cache := cache_of_run(adapter)):
            try:
                self.cache = KDCacheDataset(cache)
                check_fits(self.cache, student.model)
                self.name = f"{display_name(cache)}, on which it was trained"
            except QatLoraError:
                self.cache = None  # gone, or another by now: nothing is measured, and the result says so

    @functools.cached_property
    def batches(self) -> list[Batch]:
        """Batches of numpy arrays."""
        options = self.options
        if self.cache is not None:
            return list(cached_calibration_rows(self.cache, options.eval_rows, seed=0))
        fits_positions(self.student.model, options.length)
        return list(text_batches(options.text, self.tokenizer, options.length, options.eval_rows, 4))

    def moments(self) -> Tensor:
        """Return the mean square of what the LM head reads on these rows, or the final norm's word for it."""
        if self.name is None:
            return head_importance(self.student.model, None)
        self.runtime.place(self.student.model.module)
        found = head_importance(self.student.model, self.runtime.feed(self.batches))
        self.student.model.module.to("cpu")
        return found


def _measure(options: ExportOptions, student: Student, plan: ExportPlan, rows: _Rows) -> dict[str, Any]:
    """Return the cost of the containers: bits, layers rounded again, their weight error, and KL where text is there."""
    layers = quant_layers(student.model.module)
    held = {name: container for name, container in plan.containers.items() if container is not None}
    result: dict[str, Any] = {}
    rounded = [container.error for container in held.values() if container.error]
    if held:
        counts = {name: layers[name].in_features * layers[name].out_features for name in held}
        bits = sum(container.bits_per_weight * counts[name] for name, container in held.items())
        result = {
            "bits_per_weight_in_the_container": round(bits / sum(counts.values()), 3),
            "bits_per_weight_of_the_codes": round(
                sum(layers[name].stored_bits for name in held) / sum(counts.values()), 3
            ),
            "layers_exact": len(held) - len(rounded),
            "layers_rounded": len(rounded),
        }
    if rounded:
        result["weight_error_mean"] = round(sum(rounded) / len(rounded), 4)
        result["weight_error_worst"] = round(max(rounded), 4)
    for name, table in plan.tables.items():
        words = f"{table.bits_per_weight:g} bits a weight, weight error {table.error:.4f}"
        result["head" if LM_HEAD.search(name) else "embedding"] = words
    if rounded or any(table.error for table in plan.tables.values()):
        result["kl_of_rounding"] = "not measured: give --dataset"
        if rows.name is not None:
            result |= _rounding_kl(options, student, {**plan.containers, **plan.tables}, rows)
    return result


def _sizes(draft: Path, weights: int) -> dict[str, Any]:
    """Return the sizes of the files of weights, and their bits over all weights of the model, embedding included."""
    suffixes = (".safetensors", ".gguf", ".pt")
    sizes = {file: file.stat().st_size for file in sorted(draft.rglob("*")) if file.suffix in suffixes}
    total = sum(sizes.values())
    files = ", ".join(f"{file.relative_to(draft).as_posix()} {size / 1e6:.3f} MB" for file, size in sizes.items())
    return {
        "weights_mb": round(total / 1e6, 3),
        "bits_over_all_weights": round(8 * total / weights, 3),
        **({"files": files} if len(sizes) > 1 else {}),
    }


def _rounding_kl(
    options: ExportOptions, student: Student, found: Mapping[str, Container | None], rows: _Rows
) -> dict[str, Any]:
    """Return the mean KL(student || what the container holds), adapter on both sides, in nats."""
    own, runtime = student.model, rows.runtime
    batches = rows.batches
    rounded = replace(own, module=with_integers(copy.deepcopy(own.module), found))
    for model in (own, rounded):
        runtime.place(model.module)
    held_out, piece_bytes = runtime.feed(batches), runtime.piece_bytes
    tallies = measure(
        own, {"rounded": rounded}, held_out, options.run.quiet, runtime.mark_step, piece_bytes=piece_bytes
    )
    before, after = tallies["teacher"].figures, tallies["rounded"].figures
    own.module.to("cpu")
    return {
        "kl_of_rounding": round(after["kl"], 6),
        "perplexity_before_and_after": f"{before['ppl']:.3f}, {after['ppl']:.3f}",
        "measured_on": f"{after['tokens']} tokens of {rows.name}",
    }


def _command(options: ExportOptions, name: str) -> str:
    """Return the command that makes this export, without the paths of this machine."""
    command = f"qat-lora export --student {name} --form {options.form} --dtype {options.dtype}"
    command += f" --container-bits {options.container_bits}" if options.container_bits else ""
    command += " --exact-only" if options.exact_only else ""
    command += f" --embedding-bits {options.embedding_bits:g}" if options.embedding_bits else ""
    return command + (f" --dataset {display_name(options.text.dataset)}" if options.text.dataset else "")

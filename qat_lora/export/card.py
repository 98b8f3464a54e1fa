"""The model card of an exported folder: what it is, what made it, what was measured, what was not checked.

Everything in it is read from what the earlier commands left (the run's config.yaml, the cache's manifest, an
evaluation's scores); what cannot be read is said to be unknown, never guessed. Paths of the machine that made it are
cut to their last part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import yaml

from qat_lora.cache.store import read_manifest
from qat_lora.config import load_yaml
from qat_lora.errors import ConfigError
from qat_lora.evaluate.report import markdown_table, table_rows

LIBRARY = {"merged": "transformers", "adapter": "peft", "compressed-tensors": "transformers", "gguf": "gguf"}
USE = {
    "merged": 'AutoModelForCausalLM.from_pretrained("FOLDER")',
    "adapter": (
        "import qat_lora.models  # lets transformers read the base\n"
        'base = AutoModelForCausalLM.from_pretrained("FOLDER/base")\n'
        'model = PeftModel.from_pretrained(base, "FOLDER")'
    ),
    "compressed-tensors": (
        'base = AutoModelForCausalLM.from_pretrained("FOLDER")\n'
        '# with an adapter: model = PeftModel.from_pretrained(base, "FOLDER/adapter")'
    ),
    "gguf": "llama-cli -m FOLDER/base.gguf\n# with an adapter, add: --lora FOLDER/adapter.gguf",
}


@dataclass(frozen=True)
class Origin:
    """Where a student comes from, as far as it is written down."""

    model: str = "unknown"
    teacher: str = "unknown"
    data: str = "unknown"
    preset: str = "none"


@dataclass(frozen=True)
class Card:
    """What a card says."""

    name: str
    form: str
    origin: Origin
    base_sha256: str
    bits_per_weight: float | None
    result: Mapping[str, Any]
    """What the export measured, as in its result.json."""
    command: str
    notes: list[str] = field(default_factory=list)
    scores: str | None = None
    """A Markdown table."""
    license: str | None = None


def shown(path: str) -> str:
    """Return a name for people: the last part of a path, a Hub name as it is."""
    is_path = path.startswith((".", "/", "~", "\\")) or path.count("/") > 1 or os.path.exists(path)
    return PurePath(path).name if is_path else path


def read_origin(config: Any, adapter: Path | None) -> Origin:
    """Return where a student comes from: its base's config.json, and the run that its adapter lies in."""
    quantization: Any = getattr(config, "quantization_config", None) or {}
    plain: dict[str, Any] = quantization.to_dict() if hasattr(quantization, "to_dict") else dict(quantization)
    model = _said(plain, "details", "model", "unknown")
    preset = _said(plain, "preset", "name", "none")
    teacher = data = "unknown"
    run = adapter.parent / "config.yaml" if adapter is not None else None
    if run is not None and run.is_file():
        try:
            fingerprint = read_manifest(str(load_yaml(run).get("kd_cache_dir"))).fingerprint
            teacher, data = shown(fingerprint.teacher), _dataset(fingerprint.dataset)
        except (ValueError, OSError):
            pass  # the cache is gone, or the settings are damaged: unknown, and the card says so
    return Origin(shown(model), teacher, data, preset)


def _said(tree: Mapping[str, Any], group: str, name: str, otherwise: str) -> str:
    inner = tree.get(group)
    return str(inner.get(name, otherwise)) if isinstance(inner, dict) else otherwise


def _dataset(described: str) -> str:
    """Return a cache's description of its text (JSON, then how much of it) in words."""
    try:
        found, end = json.JSONDecoder().raw_decode(described)
    except ValueError:
        return shown(described)
    words = [f"{name} {shown(str(value))[:40]}" for name, value in found.items() if value not in (None, "")]
    return ", ".join(words) + ("," + described[end:] if described[end:] else "")


def read_scores(folder: str) -> str:
    """Return an evaluation's scores as a Markdown table.

    Raises:
        ConfigError: the folder holds none.
    """
    file = Path(folder) / "scores.json"
    try:
        return markdown_table(table_rows(json.loads(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(
            f"scores: {file} holds no scores ({error}); give the folder of a `qat-lora eval` run"
        ) from None


def render(card: Card) -> str:
    """Return the card as Markdown with the Hub's front matter."""
    front = {
        "license": card.license or "other",
        "library_name": LIBRARY[card.form],
        "pipeline_tag": "text-generation",
        "tags": ["qat-lora", "quantized", card.form],
    }
    if card.origin.model.count("/") == 1:
        front["base_model"] = card.origin.model
    bits = "not quantised" if card.bits_per_weight is None else f"{card.bits_per_weight:.3f} (adapter included)"
    rows = {
        "form": card.form,
        "full-precision model": card.origin.model,
        "teacher": card.origin.teacher,
        "data of the recovery": card.origin.data,
        "preset": card.origin.preset,
        "bits per weight of the student": bits,
        **{name.replace("_", " "): value for name, value in card.result.items() if value is not None},
        "fingerprint of the base": f"`{card.base_sha256}`",
        "licence": card.license or "not given: those of model, teacher and data apply",
    }
    lines = ["---", yaml.safe_dump(front, sort_keys=False).strip(), "---", "", f"# {card.name}", ""]
    lines += ["A language model quantised and recovered with qat-lora.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    lines += ["", "## Use", "", "```", USE[card.form], "```", "", "## Scores", ""]
    lines += [card.scores or "None were given with this export.", ""]
    if card.notes:
        lines += ["## What was and was not checked", "", *(f"* {note}" for note in card.notes), ""]
    lines += ["## Made by", "", "```", card.command, "```", ""]
    return "\n".join(lines)

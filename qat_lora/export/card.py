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

from qat_lora.cache.storage.store import read_manifest
from qat_lora.config import load_yaml
from qat_lora.errors import ConfigError, DamagedFileError
from qat_lora.evaluate.report import markdown_table, table_rows
from qat_lora.files.outputs import MARK, check_listed

LIBRARY = {"merged": "transformers", "adapter": "peft", "compressed-tensors": "transformers", "gguf": "gguf"}
_TRANSFORMERS = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
"""
_PEFT = "from peft import PeftModel\n" + _TRANSFORMERS
USE = {
    "merged": _TRANSFORMERS + 'model = AutoModelForCausalLM.from_pretrained(".")',
    "adapter": f"""\
import qat_lora  # lets transformers read the base
{_PEFT}base = AutoModelForCausalLM.from_pretrained("base")
model = PeftModel.from_pretrained(base, ".")""",
    "compressed-tensors": _TRANSFORMERS + 'model = AutoModelForCausalLM.from_pretrained(".")',
    "gguf": """\
from llama_cpp import Llama  # in a shell: llama-cli -m base.gguf

model = Llama("base.gguf")""",
}
USE_WITH_ADAPTER = USE | {
    "compressed-tensors": f"""\
{_PEFT}base = AutoModelForCausalLM.from_pretrained(".")
base(tokenizer("any", return_tensors="pt").input_ids)  # the first forward unpacks the weights, which PEFT asks for
model = PeftModel.from_pretrained(base, "adapter")""",
    "gguf": """\
from llama_cpp import Llama  # in a shell: llama-cli -m base.gguf --lora adapter.gguf

model = Llama("base.gguf", lora_path="adapter.gguf")""",
}
"""Python that loads an export, run in its folder with nothing before it; tests and `benchmarks/consumers.py` do so."""


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
    adapter: bool = False
    """Whether an adapter lies beside the base."""


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
        check_listed(run)
        try:
            settings = load_yaml(run)
        except ConfigError as error:
            if (run.parent / MARK).is_file():
                raise DamagedFileError(f"{error}; restore it, or remove it: the card then says less") from None
            settings = {}  # a file of somebody else's
        try:
            fingerprint = read_manifest(str(settings.get("kd_cache_dir"))).fingerprint
            teacher, data = shown(fingerprint.teacher), _dataset(fingerprint.dataset)
        except (ValueError, OSError):
            pass  # the cache is gone: unknown, and the card says so
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
    check_listed(file)
    try:
        return markdown_table(table_rows(json.loads(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(
            f"scores: {file} holds no scores ({error}); give the folder of a `qat-lora eval` run"
        ) from None


def labelled(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what an export measured as people read it: words, and sizes with their unit."""
    units = {name: " MB" if name.endswith("_mb") else "" for name in result}
    return {
        name.removesuffix("_mb").replace("_", " "): f"{value}{units[name]}"
        for name, value in result.items()
        if value is not None
    }


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
        **labelled(card.result),
        "fingerprint of the base": f"`{card.base_sha256}`",
        "licence": card.license or "not given: those of model, teacher and data apply",
    }
    lines = ["---", yaml.safe_dump(front, sort_keys=False).strip(), "---", "", f"# {card.name}", ""]
    lines += ["A language model quantised and recovered with qat-lora.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    use = (USE_WITH_ADAPTER if card.adapter else USE)[card.form]
    lines += ["", "## Use", "", "In this folder:", "", "```python", use, "```", "", "## Scores", ""]
    lines += [card.scores or "None were given with this export.", ""]
    if card.notes:
        lines += ["## What was and was not checked", "", *(f"* {note}" for note in card.notes), ""]
    lines += ["## Made by", "", "```", card.command, "```", ""]
    return "\n".join(lines)

"""The model card of an exported folder: what it is, what made it, what was measured, what was not checked.

Everything is read from files of the earlier commands (the run's config.yaml, the cache's manifest, an evaluation's
scores). What cannot be read is called unknown, never guessed. Paths of the machine are cut to their last part.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qat_lora.cache.storage.store import read_manifest
from qat_lora.config import load_yaml, parse_yaml
from qat_lora.errors import OF_DATA, ConfigError, DamagedFileError, ModelError, errors_explained
from qat_lora.evaluate.report import markdown_table, table_rows
from qat_lora.export.forms import FORMS, display_name
from qat_lora.files.outputs import MARK, check_listed

MODEL, DATASET = "full-precision model", "dataset on the Hub"


@dataclass(frozen=True)
class Card:
    """The content of a model card."""

    name: str
    form: str
    origin: Mapping[str, str]
    base_sha256: str
    bits_per_weight: float | None
    result: Mapping[str, Any]  # what the export measured, as in its result.json
    command: str
    usage: str  # the Python that loads it
    notes: Sequence[str] = ()
    scores: Mapping[str, Any] | None = None  # of an evaluation, by model
    license: str | None = None


def read_origin(config: Any, adapter: Path | None) -> dict[str, str]:
    """Return where a student comes from, for people, by its base's config.json and the run that its adapter is in."""
    quantization: Any = getattr(config, "quantization_config", None) or {}
    plain: dict[str, Any] = quantization.to_dict() if hasattr(quantization, "to_dict") else dict(quantization)
    model, preset = _entry(plain.get("details"), "model", "unknown"), _entry(plain.get("preset"), "name", "none")
    origin = {MODEL: display_name(model), "teacher": "unknown", "data of the recovery": "unknown", "preset": preset}
    if cache := cache_of_run(adapter):
        with contextlib.suppress(ValueError, OSError):  # the cache is gone: the card says unknown
            held = read_manifest(cache).fingerprint
            origin |= {"teacher": display_name(held.teacher), "data of the recovery": dataset_in_words(held.dataset)}
            if dataset := _described(held.dataset)[0].get("dataset"):  # a Hub dataset's; files have no name
                origin[DATASET] = str(dataset)
    return origin


def cache_of_run(adapter: Path | None) -> str | None:
    """Return the KD cache that an adapter's run names, None without one; DamagedFileError: a run of ours is damaged."""
    run = adapter.parent / "config.yaml" if adapter is not None else None
    if run is None or not run.is_file():
        return None
    check_listed(run)
    try:
        cache = load_yaml(run).get("kd_cache_dir")
    except ConfigError as error:
        if (run.parent / MARK).is_file():
            raise DamagedFileError(f"{error}; restore it, or remove it: the card then says less") from None
        return None  # another tool's file
    return None if cache is None else str(cache)


def _entry(group: Any, name: str, otherwise: str) -> str:
    return str(group.get(name, otherwise)) if isinstance(group, dict) else otherwise


def _described(text: str) -> tuple[dict[str, Any], str]:
    """Return a cache's description of its text as JSON, empty where it is none, and what stands behind."""
    try:
        found, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return {}, text
    return (found, text[end:]) if isinstance(found, dict) else ({}, text)


def dataset_in_words(described: str) -> str:
    """Return a cache's description of its text (JSON, then how much of it) in words."""
    found, more = _described(described)
    words = [f"{name} {display_name(str(value))[:40]}" for name, value in found.items() if value not in (None, "")]
    return ", ".join(words) + ("," + more if more else "") if found else display_name(described)


def read_scores(folder: str) -> dict[str, Any]:
    """Return an evaluation's scores by model; ConfigError: the folder holds none."""
    file = Path(folder) / "scores.json"
    check_listed(file)
    remedy = "give the folder of a `qat-lora eval` run"
    with errors_explained(ConfigError, f"scores: {file} holds no scores", *OF_DATA, remedy=remedy):
        scores: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        markdown_table(table_rows(scores))  # what the card shows of them is there
        return scores


def labelled(result: Mapping[str, Any]) -> dict[str, str]:
    """Return an export's measurements for people: words for names, sizes with their unit."""
    known = {name: f"{value}" for name, value in result.items() if value is not None}
    return {n.removesuffix("_mb").replace("_", " "): v + " MB" * n.endswith("_mb") for n, v in known.items()}


def model_card(card: Card) -> str:
    """Return the card as Markdown with the Hub's front matter."""
    front: dict[str, Any] = {
        "license": card.license or "other",
        "library_name": FORMS[card.form].library,
        "pipeline_tag": "image-text-to-text" if "ImageTextToText" in card.usage else "text-generation",
        "tags": ["qat-lora", "quantized", card.form],
    }
    if card.origin[MODEL].count("/") == 1:
        front["base_model"] = card.origin[MODEL]
        front["base_model_relation"] = "adapter" if card.form == "adapter" else "quantized"
    if DATASET in card.origin:
        front["datasets"] = [card.origin[DATASET]]
    students = {name: of for name, of in (card.scores or {}).items() if name != "teacher"}  # its own, or the only one
    own = students.get(card.name) or (next(iter(students.values())) if len(students) == 1 else {})
    names = {"ppl": "perplexity", "kl": "KL to the teacher, nats a token", "top1": "same top-1 as the teacher"}
    known = {key: name for key, name in names.items() if own.get(key) is not None}
    if metrics := [{"type": key, "name": name, "value": own[key]} for key, name in known.items()]:
        held_out = {"name": "held-out text, in Scores below", "type": "text"}
        results = [{"task": {"type": "text-generation"}, "dataset": held_out, "metrics": metrics}]
        front["model-index"] = [{"name": card.name, "results": results}]
    bits = "not quantised" if card.bits_per_weight is None else f"{card.bits_per_weight:.3f} (adapter included)"
    rows = {"form": card.form, **card.origin, "bits per weight of the student": bits, **labelled(card.result)}
    rows["fingerprint of the base"] = f"`{card.base_sha256}`"
    rows["licence"] = card.license or "not given: those of model, teacher and data apply"
    notes = "".join(f"* {note}\n" for note in card.notes)
    told = {"name": card.name, "usage": card.usage, "command": card.command}
    told["facts"] = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    told["scores"] = markdown_table(table_rows(card.scores)) if card.scores else "None were given with this export."
    told["checked"] = f"## What was and was not checked\n\n{notes}\n" if notes else ""
    told["front"] = yaml.safe_dump(front, sort_keys=False).strip()
    return Path(__file__).with_name("card.md").read_text(encoding="utf-8").format(**told)


def check_model_card(card: Path) -> None:
    """Raise a ModelError where a card cannot be read or names no licence."""
    remedy = "`qat-lora export` writes one"
    with errors_explained(ModelError, f"card: {card} cannot be read", *OF_DATA, remedy=remedy, passing=ModelError):
        parts = card.read_text(encoding="utf-8").split("---\n")
        front = parse_yaml(parts[1]) if len(parts) > 2 and not parts[0] else None
    if not isinstance(front, dict) or "license" not in front:
        remedy = "`qat-lora export --license NAME` writes it"
        raise ModelError(f"card: {card} names no licence in its front matter; {remedy}")

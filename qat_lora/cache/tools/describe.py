"""A summary of a cache for people: sizes, the probability outside the top K, a few rows."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.records import to_json
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.location import Place
from qat_lora.errors import CacheError, OutputExistsError
from qat_lora.files.pictures import INK, drawn_to

QUANTILES = (0.5, 0.9, 0.99, 1.0)
SAMPLE_ROWS = 64  # training rows, evenly spread, from which the tail mass is taken
_SHOWN_CHOICES = 3
_SMALLEST_MASS = 1e-6  # left end of the plot; positions with less are drawn there
Decode = Callable[[list[int]], str]  # token ids to text


def describe(path: Place, *, show_rows: int = 2, show_tokens: int = 16, decode: Decode | None = None) -> dict[str, Any]:
    """Return a cache's fingerprint, sizes, tail-mass quantiles and the start of a few rows, as plain JSON values.

    Shards are not checked (`verify_cache` does that), so this is quick on any size. The first `show_tokens` positions
    are shown of `show_rows` rows, as text too where `decode` is of the cache's tokenizer. CacheError: no finished
    cache; CacheDamaged: a record or a size is not what was written.
    """
    dataset = KDCacheDataset(path, verify=False)
    manifest, held = dataset.manifest, dataset.fingerprint
    splits = {}
    for split in fmt.SERIES:
        shards = manifest.shards(split)
        rows, size = manifest.rows(split), sum(shard.bytes for shard in shards)
        splits[split] = {"shards": len(shards), "rows": rows, "tokens": rows * held.length, "bytes": size}
    tokens, size = (sum(split[name] for split in splits.values()) for name in ("tokens", "bytes"))
    chosen, mass = _tail_mass(dataset)
    counted = mass if mass.size else np.zeros(1)
    quantiles = {f"p{q * 100:g}": float(np.quantile(counted, q)) for q in QUANTILES}
    found: dict[str, Any] = {"path": str(dataset.path), "fingerprint": to_json(held), "fingerprint_sha256": held.sha256}
    found |= {"info": manifest.info, "splits": splits, "bytes_per_token": size / tokens}
    by_array = {spec.name: spec.row_bytes / held.length for spec in held.arrays * (1 - held.contents.lzma)}
    found |= {"bytes_per_token_by_array": by_array, "sampled_rows": len(chosen)}
    found["target_fraction"] = mass.size / (len(chosen) * (held.length - 1))
    found["tail_mass"] = {"mean": float(counted.mean()), **quantiles} if held.top_k else None
    return found | {"rows": [_show(dataset, int(row), show_tokens, decode) for row in chosen[:show_rows]]}


def _tail_mass(dataset: KDCacheDataset) -> tuple[np.ndarray, np.ndarray]:
    """Return sampled rows, and the probability outside the top K at their target positions: 1 where K is 0."""
    rows, masses = np.unique(np.linspace(0, len(dataset) - 1, SAMPLE_ROWS).astype(np.int64)), []
    for row in rows:
        batch = dataset.rows([row])
        tails = batch.get("log_tail", np.zeros(batch["target_mask"].shape))
        masses.append(np.exp(tails[batch["target_mask"]], dtype=np.float64))
    return rows, np.concatenate(masses)


def _show(dataset: KDCacheDataset, row: int, tokens: int, decode: Decode | None) -> dict[str, Any]:
    batch = dataset.rows([row], min(_SHOWN_CHOICES, dataset.fingerprint.top_k), ())
    shown = {"row": row, "input_ids": batch["input_ids"][0][:tokens].tolist()}
    if "head_ids" in batch:
        probabilities = np.exp(batch["head_logits"][0] - batch["lse"][0][:, None])
        shown["top_ids"] = batch["head_ids"][0][:tokens].tolist()
        shown["top_probabilities"] = np.round(probabilities[:tokens], 4).tolist()
    if decode is not None:
        shown["tokens"] = [decode([token]) for token in shown["input_ids"]]
        if "top_ids" in shown:
            shown["top_tokens"] = [[decode([token]) for token in choices] for choices in shown["top_ids"]]
    return shown


def plot_tail_mass(path: Place, out: str | Path) -> None:
    """Draw the mass outside the top K as PNG; CacheError: unfinished, K = 0; OutputExistsError; MissingExtraError."""
    out = Path(out)
    if os.path.lexists(out):
        raise OutputExistsError(f"--plot {out}: exists already and was not touched; delete it or choose another name")
    dataset = KDCacheDataset(path, verify=False)
    if not dataset.fingerprint.top_k:
        raise CacheError(f"{path}: holds hidden states instead of a head, so no mass is outside it; leave --plot out")
    _, mass = _tail_mass(dataset)
    with drawn_to(out, size=(7, 4)) as (_, axes):
        axis, edges = axes[0, 0], np.geomspace(_SMALLEST_MASS, 1, 61)
        axis.hist(np.clip(mass, _SMALLEST_MASS, 1), bins=edges, weights=np.full(mass.size, 100 / max(1, mass.size)))
        if mass.size:
            for value, name, style in ((mass.mean(), "mean", "-"), (np.median(mass), "median", "--")):
                axis.axvline(max(value, _SMALLEST_MASS), color=INK, lw=0.8, ls=style, label=f"{name} {value:.2g}")
            axis.legend()
        axis.set(xscale="log", xlim=(_SMALLEST_MASS, 1), ylabel="% of positions")
        axis.set_xlabel(f"probability outside the {dataset.fingerprint.top_k} stored entries (1e-6 or less: first bar)")
        axis.set_title(f"tail mass of {Path(str(path)).name}, {mass.size:,} positions")


def render(description: dict[str, Any]) -> str:
    """Return what `describe` found as text for a terminal."""
    held, masses = description["fingerprint"], (description["tail_mass"] or {}).items()
    told = {**held, **description, "arrays": _stored(held), "t": ", ".join(f"{t:g}" for t in held["temperatures"])}
    split = "{0:<12} {rows:>9,} rows {shards:>6,} shards {1:>12,.1f} MB".format
    splits = [split(name, of["bytes"] / 1e6, **of) for name, of in description["splits"].items()]
    mass = f"tail mass    {', '.join(f'{name} {value:.2g}' for name, value in masses)}\n" if masses else ""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").rstrip()
    rows = itertools.chain.from_iterable(map(_row_lines, description["rows"]))
    return "\n".join([text.format(**told, shards="\n".join(splits), mass=mass), *rows])


def _stored(held: dict[str, Any]) -> str:
    parts = [f"the teacher's {held['top_k']} likeliest ({held['value_dtype']})"] if held["top_k"] else []
    words = {"tail_draws": "{} draws from the tail", "draws": "{} draws", "weights": "weights", "lzma": "compressed"}
    words["tail_entropy"] = "their entropy"
    words["hidden"] = "its hidden state ({} wide)"
    arrays = (text.split(":") for text in held["optional_arrays"])
    return ", ".join([*parts, *(words[name].format(size) for name, size, *_ in arrays)])


def _row_lines(row: dict[str, Any]) -> list[str]:
    words = [*map(_quoted, row["tokens"])] if "tokens" in row else [*map(str, row["input_ids"])]
    plain = f"row {row['row']}: tokens {' '.join(words)}"
    choices = (map(_quoted, names) for names in row["top_tokens"]) if "top_tokens" in row else row.get("top_ids", [])
    pairs = zip(choices, row.get("top_probabilities", []), strict=True)
    expected = [", ".join(f"{name} ({p:.1%})" for name, p in zip(*pair, strict=True)) for pair in pairs]
    if "top_tokens" not in row:
        return [plain, *(f"  after the first: {first}" for first in expected[:1])]
    lines = (f"  {word:<20} {after}" for word, after in zip(words, expected, strict=False))
    return [f"row {row['row']}: token, and what the teacher expects after it", *lines]


def _quoted(token: str) -> str:
    """Return a token as one printable line: text from a cache must not steer the terminal."""
    return '"' + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token) + '"'

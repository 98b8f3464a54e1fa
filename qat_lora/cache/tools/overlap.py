"""How much of an evaluation text the cache has already shown: scores on seen text measure memory, not recovery.

A run of 13 tokens that also occurs in the cache marks its tokens as seen: GPT-3's length (arXiv:2005.14165, appendix
C), which plain language seldom repeats by chance and a changed line survives. Licence headers and idioms do repeat
(5.5 % of held-out files of Python's standard library), so a small share is told and only a larger one is a warning.

The text is small and the cache is not, so the hashes of the text's runs are held, sorted, and the cache's token ids
stream past them. Runs do not cross a document's start; one that the cache's row ends cut is missed, at most 12 a row.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from qat_lora.cache.format.records import Manifest
from qat_lora.cache.storage.location import Location, Place, locate
from qat_lora.cache.storage.store import Shard, read_manifest
from qat_lora.errors import CacheError

RUN = 13
ALARM = 0.1  # share of seen tokens from which an overlap is a warning
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_ROWS_AT_ONCE = 16


def overlap(path: Place, texts: Mapping[str, Sequence[Any]], tokenizer_sha256: str, run: int = RUN) -> dict[str, Any]:
    """Return how many of the counted tokens of texts lie in a run of tokens that the cache's training rows hold.

    `texts` are rows by name, with `input_ids` [L], `loss_mask` [L] and `doc_starts` [L] like `data.packing.PackedRow`.
    Returned are `run`, `tokens` counted, `seen` of them, their `share`, `by_text` (the share of each), and
    `cache_tokens` looked at. CacheError: no finished cache, or one of another tokenizer, whose ids mean other text.
    """
    manifest = read_manifest(path)
    if manifest.fingerprint.tokenizer_sha256 != tokenizer_sha256:
        what = f"{path} was made with another tokenizer than the teacher's, so its token ids cannot be compared"
        raise CacheError(f"kd_cache_dir: {what}; give a cache of this teacher, or leave it out")
    parts = []
    for name, rows in texts.items():
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            chunk = rows[start : start + _ROWS_AT_ONCE]
            parts.append((name, chunk, *_runs(_stack(chunk, "input_ids"), _stack(chunk, "doc_starts"), run)))
    none = np.zeros(1, np.uint64)  # a hash that hardly a run has, so that there is one at least
    wanted = np.unique(np.concatenate([none, *(hashes[whole] for _, _, hashes, whole in parts)]))
    found = np.zeros(len(wanted), np.bool_)
    cache_tokens = 0
    for ids_BL, starts_BL in _cache_rows(locate(path), manifest):
        cache_tokens += ids_BL.size
        hashes, whole = _runs(ids_BL, starts_BL, run)
        at = np.searchsorted(wanted, hashes[whole])
        found[at[wanted.take(at, mode="clip") == hashes[whole]]] = True
    tokens, seen = dict.fromkeys(texts, 0), dict.fromkeys(texts, 0)
    for name, chunk, hashes, whole in parts:
        counts_BL = _stack(chunk, "loss_mask") > 0
        hit = np.zeros_like(whole)
        hit[whole] = found[np.searchsorted(wanted, hashes[whole])]
        covered_BL = np.zeros_like(counts_BL)
        for offset in range(run):
            covered_BL[:, offset : offset + hit.shape[1]] |= hit
        tokens[name] += int(counts_BL.sum())
        seen[name] += int((covered_BL & counts_BL).sum())
    total, total_seen = sum(tokens.values()), sum(seen.values())
    by_text = {name: seen[name] / max(1, tokens[name]) for name in texts}
    figures = {"run": run, "tokens": total, "seen": total_seen, "share": total_seen / max(1, total)}
    return figures | {"by_text": by_text, "cache_tokens": cache_tokens}


def run_hashes(documents: Iterable[np.ndarray], run: int = RUN) -> np.ndarray:
    """Return the hashes of all runs of tokens in documents of token ids [L], sorted, each once."""
    found = [_runs(ids_L[None], np.zeros((1, len(ids_L)), np.bool_), run)[0][0] for ids_L in documents]
    return np.unique(np.concatenate([np.zeros(0, np.uint64), *found]))


def summary(report: dict[str, Any]) -> str:
    """Return one line on an overlap; a warning where a text has more of it than boilerplate explains."""
    shares = report["by_text"]
    by_text = "" if len(shares) < 2 else f" ({', '.join(f'{name} {share:.1%}' for name, share in shares.items())})"
    run = f"a run of {report['run']} tokens that the cache holds too ({report['cache_tokens']:,} tokens looked at)"
    line = f"{report['share']:.1%} of the {report['tokens']:,} evaluation tokens{by_text} lie in {run}"
    if max(shares.values(), default=0.0) < ALARM:
        return line
    return f"warning: {line}; scores on text that was trained on flatter: choose another text"


def _stack(rows: Sequence[Any], name: str) -> np.ndarray:
    return np.stack([getattr(row, name) for row in rows])


def _runs(ids_BL: np.ndarray, starts_BL: np.ndarray, run: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hash of the run from each token on, uint64 [B, L - run + 1], and whether it is of one document."""
    width = max(0, ids_BL.shape[1] - run + 1)
    mixed_BL = (ids_BL.astype(np.uint64) + np.uint64(1)) * _MULTIPLIER
    mixed_BL ^= mixed_BL >> np.uint64(29)
    document_BL = np.cumsum(starts_BL, axis=1)
    hashes = np.zeros((len(ids_BL), width), np.uint64)
    for offset in range(run if width else 0):
        hashes = hashes * _MULTIPLIER + mixed_BL[:, offset : offset + width]
    return hashes, document_BL[:, :width] == document_BL[:, run - 1 : run - 1 + width]


def _cache_rows(place: Location, manifest: Manifest) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield token ids [B, L] and document starts [B, L] of the training rows."""
    length = manifest.fingerprint.length
    for entry in manifest.train:
        for _, part in Shard(place, entry, manifest.fingerprint).parts(_ROWS_AT_ONCE):
            yield part["input_ids"], np.unpackbits(part["doc_starts"], axis=1, count=length, bitorder="little")

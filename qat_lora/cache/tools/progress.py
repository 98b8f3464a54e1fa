"""How far an unfinished build is, and when it will end, from its shards alone: no builder has to report to anybody.

A sidecar says how much of the builder's own text its shard ends with, so rows so far over that share are the rows to
come; the time of the sidecar is the time of the commit. A fleet ends with its slowest builder, and the largest of a
thousand noisy means is far above the truth, so each builder's pace is drawn towards the mean of all by as much as the
scatter of its own intervals explains (empirical Bayes).
"""

import re
import time
from typing import Any

import numpy as np

from qat_lora.cache.build.writer import Partition
from qat_lora.cache.format import layout as fmt
from qat_lora.cache.storage.location import Place, locate
from qat_lora.cache.storage.store import at_once, committed, read_sidecar
from qat_lora.errors import CacheError

_SHOWN = 8


def unfinished(path: Place) -> bool:
    """Tell whether builders have begun there and not ended."""
    place = locate(path)
    return not place.has(fmt.MANIFEST) and bool(committed(place, "train"))


def progress(path: Place, now: float | None = None) -> dict[str, Any]:
    """Return shards done and expected (None where unknown) by builder, shards an hour, and the forecast finish.

    `now` and `finish` are in seconds since 1970. CacheError: nothing is committed there yet.
    """
    place, now = locate(path), time.time() if now is None else now
    times, numbers = place.times(), committed(place, "train")
    if not numbers:
        raise CacheError(f"{place}: holds no shard of a KD cache yet; ask again when its builders have begun")
    builders = read_sidecar(place, fmt.shard_name("train", numbers[0]))[0].builders
    own: list[list[int]] = [[] for _ in range(builders)]
    for number in numbers:
        own[number % builders].append(number)
    last = [fmt.shard_name("train", of_one[-1]) for of_one in own if of_one]
    found = {sidecar.builder: sidecar for sidecar, _ in at_once(place, lambda name: read_sidecar(place, name), last)}
    shares, rows = np.full(builders, np.nan), np.zeros(builders)
    ended = np.array([fmt.part_name(builder) in times for builder in range(builders)])
    limit = re.search(r" first (\d+) rows$", next(iter(found.values())).fingerprint.dataset)
    for builder, sidecar in found.items():
        rows[builder] = sidecar.first_row + sidecar.rows
        shares[builder] = sidecar.cursor.get("share", np.nan) if isinstance(sidecar.cursor, dict) else np.nan
    expected = np.where(ended, rows, rows / shares)
    if limit:
        expected = np.fmin(expected, [Partition(b, builders).of(int(limit[1])) for b in range(builders)])
    expected = np.where(np.isnan(expected), np.nanmean(expected) if not np.isnan(expected).all() else np.nan, expected)
    per_shard = max(1.0, float(np.median([rows[b] / len(own[b]) for b in found])))
    done = np.array([*map(len, own)])
    total = np.where(ended, done, np.maximum(done, np.ceil(expected / per_shard - 1e-6)))
    commits = {b: np.sort([times[f"{fmt.shard_name('train', n)}.json"] for n in own[b]]) for b in found}
    pace = _paces(commits, builders)
    latest = np.array([commits[b][-1] if b in commits else now for b in range(builders)])
    finishes = np.where(ended, latest, np.maximum(latest, now - pace) + (total - done) * pace)
    known = not np.isnan(finishes).any()
    return {
        "builders": [[int(done[b]), int(total[b]) if total[b] == total[b] else None] for b in range(builders)],
        "ended": int(ended.sum()),
        "shards": len(numbers),
        "expected": int(total.sum()) if known else None,
        "shards_an_hour": float(3600 * (1 / pace[~ended]).sum()) if (pace > 0).all() else None,
        "finish": float(finishes.max()) if known else None,
        "slowest": [int(b) for b in np.argsort(-finishes)[:_SHOWN] if not ended[b]],
    }


def _paces(commits: dict[int, np.ndarray], builders: int) -> np.ndarray:
    """Return the seconds from shard to shard of each builder; all the same where intervals are too few to tell."""
    gaps = {b: np.diff(times) for b, times in commits.items() if len(times) > 1}
    if not gaps:
        return np.full(builders, np.nan)
    every = np.concatenate([*gaps.values()])
    means, counts = (np.array([f(gap) for gap in gaps.values()]) for f in (np.mean, len))
    within = sum(((gap - gap.mean()) ** 2).sum() for gap in gaps.values()) / max(1, len(every) - len(gaps))
    between = max(0.0, float(means.var() - np.mean(within / counts)))
    weights = between / (between + within / counts) if between else np.zeros(len(gaps))
    paces = np.full(builders, every.mean())
    paces[[*gaps]] = every.mean() + weights * (means - every.mean())
    return paces


def render(found: dict[str, Any]) -> str:
    """Return what `progress` found as text for a terminal."""
    builders, rate, finish = found["builders"], found["shards_an_hour"], found["finish"]
    of = f"{found['expected'] or 'unknown'} shards, by {len(builders)} builders, {found['ended']} of which have ended"
    ends = time.strftime("%Y-%m-%d %H:%M", time.localtime(finish)) if finish else "unknown"
    pace = f"{f'{rate:,.3g}' if rate else 'unknown'} shards an hour; ends {ends}"
    slowest = (f"{b} ({builders[b][0]} of {builders[b][1] or 'unknown'})" for b in found["slowest"])
    last = ", ".join(slowest) or "none"
    return f"unfinished   {found['shards']:,} of {of}\nforecast     {pace}\nlast         builders {last}"

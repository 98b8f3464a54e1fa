"""How far an unfinished cache is and when it will be finished, from names and times of its files alone.

A builder's pace is the lower median of its times a shard: between commits, or from its last start (the time of its
lock) less what a start takes. Otherwise a builder that was killed in its first shard would pass for a slow one. Kills
and other delays are pooled over all builders, as ratios to the pace: one builder has too few. The finish is the median,
over draws, of the last builder's end, where each shard to come takes a pooled ratio times the pace, and the one in work
no less than it has had. The largest mean forecast would be too late: it is that of the unluckiest figure.
"""

import re
import statistics
import time
from datetime import UTC, datetime
from typing import Any

import numpy as np

from qat_lora.cache.build.writer import Partition
from qat_lora.cache.format import layout as fmt
from qat_lora.cache.storage import store
from qat_lora.cache.storage.location import Place, locate

DRAWS, DELAYED = 200, 1.3  # a shard that takes so many times its pace was delayed
_LIMIT = re.compile(r" first ([0-9]+) rows\Z")  # as `cache build --num-rows` notes it


def progress(path: Place, rows: int | None = None, now: float | None = None) -> dict[str, Any]:
    """Return what an unfinished cache holds and, where its training rows are known, its finish in seconds since 1970.

    `rows` are by default those of `--num-rows`. CacheError: there is no shard yet.
    """
    place, now = locate(path), time.time() if now is None else now
    times = place.times()
    numbers = sorted(n for name in times if (n := fmt.shard_number("train", name.removesuffix(".json"))) is not None)
    if not numbers:
        store.read_manifest(place)  # says what is missing
    sidecar, _ = store.read_sidecar(place, fmt.shard_name("train", numbers[0]))
    noted, builders = _LIMIT.search(sidecar.fingerprint.dataset), sidecar.builders
    rows = rows or (int(noted[1]) if noted else None)
    commits: list[list[float]] = [[] for _ in range(builders)]
    for number in numbers:
        commits[number % builders].append(times[f"{fmt.shard_name('train', number)}.json"])
    ended = [fmt.part_name(builder) in times for builder in range(builders)]
    found = {"path": str(place), "builders": builders, "ended": sum(ended), "shards": len(numbers)}
    found |= {"planned_shards": None, "finish": None, "earliest": None, "latest": None, "last_builder": None}
    if rows is not None:
        starts = [times.get(f"{fmt.LOCK}.{builder}", 0.0) for builder in range(builders)]
        whole = [Partition(builder, builders).of(rows) / sidecar.rows for builder in range(builders)]
        left = [0.0 if end else max(0.0, w - len(c)) for w, c, end in zip(whole, commits, ended, strict=True)]
        found |= {"planned_shards": sum(-int(-w // 1) for w in whole), **_finish(commits, starts, left, now)}
    return found


def _finish(commits: list[list[float]], starts: list[float], left: list[float], now: float) -> dict[str, Any]:
    """Return the finish, the range that nine draws in ten fall into, and the builder that is most often the last."""
    gaps = [np.diff(times) for times in commits]
    if not any(map(len, gaps)):
        return {}
    usual, draw = float(np.median(np.concatenate(gaps))), np.random.default_rng(0)
    firsts = [(c[0] - s, g) for c, s, g in zip(commits, starts, gaps, strict=True) if len(g) and 0 < s < c[0]]
    start_s = max(0.0, statistics.median([first - statistics.median_low(g) for first, g in firsts] or [0.0]))
    fleet = statistics.median([s for c, s in zip(commits, starts, strict=True) if 0 < s < (*c, now)[0]] or [now])
    clean = [_shard_times(c, s, start_s, fleet) for c, s in zip(commits, starts, strict=True)]
    # a quarter of what is usual is no pace: two starts put a shard each
    paces = [statistics.median_low(np.clip(t, usual / 4, None)) if t else 0.0 for t in clean]
    known = max(p for p, c, s in zip(paces, commits, starts, strict=True) if len(c) > 1 or s < (*c, 0.0)[0])
    paces = [min(pace or max(usual, now - s - start_s), known) for pace, s in zip(paces, starts, strict=True)]
    fewest = min(2, max(map(len, gaps)))
    ratios = np.sort(np.concatenate([g / p for g, p in zip(gaps, paces, strict=True) if len(g) >= fewest]))
    calm, lost = ratios[ratios <= DELAYED], ratios[ratios > DELAYED] - 1
    ends = np.full((len(commits), DRAWS), now)
    for builder, (done, shards, pace) in enumerate(zip(commits, left, paces, strict=True)):
        if shards:
            size = int(np.ceil(shards)), DRAWS
            taken = draw.choice(calm, size) if len(calm) else np.ones(size)
            if len(lost):  # a slow builder's shard is exposed for longer, and more of it is lost
                struck = draw.random(size) < len(lost) / len(ratios) * pace / usual
                taken += struck * draw.choice(lost, size) * (1 + usual / pace) / 2
            last = max(starts[builder], done[-1] if done else fleet)
            silence = (now - last) / pace
            longer = ratios[min(np.searchsorted(ratios, silence), len(ratios) - 1) :]
            taken[0] = np.where(taken[0] > silence, taken[0], draw.choice(longer, DRAWS).clip(silence))
            taken[-1] *= shards % 1 or 1
            ends[builder] = last + pace * taken.sum(0)
    early, middle, late = np.quantile(ends.max(0), [0.05, 0.5, 0.95]).tolist()
    last_builder = int(np.bincount(ends.argmax(0)).argmax())
    return {"finish": middle, "earliest": early, "latest": late, "last_builder": last_builder}


def _shard_times(commits: list[float], start: float, start_s: float, fleet: float) -> list[float]:
    """Return what each committed shard took, from the last start where that lies in it."""
    pairs = zip([min(fleet, *commits), *commits], commits, strict=False) if commits else ()
    return [end - start - start_s if begun < start < end else end - begun for begun, end in pairs]


def render(found: dict[str, Any]) -> str:
    """Return what `progress` found as text for a terminal."""
    planned = "" if found["planned_shards"] is None else f" of {found['planned_shards']:,}"
    text = f"{found['path']}: unfinished: {found['shards']:,}{planned} shards, {found['ended']:,} of "
    text += f"{found['builders']:,} builders have ended"
    if found["finish"] is None:
        return f"{text}; for a forecast give the build's training rows as --rows, and wait for two shards of a builder"
    ends = (datetime.fromtimestamp(found[name], UTC) for name in ("finish", "earliest", "latest"))
    return text + "\nfinish {:%Y-%m-%d %H:%M} ({:%d, %H:%M} to {:%d, %H:%M} UTC), last builder {}".format(
        *ends, found["last_builder"]
    )

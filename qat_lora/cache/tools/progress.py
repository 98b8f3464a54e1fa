"""How far an unfinished cache is and when it will be finished, from names and times of its files alone.

A builder's pace is the lower median of its times a shard: between commits, or from its last start (the time of its
lock) less what a start takes. Otherwise a builder that was killed in its first shard would pass for a slow one. Kills
and other delays are pooled over all builders, as ratios to the pace: one builder has too few. The finish is the median,
over draws, of the last builder's end, where each shard to come takes a pooled ratio times the pace, and the one in work
no less than it has had. The largest mean forecast would be too late: it is that of the unluckiest figure.
"""

import itertools
import math
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


def progress(path: Place, rows: int | None = None, now: float | None = None) -> dict[str, Any] | None:
    """Return what an unfinished cache holds and, where its training rows are known, its finish in seconds since 1970.

    `rows` are by default those of `--num-rows`. None for a finished cache; CacheError: there is no shard yet.
    """
    place, now = locate(path), time.time() if now is None else now
    times = place.times()
    numbers = sorted(n for name in times if (n := fmt.shard_number("train", name.removesuffix(".json"))) is not None)
    if fmt.MANIFEST in times or not numbers:
        store.read_manifest(place)  # says what is missing
        return None
    sidecar, _ = store.read_sidecar(place, fmt.shard_name("train", numbers[0]))
    noted, builders = _LIMIT.search(sidecar.fingerprint.dataset), sidecar.builders
    found: dict[str, Any] = {"path": str(place), "builders": builders, "shards": len(numbers), "planned_shards": None}
    found |= {"ended": sum(fmt.part_name(i) in times for i in range(builders)), "finish": None, "last_builder": None}
    if rows := rows or (int(noted[1]) if noted else None):
        commits: list[list[float]] = [[] for _ in range(builders)]
        for number in numbers:
            commits[number % builders].append(times[f"{fmt.shard_name('train', number)}.json"])
        starts = [times.get(f"{fmt.LOCK}.{i}", 0.0) for i in range(builders)]
        shards = [Partition(i, builders).of(rows) / sidecar.rows for i in range(builders)]
        found["planned_shards"] = sum(map(math.ceil, shards))
        left = [0.0 if fmt.part_name(i) in times else max(0.0, shards[i] - len(commits[i])) for i in range(builders)]
        if max(map(len, commits)) > 1:
            found |= _finish(commits, starts, left, now)
    return found


def _finish(commits: list[list[float]], starts: list[float], left: list[float], now: float) -> dict[str, Any]:
    """Return the finish, and the builder that is most often the last."""
    gaps, draw, every = [np.diff(times) for times in commits], np.random.default_rng(0), range(len(commits))
    usual, ends = float(np.median(np.concatenate(gaps))), np.full((len(commits), DRAWS), now)
    whole = [i for i in every if commits[i] and 0 < starts[i] < commits[i][0]]  # not started again since
    firsts = [commits[i][0] - starts[i] - statistics.median_low(gaps[i]) for i in whole if len(gaps[i])]
    start_s = max(0.0, statistics.median(firsts or [0.0]))
    begun = statistics.median([starts[i] for i in whole] or [min(c[0] for c in commits if c) - usual])
    paces, known = [], usual  # no builder is slower than the slowest of which it is known
    for i in every:
        pairs = itertools.pairwise([min([begun, *commits[i]]), *commits[i]])
        took = [end - starts[i] - start_s if last < starts[i] < end else end - last for last, end in pairs]
        took = took or [max(usual, now - starts[i] - start_s)]
        paces.append(max(usual / 4, statistics.median_low(took)))  # two starts may put a shard each
        known = max(known, paces[i]) if len(commits[i]) > 1 or i in whole else known
    paces = [min(pace, known) for pace in paces]
    fewest = min(2, max(map(len, gaps)))
    ratios = np.sort(np.concatenate([gaps[i] / paces[i] for i in every if len(gaps[i]) >= fewest]))
    calm, lost = np.append(ratios[ratios <= DELAYED], 1), np.append(ratios[ratios > DELAYED], 1) - 1
    for i in every:
        if left[i]:
            size, slow = (math.ceil(left[i]), DRAWS), paces[i] / usual
            # a slow builder's shard is exposed for longer, and more of it is lost
            struck = draw.random(size) < len(lost) / len(ratios) * slow
            taken = draw.choice(calm, size) + struck * draw.choice(lost, size) * (1 + 1 / slow) / 2
            last = max([starts[i], *(commits[i] or [begun])])
            silence = (now - last) / paces[i]
            longer = ratios[min(np.searchsorted(ratios, silence), len(ratios) - 1) :]
            taken[0] = np.where(taken[0] > silence, taken[0], draw.choice(longer, DRAWS).clip(silence))
            taken[-1] *= left[i] % 1 or 1
            ends[i] = last + paces[i] * taken.sum(0)
    return {"finish": float(np.median(ends.max(0))), "last_builder": int(np.bincount(ends.argmax(0)).argmax())}


def render(found: dict[str, Any]) -> str:
    """Return what `progress` found as text for a terminal."""
    ends = "not known yet: give the training rows as --rows, and wait for a builder's second shard"
    if found["finish"] is not None:
        finish = datetime.fromtimestamp(found["finish"], UTC)
        ends = f"{finish:%Y-%m-%d %H:%M} UTC, last builder {found['last_builder']}"
    text = "{path}: unfinished: {shards:,} of {planned_shards} shards; {ended:,} of {builders:,} builders have ended; "
    return f"{text}finish {{ends}}".format_map({**found, "ends": ends})

"""The cost of a build, measured instead of guessed: a few real batches, no file touched.

The rate of a teacher follows from its size only within a factor of three or so, depending on device, number format
and vocabulary; three batches tell it within a few percent. Tokenising is in the measured time, since it runs
between forwards; packing and writing are not, since they run behind them. Bytes are computed, not measured: the
layout of a shard is a pure function of its rows.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable
from typing import NamedTuple

from tqdm import tqdm

from qat_lora.cache.build.builder import ForwardSettings, run_batch
from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.records import Fingerprint
from qat_lora.cache.storage.location import LocalFolder, Place, locate
from qat_lora.data.packing import PackedRow
from qat_lora.errors import TextError
from qat_lora.types import LanguageModel

TIMED_BATCHES = 3


class Forecast(NamedTuple):
    """The cost of a build, or of one builder's share of it."""

    rows: int
    """Training rows; with a row limit the limit, unless the text was seen to end before."""
    eval_rows: int
    tokens: int
    tokens_per_second: float
    hours: float
    bytes: int
    bytes_per_token: float
    free_bytes: int | None
    """On the file system of the cache folder; None on an object store, which tells of no end."""

    def lines(self) -> str:
        """Return it as text for a terminal."""
        room = "unknown: an object store tells of no limit"
        if self.free_bytes is not None:
            enough = self.free_bytes > self.bytes
            verdict = "enough" if enough else "NOT ENOUGH: choose another --out or fewer --num-rows"
            room = f"{self.free_bytes / 1e6:,.1f} MB, {verdict}"
        return (
            f"rows      {self.rows:,} for training, {self.eval_rows:,} for evaluation, {self.tokens:,} tokens\n"
            f"time      {self.hours:,.3g} hours at {self.tokens_per_second:,.0f} tokens a second\n"
            f"size      {self.bytes / 1e6:,.1f} MB, {self.bytes_per_token:.0f} bytes a token\n"
            f"free      {room}"
        )


class Size(NamedTuple):
    """What a build is to write beyond what its rows say."""

    eval_rows: int = 0
    """Rows of the evaluation split that this build writes."""
    max_rows: int | None = None
    """The build stops there."""
    shard_rows: int | None = None
    """Rows of a shard; default as in `CacheWriter`."""
    lm_head_bytes: int = 0
    """Of the LM head, which is stored once."""


def forecast(
    teacher: LanguageModel,
    rows: Iterable[PackedRow],
    fingerprint: Fingerprint,
    out: Place,
    size: Size,
    settings: ForwardSettings,
    *,
    quiet: bool = False,
) -> Forecast:
    """Time a few batches and say what building the rows will take.

    Args:
        rows: the training rows from their beginning. Without `max_rows` all of them are packed, to be counted.
        out: the cache folder or URL; it need not exist and is not made.
        quiet: no progress bar while counting.

    Raises:
        TextError: not a single row.
    """
    batch_rows, max_rows, eval_rows = settings.batch_rows, size.max_rows, size.eval_rows
    rest = iter(rows)
    first = list(itertools.islice(rest, min(batch_rows, max_rows or batch_rows)))
    if not first:
        raise TextError("text: has no row to time; give more text")
    run_batch(teacher, first, fingerprint, settings)  # compiles, fills caches
    seen, durations, ended = len(first), [], False
    for _ in range(TIMED_BATCHES):
        begun = time.perf_counter()
        batch = list(itertools.islice(rest, batch_rows))
        ended = len(batch) < batch_rows
        run_batch(teacher, batch or first, fingerprint, settings)
        durations.append(time.perf_counter() - begun)
        seen += len(batch)
    if max_rows is None:
        seen += sum(1 for _ in tqdm(rest, desc="count", unit="row", disable=quiet, dynamic_ncols=True))
    count = seen if max_rows is None else min(seen, max_rows) if ended else max_rows
    per_shard = size.shard_rows or fmt.default_shard_rows(fingerprint.arrays)
    total_bytes = size.lm_head_bytes
    for full, last in (divmod(part, per_shard) for part in (count, eval_rows)):
        for shards, of in ((full, per_shard), (int(last > 0), last)):  # sidecars and manifest add some 2 KB a shard
            total_bytes += shards * fmt.layout(fingerprint.arrays, of, fingerprint.sha256).total_bytes
    tokens = (count + eval_rows) * fingerprint.length
    place = locate(out)
    rate = batch_rows * fingerprint.length / statistics.median(durations)
    return Forecast(
        rows=count,
        eval_rows=eval_rows,
        tokens=tokens,
        tokens_per_second=rate,
        hours=tokens / rate / 3600,
        bytes=total_bytes,
        bytes_per_token=total_bytes / tokens,
        free_bytes=place.free_bytes() if isinstance(place, LocalFolder) else None,
    )

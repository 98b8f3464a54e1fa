"""A KD cache as training data: row numbers become batches, in the order that `qat_lora.data.shuffle` computes.

Before the first row is served everything is checked: seals, names, sizes, and by default the sha256 of every shard (1
to 2 GB/s), since a flipped bit reads as a slightly different teacher and no training run would notice. After that a row
is read, compared with its CRC-32 and decoded on demand: a cache may be larger than memory, and one that changes during
a run of days is an error that names shard and row (`storage.store`).

Others may join a cache while a run goes on: rows of a text, and later rows that the student wrote (`MixedCaches`). From
its step on, rows of a later cache replace a share of each step's. So the order is a pure function of the step here too:
a run resumes at any of them, and up to the first later cache it is the run without.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.codec import OPTIONAL, decode_row, empty_batch, mask_row, strange_ids
from qat_lora.cache.format.lm_head import check_lm_head, read_lm_head
from qat_lora.cache.format.records import Fingerprint, ShardEntry
from qat_lora.cache.storage.location import Place, locate
from qat_lora.cache.storage.store import Shard, at_once, check_entry, most_open, read_manifest
from qat_lora.config import option, settings
from qat_lora.data.shuffle import Indices, ShuffledRows, global_batch
from qat_lora.errors import CacheDamaged, CacheError, ConfigError
from qat_lora.types import Batch, LMHead, VerifyRows

_CHECK_EVERY = {"all": 1, "sampled": 16, "off": 0}  # one row of so many is compared with its CRC-32


class KDCacheDataset(ShuffledRows):
    """A KD cache as training data, in a folder or behind a URL such as gs://bucket/cache, given as text.

    Args:
        preload: keep the encoded shards in memory; otherwise rows are read from the files.
        k: serve the first k of K entries; the others join the tail. The cached tail draws are from behind all K, so
            `rows` refuses to serve them where k < K, unless `optional` leaves them out.
        temperatures: at which `lse` and `log_tail` are served; each must be in the cache.
        verify: check every shard's sha256 when opening. Without it, only names, sizes, seals and headers are checked;
            from behind a URL, shards then come (and are checked) when they are first needed.
        verify_rows: which rows are compared with their CRC-32 as they are read: `all`, `sampled` (one of 16) or `off`.

    CacheError: no finished cache, a split without rows, a k or temperature that is not there.
    CacheDamaged: bytes are not what was written; the shard is named. Reading rows raises it too, and names the row.
    """

    def __init__(
        self,
        path: Place,
        preload: bool = False,
        k: int | None = None,
        split: str = "train",
        temperatures: Sequence[float] = (1.0,),
        *,
        verify: bool = True,
        verify_rows: VerifyRows = "all",
    ) -> None:
        if split not in fmt.SERIES:
            raise CacheError(f"split: {split!r} is unknown; allowed: train, eval")
        self.path, self.split, self.temperatures = locate(path), split, tuple(temperatures)
        self.manifest = read_manifest(self.path)
        self.fingerprint, self._entries = self.manifest.fingerprint, self.manifest.shards(split)
        self._ends = np.cumsum([entry.rows for entry in self._entries], dtype=np.int64)
        self.optional: Sequence[str] = OPTIONAL  # of the arrays that a cache has on request only, those served
        self._place, self._preload, self._verify_rows = path, preload, verify_rows
        self._check_every, self._served = _CHECK_EVERY[verify_rows], 0

        kept = self._check_files(verify, preload)
        # Of the open ones the least recently used is closed. Not a method: the cache would keep the dataset alive.
        place, entries, held = self.path, self._entries, self.fingerprint
        opened = functools.lru_cache(most_open())(lambda number: Shard(place, entries[number], held))
        self._shard: Callable[[int], Shard] = kept.__getitem__ if preload else opened
        self.k = _check_request(self.fingerprint, k, self.temperatures)
        if not len(self):
            raise CacheError(f"{path}: has no rows in the {split} split; build it with --eval-rows to have one")

    def _check_files(self, verify: bool, preload: bool) -> list[Shard]:
        """Check all shards of both splits; with `preload`, return those of this one, in order."""
        check_lm_head(self.path, self.fingerprint, whole=verify)
        threads = None if verify or self.path.far else 1  # several have nothing to wait for

        def check(entry: ShardEntry) -> Shard | None:
            check_entry(self.path, entry, self.fingerprint)
            keep = preload and fmt.shard_number(self.split, entry.shard) is not None
            if self.path.far and not (verify or keep):
                return None
            shard = Shard(self.path, entry, self.fingerprint, preload=keep)
            if verify:
                shard.check_sha256()
            return shard if keep else None

        every = (at_once(self.path, check, self.manifest.shards(split), threads) for split in fmt.SERIES)
        return [shard for shards in every for shard in shards if shard is not None]

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def rows(self, indices: Indices, k: int | None = None, optional: Sequence[str] | None = None) -> Batch:
        """Return rows as numpy arrays (see `types.Batch`), in the order asked; -1 gives a fully masked row.

        `k` entries of a position and of `codec.OPTIONAL` only the arrays `optional`, instead of the dataset's own.
        CacheError: a row that is not there, tail draws and k < K; CacheDamaged: a row is not what was written, or
        speaks of tokens outside the vocabulary.
        """
        k = self.k if k is None else k
        optional = self.optional if optional is None else optional
        held, temperatures = self.fingerprint, self.temperatures
        if k < held.top_k and "tail_draw_ids" in optional and (draws := held.contents.tail_draws):
            drawn = f"the cache's draws are from the tail behind {held.top_k} entries, and do not go with {k} of them"
            remedy = f"give --estimator ghost, or build a cache with --top-k {k} --tail-draws {draws}"
            raise CacheError(f"k: {drawn}; leave --head-k out, {remedy}")
        wanted = np.asarray(indices, np.int64)
        if wanted.ndim != 1 or ((wanted < -1) | (wanted >= len(self))).any():
            raise CacheError(f"rows: {wanted.tolist()!r}; allowed: 0 to {len(self) - 1}, or -1 for padding")
        batch = empty_batch(len(wanted), held, k, temperatures, optional)

        for place, (row, shard) in enumerate(zip(wanted, np.searchsorted(self._ends, wanted, "right"), strict=True)):
            out = {name: array[place] for name, array in batch.items()}
            if row < 0:
                mask_row(held, k, temperatures, out)
                continue
            inside = int(row - self._ends[shard]) + self._entries[shard].rows
            self._served += 1
            check = self._check_every > 0 and self._served % self._check_every == 0
            try:
                opened = self._shard(int(shard))
            except CacheDamaged as error:
                raise CacheDamaged(f"{error}; its row {inside} was wanted") from None
            arrays = opened.rows(inside, check=check)
            decode_row({name: array[0] for name, array in arrays.items()}, held, k, temperatures, out)
            if wrong := strange_ids(out, held.vocab_size):
                name = self._entries[shard].shard
                raise CacheDamaged(f"{self.path}/{name}: row {inside} has {wrong}; restore the shard from a copy")
        return batch

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return one row without its first axis, for a torch DataLoader; negative numbers count from the end."""
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self):
            raise IndexError(f"row {index} of {len(self):,}")  # ends a plain `for row in dataset`
        return {name: array[0] for name, array in self.rows([row]).items()}

    def __reduce__(self) -> tuple[Any, ...]:
        """Let worker processes open the cache again, without checking every byte again."""
        again = functools.partial(type(self), verify=False, verify_rows=self._verify_rows)
        made_of = (self._place, self._preload, self.k or None, self.split, self.temperatures)
        return again, made_of, {"optional": self.optional}

    def teacher_lm_head(self) -> LMHead:
        """Return the teacher's LM head of a cache that was built with `--hidden`, as `lm_head.read_lm_head` does."""
        return read_lm_head(self.path, self.fingerprint)

    def check_student(self, tokenizer_sha256: str | None, vocab_size: int, max_positions: int | None = None) -> None:
        """Raise a CacheError that names what does not fit unless a student can learn from this cache.

        Its tokenizer is compared where it is known, `vocab_size` are the rows of its LM head that are not padding,
        `max_positions` tokens are the longest row that it can read.
        """
        held = self.fingerprint
        if tokenizer_sha256 is not None and tokenizer_sha256 != held.tokenizer_sha256:
            made = f"the cache {self.path} was made with {held.tokenizer_sha256[:16]}…; ids would mean other words"
            remedy = "build a cache with a teacher that shares the student's tokenizer"
            raise CacheError(f"tokenizer: the student's is {tokenizer_sha256[:16]}…, {made}: {remedy}")
        if vocab_size < held.vocab_size:
            what = f"the student has {vocab_size:,} entries, the cache {self.path} speaks of {held.vocab_size:,}"
            allowed = f"allowed: as many or more: build the cache with --vocab-size {vocab_size}"
            raise CacheError(f"vocab_size: {what}; {allowed}")
        if max_positions is not None and max_positions < held.length:
            what = f"rows have {held.length:,} tokens, the student reads at most {max_positions:,}"
            raise CacheError(f"length: {what}; build a cache with --length {max_positions} or less")


def _check_request(fingerprint: Fingerprint, k: int | None, temperatures: Sequence[float]) -> int:
    """Return the k to serve; 0 where the cache has no top K, and then any temperature will do."""
    if not fingerprint.top_k:
        if k:
            raise CacheError(f"k: {k} entries were asked for; this cache holds hidden states and no head: give no k")
        return 0
    k = fingerprint.top_k if k is None else k
    if not 1 <= k <= fingerprint.top_k:
        raise CacheError(f"k: {k} entries were asked for; allowed: 1 to {fingerprint.top_k}, what the cache holds")
    for temperature in temperatures:
        if temperature not in fingerprint.temperatures:
            held = ", ".join(f"{t:g}" for t in fingerprint.temperatures)
            others = "the tail at another temperature cannot be computed from it: train at one of these, or build with"
            remedy = f"{others} --temperatures {held.replace(', ', ',')},{temperature:g}"
            raise CacheError(f"temperature: {temperature:g} is not in the cache, which holds {held}; {remedy}")
    return k


@settings
class LaterConfig:
    """Which caches join the first one, and when."""

    later_caches: tuple[str, ...] = option((), "caches as PATH@STEP, read after that step", unit="list")
    later_share: float = option(0.25, "share of a step's rows that are the newest later cache's", above=0, max=1)

    def __post_init__(self) -> None:
        if (steps := [-1, *(step for _, step in self.parsed)]) != sorted(set(steps)):
            raise ConfigError(f"later_caches: {','.join(self.later_caches)}; allowed: PATH@STEP, steps rising")

    @property
    def parsed(self) -> list[tuple[str, int]]:
        """The caches with the steps after which they join."""
        parts = [text.rpartition("@") for text in self.later_caches]
        return [(path, int(step) if path and step.isdecimal() else -1) for path, _, step in parts]


class MixedCaches(KDCacheDataset):
    """A KD cache, opened like one, with rows of others in its `batches`; these are numbered behind its own."""

    _later: tuple[tuple[int, int, KDCacheDataset, float], ...] = ()  # steps before it, rows before its, it, its share

    def join(self, later: LaterConfig, until: int) -> None:
        """Open the caches that join before a step; CacheError: one has not the arrays, or the teacher, of this."""
        first = len(self)
        for path, step in (joined for joined in later.parsed if joined[1] < until):  # the others need not be there
            how = {"temperatures": self.temperatures, "verify_rows": self._verify_rows}
            found = KDCacheDataset(path, self._preload, self.k or None, **how)  # type: ignore[arg-type]
            here = self.fingerprint
            there = found.fingerprint
            own = here.contents
            held = there.contents if own.tail_entropy else there.contents._replace(tail_entropy=0)  # need not be read
            same = {
                "teacher_sha256": there.teacher_sha256 == here.teacher_sha256,
                "tokenizer_sha256": there.tokenizer_sha256 == here.tokenizer_sha256,
                "contents": held == own,
            }
            for name, is_same in same.items():
                if not is_same:
                    raise CacheError(f"later_caches: {path} has another {name} than {self.path}; build it alike")
            self._later, first = (*self._later, (step, first, found, later.later_share)), first + len(found)

    def rows(self, indices: Indices, k: int | None = None, optional: Sequence[str] | None = None) -> Batch:
        """Return rows of all caches as `KDCacheDataset.rows` does."""
        k, optional = self.k if k is None else k, self.optional if optional is None else optional
        own, parts = np.array(indices, np.int64), []
        for _, first, dataset, _ in self._later:
            at = np.flatnonzero((own >= first) & (own < first + len(dataset)))
            parts.append((at, dataset.rows(own[at] - first, k, optional)))
            own[at] = -1
        batch = super().rows(own, k, optional)
        for at, part in parts:
            for name in batch:
                batch[name][at] = part[name]
        return batch

    def order(self, step: int, global_batch_rows: int, seed: int) -> np.ndarray:
        """Return the row numbers of a step, the last ones those of the newest cache that has joined."""
        order = super().order(step, global_batch_rows, seed)
        for begin, first, dataset, share in [joined for joined in self._later if joined[0] <= step][-1:]:
            rows = global_batch(len(dataset), step - begin, max(1, round(share * global_batch_rows)), seed)
            order[-len(rows) :] = np.where(rows < 0, -1, rows + first)
        return order

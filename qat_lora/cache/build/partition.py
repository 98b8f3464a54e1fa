"""Several builders fill one cache: how documents and shards are divided, and which builder writes the manifest.

Builder i of n owns the documents j with j mod n = i and the shard numbers j mod n = i. It never waits for another and
never writes a name that another writes, so builders may run on machines that share nothing but the folder, and each
resumes by itself. On an object store, where a put never replaces an object, they need no lock either. A coordinator,
or documents drawn from a common queue, would balance the load better, but then the rows would depend on timing, and
no killed build could be continued to the same bytes.

A builder whose rows have ended writes a record of its own (`b-000001.json`). The builder that finds all n of them
writes the manifest, under a lock; after a crash between the last record and the manifest, running any of the builders
again writes it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.records import Fingerprint, Part, ShardEntry, parse
from qat_lora.cache.storage.location import Location
from qat_lora.cache.storage.store import read_sidecars
from qat_lora.errors import CacheDamaged, ConfigError, OutputExistsError

_WRITTEN = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")


class Partition(NamedTuple):
    """Builder number `builder` of `builders`."""

    builder: int = 0
    builders: int = 1

    @classmethod
    def parse(cls, text: str) -> Partition:
        """Read `i/n`; ConfigError for anything else."""
        match = _WRITTEN.fullmatch(text)
        if match is None or int(match[1]) >= int(match[2]):
            raise ConfigError(f"builder: {text!r} does not fit; allowed: i/n with i from 0 to n - 1, for example 0/2")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        """Return what `parse` reads."""
        return f"{self.builder}/{self.builders}"

    def shard_name(self, split: str, index: int) -> str:
        """Return the name of this builder's shard number `index`."""
        return fmt.shard_name(split, index * self.builders + self.builder)

    def of(self, rows: int) -> int:
        """Return this builder's part of a number of rows; all parts sum to it and differ by at most one."""
        return rows * (self.builder + 1) // self.builders - rows * self.builder // self.builders


def read_part(folder: Location, partition: Partition, fingerprint: Fingerprint) -> Part | None:
    """Return a builder's record of having ended, None while it has not.

    Raises:
        CacheDamaged: it is not what was written.
        OutputExistsError: it belongs to another cache, or to a build by another number of builders.
    """
    name = fmt.part_name(partition.builder)
    file = f"{folder}/{name}"
    try:
        part = parse(Part, folder.read(name, fmt.SIDECAR_LIMIT_BYTES), file)
    except FileNotFoundError:
        return None
    if part.builder != partition.builder:
        raise CacheDamaged(f"{file}: is the record of builder {part.builder}; restore it from a copy")
    if part.builders != partition.builders or part.fingerprint != fingerprint:
        raise OutputExistsError(
            f"--out {folder}: builder {part.builder} of {part.builders} has written another cache there than builder "
            f"{partition} was asked for; nothing was touched: give all builders the same settings, or another --out"
        )
    return part


def gather(folder: Location, builders: int, fingerprint: Fingerprint) -> dict[str, list[ShardEntry]]:
    """Return all builders' shards in row order; CacheDamaged unless all have ended and their shards are there."""
    gathered: dict[str, list[ShardEntry]] = {}
    for split in fmt.SERIES:
        gathered[split] = []
        for number in range(builders):
            partition = Partition(number, builders)
            found = list(read_sidecars(folder, split, number, builders))
            part = read_part(folder, partition, fingerprint)
            wanted = -1 if part is None else getattr(part, f"{split}_shards")
            if len(found) != wanted or any(sidecar.fingerprint != fingerprint for sidecar, _ in found):
                raise CacheDamaged(
                    f"{folder}/{partition.shard_name(split, len(found))}: builder {partition} wrote {wanted} {split} "
                    f"shards, {len(found)} are there; restore the folder from a copy, or delete that builder's files "
                    f"(shard numbers that leave {number} when divided by {builders}, and {fmt.part_name(number)})"
                )
            gathered[split] += [entry for _, entry in found]
        gathered[split].sort(key=lambda entry: entry.shard)
    return gathered

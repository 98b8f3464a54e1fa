"""The commands over the files of a finished cache, without a device: verify, info, export, pack, unpack, push, pull."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
from tqdm.auto import tqdm

from qat_lora.cache.format.records import ShardEntry
from qat_lora.cache.storage.store import Progress, read_manifest, verify_cache
from qat_lora.cache.tools import progress
from qat_lora.cache.tools.describe import describe, plot_tail_mass, render
from qat_lora.cache.tools.transport import export_parquet, pack_cache, unpack_cache
from qat_lora.errors import CacheError
from qat_lora.terminal import echo


@contextlib.contextmanager
def _byte_bar(words: str, quiet: bool, shards: Iterable[ShardEntry] = ()) -> Iterator[Progress]:
    """Show a bar over the bytes of some shards, or of unknown ones; yield what is called with each that was read."""
    total = sum(shard.bytes for shard in shards) or None
    with tqdm(total=total, desc=words, unit="B", unit_scale=True, disable=quiet) as bar:
        yield lambda _shard, read: bar.update(read)


def _show(as_json: bool, result: Mapping[str, Any], line: str) -> None:
    echo(json.dumps(result) if as_json else line)


def verify(path: str, quiet: bool, as_json: bool) -> None:
    """Print that every byte of a cache is what was written; CacheDamaged names the first shard that is not."""
    with _byte_bar("verify", quiet, read_manifest(path).all_shards) as read:
        report = verify_cache(path, read)
    strangers = f"; files that are not its own: {', '.join(report.strangers)}" if report.strangers else ""
    size = f"{report.bytes / 1e6:,.1f} MB in {report.seconds:.1f} s"
    line = f"{path}: intact: {report.shards} shards, {report.rows:,} rows, {size}{strangers}"
    _show(as_json, {"intact": True, **report._asdict()}, line)


def info(path: str, tokenizer: str | None, plot: str | None, rows: int | None, as_json: bool) -> None:
    """Print what is in a cache, or how far an unfinished one is; CacheError: another tokenizer than its teacher's."""
    from qat_lora.files.finite import json_text

    if found := progress.progress(path, rows):
        return echo(json_text(found, path, indent=2) if as_json else progress.render(found))
    decode = None
    if tokenizer is not None:
        from qat_lora.models.load import load_tokenizer, tokenizer_sha256

        teachers, held = load_tokenizer(Path(tokenizer)), read_manifest(path).fingerprint.tokenizer_sha256
        if tokenizer_sha256(teachers) != held:
            other = f"the one in {tokenizer} is {tokenizer_sha256(teachers)[:16]}…, the cache {path} was made with"
            remedy = "give the folder of its teacher or leave --tokenizer out"
            raise CacheError(f"tokenizer: {other} {held[:16]}…; {remedy}")
        decode = teachers.decode
    description = describe(path, decode=decode)
    if plot is not None:
        plot_tail_mass(path, plot)
    echo(json_text(description, path, indent=2, default=str) if as_json else render(description))


def export(path: str, parquet: bool, out: str, split: str, quiet: bool, as_json: bool) -> None:
    """Write a split of a cache as Parquet."""
    if not parquet:
        raise click.UsageError("no form given: give --parquet", click.get_current_context())
    with _byte_bar("export", quiet, read_manifest(path).shards(split)) as read:
        result = export_parquet(path, out, split, progress=read)
    _show(as_json, result, f"{result['rows']:,} rows, {result['bytes'] / 1e6:,.1f} MB, written to {out}")


def _transport(words: str, source: str, out: str, quiet: bool, as_json: bool) -> None:
    work = {"pack": pack_cache, "unpack": unpack_cache}[words]
    with _byte_bar(words, quiet or as_json) as read:
        report = work(source, out, read)
    sizes = f"{report['cache_bytes'] / 1e6:,.1f} MB as a cache, {report['packed_bytes'] / 1e6:,.1f} MB packed"
    line = f"{out}: {report['shards']} shards, {sizes} ({report['packed_bytes_per_token']:.0f} bytes a token)"
    _show(as_json, report, line)


pack, unpack = partial(_transport, "pack"), partial(_transport, "unpack")


def push(
    path: str, repo: str, license: str, public: bool, allow_paths: bool, dry_run: bool, quiet: bool, as_json: bool
) -> None:
    """Check a cache and send it."""
    from qat_lora.export.hub import check_cache, check_repo, push_cache

    check_repo(repo)
    with _byte_bar("verify", quiet, shards := read_manifest(path).all_shards) as read:
        folder, manifest = check_cache(path, allow_paths, read)
    url = None if dry_run else push_cache(folder, manifest, repo, license, not public)
    size, ended = sum(shard.bytes for shard in shards), f"fit to go to {repo}; nothing was sent (--dry-run)"
    line = f"{path}: {len(shards)} shards, {size / 1e6:,.1f} MB, {f'sent: {url}' if url else ended}"
    _show(as_json, {"repo": repo, "bytes": size, "shards": len(shards), "url": url}, line)


def pull(repo: str, out: str, revision: str | None, quiet: bool, as_json: bool) -> None:
    """Fetch a cache and verify it."""
    from qat_lora.export.hub import check_repo, pull_cache

    check_repo(repo)
    with _byte_bar("verify", quiet) as read:
        shards = pull_cache(repo, Path(out), revision, read).all_shards
    size = sum(shard.bytes for shard in shards)
    line = f"{out}: intact: {len(shards)} shards, {size / 1e6:,.1f} MB from {repo}"
    _show(as_json, {"out": out, "repo": repo, "shards": len(shards), "bytes": size}, line)

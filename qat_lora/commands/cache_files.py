"""The commands over the files of a finished cache, without a device: verify, info, export, pack, unpack, push, pull."""

import json
from pathlib import Path
from typing import Any

import click

from qat_lora.errors import CacheError
from qat_lora.registry import COMMANDS
from qat_lora.terminal import echo


def _byte_bar(words: str, total_bytes: int | None, quiet: bool) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total_bytes, desc=words, unit="B", unit_scale=True, disable=quiet)


@click.command("verify")
@click.argument("path")
@click.option("--quiet", is_flag=True, help="no progress bar [default: off]")
@click.option("--json", "as_json", is_flag=True, help="print the result as JSON [default: off]")
def verify(path: str, quiet: bool, as_json: bool) -> None:
    """Read every byte of a cache; exit code 1 and the shard's name on any damage."""
    from qat_lora.cache.storage.store import read_manifest, verify_cache

    total = sum(shard.bytes for shard in read_manifest(path).all_shards)
    with _byte_bar("verify", total, quiet) as bar:
        report = verify_cache(path, lambda _shard, read: bar.update(read))
    strangers = f"; files that are not its own: {', '.join(report.strangers)}" if report.strangers else ""
    size = f"{report.bytes / 1e6:,.1f} MB in {report.seconds:.1f} s"
    line = f"{path}: intact: {report.shards} shards, {report.rows:,} rows, {size}{strangers}"
    echo(json.dumps({"intact": True, **report._asdict()}) if as_json else line)


@click.command("info")
@click.argument("path")
@click.option("--tokenizer", metavar="FOLDER", help="the teacher's folder; then rows are shown as text [default: ids]")
@click.option("--plot", metavar="FILE", help="draw the mass that the head misses as PNG [default: no plot]")
@click.option("--rows", type=click.IntRange(1), help="training rows planned, for a forecast [default: --num-rows]")
@click.option("--json", "as_json", is_flag=True, help="print it as JSON [default: off]")
def info(path: str, tokenizer: str | None, plot: str | None, rows: int | None, as_json: bool) -> None:
    """Show what is in a cache: sizes, origin, the mass that the head misses, a few rows; or its finish."""
    from qat_lora.cache.storage.store import read_manifest
    from qat_lora.cache.tools import progress
    from qat_lora.cache.tools.describe import describe, plot_tail_mass, render
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


@click.command("export")
@click.argument("path")
@click.option("--parquet", is_flag=True, help="the form: one Parquet file, a record a row (required)")
@click.option("--out", metavar="FILE", required=True, help="the file, which must not exist (required)")
@click.option("--split", type=click.Choice(["train", "eval"]), default="train", help="its rows [default: train]")
@click.option("--quiet", is_flag=True, help="no progress bar [default: off]")
@click.option("--json", "as_json", is_flag=True, help="print the result as JSON [default: off]")
def export_cache(path: str, parquet: bool, out: str, split: str, quiet: bool, as_json: bool) -> None:
    """Write a cache's rows in a form that other tools read."""
    if not parquet:
        raise click.UsageError("no form given: give --parquet", click.get_current_context())
    from qat_lora.cache.storage.store import read_manifest
    from qat_lora.cache.tools.transport import export_parquet

    total = sum(shard.bytes for shard in read_manifest(path).shards(split))
    with _byte_bar("export", total, quiet) as bar:
        result = export_parquet(path, out, split, progress=lambda _shard, read: bar.update(read))
    rows, size = result["rows"], result["bytes"] / 1e6
    echo(json.dumps(result) if as_json else f"{rows:,} rows, {size:,.1f} MB, written to {out}")


def _transport(words: str, source: str) -> click.Command:
    @click.command(words, help=COMMANDS[f"cache {words}"].help)
    @click.argument("source", metavar=source)
    @click.argument("out", metavar="OUT")
    @click.option("--quiet", is_flag=True, help="no progress bar [default: off]")
    @click.option("--json", "as_json", is_flag=True, help="print the result as JSON [default: off]")
    def transport(source: str, out: str, quiet: bool, as_json: bool) -> None:
        from qat_lora.cache.tools.transport import pack_cache, unpack_cache

        work = {"pack": pack_cache, "unpack": unpack_cache}[words]
        with _byte_bar(words, None, quiet or as_json) as bar:
            report = work(source, out, lambda _shard, done: bar.update(done))
        sizes = f"{report.cache_bytes / 1e6:,.1f} MB as a cache, {report.packed_bytes / 1e6:,.1f} MB packed"
        line = f"{out}: {report.shards} shards, {sizes} ({report.packed_bytes_per_token:.0f} bytes a token)"
        echo(json.dumps(report._asdict()) if as_json else line)

    return transport


pack, unpack = _transport("pack", "CACHE"), _transport("unpack", "PACKED")


@click.command("push", help=COMMANDS["cache push"].help)
@click.argument("path", metavar="CACHE")
@click.argument("repo", metavar="OWNER/NAME")
@click.option("--license", required=True, help="licence on the card; teacher and text have theirs (required)")
@click.option("--public", is_flag=True, help="everybody may read the repository [default: private]")
@click.option("--allow-paths", is_flag=True, help="send records that name paths of this machine [default: off]")
@click.option("--dry-run", is_flag=True, help="check the cache, and send nothing [default: off]")
@click.option("--quiet", is_flag=True, help="no progress bar [default: off]")
@click.option("--json", "as_json", is_flag=True, help="print the result as JSON [default: off]")
def push(
    path: str, repo: str, license: str, public: bool, allow_paths: bool, dry_run: bool, quiet: bool, as_json: bool
) -> None:
    """Check a cache and send it."""
    from qat_lora.cache.storage.store import read_manifest
    from qat_lora.export.hub import check_cache, check_repo, push_cache

    check_repo(repo)
    total = sum(shard.bytes for shard in read_manifest(path).all_shards)
    with _byte_bar("verify", total, quiet) as bar:
        folder, manifest = check_cache(path, allow_paths, lambda _shard, read: bar.update(read))
    url = None if dry_run else push_cache(folder, manifest, repo, license, not public)
    result = {"repo": repo, "bytes": total, "shards": len(manifest.all_shards), "url": url}
    ended = f"sent: {url}" if url else f"fit to go to {repo}; nothing was sent (--dry-run)"
    echo(json.dumps(result) if as_json else f"{path}: {result['shards']} shards, {total / 1e6:,.1f} MB, {ended}")


@click.command("pull", help=COMMANDS["cache pull"].help)
@click.argument("repo", metavar="OWNER/NAME")
@click.option("--out", metavar="FOLDER", required=True, help="new folder, which appears when it is whole (required)")
@click.option("--revision", help="branch, tag or commit [default: main]")
@click.option("--quiet", is_flag=True, help="no progress bar [default: off]")
@click.option("--json", "as_json", is_flag=True, help="print the result as JSON [default: off]")
def pull(repo: str, out: str, revision: str | None, quiet: bool, as_json: bool) -> None:
    """Fetch a cache and verify it."""
    from qat_lora.export.hub import check_repo, pull_cache

    check_repo(repo)
    with _byte_bar("verify", None, quiet) as bar:
        manifest = pull_cache(repo, Path(out), revision, lambda _shard, read: bar.update(read))
    size, shards = sum(shard.bytes for shard in manifest.all_shards), len(manifest.all_shards)
    line = f"{out}: intact: {shards} shards, {size / 1e6:,.1f} MB from {repo}"
    echo(json.dumps({"out": out, "repo": repo, "shards": shards, "bytes": size}) if as_json else line)

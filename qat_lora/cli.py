"""The console command `qat-lora`: flags read off the option classes, errors as one line, nothing else.

Heavy imports (torch, transformers) happen inside a command, so `--help` answers at once for the groups.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

import qat_lora
from qat_lora.config import Leaf, leaves, refuse_unused, resolve
from qat_lora.errors import QatLoraError, disk_errors_explained
from qat_lora.redaction import redact
from qat_lora.terminal import any_text

# command words -> (option class, function, module of the function, one line of help)
COMMANDS: dict[str, tuple[str, str, str, str]] = {
    "demo": ("DemoOptions", "demo", "qat_lora.demo", "Train, damage and recover a small model on this machine."),
    "cache build": ("CacheBuildOptions", "build_cache", "qat_lora.app", "Write a teacher's logits to a KD cache."),
    "cache audit": ("AuditOptions", "audit_cache", "qat_lora.app", "Compare a cache with what its teacher says."),
    "quantize": ("QuantizeOptions", "quantize", "qat_lora.app", "Quantise a model and prepare its adapter start."),
    "recover": ("RecoverOptions", "recover", "qat_lora.app", "Train a recovery adapter from a KD cache."),
    "qat": ("QatOptions", "qat", "qat_lora.app", "Train a quantised model's own scales, tables, norms or weights."),
    "eval": ("EvalOptions", "evaluate", "qat_lora.app", "Score models against a teacher on held-out text."),
    "export": ("ExportOptions", "export", "qat_lora.app", "Write a student in a form other tools load."),
    "generate": ("GenerateOptions", "generate", "qat_lora.app.generating", "Continue a prompt."),
    "chat": ("ChatOptions", "chat", "qat_lora.app.chatting", "Talk with a model on the terminal."),
    "push": ("PushOptions", "push", "qat_lora.app.pushing", "Upload an exported folder to the Hugging Face Hub."),
    "smoke": ("SmokeOptions", "smoke", "qat_lora.diagnose.smoke", "Check device, data, training and checkpoints."),
    "estimate": ("EstimateOptions", "estimate", "qat_lora.diagnose.estimate", "Estimate the memory a run will need."),
}

# command words -> the settings that first words without a name mean, and how --help calls those words
FIRST_WORDS = {
    "cache audit": {"kd_cache_dir": "PATH"},
    "chat": {"student": "STUDENT"},
    "push": {"folder": "FOLDER", "repo": "REPO"},
}


def _flag(leaf: Leaf) -> click.Option:
    """Make the command-line flag of a setting; values stay text here and are checked by `config`."""
    names = ["--" + leaf.name.replace("_", "-")]
    if alias := leaf.field.metadata["alias"]:
        names.append("--" + alias.replace("_", "-"))
    kind = typing.get_args(leaf.type) if typing.get_origin(leaf.type) is typing.Literal else None
    common: dict[str, Any] = {"help": _help(leaf), "default": None}
    if leaf.type is bool:
        return click.Option([*names, leaf.name], is_flag=True, flag_value="true", type=str, **common)
    if typing.get_origin(leaf.type) is tuple:
        return click.Option([*names, leaf.name], multiple=True, metavar="LIST", **common)
    metavar = "[" + "|".join(kind) + "]" if kind else _metavar(leaf.type)
    return click.Option([*names, leaf.name], type=str, metavar=metavar, **common)


def _echo(text: str, err: bool = False) -> None:
    """Print a text, credentials in addresses hidden."""
    click.echo(redact(text), err=err)


def _help(leaf: Leaf) -> str:
    """Return a setting's line of help, with its unit and its default."""
    unit, default = leaf.field.metadata["unit"], leaf.default
    text, _, stated = leaf.field.metadata["help"].partition("; default: ")
    if isinstance(default, tuple):
        default = ",".join(format(v, "g") if isinstance(v, float) else str(v) for v in default)
    notes = [unit] if unit else []
    if stated:
        notes.append(f"default: {stated}")
    elif "(required)" not in text and "default" not in f"{text} {unit}":
        words = {"False": "off", "True": "on", "None": "none", "": "none"}
        shown = words.get(str(default), default)
        notes.append(f"default: {shown}")
    return f"{text} [{'; '.join(notes)}]" if notes else text


def _metavar(hint: Any) -> str:
    for base in (hint, *typing.get_args(hint)):
        if base in (int, float):
            return "INT" if base is int else "NUMBER"
    return "TEXT"


def _run(words: str, options: Any) -> Any:
    from qat_lora.launch import run

    _, function, module, _ = COMMANDS[words]
    return run(function, options, module)


def _plain(result: Any) -> Any:
    """Return what a command returned as JSON values: a folder or URL with what its result.json says, a text by name."""
    if isinstance(result, Path):
        file = result / "result.json"
        return {"out": str(result), **(json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {})}
    if isinstance(result, str):
        return {"text": result}
    return result if result is None or isinstance(result, dict) else {"out": str(result)}


def _is_first() -> bool:
    from qat_lora.runtime.group import place_in_group

    return place_in_group().rank == 0


def _command(words: str) -> click.Command:
    class_name, _, _, help_line = COMMANDS[words]

    class Lazy(click.Command):
        """Reads the flags off the option class when they are first needed."""

        def get_params(self, ctx: click.Context) -> list[click.Parameter]:
            if not self.params:
                first = "".join(f"[{FIRST_WORDS[words][name]}] " for name in FIRST_WORDS.get(words, ()))
                recipe = click.Option(["--recipe"], metavar="FILE", help="YAML file with settings; flags win over it")
                settings = click.Argument(["words"], nargs=-1, metavar=f"{first}[NAME=VALUE]...")
                self.params = [settings, recipe, *map(_flag, leaves(_options(class_name)))]
            return super().get_params(ctx)

        def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
            """Read the flags; one that other commands have and this one does not use is named as that."""
            try:
                return super().parse_args(ctx, args)
            except click.NoSuchOption as error:
                refuse_unused(_options(class_name), error.option_name.lstrip("-"))
                raise

        def options(self, ctx: click.Context) -> Any:
            """Return the options that a command line means."""
            given = dict(ctx.params)
            recipe, extra = given.pop("recipe"), given.pop("words")
            cls = _options(class_name)
            paths = {leaf.name: leaf.path for leaf in leaves(cls)}
            flags = {
                paths[name]: ",".join(value) if isinstance(value, tuple) else value
                for name, value in given.items()
                if value not in (None, ())
            }
            for name in FIRST_WORDS.get(words, ()):
                if extra and "=" not in extra[0]:
                    flags[paths[name]], *extra = extra
            return resolve(cls, recipe=recipe, flags=flags, words=extra)

        def invoke(self, ctx: click.Context) -> None:
            options = self.options(ctx)
            result = _run(words, options)
            if options.run.json and _is_first():  # under torchrun every process comes here
                from qat_lora.finite import json_text

                _echo(json_text(_plain(result), "the result", default=str))

    epilog = "Any setting can also be given as NAME=VALUE, for example train.lr=3e-4."
    return Lazy(words.split()[-1], help=help_line, epilog=epilog)


def _options(class_name: str) -> Any:
    return getattr(importlib.import_module("qat_lora.options"), class_name)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, invoke_without_command=True
)
@click.version_option(qat_lora.__version__)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Give quantised language models their quality back."""
    if ctx.invoked_subcommand is None:
        _echo(ctx.get_help())


@cli.group(invoke_without_command=True)
@click.pass_context
def cache(ctx: click.Context) -> None:
    """Build, inspect, verify, audit, export and pack KD caches."""
    if ctx.invoked_subcommand is None:
        _echo(ctx.get_help())


def _byte_bar(words: str, total_bytes: int | None, quiet: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total_bytes, desc=words, unit="B", unit_scale=True, disable=quiet)


@cache.command("verify")
@click.argument("path")
@click.option("--quiet", is_flag=True, help="no progress bar [default: off]")
@click.option("--json", "as_json", is_flag=True, help="print the result as JSON [default: off]")
def verify(path: str, quiet: bool, as_json: bool) -> None:
    """Read every byte of a cache; exit code 1 and the shard's name on any damage."""
    from qat_lora.cache.store import read_manifest
    from qat_lora.cache.verify import verify_cache

    manifest = read_manifest(path)
    total = sum(shard.bytes for shard in (*manifest.eval, *manifest.train))
    with _byte_bar("verify", total, quiet) as bar:
        report = verify_cache(path, lambda _shard, read: bar.update(read))
    if as_json:
        _echo(json.dumps({"intact": True, **dataclasses.asdict(report)}))
        return
    strangers = f"; files that are not its own: {', '.join(report.strangers)}" if report.strangers else ""
    size = f"{report.bytes / 1e6:,.1f} MB in {report.seconds:.1f} s"
    _echo(f"{path}: intact: {report.shards} shards, {report.rows:,} rows, {size}{strangers}")


@cache.command("info")
@click.argument("path")
@click.option("--tokenizer", metavar="FOLDER", help="the teacher's folder; then rows are shown as text [default: ids]")
@click.option("--plot", metavar="FILE", help="draw the mass that the head misses as PNG [default: no plot]")
@click.option("--json", "as_json", is_flag=True, help="print it as JSON [default: off]")
def info(path: str, tokenizer: str | None, plot: str | None, as_json: bool) -> None:
    """Show what is in a cache: sizes, origin, the mass that the head misses, a few rows."""
    from qat_lora.cache.describe import describe, plot_tail_mass, render

    decode = None
    if tokenizer is not None:
        from qat_lora.app import cache_decoder

        decode = cache_decoder(path, tokenizer)
    from qat_lora.finite import json_text

    description = describe(path, decode=decode)
    if plot is not None:
        plot_tail_mass(path, plot)
    _echo(json_text(description, path, indent=2, default=str) if as_json else render(description))


@cache.command("export")
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
    from qat_lora.cache.parquet import export_parquet
    from qat_lora.cache.store import read_manifest

    total = sum(shard.bytes for shard in read_manifest(path).shards(split))
    with _byte_bar("export", total, quiet) as bar:
        result = export_parquet(path, out, split, progress=lambda _shard, read: bar.update(read))
    rows, size = result["rows"], result["bytes"] / 1e6
    _echo(json.dumps(result) if as_json else f"{rows:,} rows, {size:,.1f} MB, written to {out}")


def _transport(words: str, source: str, out: str, quiet: bool, as_json: bool) -> None:
    """Pack or unpack a cache and say what it takes."""
    from qat_lora.cache import pack

    work = {"pack": pack.pack_cache, "unpack": pack.unpack_cache}[words]
    with _byte_bar(words, None, quiet or as_json) as bar:
        report = work(source, out, lambda _shard, done: bar.update(done))
    if as_json:
        _echo(json.dumps(report._asdict()))
        return
    sizes = f"{report.cache_bytes / 1e6:,.1f} MB as a cache, {report.packed_bytes / 1e6:,.1f} MB packed"
    _echo(f"{out}: {report.shards} shards, {sizes} ({report.packed_bytes_per_token:.0f} bytes a token)")


@cache.command("pack")
@click.argument("source", metavar="CACHE")
@click.argument("out", metavar="OUT")
@click.option("--quiet", is_flag=True, help="no progress bar [default: off]")
@click.option("--json", "as_json", is_flag=True, help="print the result as JSON [default: off]")
def pack_command(source: str, out: str, quiet: bool, as_json: bool) -> None:
    """Make a cache smaller for moving it, without loss; unpack it before training from it."""
    _transport("pack", source, out, quiet, as_json)


@cache.command("unpack")
@click.argument("source", metavar="PACKED")
@click.argument("out", metavar="OUT")
@click.option("--quiet", is_flag=True, help="no progress bar [default: off]")
@click.option("--json", "as_json", is_flag=True, help="print the result as JSON [default: off]")
def unpack_command(source: str, out: str, quiet: bool, as_json: bool) -> None:
    """Write the cache that was packed, bit for bit."""
    _transport("unpack", source, out, quiet, as_json)


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("planned", nargs=-1, type=click.UNPROCESSED, metavar="[COMMAND ...]")
def doctor(planned: tuple[str, ...]) -> None:
    """Check Python, packages, devices, variables, Hub and room, also for a planned COMMAND (recover, qat or quantize).

    Exit code 1 where something needs fixing.
    """
    from qat_lora.diagnose.doctor import examine, render

    findings = examine(os.environ, _needs(planned) if planned else None)
    _echo(render(findings))
    if any(finding.fix for finding in findings):
        raise SystemExit(1)


def _needs(planned: Sequence[str]) -> Any:
    """Return what a command line would take of the machine."""
    from qat_lora.launch import PLANNED
    from qat_lora.runtime.select import select_runtime

    if planned[0] not in PLANNED:
        allowed = " or ".join(PLANNED)
        raise click.UsageError(f"doctor: {' '.join(planned)!r} is not planned from shapes; give {allowed}, or nothing")
    select_runtime("cpu")  # before transformers is imported, as for every command
    from qat_lora.app.needs import needs

    command = _command(planned[0])
    options = command.options(command.make_context(planned[0], list(planned[1:])))  # type: ignore[attr-defined]
    return needs(planned[0], options)._replace(device="tpu" if options.run.tpu else options.run.device)


@cli.command("bench", context_settings={"ignore_unknown_options": True})
@click.argument("name", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench_command(name: str | None, arguments: tuple[str, ...]) -> None:
    """Show what was claimed, asked and reached in one table, or run the benchmark NAME with its own arguments."""
    from qat_lora.diagnose.bench import benchmarks_folder, render, run_benchmark

    folder = benchmarks_folder()
    if name is None:
        _echo(render(folder))
    elif code := run_benchmark(folder, name, arguments):
        raise SystemExit(code)


for _words in COMMANDS:
    (cache if _words.startswith("cache ") else cli).add_command(_command(_words))


@any_text()
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors of ours, of the usage and of the disk become one line and an exit code."""
    try:
        with disk_errors_explained():
            cli(args=arguments, prog_name="qat-lora", standalone_mode=False)
            sys.stdout.flush()  # here, where what goes wrong is a line and not the interpreter's last words
    except BrokenPipeError:  # the reader of a pipe has seen enough
        _forget_output()
        raise SystemExit(1) from None  # as click does where the pipe breaks earlier
    except QatLoraError as error:
        _fail(str(error), error.exit_code)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "qat-lora"
        _fail(f"{error.format_message().rstrip('.')} (see `{command} --help`)", 2)
    except (click.Abort, KeyboardInterrupt):
        _echo("stopped", err=True)
        raise SystemExit(130) from None


def _forget_output() -> None:
    """Send what is left in the buffer of standard output nowhere, so that its end is not tried again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, exit_code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # a terminal that was closed
        _echo(f"error: {' '.join(message.split())}", err=True)
    raise SystemExit(exit_code) from None


def run_script(words: str) -> None:
    """Run one command with this process's arguments; what the files in `scripts/` call."""
    main([*words.split(), *sys.argv[1:]])

"""`fleet`: the manifest by which a scheduler runs the n builders of one `cache build`, starts them again, and no more.

Builders share nothing but the cache's folder and resume by themselves, so a scheduler's own arrays, retries and
handling of preemption do everything; a coordinator of ours would be one more thing to keep alive. The manifests are
data (`fleet_templates/`): a scheduler's fields, and its file with `@name` where they go. The builders' command is read
as `cache build` itself reads it, so that a mistake is found here and not n times on the cluster.
"""

import re
import shlex
import string
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from qat_lora.config import parse_yaml
from qat_lora.errors import ConfigError
from qat_lora.files.atomic import write_new
from qat_lora.registry import COMMANDS
from qat_lora.terminal import echo

SCHEDULERS = ("k8s", "skypilot", "slurm", "xpk")


class _Manifest(string.Template):
    delimiter = "@"


@click.command("fleet", help=COMMANDS["fleet"].help)
@click.argument("scheduler", type=click.Choice(SCHEDULERS))
@click.argument("build", nargs=-1, type=click.UNPROCESSED, metavar="-- CACHE_BUILD_ARGUMENTS")
@click.option("--builders", type=click.IntRange(1, 999_999), required=True, help="how many (required)")
@click.option("--name", default="kd-cache", help="of the job [default: kd-cache]")
@click.option("--retries", type=click.IntRange(0), default=6, help="of a builder, after errors [default: 6]")
@click.option("--set", "given", multiple=True, metavar="FIELD=VALUE", help="a field of the scheduler's [default: none]")
@click.option("--out", metavar="FILE", help="write it there; the file must not exist [default: print it]")
@click.pass_context
def fleet(
    ctx: click.Context, scheduler: str, build: tuple[str, ...], given: tuple[str, ...], out: str | None, **own: Any
) -> None:
    """Print a manifest; ConfigError: a field is unknown, missing or does not fit, or the builders' command is wrong."""
    command = ctx.find_root().command.get_command(ctx, "cache").get_command(ctx, "build")  # type: ignore[attr-defined]
    options = command.options(command.make_context("qat-lora cache build", [*build]))
    if options.builder != "0/1" or options.run.overwrite or options.run.out is None:
        raise ConfigError("fleet: give the builders' command with --out and without --builder and --overwrite")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?", own["name"]):
        raise ConfigError(
            f"name: {own['name']!r} does not fit; allowed: up to 42 small letters, digits and - between them"
        )
    words = shlex.join(["qat-lora", "cache", "build", *build])
    if not words.isprintable():
        raise ConfigError("fleet: an argument holds a line break or the like; put it into a --recipe file")
    more = {"last": own["builders"] - 1, "command": words, "quoted": shlex.quote(f"{words} --builder ")}
    text = manifest(scheduler, own | more, given)
    if out is None:
        return echo(text)
    try:
        write_new(Path(out), [text.encode()], "manifest")
    except FileExistsError:
        raise ConfigError(f"out: {out} exists already and was not touched; choose another file") from None


def manifest(scheduler: str, fixed: dict[str, Any], given: tuple[str, ...]) -> str:
    """Return a scheduler's file, its fields filled in; ConfigError: one is unknown, missing or does not fit."""
    file = files("qat_lora.commands") / "fleet_templates" / f"{scheduler}.yaml"
    template: Any = parse_yaml(file.read_text(encoding="utf-8"))
    fields, values = template["fields"], dict(fixed)
    asked = dict(item.partition("=")[::2] for item in given)
    if unknown := sorted(asked.keys() - fields.keys()):
        raise ConfigError(f"set: {unknown[0]!r} is no field of {scheduler}; fields: {', '.join(fields)}")
    for field, about in fields.items():
        default = _Manifest(about["default"]).substitute(fixed) if "default" in about else ""
        value, form = asked.get(field, default), about.get("allowed", r"[\w./:@+-]+")
        if not re.fullmatch(form, value):
            shown = f"{value!r} does not fit; allowed: {form}" if value else "is missing"
            raise ConfigError(f"set: {field} {shown}; give --set {field}=…: {about['help']}")
        values[field] = value
    return _Manifest(template["manifest"]).substitute(values)

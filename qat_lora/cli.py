"""The console command `qat-lora`: flags read off the option classes, errors as one line, nothing else.

Heavy imports (torch, transformers) happen inside a command, so `--help` answers at once for the groups.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import typing
from collections.abc import Sequence
from typing import Any

import click

from qat_lora.config import Leaf, leaves, resolve
from qat_lora.errors import QatLoraError

# command words -> (option class, function, module of the function, one line of help)
COMMANDS: dict[str, tuple[str, str, str, str]] = {
    "demo": ("DemoOptions", "demo", "qat_lora.demo", "Train, damage and recover a small model on this machine."),
    "cache build": ("CacheBuildOptions", "build_cache", "qat_lora.app", "Write a teacher's logits to a KD cache."),
    "quantize": ("QuantizeOptions", "quantize", "qat_lora.app", "Quantise a model and prepare its adapter start."),
    "recover": ("RecoverOptions", "recover", "qat_lora.app", "Train a recovery adapter from a KD cache."),
    "eval": ("EvalOptions", "evaluate", "qat_lora.app", "Score models against a teacher on held-out text."),
    "export": ("ExportOptions", "export", "qat_lora.app", "Write a student in a form other tools load."),
    "generate": ("GenerateOptions", "generate", "qat_lora.generate", "Continue a prompt."),
    "smoke": ("SmokeOptions", "smoke", "qat_lora.diagnose.smoke", "Check device, data, training and checkpoints."),
}


def _flag(leaf: Leaf) -> click.Option:
    """Make the command-line flag of a setting; values stay text here and are checked by `config`."""
    names = ["--" + leaf.name.replace("_", "-")]
    if alias := leaf.field.metadata["alias"]:
        names.append("--" + alias.replace("_", "-"))
    unit = leaf.field.metadata["unit"]
    note = f" [{unit}]" if unit else ""
    default = leaf.default
    if isinstance(default, tuple):
        default = ",".join(format(v, "g") if isinstance(v, float) else str(v) for v in default)
    if default not in (None, "", False):
        note += f" [default: {default}]"
    kind = typing.get_args(leaf.type) if typing.get_origin(leaf.type) is typing.Literal else None
    common: dict[str, Any] = {"help": leaf.field.metadata["help"] + note, "default": None}
    if leaf.type is bool:
        return click.Option([*names, leaf.name], is_flag=True, flag_value="true", type=str, **common)
    if typing.get_origin(leaf.type) is tuple:
        return click.Option([*names, leaf.name], multiple=True, metavar="LIST", **common)
    metavar = "[" + "|".join(kind) + "]" if kind else _metavar(leaf.type)
    return click.Option([*names, leaf.name], type=str, metavar=metavar, **common)


def _metavar(hint: Any) -> str:
    for base in (hint, *typing.get_args(hint)):
        if base in (int, float):
            return "INT" if base is int else "NUMBER"
    return "TEXT"


def _run(words: str, options: Any) -> Any:
    from qat_lora.launch import run

    _, function, module, _ = COMMANDS[words]
    return run(function, options, module)


def _command(words: str) -> click.Command:
    class_name, _, _, help_line = COMMANDS[words]

    class Lazy(click.Command):
        """Reads the flags off the option class when they are first needed."""

        def get_params(self, ctx: click.Context) -> list[click.Parameter]:
            if not self.params:
                recipe = click.Option(["--recipe"], metavar="FILE", help="YAML file with settings; flags win over it")
                settings = click.Argument(["words"], nargs=-1, metavar="[NAME=VALUE]...")
                self.params = [settings, recipe, *map(_flag, leaves(_options(class_name)))]
            return super().get_params(ctx)

        def invoke(self, ctx: click.Context) -> Any:
            given = dict(ctx.params)
            recipe, extra = given.pop("recipe"), given.pop("words")
            cls = _options(class_name)
            paths = {leaf.name: leaf.path for leaf in leaves(cls)}
            flags = {
                paths[name]: ",".join(value) if isinstance(value, tuple) else value
                for name, value in given.items()
                if value not in (None, ())
            }
            options = resolve(cls, recipe=recipe, flags=flags, words=extra)
            result = _run(words, options)
            if options.run.json:
                click.echo(json.dumps(result, default=str))
            return result

    epilog = "Any setting can also be given as NAME=VALUE, for example train.lr=3e-4."
    return Lazy(words.split()[-1], help=help_line, epilog=epilog)


def _options(class_name: str) -> Any:
    return getattr(importlib.import_module("qat_lora.options"), class_name)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="qat-lora")
def cli() -> None:
    """Give quantised language models their quality back."""


@cli.group()
def cache() -> None:
    """Build, inspect and verify KD caches."""


@cache.command("verify")
@click.argument("path")
@click.option("--quiet", is_flag=True, help="no progress bar")
def verify(path: str, quiet: bool) -> None:
    """Read every byte of a cache; exit code 1 and the shard's name on any damage."""
    from qat_lora.cache.verify import verify_cache

    report = verify_cache(path, None)
    if not quiet:
        click.echo(report)


@cache.command("info")
@click.argument("path")
def info(path: str) -> None:
    """Show what is in a cache, as JSON."""
    from qat_lora.cache.describe import describe

    click.echo(json.dumps(describe(path), indent=2, default=str))


@cli.command()
def doctor() -> None:
    """Check Python, packages, devices, variables and disk; exit code 1 where something needs fixing."""
    from qat_lora.diagnose.doctor import examine, render

    findings = examine(os.environ)
    click.echo(render(findings))
    if any(finding.fix for finding in findings):
        raise SystemExit(1)


for _words in COMMANDS:
    (cache if _words.startswith("cache ") else cli).add_command(_command(_words))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors of ours become one line and their exit code."""
    try:
        cli(args=arguments, standalone_mode=False)
    except QatLoraError as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(error.exit_code) from None
    except click.ClickException as error:
        error.show()
        raise SystemExit(2) from None
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        raise SystemExit(130) from None


def run_script(words: str) -> None:
    """Run one command with this process's arguments; what the files in `scripts/` call."""
    main([*words.split(), *sys.argv[1:]])

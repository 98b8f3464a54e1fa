"""The console command `qat-lora`: flags read off the option classes, errors as one line, nothing else.

Heavy imports (torch, transformers) happen inside a command, so `--help` answers at once for the groups.
"""

import contextlib
import dataclasses
import json
import os
import re
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

import qat_lora
from qat_lora.config import Leaf, leaves, nearest, refuse_unused, resolve
from qat_lora.errors import QatLoraError, disk_errors_explained
from qat_lora.registry import COMMANDS, Command
from qat_lora.terminal import any_text, bars_by_terminal, echo, highlight

_NUMBERS = {int: "INT", float: "NUMBER"}
_TYPES = {"int": click.INT, "float": click.FLOAT, "count": click.IntRange(1)}  # of flags in the registry
EXAMPLES = Path(__file__).with_name("command_examples.txt")  # shown by the `--help` of their commands
MANY = 15  # settings of a command, above which `--help` shows the common ones only


def _flag(leaf: Leaf) -> click.Option:
    """Make the command-line flag of a setting; values stay text here and are checked by `config`."""
    names = [_flag_name(name) for name in leaf.names]
    kind = typing.get_args(leaf.type) if typing.get_origin(leaf.type) is typing.Literal else None
    common: dict[str, Any] = {"help": _help(leaf), "default": None}
    if leaf.type is bool:
        return click.Option([*names, leaf.name], is_flag=True, flag_value="true", type=str, **common)
    if typing.get_origin(leaf.type) is tuple:
        return click.Option([*names, leaf.name], multiple=True, metavar="LIST", **common)
    number = next((_NUMBERS[hint] for hint in (leaf.type, *typing.get_args(leaf.type)) if hint in _NUMBERS), "TEXT")
    metavar = "[" + "|".join(kind) + "]" if kind else number
    return click.Option([*names, leaf.name], type=str, metavar=metavar, **common)


def _dashed(word: str) -> str:
    return word.replace("_", "-")


def _flag_name(name: str) -> str:
    return "--" + _dashed(name)


def _help_line(leaf: Leaf, short: bool) -> tuple[str, str]:
    """Return how help shows a setting; where it is short, by its first name and without what goes without saying."""
    value, text = _flag(leaf).metavar or "", _help(leaf)
    if not short:
        return f"{', '.join(map(_flag_name, leaf.names))} {value}", text
    value = value if len(value) < 20 else "NAME"  # long lists of choices
    return f"{_flag_name(leaf.name)} {value}", re.sub(r"( \[|; )default: (none|off|auto)\]$", "", text)


def _help(leaf: Leaf) -> str:
    unit, default = leaf.field.metadata["unit"], leaf.field.default
    text, _, stated = leaf.field.metadata["help"].partition("; default: ")
    if isinstance(default, tuple):
        default = ",".join(format(v, "g") if isinstance(v, float) else str(v) for v in default)
    notes = [unit] if unit else []
    if stated:
        notes.append(f"default: {stated}")
    elif "(required)" not in text and "default" not in f"{text} {unit}":
        shown = {"False": "off", "True": "on", "None": "none", "": "none"}.get(str(default), default)
        notes.append(f"default: {shown}")
    return f"{text} [{'; '.join(notes)}]" if notes else text


def _plain(result: Any) -> Any:
    """Return what a command returned as JSON values: a folder or URL with what its result.json says, a text by name."""
    if isinstance(result, Path):
        file = result / "result.json"
        return {"out": str(result), **(json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {})}
    if isinstance(result, str):
        return {"text": result}
    return result if result is None or isinstance(result, dict) else {"out": str(result)}


class OptionsCommand(click.Command):
    """A command whose flags are read off its option class, when they are first needed."""

    def __init__(self, command: Command) -> None:
        super().__init__(command.words.split()[-1], help=command.help)
        self.command = command

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the flags of the settings, and the words without a name."""
        if not self.params:
            first = "".join(f"[{shown}] " for shown in self.command.first_words.values())
            recipe = click.Option(["--recipe"], metavar="FILE", help="YAML file with settings; flags win over it")
            settings = click.Argument(["words"], nargs=-1, metavar=f"{first}[NAME=VALUE]...")
            self.params = [settings, recipe, *map(_flag, leaves(self.command.options_class()))]
        return super().get_params(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the flags; one that other commands have and this one does not use is named as that."""
        if "--help-all" in args:
            ctx.meta["all settings"], args = True, ["--help"]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            cls, name = self.command.options_class(), error.option_name.lstrip("-")
            refuse_unused(cls, name)
            near = ", ".join(_flag_name(path[-1]) for path in nearest(name, cls))
            raise click.UsageError(f"No such option {error.option_name!r}; the nearest: {near}", ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples, and the flags by group: of many settings the common ones, unless all were asked for."""
        cls, start = self.command.options_class(), f"qat-lora {self.command.words} "
        every = list(leaves(cls))
        short = len(every) > MANY and "all settings" not in ctx.meta
        lines = EXAMPLES.read_text(encoding="utf-8").splitlines()
        if examples := [f"  {line}\n" for line in lines if line.startswith(start)]:
            with formatter.section(highlight("Examples", sys.stdout, bold=True)):
                formatter.write("".join(examples))
        sections: dict[str, list[tuple[str, str]]] = {}
        for leaf in every:
            if not short or leaf.field.metadata["common"]:
                group = next(field for field in dataclasses.fields(cls) if field.name == leaf.path[0])
                heading = str(group.metadata["help"]) if len(leaf.path) > 1 else "options"
                sections.setdefault(heading, []).append(_help_line(leaf, short))
        width = min(28, max(len(name) for records in sections.values() for name, _ in records))
        for heading, records in sections.items():
            with formatter.section(highlight(heading[0].upper() + heading[1:], sys.stdout, bold=True)):
                formatter.write_dl([(name.ljust(width), text) for name, text in records])
        formatter.write_paragraph()
        more = f"--help-all shows all {len(every)} settings. " if short else ""
        formatter.write_text(f"{more}--recipe FILE reads settings from YAML; NAME=VALUE is the same as --NAME VALUE.")

    def options(self, ctx: click.Context) -> Any:
        """Return the options that a command line means."""
        cls, given = self.command.options_class(), dict(ctx.params)
        recipe, extra = given.pop("recipe"), given.pop("words")
        paths = {leaf.name: leaf.path for leaf in leaves(cls)}
        said = {paths[name]: value for name, value in given.items() if value not in (None, ())}
        flags = {path: ",".join(value) if isinstance(value, tuple) else value for path, value in said.items()}
        for name in self.command.first_words:
            if extra and "=" not in extra[0]:
                flags[paths[name]], *extra = extra
        return resolve(cls, recipe=recipe, flags=flags, words=extra)

    def invoke(self, ctx: click.Context) -> None:
        """Run the command, and print its result where JSON was asked for."""
        options = self.options(ctx)
        from qat_lora.files.finite import json_text
        from qat_lora.runtime.host.collectives import rank_info
        from qat_lora.runtime.launch.start import run

        result = run(self.command, options)
        if options.run.json and rank_info().rank == 0:  # under torchrun every process comes here
            echo(json_text(_plain(result), "the result", default=str))
        elif not options.run.quiet and rank_info().rank == 0:
            from qat_lora.plan.advice import next_command

            if line := next_command(self.command.words, options, result):
                echo(f"{highlight('next:', sys.stdout, bold=True)} {line}")


def _plain_command(command: Command) -> click.Command:
    """Return a command whose words and flags the registry lists; its module is imported when it runs."""
    params = list[click.Parameter]()
    for names, about in command.flags.items():
        kind = about.get("type", "")
        given = {**about, "type": click.Choice(kind) if isinstance(kind, list) else _TYPES.get(kind)}
        params.append((click.Option if names.startswith("--") else click.Argument)(names.split(), **given))
    context = {"ignore_unknown_options": any(param.nargs == -1 for param in params)}  # words that another command reads
    function, word = lambda **given: command.load()(**given), command.words.split()[-1]
    return click.Command(word, context, function, params, help=command.help)


class Group(click.Group):
    """The commands of the registry under some first words; modules of their own are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the next word of every command below this group."""
        return sorted({words.split()[0] for words in self._below()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command or the group of a word."""
        below = self._below()
        if command := below.get(cmd_name):
            return OptionsCommand(command) if command.options else _plain_command(command)
        return GROUPS[cmd_name] if any(words.startswith(f"{cmd_name} ") for words in below) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a line a command, read off the registry so that none of them is imported."""
        below = self._below()
        helps = {word: (below[word] if word in below else GROUPS[word]).help or "" for word in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(word, text.partition("\n")[0]) for word, text in helps.items()])

    def _below(self) -> dict[str, Command]:
        start = "" if self.name == "qat-lora" else f"{self.name} "
        return {words.removeprefix(start): COMMANDS[words] for words in COMMANDS if words.startswith(start)}


def _group(name: str, help: str) -> Group:
    @click.pass_context
    def show_help(ctx: click.Context) -> None:
        if ctx.invoked_subcommand is None:
            echo(ctx.get_help())

    return Group(name, help=help, callback=show_help, invoke_without_command=True)


GROUPS = {"cache": _group("cache", "Build, inspect, verify, audit, export and pack KD caches.")}
cli = _group("qat-lora", "Give quantised language models their quality back.")
cli.context_settings = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
cli.context_settings["token_normalize_func"] = _dashed  # `--output_dir`, as other scripts spell it
click.version_option(qat_lora.__version__)(cli)


@any_text()
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors of ours, of the usage and of the disk become one line and an exit code."""
    # torch's OpenMP threads spin for milliseconds at a barrier: beside a busy program they hold the core of the thread
    # that they wait for, and a small model trains up to 40 times slower. So they sleep after microseconds.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    bars_by_terminal()
    try:
        with disk_errors_explained():
            cli(args=arguments, prog_name="qat-lora", standalone_mode=False)
            sys.stdout.flush()  # here, where what goes wrong is a line and not the interpreter's last words
    except BrokenPipeError:  # the reader of a pipe has seen enough
        with contextlib.suppress(OSError, ValueError):  # what is left in the buffer is not tried again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None  # as click does where the pipe breaks earlier
    except QatLoraError as error:
        _fail(str(error), error.exit_code)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "qat-lora"
        _fail(f"{error.format_message().rstrip('.')} (see `{command} --help`)", 2)
    except (click.Abort, KeyboardInterrupt):
        echo("stopped", err=True)
        raise SystemExit(130) from None


def _fail(message: str, exit_code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # a terminal that was closed
        echo(f"{highlight('error:', sys.stderr, fg='red')} {' '.join(message.split())}", err=True)
    raise SystemExit(exit_code) from None


def run_script(words: str) -> None:
    """Run one command with this process's arguments; what the files in `scripts/` call."""
    main([*words.split(), *sys.argv[1:]])

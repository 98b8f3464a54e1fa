"""The commands that the documentation shows, as a reader would copy them, and whether the programs still take them.

A command is a line of a code block (four blanks, or a fence) that begins with the name of a program; `\\` continues it,
a comment ends it, `$ ` and variables may stand before it. Nothing is run here: flags go through the real parser,
recipes are read, files are looked for. `...` stands for more settings, so what is required is then not asked for.
"""

import re
import shlex
import textwrap
from pathlib import Path
from typing import NamedTuple

import click

from qat_lora import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "docs/tpu.md",
    "docs/gpu.md",
    "docs/training.md",
    "docs/quantisation.md",
    "docs/models.md",
    "docs/numerics.md",
    "docs/evaluation.md",
    "docs/serving.md",
    "docs/cache-format.md",
    "caches/README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
)
"""In the order in which somebody new reads them."""
PROGRAMS = ("qat-lora", "python", "scripts/tpu_acceptance.sh", "scripts/gpu_acceptance.sh", "make", "pip", "gcloud")
VARIABLE = re.compile(r"^[A-Z][A-Z_]*=")
SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")


class Shown(NamedTuple):
    """One command."""

    page: str
    text: str
    """On one line, without comment, `$` and the backslashes."""


def code_lines(text: str) -> list[str]:
    """Return the lines of the code blocks, stripped; continued lines joined."""
    found, fenced, blank = [], False, True
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or (line.startswith("    ") and (blank or found)):
            found.append(line.strip().removeprefix("$ "))
        blank = not line.strip()
    return re.sub(r"\s*\\\n\s*", " ", "\n".join(found)).splitlines()


def shown(page: str) -> list[Shown]:
    """Return the commands of a page."""
    lines = code_lines((ROOT / page).read_text(encoding="utf-8"))
    bare = [re.sub(r"\s+#.*$", "", line) for line in lines]
    return [Shown(page, line) for line in bare if words_of(line)[:1] and words_of(line)[0] in PROGRAMS]


def snippets(page: str) -> list[str]:
    """Return the Python of a page: code blocks that begin with an import of ours."""
    blocks = re.findall(r"^    import qat_lora.*(?:\n+    .*)*", (ROOT / page).read_text(encoding="utf-8"), re.M)
    return [textwrap.dedent(block) for block in blocks]


def words_of(text: str) -> list[str]:
    """Return the words of a command without the variables before it and what a shell does after `>`."""
    try:
        words = shlex.split(text)
    except ValueError:  # the output of a command, not a command
        return []
    while words and VARIABLE.match(words[0]):
        words = words[1:]
    return words[: words.index(">")] if ">" in words else words


def spans(page: str) -> list[str]:
    """Return what stands between backticks in a page's text."""
    return [" ".join(span.split()) for span in SPAN.findall((ROOT / page).read_text(encoding="utf-8"))]


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command of `qat-lora` that some words begin with, and the words after it.

    Raises:
        KeyError: there is no such command.
    """
    command: click.Command = cli.cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        inner = command.get_command(click.Context(command), words[0])
        if inner is None:
            raise KeyError(words[0])
        command, words = inner, words[1:]
    return command, words


def parse(words: list[str], whole: bool) -> None:
    """Give words to the parser of `qat-lora`; a `whole` command has to have all that it needs.

    Raises:
        click.ClickException, QatLoraError, KeyError: it does not take them.
    """
    command, rest = command_of(words)
    whole = whole and "..." not in rest
    rest = [word for word in rest if word != "..."]
    context = command.make_context(words[0], list(rest), resilient_parsing=not whole)
    if not whole:  # a resilient parser passes over what it does not know
        known = {name for parameter in command.get_params(context) for name in parameter.opts}
        unknown = [word for word in rest if word.startswith("--") and word.split("=")[0] not in known]
        if unknown and not getattr(command, "ignore_unknown_options", False):
            raise click.UsageError(f"no such option: {', '.join(unknown)}")
    elif hasattr(command, "options"):
        command.options(context)
    elif words[0] == "doctor" and rest:
        parse(rest, whole)


def check(text: str) -> None:
    """Refuse a command that a reader could not run as it stands, as far as that shows without running it.

    Raises:
        AssertionError, click.ClickException, QatLoraError, KeyError: says what is wrong.
    """
    program, *rest = words_of(text)
    if program == "qat-lora":
        parse(rest, whole=True)
    elif program == "python" and rest[0].startswith("scripts/"):
        started = re.search(r'run_script\("(.*)"\)', (ROOT / rest[0]).read_text(encoding="utf-8"))
        assert started, rest[0]
        parse([*started[1].split(), *rest[1:]], whole=True)
    elif program == "python":
        source = (ROOT / rest[0]).read_text(encoding="utf-8")
        assert [word for word in rest[1:] if word.startswith("--") and f'"{word}"' not in source] == [], text
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        assert set(word for word in rest if "=" not in word) <= set(targets), text
    elif program == "pip":
        extras = set(re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M))
        assert {e for named in re.findall(r"\[(.*?)\]", text) for e in named.split(",")} <= extras, text

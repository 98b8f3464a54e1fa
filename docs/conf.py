"""The documentation site, built by `make docs` with Sphinx and MyST; every warning is an error there.

Pages are the Markdown files of the repository as they are read on a code host, so nothing is written twice: pages that
live outside this folder are taken in where a page here holds only their title, with their links bent to fit, and the
reference of commands is made from the option classes that the command line itself is made from. A link that leads
nowhere is a warning, and so an error.
"""

import copy
import dataclasses
import re
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path

import click

import qat_lora
from qat_lora import cli
from qat_lora.config import Leaf, leaves

ROOT = Path(__file__).resolve().parents[1]

project = "qat-lora"
copyright = "the qat-lora authors"
version = release = qat_lora.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"qat-lora {version}"
html_copy_source = False
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
autodoc_mock_imports = ["torch_xla"]  # importing it looks for devices
autodoc_typehints = "none"  # signatures show them; their classes are internal and have no pages
suppress_warnings = ["myst.header"]  # pages taken in begin one heading lower

# Page here -> file of the repository that it shows.
TAKEN_IN = {
    "index": "README.md",
    "benchmarks": "benchmarks/README.md",
    "caches": "caches/README.md",
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
}
PAGES = {file: f"{page}.md" for page, file in TAKEN_IN.items()}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)]*)?(?=\))")


def bend_links(text: str, source: Path) -> str:
    """Return a repository page with its relative links as they read from this folder; files without a page as names."""

    def bend(found: re.Match[str]) -> str:
        target = (source.parent / found[1]).resolve().relative_to(ROOT).as_posix()
        page = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else "")
        return (page or f"{{file}}{target}") + (found[2] or "")

    text = LINK.sub(bend, text)
    return re.sub(r"\[([^\]]*)\]\(\{file\}[^)]*\)", r"\1", text)


def commands(group: click.Group = cli.cli, words: str = "") -> dict[str, click.Command]:
    """Return every command by its words."""
    found: dict[str, click.Command] = {}
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            found |= commands(command, f"{words}{name} ")
        else:
            found[f"{words}{name}"] = command
    return found


def group_class(cls: type, path: tuple[str, ...]) -> type:
    """Return the settings class that holds the last part of a path."""
    for part in path[:-1]:
        cls = typing.get_type_hints(cls)[part]
    return cls


def cells(names: str, value: str, text: str) -> str:
    """Return a row of a table of options."""
    escaped = text.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")
    return f"| {names} | {value} | {escaped} |"


def table(parameters: list[click.Parameter]) -> list[str]:
    """Return options as the lines of a table."""
    lines = ["", "| option | value | what |", "|---|---|---|"]
    for parameter in parameters:
        names = ", ".join(f"`{name}`" for name in parameter.opts)
        choice = parameter.type if isinstance(parameter.type, click.Choice) else None
        value = "|".join(choice.choices) if choice else parameter.metavar or ""
        value = (
            "" if getattr(parameter, "is_flag", False) else f"`{value.replace('|', chr(92) + '|')}`" if value else ""
        )
        lines.append(cells(names, value, getattr(parameter, "help", None) or "first words"))
    return lines


def cli_reference() -> str:
    """Return every command with its own options, and every group of options that commands share, once."""
    shared: dict[type, dict[str, list[click.Parameter]]] = {}  # group -> command -> its options
    own: list[str] = []
    for words, command in sorted(commands().items()):
        parameters = [p for p in command.get_params(click.Context(command)) if "--help" not in p.opts]
        paths: dict[str, Leaf] = {}
        if isinstance(command, cli.OptionsCommand):
            cls = command.command.options_class()
            paths = {leaf.name: leaf for leaf in leaves(cls)}
        of_group: dict[type, list[click.Parameter]] = {}
        for parameter in parameters:
            leaf = paths.get(str(parameter.name))
            if leaf is not None and len(leaf.path) > 1:
                of_group.setdefault(group_class(cls, leaf.path), []).append(parameter)
        mine = [p for p in parameters if not any(p in group for group in of_group.values())]
        own += ["", f"## qat-lora {words}", "", (command.help or "").split("\n\n")[0]]
        own += table(
            [
                p
                for p in mine
                if not (isinstance(p, click.Argument) and p.nargs == -1 and isinstance(command, cli.OptionsCommand))
            ]
        )
        if of_group:
            links = ", ".join(f"[{name(group)}](#{slug(group)})" for group in of_group)
            own += ["", f"And the options of {links}."]
        for group, options in of_group.items():
            shared.setdefault(group, {})[words] = options
    groups: list[str] = []
    for group, of_command in sorted(shared.items(), key=lambda item: name(item[0])):
        first = (group.__doc__ or "").splitlines()[0]
        groups += ["", f"## Options: {name(group)}", "", f"{first} For {listed(of_command)}."]
        groups += table(together(group, of_command))
    return "\n".join([*own, *groups, ""])


def listed(words: Iterable[str]) -> str:
    """Return commands as a reader sees them."""
    return ", ".join(f"`{word}`" for word in words)


def together(group: type, of_command: Mapping[str, list[click.Parameter]]) -> list[click.Parameter]:
    """Return all options that commands have of a group; one that some do not have says which do."""
    found: dict[str, click.Parameter] = {}
    for leaf in leaves(group):
        having = {words: p for words, options in of_command.items() for p in options if p.name == leaf.name}
        if not having:
            continue
        option = copy.copy(next(iter(having.values())))
        if len(having) < len(of_command) and isinstance(option, click.Option):
            option.help = f"{option.help} (for {listed(having)})"
        found[leaf.name] = option
    return list(found.values())


def name(group: type) -> str:
    """Return what a settings class is called in the reference."""
    assert dataclasses.is_dataclass(group)
    return group.__name__.removesuffix("Config").removesuffix("Options").lower()


def slug(group: type) -> str:
    """Return the anchor of a group's heading."""
    return f"options-{name(group)}"


def api_reference() -> str:
    """Return a directive for every public name."""
    lines = ["```{eval-rst}"]
    for public in sorted(qat_lora._HOMES):
        kind = "autofunction" if public[0].islower() else "autoclass"
        lines += [f".. {kind}:: {qat_lora._HOMES[public]}.{public}", "   :members:" if kind == "autoclass" else "", ""]
    return "\n".join([*lines, "```", ""])


MADE = {"cli": cli_reference, "api": api_reference}


def take_in(app: object, page: str, source: list[str]) -> None:
    """Add to a page what it stands for."""
    if page in TAKEN_IN:
        file = ROOT / TAKEN_IN[page]
        source[0] = bend_links(file.read_text(encoding="utf-8"), file) + "\n" + source[0]
    elif page in MADE:
        source[0] += "\n" + MADE[page]()
    else:
        source[0] = bend_links(source[0], ROOT / "docs" / f"{page}.md")


def setup(app: typing.Any) -> None:
    """Register with Sphinx."""
    app.connect("source-read", take_in)

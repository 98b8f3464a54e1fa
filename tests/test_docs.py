"""The documentation: links, flags and commands are real, the site builds, the front page says what was measured.

The strict build is Sphinx's; links are checked here as well, as a code host shows the files, without the site.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from shown_commands import PAGES as COMMAND_PAGES
from shown_commands import parse, spans

from qat_lora.commands.repository import load_program
from qat_lora.registry import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for f in ("docs", "benchmarks", "caches") for page in (ROOT / f).glob("*.md"))]
)
LINK = re.compile(r"\]\((?!\w+:)([^)\s]*)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
PROSE = [page for page in COMMAND_PAGES if page != "benchmarks/README.md"]
"""Pages that explain; the reference of commands is generated and does not count."""
OF_OTHERS = {
    *("--zone", "--accelerator-type", "--version", "--spot", "--worker", "--command"),  # gcloud
    *("--nnodes", "--layers", "--help", "--help-all"),  # torchrun, a benchmark, every command
    *("--lora", "--adapter-path", "--enable-lora", "--lora-modules", "--max-logprobs"),  # llama.cpp, mlx-lm, vLLM
}
MOST_TERMS = 40
LOG_GAP = "rows/preset=w2g64,rank=16/closed/log_gap_of_absmax/mean"
SCORES = {
    r"unavoidable products \| \*\*(\S+) ×": ("fused_linear_kd", "methods/fused/times_the_products", "{:.2f}"),
    r"TRL (\S+) ×": ("fused_linear_kd", "methods/trl_jsd/times_the_products", "{:.2f}"),
    r"Liger (\S+) ×": ("fused_linear_kd", "methods/liger_jsd/times_the_products", "{:.2f}"),
    r"\*\*(\S+) MB\*\*": ("fused_linear_kd", "methods/fused/extra_peak_mb", "{:.0f}"),
    r"counted \| \*\*(\d+)": (
        "cache_size",
        "teachers/teacher=random/by_k/k=64,values=float16/bytes_per_token",
        "{:.0f}",
    ),
    r"uint8 \*\*(\d+)": ("cache_size", "teachers/teacher=random/by_k/k=64,values=uint8/bytes_per_token", "{:.0f}"),
    r"packed \*\*(\d+)": (
        "cache_size",
        "teachers/teacher=random/by_k/k=64,values=float16/packed_bytes_per_token",
        "{:.0f}",
    ),
    r"tokens/s \| \*\*(\S+) ×\*\* a plain": ("train_step", "against/live_equal/tokens_per_s_ratio", "{:.1f}"),
    r"plain loop, \*\*(\S+) ×\*\*": ("train_step", "against/trl_equal/tokens_per_s_ratio", "{:.1f}"),
    r"\*\*(\S+) ×\*\* with one": ("train_step", "against/live_large/tokens_per_s_ratio", "{:.1f}"),
    r"\| (\S+) of the plain loop": ("train_step", "against/live_equal/extra_memory_share", "{:.2f}"),
    r"gap closed \| \*\*(\S+) %": ("recovery_matrix_auto_teacher-small", LOG_GAP, "{:.1%}"),
    r"and \*\*(\S+) %": ("recovery_matrix_teacher-stdlib", LOG_GAP, "{:.1%}"),
}


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert target.is_relative_to(ROOT)
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def test_the_glossary_stays_short():
    terms = re.findall(r"\*\*([^*]+)\*\*", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"))
    assert 20 < len(terms) <= MOST_TERMS and len(set(terms)) == len(terms)


def all_flags() -> dict[str, list[str]]:
    """Return the names of every option of the command line, by the name that the frozen list has first."""
    frozen = (ROOT / "tests/data/cli_flags.txt").read_text(encoding="utf-8").splitlines()
    named = [FLAG.findall(line.split(": ", 1)[1].split(" = ")[0]) for line in frozen]
    return {names[0]: names for names in named if names}


def test_every_flag_is_explained_on_some_page():
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PROSE)
    there = set(FLAG.findall(text))
    assert [names for names in all_flags().values() if not there.intersection(names)] == []


def test_every_flag_on_a_page_is_one_of_ours():
    known = {name for names in all_flags().values() for name in names} | OF_OTHERS
    for page in PROSE:
        assert set(FLAG.findall((ROOT / page).read_text(encoding="utf-8"))) <= known, page


def test_control_a_flag_of_another_command_is_noticed():
    for words in (["export", "--recovery-r", "4"], ["recover", "--no-such", "..."], ["doctor", "recover", "--nope"]):
        with pytest.raises(click.UsageError, match="no such option"):
            parse(words, whole=False)


def test_commands_in_the_text_have_the_options_that_they_are_shown_with():
    first = {words.split()[0] for words, command in COMMANDS.items() if command.options}
    for page in PROSE:
        for span in spans(page):
            words = span.removeprefix("qat-lora ").split()
            if words and words[0] in first and (span.startswith("qat-lora ") or any("--" in word for word in words)):
                parse(words, whole=False)


@pytest.mark.parametrize("pattern", SCORES)
def test_the_front_pages_scores_are_the_results(pattern):
    result, path, form = SCORES[pattern]
    value = load_program("table", "bench").look_up(
        json.loads((ROOT / f"benchmarks/results/{result}.json").read_text(encoding="utf-8")), path
    )
    shown = re.search(pattern, (ROOT / "README.md").read_text(encoding="utf-8"))
    assert shown and shown[1] == form.format(value).rstrip("%")


def test_the_site_builds_without_a_warning_and_knows_every_command(tmp_path):
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(tmp_path / "trees")]
    done = subprocess.run([*command, "docs", str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "site/cli.html").read_text(encoding="utf-8")
    for line in (ROOT / "tests/data/cli_flags.txt").read_text(encoding="utf-8").splitlines():
        words, flag = line.split(": ", 1)
        assert f"qat-lora {words}<" in reference
        assert not flag.startswith("--") or flag.split()[0] in reference, line
    assert "train_recovery_lora" in (tmp_path / "site/api.html").read_text(encoding="utf-8")
    front = (tmp_path / "site/index.html").read_text(encoding="utf-8")
    assert 'href="training.html"' in front and 'href="benchmarks.html"' in front and "docs/training.md)" not in front

"""The documentation: links lead somewhere, the site builds without a warning, the front page says what was measured.

The strict build is Sphinx's; links are checked here as well, as a code host shows the files, without the site.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qat_lora.diagnose.bench import benchmarks_folder, look_up

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for f in ("docs", "benchmarks", "caches") for page in (ROOT / f).glob("*.md"))]
)
LINK = re.compile(r"\]\((?!\w+:)([^)\s]*)\)")
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
    r"gap closed \| \*\*(\S+) %": ("recovery_teacher-small_w2g64", "gap_recovered_log", "{:.1%}"),
    r"and \*\*(\S+) %": ("recovery_teacher-stdlib_w2g64", "gap_recovered_log", "{:.1%}"),
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


@pytest.mark.parametrize("pattern", SCORES)
def test_the_front_pages_scores_are_the_results(pattern):
    result, path, form = SCORES[pattern]
    value = look_up(json.loads((benchmarks_folder() / f"results/{result}.json").read_text(encoding="utf-8")), path)
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

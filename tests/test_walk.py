"""Every command that the documentation shows is either run, in order, as somebody new would, or it is said why not.

`python tests/test_walk.py` walks and writes docs/walk.md (with names of pages: these sections of it). A page is walked
in a new folder in which the Hub's names are folders: a small Qwen3 instead of Qwen3-0.6B, a few pages of text instead
of WikiText. So commands run as they are written, and settings are only added to make them small. What a walk needs
minutes for, the tests check in a moment: each command is one the parsers take, it has its place in docs/walk.md, and
nothing of a machine stands there.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from os import environ, pathsep
from pathlib import Path
from typing import NamedTuple

import pytest
from shown_commands import PAGES, ROOT, Shown, check, shown, snippets
from toy_model import make_toy

PAGE = ROOT / "docs/walk.md"
MODEL, WIKITEXT, CHATS = "Qwen/Qwen3-0.6B", "Salesforce/wikitext", "chats.jsonl"
CACHE, STUDENT = "caches/wikitext103_L1024_K128", "runs/Qwen3-0.6B_q4_r32"
SMALL_CACHE = "length=64 num_rows=96 eval_rows=8"
SMALL_RUN = "max_steps=4 batch_size=4 global_batch_size=8"
SMALL_SCORES = "length=64 eval_rows=8"
FEW_LAST_LINES, WIDTH = 4, 118
BEFORE_PAGE = {"docs/quantisation.md": "docs/training.md", "caches/README.md": "docs/training.md"}
"""Pages that go on in the folder of another one."""


class Run(NamedTuple):
    """How a command is run here: what comes before it, after it, instead of it, and into it."""

    add: str = ""
    variables: str = ""
    instead: tuple[tuple[str, str], ...] = ()
    typed: str = ""


class Not(NamedTuple):
    """Why a command is not run here."""

    why: str


INSTALLS = Not("installs several GB of packages first; tried by itself, in a clone, not by this walk")
XLA = "PJRT_DEVICE=CPU"
PRINTS = "\nprint(type(model).__name__, 'on', type(model.get_base_model()).__name__)"
STAND_INS = (("<model>", MODEL), ("<text>", WIKITEXT), ("DIR", MODEL), ("CACHE", CACHE))
PLACES = (("--checkpoint ...", f"--checkpoint {STUDENT}"), ("--kd-cache-dir ...", f"--kd-cache-dir {CACHE}"))
BOTH = (("...", f"--checkpoint {STUDENT} --kd-cache-dir {CACHE}"),)
# The first pattern that is found in a command decides.
HOW: tuple[tuple[str, Run | Not], ...] = (
    (r"^(make|pip) ", INSTALLS),
    (r"^gcloud ", Not("needs Google Cloud")),
    (r"benchmarks/\w+\.py|--dataset <Lib>|^qat-lora cache audit c ", Not("a benchmark: minutes to hours")),
    (r"^python tests/", Not("for whoever changes the code")),
    (r"--tpu --num-chips 2 \.\.\.|cache build --tpu --num-chips all", Not("a process a chip needs the chips")),
    (r"train_recovery_lora_multi", Run(f"{SMALL_RUN} num_chips=2 parallel=spmd out=runs/all", XLA, PLACES)),
    (r"--parallel spmd \.\.\.", Run(f"{SMALL_RUN} num_chips=2 out=runs/spmd", XLA, BOTH)),
    (r"^qat-lora estimate", Run(instead=((MODEL, "qwen3-0.6b"),))),
    (r"cache build .*--dry-run", Run(SMALL_CACHE, XLA)),
    (r"cache build .*<model>", Run(f"{SMALL_CACHE} overwrite=true", instead=STAND_INS[:2])),
    (r"cache build .*--tpu", Run(SMALL_CACHE, XLA)),
    (r"cache build", Run(SMALL_CACHE)),
    (r"cache audit", Run(instead=STAND_INS[:1])),
    (r"quantize", Run("calibration_rows=32")),
    (r"recover .*--dry-run|^qat-lora doctor", Run()),
    (r"--objective sft", Run(f"length=64 eval_rows=8 {SMALL_RUN}")),
    (r"recover .*v6e-1|recover .*--tpu|train_recovery_lora.py", Run(SMALL_RUN, XLA)),
    (r"qat-lora qat ", Run(f"{SMALL_RUN} calibration_rows=32 blockwise_steps=4", instead=STAND_INS[2:])),
    (r"qat-lora eval", Run(SMALL_SCORES)),
    (r"qat-lora chat", Run("max_new_tokens=12", typed="what is a scale\n")),
    (r"qat-lora generate", Run("max_new_tokens=12")),
    (r"smoke .*--tpu", Run(variables=XLA)),
    (r"^qat-lora (smoke|export|push|cache) ", Run()),
)  # fmt: skip


def how(command: Shown) -> Run | Not:
    """Return what is done with a command.

    Raises:
        LookupError: nobody has decided.
    """
    for pattern, decision in HOW:
        if re.search(pattern, command.text):
            return decision
    raise LookupError(f"{command.page}: {command.text}: say in HOW how it is run")


def as_run(command: Shown, run: Run) -> str:
    """Return the line that a shell is given."""
    text = command.text
    for old, new in run.instead:
        text = text.replace(old, new)
    missing = run.variables and run.variables not in text
    return " ".join(part for part in (run.variables if missing else "", text, run.add) if part)


def furnish(folder: Path, toy: Path) -> None:
    """Make the folder of a page: the repository's files, and what stands for the Hub."""
    for name in ("recipes", "scripts", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    for name, source in ((MODEL, "teacher"), (WIKITEXT, "wikitext")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).symlink_to(toy / source)
    (folder / CHATS).write_bytes((toy / "messages.jsonl").read_bytes())
    (folder / "qwen3-0.6b").mkdir()
    (folder / "qwen3-0.6b/config.json").write_bytes((ROOT / "tests/data/qwen3-0.6b.json").read_bytes())


def make_stand_ins(toy: Path) -> None:
    """Make a trained toy, WikiText's layout of its text, and its chats as `messages`."""
    make_toy(toy, steps=300)
    (toy / "wikitext").mkdir()
    for file in sorted((toy / "text").iterdir()):
        lines = file.read_text(encoding="utf-8").splitlines()
        articles = [f" = {line[2:]} = " if line.startswith("# ") else line for line in lines]
        (toy / "wikitext" / f"{file.stem}.txt").write_text("\n".join(articles) + "\n", encoding="utf-8")
    turns = (toy / "chats.jsonl").read_text(encoding="utf-8").replace('"conversations"', '"messages"')
    for old, new in (('"from"', '"role"'), ('"value"', '"content"'), ('"human"', '"user"'), ('"gpt"', '"assistant"')):
        turns = turns.replace(old, new)
    (toy / "messages.jsonl").write_text(turns, encoding="utf-8")


def walk(pages: Sequence[str], folder: Path) -> Iterator[tuple[str, str, int, list[str]]]:
    """Run every command of pages that can be run; yield page, line, exit code and what was printed."""
    kept = {k: v for k, v in environ.items() if not k.startswith(("PJRT", "XLA", "TPU", "HF_"))}
    programs = f"{Path(sys.executable).parent}{pathsep}{environ['PATH']}"
    env = {**kept, "PATH": programs, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    make_stand_ins(folder / "toy")
    for page in pages:
        place = folder / BEFORE_PAGE.get(page, page).replace("/", "-")
        if not place.exists():
            place.mkdir()
            furnish(place, folder / "toy")
        tried = [(command, how(command)) for command in shown(page)]
        lines = [(as_run(command, run), run.typed) for command, run in tried if isinstance(run, Run)]
        for line, typed in [*lines, *(("python", snippet + PRINTS) for snippet in snippets(page))]:
            done = subprocess.run(
                line, shell=True, cwd=place, env=env, input=typed, capture_output=True, text=True, timeout=900
            )
            printed = done.stdout.splitlines() + (done.stderr.splitlines()[-1:] if done.returncode else [])
            said = [line, *(f"> {text}" for text in typed.splitlines() if text)]
            yield page, "\n    ".join(said), done.returncode, [tidy(text, place) for text in printed if text.strip()]


def tidy(text: str, place: Path) -> str:
    """Return a printed line without what says more about the machine than about the command."""
    text = re.sub(r"\d+(\.\d+)? s\b", "… s", text.rstrip().replace(f"{place}/", "").replace(str(place), "."))
    return text if len(text) <= WIDTH else text[: WIDTH - 2] + " …"


def report(pages: Sequence[str], found: dict[str, list[str]]) -> str:
    """Walk pages, and return the page that tells of them and of those that are `found` already."""
    import torch
    import transformers

    lines = [INTRODUCTION.format(torch=torch.__version__, transformers=transformers.__version__)]
    with tempfile.TemporaryDirectory(prefix="qat-lora-walk-") as folder:
        for page, line, code, printed in walk(pages, Path(folder)):
            print(code, line, *printed[-FEW_LAST_LINES:], sep="\n  ", flush=True)
            problems = [text for text in printed[:-FEW_LAST_LINES] if text.startswith("✗") or " fix: " in text]
            told = [f"$ {line}", *problems, *printed[-FEW_LAST_LINES:], f"exit code {code}"]
            found.setdefault(page, []).extend([*(f"    {text}" for text in told), ""])
    for page in PAGES:
        if page in found:
            lines += [f"## {page}", "", *found[page]]
    lines += ["## Not run here", "", "| command | why |", "|---|---|"]
    for command in (command for page in PAGES for command in shown(page)):
        if isinstance(decision := how(command), Not):
            lines.append(f"| `{command.text}` | {decision.why} |")
    return "\n".join(lines) + "\n"


INTRODUCTION = """# The walk: every documented command, run or not

`python tests/test_walk.py` runs the commands of the pages in order, each page in a new folder, and writes this page.
PyTorch {torch}, transformers {transformers}, a CPU, no network. The Hub's names are folders there: a small Qwen3, 64
wide, and this documentation as text. What stands behind a command as `name=value`, and `PJRT_DEVICE=CPU` before one for
a TPU, is added to make it small and to run it on XLA's own CPU device; all else is as the page has it. Of the output
the last lines are shown, without seconds. (There is no quality to look at: the model is a toy, and it was trained on
the text that it is tested on.)
"""


COMMANDS = [command for page in PAGES for command in shown(page)]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.text[:60]}")
def test_a_shown_command_is_one_that_the_programs_take(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    check(command.text)


def test_the_commands_are_found():
    assert len(COMMANDS) > 60 and {"README.md", "docs/tpu.md", "docs/training.md"} <= {c.page for c in COMMANDS}


def test_every_shown_command_was_walked_or_has_its_reason():
    page = PAGE.read_text(encoding="utf-8")
    for command in COMMANDS:
        decision = how(command)
        line = f"| `{command.text}` |" if isinstance(decision, Not) else f"    $ {as_run(command, decision)}\n"
        assert line in page, f"{command.page}: {command.text} is not in docs/walk.md; python tests/test_walk.py"


def test_the_walk_ended_well_and_holds_nothing_of_a_machine():
    page = PAGE.read_text(encoding="utf-8")
    ended = re.findall(r"^    \$ (.*)\n(?:    (?!\$ |exit code).*\n)*    exit code (\d+)$", page, re.M)
    assert len(ended) == len(re.findall(r"^    \$ ", page, re.M)) > 40
    assert [line for line, code in ended if code != "0" and " doctor" not in line] == []
    assert not re.search(r"/tmp/|/work|/root|/home/|/Users/", page)


def told_before() -> dict[str, list[str]]:
    """Return the sections of docs/walk.md as lines, by page."""
    parts = PAGE.read_text(encoding="utf-8").split("\n## ")
    lines = (part.splitlines() for part in parts[1:])
    return {first: [*rest[1:], ""] for first, *rest in lines if first in PAGES}


if __name__ == "__main__":
    asked = sys.argv[1:]
    walked = [page for page in PAGES if page in asked or page in map(BEFORE_PAGE.get, asked)]
    earlier = {page: told for page, told in told_before().items() if page not in walked} if asked else {}
    PAGE.write_text(report(walked or PAGES, earlier), encoding="utf-8")

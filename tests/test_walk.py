"""Every command that the documentation shows is run in order, as a new user would, or has a stated reason why not.

`python tests/test_walk.py` walks and writes tests/data/walk.md (give names of sections to walk only these). It starts
from a clone of the last commit with nothing installed: commands that install run there, each `pip` in an environment
of its own, and the pages are walked with what `make` made. Each page is walked in a new folder in which names of the
Hub are folders: a small Qwen3 for Qwen3-0.6B, a few pages of text for WikiText. So commands run as written, and
settings are only added to make them small. A walk takes an hour; the tests check in a moment that every command parses
and has its place in tests/data/walk.md, and that nothing of a machine is recorded there.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from os import environ, pathsep
from pathlib import Path
from typing import NamedTuple

import pytest
from shown_commands import PAGES, ROOT, Shown, check, shown, snippets
from toy_model import make_toy

PAGE = ROOT / "tests/data/walk.md"
MODEL, WIKITEXT, CHATS = "Qwen/Qwen3-0.6B", "Salesforce/wikitext", "chats.jsonl"
CACHE, STUDENT = "caches/wikitext103_L1024_K128", "runs/Qwen3-0.6B_q4_r32"
SMALL_CACHE = "length=64 num_rows=96 eval_rows=8"
SMALL_RUN = "max_steps=4 batch_size=4 global_batch_size=8"
SMALL_SCORES = "length=64 eval_rows=8"
PYTEST_DOTS = re.compile(r"[.sx]+ *(\[ *\d+%\])?$")
NOTHING = "From nothing"
SECTIONS = (NOTHING, *PAGES)
TIMEOUT_S = 3600
FEW_LAST_LINES, MANY_LAST_LINES, WIDTH = 4, 12, 118
LONG_S = 30
"""From here on the page says how long a command took."""
BEFORE_PAGE = dict.fromkeys(("docs/quantisation.md", "caches/README.md"), "docs/training.md")
BEFORE_PAGE |= {"docs/walks.md": "README.md"}
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


class Installs(NamedTuple):
    """A command that needs nothing installed: run in a new clone, before all others."""

    last_lines: int = FEW_LAST_LINES


class Ran(NamedTuple):
    """What became of a command."""

    section: str
    said: str
    code: int
    printed: list[str]
    elapsed_s: float
    last_lines: int
    """How many of the printed lines the page shows."""


class Tree(NamedTuple):
    """The repository's files, and the programs of an environment in which it is installed."""

    root: Path
    programs: Path

    def variables(self, **more: str) -> dict[str, str]:
        """Return the environment variables of somebody who has just made this."""
        dropped = ("PJRT", "XLA", "TPU", "HF_", "PYTHONPATH", "VIRTUAL_ENV", "MAKE", "MFLAGS")
        kept = {k: v for k, v in environ.items() if not k.startswith(dropped)}
        return {**kept, "PATH": f"{self.programs}{pathsep}{environ['PATH']}", **more}


XLA = "PJRT_DEVICE=CPU"
PRINTS = "\nprint(type(model).__name__, 'on', type(model.get_base_model()).__name__)"
STAND_INS = (("<model>", MODEL), ("<text>", WIKITEXT), ("DIR", MODEL), ("CACHE", CACHE))
PLACES = (("--checkpoint ...", f"--checkpoint {STUDENT}"), ("--kd-cache-dir ...", f"--kd-cache-dir {CACHE}"))
BOTH = (("...", f"--checkpoint {STUDENT} --kd-cache-dir {CACHE}"),)
# The first pattern that is found in a command decides.
HOW: tuple[tuple[str, Run | Not | Installs], ...] = (
    (r"--device cuda|gpu_acceptance", Not("needs a GPU")),
    (r"^make demo", Installs(MANY_LAST_LINES)),
    (r"^pip .*hub", Installs(1)),
    (r"^make (test|docs|check)$", Installs()),
    (r"^make test-full", Not("`make test` and 52 slow tests; benchmarks/results/test_full.txt is what it said")),
    (r"^make tpu-compiler engines", Not("compiles llama.cpp; what `make test-full` finds with both is committed")),
    (r"--target-size 232MB", Not("a real model's size; test_setup_allocation.py asks for a small one's")),
    (r"model-Q2_K.gguf", Not("needs a GGUF file; tests/models/test_models_from_gguf.py makes small ones")),
    (r"^qat-lora cache pu(sh|ll) ", Not("needs the Hub; tests/export/test_export_hub.py has one")),
    (r"--teacher-url|FILE.gguf --tokenizer", Not("needs a server; benchmarks/served_teacher.py has one")),
    (r"^make (wheel|test-lowest)", Not("minutes and gigabytes; for whoever releases")),
    (r"^make VENV", Not("`make test` with an environment that is there")),
    (r"^gcloud ", Not("needs Google Cloud")),
    (r"^qat-lora fleet|gs://b/c", Not("needs a bucket; tests/commands/test_commands_fleet.py runs the manifests")),
    (r"benchmarks/\w+\.py|--dataset <Lib>|^qat-lora cache audit c ", Not("minutes to hours; its result is committed")),
    (r"^python tests/", Not("for whoever changes the code")),
    (r"--tpu --num-chips 2 \.\.\.|cache build --tpu --num-chips all", Not("a process a chip needs the chips")),
    (r"train_recovery_lora_multi", Run(f"{SMALL_RUN} num_chips=2 parallel=spmd out=runs/all", XLA, PLACES)),
    (r"--parallel spmd \.\.\.", Run(f"{SMALL_RUN} num_chips=2 out=runs/spmd", XLA, BOTH)),
    (r"^qat-lora estimate", Run(instead=((MODEL, "qwen3-0.6b"),))),
    (r"cache generate|^qat-lora rounds", Not("minutes; tests/commands/test_commands_rounds.py runs both at toy size")),
    (r"cache build .*--dry-run", Run(SMALL_CACHE, XLA)),
    (r"cache build .*<model>", Run(f"{SMALL_CACHE} overwrite=true", instead=STAND_INS[:2])),
    (r"cache build .*--tpu", Run(SMALL_CACHE, XLA)),
    (r"cache build", Run(SMALL_CACHE)),
    (r"cache audit", Run(instead=STAND_INS[:1])),
    (r"quantize", Run("calibration_rows=32")),
    (r"recover .*--dry-run|^qat-lora doctor", Run()),
    (r"--objective sft", Run(f"length=64 eval_rows=8 {SMALL_RUN}")),
    (r"recover .*h100", Run(f"{SMALL_RUN} device=cpu")),
    (r"recover .*v6e-1|recover .*--tpu|train_recovery_lora.py", Run(SMALL_RUN, XLA)),
    (r"qat-lora qat ", Run(f"{SMALL_RUN} calibration_rows=32 blockwise_steps=4", instead=STAND_INS[2:])),
    (r"qat-lora eval", Run(SMALL_SCORES)),
    (r"qat-lora chat", Run("max_new_tokens=12", typed="what is a scale\n")),
    (r"qat-lora generate", Run("max_new_tokens=12")),
    (r"smoke .*--tpu", Run(variables=XLA)),
    (r"^qat-lora (smoke|export|push|cache) ", Run()),
)  # fmt: skip


COMMANDS = [command for page in PAGES for command in shown(page)]


def how(command: Shown) -> Run | Not | Installs:
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


def furnish(folder: Path, root: Path, toy: Path) -> None:
    """Make the folder of a page: the repository's files, and what stands for the Hub."""
    for name in ("recipes", "scripts", "benchmarks"):
        (folder / name).symlink_to(root / name)
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


def run(
    section: str,
    line: str,
    place: Path,
    env: Mapping[str, str],
    typed: str = "",
    last_lines: int = FEW_LAST_LINES,
) -> Ran:
    """Run one line in a shell, as somebody types it."""
    began = time.monotonic()
    done = subprocess.run(
        line, shell=True, cwd=place, env=env, input=typed, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    lines = done.stdout.splitlines() + (done.stderr.splitlines()[-1:] if done.returncode else [])
    said = "\n    ".join([line, *(f"> {text}" for text in typed.splitlines() if text)])
    printed = [tidy(text, place) for text in lines if text.strip() and not PYTEST_DOTS.match(text)]
    return Ran(section, said, done.returncode, printed, time.monotonic() - began, last_lines)


def install(clone: Path) -> Iterator[Ran]:
    """Clone the last commit, and run there what needs nothing installed.

    `make` makes an environment by itself. For every `pip` there is a new one, in which the two commands that its page
    shows next, `doctor` and `smoke`, are tried as well.
    """
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    tried: list[str] = []
    for i, command in enumerate(COMMANDS):
        done = how(command)
        if not isinstance(done, Installs) or command.text in tried:
            continue
        tried.append(command.text)
        if not command.text.startswith("pip "):
            env = Tree(clone, clone / ".venv/bin").variables()
            yield run(NOTHING, command.text, clone, env, last_lines=done.last_lines)
            continue
        with tempfile.TemporaryDirectory(prefix="qat-lora-pip-") as made:
            subprocess.run([sys.executable, "-m", "venv", made], check=True)
            after = [other.text for other in COMMANDS[i:] if not other.text.startswith("pip ")]
            env = Tree(clone, Path(made) / "bin").variables()
            yield run(NOTHING, command.text, clone, env, last_lines=done.last_lines)
            for line in after[:2]:
                yield run(NOTHING, line, clone, env, last_lines=MANY_LAST_LINES)


def walk(pages: Sequence[str], tree: Tree, folder: Path) -> Iterator[Ran]:
    """Run every command of pages that can be run, with the programs of a tree."""
    env = tree.variables(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PYTHONPATH=str(tree.root))
    make_stand_ins(folder / "toy")
    for page in pages:
        place = folder / BEFORE_PAGE.get(page, page).replace("/", "-")
        if not place.exists():
            place.mkdir()
            furnish(place, tree.root, folder / "toy")
        tried = [(command, how(command)) for command in shown(page)]
        lines = [(as_run(command, done), done.typed) for command, done in tried if isinstance(done, Run)]
        for line, typed in [*lines, *(("python", snippet + PRINTS) for snippet in snippets(page))]:
            yield run(page, line, place, env, typed)


def walked(sections: Sequence[str], folder: Path) -> Iterator[Ran]:
    """Walk sections: with a new clone and its environment where they begin from nothing, else with those of now."""
    tree = Tree(ROOT, Path(sys.executable).parent)
    if NOTHING in sections:
        tree = Tree(folder / "qat-lora", folder / "qat-lora/.venv/bin")
        yield from install(tree.root)
    yield from walk([page for page in PAGES if page in sections], tree, folder)


def tidy(text: str, place: Path) -> str:
    """Return a printed line without what says more about the machine than about the command."""
    text = re.sub(r"\d+(\.\d+)? s\b", "… s", text.rstrip().replace(f"{place}/", "").replace(str(place), "."))
    return text if len(text) <= WIDTH else text[: WIDTH - 2] + " …"


def told(ran: Ran) -> list[str]:
    """Return how the page tells of a command: its problems, its last lines, its exit code."""
    rest, last = ran.printed[: -ran.last_lines], ran.printed[-ran.last_lines :]
    problems = [text for text in rest if text.startswith("✗") or " fix: " in text]
    minutes = [f"(in {ran.elapsed_s / 60:.1f} minutes)"] if ran.elapsed_s >= LONG_S else []
    lines = [f"$ {ran.said}", *problems, *last, *minutes, f"exit code {ran.code}"]
    return [*(f"    {text}" for text in lines), ""]


def report(sections: Sequence[str], found: dict[str, list[str]]) -> str:
    """Walk sections, and return the page that tells of them and of those that are `found` already."""
    import torch
    import transformers

    with tempfile.TemporaryDirectory(prefix="qat-lora-walk-") as folder:
        for ran in walked(sections, Path(folder)):
            print(*told(ran), sep="\n", flush=True)
            found.setdefault(ran.section, []).extend(told(ran))
    lines = [INTRODUCTION.format(torch=torch.__version__, transformers=transformers.__version__)]
    for section in SECTIONS:
        if section in found:
            lines += [f"## {section}", "", *found[section]]
    lines += ["## Not run here", "", "| command | why |", "|---|---|"]
    for command in COMMANDS:
        if isinstance(decision := how(command), Not):
            lines.append(f"| `{command.text}` | {decision.why} |")
    return "\n".join(lines) + "\n"


INTRODUCTION = """# The walk: every documented command, run or not

`python tests/test_walk.py` runs the commands of the pages in order, each page in a new folder, and writes this page.
PyTorch {torch}, transformers {transformers}, two cores of a CPU. It begins with a new clone and nothing installed, and
walks the pages with what `make` made there, without a network. The Hub's names are folders: a small Qwen3, 64 wide, and
this documentation as text. What stands behind a command as `name=value`, and `PJRT_DEVICE=CPU` before one for
a TPU, is added to make it small and to run it on XLA's own CPU device; all else is as the page has it. Of the output
the last lines are shown, without seconds. (There is no quality to look at: the model is a toy, and it was trained on
the text that it is tested on.)
"""


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.text[:60]}")
def test_a_shown_command_is_one_that_the_programs_take(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    check(command.text)


def test_the_commands_are_found():
    assert len(COMMANDS) > 60 and {"README.md", "docs/tpu.md", "docs/training.md"} <= {c.page for c in COMMANDS}


def test_every_shown_command_was_walked_or_has_its_reason():
    page = PAGE.read_text(encoding="utf-8")
    for command in COMMANDS:
        match how(command):
            case Not():
                line = f"| `{command.text}` |"
            case Installs():
                line = f"    $ {command.text}\n"
            case Run() as decision:
                line = f"    $ {as_run(command, decision)}\n"
        assert line in page, f"{command.page}: {command.text} is not in tests/data/walk.md; python tests/test_walk.py"


def test_the_walk_ended_well_and_holds_nothing_of_a_machine():
    page = PAGE.read_text(encoding="utf-8")
    ended = re.findall(r"^    \$ (.*)\n(?:    (?!\$ |exit code).*\n)*    exit code (\d+)$", page, re.M)
    assert len(ended) == len(re.findall(r"^    \$ ", page, re.M)) > 40
    assert [line for line, code in ended if code != "0" and " doctor" not in line] == []
    assert not re.search(r"/tmp/|/work|/root|/home/|/Users/", page)


def told_before() -> dict[str, list[str]]:
    """Return the sections of tests/data/walk.md as lines, by name."""
    parts = PAGE.read_text(encoding="utf-8").split("\n## ")
    lines = (part.splitlines() for part in parts[1:])
    return {first: [*rest[1:], ""] for first, *rest in lines if first in SECTIONS}


if __name__ == "__main__":
    asked = sys.argv[1:]
    again = [name for name in SECTIONS if name in asked or name in map(BEFORE_PAGE.get, asked)] or SECTIONS
    earlier = {name: lines for name, lines in told_before().items() if name not in again}
    PAGE.write_text(report(again, earlier), encoding="utf-8")

r"""A model that people use, from its weights to files in llama.cpp, beside llama.cpp's own files.

Claim: a file of ours is nearer to the original than any file of llama.cpp's that is not larger,
and both are measured by llama.cpp's own programs: mean KL over the whole vocabulary, its 99.9th
percentile, how often the likeliest token is the same, perplexity, tokens a second. What each stage
takes is kept too.

    python benchmarks/real_model.py smollm2 --train-text valid.txt --report-text test.txt \
        --machine "two cores of ..."

Stages, in order; `--only` runs some of them:

    text        names the texts, by sha256, and puts together those to choose on; always run
    cache       the teacher's logits on the train text            (qat-lora cache build)
    quantise    each student of STUDENTS                          (qat-lora quantize)
    recover     those that are trained                            (qat-lora recover)
    evaluate    start and recovered on every text                 (qat-lora eval)
    export      the GGUF files of each student                    (qat-lora export)
    reference   the teacher in F16, its logits on the report text, and llama.cpp's importance
                matrix of the train text
    score       our files in llama.cpp
    types       llama.cpp's own files of TYPES, made with that matrix and scored as ours are
    bench       tokens a second of all files, in turns with Q4_0; only with --bench

A stage is one or more steps, each a command in a process of its own. `WORK/.../steps` keeps of
each what it printed (`.out`, `.err`) and a note of its command, minutes and tries (`.json`).
Interrupt it at will: the same command goes on, and steps that ended well are not run again. A step
that stands with another command is refused, so other texts or settings want another `--work`.
After every stage the result is written; `--table` prints its tables.

`--package CHECKOUT --name before` runs the same chain with the package of another checkout: texts,
the teacher's reference and llama.cpp's own files are shared, and the table shows its rows beside
ours. `--rows 8` makes everything small, to see in minutes that all of it works; its result stays
in the work folder.

Texts. The report text is for reporting: nothing is chosen on it. To choose on there are `prose`,
the documents of the train text that the cache keeps apart, and `code`, a few modules of the
running Python's standard library; `--text NAME=PATH` adds more (text files, folders, `.jsonl` of
chats). WikiText-2 in its token form, with `<unk>` and ` @-@ `, has perplexities of its own: they
are not those of papers, which score its raw form.

The model's folder is made by `real_models.py`, llama.cpp's programs come from PATH or from what
`llama_cpp.sh` fetched.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

import qat_lora
from qat_lora.data.packing import make_encoder, take_eval
from qat_lora.data.sources import Document, TextConfig, open_documents
from qat_lora.errors import ConfigError, FailedError, QatLoraError
from qat_lora.files.checksums import model_files, sha256_of
from qat_lora.files.folders import write_text
from qat_lora.models.load import load_tokenizer


class Student(NamedTuple):
    """A student: the flags of the commands that make it."""

    quantise: str
    recover: str | None
    """None: it is not trained."""
    export: str
    quick: str
    """More of quantise's, for a small check of the chain."""


# ---- What is run. --------------------------------------------------------------------------------

STUDENTS = {
    # 2.25 bits, 0.27 M tokens of training: 130 steps x 4 rows x 512 tokens.
    "q2_0": Student(
        quantise="--preset q2_0 --joint-rank 16",
        recover="--recovery-r 16 --batch-size 4 --max-steps 130 --train-scales --eval-steps 65",
        export="--embedding-bits 4.5",
        quick="--init mse --joint-rank 0",
    ),
    # Formats by layer, nothing trained.
    "size": Student(
        quantise="--target-size 85MB --for llama.cpp",
        recover=None,
        export="",
        quick="",
    ),
}

TYPES = (
    *("Q2_0", "IQ2_XXS", "IQ2_M", "Q2_K_S", "Q2_K"),
    *("IQ3_XXS", "IQ3_M", "Q3_K_M"),
    *("IQ4_XS", "Q4_0", "Q4_1", "Q4_K_M"),
    *("Q5_0", "Q5_K_M", "Q6_K", "Q8_0"),
)
"""llama.cpp's own files."""

LENGTH = 512
"""Tokens of a row and of llama.cpp's chunks."""
CACHE = f"--length {LENGTH} --top-k 64 --dtype bfloat16"
RECOVER = "--dtype bfloat16"
EVALUATE = f"--length {LENGTH} --dtype bfloat16"


class Amount(NamedTuple):
    """How much of each text is used, and what is left out of the stages that take long."""

    kept_apart: int
    """Rows that the cache keeps apart."""
    scored: int
    """Rows of every text that `eval` scores."""
    chunks: int
    """Chunks of the report text in llama.cpp."""
    importance_chunks: int
    """Chunks of the train text for llama.cpp's importance matrix."""
    cache: str = ""
    quantise: str = ""
    recover: str = ""
    export: str = ""


FULL = Amount(kept_apart=16, scored=96, chunks=40, importance_chunks=64)


def small(rows: int) -> Amount:
    """Return amounts with which the chain takes minutes: it works, and its figures mean nothing."""
    return Amount(
        kept_apart=4,
        scored=4,
        chunks=2,
        importance_chunks=2,
        cache=f"--num-rows {rows}",
        quantise=f"--calibration-rows {rows}",
        recover="--max-steps 2 --eval-steps 1 --lr 3e-4",
        export="--eval-rows 2",
    )


BENCH = "-p 128 -n 64 -t 2"
BENCH_WITH_ADAPTER = "-npp 128 -ntg 64 -npl 1 -c 256 -t 2"
"""Of llama-batched-bench, since llama-bench takes no adapter."""
ROUNDS = 3
YARDSTICK = "Q4_0"
"""The type with which all others take turns."""
IDLE_LOAD = 0.5
IDLE_WAIT_S = 300

CODE_BYTES = 200_000
"""Of the text `code`."""
CODE_FILE_BYTES = range(2_000, 20_000)

STAGES = (
    "text",
    "cache",
    "quantise",
    "recover",
    "evaluate",
    "export",
    "reference",
    "score",
    "types",
    "bench",
)

# --------------------------------------------------------------------------------------------------

PROGRAM = "from qat_lora.cli import main; main()"
QAT_LORA = [sys.executable, "-P", "-c", PROGRAM]  # -P: not the package of the working folder
NOW = "now"
"""The name of a run without `--name`."""

OUR_FIGURES = ("kl", "top1", "ppl", "tokens")
TOKEN_FORM = "WikiText in its token form: its perplexities are not those of papers"

FIGURES = {
    "perplexity": r"^Mean PPL\(Q\)\s*:\s*(\S+)",
    "perplexity_of_f16": r"^Mean PPL\(base\)\s*:\s*(\S+)",
    "kl": r"^Mean\s+KLD:\s*(\S+)",
    "kl_999": r"^99\.9%\s+KLD:\s*(\S+)",
    "top1": r"^Same top p:\s*(\S+)",
}
"""Lines of llama-perplexity's report on a KL divergence."""


def main(words: Sequence[str] | None = None) -> None:
    """Run the stages that are missing, write the result, print its tables."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("model", help="name: of build/models/NAME and of the result real_model_NAME.json")
    add("--model-folder", type=Path, help="another folder of the teacher")
    add("--train-text", type=Path, help="file of the cache and of the importance matrix")
    add("--report-text", type=Path, help="file that the figures are reported on")
    add("--text", action="append", default=[], metavar="NAME=PATH", help="one more to choose on")
    add("--students", default=",".join(STUDENTS), help="names by commas; default: %(default)s")
    add("--types", default=",".join(TYPES), help="llama.cpp's, by commas; default: %(default)s")
    add("--only", default=",".join(STAGES), help="stages by commas; default: all")
    add("--bench", action="store_true", help="measure speed too, on an idle machine")
    add("--rows", type=int, help="rows of the cache, for a small check of the whole chain")
    add("--package", type=Path, help="another checkout of qat-lora, whose package is run")
    add("--name", default=NOW, help="of the run, such as before; default: %(default)s")
    add("--llama", type=Path, default=Path("build/llama.cpp"), help="folder of llama_cpp.sh")
    add("--threads", type=int, default=2, help="of llama.cpp; ours follow OMP_NUM_THREADS")
    add("--work", type=Path, help="work folder; default: build/real_model/NAME")
    add("--results", type=Path, help="folder of the result; default: benchmarks/results")
    add("--machine", default=processor(), help="for the result; default: %(default)s")
    add("--table", action="store_true", help="print the tables of the results alone")
    arguments = parser.parse_args(words)
    try:
        chain = make_chain(arguments)
        if not arguments.table:
            run_stages(chain, chosen(arguments.only, STAGES, "only"), arguments.bench)
        print(tables(read_results(chain)))
    except QatLoraError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on") from None


def stopped(*_: Any) -> None:
    """Take SIGTERM as Ctrl-C, so that the command that runs is stopped too."""
    raise KeyboardInterrupt


# ---- Steps: commands that are run once. ----------------------------------------------------------


@dataclass
class Steps:
    """Commands that are run once: a note, standard output and standard error of each."""

    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""
    said_of_all: Mapping[str, Any] = field(default_factory=dict)
    """Added to the note of every step that is run."""

    def run(
        self,
        name: str,
        words: Sequence[str],
        launcher: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:
        """Run `launcher + words + options`, unless the step stands.

        Launcher and options may change between tries. ConfigError: the step stands with other
        words; FailedError: it ended with an error, and will be run again.
        """
        note = self.note(name)
        same = note.get("words") == list(words)
        if note.get("done") and not same:
            other = f"{self.file(name, 'json')}: stands with another command"
            raise ConfigError(f"{other}; give another --work, or remove that file to run it again")
        if note.get("done"):
            return
        if not same:
            note = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        note = {
            "words": list(words),
            "seconds": self.seconds(name, note),
            "tries": note.get("tries", 0) + 1,
        }
        note |= dict(self.said_of_all)
        begun = time.time()
        self._write(name, note | {"begun": begun})
        print(f"{name} ...", flush=True)
        try:
            code = self._process(name, [*launcher, *words, *options])
        finally:
            note["seconds"] += time.time() - begun
            self._write(name, note)
        if code:
            ended = f"{name}: ended with exit code {code} ({self.last_line(name)})"
            raise FailedError(f"{ended}; see {self.file(name, 'err')}")
        self._write(name, note | {"done": date.today().isoformat()})
        print(f"{name}: {note['seconds'] / 60:.1f} minutes", flush=True)

    def file(self, name: str, kind: str) -> Path:
        """Return a file of a step: `json`, `out` or `err`."""
        return self.folder / f"{name}.{kind}"

    def note(self, name: str) -> dict[str, Any]:
        """Return what is known of a step, {} if nothing is."""
        file = self.file(name, "json")
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def output(self, name: str) -> str | None:
        """Return what a step printed, None unless it ended well."""
        if not self.note(name).get("done"):
            return None
        return self.file(name, "out").read_text(encoding="utf-8", errors="replace")

    def seconds(self, name: str, note: Mapping[str, Any]) -> float:
        """Return the seconds of all tries.

        A try that was killed together with this program counts up to what it wrote last.
        """
        spent = note.get("seconds", 0.0)
        if "begun" in note:
            files = [self.file(name, kind) for kind in ("out", "err")]
            last = [file.stat().st_mtime for file in files if file.is_file()]
            spent += max([0.0, *(time - note["begun"] for time in last)])
        return spent

    def minutes(self) -> dict[str, float]:
        """Return the minutes of every step that ended well."""
        names = sorted(file.stem for file in self.folder.glob("*.json"))
        notes = {name: self.note(name) for name in names}
        ended_well = {name: note for name, note in notes.items() if note.get("done")}
        return {name: round(note["seconds"] / 60, 2) for name, note in ended_well.items()}

    def last_line(self, name: str) -> str:
        """Return the last line that a step wrote to standard error, else to standard output."""
        for kind in ("err", "out"):
            lines = self.file(name, kind).read_text(encoding="utf-8", errors="replace").split("\n")
            written = [line.strip() for line in lines if line.strip()]
            if written:
                return written[-1]
        return "it said nothing"

    def _process(self, name: str, command: Sequence[str]) -> int:
        """Run a command and return its exit code; if this program is stopped, so is the command."""
        variables = {**os.environ, **self.variables}
        with self.file(name, "out").open("wb") as out, self.file(name, "err").open("ab") as err:
            process = subprocess.Popen(command, stdout=out, stderr=err, env=variables)
            try:
                return process.wait()
            except BaseException:
                process.terminate()  # a run of ours leaves a checkpoint
                process.wait()
                raise

    def _write(self, name: str, note: Mapping[str, Any]) -> None:
        write_text(self.file(name, "json"), json.dumps(note, indent=1) + "\n")


# ---- The chain. ----------------------------------------------------------------------------------


@dataclass
class Chain:
    """What is run, with what, and where."""

    model: str
    teacher: Path
    train_text: Path | None
    report_text: Path | None
    more_texts: dict[str, Path]
    students: list[str]
    types: list[str]
    amount: Amount
    name: str
    llama: Path
    threads: int
    work: Path
    results: Path
    machine: str
    shared: Steps
    """Those that do not depend on the package: llama.cpp's."""
    own: Steps
    """Those of this package."""

    @property
    def home(self) -> Path:
        """The folder of this package's cache and students."""
        return self.work / "runs" / self.name

    @property
    def texts(self) -> Path:
        """The folder of the texts to choose on."""
        return self.work / "texts"

    @property
    def reference(self) -> Path:
        """The folder of the teacher's and llama.cpp's own files."""
        return self.work / "reference"

    @property
    def result(self) -> Path:
        """The file of the result."""
        end = "" if self.name == NOW else f"_{self.name}"
        return self.results / f"real_model_{self.model}{end}.json"

    def qat_lora(self, step: str, words: Sequence[str]) -> None:
        """Run a command of this package."""
        self.own.run(step, words, QAT_LORA)

    def llama_cpp(
        self,
        steps: Steps,
        step: str,
        words: Sequence[str],
        options: Sequence[str] = (),
    ) -> None:
        """Run a program of llama.cpp; ConfigError: it is not here."""
        steps.run(step, words, self.launcher(words[0]), options)

    def launcher(self, program: str) -> list[str]:
        """Return what stands before a program of llama.cpp's; ConfigError: it is not here."""
        if shutil.which(program):
            return []
        if (self.llama / "run").is_file():
            return [str(self.llama / "run")]
        missing = f"llama: {program} is neither on PATH nor in {self.llama}"
        raise ConfigError(f"{missing}; fetch it: bash benchmarks/llama_cpp.sh {self.llama}")


def make_chain(arguments: argparse.Namespace) -> Chain:
    """Return the chain that the arguments ask for; ConfigError: a name or package that is none."""
    if not re.fullmatch(r"[A-Za-z0-9.-]+", arguments.name):
        raise ConfigError(f"name: {arguments.name!r}; allowed: letters, digits, dots and dashes")
    rows: int | None = arguments.rows
    if rows is not None and rows < 4:
        raise ConfigError(f"rows: {rows}; allowed: 4 or more")
    ending = "" if rows is None else f"-rows{rows}"
    work: Path = arguments.work or Path("build/real_model") / f"{arguments.model}{ending}"
    work = work.resolve()
    results = arguments.results or (Path(__file__).parent / "results" if rows is None else work)
    package: Path = (arguments.package or Path(qat_lora.__file__).parents[1]).resolve()
    if not (package / "qat_lora" / "cli.py").is_file():
        what = "holds no qat_lora/cli.py; give the root of a checkout"
        raise ConfigError(f"package: {package} {what}")
    if arguments.package and arguments.name == NOW:
        raise ConfigError("name: not given; another package wants one, such as --name before")
    more = [word.partition("=") for word in arguments.text]
    for name, _, path in more:
        if not path or name in ("report", "prose", "code"):
            allowed = "NAME=PATH, with a name other than report, prose and code"
            raise ConfigError(f"text: {name!r}; allowed: {allowed}")
    variables = {"PYTHONPATH": str(package), "HF_HUB_OFFLINE": "1"}
    home = work / "runs" / arguments.name
    return Chain(
        model=arguments.model,
        teacher=(arguments.model_folder or Path("build/models") / arguments.model).resolve(),
        train_text=arguments.train_text and arguments.train_text.resolve(),
        report_text=arguments.report_text and arguments.report_text.resolve(),
        more_texts={name: Path(path).resolve() for name, _, path in more},
        students=chosen(arguments.students, STUDENTS, "students"),
        types=chosen(arguments.types, TYPES, "types") if arguments.types else [],
        amount=FULL if rows is None else small(rows),
        name=arguments.name,
        llama=arguments.llama.resolve(),
        threads=arguments.threads,
        work=work,
        results=results,
        machine=arguments.machine,
        shared=Steps(work / "steps"),
        own=Steps(home / "steps", variables, {"package": version_of(package)}),
    )


def chosen(words: str, allowed: Iterable[str], setting: str) -> list[str]:
    """Return the names of a list by commas, in the order of the allowed; ConfigError: another."""
    names = words.split(",")
    allowed = list(allowed)
    for name in names:
        if name not in allowed:
            raise ConfigError(f"{setting}: {name!r}; allowed: {', '.join(allowed)}")
    return [name for name in allowed if name in names]


def version_of(package: Path) -> str:
    """Return the version of a checkout's package, with its commit where there is one."""
    source = (package / "qat_lora" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'__version__ = "(.*)"', source)
    version = found[1] if found else "?"
    describe = ["git", "-C", str(package), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        said = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return version
    return f"{version} ({said})"


def processor() -> str:
    """Return how many cores this machine has, and which."""
    name = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        found = re.search(r"^model name\s*: (.*)$", info.read_text(encoding="utf-8"), re.M)
        name = found[1].strip() if found else name
    return f"{os.cpu_count()} cores of {name}"


def run_stages(chain: Chain, stages: Sequence[str], bench: bool) -> None:
    """Run stages in order; the result is written after each."""
    if not (chain.teacher / "config.json").is_file():
        make = f"make it with benchmarks/real_models.py {chain.model}"
        raise ConfigError(f"model: {chain.teacher} holds no config.json; {make}")
    for setting, path in (("train-text", chain.train_text), ("report-text", chain.report_text)):
        if path is None or not path.is_file():
            raise ConfigError(f"{setting}: {path or 'not given'}; give a file")
    for name, path in chain.more_texts.items():
        if not path.exists():
            raise ConfigError(f"text: {name}={path}: is not there")
    for stage, run in RUN.items():
        wanted = stage == "text" or stage in stages
        if wanted and (bench or stage != "bench"):
            run(chain)
            write_result(chain)


# ---- The stages. ---------------------------------------------------------------------------------


def text_stage(chain: Chain) -> None:
    """Put the texts to choose on together, and note all texts by name, files and sha256.

    ConfigError: the work folder was begun with other texts.
    """
    noted = chain.texts / "texts.json"
    given = {"train": chain.train_text, "report": chain.report_text, **chain.more_texts}
    found = {name: describe(path) for name, path in given.items()}
    if noted.is_file():
        before = json.loads(noted.read_text(encoding="utf-8"))
        for name, said in found.items():
            if before.get(name, said)["sha256"] != said["sha256"]:
                other = f"{name}: {given[name]} is not the text that {chain.work} was begun with"
                raise ConfigError(f"{other}; give another --work")
        found = before | found
    if "prose" not in found:
        write_kept_apart(chain, chain.texts / "prose")
        found["prose"] = describe(chain.texts / "prose")
    if "code" not in found:
        write_code(chain.texts / "code")
        found["code"] = describe(chain.texts / "code")
        found["code"]["name"] = f"standard library of Python {platform.python_version()}"
    report = chain.report_text.read_text(encoding="utf-8", errors="replace")
    if " @-@ " in report and "<unk>" in report:
        found["report"]["note"] = TOKEN_FORM
    write_text(noted, json.dumps(found, indent=1) + "\n")
    for name, said in found.items():
        size = f"{said['files']} files, {said['bytes']:,} bytes"
        print(f"text {name}: {said['name']}, {size}, sha256 {said['sha256'][:12]}")


def describe(path: Path) -> dict[str, Any]:
    """Return a text's name, files, bytes and sha256; of a folder, that of its files' sums."""
    if path.is_file():
        return {
            "name": path.name,
            "files": 1,
            "bytes": path.stat().st_size,
            "sha256": sha256_of(path),
        }
    files = sorted(file for file in path.rglob("*") if file.is_file())
    lines = "".join(f"{sha256_of(file)}  {file.relative_to(path).as_posix()}\n" for file in files)
    size = sum(file.stat().st_size for file in files)
    return {
        "name": path.name,
        "files": len(files),
        "bytes": size,
        "sha256": hashlib.sha256(lines.encode()).hexdigest(),
    }


def write_kept_apart(chain: Chain, folder: Path) -> None:
    """Write the documents of the train text that the cache keeps apart, which are its first."""
    open_at = partial(open_documents, TextConfig(dataset=str(chain.train_text)))
    encode = make_encoder(load_tokenizer(chain.teacher))
    _, count = take_eval(open_at, encode, LENGTH, chain.amount.kept_apart)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number, document in zip(range(count), open_at(0), strict=False):
        write_document(document, folder / f"{number:05d}")


def write_document(document: Document, file: Path) -> None:
    """Write a document as a text file, a chat as a row of its own; blank ones are left out."""
    if document.is_blank:
        return
    if document.messages:
        row = json.dumps({"messages": document.messages}, ensure_ascii=False)
        file.with_suffix(".jsonl").write_text(row + "\n", encoding="utf-8")
    else:
        file.with_suffix(".txt").write_text("".join(document.parts()), encoding="utf-8")


def write_code(folder: Path) -> None:
    """Copy modules of the standard library, ordered by their names' sums, up to `CODE_BYTES`."""
    library = Path(sysconfig.get_path("stdlib"))
    modules = [file for file in library.glob("*.py") if file.stat().st_size in CODE_FILE_BYTES]
    modules.sort(key=lambda file: hashlib.sha256(file.name.encode()).hexdigest())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    size = 0
    for module in modules:
        if size >= CODE_BYTES:
            break
        shutil.copyfile(module, folder / module.name)
        size += module.stat().st_size


def cache_stage(chain: Chain) -> None:
    """Build the cache."""
    words = command(
        "cache build",
        f"{CACHE} {chain.amount.cache}",
        teacher=chain.teacher,
        dataset=chain.train_text,
        eval_rows=chain.amount.kept_apart,
        out=chain.home / "cache",
    )
    chain.qat_lora("cache", words)


def quantise_stage(chain: Chain) -> None:
    """Quantise every student."""
    for student in chain.students:
        quick = STUDENTS[student].quick if chain.amount.quantise else ""
        words = command(
            "quantize",
            f"{STUDENTS[student].quantise} {chain.amount.quantise} {quick}",
            model=chain.teacher,
            kd_cache_dir=chain.home / "cache",
            out=quantised(chain, student),
        )
        chain.qat_lora(f"quantise-{student}", words)


def recover_stage(chain: Chain) -> None:
    """Train the students that are trained."""
    for student in chain.students:
        flags = STUDENTS[student].recover
        if flags is None:
            continue
        words = command(
            "recover",
            f"{RECOVER} {flags} {chain.amount.recover}",
            checkpoint=quantised(chain, student),
            kd_cache_dir=chain.home / "cache",
            out=finished(chain, student),
        )
        chain.qat_lora(f"recover-{student}", words)


def evaluate_stage(chain: Chain) -> None:
    """Score start and recovered by our evaluator, on every text."""
    texts = {"code": chain.texts / "code", "prose": chain.texts / "prose", **chain.more_texts}
    for student in chain.students:
        folder = finished(chain, student)
        models = f"start={folder}"
        if STUDENTS[student].recover is not None:
            models = f"start={folder / 'start'},recovered={folder}"
        words = command(
            "eval",
            EVALUATE,
            teacher=chain.teacher,
            students=models,
            dataset=chain.report_text,
            domain=",".join(f"{name}={path}" for name, path in texts.items()),
            eval_rows=chain.amount.scored,
            out=chain.home / student / "scores",
        )
        chain.qat_lora(f"evaluate-{student}", words)


def export_stage(chain: Chain) -> None:
    """Write the GGUF files of every student."""
    for student in chain.students:
        words = command(
            "export",
            f"--form gguf {STUDENTS[student].export} {chain.amount.export}",
            student=finished(chain, student),
            dataset=chain.train_text,
            out=chain.home / student / "exported",
        )
        chain.qat_lora(f"export-{student}", words)


def command(name: str, flags: str, **settings: Any) -> list[str]:
    """Return a command of qat-lora: settings, then more flags; the last flag of a name counts."""
    words = name.split()
    for setting, value in settings.items():
        words += [f"--{setting.replace('_', '-')}", str(value)]
    return words + flags.split()


def reference_stage(chain: Chain) -> None:
    """Write the teacher in F16, its logits on the report text, and the importance matrix."""
    threads = ["-t", str(chain.threads)]
    folder = chain.reference
    words = command("export", "--form gguf-merged", student=chain.teacher, out=folder / "f16")
    by_us = Steps(chain.shared.folder, chain.own.variables, chain.own.said_of_all)
    by_us.run("reference-f16", words, QAT_LORA)

    words = ["llama-perplexity", "-m", str(f16(chain)), "-f", str(chain.report_text)]
    words += ["-c", str(LENGTH), "--chunks", str(chain.amount.chunks)]
    words += ["--kl-divergence-base", str(folder / "logits.kld")]
    chain.llama_cpp(chain.shared, "reference-logits", words, threads)

    words = ["llama-imatrix", "-m", str(f16(chain)), *plain_text(chain), "-c", str(LENGTH)]
    words += ["--chunks", str(chain.amount.importance_chunks)]
    words += ["-o", str(folder / "importance.gguf")]
    chain.llama_cpp(chain.shared, "reference-importance", words, threads)


def plain_text(chain: Chain) -> list[str]:
    """Return llama-imatrix's words for the train text; of chats, what the model's template says."""
    if chain.train_text.suffix == ".txt":
        return ["-f", str(chain.train_text)]
    tokenizer = load_tokenizer(chain.teacher)
    encode = make_encoder(tokenizer)
    enough = 2 * LENGTH * chain.amount.importance_chunks
    ids: list[int] = []
    for document in open_documents(TextConfig(dataset=str(chain.train_text))):
        for piece, _ in encode(document):
            ids.extend(int(token) for token in piece)
        if len(ids) >= enough:
            break
    file = chain.reference / "train.txt"
    write_text(file, tokenizer.decode(ids[:enough], clean_up_tokenization_spaces=False))
    return ["-f", str(file), "--parse-special"]


def score_stage(chain: Chain) -> None:
    """Score our files in llama.cpp."""
    for student in chain.students:
        score(chain, chain.own, f"score-{student}", *served(chain, student))


def types_stage(chain: Chain) -> None:
    """Make llama.cpp's own files with its importance matrix, and score them."""
    for kind in chain.types:
        make_type(chain, kind)
        score(chain, chain.shared, f"score-{kind}", chain.reference / f"{kind}.gguf", None)


def make_type(chain: Chain, kind: str) -> None:
    """Make one of llama.cpp's own files."""
    importance = str(chain.reference / "importance.gguf")
    file = str(chain.reference / f"{kind}.gguf")
    words = ["llama-quantize", "--imatrix", importance, str(f16(chain)), file, kind]
    chain.llama_cpp(chain.shared, f"type-{kind}", words, [str(chain.threads)])


def score(chain: Chain, steps: Steps, step: str, file: Path, adapter: Path | None) -> None:
    """Compare a file, with its adapter where there is one, with the teacher's logits."""
    words = ["llama-perplexity", "-m", str(file), "-f", str(chain.report_text), "-c", str(LENGTH)]
    words += ["--kl-divergence-base", str(chain.reference / "logits.kld"), "--kl-divergence"]
    words += [] if adapter is None else ["--lora", str(adapter)]
    chain.llama_cpp(steps, step, words, ["-t", str(chain.threads)])


def bench_stage(chain: Chain) -> None:
    """Measure tokens a second, each file right after the yardstick; ConfigError: not idle."""
    for kind in (YARDSTICK, *chain.types):
        make_type(chain, kind)
    wait_until_idle()
    yardstick = chain.reference / f"{YARDSTICK}.gguf"
    for turn in range(1, ROUNDS + 1):
        for kind in chain.types:
            file = chain.reference / f"{kind}.gguf"
            run_in_turns(chain, chain.shared, f"bench-{kind}-{turn}", yardstick, file, None)
        for student in chain.students:
            file, adapter = served(chain, student)
            run_in_turns(chain, chain.own, f"bench-{student}-{turn}", yardstick, file, adapter)


def run_in_turns(
    chain: Chain,
    steps: Steps,
    step: str,
    yardstick: Path,
    file: Path,
    adapter: Path | None,
) -> None:
    """Measure the yardstick, then a file, by the same program."""
    if adapter is None:
        program = ["llama-bench", "-o", "json", *BENCH.split()]
        beside = []
    else:
        program = ["llama-batched-bench", "--output-format", "jsonl", *BENCH_WITH_ADAPTER.split()]
        beside = ["--lora", str(adapter)]
    chain.llama_cpp(steps, f"{step}-{YARDSTICK}", [*program, "-m", str(yardstick)])
    chain.llama_cpp(steps, step, [*program, "-m", str(file), *beside])


def wait_until_idle() -> None:
    """Wait some minutes for the load average to fall to `IDLE_LOAD`; ConfigError: it does not."""
    end = time.monotonic() + IDLE_WAIT_S
    while (load := os.getloadavg()[0]) > IDLE_LOAD:
        if time.monotonic() > end:
            busy = f"bench: the load average is {load:.1f}; allowed: up to {IDLE_LOAD}"
            raise ConfigError(f"{busy}; speed beside other work means nothing: wait, and try again")
        time.sleep(10)


RUN: dict[str, Callable[[Chain], None]] = {
    "text": text_stage,
    "cache": cache_stage,
    "quantise": quantise_stage,
    "recover": recover_stage,
    "evaluate": evaluate_stage,
    "export": export_stage,
    "reference": reference_stage,
    "score": score_stage,
    "types": types_stage,
    "bench": bench_stage,
}


def quantised(chain: Chain, student: str) -> Path:
    """Return the folder of a student as it was quantised."""
    return chain.home / student / "quantised"


def finished(chain: Chain, student: str) -> Path:
    """Return the folder of a student as it is exported."""
    if STUDENTS[student].recover is None:
        return quantised(chain, student)
    return chain.home / student / "recovered"


def served(chain: Chain, student: str) -> tuple[Path, Path | None]:
    """Return the base and the adapter, if any, that llama.cpp is given."""
    folder = chain.home / student / "exported"
    adapter = folder / "adapter.gguf"
    return folder / "base.gguf", adapter if adapter.is_file() else None


def f16(chain: Chain) -> Path:
    """Return the teacher's file in F16."""
    return chain.reference / "f16" / "base.gguf"


# ---- What the steps said. ------------------------------------------------------------------------


def read_kl(text: str) -> dict[str, float | None]:
    """Return the figures of llama-perplexity's report, nats and shares; None for what is no number.

    FailedError: a figure is missing.
    """
    found: dict[str, float | None] = {}
    for name, pattern in FIGURES.items():
        match = re.search(pattern, text, re.M)
        if match is None:
            missing = f"llama-perplexity: its report has no line {pattern}"
            raise FailedError(f"{missing}; its version writes another one")
        value = float(match[1].rstrip("%"))
        value = value / 100 if name == "top1" else value
        found[name] = round(value, 6) if abs(value) < float("inf") else None
    return found


def read_speed(text: str) -> dict[str, float]:
    """Return tokens a second, of a prompt and of decoding, from what a bench program printed."""
    if text.lstrip().startswith("["):
        tests = json.loads(text)
        prompt = [test["avg_ts"] for test in tests if test["n_prompt"]]
        decoding = [test["avg_ts"] for test in tests if test["n_gen"]]
    else:
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        prompt = [line["speed_pp"] for line in lines]
        decoding = [line["speed_tg"] for line in lines]
    if not prompt or not decoding:
        raise FailedError("llama-bench: its output names no speed; it is another version's")
    return {"prompt": statistics.median(prompt), "decoding": statistics.median(decoding)}


def speed(steps: Steps, step: str) -> dict[str, float] | None:
    """Return a file's speeds and their ratios to the yardstick's, as medians; None: no round."""
    found: dict[str, list[float]] = {}
    for turn in range(1, ROUNDS + 1):
        own = steps.output(f"{step}-{turn}")
        other = steps.output(f"{step}-{turn}-{YARDSTICK}")
        if own is None or other is None:
            continue
        own_speed = read_speed(own)
        other_speed = read_speed(other)
        for name, value in own_speed.items():
            found.setdefault(name, []).append(value)
            found.setdefault(f"{name}_ratio", []).append(value / other_speed[name])
    return {name: round(statistics.median(values), 3) for name, values in found.items()} or None


def scored(steps: Steps, step: str) -> dict[str, float | None] | None:
    """Return the figures of a file in llama.cpp, None where it was not scored."""
    text = steps.output(step)
    return None if text is None else read_kl(text)


def own_scores(chain: Chain, student: str) -> dict[str, Any] | None:
    """Return what our evaluator found: model, text, figure; None where it did not run."""
    file = chain.home / student / "scores" / "report.json"
    if not chain.own.note(f"evaluate-{student}").get("done") or not file.is_file():
        return None
    domains = json.loads(file.read_text(encoding="utf-8"))["domains"]
    domains["report"] = domains.pop(chain.report_text.name)
    found: dict[str, Any] = {}
    for text, models in domains.items():
        for model, figures in models.items():
            kept = {name: figures[name] for name in OUR_FIGURES if figures.get(name) is not None}
            found.setdefault(model, {})[text] = kept
    return found


def sizes(files: Iterable[Path | None]) -> dict[str, Any]:
    """Return files by bytes, and the MB of all of them."""
    there = [file for file in files if file is not None and file.is_file()]
    found = {file.name: file.stat().st_size for file in there}
    return {"files": found, "mb": round(sum(found.values()) / 1e6, 2)}


def write_result(chain: Chain) -> None:
    """Write all that is known as JSON."""
    noted = chain.texts / "texts.json"
    packages = {chain.own.note(step).get("package") for step in chain.own.minutes()}
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": chain.machine,
        "versions": {
            "qat_lora": ", ".join(sorted(filter(None, packages))),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "llama.cpp": llama_version(chain),
        },
        "model": chain.model,
        "name": chain.name,
        "weights": {file.name: sha256_of(file) for file in model_files(chain.teacher)},
        "settings": chain.amount._asdict() | {"length": LENGTH},
        "texts": json.loads(noted.read_text(encoding="utf-8")) if noted.is_file() else {},
        "students": {},
        "types": {},
        "minutes": {"own": chain.own.minutes(), "shared": chain.shared.minutes()},
    }
    for student in STUDENTS:
        if not any(step.endswith(f"-{student}") for step in chain.own.minutes()):
            continue
        result["students"][student] = {
            "settings": STUDENTS[student]._asdict(),
            **sizes(served(chain, student)),
            "scores": own_scores(chain, student),
            "llama_cpp": scored(chain.own, f"score-{student}"),
            "speed": speed(chain.own, f"bench-{student}"),
        }
    for kind in TYPES:
        if (figures := scored(chain.shared, f"score-{kind}")) is not None:
            file = chain.reference / f"{kind}.gguf"
            result["types"][kind] = {**sizes([file]), "llama_cpp": figures}
            result["types"][kind]["speed"] = speed(chain.shared, f"bench-{kind}")
    chain.results.mkdir(parents=True, exist_ok=True)
    write_text(chain.result, json.dumps(result, indent=1) + "\n")


def llama_version(chain: Chain) -> str | None:
    """Return what llama.cpp's programs say of themselves, None: they are not here."""
    try:
        command = [*chain.launcher("llama-perplexity"), "llama-perplexity", "--version"]
    except ConfigError:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"^version: (.*)$", done.stdout + done.stderr, re.M)
    return found[1] if found else None


# ---- Tables. -------------------------------------------------------------------------------------


def read_results(chain: Chain) -> list[dict[str, Any]]:
    """Return the result of this model and those of its other runs; ConfigError: there is none."""
    first = chain.results / f"real_model_{chain.model}.json"
    found = [first, *sorted(chain.results.glob(f"real_model_{chain.model}_*.json"))]
    results = [json.loads(file.read_text(encoding="utf-8")) for file in found if file.is_file()]
    if not results:
        raise ConfigError(f"table: {chain.results} holds no {first.name}; run the chain first")
    return results


def tables(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of some runs of one model as Markdown."""
    lines = [*files_table(results), "", *scores_table(results), "", *minutes_table(results)]
    return "\n".join(lines)


def files_table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of files in llama.cpp, by size."""
    rows: list[tuple[float, list[str]]] = []
    for result in results:
        for student, found in result["students"].items():
            if not found["files"]:
                continue
            label = f"**qat-lora: {named(student, result)}** ({' + '.join(found['files'])})"
            rows.append((found["mb"], [label, *cells(found)]))
    types = {kind: found for result in results for kind, found in result["types"].items()}
    rows += [(found["mb"], [kind, *cells(found)]) for kind, found in types.items()]
    header = [
        "file",
        "MB, all files",
        "KL",
        "99.9 %",
        "top-1",
        "perplexity",
        "prompt, tokens/s",
        "decoding, tokens/s",
    ]
    return markdown(header, [row for _, row in sorted(rows, key=lambda row: row[0])])


def cells(found: Mapping[str, Any]) -> list[str]:
    """Return a file's cells."""
    figures = found["llama_cpp"] or {}
    speeds = found["speed"] or {}
    row = [f"{found['mb']:.1f}"]
    for name, form in (("kl", ".4f"), ("kl_999", ".2f"), ("top1", ".1%"), ("perplexity", ",.2f")):
        row.append(shown(figures.get(name), form))
    for name in ("prompt", "decoding"):
        ratio = shown(speeds.get(f"{name}_ratio"), ".2f")
        row.append("-" if name not in speeds else f"{speeds[name]:,.0f} ({ratio} of {YARDSTICK}'s)")
    return row


def scores_table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of our evaluator: KL, top-1 and perplexity on every text."""
    rows = []
    for result in results:
        for student, found in result["students"].items():
            for model, texts in (found["scores"] or {}).items():
                for text, figures in texts.items():
                    row = [named(student, result), model, text]
                    row += [shown(figures.get("kl"), ".4f"), shown(figures.get("top1"), ".1%")]
                    rows.append([*row, shown(figures.get("ppl"), ",.2f")])
    return markdown(["student", "", "text", "KL", "top-1", "perplexity"], rows)


def minutes_table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of minutes by step, those of llama.cpp's own files together."""
    rows = []
    for result in results:
        for step, minutes in result["minutes"]["own"].items():
            if not step.startswith("bench-"):
                rows.append([named(step, result), f"{minutes:.1f}"])
    shared = results[0]["minutes"]["shared"]
    for stage in ("reference", "type", "score", "bench"):
        spent = [minutes for step, minutes in shared.items() if step.startswith(f"{stage}-")]
        if spent:
            rows.append([f"{stage}, llama.cpp's own, {len(spent)} steps", f"{sum(spent):.1f}"])
    return markdown(["step", "minutes"], rows)


def named(what: str, result: Mapping[str, Any]) -> str:
    """Return a name with that of its run."""
    return what if result["name"] == NOW else f"{what}, {result['name']}"


def shown(value: float | None, form: str) -> str:
    """Return a figure as text, a dash where there is none; percentages with a space."""
    return "-" if value is None else format(value, form).replace("%", " %")


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stopped)
    main()

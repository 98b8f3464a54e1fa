"""Runs one small pipeline with two commits, through the command line alone, and compares all that they leave.

A restructuring changes no behaviour, and tests that move along with the code cannot show that: this program can. It
makes a toy teacher and its text without the package under test, gives both commits the very same words, and compares
exit codes, what is printed, and every file: tensors bit for bit, JSON, YAML and logs by value (times, speeds, versions
and the working folder left out), everything else byte for byte. Differences that were decided on are in `INTENDED`,
each with its reason. Exit code 1 where another one is found.

    git worktree add --detach before 9712869
    python tests/compare_commits.py --before before --after . --out report.json

Both commits run at the same time, one process each, which is forked for each command (importing torch thirty times
would take longer than the commands); commands on PyTorch/XLA get a fresh interpreter, since that is chosen at import.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from toy_paths import FAST_COMPILE

INTENDED: dict[str, str] = {
    r"^(said/pack\.|packed/)": "the own transport is replaced by tar and zstd",
    r"^(said/)?recover-fewer[./]": "--head-k with draws is refused",
    r"^(said/)?estimate(-table)?[./]": "time is a roofline; memory under XLA is that of the loop over stacked layers",
    r"start_method": "the start methods svd and best are removed; qera was the default",
    r"break_even|teacher_tokens_per_s|build_tokens_per_s": "the break-even estimate is removed",
    r"\.html\b": "no HTML card",
    r"scores\.md: : new .KL to teacher": "no HTML card: its legend is in scores.md",
    r"qat_lora_run\.json: \.files\.report\.json\[0\]": "the break-even estimate is removed",
    r"README\.md: .*(checked with transformers|vLLM)": "the list of vLLM's rules is removed",
    r"checkpoints/step-\d+.*(only one commit|SHA256SUMS)": "how checkpoints are written",
    r"quantize-dry\.out: .*solvers": "the dry run says what solving for codes takes",
    r"checkpoints/.*metadata: None, now \{'format': 'pt'\}": "how checkpoints are written",
    r"qat_lora_(files\.txt|run\.json): .*checkpoints/": "how checkpoints are written",
}
"""Patterns of differences (`path: what`) that were decided on, and why."""
VOLATILE_KEYS = (
    "*seconds*",
    "*_s",
    "*per_s",
    "*_mb",
    "*_bytes_peak",
    "*peak*",
    "date",
    "time",
    "*version*",
    "commit",
    "machine",
    "made_with",
    "written_by",
    "checksum",
    "metrics.jsonl",  # its size and sha256; the log holds speeds, and is compared itself
)
"""Keys of JSON whose values differ between two runs of one commit."""
VOLATILE_TEXT = (
    (r"\d[\d,.]* ?(s|ms|min|minutes|seconds)\b", "TIME"),
    (r"\d[\d,.]*[kM]? (tokens|rows|steps|files)/s", "SPEED"),
    (r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d)?)?", "DATE"),
    (r"[0-9a-f]{64}", "SHA256"),
    (r"(free|time) +\d[^\n]*", r"\1"),
)
NOT_COMPARED = ("*.png", "*.pdf", "*/events.out.*", "*/.tmp-*", "*/.lock*")
KILLED, SECONDS = -signal.SIGKILL, 300
WORDS = ("layer", "weight", "token", "of", "to", "and", "in", "loss", "cache", "scale", "code", "row", "tail")


class Case(NamedTuple):
    """One command, in order: later ones read what earlier ones left."""

    name: str
    words: str
    xla: bool = False
    kill_when: str = ""
    """Kill the command once this path is there, and give it again."""


TEXT = "--dataset toy/text --length 32"
BUILD = f"cache build --teacher toy/teacher {TEXT} --eval-rows 8 --num-rows 56 --shard-rows 24 --teacher-batch-size 8"
QUANTIZE = "quantize --model toy/teacher --calibration-rows 8 --calibration-length 32"
LOOP = "--batch-size 4 --log-steps 2 --eval-steps 4 --save-steps 4 --warmup-steps 1 --lr 2e-3 --scale-lr 1e-3"
RECOVER = f"recover {LOOP} --max-steps 8 --recovery-r 2"
QAT = f"qat --kd-cache-dir cache-head {LOOP} --max-steps 6"
SCORE = "--dataset toy/held-out --length 32 --eval-rows 8"
CASES = (
    Case("cache-head", f"{BUILD} --top-k 16 --tail-draws 0 --value-dtype uint8"),
    Case("cache-draws", f"{BUILD} --top-k 16 --value-dtype uint8 --temperatures 1,2"),
    Case("cache-sampled", f"{BUILD} --top-k 0 --draws 12 --hidden"),
    Case("cache-part-0", f"{BUILD} --top-k 8 --builder 0/2".replace("OUT", "cache-parts")),
    Case("cache-dry", f"{BUILD} --top-k 16 --dry-run"),
    Case(
        "cache-chat",
        "cache build --teacher toy/teacher --dataset toy/chats.jsonl --format sharegpt --length 32"
        " --top-k 8 --num-rows 16",
    ),  # fmt: skip
    Case("verify", "cache verify cache-head"),
    Case("info", "cache info cache-draws --json"),
    Case("info-text", "cache info cache-head --tokenizer toy/teacher"),
    Case("export-rows", "cache export cache-head --parquet --out rows.parquet"),
    Case("audit", "cache audit cache-draws --teacher toy/teacher --rows 4"),
    Case("pack", "cache pack cache-head packed/cache"),
    Case("student-absmax", "quantize --model toy/teacher --preset w2g64 --init absmax --start-rank 0"),
    Case(
        "student-mse", "quantize --model toy/teacher --preset w4g64a --init mse --start-rank 0 --quantize-head w4g128"
    ),
    Case("student-gptq", f"{QUANTIZE} --preset w2g64 --init gptq --kd-cache-dir cache-head --start-rank 4"),
    Case("student-descent", f"{QUANTIZE} --preset w4g64a --kd-cache-dir cache-head --start-rank 0"),
    Case("student-lowrank", f"{QUANTIZE} --preset q4a4 --init awq --dataset toy/text --start-rank 2"),
    Case("quantize-dry", "quantize --model toy/teacher --preset w2g64 --kd-cache-dir cache-head --dry-run"),
    Case(
        "recover-start",
        f"{RECOVER} --checkpoint student-gptq --kd-cache-dir cache-draws --train-scales",
        kill_when="recover-start/checkpoints/step-000004/COMPLETE",
    ),  # fmt: skip
    Case(
        "recover-ghost",
        f"{RECOVER} --checkpoint student-absmax --kd-cache-dir cache-head --train-norms --ema 0.9"
        " --accumulation-steps 2 --gradient-checkpointing --ce-weight 0.2 --hard-top1-weight 0.1",
    ),  # fmt: skip
    Case(
        "recover-sampled",
        f"{RECOVER} --checkpoint student-lowrank --kd-cache-dir cache-sampled --estimator sampled --hidden-weight 0.1",
    ),
    Case("recover-fewer", f"{RECOVER} --checkpoint student-absmax --kd-cache-dir cache-draws --head-k 8"),
    Case(
        "recover-text",
        f"{RECOVER} --checkpoint student-mse --learn ce --dataset toy/text --length 32 --eval-rows 4 --dropout 0.1",
    ),  # fmt: skip
    Case(
        "recover-chat",
        f"{RECOVER} --checkpoint student-mse --learn sft --dataset toy/chats.jsonl --format sharegpt"
        " --length 32 --eval-rows 4",
    ),  # fmt: skip
    Case("recover-dry", f"{RECOVER} --checkpoint student-absmax --kd-cache-dir cache-head --dry-run"),
    Case("recover-two", f"{RECOVER} --checkpoint student-absmax --kd-cache-dir cache-head --num-chips 2"),
    Case("qat-scales", f"{QAT} --checkpoint student-absmax --train-parts scales,norms"),
    Case(
        "qat-weights",
        f"{QAT} --from-scratch --model toy/teacher --preset w4g128 --init mse --train-parts weights"
        " --weight-gradient ste --blockwise-steps 2 --anchor-weight 0.1",
    ),
    Case("qat-mergeable", f"{QAT} --checkpoint student-descent --mergeable --mergeable-r 2"),
    Case("qat-dry", f"{QAT} --checkpoint student-absmax --dry-run"),
    Case(
        "recover-xla",
        f"{RECOVER} --checkpoint student-absmax --kd-cache-dir cache-head --train-scales",
        True,
        "recover-xla/checkpoints/step-000004/COMPLETE",
    ),  # fmt: skip
    Case(
        "eval",
        f"eval --teacher toy/teacher --students recover-start,student-absmax,qat-scales {SCORE}"
        " --resamples 100 --generate 2 --generate-tokens 8 --prompt-tokens 4 --kd-cache-dir cache-head",
    ),  # fmt: skip
    Case("eval-sliding", f"eval --teacher toy/teacher --students recover-ghost {SCORE} --protocol sliding"),
    Case("generate", "generate --student recover-start --prompt 'the model' --max-new-tokens 12"),
    Case("generate-teacher", "generate --student toy/teacher --prompt 'a row of' --max-new-tokens 12 --json"),
    Case("estimate", "estimate --model toy/teacher --preset w2g64 --length 32 --json"),
    Case("estimate-text", "estimate --model toy/teacher --preset q4_r32 --train-scales"),
    Case("merged", f"export --student recover-start --form merged {SCORE}"),
    Case("merged-mergeable", "export --student qat-mergeable --form merged"),
    Case("adapter", f"export --student recover-start --form adapter {SCORE}"),
    Case("compressed", f"export --student qat-scales --form compressed-tensors {SCORE}"),
    Case("gguf", "export --student recover-ghost --form gguf"),
    Case("gguf-qat", "export --student qat-weights --form gguf"),
    Case("refuse-preset", "quantize --model toy/teacher --preset w9"),
    Case("refuse-flag", "recover --nothing"),
    Case("refuse-damage", "cache verify toy"),
    Case("refuse-again", f"{BUILD} --top-k 12".replace("OUT", "cache-head")),
)
NO_OUT = ("cache verify", "cache info", "cache export", "cache pack", "generate", "estimate", "recover --nothing")


def words_of(case: Case) -> list[str]:
    """Return the words of a case, with the output folder named after it."""
    import shlex

    words = shlex.split(case.words)
    if not case.words.startswith(("cache info", "estimate", "recover --nothing")):
        words.append("--quiet")
    if not case.words.startswith(NO_OUT):
        words += ["--out", "cache-head" if case.name == "refuse-again" else case.name]
    if not case.words.startswith(("cache ver", "cache info", "cache exp", "cache pack", "recover --nothing")):
        words += ["--device", "xla" if case.xla else "cpu"] if not case.words.startswith("estimate") else []
    return words


def make_toy(root: Path) -> None:
    """Make text, chats and an untrained teacher with logits that are not flat, without the package under test."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    for name, documents, seed in (("text", 24, 0), ("held-out", 6, 1)):
        (root / name).mkdir(parents=True)
        draw = random.Random(seed)
        for i in range(documents):
            lines = [" ".join(draw.choices(WORDS, k=draw.randint(4, 12))) + "." for _ in range(draw.randint(5, 30))]
            (root / name / f"{i:03d}.txt").write_text("\n".join(lines) + "\n")
    chats = [[{"from": "human", "value": f"what is row {i}"}, {"from": "gpt", "value": f"row {i} is a {WORDS[i % 13]}"}]
             for i in range(40)]  # fmt: skip
    (root / "chats.jsonl").write_text("".join(json.dumps({"conversations": turns}) + "\n" for turns in chats))
    end, size = "<|endoftext|>", 320
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((file.read_text() for file in sorted((root / "text").iterdir())), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end).save_pretrained(root / "teacher")
    (root / "teacher" / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=size, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, head_dim=32, intermediate_size=96, max_position_embeddings=256,
                         tie_word_embeddings=True, bos_token_id=0, eos_token_id=0)  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # as made, attention is nearly uniform and quantisation hardly shows
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0 if "embed" not in name else 2.0)
    model.save_pretrained(root / "teacher")


def run_cases(cases: list[Case]) -> None:
    """Run cases in the working folder with the package on this process's path; `said/` gets what they print."""
    import torch
    import transformers
    from transformers import Qwen3ForCausalLM  # noqa: F401  transformers imports its parts when they are asked for

    from qat_lora.cli import main

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    Path("said").mkdir()
    for case in cases:
        begun, codes = time.monotonic(), []
        while True:
            pid = _fresh(case) if case.xla else _forked(case, main)
            code = _wait(pid, Path(case.kill_when) if case.kill_when and not codes else None)
            codes.append(code)
            if code != KILLED or not case.kill_when or len(codes) > 1:
                break
        Path("said", f"{case.name}.code").write_text(f"{codes}\n")
        print(f"{case.name:<20} {codes}  {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)


def _redirect(case: Case) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"said/{case.name}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)


def _forked(case: Case, main: Any) -> int:
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 99
    try:
        _redirect(case)
        sys.argv[:] = ["qat-lora", *words_of(case)]
        main(words_of(case))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 70
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _fresh(case: Case) -> int:
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    _redirect(case)
    program = "from qat_lora.cli import main; main()"
    environment = {k: v for k, v in os.environ.items() if k != "USE_TORCH_XLA"} | {
        "PJRT_DEVICE": "CPU",
        "XLA_FLAGS": FAST_COMPILE,
    }
    os.execve(sys.executable, [sys.executable, "-c", program, *words_of(case)], environment)


def _wait(pid: int, kill_when: Path | None) -> int:
    """Wait for a process; kill it once a path is there, or when it takes too long."""
    until = time.monotonic() + SECONDS
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until or (kill_when is not None and kill_when.exists()):
            os.kill(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.002)


class Difference(NamedTuple):
    """One difference: where, and what."""

    path: str
    what: str

    @property
    def reason(self) -> str | None:
        """Why it is intended; None where it is not."""
        line = f"{self.path}: {self.what}"
        return next((reason for pattern, reason in INTENDED.items() if re.search(pattern, line)), None)


def compare(before: Path, after: Path) -> tuple[list[Difference], dict[str, int]]:
    """Compare two working folders; return the differences, and how many files of each kind were compared."""
    found, kinds = [], dict[str, int]()
    names = {}
    for root in (before, after):
        names[root] = {
            name
            for file in root.rglob("*")
            if file.is_file() and not any(fnmatch.fnmatch(name := file.relative_to(root).as_posix(), p)
                                          for p in NOT_COMPARED)
        }  # fmt: skip
    for name in sorted(names[before] ^ names[after]):
        found.append(Difference(name, f"only one commit has it ({'before' if name in names[before] else 'after'})"))
    for name in sorted(names[before] & names[after]):
        kind = name.rsplit("/", 1)[-1].rpartition(".")[2]
        kinds[kind] = kinds.get(kind, 0) + 1
        found += [Difference(name, what) for what in _differing(before / name, after / name, (before, after))]
    return found, kinds


def _differing(before: Path, after: Path, roots: tuple[Path, Path]) -> Iterator[str]:
    if before.read_bytes() == after.read_bytes():
        return
    match before.suffix:
        case ".safetensors":
            yield from _tensors(before, after)
        case ".json" | ".jsonl" | ".yaml" | ".yml" | ".md" | ".txt" | ".out" | ".err" | ".code":
            values = [_plain(file, root) for file, root in zip((before, after), roots, strict=True)]
            yield from _values("", *values)
        case "" if before.name == "SHA256SUMS":  # of files that hold times; the files are compared themselves
            lists = [[line.split("  ")[1] for line in file.read_text().splitlines()] for file in (before, after)]
            yield from _values("", *lists)
        case _:
            values = [_plain(file, root) for file, root in zip((before, after), roots, strict=True)]
            if values[0] != values[1]:
                sums = [hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in (before, after)]
                yield f"other bytes ({sums[0]}, {sums[1]})"


def _tensors(before: Path, after: Path) -> Iterator[str]:
    import torch
    from safetensors import safe_open

    with safe_open(before, "pt") as one, safe_open(after, "pt") as other:
        yield from _values("metadata", one.metadata(), other.metadata())
        for name in sorted({*one.keys()} ^ {*other.keys()}):
            yield f"{name}: only one commit has it"
        for name in sorted({*one.keys()} & {*other.keys()}):
            x, y = one.get_tensor(name), other.get_tensor(name)
            if x.dtype != y.dtype or x.shape != y.shape:
                yield f"{name}: {x.dtype} {tuple(x.shape)}, now {y.dtype} {tuple(y.shape)}"
            elif not torch.equal(x, y):
                yield f"{name}: differs by up to {(x.double() - y.double()).abs().max():.3g}"


def _plain(file: Path, root: Path) -> Any:
    """Return what a file says, without what differs between two runs of one commit."""
    text = file.read_text(errors="backslashreplace").replace(str(root), "ROOT")
    if file.suffix == ".json":
        with contextlib.suppress(ValueError):
            return json.loads(text)
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    if file.suffix in (".yaml", ".yml"):
        import yaml

        return yaml.safe_load(text)
    if file.suffix == ".out" and text.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            return json.loads(text)
    return _steady(text).splitlines()


def _steady(text: str) -> str:
    for pattern, word in VOLATILE_TEXT:
        text = re.sub(pattern, word, text)
    return text


def _values(where: str, before: Any, after: Any) -> Iterator[str]:
    """Yield where two values differ, keys that always do left out."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys(), key=str):
            if any(fnmatch.fnmatch(str(key), pattern) for pattern in VOLATILE_KEYS):
                continue
            if key not in before or key not in after:
                yield f"{where}.{key}: only one commit has it"
            else:
                yield from _values(f"{where}.{key}", before[key], after[key])
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _values(f"{where}[{i}]", one, other)
    elif isinstance(before, list) and isinstance(after, list) and all(isinstance(x, str) for x in before + after):
        yield from (f"{where}: no longer {line!r}" for line in before if line not in after)
        yield from (f"{where}: new {line!r}" for line in after if line not in before)
    elif isinstance(before, str) and isinstance(after, str):
        if _steady(before) != _steady(after):
            yield f"{where}: {before!r}, now {after!r}"
    elif before != after:
        yield f"{where}: {before!r}, now {after!r}"


def main() -> int:
    """Run both commits and compare; exit code 1 where a difference is not intended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="folder of the older commit")
    parser.add_argument("--after", type=Path, help="folder of the newer commit")
    parser.add_argument("--only", default="", help="comma-separated names of cases; what they read has to be named too")
    parser.add_argument("--work", type=Path, help="folder to keep what both leave; default: a temporary one")
    parser.add_argument("--out", type=Path, help="JSON file for the report")
    parser.add_argument("--run-cases", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = [case for case in CASES if not arguments.only or case.name in arguments.only.split(",")]
    if arguments.run_cases:
        run_cases(cases)
        return 0
    with tempfile.TemporaryDirectory() if arguments.work is None else contextlib.nullcontext(arguments.work) as folder:
        return _compare_in(Path(folder).resolve(), arguments, cases)


def _compare_in(work: Path, arguments: argparse.Namespace, cases: list[Case]) -> int:
    begun, toy = time.monotonic(), work / "toy"
    shutil.rmtree(toy, ignore_errors=True)
    make_toy(toy)
    sides = {}
    for name, commit in (("before", arguments.before), ("after", arguments.after)):
        root = work / name
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(toy, root / "toy")
        environment = {**os.environ, "PYTHONPATH": str(commit.resolve()), "OMP_NUM_THREADS": "1", "COLUMNS": "110",
                       "USE_TORCH_XLA": "0", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0",
                       "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
        command = [sys.executable, str(Path(__file__).resolve()), "--run-cases", "--only", arguments.only]
        with (work / f"{name}.log").open("w") as log:
            sides[name] = subprocess.Popen(command, cwd=root, env=environment, stderr=log)
    codes = {name: process.wait() for name, process in sides.items()}
    if any(codes.values()):
        print({name: (work / f"{name}.log").read_text()[-2000:] for name in codes}, file=sys.stderr)
        return 1
    found, kinds = compare(work / "before", work / "after")
    bad = [difference for difference in found if difference.reason is None]
    codes = {case.name: (work / "after/said" / f"{case.name}.code").read_text().strip() for case in cases}
    report = {
        "commits": {name: _commit(getattr(arguments, name)) for name in ("before", "after")},
        "seconds": round(time.monotonic() - begun, 1),
        "commands": codes,
        "files": kinds,
        "not_intended": [difference._asdict() for difference in bad],
        "intended": [{**d._asdict(), "reason": d.reason} for d in found if d.reason is not None],
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{len(cases)} commands, {sum(kinds.values())} files in both, {report['seconds']:.0f} s")
    for title, some in (("intended", [d for d in found if d.reason]), ("not intended", bad)):
        print(f"{title}: {len(some)}")
        for difference in some[:40]:
            print(
                f"  {difference.path}: {difference.what[:300]}" + (f"  [{difference.reason}]" * bool(difference.reason))
            )
    print("no difference" if not bad else f"{len(bad)} differences that nobody decided on")
    return 1 if bad else 0


def _commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())

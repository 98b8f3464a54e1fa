"""Mistakes of users: one line that names the thing and the fix, exit code 2, and nothing made or changed.

Each row of the table is a command line as a person might type it; `{...}` are folders of the `work` fixture.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from qat_lora import cli
from qat_lora.files.checksums import seal
from qat_lora.quant.presets import PRESETS

BUILD = "cache build --teacher {teacher} --dataset {text} --length 32 --top-k 8"
QUANTIZE = "quantize --model {teacher} --init mse"
RECOVER = "recover --checkpoint {student} --kd-cache-dir {cache} --max-steps 2"
EVAL = "eval --teacher {teacher} --dataset {held_out} --length 32"

BAD: dict[str, tuple[str, str]] = {
    # what a person did: (the command line, what the message must say)
    "no such model folder": (
        f"{BUILD} --teacher {{root}}/nothing",
        "nothing; give a Hugging Face folder or a Hub name",
    ),
    "a folder without a model": (f"{BUILD} --teacher {{text}}", "has no config.json"),
    "broken config.json": (f"{BUILD} --teacher {{bad_config}}", "bad_config/config.json: is no JSON that can be used"),
    "a config of no model": (f"{BUILD} --teacher {{no_type}}", "does not load as a causal language model"),
    "truncated weights": (f"{BUILD} --teacher {{truncated}}", "truncated does not load"),
    "empty weights": (f"{BUILD} --teacher {{no_weights}}", "no_weights does not load"),
    "weights of another kind": (f"{BUILD} --teacher {{other_kind}}", "other_kind has missing"),
    "no tokenizer.json": (f"{BUILD} --teacher {{no_tokenizer}}", "copy the model's tokenizer.json"),
    "no tokenizer files": (f"{BUILD} --teacher {{bare}}", "bare has no tokenizer.json that can be used; copy that of"),
    "broken tokenizer.json": (f"{BUILD} --teacher {{bad_tokenizer}}", "bad_tokenizer has none that loads"),
    "no such text": (f"{BUILD} --dataset {{root}}/nothing.txt", "nothing.txt: no such file or folder; check the path"),
    "empty folder": (f"{BUILD} --dataset {{empty}}", "no file in {empty} matches"),
    "blank text": (f"{BUILD} --dataset {{blank}}", "all blank; give some text"),
    "blank evaluation text": (f"{EVAL} --students {{student}} --dataset {{blank}}", "all blank; give some text"),
    "blank calibration text": ("quantize --model {teacher} --dataset {blank}", "all blank; give some text"),
    "no such list of files": (f"{BUILD} --files-from {{root}}/none", "files_from: {root}/none cannot be read"),
    "a listed file is missing": (f"{BUILD} --files-from {{list}}", "files_from: missing.txt, listed in {list}"),
    "plain text as chats": (f"{BUILD} --format alpaca", "format: alpaca needs rows"),
    "all text for evaluation": (f"{BUILD} --eval-rows 100000", "or fewer, or more text"),
    "no text given": ("cache build --teacher {teacher}", "dataset: missing; give --dataset"),
    "L of 1": (f"{BUILD} --length 1", "length: 1 is too small; allowed: 2 or more"),
    "L beyond the model": (f"{BUILD} --length 300", "more than the model's 256 positions; give 256 or less"),
    "L beyond the model, in eval": (f"{EVAL} --length 300", "more than the model's 256 positions"),
    "L of the cache beyond the student": (
        "recover --model {short} --kd-cache-dir {cache}",
        "the student reads at most 16; build a cache with --length 16 or less",
    ),
    "K of 0": (f"{BUILD} --top-k 0", "top_k: 0 is too small; allowed: 1 or more"),
    "K beyond the vocabulary": (
        f"{BUILD} --top-k 1000",
        "top_k: 1000 does not fit; allowed: 1 to 320, or 0 with --hidden",
    ),
    "K beyond the cache": (f"{RECOVER} --head-k 9", "9 entries were asked for; allowed: 1 to 8"),
    "no temperature": (f"{BUILD} --temperatures 0", "temperatures: allowed: one or more numbers above 0"),
    "a temperature that is not cached": (f"{RECOVER} --temperature 2", "temperature: 2 is not in the cache"),
    "another tokenizer": (
        "recover --model {stranger} --kd-cache-dir {cache}",
        "build a cache with a teacher that shares the student's tokenizer",
    ),
    "another tokenizer, calibrating": (
        "quantize --model {stranger} --kd-cache-dir {cache}",
        "build a cache with a teacher that shares the student's tokenizer",
    ),
    "another tokenizer, scoring": (f"{EVAL} --students {{stranger}}", "students: stranger has another tokenizer"),
    "unknown preset": (f"{QUANTIZE} --preset w9", f"preset: 'w9' is unknown; allowed: {', '.join(PRESETS)}"),
    "unknown start": ("quantize --model {teacher} --init foo", "init: 'foo' is unknown; allowed: absmax, mse, awq"),
    "an override that is no pair": (f"{QUANTIZE} --override w4g128", "override: 'w4g128' is not PATTERN=PRESET"),
    "a joint rank without its start": (f"{QUANTIZE} --joint-rank 9 --start-rank 4", "more than --start-rank 4 stores"),
    "gptq without text": ("quantize --model {teacher}", "give --dataset, --kd-cache-dir or --init mse"),
    "a pattern without a match": (f"{QUANTIZE} --keep nothing", "'nothing' matches no linear layer; there are: model."),
    "no regular expression": (f"{QUANTIZE} --keep (", "keep: '(' is not a regular expression"),
    "a student as model": ("quantize --model {student} --init mse", "is quantised already"),
    "no calibration rows": (f"{QUANTIZE} --calibration-rows 0", "calibration_rows: 0 is too small"),
    "a negative rank of starts": (f"{QUANTIZE} --start-rank -1", "start_rank: -1 is too small"),
    "no cache there": ("recover --checkpoint {student} --kd-cache-dir {root}/nothing", "it is no finished KD cache"),
    "text as cache": ("recover --checkpoint {student} --kd-cache-dir {text}", "it is no finished KD cache"),
    "no checkpoint": ("recover --kd-cache-dir {cache}", "checkpoint: missing; give --checkpoint FOLDER"),
    "no such checkpoint": (
        "recover --checkpoint {root}/a/best.pt --kd-cache-dir {cache}",
        "there is no folder {root}/a",
    ),
    "a pickled checkpoint": ("recover --checkpoint {pickled} --kd-cache-dir {cache}", "best.pt is a pickled file"),
    "rank 0": (f"{RECOVER} --recovery-r 0", "recovery_r: 0 is too small; allowed: 1 or more"),
    "negative alpha": (f"{RECOVER} --recovery-alpha -1", "recovery_alpha: -1.0 is not allowed"),
    "batch 0": (f"{RECOVER} --batch-size 0", "batch_size: 0"),
    "negative steps": (f"{RECOVER} --max-steps -5", "max_steps: -5"),
    "a batch that does not divide": (f"{RECOVER} --global-batch-size 3", "global_batch_size: 3 is not a multiple of"),
    "negative batch of the teacher": (f"{BUILD} --teacher-batch-size -1", "teacher_batch_size: -1 is too small"),
    "negative rows": (f"{BUILD} --eval-rows -1", "eval_rows: -1 is too small; allowed: 0 or more"),
    "no rows": (f"{BUILD} --num-rows 0", "num_rows: 0 is too small"),
    "a rate that is no number": (f"{RECOVER} --lr fast", "train.lr: 'fast' is not a finite number or auto"),
    "a rate of nan": (f"{RECOVER} --lr nan", "train.lr: 'nan' is not a finite number or auto"),
    "negative seed": (f"{RECOVER} --seed -1", "seed: -1 is too small"),
    "huge seed": (f"{RECOVER} --seed 99999999999999999999", "seed: 99999999999999999999 is too large"),
    "targets that match nothing": (f"{RECOVER} --lora-targets nope", "lora_targets: 'nope' matches no linear layer"),
    "scales of a plain model": (
        "recover --model {teacher} --objective ce --dataset {text} --length 32 --train-scales",
        "the student has no quantised layers",
    ),
    "the teacher as its own student": (
        "recover --model {teacher} --kd-cache-dir {cache} --train-scales",
        "checkpoint: {teacher} is the cache's teacher itself, so there is nothing to recover; quantise it (qat-lora",
    ),
    "no such student": (f"{EVAL} --students {{root}}/nothing", "there is no folder {root}/nothing"),
    "two students of a name": (f"{EVAL} --students {{student}},{{student}}", "give each a name as NAME=FOLDER"),
    "a truncated adapter": (f"{EVAL} --students {{bad_adapter}}", "adapter_model.safetensors"),
    "an adapter without its base": (f"{EVAL} --students {{no_base}}", "/gone"),
    "nothing to export": ("export --student {teacher}", "nothing to merge"),
    "a prompt too long": ("generate --student {teacher} --prompt a --max-new-tokens 999", "of 256 positions"),
    "no CUDA here": (f"{BUILD} --device cuda", "--device cuda: "),
    "no Apple GPU here": (f"{RECOVER} --device mps", "--device mps: "),
    "no TPU here": (f"{RECOVER} --device tpu", "--device tpu: "),
    "no TPU here, the guide's way": (f"{RECOVER} --tpu", "--tpu: "),
    "two devices": (f"{RECOVER} --tpu --device cpu", "they contradict each other; give one of the two"),
    "unknown device": (
        f"{RECOVER} --device gpu",
        "run.device: 'gpu' is unknown; did you mean 'tpu'? allowed: auto, cpu",
    ),
    "unknown word": (f"{RECOVER} train.lrr=1", "train.lrr: no such setting; the nearest: train.lr, "),
    "unknown flag": (f"{RECOVER} --lrr 1", "No such option '--lrr'"),
    "a stray word": (f"{RECOVER} runs/x", "'runs/x': expected a setting as name=value"),
    "a flag without value": ("recover --checkpoint", "Option '--checkpoint' requires an argument"),
    "no such recipe": (f"{RECOVER} --recipe {{root}}/none.yaml", "none.yaml: cannot be read (No such file"),
    "a recipe that is no YAML": (f"{RECOVER} --recipe {{bad_recipe}}", "is not valid YAML"),
    "a recipe of another command": (f"{RECOVER} --recipe {{other_recipe}}", "teacher: no such setting"),
    "unknown command": ("recovr --checkpoint x", "No such command 'recovr'"),
    "unknown cache command": ("cache look x", "No such command 'look'"),
    "no cache to verify": ("cache verify {root}/nothing", "it is no finished KD cache"),
    "no cache to audit": ("cache audit {root}/nothing --teacher {teacher}", "it is no finished KD cache"),
    "audit nothing": ("cache audit --teacher {teacher}", "kd_cache_dir: missing; give --kd-cache-dir"),
    "audit without a teacher": ("cache audit {cache}", "teacher: missing; give --teacher"),
    "another teacher, auditing": ("cache audit {cache} --teacher {stranger}", "an audit needs the same teacher"),
    "an audit of no rows": ("cache audit {cache} --teacher {teacher} --rows 0", "rows: 0 is too small; allowed: 1"),
    "an audit of two caches": ("cache audit {cache} x --teacher {teacher}", "'x': expected a setting as name=value"),
    "no cache to export": ("cache export --parquet {root}/nothing --out x", "it is no finished KD cache"),
    "verify nothing": ("cache verify", "Missing argument 'PATH' (see `qat-lora cache verify --help`)"),
}

TAKEN = {
    "of another quantise run": (f"{QUANTIZE} --seed 1", "student", "holds another run: seed was"),
    "of another command": (f"{QUANTIZE}", "run", "holds another run: command was"),
    "of a cache": (f"{QUANTIZE}", "cache", "holds files that no qat-lora run made; choose another folder"),
    "with strangers' files": (RECOVER, "text", "holds files that no qat-lora run made; choose another folder"),
    "of another cache": (f"{BUILD} --seed 5", "cache", "holds another cache: "),
    "that is a file": (RECOVER, "list", "is a file; give a folder"),
    "with a damaged mark": (RECOVER, "bad_mark", "is damaged; --overwrite starts again"),
    "of another evaluation": (f"{EVAL} --batch-size 1", "run", "holds another run"),
    "of strangers, for the demo": ("demo", "text", "holds files that no qat-lora run made"),
}


@pytest.fixture(scope="module")
def work(tiny, tmp_path_factory) -> dict[str, str]:
    """Good and bad inputs by name."""
    from qat_lora.models.load import make_qwen3, make_tokenizer

    root = tmp_path_factory.mktemp("bad")
    made = {"root": root, "teacher": tiny.teacher, "text": tiny.text, "held_out": tiny.held_out}
    for name in ("cache", "student", "run", "empty", "blank", "stranger", "bad_mark"):
        made[name] = root / name
    for line in (
        f"{BUILD} --num-rows 8 --out {{cache}}",
        f"{QUANTIZE} --start-rank 4 --out {{student}}",
        f"{RECOVER} --recovery-r 2 --batch-size 2 --out {{run}}",
    ):
        line = line.format(**made).replace("--max-steps 2", "--max-steps 1")
        cli.main([*line.split(), "--device", "cpu", "--quiet"])

    def copy(name: str, source: Path, file: str, content: bytes | None) -> None:
        made[name] = shutil.copytree(source, root / name)
        (made[name] / file).unlink() if content is None else (made[name] / file).write_bytes(content)

    weights, config = tiny.teacher / "model.safetensors", (tiny.teacher / "config.json").read_text(encoding="utf-8")
    copy("bad_config", tiny.teacher, "config.json", b"{")
    copy("no_type", tiny.teacher, "config.json", b"{}")
    copy("truncated", tiny.teacher, "model.safetensors", weights.read_bytes()[:3000])
    copy("no_weights", tiny.teacher, "model.safetensors", b"")
    copy("other_kind", tiny.teacher, "config.json", config.replace('"qwen3"', '"bert"').encode())
    copy("no_tokenizer", tiny.teacher, "tokenizer.json", None)
    copy("bad_tokenizer", tiny.teacher, "tokenizer.json", b"{")
    copy("bare", tiny.teacher, "tokenizer.json", None)
    (made["bare"] / "tokenizer_config.json").unlink()
    short = config.replace('"max_position_embeddings": 256', '"max_position_embeddings": 16')
    copy("short", tiny.teacher, "config.json", short.encode())
    adapter = made["run"] / "best" if (made["run"] / "best").is_dir() else made["run"] / "last"
    copy("bad_adapter", adapter, "adapter_model.safetensors", (adapter / "adapter_model.safetensors").read_bytes()[:99])
    gone = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": "/gone"}
    copy("no_base", adapter, "adapter_config.json", json.dumps(gone).encode())
    seal(made["no_base"])
    made["empty"].mkdir()
    made["blank"].mkdir()
    (made["blank"] / "a.txt").write_text(" \n")
    made["bad_mark"].mkdir()
    (made["bad_mark"] / "qat_lora_run.json").write_text("{")
    for name, file, content in (
        ("list", "list.txt", "missing.txt\n"),
        ("pickled", "best.pt", "x"),
        ("bad_recipe", "bad.yaml", "a: b: c\n"),
        ("other_recipe", "other.yaml", "teacher: x\n"),
    ):
        made[name] = root / file
        made[name].write_text(content)
    make_tokenizer(["entirely different words stand here"] * 9, 280, made["stranger"])
    make_qwen3(made["stranger"], 320, hidden=32, layers=1, heads=1, kv_heads=1, mlp=32).module.save_pretrained(
        made["stranger"]
    )
    return {name: str(path) for name, path in made.items()}


def contents(path: Path) -> dict[str, str]:
    """Return the sha256 of every file at a path, the path's own if it is a file; {} where there is nothing."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def refused(arguments: list[str], capfd) -> str:
    """Run a command line that must be refused; return its one line."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    out, err = capfd.readouterr()
    assert caught.value.code == (1 if "is not what was written" in err else 2), err
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    return err


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, work, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # default output folders would appear here
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    for variable in ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID"):
        monkeypatch.delenv(variable, raising=False)
    line, says = BAD[name]
    arguments = [part.format(**work) for part in line.split()]
    if name.startswith("no CUDA"):
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    if name.startswith("no Apple"):
        monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    if "--device" not in arguments and "--tpu" not in arguments and arguments[0] in ("recover", "quantize", "eval"):
        arguments += ["--device", "cpu"] if name != "a flag without value" else []
    err = refused(arguments, capfd)
    assert says.format(**work) in err
    assert contents(tmp_path) == {} and not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", TAKEN)
def test_an_output_folder_that_is_taken(name, work, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line, out, says = TAKEN[name]
    before = contents(Path(work[out]))
    err = refused([*line.format(**work).split(), "--out", work[out], "--device", "cpu"], capfd)
    assert says in err and f"--out {work[out]}: " in err
    assert contents(Path(work[out])) == before and not any(tmp_path.iterdir())


def test_an_output_folder_inside_a_file(work, capfd):
    out = f"{work['list']}/x"
    err = refused([*QUANTIZE.format(**work).split(), "--out", out, "--device", "cpu"], capfd)
    assert out in err and "choose another --out" in err

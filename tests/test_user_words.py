"""The user's own words: every command line of the original guides and every name of their YAML, as given there.

Other tests run some of these to their end (tests/test_scripts.py, tests/test_scripts_multi.py); here each is
resolved by the real parser, and what it means is compared.
"""

import contextlib
import importlib
import json
import re
import types
from pathlib import Path

import pytest

import qat_lora
from qat_lora import cli
from qat_lora.config import ConfigError, to_dict
from qat_lora.setup.training import by_replicas
from qat_lora.train.callbacks import LoopConfig

RECOVER = ("recover", "--checkpoint", "s", "--kd-cache-dir", "c")
ROOT = Path(__file__).resolve().parents[1]


class Seen(Exception):
    """Carries the command and the options that a line led to."""


@pytest.fixture
def meant(monkeypatch):
    """Return the function from words to the command and the settings by their last names."""

    def stop(command, options):
        raise Seen(command.words, options)

    monkeypatch.setattr("qat_lora.runtime.launch.start.run", stop)

    def mean(line: str) -> tuple[str, dict]:
        with pytest.raises(Seen) as caught:
            cli.main(line.split())
        words, options = caught.value.args
        flat = to_dict(options)
        for _ in range(3):
            groups = [value for value in flat.values() if isinstance(value, dict)]
            flat = {k: v for group in (flat, *groups) for k, v in group.items() if not isinstance(v, dict)} | {
                k: v for group in groups for k, v in group.items() if isinstance(v, dict)
            }
        return words, flat

    return mean


BUILD = "--teacher Qwen/Qwen3-0.6B --dataset Salesforce/wikitext --length 1024 --top-k 128"
TRAIN = "--checkpoint runs/v2_q4/best.pt --kd-cache-dir caches/wikitext103_L1024_K128"
QAT = "--from-scratch --model Qwen/Qwen3-0.6B --cache-dir caches/c --config q4_r32"
# Script or command of a guide, its words, what they mean.
GUIDE = [
    ("build_kd_cache.py", f"{BUILD} --out caches/wikitext103_L1024_K128", {"length": 1024, "top_k": 128}),
    (
        "build_kd_cache.py",
        f"{BUILD} --dataset-config wikitext-103-raw-v1 --split train --text-field text --format wikitext",
        {"dataset_config": "wikitext-103-raw-v1", "split": "train", "text_field": "text", "format": "wikitext"},
    ),
    (
        "train_recovery_lora.py",
        f"--tpu --model Qwen/Qwen3-0.6B {TRAIN} --recovery-r 8 --batch-size 4 --accumulation-steps 8 --max-steps 1000",
        {"tpu": True, "recovery_r": 8, "batch_size": 4, "accumulation_steps": 8, "max_steps": 1000},
    ),
    ("train_recovery_lora.py", f"{TRAIN} train.lr=3e-4 device_type=tpu", {"lr": 3e-4, "device": "tpu"}),
    ("train_recovery_lora.py", f"{TRAIN} global_batch_size=1024", {"global_batch_size": 1024}),
    ("train_recovery_lora_multi.py", f"--tpu {TRAIN} --recovery-r 8", {"num_chips": "all", "recovery_r": 8}),
    ("train_recovery_lora_multi.py", f"--tpu {TRAIN} --num-chips 4", {"num_chips": "4"}),
    ("train_v2.py", f"{QAT} --batch-size 8 --accumulation-steps 4 --max-steps 2000", {"preset": "q4_r32"}),
    ("train_v2_tpu_multi.py", f"{QAT} --num-chips 4", {"num_chips": "4", "from_scratch": True}),
    ("train_v2_tpu_multi.py", "--v2-checkpoint runs/v2_q4/best.pt --cache-dir c --model-id m", {"model": "m"}),
    (
        "build_kd_cache.py",
        "--teacher_model_name_or_path t --dataset_name d --dataset_config_name c --dataset_split s --max_length 64"
        " --topk 32 --num_sequences 20 --batch_size 2 --shard_size 16 --output_dir o",
        {"teacher": "t", "dataset": "d", "dataset_config": "c", "split": "s", "length": 64, "top_k": 32}
        | {"num_rows": 20, "teacher_batch_size": 2, "shard_rows": 16, "out": "o"},
    ),
    ("smoke_test.py", "--run-training --train-epochs 5 device_type=tpu", {"train_epochs": 5, "device": "tpu"}),
]


@pytest.mark.parametrize(("script", "words", "means"), GUIDE, ids=range(len(GUIDE)))
def test_a_command_line_of_the_guides(script, words, means, meant):
    source = (ROOT / "scripts" / script).read_text(encoding="utf-8")
    start = re.search(r'run_script\("(.*)"\)', source)[1]
    command, found = meant(f"{start} {words}")
    assert start.startswith(command) and {name: found[name] for name in means} == means


# A name of the user's YAML with its value, ours with what it becomes.
NAMES = [
    ("epochs: 3", "epochs", 3.0),
    ("num_train_epochs: 3", "epochs", 3.0),
    ("eval_interval: 25", "eval_steps", 25),
    ("save_interval: 75", "save_steps", 75),
    ("log_interval: 5", "log_steps", 5),
    ("forward_dtype: bfloat16", "dtype", "bfloat16"),
    ("forward_dtype: bf16", "dtype", "bfloat16"),
    ("dtype: fp32", "dtype", "float32"),
    ("ema: true", "ema", 0.999),
    ("ema: false", "ema", 0.0),
    ("ema: 0.99", "ema", 0.99),
    ("grad_clip_norm: 0.5", "clip_grad_norm", 0.5),
    ("max_grad_norm: 0.5", "clip_grad_norm", 0.5),
    ("learning_rate: 3e-4", "lr", 3e-4),
    ("save_total_limit: 3", "keep_checkpoints", 3),
    ("report_to: wandb", "log_to", ["wandb"]),
    ("report_to: [tensorboard, wandb]", "log_to", ["tensorboard", "wandb"]),
    ("report_to: none", "log_to", []),
    ("output_dir: runs/x", "out", "runs/x"),
    ("device_type: tpu", "device", "tpu"),
    ("global_batch_size: 64", "global_batch_size", 64),
    ("cache_dir: c", "kd_cache_dir", "c"),
    ("seq_len: 512", "length", 512),
    ("hard_top1: 0.2", "hard_top1_weight", 0.2),
    ("kd_temperature: 3.0", "temperature", 3.0),
    ("lora_r: 4", "recovery_r", 4),
    ("lora_alpha: 8", "recovery_alpha", 8.0),
    ("per_device_train_batch_size: 2", "batch_size", 2),
    ("gradient_accumulation_steps: 4", "accumulation_steps", 4),
    ("lr_scheduler_type: cosine", "schedule", "cosine"),
]


@pytest.mark.parametrize("form", ["{}\n", "train:\n  {}\n", "word"])
@pytest.mark.parametrize(("line", "name", "value"), NAMES, ids=[line for line, *_ in NAMES])
def test_a_name_of_the_users_yaml(line, name, value, form, meant, tmp_path):
    """At the top, in a group that is theirs and not ours, and as a word."""
    recipe, word = tmp_path / "recipe.yaml", ""
    recipe.write_text("checkpoint: s\n" + ("" if name == "kd_cache_dir" else "kd_cache_dir: d\n"))
    if form == "word":
        word = re.sub(r"[\[\] ]", "", line).replace(":", "=", 1)
    else:
        recipe.write_text(recipe.read_text() + form.format(line))
    _, found = meant(f"recover --recipe {recipe} {word}")
    assert found[name] == value


def test_epochs_are_steps_and_both_must_agree():
    loop = LoopConfig(batch_size=4, accumulation_steps=2, epochs=2.5)
    assert loop.for_rows(33, replicas=2).max_steps == 8  # ceil(2.5 · ceil(33 / 16))
    assert LoopConfig().for_rows(5, 1).max_steps == LoopConfig.max_steps
    assert LoopConfig(epochs=1, max_steps=2, batch_size=4).for_rows(5, 1).max_steps == 2
    with pytest.raises(ConfigError, match="max_steps: 7, but 1 epochs of 5 rows are 2 steps; give --max-steps or"):
        LoopConfig(epochs=1, max_steps=7, batch_size=4).for_rows(5, 1)


def test_an_unknown_name_shows_the_three_nearest(capfd):
    with pytest.raises(SystemExit):
        cli.main([*RECOVER, "learning_rte=1"])
    err = capfd.readouterr().err
    nearest = re.fullmatch(r"error: learning_rte: no such setting; the nearest: (.*); --help-all shows all\n", err)
    assert nearest and nearest[1].split(", ")[0] == "train.lr" and len(nearest[1].split(", ")) == 3


def test_a_name_in_a_foreign_group_that_two_settings_have_is_refused(capfd):
    with pytest.raises(SystemExit):
        cli.main([*RECOVER, "train.no_such=1"])
    assert "train.no_such: no such setting; the nearest: " in capfd.readouterr().err


@pytest.fixture(scope="module")
def work(tiny, tmp_path_factory):
    """A folder with a cache of 6 + 2 rows and a student."""
    root = tmp_path_factory.mktemp("words")
    build = {"length": 32, "top_k": 8, "num_rows": 6, "eval_rows": 2, "out": root / "cache"}
    qat_lora.build_kd_cache(teacher=tiny.teacher, dataset=tiny.text, device="cpu", quiet=True, **build)
    qat_lora.quantize_model(model=tiny.teacher, init="mse", out=root / "student", device="cpu", quiet=True)
    return root


def run(line: str, capfd) -> tuple[str, str]:
    """Run a command on the CPU; return what it printed, the last line of an error instead of a traceback."""
    capfd.readouterr()
    with contextlib.suppress(SystemExit):
        cli.main([*line.split(), "--device", "cpu", "--lr", "1e-3"])
    return capfd.readouterr()


def test_epochs_end_a_run_and_many_passes_are_said(work, capfd, monkeypatch):
    monkeypatch.chdir(work)
    out, _ = run("recover --checkpoint student --kd-cache-dir cache --batch-size 4 --epochs 2 --out e", capfd)
    steps = [json.loads(line) for line in (work / "e/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 4 and "passes" not in out and all(line["samples_per_s"] > 0 for line in steps)
    again, _ = run("recover --recipe e/config.yaml", capfd)
    assert "e is complete already" in again
    out, _ = run("recover --checkpoint student --kd-cache-dir cache --batch-size 8 --max-steps 21 --out m", capfd)
    assert "21 steps are 21 passes over all rows; --epochs sets their number" in out
    assert "a step has 8 rows, and only 6 are there: the rest are masked; give a smaller --batch-size" in out
    plan, _ = run("recover --checkpoint student --kd-cache-dir cache --batch-size 4 --epochs 3 --dry-run", capfd)
    assert re.search(r"run      6 steps, .* 3\.00 epochs", plan), plan


def test_what_is_not_read_or_not_there_is_said_by_its_own_name(work, capfd, monkeypatch):
    monkeypatch.chdir(work)
    train = "recover --kd-cache-dir cache --max-steps 1"
    _, err = run(f"{train} --checkpoint runs/v2_q4/best.pt", capfd)
    assert err.startswith("error: checkpoint: there is no folder runs/v2_q4/best;"), err
    out, _ = run(f"{train} --checkpoint student --model other --out o", capfd)
    assert "--model other is not read: the student is --checkpoint student" in out
    _, err = run("recover --model student --dataset chats.jsonl", capfd)
    assert err.startswith("error: learn: missing; to learn from --dataset give --objective sft"), err


def test_from_scratch_the_student_is_made_of_the_caches_teacher(work, capfd, monkeypatch):
    monkeypatch.chdir(work)
    out, err = run("qat --from-scratch --cache-dir cache --config w2g64 --init mse --max-steps 1 --out q", capfd)
    assert (work / "q/best/config.json").is_file(), err


def test_runs_on_several_chips_have_a_default_folder_of_their_own():
    alone, four = types.SimpleNamespace(replicas=1), types.SimpleNamespace(replicas=4)
    assert (by_replicas(LoopConfig(), alone), by_replicas(LoopConfig(), four)) == ("", "_x4")
    assert by_replicas(LoopConfig(global_batch_size=8), four) == ""  # the same run on more chips


def test_the_predecessors_module():
    module = importlib.import_module("qat_lora.layer_qat")
    assert all(getattr(module, name) is getattr(qat_lora, name) for name in module.__all__)

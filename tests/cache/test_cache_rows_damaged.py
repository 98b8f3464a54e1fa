"""Real runs over a cache that is damaged while they train: one line, exit code 1, and nothing trained is lost."""

import json
import os
import shutil

import pytest
from safetensors.torch import load_file
from toy_pipeline import cache_options, call, quantize_options

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cli import main
from qat_lora.train.checkpoint import checkpoints

STEPS = 6


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """A cache, a student, and the result of a run that nothing disturbs."""
    root = tmp_path_factory.mktemp("damaged")
    cache = call("build_cache", cache_options(tiny, root / "cache", num_rows=24, eval_rows=4, shard_rows=5))
    student = call("quantize", quantize_options(tiny, root / "student"))
    command = (
        f"recover --checkpoint {student} --recovery-r 2 --batch-size 2 --accumulation-steps 2 --device cpu --quiet "
    )
    command += f"--max-steps {STEPS} --eval-steps 3 --save-steps 100 --log-steps 4 --dropout 0.2 --lr 1e-3 --out "
    main([*(command + str(root / "whole")).split(), "--kd-cache-dir", str(cache)])
    return cache, command, outcome(root / "whole")


def outcome(out):
    """What a run leaves but for speeds."""
    tensors = {name: load_file(out / name / "adapter_model.safetensors") for name in ("best", "last")}
    numbers = {name: {k: v.numpy().tobytes() for k, v in held.items()} for name, held in tensors.items()}
    logs = [
        [
            {k: v for k, v in json.loads(line).items() if not k.endswith("_per_s")}
            for line in file.read_text().splitlines()
        ]
        for file in (out / "metrics.jsonl", out / "evaluations.jsonl")
    ]
    return numbers, logs


def flip(file):
    """Change a bit of every row, in place."""
    with open(file, "r+b") as opened:
        size = opened.seek(0, 2)
        for place in range(size // 3, size, 500):
            opened.seek(place)
            byte = opened.read(1)[0]
            opened.seek(place)
            opened.write(bytes([byte ^ 1]))


DAMAGES = {  # what happens to the files of a split, and which shard and row the line names
    "flipped": ("s", flip, "does not have its checksum"),
    "cut off": ("s", lambda file: os.truncate(file, file.stat().st_size // 2), "cut off"),
    "replaced": ("s", lambda file: os.replace(shutil.copy(file, f"{file}.new"), file), "removed or replaced"),
    "removed": ("s", lambda file: file.unlink(), "removed or replaced"),
    "evaluation": ("e", flip, "does not have its checksum"),
}


def damage_while_training(monkeypatch, cache, series, damage):
    """Damage all shards of a split when the run asks for its sixth micro-batch."""
    batches = KDCacheDataset.batches

    def disturbed(self, *arguments, **named):
        for number, batch in enumerate(batches(self, *arguments, **named)):
            if number == 5 and self.split == "train":
                for file in cache.glob(f"{series}-*.safetensors"):
                    damage(file)
            yield batch

    monkeypatch.setattr(KDCacheDataset, "batches", disturbed)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_cache_ends_a_run_that_goes_on_once_it_is_restored(made, tmp_path, monkeypatch, capsys, kind):
    cache, command, whole = made
    shutil.copytree(cache, tmp_path / "cache")
    words = [*(command + str(tmp_path / "run")).split(), "--kd-cache-dir", str(tmp_path / "cache")]
    series, damage, what = DAMAGES[kind]
    with monkeypatch.context() as patched, pytest.raises(SystemExit) as left:
        damage_while_training(patched, tmp_path / "cache", series, damage)
        main(words)
    shown = capsys.readouterr().err
    assert left.value.code == 1 and shown.count("\n") == 1 and what in shown, shown
    assert f"{tmp_path}/cache/{series}-00000" in shown and ": row " in shown and "the same command goes on" in shown
    (kept,) = checkpoints(tmp_path / "run" / "checkpoints")
    step = int(kept.name[5:])
    assert f"the checkpoint after step {step} is complete" in shown and 2 <= step < STEPS
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == step
    with pytest.raises(SystemExit) as left:  # not restored yet: refused when it is opened, and nothing is lost
        main([*words]) if kind != "replaced" else main([*words[:-1], str(tmp_path / "nowhere")])
    assert left.value.code and checkpoints(tmp_path / "run" / "checkpoints") == [kept]
    shutil.rmtree(tmp_path / "cache")
    shutil.copytree(cache, tmp_path / "cache")
    main(words)
    assert outcome(tmp_path / "run") == whole


def test_without_the_check_wrong_targets_are_trained_in_silence(made, tmp_path, monkeypatch):
    """The positive control."""
    cache, command, whole = made
    shutil.copytree(cache, tmp_path / "cache")
    damage_while_training(monkeypatch, tmp_path / "cache", "s", flip)
    words = (command + str(tmp_path / "run")).split()
    main([*words, "--verify-rows", "off", "--kd-cache-dir", str(tmp_path / "cache")])
    numbers, (metrics, _) = outcome(tmp_path / "run")
    assert len(metrics) == STEPS and metrics[0] == whole[1][0][0] and numbers["last"] != whole[0]["last"]

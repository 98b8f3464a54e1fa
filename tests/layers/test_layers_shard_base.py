"""Frozen weights spread over processes: every number as with copies, half the bytes, one program for all layers."""

import functools
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from toy_paths import clean_environment
from toy_pipeline import cache_options, call, recover_options

from qat_lora import cli
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.errors import CacheDamaged, DeviceError
from qat_lora.registry import COMMANDS
from qat_lora.runtime.launch.select import ChipsConfig
from qat_lora.runtime.launch.start import run, run_group
from qat_lora.runtime.sharded import shard_layers
from qat_lora.train.loop import LoopConfig
from qat_lora.train.metrics import read_metrics

ROOT, HERE = Path(__file__).resolve().parents[2], Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def report():
    program = [sys.executable, str(HERE / "shard_base_program.py")]
    environment = clean_environment(USE_TORCH_XLA="0", PYTHONPATH=str(ROOT))
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("way", ["plain", "scales and norms", "recomputed"])
def test_training_is_bit_for_bit_that_with_copies(report, way):
    assert report[way]["losses"] and report[way]["trained"] and report[way]["changed"] > 0.1, report[way]


@pytest.mark.parametrize("way", ["plain", "scales and norms", "recomputed"])
def test_a_process_holds_half_the_frozen_bytes_and_no_layer_between_steps(report, way):
    assert report[way]["share"] == 0.5 and report[way]["left"] == 0


def test_compiled_layers_stay_one_program(report):
    (copied, losses), (sharded, mine) = report["compiled"]
    assert copied == sharded == 1 and losses == mine


def test_a_model_without_decoder_layers_or_with_shared_ones_is_refused():
    with pytest.raises(DeviceError, match="shard_base: Linear has no decoder layers"):
        shard_layers(torch.nn.Linear(2, 2), torch.device("cpu"))
    layer = torch.nn.Linear(2, 2)
    layer.gradient_checkpointing = False
    with pytest.raises(DeviceError, match="shard_base: layers of ModuleList share weights"):
        shard_layers(torch.nn.ModuleList([layer, layer]), torch.device("cpu"))


@pytest.fixture(scope="module")
def cache(tiny, tmp_path_factory):
    return call("build_cache", cache_options(tiny, tmp_path_factory.mktemp("shard") / "cache"))


def recover(arguments, shard, out):
    os.environ["USE_TORCH_XLA"] = "0"
    cli.main([*arguments, *(["--shard-base"] if shard else []), "--out", str(out)])


def recover_from_damaged_rows(options):
    """Process 1 finds its third training batch damaged."""
    real = KDCacheDataset.batches

    def damaged(*arguments, **named):
        trains = len(arguments) > 5  # with an order of its own; evaluations take rows as they come
        yield from itertools.islice(real(*arguments, **named), 2 if trains else None)
        if trains:
            raise CacheDamaged("c/s-000001: row 7 does not have its checksum")

    if os.environ["RANK"] == "1":
        KDCacheDataset.batches = damaged
    return run(COMMANDS["recover"], options)


def test_rows_that_one_process_cannot_read_end_all_after_the_same_step(student, cache, tmp_path):
    loop = LoopConfig(batch_size=4, accumulation_steps=2, max_steps=4, eval_steps=4)
    options = recover_options(student, cache, tmp_path, loop=loop)
    options = replace(options, run=replace(options.run, chips=ChipsConfig("2", shard_base=True)))
    with pytest.raises(CacheDamaged, match="row 7 .*the checkpoint after step 1 is complete"):
        run_group(functools.partial(recover_from_damaged_rows, options), 2, 1, "fork")


def test_recover_by_the_command_line(student, cache, tmp_path):
    arguments = "recover --device cpu --num-chips 2 --train-scales --train-norms --gradient-checkpointing --quiet"
    arguments += " --batch-size 4 --global-batch-size 16 --max-steps 4 --eval-steps 2 --warmup-steps 1 --recovery-r 2"
    arguments = [*arguments.split(), "--checkpoint", str(student), "--kd-cache-dir", str(cache)]
    for shard in (False, True):
        run_group(functools.partial(recover, arguments, shard, tmp_path / str(shard)), 2, 1, "fork")
    copied, sharded = (read_metrics(tmp_path / str(shard) / "metrics.jsonl") for shard in (False, True))
    assert [line["loss"] for line in copied] == [line["loss"] for line in sharded] and len(copied) == 4
    for file in ("adapter_model.safetensors", "base/model.safetensors"):
        mine, theirs = (load_file(tmp_path / str(shard) / "last" / file) for shard in (True, False))
        assert mine.keys() == theirs.keys() and all((mine[name] == theirs[name]).all() for name in mine)

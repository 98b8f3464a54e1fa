"""A KD cache in other libraries: torch's DataLoader with workers, `datasets`, transformers.Trainer on PEFT models."""

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from toy_paths import clean_environment

import qat_lora
from qat_lora.cache.tools.transport import export_parquet

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def cache(tiny, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("trainer") / "cache"
    build = {"length": 32, "top_k": 256, "num_rows": 24, "eval_rows": 2, "out": out}
    return qat_lora.build_kd_cache(teacher=tiny.teacher, dataset=tiny.text, device="cpu", quiet=True, **build)


@pytest.mark.parametrize(("workers", "start"), [(0, None), (2, "fork"), (2, "spawn")])
@pytest.mark.filterwarnings("default:.*fork.*:DeprecationWarning")
def test_a_data_loader_serves_the_rows(cache, workers, start):
    dataset = qat_lora.KDCacheDataset(cache, k=4)
    dataset.optional = []
    loader = DataLoader(dataset, batch_size=8, num_workers=workers, multiprocessing_context=start)
    batches = list(loader)
    assert len(batches) == 3 and set(batches[0]) == set(dataset.rows([0]))
    for number, batch in enumerate(batches):
        expected = dataset.rows(np.arange(8 * number, 8 * number + 8))
        for name, tensor in batch.items():
            assert isinstance(tensor, torch.Tensor)
            np.testing.assert_array_equal(tensor.numpy(), expected[name], name)


def test_single_rows(cache):
    dataset = qat_lora.KDCacheDataset(cache)
    assert len(list(dataset)) == len(dataset) == 24
    np.testing.assert_array_equal(dataset[-1]["input_ids"], dataset.rows([23])["input_ids"][0])
    with pytest.raises(IndexError, match="row 24 of 24"):
        dataset[24]
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.k == dataset.k and copy.temperatures == dataset.temperatures


def test_datasets_reads_the_export(cache, tmp_path):
    datasets = pytest.importorskip("datasets")
    export_parquet(cache, tmp_path / "rows.parquet")
    rows = datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path / "hf"))
    dataset = qat_lora.KDCacheDataset(cache)
    assert len(rows) == 24 and rows[3]["input_ids"] == dataset[3]["input_ids"].tolist()

    def generated():
        yield from dataset

    made = datasets.Dataset.from_generator(generated, cache_dir=str(tmp_path / "hf")).with_format("numpy")
    assert len(made) == 24 and set(made.column_names) == set(dataset[0])
    assert all(np.array_equal(made[3][name], array) for name, array in dataset[3].items())


PROGRAM = """
import json, sys, peft, torch, kd_trainer
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM

model, cache, *outs = sys.argv[1:]
batch = default_collate(list(kd_trainer.KDCacheDataset(cache)))

@torch.no_grad()
def kl(module):
    student = kd_trainer.CausalLM(module.eval(), None)
    hidden = student.hidden(batch["input_ids"], batch["document_ids"])
    loss = kd_trainer.objective_loss(hidden, student.lm_head(), batch, kd_trainer.ObjectiveConfig("ghost"))
    return float(loss.loss_sum / loss.token_count)

def train(out, lr):
    settings = dict(max_steps=40, per_device_train_batch_size=8, learning_rate=lr, report_to=[], save_strategy="no")
    return kd_trainer.main(model, cache, out, use_cpu=True, disable_tqdm=True, **settings).model

load, lora = AutoModelForCausalLM.from_pretrained, peft.LoraConfig(r=8, target_modules="all-linear")
kls = [kl(load(model)), kl(train(outs[0], 3e-3))]
kd_trainer.AutoModelForCausalLM = type("Auto", (), dict(from_pretrained=lambda m: peft.get_peft_model(load(m), lora)))
print(json.dumps([*kls, kl(train(outs[1], 1e-2).get_base_model())]))
"""


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs the big extra")
def test_transformers_trainer_learns_from_the_cache(cache, tiny, tmp_path):
    """In a process of its own: accelerate decides at its import that everything runs on XLA where that is installed."""
    folders = [damage(tiny.teacher, tmp_path / "student"), cache, tmp_path / "whole", tmp_path / "adapter"]
    environment = clean_environment(USE_TORCH_XLA="0", PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'recipes'}")
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *map(str, folders)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    before, whole, adapter = json.loads(done.stdout.splitlines()[-1])
    assert max(whole, adapter) < 0.6 * before, (before, whole, adapter)
    assert (folders[2] / "config.json").is_file() and (folders[3] / "adapter_config.json").is_file()


def damage(teacher: Path, out: Path) -> Path:
    """Write the teacher with noise on its weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(teacher)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(2.0 * parameter.std() * torch.randn_like(parameter) if parameter.ndim == 2 else 0.0)
    model.save_pretrained(out)
    return out

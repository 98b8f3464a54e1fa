"""What all tests share: one thread, and a tiny teacher with text."""

import os
import random
from pathlib import Path

import pytest
import torch
from toy_paths import FAST_COMPILE, Tiny

os.environ.setdefault("XLA_FLAGS", FAST_COMPILE)  # of every program that a test starts
# Likewise: so `--dtype auto` is float32, and figures are the same, on processors with and without bfloat16's units.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")

WORDS = [
    "the",
    "a",
    "model",
    "layer",
    "weight",
    "token",
    "of",
    "to",
    "and",
    "in",
    "loss",
    "cache",
    "quant",
    "scale",
    "code",
    "row",
    "head",
    "tail",
]


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


def write_text(folder: Path, documents: int, seed: int) -> Path:
    folder.mkdir()
    draw = random.Random(seed)
    for i in range(documents):
        lines = [" ".join(draw.choices(WORDS, k=draw.randint(4, 12))) + "." for _ in range(draw.randint(5, 30))]
        (folder / f"{i:03d}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    from qat_lora.models.load import make_tokenizer

    root = tmp_path_factory.mktemp("tiny")
    text, held_out = write_text(root / "text", 24, 0), write_text(root / "held-out", 6, 1)
    teacher = root / "teacher"
    make_tokenizer((file.read_text() for file in sorted(text.iterdir())), 320, teacher)
    write_teacher(teacher, hidden=64, mlp=96)
    return Tiny(teacher, text, held_out)


@pytest.fixture(scope="session")
def wide(tiny, tmp_path_factory) -> Tiny:
    """The tiny model as wide as the blocks of K-quants."""
    from qat_lora.models.copies import copy_tokenizer

    teacher = tmp_path_factory.mktemp("wide") / "teacher"
    write_teacher(teacher, hidden=256, mlp=256)
    copy_tokenizer(tiny.teacher, teacher)
    return tiny._replace(teacher=teacher)


def write_teacher(teacher: Path, hidden: int, mlp: int) -> None:
    from qat_lora.models.load import make_qwen3

    torch.manual_seed(0)
    model = make_qwen3(teacher, 320, hidden=hidden, layers=2, heads=2, kv_heads=1, mlp=mlp, max_position_embeddings=256)
    with torch.no_grad():  # as made, attention is nearly uniform and quantisation hardly shows
        for name, parameter in model.module.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0 if "embed" not in name else 2.0)
    model.module.save_pretrained(teacher)


@pytest.fixture(scope="session")
def student(tiny, tmp_path_factory):
    """A quantised student of the tiny teacher."""
    from toy_pipeline import call, quantize_options

    return call("quantize", quantize_options(tiny, tmp_path_factory.mktemp("student") / "student", init="mse"))


@pytest.fixture
def adapted(student, tmp_path):
    """A model with an adapter, and the folder that the adapter was saved to."""
    from toy_export import with_adapter

    from qat_lora.files.checksums import checkpoint_sha256
    from qat_lora.layers.lora import LoraConfig
    from qat_lora.models.adapter import save_adapter

    config = LoraConfig(recovery_r=3, recovery_alpha=5.0)
    model = with_adapter(student, config)
    save_adapter(model.module, config, tmp_path / "adapter", student, checkpoint_sha256(student))
    return model, tmp_path / "adapter"

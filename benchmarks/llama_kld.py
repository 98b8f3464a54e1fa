r"""The damage report of `qat-lora eval` beside llama.cpp's, `llama-perplexity --kl-divergence`, on one model and text.

Claim: mean and quantiles of the KL, the share of the same top token, and mean, quantiles and root mean square of Δp are
the figures that llama.cpp reports. **llama.cpp's own program was not run**: no wheel has it. Its side is this file,
written after `tools/perplexity/perplexity.cpp` of ggml-org/llama.cpp at 050fc7f, and shares no code with the package:
windows of `--context` tokens, without a token added before them; only tokens of a window's second half count; the
base's logits are kept as 65,536 steps between the largest and the largest less 16 (or the smallest); base tokens with a
log-probability of -16 or less are left out; sums are in double precision. Both sides take the logits of the same
PyTorch models, so that what is compared is the arithmetic. Its figures without the rounding stand beside.

    python benchmarks/llama_kld.py --teacher ../shared/data/teacher-small --text .../asyncio/base_events.py \
        --machine "two cores of ..." --out benchmarks/results/llama_kld.json
"""

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from qat_lora.commands.quantize import quantize
from qat_lora.data.packing import PackedRow
from qat_lora.evaluate.damage import Damage, damage_report
from qat_lora.evaluate.score import measure
from qat_lora.models.load import CausalLM, load_model, load_tokenizer
from qat_lora.models.student import open_student
from qat_lora.options import QuantizeOptions, RunConfig
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.setup.common import batches_of

POINTS = {"smallest": 0.0, "0.1": 0.001, "1": 0.01, "5": 0.05, "10": 0.1, "median": 0.5}
POINTS |= {"90": 0.9, "95": 0.95, "99": 0.99, "99.9": 0.999, "largest": 1.0}


def main() -> None:
    """Score one student both ways, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--text", required=True, help="a file")
    parser.add_argument("--preset", default="w3g128", help="of the student, rounded to nearest")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as folder:
        run = RunConfig(out=f"{folder}/student", device="cpu", dtype="float32", quiet=True)
        made = QuantizeOptions(model=arguments.teacher, preset=arguments.preset, init="absmax", start_rank=0, run=run)
        student = open_student(str(quantize(made, select_runtime("cpu")))).model
        teacher = load_model(arguments.teacher)
        windows = cut(arguments)
        theirs, exact = (of_llama(teacher, student, windows, rounded) for rounded in (True, False))
        ours = of_eval(teacher, student, windows)
    differences = {
        name: {figure: abs(side[figure] - value) for figure, value in ours.items()}
        for name, side in {"rounded": theirs, "exact": exact}.items()
    }
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{name: getattr(arguments, name) for name in ("preset", "context", "chunks")},
        "teacher": Path(arguments.teacher).name,
        "text": Path(arguments.text).name,
        "llama_cpp_was_run": False,
        "tokens": len(windows) * (arguments.context - 1 - arguments.context // 2),
        "ours": ours,
        "by_llama_cpps_definitions": theirs,
        "the_same_without_its_rounding": exact,
        "differences": differences,
        "mean_kl_relative_difference": abs(theirs["KL mean"] / ours["KL mean"] - 1),
        "largest_difference": max(differences["rounded"].values()),
        "largest_difference_without_rounding": max(differences["exact"].values()),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n", encoding="utf-8")


def cut(arguments: argparse.Namespace) -> list[np.ndarray]:
    """Return the first windows of the text's tokens."""
    ids = load_tokenizer(Path(arguments.teacher))(Path(arguments.text).read_text("utf-8"), verbose=False)["input_ids"]
    starts = range(0, len(ids) - arguments.context + 1, arguments.context)
    return [np.array(ids[start : start + arguments.context]) for start in starts][: arguments.chunks]


def of_eval(teacher: CausalLM, student: CausalLM, windows: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the figures as the package has them."""
    length = len(windows[0])
    counts, starts = np.arange(length) > length // 2, np.arange(length) == 0
    rows = [PackedRow(ids.astype(np.int32), counts.astype(np.uint8), starts, {}) for ids in windows]
    damage = Damage(rows, [])
    batches = select_runtime("cpu").feed(batches_of(iter(rows), length, 8))
    tally = measure(teacher, {"student": student}, batches, quiet=True, observe=damage.observe)["student"]
    found = damage_report(["student"], {"text": damage}, str)["student"]
    points = {f"KL {name}": found["kl"][name] for name in POINTS}
    points |= {f"Δp {name}": found["delta_p"][name] for name in POINTS}
    points |= {"KL mean": tally.figures["kl"], "same top": 1 - found["changed_top1"]}
    return points | {"Δp mean": found["delta_p"]["mean"], "Δp RMS": found["delta_p"]["rms"]}


def logits_of(model: CausalLM, windows: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the logits [context, vocabulary] of each window, by transformers' own forward."""
    for ids in windows:
        yield model.module(torch.from_numpy(ids)[None]).logits[0].float().numpy()


def of_llama(teacher: CausalLM, student: CausalLM, windows: Sequence[np.ndarray], rounded: bool) -> dict[str, float]:
    """Return the figures by llama.cpp's definitions; without its rounding all base tokens count as they are."""
    kls: list[float] = []
    changes: list[float] = []
    same = 0
    for ids, base_LV, logits_LV in zip(windows, logits_of(teacher, windows), logits_of(student, windows), strict=True):
        for i in range(len(ids) // 2, len(ids) - 1):
            base, token = log_probs_of_base(base_LV[i], rounded), ids[i + 1]
            own = log_softmax(logits_LV[i])
            kept = base > -16 if rounded else np.isfinite(base)
            kls.append(float((np.exp(base[kept]) * (base[kept] - own[kept])).sum()))
            changes.append(float(np.exp(own[token]) - np.exp(base[token])))
            same += int(base.argmax() == logits_LV[i].argmax())
    figures = {f"{name} {point}": percentile(values, share) for name, values in (("KL", kls), ("Δp", changes))
               for point, share in POINTS.items()}  # fmt: skip
    figures |= {"KL mean": sum(kls) / len(kls), "same top": same / len(kls)}
    return figures | {"Δp mean": sum(changes) / len(kls), "Δp RMS": (sum(x * x for x in changes) / len(kls)) ** 0.5}


def log_softmax(logits_V: np.ndarray) -> Any:
    """Return log-probabilities in double precision."""
    shifted_V = logits_V.astype(np.float64) - logits_V.max()
    return shifted_V - np.log(np.exp(shifted_V).sum())


def log_probs_of_base(logits_V: np.ndarray, rounded: bool) -> Any:
    """Return the base's log-probabilities as its file holds them: 16 bits over at most 16 nats below the largest."""
    if not rounded:
        return log_softmax(logits_V)
    largest = logits_V.max()
    smallest = max(logits_V.min(), largest - np.float32(16))
    step = (largest - smallest) / np.float32(65535)
    steps_V = np.where(logits_V > smallest, np.rint((logits_V - smallest) / step), 0)
    log_sum = np.log(np.exp(logits_V.astype(np.float64) - largest).sum())
    return (step * steps_V + (smallest - largest - np.float32(log_sum))).astype(np.float64)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value between the two of the sorted list that are nearest to share · (n - 1)."""
    values = sorted(values)
    place = share * (len(values) - 1)
    low = int(place)
    above = values[min(low + 1, len(values) - 1)]
    return (1 - (place - low)) * values[low] + (place - low) * above


if __name__ == "__main__":
    main()

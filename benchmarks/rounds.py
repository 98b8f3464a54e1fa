"""`rounds` beside `recover` on a text: a student that also learns on its own answers, at equal scored tokens.

Claims: with `qat-lora rounds`, KL(teacher || student) on the student's own answers to fixed prompts is 30 % lower than
after an offline run on as many scored tokens, at most 1 percentage point more answers than the teacher's do not end,
and the KL on held-out text is at most 2 % higher. And `cache generate` decodes a batch at 0.6 or more of the rate of a
bare loop over kept keys and values.

    python benchmarks/rounds.py --work DIR --out benchmarks/results/rounds.json

The toy: a teacher of 1.25 M weights is trained on little stories and on questions about digits (sums, turning round,
sorting) whose answers have several forms and end. The text of the cache is stories with few answers, as text for
calibration is; the held-out text is of the same kind. The student is the teacher at 2 bits. What exists in the folder
is not made again.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from qat_lora import cli
from qat_lora.commands.cache_generate import decode
from qat_lora.commands.demo import Muon
from qat_lora.data.packing import make_encoder, pack_rows
from qat_lora.data.sources import Document
from qat_lora.files.checksums import seal
from qat_lora.generate.sample import plain_prompt
from qat_lora.models.load import CausalLM, load_tokenizer, make_qwen3, make_tokenizer, save_model
from qat_lora.models.student import open_student
from qat_lora.runtime.host.machine import made_with
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.setup.common import batches_of

LENGTH, VOCABULARY, NEW = 64, 512, 32
TEACHER_STEPS, TEACHER_ROWS = 1200, 32
ANSWERS, RATE_ROWS, RATE_TOKENS = 2000, 64, 64
OFFLINE_STEPS, ROUNDS_STEPS, ROUNDS, TEXTS, SHARE = 300, 340, 3, 1280, 0.25
RECOVER = "recovery_r=8 train_scales=true batch_size=32 lr=2e-3 warmup_steps=20 eval_steps=100000"
GENERATE = f"max_new_tokens={NEW} write_batch_size=128 teacher_batch_size=64"
CPU = "--device cpu --quiet"
NAMES = "anna ben clara david emma felix greta hugo ida jonas karla leo mona nils olga paul"
THINGS = "apples books coins drums eggs flags gloves hats inks jars kites lamps maps nuts oars pens"
PLACES = "attic barn cellar dock forest garden harbour inn kitchen library market orchard"
VERBS = "finds hides counts paints sells washes carries wraps"
HOW = "slowly gladly again today quietly twice never often"
FORMS = {
    "add": ("the sum is {} .", "it makes {} .", "{} , of course .", "i get {} for that ."),
    "turn round": ("backwards it reads {} .", "{} .", "reversed : {} ."),
    "put in order": ("in order : {} .", "sorted they are {} .", "{} , from small to large ."),
    "which is largest ,": ("the largest is {} .", "it is {} .", "{} ."),
}


def question(draw: random.Random) -> tuple[str, str]:
    """Return a question, and an answer in one of its forms."""
    kind = draw.choice(("add", *FORMS))
    if kind == "add":
        a, b = draw.randrange(10, 100), draw.randrange(10, 100)
        text = draw.choice(("what is {} and {} ?", "add {} to {} .")).format(" ".join(str(a)), " ".join(str(b)))
        right = " ".join(str(a + b))
    else:
        row = [draw.randrange(10) for _ in range(draw.randrange(3, 7))]
        text = f"{kind} {' '.join(map(str, row))} " + ("?" if kind.startswith("which") else ".")
        found = {"turn round": row[::-1], "put in order": sorted(row)}.get(kind, [max(row)])
        right = " ".join(map(str, found))
    return f"{draw.choice(NAMES.split())} asks : {text} answer :", " " + draw.choice(FORMS[kind]).format(right)


def story(draw: random.Random) -> str:
    """Return a few sentences about somebody."""
    name, place, lines = draw.choice(NAMES.split()), draw.choice(PLACES.split()), []
    for _ in range(draw.randrange(3, 7)):
        every = THINGS, NAMES, PLACES, VERBS, HOW
        thing, other, next_place, does, how = (draw.choice(words.split()) for words in every)
        n = draw.randrange(2, 10)
        kinds = (
            f"{name} {does} {n} {thing} in the {place} {how} .",
            f"in the {place} , {other} {does} the {thing} of {name} .",
            f"then {name} goes to the {next_place} with {other} .",
            f"{other} gives {name} {n} {thing} , and {name} {does} them {how} .",
        )
        chosen = draw.randrange(4)
        place = next_place if chosen == 2 else place
        lines.append(kinds[chosen])
    return " ".join(lines)


def documents(seed: int, count: int, answered: float) -> list[str]:
    """Return texts, a share of them questions with answers."""
    draw = random.Random(seed)
    return ["".join(question(draw)) if draw.random() < answered else story(draw) for _ in range(count)]


def make_texts(work: Path, answered: float) -> None:
    """Write the cache's text, held-out text, prompts to learn on and the fixed prompts."""
    draws = random.Random(7), random.Random(8)
    texts = {"offline": documents(2, 12_000, answered), "held": documents(3, 600, answered)}
    texts |= {"prompts": [question(draws[0])[0] for _ in range(8000)]}
    texts |= {"fixed": [question(draws[1])[0] for _ in range(ANSWERS)]}
    for name, lines in texts.items():
        (work / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def train_teacher(out: Path) -> None:
    """Train the teacher on stories and answers, half and half."""
    out.mkdir(parents=True, exist_ok=True)
    texts = documents(1, 24_000, 0.5)
    make_tokenizer(iter(texts), VOCABULARY, out)
    encode = make_encoder(load_tokenizer(out))
    rows = list(pack_rows((Document(text, None, "toy") for text in texts), encode, LENGTH))
    torch.manual_seed(0)
    model = make_qwen3(out, VOCABULARY, hidden=160, layers=4, heads=4, kv_heads=2, mlp=448)
    model.module.train().requires_grad_(True)
    embedding = model.module.get_input_embeddings().weight
    matrices = [p for p in model.module.parameters() if p.ndim == 2 and p is not embedding]
    rest = [p for p in model.module.parameters() if p.ndim != 2 or p is embedding]
    optimizers = [Muon(matrices, 1e-2, 0.01, torch.float32), torch.optim.AdamW(rest, 5e-3, (0.9, 0.95), weight_decay=0)]
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    generator = np.random.default_rng(0)

    def batches() -> Iterator[Any]:
        while True:
            order = generator.permutation(len(rows))[: len(rows) // TEACHER_ROWS * TEACHER_ROWS]
            yield from batches_of((rows[i] for i in order), LENGTH, TEACHER_ROWS)

    for step, arrays in zip(range(TEACHER_STEPS), batches(), strict=False):
        batch = {name: torch.from_numpy(values) for name, values in arrays.items()}
        factor = min(1.0, (step + 1) / 30, (1 - step / TEACHER_STEPS) / 0.5)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
        hidden = model.hidden(batch["input_ids"], batch["document_ids"])
        logits = model.logits(hidden[:, :-1].flatten(0, 1))
        targets = batch["input_ids"][:, 1:].reshape(-1).long().masked_fill(~batch["target_mask"].reshape(-1), -100)
        torch.nn.functional.cross_entropy(logits, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    save_model(model.module, out)
    seal(out)


@torch.no_grad()
def kl_sum(
    teacher: CausalLM, student: CausalLM, ids: torch.Tensor, documents: torch.Tensor, mask: torch.Tensor
) -> float:
    """Return the sum of KL(teacher || student) over the positions whose target counts."""
    logs = [
        torch.log_softmax(m.logits(m.hidden(ids, documents)[:, :-1][mask]).double(), -1) for m in (teacher, student)
    ]
    return float((logs[0].exp() * (logs[0] - logs[1])).sum())


def on_held_out(teacher: CausalLM, student: CausalLM, work: Path) -> float:
    """Return the mean KL on rows of the held-out text."""
    texts = [json.loads(line)["text"] for line in (work / "held.jsonl").read_text().splitlines()]
    encode = make_encoder(load_tokenizer(work / "teacher"))
    total, count = 0.0, 0
    for batch in batches_of(pack_rows((Document(t, None, "held") for t in texts), encode, LENGTH), LENGTH, 64):
        ids, starts, mask = (torch.from_numpy(batch[name]) for name in ("input_ids", "document_ids", "target_mask"))
        total, count = total + kl_sum(teacher, student, ids, starts, mask), count + int(mask.sum())
    return total / count


def on_own_answers(teacher: CausalLM, writer: CausalLM, work: Path, seed: int = 5) -> dict[str, float]:
    """Return the mean KL on a model's own answers to the fixed prompts, and the percentage that do not end."""
    tokenizer, runtime = load_tokenizer(work / "teacher"), select_runtime("cpu")
    texts = [json.loads(line)["text"] for line in (work / "fixed.jsonl").read_text().splitlines()]
    prompts = [plain_prompt(tokenizer, text) for text in texts]
    draw, total, count, endless = torch.Generator().manual_seed(seed), 0.0, 0, 0
    for part in (prompts[i : i + 250] for i in range(0, len(prompts), 250)):
        uniforms = torch.rand(len(part), NEW, generator=draw)
        answers = decode(writer, part, uniforms, 1.0, {tokenizer.eos_token_id}, runtime)
        endless += sum(answer[-1] != tokenizer.eos_token_id for answer in answers)
        rows = [[*prompt, *answer] for prompt, answer in zip(part, answers, strict=True)]
        ids, mask = torch.zeros(len(rows), LENGTH, dtype=torch.int64), torch.zeros(len(rows), LENGTH, dtype=torch.bool)
        for i, (row, prompt) in enumerate(zip(rows, part, strict=True)):
            ids[i, : len(row)], mask[i, len(prompt) : len(row)] = torch.tensor(row), True
        total += kl_sum(teacher, writer, ids, torch.zeros_like(ids), mask[:, 1:])
        count += int(mask.sum())
    return {"kl_own_answers": total / count, "endless_percent": 100 * endless / len(prompts)}


@torch.no_grad()
def decoding_rate(model: CausalLM) -> dict[str, float]:
    """Return tokens a second of `decode` and of a bare greedy loop over kept keys and values, best of three each."""
    prompts, runtime = torch.randint(1, VOCABULARY, (RATE_ROWS, 32)).tolist(), select_runtime("cpu")

    def bare() -> None:
        ids, cache = torch.tensor(prompts), DynamicCache()
        for _ in range(RATE_TOKENS):
            ids = model.module(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

    ways = {
        "bare": bare,
        "decode": lambda: decode(model, prompts, torch.rand(RATE_ROWS, RATE_TOKENS), 1.0, {-1}, runtime),
    }
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(3):
        for name, run in ways.items():
            begun = time.perf_counter()
            run()
            seconds[name] = min(seconds[name], time.perf_counter() - begun)
    rates = {name: RATE_ROWS * RATE_TOKENS / spent for name, spent in seconds.items()}
    return {f"{name}_tokens_per_s": round(rate) for name, rate in rates.items()} | {
        "decode_over_bare": round(rates["decode"] / rates["bare"], 3)
    }


def run_all(work: Path) -> dict[str, Any]:
    """Make teacher, texts, cache and student, train both ways, and measure all."""
    if not (work / "teacher" / "config.json").is_file():
        train_teacher(work / "teacher")
    make_texts(work, 0.08)
    teacher, cache, student = (str(work / name) for name in ("teacher", "cache", "student"))
    rows = f"--length {LENGTH} --top-k 32 --num-rows 7000 --teacher-batch-size 64"
    learning = f"--checkpoint {student} --kd-cache-dir {cache}"
    mixing = f"--rounds {ROUNDS} --round-texts {TEXTS} --max-steps {ROUNDS_STEPS} --later-share {SHARE}"
    seconds = {}
    for name, line in {
        "cache": f"cache build --teacher {teacher} --dataset {work}/offline.jsonl {rows} --out {cache}",
        "student": f"quantize --model {teacher} --kd-cache-dir {cache} --start-rank 8 --out {student}",
        "offline": f"recover {learning} --max-steps {OFFLINE_STEPS} --out {work}/offline {RECOVER}",
        "rounds": f"rounds {learning} --dataset {work}/prompts.jsonl {mixing} --out {work}/rounds "
        f"--recover '{RECOVER}' --generate '{GENERATE}'",
    }.items():
        begun = time.perf_counter()
        cli.main(shlex.split(f"{line} {CPU}"))
        seconds[name] = round(time.perf_counter() - begun)
    opened = open_student(teacher).model
    runs = {
        "teacher": teacher,
        "student": student,
        "offline": work / "offline/last",
        "rounds": work / "rounds/run/last",
    }
    models = {name: open_student(str(folder)).model for name, folder in runs.items()}
    result: dict[str, Any] = {"rate": decoding_rate(opened), "seconds": seconds}
    for name, model in models.items():
        result[name] = {"kl_held_out": on_held_out(opened, model, work), **on_own_answers(opened, model, work)}
    for name, folder in (("offline", work / "offline"), ("rounds", work / "rounds/run")):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        result[name] |= {"steps": len(lines), "scored_tokens": sum(json.loads(line)["tokens"] for line in lines)}
    rounds, offline = result["rounds"], result["offline"]
    return result | {
        "own_answers_change_percent": 100 * (rounds["kl_own_answers"] / offline["kl_own_answers"] - 1),
        "held_out_change_percent": 100 * (rounds["kl_held_out"] / offline["kl_held_out"] - 1),
        "endless_over_teacher_points": rounds["endless_percent"] - result["teacher"]["endless_percent"],
        "scored_tokens_ratio": rounds["scored_tokens"] / offline["scored_tokens"],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    found = run_all(arguments.work)
    arguments.out.write_text(json.dumps(made_with() | found, indent=1) + "\n")
    print(json.dumps(found, indent=1))

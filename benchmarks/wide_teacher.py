"""Train the teacher on which sizes are compared: Qwen3, width 512, two layers, 8 tokens for each of its weights.

An adapter of one rank weighs less, beside the codes, the wider a model is: 1.6 bits a weight at width 256, 0.8 here,
0.3 at 2,048. And llama.cpp's K-quants want rows of 256 weights. So claims at equal bytes need a teacher that is wide,
and one that low bits hurt, which takes many tokens a weight; depth matters least and is what this one goes without.

    python benchmarks/wide_teacher.py --text DIR --held-out LIST --out DIR

`--text` is a folder of Python sources or other text, 200 MB or more (an environment's packages will do); files of
`--held-out`, and files of an equal name and size, are left out. An hour and a half on two cores that multiply bfloat16,
0.8 s a step: it may be stopped and started again at will, and goes on from its last state, at most ten minutes old.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from qat_lora.commands import demo
from qat_lora.data.packing import make_encoder, pack_rows
from qat_lora.data.sources import TextConfig, open_documents
from qat_lora.files.checksums import seal
from qat_lora.models.load import load_tokenizer, make_qwen3, make_tokenizer, save_model
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.setup.common import batches_of
from qat_lora.train.optim import set_lr

VOCABULARY, LENGTH, ROWS, TOKENS_A_WEIGHT = 2048, 256, 32, 8
SHAPE = {"hidden": 512, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 1536, "head_dim": 64}
SAVE_S, TOKENIZER_BYTES = 600.0, 30_000_000


def main() -> None:
    """Write the rows, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="folder of text to train on")
    parser.add_argument(
        "--held-out", type=Path, required=True, help="list of files to leave out, relative to the folder"
    )
    parser.add_argument("--held-out-in", type=Path, help="folder of the held-out files, if it is another one")
    parser.add_argument("--out", type=Path, required=True, help="folder of the teacher")
    parser.add_argument("--steps", type=int, help="steps, if not 8 tokens a weight (of 32 rows of 256 tokens)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not (arguments.out / "tokenizer.json").is_file():
        listed = files(arguments.text, arguments.held_out, arguments.held_out_in or arguments.text)
        (arguments.out / "files.txt").write_text("\n".join(listed), encoding="utf-8")
        text = TextConfig(dataset=str(arguments.text), files_from=str(arguments.out / "files.txt"))
        make_tokenizer(some_of("".join(d.parts()) for d in open_documents(text)), VOCABULARY, arguments.out)
    torch.manual_seed(0)
    model = make_qwen3(arguments.out, VOCABULARY, **SHAPE)
    weights = sum(p.numel() for p in model.module.parameters())
    steps = arguments.steps or math.ceil(TOKENS_A_WEIGHT * weights / (ROWS * LENGTH))
    train(model, make_rows(arguments.text, arguments.out, steps * ROWS), arguments.out, steps)
    save_model(model.module, arguments.out)
    seal(arguments.out)
    trained = {"weights": weights, "tokens": steps * ROWS * LENGTH}
    (arguments.out / "trained.json").write_text(json.dumps(trained), encoding="utf-8")


def files(folder: Path, held_out: Path, held_out_in: Path) -> list[str]:
    """Return the folder's Python files in an order drawn once, without the held-out ones or copies of them."""
    kept_apart = {(Path(name).name, (held_out_in / name).stat().st_size) for name in held_out.read_text().split()}
    found = sorted(path for path in folder.rglob("*.py") if 200 < path.stat().st_size < 500_000)
    found = [path for path in found if (path.name, path.stat().st_size) not in kept_apart]
    return [str(found[i].relative_to(folder)) for i in np.random.default_rng(0).permutation(len(found))]


def some_of(texts):
    """Yield texts until there are enough for a tokenizer."""
    read = 0
    for text in texts:
        yield text
        read += len(text)
        if read > TOKENIZER_BYTES:
            return


def make_rows(folder: Path, out: Path, count: int) -> dict[str, np.ndarray]:
    """Return `count` rows of 256 tokens as arrays on disk, packed once."""
    names = {"input_ids": np.int32, "document_ids": np.int32, "target_mask": np.bool_}
    if not (out / "rows.json").is_file():
        text = TextConfig(dataset=str(folder), files_from=str(out / "files.txt"))
        packed = pack_rows(open_documents(text), make_encoder(load_tokenizer(out)), LENGTH)
        kept: dict[str, list[np.ndarray]] = {name: [] for name in names}
        with tqdm(total=count, desc="tokenize", unit="row") as bar:
            for batch in batches_of(packed, LENGTH, ROWS):
                for name in names:
                    kept[name].append(batch[name])
                bar.update(ROWS)
                if bar.n >= count:
                    break
        for name, dtype in names.items():
            np.save(out / f"{name}.npy", np.concatenate(kept[name]).astype(dtype))
        (out / "rows.json").write_text(json.dumps({"rows": bar.n}), encoding="utf-8")
    return {name: np.load(out / f"{name}.npy", mmap_mode="r") for name in names}


def train(model, rows: dict[str, np.ndarray], out: Path, steps: int) -> None:
    """Train by Muon as `demo` does, each row once if there are enough, from the last state if there is one."""
    runtime, state, start = select_runtime("cpu"), out / "state.pt", 0
    model.tile_attention()
    model.module.train().requires_grad_(True)
    optimizers = demo._optimizers(model, torch.bfloat16)
    if state.is_file():
        saved = torch.load(state, weights_only=True)
        start = saved["step"]
        model.module.load_state_dict(saved["model"])
        for optimizer, values in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
    count = len(rows["input_ids"])
    order = np.concatenate([np.random.default_rng(i).permutation(count) for i in range(-(-steps * ROWS // count))])
    chosen = (np.sort(order[i * ROWS : (i + 1) * ROWS]) for i in range(start, steps))
    last = time.monotonic()
    with tqdm(total=steps, initial=start, desc="train", unit="step", mininterval=30) as bar:
        for step, batch in enumerate(
            runtime.feed({name: values[i] for name, values in rows.items()} for i in chosen), start
        ):
            for optimizer in optimizers:
                set_lr(optimizer, min(1.0, (step + 1) / 100, (1 - step / steps) / 0.4))
            with runtime.autocast(torch.bfloat16):
                hidden = model.hidden(batch["input_ids"], batch["document_ids"])
                logits = model.logits(hidden[:, :-1].flatten(0, 1)).float()
            mask = batch["target_mask"].reshape(-1)
            targets = batch["input_ids"][:, 1:].reshape(-1).long().masked_fill(~mask, -100)
            loss = torch.nn.functional.cross_entropy(logits, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            bar.update()
            if step % 20 == 0:
                bar.set_postfix_str(f"loss {loss.item():.3f}")
            if time.monotonic() - last > SAVE_S:
                held = [optimizer.state_dict() for optimizer in optimizers]
                torch.save({"step": step + 1, "model": model.module.state_dict(), "optimizers": held}, out / "new.pt")
                os.replace(out / "new.pt", state)
                last = time.monotonic()


if __name__ == "__main__":
    main()

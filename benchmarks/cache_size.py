r"""Size of KD caches, on disk and packed for transport, and what storing costs in KL: by encoding and by K.

Claims at a vocabulary of 151,936, rows of 1,024 tokens and K = 64, everything counted (ids, values, sums, input ids,
masks, checksums, sidecars, manifest): at most 290 bytes a token with float16 values, 226 with uint8, 205 packed. Mean
KL from storing at most 1e-5 and 5e-5 nats. The teacher for sizes is a random model of the shape of Qwen3-0.6B, whose
ids have no pattern at all: the worst case for packing. In float32, too: a bfloat16 teacher's logits have 8 bits, which
float16 holds exactly and which pack better. KL is also measured on real tokens, for every --teacher folder with --text;
those have vocabularies of their own.

The teacher runs once, with the largest K; smaller K are the same rows with the dropped entries in the tail. KL is
between the float32 head and tail that the teacher gave and what a reader gives back, K + 1 outcomes, both renormalised,
in float64 (`qat-lora cache audit` compares whole distributions instead).

    python benchmarks/cache_size.py --machine "two cores of ..." --teacher teacher-small --text held-out.txt \
        --out benchmarks/results/cache_size.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qat_lora.cache.build.builder import ForwardSettings, run_batch
from qat_lora.cache.build.writer import CacheWriter
from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.layout import VALUE_DTYPES
from qat_lora.cache.format.records import Fingerprint
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.tools.transport import pack_cache
from qat_lora.data.packing import PackedRow, make_encoder, pack_rows
from qat_lora.data.sources import TextConfig, open_documents
from qat_lora.models.load import CausalLM, load_model, load_tokenizer, make_qwen3

Arrays = dict[str, np.ndarray]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SHAPE = {"hidden": 1024, "heads": 16, "kv_heads": 8, "mlp": 3072, "head_dim": 128}


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--layers", type=int, default=28, help="of the random teacher")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="of the random teacher")
    parser.add_argument("--vocab", type=int, default=151_936, help="of the random teacher")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row of the random teacher")
    parser.add_argument("--rows", type=int, default=8, help="rows of each teacher")
    parser.add_argument("--ks", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument("--teacher", action="append", default=[], help="a model folder; may be repeated")
    parser.add_argument("--teacher-length", type=int, default=256, help="tokens of a row of these")
    parser.add_argument("--text", help="text file for these")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    if arguments.teacher and not arguments.text:
        parser.error("--teacher needs --text")
    torch.manual_seed(0)
    random = make_qwen3(Path("unsaved"), arguments.vocab, layers=arguments.layers, **SHAPE)
    random.module.to(DTYPES[arguments.dtype]).eval()
    sides = [measure("random", random, random_rows(arguments), arguments.length, arguments.ks)]
    del random
    for folder in arguments.teacher:
        rows = itertools.islice(text_rows(folder, arguments.text, arguments.teacher_length), arguments.rows)
        sides.append(measure(Path(folder).name, load_model(folder), rows, arguments.teacher_length, arguments.ks))
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, NumPy {np.__version__}",
        "random_teacher": f"{arguments.layers} layers, {arguments.dtype}",
        "teachers": sides,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n", encoding="utf-8")


def random_rows(arguments: argparse.Namespace) -> Iterator[PackedRow]:
    """Yield rows of random tokens."""
    draw = np.random.default_rng(0)
    for number in range(arguments.rows):
        ids = draw.integers(0, arguments.vocab, arguments.length).astype(np.int32)
        ones = np.ones(arguments.length, np.uint8)
        yield PackedRow(ids, ones, np.arange(arguments.length) == 0, {"document": number})


def text_rows(folder: str, text: str, length: int) -> Iterator[PackedRow]:
    """Yield packed rows of a text."""
    encode = make_encoder(load_tokenizer(Path(folder)))
    return pack_rows(open_documents(TextConfig(dataset=text, format="text")), encode, length)


def measure(name: str, teacher: CausalLM, rows: Iterable[PackedRow], length: int, ks: list[int]) -> dict[str, Any]:
    """Run a teacher over some rows and write them in every encoding and with every K."""
    whole = fingerprint(teacher.vocab_size, length, max(ks), "float16")
    parts = []
    for row in rows:
        parts.append(run_batch(teacher, [row], whole, ForwardSettings(1)))
        print(f"{name}: row {len(parts)}", flush=True)
    arrays = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    lines = [encode(arrays, teacher.vocab_size, length, k, dtype) for dtype in VALUE_DTYPES for k in ks]
    positions = len(parts) * (length - 1)
    return {"teacher": name, "vocab": teacher.vocab_size, "length": length, "positions": positions, "by_k": lines}


def fingerprint(vocab: int, length: int, top_k: int, value_dtype: str) -> Fingerprint:
    """Return what such a cache says about itself."""
    named = dict.fromkeys(("tokenizer_sha256", "teacher_sha256"), "0" * 64)
    return Fingerprint(
        **named,
        vocab_size=vocab,
        teacher="benchmark",
        chat_template_sha256=None,
        dataset="benchmark",
        packing="benchmark",
        length=length,
        top_k=top_k,
        value_dtype=value_dtype,
    )


def encode(arrays: Arrays, vocab: int, length: int, k: int, value_dtype: str) -> dict[str, Any]:
    """Write one cache, read it back, pack it; return the figures."""
    held = fingerprint(vocab, length, k, value_dtype)
    rows = with_k(arrays, k)
    count = len(rows["input_ids"])
    tokens = count * length
    with tempfile.TemporaryDirectory() as folder:
        cache, packed = Path(folder) / "cache", Path(folder) / "packed"
        with CacheWriter(cache, held) as writer:
            writer.append(rows, list(range(count)))
        size, transport = (sum(file.stat().st_size for file in cache.iterdir()), pack_cache(cache, packed))
        batch = KDCacheDataset(cache).rows(range(count))
        kl = divergence(rows, batch)
    return {
        "k": k,
        "values": value_dtype,
        "bytes_per_token": round(fmt.row_bytes(held.arrays) / length, 2),
        "with_records_of_so_few_rows": round(size / tokens, 2),
        "packed_bytes_per_token": round(transport["packed_bytes_per_token"], 2),
        "kl_mean": float(f"{kl.mean():.3g}"),
        "kl_largest": float(f"{kl.max():.3g}"),
    }


def with_k(arrays: Arrays, k: int) -> Arrays:
    """Return the rows with the first k entries as head and the others in the tail."""
    dropped = arrays["head_logits"][..., k:].astype(np.float64) - arrays["lse"][..., None]
    parts = np.concatenate([dropped, arrays["log_tail"].astype(np.float64)[..., None]], axis=-1)
    log_tail = np.logaddexp.reduce(parts, axis=-1).astype(np.float32)
    heads = {name: arrays[name][..., :k] for name in ("head_ids", "head_logits")}
    return {**arrays, **heads, "log_tail": log_tail}


def divergence(given: Arrays, read: Arrays) -> np.ndarray:
    """Return KL(given ‖ read) at each position."""
    log_p, log_q = outcomes(given), outcomes(read)
    with np.errstate(invalid="ignore"):
        terms = np.exp(log_p) * (log_p - log_q)
    return np.where(log_p > -np.inf, terms, 0).sum(-1)


def outcomes(batch: Arrays) -> np.ndarray:
    """Return log-probabilities of head entries and tail, renormalised, in float64."""
    head = batch["head_logits"].astype(np.float64) - batch["lse"].astype(np.float64)[..., None]
    logs = np.concatenate([head, batch["log_tail"].astype(np.float64)[..., None]], axis=-1)
    return logs - np.logaddexp.reduce(logs, axis=-1, keepdims=True)


if __name__ == "__main__":
    main()

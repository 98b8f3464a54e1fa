r"""Does the memory of tokenising follow the size of a document?

Claim: one document of 200 MB is tokenised, and a KD cache of its first 64 rows built, each in less than 1.2 GB of
process, imports and tokenizer included; the ids are those of the whole (tests). The control gives the document to the
tokenizer whole, which is how it was done before, and how most loaders do it. Every case is a process of its own, and
its peak resident size (ru_maxrss) the result; `start_mb` is what it had before the text was opened.

    python benchmarks/text_memory.py --teacher FOLDER --text wikitext.txt --work DIR \
        --out benchmarks/results/text_memory.json
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qat_lora.commands.cache import build_cache
from qat_lora.data.packing import make_encoder, pack_rows
from qat_lora.data.sources import TextConfig, open_documents
from qat_lora.models.load import load_tokenizer
from qat_lora.options import CacheBuildOptions, RunConfig
from qat_lora.runtime.host.machine import made_with
from qat_lora.runtime.launch.select import select_runtime

LENGTH = 256  # tokens of a row
ROWS = 64


def lines(source: str | None, draw: random.Random) -> Iterator[str]:
    """Yield lines of text without end: those of a file in random order, or random words."""
    given = Path(source).read_text(encoding="utf-8").splitlines() if source else []
    letters = "etaoinshrdlu"
    words = ["".join(draw.choices(letters, k=draw.randint(1, 9))) for _ in range(5000)]
    kept = [line for line in given if line.strip() and not line.startswith(" = ")]
    while True:
        yield draw.choice(kept) if kept else " ".join(draw.choices(words, k=80))


def write_document(path: Path, megabytes: int, source: str | None) -> None:
    """Write one document of so many MB (10^6 bytes)."""
    left = megabytes * 1_000_000
    with path.open("w", encoding="utf-8") as file:
        for line in lines(source, random.Random(0)):
            left -= len(line.encode()) + 1
            file.write(line + "\n")
            if left <= 0:
                return


def peak_mb() -> int:
    """Return the largest resident size of this process until now, in MB (10^6 bytes)."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6)


def measure(case: str, document: Path, teacher: str, out: Path) -> dict[str, Any]:
    """Run one case in this process."""
    tokenizer = load_tokenizer(Path(teacher))
    text = TextConfig(dataset=str(document), format="text")
    start_mb, began, first_row_s = peak_mb(), time.perf_counter(), None
    tokens = 0
    if case == "build":
        run = RunConfig(device="cpu", dtype="float32", out=str(out), quiet=True)
        build_cache(
            CacheBuildOptions(teacher=teacher, text=text, length=LENGTH, top_k=16, num_rows=ROWS, run=run),
            select_runtime("cpu"),
        )
        tokens = ROWS * LENGTH
    elif case == "whole":
        ids = tokenizer(document.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
        mask = [1] * len(ids)  # as the encoder returned it
        tokens = len(mask)
    else:
        for _ in pack_rows(open_documents(text), make_encoder(tokenizer), LENGTH):
            first_row_s = first_row_s or time.perf_counter() - began
            tokens += LENGTH
    seconds = time.perf_counter() - began
    result = {"case": case, "mb": round(document.stat().st_size / 1e6), "peak_mb": peak_mb(), "start_mb": start_mb}
    result |= {"tokens": tokens, "tokens_per_s": round(tokens / seconds)}
    return result | ({"first_row_s": round(first_row_s, 2)} if first_row_s else {})


def main() -> None:
    """Write the documents, run every case in a process of its own, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="folder of a small teacher, whose tokenizer is taken too")
    parser.add_argument("--text", help="file whose lines are mixed into the documents (default: random words)")
    parser.add_argument("--work", required=True, help="folder for the documents and caches")
    parser.add_argument("--sizes", default="2,8,24,200", help="of the documents in MB")
    parser.add_argument("--whole-up-to", type=int, default=8, help="largest document of the control, in MB")
    parser.add_argument("--out", help="JSON file for the result")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    work = Path(arguments.work)
    if arguments.measure:
        case, size = arguments.measure.split(":")
        print(json.dumps(measure(case, work / f"{size}.txt", arguments.teacher, work / f"cache-{size}")))
        return
    work.mkdir(parents=True, exist_ok=True)
    sizes = [int(size) for size in arguments.sizes.split(",")]
    cases = [f"{case}:{size}" for size in sizes for case in ("build", "whole", "pieces")]
    cases = [case for case in cases if not (case.startswith("whole") and int(case[6:]) > arguments.whole_up_to)]
    cases = [case for case in cases if not case.startswith("build") or case == f"build:{max(sizes)}"]
    result: dict[str, Any] = made_with() | {"rows_built": ROWS, "length": LENGTH, "cases": []}
    for size in sizes:
        write_document(work / f"{size}.txt", size, arguments.text)
    for case in cases:
        command = [sys.executable, __file__, "--measure", case, "--teacher", arguments.teacher, "--work", str(work)]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        print(shown, flush=True)
        result["cases"].append(json.loads(shown))
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

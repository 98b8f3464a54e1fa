"""Quantise the tiny teacher in forked processes, kill each at a failpoint, go on; run by `test_app_unfinished.py`.

Forked from a process that has imported torch and started no thread, a life costs a second instead of several.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from toy_paths import Tiny
from toy_pipeline import call, quantize_options

ORDER = {"init": "gptq", "start_rank": 4, "joint_rank": 2, "calibration_rows": 16}
RESULT = ("model.safetensors", "adapter_start.safetensors", "config.json", "result.json")
SETTINGS = {
    "with the head": {**ORDER, "quantize_head": "w4g128"},  # which comes first: it is the embedding
    "descent": {**ORDER, "init": "descent"},
    "layers alone": {**ORDER, "calibrate_on": "teacher", "preset": "w4g64a"},
    "without text": {"init": "mse", "start_rank": 4, "kd_cache_dir": None},
}
POINTS = {"with the head": ("block-kept:1", "block-written:3")}
BLOCKS = tuple(f"block-{step}:{number}" for number in (1, 2) for step in ("written", "kept"))
EVERY_POINT = {
    "with the head": (*BLOCKS, "block-written:3", "block-kept:3", "sensitivity-written:3", "sensitivity-kept:14"),
    "descent": BLOCKS,
    "layers alone": (*BLOCKS, "sensitivity-kept:5"),
    "without text": BLOCKS,
}


def life(options, point=None):
    """Quantise in a forked process; return its exit code, negative for the signal that ended it."""
    child = os.fork()
    if not child:
        if point:
            os.environ["QAT_LORA_FAILPOINT"] = point
        try:
            call("quantize", options)
            os._exit(0)
        except BaseException as error:
            print("child:", repr(error), file=sys.stderr, flush=True)
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def content(folder):
    """Return the bytes of all files of a finished student."""
    assert not (folder / "unfinished").exists() and not list(folder.glob(".*"))
    return {name: (folder / name).read_bytes() for name in RESULT if (folder / name).exists()}


def main(tiny, cache, root, points):
    torch.set_num_threads(1)
    for name, killed_at in points.items():
        settings = SETTINGS[name]
        options = lambda out, settings=settings: quantize_options(tiny, out, cache, **settings)  # noqa: E731
        call("quantize", options(root / name))  # in this process: what is imported late is then there for all lives
        whole = content(root / name)
        assert len(whole) == len(RESULT)
        for point in killed_at:
            out = root / f"{name} {point}"
            assert (code := life(options(out), point)) == -signal.SIGKILL, (point, code)
            pieces = {piece.name for piece in (out / "unfinished").iterdir() if not piece.name.startswith(".")}
            kind, _, step = point.partition("-")
            finished = int(step.rpartition(":")[2]) - step.startswith("written")
            assert sum(piece.startswith(kind) for piece in pieces) == finished, (point, pieces)
            assert life(options(out)) == 0
            assert content(out) == whole, f"{name}: not the same bytes after a kill at {point}"
            print("the same after", name, point, flush=True)


if __name__ == "__main__":
    *paths, every = sys.argv[1:]
    teacher, text, held_out, cache, root = map(Path, paths)
    main(Tiny(teacher, text, held_out), cache, root, EVERY_POINT if every == "every" else POINTS)

"""How many modules a reader goes through on three ways through the code, counted while it runs.

Counted are the distinct modules of this package with a function on the call stack at the moments named below, in every
thread and process. A helper that was called and has returned is not on the way. Each way and its moments:

* A cache row, from `train()` to the gradient of its loss: whenever bytes are read from a file or decoded
  (`cache/format/codec`), whenever a function of `losses/` runs, and when autograd starts. Frames outside `train()`
  are not counted, except for those of the thread that reads ahead. The model itself (`layers/`, `models/`) is not on
  the row's way.
* `--num-chips 2`, from `cli.main` to the gradient: when the number of processes is decided (`plan_chips`), when one is
  started, and in a worker when the gradients are exchanged. The rate is given: with `--lr auto` the trials go the same
  way before, through `train/lr_probe`.
* A preset, from `cli.main(["quantize", ...])` to a layer: when the preset is looked up (`quant/presets`), and when the
  first `QuantLinear` is made.

`python tests/test_journeys.py` prints the ways.
"""

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
from toy_pipeline import cache_options, call, quantize_options, recover_options

from qat_lora.cli import main
from qat_lora.registry import COMMANDS

ROW, CHIPS, PRESET = 12, 8, 8


class Way:
    """Records the modules on the call stack at some moments; a context manager, for all threads."""

    def __init__(self, is_moment: Callable[[FrameType, str, object], bool], since: str = "") -> None:
        """Look at every call with `is_moment`; with `since`, only at stacks below the function of that name."""
        self.is_moment, self.since = is_moment, since
        self.modules: dict[str, None] = {}

    def __enter__(self):
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)

    def _look(self, frame, event, argument):
        if event not in ("call", "c_call") or not self.is_moment(frame, event, argument):
            return
        stack = []
        while frame is not None:
            stack.append(frame)
            frame = frame.f_back
        stack.reverse()
        if self.since and threading.current_thread() is threading.main_thread():
            first = next((i for i, frame in enumerate(stack) if frame.f_code.co_name == self.since), len(stack))
            stack = stack[first:]
        names = (module_of(frame) for frame in stack)
        self.modules |= dict.fromkeys(name for name in names if name.startswith("qat_lora."))


def module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def is_row(frame, event, argument) -> bool:
    """Whether bytes of a file are read or decoded, or the loss or its gradient is computed."""
    name = module_of(frame)
    if event == "c_call":
        is_ours = name.startswith("qat_lora.cache.")
        read = is_ours and getattr(argument, "__name__", "") in ("read", "pread", "readinto", "frombuffer")
        return read or getattr(argument, "__name__", "") == "run_backward"
    return name.startswith("qat_lora.losses.") or name == "qat_lora.cache.format.codec"


def is_exchange(frame, event, argument) -> bool:
    """Whether the processes are decided on or started, or the gradients exchanged."""
    function = frame.f_code.co_name
    if event != "call":
        return False
    if function == "plan_chips" or (function == "start" and module_of(frame) == "multiprocessing.process"):
        return True
    if function != "all_reduce" or not module_of(frame).startswith("torch.distributed"):
        return False
    while frame is not None and frame.f_code.co_name != "reduce_gradients":
        frame = frame.f_back
    return frame is not None


def is_layer(frame, event, argument) -> bool:
    """Whether a preset is looked up or a quantised layer made."""
    function, name = frame.f_code.co_name, module_of(frame)
    made = function == "__init__" and name == "qat_lora.layers.quant_linear"
    return event == "call" and (made or (function == "preset" and name == "qat_lora.quant.presets"))


def recover_on_the_way(options, runtime):
    """Run `recover` in a worker, and write what was on the stack when the gradients were exchanged."""
    with Way(is_exchange) as way:
        result = COMMANDS["recover"].load()(options, runtime)
    Path(f"way-{runtime.rank}.json").write_text(json.dumps([name for name in way.modules if name != __name__]))
    return result


@pytest.fixture(scope="module")
def work(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("journeys")
    call("build_cache", cache_options(tiny, root / "cache", eval_rows=0, num_rows=32))
    call("quantize", quantize_options(tiny, root / "student"))
    return root


def shown(title: str, modules) -> int:
    print(f"{title}: {len(modules)}", *modules, sep="\n  ")
    return len(modules)


def test_a_row_from_the_disk_to_its_gradient(work):
    options = recover_options(work / "student", work / "cache", work / "row")
    options = replace(options, loop=replace(options.loop, batch_size=4, max_steps=2))
    with Way(is_row, since="train") as way:
        call("recover", options)
    modules = [name for name in way.modules if not name.startswith(("qat_lora.layers.", "qat_lora.models."))]
    assert {"qat_lora.train.loop", "qat_lora.cache.format.codec", "qat_lora.losses.fused.op"} <= set(modules)
    assert shown("a row", modules) <= ROW


def test_two_chips_from_the_command_line_to_the_gradient(work, monkeypatch):
    probed = replace(COMMANDS["recover"], function="test_journeys:recover_on_the_way")
    monkeypatch.chdir(work)
    arguments = (
        "recover --checkpoint student --kd-cache-dir cache --batch-size 2 --max-steps 1 --recovery-r 2 --quiet "
        "--lr 1e-3 --device cpu --num-chips 2 --out two"
    )
    with monkeypatch.context() as patched, Way(is_exchange) as way:
        patched.setitem(COMMANDS, "recover", probed)
        main(arguments.split())
    modules = dict.fromkeys((*way.modules, *json.loads((work / "way-1.json").read_text())))
    assert {"qat_lora.cli", "qat_lora.train.step", "qat_lora.runtime.native"} <= set(modules)
    assert shown("two chips", modules) <= CHIPS


def test_a_preset_from_the_command_line_to_a_layer(tiny, tmp_path):
    arguments = f"quantize --model {tiny.teacher} --preset w2g64 --init absmax --start-rank 0 --quiet --device cpu"
    with Way(is_layer) as way:
        main([*arguments.split(), "--out", str(tmp_path / "student")])
    assert {"qat_lora.cli", "qat_lora.layers.quant_linear"} <= set(way.modules)
    assert shown("a preset", way.modules) <= PRESET


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", "-s", "-p", "no:cacheprovider"]))

"""The log of a run: `metrics.jsonl`, the progress bar, trackers on request, and the training curve as a picture.

One JSON object per optimizer step. Values stay on the device and are fetched together, every `log_steps` and before
anything else is written, so the file may lag behind the run. A resumed run cuts it back to its checkpoint, which was
written after all lines up to it and holds their checksum.

Trackers get the same numbers from the main process. A resumed run continues in the same place: TensorBoard is told from
which step on to forget, Weights & Biases finds the run by an id in the run's folder. Both name their files themselves,
so the run's list of files gets them only after they appear; a kill in between leaves files that are not listed.
"""

import hashlib
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from qat_lora.errors import DamagedFileError, DivergedError
from qat_lora.extras import require
from qat_lora.files.checksums import sha256_of
from qat_lora.files.finite import json_text
from qat_lora.files.folders import appeared, ours, tree, write_text
from qat_lora.files.pictures import COLOURS, INK, drawn_to
from qat_lora.losses.objective import KL_NAMES
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.host.machine import peak_memory_bytes
from qat_lora.train.step import Sums

REMEDY = (  # what to do about a loss or a weight that is NaN or infinite
    "checkpoints and exports from before it are sound. Lower --lr (or --scale-lr), or raise --warmup-steps, and start "
    "again with --overwrite"
)


class TensorBoard:
    """Event files under `tensorboard/` in the run's folder; view them with `tensorboard --logdir`."""

    def __init__(self, out: Path, start_step: int, settings: Mapping[str, Any]) -> None:
        require("tensorboard", "log")
        from torch.utils.tensorboard import SummaryWriter

        folder, before = out / "tensorboard", tree(out / "tensorboard")
        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else None)
        appeared(folder, before)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar per number."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """A run in the project `qat-lora`; WANDB_MODE=offline writes under `wandb/` in the run's folder only."""

    def __init__(self, out: Path, start_step: int, settings: Mapping[str, Any]) -> None:
        self._wandb = require("wandb", "log")
        file = out / "wandb_id.txt"
        if not file.exists():
            write_text(file, uuid.uuid4().hex[:12])
        self._folder, before = out / "wandb", tree(out / "wandb")
        place = {"project": "qat-lora", "name": out.name, "dir": str(out), "id": file.read_text("utf-8").strip()}
        silent = self._wandb.Settings(silent=True)
        self._run = self._wandb.init(**place, resume="allow", config=dict(settings), settings=silent)
        appeared(self._folder, before)
        self._own = [folder for folder in self._folder.glob(f"*-{self._run.id}") if folder.is_dir()]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers; the service ignores steps that it has already."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
        for folder in self._own:
            appeared(folder, set())


Tracker = TensorBoard | WeightsAndBiases
# By name; each is opened with the run's folder, the step after which it goes on, and its settings.
TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


class MetricsLog:
    """Collects the values of steps, appends them to the file and shows progress."""

    def __init__(
        self, path: Path, steps: int, start: int, quiet: bool, device: torch.device, trackers: Sequence[Tracker] = (),
        step_rows: int = 0,  # 0: no samples/s
    ) -> None:  # fmt: skip
        self.path = path
        self._bar = tqdm(total=steps, initial=start, desc="train", unit="step", disable=quiet)
        self._device, self._trackers, self._step_rows = device, trackers, step_rows
        self._since, self._first_step = time.perf_counter(), start + 1
        self._pending: list[tuple[int, Mapping[str, float], Sums]] = []

    def close(self) -> None:
        """Close the bar and the trackers."""
        self._bar.close()
        for tracker in self._trackers:
            tracker.close()

    def say(self, line: str) -> None:
        """Print a line above the bar, unless the run is quiet."""
        if not self._bar.disable:
            self._bar.write(line, file=sys.stderr)

    def track(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers to the trackers."""
        for tracker in self._trackers:
            tracker.log(step, values)

    def add(self, step: int, rates: Mapping[str, float], means: Sums) -> None:
        """Note the learning rates, by name, and the values of an optimizer step; these stay there until `flush`."""
        self._pending.append((step, rates, means))
        self._bar.update()  # as steps are dispatched: a CPU may take minutes for one

    def flush(self, runtime: Runtime) -> None:
        """Write the noted steps by the runtime's deferred callback, up to a NaN or infinity, a DivergedError."""
        if not self._pending:
            return
        steps, rates, means = zip(*self._pending, strict=True)
        names = list(means[0])
        self._pending.clear()

        def write(*values: Any) -> None:
            numbers = map(float, values)
            named = [{name: next(numbers) for name in names} for _ in steps]
            lines = [{"step": step, **of, **lrs} for step, of, lrs in zip(steps, named, rates, strict=True)]
            sound = list(takewhile(lambda line: all(map(math.isfinite, line.values())), lines))
            self.write(sound)
            if len(sound) < len(lines):
                odd = lines[len(sound)]
                name = next(name for name in ("loss", *names) if not math.isfinite(odd[name]))
                raise DivergedError(f"{name}: {odd[name]} at step {odd['step']}; {REMEDY}")

        if runtime.is_main:  # each value by itself: stacking them on the device would be one more graph
            runtime.defer(write, *(mean[name] for mean in means for name in names))

    def write(self, lines: Sequence[Mapping[str, float]]) -> None:
        """Append steps at one rate of tokens, but for the first, which compiles and has its own; show the last."""
        now = time.perf_counter()
        timed = [line for line in lines if line["step"] > self._first_step] or lines
        seconds = max(now - self._since, 1e-9)
        rate, samples = sum(line["tokens"] for line in timed) / seconds, self._step_rows * len(timed) / seconds
        self._since = now
        rates = {"tokens_per_s": round(rate, 1)} | ({"samples_per_s": round(samples, 2)} if self._step_rows else {})
        lines = [{**line, **rates} for line in lines]
        append_lines(self.path, lines)
        for line in lines:
            self.track(int(line["step"]), {f"train/{name}": value for name, value in line.items() if name != "step"})
        if lines and not self._bar.disable:
            terms = [name for name in lines[-1] if name.startswith("loss_")]
            shown = [name for name in (*KL_NAMES, "loss") if name in lines[-1]]
            shown += terms if len(terms) > 1 else []  # one term alone is the loss
            losses = [f"{name.removeprefix('loss_')} {lines[-1][name]:.4f}" for name in shown]
            used = f"{peak_memory_bytes(self._device) / 2**30:.1f} GiB"
            self._bar.set_postfix_str(", ".join([*losses, f"{rate:,.0f} tokens/s", f"{samples:,.1f} samples/s", used]))

    def pause(self) -> None:
        """Exclude the time until now, spent on compiling, saving or evaluating, from the next tokens/s."""
        self._since = time.perf_counter()


def read_metrics(path: Path, *numbers: str) -> list[dict[str, Any]]:
    """Return a file's lines, [] without one; DamagedFileError: one, but a last that was cut short, lacks a number."""
    if not path.exists():
        return []
    found, texts = [], path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and all(isinstance(line.get(name), int | float) for name in ("step", *numbers)):
            found.append(line)
        elif isinstance(line, dict) or number < len(texts):
            raise _damaged(path, f"line {number} is not what was written: {text[:60]!r}")
    return found


def _damaged(path: Path, what: str) -> DamagedFileError:
    remedy = "restore the file from a copy, or remove it: nothing but the log is lost"
    return DamagedFileError(f"{path}: {what}; {remedy}")


METRICS, EVALUATIONS = LOGS = ("metrics.jsonl", "evaluations.jsonl")  # in a run's folder: steps and evaluations
LogMark = Mapping[str, Any]  # length and checksum of a file of lines at a checkpoint
EMPTY: LogMark = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}


def log_mark(path: Path) -> LogMark:
    """Return the mark of a file of lines as it is now."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)} if path.exists() else EMPTY


def check_log(path: Path, mark: LogMark) -> None:
    """Raise DamagedFileError unless the beginning of a file of lines fits its mark."""
    with path.open("rb") as file:
        if hashlib.sha256(file.read(mark["bytes"])).hexdigest() != mark["sha256"]:
            raise _damaged(path, f"its first {mark['bytes']} bytes are not what was written")


def cut_back(path: Path, mark: LogMark) -> None:
    """Drop what was written to a file of lines, if there is one, after its mark; raises as `check_log`."""
    if path.exists():
        check_log(path, mark)
        os.truncate(ours(path), mark["bytes"])


def append_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Append JSON objects to a file of lines."""
    with ours(path).open("a", encoding="utf-8") as file:
        file.writelines(json_text(line, path) + "\n" for line in lines)


def plot_curve(metrics: Path, evaluations: Path, out: Path) -> None:
    """Draw a run as PNG: what `draw_curve` draws, and below it the learning rates."""
    lines = read_metrics(metrics, "loss")
    rates = list(dict.fromkeys(name for line in lines for name in line if name == "lr" or name.startswith("lr_")))
    with drawn_to(out, 2, size=(7, 5), height_ratios=(3, 1), sharex=True) as (_, axes):
        draw_curve(axes[0, 0], metrics, evaluations)
        for name, colour in zip(rates, (INK, *COLOURS), strict=False):
            points = np.array([(line["step"], line[name]) for line in lines if name in line]).T
            axes[1, 0].plot(*points, color=colour, lw=1, label=name)
        if len(rates) > 1:
            axes[1, 0].legend()
        axes[1, 0].set(ylim=(0, None), xlabel="optimizer step", ylabel="learning rate")
        axes[1, 0].grid(alpha=0.3)


def draw_curve(axis: Any, metrics: Path, evaluations: Path) -> None:
    """Draw steps, their means over a fiftieth, and evaluations on one axis: the KL, without a teacher the loss."""
    name, steps = _points(read_metrics(metrics, "loss"))
    means = [part.mean(1) for part in np.array_split(steps, min(50, steps.shape[1]), 1)]
    axis.plot(*steps, lw=0.6, alpha=0.3, color=COLOURS[0])
    axis.plot(*np.transpose(means), label=f"training {name}", color=COLOURS[0])
    if evaluated := read_metrics(evaluations):
        name, points = _points(evaluated)
        axis.plot(*points, "o-", ms=3, label=f"evaluation {name}", color=COLOURS[1])
    axis.set(ylim=(0, None), title="Training", ylabel="nats per token")
    axis.grid(alpha=0.3)
    axis.legend()


def _points(lines: Sequence[Mapping[str, Any]]) -> tuple[str, np.ndarray]:
    """Return what lines measure, as a label, and steps and values [2, lines]: the KL or its bound, else the loss."""
    names = [name for name in (*KL_NAMES, "nll", "loss") if any(name in line for line in lines)]
    # Both names are in the files of a run that an earlier version began: it called the bound `kl`, too.
    names = [*KL_NAMES] if names[0] in KL_NAMES else names[:1]
    label = "KL" if names[0] in KL_NAMES else "loss"
    if any("kl_bound" in line for line in lines):
        label = "KL, lower bound (top-K)"
    return label, np.array([(line["step"], line[name]) for line in lines for name in names if name in line]).T

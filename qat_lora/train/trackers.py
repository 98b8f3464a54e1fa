"""Views of a run's metrics elsewhere, on request: TensorBoard and Weights & Biases.

`metrics.jsonl` is the record; trackers get the same numbers from the main process once they are on the host. A resumed
run continues in the same place: TensorBoard is told from which step on to forget, Weights & Biases finds the run by an
id in the run's folder. Both name their files themselves, so the run's list of files gets them only after they appear; a
kill in between leaves files that are not listed.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qat_lora.extras import require
from qat_lora.files.folders import appeared, tree, write_text


class TensorBoard:
    """Event files under `tensorboard/` in the run's folder; view them with `tensorboard --logdir`."""

    def __init__(self, out: Path, start_step: int, settings: Mapping[str, Any]) -> None:
        require("tensorboard", "log")
        from torch.utils.tensorboard import SummaryWriter

        folder = out / "tensorboard"
        before = tree(folder)
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
        self._run = self._wandb.init(
            project="qat-lora",
            name=out.name,
            dir=str(out),
            id=file.read_text(encoding="utf-8").strip(),
            resume="allow",
            config=dict(settings),
            settings=self._wandb.Settings(silent=True),
        )
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
TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
"""By name; each is opened with the run's folder, the step after which it goes on, and its settings."""

"""Training checkpoints: everything a run needs to go on as if it had never stopped.

A checkpoint is a folder `step-000100` with the trained tensors and the optimizer's state as safetensors and a
JSON of counters, random state and the fingerprint of the run. It is written under another name, flushed to disk,
and renamed: a folder with the right name is therefore complete, whatever was killed when. Old ones are removed
only after the new one is in place. No pickle is read or written.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qat_lora.errors import ConfigError, ModelError

NAME = re.compile(r"^step-(\d{6,})$")


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = [path for path in folder.glob("step-*") if NAME.match(path.name) and (path / "COMPLETE").is_file()]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def save_checkpoint(
    folder: Path,
    step: int,
    trained: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint after optimizer step `step`, then remove all but the newest `keep`."""
    final = folder / f"step-{step:06d}"
    draft = folder / f".{final.name}.{os.getpid()}"
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)
    save_file({name: p.detach().cpu().contiguous() for name, p in trained.items()}, draft / "trained.safetensors")
    save_file(_optimizer_tensors(trained, optimizer), draft / "optimizer.safetensors")
    random_state = base64.b64encode(bytes(torch.get_rng_state().tolist())).decode()
    text = json.dumps({**state, "step": step, "torch_rng": random_state}, indent=1)
    (draft / "state.json").write_text(text, encoding="utf-8")
    (draft / "COMPLETE").write_text("", encoding="utf-8")
    for path in (*draft.iterdir(), draft):
        _fsync(path)
    if final.exists():  # the same step of an earlier try; equal by construction
        shutil.rmtree(final)
    draft.rename(final)
    _fsync(folder)
    for stale in folder.glob(".step-*"):
        shutil.rmtree(stale, ignore_errors=True)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def load_checkpoint(
    path: Path,
    trained: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    fingerprint: Mapping[str, Any],
) -> dict[str, Any]:
    """Put a checkpoint's tensors back and return its state (`step` and what the run added).

    Raises:
        ConfigError: the checkpoint belongs to other settings; the message names the field.
        ModelError: its tensors are not the ones that train now.
    """
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    for field, value in fingerprint.items():
        if state.get("fingerprint", {}).get(field) != value:
            was = state.get("fingerprint", {}).get(field)
            raise ConfigError(
                f"{field}: the run to resume has {was!r}, this one {value!r}; choose another --out, or --overwrite"
            )
    _copy_into({name: p.data for name, p in trained.items()}, load_file(path / "trained.safetensors"), path)
    _copy_into(_optimizer_views(trained, optimizer), load_file(path / "optimizer.safetensors"), path)
    torch.set_rng_state(torch.tensor(list(base64.b64decode(state["torch_rng"])), dtype=torch.uint8))
    return state


def _optimizer_views(trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{part}": value
        for name, parameter in trained.items()
        for part, value in optimizer.state[parameter].items()
    }


def _optimizer_tensors(trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {k: v.detach().cpu().contiguous() for k, v in _optimizer_views(trained, optimizer).items()}


def _copy_into(targets: Mapping[str, Tensor], saved: Mapping[str, Tensor], path: Path) -> None:
    if set(targets) != set(saved):
        names = ", ".join(sorted(set(targets) ^ set(saved))[:6])
        raise ModelError(f"checkpoint {path}: holds other tensors than those that train now: {names}")
    with torch.no_grad():
        for name, target in targets.items():
            if target.shape != saved[name].shape:
                raise ModelError(
                    f"checkpoint {path}: {name} has shape {tuple(saved[name].shape)}, not {tuple(target.shape)}"
                )
            target.copy_(saved[name])


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Training checkpoints: everything a run needs to go on as if it had never stopped.

A checkpoint is a folder `step-000100` with the trained tensors and the optimizer's state as safetensors, a JSON file of
counters, random state and the run's fingerprint, and checksums of all three. Stacked layers (`layers/stacked.py`) are
written apart, so that a run goes on wherever its layers are kept in another way. The folder appears whole or not at all
(`files`); `COMPLETE` is written last, for tools that copy folders file by file. Old checkpoints are removed only after
the new one is in place, and renamed first, so that no half-removed one looks complete. No pickle is written or read.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from qat_lora.errors import ConfigError, DamagedFileError, DivergedError, ModelError
from qat_lora.files.checksums import check_sums, read_object, write_sums
from qat_lora.files.finite import json_text, not_finite
from qat_lora.files.folders import atomic_dir, discard, is_ours, remove_leftovers
from qat_lora.layers.stacked import by_layer, layer_names
from qat_lora.runtime.base import Runtime, random_states, set_random_states
from qat_lora.train.metrics import REMEDY

NAME = re.compile(r"^step-(\d{6,})$")
STATE, TRAINED, OPTIMIZER = "state.json", "trained.safetensors", "optimizer.safetensors"


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
    runtime: Runtime,
) -> Path:
    """Write a checkpoint after `step`, keep the newest; all processes call this. DivergedError: not finite."""
    final = folder / f"step-{step:06d}"
    if not runtime.agree(runtime.is_main and final in checkpoints(folder)):  # else written by an earlier try, and equal
        parts: dict[str, dict[str, Tensor]] = {TRAINED: {**trained}, OPTIMIZER: optimizer_views(trained, optimizer)}
        if runtime.is_main:  # on the host, so that they are read from the device once
            parts = {file: by_layer({n: x.detach().cpu() for n, x in part.items()}) for file, part in parts.items()}
            if (found := not_finite({**parts[TRAINED], **parts[OPTIMIZER]})) is not None:
                raise DivergedError(f"step {step}: {found}; {REMEDY}")
            text = json_text({**state, "step": step, "random": random_states()}, final / STATE, indent=1)
        with atomic_dir(final) if runtime.is_main else contextlib.nullcontext(final) as draft:
            for file, part in parts.items():
                runtime.save(part, draft / file)
            if runtime.is_main:
                (draft / STATE).write_text(text, encoding="utf-8")
                write_sums(draft, (STATE, TRAINED, OPTIMIZER))
                (draft / "COMPLETE").write_text("", encoding="utf-8")
    if runtime.is_main:
        for old in checkpoints(folder)[:-keep]:
            if is_ours(old / "COMPLETE"):
                discard(old)
        remove_leftovers(folder)
    return final


def load_checkpoint(
    path: Path, trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, fingerprint: Mapping[str, Any]
) -> dict[str, Any]:
    """Copy a checkpoint's tensors into those that train; return its `state.json`.

    ConfigError names a setting that differs. DamagedFileError: a missing or damaged file. ModelError: other tensors.
    """
    try:
        state = read_object(path / STATE)
        check_sums(path, True, (STATE, TRAINED, OPTIMIZER))
        tensors, moments = load_file(path / TRAINED), load_file(path / OPTIMIZER)
        if (found := not_finite({**tensors, **moments})) is not None:
            raise ValueError(found)
        before, state["step"] = dict(state["fingerprint"]), int(state["step"])
        set_random_states(dict(state["random"]))
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise damaged(path, error) from None
    now = json.loads(json.dumps(dict(fingerprint)))
    for field in sorted(before.keys() | now.keys()):
        old, new = before.get(field), now.get(field)
        if old != new:
            differ = f"the run to resume has {old!r}, this one {new!r}"
            raise ConfigError(f"{field}: {differ}; choose another --out, or --overwrite")
    _copy_into({name: p.data for name, p in trained.items()}, tensors, path)
    _copy_into(optimizer_views(trained, optimizer), moments, path)
    return state


def damaged(path: Path, error: Exception) -> DamagedFileError:
    """Return what an error in a checkpoint means to people."""
    reason, remedy = " ".join(str(error).split()), "remove that folder to go on from the one before it"
    return DamagedFileError(f"checkpoint {path}: cannot be read ({reason}); {remedy}")


def optimizer_views(trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of trained tensors by `name/part`."""
    states = {name: optimizer.state[parameter] for name, parameter in trained.items()}
    return {f"{name}/{part}": value for name, state in states.items() for part, value in state.items()}


def _copy_into(targets: Mapping[str, Tensor], saved: Mapping[str, Tensor], path: Path) -> None:
    names_of = {name: layer_names(name) for name in targets}
    if odd := {own for names in names_of.values() for own in names} ^ set(saved):
        names = ", ".join(sorted(odd)[:6])
        raise ModelError(f"checkpoint {path}: holds other tensors than those that train now: {names}")
    with torch.no_grad():
        for name, target in targets.items():
            rows = [saved[own] for own in names_of[name]]
            shape = target.shape[1:] if len(rows) > 1 else target.shape
            for own, row in zip(names_of[name], rows, strict=True):
                if row.shape != shape:
                    raise ModelError(f"checkpoint {path}: {own} has shape {tuple(row.shape)}, not {tuple(shape)}")
            target.copy_(torch.stack(rows) if len(rows) > 1 and target.ndim else rows[0])

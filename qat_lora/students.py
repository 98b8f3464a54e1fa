"""Open whatever a user may name as a model: a plain folder, a quantised one, an adapter, or a run's output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qat_lora.errors import ModelError
from qat_lora.export.adapter import CONFIG, check_tokenizer, load_adapter, read_adapter
from qat_lora.layers.convert import bits_per_weight, lora_layers, prepare_base, quant_layers
from qat_lora.models import CausalLM, checkpoint_sha256, load_model, resolve_model
from qat_lora.options import HubConfig


@dataclass(frozen=True)
class Student:
    """An opened model and what it costs to store."""

    model: CausalLM
    bits_per_weight: float | None
    """Of the quantised layers, adapter included; None for an unquantised model."""
    sha256: str
    """Identity of its weights, adapter included."""


def adapter_folder(name: str) -> Path | None:
    """Return the adapter folder that a name means (an adapter, or a run with `best`), None for other models."""
    for folder in (Path(name).expanduser(), Path(name).expanduser() / "best"):
        if (folder / CONFIG).is_file():
            return folder
    return None


def base_folder(adapter: Path) -> Path:
    """Return the folder of an adapter's base: one saved with it, the path it names, or that path beside it.

    Raises:
        ModelError: none of them is there.
    """
    named = read_adapter(adapter).base
    for folder in (adapter / "base", Path(named), adapter / named):
        if (folder / "config.json").is_file():
            return folder
    try:
        return resolve_model(named)
    except ModelError:
        raise ModelError(
            f"adapter: {adapter} belongs to the base {named}, which is not there; put that folder back, or copy it "
            f"to {adapter / 'base'}"
        ) from None


def open_student(name: str, hub: HubConfig, dtype: str = "float32") -> Student:
    """Load a model for scoring, generation or export.

    Raises:
        ModelError: nothing there, or an adapter whose base is missing or another.
    """
    adapter = adapter_folder(name)
    if adapter is None:
        model = load_model(name, revision=hub.revision, trust_remote_code=hub.trust_remote_code, dtype=dtype)
    else:
        base = base_folder(adapter)
        model = load_model(str(base), trust_remote_code=hub.trust_remote_code, dtype=dtype)
        check_tokenizer(adapter, model.folder)
        load_adapter(model.module, adapter, checkpoint_sha256(model.folder))
    bits, sha256 = None, checkpoint_sha256(model.folder)
    if quant_layers(model.module):
        key = "with_adapter" if lora_layers(model.module) else "base"
        bits = bits_per_weight(model.module)[key]
        prepare_base(model.module, train_scales=False, dtype=model.module.dtype)
    model.module.requires_grad_(False)
    return Student(model, bits, sha256 + (checkpoint_sha256(adapter) if adapter else ""))

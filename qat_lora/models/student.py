"""Open whatever a user names as a model: a plain folder, a quantised one, an adapter, a run's output, an export.

An export is opened as what it holds, not as what it was made from: that shows what another tool will compute. A folder
of another tool's codes, or a GGUF file, is read as dense weights, with its adapter on them. Codes that `quantize` chose
beside an adapter are opened with the start of that adapter, as if a run of no steps had exported it: alone they have
several times the KL.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from qat_lora.errors import ModelError
from qat_lora.files.checksums import checkpoint_sha256, model_files, sha256_of
from qat_lora.files.gguf_header import BASE, GGUF, read_header
from qat_lora.layers.convert import add_lora, bits_per_weight, lora_layers, prepare_base, quant_layers, weight_count
from qat_lora.layers.lora import LoraConfig
from qat_lora.models import adapter as adapters
from qat_lora.models.from_gguf import check_tokens
from qat_lora.models.hub import DEFAULT_HUB, HubConfig, local_folder
from qat_lora.models.load import CausalLM, load_model, load_tokenizer, resolve_model


@dataclass(frozen=True)
class Student:
    """An opened model and what it costs to store."""

    model: CausalLM
    bits_per_weight: float | None  # of the quantised layers, adapter included; None where there are no codes of ours
    sha256: str  # fingerprint of its weights, adapter included
    sizes: dict[str, float]  # of its files of weights, as `stored_sizes`
    start: LoraConfig | None = None  # of an adapter start on it, beside which its codes were chosen

    @property
    def start_text(self) -> str:
        """Words for people on the adapter start that is on it, empty where there is none."""
        if self.start is None:
            return ""
        ranks = (len(layer.lora_A) for layer in lora_layers(self.model.module).values())
        return f"with its adapter start of {adapters.ranks_text(ranks)}"


def stored_sizes(model: CausalLM, adapter: Path | None = None, start: bool = False) -> dict[str, float]:
    """Return the MB of a model's files of weights, its adapter's included, and their bits over all its weights.

    Of a `start` count the factors in use, in float16: its file holds columns to spare.
    """
    files = {*model_files(model.folder), *([adapter] if adapter else [])}
    stored_bytes = sum(file.stat().st_size for file in files)
    if start:
        layers = lora_layers(model.module).values()
        stored_bytes += sum(2 * (layer.lora_A.numel() + layer.lora_B.numel()) for layer in layers)
    bits = 8 * (stored_bytes - sum(model.rest.values())) / weight_count(model.module)
    return {"size_mb": round(stored_bytes / 1e6, 3), "bits_over_all_weights": round(bits, 3)}


def adapter_folder(name: str) -> Path | None:
    """Return the adapter folder that a name means: itself, a run's `best`, an export's `adapter`; None for others."""
    place = Path(name).expanduser()
    return next((f for f in (place, place / "best", place / "adapter") if (f / adapters.CONFIG).is_file()), None)


def local_base(adapter: Path) -> Path | None:
    """Return the folder here of an adapter's base: saved with it, as named, or relative to it; None where none is."""
    named = adapters.read_adapter(adapter).base
    for folder in (adapter / "base", adapter / named, Path(named)):
        # Unlike Path's, False for names that no system takes.
        if os.path.isfile(folder / "config.json") or folder.suffix == GGUF and os.path.isfile(folder):
            return folder
    return None


def base_folder(adapter: Path) -> Path:
    """Return the folder of an adapter's base, `local_base` or fetched from the Hub; ModelError: none is there."""
    named = adapters.read_adapter(adapter).base
    try:
        return local_base(adapter) or resolve_model(named)
    except ModelError:
        remedy = f"put that folder back, or copy it to {adapter / 'base'}"
        raise ModelError(f"adapter: {adapter} belongs to the base {named}, which is not there; {remedy}") from None


def with_tokenizer(model: CausalLM, places: Iterable[str | Path | None]) -> CausalLM:
    """Return a model of a GGUF file with its tokenizer's folder, the first of `places` with one; another as it is.

    llama.cpp keeps tables without the rules for splitting text. ModelError: no tokenizer is there, or only another one.
    """
    if model.folder.suffix != GGUF:
        return model
    folder = next((found for place in places if place and (found := local_folder(place, "tokenizer.json"))), None)
    if folder is None:
        remedy = "give --tokenizer FOLDER, or put the original model's tokenizer.json beside it"
        raise ModelError(f"tokenizer: {model.folder} holds none that text can be split by; {remedy}")
    check_tokens(read_header(model.folder), load_tokenizer(folder), folder)
    return replace(model, tokenizer=folder)


def open_student(
    name: str, hub: HubConfig = DEFAULT_HUB, dtype: str = "float32", tokenizer: Path | None = None
) -> Student:
    """Load what a name means, a GGUF file with this `tokenizer`'s folder; ModelError: it, or its base, is not there.

    A quantised folder whose codes were chosen beside an adapter has the start of that adapter on it.
    """
    adapter, place = adapter_folder(name), Path(name).expanduser()
    if adapter is not None:
        name, hub = str(base_folder(adapter)), replace(hub, revision=None)
    elif (place / BASE).is_file():
        name = str(place / BASE)
    model = load_model(name, hub, dtype, dequantize=True)
    model = with_tokenizer(model, (adapter, model.folder.parent, tokenizer))
    if adapter is not None:
        adapters.check_tokenizer(adapter, model.tokenizer_folder)
        adapters.load_adapter(model.module, adapter, checkpoint_sha256(model.folder))
    # A folder is opened with its adapter, a GGUF file as what it holds.
    beside = None if adapter else adapters.engine_adapter(model.folder if model.folder.is_dir() else place)
    if beside:
        adapters.load_engine_adapter(model, beside)
    start = None if adapter or beside else _put_start(model)
    bits, sha256 = None, checkpoint_sha256(model.folder)
    if quant_layers(model.module):
        bits = bits_per_weight(model.module)["with_adapter" if lora_layers(model.module) else "base"]
        prepare_base(model.module, train_scales=False, dtype=model.module.dtype)
    model.module.requires_grad_(False)
    if whole := adapter or beside:
        sha256 += checkpoint_sha256(whole)
    elif start is not None:
        sha256 += sha256_of(model.folder / adapters.STARTS)
    file = adapter / adapters.WEIGHTS if adapter else beside
    return Student(model, bits, sha256, stored_sizes(model, file, start is not None), start)


def _put_start(model: CausalLM) -> LoraConfig | None:
    """Put the start beside which codes were chosen onto them; return its shape, None for other codes."""
    ranks = adapters.joint_ranks(model.folder)
    if not ranks:
        return None
    config = LoraConfig(recovery_r=max(ranks.values()))
    add_lora(model.module, config, adapters.load_starts(model.folder), ranks)
    return config

"""The recovery adapter as files: PEFT's folder, written and read, and the forms of engines, read back.

PEFT, transformers and vLLM load `adapter_config.json` and `adapter_model.safetensors` as they are. None of them checks
the base: an adapter corrects the errors of one set of codes and scales, and on any other it does damage without a
warning. So the base's fingerprint is stored in `qat_lora.json`, and our loader refuses another base. An export is
scored by the files that its users get (llama.cpp, mlx-lm, `torch.load`), not by the run that made them: a factor in the
wrong order, or rounded too far, shows here. Factors keep the type that their file has.
"""

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qat_lora.config import from_dict
from qat_lora.errors import OF_DATA, ModelError, errors_explained
from qat_lora.files.checksums import NOTE, STATE, check_folder, is_state, read_object, seal, sha256_of
from qat_lora.files.finite import check_finite, json_text
from qat_lora.files.gguf_header import ADAPTER, BASE, read_header
from qat_lora.layers.convert import add_lora, linear_layers, lora_layers
from qat_lora.layers.lora import Factors, LoraConfig
from qat_lora.models import from_gguf
from qat_lora.models.load import CausalLM, load_tokenizer, read_state, tokenizer_sha256

PREFIX = "base_model.model."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
STARTS = "adapter_start.safetensors"
# Settings of PEFT that change what an adapter computes and that ours never use, with the values that mean "off".
OFF: dict[str, tuple[Any, ...]] = {"bias": ("none",), "modules_to_save": (None, [])}
OFF |= dict.fromkeys(("use_dora", "use_rslora", "fan_in_fan_out"), (False,))
MLX = Path("adapters") / "adapters.safetensors"
SCALE = "adapter_scale"  # in the config.json of a state dict: alpha / rank


@dataclass(frozen=True)
class AdapterInfo:
    """The settings of an adapter folder."""

    folder: Path
    base: str
    base_sha256: str | None
    lora: LoraConfig
    tokenizer_sha256: str | None = None
    ranks: dict[str, int] | None = None  # by layer, where they differ


def save_adapter(model: nn.Module, lora: LoraConfig, out: Path, base: Path, base_sha256: str) -> None:
    """Write adapters of the checkpoint `base` as a PEFT folder, float16; ModelError: none, or too large."""
    layers = lora_layers(model)
    if not layers:
        raise ModelError("model: has no recovery adapters to save")
    out.mkdir(parents=True, exist_ok=True)
    # On the host: no graphs of its own on XLA.
    tensors = {name: factor.detach().cpu().half().contiguous() for name, factor in _factors(layers).items()}
    ranks = {name: layer.lora_A.shape[0] for name, layer in layers.items()}
    most = max(ranks.values())
    alpha, differ = lora.alpha * (most / lora.rank), {name: rank for name, rank in ranks.items() if rank != most}
    config: dict[str, Any] = {name: off[0] for name, off in OFF.items()} | {"inference_mode": True}
    config |= {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base)}
    config |= {"r": most, "lora_alpha": alpha, "lora_dropout": lora.dropout, "target_modules": sorted(layers)}
    config |= {"rank_pattern": differ, "alpha_pattern": {name: alpha / most * rank for name, rank in differ.items()}}
    check_finite(tensors, f"adapter for {out}")
    settings = json_text(config, out / CONFIG, indent=2)
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    (out / CONFIG).write_text(settings + "\n", encoding="utf-8")
    note = {"base_sha256": base_sha256, "mlp_only": lora.mlp_only, "lora_targets": lora.lora_targets}
    folders = [folder for folder in (out / "base", base, out) if (folder / "tokenizer.json").is_file()]
    if folders:
        note["tokenizer_sha256"] = _tokenizer_of(folders[0], sha256_of(folders[0] / "tokenizer.json"))
    (out / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    seal(out)


def _factors(layers: dict[str, Any]) -> dict[str, nn.Parameter]:
    """Return the adapters' factors by their names in PEFT."""
    both = [(name, factor) for name in layers for factor in ("lora_A", "lora_B")]
    return {f"{PREFIX}{name}.{factor}.weight": layers[name].get_parameter(factor) for name, factor in both}


@functools.cache  # a run saves many adapters of one base
def _tokenizer_of(folder: Path, _sha256: str) -> str:
    return tokenizer_sha256(load_tokenizer(folder))


def check_tokenizer(adapter: Path, base: Path) -> None:
    """Raise a ModelError for a base with another tokenizer than the adapter was trained with, where that is noted."""
    wanted = read_adapter(adapter).tokenizer_sha256
    if wanted is None:
        return
    found = tokenizer_sha256(load_tokenizer(base))
    if found != wanted:
        which = f"fingerprint {wanted[:12]}, the one in {base} is {found[:12]}"
        remedy = "put back the tokenizer files that the base came with"
        raise ModelError(f"adapter: {adapter} was trained with another tokenizer ({which}); {remedy}")


def read_adapter(folder: Path) -> AdapterInfo:
    """Read an adapter's settings; ModelError: no LoRA, or with settings of others'; DamagedFileError: other files."""
    check_folder(folder)
    with errors_explained(ModelError, f"adapter: {folder} is no PEFT folder", *OF_DATA, passing=ModelError):
        config = read_object(folder / CONFIG)
        if config["peft_type"] != "LORA":
            raise ModelError(f"adapter: {folder} is of kind {config['peft_type']}; only LORA is supported")
        for name, allowed in OFF.items():
            if config.get(name, allowed[0]) not in allowed:
                raise ModelError(f"adapter: {folder} has {name} = {config[name]!r}, which is not supported")
        targets = config["target_modules"]
        if not isinstance(targets, list):
            raise ModelError(f"adapter: {folder} has target_modules = {targets!r}; only a list of names is supported")
        ranks, scaling, names = config.get("rank_pattern") or {}, config["lora_alpha"] / config["r"], {*targets}
        whole = {*ranks} <= names and all(type(rank) is int and rank > 0 for rank in ranks.values())
        if not whole or (config.get("alpha_pattern") or {}) != {name: scaling * rank for name, rank in ranks.items()}:
            other = "rank_pattern and alpha_pattern of other layers or scalings than ours"
            raise ModelError(f"adapter: {folder} has {other}")
        ranks = dict.fromkeys(targets, config["r"]) | ranks if ranks else None
        note = read_object(folder / NOTE) if (folder / NOTE).is_file() else {}
        pattern = "|".join(rf"(^|\.){re.escape(name)}$" for name in targets)  # a name or its end, as in PEFT
        settings = {"recovery_r": config["r"], "recovery_alpha": config["lora_alpha"], "lora_targets": pattern}
        base, sums = config["base_model_name_or_path"], [note.get(f"{part}_sha256") for part in ("base", "tokenizer")]
        if not isinstance(base, str) or not all(isinstance(sha256, str | None) for sha256 in sums):
            raise ModelError(f"adapter: {folder} names its base as {base!r} with sha256 {sums}; all three are texts")
        return AdapterInfo(folder, base, sums[0], from_dict(LoraConfig, settings), sums[1], ranks)


def _read_tensors(file: Path) -> dict[str, Tensor]:
    remedy = "the folder is incomplete or damaged"
    with errors_explained(ModelError, f"adapter: {file} cannot be read", OSError, SafetensorError, remedy=remedy):
        tensors = load_file(file)
    check_finite(tensors, file)
    return tensors


def load_adapter(model: nn.Module, folder: Path, base_sha256: str) -> LoraConfig:
    """Put a saved adapter onto its base; ModelError: another base, tensors that do not fit it, or a damaged file."""
    info = read_adapter(folder)
    if info.base_sha256 is not None and info.base_sha256 != base_sha256:
        which = f"fingerprint {info.base_sha256[:12]}, this one is {base_sha256[:12]}"
        raise ModelError(f"adapter: {folder} was trained on another base ({which}); load it on {info.base}")
    saved = _read_tensors(folder / WEIGHTS)
    wanted = _factors(add_lora(model, info.lora, ranks=info.ranks))
    if wanted.keys() != saved.keys():
        names = ", ".join(sorted(wanted.keys() ^ saved.keys())[:4])
        raise ModelError(f"adapter: {folder} does not fit the model's layers: {names}")
    with torch.no_grad():
        for name, target in wanted.items():
            if saved[name].shape != target.shape:
                factor = name.removeprefix(PREFIX).removesuffix(".weight")
                had, wants = tuple(saved[name].shape), tuple(target.shape)
                raise ModelError(f"adapter: {factor} has shape {had}, the model wants {wants}")
            target.copy_(saved[name])
    return info.lora


def save_starts(starts: dict[str, Factors], out: Path) -> None:
    """Write adapter starts, float16, most important columns first, into the folder of their quantised checkpoint."""
    parts = {f"{name}.lora_A": of.a_RI for name, of in starts.items()}
    parts |= {f"{name}.lora_B": of.b_OR for name, of in starts.items()}
    tensors = {name: part.cpu().half().contiguous() for name, part in parts.items()}
    check_finite(tensors, out / STARTS)
    save_file(tensors, out / STARTS)


def load_starts(folder: Path) -> dict[str, Factors]:
    """Read adapter starts, {} where the checkpoint has none; ModelError: the file is damaged."""
    file = folder / STARTS
    tensors = _read_tensors(file) if file.is_file() else {}
    with errors_explained(ModelError, f"start: {file} lacks a factor", KeyError, remedy="quantise the model again"):
        return _paired(tensors, ("lora_A", "lora_B"))


def _details(folder: Path) -> dict[str, Any]:
    """Return what `quantize` noted of a checkpoint in its config.json, {} for any other place."""
    config = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    quantization = config.get("quantization_config")
    details = quantization.get("details") if isinstance(quantization, dict) else None
    return details if isinstance(details, dict) else {}


def allocated_ranks(folder: Path) -> dict[str, int] | None:
    """Return the ranks by layer, those above 0, that a target size chose for a checkpoint; None for any other."""
    ranks = _details(folder).get("adapter_ranks")
    return None if ranks is None else {name: rank for name, rank in ranks.items() if rank}


def joint_ranks(folder: Path) -> dict[str, int]:
    """Return by layer the rank of the adapter beside which a checkpoint's codes were chosen.

    The adapter is the first columns of the checkpoint's starts; {} where codes stand alone, or no start is there.
    ModelError: the file of starts is damaged, or what is noted are no ranks.
    """
    file = folder / STARTS
    if not file.is_file():
        return {}
    what, remedy = f"start: {file} cannot be read", "quantise the model again"
    with errors_explained(ModelError, what, SafetensorError, *OF_DATA, remedy=remedy):
        most: dict[str, int] = {}
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                if name.endswith(".lora_A"):
                    most[name.removesuffix(".lora_A")] = stored.get_slice(name).get_shape()[0]
        ranks = allocated_ranks(folder)
        if ranks is None:
            ranks = dict.fromkeys(most, _details(folder).get("joint_rank", 0))
        known = {name: min(rank, most[name]) for name, rank in ranks.items() if name in most}
        return {name: rank for name, rank in known.items() if rank > 0}


def ranks_text(ranks: Iterable[int]) -> str:
    """Return the ranks of an adapter's layers for people: `rank 16`, or the highest of several."""
    found = {*ranks}
    return f"rank {max(found)}" + (" or less" if len(found) > 1 else "")


def engine_adapter(folder: Path) -> Path | None:
    """Return the file of an export that holds its adapter in an engine's form; None: it has none of these."""
    gguf, mlx, state = folder / ADAPTER, folder / MLX, folder / STATE
    is_export = {gguf: (folder / BASE).is_file(), mlx: True, state: is_state(state)}  # else it is somebody's file
    return next((file for file, known in is_export.items() if known and file.is_file()), None)


def load_engine_adapter(model: CausalLM, file: Path) -> None:
    """Put the adapter of `engine_adapter` on its base; ModelError: factors that do not fit it, or that are none."""
    what, remedy = f"adapter: {file} does not fit the base beside it", "export both again"
    with errors_explained(ModelError, what, *OF_DATA, remedy=remedy, passing=ModelError):
        if file.name == ADAPTER:
            factors = _of_gguf(model, file)
        elif file.name == MLX.name:
            check_folder(file.parent)
            scale = read_object(file.parent / CONFIG)["lora_parameters"]["scale"]
            state = {name: factor.t() for name, factor in load_file(file).items()}
            factors = _paired(state, ("lora_a", "lora_b"), scale)
        else:
            scale = read_object(file.parent / "config.json").get(SCALE, 1.0)
            factors = _paired(read_state(file), ("lora_A", "lora_B"), scale)
        ranks = {name: len(of.a_RI) for name, of in factors.items()}
        if factors:
            pattern = "|".join(f"^{re.escape(name)}$" for name in factors)
            config = LoraConfig(recovery_r=max(ranks.values()), lora_targets=pattern)
            add_lora(model.module, config, factors, ranks)


def _of_gguf(model: CausalLM, file: Path) -> dict[str, Factors]:
    header, config = read_header(file), model.config.to_dict()
    names = from_gguf.tensor_names(header.architecture, model.config.num_hidden_layers)
    alpha, found = float(header.settings.get("adapter.lora.alpha", 0.0)), {}
    for name, _ in linear_layers(model.module):
        label = f"{names.get_name(name)}.weight"
        if f"{label}.lora_a" not in header.tensors:
            continue
        a_RI, b_OR = (from_gguf.dequantize(header, f"{label}.lora_{end}") for end in "ab")
        b_OR = from_gguf.as_trained(b_OR, label, config)
        found[name] = Factors(a_RI, b_OR * (alpha / len(a_RI) if alpha else 1.0))
    if 2 * len(found) != len(header.tensors):
        other = f"{len(header.tensors)} factors, of which the base has layers for {2 * len(found)}"
        raise ModelError(f"adapter: {file} holds {other}; it belongs to another model")
    return found


def _paired(state: dict[str, Tensor], ends: tuple[str, str], scale: float = 1.0) -> dict[str, Factors]:
    """Return factors [R, I] and [O, R] of a file, float32, by layer; `ends` end their names. KeyError: one is alone."""
    first, second = ends
    layers = sorted({name.rpartition(".")[0] for name in state if name.endswith(ends)})
    return {n: Factors(state[f"{n}.{first}"].float(), state[f"{n}.{second}"].float() * scale) for n in layers}

"""An adapter as llama.cpp, mlx-lm or `torch.load` has it, read back onto the base that lies beside it.

An export is scored by the files that its users get, not by the run that they were made of: a factor that was written
in the wrong order, or rounded too far, shows here. Factors keep the type that their file rounded them to.
"""

import re
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from qat_lora.errors import ModelError
from qat_lora.files.checksums import STATE, check_folder, read_object
from qat_lora.files.gguf_header import ADAPTER, read_header
from qat_lora.layers.convert import add_lora, linear_layers
from qat_lora.layers.lora import Factors, LoraConfig
from qat_lora.models import from_gguf
from qat_lora.models.adapter import CONFIG
from qat_lora.models.load import CausalLM, read_state

MLX = Path("adapters") / "adapters.safetensors"
SCALE = "adapter_scale"  # in the config.json of a state dict: alpha / rank


def engine_adapter(folder: Path) -> Path | None:
    """Return the file of an export that holds its adapter in an engine's form; None: it has none of these."""
    found = (folder / ADAPTER, folder / MLX, folder / STATE)
    return next((file for file in found if file.is_file()), None)


def load_engine_adapter(model: CausalLM, file: Path) -> None:
    """Put the adapter of `engine_adapter` on its base; ModelError: factors that do not fit it, or that are none."""
    try:
        factors = {ADAPTER: _of_gguf, MLX.name: _of_mlx, STATE: _of_state}[file.name](model, file)
        ranks = {name: len(of.a_RI) for name, of in factors.items()}
        if factors:
            pattern = "|".join(f"^{re.escape(name)}$" for name in factors)
            config = LoraConfig(recovery_r=max(ranks.values()), lora_targets=pattern)
            add_lora(model.module, config, factors, ranks)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"adapter: {file} does not fit the base beside it ({error!r}); export both again") from None


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


def _of_mlx(_model: CausalLM, file: Path) -> dict[str, Factors]:
    check_folder(file.parent)
    scale = read_object(file.parent / CONFIG)["lora_parameters"]["scale"]
    return _paired(load_file(file), ("lora_a", "lora_b"), scale, Tensor.t)


def _of_state(_model: CausalLM, file: Path) -> dict[str, Factors]:
    scale = read_object(file.parent / "config.json").get(SCALE, 1.0)
    return _paired(read_state(file), ("lora_A", "lora_B"), scale, Tensor.clone)


def _paired(
    state: dict[str, Tensor], ends: tuple[str, str], scale: float, turned: Callable[[Tensor], Tensor]
) -> dict[str, Factors]:
    """Return the factors of a file by layer; `ends` end their names, and `turned` makes them [R, I] and [O, R]."""
    first, second = (f".{end}" for end in ends)
    layers = [name.removesuffix(first) for name in state if name.endswith(first)]
    pairs = {name: (turned(state[name + first].float()), turned(state[name + second].float())) for name in layers}
    return {name: Factors(a_RI, b_OR * scale) for name, (a_RI, b_OR) in pairs.items()}

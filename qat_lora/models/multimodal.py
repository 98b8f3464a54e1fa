"""Vision-language checkpoints: the text part is the model, the rest passes through as the bytes that it was.

transformers loads the whole; then all but the decoder and the LM head is taken out of it. So presets, adapters, norms
and devices meet text alone, under the names that transformers and PEFT have for the whole; a text model of its own
class would need names and settings translated for every family, and back. The tensors of the rest go from file to file
in the types that they have there, whatever type the text part is computed or stored in.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn

from qat_lora.errors import ModelError
from qat_lora.files.checksums import model_files, read_object
from qat_lora.models.config_names import with_older_names
from qat_lora.models.copies import GENERATION, copy_files

FAMILIES = (
    *("gemma3", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3", "qwen2_vl", "qwen2_5_vl"),
    *("qwen3_vl", "qwen3_5", "qwen3_5_moe", "smolvlm"),
)
"""By transformers' `model_type`: tests compare their text logits with those of the whole."""
REST = "model-rest.safetensors"


def sees(config: Any) -> bool:
    """Return True for a model with an encoder of images beside its text part; ModelError: a family not checked."""
    if all(getattr(config, part, None) is None for part in ("vision_config", "audio_config")):
        return False
    if config.model_type not in FAMILIES:
        allowed = f"{', '.join(FAMILIES)}, and checkpoints of a text part alone"
        raise ModelError(f"model: {config.model_type}, which sees or hears, is not supported; allowed: {allowed}")
    return True


def auto_class(config: Any) -> str:
    """Return the name of the class of transformers that loads a model; ModelError: as `sees`."""
    return "AutoModelForImageTextToText" if sees(config) else "AutoModelForCausalLM"


def cut_to_text(module: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """Take all but decoder and LM head out of a model that sees; return what it was in, its name there, and itself."""
    decoder, lm_head, cut = module.get_decoder(), module.get_output_embeddings(), []
    for parent in [part for part in module.modules() if part is not decoder and decoder in part.modules()]:
        for parts in (parent._modules, parent._parameters, parent._buffers):
            for name, part in list(parts.items()):
                if part is not lm_head and not (isinstance(part, nn.Module) and decoder in part.modules()):
                    cut.append((parts, name, parts.pop(name)))
    return cut


def add_rest(model: Any, out: Path) -> None:
    """Add the rest of a `CausalLM`'s checkpoint to the text part in `out`: tensors, settings, side files."""
    if not model.rest:
        return
    stored = (item for file in model_files(model.folder) for item in load_file(file).items())
    save_file({name: tensor for name, tensor in stored if name in model.rest}, out / REST, metadata={"format": "pt"})
    if (alone := out / "model.safetensors").is_file():  # which transformers would take for the whole
        alone.rename(out / "model-text.safetensors")
    files = sorted(out.glob("model*.safetensors"))
    where = {name: file.name for file in files for name in load_file(file)}
    index = {"metadata": {"total_size": sum(file.stat().st_size for file in files)}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    # Only what is ours changes: transformers drops, adds and renames keys of a config that it writes.
    config, written = read_object(model.folder / "config.json"), read_object(out / "config.json")
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    config |= {key: value for key, value in written.items() if key == "quantization_config"}
    if "preset" not in config.get("quantization_config", ()):  # codes are beside dense tensors of the type that was
        config.pop("torch_dtype", None)
        config["dtype"] = written["dtype"]
    for part in (config, config["text_config"]):
        part["tie_word_embeddings"] = written.get("tie_word_embeddings", model.module.config.tie_word_embeddings)
    config = with_older_names(config)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copy_files(model.folder, out, GENERATION)

"""Base, adapter and vocabulary as GGUF files for llama.cpp.

Codes go into Q4_0 blocks: 32 integers of -8 to 7 and one float16 step. Our codes of up to 3 bits half-integer or 4 bits
integer are such integers (`integers.py`), and a group of 64 or 128 is two or four blocks with the same step: exact, at
4.5 bits. The smaller blocks are not exact: Q2_K and Q3_K round steps to 4 and 6 bits, which on a recovered student
undoes part of the recovery. (llama.cpp rounds *activations* to 8 bits in its product with Q4_0 on a CPU; that is its
arithmetic, and the weights in the file are ours bit for bit.) Layers that no Q4_0 holds exactly (look-up tables,
low-rank scales, zero points) are rounded to it and the error is stated, or written dense if the user asks for that.

llama.cpp does not read a tokenizer's splitting rule. It knows rules by name, and a wrong name gives other tokens
without a warning. So the rule is recognised from the tokenizer's own description, and an unknown one is refused.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qat_lora.errors import ModelError
from qat_lora.export.forms import ExportJob, ExportPlan, display_name
from qat_lora.export.integers import Integers, as_integers, needed_bits, other_tensors
from qat_lora.extras import require
from qat_lora.files.finite import check_finite
from qat_lora.layers.convert import LM_HEAD, lora_layers, quant_layers, tied_embedding
from qat_lora.models.load import DTYPES, CausalLM

BLOCK = 32
Q4_BITS = 4
ARCHITECTURES = {"qwen3": "qwen3", "llama": "llama"}
"""transformers' `model_type` to GGUF's architecture, for models whose layers Qwen3's names cover."""


def plan(job: ExportJob) -> ExportPlan:
    """Return what writes a student as `base.gguf` and, where it has an adapter, `adapter.gguf`.

    Raises:
        ModelError: an architecture or a tokenizer that is not supported.
    """
    model = job.student.model
    check_architecture(model)
    vocabulary(job.tokenizer, _rows(model))
    found = to_blocks(model, job.exact_only)
    name = display_name(job.name)

    def write(out: Path) -> None:
        save_base(model, found, job.tokenizer, out / "base.gguf", job.dtype, name)
        if lora_layers(model.module):
            save_lora(model, out / "adapter.gguf", name)

    notes = ["llama.cpp rounds activations to 8 bits in its products with Q4_0 on a CPU; the weights are these"]
    if dense := [layer for layer, integers in found.items() if integers is None]:
        notes.append(f"{len(dense)} quantised layers are stored dense, since no Q4_0 block holds them")
    return ExportPlan(write, found, tuple(notes))


def usage(adapter: bool) -> str:
    """Return the Python that loads the export."""
    option, argument = (" --lora adapter.gguf", ', lora_path="adapter.gguf"') if adapter else ("", "")
    return f"""\
from llama_cpp import Llama  # in a shell: llama-cli -m base.gguf{option}

model = Llama("base.gguf"{argument})"""


def check_architecture(model: CausalLM) -> str:
    """Return GGUF's name of a model's architecture.

    Raises:
        ModelError: one that we do not write, or settings of it that we would write wrongly.
    """
    config = model.config
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"model: GGUF export of {config.model_type} is not supported; allowed: {known}")
    if any(name.endswith(".bias") for name, _ in model.module.named_parameters()):
        raise ModelError("model: has biases, which GGUF export does not write")
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope.get("rope_type", "default") != "default":
        raise ModelError(f"model: positions scaled by {rope['rope_type']} are not supported by GGUF export")
    if getattr(config, "use_sliding_window", False):
        raise ModelError("model: sliding attention is not supported by GGUF export")
    return ARCHITECTURES[config.model_type]


def gguf_name(layer: str) -> str:
    """Return GGUF's name of a layer, by the library's own table.

    Raises:
        ModelError: a layer that these architectures do not have.
        MissingExtraError: gguf is not installed.
    """
    if name := _names(1 + max(map(int, re.findall(r"\d+", layer)), default=0)).get_name(layer):
        return str(name)
    raise ModelError(f"model: GGUF has no name for the layer {layer}")


@functools.cache
def _names(layers: int) -> Any:
    gguf = require("gguf", "export")
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, layers)


def to_blocks(model: CausalLM, exact_only: bool = False) -> dict[str, Integers | None]:
    """Return every quantised layer as Q4_0 holds it, None to write it dense (`exact_only`: if Q4_0 is not exact)."""
    found: dict[str, Integers | None] = {}
    for name, layer in quant_layers(model.module).items():
        needed = needed_bits(layer.spec)
        fits = layer.in_features % BLOCK == 0 and (needed or Q4_BITS) <= Q4_BITS
        integers = as_integers(layer, Q4_BITS) if fits else None
        if integers is not None and (integers.group_size % BLOCK or (exact_only and integers.error)):
            integers = None
        found[name] = integers
    return found


def q4_0(codes_OI: Tensor, steps_OG: Tensor, group_size: int) -> np.ndarray:
    """Return the bytes [O, I / 32 * 18] of Q4_0 blocks: a float16 step, then 32 nibbles, low half first."""
    rows, width = codes_OI.shape
    shifted = (codes_OI.numpy().astype(np.int16) + 8).astype(np.uint8).reshape(rows, width // BLOCK, 2, BLOCK // 2)
    nibbles = shifted[:, :, 0] | (shifted[:, :, 1] << 4)
    steps = steps_OG.repeat_interleave(group_size // BLOCK, dim=1).numpy().astype(np.float16)
    return np.concatenate([steps[..., None].view(np.uint8), nibbles], axis=-1).reshape(rows, -1)


def row_order(model: CausalLM, layer: str) -> Tensor | None:
    """Return the order of a layer's rows in GGUF, None where it is ours.

    In the rotary embedding of a Llama head, llama.cpp pairs neighbouring rows and transformers the two halves.
    """
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(layer.rsplit(".", 1)[-1])
    if config.model_type != "llama" or heads is None:
        return None
    rows = heads * _head_width(config)
    return torch.arange(rows).reshape(heads, 2, -1).transpose(1, 2).reshape(-1)


def _rows(model: CausalLM) -> int:
    return int(model.module.get_input_embeddings().weight.shape[0])


def _head_width(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def save_base(
    model: CausalLM, found: dict[str, Integers | None], tokenizer: Any, file: Path, dtype: str, name: str
) -> None:
    """Write a model without its adapter as one GGUF file; `name` is its name in there.

    Layers that `to_blocks` found are Q4_0, norms float32, and all other tensors of type `dtype`.

    Raises:
        ModelError: an architecture or tokenizer that cannot be written.
        MissingExtraError: gguf is not installed.
    """
    gguf = require("gguf", "export")
    vocab = vocabulary(tokenizer, _rows(model))
    writer = gguf.GGUFWriter(file, check_architecture(model))
    config = model.config
    width, rope = _head_width(config), dict(getattr(config, "rope_parameters", None) or {})
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))))
    writer.add_rope_dimension_count(width)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_vocab_size(_rows(model))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocab.splitting)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.kinds)
    writer.add_token_merges(vocab.merges)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if (index := getattr(tokenizer, token)) is not None:
            getattr(writer, f"add_{token}")(index)
    writer.add_add_bos_token(False)
    if getattr(tokenizer, "chat_template", None):
        writer.add_chat_template(tokenizer.chat_template)
    for tensor_name, array, kind in _tensors(gguf, model, found, dtype):
        writer.add_tensor(tensor_name, array, raw_dtype=kind)
    _finish(writer)


def _tensors(
    gguf: Any, model: CausalLM, found: dict[str, Integers | None], dtype: str
) -> Iterator[tuple[str, np.ndarray, Any]]:
    kinds = gguf.GGMLQuantizationType
    weights = {key.removesuffix(".weight"): t for key, t in other_tensors(model.module, torch.float32).items()}
    weights |= {name: layer.weight.detach().float() for name, layer in quant_layers(model.module).items()}
    tied = tied_embedding(model.module)  # one matrix in the file: llama.cpp uses the embedding's for the head
    for name, weight in weights.items():
        order = row_order(model, name)
        label = f"{gguf_name(tied if tied and LM_HEAD.search(name) else name)}.weight"
        integers = found.get(name)
        if integers is not None:
            codes, steps = integers.codes_OI.cpu(), integers.steps_OG.cpu()
            if order is not None:
                codes, steps = codes[order], steps[order]
            check_finite({label: steps.half()}, "GGUF")
            yield label, q4_0(codes, steps, integers.group_size), kinds.Q4_0
            continue
        tensor = weight.cpu() if order is None else weight.cpu()[order]
        check_finite({label: tensor.to(DTYPES[dtype])}, "GGUF")
        if tensor.ndim == 1 or DTYPES[dtype] == torch.float32:
            yield label, tensor.contiguous().numpy(), None
        else:
            yield (
                label,
                tensor.to(DTYPES[dtype]).contiguous().view(torch.uint8).numpy(),
                kinds.F16 if dtype == "float16" else kinds.BF16,
            )


def save_lora(model: CausalLM, file: Path, name: str) -> None:
    """Write a model's adapter as one GGUF file, factors as float32 (llama.cpp's `--lora`).

    Raises:
        MissingExtraError: gguf is not installed.
    """
    gguf = require("gguf", "export")
    layers = lora_layers(model.module)
    writer = gguf.GGUFWriter(file, check_architecture(model))
    writer.add_type("adapter")
    writer.add_name(name)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    (alpha,) = {layer.scaling * layer.lora_A.shape[0] for layer in layers.values()}  # one adapter, one alpha
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(alpha))
    for layer_name, layer in layers.items():
        order = row_order(model, layer_name)
        a, b = layer.lora_A.detach().float().cpu(), layer.lora_B.detach().float().cpu()
        b = b if order is None else b[order]
        check_finite({f"{layer_name}.lora_A": a, f"{layer_name}.lora_B": b}, "GGUF")
        writer.add_tensor(f"{gguf_name(layer_name)}.weight.lora_a", a.contiguous().numpy())
        writer.add_tensor(f"{gguf_name(layer_name)}.weight.lora_b", b.contiguous().numpy())
    _finish(writer)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # gguf.TokenType
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {_WORDS + r"\p{N}" + _REST: "qwen2", _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe"}
"""llama.cpp's name of a splitting rule."""


class Vocabulary(NamedTuple):
    """A tokenizer's tables in GGUF."""

    splitting: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str]


def vocabulary(tokenizer: Any, rows: int) -> Vocabulary:
    """Return a tokenizer's tables for a model with `rows` embeddings.

    Raises:
        ModelError: no byte-level BPE, an unknown splitting rule, or more tokens than rows.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    if backend["model"].get("type") != "BPE":
        raise ModelError(f"tokenizer: is of type {backend['model'].get('type')}; GGUF export knows byte-level BPE only")
    splitting = _splitting(backend.get("pre_tokenizer") or {})
    vocab = tokenizer.get_vocab()
    if len(vocab) > rows or max(vocab.values()) >= rows:
        raise ModelError(f"tokenizer: has {len(vocab)} tokens, the model {rows} rows; it belongs to another model")
    by_id = {index: token for token, index in vocab.items()}
    added = {entry["id"]: CONTROL if entry["special"] else USER_DEFINED for entry in backend["added_tokens"]}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(rows)]
    kinds = [added.get(i, NORMAL) if i in by_id else UNUSED for i in range(rows)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in backend["model"]["merges"]]
    return Vocabulary(splitting, tokens, kinds, merges)


def _splitting(rule: dict[str, Any]) -> str:
    parts = rule.get("pretokenizers", [rule])
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex") and not parts[0].get("add_prefix_space"):
        return "gpt-2"
    if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex"):
        pattern = parts[0]["pattern"].get("Regex")
        if pattern in SPLITS:
            return SPLITS[pattern]
    raise ModelError(
        f"tokenizer: splits text by a rule that GGUF export does not know ({' + '.join(map(str, kinds)) or 'none'}); "
        f"known: {', '.join(('gpt-2', *SPLITS.values()))}"
    )

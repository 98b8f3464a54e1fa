"""Hugging Face models: finding, loading strictly, cutting before the output head, saving.

With `hf_quantizer` the only module that imports transformers. Two decisions are made here:

* A name is first turned into a local folder (downloaded from the Hub where it is none), so every later step, loading
  and hashing alike, sees files. A missing or unexpected tensor is an error: transformers warns and makes random ones.
* Attention masks are built here (`layers/attention.py`) from document ids, or packed documents would see each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor, nn
from transformers.core_model_loading import apply_renamings
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as hf_logging

from qat_lora.errors import ModelError, errors_explained
from qat_lora.files import checksums
from qat_lora.files.finite import check_finite
from qat_lora.files.gguf_header import BASE, GGUF, read_header
from qat_lora.layers import attention
from qat_lora.layers.attention import AttentionKernel, Keep, MaskForm
from qat_lora.layers.calibrate.upcast import computing_dtype, upcast_linear
from qat_lora.layers.convert import quant_layers, tied_embedding
from qat_lora.layers.experts import Experts, split_experts
from qat_lora.layers.recurrent import keep_documents_apart, split_documents
from qat_lora.models import from_gguf, packed
from qat_lora.models.config_names import with_older_names, without_type
from qat_lora.models.copies import GENERATION, copy_files, copy_tokenizer
from qat_lora.models.hf_quantizer import QUANT_METHOD, QatLoraQuantizationConfig, QatLoraQuantizer
from qat_lora.models.hub import DEFAULT_HUB, HubConfig
from qat_lora.models.multimodal import add_rest, auto_class, cut_to_text, sees
from qat_lora.quant.presets import Preset
from qat_lora.types import LMHead

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FILE_SUFFIXES = (".pt", ".pth", ".safetensors")
"""Of names of files; any other dot belongs to the name of a folder, as in Qwen3-0.6B."""
LIBRARY, TILED, BLOCKED, FLEX = (f"qat_lora_{form}" for form in ("library", "tiled", "blocked", "flex"))
"""Names of our attention among those of transformers."""
PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", checksums.SUMS]


def resolve_model(name: str, revision: str | None = None, patterns: Sequence[str] = PATTERNS) -> Path:
    """Return the local folder of a model, downloading `patterns` of it from the Hub where `name` is not a folder.

    A path that does not exist (`runs/v2/best.pt`, the guide's spelling) means the folder of that name without the
    suffix, a `.safetensors` file its folder, and the folder of a `qat-lora qat` run its `best`. A GGUF file is itself.
    ModelError: nothing there, no config.json, or the Hub does not give it.
    """
    path = Path(name).expanduser()
    if len(path.name.encode(errors="replace")) > 255:
        raise ModelError(f"model: {name[:60]}... is longer than a file's name can be; give a folder or a Hub name")
    if path.suffix == GGUF:
        if not path.is_file():
            raise ModelError(f"model: there is no file {path}")
        return path
    is_file_name = path.suffix in FILE_SUFFIXES
    if is_file_name and path.is_file() and path.suffix != ".safetensors" and not checksums.is_state(path):
        raise ModelError(f"model: {name} is a pickled file; give the Hugging Face folder beside it instead")
    if is_file_name:
        path = path.parent if path.is_file() else path.with_suffix("")
    if path.is_dir():
        if not (path / "config.json").is_file() and (path / "best" / "config.json").is_file():
            path = path / "best"
        if (path / BASE).is_file():
            raise ModelError(f"model: {path} is a GGUF export, for `eval` and `chat`; give the run it was made of")
        if not (path / "config.json").is_file():
            raise ModelError(f"model: {path} has no config.json, so it is no Hugging Face model folder")
        return path
    if path.exists() or is_file_name or not is_hub_name(name):
        raise ModelError(f"model: there is no folder {path}; give a Hugging Face folder or a Hub name, OWNER/NAME")
    with errors_explained(ModelError, f"model: {name} is neither a folder here nor to be had from the Hub"):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, allow_patterns=[*patterns]))


def is_hub_name(name: str) -> bool:
    """Return whether a name may be OWNER/NAME on the Hub."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """Load a folder's tokenizer; ModelError: none, or one that has no fingerprint; DamagedFileError: other files."""
    checksums.check_folder(folder, checksums.TOKENIZER)
    remedy = "copy the model's tokenizer.json"
    with errors_explained(ModelError, f"tokenizer: {folder} has none that loads", remedy=remedy):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # Where the files are missing, transformers makes a tokenizer of special tokens alone, which drops all text.
    if backend is None or set(backend.get_vocab(with_added_tokens=False)) <= set(tokenizer.all_special_tokens):
        raise ModelError(f"tokenizer: {folder} has no tokenizer.json that can be used; copy that of the model")
    return tokenizer


def tokenizer_sha256(tokenizer: Any) -> str:
    """Return the sha256 of all that maps text to ids; padding, truncation and chat template change no id."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for part in ("padding", "truncation", "post_processor"):
        backend.pop(part, None)
    return hashlib.sha256(json.dumps(backend, sort_keys=True).encode()).hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and warnings off the terminal for a while: here, bad tensors are errors."""
    had_bars, verbosity = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if had_bars:
            hf_logging.enable_progress_bar()


@dataclass
class CausalLM:
    """A causal language model cut before its output head (the `types.LanguageModel` of everything else)."""

    module: Any  # the transformers model
    folder: Path  # holds its files; or the GGUF file itself
    vocab_limit: int | None = None  # rows of the output head that count, where it has more (padded vocabularies)
    tokenizer: Path | None = None  # folder of its tokenizer, where `folder` is a GGUF file
    rest: Mapping[str, int] = field(default_factory=dict)  # bytes of tensors in `folder` that are no text, by name

    def __post_init__(self) -> None:
        """Let attention of long rows keep no mask, also where nobody asks for a form of ours."""
        if hasattr(getattr(self.module, "config", None), "_attn_implementation"):
            self._attend(LIBRARY, attention.library_or_blocked)

    @property
    def tokenizer_folder(self) -> Path:
        """Holds the files of its tokenizer."""
        return self.tokenizer or self.folder

    @property
    def backbone(self) -> Any:
        """The text model without its output head."""
        whole = getattr(self.module, self.module.base_model_prefix)
        return whole.get_decoder() if sees(self.module.config) else whole

    @property
    def config(self) -> Any:
        """The text model's config."""
        return self.module.config.get_text_config()

    @property
    def vocab_size(self) -> int:
        """Rows of the output head that count."""
        rows = int(self.module.get_output_embeddings().weight.shape[0])
        return min(rows, self.vocab_limit or rows)

    @property
    def max_positions(self) -> int | None:
        """Longest row that the model was made for, None where its config does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    def with_vocabulary(self, rows: int) -> CausalLM:
        """Return the same model with all rows of the output head from `rows` on counted as padding."""
        return replace(self, vocab_limit=rows)

    def checkpoint_gradients(self, function: Callable[..., Any]) -> None:
        """Recompute layers in the backward pass by the `Runtime.checkpoint_function`; ModelError: none of them can."""
        layers = [layer for layer in self.module.modules() if hasattr(layer, "gradient_checkpointing")]
        if not layers:
            raise ModelError(f"gradient_checkpointing: {type(self.module).__name__} has no layers that offer it")
        for layer in layers:
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, function

    def tile_attention(self) -> None:
        """Compute attention in tiles (`layers/attention.py`), faster on CPUs than transformers' `sdpa`."""
        self._attend(TILED, attention.tiled_or)

    def block_attention(self, keep: Keep, kernel: AttentionKernel | None) -> None:
        """Compute attention in blocks that a compiler can fuse, or by a kernel; `keep` is `Runtime.kept`."""
        if attention.keeps_state(self.config):
            why = "documents kept apart in it are other shapes in every batch, each of which XLA would compile"
            raise ModelError(f"model: it has layers that carry a state, and {why}; give --device cpu or cuda")
        blocked = partial(attention.blocked_attention, keep=keep, kernel=kernel)
        self._attend(BLOCKED, partial(attention.tiled_or, attention=blocked))

    def compile_layers(self, **how: Any) -> None:
        """Compile decoder layers, one program for all, with attention by block masks; `how` is of `torch.compile`.

        A whole model of 28 layers takes 28 times as long. Layers with a state, whose calls change, are left alone.
        """
        if attention.keeps_state(self.config):
            return
        blocked = torch.compiler.disable(attention.blocked_attention)
        self._attend(FLEX, lambda sdpa: attention.flex_or(attention.tiled_or(sdpa, blocked)))
        for module in self.module.modules():
            if isinstance(module, Experts):  # how many tokens each gets is another program every time
                module.__dict__["forward"] = torch.compiler.disable(module.forward)
            if isinstance(module, GradientCheckpointingLayer):
                module.compile(dynamic=False, **how)
        # What a frozen embedding returns needs no gradient, and the first layer would be a program of its own.
        self.module.get_input_embeddings().register_forward_hook(_with_gradient)

    def _attend(self, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        if self.config._attn_implementation in (_own_attention(self.config), LIBRARY):
            transformers.AttentionInterface.register(name, around(_attend_as_transformers))
            transformers.AttentionMaskInterface.register(name, _own_mask)
            with _quiet():  # of a vision tower that is not there
                self.module.set_attn_implementation(name)

    def norms(self) -> dict[str, nn.Parameter]:
        """Return the parameters of all norms by name."""
        norms = {name: norm for name, norm in self.module.named_modules() if type(norm).__name__.endswith("Norm")}
        return {f"{name}.{part}": p for name, norm in norms.items() for part, p in norm.named_parameters(recurse=False)}

    def hidden(self, input_ids_BL: Tensor, document_ids_BL: Tensor) -> Tensor:
        """Return the last hidden states [B, L, H]; attention and positions restart with each document."""
        form = self.mask_form()
        masks, positions = attention.attention_inputs(self.config, document_ids_BL, computing_dtype(self.module), form)
        given = {"attention_mask": masks, "position_ids": positions, "use_cache": False}
        if attention.keeps_state(self.config):
            keep_documents_apart(self.module, self.config.model_type)
            given["documents"] = split_documents(attention.document_begins(document_ids_BL)[0])
        return self.backbone(input_ids=input_ids_BL, **given).last_hidden_state

    def mask_form(self) -> MaskForm:
        """Return the form of attention mask that the model's attention reads."""
        name = self.config._attn_implementation
        return "blocks" if name == FLEX else "first" if name in (LIBRARY, TILED, BLOCKED) else "dense"

    def lm_head(self) -> LMHead:
        """Return the output head with its current weight."""
        linear, config = self.module.get_output_embeddings(), self.config
        # Cohere multiplies, Granite divides.
        scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        return LMHead(linear.weight, self.vocab_size, linear.bias, scale, softcap)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return logits [N, vocab_size], in the hidden states' type, or in float32 where they are scaled or capped."""
        lm_head = self.lm_head()
        bias_V = None if lm_head.bias_V is None else lm_head.bias_V[: lm_head.vocab_size]
        return scale_and_cap(upcast_linear(hidden_NH, lm_head.weight_VH[: lm_head.vocab_size], bias_V), lm_head)


def _own_attention(config: Any) -> str:
    """Return the name of transformers' own attention for a model: its `sdpa` does not cap scores, as Gemma 2 does."""
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else "sdpa"


def _attend_as_transformers(*given: Any, **others: Any) -> Any:
    if others.get("softcap") is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](*given, **others)
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    return eager_attention_forward(*given, **others)


def _own_mask(*given: Any, config: Any, **others: Any) -> Any:
    return ALL_MASK_ATTENTION_FUNCTIONS[_own_attention(config)](*given, config=config, **others)


def _with_gradient(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    """Let a module's output require a gradient, wherever gradients are computed."""
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


def scale_and_cap(logits_NV: Tensor, lm_head: LMHead) -> Tensor:
    """Return logits as an architecture with scaled or capped logits has them, in float32; others as they are."""
    if lm_head.logit_scale != 1.0:
        logits_NV = logits_NV.float() * lm_head.logit_scale
    return logits_NV if lm_head.softcap is None else lm_head.softcap * torch.tanh(logits_NV.float() / lm_head.softcap)


def load_model(
    name: str,
    hub: HubConfig = DEFAULT_HUB,
    dtype: str = "float32",
    device_map: str | Mapping[str, str | int] | None = None,
    dequantize: bool = False,
) -> CausalLM:
    """Load a causal language model, quantised by us or not, from a folder or the Hub.

    Scales and look-up tables stay float32 whatever the dtype (`stored`: the files'), so it computes what was saved.
    Tensors that the files hold in that type stay memory-mapped, shared by the processes of a host until each has placed
    its own. `device_map` is for `load_dispatched`. With `dequantize`, GGUF files and folders of other tools are read as
    the dense weights that they stand for. ModelError: no such model, another architecture, a missing, unexpected or
    misshapen tensor, NaN or infinity. DamagedFileError: not what was written. MissingExtraError: a library is missing.
    """
    folder = resolve_model(name, hub.revision)
    with errors_explained(ModelError, f"model: {folder} does not load as a causal language model"), _quiet():
        config, state = _foreign(folder, hub, dequantize)
        how = {"config": config, "attn_implementation": _own_attention(config), "device_map": device_map}
        how |= {"trust_remote_code": hub.trust_remote_code, "use_safetensors": True, "state_dict": state}
        how["dtype"] = "auto" if dtype == "stored" and state is None else DTYPES.get(dtype, torch.float32)
        how |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # which names them, below
        kind = getattr(transformers, auto_class(config)) if state is None else type(on_meta(config))
        module, report = kind.from_pretrained(folder if state is None else None, **how)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(problem):
            names = ", ".join(sorted(map(_tensor_name, report[problem]))[:6])
            kind = problem.removesuffix("_keys")
            raise ModelError(f"model: {folder} has {kind} tensors: {names}; they do not fit its config.json")
    if sees(config):
        cut_to_text(module)
    check_finite(module.state_dict(), f"model: {folder}")
    if device_map is None:  # else accelerate has its hooks in the modules as they are
        split_experts(module)
    module.eval().requires_grad_(False)
    for part in module.modules():  # no dropout of pre-training, as Granite's of attention: its teacher is read without
        rates = [name for name, value in vars(part).items() if "dropout" in name and isinstance(value, float)]
        vars(part).update(dict.fromkeys(rates + ["p"] * isinstance(part, nn.Dropout), 0.0))
    return CausalLM(module, folder, rest=_rest_of(module, folder) if sees(config) else {})


def _rest_of(module: Any, folder: Path) -> dict[str, int]:
    """Return the bytes of the tensors in a folder that belong to neither decoder nor LM head, by their names there."""
    own, renamings = (module.get_decoder(), module.get_output_embeddings()), module._weight_conversions or []
    inside = tuple(f"{name}." for name, part in module.named_modules() if part in own)
    stored = (item for file in checksums.model_files(folder) for item in load_file(file).items())  # mapped, not read
    return {name: t.nbytes for name, t in stored if not apply_renamings(name, renamings).startswith(inside)}


def _foreign(folder: Path, hub: HubConfig, dequantize: bool) -> tuple[Any, dict[str, Tensor] | None]:
    """Return a model's config, and its weights if another tool's format holds them; None: transformers reads them."""
    if folder.suffix == GGUF:
        if not dequantize:
            raise ModelError(f"model: {folder} is quantised; recover it by --checkpoint, or give the unquantised model")
        settings = from_gguf.config_of(header := read_header(folder))
        config = transformers.AutoConfig.for_model(**settings)
        return config, from_gguf.dense_state(header, on_meta(config).state_dict(), settings)
    files = checksums.weight_files(folder)
    plain = checksums.read_object(folder / "config.json")
    method = packed.method_of(plain)
    checksums.check_folder(folder, (*checksums.LOADED, *(file.name for file in files)))
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=hub.trust_remote_code)
    if checksums.is_state(files[0]):
        state = {name: tensor for name, tensor in read_state(files[0]).items() if ".lora_" not in name}
        return config, {name.replace(".base.", "."): tensor for name, tensor in state.items()}
    if config.is_encoder_decoder or method in (None, QUANT_METHOD):
        return config, None
    if not dequantize or method not in packed.READERS:
        raise ModelError(f"model: {folder} is quantised by {method}; give the unquantised model")
    for name in {"quantization_config", "quantization"} & set(vars(config)):
        delattr(config, name)
    return config, packed.dense_state(folder, plain)


def read_state(file: Path) -> dict[str, Tensor]:
    """Return the tensors of an export's state dict, no code of its run; ModelError: it holds anything else."""
    with errors_explained(ModelError, f"model: {file} is no state dict that can be read", remedy="export it again"):
        state = dict(torch.load(file, weights_only=True, map_location="cpu"))
        if all(isinstance(tensor, Tensor) for tensor in state.values()):
            return state
        raise ValueError("it holds more than tensors")


def on_meta(config: Any) -> Any:
    """Return the model of a config on the meta device: shapes without memory."""
    with torch.device("meta"):
        module = getattr(transformers, auto_class(config)).from_config(config)
    whole = module.num_parameters()
    if sees(config):
        cut_to_text(module)
    module.rest_weights = whole - module.num_parameters()
    return module


def stored_dtype(folder: Path) -> str:
    """Return the name of the type that a model's files hold, float32 where no config.json names one of `DTYPES`."""
    config = checksums.read_object(folder / "config.json") if folder.is_dir() else {}
    return named if (named := str(config.get("dtype", config.get("torch_dtype")))) in DTYPES else "float32"


def _tensor_name(key: Any) -> str:
    """Return a tensor's name, with both shapes where transformers reports (name, in the file, in the model)."""
    if isinstance(key, str):
        return key
    name, stored, wanted = key
    return f"{name} (shape {tuple(stored)}, the model wants {tuple(wanted)})"


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert the floating tensors of a model, except the scales and tables of quantised layers."""
    scales = {id(p) for layer in quant_layers(module).values() for n, p in layer.named_parameters() if n != "bias"}
    for parameter in module.parameters():
        if parameter.is_floating_point() and id(parameter) not in scales:
            parameter.data = parameter.data.to(dtype)
    if (table := tied_embedding(module)) is not None:
        module.get_submodule(table).to(dtype)
    if hasattr(module, "config"):
        module.config.dtype = dtype


def save_quantised(model: CausalLM, out: Path, preset: Preset, details: dict[str, Any]) -> None:
    """Write a quantised model without adapters, and its tokenizer files; `details`, in config.json, are for people."""
    if tied_embedding(model.module) is not None:
        preset = replace(preset, tied=True)
        model.config.tie_word_embeddings = model.module.config.tie_word_embeddings = False
    quantization = QatLoraQuantizationConfig(preset.to_dict(), details=details)
    model.module.config.quantization_config = quantization
    model.module.hf_quantizer = QatLoraQuantizer(quantization)
    save_model(model.module, out)
    add_rest(model, out)
    copy_tokenizer(model.folder, out)
    copy_files(model.folder, out, GENERATION)
    checksums.seal(out)


def save_model(module: Any, out: Path) -> None:
    """Write a model's config and weights; `seal` the folder when it is complete. ModelError: NaN or infinity."""
    check_finite(module.state_dict(), f"model for {out}")
    with _quiet():
        module.save_pretrained(out)
    add_older_names(out)


def add_older_names(folder: Path) -> None:
    """Add to a folder's config.json the names that engines other than transformers 5 read.

    Some families never had the older names of rotary positions, and their classes would lose the
    positions to them: these get none.
    """
    file = folder / "config.json"
    config = checksums.read_object(file)
    wanted = _positions_read(folder, config)
    _write_config(file, with_older_names(config))
    if _positions_read(folder, config) != wanted:
        _write_config(file, with_older_names(config, positions=False))


def _positions_read(folder: Path, config: dict[str, Any]) -> Any:
    """Return the rotary settings that transformers reads in a folder, None where it refuses to."""
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        return None
    with _quiet(), suppress(Exception):  # of any kind: a class checks its settings by itself
        text = CONFIG_MAPPING[kind].from_pretrained(folder).get_text_config()
        return without_type(getattr(text, "rope_parameters", None))
    return None


def _write_config(file: Path, config: dict[str, Any]) -> None:
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


END_OF_TEXT = "<|endoftext|>"


def make_tokenizer(texts: Iterable[str], vocab_size: int, out: Path) -> None:
    """Train a byte-level BPE tokenizer and write it as a Hugging Face tokenizer; id 0 ends documents."""
    trained, ends = ByteLevelBPETokenizer(), [END_OF_TEXT]
    trained.train_from_iterator(texts, vocab_size, min_frequency=0, show_progress=False, special_tokens=ends)
    tokenizer = Tokenizer.from_str(trained.to_str())
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=ends[0], eos_token=ends[0])
    wrapped.save_pretrained(out)


def make_qwen3(
    folder: Path, vocab_size: int, *, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, **others: int
) -> CausalLM:
    """Make an untrained Qwen3 model with tied embeddings; `folder` is where it will be saved."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": mlp, "head_dim": hidden // heads}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 1024}
    sizes |= {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 0, **others}
    return CausalLM(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(tie_word_embeddings=True, **sizes)), folder)

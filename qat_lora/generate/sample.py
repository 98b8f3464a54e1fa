"""Continue a prompt with shapes that never change, and yield the text as it grows.

Growing inputs, and caches that grow with them, give a compiling device a new graph for each token. Here the row has its
final length from the start, and the unwritten part is padding behind the last token. One forward goes over the whole
row; from then on a token costs the forward of one token (`models/kv_cache.py`). That needs nothing of transformers'
generation code, and all prompts of one row length share two graphs.

A GGUF export runs in llama.cpp's own Python binding behind the same `Backend`. Turned back into dense weights it could
run here, but that would show what transformers makes of it, not what its users get. All of llama.cpp's sampling is off
except for the temperature, so both draw from the whole distribution.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Set
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from qat_lora.data.file_rows import well_formed
from qat_lora.data.framing import added_ids
from qat_lora.data.layouts import Message, render_chat
from qat_lora.errors import ConfigError, ModelError, TextError
from qat_lora.extras import require
from qat_lora.files.checksums import check_folder
from qat_lora.files.gguf_header import ADAPTER, BASE, read_header
from qat_lora.models.end_tokens import end_ids, header_end_ids
from qat_lora.models.hub import HubConfig
from qat_lora.models.kv_cache import begin, step
from qat_lora.models.load import CausalLM, load_tokenizer
from qat_lora.models.student import open_student
from qat_lora.options import RunConfig
from qat_lora.runtime.base import Runtime
from qat_lora.terminal import echo

_WHOLE_DISTRIBUTION = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}


@torch.no_grad()  # not inference_mode, whose tensors PyTorch/XLA cannot use
def stream_ids(
    model: CausalLM,
    prompt_ids: list[int],
    max_new_tokens: int,
    *,
    device: torch.device,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    row_length: int | None = None,
    mark_step: Callable[[], None] = lambda: None,
) -> Iterator[int]:
    """Yield the `max_new_tokens` ids that follow a prompt, each computed when it is asked for.

    Temperature 0 takes the top-1 token, above it the generator, of the CPU, draws; `row_length` is in tokens, at least
    those of prompt and continuation. ConfigError: an empty prompt, or more tokens than the model has positions.
    """
    total = len(prompt_ids) + max_new_tokens
    if not prompt_ids:
        raise ConfigError("prompt: is empty; give at least one word")
    if model.max_positions is not None and total > model.max_positions:
        raise ConfigError(f"max_new_tokens: prompt and continuation take {total} of {model.max_positions} positions")
    ids = torch.zeros(1, max(total, row_length or 0), dtype=torch.int64)
    ids[0, : len(prompt_ids)] = torch.tensor(prompt_ids)
    last = torch.tensor([len(prompt_ids) - 1]).to(device)  # as data: a slice would write the number into the graph
    hidden_B1H, cache = begin(model, ids.to(device), len(prompt_ids))
    hidden_B1H = hidden_B1H.index_select(1, last)
    for position in range(len(prompt_ids), total):
        logits = model.logits(hidden_B1H[:, 0])
        mark_step()  # before the read: a read alone would leave the cache to be computed again
        logits_V = logits.cpu()[0].float()
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            token = int(torch.multinomial(torch.softmax(logits_V / temperature, -1), 1, generator=generator))
        yield token
        if position + 1 < total:
            hidden_B1H = step(model, torch.tensor([[token]]).to(device), torch.tensor([position]).to(device), cache)


def until_end(ids: Iterable[int], ends: Set[int]) -> Iterator[int]:
    """Yield ids up to the first of the `end_ids`, which is left out."""
    return itertools.takewhile(lambda token: token not in ends, ids)


def stream_text(tokenizer: Any, ids: Iterable[int]) -> Iterator[str]:
    """Yield the text of ids in pieces as they come; half characters (U+FFFD) wait for their other half."""
    written: list[int] = []
    shown = text = ""
    for token in ids:
        written.append(token)
        text = tokenizer.decode(written, clean_up_tokenization_spaces=False)  # all: neighbours change a token's text
        if not text.endswith("\ufffd") and text.startswith(shown) and text != shown:
            yield text[len(shown) :]
            shown = text
    if text.startswith(shown) and text != shown:
        yield text[len(shown) :]


def plain_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Return the ids of a text to continue, behind the begin tokens that the tokenizer adds (`data/framing.py`).

    A text of no ids is one token that a text may follow, the bos or else the eos, if the tokenizer has one.
    """
    before, _ = added_ids(tokenizer)
    ids = [*before.tolist(), *tokenizer(well_formed(prompt), add_special_tokens=False)["input_ids"]]
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return ids or [token for token in (first,) if token is not None]


def chat_prompt(tokenizer: Any, messages: list[Message], **switches: Any) -> list[int]:
    """Return the ids of a chat up to the assistant's answer; TextError without a chat template, or if it refuses."""
    if not getattr(tokenizer, "chat_template", None):
        instead = "leave --chat out, and the text is continued as it is"
        raise TextError(f"chat: the tokenizer has no chat template; {instead}")
    text = render_chat(tokenizer, "chat", messages, prompt=True, **switches)
    return list(tokenizer(well_formed(text), add_special_tokens=False)["input_ids"])


def continue_text(model: CausalLM, tokenizer: Any, prompt: str, max_new_tokens: int, **settings: Any) -> str:
    """Return the text that follows a prompt; see `stream_ids`."""
    ids = stream_ids(model, plain_prompt(tokenizer, prompt), max_new_tokens, **settings)
    ids = until_end(ids, end_ids(model, tokenizer))
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)


class Backend(NamedTuple):
    """An opened model that continues texts."""

    description: str
    positions: int | None  # longest row in tokens, None where nothing limits it
    templated: bool  # whether it has a chat template
    encode_text: Callable[[str], list[int]]
    encode_chat: Callable[[list[Message]], list[int]]
    # (prompt ids, new tokens, temperature, source of draws, tokens of the row) -> text, piece by piece
    stream: Callable[[list[int], int, float, torch.Generator, int], Iterator[str]]


def open_backend(name: str, hub: HubConfig, run: RunConfig, runtime: Runtime) -> Backend:
    """Open the folder of a GGUF export, which needs llama-cpp-python, or anything else as `open_student` does."""
    folder = Path(name).expanduser()
    return _llama_cpp(folder) if (folder / BASE).is_file() else _ours(name, hub, run, runtime)


def _ours(name: str, hub: HubConfig, run: RunConfig, runtime: Runtime) -> Backend:
    student = open_student(name, hub, run.dtype)
    if student.start and not (run.quiet or run.json):
        echo(f"{name} is opened {student.start_text}", err=True)  # standard output is the text's
    model = student.model
    tokenizer = load_tokenizer(model.tokenizer_folder, hub.trust_remote_code)
    runtime.place(model.module)
    ends = end_ids(model, tokenizer)
    ids_after = partial(stream_ids, model, device=runtime.device, mark_step=runtime.mark_step)

    def stream(ids: list[int], new: int, temperature: float, generator: torch.Generator, row: int) -> Iterator[str]:
        tokens = ids_after(ids, new, temperature=temperature, generator=generator, row_length=row)
        return stream_text(tokenizer, until_end(tokens, ends))

    encoders = partial(plain_prompt, tokenizer), partial(chat_prompt, tokenizer)
    templated = bool(getattr(tokenizer, "chat_template", None))
    return Backend(runtime.description, model.max_positions, templated, *encoders, stream)


def _llama_cpp(folder: Path) -> Backend:
    check_folder(folder)
    llama_cpp, formats = (require(module, "llama") for module in ("llama_cpp", "llama_cpp.llama_chat_format"))
    lora = folder / ADAPTER
    adapter = str(lora) if lora.is_file() else None
    try:
        llama = llama_cpp.Llama(str(folder / BASE), lora_path=adapter, n_ctx=0, verbose=False)
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"model: llama.cpp does not load {folder / BASE}: {error}") from None
    template = llama.metadata.get("tokenizer.chat_template")
    ends = header_end_ids(read_header(folder / BASE).settings) | {llama.token_eos()}

    def encode_text(text: str) -> list[int]:
        ids: list[int] = llama.tokenize(text.encode(), add_bos=False)
        begin = llama.metadata.get("tokenizer.ggml.bos_token_id")
        adds = llama.metadata.get("tokenizer.ggml.add_bos_token") == "true" or not ids  # as `plain_prompt`
        return [int(begin), *ids] if adds and begin is not None else ids

    def encode_chat(messages: list[Message]) -> list[int]:
        if template is None:
            raise TextError("chat: this GGUF file holds no chat template; leave --chat out")
        end_id, begin_id = llama.token_eos(), llama.token_bos()
        ids = (end_id, begin_id if begin_id >= 0 else end_id)
        end, begin = (llama.detokenize([token], special=True).decode() for token in ids)
        write = formats.Jinja2ChatFormatter(template, eos_token=end, bos_token=begin)
        return list(llama.tokenize(write(messages=messages).prompt.encode(), add_bos=False, special=True))

    def decode(ids: list[int], **_: Any) -> str:
        return llama.detokenize(ids).decode("utf-8", errors="replace")  # as yet half a character: U+FFFD

    def stream(ids: list[int], new: int, temperature: float, generator: torch.Generator, _: int) -> Iterator[str]:
        llama.set_seed(int(torch.randint(2**31, (), generator=generator)))
        tokens = itertools.islice(llama.generate(ids, temp=temperature, **_WHOLE_DISTRIBUTION), new)
        return stream_text(SimpleNamespace(decode=decode), until_end(tokens, ends))

    description = f"llama.cpp {llama_cpp.__version__} on the CPU"
    return Backend(description, llama.n_ctx(), template is not None, encode_text, encode_chat, stream)

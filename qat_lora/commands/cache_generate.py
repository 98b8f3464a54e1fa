"""`cache generate`: a model writes texts, and the teacher's logits of them become a KD cache.

Token ids are kept beside the text: a text can be cut into tokens in several ways, and the model wrote one of them. Rows
of a batch end at one place, behind padding that nothing sees. The draws of a text are its own (by seed and number), and
a batch's file appears whole: a killed run goes on behind the last one, and writes what it would have written.
"""

import json
import random
import zlib
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qat_lora.cache.tools.overlap import run_hashes
from qat_lora.commands.cache import build_cache
from qat_lora.config import to_dict
from qat_lora.data.packing import make_encoder
from qat_lora.data.sources import TextConfig, describe_source, open_documents
from qat_lora.errors import ConfigError, TextError
from qat_lora.files import outputs
from qat_lora.files.folders import write_text
from qat_lora.generate.sample import chat_prompt, plain_prompt
from qat_lora.layers.attention import keeps_state
from qat_lora.models.end_tokens import end_ids
from qat_lora.models.kv_cache import begin, step
from qat_lora.models.load import CausalLM, load_tokenizer
from qat_lora.models.student import open_student
from qat_lora.options import CacheGenerateOptions, WriteConfig
from qat_lora.runtime.base import Runtime
from qat_lora.setup.common import READ_A_ROW, fits_positions, keep_dtype, say, text_inputs

WIDTH_STEP = 32  # to multiples of which a batch's prompts are padded, so that a compiling device makes few graphs


def generate_cache(options: CacheGenerateOptions, runtime: Runtime) -> Any:
    """Write the texts to OUT_texts, or go on writing; then build the cache, and return its folder."""
    out = (options.run.out or f"caches/written_L{options.length}_K{options.top_k}").rstrip("/")
    texts = Path(f"caches/{out.rpartition('/')[2]}_texts" if "://" in out else f"{out}_texts")
    _write_texts(options, runtime, texts)
    return build_cache(options.of_texts(str(texts), out), runtime)


def _write_texts(options: CacheGenerateOptions, runtime: Runtime, out: Path) -> None:
    options = keep_dtype(options, runtime, outputs.settings_of(out, "cache generate").get("run", [None])[-1])
    write, run = options.write, options.run
    student = open_student(str(write.writer or options.teacher), options.hub, run.dtype)
    if student.start:
        say(run, f"{write.writer or options.teacher} writes {student.start_text}")
    model = student.model
    tokenizer = load_tokenizer(model.tokenizer_folder, options.hub.trust_remote_code)
    model = model.with_vocabulary(min(model.vocab_size, max(tokenizer.get_vocab().values()) + 1))
    fits_positions(model, options.length)
    if keeps_state(model.config):
        raise ConfigError("writer: its layers carry a state, which padding would enter; take one with attention alone")
    ends = end_ids(model, tokenizer)
    prompts, not_in = _prompts(options, tokenizer), [TextConfig(dataset=path) for path in write.not_in]
    texts_not_in = (make_encoder(tokenizer)(document) for text in not_in for document in open_documents(text))
    known = run_hashes(np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in text)]) for text in texts_not_in)
    settings = {
        "writer_sha256": student.sha256,
        "write": {**to_dict(write), "writer": None, "not_in": [describe_source(text) for text in not_in]},
        "prompts": describe_source(options.text) if options.text.dataset else None,
        "run": [options.length, run.seed, run.dtype],
    }
    inputs = [write.writer, options.teacher, model.folder, write.tools, *text_inputs(options.text), *write.not_in]
    with outputs.claimed(out, "cache generate", settings, run.overwrite, inputs) as complete:
        if complete:
            return
        runtime.place(model.module)
        count, counts = write.texts or len(prompts), Counter[str]()
        for first in range(0, count, write.write_batch_size):
            file, numbers = out / f"{first:09d}.jsonl", range(first, min(first + write.write_batch_size, count))
            if not file.is_file():
                draws = [torch.Generator().manual_seed((run.seed * 1_000_003 + number) % 2**63) for number in numbers]
                draws_BN = torch.stack([torch.rand(write.max_new_tokens, generator=draw) for draw in draws])
                begun = [prompts[number % len(prompts)] for number in numbers]
                answers = decode(model, begun, draws_BN, write.gen_temperature, ends, runtime)
                wholes = [[*prompt, *answer] for prompt, answer in zip(begun, answers, strict=True)]
                texts = tokenizer.batch_decode(wholes, clean_up_tokenization_spaces=False)
                lines = (_line(write, *written, ends, known) for written in zip(begun, answers, texts, strict=True))
                write_text(file, "".join(json.dumps(line) + "\n" for line in lines))
            counts.update(json.loads(line).get("left_out", "kept") for line in file.read_text("utf-8").splitlines())
        say(run, f"{out}: " + ", ".join(f"{count:,} texts {what}" for what, count in sorted(counts.items())))
        outputs.complete(out)


@torch.no_grad()
def decode(
    model: CausalLM, prompts: list[list[int]], draws_BN: Tensor, temperature: float, ends: set[int], runtime: Runtime
) -> list[list[int]]:
    """Return at most N ids that follow each prompt, up to its first end; the uniform numbers [B, N] draw them."""
    device, most = runtime.device, draws_BN.shape[1]
    width = -(-max(map(len, prompts)) // WIDTH_STEP) * WIDTH_STEP
    padding = [width - len(prompt) for prompt in prompts]
    ids_BL = torch.tensor([[0] * before + [*prompt] for before, prompt in zip(padding, prompts, strict=True)])
    hidden, cache = begin(model, ids_BL.to(device), width, torch.tensor(padding).to(device), most)
    draws_BN, written, ended_B = draws_BN.to(device), list[Tensor](), torch.zeros(len(prompts)) > 0
    for place in range(most):
        logits_BV = model.logits(hidden[:, -1]).float()
        token_B1 = logits_BV.argmax(-1, keepdim=True)
        if temperature:
            mass_BV = torch.softmax(logits_BV / temperature, -1).cumsum(-1)
            token_B1 = (mass_BV[:, :-1] <= draws_BN[:, place : place + 1] * mass_BV[:, -1:]).sum(-1, keepdim=True)
        runtime.mark_step()
        written.append(token_B1.cpu())
        ended_B |= torch.isin(written[-1][:, 0], torch.tensor(sorted(ends)))
        if ended_B.all() or place + 1 == most:
            break
        hidden = step(model, token_B1, torch.tensor([width + place]).to(device), cache)
    rows = torch.cat(written, 1).tolist()
    return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), most)] for row in rows]


def _line(write: WriteConfig, prompt: list[int], answer: list[int], text: str, ends: set[int], known: Any) -> Any:
    """Return a prompt with its answer as a file keeps it, without its text if it is left out."""
    ids, data, most = [*prompt, *answer], text.encode(), write.max_repetition or np.inf
    reasons = {
        "short": len(answer) < write.min_new_tokens,
        "without an end": write.only_ended and answer[-1] not in ends,
        "repetitive": len(data) > most * len(zlib.compress(data)),
        "in evaluation text": np.isin(run_hashes([np.array(ids)]), known).any(),
    }
    for why in (name for name, holds in reasons.items() if holds):
        return {"text": "", "token_ids": [], "prompt_tokens": 0, "left_out": why}
    return {"text": text, "token_ids": ids, "prompt_tokens": len(prompt)}


def _prompts(options: CacheGenerateOptions, tokenizer: Any) -> list[list[int]]:
    """Return the ids of the prompts that leave room for an answer; of none, the token that begins a text."""
    write, room = options.write, options.length - options.write.max_new_tokens
    switches = {} if write.thinking == "auto" else {"enable_thinking": write.thinking == "on"}
    switches |= {"tools": json.loads(Path(write.tools).read_text("utf-8"))} if write.tools else {}
    for name in switches:
        if name not in str(getattr(tokenizer, "chat_template", "")):
            raise ConfigError(f"{name[-8:].strip('_')}: the writer's chat template does not know it; leave it out")
    if options.text.dataset is None:
        return [plain_prompt(tokenizer, "")]
    prompts, documents = [], (document for document in open_documents(options.text) if not document.is_blank)
    for document in islice(documents, write.texts and READ_A_ROW * write.texts):
        asked = document.messages or [{"role": "user", "content": "".join(document.parts())}] * write.chat
        if asked:
            answered = asked[-1]["role"] == "assistant"
            prompts.append(chat_prompt(tokenizer, asked[: len(asked) - answered], **switches))
        else:
            prompts.append(plain_prompt(tokenizer, "".join(document.parts()))[: write.prompt_tokens])
    if not (fitting := [prompt for prompt in prompts if len(prompt) <= room]):
        raise TextError(f"dataset: no prompt has {room} tokens or fewer; give a longer --length, or --prompt-tokens")
    return random.Random(options.run.seed).sample(fitting, len(fitting))

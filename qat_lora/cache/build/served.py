"""A teacher behind a server: the likeliest tokens of a text's positions, asked for over HTTP by token ids.

vLLM and SGLang score a whole prompt in one forward, llama.cpp's server the position after a prompt, whose prefix it
keeps. Sent are ids, one document of a row at a time (attention restarts there), nothing put in front; what comes back
must be ids too: text would not tell two tokens of the same letters apart. The chat protocol gives neither.

Each answer is held against what was asked: the ids that went in, K entries of the vocabulary, log-probabilities that
sum to at most one. A server that is busy, slow or gone is asked again, by urllib3's rules. Which model answers is known
by its name and by what it says of one short text (`identify`), compared whenever a build starts and after every lost
connection, since an engine is easily started again with another model.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np

from qat_lora.cache.format.layout import Contents
from qat_lora.cache.format.records import Fingerprint
from qat_lora.config import option, required, settings
from qat_lora.errors import CacheError, ConfigError, QatLoraError, one_line
from qat_lora.extras import require

KEY = "QAT_LORA_TEACHER_KEY"  # of the environment: the one place where a server's key may stand
PROBE = "The quick brown fox jumps over the lazy dog. def square(x): return x * x\n"
_PROBE_TOKENS, _PROBE_NATS = 16, 0.05  # of it; mean change of its log-probabilities up to which a model is the same
_AGAIN = (408, 429, 500, 502, 503, 504)  # answers after which the same request may succeed
_RETRIES, _BACKOFF_S, _TIMEOUT_S = 7, 1.0, 600.0  # waits of 0, 2, 4, ... 64 seconds, or as long as the server says
_NOISE, _SLACK = 1e-6, 1e-3  # a tail below that is the rounding of float32 sums: none; how far sums may be above 1
_NOTED = re.compile(r".+ over HTTP; probe((?: [0-9]+:-?[0-9.]+)+)")

Pairs = list[tuple[int, float]]  # token ids and their log-probabilities
Ask = Callable[[str, dict[str, Any]], Any]


@settings
class ServedConfig:
    """A teacher that is not loaded here."""

    teacher_url: str | None = option(None, f"server of the teacher, one of whose models it is; its key is in {KEY}")
    teacher_engine: Literal["auto", "vllm", "sglang", "llama.cpp"] = option("auto", "what the server is; auto: asks it")
    tokenizer: str | None = option(None, "tokenizer of a teacher behind a URL or in a GGUF file: folder or Hub name")
    concurrency: int = option(8, "requests under way at a time", unit="requests", min=1)
    requests_per_second: float | None = option(None, "requests begun in a second at the most", above=0)
    own_text: bool = option(False, "with --draws 1: the teacher wrote the text at T = 1, so its tokens are its draws")

    def check(self, options: Any) -> None:
        """Raise ConfigError for a setting of the `CacheBuildOptions` that a server cannot fulfil, or only one can."""
        if self.teacher_url is None:
            required(options, "teacher")
            if is_gguf := options.teacher.endswith(".gguf"):
                required(self, "tokenizer")
            for name in ("teacher_engine", "requests_per_second", "own_text", *(["tokenizer"] * (not is_gguf))):
                if getattr(self, name) != getattr(ServedConfig, name):
                    raise ConfigError(f"{name}: is for a teacher behind a server; give --teacher-url too")
            return
        if not re.fullmatch(r"https?://[^/@?#\s]+(/[^@?#\s]*)?", self.teacher_url):
            hint = f"leave out user names, keys and parameters; a key belongs into the environment variable {KEY}"
            raise ConfigError(f"teacher_url: is no plain http:// or https:// address; {hint}")
        required(self, "tokenizer")
        fits = {"hidden": False, "temperatures": (1.0,), "draws": int(self.own_text), "tail_draws": 0}
        more = {"builder": "0/1", "device_map": "none", "row_codec": "none", "positions": "all"}
        for name, allowed in (fits | more).items():
            if (value := getattr(options, name)) not in (allowed, None):
                raise ConfigError(f"{name}: {value} does not fit a server (top K at T = 1); allowed: {allowed}")


def _vllm(ask: Ask, name: str, ids: Sequence[int], wanted: Sequence[bool], k: int, _plain: int) -> list[Pairs]:
    asked = {"model": name, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": k}
    listed = ask("/v1/completions", asked | {"add_special_tokens": False})["choices"][0]["prompt_logprobs"]
    found = [{int(token): entry["logprob"] for token, entry in at.items()} for at in listed[1:]]
    _same(len(listed) == len(ids) and all(token in at for token, at in zip(ids[1:], found, strict=True)))
    return [[*at.items()] for at in found]


def _sglang(ask: Ask, name: str, ids: Sequence[int], wanted: Sequence[bool], k: int, _plain: int) -> list[Pairs]:
    sampling = {"max_new_tokens": 0, "temperature": 1.0}
    asked = {"model": name, "input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    asked |= {"logprob_start_len": 0, "top_logprobs_num": k, "return_text_in_logprobs": False}
    about = ask("/generate", asked)["meta_info"]
    _same([entry[1] for entry in about["input_token_logprobs"]] == list(ids))
    return [[(token, value) for value, token, *_ in at] for at in about["input_top_logprobs"][1:]]


def _llama_cpp(ask: Ask, name: str, ids: Sequence[int], wanted: Sequence[bool], k: int, plain: int) -> list[Pairs]:
    # The token that follows is forced to be `plain`: one that ends within a letter gets no entry, and the next one's
    # would be taken for it. The probabilities are the model's own, before sampling.
    asked = {"model": name, "n_predict": 1, "n_probs": k, "cache_prompt": True, "post_sampling_probs": False}
    asked |= {"temperature": 0.0, "samplers": [], "logit_bias": [[plain, 1e6]]}

    def after(length: int) -> Pairs:
        answer = ask("/completion", asked | {"prompt": ids[:length]})
        (at,) = answer["completion_probabilities"]
        _same(answer["tokens_evaluated"] == length and at["id"] == plain)
        return [(entry["id"], entry["logprob"]) for entry in at["top_logprobs"]]

    return [after(length) if counts else [] for length, counts in enumerate(wanted, 1)]


# How each engine scores a document: `Pairs` of the positions before tokens 1, 2, ..., [] where it was not asked.
ENGINES = {"vllm": _vllm, "sglang": _sglang, "llama.cpp": _llama_cpp}


def _same(ids_are: bool) -> None:
    if not ids_are:
        raise ValueError("other token ids than were sent")


class ServedTeacher:
    """A model behind a server. CacheError: none of `ENGINES`, or it fails; ConfigError: it does not list the model."""

    def __init__(self, config: ServedConfig, name: str | None, top_k: int) -> None:
        urllib3, self._key = require("urllib3", "served"), os.environ.get(KEY, "")
        self.url, self.engine = str(config.teacher_url).rstrip("/"), str(config.teacher_engine)
        self._top_k, self._threads = top_k, config.concurrency
        retries = urllib3.Retry(
            _RETRIES, redirect=0, allowed_methods=None, status_forcelist=_AGAIN, backoff_factor=_BACKOFF_S,
            raise_on_status=False, raise_on_redirect=False,
        )  # fmt: skip
        timeout = urllib3.Timeout(connect=30, read=_TIMEOUT_S)
        self._pool = urllib3.PoolManager(maxsize=self._threads, block=True, retries=retries, timeout=timeout)
        self._errors = urllib3.exceptions.HTTPError
        self._gap_s, self._next_s, self._lock = 1 / (config.requests_per_second or math.inf), 0.0, threading.Lock()
        self._lost = False  # whether a connection was, so that another model may have come
        with self._understood():
            models = {str(model["id"]): model for model in self._ask("/v1/models")["data"]}
            if name not in models and (name is not None or len(models) != 1):
                raise ConfigError(f"teacher: {name} is no model of {self.url}; allowed: {', '.join(models)}")
            self.name = name or next(iter(models))
            owner = str(models[self.name].get("owned_by")).replace("llamacpp", "llama.cpp")
            self.engine = owner if self.engine == "auto" else self.engine
            self.vocab_size = int((models[self.name].get("meta") or {}).get("n_vocab", 0))  # llama.cpp alone says it
            if self.engine == "llama.cpp":  # more requests than slots would drive each other's prefixes out
                self._threads = min(self._threads, int(self._ask("/props")["total_slots"]))
        if self.engine not in ENGINES:
            allowed = f"allowed: {', '.join(ENGINES)}, which give token ids (--teacher-engine, if it is one of them)"
            raise CacheError(f"teacher_url: {self.url} says that it is {self.engine}; {allowed}")

    def identify(self, tokenizer: Any, vocab_size: int, noted: Fingerprint | None) -> tuple[str, str]:
        """Return the fingerprint's `teacher_sha256` and `builder`: those `noted` by a build that has begun, if it fits.

        `vocab_size` is the model's by the folder of its tokenizer. CacheError: the server reads text as other ids than
        the tokenizer, its vocabulary is another, or another model answers.
        """
        self._probe = tokenizer.encode(PROBE, add_special_tokens=False)[:_PROBE_TOKENS]
        ask = {"model": self.name, "prompt": PROBE, "content": PROBE, "add_special_tokens": False, "add_special": False}
        with self._understood():
            theirs = self._ask("/tokenize", ask, optional=True).get("tokens", self._probe)[:_PROBE_TOKENS]
        if theirs != self._probe or self.vocab_size not in (0, vocab_size):
            both = f"are here {vocab_size} {self._probe[:6]}, there {self.vocab_size or 'unknown'} {theirs[:6]}"
            raise CacheError(f"tokenizer: is not that of {self.url}; vocabulary and a probe's ids {both}; give its own")
        self.vocab_size = vocab_size
        match = noted and noted.teacher == self.name and _NOTED.fullmatch(noted.builder)
        if noted and match:
            self._seen = [(int(at[0]), float(at[1])) for at in (text.split(":") for text in match[1].split())]
            self._check_model()
            return noted.teacher_sha256, noted.builder
        self._seen = [at[0] for at in self._score(self._probe)]
        builder = f"{self.engine} over HTTP; probe " + " ".join(f"{token}:{value:.3f}" for token, value in self._seen)
        return hashlib.sha256(f"{self.name}\n{builder}".encode()).hexdigest(), builder

    def _check_model(self) -> None:
        pairs = zip(self._score(self._probe), self._seen, strict=False)
        gap = np.mean([abs(dict(at).get(token, value + 1) - value) for at, (token, value) in pairs])
        if not gap <= _PROBE_NATS:
            far = f"log-probabilities of a probe are {gap:.2f} nats away; serve the first one, or choose another --out"
            raise CacheError(f"teacher: another model answers at {self.url} under the name {self.name}: {far}")

    def arrays(self, inputs: Mapping[str, np.ndarray], held: Contents) -> dict[str, np.ndarray]:
        """Return a batch's arrays as `codec.encode_rows` takes them; where nothing counts, the teacher is uniform.

        `inputs` are `input_ids`, `loss_mask` and `doc_starts` [B, L]. CacheError: the server fails for good, gives
        what was not asked for, or is another one since a connection was lost.
        """
        (rows, length), k = inputs["input_ids"].shape, held.top_k
        ids_BLK = np.broadcast_to(np.arange(k, dtype=np.int32), (rows, length - 1, k)).copy()
        log_p_BLK = np.full(ids_BLK.shape, -math.log(held.vocab_size))
        documents = []  # each up to its last target: row, first position, ids, which positions count
        for row in range(rows):
            for first, end in itertools.pairwise([*np.flatnonzero(inputs["doc_starts"][row]), length]):
                if len(targets := np.flatnonzero(inputs["loss_mask"][row, first + 1 : end])):
                    last = first + 2 + targets[-1]
                    wanted = (inputs["loss_mask"][row, first + 1 : last] > 0).tolist()
                    documents.append((row, first, inputs["input_ids"][row, first:last].tolist(), wanted))
        pool = ThreadPoolExecutor(self._threads, "teacher")
        try:
            scored = pool.map(lambda document: self._score(*document[2:]), documents)
            for (row, first, *_), found in zip(documents, scored, strict=True):
                for position, pairs in enumerate(found, first):
                    if pairs:
                        ids_BLK[row, position], log_p_BLK[row, position] = zip(*pairs, strict=True)
        finally:
            pool.shutdown(cancel_futures=True)
        if self._lost:
            self._lost = False
            self._check_model()
            print(f"note: {self.url} was away or failed, and the same model has answered again", file=sys.stderr)
        largest_BL1, tail_BL = log_p_BLK[..., :1], 1 - np.exp(log_p_BLK).sum(-1)
        tail_BL[(tail_BL < _NOISE) | (k == held.vocab_size)] = 0
        log_tail_BL = np.log(tail_BL, out=np.full_like(tail_BL, -np.inf), where=tail_BL > 0)
        floats = {"head_logits": log_p_BLK - largest_BL1, "lse": -largest_BL1[..., 0], "log_tail": log_tail_BL}
        arrays = {"head_ids": ids_BLK, **{name: values.astype(np.float32) for name, values in floats.items()}}
        return arrays | ({"draw_ids": inputs["input_ids"][:, 1:, None]} if held.draws else {})

    def _score(self, ids: list[int], wanted: list[bool] | None = None) -> list[Pairs]:
        """Return K pairs, likeliest first, of each position before ids[1:], [] of those that are not `wanted`."""
        wanted = wanted or [True] * (len(ids) - 1)
        with self._understood():
            found = ENGINES[self.engine](self._ask, self.name, ids, wanted, self._top_k, self._probe[0])
            return [self._top(pairs) if counts else [] for pairs, counts in zip(found, wanted, strict=True)]

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        """Turn what an answer of another form leads to into a CacheError."""
        try:
            yield
        except QatLoraError:
            raise
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            what = f"answer as {self.engine} does, by token ids ({one_line(error, 99)}); give a newer one"
            raise CacheError(f"teacher_url: {self.url} does not {what}, or --teacher-engine") from None

    def _top(self, pairs: Pairs) -> Pairs:
        """Return the K likeliest of a position's entries; the text's own token may be one more."""
        ranked = sorted(pairs, key=lambda pair: -pair[1])[: self._top_k]
        ids, values = {token for token, _ in ranked}, [value for _, value in ranked]
        if len(ids) < self._top_k:
            asked = f"--top-k {self._top_k} were asked for; ask for fewer, or let it give more (vLLM: --max-logprobs)"
            raise CacheError(f"teacher_url: {self.url} gives {len(ids)} entries a position, {asked}")
        if not all(type(token) is int and 0 <= token < self.vocab_size for token in ids):
            allowed = f"allowed: 0 to {self.vocab_size - 1}: give the served model's tokenizer, or its --vocab-size"
            raise CacheError(f"vocab_size: {self.url} gives token ids from {min(ids)} to {max(ids)}; {allowed}")
        if not all(map(math.isfinite, values)) or sum(map(math.exp, values)) > 1 + _SLACK:
            raise CacheError(f"teacher_url: {self.url} gives numbers that are no log-probabilities: {values[:4]}")
        return ranked

    def _ask(self, path: str, body: dict[str, Any] | None = None, optional: bool = False) -> Any:
        """Return the JSON object that a path answers with, {} where it is `optional` and there is none."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        method, retries = ("POST", None) if body else ("GET", False)  # at the start: the address may be wrong
        with self._lock:
            begin_s = max(self._next_s, time.monotonic())
            self._next_s = begin_s + self._gap_s
        time.sleep(max(0.0, begin_s - time.monotonic()))
        try:
            answer = self._pool.request(method, self.url + path, json=body, headers=headers, retries=retries)
            self._lost |= bool(answer.retries) and any(failure.status != 429 for failure in answer.retries.history)
            if answer.status == 200 and isinstance(found := json.loads(answer.data), dict):
                return found
        except (self._errors, ValueError) as error:  # ValueError: no JSON, cut off where no length was said
            raise self._failed(path, str(error)) from None
        if optional and answer.status in (400, 404, 405, 422, 501):
            return {}
        raise self._failed(path, f"{answer.status}: {answer.data[:500].decode(errors='replace')}", answer.status)

    def _failed(self, path: str, reason: str, status: int = 0) -> CacheError:
        known = {400: f"--length must fit it; vLLM needs --max-logprobs {self._top_k}", 401: f"give its key in {KEY}"}
        advice = known.get(401 if status == 403 else status, "the same command goes on from what is complete")
        hidden = one_line(ValueError(reason.replace(self._key, "***") if self._key else reason), 300)
        return CacheError(f"teacher_url: {self.url}{path} failed ({hidden}); {advice}")

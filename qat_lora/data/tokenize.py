"""Tokenising a text of any size in bounded memory, with the ids that the whole text would have.

A tokenizer takes some 200 bytes of memory for every byte of text, so it gets windows of `WINDOW_CHARS` characters. To
cut at a fixed place, or at line ends, changes ids: tokens span them, and some tokenizers mark where a text begins. So
each window begins before the end of the one before it, and tokens pass from one to the other only where both have the
same tokens, words and characters on both sides, away from both edges:

* At the beginning of a word (the tokenizer's: it splits text into words from left to right and encodes each by itself)
  what follows depends on what follows alone. This holds for every model: BPE, Unigram, WordPiece.
* Inside a word that is longer than the overlap only BPE can be cut. It always does the merge of lowest rank, leftmost
  first, so what happens on one side of a boundary that no merge crosses is what would happen there alone: a text a, b
  is a and then b whenever the last token of a and the first of b stay two, and the second window shows that they do.

A new window is tried at neighbouring characters until it falls into step, the windows then grow, and a text where no
such place is found is refused, never cut on a guess. The ids are those of the whole text for tokenizers that decide
where a word ends by at most `MARGIN_CHARS` characters behind it, runs of white space aside (a window never ends in
one), and whose normaliser reorders no more than combining marks (no cut is made before one). The usual ones are tested;
GPT-4o's looks further ahead in a run of thousands of capitals.
"""

import itertools
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from tokenizers import models

from qat_lora.errors import TextError
from qat_lora.runtime.host.machine import give_back

WINDOW_CHARS = 1 << 18  # tokenised at once, which bounds memory (`benchmarks/text_memory.py` measures it)
LARGEST = 8  # times WINDOW_CHARS, where no place to cut is found in less
OVERLAP_CHARS = 4096
MARGIN_CHARS = 256
AGREEING = 4  # tokens on each side of a cut that must be the same
STARTS = 128  # places tried for a window's beginning; runs have tokens of at most so many letters


class Piece(NamedTuple):
    """Tokens of a text, in order."""

    ids: np.ndarray  # int32 [N]
    spans: np.ndarray  # int64 [N, 2]: first character in the text, the one behind the last; [0, 2] if not asked for


class _Cut(NamedTuple):
    start: int  # the character of this window at which the next begins
    here: int  # tokens of this window before the cut
    there: int  # tokens of the next before it
    known: list[int]  # their ids, which longer text must not change


def encode_pieces(tokenizer: Any, parts: Iterable[str], name: str, *, spans: bool = False) -> Iterator[Piece]:
    """Yield the tokens of a text given in `parts` (see `slices`), without special ones; TextError: it cannot be cut."""
    source = iter(parts)
    window, more, size = "", True, WINDOW_CHARS
    at, done, known = 0, 0, list[int]()  # characters before the window; its tokens given out already; its first ids
    while True:
        # A run of white space must not go on behind a window: words are decided there.
        while more and (len(window) <= size or window[-1].isspace() and len(window) < 2 * LARGEST * WINDOW_CHARS):
            part = next(source, None)
            more = part is not None
            window += part or ""
        encoded = _encode(tokenizer, window, spans)
        ids = encoded["input_ids"]
        cut = _find_cut(tokenizer, window, encoded, done) if more else None
        if ids[: len(known)] != known or (more and cut is None and size >= LARGEST * WINDOW_CHARS):
            place = f"around character {at + len(window)} this tokenizer cuts words or runs of white space longer than"
            raise TextError(f"{name}: cannot be tokenised in pieces: {place} {size} characters; divide the text there")
        if more and cut is None:
            size *= 2
            continue
        end = cut.here if cut else len(ids)
        found = encoded["offset_mapping"][done:end] if spans else []
        yield Piece(np.array(ids[done:end], np.int32), np.array(found, np.int64).reshape(-1, 2) + at)
        if cut is None:
            return
        del encoded, ids, found
        give_back()
        window, at, done, known, size = window[cut.start :], at + cut.start, cut.there, cut.known, WINDOW_CHARS


def slices(text: str) -> Iterator[str]:
    """Yield a text in parts of `WINDOW_CHARS` characters."""
    return (text[i : i + WINDOW_CHARS] for i in range(0, len(text), WINDOW_CHARS))


def _encode(tokenizer: Any, text: str, spans: bool = False) -> Any:
    # verbose=False: texts are longer than a model's rows on purpose, so the length warning would be noise
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=spans, verbose=False)


def _find_cut(tokenizer: Any, window: str, encoded: Any, done: int) -> _Cut | None:
    """Return where the next window begins, behind the `done` tokens given out already; None where no place is found."""
    encoding, ids = encoded.encodings[0], encoded["input_ids"]
    if len(ids) != len(encoding) or window[-1].isspace():
        return None
    margin = max([MARGIN_CHARS, *map(len, tokenizer.get_added_vocab())])
    last = len(window[: len(window) - margin].rstrip())  # text that is not white space follows, and the margin
    model = tokenizer.backend_tokenizer.model
    # a mark on a word's first or last piece makes the two sides of a boundary other words than they are alone
    within = isinstance(model, models.BPE) and not (model.continuing_subword_prefix or model.end_of_word_suffix)
    for overlap, starts in ((OVERLAP_CHARS, STARTS if within else 1), (len(window) // 2, 1)):
        first = next((t for c in range(len(window) - overlap, last) if (t := encoding.char_to_token(c)) is not None), 0)
        here = _marks(encoding, ids, max(first, done, 1))
        if not len(here):
            continue
        new_word = int(here[:64, _WORD].argmax())  # 0 where there is none
        begin = int(here[new_word, _BEGIN])
        for start in range(begin, min(begin + starts, last)):
            probe = _encode(tokenizer, window[start:])
            if len(probe["input_ids"]) != len(probe.encodings[0]):
                return None
            there = _marks(probe.encodings[0], probe["input_ids"], 1)
            there[:, _BEGIN : _END + 1] += start
            i, j = _meeting(here, there, window, start + margin, last, within)
            if i:
                return _Cut(start, i + max(first, done, 1), j + 1, probe["input_ids"][: j + 1])
    return None


_ID, _BEGIN, _END, _WORD = range(4)


def _marks(encoding: Any, ids: list[int], first: int) -> np.ndarray:
    """Return for each token from number `first` on: its id, its characters, whether it begins a word; int64 [N, 4]."""
    words = [encoding.token_to_word(token) for token in range(first - 1, len(ids))]
    marks = [(ids[token], *encoding.token_to_chars(token)) for token in range(first, len(ids))]
    begins = [word != before for before, word in itertools.pairwise(words)]
    return np.column_stack([np.array(marks, np.int64).reshape(-1, 3), np.array(begins, np.int64)])


def _meeting(here: np.ndarray, there: np.ndarray, window: str, low: int, high: int, within: bool) -> tuple[int, int]:
    """Return a token of each of two encodings of the same text, the first behind a cut; (0, 0) where there is none.

    `there` are the marks of the text from a later character on; the first character behind the cut is one of `low` to
    `high` - 1; `within` allows to cut a word that fills the overlap.
    """
    near, near_there = ((marks[:, _BEGIN] >= low) & (marks[:, _BEGIN] < high) for marks in (here, there))
    words = bool(here[near, _WORD].any() or there[near_there, _WORD].any())
    if not words and not within:
        return 0, 0
    inner = range(AGREEING, len(there) - AGREEING)
    # No token that begins amid the bytes of a character: it would overlap the one before it.
    starts_at = {int(there[j, _BEGIN]): j for j in inner if there[j, _BEGIN] >= there[j - 1, _END]}
    middle, fits = (low + high) // 2, near & (here[:, _WORD] == words)
    for i in sorted(np.flatnonzero(fits).tolist(), key=lambda i: abs(int(here[i, _BEGIN]) - middle)):
        j = starts_at.get(int(here[i, _BEGIN]), 0)
        if (
            j
            and AGREEING <= i < len(here) - AGREEING
            and here[i, _BEGIN] >= here[i - 1, _END]
            and np.array_equal(here[i - AGREEING : i + AGREEING], there[j - AGREEING : j + AGREEING])
            and _begins_anew(window[here[i, _BEGIN]])
        ):
            return i, j
    return 0, 0


def _begins_anew(character: str) -> bool:
    """Whether no normal form joins a character to the one before it or sorts it before that."""
    first = unicodedata.normalize("NFKD", character)[0]
    return unicodedata.category(first)[0] != "M" and not "\u1160" <= first <= "\u11ff"

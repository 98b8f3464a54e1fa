"""Documents to rows of exactly L tokens, resumable at every row without a replay, and such rows as training data.

Documents are concatenated and cut every L tokens. Padding each to L wastes most of a batch on short texts, truncating
loses the ends of long ones, and best-fit packing needs a buffer of documents, which would have to be saved to resume.
Here the whole state is the cursor {"document": index, "token": offset} of the next row's first token: that one document
is encoded again up to the offset. Documents arrive in pieces (`tokenize.py`), so memory depends on no size or number.

A row knows where its documents begin (`doc_starts`), because attention and positions restart there. A document that
continues in the next row starts anew there, behind the tokenizer's begin tokens (`framing.py`) if it began with them:
they take places of the row and no loss, and the token behind them counts like any other. Without begin tokens nothing
predicts a document's first token in a row: its `loss_mask` is 0.

Training without a teacher holds all rows (`TextDataset`): the order is a permutation of them, and a stream could not be
resumed at an arbitrary step. That is nine bytes a token; longer texts should become a KD cache, read on demand.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from qat_lora.data.framing import text_frame
from qat_lora.data.layouts import encode_chat
from qat_lora.data.shuffle import Indices, ShuffledRows
from qat_lora.data.sources import Document
from qat_lora.data.tokenize import encode_pieces
from qat_lora.errors import ConfigError, TextError
from qat_lora.types import Batch

Tokens = tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]  # ids, and a mask: 1 on those that are targets
_END: Tokens = ((), ())
OpenDocuments = Callable[[int], Iterable[Document]]  # a fixed series from an index on, as by `open_documents`


class PackedRow(NamedTuple):
    """One row of L tokens."""

    input_ids: np.ndarray  # int32 [L]
    loss_mask: np.ndarray  # uint8 [L], 1 where token i counts as the target of position i - 1
    doc_starts: np.ndarray  # bool [L], True where a document begins, and always at 0
    cursor: dict[str, int]  # of the next row: index of its first document, offset of its first token in that
    weights: np.ndarray | None = None  # float32 [L], of the documents; None where all are 1


@dataclass(frozen=True)
class Encoder:
    """A function from documents to their tokens, in pieces, so that a long document need not be held."""

    encode: Callable[[Document], Iterable[Tokens]]
    prefix: tuple[int, ...] = ()  # the ids that the tokenizer puts before a text

    def __call__(self, document: Document) -> Iterable[Tokens]:
        """Return the pieces of a document."""
        return self.encode(document)

    def repeated(self, ids: Sequence[int] | np.ndarray) -> tuple[int, ...]:
        """Return what stands before every further piece of a document that begins with `ids`: the prefix, or ()."""
        return self.prefix if tuple(ids[: len(self.prefix)]) == self.prefix else ()


def make_encoder(tokenizer: Any) -> Encoder:
    """Return the encoder of a tokenizer.

    A text gets the begin and end tokens of `text_frame`; its begin tokens are no targets. A chat is what its template
    writes, a model's text what it wrote, a blank document no tokens. Special tokens written out in a text become those
    tokens. TextError: what the tokenizer puts around a text cannot be told.
    """
    before, after = text_frame(tokenizer)
    framed = [(before, np.zeros(len(before), np.uint8))]

    def encode(document: Document) -> Iterator[Tokens]:
        if document.is_blank:
            return iter(())
        if document.tokens is not None:
            ids, prompt = document.tokens
            if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != document.text:
                raise TextError(f"{document.name}: its token ids are another tokenizer's; write it with this model's")
            return iter([(ids, [0] * prompt + [1] * (len(ids) - prompt))])
        if document.messages is not None:
            return encode_chat(tokenizer, document.messages, document.name)
        pieces = (piece.ids for piece in encode_pieces(tokenizer, document.parts(), document.name))
        counted = ((ids, np.ones(len(ids), np.uint8)) for ids in itertools.chain(pieces, [after]))
        return itertools.chain(framed, counted)

    return Encoder(encode, tuple(before.tolist()))


def pack_rows(
    documents: Iterable[Document], encode: Encoder, length: int, cursor: Mapping[str, int] | None = None
) -> Iterator[PackedRow]:
    """Cut documents into rows of `length` tokens; the rest of the last is a document of padding that counts nothing.

    With the `cursor` of the row after which to go on, `documents` begin at its document, and the rows are those that an
    uninterrupted run would yield. A text that a model wrote begins a new row where it does not fit, so that its
    prompt stays with it. The cursor counts a document's own tokens, not the begin tokens that later rows repeat.
    ConfigError: a length that leaves no target; TextError: the text at the cursor is not what it was.
    """
    fewest = max(2, len(encode.prefix) + 1)
    if length < fewest:
        raise ConfigError(f"length: {length} tokens a row leave nothing to predict; allowed: {fewest} or more")
    first, skip = (cursor["document"], cursor["token"]) if cursor else (0, 0)
    row, filled = empty_row(length), 0
    index = first - 1
    for index, document in enumerate(documents, first):
        if filled and document.tokens and filled + len(document.tokens[0]) > length:
            row.doc_starts[filled] = True
            yield row._replace(cursor={"document": index, "token": 0})
            row, filled = empty_row(length), 0
        passed = 0  # tokens of the document in earlier pieces
        repeated: tuple[int, ...] = ()  # with which a row begins that goes on with the document
        pieces = (tokens for tokens in encode(document) if len(tokens[0]))
        for (ids, mask), following in itertools.pairwise(itertools.chain(pieces, [_END])):
            if not passed:
                repeated = encode.repeated(ids)
            done = min(max(skip - passed, 0), len(ids))
            while done < len(ids):
                at = passed + done  # of the document
                known = () if filled else repeated[:at]
                start = filled + len(known)
                take = min(length - start, len(ids) - done)
                end = start + take
                row.input_ids[filled:start] = known
                row.input_ids[start:end] = ids[done : done + take]
                row.loss_mask[start:end] = mask[done : done + take]
                row = weighed(row, slice(filled, end), document.weight)
                if not filled or not at:
                    row.loss_mask[filled] = 0
                    row.doc_starts[filled] = True
                filled = end
                done += take
                if filled == length:
                    ended = following is _END and done == len(ids)
                    document_at, token_at = (index + 1, 0) if ended else (index, passed + done)
                    yield row._replace(cursor={"document": document_at, "token": token_at})
                    row, filled = empty_row(length), 0
            passed += len(ids)
        if skip and skip >= passed:
            raise _moved(first, skip, f"that document ({document.name}) has {passed} tokens")
        skip = 0
    if skip:
        raise _moved(first, skip, "the text ends before that document")
    if filled:
        row.doc_starts[filled] = True
        yield row._replace(cursor={"document": index + 1, "token": 0})


def draw_rows(packed: Iterable[PackedRow], count: int, read: int, seed: int) -> tuple[list[PackedRow], int]:
    """Return `count` rows drawn from the first `read` that have a target, all where there are fewer; and those read.

    Every row is as likely (algorithm R of Vitter 1985), so the beginning of a text weighs no more than its end, only
    `count` rows are held, and a stream without an end is read for a bounded time. A pure function of text and seed.
    """
    draw, kept, seen, taken = random.Random(seed), list[PackedRow](), 0, 0
    for row in itertools.islice(packed, read):
        taken += 1
        if row.loss_mask[1:].any():
            seen += 1
            place = len(kept) if len(kept) < count else draw.randrange(seen)
            kept[place : place + 1] = [row] if place < count else kept[place : place + 1]
    return kept, taken


def weighed(row: PackedRow, place: slice, weight: float) -> PackedRow:
    """Return a row with the weight of a document at its tokens."""
    if weight == 1 and row.weights is None:
        return row
    row = row if row.weights is not None else row._replace(weights=np.ones(len(row.input_ids), np.float32))
    row.weights[place] = weight  # type: ignore[index]
    return row


def empty_row(length: int) -> PackedRow:
    """Return a row of `length` tokens in which nothing is written."""
    return PackedRow(np.zeros(length, np.int32), np.zeros(length, np.uint8), np.zeros(length, np.bool_), {})


def _moved(document: int, token: int, found: str) -> TextError:
    remedy = "the text has changed since then, so restore it or start again"
    return TextError(f"text: cannot go on at token {token} of document {document}: {found}; {remedy}")


def take_eval(open_at: OpenDocuments, encode: Encoder, length: int, eval_rows: int) -> tuple[list[PackedRow], int]:
    """Keep the first documents that fill `eval_rows` rows apart; return the rows and the first document for training.

    The rest of the last of them is used by neither side. TextError: fewer rows, or nothing left for training.
    """
    if eval_rows <= 0:
        return [], 0
    rows = list(itertools.islice(pack_rows(open_at(0), encode, length), eval_rows))
    rest = rows[-1].cursor["document"] + bool(rows[-1].cursor["token"]) if rows else 0
    if len(rows) < eval_rows or not any(not document.is_blank for document in open_at(rest)):
        fix = f"give --eval-rows {len(rows) // 5} or fewer, or more text"
        found = f"the text has only {len(rows)} with nothing left to train on; {fix}"
        raise TextError(f"eval_rows: {eval_rows} rows of {length} tokens were to be kept apart, and {found}")
    return rows, rest


def share(open_at: OpenDocuments, first: int = 0, part: int = 0, parts: int = 1) -> OpenDocuments:
    """Return the series, numbered anew from 0, of the documents j ≥ `first` with j % `parts` = `part`: a builder's."""
    begin = first + (part - first) % parts
    return lambda start: itertools.islice(open_at(begin + start * parts), 0, None, parts)


def every_token(encode: Encoder) -> Encoder:
    """Return an encoder that counts every token as a target, those of prompts too: plain next-token training."""

    def encode_all(document: Document) -> Iterable[Tokens]:
        return ((ids, np.ones(len(ids), np.uint8)) for ids, _ in encode(document))

    return replace(encode, encode=encode_all)


def answers_only(encode: Encoder) -> Encoder:
    """Return an encoder for fine-tuning on chats: only what the assistant says counts, plain text is a TextError."""

    def encode_answers(document: Document) -> Iterable[Tokens]:
        if document.messages is None and not document.is_blank:
            remedy = "give a chat layout with --format (messages, alpaca, sharegpt), or --objective ce"
            raise TextError(f"objective: sft learns from chats, and {document.name} is plain text; {remedy}")
        return encode(document)

    return replace(encode, encode=encode_answers)


class TextDataset(ShuffledRows):
    """Packed rows in memory, at most `rows`; TextError if there is none with a token that counts."""

    def __init__(self, packed: Iterable[PackedRow], rows: int | None = None) -> None:
        taken = list(itertools.islice(packed, rows))
        if not any(row.loss_mask.any() for row in taken):
            raise TextError("dataset: the text has no token to learn from; give more text")
        self._ids_NL = np.stack([row.input_ids for row in taken])
        self._documents_NL = np.stack([np.cumsum(row.doc_starts, dtype=np.int32) - 1 for row in taken])
        self._mask_NL = np.stack([row.loss_mask[1:] > 0 for row in taken])
        weights = [np.ones(len(row.input_ids), np.float32) if row.weights is None else row.weights for row in taken]
        self._weights_NL = np.stack(weights)[:, 1:] if any(row.weights is not None for row in taken) else None

    def __len__(self) -> int:
        return len(self._ids_NL)

    def rows(self, indices: Indices) -> Batch:
        """Return rows as numpy arrays (see `types.Batch`), in the order asked; -1 gives a fully masked row."""
        at = np.maximum(np.asarray(indices, np.int64), 0)
        there = np.asarray(indices)[:, None] >= 0
        ids_BL, documents_BL, mask_BL = self._ids_NL[at], self._documents_NL[at], self._mask_NL[at] & there
        batch = {"input_ids": ids_BL, "document_ids": documents_BL, "target_mask": mask_BL}
        return batch if self._weights_NL is None else batch | {"weights": self._weights_NL[at]}


# What counts as a target under each objective that needs no teacher.
ENCODERS: dict[str, Callable[[Encoder], Encoder]] = {"ce": every_token, "sft": answers_only}

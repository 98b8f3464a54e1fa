"""How a held-out text becomes rows to score: a perplexity means nothing without the name of its protocol.

There are three, since published numbers follow three conventions that differ by several percent on one model and text:

* `packed` (`data/packing.py`): documents one behind the other, cut every L tokens, attention restarting with each
  document, as students are trained. Tokens at the start of a row have little context, so it gives the worst scores.
* `sliding`: windows of L tokens over each document, moved on by a stride. Only tokens that no earlier window scored
  count, so each is scored once, with at least L - stride tokens before it where the document has them. This is the
  perplexity of transformers' guide: nearest to what a model can do, at L / stride times the work.
* `blocks2048`: the convention of the quantisation papers (GPTQ and after): all documents joined by a blank line and
  encoded once with the tokenizer's defaults, cut into blocks of 2,048 tokens that ignore documents, the incomplete last
  block dropped. Only numbers of this protocol compare with those tables, and only on their text.

Begin tokens that the tokenizer adds by itself (`data/framing.py`) stand before every row, window and block, within its
length: models that expect them predict next to nothing without. The guide and the papers have them once a text, so
these two are theirs to the letter only where a tokenizer adds none.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from qat_lora.data.framing import added_ids
from qat_lora.data.packing import Encoder, PackedRow, empty_row
from qat_lora.data.sources import Document
from qat_lora.data.tokenize import encode_pieces
from qat_lora.errors import ConfigError, TextError

Protocol = Literal["packed", "sliding", "blocks2048"]
BLOCK = 2048  # tokens of a row of `blocks2048`


def sliding_rows(documents: Iterable[Document], encode: Encoder, length: int, stride: int) -> Iterator[PackedRow]:
    """Yield a row a window, which counts what no earlier one held; ConfigError: a stride without context, or below 1.

    A window holds the begin tokens and L less their number of the text; the next one is `stride` tokens of it further.
    """
    most = length - max(1, len(encode.prefix))
    if not 1 <= stride <= most:
        raise ConfigError(f"stride: {stride} does not fit; allowed: 1 to {most}, below the tokens of a row")
    for document in documents:
        ids, mask = (np.zeros(0, kind) for kind in (np.int32, np.uint8))  # from the next window's first token on
        begin: tuple[int, ...] | None = None  # tokens before every window
        scored = 0  # tokens of these that an earlier window held
        for more_ids, more_mask in encode(document):
            if begin is None:
                begin = encode.repeated(more_ids)
                more_ids, more_mask = more_ids[len(begin) :], more_mask[len(begin) :]
            ids, mask = np.append(ids, more_ids), np.append(mask, more_mask)
            room, at = length - len(begin), 0
            while len(ids) - at >= room:
                yield _window(begin, ids[at : at + room], mask[at : at + room], scored, length)
                at, scored = at + stride, room - stride
            ids, mask = ids[at:], mask[at:]
        if len(ids) > scored:
            yield _window(begin or (), ids, mask, scored, length)


def _window(begin: tuple[int, ...], ids: np.ndarray, mask: np.ndarray, scored: int, length: int) -> PackedRow:
    row = _row(begin, ids, length)
    row.loss_mask[len(begin) + scored : len(begin) + len(ids)] = mask[scored:]
    row.loss_mask[0] = 0  # nothing comes before it
    return row


def block_rows(documents: Iterable[Document], tokenizer: Any, length: int = BLOCK) -> Iterator[PackedRow]:
    """Yield the full blocks of the joined text, each behind the begin tokens that the tokenizer adds.

    They count all but those and a first token; TextError: chats, or no full block.
    """
    before, after = added_ids(tokenizer)
    room = length - len(before)
    pieces = (piece.ids for piece in encode_pieces(tokenizer, _joined(documents), "the joined text"))
    ids, made = np.zeros(0, np.int32), 0
    for piece in itertools.chain(pieces, [after]):
        ids = np.append(ids, piece)
        for start in range(0, len(ids) - room + 1, room):
            row = _row(before, ids[start : start + room], length)
            row.loss_mask[max(1, len(before)) :] = 1
            yield row
            made += 1
        ids = ids[len(ids) // room * room :]
    if not made:
        found = f"this has {len(before) + len(ids)}"
        raise TextError(f"protocol: blocks of {length} tokens need that much text, {found}; use packed")


def _joined(documents: Iterable[Document]) -> Iterator[str]:
    for i, document in enumerate(documents):
        if document.text is None:
            raise TextError(f"protocol: blocks2048 joins plain texts, and {document.name} is a chat; use packed")
        yield "\n\n" if i else ""
        yield from document.parts()


def _row(begin: Sequence[int] | np.ndarray, ids: np.ndarray, length: int) -> PackedRow:
    """Return a row of one document behind begin tokens that counts nothing; the rest is a document of padding."""
    row, end = empty_row(length), len(begin) + len(ids)
    row.input_ids[: len(begin)] = begin
    row.input_ids[len(begin) : end] = ids
    row.doc_starts[0] = True
    if end < length:
        row.doc_starts[end] = True
    return row

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
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np

from qat_lora.data.packing import Encode, PackedRow, empty_row
from qat_lora.data.sources import Document
from qat_lora.data.tokenize import encode_pieces
from qat_lora.errors import ConfigError, TextError

Protocol = Literal["packed", "sliding", "blocks2048"]
BLOCK = 2048  # tokens of a row of `blocks2048`


def sliding_rows(documents: Iterable[Document], encode: Encode, length: int, stride: int) -> Iterator[PackedRow]:
    """Yield a row a window, which counts what no earlier one held; ConfigError: a stride not in 1 to L - 1."""
    if not 1 <= stride < length:
        raise ConfigError(f"stride: {stride} does not fit; allowed: 1 to {length - 1}, below the tokens of a row")
    for document in documents:
        ids, mask = (np.zeros(0, kind) for kind in (np.int32, np.uint8))  # from the next window's first token on
        scored = 0  # tokens of these that an earlier window held
        for more_ids, more_mask in encode(document):
            ids, mask = np.append(ids, more_ids), np.append(mask, more_mask)
            at = 0
            while len(ids) - at >= length:
                yield _window(ids[at : at + length], mask[at : at + length], scored, length)
                at, scored = at + stride, length - stride
            ids, mask = ids[at:], mask[at:]
        if len(ids) > scored:
            yield _window(ids, mask, scored, length)


def _window(ids: np.ndarray, mask: np.ndarray, scored: int, length: int) -> PackedRow:
    row = _row(ids, length)
    row.loss_mask[scored : len(ids)] = mask[scored:]
    row.loss_mask[0] = 0  # nothing comes before it
    return row


def block_rows(documents: Iterable[Document], tokenizer: Any, length: int = BLOCK) -> Iterator[PackedRow]:
    """Yield the full blocks of the joined text, which count all but their first token; TextError for chats or none."""
    before, after = _frame(tokenizer)
    pieces = (piece.ids for piece in encode_pieces(tokenizer, _joined(documents), "the joined text"))
    ids, made = np.zeros(0, np.int32), 0
    for piece in itertools.chain([before], pieces, [after]):
        ids = np.append(ids, piece)
        for start in range(0, len(ids) - length + 1, length):
            row = _row(ids[start : start + length], length)
            row.loss_mask[1:] = 1
            yield row
            made += 1
        ids = ids[len(ids) // length * length :]
    if not made:
        raise TextError(f"protocol: blocks of {length} tokens need that much text, this has {len(ids)}; use packed")


def _joined(documents: Iterable[Document]) -> Iterator[str]:
    for i, document in enumerate(documents):
        if document.text is None:
            raise TextError(f"protocol: blocks2048 joins plain texts, and {document.name} is a chat; use packed")
        yield "\n\n" if i else ""
        yield from document.parts()


def _frame(tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids that the tokenizer adds before and behind a text by default, int32."""
    bare, framed = (tokenizer("a", add_special_tokens=own, verbose=False)["input_ids"] for own in (False, True))
    at = next(i for i in range(len(framed)) if framed[i : i + len(bare)] == bare)
    return np.array(framed[:at], np.int32), np.array(framed[at + len(bare) :], np.int32)


def _row(ids: np.ndarray, length: int) -> PackedRow:
    """Return a row of one document that counts nothing; the rest of the row is a document of padding."""
    row = empty_row(length)
    row.input_ids[: len(ids)] = ids
    row.doc_starts[0] = True
    if len(ids) < length:
        row.doc_starts[len(ids)] = True
    return row

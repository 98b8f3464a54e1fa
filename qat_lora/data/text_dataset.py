"""A text as training data without a teacher: packed rows in memory, in the same order as a KD cache.

Rows are packed once, before the first step, because the order is a permutation of all rows: a stream could only be
shuffled through a buffer and could not be resumed at an arbitrary step. It costs nine bytes a token (0.9 GB for 100
million tokens); longer texts should become a KD cache, whose rows are read on demand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from qat_lora.data.packing import Encode, PackedRow, Tokens
from qat_lora.data.shuffle import ShuffledRows
from qat_lora.data.sources import Document
from qat_lora.errors import TextError
from qat_lora.types import Batch


def every_token(encode: Encode) -> Encode:
    """Return an encoder that counts every token as a target, those of prompts too: plain next-token training."""
    return lambda document: ((ids, np.ones(len(ids), np.uint8)) for ids, _ in encode(document))


def answers_only(encode: Encode) -> Encode:
    """Return an encoder for fine-tuning on chats: only what the assistant says counts, plain text is a TextError."""

    def encode_answers(document: Document) -> Iterable[Tokens]:
        if document.messages is None and not document.is_blank:
            raise TextError(
                f"objective: sft learns from chats, and {document.name} is plain text; give a chat layout with "
                "--format (messages, alpaca, sharegpt), or --objective ce"
            )
        return encode(document)

    return encode_answers


class TextDataset(ShuffledRows):
    """Rows of a text (`packing.pack_rows`) in memory, at most `rows`.

    Raises:
        TextError: no row, or none with a token that counts.
    """

    def __init__(self, packed: Iterable[PackedRow], rows: int | None = None) -> None:
        taken = list(itertools.islice(packed, rows))
        if not any(row.loss_mask.any() for row in taken):
            raise TextError("dataset: the text has no token to learn from; give more text")
        self._ids_NL = np.stack([row.input_ids for row in taken])
        self._documents_NL = np.stack([np.cumsum(row.doc_starts, dtype=np.int32) - 1 for row in taken])
        self._mask_NL = np.stack([row.loss_mask[1:] > 0 for row in taken])

    def __len__(self) -> int:
        return len(self._ids_NL)

    def rows(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return rows as numpy arrays (see `types.Batch`), in the order asked; -1 gives a fully masked row."""
        at = np.maximum(np.asarray(indices, np.int64), 0)
        there = np.asarray(indices)[:, None] >= 0
        return {
            "input_ids": self._ids_NL[at],
            "document_ids": self._documents_NL[at],
            "target_mask": self._mask_NL[at] & there,
        }


ENCODERS: dict[str, Callable[[Encode], Encode]] = {"ce": every_token, "sft": answers_only}
"""What counts as a target under each objective that needs no teacher."""

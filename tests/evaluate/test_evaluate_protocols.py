"""Protocols of evaluation text: every token once, with the context that the protocol promises."""

import numpy as np
import pytest

from qat_lora.data.packing import Encoder
from qat_lora.data.sources import Document
from qat_lora.errors import ConfigError, TextError
from qat_lora.evaluate.protocols import block_rows, sliding_rows


def document(length, name="d"):
    return Document(" ".join(map(str, range(1, length + 1))), None, name)


@Encoder
def encode(document):
    ids = [] if document.is_blank else [int(word) for word in document.text.split()]
    return [(ids[at : at + 5], [1] * len(ids[at : at + 5])) for at in range(0, len(ids), 5)]  # in pieces


@pytest.mark.parametrize(("length", "stride"), [(8, 4), (8, 7), (8, 1), (5, 2), (2, 1)])
def test_sliding_scores_every_token_once_with_its_context(length, stride):
    sizes = [1, 2, 7, 8, 9, 30, 31]
    rows = list(sliding_rows([document(size) for size in sizes], encode, length, stride))
    scored = [(int(row.input_ids[at]), at) for row in rows for at in row.loss_mask.nonzero()[0]]
    assert sorted(token for token, _ in scored) == sorted(token for size in sizes for token in range(2, size + 1))
    for row in rows:
        assert row.doc_starts[0] and row.loss_mask[0] == 0
        real = row.input_ids[row.input_ids > 0]
        assert (np.diff(real) == 1).all() and (row.input_ids[: len(real)] == real).all()
        assert len(real) == length or row.doc_starts[len(real)]
        for at in row.loss_mask.nonzero()[0]:
            token = int(row.input_ids[at])
            assert at >= min(token - 1, length - stride), "less context than promised"


def test_sliding_keeps_what_the_encoder_masks():
    rows = list(sliding_rows([document(6)], Encoder(lambda d: [([1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 0])]), 4, 2))
    assert [int(t) for row in rows for t in row.input_ids[row.loss_mask > 0]] == [4, 5]


@pytest.mark.parametrize("stride", [0, 8, 9])
def test_a_stride_that_leaves_no_context_is_refused(stride):
    with pytest.raises(ConfigError, match="stride.*1 to 7"):
        next(sliding_rows([document(3)], encode, 8, stride))


class Words:
    """A tokenizer that puts ids before and behind a text."""

    def __init__(self, before=(), after=()):
        self.before, self.after = before, after

    def __call__(self, text, add_special_tokens, verbose, **_):
        ids = [ord(word) if word.isalpha() else int(word) for word in text.split()]
        return {"input_ids": [*self.before, *ids, *self.after] if add_special_tokens else ids}


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (Words(), [[1, 2, 3, 4], [5, 1, 2, 3], [4, 5, 6, 7]]),
        (Words(after=[99]), [[1, 2, 3, 4], [5, 1, 2, 3], [4, 5, 6, 7]]),
        (Words([0]), [[0, 1, 2, 3], [0, 4, 5, 1], [0, 2, 3, 4], [0, 5, 6, 7]]),
        (Words([0], [99]), [[0, 1, 2, 3], [0, 4, 5, 1], [0, 2, 3, 4], [0, 5, 6, 7]]),
        (Words([0, 50]), [[0, 50, 1, 2], [0, 50, 3, 4], [0, 50, 5, 1], [0, 50, 2, 3], [0, 50, 4, 5], [0, 50, 6, 7]]),
    ],
)
def test_blocks_ignore_documents_and_begin_as_the_tokenizer_begins_texts(tokenizer, expected):
    rows = list(block_rows([document(5), document(0), document(7)], tokenizer, length=4))
    assert [row.input_ids.tolist() for row in rows] == expected
    counted = [0, *[i >= len(tokenizer.before) for i in range(1, 4)]]
    assert all(row.loss_mask.tolist() == counted and row.doc_starts.tolist() == [1, 0, 0, 0] for row in rows)


@pytest.mark.parametrize("prefix", [(100,), (100, 101)])
@pytest.mark.parametrize(("length", "stride"), [(8, 4), (8, 6), (5, 1), (7, 3)])
def test_sliding_windows_begin_as_the_tokenizer_begins_texts(prefix, length, stride):
    def framed(document):
        yield list(prefix), [0] * len(prefix)
        yield from encode(document)

    sizes = [1, 2, 7, 8, 9, 30, 31]
    rows = list(sliding_rows([document(size) for size in sizes], Encoder(framed, prefix), length, stride))
    scored = [(int(row.input_ids[at]), at) for row in rows for at in row.loss_mask.nonzero()[0]]
    assert sorted(token for token, _ in scored) == sorted(token for size in sizes for token in range(1, size + 1))
    for row in rows:
        assert tuple(row.input_ids[: len(prefix)]) == prefix and row.doc_starts[0]
        assert not row.loss_mask[: len(prefix)].any()
        real = row.input_ids[len(prefix) :]
        real = real[real > 0]
        assert (np.diff(real) == 1).all()
        assert len(prefix) + len(real) == length or row.doc_starts[len(prefix) + len(real)]
        for at in row.loss_mask.nonzero()[0]:
            before = int(row.input_ids[at]) - 1 + len(prefix)
            assert at >= min(before, length - stride), "less context than promised"


def test_windows_of_a_document_without_begin_tokens_have_none():
    [first, second] = sliding_rows([document(6)], Encoder(encode.encode, (100,)), 4, 2)
    assert (first.input_ids.tolist(), second.input_ids.tolist()) == ([1, 2, 3, 4], [3, 4, 5, 6])


def test_a_stride_leaves_room_for_begin_tokens():
    with pytest.raises(ConfigError, match="stride.*1 to 6"):
        next(sliding_rows([document(3)], Encoder(encode.encode, (100, 101)), 8, 7))


def test_blocks_refuse_chats_and_too_little_text():
    chat = Document(None, [{"role": "user", "content": "1"}], "chat 3")
    with pytest.raises(TextError, match="chat 3"):
        next(block_rows([chat], Words()))
    with pytest.raises(TextError, match="2048.*has 3"):
        next(block_rows([document(3)], Words()))

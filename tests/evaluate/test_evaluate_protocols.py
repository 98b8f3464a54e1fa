"""Protocols of evaluation text: every token once, with the context that the protocol promises."""

import numpy as np
import pytest

from qat_lora.data.sources import Document
from qat_lora.errors import ConfigError, TextError
from qat_lora.evaluate.protocols import block_rows, sliding_rows


def document(length, name="d"):
    return Document(" ".join(map(str, range(1, length + 1))), None, name)


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
    rows = list(sliding_rows([document(6)], lambda d: [([1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 0])], 4, 2))
    assert [int(t) for row in rows for t in row.input_ids[row.loss_mask > 0]] == [4, 5]


@pytest.mark.parametrize("stride", [0, 8, 9])
def test_a_stride_that_leaves_no_context_is_refused(stride):
    with pytest.raises(ConfigError, match="stride.*1 to 7"):
        next(sliding_rows([document(3)], encode, 8, stride))


class Words:
    """A tokenizer that begins texts with 0, as many do by default."""

    def __call__(self, text, add_special_tokens, verbose, **_):
        ids = [ord(word) if word.isalpha() else int(word) for word in text.split()]
        return {"input_ids": [0, *ids] if add_special_tokens else ids}


def test_blocks_ignore_documents_and_leave_the_rest_out():
    rows = list(block_rows([document(5), document(0), document(7)], Words(), length=4))
    assert [row.input_ids.tolist() for row in rows] == [[0, 1, 2, 3], [4, 5, 1, 2], [3, 4, 5, 6]]
    assert all(row.loss_mask.tolist() == [0, 1, 1, 1] and row.doc_starts.tolist() == [1, 0, 0, 0] for row in rows)


def test_blocks_refuse_chats_and_too_little_text():
    chat = Document(None, [{"role": "user", "content": "1"}], "chat 3")
    with pytest.raises(TextError, match="chat 3"):
        next(block_rows([chat], Words()))
    with pytest.raises(TextError, match="2048.*has 4"):
        next(block_rows([document(3)], Words()))

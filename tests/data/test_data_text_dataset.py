"""Text as training data: the rows of the packer, once an epoch, in the order of a cache; what counts as a target."""

import itertools

import numpy as np
import pytest

from qat_lora.data.packing import Encoder, PackedRow, TextDataset, answers_only, every_token, pack_rows
from qat_lora.data.shuffle import global_batch, permuted, steps_per_epoch
from qat_lora.data.sources import Document
from qat_lora.errors import ConfigError, TextError

LENGTH = 7


def documents(count):
    return [Document(text="x" * (3 + 5 * i % 11), messages=None, name=f"d{i}") for i in range(count)]


@Encoder
def encode(document):
    ids = [ord(letter) % 50 + len(document.text) for letter in document.text]
    return [(ids, [1] * len(ids))]


def packed(count=9):
    return list(pack_rows(documents(count), encode, LENGTH))


def test_rows_are_those_of_the_packer():
    rows = packed()
    data = TextDataset(rows)
    batch = data.rows([3, -1, 0])
    for at, number in ((0, 3), (2, 0)):
        assert np.array_equal(batch["input_ids"][at], rows[number].input_ids)
        assert np.array_equal(batch["target_mask"][at], rows[number].loss_mask[1:] > 0)
        assert np.array_equal(batch["document_ids"][at], np.cumsum(rows[number].doc_starts) - 1)
    assert not batch["target_mask"][1].any() and batch["target_mask"].shape == (3, LENGTH - 1)
    assert len(TextDataset(rows, 4)) == 4


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_row_once_an_epoch_in_the_order_of_a_cache(replicas, accumulation):
    data, batch_rows = TextDataset(packed()), 2
    step_rows = batch_rows * accumulation * replicas
    steps = data.steps_per_epoch(step_rows)
    assert steps == steps_per_epoch(len(data), step_rows)
    parts = [list(data.batches(0, 2 * steps, batch_rows, accumulation, 5, r, replicas)) for r in range(replicas)]
    micros = list(itertools.chain(*zip(*parts, strict=True)))
    for step in range(2 * steps):
        wanted = data.rows(global_batch(len(data), step, step_rows, 5))
        found = micros[step * accumulation * replicas : (step + 1) * accumulation * replicas]
        for name, value in wanted.items():
            assert np.array_equal(np.concatenate([micro[name] for micro in found]), value)
    later = next(data.batches(1, 1, batch_rows, accumulation, 5, 0, replicas))
    assert np.array_equal(later["input_ids"], parts[0][accumulation]["input_ids"])
    assert sorted(permuted(np.arange(len(data)), len(data), 5, 1)) == list(range(len(data)))


def test_documents_weigh_what_they_say():
    given = [document._replace(weight=1.0 if i % 3 else 0.25 * i) for i, document in enumerate(documents(9))]
    rows = list(pack_rows(given, encode, LENGTH))
    letters = np.concatenate([np.full(len(document.text), document.weight) for document in given])
    flat = np.concatenate([np.ones(LENGTH) if row.weights is None else row.weights for row in rows])
    assert np.array_equal(flat[: len(letters)], letters) and rows[0].weights is not None
    batch = TextDataset(rows).rows([2, 0, -1])
    assert (
        np.array_equal(batch["weights"][:2], flat.reshape(-1, LENGTH)[[2, 0], 1:])
        and batch["weights"].dtype == np.float32
    )
    again = list(
        pack_rows(given[rows[1].cursor["document"] :], encode, LENGTH, rows[1].cursor)
    )  # goes on in the middle
    for ours, theirs in zip(rows[2:], again, strict=True):
        assert np.array_equal(ours.input_ids, theirs.input_ids) and ours.cursor == theirs.cursor
        assert (ours.weights is None) == (theirs.weights is None)
        assert ours.weights is None or np.array_equal(ours.weights, theirs.weights)
    assert "weights" not in TextDataset(packed()).rows([0]) and packed()[0].weights is None


def numbered(rows):
    """Return a text whose row i holds token i alone."""
    ones = np.ones(LENGTH, np.bool_)
    return TextDataset([PackedRow(np.full(LENGTH, i, np.int32), ones.astype(np.uint8), ones, {}) for i in range(rows)])


def rows_of_steps(data, steps, accumulation, replicas, **how):
    """Return the numbers of the rows that count, step by step; every micro-batch has two rows."""
    parts = [list(data.batches(0, steps, 2, accumulation, 5, r, replicas, **how)) for r in range(replicas)]
    micros = list(itertools.chain(*zip(*parts, strict=True)))
    assert all(micro["input_ids"].shape == (2, LENGTH) for micro in micros)
    per_step = accumulation * replicas
    found = []
    for step in range(steps):
        of_step = micros[step * per_step : (step + 1) * per_step]
        real = [micro["input_ids"][micro["target_mask"].any(1), 0] for micro in of_step]
        found.append(np.concatenate(real).tolist())
    return found


@pytest.mark.parametrize(("accumulation", "replicas"), [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("rows", [2, 5, 9, 13, 40])
def test_the_rows_of_a_step_that_is_held_out_are_in_no_other(rows, accumulation, replicas):
    data, steps, step_rows = numbered(rows), 11, 2 * accumulation * replicas
    usual = rows_of_steps(data, steps, accumulation, replicas)
    for held_out in range(steps):
        found = rows_of_steps(data, steps, accumulation, replicas, held_out=held_out)
        measured = found[held_out]
        assert len(measured) == min(step_rows, max(1, rows // 2)), "a full step, also where an epoch ends"
        for step in (step for step in range(steps) if step != held_out):
            assert found[step] == [number for number in usual[step] if number not in measured]


def test_a_single_row_is_measured_and_trained_on():
    assert rows_of_steps(numbered(1), 3, 1, 1, held_out=1) == [[0], [0], [0]]


def test_a_replica_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="^replica: 2 of 2"):
        next(TextDataset(packed()).batches(0, 1, 2, 1, 0, 2, 2))


def test_a_text_without_targets_is_refused():
    blank = PackedRow(np.zeros(4, np.int32), np.zeros(4, np.uint8), np.ones(4, np.bool_), {})
    for rows in ([], [blank]):
        with pytest.raises(TextError, match="^dataset: the text has no token to learn from"):
            TextDataset(rows)


def test_ce_counts_every_token_and_sft_the_answers_of_chats_only():
    @Encoder
    def masked(document):
        return [([1, 2, 3], [0, 0, 1])]

    chat = Document(text=None, messages=[{"role": "user", "content": "q"}], name="chat")
    assert [(ids, mask.tolist()) for ids, mask in every_token(masked)(chat)] == [([1, 2, 3], [1, 1, 1])]
    assert answers_only(masked)(chat) == [([1, 2, 3], [0, 0, 1])]
    with pytest.raises(TextError, match="^objective: sft learns from chats, and notes.txt is plain text"):
        answers_only(masked)(Document(text="plain", messages=None, name="notes.txt"))
    answers_only(masked)(Document(text=" ", messages=None, name="blank"))

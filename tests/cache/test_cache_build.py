import os
import signal
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from qat_lora.cache.build.builder import ForwardSettings, build_kd_cache, teacher_arrays
from qat_lora.cache.build.writer import CacheWriter
from qat_lora.cache.format.layout import Contents
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.store import verify_cache
from qat_lora.errors import CacheError, ConfigError

WIDTH = 6


class Row(NamedTuple):
    input_ids: np.ndarray
    loss_mask: np.ndarray
    doc_starts: np.ndarray
    cursor: dict
    weights: np.ndarray | None = None


class Teacher:
    """A random linear head over embeddings that also feel the document; counts what it is asked."""

    def __init__(self, vocab_size, scale=1.0, act=lambda call: None):
        generator = torch.Generator().manual_seed(3)
        self.vocab_size = vocab_size
        self.embed = torch.randn(vocab_size, WIDTH, generator=generator)
        self.weight = torch.randn(vocab_size, WIDTH, generator=generator) * scale
        self.act = act
        self.calls = 0
        self.shapes = set()
        self.largest = 0

    def hidden(self, input_ids_BL, document_ids_BL):
        self.calls += 1
        self.act(self.calls)
        self.shapes.add((tuple(input_ids_BL.shape), input_ids_BL.dtype, document_ids_BL.dtype))
        return self.embed[input_ids_BL.long()] + 0.25 * document_ids_BL[..., None]

    def lm_head(self):
        raise AssertionError("the builder asks for logits")

    def logits(self, hidden_NH):
        self.largest = max(self.largest, len(hidden_NH))
        return hidden_NH @ self.weight.T

    def dense(self, row):
        """Logits [L-1, V] of a row in float64."""
        documents = np.cumsum(row.doc_starts)
        hidden = self.embed.double().numpy()[row.input_ids] + 0.25 * documents[:, None]
        return (hidden @ self.weight.double().numpy().T)[:-1]


def _rows(count, length, vocab, first=0):
    rows = []
    for number in range(first, first + count):
        rng = np.random.default_rng(number)
        starts = rng.integers(0, 4, length) == 0
        ids = rng.integers(0, vocab, length).astype(np.int32)
        rows.append(Row(ids, rng.integers(0, 2, length).astype(np.uint8), starts, {"row": number + 1}))
    return rows


def _files(folder):
    return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir()) if p.name != ".lock"}


@pytest.mark.parametrize(("vocab", "top_k", "length"), [(31, 5, 17), (31, 31, 4), (29, 1, 2), (70_001, 6, 5)])
def test_against_a_dense_float64_teacher(tmp_path, fingerprint, vocab, top_k, length):
    temperatures = (0.5, 1.0, 2.0)
    fp = fingerprint(vocab_size=vocab, top_k=top_k, length=length, temperatures=temperatures, eval_rows=2)
    teacher = Teacher(vocab, scale=2.0)
    rows, evaluation = _rows(7, length, vocab), _rows(2, length, vocab, first=50)
    with CacheWriter(tmp_path / "c", fp, 3) as writer:
        build_kd_cache(
            teacher, iter(rows), writer, ForwardSettings(4, chunk_bytes=vocab * 4 * 7), eval_rows=evaluation, quiet=True
        )
    state = writer.resume_state()
    assert (state.rows, state.eval_rows, writer.stopped) == (7, 2, False)
    assert teacher.shapes == {((4, length), torch.int32, torch.int32)}  # one shape, the last batch included
    assert teacher.largest <= 7  # positions whose logits exist at a time
    verify_cache(tmp_path / "c")
    for split, source in (("train", rows), ("eval", evaluation)):
        batch = KDCacheDataset(tmp_path / "c", split=split, temperatures=temperatures).rows(range(len(source)))
        for number, row in enumerate(source):
            np.testing.assert_array_equal(batch["input_ids"][number], row.input_ids)
            np.testing.assert_array_equal(batch["target_mask"][number], row.loss_mask[1:] == 1)
            logits = teacher.dense(row)
            for p in range(length - 1):
                ranked = np.argsort(-logits[p])
                np.testing.assert_array_equal(batch["head_ids"][number, p], ranked[:top_k])
                shifted = logits[p] - logits[p].max()
                np.testing.assert_allclose(batch["head_logits"][number, p], shifted[ranked[:top_k]], 1e-3, 1e-3)
                for temperature in temperatures:
                    suffix = "" if temperature == 1 else f"@{temperature:g}"
                    lse = np.log(np.exp(shifted / temperature).sum())
                    mass = np.exp(shifted[ranked[top_k:]] / temperature).sum()
                    tail = np.log(mass) - lse if top_k < vocab else -np.inf
                    assert batch["lse" + suffix][number, p] == pytest.approx(lse, abs=1e-5)
                    assert batch["log_tail" + suffix][number, p] == pytest.approx(tail, abs=2e-4, rel=1e-5)


def test_a_tiny_tail_is_not_rounding_noise():
    """One minus the head's sum would be 0 or negative here; the tail is about e^-60."""
    vocab, top_k = 50, 4
    teacher = Teacher(vocab)
    teacher.logits = lambda hidden_NH: (
        torch.linspace(0, -1, vocab).repeat(len(hidden_NH), 1) - 60 * (torch.arange(vocab) >= top_k)
    )
    ids = torch.zeros(1, 3, dtype=torch.int32)
    arrays = teacher_arrays(teacher, ids, ids, Contents(3, top_k, vocab), {})
    logits = teacher.logits(torch.zeros(1, 1))[0].double().numpy()
    exact = np.log(np.exp(logits[top_k:]).sum()) - np.log(np.exp(logits).sum())
    assert exact < -55
    np.testing.assert_allclose(arrays["log_tail"].numpy(), exact, rtol=1e-6)


def test_a_padded_output_head_is_cut(tmp_path, fingerprint):
    teacher = Teacher(40)
    fp = fingerprint(vocab_size=31, top_k=31)
    with CacheWriter(tmp_path, fp) as writer:
        build_kd_cache(teacher, _rows(2, 5, 31), writer, quiet=True)
    batch = KDCacheDataset(tmp_path).rows([0, 1])
    assert batch["head_ids"].max() == 30
    total = np.exp(batch["head_logits"] - batch["lse"][..., None]).sum(-1)
    np.testing.assert_allclose(total, 1, rtol=2e-3)


def _build(folder, fp, teacher, total=11, **options):
    with CacheWriter(folder, fp, 2) as writer:
        done = writer.resume_state()
        rows = _rows(total, fp.length, 31)[done.cursor["row"] if done.cursor else 0 :]
        held_back = _rows(3, fp.length, 31, first=90)
        build_kd_cache(teacher, rows, writer, ForwardSettings(3), eval_rows=held_back, quiet=True, **options)
    return writer


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5])
def test_a_teacher_that_fails_and_one_that_is_stopped_lose_one_shard_at_most(tmp_path, fingerprint, call):
    fp = fingerprint(eval_rows=3)
    _build(tmp_path / "whole", fp, Teacher(31))
    whole = _files(tmp_path / "whole")

    def fail(number):
        if number == call:
            raise RuntimeError("the teacher broke")

    def ended(*_):
        raise AssertionError("the signal ended the process")

    with pytest.raises(RuntimeError, match="the teacher broke"):
        _build(tmp_path / "c", fp, Teacher(31, act=fail))
    assert "manifest.json" not in _files(tmp_path / "c")
    assert threading.active_count() == 1 or not any(t.name == "cache-writer" for t in threading.enumerate())
    assert threading.current_thread() is threading.main_thread()  # else SIGTERM would end the test run
    number = [signal.SIGTERM, signal.SIGHUP][call % 2]
    before = signal.signal(number, ended)  # as a terminal leaves it, also where the tests run under nohup
    try:
        stopped = _build(tmp_path / "c", fp, Teacher(31, act=lambda batch: batch == 1 and os.kill(os.getpid(), number)))
        assert signal.getsignal(number) is ended
    finally:
        signal.signal(number, before)
    assert stopped.stopped and not stopped.finished and stopped.waiting_for() == ()
    assert "manifest.json" not in _files(tmp_path / "c")
    assert _build(tmp_path / "c", fp, Teacher(31)).finished
    assert _files(tmp_path / "c") == whole
    idle = Teacher(31)
    again = _build(tmp_path / "c", fp, idle)
    assert again.finished and (again.resume_state().rows, again.resume_state().eval_rows) == (11, 3)
    assert idle.calls == 0


def test_what_the_writer_refuses_surfaces_in_the_caller(tmp_path, fingerprint):
    teacher = Teacher(31)
    teacher.weight[7] = torch.nan
    with pytest.raises(CacheError, match="NaN or infinite"):
        _build(tmp_path, fingerprint(eval_rows=3), teacher, total=200)
    assert "manifest.json" not in _files(tmp_path)
    assert teacher.calls < 20  # it was not run to the end for nothing


def test_max_rows_counts_earlier_runs(tmp_path, fingerprint):
    fp = fingerprint()
    for total in (5, 11):  # the first run ends early, as if killed: its rows are an unfinished build
        with CacheWriter(tmp_path, fp, 2) as writer:
            done = writer.resume_state()
            rows = _rows(total, 5, 31)[done.cursor["row"] if done.cursor else 0 :]
            if total == 5:
                build_kd_cache(Teacher(31, act=lambda n: n == 3 and os.kill(os.getpid(), 15)), rows, writer,
                               ForwardSettings(2), quiet=True)  # fmt: skip
            else:
                build_kd_cache(Teacher(31), rows, writer, ForwardSettings(2), max_rows=7, quiet=True)
    assert writer.resume_state().rows == 7
    ids = KDCacheDataset(tmp_path).rows(range(7))["input_ids"]
    np.testing.assert_array_equal(ids, [row.input_ids for row in _rows(7, 5, 31)])


def test_progress_bar_says_what_it_costs(tmp_path, fingerprint, capsys):
    with CacheWriter(tmp_path, fingerprint()) as writer:
        build_kd_cache(Teacher(31), _rows(4, 5, 31), writer, max_rows=4)
    shown = capsys.readouterr().err
    assert "20.0/20.0" in shown and "tok/s" in shown and "bytes/token" in shown


def test_settings_that_cannot_work(tmp_path, fingerprint):
    def build(teacher, **options):
        with CacheWriter(tmp_path, fingerprint(), overwrite=True) as writer:
            try:
                build_kd_cache(teacher, _rows(2, 5, 31), writer, quiet=True, **options)
            finally:
                writer.stop()

    with pytest.raises(ConfigError, match="vocab_size: .*31.*30"):
        build(Teacher(30))
    with pytest.raises(ConfigError, match="batch_rows"):
        build(Teacher(31), settings=ForwardSettings(0))
    with CacheWriter(tmp_path / "x", fingerprint()) as writer:
        with pytest.raises(CacheError, match=r"input_ids: a row has shape \(4,\)"):
            build_kd_cache(Teacher(31), _rows(2, 4, 31), writer, quiet=True)
        writer.stop()

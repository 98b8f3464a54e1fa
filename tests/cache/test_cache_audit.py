"""`cache audit` against a dense computation in NumPy, on distributions rebuilt token by token."""

import json

import numpy as np
import pytest
import torch

from qat_lora.cache.build.builder import ForwardSettings, build_kd_cache
from qat_lora.cache.build.writer import CacheWriter
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.tools.audit import audit, summary, table_rows, topk_sizes
from qat_lora.cli import main
from qat_lora.errors import CacheError

WIDTH, SHA = 6, "22" * 32


class Teacher:
    """Random embeddings and head; `shift` makes it another teacher than the one that built the cache."""

    def __init__(self, vocab_size, shift=0.0):
        draw = np.random.default_rng(3)
        self.vocab_size = vocab_size
        self.embed, weight = (torch.from_numpy(draw.normal(size=(vocab_size, WIDTH))).float() for _ in range(2))
        self.weight = weight + shift * torch.from_numpy(draw.normal(size=(vocab_size, WIDTH))).float()

    def hidden(self, input_ids_BL, document_ids_BL):
        return self.embed[input_ids_BL.long()] + 0.25 * document_ids_BL[..., None]

    def logits(self, hidden_NH):
        # By way of float64: else the last bits would depend on how many positions come at a time.
        return (hidden_NH.double() @ self.weight.double().T).float()


class Row:
    def __init__(self, number, length, vocab):
        draw = np.random.default_rng(number)
        self.input_ids = draw.integers(0, vocab, length).astype(np.int32)
        self.loss_mask = draw.integers(0, 2, length).astype(np.uint8)
        self.doc_starts = draw.random(length) < 0.2
        self.cursor = number


def _cache(folder, fp, rows=5):
    with CacheWriter(folder, fp, 2) as writer:
        source = (Row(i, fp.length, fp.vocab_size) for i in range(rows))
        build_kd_cache(Teacher(fp.vocab_size), source, writer, ForwardSettings(2), quiet=True)
    return folder


def _softmax(values):
    powers = np.exp(values - values.max())
    return powers / powers.sum()


def _dense(path, teacher, k, vocab):
    """Mean figures from whole distributions: the stored head and tail written out over all V tokens."""
    dataset = KDCacheDataset(path)
    stored, even, tails = [], [], []
    for row in range(len(dataset)):
        batch = dataset.rows([row], k)
        hidden = teacher.hidden(*(torch.from_numpy(batch[n]) for n in ("input_ids", "document_ids")))
        logits = teacher.logits(hidden[0, :-1]).double().numpy()
        for p in np.flatnonzero(batch["target_mask"][0]):
            truth = _softmax(logits[p])
            ids = batch["head_ids"][0, p]
            others = np.setdiff1d(np.arange(vocab), ids)
            head = np.exp(batch["head_logits"][0, p].astype(np.float64) - batch["lse"][0, p])
            tail = np.exp(np.float64(batch["log_tail"][0, p]))
            tails.append(truth[others].sum())
            for found, spread in ((stored, truth[others]), (even, np.ones(len(others)))):
                q = np.zeros(vocab)
                q[ids] = head
                if len(others):
                    q[others] = tail * spread / spread.sum()
                q /= q.sum()
                found.append((truth * np.log(truth / q)).sum())
    return np.mean(stored), np.max(stored), np.mean(tails), np.mean(even), len(stored)


@pytest.mark.parametrize(("vocab", "top_k", "shift"), [(61, 16, 0.0), (61, 10, 0.1), (23, 23, 0.0)])
def test_against_whole_distributions(vocab, top_k, shift, tmp_path, fingerprint, monkeypatch):
    path = _cache(tmp_path / "c", fingerprint(vocab_size=vocab, top_k=top_k, length=17))
    teacher = Teacher(vocab, shift)
    monkeypatch.setattr("qat_lora.cache.tools.audit.CHUNK_BYTES", 8 * vocab * 3)
    report = audit(teacher, path, SHA, rows=99)
    assert report["rows"] == 5 and [row["k"] for row in report["by_k"]] == topk_sizes(top_k)
    for row in report["by_k"]:
        stored, largest, tail, even, positions = _dense(path, teacher, row["k"], vocab)
        assert report["positions"] == positions
        assert row["kl_stored"] == pytest.approx(stored, rel=1e-5, abs=1e-13)
        assert row["kl_stored_max"] == pytest.approx(largest, rel=1e-5, abs=1e-13)
        assert row["tail_mass"] == pytest.approx(tail, rel=1e-9, abs=1e-15)
        assert row["kl_even_tail"] == pytest.approx(even, rel=1e-6, abs=1e-12)
    if shift:  # positive control: what differs is seen
        assert report["by_k"][-1]["kl_stored"] > 1e-3 and report["same_values"] < 0.1
    else:
        assert report["by_k"][-1]["kl_stored"] < 1e-6 and report["mass_defect"] < 2e-3
        assert report["same_ids"] == 1 and report["same_values"] > 0.95
    masses = [row["tail_mass"] for row in report["by_k"]]
    assert masses == sorted(masses, reverse=True)


def test_bytes_are_those_of_a_cache_with_that_k(tmp_path, fingerprint):
    """The smallest head's figure against the file of a real cache; a header is some hundred bytes."""
    path = _cache(tmp_path / "c", fingerprint(vocab_size=61, top_k=16, length=200), rows=8)
    report = audit(Teacher(61), path, SHA, rows=1)
    for row in (report["by_k"][0], report["by_k"][-1]):
        fp = fingerprint(vocab_size=61, top_k=row["k"], length=200)
        with CacheWriter(tmp_path / str(row["k"]), fp) as writer:
            build_kd_cache(Teacher(61), (Row(i, 200, 61) for i in range(8)), writer, ForwardSettings(8), quiet=True)
        size = (tmp_path / str(row["k"]) / "s-000000.safetensors").stat().st_size
        assert 0 < size / (8 * 200) - row["bytes_per_token"] < 1


def test_another_teacher_is_refused(tmp_path, fingerprint):
    path = _cache(tmp_path / "c", fingerprint(vocab_size=61, length=9))
    with pytest.raises(CacheError, match="the cache .* was made by toy .*; an audit needs the same teacher"):
        audit(Teacher(61), path, "33" * 32)


def test_no_target_in_the_rows(tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint()
    rows = random_rows(fp, 3)
    rows["loss_mask"][:] = 0
    write_cache(tmp_path / "c", fp, rows)
    with pytest.raises(CacheError, match="none of the 3 rows looked at has a target"):
        audit(Teacher(fp.vocab_size), tmp_path / "c", SHA)


def test_head_sizes_and_table():
    assert [topk_sizes(k) for k in (1, 4, 5, 64)] == [[1], [4], [4, 5], [4, 8, 16, 32, 64]]
    row = dict.fromkeys(("bytes_per_token", "kl_stored", "kl_stored_max", "tail_mass", "kl_even_tail"), 0.5)
    row |= {"k": 4, "encoding": "uint8"}
    report = {"positions": 9, "rows": 1, "same_ids": 1.0, "same_values": 0.5, "mass_defect": 1e-4, "by_k": [row]}
    header, body = table_rows(report)
    assert header[0] == "K" and body == ["4", "uint8", "0.5", "5.00e-01", "5.00e-01", "0.5000", "0.5000"]
    assert "values at 50.0%" in summary(report)


def test_the_command(tiny, tmp_path, capfd):
    build = f"cache build --teacher {tiny.teacher} --dataset {tiny.text} --length 32 --top-k 8 --num-rows 6"
    main([*build.split(), "--out", str(tmp_path / "c"), "--device", "cpu", "--quiet"])
    capfd.readouterr()
    line = ["cache", "audit", str(tmp_path / "c"), "--teacher", str(tiny.teacher), "--device", "cpu"]
    main([*line, "--rows", "3"])
    out = capfd.readouterr().out
    assert "KL stored" in out and "in 3 rows; as stored: ids at 100.0%" in out
    main([*line, "--json", "--out", str(tmp_path / "a")])
    printed = json.loads(capfd.readouterr().out)
    assert printed == json.loads((tmp_path / "a" / "audit.json").read_text())
    assert {"date", "machine", "versions"} < printed.keys()
    assert printed["rows"] == 6 and printed["by_k"][-1]["kl_stored"] < 1e-5
    main([*line, "--json", "--out", str(tmp_path / "a")])  # there already
    assert json.loads(capfd.readouterr().out) == printed

"""What several commands share: names of runs, rows for calibration."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from toy_pipeline import cache_options, call, quantize_options

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.data.packing import make_encoder, pack_rows
from qat_lora.data.sources import TextConfig, open_documents
from qat_lora.models.load import load_model, load_tokenizer
from qat_lora.setup import common
from qat_lora.setup.common import (
    cached_calibration_rows,
    calibration,
    calibration_batch_rows,
    calibration_rows,
    run_name,
)


@pytest.mark.parametrize(
    ("model", "name"),
    [("Qwen/Qwen3-0.6B", "Qwen3-0.6B"), ("runs/qwen3-0.6b_w2g64/", "qwen3-0.6b_w2g64"), ("runs/v2_q4/best.pt", "best")],
)
def test_a_dot_in_a_folders_name_is_no_suffix(model, name):
    assert run_name(model) == name


def batch_of(*real):
    mask = np.array([[is_real] * 3 for is_real in real])
    ids = np.arange(4 * len(real), dtype=np.int32).reshape(-1, 4)
    return {"input_ids": ids, "document_ids": ids * 0, "target_mask": mask, "head_ids": ids}


def test_padding_is_no_calibration_text():
    """Statistics have no mask: a row of zeros would count like one of text."""
    batches = [batch_of(True, True), batch_of(True, False), batch_of(False, False)]
    found = list(calibration_rows(iter(batches), 8))
    assert [len(batch["input_ids"]) for batch in found] == [2, 1]
    assert all(batch["target_mask"].any(1).all() and "head_ids" not in batch for batch in found)
    assert [len(batch["input_ids"]) for batch in calibration_rows(iter(batches), 1)] == [1]


def test_a_cache_gives_as_many_rows_as_asked_for_or_all(tiny, tmp_path, monkeypatch):
    cache = call("build_cache", cache_options(tiny, tmp_path / "cache", num_rows=11, eval_rows=0))
    dataset = KDCacheDataset(cache)
    for asked, given in ((3, 3), (10, 10), (100, 11)):
        rows = [row for batch in cached_calibration_rows(dataset, asked, seed=0) for row in batch["input_ids"]]
        assert len(rows) == given and len({row.tobytes() for row in rows}) == given
    assert [calibration_batch_rows(length) for length in (32, 256, 512, 1024, 2048, 32768)] == [8, 8, 4, 2, 1, 1]
    with monkeypatch.context() as patched:  # rows are the same ones in smaller batches
        patched.setattr(common, "calibration_batch_rows", lambda length: 2)
        few = [*cached_calibration_rows(dataset, 5, seed=0)]
    assert [len(batch["input_ids"]) for batch in few] == [2, 2, 1]
    eight = next(iter(cached_calibration_rows(dataset, 5, seed=0)))["input_ids"]
    assert np.array_equal(np.concatenate([batch["input_ids"] for batch in few]), eight)
    moved = cache.rename(tmp_path / "moved")
    _, text = calibration(quantize_options(tiny, tmp_path / "student", moved), load_model(str(tiny.teacher)))
    assert text == dataset.manifest.fingerprint.sha256


def test_a_text_is_drawn_from_beyond_its_first_rows_and_says_so(tiny, tmp_path, capsys):
    options = quantize_options(tiny, tmp_path / "student", None, calibration_rows=3, calibration_length=16)
    options = replace(options, text=TextConfig(dataset=str(tiny.text)), run=replace(options.run, quiet=False))
    model = load_model(str(tiny.teacher))

    def rows(seed):
        batches, identity = calibration(replace(options, run=replace(options.run, seed=seed)), model)
        assert identity.startswith("192 rows read of ")
        return np.concatenate([batch["input_ids"] for batch in batches])

    encode = make_encoder(load_tokenizer(model.tokenizer_folder))
    first = [row.input_ids for row in islice(pack_rows(open_documents(options.text), encode, 16), 3)]
    assert (rows(0) == rows(0)).all() and (rows(0) != rows(1)).any() and (rows(0) != np.stack(first)).any()
    assert "calibration: drew 3 of 192 rows read" in capsys.readouterr().out

"""Caches that people already have stay readable: committed files against values in plain JSON.

Both were written by `tests/data/golden_cache/make.py`, which shares no code with the package.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qat_lora.cache.build.writer import CacheWriter
from qat_lora.cache.format.lm_head import LMHeadFile
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.store import read_manifest, verify_cache

GOLDEN = Path(__file__).parents[1] / "data" / "golden_cache"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
NAMES = sorted(EXPECTED)


def _rows(split, name):
    rows = [row["all"] for row in EXPECTED[name][split]]
    return {key: np.array([row[key] for row in rows]) for key in rows[0]} if rows else {}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_every_value_is_read_back(name, split):
    rows, temperatures = _rows(split, name), tuple(EXPECTED[name]["temperatures"])
    if not rows:
        assert read_manifest(GOLDEN / name).rows(split) == 0
        return
    fewer = EXPECTED[name]["fewer"]
    batch = KDCacheDataset(GOLDEN / name, split=split, temperatures=temperatures).rows(range(len(rows["input_ids"])))
    cut = KDCacheDataset(GOLDEN / name, split=split, temperatures=temperatures, k=fewer)
    cut.optional = ["draw_ids", "teacher_hidden"]
    part = cut.rows(range(len(rows["input_ids"])))
    tails = {key for key in rows if key.startswith("log_tail")}
    exact = {key for key in rows if key not in ("loss_mask", "doc_starts")}
    assert set(batch) == exact | {"target_mask"} == set(part) | {"tail_draw_ids", "tail_entropy"} & exact
    for key in exact:
        np.testing.assert_array_equal(batch[key], rows[key], err_msg=key)
        if key not in tails and key in part:
            shown = rows[key][..., :fewer] if key.startswith("head_") else rows[key]
            np.testing.assert_array_equal(part[key], shown, err_msg=key)
    np.testing.assert_array_equal(batch["target_mask"], rows["loss_mask"][:, 1:] == 1)
    for key in tails:
        expected = [row["fewer"][key] for row in EXPECTED[name][split]]
        np.testing.assert_allclose(part[key], expected, rtol=1e-6, atol=1e-7, err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_our_writer_gives_the_same_shards(name, tmp_path):
    """The reverse: the golden rows, written by us, are the golden bytes."""
    verify_cache(GOLDEN / name)
    manifest = read_manifest(GOLDEN / name)
    head = None
    if manifest.fingerprint.lm_head_sha256:
        data = (GOLDEN / name / "teacher_head.safetensors").read_bytes()
        head = LMHeadFile(manifest.fingerprint.contents.hidden, manifest.fingerprint.lm_head_sha256, (data,))
    with CacheWriter(tmp_path, manifest.fingerprint, lm_head=head) as writer:
        for split in ("eval", "train"):
            rows, first = _rows(split, name), 0
            for entry in manifest.shards(split):
                writer.shard_rows = entry.rows
                part = {key: array[first : first + entry.rows] for key, array in rows.items()}
                writer.append(part, [None] * entry.rows, split)
                first += entry.rows
    shards = sorted(file.name for file in GOLDEN.glob(f"{name}/*.safetensors"))
    assert shards == sorted(file.name for file in tmp_path.glob("*.safetensors"))
    for shard in shards:
        assert (tmp_path / shard).read_bytes() == (GOLDEN / name / shard).read_bytes(), shard


def test_the_golden_head():
    expected = EXPECTED["hidden"]["head"]
    head = KDCacheDataset(GOLDEN / "hidden").teacher_lm_head()
    assert (head.vocab_size, head.logit_scale, head.softcap) == (300, expected["logit_scale"], expected["softcap"])
    assert head.weight_VH.shape == (300, 3)
    np.testing.assert_array_equal(head.weight_VH[[0, -1]], np.float32(expected["weight_rows"]))
    np.testing.assert_array_equal(head.bias_V[[0, -1]], np.float32(expected["bias_ends"]))


def test_the_committed_files_are_what_the_script_writes(tmp_path):
    subprocess.run([sys.executable, "-I", str(GOLDEN / "make.py"), str(tmp_path)], check=True, timeout=60)
    made = {str(file.relative_to(tmp_path)): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert len(made) == 1 + 7 * 3 + 3 * 2 + 1
    for name, data in made.items():
        assert (GOLDEN / name).read_bytes() == data, name
    assert sum(map(len, made.values())) < 50_000

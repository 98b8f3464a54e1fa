"""`cache export --parquet`: what another library reads from the file is what our reader reads from the cache."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from qat_lora.cache.format.records import to_json
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.store import read_manifest
from qat_lora.cache.tools.transport import export_parquet
from qat_lora.cli import main
from qat_lora.errors import CacheDamaged, CacheError, MissingExtraError, OutputExistsError

GOLDEN = Path(__file__).parents[1] / "data" / "golden_cache"


def _column(table, name, dtype):
    """A column by way of plain Python lists."""
    return np.array(table.column(name).to_pylist(), dtype)


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("vocab", [31, 70_001, 300_000])  # ids stored in each of the three ways
def test_the_file_holds_what_the_reader_gives(
    vocab, split, tmp_path, fingerprint, random_rows, write_cache, monkeypatch
):
    parquet = pytest.importorskip("pyarrow.parquet")
    fp = fingerprint(vocab_size=vocab, temperatures=(1.0, 2.0), eval_rows=2, top_k=5, length=11)
    source = {"train": random_rows(fp, 7), "eval": random_rows(fp, 2, seed=1)}
    write_cache(tmp_path / "c", fp, source["train"], 3, source["eval"])
    out = tmp_path / "new" / "rows.parquet"
    monkeypatch.setattr("qat_lora.cache.tools.transport.GROUP_BYTES", 1)
    result = export_parquet(tmp_path / "c", out, split)
    rows = len(source[split]["input_ids"])
    assert result == {"out": str(out), "split": split, "rows": rows, "row_groups": rows, "bytes": out.stat().st_size}
    assert [path.name for path in out.parent.iterdir()] == ["rows.parquet"]
    assert parquet.ParquetFile(out).num_row_groups == rows
    table = parquet.read_table(out)
    batch = KDCacheDataset(tmp_path / "c", split=split, temperatures=(1.0, 2.0)).rows(range(rows))
    for name in ("input_ids", "head_ids", "lse", "log_tail", "lse@2", "log_tail@2"):
        np.testing.assert_array_equal(_column(table, name, batch[name].dtype), batch[name], err_msg=name)
    logits = _column(table, "head_logits", np.float32)
    np.testing.assert_array_equal(logits, batch["head_logits"])
    np.testing.assert_array_equal(logits, source[split]["head_logits"].astype(np.float16))
    for name in ("loss_mask", "doc_starts"):
        np.testing.assert_array_equal(_column(table, name, np.int64), source[split][name], err_msg=name)
    assert "halffloat" in str(table.schema.field("head_logits").type)
    assert json.loads(table.schema.metadata[b"qat-lora-kd-cache"]) == to_json(fp)


def test_golden_values(tmp_path):
    """Against values that share no code with the package."""
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, expected in json.loads((GOLDEN / "expected.json").read_text()).items():
        table = parquet.read_table(export_parquet(GOLDEN / name, tmp_path / name)["out"])
        for column in table.column_names:
            values = np.array([row["all"][column] for row in expected["train"]])
            np.testing.assert_array_equal(_column(table, column, values.dtype), values, err_msg=f"{name}.{column}")


def test_what_is_refused_leaves_nothing(tmp_path, fingerprint, random_rows, write_cache, monkeypatch):
    pytest.importorskip("pyarrow")
    fp = fingerprint()
    cache = write_cache(tmp_path / "c", fp, random_rows(fp, 5), 2)
    out = tmp_path / "rows.parquet"
    out.write_text("mine")
    with pytest.raises(OutputExistsError, match="not touched"):
        export_parquet(cache, out)
    assert out.read_text() == "mine"
    out.unlink()
    with pytest.raises(CacheError, match="no rows in the eval split"):
        export_parquet(cache, out, "eval")
    shard = cache / f"{read_manifest(cache).train[-1].shard}.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CacheDamaged, match="s-000002"):
        export_parquet(cache, out)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"qat-lora\[hub\]"):
        export_parquet(cache, out)


def test_the_command(tmp_path, capfd):
    pytest.importorskip("pyarrow")
    name = sorted(json.loads((GOLDEN / "expected.json").read_text()))[0]
    line = ["cache", "export", "--parquet", str(GOLDEN / name), "--out", str(tmp_path / "x.parquet"), "--quiet"]
    main([*line, "--json"])
    assert json.loads(capfd.readouterr().out)["rows"] == read_manifest(GOLDEN / name).rows("train")
    with pytest.raises(SystemExit) as left:
        main(line)
    assert left.value.code == 2 and "exists already" in capfd.readouterr().err
    with pytest.raises(SystemExit) as left:
        main([*line[:2], *line[3:]])
    assert left.value.code == 2 and "give --parquet" in capfd.readouterr().err

"""The streams of a packed shard: every array comes back, whichever way ids are written."""

import numpy as np
import pytest

from qat_lora.cache.format.codec import encode_rows
from qat_lora.cache.format.records import optional_arrays
from qat_lora.cache.tools.transport import pack_arrays, unpack_arrays
from qat_lora.errors import CacheDamaged

pytest.importorskip("zstandard")


@pytest.mark.parametrize("vocab", [31, 70_001, 300_000])
@pytest.mark.parametrize("value_dtype", ["float16", "uint8"])
@pytest.mark.parametrize("usual", [False, True])
def test_every_array_comes_back(fingerprint, random_rows, vocab, value_dtype, usual):
    names = optional_arrays(3, 5, 7, "0" * 64)
    fp = fingerprint(vocab_size=vocab, top_k=6, length=9, value_dtype=value_dtype, optional_arrays=names)
    rows = random_rows(fp, 3)
    rows["teacher_hidden"] = np.random.default_rng(1).normal(size=(3, 8, 7)).astype(np.float32)
    rows["head_logits"][0, 0] = [0, -0.0, -0.0, -1e-7, -60000, -60000]
    rows["head_logits"][0, 1] = 0
    if usual:  # few ids of a large vocabulary: a table pays
        rows["draw_ids"] = rows["draw_ids"] % 3 + vocab - 3
    arrays = encode_rows(rows, fp)
    data = memoryview(b"".join(pack_arrays(arrays, fp.contents)))
    found = unpack_arrays(data, fp.contents, 3, "x")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes(), name
    for bad in (data[:-1], data[:7], bytes(data) + b"\0"):
        with pytest.raises(CacheDamaged, match="x: its streams"):
            unpack_arrays(memoryview(bad), fp.contents, 3, "x")
    with pytest.raises(CacheDamaged, match="x: its streams"):
        unpack_arrays(data, fp.contents, 4, "x")

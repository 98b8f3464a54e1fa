"""The rules for values say which one is broken; `test_cache_damage.py` has them on sealed files, rule by rule."""

import numpy as np
import pytest

from qat_lora.cache.format.codec import encode_rows, promises


@pytest.mark.parametrize("value_dtype", ["float16", "uint8"])
def test_what_was_encoded_keeps_them_and_a_swap_breaks_one(fingerprint, random_rows, value_dtype):
    fp = fingerprint(vocab_size=97, top_k=9, length=17, value_dtype=value_dtype, optional_arrays=("draws:3",))
    arrays = encode_rows(random_rows(fp, 3), fp)
    assert all(promises(arrays, fp).values())
    values = arrays["val"].copy()
    values[1, 5] = values[1, 5, ::-1]
    broken = promises({**arrays, "val": values}, fp)
    assert [name for name, kept in broken.items() if not kept] == ["values falling from 0 in rank order"]
    high = promises({**arrays, "draws_lo": np.full_like(arrays["draws_lo"], 97)}, fp)
    assert [name for name, kept in high.items() if not kept] == ["draws inside the vocabulary"]

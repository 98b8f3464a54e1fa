"""The random numbers of a row: uniform, and decided by seed, name and tokens alone."""

import subprocess
import sys

import numpy as np

from qat_lora.cache.build.topk import row_uniforms

KNOWN = [[11563034, 6821631], [8059886, 2691079]]


class Row:
    def __init__(self, ids, starts=None):
        self.input_ids = np.array(ids, np.int32)
        self.doc_starts = np.zeros(len(ids), bool) if starts is None else np.array(starts)


def test_the_same_row_anywhere_has_the_same_numbers():
    rows = [Row([number, 5, 7]) for number in range(4)]
    whole = row_uniforms(3, "draws", rows, (5, 3, 6))
    assert whole.shape == (5, 2, 6, 2) and whole.dtype == np.float32 and not whole[4].any()
    for place, row in enumerate(rows):
        np.testing.assert_array_equal(row_uniforms(3, "draws", [row], (1, 3, 6))[0], whole[place])
    others = [
        row_uniforms(4, "draws", rows[:1], (1, 3, 6)),
        row_uniforms(3, "tail_draws", rows[:1], (1, 3, 6)),
        row_uniforms(3, "draws", [Row([0, 5, 7], [0, 1, 0])], (1, 3, 6)),
        whole[1:2],
    ]
    assert all((other != whole[:1]).all() for other in others)


def test_known_numbers():
    """A resumed cache of another year, with another NumPy, goes on with the same draws."""
    found = row_uniforms(0, "draws", [Row([1, 2])], (1, 2, 2))[0, 0] * 2**24
    assert found.tolist() == KNOWN


def test_uniform():
    numbers = row_uniforms(0, "draws", [Row(range(257))], (1, 257, 200)).reshape(-1).astype(np.float64)
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.bincount((numbers * 64).astype(int), minlength=64)
    expected = len(numbers) / 64
    assert abs(((counts - expected) ** 2 / expected).sum() - 63) < 5 * np.sqrt(126)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / np.sqrt(len(numbers))


def test_reader_and_writer_need_no_torch():
    modules = "qat_lora.cache.build.writer, qat_lora.cache.read.dataset, qat_lora.cache.tools.pack"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)

"""Head, sums and their pieces against slow float64 sums that share no code, at sizes on both sides of every branch."""

import numpy as np
import pytest
import torch

from qat_lora.cache.build.topk import sparse_arrays, top_k_entries
from qat_lora.types import temperature_key


@pytest.mark.parametrize("vocab", [1, 31, 1009, 4099, 20_011])
@pytest.mark.parametrize("k", [1, 5, 64])
def test_top_k_entries_are_those_of_a_full_sort(vocab, k):
    k = min(k, vocab)
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(vocab + k))
    values, indices = top_k_entries(logits, k)
    expected = np.sort(logits.numpy(), axis=1)[:, ::-1][:, :k]
    assert np.array_equal(values.numpy(), expected)
    assert torch.equal(logits.gather(1, indices), values)
    assert all(len(set(row)) == k for row in indices.tolist())


def test_the_largest_are_found_wherever_they_lie():
    """All in one stretch, one in each, and in the rest behind the last whole stretch."""
    vocab, k = 20_011, 8
    for places in ([100 + i for i in range(k)], [i * 2_500 for i in range(k)], [vocab - 1 - i for i in range(k)]):
        logits = torch.zeros(1, vocab)
        logits[0, places] = torch.arange(1.0, k + 1)
        assert sorted(top_k_entries(logits, k)[1][0].tolist()) == sorted(places)


def test_ties_and_nan_do_not_break_the_ranking():
    values, indices = top_k_entries(torch.zeros(2, 20_011), 8)
    assert (values == 0).all()
    assert all(len(set(row)) == 8 for row in indices.tolist())
    spoilt = torch.randn(1, 20_011)
    spoilt[0, 12_345] = float("nan")
    assert torch.isnan(top_k_entries(spoilt, 8)[0][0, 0])  # on top, where the writer refuses it


@pytest.mark.parametrize("piece_bytes", [None, 1, 3 * 4 * 5003])
@pytest.mark.parametrize("top_k", [1, 40, 5003])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_sums_against_float64(piece_bytes, top_k, scale):
    vocab = 5003
    logits = scale * torch.randn(11, vocab, generator=torch.Generator().manual_seed(1))
    arrays = sparse_arrays(logits.clone(), top_k, (1.0, 2.5), {}, piece_bytes)
    exact = logits.double().numpy()
    ids = arrays["head_ids"].numpy()
    np.testing.assert_array_equal(ids[:, 0], exact.argmax(1))
    for temperature in (1.0, 2.5):
        lse = arrays[temperature_key("lse", temperature)].double().numpy()
        log_tail = arrays[temperature_key("log_tail", temperature)].double().numpy()
        for row in range(len(exact)):
            z = (exact[row] - exact[row].max()) / temperature
            outside = np.ones(vocab, bool)
            outside[ids[row]] = False
            total = np.log(np.exp(z).sum())
            assert abs(lse[row] - total) < 1e-5
            if top_k == vocab:
                assert log_tail[row] == -np.inf
            else:
                largest = z[outside].max()
                tail = largest + np.log(np.exp(z[outside] - largest).sum()) - total
                assert abs(log_tail[row] - tail) < 1e-5 * max(1.0, abs(tail))


def test_pieces_change_no_bit():
    logits = torch.randn(11, 20_011, generator=torch.Generator().manual_seed(2))
    uniforms = {"tail_draw_ids": torch.rand(11, 3, 2), "draw_ids": torch.rand(11, 2, 2)}
    whole = sparse_arrays(logits.clone(), 64, (1.0, 2.0), uniforms)
    cut = sparse_arrays(logits.clone(), 64, (1.0, 2.0), uniforms, 4 * 20_011 * 2)
    assert whole.keys() == cut.keys()
    for name, values in whole.items():
        assert torch.equal(values, cut[name]), name


def test_a_position_gives_the_same_bits_wherever_it_stands():
    """A resumed build has the same rows at other places of its batches."""
    logits = torch.randn(37, 1009, generator=torch.Generator().manual_seed(3))
    together = sparse_arrays(logits.clone(), 8, (1.0, 2.0), {})
    for row in range(len(logits)):
        alone = sparse_arrays(logits[row : row + 1].clone(), 8, (1.0, 2.0), {})
        for name, values in together.items():
            assert torch.equal(values[row : row + 1], alone[name]), (name, row)

"""The normal table against QLoRA's published numbers; k-means against a plain Lloyd loop and against its own start."""

import numpy as np
import pytest
import torch

from qat_lora.quant.tables import kmeans_table, normal_table

NF4 = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0]  # bitsandbytes, rounded
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]


def test_the_normal_table_is_nf4_at_four_bits():
    assert normal_table(4).tolist() == pytest.approx(NF4, abs=2e-6)


@pytest.mark.parametrize("bits", range(2, 9))
def test_normal_tables_are_sorted_with_a_zero_and_both_ends(bits):
    table = normal_table(bits)
    assert len(table) == 2**bits and (table.diff() > 0).all()
    assert table[2 ** (bits - 1) - 1] == 0 and table[0] >= -1 and table[-1] == 1


def lloyd(points, weights, table, rounds):
    for _ in range(rounds):
        nearest = np.abs(points[:, None] - table).argmin(1)
        table = np.sort(
            [
                (points * weights)[nearest == k].sum() / weights[nearest == k].sum()
                if (nearest == k).any()
                else table[k]
                for k in range(len(table))
            ]
        )
    return table


def error(points, weights, table):
    return (weights * np.abs(points[:, None] - table).min(1) ** 2).sum()


@pytest.mark.parametrize("entries", [4, 16])
def test_kmeans_is_lloyds_algorithm_and_never_worse_than_its_start(entries):
    draw = np.random.default_rng(entries)
    points, weights = draw.normal(size=900) ** 3, draw.uniform(0.01, 3, size=900)
    start = np.linspace(-1, 1, entries)
    tensors = [torch.from_numpy(x) for x in (points.reshape(30, 30), weights.reshape(30, 30), start)]
    last = np.inf
    for rounds in (0, 1, 2, 5, 20, 60):
        ours = kmeans_table(*tensors, iterations=rounds).numpy()
        assert np.allclose(ours, lloyd(points, weights, start, rounds), atol=1e-9)
        now = error(points, weights, ours)
        assert now <= last + 1e-9
        last = now
    assert last < 0.7 * error(points, weights, start)


def test_empty_intervals_keep_their_entry_and_free_points_pull_nothing():
    points = torch.tensor([1.0, 1.0, 5.0])
    table = kmeans_table(points, torch.tensor([1.0, 1.0, 0.0]), torch.tensor([-9.0, 1.5, 4.0]))
    assert table.tolist() == [-9, 1, 4]

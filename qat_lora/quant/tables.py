"""Look-up tables that fit the weights: quantiles of the normal distribution, and weighted k-means.

An even table spends as many codes on the rare large weights as on the many small ones. `normal_table` is fixed and
needs nothing (NF4); `kmeans_table` fits one layer's own weights by Lloyd's iterations, weighted by what an error
costs in the layer's output. In one dimension a cluster is an interval, so sums over clusters are differences of one
cumulative sum over the sorted weights and an iteration costs no pass over them; library k-means knows neither.

Source: QLoRA (arXiv 2305.14314) for the normal table; SqueezeLLM (arXiv 2306.07629) for weighted k-means.
"""

from __future__ import annotations

import torch
from torch import Tensor

ITERATIONS = 60


def normal_table(bits: int) -> Tensor:
    """Return 2^bits sorted float32 quantiles of the normal distribution, from -1 to 1 with an exact zero.

    One more code is above zero than below. At 4 bits these are the values of NF4.
    """
    count = 2**bits
    outermost = 1 - (1 / (2 * count) + 1 / (2 * count - 2)) / 2
    above, below = (
        torch.special.ndtri(torch.linspace(outermost, 0.5, count // 2 + extra, dtype=torch.float64)[:-1])
        for extra in (1, 0)
    )
    table = torch.cat([-below, torch.zeros(1, dtype=torch.float64), above.flip(0)])
    return (table / table.abs().max()).float()


def kmeans_table(points: Tensor, weights: Tensor, start: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """Return the sorted table that Lloyd's iterations reach; its weighted squared error is never above the start's.

    Args:
        points: numbers to be represented, any shape (weights divided by their scales).
        weights: cost of a squared error at each point.
        start: sorted table to begin with; an entry whose interval is empty stays where it is.
        iterations: passes; the end is reached when nothing moves.
    """
    order = points.flatten().argsort()
    sorted_points = points.flatten()[order].double()
    cost = weights.expand_as(points).flatten()[order].double()
    zero = cost.new_zeros(1)
    mass = torch.cat([zero, cost.cumsum(0)])
    moment = torch.cat([zero, (cost * sorted_points).cumsum(0)])
    table = start.double()
    for _ in range(iterations):
        cuts = torch.searchsorted(sorted_points, (table[1:] + table[:-1]) / 2)
        ends = torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), len(sorted_points))])
        filled = mass[ends[1:]] - mass[ends[:-1]]
        means = (moment[ends[1:]] - moment[ends[:-1]]) / filled.clamp_min(1e-300)
        moved = torch.where(filled > 0, means, table).sort().values
        if torch.equal(moved, table):
            break
        table = moved
    return table.to(start.dtype)

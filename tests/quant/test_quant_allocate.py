"""The choice of points: within the budget, on the hulls, and no gap that anything better fits in."""

import itertools

import numpy as np
import pytest

from qat_lora.errors import ConfigError
from qat_lora.quant.presets import allocate


def toy(seed, layers, points):
    """Return layers with falling, not convex costs."""
    draw = np.random.default_rng(seed)
    number = np.repeat(np.arange(layers), points)
    sizes = np.concatenate([np.cumsum(draw.integers(1, 40, points)) for _ in range(layers)])
    costs = np.concatenate([np.sort(draw.random(points) ** 3)[::-1] for _ in range(layers)])
    order = draw.permutation(len(number))
    return number[order], sizes[order], costs[order]


@pytest.mark.parametrize("seed", range(20))
def test_near_the_best_of_all_choices(seed):
    layers, sizes, costs = toy(seed, 4, 6)
    mine = [np.flatnonzero(layers == i) for i in range(4)]
    whole = [(sizes[list(c)].sum(), costs[list(c)].sum()) for c in itertools.product(*mine)]
    least, most = min(whole)[0], max(whole)[0]
    losses = []
    for budget in np.linspace(least, most, 17).astype(int):
        chosen = allocate(layers, sizes, costs, int(budget))
        assert sorted(layers[chosen]) == [0, 1, 2, 3] and sizes[chosen].sum() <= budget
        left = budget - sizes[chosen].sum()
        for i, point in zip(layers[chosen], chosen, strict=True):  # nothing better fits beside the rest
            better = mine[i][(costs[mine[i]] < costs[point]) & (sizes[mine[i]] > sizes[point])]
            assert (sizes[better] - sizes[point] > left).all()
        losses.append(costs[chosen].sum() - min(cost for size, cost in whole if size <= budget))
    assert min(losses) > -1e-12 and np.mean(losses) < 0.1
    assert losses[0] == pytest.approx(0, abs=1e-12) and losses[-1] == pytest.approx(0, abs=1e-12)


def test_a_budget_below_the_least_is_refused():
    layers, sizes, costs = toy(0, 3, 4)
    with pytest.raises(ConfigError, match="1 too few"):
        allocate(layers, sizes, costs, sum(sizes[layers == i].min() for i in range(3)) - 1)

"""Sums by row against loops, calibration by hand, and intervals that hold what they say."""

import math

import numpy as np
import pytest

from qat_lora.evaluate.tally import BINS, COLUMNS, Tally, add_up, bootstrap, interval, join, pairs

ROWS = 7


def positions(count, seed):
    draw = np.random.default_rng(seed)
    row_N = draw.integers(0, ROWS, count)
    values = [draw.exponential(2, count), draw.exponential(0.3, count), draw.random(count) < 0.7]
    values += [draw.random(count), draw.random(count) < 0.5]
    return row_N, np.stack(values).astype(np.float32)


def oracle(values_FN):
    """The figures position by position; calibration as Guo et al. write it."""
    loss, kl, same, confidence, right = values_FN.astype(np.float64).tolist()
    n = len(loss)
    ece = 0.0
    for b in range(BINS):
        inside = [
            i for i in range(n) if b / BINS <= confidence[i] < (b + 1) / BINS or (b == BINS - 1 and confidence[i] == 1)
        ]
        if inside:
            gap = math.fsum(right[i] for i in inside) / len(inside) - math.fsum(confidence[i] for i in inside) / len(
                inside
            )
            ece += len(inside) / n * abs(gap)
    nll = math.fsum(loss) / n
    means = {"nll": nll, "ppl": math.exp(nll), "kl": math.fsum(kl) / n, "top1": sum(same) / n}
    return {**means, "accuracy": sum(right) / n, "ece": ece, "tokens": n}


@pytest.mark.parametrize("count", [1, 13, 1009])
def test_figures_are_those_of_the_definition(count):
    row_N, values = positions(count, count)
    whole = Tally(add_up(row_N, values, ROWS))
    assert whole.figures == pytest.approx(oracle(values), abs=1e-9)
    for row in range(ROWS):
        own = values[:, row_N == row]
        if own.shape[1]:
            assert Tally(whole.rows[row : row + 1]).figures == pytest.approx(oracle(own), abs=1e-9)
    halves = [
        Tally(add_up(row_N[part], values[:, part], ROWS)) for part in (slice(0, count // 2), slice(count // 2, None))
    ]
    assert join(halves).figures == pytest.approx(whole.figures, abs=1e-12)


def test_calibration_by_hand():
    """Four tokens: two at 0.9 of which one is right, one at 0.1 that is right, one at exactly 1 that is right."""
    confidence, right = [0.9, 0.9, 0.1, 1.0], [1, 0, 1, 1]
    tally = Tally(add_up(np.zeros(4, int), np.array([[0] * 4, [0] * 4, [0] * 4, confidence, right]), 1))
    assert tally.figures["ece"] == pytest.approx((0.8 + 0.9 + 0.0) / 4)
    bins = tally.calibration
    assert bins["tokens"] == [0, 1] + [0] * 11 + [2, 1]
    assert bins["confidence"][13] == pytest.approx(0.9) and bins["accuracy"][13] == 0.5 and bins["accuracy"][0] is None


def test_a_ruined_model_has_figures_that_say_so():
    values = np.array([[math.inf, 1e4], [math.nan, 1], [0, 1], [math.nan, 0.5], [0, 1]])
    found = Tally(add_up(np.array([0, 0]), values, 1)).figures
    assert found["ppl"] == math.inf and math.isnan(found["kl"]) and math.isnan(found["ece"]) and found["top1"] == 0.5


def rows_of(losses, tokens=50):
    sums = np.zeros((len(losses), COLUMNS))
    sums[:, 0], sums[:, 1], sums[:, 2] = tokens, np.asarray(losses) * tokens, np.asarray(losses) * tokens
    return Tally(sums)


def test_intervals_hold_the_truth_as_often_as_they_say():
    """200 texts of 60 rows; tokens drawn as if independent, the positive control, would miss most of the time."""
    draw = np.random.default_rng(0)
    hits = narrow = 0
    for trial in range(200):
        means = draw.normal(3.0, 0.5, 60)  # rows differ; their 50 tokens do not
        low, high = interval(bootstrap([{"m": rows_of(means)}], 300, trial)["m"]["nll"])
        hits += low < 3.0 < high
        half = 1.96 * means.std() / math.sqrt(60 * 50)
        narrow += abs(means.mean() - 3.0) < half
    assert 178 <= hits <= 198, hits
    assert narrow < 100


def test_differences_are_paired_and_draws_repeat():
    draw = np.random.default_rng(1)
    hard = draw.normal(3, 1, 80)
    tallies = {"teacher": rows_of(hard), "a": rows_of(hard + 0.5), "b": rows_of(hard + 0.45 + draw.normal(0, 0.02, 80))}
    drawn = bootstrap([tallies], 500, 3)
    (line,) = pairs(tallies, drawn, ["a", "b"])
    assert (line["first"], line["second"]) == ("a", "b") and line["kl"]["clear"]
    assert line["kl"]["difference"] == pytest.approx(-0.05, abs=0.01)
    low, high = line["kl"]["interval"]
    own = interval(drawn["a"]["kl"])
    assert low < -0.05 < high or abs(low + 0.05) < 0.01
    assert high - low < (own[1] - own[0]) / 10
    again = bootstrap([tallies], 500, 3)
    assert all((again[m][f] == drawn[m][f]).all() for m in drawn for f in drawn[m])
    assert (bootstrap([tallies], 500, 4)["a"]["kl"] != drawn["a"]["kl"]).any()


def test_texts_keep_their_share_of_the_rows():
    """Two texts far apart: drawn within each, the mean of both hardly moves; drawn from the pool it would."""
    easy, hard = (rows_of(np.full(20, value) + np.linspace(-0.01, 0.01, 20)) for value in (1.0, 9.0))
    low, high = interval(bootstrap([{"m": easy}, {"m": hard}], 400, 0)["m"]["nll"])
    assert high - low < 0.02 and low < 5.0 < high
    low, high = interval(bootstrap([{"m": join([easy, hard])}], 400, 0)["m"]["nll"])
    assert high - low > 1


def test_many_rows_are_drawn_in_parts(monkeypatch):
    whole = bootstrap([{"m": rows_of(np.arange(9.0))}], 100, 5)["m"]["nll"]
    monkeypatch.setattr("qat_lora.evaluate.tally._DRAWN_AT_ONCE", 9 * 7)
    assert (bootstrap([{"m": rows_of(np.arange(9.0))}], 100, 5)["m"]["nll"] == whole).all()

"""The break-even of a cache against a live teacher, by hand."""

import pytest

from qat_lora.evaluate.break_even import break_even, summary


def test_by_hand():
    found = break_even(3_600_000, 1000.0, 500.0, {"short": 7_000_000, "long": 7_300_000})
    assert found["cache_teacher_hours"] == pytest.approx(2.0)
    assert found["break_even_passes"] == pytest.approx(2.0) and found["break_even_tokens"] == pytest.approx(7_200_000)
    assert found["students"]["short"]["live_teacher_hours"] == pytest.approx(7000 / 3600)
    assert [of["cache_is_ahead"] for of in found["students"].values()] == [False, True]
    # Whoever is ahead has spent fewer teacher hours: the definition, against the threshold.
    for of in found["students"].values():
        assert of["cache_is_ahead"] == (found["cache_teacher_hours"] < of["live_teacher_hours"])
    lines = summary(found)
    assert "2.00 passes" in lines[0] and "assumed" not in lines[0]
    assert lines[1].endswith("a live teacher would have cost less so far") and lines[2].endswith("the cache is ahead")


def test_an_unknown_build_speed_is_said_to_be_assumed():
    found = break_even(100, 10.0, None, {})
    assert found["build_rate_assumed"] and found["break_even_passes"] == 1
    assert "assumed" in summary(found)[0]

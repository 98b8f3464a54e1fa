"""Caches that join a run later: the rows of every step, against a plain count; and what does not fit is refused."""

import numpy as np
import pytest
from toy_pipeline import cache_options, call

from qat_lora.cache.read.dataset import KDCacheDataset, LaterConfig, MixedCaches
from qat_lora.commands import cache
from qat_lora.data.shuffle import global_batch
from qat_lora.data.sources import TextConfig
from qat_lora.errors import CacheError, ConfigError


@pytest.fixture(scope="module")
def caches(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("mixed")
    call("build_cache", cache_options(tiny, root / "first", num_rows=24, eval_rows=0))
    text = TextConfig(dataset=str(tiny.held_out))
    for name, rows in (("second", 5), ("third", 7)):
        call("build_cache", cache_options(tiny, root / name, text=text, num_rows=rows, eval_rows=0))
    return root


def test_the_rows_of_every_step(caches):
    first, second, third = (KDCacheDataset(str(caches / name)) for name in ("first", "second", "third"))
    mixed = MixedCaches(str(caches / "first"))
    later = LaterConfig((f"{caches}/second@2", f"{caches}/third@4", f"{caches}/none@9"), later_share=0.25)
    mixed.join(later, until=9)  # what joins at its end need not be there
    for step in range(9):
        order = global_batch(24, step, 8, 3)
        wanted = [first.rows(order if step < 2 else order[:6])]
        if step >= 2:
            newest, begin = (second, 2) if step < 4 else (third, 4)
            wanted.append(newest.rows(global_batch(len(newest), step - begin, 2, 3)))
        halves = [list(mixed.batches(step, 1, 2, 2, 3, replica, 2)) for replica in range(2)]
        found = [halves[0][0], halves[1][0], halves[0][1], halves[1][1]]
        for name in wanted[0]:
            whole = np.concatenate([batch[name] for batch in found])
            assert np.array_equal(whole, np.concatenate([batch[name] for batch in wanted])), (step, name)
    alone = MixedCaches(str(caches / "first"))
    assert np.array_equal(*(next(iter(d.batches(3, 1, 8, seed=3)))["input_ids"] for d in (alone, first)))


def test_the_rows_of_a_step_that_is_held_out_are_in_no_other(caches, monkeypatch):
    """Also where later caches join, and where their epochs end."""
    mixed = MixedCaches(str(caches / "first"))
    mixed.join(LaterConfig((f"{caches}/second@2", f"{caches}/third@4"), later_share=0.25), until=9)
    monkeypatch.setattr(mixed, "rows", lambda numbers: numbers)

    def rows_of_steps(**how):
        steps = [np.concatenate(list(mixed.batches(step, 1, 4, 2, 3, **how))) for step in range(12)]
        return [numbers[numbers >= 0].tolist() for numbers in steps]

    usual = rows_of_steps()
    assert min(map(len, usual)) < 8, "a step is not full"
    for held_out in range(12):
        found = rows_of_steps(held_out=held_out)
        measured = found[held_out]
        assert len(measured) == 8
        for step in (step for step in range(12) if step != held_out):
            assert found[step] == [number for number in usual[step] if number not in measured]


def test_a_later_cache_may_have_the_tails_entropy_that_the_first_lacks_but_not_the_reverse(tiny, tmp_path, monkeypatch):
    make, settings = cache.optional_arrays, {"num_rows": 4, "eval_rows": 0, "tail_draws": 2}
    call("build_cache", cache_options(tiny, tmp_path / "new", **settings))
    monkeypatch.setattr(cache, "optional_arrays", lambda *arrays: make(*arrays[:6]))
    call("build_cache", cache_options(tiny, tmp_path / "old", **settings))
    mixed = MixedCaches(str(tmp_path / "old"))
    mixed.join(LaterConfig((f"{tmp_path}/new@1",)), 2)
    assert "tail_entropy" not in mixed.rows([0, 5]) and "tail_entropy" in KDCacheDataset(str(tmp_path / "new")).rows(
        [0]
    )
    with pytest.raises(CacheError, match="another contents than"):
        MixedCaches(str(tmp_path / "new")).join(LaterConfig((f"{tmp_path}/old@1",)), 2)


def test_what_does_not_fit_is_refused(caches, tiny, tmp_path):
    call("build_cache", cache_options(tiny, tmp_path / "other", num_rows=4, eval_rows=0, value_dtype="uint8"))
    with pytest.raises(CacheError, match="another contents than"):
        MixedCaches(str(caches / "first")).join(LaterConfig((f"{tmp_path}/other@1",)), 2)
    with pytest.raises(CacheError, match="rows: .*allowed: 0 to 23"):
        MixedCaches(str(caches / "first")).rows([24])
    for wrong in (("x",), ("x@-1",), ("x@2", "y@1"), ("@3",)):
        with pytest.raises(ConfigError, match="later_caches: .* PATH@STEP"):
            LaterConfig(wrong)

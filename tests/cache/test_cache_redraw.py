"""Draws from the tail behind fewer entries: distributed like the larger tail, and the same every time."""

import numpy as np

from qat_lora.cache.format.redraw import redraw, redraw_uniforms

VOCAB, TOP_K, K, POSITIONS, DRAWS = 23, 9, 3, 400, 50


def problem(seed=0):
    """One teacher at every position, with all draws of its stored tail."""
    rng = np.random.default_rng(seed)
    probs = np.sort(rng.dirichlet(np.full(VOCAB, 0.5)))[::-1]
    ids = rng.permutation(VOCAB)
    stored = rng.choice(ids[TOP_K:], size=(POSITIONS, DRAWS), p=probs[TOP_K:] / probs[TOP_K:].sum()).astype(np.int32)
    dropped = np.tile(ids[K:TOP_K], (POSITIONS, 1))
    log_probs = np.tile(np.log(probs[K:TOP_K]), (POSITIONS, 1))
    log_tail = np.full(POSITIONS, np.log(probs[TOP_K:].sum()), np.float32)
    row = (rng.integers(0, VOCAB, POSITIONS + 1).astype(np.int32), np.zeros(POSITIONS + 1, np.uint8))
    return probs, ids, stored, dropped, log_probs, log_tail, row


def again(draws, dropped, log_probs, log_tail, row, seed):
    redraw(draws, dropped, log_probs, log_tail, redraw_uniforms(row, seed, dropped.shape[1], draws.shape[1]))


def chi_square(draws, probs, ids):
    """Squared deviations from the larger tail, each over its expectation; about as many as it has tokens, less one."""
    expected = probs[K:] / probs[K:].sum() * draws.size
    found = np.array([(draws == token).sum() for token in ids[K:]])
    return ((found - expected) ** 2 / expected).sum()


def test_draws_follow_the_larger_tail_and_the_stored_ones_do_not():
    probs, ids, stored, *rest = problem()
    draws = stored.copy()
    again(draws, *rest, seed=7)
    freedom = VOCAB - K - 1
    assert not np.isin(draws, ids[:K]).any()
    assert chi_square(draws, probs, ids) < freedom + 4 * np.sqrt(2 * freedom)
    assert chi_square(stored, probs, ids) > 100 * freedom  # positive control


def test_the_choice_depends_on_seed_and_row_alone():
    _, _, stored, *rest, row = problem()
    first, second, other_seed, other_row = (stored.copy() for _ in range(4))
    again(first, *rest, row, seed=7)
    again(second, *rest, row, seed=7)
    again(other_seed, *rest, row, seed=8)
    again(other_row, *rest, (row[0] + 1, row[1]), seed=7)
    assert np.array_equal(first, second)
    assert (first != other_seed).any() and (first != other_row).any()


def test_an_empty_stored_tail_gives_entries_of_the_head_only():
    _, ids, stored, dropped, log_probs, log_tail, row = problem()
    again(stored, dropped, log_probs, np.full_like(log_tail, -np.inf), row, seed=0)
    assert np.isin(stored, ids[K:TOP_K]).all()

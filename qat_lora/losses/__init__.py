"""Losses: pure functions that return a sum and a token count, so that any split of a batch adds up to the same."""

"""Quantise a model layer by layer, by what its inputs are."""

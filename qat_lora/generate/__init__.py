"""Continuing a prompt, with one of our models or with a GGUF export."""

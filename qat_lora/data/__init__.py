"""Text: sources, layouts, tokens, packed rows, and their order in training."""

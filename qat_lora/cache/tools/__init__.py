"""Look at, verify, export a KD cache."""

"""Read rows of a KD cache for training."""

"""Hugging Face models: loading, adapters, quantised and packed checkpoints, device maps."""

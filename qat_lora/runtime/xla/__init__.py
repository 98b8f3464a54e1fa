"""The runtimes of PyTorch/XLA."""

"""The host's part of every runtime: group exchange, prefetch, readback, memory, signals, files."""

"""What every runtime uses of the host: memory, signals, readback, random states."""

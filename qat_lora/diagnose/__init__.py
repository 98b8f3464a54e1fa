"""What is wrong here, does it work, will it fit: `doctor`, `smoke` and `estimate`."""

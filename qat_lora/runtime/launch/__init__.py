"""Choose the device and start its processes."""

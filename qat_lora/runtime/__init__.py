"""The only place that knows a device: what a runtime must do, and the runtimes that do it."""

"""Dry runs and estimates: memory, time and disk of a command, from shapes alone."""

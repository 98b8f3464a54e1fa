"""Files on disk: atomic, listed, checked, locked."""

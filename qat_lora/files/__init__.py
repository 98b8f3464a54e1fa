"""Files on disk: atomic, listed, checksummed, locked."""

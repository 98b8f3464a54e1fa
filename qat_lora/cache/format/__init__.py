"""The bytes of a KD cache: layout, codec, records."""

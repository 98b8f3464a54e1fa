"""What a quantised weight is: spec and presets, code books, scales, packing and how to find the best start."""

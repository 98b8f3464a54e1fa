"""What the compilers of chips make of a run, on a machine without the chips."""

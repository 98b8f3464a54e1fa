"""The commands: a file each, with the function that builds every part from its options and runs it."""

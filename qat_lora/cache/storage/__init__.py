"""Where the files of a cache lie."""

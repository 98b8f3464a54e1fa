"""Standard output and error that take any text, whatever the terminal's encoding.

Our lines hold "·" and "…", and names of files need not be text at all. A terminal in ASCII or Latin-1 raises on both,
in the middle of a run that has nothing else wrong. Python's own switch for it (`PYTHONIOENCODING=ascii:replace`) has to
be known and set beforehand. So while a command runs, what cannot be printed is replaced; files stay UTF-8.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def any_text() -> Iterator[None]:
    """Replace what an output stream cannot encode: by `?`, or in UTF-8 (lone surrogates only) by its escape."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    before = [stream.errors for stream in streams]

    def set_errors(stream: io.TextIOWrapper, errors: str) -> None:
        with contextlib.suppress(ValueError):  # closed meanwhile
            stream.reconfigure(errors=errors)

    for stream in streams:
        is_utf8 = stream.encoding.lower().replace("-", "") == "utf8"
        set_errors(stream, "backslashreplace" if is_utf8 else "replace")
    try:
        yield
    finally:
        for stream, errors in zip(streams, before, strict=True):
            set_errors(stream, errors or "strict")

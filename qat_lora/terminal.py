"""What is printed: any text in any encoding, and no credentials; colours and bars as the terminal takes them.

Our lines contain "·" and "…", and file names need not be valid text at all. A terminal in ASCII or Latin-1 would raise
on both in the middle of a healthy run, and Python's own switch (`PYTHONIOENCODING=ascii:replace`) must be set
beforehand. So while a command runs, characters that cannot be printed are replaced (`any_text`); files stay UTF-8.

Drivers accept addresses such as `s3://KEY:SECRET@bucket/cache` and `https://host/cache?token=…`, and messages,
`config.yaml` and results quote addresses. `redact` is applied wherever text leaves: in the constructor of our errors,
in status lines, in printed results and in files of settings. Credentials in the environment are safer still.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import click

HIDDEN = "***"
# In Azure's addresses a container stands where others have a name or a token: `abfs://container@account/path`.
_CONTAINERS = ("abfs", "abfss", "az", "wasb", "wasbs")
_NO_CONTAINER = "".join(rf"(?<!\b{scheme}:{slashes})" for scheme in _CONTAINERS for slashes in ("/", "//"))
# `user:secret`, or a token alone, up to the last @ before a slash. A secret of AWS may hold slashes; a path that went
# through pathlib has one slash left of two.
_SECRET = rf"(?:[^/\s@:'\"]*:[^\s@'\"]+|{_NO_CONTAINER}[^/\s@'\"]+)(?:@[^/\s@'\"]*)*"
_USER = re.compile(rf"(?<=[\w+.-]:/)(/?)({_SECRET})(?=@)")
_PARAMETER = re.compile(r"([?&][\w.-]*(?:token|secret|key|sig|pass|credential|auth)[\w.-]*=)[^&\s'\"]+", re.IGNORECASE)


def redact(text: str, address: str = "") -> str:
    """Return a text with `***` for credentials in its addresses, and for those of `address` wherever they stand."""
    for found in _USER.finditer(address):
        text = text.replace(found[2], HIDDEN)
    return _PARAMETER.sub(rf"\g<1>{HIDDEN}", _USER.sub(rf"\g<1>{HIDDEN}", text))


@contextlib.contextmanager
def any_text() -> Iterator[None]:
    """Replace what an output stream cannot encode: by `?`, or in UTF-8 (lone surrogates only) by its escape."""
    before = {stream: stream.errors for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)}
    for stream in before:
        is_utf8 = stream.encoding.lower().replace("-", "") == "utf8"
        with contextlib.suppress(ValueError):  # closed before
            stream.reconfigure(errors="backslashreplace" if is_utf8 else "replace")
    try:
        yield
    finally:
        for stream, errors in before.items():
            with contextlib.suppress(ValueError):  # closed meanwhile
                stream.reconfigure(errors=errors or "strict")


def highlight(text: str, stream: TextIO | None, **style: Any) -> str:
    """Return a text in a style of click's, plain unless the stream is a terminal and NO_COLOR is not set."""
    with contextlib.suppress(AttributeError, ValueError):  # there is no stream, or it was closed
        if stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":  # type: ignore[union-attr]
            return click.style(text, **style)
    return text


def bars_by_terminal() -> None:
    """Fit progress bars to the terminal's width, and make them rare in logs; tqdm reads these variables at import."""
    os.environ.setdefault("TQDM_DYNAMIC_NCOLS", "1")
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "30")
        os.environ.setdefault("TQDM_MAXINTERVAL", "60")


def echo(text: str, err: bool = False) -> None:
    """Print a text, credentials in addresses hidden."""
    click.echo(redact(text), err=err)

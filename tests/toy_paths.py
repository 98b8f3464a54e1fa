"""Where the toys of the tests lie; a module of its own, since there is more than one `conftest`."""

from pathlib import Path
from typing import NamedTuple


class Tiny(NamedTuple):
    teacher: Path
    text: Path
    held_out: Path

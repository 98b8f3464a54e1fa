"""Optional dependencies: imported where they are used, or an error that holds the install command."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from qat_lora.errors import MissingExtraError


def require(module: str, extra: str) -> Any:
    """Import an optional module by its dotted name; `extra` is the extra of this package that installs it.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtraError(f"{module} is not installed: pip install 'qat-lora[{extra}]'") from None


def pyplot() -> Any:
    """Return matplotlib.pyplot, drawing to files only; in a notebook its own backend stays, for the user's figures.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    matplotlib = require("matplotlib", "plot")
    if "ipykernel" not in sys.modules:
        matplotlib.use("Agg")
    return require("matplotlib.pyplot", "plot")

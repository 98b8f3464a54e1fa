"""Optional dependencies: imported where they are used, or an error that holds the install command."""

import importlib
import sys
from typing import Any

from qat_lora.errors import MissingExtraError

# The extra with fsspec's driver, by the scheme of a URL.
URL_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3", "hf": "hub"}


def require(module: str, extra: str) -> Any:
    """Import an optional module; MissingExtraError: this package's `extra`, which installs it, is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtraError(f"{module} is not installed: pip install 'qat-lora[{extra}]'") from None


def pyplot() -> Any:
    """Return matplotlib.pyplot, drawing to files only; in a notebook its own backend stays, for the user's figures."""
    matplotlib = require("matplotlib", "plot")
    if "ipykernel" not in sys.modules:
        matplotlib.use("Agg")
    return require("matplotlib.pyplot", "plot")

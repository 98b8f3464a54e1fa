"""Pictures: one palette and one style for all, and a file that is whole or not there.

The palette is here and nowhere else, so a model has one colour in every picture. The style holds for our pictures only
(`rc_context`): in a notebook the user's own figures stay as they are.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qat_lora.extras import pyplot
from qat_lora.files.folders import atomic_file

INK, FAINT = "#1f2933", "#9aa5b1"
COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#cb912f", "#337ea9", "#787774")
STYLE: dict[str, Any] = {"font.size": 9, "axes.titlesize": 10, "legend.fontsize": 8, "axes.edgecolor": FAINT}
STYLE |= {"axes.titleweight": "bold", "axes.titlelocation": "left", "axes.prop_cycle": f"cycler('color', {COLOURS})"}
STYLE |= dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK)
STYLE |= dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False)


@contextlib.contextmanager
def drawn_to(
    out: Path, rows: int = 1, columns: int = 1, *, size: tuple[float, float], **more: Any
) -> Iterator[tuple[Any, Any]]:
    """Give a figure of `size` inches and its axes [rows, columns], saved as PNG at the end; needs matplotlib."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **more)
        try:
            yield figure, axes
            with atomic_file(out) as draft:
                figure.savefig(draft, dpi=150)
        finally:
            plt.close(figure)

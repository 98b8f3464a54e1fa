"""The finished pieces of an interrupted run, kept in its folder `unfinished` until the whole is done.

This is the store behind the protocol `layers.calibrate.quantize.Work`; the layers know no folder. Every piece is a
folder that appears whole or not at all (`files`) and carries its checksums, so whatever a kill leaves can be trusted.
All checksums are verified before a run goes on. A damaged piece is removed and made again, which gives the same bytes,
because it is made from the model, the text and earlier pieces, all of them verified.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from qat_lora.errors import DamagedFileError, InterruptedRunError
from qat_lora.files.checksums import check_sums, write_sums
from qat_lora.files.folders import atomic_dir, discard, failpoint, is_ours, remove_leftovers
from qat_lora.layers.calibrate.quantize import Kept, Work

FOLDER = "unfinished"
TENSORS, FACTS = "tensors.safetensors", "facts.json"


class Unfinished(Work):
    """The pieces of one run, in its folder `out`, which this process holds."""

    def __init__(self, out: Path, unit: str, total: int, stopped: list[str]) -> None:
        """Check what is there of the `total` parts, called `unit` for people; `stopped` fills when a signal arrives."""
        self.folder, self.unit, self.total, self.stopped = out / FOLDER, unit, total, stopped
        remove_leftovers(self.folder)
        for piece in _pieces(out):
            try:
                check_sums(piece, True, (TENSORS, FACTS))
            except DamagedFileError as error:
                reason = str(error).split(";")[0]
                print(f"{reason}; it is made again, which gives what it was", file=sys.stderr, flush=True)
                discard(piece)

    @property
    def parts(self) -> int:
        """How many parts are finished."""
        return sum(len(json.loads(file.read_text(encoding="utf-8"))) for file in self.folder.glob(f"*/{FACTS}"))

    def take(self, name: str) -> Kept | None:
        """Return a piece that was kept, its tensors as views of its file; None where it is still to be done."""
        self.may_stop()
        piece = self.folder / name
        if not (piece / FACTS).is_file():
            return None
        return load_file(piece / TENSORS), json.loads((piece / FACTS).read_text(encoding="utf-8"))

    def keep(self, name: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Write a finished piece, so that it stays after a power cut."""
        kind = name.partition("-")[0]
        with atomic_dir(self.folder / name) as draft:
            save_file({part: tensor.contiguous().cpu() for part, tensor in tensors.items()}, draft / TENSORS)
            (draft / FACTS).write_text(json.dumps(facts), encoding="utf-8")
            failpoint(f"{kind}-written")
            write_sums(draft, (TENSORS, FACTS))
        failpoint(f"{kind}-kept")

    def may_stop(self) -> None:
        """Raise InterruptedRunError where a stop signal has arrived."""
        if self.stopped:
            kept = f"{self.parts} of {self.total} {self.unit} are finished and kept in {self.folder.parent}"
            raise InterruptedRunError(f"stopped by {self.stopped[0]}: {kept}; the same command goes on from there")


def remove_pieces(out: Path) -> None:
    """Remove the pieces of a run that is complete."""
    for piece in _pieces(out):
        discard(piece)
    remove_leftovers(out / FOLDER)
    with contextlib.suppress(OSError):  # there is none, or it holds something of others
        (out / FOLDER).rmdir()


def _pieces(out: Path) -> list[Path]:
    return sorted(piece for piece in (out / FOLDER).glob("[!.]*") if is_ours(piece / FACTS))

"""`rounds`: a student learns from a cache, writes, and learns from its teacher's logits of what it wrote, in turns.

Every phase is another command in a process of its own, printed as it could be typed, so the teacher is never in memory
while the student trains. All rounds are one run of `recover` with one schedule of the learning rate: a run begun anew
would pay for warm-up and a high rate again. The folders of the phases say what is done, and each goes on by itself.
"""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from qat_lora.cache.format.layout import MANIFEST
from qat_lora.cache.storage.store import read_manifest
from qat_lora.errors import FailedError, InterruptedRunError
from qat_lora.options import RoundsOptions
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.host.signals import passed_on
from qat_lora.setup.common import run_name, say


def rounds(options: RoundsOptions, runtime: Runtime) -> Path:
    """Run the phases that are not complete; return the folder of the run. FailedError: one failed, and said why."""
    run, parts = options.run, options.rounds + 1
    out = Path(run.out or f"runs/rounds_{run_name(str(options.checkpoint))}")
    joins = {out / f"round-{number}": options.max_steps * number // parts for number in range(1, parts)}
    held = read_manifest(str(options.kd_cache_dir)).fingerprint
    where = {"device": run.device, "dtype": run.dtype, "quiet": run.quiet or run.json}
    same = {name: getattr(options, name) for name in ("checkpoint", "kd_cache_dir", "max_steps", "later_share")}
    later = ",".join(f"{cache}@{step}" for cache, step in joins.items())
    training = {**same, "out": out / "run", "seed": run.seed, "later_caches": later, **where}
    writing = {"teacher": held.teacher, "writer": out / "run" / "last", "dataset": options.dataset} | where
    writing |= held.contents._asdict() | {"temperatures": ",".join(f"{t:g}" for t in held.temperatures)}
    writing |= {"hidden": bool(held.contents.hidden), "texts": options.round_texts, "weights": None, "lzma": None}
    writing["tail_entropy"] = None
    writing |= {"row_codec": "lzma"} if held.contents.lzma else {}
    for number, (cache, step) in enumerate(joins.items(), 1):
        if not (cache / MANIFEST).is_file():
            _phase(options, "recover", {**training, "until_step": step}, options.recover)
            own = {"out": cache, "seed": run.seed + number}  # other draws, and other prompts where there are more
            _phase(options, "cache generate", writing | own, options.generate)
    _phase(options, "recover", training, options.recover)
    return out / "run"


def _phase(options: RoundsOptions, command: str, settings: dict[str, Any], more: str) -> None:
    """Run a command with settings, and more as they were typed, in a process of its own."""
    given = [f"{name}={value}" for name, value in settings.items() if value is not None]
    words = [*command.split(), *given, *shlex.split(more)]
    say(options.run, f"$ {shlex.join(['qat-lora', *words])}")
    start, silent = "from qat_lora.cli import main; main()", options.run.json
    process = subprocess.Popen([sys.executable, "-c", start, *words], stdout=subprocess.DEVNULL if silent else None)
    with passed_on(lambda: [process.pid]) as signals:
        if (code := process.wait()) or signals:
            kind = InterruptedRunError if signals else FailedError
            raise kind(f"rounds: {command} ended with exit code {code}; the same command goes on from there")

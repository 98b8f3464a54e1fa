"""What usually comes after a command: one line to paste, with the names that the command knows; CAPITALS are open."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qat_lora.cache.storage.store import read_manifest
from qat_lora.options import RecoverOptions

# Held-out text that others report too.
WIKITEXT = "--dataset Salesforce/wikitext --dataset-config wikitext-2-raw-v1 --split test --format wikitext"


def next_command(words: str, options: Any, result: Any) -> str | None:
    """Return the command line for after `words` ended with a `result`; None where nothing follows."""
    if getattr(options, "dry_run", False) or not isinstance(result, Path | dict):
        return None
    found = _next(words, options, str(result))
    return shlex.join(["qat-lora", *map(str, found)]) if found else None


def _next(words: str, options: Any, out: str) -> Sequence[Any]:
    match words:
        case "cache build":
            return "quantize", "--model", options.teacher or "MODEL", "--kd-cache-dir", out
        case "quantize" if options.kd_cache_dir:
            return "recover", "--checkpoint", out, "--kd-cache-dir", options.kd_cache_dir
        case "quantize":
            return "cache", "build", "--teacher", options.model, "--dataset", options.text.dataset or "TEXT"
        case "recover" | "qat" if not isinstance(options, RecoverOptions) or options.uses_cache:
            teacher = read_manifest(options.kd_cache_dir).fingerprint.teacher
            return "eval", "--teacher", teacher, "--students", out, *shlex.split(WIKITEXT)
        case "recover":
            return "export", "--student", out
        case "eval" if options.students:
            student = options.students[-1].rpartition("=")[2]
            told = Path(student, "result.json")
            if told.is_file() and '"form"' in told.read_text(encoding="utf-8"):  # an export is not exported again
                return _next("export", options, student)
            return "export", "--student", student, "--scores", options.run.out or "runs/eval"
        case "export":
            return "push", out, "OWNER/NAME", "--dry-run"
    return ()

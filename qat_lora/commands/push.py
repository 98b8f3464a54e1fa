"""The command that uploads an exported folder to the Hugging Face Hub."""

from pathlib import Path
from typing import Any

from qat_lora.export.hub import check_repo, files_to_upload, upload, upload_summary
from qat_lora.options import PushOptions
from qat_lora.runtime.base import Runtime
from qat_lora.setup.common import say


def push(options: PushOptions, runtime: Runtime, api: Any = None) -> dict[str, object]:
    """Check a folder, and upload it from the main process unless it is a dry run; ModelError, ConfigError: why not."""
    run, folder, repo = options.run, Path(str(options.folder)), str(options.repo)
    check_repo(repo)
    files = files_to_upload(folder)
    result = upload_summary(folder, files) | {"repo": repo, "uploaded": False}
    for name, size_bytes in files.items():
        say(run, f"{size_bytes:>14,}  {name}")
    size = f"{len(files)} files, {result['size_bytes']:,} bytes"
    if options.dry_run:
        say(run, f"{size}, fit to go to {repo}; nothing was uploaded (--dry-run)")
    elif runtime.is_main:
        url = upload(folder, files, repo, options.private, api)
        say(run, f"{size}, uploaded: {url}")
        result |= {"uploaded": True, "url": url}
    return result

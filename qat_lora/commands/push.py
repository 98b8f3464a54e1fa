"""The command that uploads an exported folder to the Hugging Face Hub.

One commit with all files or none: a repository never shows a card without its weights.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from qat_lora.errors import ConfigError, ModelError
from qat_lora.export.shipping import files_to_ship, summary
from qat_lora.options import PushOptions
from qat_lora.runtime.base import Runtime
from qat_lora.setup.common import say

REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def push(options: PushOptions, runtime: Runtime, api: Any = None) -> dict[str, object]:
    """Check a folder and upload it; with `dry_run` only check.

    Args:
        options: the folder and where it goes.
        runtime: unused but for who speaks: one process uploads.
        api: what talks with the Hub; default: `huggingface_hub.HfApi()`, with the login that is there.

    Raises:
        ModelError: something in the folder must not go, or the Hub refuses.
        ConfigError: `repo` is no repository name.
    """
    run, folder, repo = options.run, Path(str(options.folder)), str(options.repo)
    if not REPO.fullmatch(repo):
        raise ConfigError(f"repo: {repo!r} is no repository name; give OWNER/NAME")
    files = files_to_ship(folder)
    result = summary(folder, files) | {"repo": repo, "uploaded": False}
    for file in files:
        say(run, f"{file.size_bytes:>14,}  {file.name}")
    total = sum(file.size_bytes for file in files)
    if options.dry_run:
        say(run, f"{len(files)} files, {total:,} bytes, fit to go to {repo}; nothing was uploaded (--dry-run)")
        return result
    if not runtime.is_main:
        return result
    from huggingface_hub import CommitOperationAdd, HfApi

    api = api or HfApi()
    try:
        api.create_repo(repo, private=options.private, exist_ok=True)
        # Not upload_folder: its allow_patterns are patterns, and a file may be named `*`.
        commit = api.create_commit(
            repo_id=repo,
            operations=[CommitOperationAdd(file.name, str(folder / file.name)) for file in files],
            commit_message="Upload a model exported by qat-lora",
        )
    except Exception as error:  # of the network, the login or the Hub: all are the user's to mend
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(f"repo: {repo} did not take the upload ({reason}); log in with `hf auth login`") from None
    url = str(getattr(commit, "commit_url", commit))
    say(run, f"{len(files)} files, {total:,} bytes, uploaded: {url}")
    return result | {"uploaded": True, "url": url}

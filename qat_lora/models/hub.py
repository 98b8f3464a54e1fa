"""Settings of fetching models, without transformers, so that the command line reads them at once."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from qat_lora.config import option


@dataclass(frozen=True)
class HubConfig:
    """How models are fetched."""

    revision: str | None = option(None, "branch, tag or commit of the model on the Hub")
    trust_remote_code: bool = option(False, "run Python code that comes with the model")


DEFAULT_HUB = HubConfig()


def local_folder(name: str | Path, *files: str, revision: str | None = None) -> Path | None:
    """Return the folder with one of these files of a model that is here or was fetched from the Hub, None for none."""
    folder = Path(name).expanduser()
    if any((folder / file).is_file() for file in files):
        return folder
    from huggingface_hub import try_to_load_from_cache

    with contextlib.suppress(ValueError):  # of no Hub name
        found = (try_to_load_from_cache(str(name), file, revision=revision) for file in files)
        return next((Path(file).parent for file in found if isinstance(file, str)), None)
    return None

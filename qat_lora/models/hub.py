"""Settings of fetching models, without transformers, so that the command line reads them at once."""

from dataclasses import dataclass
from pathlib import Path

from qat_lora.config import option


@dataclass(frozen=True)
class HubConfig:
    """How models are fetched."""

    revision: str | None = option(None, "branch, tag or commit of the model on the Hub")
    trust_remote_code: bool = option(False, "run Python code that comes with the model")


DEFAULT_HUB = HubConfig()


def local_folder(name: str | Path, *files: str) -> Path | None:
    """Return the folder with one of these files of a model that is here or was fetched from the Hub, None for none."""
    folders = [Path(name).expanduser()]
    if str(name).count("/") == 1:
        from huggingface_hub import try_to_load_from_cache

        fetched = [try_to_load_from_cache(str(name), file) for file in files]
        folders += [Path(file).parent for file in fetched if isinstance(file, str)]
    return next((folder for folder in folders if any((folder / file).is_file() for file in files)), None)

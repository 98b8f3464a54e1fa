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


def local_tokenizer(name: str | Path | None) -> Path | None:
    """Return the folder with the tokenizer of a model that is here, or was fetched from the Hub; None for others."""
    if name is None:
        return None
    folder = Path(name).expanduser()
    if not (folder / "tokenizer.json").is_file() and str(name).count("/") == 1:
        from huggingface_hub import try_to_load_from_cache

        fetched = try_to_load_from_cache(str(name), "tokenizer.json")
        folder = Path(fetched).parent if isinstance(fetched, str) else folder
    return folder if (folder / "tokenizer.json").is_file() else None

"""Settings of fetching models, without transformers, so that the command line reads them at once."""

from __future__ import annotations

from dataclasses import dataclass

from qat_lora.config import option


@dataclass(frozen=True)
class HubConfig:
    """How models are fetched."""

    revision: str | None = option(None, "branch, tag or commit of the model on the Hub")
    trust_remote_code: bool = option(False, "run Python code that comes with the model")


DEFAULT_HUB = HubConfig()

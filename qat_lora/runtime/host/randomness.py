"""The state of torch's random generators as text, so that a resumed run draws what the first would have drawn."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import torch


def random_states() -> dict[str, str]:
    """Return the state of the CPU's generator, and of CUDA's where it is in use, by device, in base64."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def set_random_states(texts: Mapping[str, str]) -> None:
    """Restore what `random_states` returned; a state for a device that is not in use here is left out."""
    states = {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8) for name, text in texts.items()
    }
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])

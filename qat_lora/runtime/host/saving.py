"""What a checkpoint takes from the device: tensors as a safetensors file, states of random generators as text."""

import base64
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from qat_lora.files.folders import atomic_file, fsync


def save_tensors(tensors: Mapping[str, torch.Tensor], path: str | Path) -> None:
    """Write a safetensors file that appears whole or not at all, and stays after a power cut.

    It says `format: pt`, without which transformers refuses it. A tensor under two names is written twice.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as draft:
        save_file(_unshared(tensors), draft, metadata={"format": "pt"})
    fsync(path.parent)


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous CPU tensors of which no two share memory, as safetensors demands."""
    seen: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return plain


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

"""The variables of a process group: WORLD_SIZE, RANK and the others that torchrun or a scheduler sets.

They are read here only, and strictly. `export WORLD_SIZE=` in a job script, or a RANK that a scheduler left behind,
would otherwise be a traceback from inside torch, or worse: a process that takes itself for the third of one, so that
none is the main one and nothing is written.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from qat_lora.errors import ConfigError, DeviceError

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
HOW = "start through --num-chips N or `torchrun --nproc-per-node N`, or unset WORLD_SIZE"


class RankInfo(NamedTuple):
    """Which process of how many this is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the processes of this machine


def whole_number(environ: Mapping[str, str], name: str, default: int, least: int = 0) -> int:
    """Return a variable's number, the default where it is not set; ConfigError where it is none, or too small."""
    text = environ.get(name)
    if text is None:
        return default
    if not (text.strip().isdecimal() and int(text) >= least):
        given = "empty" if not text.strip() else f"{text!r}"
        raise ConfigError(f"{name}: is {given} in the environment; allowed: a number from {least}; unset {name}")
    return int(text)


def group_size(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many processes were started together; 1 without WORLD_SIZE, ConfigError where it is no number."""
    return whole_number(environ, "WORLD_SIZE", 1, least=1)


def rank_info(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Return this process's rank; rank 0 of 1 without WORLD_SIZE, whatever else is set.

    ConfigError where a variable is no number, or a rank not among the processes; DeviceError where one is not set.
    """
    size = group_size(environ)
    rank, local_rank = (whole_number(environ, name, 0) for name in ("RANK", "LOCAL_RANK"))
    if size == 1:
        return RankInfo()
    missing = [name for name in NEEDED if not environ.get(name, "").strip()]
    if missing:
        raise DeviceError(f"WORLD_SIZE={size}: a process group also needs {', '.join(missing)}; {HOW}")
    whole_number(environ, "MASTER_PORT", 0, least=1)
    if rank >= size or local_rank >= size:
        raise ConfigError(f"RANK={rank}, LOCAL_RANK={local_rank}: ranks of {size} processes are 0 to {size - 1}; {HOW}")
    return RankInfo(rank, size, local_rank)

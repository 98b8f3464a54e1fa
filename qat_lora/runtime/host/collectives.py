"""A group of processes: who is in it, and exchange through the host by gloo (gradients on CUDA: by NCCL).

The exchange is the control plane of every group: a stop request, a decision of the main process. It needs no device, so
it never stops one, and it works where XLA has no collectives (on the CPU). There it carries the gradients too.

WORLD_SIZE, RANK and the others that torchrun or a scheduler sets are read here only, and strictly. `export WORLD_SIZE=`
in a job script, or a RANK that a scheduler left behind, would otherwise be a traceback from inside torch, or worse: a
process that takes itself for the third of one, so that none is the main one and nothing is written.
"""

import contextlib
import datetime
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from qat_lora.errors import ConfigError, DeviceError, ReplicaError

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
HOW = "start through --num-chips N or `torchrun --nproc-per-node N`, or unset WORLD_SIZE"
PATIENCE = datetime.timedelta(days=2)
"""How long a process waits for others through the host. Torch's 10 to 30 minutes would end a run whose main process
quantises or downloads meanwhile; a peer that has died is noticed within seconds (its connection, `launch/start.py`)."""
EXCHANGE = datetime.timedelta(minutes=10)  # between devices, once all hosts agree: NCCL sees no closed connection


@contextlib.contextmanager
def among_peers() -> Iterator[None]:
    """Turn torch's error for a lost process into `ReplicaError`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # gloo has no type of its own
        reason = str(error).strip().splitlines()[0]
        what = f"another process of this run ended or cannot be reached ({reason})"
        raise ReplicaError(f"process {os.environ.get('RANK', '?')}: {what}") from error


@contextlib.contextmanager
def _joining() -> Iterator[None]:
    """Hide gloo's remarks at joining, which it prints to standard output, where results belong."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere, among_peers():
            os.dup2(nowhere.fileno(), 1)
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def join(backend: str = "gloo", **where: Any) -> None:
    """Join the process group; where it meets is said as to `torch.distributed.init_process_group`."""
    with _joining():
        dist.init_process_group(backend, timeout=EXCHANGE if backend == "nccl" else PATIENCE, **where)


def gloo_group() -> dist.ProcessGroup | None:
    """Return a second group of the same processes, for what hosts exchange."""
    with _joining():
        return dist.new_group(backend="gloo", timeout=PATIENCE)


def agree(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return True in every process if the flag is set in any; all call it at the same place."""
    value = torch.tensor([float(flag)])
    with among_peers():
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return bool(value.item())


def mean_form(value: torch.Tensor) -> torch.Tensor:
    """Return a detached tensor that can hold a mean: counts become float32 (exact up to 2^24)."""
    value = value.detach()
    return value if value.is_floating_point() else value.float()


def flat_gradients(trained: Sequence[torch.nn.Parameter]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return gradients and a flat float32 copy; missing ones become zero, so that all processes have one layout."""
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in trained if p.grad is not None]
    return gradients, torch.cat([g.detach().float().reshape(-1) for g in gradients])


def put_back(gradients: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy a flat tensor's parts into the gradients that it was made of."""
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def free_port() -> int:
    """Return an unused TCP port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


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
    """Return this process's rank, 0 of 1 without WORLD_SIZE; ConfigError: no number or rank; DeviceError: unset."""
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

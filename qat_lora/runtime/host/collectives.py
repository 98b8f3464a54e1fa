"""Exchange between the processes of a group through the host, by gloo (gradients on CUDA: by NCCL).

The control plane of every group, whatever carries the gradients: a stop request, a decision of the main process. It
needs no device, so it never stops one, and it works where XLA has no collectives (on the CPU). There it carries the
gradients too.
"""

import contextlib
import datetime
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from qat_lora.errors import ReplicaError

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
        raise ReplicaError(
            f"process {os.environ.get('RANK', '?')}: another process of this run ended or cannot be reached ({reason})"
        ) from error


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


def flat_gradients(parameters: Sequence[torch.nn.Parameter]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the gradients of what trains and a flat float32 copy of them.

    A missing gradient becomes zero: processes have to agree on the layout even if a batch did not reach a parameter.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
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

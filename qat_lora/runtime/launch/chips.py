"""How many chips a run takes: what was asked for, what is possible here, and the variables that make it so.

A pure decision, like the choice of the device. `TPU_NUM_DEVICES`, which torch_xla's own error message recommends,
is read nowhere in torch_xla 2.9, and `xmp.spawn` takes no number but 1; what decides is the topology that libtpu is
told. So the number is translated into that: `TPU_VISIBLE_CHIPS` and bounds for one process over some chips, process
bounds alone for a process per chip (an inherited TPU_VISIBLE_CHIPS would give all of them the same chip).

Source: torch_xla/_internal/tpu.py and pjrt.py (2.9). The TPU variables are untested on hardware.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from qat_lora.config import option
from qat_lora.errors import ConfigError
from qat_lora.runtime.launch.process_group import group_size, whole_number

RUNS_ON_REAL_CHIPS = {"spawn": 0, "spmd": 0}
"""On how many TPU chips each way has been run so far; printed when several are used."""
ROW_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""How TPU chips of one host lie, as libtpu wants it."""


@dataclass(frozen=True)
class ChipsConfig:
    """How many chips, and how they are driven."""

    num_chips: str | None = option(
        None, "chips (on a CPU: processes) of this machine to use: a number, or all; default: 1, with spmd all"
    )
    parallel: Literal["spawn", "spmd"] = option(
        "spawn", "on XLA: spawn runs a process a chip, spmd one process over all chips"
    )
    shard_base: bool = option(False, "with spmd: spread the frozen weights over the chips instead of copying them")

    def __post_init__(self) -> None:
        if self.num_chips not in (None, "all") and not (self.num_chips.isdecimal() and int(self.num_chips)):
            raise ConfigError(f"num_chips: {self.num_chips!r} is no number of chips; allowed: 1 or more, or all")
        if self.shard_base and self.parallel != "spmd":
            raise ConfigError("shard_base: only one process over all chips can share weights; add --parallel spmd")


class Plan(NamedTuple):
    """What to start."""

    chips: int = 1
    """Replicas on this machine; 0 where only the device itself will tell (all of an unseen number)."""
    start: Literal["here", "group", "torch_xla"] = "here"
    """In this process; as processes of our own; or by PyTorch/XLA, a process a chip."""
    variables: Mapping[str, str] = {}
    """To set, where nothing is set yet, before the device is touched."""


def count_tpu_chips(root: Path = Path("/")) -> int:
    """Return the TPU chips of this host, 0 where none can be seen."""
    files = glob.glob(str(root / "dev/accel[0-9]*"))
    return len(files) or len([f for f in glob.glob(str(root / "dev/vfio/[0-9]*")) if Path(f).name.isdecimal()])


def plan_chips(
    config: ChipsConfig, kind: str, backend: str, environ: Mapping[str, str], *, cores: int, gpus: int, tpu_chips: int
) -> Plan:
    """Decide how a run on a chosen device is started; a pure function.

    Args:
        config: what was asked for.
        kind: `cpu`, `cuda`, `mps` or `xla`.
        backend: XLA's, `TPU` or `CPU`.
        environ: the process's variables.
        cores: of the CPU.
        gpus: CUDA devices.
        tpu_chips: of this host, 0 if unknown.

    Raises:
        ConfigError: a number that is not possible here; the message lists the possible ones.
    """
    on_tpu = kind == "xla" and backend == "TPU"
    asked = config.num_chips or (_from_variable(environ) if on_tpu else None)
    if config.parallel == "spmd" and kind != "xla":
        raise ConfigError("parallel: spmd exists on XLA only; give --tpu (or --device xla), or leave it out")
    if group_size(environ) > 1:
        return _in_a_group(config, asked, environ)
    if on_tpu:
        return _on_tpu(config, asked, environ, tpu_chips)
    if kind == "xla":
        return _on_xla_cpu(config, asked, environ)
    if kind == "mps":
        return Plan(_pick(asked, [1], 1, "Apple GPU"))
    possible = list(range(1, (gpus if kind == "cuda" else max(8, 4 * cores)) + 1))
    count = _pick(asked, possible, gpus if kind == "cuda" else cores, kind)
    return Plan(count, "group" if count > 1 else "here")


def _from_variable(environ: Mapping[str, str]) -> str | None:
    count = whole_number(environ, "TPU_NUM_DEVICES", 0, least=1)
    return str(count) if count else None


def _pick(asked: str | None, possible: list[int], everything: int, what: str) -> int:
    if asked is None:
        return 1
    if asked == "all":
        return everything
    if not asked.isdecimal() or int(asked) not in possible:
        whole_range = len(possible) > 2 and possible[-1] - possible[0] == len(possible) - 1
        allowed = f"{possible[0]} to {possible[-1]}" if whole_range else ", ".join(map(str, possible))
        raise ConfigError(f"num_chips: {asked} is not possible here ({what}); possible: {allowed}, or all")
    return int(asked)


def _in_a_group(config: ChipsConfig, asked: str | None, environ: Mapping[str, str]) -> Plan:
    """The processes are there already (torchrun); a number may only confirm theirs."""
    size = group_size(environ)
    here = whole_number(environ, "LOCAL_WORLD_SIZE", size, least=1)
    if config.parallel == "spmd":
        raise ConfigError(
            f"parallel: spmd is one process a machine, but WORLD_SIZE={size}; leave torchrun out, or --parallel spmd"
        )
    if asked not in (None, "all") and int(asked) not in (size, here):
        raise ConfigError(
            f"num_chips: {asked}, but this is one of {size} processes that were started already (WORLD_SIZE); "
            "leave --num-chips out, or start without torchrun"
        )
    return Plan(1)


def _on_xla_cpu(config: ChipsConfig, asked: str | None, environ: Mapping[str, str]) -> Plan:
    if config.parallel == "spmd":
        there = whole_number(environ, "CPU_NUM_DEVICES", 0, least=1)
        count = _pick(asked or "all", [there] if there else list(range(1, 9)), there or 1, "XLA on CPU")
        return Plan(count, variables={"CPU_NUM_DEVICES": str(count)})
    count = _pick(asked, [1], 1, "XLA on CPU has no exchange between processes; --parallel spmd takes up to 8")
    return Plan(count, "torch_xla" if asked else "here")


def _on_tpu(config: ChipsConfig, asked: str | None, environ: Mapping[str, str], chips: int) -> Plan:
    part = {4: 2, 8: 4}.get(chips)
    possible = sorted({1, *([part] if part else []), *([chips] if chips else [])})
    if config.parallel == "spmd":
        asked = asked or "all"
    count = _pick(asked, possible, chips, f"{chips or 'an unknown number of'} TPU chips")
    if asked in (None, "1"):
        bounds = {"TPU_CHIPS_PER_PROCESS_BOUNDS": ROW_BOUNDS[1], "TPU_PROCESS_BOUNDS": ROW_BOUNDS[1]}
        return Plan(1, variables={"TPU_VISIBLE_CHIPS": "0", **bounds})
    some = count == part
    if config.parallel == "spmd":
        visible = ",".join(map(str, range(count)))
        bounds = {"TPU_CHIPS_PER_PROCESS_BOUNDS": ROW_BOUNDS.get(count, ""), "TPU_PROCESS_BOUNDS": ROW_BOUNDS[1]}
        return Plan(count, variables={"TPU_VISIBLE_CHIPS": visible, **bounds} if some else {})
    if environ.get("TPU_VISIBLE_CHIPS"):
        raise ConfigError(
            f"TPU_VISIBLE_CHIPS={environ['TPU_VISIBLE_CHIPS']}: every process would take the same chip; unset it and "
            "give --num-chips, or use --parallel spmd"
        )
    return Plan(count, "torch_xla", {"TPU_PROCESS_BOUNDS": ROW_BOUNDS[count]} if some else {})

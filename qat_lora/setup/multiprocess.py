"""What a command does differently in several processes: fetching models, claiming folders, dividing a cache.

Only the main process writes shared files and decides; the others learn its decision by `Runtime.agree`.
"""

from __future__ import annotations

from dataclasses import replace

from qat_lora.cache.build.partition import Partition
from qat_lora.errors import ConfigError
from qat_lora.models.hub import HubConfig
from qat_lora.models.load import resolve_model
from qat_lora.options import CacheBuildOptions
from qat_lora.runtime.base import Runtime


def fetch(runtime: Runtime, name: str, hub: HubConfig) -> None:
    """Let the main process download a model that is not here yet, while the others wait for the files."""
    if runtime.is_main:
        resolve_model(name, hub.revision)
    runtime.barrier("model_download")


def refuse_spmd_over_hosts(runtime: Runtime) -> None:
    """Raise ConfigError for several hosts with one mesh of chips, for a command whose main process computes alone.

    A program of such a mesh runs only once every host has started it, so what one host computes by itself, quantising
    at the start and writing codes at the end, would wait for ever.
    """
    if runtime.processes > 1 and runtime.replicas != runtime.processes:
        raise ConfigError(
            f"parallel: spmd over {runtime.processes} hosts cannot run qat, whose first process computes alone at the "
            "start and at every export; leave --parallel out (a process a chip), or use one host"
        )


def as_builder(options: CacheBuildOptions, runtime: Runtime) -> CacheBuildOptions:
    """Return the options of this process's share of a cache: chip r of N of builder i/n is builder (i N + r)/(n N).

    Raises:
        ConfigError: one process drives several chips.
    """
    if runtime.replicas != runtime.processes:
        raise ConfigError("parallel: a cache is built by a process a chip, which share nothing; leave spmd out")
    if runtime.processes == 1:
        return options
    share = Partition.parse(options.builder)
    mine = Partition(share.builder * runtime.processes + runtime.rank, share.builders * runtime.processes)
    return replace(options, builder=str(mine))

"""`fleet`: what a scheduler must be told to run n builders of one cache, and what they are to cost.

The manifests are data (`fleets/`). Retries and preemption are left to the scheduler, which has both: a builder
that is started again goes on from its last shard, so there is no coordinator here that could fail itself.
"""

import math
import shlex
from pathlib import Path
from string import Template
from typing import Any

from qat_lora.cache.format import layout as fmt
from qat_lora.cli import OptionsCommand
from qat_lora.errors import ConfigError
from qat_lora.registry import COMMANDS
from qat_lora.terminal import echo

DATA = Path(__file__).parent / "fleets"
MACHINES = {"slurm": "1", "k8s": "nvidia.com/gpu", "skypilot": "H100:1", "xpk": "v6e-1"}  # of one machine
VOCAB_SIZE, ENTRY_BYTES = 151_936, 300  # where --vocab-size is not given; of a shard in the manifest, at most


def planned(options: Any, builders: int, rows: int, tokens_per_second: float, price: float) -> dict[str, Any]:
    """Return what a build of so many training rows takes; its shards are no more than a manifest can list."""
    vocab, drawn = options.vocab_size or VOCAB_SIZE, (options.draws_from_tail, options.draws)
    held = fmt.Contents(options.length, options.top_k, vocab, options.temperatures, options.value_dtype, *drawn)
    table = fmt.array_table(held)
    a_builder, most = -(-rows // builders), min(fmt.MANIFEST_LIMIT_BYTES // ENTRY_BYTES, 10**6) // builders
    shard_rows = max(options.shard_rows or fmt.default_shard_rows(table), -(-a_builder // most))
    hours, row = a_builder * options.length / tokens_per_second / 3600, fmt.row_bytes(table)
    found = {"tokens": rows * options.length, "bytes": rows * row, "shards": builders * -(-a_builder // shard_rows)}
    found |= {"shard_rows": shard_rows, "shard_bytes": shard_rows * row, "builders": builders}
    return {**found, "hours": hours, "cost": hours * builders * price}


def fleet(scheduler: str, settings: tuple[str, ...], builders: int, tokens: float | None, **words: Any) -> None:
    """Print a manifest; `words` are `tokens_per_second`, `price`, and what its template names."""
    build = OptionsCommand(COMMANDS["cache build"])
    options = build.options(build.make_context("cache build", list(settings)))  # errors here, not on n machines
    if not 0 < builders <= 100_000 or options.builder != "0/1":
        raise ConfigError(f"builders: {builders} with --builder {options.builder}; allowed: 1 to 100,000, no --builder")
    rate, price, plan = words.pop("tokens_per_second"), words.pop("price"), "no plan without --tokens or --num-rows"
    told = "computed, not measured: {tokens:,} tokens, {bytes:,} bytes, {shards:,} shards of {shard_bytes:,} bytes, "
    told += "{builders:,} builders, {hours:,.1f} hours, cost {cost:,.0f}"
    rows, more = options.num_rows or math.ceil((tokens or 0) / options.length), list[str]()
    if rows:
        cost = planned(options, builders, rows, rate, price)
        plan, more = told.format(**cost), [] if options.num_rows else ["--num-rows", str(rows)]
        more += [] if options.shard_rows == cost["shard_rows"] else ["--shard-rows", str(cost["shard_rows"])]
    command = shlex.join(["qat-lora", "cache", "build", *settings, *more])
    words |= {"machine": words["machine"] or MACHINES[scheduler], "command": command, "quoted": shlex.quote(command)}
    template = Template((DATA / f"{scheduler}.txt").read_text(encoding="utf-8"))
    echo(template.substitute(words, plan=plan, builders=builders, last=builders - 1).rstrip("\n"))

"""`fleet`: what a scheduler must be told to run n builders of one cache, and what they are to cost.

The manifests are templates (`fleets/`). Retries and preemption are left to the scheduler, which has both: a builder that
is started again goes on from its last shard, so there is no coordinator here that could fail itself.
"""

import math
import shlex
from pathlib import Path
from string import Template
from typing import Any

import click

from qat_lora.cache.format import layout as fmt
from qat_lora.cli import OptionsCommand
from qat_lora.registry import COMMANDS
from qat_lora.terminal import echo

# What each calls one machine's accelerator.
MACHINES = {"slurm": "1", "k8s": "nvidia.com/gpu", "skypilot": "H100:1", "xpk": "v6e-1"}
VOCAB_SIZE, ENTRY_BYTES = 151_936, 300  # where --vocab-size is not given; of a shard in the manifest, at most


def planned(options: Any, builders: int, rows: int, tokens_per_second: float, price: float) -> dict[str, Any]:
    """Return what a build of so many training rows takes, computed and not measured."""
    vocab, drawn = options.vocab_size or VOCAB_SIZE, (options.draws_from_tail, options.draws)
    held = fmt.Contents(options.length, options.top_k, vocab, options.temperatures, options.value_dtype, *drawn)
    table = fmt.array_table(held)
    most = min(fmt.MANIFEST_LIMIT_BYTES // ENTRY_BYTES, 10**6) // builders * builders
    usual = options.shard_rows or fmt.default_shard_rows(table)
    shard_rows = max(usual, -(-rows // most))
    hours = rows / builders * options.length / tokens_per_second / 3600
    cost = {"hours": hours, "cost": hours * builders * price}
    found = {"tokens": rows * options.length, "bytes": rows * fmt.row_bytes(table), "shard_rows": shard_rows}
    shards = builders * math.ceil(rows / builders / shard_rows)
    return {**found, "shard_bytes": shard_rows * fmt.row_bytes(table), "shards": shards, "builders": builders, **cost}


@click.command("fleet", help=COMMANDS["fleet"].help, context_settings={"ignore_unknown_options": True})
@click.argument("scheduler", type=click.Choice(list(MACHINES)))
@click.argument("settings", nargs=-1, type=click.UNPROCESSED)
@click.option("--builders", type=click.IntRange(1, 10**5), required=True, help="how many (required)")
@click.option("--tokens", type=float, help="of the cache; sets --num-rows [default: --num-rows]")
@click.option(
    "--tokens-per-second", type=float, default=1e4, help="of a builder (cache build --dry-run) [default: 1e4]"
)
@click.option("--price", type=float, default=1.0, help="of a builder's hour [default: 1]")
@click.option("--retries", type=click.IntRange(0), default=20, help="of a builder that fails [default: 20]")
@click.option("--machine", help="one builder's, in the scheduler's words [default: 1 GPU, H100:1 or v6e-1]")
@click.option("--image", default="qat-lora", help="container image with qat-lora [default: qat-lora]")
@click.option("--name", default="kd-cache", help="of the job [default: kd-cache]")
def fleet(
    scheduler: str,
    settings: tuple[str, ...],
    builders: int,
    tokens: float | None,
    tokens_per_second: float,
    price: float,
    **words: Any,
) -> None:
    """Print the manifest; SETTINGS are those of `cache build`, which are checked here and not on n machines."""
    build = OptionsCommand(COMMANDS["cache build"])
    options = build.options(build.make_context("cache build", list(settings)))
    rows, more, plan = options.num_rows, list[str](), "give --tokens or --num-rows for a plan"
    if tokens and rows is None:
        rows = math.ceil(tokens / options.length)
        more = ["--num-rows", str(rows)]
    if rows is not None:
        cost = planned(options, builders, rows, tokens_per_second, price)
        more += [] if options.shard_rows == cost["shard_rows"] else ["--shard-rows", str(cost["shard_rows"])]
        plan = (
            "computed, not measured: {tokens:,} tokens, {bytes:,} bytes, {shards:,} shards of {shard_bytes:,} bytes, "
        )
        plan = (plan + "{builders:,} builders, {hours:,.1f} hours, cost {cost:,.0f}").format(**cost)
    command = shlex.join(["qat-lora", "cache", "build", *settings, *more])
    words |= {"machine": words["machine"] or MACHINES[scheduler], "command": command, "quoted": shlex.quote(command)}
    template = Path(__file__).parent / "fleets" / f"{scheduler}.txt"
    text = Template(template.read_text(encoding="utf-8"))
    echo(text.substitute(words, plan=plan, builders=builders, last=builders - 1).rstrip("\n"))

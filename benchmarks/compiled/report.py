"""`qat-lora doctor --compile-for`: what the TPU's own compiler makes of a recovery's graphs, without a TPU.

Two programs are run, each by the Python that it needs: `graphs.py` traces with PyTorch/XLA on the CPU, `tpu_program.py`
compiles with jax and libtpu, which do not fit torch_xla's own pins and so live in an environment of their own
(`make tpu-compiler`). What comes out is counted here (`hlo.py`). Sizes, bytes and operations are the chip's own program
and as good as known; how long it takes is not said, because nothing has run.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from qat_lora.commands.doctor import libtpu_specifier
from qat_lora.errors import ConfigError, DeviceError, MissingExtraError
from qat_lora.terminal import echo

from . import NAMES, QWEN3_06B, Asked, hlo, tpu_program

GRIDS = {1: "1x1", 4: "2x2", 8: "2x4"}  # of what can be rented as one host, by its chips
TOPOLOGIES = {f"{kind}-{chips}": (f"{kind}:{grid}", chips) for kind in ("v6e", "v5e") for chips, grid in GRIDS.items()}
COMPILER_VARIABLE = "QAT_LORA_TPU_COMPILER"
DEFAULT_COMPILER = Path(".venv-tpu/bin/python")  # the Makefile's TPU_VENV


def find_compiler(given: str | None = None) -> Path:
    """Return the compiler's Python: as given, as the variable says, or the Makefile's; or raise MissingExtraError."""
    found = Path(given or os.environ.get(COMPILER_VARIABLE) or DEFAULT_COMPILER).expanduser()
    if not found.is_file():
        raise MissingExtraError(
            f"compile_for: there is no Python with jax and libtpu at {found}; `make tpu-compiler` makes one in "
            f".venv-tpu, and {COMPILER_VARIABLE} or --compiler names one elsewhere"
        )
    return found.absolute()  # not resolved: the link is what makes it that environment's


def compile_recovery(
    chip: str, asked: Asked, compiler: Path, folder: Path | None = None, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Trace and compile the graphs of a recovery; return the versions and, by graph, what was found.

    The recovery's `chips` are those of the chip, a key of `TOPOLOGIES`; graphs and optimised HLO are kept in `folder`.

    Raises:
        ConfigError: an unknown chip.
        DeviceError: a graph cannot be traced, or the compiler does not start. What it refuses is in the report.
    """
    if chip not in TOPOLOGIES:
        raise ConfigError(f"compile_for: {chip!r} is unknown; allowed: {', '.join(TOPOLOGIES)}")
    topology, chips = TOPOLOGIES[chip]
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(str(folder)) as place:
        out = Path(place)
        out.mkdir(parents=True, exist_ok=True)
        if not asked.model:
            (out / "config.json").write_text(json.dumps(QWEN3_06B), encoding="utf-8")
        asked = replace(asked, chips=chips, model=str(Path(asked.model or out).expanduser().absolute()))
        say(f"tracing {', '.join(asked.graphs)} ...")
        # No thread that is not needed: the CPU seconds of tracing are those of one.
        variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(chips), "OMP_NUM_THREADS": "1"}
        graphs = [sys.executable, "-m", "compiled.graphs", json.dumps(asdict(asked)), str(out.absolute())]
        _run(graphs, variables, "trace")
        found = {}
        for name in asked.graphs:
            say(f"compiling {name} for {chip} ...")
            found[name] = _compiled(name, topology, chips, compiler, out)
    versions = {key: graph.pop(key) for graph in found.values() for key in ("jax", "libtpu")}
    pinned = libtpu_specifier().removeprefix("==") or "none"  # which a real TPU machine would have
    versions |= {"torch_xla": importlib.metadata.version("torch_xla"), "libtpu_of_torch_xla": pinned}
    settings = {name: value for name, value in asdict(asked).items() if name not in ("model", "graphs")}
    return {"chip": chip, "settings": settings, "versions": versions, "graphs": found}


def _compiled(name: str, topology: str, chips: int, compiler: Path, out: Path) -> dict[str, Any]:
    kind = {"v5e": "v5litepod"}.get(topology[:3], topology[:3])
    command = [str(compiler), "-I", tpu_program.__file__, f"{out / name}.pb", topology, str(chips), f"{out / name}.tpu"]
    _run(command, {"TPU_ACCELERATOR_TYPE": f"{kind}-{chips}"}, "compiler")
    report: dict[str, Any] = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    report |= json.loads(Path(f"{out / name}.tpu.json").read_text(encoding="utf-8"))
    if "error" not in report:
        report["counted"] = asdict(hlo.count(Path(f"{out / name}.tpu.txt").read_text(encoding="utf-8")))
    return report


def _run(command: list[str], variables: dict[str, str], what: str) -> None:
    environment, folder = os.environ | variables, Path(__file__).parents[1]  # from which `-m compiled.graphs` is found
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise DeviceError(f"compile_for: the {what} failed: {last}")


COLUMNS = ("instructions", "trace s", "compile s", "program", "arguments", "temporary", "HBM", "moved", "operations")


def table(report: dict[str, Any]) -> str:
    """Return a report as lines for people: sizes in GB (10^9 bytes), operations in 10^12."""
    versions, settings = report["versions"], report["settings"]
    lines = [
        f"{report['chip']}: {settings['batch_size']} x {settings['length']} tokens a chip, K = {settings['head_k']}, "
        f"rank {settings['rank']}, {settings['dtype']}",
        f"compiled by libtpu {versions['libtpu']} (jax {versions['jax']}); torch_xla {versions['torch_xla']} pins "
        f"libtpu {versions['libtpu_of_torch_xla']}",
        "",
        f"{'graph':<16}" + "".join(f"{column:>13}" for column in COLUMNS),
    ]
    for name, graph in report["graphs"].items():
        line = f"{name:<16}{graph['instructions']:>13,}{graph['trace_cpu_s']:>13.3f}"
        if "error" in graph:
            lines.append(f"{line}  does not compile: {graph['error'].splitlines()[0]}")
            continue
        hbm, counted = graph["hbm"], graph["counted"]
        sizes = [hbm["program"], hbm["arguments"], hbm["temporaries"], sum(hbm.values()), counted["bytes"]]
        lines.append(
            f"{line}{graph['compile_s']:>13.1f}"
            + "".join(f"{size / 1e9:>13.3f}" for size in sizes)
            + f"{counted['operations'] / 1e12:>13.3f}"
        )
    for name, graph in report["graphs"].items():
        lines += _details(name, graph)
    return "\n".join(lines)


def _details(name: str, graph: dict[str, Any]) -> list[str]:
    """Return what of a graph does not fit into a row: exchanges between chips, unknown loops, what moves most."""
    counted = graph.get("counted", {})
    sent = sorted(counted.get("collectives", {}).items())
    lines = [f"  {row['number']} x {kind}, {row['bytes'] / 1e6:,.1f} MB" for kind, row in sent]
    if unknown := counted.get("unknown_trips"):
        lines.append(f"  loops of unknown length, counted once: {', '.join(unknown)}")
    lines += [
        f"  {row['bytes'] / 1e9:8.3f} GB  {row['times']:>4} x {row['opcode']} of {row['from']}"
        for row in counted.get("largest", [])[:3]
    ]
    return ["", name, *lines] if lines else []


@click.command("doctor --compile-for")
@click.option("--model", default="")
@click.option("--batch-size", type=click.IntRange(1), default=4)
@click.option("--length", type=click.IntRange(2), default=1024)
@click.option("--head-k", type=click.IntRange(1), default=128)
@click.option("--rank", type=click.IntRange(1), default=8)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16")
@click.option("--loss-chunk-mb", type=click.IntRange(1), default=Asked.loss_chunk_mb)
@click.option("--preset")
@click.option("--train-scales", is_flag=True)
@click.option("--gradient-checkpointing", is_flag=True)
@click.option("--shard-base", is_flag=True)
@click.option("--graphs", default=",".join(NAMES))
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False))
@click.option("--compiler")
@click.option("--json", "as_json", is_flag=True)
@click.pass_obj
def command(chip: str, graphs: str, keep: Path | None, compiler: str | None, as_json: bool, **given: Any) -> int:
    """Print what the TPU's compiler makes of a recovery; return 1 where it refuses a graph."""
    names = tuple(name.strip() for name in graphs.split(","))
    if unknown := set(names) - set(NAMES):
        raise click.UsageError(f"graphs: {', '.join(sorted(unknown))}; allowed: {', '.join(NAMES)}")
    asked = Asked(**given, graphs=names)
    say = (lambda line: None) if as_json else echo
    report = compile_recovery(chip, asked, find_compiler(compiler), keep, say)
    echo(json.dumps(report) if as_json else table(report))
    return int(any("error" in graph for graph in report["graphs"].values()))

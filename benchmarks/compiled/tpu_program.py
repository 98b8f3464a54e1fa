"""Compile one HLO module with the TPU's own compiler, on a machine without a TPU.

libtpu holds the compiler and needs no chip to compile for a topology that it is told. PyTorch/XLA reaches it only
through a running TPU, jax by name of the topology; so this program is run by the Python of an environment with jax and
libtpu (`make tpu-compiler`) and imports nothing of this package. Beside what the compiler says of memory and cost it
hands back the optimised HLO, since its own sums count a loop's body once (`hlo.py` does not).

    python tpu_program.py GRAPH.pb v6e:2x2 4 OUT      # writes OUT.json and OUT.txt
"""

import json
import os
import re
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

LIFTED = re.compile(r"stablehlo\.custom_call @Sharding\((%arg\d+)\) \{[^\n]*?mhlo\.sharding = (\"[^\"]*\")")
ARGUMENT = re.compile(r"(%arg\d+): (tensor<[^>]*>)(?: \{([^}\n]*(?:\"[^\"]*\"[^}\n]*)*)\})?")


def with_lifted_shardings(module: str) -> str:
    """Give the arguments of a program the shardings that it asserts on them, all that a tracer without data can do.

    As an attribute of the argument, a sharding decides where the weight lies.
    """
    before, opened, body = module.partition(" @main(")
    wanted = dict(LIFTED.findall(body))
    arguments, arrow, rest = body.partition(") -> ")

    def lift(found: re.Match[str]) -> str:
        name, kind, attributes = found.groups()
        if name not in wanted or "mhlo.sharding" in (attributes or ""):
            return found.group()
        return f"{name}: {kind} {{{attributes + ', ' if attributes else ''}mhlo.sharding = {wanted[name]}}}"

    return before + opened + ARGUMENT.sub(lift, arguments) + arrow + rest


def compile_for(graph: bytes, topology: str, chips: int, dump: str) -> tuple[dict[str, Any], str]:
    """Return what the compiler says of a serialised HloModuleProto, and the optimised HLO of one chip's program.

    It is the text that the compiler dumps: jax refuses protos whose asynchronous instructions are newer than it.
    """
    import numpy as np
    from jax._src.interpreters import mlir as jax_mlir
    from jax._src.lib import xla_client as xc
    from jax._src.lib.mlir import ir
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:chips]
    module = xc._xla.mlir.xla_computation_to_mlir_module(xc.XlaComputation(graph))
    options = xc.CompileOptions()
    options.num_replicas, options.num_partitions = 1, chips
    options.device_assignment = xc.DeviceAssignment.create(np.arange(chips)[None])
    build = options.executable_build_options
    build.debug_options.xla_dump_to, build.debug_options.xla_dump_hlo_as_text = dump, True
    build.use_spmd_partitioning = chips > 1
    build.allow_spmd_sharding_propagation_to_output = [chips > 1]  # as torch_xla asks
    with jax_mlir.make_ir_context() as context:
        parsed = ir.Module.parse(module, context)
        if chips > 1:
            parsed = ir.Module.parse(with_lifted_shardings(str(parsed)), context)
        begun, begun_cpu = time.perf_counter(), time.process_time()
        program = devices[0].client.compile(parsed, xc.DeviceList(tuple(devices)), options)
        spent = {"compile_s": time.perf_counter() - begun, "compile_cpu_s": time.process_time() - begun_cpu}
    memory, cost = program.get_compiled_memory_stats(), program.cost_analysis()
    report = {
        **spent,
        "hbm": {
            "program": memory.generated_code_size_in_bytes,
            "arguments": memory.argument_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        },
        "compiler_says": {"operations": cost.get("flops"), "bytes": cost.get("bytes accessed")},
    }
    (file,) = Path(dump).glob("*after_codegen.txt")
    return report, file.read_text(encoding="utf-8")


def main() -> None:
    """Compile the graph of the command line; an error of the compiler is part of the result."""
    graph, topology, chips, out = sys.argv[1:]
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "true"
    found: dict[str, Any] = {"jax": version("jax"), "libtpu": version("libtpu")}
    try:
        with tempfile.TemporaryDirectory() as dump:
            report, text = compile_for(Path(graph).read_bytes(), topology, int(chips), dump)
        found |= report
        Path(f"{out}.txt").write_text(text, encoding="utf-8")
    except (RuntimeError, ValueError) as error:  # XlaRuntimeError among them: what a run would end with
        found["error"] = str(error).strip()
    Path(f"{out}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()

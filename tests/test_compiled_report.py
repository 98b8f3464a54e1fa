"""`doctor --compile-for`: what it says where the compiler is missing, and what the TPU's compiler says where it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compiled import Asked, report, tpu_program
from qat_lora.errors import ConfigError, MissingExtraError

COMPILER = Path(os.environ.get(report.COMPILER_VARIABLE, ""))
needs_compiler = pytest.mark.skipif(
    not COMPILER.is_file(), reason=f"no TPU compiler: make tpu-compiler, {report.COMPILER_VARIABLE} names its Python"
)
GRAPH = {
    "instructions": 56_287,
    "trace_cpu_s": 0.47,
    "compile_s": 12.5,
    "hbm": {"program": 4 * 10**8, "arguments": 10**9, "temporaries": 5 * 10**9, "outputs": 10**6},
    "counted": {
        "bytes": 322 * 10**9,
        "operations": 13 * 10**12,
        "collectives": {"all-gather": {"number": 28, "bytes": 28 * 10**6}},
        "unknown_trips": ["while.3"],
        "largest": [{"name": "f", "opcode": "fusion", "from": "dot", "times": 28, "bytes": 10**9, "operations": 0}],
    },
}


def test_the_table_says_versions_sizes_exchanges_and_what_is_not_known():
    settings = {"batch_size": 4, "length": 1024, "head_k": 128, "rank": 8, "dtype": "bfloat16"}
    versions = {"jax": "1", "libtpu": "2", "torch_xla": "2.9.0", "libtpu_of_torch_xla": "0.0.21"}
    graphs = {"micro-batch": GRAPH, "prompt": {"instructions": 9, "trace_cpu_s": 0.1, "error": "out of HBM\nmore"}}
    text = report.table({"chip": "v6e-1", "settings": settings, "versions": versions, "graphs": graphs})
    assert "torch_xla 2.9.0 pins libtpu 0.0.21" in text
    assert "56,287        0.470         12.5        0.400        1.000        5.000        6.401      322.000" in text
    assert "28 x all-gather, 28.0 MB" in text and "counted once: while.3" in text
    assert "does not compile: out of HBM\n" in text


def test_a_missing_compiler_and_an_unknown_chip_are_refused_with_what_helps(tmp_path):
    with pytest.raises(MissingExtraError, match="make tpu-compiler"):
        report.find_compiler(str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="v6e-1, v6e-4"):
        report.compile_recovery("v7", Asked(), Path(sys.executable))


def test_the_command_line_reads_the_recovery_that_is_asked_for(tmp_path):
    program = "from qat_lora.cli import main; main()"
    words = ["doctor", "--compile-for", "v6e-1", "--compiler", str(tmp_path / "none")]
    changed = ["--preset", "w2g64", "--train-scales", "--gradient-checkpointing", "--dtype", "float32"]
    wrong = ((changed, "make tpu-compiler"), (["--batch-size", "0"], "batch-size"), (["--graphs", "x"], "graphs"))
    for more, said in wrong:
        command = [sys.executable, "-c", program, *words, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode and said in done.stderr, done.stderr


def test_asserted_shardings_become_those_of_the_arguments():
    module = """module @m {
  func.func @main(%arg0: tensor<16x8xbf16>, %arg1: tensor<4x8xbf16> {mhlo.sharding = "{devices=[4,1]<=[4]}"}, \
%arg2: tensor<f32> {mhlo.is_donor = true}) -> (tensor<f32>) {
    %0 = stablehlo.custom_call @Sharding(%arg0) {mhlo.sharding = "{devices=[1,4]<=[4]}"} : (tensor<16x8xbf16>)
    %1 = stablehlo.custom_call @Sharding(%arg2) {backend_config = "", mhlo.sharding = "{replicated}"} : (tensor<f32>)
  }
}"""
    lifted = tpu_program.with_lifted_shardings(module)
    assert '%arg0: tensor<16x8xbf16> {mhlo.sharding = "{devices=[1,4]<=[4]}"}, %arg1' in lifted
    assert '%arg1: tensor<4x8xbf16> {mhlo.sharding = "{devices=[4,1]<=[4]}"}, %arg2' in lifted
    assert '%arg2: tensor<f32> {mhlo.is_donor = true, mhlo.sharding = "{replicated}"}) -> (' in lifted
    assert lifted.partition(") -> ")[2] == module.partition(") -> ")[2]


LAYERS = """
import sys
import jax
import jax.numpy as jnp

def layer(x, w):
    return jax.nn.silu(x @ w[0]) @ w[1] + x, None

def scanned(x, w):
    return jax.lax.scan(layer, x, w)[0]

def unrolled(x, w):
    for i in range(2):
        x, _ = layer(x, (w[0][i], w[1][i]))
    return x

x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
w = tuple(jax.ShapeDtypeStruct((2, *shape), jnp.bfloat16) for shape in ((1024, 3072), (3072, 1024)))
for work in (scanned, unrolled):
    module = jax.jit(work).lower(x, w).compiler_ir("hlo").as_serialized_hlo_module_proto()
    open(f"{sys.argv[1]}/{work.__name__}.pb", "wb").write(module)
    open(f"{sys.argv[1]}/{work.__name__}.json", "w").write("{}")
"""


@needs_compiler
@pytest.mark.slow
def test_a_scanned_program_counts_like_its_unrolled_form(tmp_path):
    subprocess.run(
        [COMPILER, "-c", LAYERS, tmp_path], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, timeout=300
    )
    both = [report._compiled(name, "v6e:1x1", 1, COMPILER, tmp_path) for name in ("scanned", "unrolled")]
    scanned, unrolled = (found["counted"] for found in both)
    assert scanned["loops"] == 1 and not unrolled["loops"]
    # Of all bytes, copies within the chip are part, which the compiler makes as it likes: 176 MB and 109 MB here.
    for what in ("matrix_operations", "operations", "hbm_bytes"):
        assert scanned[what] == pytest.approx(unrolled[what], rel=0.1), what
    said = both[1]["compiler_says"]
    assert unrolled["operations"] == pytest.approx(said["operations"], rel=0.1)
    assert both[0]["compiler_says"]["operations"] < 0.6 * said["operations"]  # a control: a body counted once


@needs_compiler
@pytest.mark.slow
@pytest.mark.xla
@pytest.mark.parametrize("chip", ["v6e-1", "v6e-4"])
def test_a_toy_recovery_compiles_for_a_tpu(chip, tmp_path):
    model = tmp_path / "config.json"
    model.write_text(report.json.dumps(report.QWEN3_06B | {"num_hidden_layers": 1, "vocab_size": 4096}))
    asked = Asked(str(tmp_path), batch_size=1, length=256, head_k=8, shard_base=chip != "v6e-1")
    found = report.compile_recovery(chip, asked, COMPILER, tmp_path / "graphs")
    assert [name for name, graph in found["graphs"].items() if "error" in graph] == []
    micro = found["graphs"]["micro-batch"]["counted"]
    assert micro["matrix_operations"] and not micro["unknown_trips"]
    assert bool(micro["collectives"]) == (chip != "v6e-1")

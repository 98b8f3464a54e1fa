"""Estimates against models that were really built, and activations against what autograd really keeps."""

import importlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.compiled.report import COMPILER_VARIABLE
from qat_lora.commands.estimate import estimate
from qat_lora.errors import ConfigError, ModelError
from qat_lora.layers.convert import add_lora
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.load import DTYPES, cast, load_model
from qat_lora.options import EstimateOptions, QuantizeOptions, RunConfig
from qat_lora.plan.devices import named
from qat_lora.plan.step import Shapes, step_bytes, widths
from qat_lora.runtime.host.machine import LiveBytes
from qat_lora.runtime.launch.select import ChipsConfig
from qat_lora.runtime.native import NativeRuntime
from qat_lora.setup.trainable import recovery_parts
from qat_lora.train.optim import OptimConfig, build_optimizer

RANK = 6


class Apart(NativeRuntime):
    """Trained tensors as they are; in one flat tensor there would be some zeros between these small ones."""

    shares_memory = False


ROOT = Path(__file__).resolve().parents[2]
COMPILER = Path(os.environ.get(COMPILER_VARIABLE, ""))


@pytest.fixture(scope="module")
def student(tiny, tmp_path_factory):
    from qat_lora.commands.quantize import quantize

    run = RunConfig(out=str(tmp_path_factory.mktemp("estimate") / "student"), quiet=True)
    options = QuantizeOptions(model=str(tiny.teacher), init="absmax", start_rank=0, run=run)
    return quantize(options, NativeRuntime("cpu"))


def ask(model, **settings):
    settings = {"lora": LoraConfig(recovery_r=RANK), "length": 64, "batch_size": 2, **settings}
    return estimate(EstimateOptions(model=str(model), **settings), NativeRuntime("cpu"))


def built(folder, dtype, train_scales):
    """Build the student as `recover` does; return it with its trained tensors and its optimizer."""
    model = load_model(str(folder), dtype=dtype)
    add_lora(model.module, LoraConfig(recovery_r=RANK))
    groups = recovery_parts(model, train_scales, False, DTYPES[dtype])
    optimizer, adapter = build_optimizer(OptimConfig(), groups, Apart("cpu")), [*groups.pop("adapter").values()]
    return model, adapter, [p for tensors in groups.values() for p in tensors.values()], optimizer


def memory(*tensors):
    """Bytes of the tensors' memory, shared memory counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("train_scales", [False, True])
def test_what_is_held_equals_a_built_model(student, dtype, train_scales, capsys):
    run = RunConfig(dtype=dtype, device="cpu")
    report = ask(student, train_scales=train_scales, run=run)
    model, adapter, scales, optimizer = built(student, dtype, train_scales)
    everything = [*model.module.parameters(), *model.module.buffers()]
    mine = memory(*adapter)
    assert report["bytes"]["weights"] == memory(*everything) - mine
    assert report["bytes"]["adapter"] == mine
    assert report["bytes"]["gradients"] == memory(*(p.grad for p in [*adapter, *scales]))
    moments = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    assert report["bytes"]["optimizer state"] == memory(*moments)
    assert report["trained"] == sum(p.numel() for p in [*adapter, *scales])
    assert "estimate" in capsys.readouterr().out


def test_parameters_are_those_of_the_full_precision_model(tiny, student):
    real = sum(p.numel() for p in load_model(str(tiny.teacher)).module.parameters())
    plain, preset, quantised = ask(tiny.teacher), ask(tiny.teacher, preset="w2g64"), ask(student)
    assert plain["parameters"] == preset["parameters"] == quantised["parameters"] == real
    assert plain["quantised"] == 0 and preset == quantised
    per_layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96  # q and o, k and v, gate, up and down
    assert quantised["quantised"] == 2 * per_layer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["tiled", "fused", "blocked"])
def test_activations_are_within_15_percent_of_what_autograd_keeps(tiny, dtype, attention):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    length = 128
    model = load_model(str(tiny.teacher))
    cast(model.module, DTYPES[dtype])
    add_lora(model.module, LoraConfig(recovery_r=RANK))
    model.module.train()
    weights = {p.untyped_storage().data_ptr() for p in model.module.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        # Casts of the adapter's own factors are counted as its, not as activations.
        if storage.data_ptr() not in weights and RANK not in tensor.shape[:1]:
            kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    if attention == "tiled":
        model.tile_attention()
    backend = SDPBackend.FLASH_ATTENTION if attention == "fused" else SDPBackend.MATH
    with sdpa_kernel(backend), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.hidden(torch.randint(0, 320, (2, length)), torch.zeros(2, length, dtype=torch.int32))
    measured = sum(storage.nbytes() for storage in kept.values()) + hidden.numel() * hidden.element_size()
    report = ask(tiny.teacher, length=length, attention=attention, run=RunConfig(dtype=dtype))
    assert report["bytes"]["activations"] == pytest.approx(measured, rel=0.15)


@pytest.fixture(scope="module")
def benchmark():
    """`benchmarks/estimate.py`, whose points are measured as here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("estimate")


@pytest.mark.parametrize(
    "changed",
    [
        {"vocab": 4096},
        {"vocab": 32768, "dtype": "bfloat16"},
        {"vocab": 32768, "checkpointing": True},
        {"vocab": 4096, "dtype": "bfloat16", "checkpointing": True},
        {"train_scales": True},
        {"train_scales": True, "dtype": "bfloat16", "checkpointing": True},
    ],
    ids=lambda changed: "-".join(f"{name}={value}" for name, value in changed.items()),
)
def test_the_sum_is_within_15_percent_of_the_peak_of_a_step(benchmark, changed):
    """Everything that is alive at once in a real step, counted at torch's dispatcher; a long and a short head."""
    point = benchmark.Point(**{"layers": 3, "rows": 4, "length": 128, **changed})
    assert benchmark.estimated(point) == pytest.approx(benchmark.on_cpu(point), rel=0.15)


@pytest.mark.slow
@pytest.mark.xla
@pytest.mark.skipif(not COMPILER.is_file(), reason=f"no TPU compiler: make tpu-compiler, {COMPILER_VARIABLE}")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_sum_is_within_15_percent_of_what_the_tpus_compiler_gives(benchmark, checkpointing):
    point = benchmark.Compiled(layers=2, vocab=32_768, rows=4, length=512, checkpointing=checkpointing)
    assert benchmark.estimated(point) == pytest.approx(benchmark.on_tpu(point, None), rel=0.15)


def test_the_estimates_of_the_committed_measurements_are_still_those(benchmark):
    """All sizes, without measuring them again."""
    result = json.loads((ROOT / "benchmarks/results/estimate.json").read_text(encoding="utf-8"))
    assert {found["chip"] for found in result["points"]} == {"cpu", "v6e-1", "v6e-4"}
    for found in result["points"]:
        point = benchmark.of_result(found)
        guess = benchmark.estimated(point) / 2**20
        assert guess == pytest.approx(found["measured_mib"], rel=0.15), point
        assert guess == pytest.approx(found["estimated_mib"], rel=0.001), f"{point}: run benchmarks/estimate.py again"


def test_a_loop_keeps_what_its_scan_names_and_forms_one_layers_weights(tiny):
    """Counted by hand at the toy's widths: input, q, k and v, attention and its sums, its output, gate and up."""
    model = load_model(str(tiny.teacher))
    sizes, shapes = widths(model.config), Shapes(model.config, model.module, {}, RANK, False, 4 * 61_440)
    run, lora = RunConfig(dtype="float32"), LoraConfig(recovery_r=RANK)
    options = EstimateOptions(model=str(tiny.teacher), length=64, batch_size=2, lora=lora, run=run, attention="xla")
    plain, checkpointed = (
        step_bytes(shapes, replace(options, gradient_checkpointing=again)) for again in (False, True)
    )
    numbers = (
        sizes.hidden + (sizes.queries + 2 * sizes.keys) + sizes.queries + sizes.heads + sizes.hidden + 2 * sizes.mlp
    )
    kept = plain["activations"] - checkpointed["activations"]
    assert kept == 128 * 2 * 4 * (numbers - sizes.hidden)  # tokens, layers, float32
    assert plain["formed weights"] == checkpointed["formed weights"] == 4 * 61_440 // 2
    assert step_bytes(shapes, replace(options, attention="tiled"))["formed weights"] == 4 * 61_440


def test_codes_of_formed_weights_stay_on_the_host_of_a_tpu(student, tiny):
    """Layers are stacked there: a frozen student weighs what a dense one does, one whose scales train has its codes."""
    tpu, bf16 = RunConfig(device="tpu", dtype="bfloat16"), RunConfig(device="cuda", dtype="bfloat16")
    dense = ask(tiny.teacher, run=tpu)["bytes"]["weights"]
    assert ask(student, run=tpu)["bytes"]["weights"] == dense < ask(student, run=bf16)["bytes"]["weights"]
    scales = [ask(student, run=run, train_scales=True)["bytes"]["weights"] for run in (tpu, bf16)]
    assert scales[0] == scales[1] > dense


@pytest.mark.parametrize("device", ["tpu", "cuda"])
def test_a_sharded_base_is_a_share_of_each_matrix_and_one_layer_gathered(tiny, device):
    run = RunConfig(device=device, dtype="float32", chips=ChipsConfig(shard_base=True, parallel="spmd"))
    names = ("v6e-1", "v6e-4") if device == "tpu" else ("h100", "h100-4")
    whole, shared = (ask(tiny.teacher, run=run, devices=(name,))["bytes"]["weights"] for name in names)
    layer = 4 * 61_440 // 2
    assert whole - shared == 2 * layer * 3 // 4 - layer  # the embedding stays whole


def test_attention_follows_the_device(tiny, capsys):
    report = ask(tiny.teacher, devices=("v6e-4", "h100", "laptop"))
    there = report["devices"]
    assert [there[name]["attention"] for name in there] == ["xla", "fused", "tiled"]
    assert report["attention"] == "xla" and report["total_bytes"] == there["v6e-4"]["total_bytes"]
    assert len({found["total_bytes"] for found in there.values()}) == 3
    printed = capsys.readouterr().out
    assert "a step in bfloat16 with xla attention, as on v6e-4\n" in printed
    for device, attention in (("cpu", "tiled"), ("mps", "blocked"), ("cuda", "fused"), ("tpu", "xla"), ("xla", "xla")):
        assert ask(tiny.teacher, run=RunConfig(device=device))["attention"] == attention
    forced = ask(tiny.teacher, attention="blocked", devices=("v6e-4", "h100"))
    assert {forced["attention"], *(d["attention"] for d in forced["devices"].values())} == {"blocked"}


def test_live_bytes_counts_memory_and_not_views():
    with LiveBytes() as live:
        a = torch.ones(1000)
        view = a.view(10, 100)
        del a
        assert live.now == 4000
        doubled = view * 2
        assert live.now == live.peak == 8000
        del view, doubled
        assert (live.now, live.peak) == (0, 8000)


def test_time_and_cost_follow_from_operations_rate_and_price(tiny):
    report = ask(tiny.teacher, preset="w2g64", max_steps=10, devices=("v6e-4", "h100"), utilisation=0.5)
    flops = report["flops_per_token"]
    # 2 layers: 61,440 weights in linear layers, 4 N; the head once; adapters 6 N; attention 14 L d, in one block.
    adapter = report["trained"]
    assert flops == 4 * 61_440 + 4 * 320 * 64 + 6 * adapter + 14 * 64 * 64 * 2
    chips, card = (report["devices"][name] for name in ("v6e-4", "h100"))
    assert chips["seconds_by_bound"]["compute"] == pytest.approx(2 * 64 * flops / (918e12 * 0.5))
    assert chips["bound"] == "host tracing" and chips["hours"] == pytest.approx(10 * 0.015 / 3600)
    assert chips["tokens"] == 4 * 10 * 2 * 64 and chips["tokens_per_s"] == pytest.approx(4 * 2 * 64 / 0.015)
    assert chips["usd"] == pytest.approx(chips["hours"] * 4 * 2.70) and card["usd"] == pytest.approx(card["hours"] * 3)
    for wrong in ("v9e", "v6e-0", "v6e-x", ""):
        with pytest.raises(ConfigError, match="^for: .*v6e-4"):
            named((wrong,))


def test_memory_grows_with_batch_and_length_and_shrinks_with_checkpointing(tiny):
    def together(rows: int, length: int, again: bool = False) -> int:
        asked = {"batch_size": rows, "length": length, "gradient_checkpointing": again}
        return ask(tiny.teacher, **asked)["total_bytes"]

    assert together(1, 32) < together(1, 64) < together(4, 64) < together(16, 128)
    assert all(together(*sizes, again=True) < together(*sizes) for sizes in ((1, 32), (4, 64), (16, 128)))


def test_the_table_adds_up_and_says_what_it_is(tiny, capsys, monkeypatch):
    from qat_lora.cli import main

    monkeypatch.setenv("USE_TORCH_XLA", "0")
    flags = ["estimate", "--device", "cpu", "--model", str(tiny.teacher), "--preset", "w2g64", "--recovery-r", "6"]
    main([*flags, "--batch-size", "2", "--accumulation-steps", "8"])
    table = capsys.readouterr().out
    assert (
        "effective batch 16" in table
        and "An estimate." in table
        and "Nothing of it has been measured on a TPU" in table
    )
    main([*flags, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["total_bytes"] == sum(report["bytes"].values())
    lines = [line.split() for line in table.splitlines() if line.endswith("GiB")]
    there = [size for size in report["bytes"].values() if size]  # no weights are formed anew under a frozen base
    assert len([line for line in lines if len(line) >= 3]) == len(there) + 1 == len(report["bytes"])


def test_only_config_json_is_read(tiny, student, tmp_path):
    for source in (tiny.teacher, student):
        folder = tmp_path / source.name
        folder.mkdir()
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())
        assert ask(folder)["bytes"] == ask(source)["bytes"]


def test_refusals(tiny, student, tmp_path):
    with pytest.raises(ModelError, match="no config.json"):
        ask(tmp_path)
    with pytest.raises(ModelError, match="quantised already"):
        ask(student, preset="w4g128")
    with pytest.raises(ConfigError, match="w9"):
        ask(tiny.teacher, preset="w9")
    with pytest.raises(ConfigError, match="batch_size: 0 is too small"):
        ask(tiny.teacher, batch_size=0)

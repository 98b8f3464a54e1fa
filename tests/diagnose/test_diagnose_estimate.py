"""Estimates against models that were really built, and activations against what autograd really keeps."""

import json

import pytest
import torch

from qat_lora.diagnose.devices import named
from qat_lora.diagnose.estimate import estimate
from qat_lora.diagnose.live import LiveBytes
from qat_lora.errors import ConfigError, ModelError
from qat_lora.layers.convert import add_lora, make_quant_skeleton, prepare_base, quant_layers
from qat_lora.layers.lora import LoraConfig
from qat_lora.losses.objective import ObjectiveConfig, weight_tensors
from qat_lora.models import DTYPES, cast, load_model, make_qwen3, save_model
from qat_lora.options import EstimateOptions, QuantizeOptions, RunConfig
from qat_lora.quant.spec import preset
from qat_lora.runtime.native import NativeRuntime
from qat_lora.train.optim import OptimConfig, build_optimizer
from qat_lora.train.step import add_sums, micro_batch, optimizer_step, zero_sums

RANK = 6


@pytest.fixture(scope="module")
def student(tiny, tmp_path_factory):
    from qat_lora import app

    run = RunConfig(out=str(tmp_path_factory.mktemp("estimate") / "student"), quiet=True)
    options = QuantizeOptions(model=str(tiny.teacher), init="absmax", start_rank=0, run=run)
    return app.quantize(options, NativeRuntime("cpu"))


def ask(model, **settings):
    settings = {"lora": LoraConfig(recovery_r=RANK), "length": 64, "batch_size": 2, **settings}
    return estimate(EstimateOptions(model=str(model), **settings), NativeRuntime("cpu"))


def built(folder, dtype, train_scales):
    """Build the student as `recover` does; return it with its trained tensors and its optimizer."""
    model = load_model(str(folder), dtype=dtype)
    add_lora(model.module, LoraConfig(recovery_r=RANK))
    scales = prepare_base(model.module, train_scales, DTYPES[dtype])
    adapter = [p for name, p in model.module.named_parameters() if "lora_" in name]
    groups = {"adapter": dict(enumerate(adapter)), "scales": scales}
    return model, adapter, list(scales.values()), build_optimizer(OptimConfig(), groups)


def memory(*tensors):
    """Bytes of the tensors' memory, shared memory counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("train_scales", [False, True])
def test_what_is_held_equals_a_built_model(student, dtype, train_scales, capsys):
    report = ask(student, train_scales=train_scales, run=RunConfig(dtype=dtype))
    model, adapter, scales, optimizer = built(student, dtype, train_scales)
    kept = [getattr(m, name, None) for m in model.module.modules() for name in ("_values_OI", "_dense_OI")]
    everything = [*model.module.parameters(), *model.module.buffers(), *(t for t in kept if t is not None)]
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
@pytest.mark.parametrize("attention", ["fused", "plain"])
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

    backend = SDPBackend.FLASH_ATTENTION if attention == "fused" else SDPBackend.MATH
    with sdpa_kernel(backend), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.hidden(torch.randint(0, 320, (2, length)), torch.zeros(2, length, dtype=torch.int32))
    measured = sum(storage.nbytes() for storage in kept.values()) + hidden.numel() * hidden.element_size()
    report = ask(tiny.teacher, length=length, attention=attention, run=RunConfig(dtype=dtype))
    assert report["bytes"]["activations"] == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("vocabulary", "chunk_mb"), [(4096, 1), (32768, 8)])
def test_the_sum_is_within_15_percent_of_the_peak_of_a_step(tmp_path, dtype, checkpointing, vocabulary, chunk_mb):
    """Everything that is alive at once in a real step, counted at torch's dispatcher; both a long and a short head."""
    length, rows, head_k = 256, 4, 16
    sizes = {"hidden": 256, "layers": 3, "heads": 4, "kv_heads": 2, "mlp": 768, "positions": 512}
    model = make_qwen3(tmp_path, vocabulary, **sizes)
    save_model(model.module, tmp_path)
    make_quant_skeleton(model.module, preset("w2g64", ()))
    cast(model.module, DTYPES[dtype])
    add_lora(model.module, LoraConfig(recovery_r=RANK))
    prepare_base(model.module, False, DTYPES[dtype])
    model.module.train()
    runtime = NativeRuntime("cpu")
    if checkpointing:
        model.checkpoint_gradients(runtime.checkpoint_function())
    adapter = {name: p for name, p in model.module.named_parameters() if "lora_" in name}
    optimizer = build_optimizer(OptimConfig(), {"adapter": adapter})
    objective = ObjectiveConfig(loss_chunk_mb=chunk_mb, loss_walk="positions")
    shape = (rows, length - 1)
    batch = {
        "input_ids": torch.randint(0, vocabulary, (rows, length)),
        "document_ids": torch.zeros(rows, length, dtype=torch.int32),
        "target_mask": torch.ones(shape, dtype=torch.bool),
        "head_ids": torch.arange(head_k).expand(*shape, head_k).contiguous(),
        "head_logits": -torch.arange(head_k).float().expand(*shape, head_k).contiguous(),
        "lse": torch.full(shape, 1.0),
        "log_tail": torch.full(shape, -1.0),
    }
    kept = [layer._dense_OI for layer in quant_layers(model.module).values()]
    held = [*model.module.parameters(), *model.module.buffers(), *kept, *(p.grad for p in adapter.values())]
    held += [value for state in optimizer.state.values() for value in state.values()]
    weights = weight_tensors(objective.weights_at(0.0), runtime.device)
    with LiveBytes(*held, *batch.values()) as live:
        sums = add_sums(zero_sums(objective, runtime.device), micro_batch(model, batch, objective, weights))
        optimizer_step(optimizer, list(adapter.values()), sums, 1.0, runtime)
    asked = {"preset": "w2g64", "length": length, "batch_size": rows, "head_k": head_k, "loss_chunk_mb": chunk_mb}
    report = ask(tmp_path, **asked, gradient_checkpointing=checkpointing, run=RunConfig(dtype=dtype))
    assert report["total_bytes"] == pytest.approx(live.peak, rel=0.15)


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
    # 2 layers: 61,440 weights in linear layers, 4 N; the head once; adapters 6 N; attention 12 L d a layer.
    adapter = report["trained"]
    assert flops == 4 * 61_440 + 4 * 320 * 64 + 6 * adapter + 12 * 64 * 64 * 2
    seconds = 10 * 2 * 64 * flops / (918e12 * 0.5)
    chips = report["devices"]["v6e-4"]
    assert chips["hours"] == pytest.approx(seconds / 3600) and chips["tokens"] == 4 * 10 * 2 * 64
    assert chips["usd"] == pytest.approx(seconds / 3600 * 4 * 2.70)
    assert report["devices"]["h100"]["usd"] == pytest.approx(10 * 128 * flops / (989e12 * 0.5) / 3600 * 3.00)
    for wrong in ("v9e", "v6e-0", "v6e-x", ""):
        with pytest.raises(ConfigError, match="^for: .*v6e-4"):
            named((wrong,))


def test_the_memory_table_grows_with_batch_and_shrinks_with_checkpointing(tiny):
    table = ask(tiny.teacher, table=True)["table"]
    assert [(row["batch_size"], row["length"]) for row in table[:3]] == [(1, 32), (1, 64), (1, 128)]
    assert all(row["checkpointed"] < row["kept"] for row in table)
    assert all(a["kept"] < b["kept"] for a, b in zip(table, table[1:], strict=False) if a["length"] < b["length"])


def test_the_table_adds_up_and_says_what_it_is(tiny, capsys, monkeypatch):
    from qat_lora.cli import main

    monkeypatch.setenv("USE_TORCH_XLA", "0")
    flags = ["estimate", "--device", "cpu", "--model", str(tiny.teacher), "--preset", "w2g64", "--recovery-r", "6"]
    main([*flags, "--batch-size", "2", "--accumulation-steps", "8"])
    table = capsys.readouterr().out
    assert (
        "effective batch 16" in table
        and "An estimate." in table
        and "nothing of it has been measured\non a TPU" in table
    )
    main([*flags, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["total_bytes"] == sum(report["bytes"].values())
    lines = [line.split() for line in table.splitlines() if line.endswith("GiB")]
    assert len([line for line in lines if len(line) >= 3]) == len(report["bytes"]) + 1


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
    with pytest.raises(ConfigError, match="batch_size: 0 is below 1"):
        ask(tiny.teacher, batch_size=0)

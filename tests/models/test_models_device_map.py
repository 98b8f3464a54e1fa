"""A teacher spread over devices says what it says on one."""

import sys

import pytest
import torch
from torch import nn

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cli import main
from qat_lora.errors import DeviceError, MissingExtraError, ModelError
from qat_lora.models.load import load_model
from qat_lora.models.teachers import DispatchedCausalLM, load_dispatched
from qat_lora.runtime.native import NativeRuntime

pytest.importorskip("accelerate")
MODULES = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")


def _map(disk):
    return {name: "disk" if name in disk else "cpu" for name in MODULES}


def _batch():
    ids = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(5))
    documents = torch.cumsum(torch.arange(24) % 9 == 0, 0).expand(2, 24)
    return ids, documents


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "device_map",
    [
        {"": "cpu"},
        _map(["model.layers.1"]),
        _map(["model.layers.0", "model.embed_tokens", "lm_head"]),
        {"": "disk"},
        "auto",
    ],
)
@torch.no_grad()
def test_spread_and_plain_agree(tiny, device_map, dtype):
    plain = load_model(str(tiny.teacher), dtype=dtype)
    spread = load_dispatched(str(tiny.teacher), device_map, dtype=dtype)
    ids, documents = _batch()
    hidden = spread.hidden(ids, documents)
    torch.testing.assert_close(hidden, plain.hidden(ids, documents), rtol=0, atol=0)
    torch.testing.assert_close(spread.logits(hidden[1]), plain.logits(hidden[1]), rtol=0, atol=0)
    cut = spread.with_vocabulary(300)
    assert isinstance(cut, DispatchedCausalLM) and cut.logits(hidden[0]).shape == (24, 300)
    on_disk = [name for name, parameter in spread.module.named_parameters() if parameter.is_meta]
    assert bool(on_disk) == (device_map == {"": "disk"} or isinstance(device_map, dict) and len(device_map) > 1)


def test_what_cannot_be_is_said(tiny, monkeypatch):
    away = load_dispatched(str(tiny.teacher), {"": "disk"})
    assert away.vocab_size == 320
    with pytest.raises(ModelError, match="device_map: the output head is on no device"):
        away.lm_head()
    with pytest.raises(ModelError, match="does not load.*device"):
        load_dispatched(str(tiny.teacher), "best")
    runtime = NativeRuntime("cpu")
    runtime.check_device_map()
    runtime.replicas = 2
    with pytest.raises(DeviceError, match="2 processes"):
        runtime.check_device_map()
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'qat-lora\[big\]'"):
        load_dispatched(str(tiny.teacher), "auto")


def test_xla_refuses_with_the_reason():
    xla = pytest.importorskip("qat_lora.runtime.xla.runtime")
    runtime = object.__new__(xla.XlaRuntime)  # no device is touched
    with pytest.raises(DeviceError, match="device_map: .*PyTorch/XLA.*--device cuda or cpu"):
        runtime.check_device_map()


def test_a_cache_of_a_spread_teacher_is_the_same_cache(tiny, tmp_path, monkeypatch, capsys):
    common = f"--teacher {tiny.teacher} --device cpu --device-map"
    build = f"cache build --dataset {tiny.text} --format text --length 32 --top-k 4 --num-rows 6 --quiet --out"
    main(f"{build} {tmp_path / 'plain'} {common} none".split())
    import qat_lora.commands.cache as app

    real = app.load_dispatched
    monkeypatch.setattr(app, "load_dispatched", lambda name, _, *how: real(name, _map(["model.layers.0"]), *how))
    moved = []
    monkeypatch.setattr(NativeRuntime, "place", lambda self, module: moved.append(module))
    main(f"{build} {tmp_path / 'spread'} {common} auto".split())
    assert not moved
    for name in ("s-000000.safetensors", "s-000000.json", "manifest.json"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "spread" / name).read_bytes()
    main(f"cache audit {tmp_path / 'spread'} {common} balanced --rows 2 --quiet --json".split())
    assert '"same_ids": 1.0' in capsys.readouterr().out and len(KDCacheDataset(tmp_path / "spread")) == 6
    with pytest.raises(SystemExit):
        main(f"{build} {tmp_path / 'no'} {common} best".split())
    assert "device_map: 'best'" in (error := capsys.readouterr().err) and "balanced_low_0" in error
    assert isinstance(load_model(str(tiny.teacher)).module, nn.Module)

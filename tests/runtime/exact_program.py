"""A toy student whose scales and codes train, traced on XLA: runs in a process of its own, writes its graphs."""

import json
import sys
from pathlib import Path

import torch

from qat_lora.layers.calibrate.quantize import quantize_model
from qat_lora.layers.convert import quant_layers
from qat_lora.layers.stacked import parameters_at, stack_layers, trained_paths
from qat_lora.models.load import make_qwen3
from qat_lora.quant.presets import preset
from qat_lora.runtime.xla.loop import exact_dot
from qat_lora.runtime.xla.runtime import XlaRuntime


def graph(runtime, change, stacked):
    torch.manual_seed(0)
    model = make_qwen3(Path("."), 64, hidden=40, layers=2, heads=4, kv_heads=2, mlp=48)
    quantize_model(model.module, preset("q4_r32"), "absmax", quiet=True)
    groups = {"trained": {}}
    for name, layer in quant_layers(model.module).items():
        layer.train_scales()
        groups["trained"] |= {f"{name}.{part}": scale for part, scale in layer.named_scales().items()}
        if change:
            groups["trained"] |= {f"{name}.{k}": p for k, p in layer.train_weight(None, 7).trained().items()}
    paths = trained_paths(model.module, groups)
    if stacked:
        stack_layers(model.module, runtime.layer_scan())
    runtime.place(model.module)
    trained = [p for tensors in parameters_at(model.module, paths).values() for p in tensors.values()]
    ids = torch.arange(22).reshape(2, 11).to(runtime.device)
    loss = model.hidden(ids, torch.zeros_like(ids)).sin().sum()
    gradients = torch.autograd.grad(loss, trained)
    return sys.modules["torch_xla"]._XLAC._get_xla_tensors_hlo([loss, *gradients])


def main(runtime):
    report = {f"{change} {stacked}": graph(runtime, change, stacked) for change, stacked in ((0, 0), (1, 1))}
    a, b = (torch.randn(*shape, generator=torch.Generator().manual_seed(3)) for shape in ((9, 4), (4, 6)))
    error = (exact_dot(a.to(runtime.device), b.to(runtime.device)).cpu() - (a.double() @ b.double()).float()).abs()
    return report | {"error": float(error.max()), "after": sys.modules["torch_xla"]._XLAC._xla_get_mat_mul_precision()}


if __name__ == "__main__":
    runtime = XlaRuntime("CPU")
    Path(sys.argv[1]).write_text(json.dumps(runtime.launch(lambda: main(runtime))))

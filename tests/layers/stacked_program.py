"""A toy student on XLA, its layers one by one and stacked: runs in a process of its own, prints JSON."""

import json
import re
import sys
from pathlib import Path

import torch

from qat_lora.layers.calibrate.quantize import quantize_model
from qat_lora.layers.convert import add_lora, lora_layers, quant_layers
from qat_lora.layers.lora import LoraConfig
from qat_lora.layers.stacked import apart, by_layer, parameters_at, stack_layers, trained_paths
from qat_lora.models.load import make_qwen3
from qat_lora.quant.presets import preset
from qat_lora.runtime.native import NativeRuntime
from qat_lora.runtime.xla import loop
from qat_lora.runtime.xla.runtime import XlaRuntime, xla_mark_step
from qat_lora.runtime.xla.spmd import XlaSpmdRuntime
from qat_lora.setup.common import fit_attention
from qat_lora.setup.trainable import recovery_parts

DOCUMENTS = torch.tensor([[0] * 9 + [1] * 14, [0] * 23], dtype=torch.int32)


def student(layers, dropout=0.0):
    torch.manual_seed(0)
    model = make_qwen3(Path("."), 64, hidden=32, layers=layers, heads=4, kv_heads=2, mlp=48)
    quantize_model(model.module, preset("w4g128"), "mse", quiet=True)
    add_lora(model.module, LoraConfig(recovery_r=4, dropout=dropout))
    for adapter in lora_layers(model.module).values():
        torch.nn.init.normal_(adapter.lora_B, std=0.1)
    return model


def run(runtime, layers, stacked, recompute=False, scales=False, norms=False):
    """Trace one micro-batch; return loss and gradients, the gradients' names, the graph's text, model and paths."""
    model = student(layers)
    fit_attention(model, runtime)
    paths = trained_paths(model.module, recovery_parts(model, scales, scales or norms, torch.float32))
    if stacked:
        assert stack_layers(model.module, runtime.layer_scan()) == (layers, layers)
    runtime.place(model.module)
    if recompute:
        model.checkpoint_gradients(runtime.checkpoint_function())
    trained = {n: p for tensors in parameters_at(model.module, paths).values() for n, p in tensors.items()}
    loss = forward(model, runtime)
    gradients = torch.autograd.grad(loss, [*trained.values()])
    text = sys.modules["torch_xla"]._XLAC._get_xla_tensors_hlo([loss, *gradients])
    return loss, dict(zip(trained, gradients, strict=True)), text, model, paths


def forward(model, runtime):
    ids = (torch.arange(46, dtype=torch.int32).reshape(2, 23) % 61).numpy()
    (batch,) = runtime.feed([{"input_ids": ids, "document_ids": DOCUMENTS.numpy()}])
    return model.hidden(batch["input_ids"], batch["document_ids"]).sin().sum()


def instructions(text):
    return len(re.findall(r"^\s+(?:ROOT )?%?\S+ = ", text, re.M))


def joined(text):
    """Return the most numbers that one concatenation makes."""
    shapes = re.findall(r"= \w+\[([\d,]*)\]\S* concatenate\(", text)
    return max([torch.Size(map(int, filter(None, shape.split(",")))).numel() for shape in shapes], default=0)


def main(runtime):
    loop.NARROW = 8  # the toy's matrices are narrow, and the products of its adapters narrower
    report = {}
    for name, scales, recompute in (("kept", False, False), ("recomputed", False, True), ("all trained", True, False)):
        loss, gradients, _, _, _ = run(runtime, 2, False, scales=scales)
        mine, stacked, text, model, paths = run(runtime, 2, True, recompute, scales)
        deep = run(runtime, 5, True, recompute, scales)[2]
        with torch.no_grad():
            again = forward(model, runtime)
        xla_mark_step()
        tensors = [len(gradients), len(stacked)]
        stacked = by_layer({n: gradient.cpu() for n, gradient in stacked.items()})
        gradients = {n: gradient.cpu() for n, gradient in gradients.items()}
        report[name] = {
            "losses": [loss.item(), mine.item(), again.item()],
            "names": sorted(stacked) == sorted(gradients),
            "worst": max(float((stacked[n] - g).abs().max() / g.abs().max()) for n, g in gradients.items()),
            "tensors": tensors,
            "joined": joined(text),
            "instructions": [instructions(text), instructions(deep)],
        }
        del loss, mine, again
        print(name, report[name], file=sys.stderr, flush=True)
    report |= {"apart": apart_again(model, paths), "dropout": stack_layers(student(2, 0.1).module, None)}
    return report


def apart_again(model, paths):
    """Return how far the layers are from the stacks that have been trained since, and whether those are back after."""
    whole = parameters_at(model.module, paths)
    with torch.no_grad():
        for tensors in whole.values():
            for parameter in tensors.values():
                parameter.mul_(3.0)
    xla_mark_step()
    stacks = by_layer({n: p.detach().cpu() for tensors in whole.values() for n, p in tensors.items()})
    with apart(model.module):
        found = {n: p for tensors in parameters_at(model.module, paths).values() for n, p in tensors.items()}
        worst = max(float((found[name].detach().cpu() - value).abs().max()) for name, value in stacks.items())
        there = [len(lora_layers(model.module)), len(quant_layers(model.module)), sorted(found) == sorted(stacks)]
    back = parameters_at(model.module, paths)
    same = all(back[kind][name] is p for kind, tensors in whole.items() for name, p in tensors.items())
    return [worst, *there, same]


def sharded(runtime):
    """Compare a student whose frozen matrices are spread over devices with the same on the host."""
    host, model = NativeRuntime("cpu"), student(3)
    groups = recovery_parts(model, False, True, torch.float32)
    trained = {name: p for tensors in groups.values() for name, p in tensors.items()}
    loss = forward(model, host)
    wanted = dict(zip(trained, torch.autograd.grad(loss, [*trained.values()]), strict=True))
    mine, gradients, _, placed, _ = run(runtime, 3, True, norms=True)
    xla_mark_step()
    spec = sys.modules["torch_xla"]._XLAC._get_xla_sharding_spec
    spread = sum("devices" in spec(p) for p in placed.module.parameters())
    gradients = by_layer({n: gradient.cpu() for n, gradient in gradients.items()})
    worst = max(float((gradients[n] - g).abs().max() / g.abs().max()) for n, g in wanted.items())
    return {"losses": [loss.item(), mine.item()], "spread": spread, "worst": worst}


if __name__ == "__main__":
    if sys.argv[1:] == ["sharded"]:
        runtime, work = XlaSpmdRuntime("CPU", shard_base=True), sharded
    else:
        runtime, work = XlaRuntime("CPU"), main
    print(json.dumps(runtime.launch(lambda: work(runtime))))

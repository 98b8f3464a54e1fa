"""Two processes train a toy student with frozen weights copied and sharded: a program of its own, prints JSON.

`compiled`: how many graphs a compiler is given for the decoder layers.
"""

import functools
import json

import torch
from stacked_program import DOCUMENTS, student
from torch._dynamo.testing import CompileCounterWithBackend

from qat_lora.layers.stacked import parameters_at
from qat_lora.options import RunConfig
from qat_lora.runtime.launch.start import run_group
from qat_lora.runtime.native import NativeRuntime
from qat_lora.runtime.sharded import sharded_bytes
from qat_lora.setup.common import fit_attention
from qat_lora.setup.trainable import recovery_parts
from qat_lora.setup.training import place_student
from qat_lora.train.optim import OptimConfig, build_optimizer, optimized
from qat_lora.train.step import optimizer_step

WAYS = {"plain": (False, False), "scales and norms": (True, False), "recomputed": (False, True)}


def memory(tensors):
    """Return the bytes of the memories that tensors lie in, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def frozen(layers):
    """Return the tensors of layers that do not train."""
    found = {id(t): t for layer in layers for t in (*layer.parameters(), *layer.buffers()) if not t.requires_grad}
    return found.values()


def train(runtime, train_more, recompute, compiler=None):
    """Return the losses of two steps of two micro-batches, what was trained, and the bytes of frozen weights."""
    model = student(3)
    if compiler is None:
        fit_attention(model, runtime)
    else:
        model.compile_layers(backend=compiler)
    layers = list(model.module.model.layers)
    groups = functools.partial(recovery_parts, model, train_more, train_more, torch.float32)
    paths = place_student(model, groups, runtime, RunConfig(quiet=True))
    groups = parameters_at(model.module, paths)
    if recompute:
        model.checkpoint_gradients(runtime.checkpoint_function())
    optimizer, losses = build_optimizer(OptimConfig(lr=1e-2, scale_lr=1e-2), groups, runtime), []
    width = 128 if compiler else 23
    documents = torch.zeros(2, width, dtype=torch.int32) if compiler else DOCUMENTS
    for step in range(1 if compiler else 2):
        for micro in range(2):
            ids = (torch.arange(2 * width).reshape(2, width) * (1 + runtime.rank + 2 * micro) + step) % 61
            loss = model.hidden(ids, documents).sin().sum()
            loss.backward()
            losses.append(loss.item())
        sums = {"loss": loss.detach(), "tokens": torch.tensor(92.0)}
        optimizer_step(optimizer, optimized(optimizer), sums, 1.0, runtime)
    with torch.set_grad_enabled(bool(compiler)):  # a compiler would be given another graph without gradients
        losses.append(model.hidden(ids, documents).sin().sum().item())
    trained = {name: p.detach().clone() for tensors in groups.values() for name, p in tensors.items()}
    kept = sharded_bytes(model.module)[0]
    return losses, trained, kept, memory(frozen(layers))


def compare(train_more, recompute):
    copied, sharded = NativeRuntime("cpu"), NativeRuntime("cpu", shard_base=True)
    losses, trained, _, whole = train(copied, train_more, recompute)
    mine, ours, kept, left = train(sharded, train_more, recompute)
    changed = max(float(p.abs().max()) for n, p in trained.items() if "lora_B" in n)
    return {
        "losses": losses == mine,
        "trained": sorted(ours) == sorted(trained) and all(torch.equal(ours[n], p) for n, p in trained.items()),
        "changed": changed,
        "share": kept / whole,
        "left": left,
    }


def graphs():
    counts = []
    for sharded in (False, True):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        losses = train(NativeRuntime("cpu", sharded), False, False, counter)[0]
        counts.append([counter.frame_count, losses])
    return counts


def main():
    runtime = NativeRuntime("cpu")
    assert runtime.replicas == 2

    def work():
        report = {name: compare(*how) for name, how in WAYS.items()}
        report["compiled"] = graphs()
        return report

    return runtime.launch(work)


if __name__ == "__main__":
    print(json.dumps(run_group(main, 2, 1, "fork")))

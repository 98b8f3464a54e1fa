"""A loop in the graph against the same loop in Python; run by itself, this file is the program that uses XLA."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("torch_xla")


def body(carry, inputs, constants):
    total, _unused = carry[0], constants[1]
    x, keep = inputs
    made = torch.where(keep[:, None], x @ constants[0], torch.full_like(x, 0.5))
    total.add_(made.sum(0))  # in place, of what the body was given
    return [total, carry[1] + 1], [made, made.amax(1) * total[0]]


def rounds(count, device):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(count, 3, 4, generator=generator), torch.rand(count, 3, generator=generator) < 0.5]
    constants = [torch.randn(4, 4, generator=generator), torch.zeros(2)]
    carry = [torch.zeros(4), torch.zeros((), dtype=torch.int32)]
    return [[x.to(device) for x in group] for group in (carry, inputs, constants)]


def main():
    import torch_xla
    import torch_xla.debug.metrics as metrics

    from qat_lora.runtime.xla.loop import scan

    carry, inputs, constants = rounds(5, "cpu")
    outputs = []
    for number in range(5):
        carry, made = body(carry, [x[number] for x in inputs], constants)
        outputs.append(made)
    want = [*carry, *(torch.stack(made) for made in zip(*outputs, strict=True))]
    compiled = []
    for _ in range(3):
        carry, inputs, constants = rounds(5, torch_xla.device())
        torch_xla.sync()
        heavy = [(constants[0] + 1.0) - 1.0, constants[1]]  # its history stays outside
        last, made = scan(body, carry, inputs, heavy)
        text = torch_xla._XLAC._get_xla_tensors_hlo([*last, *made])
        torch_xla.sync()
        errors = [(a.cpu() - b).abs().max().item() for a, b in zip([*last, *made], want, strict=True)]
        compiled.append(metrics.metric_data("CompileTime")[0])
        assert [x.cpu().tolist() for x in carry] == [[0.0] * 4, 0], "the caller's tensor was overwritten"
    inside = text[: text.index("\nENTRY ")]
    print(json.dumps({"error": max(errors), "again": compiled[2] - compiled[1], "loops": text.count(" while("),
                      "subtracted inside": inside.count(" subtract(")}))  # fmt: skip


@pytest.mark.xla
def test_equals_a_python_loop_compiles_once_and_keeps_history_outside():
    environment = os.environ | {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("error") < 1e-5
    assert found == {"again": 0, "loops": 1, "subtracted inside": 0}


if __name__ == "__main__":
    main()

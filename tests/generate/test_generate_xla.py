"""Generation and scores on XLA: the CPU's values, and no graph that depends on position or batch."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch_xla")

PROGRAM = """
import json, sys, torch
torch.set_num_threads(1)
from qat_lora.runtime.launch.select import select_runtime
runtime = select_runtime("xla")

def main():
    from qat_lora.evaluate import score as score_module
    from qat_lora.generate.sample import stream_ids
    from qat_lora.models.load import load_model
    score_module.CHUNK_ROWS, score_module.CHUNK_BYTES = 1, 4 * 320 * 7  # 7 positions: many chunks, a short one
    cpu, cpu_2, xla, xla_2 = (load_model(sys.argv[1]) for _ in range(4))
    for model in (cpu_2, xla_2):
        model.module.model.layers[0].mlp.up_proj.weight.data.mul_(0.8)
    for model in (xla, xla_2):
        runtime.place(model.module)
    draw = torch.Generator().manual_seed(1)
    batches = [
        {
            "input_ids": torch.randint(0, 320, (3, 12), generator=draw),
            "document_ids": torch.zeros(3, 12, dtype=torch.int32),
            "target_mask": torch.rand(3, 11, generator=draw) < 0.7,
        }
        for _ in range(4)
    ]
    found = {}
    wanted = score_module.measure(cpu, {"s": cpu_2}, batches, quiet=True)
    before = runtime.compile_report()["graphs_compiled"]
    scores = score_module.measure(xla, {"s": xla_2}, runtime.feed(batches), True, runtime.mark_step)
    found["score graphs"] = runtime.compile_report()["graphs_compiled"] - before
    found["scores"] = [[value.figures for value in result.values()] for result in (wanted, scores)]
    before = runtime.compile_report()["graphs_compiled"]
    places = ((cpu, torch.device("cpu")), (xla, runtime.device))
    prompts = [5, 17, 200], [3, 8, 1, 2, 9]
    found["graphs of a text"] = []
    for prompt in prompts:
        settings = {"row_length": 16, "mark_step": runtime.mark_step}
        texts = [list(stream_ids(model, prompt, 9, device=device, **settings)) for model, device in places]
        found.setdefault("texts", []).append(texts)
        found["graphs of a text"].append(runtime.compile_report()["graphs_compiled"] - before)
    return found

print(json.dumps(runtime.launch(main)))
"""


@pytest.mark.xla
def test_same_values_and_few_graphs(tiny):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tiny.teacher],
        env={**os.environ, "PJRT_DEVICE": "CPU", "USE_TORCH_XLA": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for wanted, score in zip(*found["scores"], strict=True):
        assert score == pytest.approx(wanted, abs=1e-5, rel=1e-6)
    for on_cpu, on_xla in found["texts"]:
        assert on_cpu == on_xla and len(on_cpu) == 9
    assert found["graphs of a text"] == [2, 2]  # of the row and of a token; a second prompt adds none
    assert found["score graphs"] == 2

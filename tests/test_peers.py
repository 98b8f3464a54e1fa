"""The comparison with other tools: who counts as beaten, what the table leaves out, what a file of ours weighs."""

import json

import pytest
import torch

from qat_lora.commands.repository import load_program

peers = load_program("peers", "plot")
tools = load_program("peer_tools", "plot")


def row(tool, size, kl, **more):
    return {"tool": tool, "version": "1", "setting": f"s{size}", "bytes": size, "kl": kl, "bits": size / 100} | {
        "perplexity": 2.0,
        "seconds": 1.0,
        **more,
    }


def test_a_file_is_beaten_by_one_that_is_no_larger_and_nearer():
    ours = [row("qat-lora", 200, 0.5), row("qat-lora", 300, 0.6), row("qat-lora", 400, 0.2)]
    theirs = [row("a", 100, 0.9), row("a", 300, 0.55), row("b", 310, 0.7), row("b", 450, 0.1), row("b", 600, 0.01)]
    found = peers.against_peers([*ours, *theirs, {"tool": "c", "setting": "", "failed": "no"}])
    assert [line["bytes"] for line in found["compared"]] == [100, 300, 450]  # 310 is beaten, 600 is above 5 bits
    assert [line.get("ours_kl") for line in found["compared"]] == [None, 0.5, 0.2]
    assert (found["sizes"], found["won"]) == (3, 1)


def test_the_table_keeps_trained_students_apart_and_names_failures():
    rows = [row("a", 100, 0.5), row("a", 100, 0.1, tokens=2_000_000), row("a", 200, 0.6), row("qat-lora", 100, 0.4)]
    rows += [{"tool": "c", "version": "2", "setting": "", "failed": "does not import"}]
    settings = {"calibration": 8, "held_out": 4, "length": 16}
    result = {"teacher_name": "t", "weights": 8, "perplexity_of_teacher": 2.0, "settings": settings, "rows": rows}
    lines = "\n".join(peers.table(result))
    assert "s100, 2.0 M tokens" in lines and "**0.4000**" in lines and "s200" not in lines
    assert "| - | - | - | - | c 2 | : does not import | - |" in lines


def test_dense_tensors_and_scales_count_sixteen_bits_and_indices_nothing(tmp_path):
    from safetensors.torch import save_file

    tensors = {"codes": torch.zeros(3, 5, dtype=torch.int32), "scales": torch.zeros(7), "layer.g_idx": torch.zeros(9)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert tools.stored_bytes(tmp_path) == 60 + 14


@pytest.mark.parametrize("failing", [True, False])
def test_a_setting_that_fails_leaves_its_reason_and_the_others_go_on(tmp_path, monkeypatch, failing):
    def settings(job):
        def fails(out):
            raise ValueError("rows too short\nand more")

        yield "fails", fails
        yield "works", lambda out: {"bytes": 3}
        if failing:
            raise ImportError("no module")

    (tmp_path / "prepared.json").write_text(json.dumps({"teacher": str(tmp_path)}))
    for name in ("calibration", "train", "valid"):
        peers.np.save(tmp_path / f"{name}.npy", peers.np.zeros((1, 2)))
    monkeypatch.setitem(tools.PEERS, "hqq", ("HQQ", "numpy", settings))
    monkeypatch.setattr("sys.argv", ["peer_tools.py", "hqq", "--work", str(tmp_path)])
    tools.main()
    made = {f.parent.name: json.loads(f.read_text()) for f in tmp_path.glob("students/*/made.json")}
    assert made["hqq_fails"]["failed"] == "ValueError: rows too short" and made["hqq_works"]["bytes"] == 3
    assert (made.get("hqq", {}).get("failed") == "does not import: no module") == failing

"""The comparison of two commits sees what it should: a bit of a tensor, a value, a file too many; and no times."""

import json

import pytest
import torch
from compare_commits import CASES, compare, words_of
from safetensors.torch import save_file

from qat_lora.registry import COMMANDS


def leave(root, **changed):
    """Write what a commit might leave, with some of it changed."""
    said = {"loss": 0.5, "seconds": 1.5, "rows": [1, 2], "out": f"{root}/x"} | changed.get("said", {})
    (root / "run").mkdir(parents=True)
    (root / "run/result.json").write_text(json.dumps(said))
    (root / "run/codes.bin").write_bytes(changed.get("codes", b"1234"))
    (root / "run/log.txt").write_text(f"{changed.get('rows', 12)} rows in {changed.get('time', '1.2 s')}\n")
    save_file({"weight": torch.tensor(changed.get("weight", [1.0, 2.0]))}, root / "run/model.safetensors")
    if "extra" in changed:
        (root / "run" / changed["extra"]).write_text("")
    return root


@pytest.mark.parametrize(
    ("changed", "path", "what"),
    [
        ({"weight": [1.0, 2.0 + 2**-22]}, "run/model.safetensors", "weight: differs by up to 2.38e-07"),
        ({"weight": [1.0, 2.0, 3.0]}, "run/model.safetensors", "now torch.float32 (3,)"),
        ({"said": {"loss": 0.5000001}}, "run/result.json", ".loss: 0.5, now 0.5000001"),
        ({"said": {"rows": [1, 3]}}, "run/result.json", ".rows[1]: 2, now 3"),
        ({"said": {"new": 1}}, "run/result.json", ".new: only one commit has it"),
        ({"codes": b"1235"}, "run/codes.bin", "other bytes (03ac674216f3, 310ced37200b)"),
        ({"rows": 13}, "run/log.txt", "'12 rows in TIME', now '13 rows in TIME'"),
        ({"extra": "config.yaml"}, "run/config.yaml", "only one commit has it (after)"),
    ],
)
def test_differences_are_found(tmp_path, changed, path, what):
    found, _ = compare(leave(tmp_path / "a"), leave(tmp_path / "b", **changed))
    assert len(found) == 1
    assert found[0].path == path
    assert what in found[0].what
    assert found[0].reason is None


def test_times_and_folders_are_no_difference(tmp_path):
    before, after = leave(tmp_path / "a"), leave(tmp_path / "b", said={"seconds": 9.0}, time="3.4 s")
    found, kinds = compare(before, after)
    assert found == []
    assert kinds == {"json": 1, "bin": 1, "txt": 1, "safetensors": 1}


def test_decided_differences_have_a_reason(tmp_path):
    found, _ = compare(leave(tmp_path / "a", extra="report.html"), leave(tmp_path / "b"))
    assert [difference.reason for difference in found] == ["no HTML card"]


def test_every_command_that_makes_something_is_compared():
    given = {" ".join(words_of(case)) for case in CASES}
    left_out = {
        "demo",
        "smoke",
        "chat",
        "push",
        "cache push",
        "cache pull",
        "doctor",
        "bench",
        "examples",
        "fleet",
        "cache unpack",
        "cache generate",
        "rounds",
    }  # other commands, talk, machines, or newer than what is compared
    missing = {words for words in COMMANDS if not any(line.startswith(f"{words} ") for line in given)}
    assert missing <= left_out

"""The doctor: every fault is named with its fix, and a machine without faults leaves nothing to fix."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from qat_lora.commands import doctor
from qat_lora.commands.doctor import Accelerator
from qat_lora.runtime.launch.select import Found

ROOT = Path(__file__).resolve().parents[2]
REQUIRED = [Requirement("torch<2.12,>=2.9"), Requirement("peft>=0.21"), Requirement('wandb>=0.21; extra == "log"')]


def only(findings):
    (finding,) = findings
    return finding


@pytest.mark.parametrize(
    "versions,bad",
    [
        ({"torch": "2.9.0+cu128", "peft": "0.21.2"}, []),
        ({"torch": "2.11.0.dev20260101", "peft": "1.0"}, []),
        ({"torch": "2.12.0", "peft": "0.21.2"}, ["torch"]),
        ({"torch": "2.8.1"}, ["torch", "peft"]),
    ],
)
def test_packages_are_judged_by_the_metadata_and_extras_are_left_out(versions, bad):
    findings = doctor._check_packages(REQUIRED, versions)
    assert [f.name for f in findings] == ["torch", "peft"]
    assert [f.name for f in findings if f.state == "problem"] == bad
    assert all(("pip install" in f.fix) == (f.state == "problem") for f in findings if f.fix)


@pytest.mark.parametrize(
    "versions,found,state,words",
    [
        ({"torch": "2.9.0", "torch-xla": "2.9.1"}, Found(), "ok", "2.9.1"),
        ({"torch": "2.11.0", "torch-xla": "2.9.0"}, Found(), "problem", "2.9.0 does not fit torch 2.11.0"),
        ({"torch": "2.11.0"}, Found(), "note", "only TPUs need it"),
        ({"torch": "2.9.0"}, Found(tpu="/dev/accel0"), "problem", "/dev/accel0"),
        ({"torch": "2.9.0"}, Found(pjrt_device="CPU"), "problem", "PJRT_DEVICE=CPU"),
        ({"torch": "2.9.0", "torch-xla": "2.9.0"}, Found(tpu="/dev/accel0"), "problem", "without libtpu"),
        ({"torch": "2.9.0", "torch-xla": "2.9.0", "libtpu": "0.0.21"}, Found(tpu="/dev/accel0"), "ok", "libtpu 0.0.21"),
    ],
)
def test_torch_xla_fits_torch(versions, found, state, words):
    finding = doctor._check_xla_fit(versions, found)
    assert finding.state == state and words in finding.found
    assert (finding.fix is not None) == (state == "problem")


def test_devices():
    both = Found(cuda_devices=1, torch_xla=True, tpu="/dev/accel0")
    assert "takes XLA on TPU" in only(doctor._check_device(both, nvidia_driver=True)).found
    driver, device = doctor._check_device(Found(), nvidia_driver=True)
    assert driver.state == "problem" and "CUDA build" in driver.fix and "takes cpu" in device.found
    missing = only(doctor._check_device(Found(pjrt_device="TPU"), nvidia_driver=False))
    assert missing.state == "problem" and "qat-lora[tpu]" in missing.fix


def test_a_planned_run_whose_device_is_not_here():
    needs = doctor.Requirements("this recovery", memory=0, host=0, disk=0, device="tpu")
    _, missing = doctor._check_device(Found(torch_xla=True), False, needs)
    assert missing.state == "problem" and "no TPU on this machine" in missing.fix
    assert "this recovery asks for --device tpu" in missing.found
    for found in (Found(torch_xla=True, tpu="/dev/accel0"), Found(torch_xla=True, pjrt_device="CPU")):
        assert [finding.state for finding in doctor._check_device(found, False, needs)] == ["ok", "ok"]
    assert only(doctor._check_device(Found(), False)).state == "ok"


@pytest.mark.parametrize(
    "environ,name,state,words",
    [
        ({}, "variables", "ok", ""),
        ({"TPU_NUM_DEVICES": "2"}, "TPU_NUM_DEVICES", "note", ""),
        ({"TPU_NUM_DEVICES": "two"}, "TPU_NUM_DEVICES", "problem", "dead in torch_xla, and taken as --num-chips here"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE", "problem", "unset WORLD_SIZE"),
        ({"RANK": "0"}, "variables", "ok", ""),
        ({"TPU_VISIBLE_CHIPS": "0"}, "TPU_VISIBLE_CHIPS", "note", ""),
        ({"XLA_PERSISTENT_CACHE_PATH": "/c"}, "XLA_PERSISTENT_CACHE_PATH", "note", ""),
        ({"XLA_USE_BF16": "1"}, "XLA_USE_BF16", "problem", "--dtype bfloat16"),
        ({"XLA_DOWNCAST_BF16": "1"}, "XLA_DOWNCAST_BF16", "problem", "--dtype bfloat16"),
        ({"XRT_TPU_CONFIG": "localservice;0;localhost:51011"}, "XRT_TPU_CONFIG", "problem", "PJRT_DEVICE"),
        ({"PJRT_DEVICE": "GPU"}, "PJRT_DEVICE", "problem", "TPU, CPU"),
        ({"PJRT_DEVICE": "TPU"}, "PJRT_DEVICE", "note", ""),
        ({"PJRT_DEVICE": "cpu"}, "PJRT_DEVICE", "ok", ""),
    ],
)
def test_variables(environ, name, state, words):
    found = Found(pjrt_device=environ.get("PJRT_DEVICE", "").upper())
    finding = only(doctor._check_variables(environ, found))
    assert (finding.name, finding.state) == (name, state)
    assert words in (finding.fix or "") and (finding.fix is not None) == (state == "problem")


def test_tpu_num_devices_is_ours_alone():
    """Translated here, dead in torch_xla: both have to be said."""
    found = only(doctor._check_variables({"TPU_NUM_DEVICES": "2"}, Found())).found
    assert "taken as --num-chips 2" in found and "torch_xla itself never reads it" in found


@pytest.mark.parametrize(("libtpu", "state"), [("0.0.21", "ok"), ("0.0.30", "problem")])
def test_libtpu_fits_torch_xla(libtpu, state):
    versions = {"torch": "2.9.0", "torch-xla": "2.9.0", "libtpu": libtpu}
    finding = doctor._check_xla_fit(versions, Found(tpu="/dev/accel0"), "==0.0.21")
    assert finding.state == state and (finding.fix == "pip install 'libtpu==0.0.21'") == (state == "problem")


def test_chips_and_whether_a_planned_run_fits_one():
    needs = doctor.Requirements("this recovery", memory=20 * 2**30, host=2 * 2**30, disk=3 * 2**30)
    chips = [
        Accelerator("TPU v5e", 8, 14.9),
        Accelerator("TPU v6e", 1, 29.8),
        Accelerator("TPU of unknown kind", 1, None),
    ]
    small, large, unknown = doctor._check_accelerators(chips, needs)
    assert small.state == "problem" and "is estimated to need 20.0 GiB" in small.found
    assert "--gradient-checkpointing" in small.fix and large.state == "ok" and unknown.state == "note"
    assert [f.state for f in doctor._check_accelerators(chips, None)] == ["ok", "ok", "note"]


@pytest.mark.parametrize(
    ("environ", "error", "mark", "words"),
    [
        ({}, "", "ok", "reached; logged in"),
        ({"HF_HUB_OFFLINE": "1"}, None, "note", "HF_HUB_OFFLINE"),
        ({}, "timed out", "note", "cannot be reached (timed out): give folders instead of names; logged in"),
    ],
)
def test_the_hub_is_never_something_to_fix(environ, error, mark, words, monkeypatch):
    def answer(url):
        assert error is not None, "asked the Hub, offline"
        return error

    monkeypatch.setattr(doctor, "_unreachable", answer)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    finding = doctor._check_hub(environ)
    assert finding.state == mark and words in finding.found and finding.fix is None


def test_room():
    needs = doctor.Requirements("this recovery", memory=0, host=2**33, disk=2**33)
    assert "this recovery wants 8.0 GiB" in doctor._check_disk(7.0, Path("/data"), needs).found
    assert doctor._check_ram(7 << 30, needs).fix and not doctor._check_ram(9 << 30, needs).fix
    assert doctor._check_disk(4.0, Path("/data")).fix and not doctor._check_disk(6.0, Path("/data")).fix
    assert doctor._check_ram(1 << 30).fix and not doctor._check_ram(64 << 30).fix
    assert doctor._check_ram(None).state == "note"


def test_extras_are_never_something_to_fix():
    missing = only(doctor._check_extras(REQUIRED, ["log", "dev"], {}))
    assert missing.state == "note" and "pip install 'qat-lora[log]'" in missing.found and missing.fix is None
    assert only(doctor._check_extras(REQUIRED, ["log"], {"wandb": "0.21"})).state == "ok"


def test_the_text_gives_one_line_a_finding_and_the_fix_below_a_problem():
    findings = [
        doctor.Finding("torch", "ok", "2.9.0"),
        doctor.Finding("gpu driver", "problem", "is too old", "install a newer one"),
        doctor.Finding("extra log", "note", "not installed"),
    ]
    assert doctor.findings_text(findings).splitlines() == [
        "✓ torch       2.9.0",
        "✗ gpu driver  is too old",
        "              fix: install a newer one",
        "– extra log   not installed",
        "1 to fix",
    ]
    assert doctor.findings_text(findings[:1]).endswith("nothing to fix")


def test_the_command_exits_1_for_a_problem_only_and_starts_nothing():
    program = """
import json, sys
from qat_lora.cli import main
try:
    main(["doctor"])
    code = 0
except SystemExit as stop:
    code = stop.code
print(json.dumps({"code": code, "loaded": [m for m in ("torch_xla", "transformers") if m in sys.modules]}))
"""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PJRT", "XLA", "XRT", "TPU"))}

    clean["HF_HUB_OFFLINE"] = "1"

    def run(**variables: str) -> tuple[str, dict]:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program], env=clean | variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, json.loads(done.stdout.splitlines()[-1])

    text, result = run(XRT_TPU_CONFIG="x")
    assert result == {"code": 1, "loaded": []} and "fix: torch_xla no longer reads it" in text
    text, result = run()
    # A machine short of disk or memory has a finding of its own; nothing else may be wrong where tests pass.
    assert result["loaded"] == [] and result["code"] == int("fix:" in text)

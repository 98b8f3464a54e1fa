"""The manifests of `fleet`: read as their schedulers read them, and the shell of SLURM's run with stand-ins."""

import os
import shlex
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from qat_lora import cli
from qat_lora.commands.fleet import SCHEDULERS

ROOT = Path(__file__).resolve().parents[2]
BUILD = ["--teacher", "org/T", "--dataset", "it's text", "--out", "gs://b/c", "--top-k", "8"]
FIELDS = {"slurm": ["partition=gpu"], "k8s": ["image=reg/i:1"], "skypilot": [], "xpk": ["image=reg/i:1", "cluster=c"]}
COMMAND = shlex.join(["qat-lora", "cache", "build", *BUILD])


def fleet(capfd, scheduler, *words, build=BUILD, builders="64", fields=None):
    given = [word for field in FIELDS[scheduler] if fields is None for word in ("--set", field)] + (fields or [])
    capfd.readouterr()
    code = 0
    try:
        cli.main(["fleet", scheduler, "--builders", builders, *given, *words, "--", *build])
    except SystemExit as error:
        code = error.code
    printed = capfd.readouterr()
    return printed.out if not code else f"{code}: {printed.err}"


def test_kubernetes(capfd):
    job = yaml.safe_load(fleet(capfd, "k8s", "--retries", "3", "--set", "gpus=2"))
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 64, 64)
    assert spec["backoffLimitPerIndex"] == 3 and spec["template"]["spec"]["restartPolicy"] == "Never"
    ignored, failed = spec["podFailurePolicy"]["rules"]
    assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert failed["action"] == "FailIndex" and failed["onExitCodes"]["values"] == [2]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["name"] == failed["onExitCodes"]["containerName"] and container["image"] == "reg/i:1"
    assert container["args"][0].strip() == f'exec {COMMAND} --builder "$JOB_COMPLETION_INDEX/64"'
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2


def _programs(folder, **bodies):
    folder.mkdir()
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_skypilot_and_xpk_start_a_job_a_builder(capfd, tmp_path):
    """The scripts run with stand-ins for `sky` and `xpk`, which write down what they are given."""
    noted = f'printf "%s\\n" "$@" >> {tmp_path}/noted; [ -f "${{!#}}" ] && cp "${{!#}}" {tmp_path}/task.yaml; true'
    environment = _programs(tmp_path / "bin", sky=noted, xpk=noted)
    for scheduler in ("skypilot", "xpk"):
        (tmp_path / "noted").unlink(missing_ok=True)
        subprocess.run(["bash", "-c", fleet(capfd, scheduler, builders="3")], env=environment, check=True)
        words = (tmp_path / "noted").read_text().splitlines()
        if scheduler == "xpk":
            assert [w for w in words if w.startswith("--command=")] == [
                f"--command={COMMAND} --builder {i}/3" for i in range(3)
            ]
            assert "--max-restarts=6" in words and "--workload=kd-cache-2" in words
        else:
            assert [w for w in words if w.startswith("QAT_LORA")] == [f"QAT_LORA_BUILDER={i}/3" for i in range(3)]
            task = yaml.safe_load((tmp_path / "task.yaml").read_text())
            assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 6} and task["resources"]["use_spot"]
            assert task["run"].strip() == f'exec {COMMAND} --builder "$QAT_LORA_BUILDER"'


@pytest.mark.parametrize(
    ("body", "restarts", "code", "requeued"),
    [("exit 0", 0, 0, False), ("exit 1", 0, 1, True), ("exit 1", 6, 1, False), ("exit 2", 0, 2, False)]
    + [("kill -KILL $$", 0, 137, True), ("exit 143", 9, 143, True)],
)
def test_slurm_requeues_what_may_succeed_later(capfd, tmp_path, body, restarts, code, requeued):
    text = fleet(capfd, "slurm")
    assert "#SBATCH --array=0-63%64\n" in text and "#SBATCH --signal=B:TERM@120\n" in text and "--requeue" in text
    noted = f'printf "%s\\n" "$@" > {tmp_path}/'
    environment = _programs(tmp_path / "bin", scontrol=noted + "requeued", **{"qat-lora": f"{noted}built\n{body}"})
    environment |= {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "5", "SLURM_RESTART_COUNT": str(restarts)}
    assert subprocess.run(["bash", "-c", text], env=environment, stderr=subprocess.DEVNULL).returncode == code
    assert (tmp_path / "built").read_text().splitlines() == ["cache", "build", *BUILD, "--builder", "5/64"]
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text().split() == ["requeue", "9_5"]


def test_slurm_stops_a_builder_before_the_time_limit(capfd, tmp_path):
    body = f"trap 'touch {tmp_path}/stopped; exit 143' TERM; touch {tmp_path}/began; while :; do sleep 0.05; done"
    environment = _programs(tmp_path / "bin", scontrol=f"touch {tmp_path}/requeued", **{"qat-lora": body})
    environment |= {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "5"}
    job = subprocess.Popen(["bash", "-c", fleet(capfd, "slurm")], env=environment)
    while not (tmp_path / "began").exists():
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 143 and (tmp_path / "stopped").exists() and (tmp_path / "requeued").exists()


def test_what_is_refused(capfd, tmp_path):
    assert "set: image is missing; give --set image=" in fleet(capfd, "k8s", fields=[])
    assert "'color' is no field of k8s; fields: image, gpus" in fleet(capfd, "k8s", "--set", "color=red")
    assert "gpus 'many' does not fit" in fleet(capfd, "k8s", "--set", "gpus=many")
    assert "image 'a b' does not fit" in fleet(capfd, "k8s", fields=["--set", "image=a b"])
    assert "name: 'A_b'" in fleet(capfd, "k8s", "--name", "A_b")
    assert fleet(capfd, "k8s", builders="0").startswith("2: ") and fleet(capfd, "k8s", builders="x").startswith("2: ")
    without = "--out and without --builder and --overwrite"
    for build in (BUILD[:4], [*BUILD, "--builder", "1/2"], [*BUILD, "--overwrite"]):
        assert without in fleet(capfd, "k8s", build=build)
    assert "--teechar" in fleet(capfd, "k8s", build=["--teechar", "T"])  # read as `cache build` reads it
    assert "line break" in fleet(capfd, "k8s", build=[*BUILD, "--text-field", "a\nb"])
    out = tmp_path / "job.yaml"
    assert fleet(capfd, "k8s", "--out", str(out)) == "" and yaml.safe_load(out.read_text())["kind"] == "Job"
    assert "exists already" in fleet(capfd, "k8s", "--out", str(out))


def test_the_templates_are_in_the_wheel():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["qat_lora"]
    found = [file for pattern in patterns for file in (ROOT / "qat_lora").glob(pattern)]
    found = [file.stem for file in found if file.parent.name == "fleet_templates"]
    assert sorted(found) == sorted(SCHEDULERS)

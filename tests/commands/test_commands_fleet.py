"""The manifests of a fleet, parsed as their schedulers do, run where a shell runs them, and the plan on paper."""

import os
import shlex
import stat
import subprocess

import pytest
import yaml

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.records import Fingerprint, Manifest, ShardEntry, render
from qat_lora.cli import OptionsCommand, main
from qat_lora.commands.fleet import ENTRY_BYTES, MACHINES, planned
from qat_lora.registry import COMMANDS

BUILD = ["--teacher", "T", "--dataset", "/data/my text", "--top-k", "64", "--out", "gs://b/c"]


def manifest(capsys, scheduler, *arguments):
    main(["fleet", scheduler, "--builders", "3", "--tokens", "1e6", "--retries", "5", *arguments, *BUILD])
    return capsys.readouterr().out


def options_of(line):
    """Parse the command that a builder runs."""
    words = shlex.split(line)
    assert words[:3] == ["qat-lora", "cache", "build"]
    command = OptionsCommand(COMMANDS["cache build"])
    return command.options(command.make_context("build", words[3:]))


def program(folder, name, text):
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_every_scheduler_gets_retries_preemption_and_a_plan(capsys):
    for scheduler in MACHINES:
        text = manifest(capsys, scheduler)
        assert "$plan" not in text and "# computed, not measured: 1,000,448 tokens" in text
        assert "3 builders" in text and "5" in text


def test_kubernetes_replaces_what_was_preempted_and_counts_failures_by_builder(capsys):
    job = yaml.safe_load(manifest(capsys, "k8s", "--image", "r/q:1", "--machine", "google.com/tpu"))
    spec = job["spec"]
    assert (job["kind"], spec["completionMode"]) == ("Job", "Indexed")
    assert (spec["completions"], spec["parallelism"], spec["backoffLimitPerIndex"]) == (3, 3, 5)
    ignored, failed = spec["podFailurePolicy"]["rules"]
    assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert failed["action"] == "FailIndex" and failed["onExitCodes"]["values"] == [2]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["restartPolicy"] == "Never" and container["image"] == "r/q:1"
    assert container["resources"]["limits"] == {"google.com/tpu": 1}
    script = container["args"][0].replace("$JOB_COMPLETION_INDEX", "2")
    options = options_of(script.removeprefix("exec "))
    assert (options.builder, options.text.dataset, options.num_rows) == ("2/3", "/data/my text", 977)


def test_skypilot_recovers_a_job_a_builder(capsys):
    task = yaml.safe_load(manifest(capsys, "skypilot", "--name", "kd"))
    assert task["resources"]["use_spot"] and task["resources"]["job_recovery"]["max_restarts_on_errors"] == 5
    assert task["envs"] == {"BUILDER": "0"} and task["name"] == "kd"
    assert options_of(task["run"].replace("$BUILDER", "1")).builder == "1/3"


def test_xpk_starts_a_workload_a_builder(capsys, tmp_path):
    program(tmp_path, "xpk", 'printf "%s\\n" "$@" >> "$0.log"')
    script = manifest(capsys, "xpk")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CLUSTER": "c"}
    subprocess.run(["bash", "-c", script], env=environment, check=True)
    words = (tmp_path / "xpk.log").read_text().splitlines()
    lines = [words[i + 1] for i, word in enumerate(words) if word == "--command"]
    assert [options_of(line).builder for line in lines] == ["0/3", "1/3", "2/3"]
    assert words.count("--max-restarts") == words.count("--restart-on-user-code-failure") == 3


@pytest.mark.parametrize(
    ("code", "count", "requeued"), [(0, 0, False), (1, 0, True), (143, 4, True), (1, 5, False), (2, 0, False)]
)
def test_slurm_queues_again_what_a_retry_can_cure(capsys, tmp_path, code, count, requeued):
    program(tmp_path, "qat-lora", f'printf "%s\\n" "$@" > "$0.log"; exit {code}')
    program(tmp_path, "scontrol", 'echo "$@" > "$0.log"')
    script = tmp_path / "job"
    script.write_text(manifest(capsys, "slurm"))
    assert "#SBATCH --array=0-2" in script.read_text() and "#SBATCH --requeue" in script.read_text()
    slurm = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "77", "SLURM_RESTART_COUNT": str(count)}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run(["bash", str(script)], env=environment).returncode == code
    assert (tmp_path / "qat-lora.log").read_text().endswith("--builder\n1/3\n")
    log = tmp_path / "scontrol.log"
    assert (log.read_text() if log.exists() else "") == ("requeue 77_1\n" if requeued else "")


def test_slurm_hands_the_builder_the_signal(capsys, tmp_path):
    program(tmp_path, "qat-lora", "trap 'sleep 0.2; exit 143' TERM; kill -TERM $PPID; while :; do sleep 0.1; done")
    program(tmp_path, "scontrol", 'echo "$@" > "$0.log"')
    script = tmp_path / "job"
    script.write_text(manifest(capsys, "slurm"))
    slurm = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "77"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run(["bash", str(script)], env=environment, timeout=20).returncode == 143
    assert (tmp_path / "scontrol.log").exists()


def test_wrong_settings_are_refused_here(capsys):
    for wrong, said in (
        (["--no-such"], "no-such"),
        (["--builder", "0/2"], "no --builder"),
        (["--length", "x"], "length"),
    ):
        with pytest.raises(SystemExit) as caught:
            manifest(capsys, "k8s", *wrong)
        assert caught.value.code == 2 and said in capsys.readouterr().err


def test_the_plan_of_a_trillion_tokens_fits_a_manifest():
    command = OptionsCommand(COMMANDS["cache build"])
    options = command.options(command.make_context("build", list(BUILD)))
    plan = planned(options, 1000, 10**12 // 1024, 1e4, 2.0)
    entry = ShardEntry(shard="s-999999", rows=10**7, bytes=10**12, sha256="0" * 64, sidecar_sha256="0" * 64)
    assert plan["shards"] * ENTRY_BYTES <= fmt.MANIFEST_LIMIT_BYTES and plan["shards"] % 1000 == 0
    assert plan["bytes"] == pytest.approx(303e12, rel=0.01)
    assert plan["hours"] == pytest.approx(1e12 / 1000 / 1e4 / 3600, rel=1e-3)
    assert plan["cost"] == pytest.approx(plan["hours"] * 2000)
    held = {
        "tokenizer_sha256": "1",
        "vocab_size": 9,
        "teacher": "t",
        "teacher_sha256": "1",
        "chat_template_sha256": None,
    }
    fp = Fingerprint(**held, dataset="d", packing="p", length=4, top_k=2)
    sizes = [len(render(Manifest(fingerprint=fp, train=(entry,) * count))) for count in (1, 101)]
    assert (sizes[1] - sizes[0]) / 100 <= ENTRY_BYTES

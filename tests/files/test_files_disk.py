"""Errors of the disk, at every command: one line and an exit code, nothing half-written, and the same command goes on.

A small file system is mounted and filled up (root may do that; elsewhere the test is skipped by name). The commands run
in one process, each by its command line, since importing everything is most of a command's time at this size.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from qat_lora import cli, errors, registry
from qat_lora.errors import DiskError, QatLoraError, disk_error
from qat_lora.options import RunConfig
from qat_lora.runtime.launch import start as launch

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "quantize": "quantize --model {teacher} --init absmax --start-rank 0",
    "recover": "recover --checkpoint {student} --kd-cache-dir {cache} --max-steps 4 --save-steps 2 --batch-size 4"
    " --recovery-r 2 --train-scales",
    "export": "export --student {run}",
    "export adapter": "export --student {run} --form adapter",
    "eval": "eval --teacher {teacher} --students run={run} --dataset {held_out} --length 32 --eval-rows 8",
    "cache audit": "cache audit {cache} --teacher {teacher} --rows 4",
    "cache build": "cache build --teacher {teacher} --dataset {text} --length 32 --top-k 8 --num-rows 32"
    " --shard-rows 8",
    "qat": "qat --from-scratch --model {teacher} --preset w2g64 --init absmax --kd-cache-dir {cache}"
    " --calibration-rows 8 --blockwise-steps 1 --batch-size 4 --max-steps 2 --save-steps 1",
}
# Runs every command into a disk with `room` KB left, then with enough, then beside it on a good disk.
PROGRAM = r"""
import contextlib, io, json, os, sys
from pathlib import Path
from types import SimpleNamespace
from qat_lora import cli

def run(line, out):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            cli.main([*line.split(), "--out", str(out), "--device", "cpu", "--quiet"])
        code = 0
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:
        code = f"{type(error).__name__}: {error}"
    return code, said.getvalue()

def content(out):
    skipped = {"qat_lora_run.json", "qat_lora_files.txt", "config.yaml", "metrics.jsonl", ".lock"}
    skipped |= {"result.json", "audit.json", "state.json", "README.md", "adapter_config.json", "scores.md"}
    skipped |= {"SHA256SUMS"}  # of files that name their folder
    return {f.relative_to(out).as_posix(): f.read_bytes().hex() for f in sorted(out.rglob("*"))
            if f.is_file() and f.name not in skipped and f.suffix != ".png"}

small, good, jobs = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
found = []
for name, line, room in jobs:
    os.system(f"mount -o remount,size=64m {small}")
    out, ballast = small / "out", small / "ballast"
    os.system(f"mount -o remount,size={room}k {small}")
    first = run(line, out)
    left = sorted(f.relative_to(out).as_posix() for f in out.rglob("*") if f.is_file() and f.name.startswith(".tmp-"))
    os.system(f"mount -o remount,size=64m {small}")
    second = run(line, out)
    whole = run(line, good / f"{name}-{room}")
    same = content(out) == content(good / f"{name}-{room}")
    found.append({"name": name, "room": room, "first": first, "second": second, "whole": whole[0], "same": same,
                  "left": left})
    os.system(f"rm -rf {out}")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    from toy_pipeline import cache_options, call, quantize_options, recover_options

    root = tmp_path_factory.mktemp("disk")
    cache = call("build_cache", cache_options(tiny, root / "cache", num_rows=32, eval_rows=4))
    student = call("quantize", quantize_options(tiny, root / "student"))
    run = call("recover", recover_options(student, cache, root / "run"))
    return {"cache": cache, "student": student, "run": run, **tiny._asdict()}


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill_disks(small, tmp_path, made, jobs):
    """Run jobs (command, KB of room) into a disk that is too small; return what came of each."""
    good = tmp_path / "good"
    good.mkdir()
    lines = [(name, COMMANDS[name].format(**made), room) for name, room in jobs]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, small, good, json.dumps(lines)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(found):
    failed = 0
    for job in found:
        code, said = job["first"]
        if code == 0:  # it fitted
            continue
        failed += 1
        assert code in (1, 2) and "No space left on device" in said and "room" in said, job
        assert len(said.strip().splitlines()) == 1 and said.startswith("error: "), job
        assert job["second"] == [0, ""] and job["whole"] == 0 and job["same"] and not job["left"], job
    return failed


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(small_disk, tmp_path, made):
    jobs = [("quantize", 60), ("recover", 250)]
    assert check(fill_disks(small_disk, tmp_path, made, jobs)) == len(jobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_at_many_levels(small_disk, tmp_path, made, name):
    rooms = [4, 8, 16, 32, 64, 128, 256, 512]
    assert check(fill_disks(small_disk, tmp_path, made, [(name, room) for room in rooms])) >= 1


LIBRARIES = [
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    RuntimeError("unable to write to file </out/x>: No space left on device (28)"),
    Exception("Too many open files (os error 24)"),
    OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device"),
    OSError("20480 requested and 6136 written"),
]


@pytest.mark.parametrize("error", LIBRARIES)
def test_what_libraries_make_of_the_disk_s_errors_is_understood(error):
    found = disk_error(error)
    assert isinstance(found, DiskError) and isinstance(found, OSError) and found.exit_code == 2
    assert ("No space left" in str(found) and "make room" in str(found)) or "ulimit -n" in str(found)
    assert disk_error(RuntimeError("shape mismatch")) is None and disk_error(BrokenPipeError()) is None


@pytest.mark.parametrize("number", [*errors.DISK_ERRORS, 2, 13, 17, 20, 21, 40])
def test_every_error_of_the_disk_is_one_line_from_the_command_line_and_from_python(number, monkeypatch, capsys):
    def fails(*_):
        raise OSError(number, os.strerror(number), "/out/a\nfile")

    monkeypatch.setattr(launch.select, "plan_run", fails)
    options = SimpleNamespace(run=RunConfig(device="cpu"), dry_run=False)
    with pytest.raises(QatLoraError, match="file: .*; "):
        launch.run(registry.COMMANDS["quantize"], options)
    with pytest.raises(SystemExit) as stop:
        cli.main(["quantize", "--model", "x"])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and os.strerror(number) in said


OUTS = {
    "a name of 300 letters": ("{root}/" + "x" * 300, "File name too long; give a shorter name"),
    "below a file": ("{root}/file/out", "Not a directory"),
    "a link to itself": ("{root}/loop/out", "Too many levels of symbolic links"),
    "a link to nothing": ("{root}/nothing", "File exists"),
}


@pytest.mark.parametrize("what", OUTS)
def test_an_out_that_cannot_be_is_one_line(what, made, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nothing").symlink_to(tmp_path / "not there")
    out, message = OUTS[what]
    with pytest.raises(SystemExit) as stop:
        cli.main([*COMMANDS["quantize"].format(**made).split(), "--out", out.format(root=tmp_path), "--device", "cpu"])
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and message in said and said.startswith("error: ")
    assert (tmp_path / "file").read_text() == "mine" and not (tmp_path / "not there").exists()


def test_a_disk_that_only_reads_is_one_line(small_disk, made, capsys):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(SystemExit) as stop:
        out = ["--out", str(small_disk / "out"), "--device", "cpu"]
        cli.main([*COMMANDS["quantize"].format(**made).split(), *out])
    assert stop.value.code == 2 and "Read-only file system; give a path" in capsys.readouterr().err


def test_a_closed_pipe_ends_quietly_and_a_full_output_in_one_line():
    for target, code, said in (("| head -c 0", 1, ""), ("> /dev/full", 2, "error: output: No space left on device")):
        program = "import sys; sys.argv = ['qat-lora']; from qat_lora.cli import main; main(['recover', '--help'])"
        line = f'set -o pipefail; {sys.executable} -c "{program}" {target}'
        done = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        assert done.returncode == code and done.stderr.startswith(said) and done.stderr.count("\n") == bool(said)

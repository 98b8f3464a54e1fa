"""Commands, really run, in folders where people keep files: --overwrite takes the run's own and no others."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from toy_pipeline import (
    cache_options,
    call,
    eval_options,
    export_options,
    part,
    quantize_options,
    recover_options,
)

from qat_lora.errors import DamagedFileError, OutputExistsError
from qat_lora.files.folders import LIST
from qat_lora.options import AuditOptions, QatOptions
from qat_lora.train.blockwise import BlockwiseConfig
from qat_lora.train.loop import LoopConfig

MINE = ("thesis/chapter.tex", "best/notes.txt", "notes.txt", ".cache/mine", "checkpoints/mine.txt", "scores.txt")


def bytes_of(folder):
    return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """Cache, student, run and scores of the toy pipeline, which the tests read and copy."""
    root = tmp_path_factory.mktemp("overwrite")
    cache = call("build_cache", cache_options(tiny, root / "cache"))
    student = call("quantize", quantize_options(tiny, root / "student"))
    run = call("recover", recover_options(student, cache, root / "run"))
    return {"cache": cache, "student": student, "run": run, "root": root}


def work(name, tiny, made, out, **run):
    """Run a command at toy size into a folder."""
    options = {
        "quantize": lambda: ("quantize", quantize_options(tiny, out)),
        "recover": lambda: ("recover", recover_options(made["student"], made["cache"], out, train_scales=True)),
        "eval": lambda: ("evaluate", eval_options(tiny, {"run": made["run"]}, out)),
        "export": lambda: ("export", export_options(made["run"], out)),
        "cache audit": lambda: (
            "audit_cache",
            AuditOptions(kd_cache_dir=str(made["cache"]), teacher=str(tiny.teacher), rows=4, run=part(out)),
        ),
        "qat": lambda: (
            "qat",
            QatOptions(
                model=str(tiny.teacher),
                preset="w2g64",
                init="absmax",
                from_scratch=True,
                kd_cache_dir=str(made["cache"]),
                calibration_rows=8,
                blockwise=BlockwiseConfig(blockwise_steps=1),
                loop=LoopConfig(batch_size=16, max_steps=2, save_steps=1),
                run=part(out),
            ),
        ),
    }[name]()
    function, given = options
    return call(function, replace(given, run=replace(given.run, **run)))


@pytest.mark.parametrize(
    "name",
    [
        "quantize",
        "recover",
        "export",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("eval", "cache audit", "qat")),
    ],
)
def test_a_command_starts_again_and_leaves_what_is_not_its_own(tiny, made, tmp_path, name, capsys):
    out, outside = tmp_path / "out", tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("mine too")
    work(name, tiny, made, out)
    own = {path.relative_to(out) for path in bytes_of(out)}
    for place in MINE:
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        (out / place).write_text(f"mine: {place}")
    (out / "link").symlink_to(outside)
    inputs = {
        path: data for folder in (tiny.teacher, tiny.text, made["root"]) for path, data in bytes_of(folder).items()
    }
    work(name, tiny, made, out, seed=0 if name == "export" else 1, overwrite=True)
    assert "left as it is: .cache/" in capsys.readouterr().err
    assert {(out / place).read_text() for place in MINE} == {f"mine: {place}" for place in MINE}
    assert bytes_of(outside) == {outside / "kept": b"mine too"} and (out / "link").is_symlink()
    assert all(path.read_bytes() == data for path, data in inputs.items())
    now = {path.relative_to(out) for path in bytes_of(out)} - {Path(place) for place in MINE}
    assert now == own and (out / LIST).is_file()


def test_inputs_are_refused_before_anything_is_touched(tiny, made, tmp_path):
    """Each was lost: a student, a demo's folder, a run, a run, a teacher that lies in the folder of the cache."""
    student, run = tmp_path / "student", tmp_path / "run"
    shutil.copytree(made["student"], student)
    shutil.copytree(made["run"], run)
    cache = tmp_path / "cache"
    shutil.copytree(made["cache"], cache)
    shutil.copytree(tiny.teacher, cache / "teacher")
    before = bytes_of(tmp_path)
    again = part(student, overwrite=True)
    tries = {
        "recover": (student, recover_options(student, made["cache"], student, run=again)),
        "quantize": (run, replace(quantize_options(tiny, run), model=str(student), run=part(run, overwrite=True))),
        "export": (run, export_options(run, run, run=part(run, overwrite=True))),
        "evaluate": (run, eval_options(tiny, {"run": run}, run, run=part(run, overwrite=True))),
        "build_cache": (
            cache,
            cache_options(tiny, cache, teacher=str(cache / "teacher"), run=part(cache, overwrite=True, seed=3)),
        ),
    }
    for command, (out, options) in tries.items():
        if command == "quantize":
            shutil.copytree(tiny.teacher, out / "teacher")
            options, before = replace(options, model=str(out / "teacher")), bytes_of(tmp_path)
        with pytest.raises(OutputExistsError, match="the input .* nothing was touched: choose another --out"):
            call(command, options)
        assert bytes_of(tmp_path) == before, command


def test_a_run_that_shares_files_with_an_input_is_not_removed(tiny, made, tmp_path):
    """A teacher made of links into the output: hard ones, and one by name."""
    out = call("quantize", quantize_options(tiny, tmp_path / "out"))
    for kind in ("hard", "symbolic"):
        teacher = tmp_path / kind
        shutil.copytree(tiny.teacher, teacher)
        (teacher / "more.json").hardlink_to(out / "result.json") if kind == "hard" else None
        (teacher / "more.json").symlink_to(out / "result.json") if kind == "symbolic" else None
        before = bytes_of(tmp_path)
        options = quantize_options(tiny, out, model=str(teacher), run=part(out, overwrite=True, seed=4))
        with pytest.raises(OutputExistsError, match="has files in common with the input"):
            call("quantize", options)
        assert bytes_of(tmp_path) == before
    (tmp_path / "text" / "runs").mkdir(parents=True)  # the other way round is fine: `--dataset . --out runs/x`
    shutil.copytree(tiny.held_out, tmp_path / "text", dirs_exist_ok=True)
    options = eval_options(tiny._replace(held_out=tmp_path / "text"), {"run": made["run"]}, tmp_path / "text/runs/eval")
    call("evaluate", options)
    call("evaluate", replace(options, run=replace(options.run, overwrite=True)))


@pytest.mark.parametrize("harm", ["gone", "changed"])
def test_complete_is_only_said_of_what_is_there(tiny, tmp_path, harm):
    out = call("quantize", quantize_options(tiny, tmp_path / "out"))
    weights = out / "model.safetensors"
    if harm == "gone":
        weights.unlink()
    else:
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    with pytest.raises(DamagedFileError, match=f"model.safetensors: is {'missing' if harm == 'gone' else 'not what'}"):
        call("quantize", quantize_options(tiny, out))
    call("quantize", quantize_options(tiny, out, run=part(out, overwrite=True)))
    assert os.path.getsize(weights) > 1000

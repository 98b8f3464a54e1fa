"""An interrupted `quantize` goes on after its last finished block and ends with the same bytes."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from quantise_kills import EVERY_POINT, ORDER, POINTS, content
from toy_pipeline import cache_options, call, quantize_options

from qat_lora.commands import quantize as quantising
from qat_lora.errors import InterruptedRunError, OutputExistsError
from qat_lora.files import folders as files
from qat_lora.layers.calibrate import quantize as calibrate
from qat_lora.layers.calibrate import sequential
from qat_lora.setup.unfinished import Unfinished


@pytest.fixture(scope="module")
def cache(tiny, tmp_path_factory):
    return call("build_cache", cache_options(tiny, tmp_path_factory.mktemp("unfinished") / "cache", num_rows=32))


def kills(tiny, cache, root, points, every):
    program = Path(__file__).parents[1] / "quantise_kills.py"
    command = [sys.executable, program, *tiny, cache, root, every]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("the same after") == sum(map(len, points.values()))


def test_killed_at_two_blocks_it_ends_with_the_same_bytes(tiny, cache, tmp_path):
    kills(tiny, cache, tmp_path, POINTS, "two")


@pytest.mark.slow
def test_killed_at_every_block_it_ends_with_the_same_bytes(tiny, cache, tmp_path):
    kills(tiny, cache, tmp_path, EVERY_POINT, "every")


def options(tiny, cache, out, **changed):
    return quantize_options(tiny, out, cache, **{**ORDER, **changed})


def stopped_in_the_second_block(monkeypatch, tiny, cache, out):
    """Quantise, with SIGTERM in the second block; return the message."""
    original, blocks = sequential._Block.fit, []

    def block(*args):
        blocks.append(args)
        if len(blocks) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    with monkeypatch.context() as patch, pytest.raises(InterruptedRunError) as caught:
        patch.setattr(sequential._Block, "fit", block)
        call("quantize", options(tiny, cache, out))
    assert caught.value.exit_code == 143
    return str(caught.value)


def count(monkeypatch, module, name):
    """Let a function note its calls; return the list."""
    original, calls = getattr(module, name), []
    monkeypatch.setattr(module, name, lambda *a, **k: (calls.append(a), original(*a, **k))[1])
    return calls


@pytest.fixture(scope="module")
def whole(tiny, cache, tmp_path_factory):
    out = call("quantize", options(tiny, cache, tmp_path_factory.mktemp("unfinished") / "whole"))
    return content(out)


def test_a_stop_says_what_is_safe_and_nothing_of_it_is_done_again(monkeypatch, tiny, cache, tmp_path, whole, capsys):
    out = tmp_path / "out"
    message = stopped_in_the_second_block(monkeypatch, tiny, cache, out)
    assert message == (
        f"stopped by SIGTERM: 7 of 14 layers are finished and kept in {out}; the same command goes on from there"
    )
    assert not (out / "model.safetensors").exists()
    fits, passes = count(monkeypatch, calibrate, "fit_layers"), count(monkeypatch, quantising, "sensitivities")
    again = options(tiny, cache, out)
    call("quantize", again, run=again.run.__class__(**{**vars(again.run), "quiet": False}))
    assert (len(fits), len(passes)) == (7, 0)  # a run that keeps nothing: 14 and 1
    assert "goes on after 7 of 14 layers" in capsys.readouterr().out
    assert content(out) == whole


def test_a_damaged_block_is_named_and_made_again_and_other_settings_are_refused(
    monkeypatch, tiny, cache, tmp_path, whole, capsys
):
    out = tmp_path / "out"
    stopped_in_the_second_block(monkeypatch, tiny, cache, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(OutputExistsError, match="joint_rank was 2, now 1"):
        call("quantize", options(tiny, cache, out, joint_rank=1))
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    damaged = out / "unfinished" / "block-model.layers.0" / "tensors.safetensors"
    flip_a_bit(damaged)
    fits = count(monkeypatch, calibrate, "fit_layers")
    call("quantize", options(tiny, cache, out))
    assert str(damaged) in capsys.readouterr().err
    assert len(fits) == 14 and content(out) == whole


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_finished_blocks_are_views_of_their_files(monkeypatch, tiny, cache, tmp_path):
    """So own memory does not grow with depth; kept in memory, every block would have storages of its own."""
    kept = {}

    def seen(fitter, name, found, original=calibrate.LayerFitter.put):
        starts = original(fitter, name, found)
        folder = tmp_path / "out" / "unfinished"
        for layer in found:
            kept[layer] = fitter.model.get_submodule(layer).codes, folder / f"block-{name}" / "tensors.safetensors"
            kept[f"start of {layer}"] = starts[layer].a_RI, folder / f"start-{name}" / "tensors.safetensors"
        return starts

    monkeypatch.setattr(calibrate.LayerFitter, "put", seen)
    monkeypatch.setattr(quantising, "remove_pieces", lambda out: None)
    call("quantize", options(tiny, cache, tmp_path / "out"))
    assert len(kept) == 28
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    mapped = [(*(int(end, 16) for end in of[0].split("-")), Path(of[-1])) for of in maps]
    for tensor, file in kept.values():
        assert any(start <= tensor.data_ptr() < end and path == file for start, end, path in mapped)


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[-2] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize("file", ["tensors.safetensors", "facts.json", "SHA256SUMS"])
def test_what_is_damaged_or_half_written_is_taken_for_undone(tmp_path, capsys, file, request):
    files.begin_list(tmp_path, "quantize", {"unfinished/.block-2.new/"})  # the draft that a kill leaves
    request.addfinalizer(lambda: files.release(tmp_path))
    work = Unfinished(tmp_path, "layers", 3, [])
    for name in ("block-0", "block-1"):
        work.keep(name, {"codes": torch.arange(4)}, {name: None})
    draft = tmp_path / "unfinished" / ".block-2.new"
    shutil.copytree(tmp_path / "unfinished" / "block-1", draft)
    flip_a_bit(tmp_path / "unfinished" / "block-1" / file)
    again = Unfinished(tmp_path, "layers", 3, [])
    said = capsys.readouterr().err
    assert str(tmp_path / "unfinished" / "block-1") in said and "made again" in said and said.count("\n") == 1
    assert again.parts == 1 and again.take("block-1") is None and not draft.exists()
    tensors, facts = again.take("block-0")
    assert torch.equal(tensors["codes"], torch.arange(4)) and facts == {"block-0": None}


def test_what_is_left_in_a_complete_run_is_removed(tiny, cache, tmp_path):
    """A kill between the last line of the mark and the end."""
    out = call("quantize", options(tiny, None, tmp_path / "out", init="absmax", start_rank=0, joint_rank=None))
    files.hold(out, files.listed(out)[1])
    Unfinished(out, "layers", 14, []).keep("block-0", {}, {})
    files.release(out)
    call("quantize", options(tiny, None, out, init="absmax", start_rank=0, joint_rank=None))
    assert not (out / "unfinished").exists()

"""Sums of folders that can be loaded: what is refused, what is only noticed, and that nothing is hashed twice."""

import json
import os
import shutil
import subprocess

import pytest

from qat_lora.errors import DamagedFileError, ModelError
from qat_lora.files import checksums
from qat_lora.files.checksums import LOADED, NOTE, SUMS, check_folder, check_sums, read_object, seal, sha256_of


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(bytes(range(8)))
    (made / "README.md").write_text("of no account")
    seal(made)
    return made


def test_what_decides_is_listed_and_people_may_edit_the_rest(folder):
    assert {line.split("  ")[1] for line in (folder / SUMS).read_text().splitlines()} == {
        "config.json",
        "model.safetensors",
        NOTE,
    }
    (folder / "README.md").write_text("edited")
    check_folder(folder)
    check_folder(shutil.copytree(folder, folder.with_name("moved")))


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no sha256sum here")
def test_every_system_can_check_them(folder):
    assert subprocess.run(["sha256sum", "-c", "--quiet", SUMS], cwd=folder).returncode == 0
    (folder / "config.json").write_text("[]")
    assert subprocess.run(["sha256sum", "-c", "--quiet", SUMS], cwd=folder, capture_output=True).returncode


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", NOTE, SUMS])
def test_every_bit_counts(folder, name):
    file = folder / name
    whole = file.read_bytes()
    for bit in range(0, 8 * len(whole), 1 if len(whole) < 9 else 11):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(ModelError, match=name) as caught:
            check_folder(folder)
        assert "\n" not in str(caught.value)
    file.write_bytes(whole)
    check_folder(folder)


def test_missing_files_and_missing_sums(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DamagedFileError, match=r"tokenizer.json: has no checksum.*sha256sum tokenizer.json >>"):
        check_folder(folder)
    check_folder(folder, ("*.safetensors",))
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").rename(folder / "model.old")
    with pytest.raises(DamagedFileError, match="model.safetensors: cannot be read"):
        check_folder(folder)
    (folder / "model.old").rename(folder / "model.safetensors")
    (folder / SUMS).unlink()
    with pytest.raises(DamagedFileError, match=f"{SUMS}: is missing"):
        check_folder(folder)


def test_sums_of_somebody_else(folder):
    (folder / NOTE).unlink()
    (folder / SUMS).write_text("SHA256 (model.safetensors) = 00\n")
    check_folder(folder)
    (folder / SUMS).write_text(f"{'0' * 64}  model.safetensors\n")
    with pytest.raises(DamagedFileError, match="model.safetensors: is not what was written"):
        check_folder(folder)


def test_a_file_is_read_once_and_again_when_it_changed(folder, monkeypatch):
    file, reads = folder / "model.safetensors", []
    real = checksums.hashlib.file_digest
    monkeypatch.setattr(checksums.hashlib, "file_digest", lambda *a: reads.append(a) or real(*a))
    monkeypatch.setattr(checksums.time, "time_ns", lambda: file.stat().st_ctime_ns + 10**9)
    first = sha256_of(file)
    assert [sha256_of(file), len(reads)] == [first, 1]
    status = file.stat()
    file.write_bytes(bytes(8))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a copy that keeps times does
    assert sha256_of(file) != first


def test_a_file_just_written_is_never_remembered(folder):
    """A clock that stands still between two writes must not hide the second: the control is a cache by times alone."""
    file = folder / "model.safetensors"
    for content in (b"a", b"b") * 20:
        file.write_bytes(content)
        assert sha256_of(file) == checksums.hashlib.sha256(content).hexdigest()


ODD = ["", "[]", "3", "{", "\ufeff{}", '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', "[" * 100_000, "9" * 5000]


@pytest.mark.parametrize("text", ODD)
def test_odd_json_is_one_line(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ModelError, match=r"state.json: ") as caught:
        read_object(tmp_path / "state.json")
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="cannot be read"):
        read_object(tmp_path / "none.json")


def test_a_promise_in_another_file(folder):
    check_sums(folder, True, LOADED)
    assert {line.split()[1] for line in (folder / SUMS).read_text().splitlines()} == {
        "config.json",
        "model.safetensors",
        NOTE,
    }
    assert json.loads((folder / NOTE).read_text()) == {"checksums": SUMS}


def test_a_config_of_transformers_may_hold_infinities(tmp_path):
    """Mamba's `time_step_limit` is (0, infinity), and transformers writes it so; NaN means nothing anywhere."""
    file = tmp_path / "config.json"
    file.write_text('{"time_step_limit": [0.0, Infinity]}')
    assert read_object(file)["time_step_limit"] == [0.0, float("inf")]
    file.write_text('{"rms_norm_eps": NaN}')
    with pytest.raises(ModelError, match=r"config.json: .*NaN is no number"):
        read_object(file)

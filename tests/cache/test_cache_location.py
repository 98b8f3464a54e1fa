"""What a path or URL means, and the commands with a URL where a folder could stand."""

import hashlib
import json
import tempfile
from pathlib import Path

import fsspec
import pytest

from qat_lora.cache.storage.location import LocalFolder, RemoteFolder, locate
from qat_lora.cache.storage.store import verify_cache
from qat_lora.cli import main
from qat_lora.errors import CacheDamaged, CacheError

URL = "memory://kd/wiki_L48_K4"


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def test_paths_and_urls_are_told_apart(tmp_path, monkeypatch):
    for text in ("caches/x", "/a/b", ".", "a:b", str(tmp_path)):
        place = locate(text)
        assert isinstance(place, LocalFolder) and str(place) == str(Path(text)) and not place.far
        assert str(locate(Path(text))) == str(Path(text)) and locate(place) is place
    assert str(locate(f"file://{tmp_path}")) == str(tmp_path)
    for text in ("memory://a/b", "memory://a/b/", "simplecache::memory://a/b"):
        place = locate(text)
        assert isinstance(place, RemoteFolder) and str(place) == text.rstrip("/") and place.far
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CacheError, match=r"gs:/b/c: .*as a URL, give gs://… as text"):
        locate(Path("gs://b/c"))
    Path("gs:").mkdir()
    assert str(locate(Path("gs://b/c"))) == "gs:/b/c"  # an odd name, but it is there


@pytest.mark.parametrize("make", [lambda path: str(path), lambda path: "memory://folder"])
def test_both_kinds_keep_the_same_promises(make, tmp_path):
    place = locate(make(tmp_path / "c"))
    assert place.names() == [] and not place.has("a")
    (tmp_path / "c").mkdir()
    size, digest = place.write_new("a", [b"first", memoryview(b" second")], "shard")
    assert (size, place.size("a"), place.read("a", 99), b"".join(place.chunks("a"))) == (
        12, 12, b"first second", b"first second",
    )  # fmt: skip
    assert digest == hashlib.sha256(b"first second").hexdigest()
    with place.open("a") as opened:
        assert opened.read() == b"first second"
    with pytest.raises(FileExistsError):
        place.write_new("a", [b"other"], "shard")
    with pytest.raises(CacheDamaged, match="larger than 11 bytes"):
        place.read("a", 11)
    assert place.has("a") and place.names() == ["a"]
    place.delete("a")
    place.delete("a")
    for missing in (lambda: place.read("a", 9), lambda: place.size("a"), lambda: list(place.chunks("a"))):
        with pytest.raises(FileNotFoundError):
            missing()
    with pytest.raises(FileNotFoundError):
        place.open("b")
    assert place.far or place.free_bytes() > 0


def test_every_command_takes_a_url(tiny, student, tmp_path, capsys):
    """Built, shown, verified, exported, audited, trained from: all behind a URL."""
    build = f"cache build --teacher {tiny.teacher} --dataset {tiny.text} --format text --length 48 --top-k 4 "
    build += "--eval-rows 2 --num-rows 12 --shard-rows 5 --device cpu --quiet --out "

    def run(line):
        main(line.split())
        return capsys.readouterr().out

    assert json.loads(run(build + URL + " --json")) == {"out": URL}
    run(build + str(tmp_path / "near"))
    folder = RemoteFolder(URL)
    near = {file.name: file.read_bytes() for file in (tmp_path / "near").iterdir() if file.name != ".lock"}
    assert {name: folder.read(name, 1 << 30) for name in folder.names()} == near
    run(build + URL)  # complete already
    cost = run(build.replace("--quiet", "") + "memory://kd/other --dry-run")
    assert "an object store tells of no limit" in cost and RemoteFolder("memory://kd/other").names() == []
    assert "intact: 4 shards, 14 rows" in run(f"cache verify {URL} --quiet")
    assert URL in run(f"cache info {URL} --tokenizer {tiny.teacher}")
    assert json.loads(run(f"cache export {URL} --parquet --out {tmp_path / 'x.parquet'} --quiet --json"))["rows"] == 12
    audited = json.loads(run(f"cache audit {URL} --teacher {tiny.teacher} --rows 2 --device cpu --json"))
    assert audited["same_ids"] == 1.0
    out = tmp_path / "run"
    recover = f"recover --checkpoint {student} --kd-cache-dir {URL} --recovery-r 2 --batch-size 2 --max-steps 2 "
    run(recover + f"--device cpu --quiet --out {out}")
    assert (out / "best").is_dir() and not (tmp_path / "memory:").exists()
    quantize = f"quantize --model {tiny.teacher} --kd-cache-dir {URL} --calibration-rows 8 --device cpu --quiet "
    run(quantize + f"--out {tmp_path / 'q'}")
    name = next(name for name in folder.names() if name.endswith("1.safetensors"))
    fsspec.filesystem("memory").pipe_file(f"{URL}/{name}", folder.read(name, 1 << 30)[:-1] + b"\xff")
    with pytest.raises(SystemExit) as left:
        main(["cache", "verify", URL, "--quiet"])
    assert left.value.code == 1 and f"{URL}/{name}" in capsys.readouterr().err
    with pytest.raises(CacheDamaged):
        verify_cache(URL)

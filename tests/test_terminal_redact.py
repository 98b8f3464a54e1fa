"""Credentials in addresses are in nothing that is printed or written, whatever the command and however it ends."""

import json
import tempfile

import fsspec
import pytest

import qat_lora
from qat_lora import errors
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.location import RemoteFolder
from qat_lora.cli import main
from qat_lora.terminal import redact

URL = "memory://KEYID:S3CR3T@bucket/cache"


def test_what_is_hidden_and_what_is_not():
    for text, shown in {
        "s3://KEYID:S3C/R3T+x@bucket/c: is missing": "s3://***@bucket/c: is missing",
        "give s3:/KEYID:S3CR3T@b//… as text": "give s3:/***@b//… as text",
        "simplecache::gs://t0k3n@b/c, gs://u:p@d": "simplecache::gs://***@b/c, gs://***@d",
        "'https://h/c?token=a1&x=1&X-Amz-Signature=b2'": "'https://h/c?token=***&x=1&X-Amz-Signature=***'",
        "https://user:pa@ss@host/c@d and https://me@corp.com:p@@x@h": "https://***@host/c@d and https://***@h",
        "abfs://c:S3CR3T@a/x, az://c@a/x, xabfs://t0k3n@a": "abfs://***@a/x, az://c@a/x, xabfs://***@a",
        "https://h/c?AWSAccessKeyId=a&part=2": "https://h/c?AWSAccessKeyId=***&part=2",
    }.items():
        assert redact(text) == shown and redact(shown) == shown
    for text in ("gs://bucket/a/b", "mail a@b.c about C:/x and /d@e", "https://h:80/c?x=1", "a: b@c", "x:\n/a@b"):
        assert redact(text) == text
    for scheme in ("abfs", "abfss", "wasb", "wasbs", "simplecache::abfss"):  # a container is no credential
        address = f"{scheme}://text@account.dfs.core.windows.net/x"
        assert redact(address) == address and redact(address.replace("//", "/")) == address.replace("//", "/")
    assert redact("no bucket KEYID:S3CR3T@bucket", URL) == "no bucket ***@bucket"
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.QatLoraError):
            assert str(kind(f"{URL}: x")) == "memory://***@bucket/cache: x" and "S3CR3T" not in repr(kind(URL))


@pytest.fixture
def quiet_store(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "copies"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def test_commands_on_a_cache_behind_credentials(tiny, student, tmp_path, capfd, quiet_store):
    """Every way in which a command names its cache: results, status lines, settings, refusals, damage."""
    build = f"cache build --teacher {tiny.teacher} --dataset {tiny.text} --format text --length 32 --top-k 4 "
    build += f"--eval-rows 2 --num-rows 8 --device cpu --out {URL}"
    recover = f"recover --checkpoint {student} --recovery-r 2 --batch-size 2 --max-steps 2 --device cpu "
    recover += f"--out {tmp_path / 'run'} --kd-cache-dir {URL}"
    audit = f"cache audit {URL} --teacher {tiny.teacher} --rows 2 --device cpu"
    evaluate = f"eval --teacher {tiny.teacher} --students same={tiny.teacher} --dataset {tiny.held_out} --length 32 "
    evaluate += f"--eval-rows 4 --device cpu --kd-cache-dir {URL} --out {tmp_path / 'eval'} --domain web={URL}-text"
    for file in tiny.held_out.iterdir():
        fsspec.filesystem("memory").pipe_file(f"/KEYID:S3CR3T@bucket/cache-text/{file.name}", file.read_bytes())
    qat = f"qat --model {tiny.teacher} --from-scratch --kd-cache-dir {URL} --dry-run --device cpu"
    lines = [build, build + " --json", f"cache verify {URL}", f"cache verify {URL} --json", f"cache info {URL} --json"]
    lines += [f"cache info {URL}", audit, recover, evaluate, qat, recover + " --dry-run"]
    for line in lines:
        main(line.split())
    assert json.loads(fsspec.filesystem("memory").cat("/KEYID:S3CR3T@bucket/cache/manifest.json"))["train"]
    assert "***@bucket/cache" in (tmp_path / "run/config.yaml").read_text()
    assert "web=memory://***@bucket/cache-text" in (tmp_path / "eval/qat_lora_run.json").read_text()
    folder = RemoteFolder(URL)
    name = next(name for name in folder.names() if name.startswith("s-") and name.endswith("safetensors"))
    folder._fs.pipe_file(folder._path(name), folder.read(name, 1 << 30)[:-1] + b"\xff")
    refused = [
        f"cache verify {URL}",
        f"cache info {URL}/none",
        recover.replace("/run", "/other"),
        recover + "x --dry-run",
        build + "0 --top-k 0",
    ]
    refused += [
        "cache verify s4://KEYID:S3CR3T@b/c?token=S3CR3T",
        f"{recover} --objective sft",
        f"cache verify {URL} {URL}",
    ]
    for line in refused:
        with pytest.raises(SystemExit):
            main(line.split())
    with pytest.raises(errors.CacheDamaged) as caught:
        qat_lora.KDCacheDataset(URL)
    shown = capfd.readouterr()
    texts = {"out": shown.out, "err": shown.err, "error": str(caught.value), "place": str(RemoteFolder(URL))}
    for file in tmp_path.rglob("*"):
        if file.is_file():
            texts[str(file)] = str(file) + file.read_bytes().decode("latin-1")
    assert [name for name, text in texts.items() if "S3CR3T" in text or "KEYID" in text] == []
    assert "***@bucket/cache" in shown.out and "***@bucket/cache/s-000000" in shown.err
    assert str(KDCacheDataset(URL, verify=False).path) == "memory://***@bucket/cache"

"""`cache push`, `cache pull` and `hf://`, through the Hub's real client, against a Hub on this machine (`toy_hub`)."""

import contextlib
import json
import shutil

import numpy as np
import pytest
import toy_hub
import yaml
from toy_hub import REPO

from qat_lora import cli
from qat_lora.cache.build.writer import CacheWriter
from qat_lora.cache.format.records import Fingerprint
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.store import read_manifest, verify_cache
from qat_lora.errors import CacheDamaged, CacheError, OutputExistsError
from qat_lora.export import hub as uploads
from qat_lora.export.hub import check_cache, pull_cache, push_cache

URL = f"hf://datasets/{REPO}"


@pytest.fixture
def hub(monkeypatch):
    constants = pytest.importorskip("huggingface_hub").constants
    with toy_hub.toy_hub() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.url + template)
        yield served


def _client(hub):
    from huggingface_hub import HfApi

    return HfApi(hub.url, token="no secret")


def _cache(path, rows=7, first=0, **changes):
    about = {"tokenizer_sha256": "11" * 32, "vocab_size": 31, "teacher": "org/toy", "teacher_sha256": "22" * 32}
    about |= {"chat_template_sha256": None, "dataset": "numbers", "packing": "none", "length": 5, "top_k": 3}
    with CacheWriter(path, Fingerprint(**{**about, **changes}), 2) as writer:
        for i in range(first, first + rows):
            values = np.array([0, -1, -2 - i / 8])
            row = {"input_ids": np.full((1, 5), i), "loss_mask": np.ones((1, 5)), "doc_starts": np.ones((1, 5))}
            row |= {"head_ids": np.tile([3, 1, 2], (1, 4, 1)), "head_logits": np.tile(values, (1, 4, 1))}
            writer.append(row | {"lse": np.ones((1, 4)), "log_tail": np.full((1, 4), -1.5)}, [{"row": i}])
    return path


def _push(hub, path, private=True, **settings):
    return push_cache(*check_cache(str(path), **settings), REPO, "mit", private, _client(hub))


def _files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != ".lock"}


def test_there_and_back(hub, tmp_path):
    """Sent with a card, private, the manifest last; fetched to the same bytes; and read in place."""
    _cache(tmp_path / "c")
    (tmp_path / "c" / "notes.txt").write_text("mine")
    url = _push(hub, tmp_path / "c")
    assert hub.private and url.startswith(hub.url)
    sent = {name: data for name, data in _files(tmp_path / "c").items() if name != "notes.txt"}
    assert {"README.md", *sent} == {*hub.files} and all(hub.files[name] == data for name, data in sent.items())
    holding = ["manifest.json" in files for files in hub.revisions]
    assert sum(holding) == 1 and holding[-1]  # what a broken push leaves is no cache
    _, front, card = hub.files["README.md"].decode().split("---\n", 2)
    front = yaml.safe_load(front)
    assert front["license"] == "mit" and front["size_categories"] == ["n<1K"] and "kd-cache" in front["tags"]
    for told in ("org/toy", "11" * 32, "numbers", "3,426 bytes", f"qat-lora cache pull {REPO} --out cache"):
        assert told in card
    assert pull_cache(REPO, tmp_path / "d") == read_manifest(tmp_path / "c")
    assert _files(tmp_path / "d") == sent | {"README.md": hub.files["README.md"]}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c", "d"]

    assert verify_cache(URL).rows == 7 and verify_cache(URL).strangers == ("README.md",)
    near, far = KDCacheDataset(tmp_path / "c").rows(range(7)), KDCacheDataset(URL).rows(range(7))
    assert all(np.array_equal(near[name], far[name]) for name in near)
    with pytest.raises(CacheError, match=r"hf://.*not built in; build on a disk .* `qat-lora cache push`"):
        CacheWriter(URL, read_manifest(URL).fingerprint).__enter__()
    revision = hub.sha()
    hub.revisions.append({})
    with pytest.raises(CacheError, match="no finished KD cache"):
        pull_cache(REPO, tmp_path / "e")
    assert pull_cache(REPO, tmp_path / "e", revision) and _files(tmp_path / "e") == _files(tmp_path / "d")


def test_a_broken_push_and_a_broken_pull_go_on(hub, tmp_path):
    _cache(tmp_path / "c")
    commits = []

    def second_commit(method, path):
        commits.append(path) if "/commit/" in path else None
        return len(commits) == 2 and "/commit/" in path

    hub.fails = second_commit
    with pytest.raises(CacheError, match=r"did not take the cache .*goes on where it stopped"):
        _push(hub, tmp_path / "c")
    assert "s-000003.json" in hub.files and "manifest.json" not in hub.files
    for read in (verify_cache, KDCacheDataset):
        with pytest.raises(CacheError, match="no finished KD cache"):
            read(URL)
    hub.fails = lambda method, path: False
    _push(hub, tmp_path / "c")
    before = hub.files
    _push(hub, tmp_path / "c")  # again: the same
    assert hub.files == before

    hub.fails = lambda method, path: method == "GET" and path.endswith("s-000002.safetensors")
    with pytest.raises(CacheError, match=r"cannot be fetched .*goes on from there"):
        pull_cache(REPO, tmp_path / "d")
    assert not (tmp_path / "d").exists()
    hub.fails = lambda method, path: False
    hub.asked.clear()
    pull_cache(REPO, tmp_path / "d")
    assert hub.asked["GET s-000002.safetensors"] == 1 and hub.asked["GET manifest.json"] == 0
    verify_cache(tmp_path / "d")
    with pytest.raises(OutputExistsError, match="exists already"):
        pull_cache(REPO, tmp_path / "d")


def test_what_arrives_damaged_is_no_cache_and_is_fetched_again(hub, tmp_path):
    _cache(tmp_path / "c")
    _push(hub, tmp_path / "c")
    good = hub.files["s-000001.safetensors"]
    hub.files["s-000001.safetensors"] = good[:-1] + bytes([good[-1] ^ 1])
    with pytest.raises(CacheDamaged, match=r"s-000001.*d was not made: the same command fetches again"):
        pull_cache(REPO, tmp_path / "d")
    assert not (tmp_path / "d").exists()
    hub.files["s-000001.safetensors"] = good
    hub.asked.clear()
    pull_cache(REPO, tmp_path / "d")
    assert _files(tmp_path / "d")["s-000001.safetensors"] == good
    assert hub.asked["GET s-000001.safetensors"] == 1 and hub.asked["GET s-000000.safetensors"] == 0


def test_another_revision_leaves_nothing_behind(hub, tmp_path):
    _cache(tmp_path / "c", rows=9)
    _push(hub, tmp_path / "c")
    hub.fails = lambda method, path: method == "GET" and path.endswith("s-000003.safetensors")
    with pytest.raises(CacheError):
        pull_cache(REPO, tmp_path / "d")
    hub.fails = lambda method, path: False
    _cache(tmp_path / "short", rows=3, first=20)
    hub.revisions.append(_files(tmp_path / "short") | {"README.md": b"shorter"})
    pull_cache(REPO, tmp_path / "d")
    assert _files(tmp_path / "d") == hub.files


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher": "/home/me/models/toy"}, "manifest.json: names a path of this machine ./home/me/models/toy"),
        ({"dataset": '{"dataset": "/data/x/y"}'}, "names a path of this machine"),
        ({"dataset": "s3://KEY:SECRET@bucket/x"}, "holds what looks like a secret"),
        ({"teacher": "hf_" + "a" * 30}, "holds what looks like a secret"),
    ],
)
def test_what_is_not_sent(hub, tmp_path, changes, words):
    _cache(tmp_path / "c", **changes)
    with pytest.raises(CacheError, match=words):
        check_cache(str(tmp_path / "c"))
    if "path of this machine" in words:
        _, manifest = check_cache(str(tmp_path / "c"), allow_paths=True)
        assert "/home/me" not in uploads.dataset_card(manifest, REPO, "mit")


def test_what_is_refused(hub, tmp_path, monkeypatch):
    folder = _cache(tmp_path / "c")
    with pytest.raises(CacheError, match="memory://kd: is behind a URL"):
        check_cache("memory://kd")
    shutil.copy(folder / "s-000001.safetensors", folder / "s-000009.safetensors")
    with pytest.raises(CacheError, match="s-000009.safetensors is named as a shard"):
        check_cache(str(folder))
    (folder / "s-000009.safetensors").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(uploads, "MOST_FILES", 6)
        with pytest.raises(CacheError, match="has 10 files; the Hub takes 6 a folder"):
            check_cache(str(folder))
    _push(hub, folder)
    hub.private = False
    with pytest.raises(CacheError, match="is public already"):
        _push(hub, folder)
    _push(hub, folder, private=False)
    before = dict(hub.files)
    _cache(tmp_path / "other", seed=1)
    with pytest.raises(CacheError, match="holds another cache already"):
        _push(hub, tmp_path / "other", private=False)
    assert hub.files == before
    (folder / "s-000001.json").unlink()
    with pytest.raises(CacheDamaged, match="s-000001"):
        check_cache(str(folder))


def test_the_commands(hub, tmp_path, monkeypatch, capfd):
    folder, words = str(_cache(tmp_path / "c")), ["--quiet", "--json"]
    monkeypatch.setenv("HF_TOKEN", "no secret")

    def said(*arguments):
        capfd.readouterr()
        with contextlib.suppress(SystemExit):
            cli.main(["cache", *arguments])
        return capfd.readouterr()

    assert "Missing option '--license'" in said("push", folder, REPO).err
    assert "OWNER/NAME" in said("push", folder, "cache", "--license", "mit").err
    result = json.loads(said("push", folder, REPO, "--license", "mit", "--dry-run", *words).out)
    assert result == {"repo": REPO, "bytes": 3426, "shards": 4, "url": None} and not hub.exists
    assert json.loads(said("push", folder, REPO, "--license", "mit", *words).out)["url"].startswith(hub.url)
    pulled = json.loads(said("pull", REPO, "--out", str(tmp_path / "d"), *words).out)
    assert pulled["shards"] == 4 and verify_cache(tmp_path / "d").rows == 7
    assert f"{tmp_path}/d: exists already" in said("pull", REPO, "--out", str(tmp_path / "d")).err
    assert "intact" in said("verify", URL, "--quiet").out and "org/toy" in said("info", URL).out

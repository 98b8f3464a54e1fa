"""What may go to the Hub, what may not, and what is asked of the Hub's client (a stand-in: nothing is sent)."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from toy_pipeline import cache_options, call, export_options, part, quantize_options, recover_options

from qat_lora.commands.export import push
from qat_lora.errors import ConfigError, ModelError
from qat_lora.export.hub import files_to_upload, upload_summary
from qat_lora.files.checksums import seal
from qat_lora.options import PushOptions
from qat_lora.runtime.launch.select import select_runtime


class Hub:
    """Stands for `huggingface_hub.HfApi`."""

    def __init__(self, error=None):
        self.calls, self.error = [], error

    def create_repo(self, repo, **settings):
        self.calls.append(("create", repo, settings))
        if self.error:
            raise self.error

    def create_commit(self, **settings):
        self.calls.append(("upload", settings))
        return SimpleNamespace(commit_url="https://hub.example/commit/1")


@pytest.fixture(scope="module")
def exported(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("push")
    cache = call("build_cache", cache_options(tiny, root / "cache", num_rows=16))
    student = call("quantize", quantize_options(tiny, root / "student", cache))
    run = call("recover", recover_options(student, cache, root / "run"))
    return call("export", export_options(run, root / "pair", form="adapter", license="mit"))


@pytest.fixture
def folder(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "pair")


def pushed(folder, hub=None, **settings):
    options = PushOptions(folder=str(folder), repo=settings.pop("repo", "me/tiny"), run=part("unused"), **settings)
    return push(options, select_runtime("cpu"), hub)


def test_a_dry_run_lists_everything_and_sends_nothing(folder):
    hub = Hub()
    result = pushed(folder, hub, dry_run=True)
    assert hub.calls == [] and result["uploaded"] is False and result["form"] == "adapter"
    assert {"README.md", "adapter_model.safetensors", "base/model.safetensors", "base/tokenizer.json"} <= set(
        result["files"]
    )
    assert not {"qat_lora_run.json", "config.yaml"} & set(result["files"])  # they name folders of this machine
    assert result["size_bytes"] == sum(result["files"].values())


def test_what_the_hub_is_asked(folder):
    hub = Hub()
    result = pushed(folder, hub, private=True)
    (create, repo, settings), (upload, sent) = hub.calls
    assert (create, repo, settings) == ("create", "me/tiny", {"private": True, "exist_ok": True})
    assert upload == "upload" and sent["repo_id"] == "me/tiny" and result["uploaded"]
    paths = {operation.path_in_repo: operation.path_or_fileobj for operation in sent["operations"]}
    assert paths == {name: str(folder / name) for name in result["files"]}


def test_only_what_an_export_holds_goes(folder):
    """Files of other kinds stay; as patterns, two of these names would have sent everything."""
    before = pushed(folder, dry_run=True)["files"]
    for name in ("*", "[a-z]*", ".hidden", "notes.docx", "training.log", "base/run.sh", "dump.sql"):
        (folder / name).write_text("x")
    hub = Hub()
    assert pushed(folder, hub)["files"] == before
    sent = [operation.path_in_repo for operation in hub.calls[1][1]["operations"]]
    assert sorted(sent) == sorted(before)


def test_a_hub_that_refuses_is_an_error_for_people(folder):
    with pytest.raises(ModelError, match="me/tiny did not take the upload .401 no.*hf auth login"):
        pushed(folder, Hub(RuntimeError("401\nno")))


def _pickled(folder):
    torch.save({}, folder / "pytorch_model.bin")


def _other_base(folder):
    save_file({"a": torch.ones(2)}, folder / "base" / "model.safetensors")
    seal(folder / "base")


def _no_base(folder):
    shutil.rmtree(folder / "base")


def _no_licence(folder):
    (folder / "README.md").write_text("---\ntags: []\n---\n# x\n")


def _absolute(folder):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "/home/me/models/x"}))
    seal(folder)


def _no_suffix(folder):
    torch.save({}, folder / "weights")


def _protocol(folder):
    (folder / "base" / "vocab.json").write_bytes(b"\x80\x04}.")


def _disguised(folder):
    (folder / "extra.safetensors").write_bytes(b"\x80\x04\x95........")


def _holding(name, text):
    return lambda folder: (folder / name).write_text(text)


def _link(folder):
    (folder / "secret.txt").symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_pickled, "pytorch_model.bin may be pickled"),
        (_other_base, "does not belong to the base"),
        (_no_base, "would go without its base"),
        (_no_licence, "names no licence"),
        (lambda folder: (folder / "README.md").unlink(), "card"),
        (_absolute, "names a path of this machine .*/home/me"),
        (_link, "secret.txt is a link"),
        (_no_suffix, "weights may be pickled"),
        (_protocol, "base/vocab.json may be pickled"),
        (_disguised, "extra.safetensors may be pickled"),
        (_holding("id_rsa", "x"), "id_rsa looks like a secret"),
        (_holding(".env", "x"), ".env looks like a secret"),
        (_holding("base/server.pem", "x"), "base/server.pem looks like a secret"),
        (_holding("token", "x"), "token looks like a secret"),
        (_holding("credentials.json", "{}"), "credentials.json looks like a secret"),
        (_holding("extra.json", json.dumps({"note": "hf_" + "a" * 34})), "extra.json holds what looks like a secret"),
        (_holding("extra.json", '{"api_key": "0123456789"}'), "extra.json holds what looks like a secret"),
        (_holding("base/x.md", "read s3://KEY:SECRET@bucket/x"), "base/x.md holds what looks like a secret"),
    ],
)
def test_refused(folder, damage, words):
    damage(folder)
    hub = Hub()
    with pytest.raises(ModelError, match=words):
        pushed(folder, hub)
    assert hub.calls == []


def test_no_folder_no_weights_no_name(folder, tmp_path):
    with pytest.raises(ModelError, match="there is no folder"):
        files_to_upload(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="holds no weights"):
        files_to_upload(tmp_path / "empty")
    with pytest.raises(ConfigError, match="OWNER/NAME"):
        pushed(folder, Hub(), repo="tiny")
    assert upload_summary(folder, files_to_upload(folder))["form"] == "adapter"

"""Hidden states and the teacher's output head: exact logits again, and every damage refused."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from qat_lora.cache.build.builder import ForwardSettings, build_kd_cache
from qat_lora.cache.build.writer import CacheWriter, Partition
from qat_lora.cache.format.lm_head import lm_head_file, read_lm_head
from qat_lora.cache.format.records import optional_arrays
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.store import verify_cache
from qat_lora.cache.tools.audit import audit
from qat_lora.cache.tools.describe import describe, render
from qat_lora.cache.tools.transport import pack_cache, unpack_cache
from qat_lora.cli import main
from qat_lora.errors import CacheDamaged, CacheError
from qat_lora.models.load import load_model
from qat_lora.types import LMHead

VOCAB, WIDTH, SHA = 31, 6, "22" * 32


class Row:
    def __init__(self, number, length):
        rng = np.random.default_rng(number)
        self.input_ids = rng.integers(0, VOCAB, length).astype(np.int32)
        self.loss_mask = np.ones(length, np.uint8)
        self.doc_starts = rng.random(length) < 0.2
        self.cursor = number + 1


class Teacher:
    """A padded, biased, scaled and soft-capped head over random states."""

    vocab_size = VOCAB

    def __init__(self, dtype=torch.float32, scale=1.0):
        rng = np.random.default_rng(5)
        self.embed, weight = (torch.from_numpy(rng.normal(size=(VOCAB + 4, WIDTH))).float() for _ in range(2))
        self.embed = self.embed * scale
        self._lm_head = LMHead(weight.to(dtype), VOCAB, torch.linspace(-1, 1, VOCAB + 4).to(dtype), 0.5, 7.0)

    def lm_head(self):
        return self._lm_head

    def hidden(self, input_ids_BL, document_ids_BL):
        return self.embed[input_ids_BL.long()] + 0.25 * document_ids_BL[..., None]

    def logits(self, hidden_NH):
        return _logits(self._lm_head, hidden_NH.double()).float()


def _logits(head, hidden):
    weight, bias = (t[: head.vocab_size].double() for t in (head.weight_VH, head.bias_V))
    return head.softcap * torch.tanh(head.logit_scale * (hidden.double() @ weight.T + bias) / head.softcap)


def _build(out, fingerprint, teacher, top_k=0, rows=5, head=None, **changes):
    file = head or lm_head_file(teacher.lm_head())
    fp = fingerprint(
        vocab_size=VOCAB, top_k=top_k, length=9, optional_arrays=optional_arrays(0, 2, WIDTH, file.sha256), **changes
    )
    with CacheWriter(out, fp, 2, lm_head=file) as writer:
        done = writer.resume_state()
        source = (Row(i, 9) for i in range(done.cursor or 0, rows))
        build_kd_cache(teacher, source, writer, ForwardSettings(2), quiet=True)
    return fp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top_k", [0, 4])
def test_the_whole_distribution_comes_back(tmp_path, fingerprint, dtype, top_k):
    teacher = Teacher(dtype)
    _build(tmp_path / "c", fingerprint, teacher, top_k)
    verify_cache(tmp_path / "c")
    dataset = KDCacheDataset(tmp_path / "c")
    batch, head = dataset.rows(range(5)), dataset.teacher_lm_head()
    assert head.weight_VH.dtype == dtype and head.weight_VH.shape == (VOCAB, WIDTH)
    assert torch.equal(head.weight_VH, teacher.lm_head().weight_VH[:VOCAB])
    assert (head.logit_scale, head.softcap, head.vocab_size) == (0.5, 7.0, VOCAB)
    assert ("head_ids" in batch) == ("lse" in batch) == (top_k > 0)
    ids, documents = (torch.from_numpy(batch[name]) for name in ("input_ids", "document_ids"))
    truth = teacher.logits(teacher.hidden(ids, documents)[:, :-1])
    again = _logits(head, torch.from_numpy(batch["teacher_hidden"]))
    np.testing.assert_allclose(again, truth, atol=4e-3)
    report = audit(teacher, tmp_path / "c", SHA)
    line = next(line for line in report["others"] if line["encoding"] == "hidden")
    assert line["k"] == VOCAB and line["kl_stored"] < 1e-6 and report["same_hidden"] == 1
    assert [line["k"] for line in report["by_k"]] == ([4] if top_k else [])
    theirs = load_file(tmp_path / "c" / "teacher_head.safetensors")  # a standard tool reads it
    assert torch.equal(theirs["weight"], head.weight_VH) and torch.equal(theirs["bias"], head.bias_V)


def test_hidden_states_alone(tmp_path, fingerprint, capsys):
    _build(tmp_path / "c", fingerprint, Teacher())
    shown = describe(tmp_path / "c", decode=lambda ids: f"<{ids[0]}>")
    assert shown["tail_mass"] is None and "top_ids" not in shown["rows"][0]
    text = render(shown)
    assert "2 draws, its hidden state (6 wide)" in text and '"<' in text
    dataset = KDCacheDataset(tmp_path / "c", temperatures=(3.0,))  # nothing there depends on a temperature
    padding = dataset.rows([-1])
    assert not padding["teacher_hidden"].any() and not padding["target_mask"].any()
    with pytest.raises(CacheError, match="no head"):
        KDCacheDataset(tmp_path / "c", k=4)


def test_states_that_float16_cannot_hold(tmp_path, fingerprint):
    with pytest.raises(CacheError, match=r"hidden: .* row 0, position 0 .*65,504"):
        _build(tmp_path / "c", fingerprint, Teacher(scale=1e6))
    with pytest.raises(CacheError, match="of type torch.float64|of type float64"):
        lm_head_file(LMHead(torch.zeros(3, 2, dtype=torch.float64), 3))


def test_a_head_that_is_not_the_fingerprints(tmp_path, fingerprint):
    other = lm_head_file(Teacher(torch.float16).lm_head())
    fp = fingerprint(vocab_size=VOCAB, top_k=0, optional_arrays=optional_arrays(0, 0, WIDTH, "0" * 64))
    for head in (None, other):
        with pytest.raises(CacheError, match="output head"), CacheWriter(tmp_path / "c", fp, lm_head=head):
            pass
    assert sorted(os.listdir(tmp_path / "c")) == [".lock"]
    plain = fingerprint()
    with pytest.raises(CacheError, match="--hidden"):
        read_lm_head(tmp_path / "c", plain)


def test_every_damage_to_the_head_is_refused(tmp_path, fingerprint):
    fp = _build(tmp_path / "c", fingerprint, Teacher())
    file = tmp_path / "c" / "teacher_head.safetensors"
    good = file.read_bytes()
    for bit in range(0, 8 * len(good), 13):
        changed = bytearray(good)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with pytest.raises(CacheDamaged, match="teacher_head"):
            read_lm_head(tmp_path / "c", fp)
    cuts = [good[:n] for n in range(0, len(good), 41)] + [good + b"\0", good + good]
    for data in cuts:
        file.write_bytes(data)
        for opened in (KDCacheDataset, verify_cache):
            with pytest.raises(CacheDamaged, match="teacher_head"):
                opened(tmp_path / "c")
    file.unlink()
    for opened in (KDCacheDataset, verify_cache, lambda path: KDCacheDataset(path, verify=False)):
        with pytest.raises(CacheDamaged, match="teacher_head.*missing"):
            opened(tmp_path / "c")
    (tmp_path / "elsewhere").write_bytes(good)
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheDamaged, match="teacher_head"):
        KDCacheDataset(tmp_path / "c")
    file.unlink()
    file.write_bytes(good)
    assert verify_cache(tmp_path / "c").strangers == ()


def test_a_head_whose_hash_is_right_and_whose_header_is_not(tmp_path, fingerprint):
    """Made by somebody who seals what is wrong: every field of the header is compared, none trusted."""
    good = lm_head_file(Teacher().lm_head())
    header = bytes(good.parts[0])
    size = len(header) - 8
    bad_headers = [
        (10 << 30).to_bytes(8, "little") + header[8:],
        header.replace(b'"shape":[31,6]', b'"shape":[6,31]'),
        header.replace(b'"data_offsets":[0,744]', b'"data_offsets":[9,744]'),
        header.replace(b'"F32"', b'"F16"', 1),
        header.replace(b'"F32"', b'"I64"', 1),
        header.replace(b'"0.5"', b'"nan"'),
        header.replace(b"logit_scale", b"logit_other"),
        header[:8] + b"[" * size,
        header[:8] + b"1" + b" " * (size - 1),
    ]
    for number, bad in enumerate([header, *bad_headers]):
        assert number == 0 or bad != header
        parts = (bad, *good.parts[1:])
        forged = good._replace(sha256=hashlib.sha256(b"".join(map(bytes, parts))).hexdigest(), parts=parts)
        folder = tmp_path / str(number)
        fp = _build(folder, fingerprint, Teacher(), head=forged)
        if number == 0:  # positive control: the same way, nothing wrong
            read_lm_head(folder, fp)
        else:
            with pytest.raises(CacheDamaged, match="teacher_head"):
                read_lm_head(folder, fp)


KILLED = """
from test_cache_lm_head import Teacher, _build
from conftest import _fingerprint
_build({out!r}, _fingerprint, Teacher())
"""


@pytest.mark.parametrize("step", ["written", "linked"])
def test_kills_while_the_head_is_written(tmp_path, fingerprint, step):
    _build(tmp_path / "whole", fingerprint, Teacher())
    code = KILLED.format(out=str(tmp_path / "c"))
    environment = os.environ | {"QAT_LORA_FAILPOINT": f"head-{step}", "PYTHONPATH": str(Path(__file__).parent)}
    died = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=100)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()[-500:]
    _build(tmp_path / "c", fingerprint, Teacher())
    files = {name: (tmp_path / "whole" / name).read_bytes() for name in os.listdir(tmp_path / "whole")}
    assert {name: (tmp_path / "c" / name).read_bytes() for name in os.listdir(tmp_path / "c")}.keys() == files.keys()
    for name, data in files.items():
        assert name == ".lock" or (tmp_path / "c" / name).read_bytes() == data, name


def test_the_command_with_everything(tiny, tmp_path, capfd):
    build = ["cache", "build", "--teacher", str(tiny.teacher), "--dataset", str(tiny.text), "--length", "32", "--quiet"]
    build += ["--device", "cpu", "--num-rows", "5"]
    many = ["--top-k", "8", "--value-dtype", "uint8", "--tail-draws", "3", "--draws", "4", "--hidden"]
    main([*build, *many, "--dry-run", "--json", "--out", str(tmp_path / "c")])
    forecast = json.loads(capfd.readouterr().out)
    main([*build, *many, "--out", str(tmp_path / "c")])
    size = sum(file.stat().st_size for file in (tmp_path / "c").glob("*.safetensors"))
    assert forecast["bytes"] == size
    main(["cache", "verify", str(tmp_path / "c"), "--quiet"])
    teacher = load_model(str(tiny.teacher))
    dataset = KDCacheDataset(tmp_path / "c")
    batch = dataset.rows(range(5))
    assert [batch[name].shape[2] for name in ("head_ids", "tail_draw_ids", "draw_ids")] == [8, 3, 4]
    assert batch["teacher_hidden"].shape == (5, 31, teacher.config.hidden_size)
    assert torch.equal(dataset.teacher_lm_head().weight_VH, teacher.lm_head().weight_VH[: teacher.vocab_size])
    capfd.readouterr()
    main(["cache", "audit", str(tmp_path / "c"), "--teacher", str(tiny.teacher), "--device", "cpu", "--json"])
    report = json.loads(capfd.readouterr().out)
    assert report["same_hidden"] == report["same_ids"] == 1 and report["by_k"][-1]["encoding"] == "uint8"
    main([*build, "--top-k", "0", "--hidden", "--out", str(tmp_path / "h")])
    assert set(KDCacheDataset(tmp_path / "h").rows([0])) == {
        "input_ids",
        "document_ids",
        "target_mask",
        "teacher_hidden",
    }
    for wrong, words in (
        (["--top-k", "0"], "top_k"),
        (["--top-k", "0", "--hidden", "--tail-draws", "2"], "tail_draws"),
    ):
        with pytest.raises(SystemExit) as left:
            main([*build, *wrong, "--out", str(tmp_path / "x")])
        assert left.value.code == 2 and words in capfd.readouterr().err
    assert not (tmp_path / "x").exists()


def test_two_builders_share_one_head(tmp_path, fingerprint):
    teacher = Teacher()
    file = lm_head_file(teacher.lm_head())
    fp = fingerprint(vocab_size=VOCAB, top_k=0, length=9, optional_arrays=optional_arrays(0, 0, WIDTH, file.sha256))
    for builder in (1, 0):
        with CacheWriter(tmp_path / "c", fp, 2, partition=Partition(builder, 2), lm_head=file) as writer:
            build_kd_cache(teacher, [Row(i, 9) for i in range(builder, 5, 2)], writer, ForwardSettings(2), quiet=True)
    assert verify_cache(tmp_path / "c").rows == 5
    assert torch.equal(KDCacheDataset(tmp_path / "c").teacher_lm_head().bias_V, teacher.lm_head().bias_V[:VOCAB])


def test_behind_a_url(tmp_path, fingerprint):
    pytest.importorskip("fsspec")
    url, packed = f"memory://{tmp_path.name}/c", tmp_path / "p.tar.zst"
    _build(url, fingerprint, Teacher(), top_k=4)
    _build(tmp_path / "c", fingerprint, Teacher(), top_k=4)
    assert verify_cache(url).strangers == verify_cache(tmp_path / "c").strangers == ()
    assert torch.equal(
        KDCacheDataset(url).teacher_lm_head().weight_VH, KDCacheDataset(tmp_path / "c").teacher_lm_head().weight_VH
    )
    pytest.importorskip("zstandard")
    pack_cache(url, packed)
    unpack_cache(packed, tmp_path / "d")
    for file in (tmp_path / "c").glob("*.*"):
        assert file.name == ".lock" or (tmp_path / "d" / file.name).read_bytes() == file.read_bytes(), file.name

"""A teacher whose output head has more padding rows than the student's: cut when the cache is built."""

import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import processors
from toy_pipeline import cache_options, call, quantize_options, recover_options

from qat_lora.cache.build.builder import run_batch
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.store import read_manifest
from qat_lora.commands import cache
from qat_lora.errors import CacheError, ConfigError, OutputExistsError, OvertakenError
from qat_lora.losses.objective import ObjectiveConfig
from qat_lora.models.load import load_model, load_tokenizer


@pytest.fixture(scope="module")
def padded(tiny, tmp_path_factory):
    """The tiny teacher with eight rows more, whose logits are far from negligible."""
    folder = tmp_path_factory.mktemp("padded") / "teacher"
    shutil.copytree(tiny.teacher, folder)
    model = load_model(str(folder), dtype="float32").module
    model.resize_token_embeddings(328, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[320:] = model.get_output_embeddings().weight[:8] * 2
    model.save_pretrained(folder)
    return folder


def test_a_cut_vocabulary_is_that_of_a_teacher_without_the_padding(tiny, padded, tmp_path):
    settings = dict(top_k=8, num_rows=8, eval_rows=0, hidden=True)
    caches = {
        "plain": call("build_cache", cache_options(tiny, tmp_path / "plain", **settings)),
        "cut": call(
            "build_cache", cache_options(tiny, tmp_path / "cut", teacher=str(padded), vocab_size=320, **settings)
        ),
        "whole": call("build_cache", cache_options(tiny, tmp_path / "whole", teacher=str(padded), **settings)),
    }
    rows = {name: KDCacheDataset(cache).rows(range(8)) for name, cache in caches.items()}
    for name, values in rows["plain"].items():
        torch.testing.assert_close(torch.tensor(rows["cut"][name]), torch.tensor(values), rtol=1e-4, atol=1e-3)
    assert abs(rows["whole"]["lse"] - rows["plain"]["lse"]).max() > 0.01  # positive control: the padding had mass
    head = KDCacheDataset(caches["cut"]).teacher_lm_head()
    assert head.vocab_size == len(head.weight_VH) == 320
    student = call("quantize", quantize_options(tiny, tmp_path / "student"))
    for estimator in ("ghost", "full"):
        objective = ObjectiveConfig(estimator=estimator)
        call("recover", recover_options(student, caches["cut"], tmp_path / estimator, objective=objective))
    with pytest.raises(CacheError, match="has 320 entries.*speaks of 328.*--vocab-size 320"):
        call("recover", recover_options(student, caches["whole"], tmp_path / "refused"))


@pytest.mark.parametrize("rows", [100, 329])
def test_rows_that_the_tokenizer_needs_or_the_head_lacks_are_refused(tiny, padded, tmp_path, rows):
    with pytest.raises(ConfigError, match=rf"vocab_size: {rows} is not allowed; .* take 320, .* has 328 rows"):
        call("build_cache", cache_options(tiny, tmp_path / "cache", teacher=str(padded), vocab_size=rows))
    assert not (tmp_path / "cache").exists()


def test_overtaken_it_does_not_overwrite_again(tiny, tmp_path, monkeypatch):
    """What is there when it goes on is of this build, its own and the other start's."""
    real, rows = cache.build_kd_cache, []

    def build(teacher, packed, writer, settings, **how):
        rows.append(writer.resume_state().rows)
        if len(rows) > 1:
            return real(teacher, packed, writer, settings, **how)
        arrays = run_batch(teacher, [next(packed)], writer.fingerprint, settings._replace(batch_rows=1))
        writer.append(arrays, [None])
        raise OvertakenError("another start was faster")

    monkeypatch.setattr(cache, "build_kd_cache", build)
    options = cache_options(tiny, tmp_path / "c", num_rows=4, eval_rows=0, shard_rows=1)
    call("build_cache", replace(options, run=replace(options.run, overwrite=True)))
    assert rows == [0, 1] and len(KDCacheDataset(tmp_path / "c")) == 4


def test_draws_from_the_tail_are_kept_unless_they_are_declined(tiny, tmp_path):
    for given, kept in ((None, ("tail_draws:8", "tail_entropy:1")), (3, ("tail_draws:3", "tail_entropy:1")), (0, ())):
        options = cache_options(tiny, tmp_path / str(given), num_rows=4, eval_rows=0, tail_draws=given)
        assert read_manifest(str(call("build_cache", options))).fingerprint.optional_arrays == kept


def test_a_build_of_a_version_without_the_tails_entropy_goes_on_without(tiny, tmp_path, monkeypatch):
    options = cache_options(tiny, tmp_path / "cache", num_rows=4, eval_rows=0, tail_draws=2)
    make = cache.optional_arrays
    monkeypatch.setattr(cache, "optional_arrays", lambda *arrays: make(*arrays[:6]))
    call("build_cache", options)
    before = {file.name: file.read_bytes() for file in (tmp_path / "cache").iterdir()}
    monkeypatch.undo()
    call("build_cache", options)  # complete already
    assert {file.name: file.read_bytes() for file in (tmp_path / "cache").iterdir()} == before
    assert read_manifest(str(tmp_path / "cache")).fingerprint.optional_arrays == ("tail_draws:2",)


def test_every_row_begins_with_the_token_that_the_tokenizer_adds(tiny, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(tiny.teacher, teacher)
    tokenizer = load_tokenizer(teacher)
    end = tokenizer.eos_token
    adding = processors.TemplateProcessing(single=f"{end} $A", special_tokens=[(end, 0)])
    tokenizer.backend_tokenizer.post_processor = adding
    tokenizer.save_pretrained(teacher)
    starts = {}
    for name, folder in (("plain", tiny.teacher), ("adding", teacher)):
        cache = call("build_cache", cache_options(tiny, tmp_path / name, teacher=str(folder), num_rows=12))
        dataset = KDCacheDataset(cache)
        rows = dataset.rows(range(len(dataset)))
        starts[name] = rows["input_ids"][:, 0] == 0
        begun = "0" if name == "adding" else "nothing"
        assert dataset.manifest.fingerprint.packing == (
            f"rows and texts begin with {begun}, texts end with 0; attention and positions restart at each"
        )
    assert starts["adding"].all() and not starts["plain"].any()
    assert np.array_equal(rows["target_mask"][:, 0], rows["input_ids"][:, 1] > 0)  # what follows it counts


def test_a_cache_of_another_packing_is_not_gone_on_with_but_serves(tiny, tmp_path, monkeypatch):
    options = cache_options(tiny, tmp_path / "cache", num_rows=8)
    with monkeypatch.context() as before:
        old = "documents with bos and eos; attention and positions restart at each"
        before.setattr("qat_lora.commands.cache.describe_packing", lambda tokenizer: old)
        cache = call("build_cache", options)
    held = {file.name: file.read_bytes() for file in cache.iterdir()}
    for name in (None, "manifest.json"):  # finished, and then as if it were not
        if name:
            (cache / name).unlink()
            del held[name]
        with pytest.raises(OutputExistsError, match="holds another cache: packing is 'documents with bos and eos"):
            call("build_cache", options)
        assert {file.name: file.read_bytes() for file in cache.iterdir()} == held
        if not name:
            student = call("quantize", quantize_options(tiny, tmp_path / "student"))
            call("recover", recover_options(student, cache, tmp_path / "run"))


@pytest.mark.slow
def test_a_cache_of_one_document_of_200_mb_takes_no_more_memory_than_another(tiny, tmp_path):
    """In a process of its own, everything imported; the tokens are those of the toy's own words."""
    line = (tiny.text / "000.txt").read_text()
    with (tmp_path / "large.txt").open("w") as file:
        for _ in range(200):
            file.write(line * (1_000_000 // len(line)))
    words = [
        "cache",
        "build",
        "--teacher",
        str(tiny.teacher),
        "--dataset",
        str(tmp_path / "large.txt"),
        "--length",
        "64",
    ]
    words += ["--top-k", "16", "--num-rows", "64", "--device", "cpu", "--quiet", "--out", str(tmp_path / "cache")]
    program = (
        "import sys, torch; from qat_lora.cli import main; main(sys.argv[1:]); "
        "from qat_lora.runtime.host.machine import peak_memory_bytes; "
        "print(peak_memory_bytes(torch.device('cpu')) // 2**20)"
    )
    ran = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert int(ran.stdout.splitlines()[-1]) < 1200  # MiB

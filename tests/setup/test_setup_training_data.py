"""`recover` from a text alone and from mixtures: what counts, what is measured, what is refused."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from toy_pipeline import cache_options, call, part, quantize_options, recover_options

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.location import LocalFolder
from qat_lora.cache.storage.store import verify_cache
from qat_lora.data.sources import TextConfig
from qat_lora.errors import ConfigError, InterruptedRunError, OutputExistsError, TextError
from qat_lora.layers.lora import LoraConfig
from qat_lora.losses.objective import ObjectiveConfig, objective_loss
from qat_lora.models.load import load_model
from qat_lora.options import RecoverOptions
from qat_lora.setup.training import cache_training_data, text_training_data
from qat_lora.train.loop import LoopConfig
from qat_lora.train.metrics import read_metrics
from qat_lora.train.optim import OptimConfig

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def chats(tiny, tmp_path_factory):
    """The tiny teacher with a chat template, and a file of chats whose questions cannot be learned from."""
    root = tmp_path_factory.mktemp("chats")
    folder = root / "teacher"
    folder.mkdir()
    for file in tiny.teacher.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    rows = [
        {"messages": [{"role": "user", "content": f"row {i}"}, {"role": "assistant", "content": "the scale of a row"}]}
        for i in range(40)
    ]
    (root / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, root / "chats.jsonl"


def text_options(model, data, out, learn, **changed):
    options = RecoverOptions(
        model=str(model),
        learn=learn,
        text=TextConfig(dataset=str(data)),
        length=32,
        eval_rows=6,
        lora=LoraConfig(recovery_r=2),
        train=OptimConfig(lr=5e-3, warmup_steps=1),
        loop=LoopConfig(batch_size=8, max_steps=8, log_steps=4, eval_steps=4),
        run=part(out),
    )
    return replace(options, **changed)


def evaluations(run):
    return [line["nll"] for line in read_metrics(run / "evaluations.jsonl")]


def test_a_text_alone_teaches_its_next_tokens(tiny, tmp_path):
    run = call("recover", text_options(tiny.teacher, tiny.text, tmp_path / "run", "ce"))
    values = evaluations(run)
    assert values[-1] < values[0] <= math.log(320) * 1.2
    result = json.loads((run / "result.json").read_text())
    assert result["best_nll"] == min(values) and "best_kl_bound" not in result and "best_kl" not in result
    names = set(read_metrics(run / "metrics.jsonl")[0])
    assert {"loss", "loss_ce"} <= names and "loss_kd" not in names
    assert (run / "curve.png").exists() and (run / "best" / "adapter_model.safetensors").exists()


def test_the_first_loss_is_the_cross_entropy_of_transformers(tiny, tmp_path):
    """One document, all of it in one row, so that its own loss is comparable."""
    (tmp_path / "one.txt").write_text("the model of a layer and the loss of a token to the scale")
    options = text_options(tiny.teacher, tmp_path / "one.txt", tmp_path / "run", "ce", eval_rows=0)
    model = load_model(str(tiny.teacher))
    batch = text_training_data(options, model).rows.rows([0])
    count = int(batch["target_mask"].sum())
    ids = torch.from_numpy(batch["input_ids"]).long()[:, : count + 1]
    wanted = float(model.module(input_ids=ids, labels=ids).loss)
    run = call("recover", replace(options, start="zero", loop=LoopConfig(batch_size=1, max_steps=1)))
    first = read_metrics(run / "metrics.jsonl")[0]
    assert first["tokens"] == count and first["loss"] == pytest.approx(wanted, rel=1e-5)


def test_fine_tuning_counts_answers_only(chats, tmp_path):
    folder, data = chats
    model = load_model(str(folder))
    counted = {}
    for learn in ("ce", "sft"):
        rows = text_training_data(text_options(folder, data, tmp_path, learn, eval_rows=2), model).rows
        counted[learn] = int(rows.rows(range(len(rows)))["target_mask"].sum())
    assert 0 < counted["sft"] < 0.7 * counted["ce"]
    run = call("recover", text_options(folder, data, tmp_path / "run", "sft"))
    values = evaluations(run)
    assert values[-1] < values[0]


def test_plain_text_is_refused_for_fine_tuning_before_anything_is_written(tiny, tmp_path):
    with pytest.raises(TextError, match="sft learns from chats"):
        call("recover", text_options(tiny.teacher, tiny.text, tmp_path / "run", "sft"))
    assert not (tmp_path / "run").exists()


def test_another_text_or_objective_is_another_run(chats, tmp_path, monkeypatch):
    folder, data = chats
    out = tmp_path / "run"
    call("recover", text_options(folder, data, out, "sft"))
    with monkeypatch.context() as other:
        other.setattr("qat_lora.setup.training.describe_packing", lambda tokenizer: "documents with bos and eos")
        with pytest.raises(OutputExistsError, match="packing was"):
            call("recover", text_options(folder, data, out, "sft"))
    for field, changed in (("learn", {"learn": "ce"}), ("length", {"length": 16}), ("eval_rows", {"eval_rows": 2})):
        with pytest.raises(OutputExistsError, match=f"{field} was"):
            call("recover", replace(text_options(folder, data, out, "sft"), **changed))
    with data.open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "x"}]}\n')
    with pytest.raises(OutputExistsError, match="text was"):
        call("recover", text_options(folder, data, out, "sft"))


def test_a_cache_with_its_text_is_a_mixture(tiny, tmp_path):
    cache = call("build_cache", cache_options(tiny, tmp_path / "cache"))
    student = call("quantize", quantize_options(tiny, tmp_path / "student"))
    options = recover_options(student, cache, tmp_path / "run", learn="kd+ce")
    assert cache_training_data(options).objective.weights_at(0.0) == {"kd": 1.0, "ce": 1.0}
    weighted = replace(options, objective=ObjectiveConfig(kd_weight=0.7, ce_weight=0.3))
    assert cache_training_data(weighted).objective.weights_at(0.0) == {"kd": 0.7, "ce": 0.3}
    run = call("recover", weighted)
    line = read_metrics(run / "metrics.jsonl")[0]
    assert line["loss"] == pytest.approx(0.7 * line["loss_kd"] + 0.3 * line["loss_ce"], rel=1e-5)


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ("kd_cache_dir: missing", {"model": "m"}),
        ("dataset: missing", {"model": "m", "learn": "ce"}),
        ("kd_cache_dir: nothing reads it with --objective sft", {"learn": "sft", "kd_cache_dir": "c"}),
        ("dataset: nothing reads it with --objective kd", {"learn": "kd", "kd_cache_dir": "c"}),
    ],
)
def test_what_an_objective_needs_and_what_it_does_not_read(message, settings):
    text = TextConfig(dataset="t") if "nothing" in message else TextConfig()
    with pytest.raises(ConfigError, match=f"^{message}"):
        RecoverOptions(**{"model": "m", "text": text, **settings})


@pytest.mark.parametrize("setting", ["autocast", "train_norms"])
def test_what_needs_float32_weights_is_refused_with_bfloat16(setting):
    loop = LoopConfig(autocast=setting == "autocast")
    run = part("x", dtype="bfloat16")
    with pytest.raises(ConfigError, match=f"^{setting}: needs float32 weights"):
        RecoverOptions(model="m", kd_cache_dir="c", loop=loop, train_norms=setting == "train_norms", run=run)


def test_trained_norms_come_with_their_base_and_autocast_keeps_weights_float32(tiny, tmp_path):
    cache = call("build_cache", cache_options(tiny, tmp_path / "cache"))
    student = call("quantize", quantize_options(tiny, tmp_path / "student"))
    loop = LoopConfig(batch_size=16, max_steps=6, eval_steps=3, autocast=True)
    optim = OptimConfig(lr=2e-3, norm_lr=1e-2, warmup_steps=1)
    options = recover_options(student, cache, tmp_path / "run", loop=loop, train=optim, train_norms=True)
    run = call("recover", options)
    kl = [line["kl_bound"] for line in read_metrics(run / "evaluations.jsonl")]
    assert kl[-1] < kl[0]
    before, after = (load_model(str(folder)).norms() for folder in (student, run / "last" / "base"))
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved and before.keys() == after.keys() and all(p.dtype == torch.float32 for p in after.values())
    exact = call("recover", replace(options, loop=replace(loop, autocast=False), run=part(tmp_path / "exact")))
    other = [line["kl_bound"] for line in read_metrics(exact / "evaluations.jsonl")]
    assert other == pytest.approx(kl, rel=0.05) and other != kl


def test_two_trainers_on_one_folder(tiny, tmp_path):
    """The second is refused while the first trains; after a stop the folder is free again."""
    import os
    import signal

    from qat_lora.train import loop as loop_module

    options = text_options(tiny.teacher, tiny.text, tmp_path / "run", "ce")
    real, refusals = loop_module.step.micro_batch, []

    def intruded(*args):
        if not refusals:
            with pytest.raises(OutputExistsError, match="another process is working there") as caught:
                call("recover", options)
            refusals.append(caught.value)
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_module.step, "micro_batch", intruded)
        with pytest.raises(InterruptedRunError):
            call("recover", options)
    assert len(refusals) == 1
    assert json.loads((call("recover", options) / "result.json").read_text())["resumed_from"] == 1


def test_documents_weigh_in_the_loss_what_a_field_says(tiny, tmp_path):
    texts = [file.read_text(encoding="utf-8") for file in sorted(tiny.text.iterdir())]
    lines = [line for line in "\n".join(texts).splitlines() if len(line) > 40][:160]
    rows = [{"text": line, "w": (0.0, 0.5, 3.0)[i % 3]} for i, line in enumerate(lines)]
    data = tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    text = TextConfig(dataset=str(data), weight_field="w")
    whole = call("build_cache", cache_options(tiny, tmp_path / "whole", text=text, num_rows=24, shard_rows=8))
    held = KDCacheDataset(whole).rows(range(24))
    assert {*np.unique(held["weights"])} == {0.0, 0.5, 3.0}
    same = call("build_cache", cache_options(tiny, tmp_path / "same", num_rows=24, text=TextConfig(dataset=str(data))))
    plain = KDCacheDataset(same).rows(range(24))
    assert "weights" not in plain and np.array_equal(plain["input_ids"], held["input_ids"])

    # killed between two shards, it goes on to the same bytes
    put, puts = LocalFolder.write_new, []

    def killed(self, name, *arguments, **more):
        puts.append(name)
        if len(puts) == 6:
            raise RuntimeError("killed")
        return put(self, name, *arguments, **more)

    again = cache_options(tiny, tmp_path / "again", text=text, num_rows=24, shard_rows=8)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(LocalFolder, "write_new", killed)
        call("build_cache", again)
    call("build_cache", again)
    for file in sorted(whole.iterdir()):
        assert file.name == ".lock" or file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name
    assert verify_cache(whole)

    # the loss is the mean over tokens by weight, for a teacher's rows and for a text's own
    model = load_model(str(tiny.teacher))
    log_p = float64_log_probs(model, held)
    batch = {name: torch.from_numpy(array) for name, array in held.items()}
    labels, weights = held["input_ids"][:, 1:], held["weights"] * held["target_mask"]
    with torch.no_grad():
        hidden = model.hidden(batch["input_ids"], batch["document_ids"])
        result = objective_loss(hidden, model.lm_head(), batch, ObjectiveConfig(kd_weight=0.0, ce_weight=1.0))
    expected = -(weights * np.take_along_axis(log_p, labels[..., None].astype(int), -1)[..., 0]).sum() / weights.sum()
    assert float(result.loss_sum / result.token_count) == pytest.approx(expected, rel=1e-4)
    options = text_options(tiny.teacher, data, tmp_path / "none", "ce")
    read = text_training_data(replace(options, text=text, eval_rows=0), model).rows
    assert {*np.unique(read.rows(range(len(read)))["weights"])} == {0.0, 0.5, 1.0, 3.0}  # 1: padding


def float64_log_probs(model, rows):
    """Return log p [B, P, V] of every position, from the model's logits in float64."""
    with torch.no_grad():
        hidden = model.hidden(*(torch.from_numpy(rows[name]) for name in ("input_ids", "document_ids")))
        logits = model.logits(hidden[:, :-1].flatten(0, 1)).double().numpy()
    logits = logits.reshape(*rows["target_mask"].shape, -1)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)

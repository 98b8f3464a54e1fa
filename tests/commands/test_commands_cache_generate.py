"""`cache generate`: texts by seed, the same after a kill, none of an evaluation text, and a cache of them."""

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from toy_pipeline import cache_options, call, part

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.tools.overlap import overlap
from qat_lora.commands import cache_generate
from qat_lora.commands.cache_generate import decode
from qat_lora.data.packing import make_encoder, pack_rows
from qat_lora.data.sources import Document, TextConfig, open_documents
from qat_lora.errors import ConfigError, TextError
from qat_lora.generate.sample import stream_ids
from qat_lora.models.load import load_model, load_tokenizer, make_tokenizer
from qat_lora.options import CacheGenerateOptions, WriteConfig
from qat_lora.runtime.launch.select import select_runtime

PROMPTS = ("the model of", "a token", "loss and the scale of a code row in the cache", "weight")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if tools %}[{{ tools[0].name }}]{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %}think{% endif %}{% endif %}"
)


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in PROMPTS))
    return file


def options(tiny, out, prompts=None, seed=0, length=64, **write):
    whole = cache_options(tiny, out)
    return CacheGenerateOptions(
        teacher=whole.teacher,
        text=TextConfig(dataset=str(prompts) if prompts else None),
        length=length,
        top_k=16,
        tail_draws=0,
        write=WriteConfig(**{"texts": 10, "max_new_tokens": 24, "write_batch_size": 4, **write}),
        run=part(out, seed=seed),
    )


def lines(out):
    files = sorted(out.with_name(f"{out.name}_texts").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def content(root):
    return {
        file.relative_to(root).as_posix(): file.read_bytes()
        for file in sorted(root.rglob("*"))
        if file.is_file() and file.suffix in (".jsonl", ".json", ".safetensors") and "qat_lora" not in file.name
    }


def test_texts_of_several_prompts_are_those_of_each_alone(tiny):
    model, tokenizer, runtime = load_model(str(tiny.teacher)), load_tokenizer(tiny.teacher), select_runtime("cpu")
    ids = [[0, *tokenizer(prompt)["input_ids"]] for prompt in PROMPTS]
    alone = [list(stream_ids(model, prompt, 12, device=runtime.device)) for prompt in ids]
    end = alone[1][5]
    wanted = [row[: row.index(end) + 1] if end in row else row for row in alone]
    assert decode(model, ids, torch.zeros(4, 12), 0.0, {end}, runtime) == wanted


def test_draws_follow_the_distribution(tiny):
    model, runtime = load_model(str(tiny.teacher)), select_runtime("cpu")
    uniforms = (torch.arange(2000) + 0.5)[:, None] / 2000
    found = decode(model, [[5, 6]] * 2000, uniforms, 0.7, {-1}, runtime)
    counts = np.bincount([row[0] for row in found], minlength=model.vocab_size) / 2000
    with torch.no_grad():
        hidden = model.hidden(torch.tensor([[5, 6]]), torch.zeros(1, 2, dtype=torch.int64))
        wanted = torch.softmax(model.logits(hidden[:, -1])[0] / 0.7, -1)
    assert np.abs(counts - wanted.numpy()).max() < 2 / 2000


def test_by_seed_and_the_same_after_a_kill(tiny, prompts, tmp_path, monkeypatch):
    def run(name, **how):
        (tmp_path / name).mkdir()
        call("generate_cache", options(tiny, tmp_path / name / "cache", prompts, **how))
        return content(tmp_path / name)

    whole = run("whole")
    assert run("again") == whole
    assert run("other", seed=1).keys() == whole.keys() and lines(tmp_path / "other/cache") != lines(
        tmp_path / "whole/cache"
    )
    for killed, name in enumerate(("write_text", "write_text", "build_cache")):
        seen, real = [], getattr(cache_generate, name)

        def die(*given, seen=seen, real=real, killed=killed):
            if len(seen) == killed or real.__name__ == "build_cache":
                raise KeyboardInterrupt
            seen.append(given)
            return real(*given)

        monkeypatch.setattr(cache_generate, name, die)
        (tmp_path / f"killed-{killed}").mkdir()
        given = options(tiny, tmp_path / f"killed-{killed}" / "cache", prompts)
        with pytest.raises(KeyboardInterrupt):
            call("generate_cache", given)
        monkeypatch.setattr(cache_generate, name, real)
        call("generate_cache", given)
        assert content(tmp_path / f"killed-{killed}") == whole


def test_one_source_of_draws_would_not_go_on(tiny, prompts, tmp_path, monkeypatch):
    """The naive way: draws of the whole run from one generator, which a killed run begins again."""
    real, write = torch.rand, cache_generate.write_text
    found = []
    for name, files in (("whole", 9), ("killed", 1)):
        (tmp_path / name).mkdir()
        for allowed in (files, 9):
            one, seen = torch.Generator().manual_seed(0), []

            def few(*given, seen=seen, allowed=allowed):
                if len(seen) == allowed:
                    raise KeyboardInterrupt
                seen.append(write(*given))

            monkeypatch.setattr(torch, "rand", lambda *size, generator, one=one: real(*size, generator=one))
            monkeypatch.setattr(cache_generate, "write_text", few)
            with contextlib.suppress(KeyboardInterrupt):
                call("generate_cache", options(tiny, tmp_path / name / "cache", prompts))
        found.append(lines(tmp_path / name / "cache"))
    assert len(found[0]) == len(found[1]) == 10 and found[0] != found[1]


def test_no_run_of_tokens_is_shared_with_evaluation_text(tiny, tmp_path):
    shared = "cache loss a row token head of scale and tail in quant layer to code weight model the loss"
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "evaluation.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a model", shared, "the head")))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in (f"in the code {shared}", "short")))
    encode = make_encoder(load_tokenizer(tiny.teacher))
    rows = list(pack_rows(open_documents(TextConfig(dataset=str(file))), encode, 64))
    call("generate_cache", options(tiny, tmp_path / "all", prompts, length=96, texts=12))
    sha, every = KDCacheDataset(str(tmp_path / "all")).fingerprint.tokenizer_sha256, lines(tmp_path / "all")
    assert overlap(str(tmp_path / "all"), {"e": rows}, sha)["seen"] > 0  # without the filter
    call("generate_cache", options(tiny, tmp_path / "some", prompts, length=96, texts=12, not_in=(str(file),)))
    left = [line.get("left_out") == "in evaluation text" for line in lines(tmp_path / "some")]
    assert left == [shared in line["text"] for line in every] and sum(left) == 4
    assert overlap(str(tmp_path / "some"), {"e": rows}, sha)["seen"] == 0


def test_rows_hold_whole_texts_and_count_answers_alone(tiny, prompts, tmp_path):
    out = tmp_path / "cache"
    call("generate_cache", options(tiny, out, prompts))
    written, dataset = [line for line in lines(out) if line["text"]], KDCacheDataset(str(out))
    found = []
    for i in range(len(dataset)):
        row = dataset[i]
        for document in range(row["document_ids"].max() + 1):
            at = row["document_ids"] == document
            counted = np.concatenate([[False], row["target_mask"]])[at]
            if counted.any():
                found.append((row["input_ids"][at].tolist(), counted.tolist()))
    wanted = [
        (line["token_ids"], [i >= line["prompt_tokens"] for i in range(len(line["token_ids"]))]) for line in written
    ]
    assert found == wanted and len(dataset) < len(found)


def test_filters(tiny, tmp_path):
    call("generate_cache", options(tiny, tmp_path / "all", texts=30))
    every, end = lines(tmp_path / "all"), load_tokenizer(tiny.teacher).eos_token_id
    lengths = sorted(len(line["token_ids"]) - line["prompt_tokens"] for line in every)
    fewest = lengths[len(lengths) // 2]
    call("generate_cache", options(tiny, tmp_path / "some", texts=30, min_new_tokens=fewest, max_repetition=1.01))
    for line, before in zip(lines(tmp_path / "some"), every, strict=True):
        short = len(before["token_ids"]) - before["prompt_tokens"] < fewest
        assert short == (line.get("left_out") == "short")
        assert line.get("left_out") or line == before
    with pytest.raises(TextError, match="is empty: 3 documents, all blank"):
        call("generate_cache", options(tiny, tmp_path / "none", texts=3, only_ended=True, max_new_tokens=1))
    assert all(end not in line["token_ids"][1:-1] for line in every)


def test_chats_by_the_template(tiny, tmp_path):
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    for file in tiny.teacher.iterdir():
        (teacher / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tools.json").write_text('[{"name": "a model"}]')
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": "loss"}]}) + "\n"
    )
    given = replace(options(tiny, tmp_path / "c", tmp_path / "chats.jsonl", texts=None), teacher=str(teacher))
    with pytest.raises(TextError, match="no chat template"):
        call("generate_cache", given)
    (teacher / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for name, write in (("thinking", {"thinking": "on"}), ("tools", {"tools": str(tmp_path / "tools.json")})):
        with pytest.raises(ConfigError, match=f"{name}: the writer's chat template does not know it"):
            call("generate_cache", replace(given, write=replace(given.write, **write)))
    (teacher / "chat_template.jinja").write_text(TEMPLATE)
    write = replace(given.write, thinking="on", tools=str(tmp_path / "tools.json"))
    call("generate_cache", replace(given, write=write))
    (line,) = lines(tmp_path / "c")
    assert line["text"].startswith("<user>the\n[a model]<assistant>think") and line["prompt_tokens"] > 5
    assert "loss" not in line["text"][: len("<user>the\n[a model]<assistant>think")]


def test_what_does_not_go_is_refused(tiny, tmp_path, prompts):
    given = options(tiny, tmp_path / "c", prompts)
    for changed, words in (
        ({"dry_run": True}, "dry_run, builder"),
        ({"teacher": None}, "writer: missing"),
        ({"text": TextConfig(), "write": WriteConfig()}, "texts: missing"),
        ({"length": 24}, "max_new_tokens: give fewer than --length 24"),
    ):
        with pytest.raises(ConfigError, match=words):
            replace(given, **changed)
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"text": " ".join(PROMPTS)}) + "\n")
    with pytest.raises(TextError, match="no prompt has 1 tokens or fewer"):
        call("generate_cache", replace(given, length=25, text=TextConfig(dataset=str(long))))


def test_ids_of_another_tokenizer_are_refused(tiny, tmp_path):
    make_tokenizer(["other words than those, which merge in other ways"], 300, tmp_path)
    tokenizer = load_tokenizer(tiny.teacher)
    ids = tokenizer("the model of the layer")["input_ids"]
    document = Document("the model of the layer", None, "row 1", (ids, 1))
    ((found, mask),) = make_encoder(tokenizer)(document)
    assert (list(found), list(mask)) == (ids, [0] + [1] * (len(ids) - 1))
    with pytest.raises(TextError, match="row 1: its token ids are another tokenizer's"):
        make_encoder(load_tokenizer(tmp_path))(document)

"""Streaming, chat templates, several prompts, and the terminal chat, against one-shot generation."""

import io
from dataclasses import replace

import pytest
import torch
from toy_pipeline import part

from qat_lora.commands.generate import NO_TEMPLATE, chat, generate
from qat_lora.errors import ConfigError, TextError
from qat_lora.generate.sample import chat_prompt, plain_prompt, stream_ids, stream_text, until_end
from qat_lora.models import kv_cache as decoding
from qat_lora.models.copies import copy_tokenizer
from qat_lora.models.load import load_model, load_tokenizer
from qat_lora.options import ChatOptions, GenerateOptions
from qat_lora.runtime.launch.select import select_runtime

CPU = torch.device("cpu")
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "plain"
    model = load_model(str(tiny.teacher))
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(6 if "embed" in name else 8)
    model.module.save_pretrained(folder)
    copy_tokenizer(tiny.teacher, folder)
    return folder


@pytest.fixture(scope="module")
def talker(plain, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "talker"
    load_model(str(plain)).module.save_pretrained(folder)
    copy_tokenizer(plain, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def run(function, options):
    runtime = select_runtime("cpu")
    return runtime.launch(lambda: function(options, runtime))


def test_the_stream_is_the_text(plain):
    model, tokenizer = load_model(str(plain)), load_tokenizer(plain)
    ids = plain_prompt(tokenizer, "the model")
    whole = list(stream_ids(model, ids, 16, device=CPU))
    pieces = list(stream_text(tokenizer, stream_ids(model, ids, 16, device=CPU)))
    assert "".join(pieces) == tokenizer.decode(whole, clean_up_tokenization_spaces=False) and len(pieces) > 4
    assert whole == list(stream_ids(model, ids, 16, device=CPU, row_length=128))  # padding behind changes nothing


def test_half_characters_wait(plain):
    tokenizer = load_tokenizer(plain)
    text = "loss → 漢字 🙂 row"
    pieces = list(stream_text(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"]))
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    cut = tokenizer("🙂", add_special_tokens=False)["input_ids"][:-1]
    assert "".join(stream_text(tokenizer, cut)) == tokenizer.decode(cut)  # what never becomes whole is not lost


def test_many_prompts_share_one_shape(plain, tmp_path, monkeypatch):
    prompts = ["the model", "a", "layer of the weight, and the token in the loss"]
    (tmp_path / "p.txt").write_text("\n\n".join(prompts) + "\n")
    shapes = set()
    begin = decoding.begin
    counted = lambda model, ids, known: shapes.add(ids.shape) or begin(model, ids, known)  # noqa: E731
    monkeypatch.setattr("qat_lora.generate.sample.begin", counted)
    one = GenerateOptions(student=str(plain), prompt="x", max_new_tokens=6, run=part("unused"))
    many = run(generate, replace(one, prompt=None, prompts=str(tmp_path / "p.txt")))
    assert len(shapes) == 1 and [item["prompt"] for item in many] == prompts
    assert [item["text"] for item in many] == [run(generate, replace(one, prompt=prompt)) for prompt in prompts]
    (tmp_path / "p.txt").write_text("\n \n")
    with pytest.raises(TextError, match="no line with text"):
        run(generate, replace(one, prompt=None, prompts=str(tmp_path / "p.txt")))
    with pytest.raises(ConfigError, match="one of the two"):
        GenerateOptions(student="x", prompt="a", prompts="b")


def test_the_template_writes_the_prompt(plain, talker):
    tokenizer = load_tokenizer(talker)
    ids = chat_prompt(tokenizer, [{"role": "user", "content": "the loss"}])
    assert tokenizer.decode(ids) == "<user>the loss</user>\n<assistant>"
    options = GenerateOptions(student=str(talker), prompt="the loss", chat=True, max_new_tokens=6, run=part("unused"))
    ends = {tokenizer.eos_token_id}
    wanted = until_end(stream_ids(load_model(str(talker)), ids, 6, device=CPU), ends)
    assert run(generate, options) == tokenizer.decode(list(wanted))
    with pytest.raises(TextError, match="no chat template"):
        run(generate, replace(options, student=str(plain)))


def spoken(monkeypatch, lines, folder, **settings):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    quiet = replace(part("unused"), quiet=False)
    return run(chat, ChatOptions(student=str(folder), max_new_tokens=8, gen_temperature=0.0, run=quiet, **settings))


def test_a_chat_of_two_turns(talker, monkeypatch, capsys):
    messages = spoken(monkeypatch, ["the loss", "", "a row", "/exit", "never"], talker, system="be brief")
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    out = capsys.readouterr().out
    assert NO_TEMPLATE not in out and "never" not in out
    model, tokenizer = load_model(str(talker)), load_tokenizer(talker)
    for n in (2, 4):  # every answer follows all that was said before it
        ids = chat_prompt(tokenizer, messages[:n])
        whole = until_end(stream_ids(model, ids, 8, device=CPU), {tokenizer.eos_token_id})
        wanted = tokenizer.decode(list(whole))
        assert messages[n]["content"] == wanted and wanted in out
    assert len(spoken(monkeypatch, ["the loss", "/new", "a row"], talker)) == 2


def test_without_a_template_the_text_goes_on(plain, monkeypatch, capsys):
    messages = spoken(monkeypatch, ["the model", "a layer"], plain)
    assert NO_TEMPLATE in capsys.readouterr().out
    options = GenerateOptions(student=str(plain), prompt="a layer", max_new_tokens=8, run=part("unused"))
    assert messages[-1]["content"] == run(generate, options) and len(messages) == 2
    with pytest.raises(ConfigError, match="system"):
        spoken(monkeypatch, ["a"], plain, system="x")


def test_a_long_chat_forgets_and_says_so(talker, monkeypatch, capsys):
    line = "the weight of a layer in the model " * 6
    messages = spoken(monkeypatch, [line] * 6 + ["word " * 400], talker)
    out = capsys.readouterr().out
    assert "oldest turns are forgotten" in out and "say it shorter" in out
    assert messages[-1]["role"] == "assistant" and len(messages) < 12

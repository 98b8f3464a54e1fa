"""Generation is the argmax of transformers' own forward, token by token, with two input shapes."""

import shutil
from dataclasses import replace

import pytest
import torch
from tokenizers import processors
from toy_pipeline import part
from transformers import AutoModelForCausalLM

from qat_lora.commands.generate import generate
from qat_lora.errors import ConfigError, ModelError
from qat_lora.generate.sample import continue_text, plain_prompt, stream_ids, until_end
from qat_lora.models.load import load_model, load_tokenizer
from qat_lora.options import ChatOptions, GenerateOptions
from qat_lora.runtime.launch.select import select_runtime

CPU = torch.device("cpu")
PROMPT = [5, 17, 200, 31]


@pytest.fixture(scope="module")
def lively(tiny, tmp_path_factory):
    """The tiny teacher with layers that outweigh the embedding, or the likeliest next token is always the last."""
    folder = tmp_path_factory.mktemp("lively") / "model"
    model = load_model(str(tiny.teacher))
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(6 if "embed" in name else 8)
    model.module.save_pretrained(folder)
    for file in tiny.teacher.glob("tok*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture
def model(lively):
    return load_model(str(lively))


def continue_ids(model, prompt, new, ends=frozenset(), **settings):
    return list(until_end(stream_ids(model, prompt, new, device=CPU, **settings), ends))


def plain_argmax(folder, prompt, tokens):
    """The oracle: transformers' model, called anew on every growing sequence."""
    module = AutoModelForCausalLM.from_pretrained(folder)
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(tokens):
            ids.append(int(module(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("prompt", [PROMPT, [9], list(range(40))])
def test_equals_transformers_step_by_step(lively, model, prompt):
    wanted = plain_argmax(lively, prompt, 24)
    assert continue_ids(model, prompt, 24) == wanted
    assert len(set(wanted)) > 5


def test_one_forward_of_the_row_and_then_one_of_a_token(model):
    shapes = []

    def seen(module, args, given):
        shapes.append((tuple(given["input_ids"].shape), tuple(given["attention_mask"].shape)))

    model.module.model.register_forward_pre_hook(seen, with_kwargs=True)
    assert len(continue_ids(model, PROMPT, 9)) == 9
    assert shapes == [((1, 13), (1, 1, 1, 13))] + 8 * [((1, 1), (1, 1, 1, 13))]


def test_ends_at_the_end_token_which_is_not_returned(model):
    free = continue_ids(model, PROMPT, 24)
    for eos in free[3:6]:
        assert continue_ids(model, PROMPT, 24, ends={eos}) == free[: free.index(eos)]
    assert continue_ids(model, PROMPT, 24, ends={free[0]}) == []


def test_the_continuation_is_a_prefix_of_a_longer_one(model):
    assert continue_ids(model, PROMPT, 5) == continue_ids(model, PROMPT, 20)[:5]


def test_draws_follow_seed_and_temperature(model):
    def draw(seed, temperature):
        generator = torch.Generator().manual_seed(seed)
        return continue_ids(model, PROMPT, 12, temperature=temperature, generator=generator)

    assert draw(1, 1.0) == draw(1, 1.0) != draw(2, 1.0)
    assert draw(1, 1e-4) == continue_ids(model, PROMPT, 12)  # cold draws are the likeliest tokens


def test_draws_have_the_models_probabilities(model):
    with torch.inference_mode():
        hidden = model.hidden(torch.tensor([PROMPT]), torch.zeros(1, 4, dtype=torch.int32))
        wanted = torch.softmax(model.logits(hidden[0, -1:])[0].double() / 2.0, -1)
    generator = torch.Generator().manual_seed(0)
    drawn = [continue_ids(model, PROMPT, 1, temperature=2.0, generator=generator)[0] for _ in range(400)]
    likely = int(wanted.argmax())
    share, error = drawn.count(likely) / 400, float((wanted[likely] * (1 - wanted[likely]) / 400).sqrt())
    assert abs(share - float(wanted[likely])) < 5 * error + 1e-9


@pytest.mark.parametrize(
    ("prompt", "new", "word"),
    [([], 5, "prompt: is empty"), (PROMPT, 253, "max_new_tokens: .* 257 of 256")],
)
def test_refusals(model, prompt, new, word):
    with pytest.raises(ConfigError, match=word):
        continue_ids(model, prompt, new)


@pytest.mark.parametrize("options", [GenerateOptions, ChatOptions])
@pytest.mark.parametrize(
    ("name", "value"),
    [("max_new_tokens", 0), ("max_new_tokens", -2), ("gen_temperature", -1.0), ("gen_temperature", float("nan"))],
)
def test_numbers_without_a_meaning_are_refused_by_the_settings(options, name, value):
    with pytest.raises(ConfigError, match=f"{name}: {value} is too small"):
        options(student="s", **{name: value}, **({"prompt": "p"} if options is GenerateOptions else {}))


def test_the_longest_that_fits_is_allowed(model):
    assert len(continue_ids(model, list(range(253)), 3)) == 3


def test_text(lively, model, capsys):
    tokenizer = load_tokenizer(lively)
    ids = tokenizer("the model", add_special_tokens=False)["input_ids"]
    wanted = tokenizer.decode(plain_argmax(lively, ids, 8))
    wanted = wanted.split(tokenizer.eos_token)[0]
    assert continue_text(model, tokenizer, "the model", 8, device=CPU) == wanted
    run = replace(part("unused"), quiet=False, out=None)
    options = GenerateOptions(student=str(lively), prompt="the model", max_new_tokens=8, run=run)
    runtime = select_runtime("cpu")
    assert runtime.launch(lambda: generate(options, runtime)) == wanted
    assert capsys.readouterr().out.splitlines() == f"the model{wanted}".splitlines()
    assert runtime.launch(lambda: generate(replace(options, run=part("unused")), runtime)) == wanted
    assert capsys.readouterr().out == ""


def test_no_such_model():
    runtime = select_runtime("cpu")
    options = GenerateOptions(student="/nowhere/model", prompt="a", run=part("unused"))
    with pytest.raises(ModelError, match="/nowhere/model"):
        generate(options, runtime)


def test_a_prompt_begins_as_the_tokenizer_begins_texts(lively):
    tokenizer = load_tokenizer(lively)
    ids = tokenizer("the model", add_special_tokens=False)["input_ids"]
    assert plain_prompt(tokenizer, "the model") == ids  # though it has a bos, which it never adds
    assert plain_prompt(tokenizer, "") == [tokenizer.bos_token_id]
    end = tokenizer.eos_token
    adding = processors.TemplateProcessing(single=f"{end} $A", special_tokens=[(end, 0)])
    tokenizer.backend_tokenizer.post_processor = adding
    assert plain_prompt(tokenizer, "the model") == [0, *ids]
    assert plain_prompt(tokenizer, "") == [0]

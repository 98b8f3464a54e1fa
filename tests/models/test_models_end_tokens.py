"""The ids that end a model's text, from each place that may name them, and the commands that stop there."""

import json
from dataclasses import replace

import pytest
import torch
from toy_gguf import make_model, make_sentencepiece
from toy_pipeline import call, export_options, part, quantize_options

from qat_lora.commands.generate import generate
from qat_lora.evaluate.health import HealthConfig
from qat_lora.generate.sample import plain_prompt, stream_ids
from qat_lora.models.copies import copy_tokenizer
from qat_lora.models.end_tokens import end_ids, turn_ends
from qat_lora.models.load import load_model, load_tokenizer
from qat_lora.options import EvalOptions, GenerateOptions, TextConfig
from qat_lora.runtime.launch.select import select_runtime

CPU = torch.device("cpu")
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<end_of_turn>\n{% endfor %}"
PROMPT = "the model"


@pytest.fixture
def folder(tiny, tmp_path):
    """A model whose greedy text varies, without a generation_config.json."""
    model = load_model(str(tiny.teacher))
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(6 if "embed" in name else 8)
    model.module.save_pretrained(tmp_path / "model")
    copy_tokenizer(tiny.teacher, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    return tmp_path / "model"


def ends(folder):
    return end_ids(load_model(str(folder)), load_tokenizer(folder))


def set_in(file, **settings):
    known = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(known | settings))


def test_from_each_place(folder):
    assert ends(folder) == {0}
    set_in(folder / "generation_config.json", eos_token_id=5)
    assert ends(folder) == {0, 5}
    set_in(folder / "generation_config.json", eos_token_id=[5, 6])
    set_in(folder / "config.json", eos_token_id=[7, 8])
    assert ends(folder) == {0, 5, 6, 7, 8}


def test_from_the_chat_template(folder):
    tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_turn>", "<|im_end|>"]})
    tokenizer.save_pretrained(folder)
    assert ends(folder) == {0}
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert ends(folder) == {0, load_tokenizer(folder).convert_tokens_to_ids("<end_of_turn>")}


def test_known_tokens():
    vocab = {"<|end|>": 1, "<|return|>": 2, "<|eom_id|>": 3}
    assert turn_ends("{{ m }}<|end|>", vocab) == {"<|end|>": 1}
    assert turn_ends({"default": "{{ m }}<|end|>", "tool_use": "<|eom_id|>"}, vocab) == {"<|end|>": 1, "<|eom_id|>": 3}
    assert turn_ends("<|end|><|return|>", vocab) == {}  # gpt-oss: of several messages in a turn
    assert turn_ends(None, vocab) == turn_ends("<|end|>", {}) == {}


def test_generation_stops_at_any_of_them(folder):
    tokenizer = load_tokenizer(folder)
    free = list(stream_ids(load_model(str(folder)), plain_prompt(tokenizer, PROMPT), 12, device=CPU))
    end = next(token for token in free[2:] if token not in free[:2])
    set_in(folder / "generation_config.json", eos_token_id=[0, end])
    options = GenerateOptions(student=str(folder), prompt=PROMPT, max_new_tokens=12, run=part(None))
    runtime = select_runtime("cpu")
    written = runtime.launch(lambda: generate(options, runtime))
    assert written == tokenizer.decode(free[: free.index(end)], clean_up_tokenization_spaces=False)


def test_eval_counts_it_as_an_end(tiny, folder, tmp_path):
    options = EvalOptions(
        teacher=str(folder), students=(f"same={folder}",), text=TextConfig(dataset=str(tiny.held_out)), length=32,
        eval_rows=8, health=HealthConfig(generate=4, generate_tokens=12, prompt_tokens=8), run=part(tmp_path / "free"),
    )  # fmt: skip
    call("evaluate", options)
    before = json.loads((tmp_path / "free" / "report.json").read_text())["generation"]
    set_in(folder / "generation_config.json", eos_token_id=[*range(320)])
    call("evaluate", replace(options, run=part(tmp_path / "ended")))
    after = json.loads((tmp_path / "ended" / "report.json").read_text())["generation"]
    assert before["teacher"]["termination"] < 1
    for name in ("teacher", "same"):
        assert after[name]["termination"] == 1 and after[name]["tokens"] == 0


def test_of_a_gguf_file(tmp_path):
    pytest.importorskip("gguf")
    folder = make_model("mistral", tmp_path / "model")
    tokenizer = make_sentencepiece("the model of a layer and the weight\n", folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    file = call("export", export_options(folder, tmp_path / "out", form="gguf")) / "base.gguf"
    model = load_model(str(file), dequantize=True)
    tokenizer.chat_template = None
    assert end_ids(model, tokenizer) == {2, tokenizer.convert_tokens_to_ids("<end_of_turn>")}


def test_a_quantised_student_has_them(tiny, folder, tmp_path):
    set_in(folder / "generation_config.json", eos_token_id=[0, 9], temperature=0.7, do_sample=False)
    student = call("quantize", quantize_options(tiny._replace(teacher=folder), tmp_path / "student"))
    assert (student / "generation_config.json").read_bytes() == (folder / "generation_config.json").read_bytes()
    assert ends(student) == {0, 9}

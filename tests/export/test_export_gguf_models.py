"""Every architecture in GGUF: names, shapes and settings as llama.cpp's converter writes them, and its logits."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toy_gguf import ARCHITECTURES, make_model, make_sentencepiece
from toy_pipeline import call, export_options
from transformers import AddedToken, AutoConfig, AutoModelForCausalLM

from qat_lora.errors import ModelError
from qat_lora.export import gguf_model
from qat_lora.export.gguf import TABLES, save_base
from qat_lora.export.gguf_model import SPLITS, architecture, gguf_name, notes, row_order, vocabulary, write_vocabulary
from qat_lora.files.gguf_header import read_header
from qat_lora.layers.convert import linear_layers, quantize_targets
from qat_lora.models.end_tokens import header_end_ids
from qat_lora.models.load import load_model, load_tokenizer
from qat_lora.quant.presets import preset

gguf = pytest.importorskip("gguf")
TEXT = "the model of a layer and the weight in the cache. a token to the loss, quant scale code row head tail.\n" * 3
SETTINGS = {
    "qwen2": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4, "rope.scaling.attn_factor": 1,
              "rope.scaling.original_context_length": 64, "rope.scaling.yarn_beta_fast": 16},
    "qwen3": {"rope.scaling.type": "linear", "rope.scaling.factor": 2, "attention.key_length": 16},
    "llama": {"rope.dimension_count": 32, "rope.freq_base": 1e4, "context_length": 512},
    "mistral": {"rope.dimension_count": 16, "attention.head_count_kv": 1, "feed_forward_length": 96},
    "gemma2": {"attn_logit_softcapping": 5, "final_logit_softcapping": 30, "attention.sliding_window": 24,
               "attention.sliding_window_pattern": [True, False, True]},
    "gemma3_text": {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "rope.scaling.factor": 8,
                    "final_logit_softcapping": 8, "attention.sliding_window_pattern": [True] * 3},
    "phi3": {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 256,
             "rope.scaling.attn_factor": (1 + np.log(2) / np.log(256)) ** 0.5},
    "granite": {"attention.scale": 0.3, "embedding_scale": 3, "residual_scale": 0.5, "logit_scale": 2},
}  # fmt: skip
TENSORS = {
    "qwen2": {"blk.2.attn_k.bias"},
    "qwen3": {"blk.2.attn_k_norm.weight", "output.weight"},
    "llama": {"rope_freqs.weight", "blk.0.attn_output.bias", "blk.1.ffn_down.bias"},
    "mistral": {"blk.0.ffn_norm.weight"},
    "gemma2": {"blk.0.post_attention_norm.weight", "blk.0.post_ffw_norm.weight", "blk.0.ffn_norm.weight"},
    "gemma3_text": {"blk.0.attn_q_norm.weight", "blk.0.post_ffw_norm.weight"},
    "phi3": {"blk.0.attn_qkv.weight", "blk.0.ffn_up.weight", "rope_factors_long.weight", "rope_factors_short.weight"},
    "granite": {"blk.0.attn_q.bias", "blk.0.ffn_gate.weight"},
}


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def written(request, tmp_path_factory):
    """A model of an architecture, and its dense GGUF file."""
    folder = make_model(request.param, tmp_path_factory.mktemp("model") / request.param)
    tokenizer = make_sentencepiece(TEXT, folder, prefix="gemma" not in request.param)
    model = load_model(str(folder))
    save_base(model, {}, tokenizer, folder / "base.gguf", "float32", request.param)
    return SimpleNamespace(kind=request.param, model=model, tokenizer=tokenizer, file=folder / "base.gguf")


def test_names_shapes_and_settings(written):
    reader = gguf.GGUFReader(written.file)
    tensors = {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    name = architecture(written.model).name
    for key, value in SETTINGS[written.kind].items():
        found = reader.get_field(f"{name}.{key}").contents()
        assert found == (value if isinstance(value, str | list) else pytest.approx(value))
    assert TENSORS[written.kind] <= set(tensors)
    own = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
    parameters = dict(written.model.module.named_parameters())
    assert len(tensors.keys() - own) == len(parameters)
    for key, parameter in parameters.items():
        layer, _, part = key.rpartition(".")
        found, order = tensors[f"{gguf_name(written.model, layer)}.{part}"], row_order(written.model, layer)
        expected = parameter.detach() if order is None else parameter.detach()[order]
        shift = 1 if "gemma" in written.kind and key.endswith("norm.weight") else 0
        assert torch.equal(found, expected + shift), key
        assert (order is not None) == (written.kind in ("llama", "mistral", "granite") and layer[-6:-5] in ("q", "k"))
    if "rope_freqs.weight" in tensors:  # Llama 3's rule, by hand: fast pairs as they are, slow ones an eighth
        factors = tensors["rope_freqs.weight"]
        assert torch.allclose(factors[:2], torch.ones(2)) and torch.allclose(factors[-4:], torch.full((4,), 8.0))


@pytest.mark.parametrize("prefix", [True, False], ids=["Llama", "Gemma"])
def test_a_sentencepiece_vocabulary(prefix, tmp_path):
    tokenizer = make_sentencepiece(TEXT, tmp_path, prefix)
    found = vocabulary(tokenizer, 400)
    assert found.space_prefix is prefix and len(found.tokens) == len(found.kinds) == len(found.scores) == 400
    assert found.kinds[:4] == [2, 3, 3, 6] and found.kinds[-1] == 5 and found.tokens[3] == "<0x00>"
    ids = {token: i for i, token in enumerate(found.tokens)}

    def joined(text):
        """llama.cpp's way: always the neighbours whose token scores highest, the leftmost of equals."""
        parts = list(("▁" if prefix else "") + text.replace(" ", "▁"))
        while True:
            pairs = [(parts[i] + parts[i + 1], -i) for i in range(len(parts) - 1)]
            scored = [(found.scores[ids[pair]], at) for pair, at in pairs if pair in ids]
            if not scored:
                break
            at = -max(scored)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        pieces = ([part] if part in ids else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts)
        return [ids[piece] for part in pieces for piece in part]

    for text in ("the weight of a token", "tail  head é scale", "q"):
        assert joined(text) == tokenizer(text)["input_ids"]


def test_phi_3_is_told_by_the_name_where_its_tokens_strip_spaces(tmp_path):
    """llama.cpp sets that by `phi-3` in the name, and does not load such a file without four tokens."""
    tokenizer = make_sentencepiece(TEXT, tmp_path)
    names = []
    writer = type(
        "Writer", (), {"__getattr__": lambda _, key: names.append if key == "add_name" else lambda *_: None}
    )()
    plain = vocabulary(tokenizer, 400)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|endoftext|>", rstrip=True)]})
    for found in (plain, vocabulary(tokenizer, 400)):
        write_vocabulary(writer, found, tokenizer, "my-Phi3-run")
    assert names == ["my-phi-run", "my-phi-run (phi-3)"]


def test_splitting_rules_are_told_apart():
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    for (pattern, whole_words), name in SPLITS.items():
        rule = {"pretokenizers": [{"type": "Split", "pattern": {"Regex": pattern}}, level]}
        assert gguf_model._splitting(rule, whole_words) == name
    assert gguf_model._splitting({**level, "use_regex": True}, False) == "gpt-2"
    digits = {"type": "Digits", "individual_digits": True}
    assert gguf_model._splitting({"pretokenizers": [digits, {**level, "use_regex": True}]}, False) == "starcoder"
    with pytest.raises(ModelError, match=r"does not know \(Digits \+ ByteLevel\); known: gpt-2, starcoder, qwen2"):
        gguf_model._splitting({"pretokenizers": [{**digits, "individual_digits": False}, level]}, False)


def test_what_is_not_known_is_refused_before_anything_is_written(tiny, tmp_path):
    folder = make_model("mistral", tmp_path / "model")
    tokenizer = make_sentencepiece(TEXT, folder)
    model = load_model(str(folder))
    for field, value, message in (
        ("model_type", "qwen9", "qwen9 is not supported; allowed: qwen2, qwen3, llama, mistral, gemma2"),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 2.0}, "positions scaled by dynamic is not supported"),
        ("hidden_act", "gelu", "activation gelu is not supported by GGUF export of mistral"),
    ):
        kept = getattr(model.config, field)
        setattr(model.config, field, value)
        with pytest.raises(ModelError, match=message):
            architecture(model)
        setattr(model.config, field, kept)
    with pytest.raises(ModelError, match=r"no name for the layer model.layers.0.extra"):
        gguf_name(model, "model.layers.0.extra")
    assert notes(model) == []
    model.config.sliding_window = 24
    assert "reaches back 24 tokens" in notes(model)[0]
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["merges"] = state["model"]["merges"][:-1]
    broken = SimpleNamespace(
        backend_tokenizer=SimpleNamespace(to_str=lambda: json.dumps(state)), get_vocab=tokenizer.get_vocab
    )
    with pytest.raises(ModelError, match="it was not made from a SentencePiece model"):
        vocabulary(broken, 400)
    with pytest.raises(ModelError, match="another model"):
        vocabulary(load_tokenizer(tiny.teacher), 300)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    with pytest.raises(ModelError, match="activation gelu"):
        call("export", export_options(folder, tmp_path / "out", form="gguf"))
    assert not (tmp_path / "out").exists()


def test_the_base_and_the_factors_of_llama_3(tmp_path):
    """The settings of Llama 3.2's published config.json; the base is nobody's default."""
    folder = make_model("llama", tmp_path / "model")
    scaling = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
    scaling["original_max_position_embeddings"] = 8192
    config = json.loads((folder / "config.json").read_text())
    for name in ("rope_parameters", "rope_theta"):
        config.pop(name, None)
    config |= {"rope_theta": 123456.0, "rope_scaling": scaling, "max_position_embeddings": 131072}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = make_sentencepiece(TEXT, folder)
    save_base(load_model(str(folder)), {}, tokenizer, tmp_path / "base.gguf", "float32", "llama")
    reader = gguf.GGUFReader(tmp_path / "base.gguf")
    assert reader.get_field("llama.rope.freq_base").contents() == 123456.0
    (factors,) = (tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
    wanted = []
    for i in range(0, 32, 2):  # of a head of 32; the waves are sorted by 8192 / 4 and 8192 / 1 tokens
        wave = 2 * np.pi * 123456.0 ** (i / 32)
        share = np.clip((8192 / wave - 1) / 3, 0, 1)
        wanted.append(1 / ((1 - share) / 32 + share))
    assert 1 == min(wanted) < max(wanted) == 32 and len({*wanted}) > 3
    np.testing.assert_allclose(factors, wanted, rtol=1e-5)


END_OF = {
    "gemma": ("<end_of_turn>", "{{ m }}<end_of_turn>", {"eot": "<end_of_turn>"}),
    "llama 3": ("<|eot_id|> <|eom_id|>", "{{ m }}<|eot_id|><|eom_id|>", {"eot": "<|eot_id|>", "eom": "<|eom_id|>"}),
    "not in the template": ("<|eot_id|>", "{{ m }}", {}),
    "not in the vocabulary": ("", "{{ m }}<|end|>", {}),
    "no template": ("<|eot_id|>", None, {}),
    "its eos": ("<|im_end|>", "{{ m }}</s>", {"eot": "</s>"}),
}


@pytest.mark.parametrize("case", END_OF)
def test_the_tokens_that_end_a_turn(case, tmp_path):
    added, template, wanted = END_OF[case]
    folder = make_model("mistral", tmp_path / "model")
    tokenizer = make_sentencepiece(TEXT, folder)
    tokenizer.add_special_tokens({"additional_special_tokens": added.split()})
    tokenizer.chat_template = template
    save_base(load_model(str(folder)), {}, tokenizer, tmp_path / "base.gguf", "float32", "mistral")
    settings = read_header(tmp_path / "base.gguf").settings
    found = {name: settings.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")}
    vocab = tokenizer.get_vocab()
    assert {name: index for name, index in found.items() if index is not None} == {
        name: vocab[token] for name, token in wanted.items()
    }
    assert header_end_ids(settings) == {tokenizer.eos_token_id, *(vocab[token] for token in wanted.values())}


def test_the_size_of_qwen3_06b():
    """Base and rank-16 adapter at two bits, embedding at 4.5, tokenizer aside: at most 233 MB."""
    config = AutoConfig.for_model(
        "qwen3", vocab_size=151_936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, head_dim=128,
        num_key_value_heads=8, intermediate_size=3072, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    specs, layers = quantize_targets(module, preset("q2_0")), dict(linear_layers(module))
    table = preset(TABLES[4.5][0]).spec_for("embedding")
    codes = sum(spec.stored_bits(layers[name].out_features, layers[name].in_features) for name, spec in specs.items())
    codes += table.stored_bits(151_936, 1024)
    vectors = 32 * sum(p.numel() for p in module.parameters() if p.ndim == 1)
    factors = 16 * 16 * sum(layer.in_features + layer.out_features for layer in layers.values())
    assert len(specs) == len(layers) == 196
    assert 231e6 < (codes + vectors + factors) / 8 < 233e6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of a package built elsewhere
def test_llama_cpp_has_our_logits(written):
    llama_cpp = pytest.importorskip("llama_cpp")
    ids = written.tokenizer(TEXT * 6)["input_ids"]
    for count, context in ((48, 256), (300, 512)):  # within and beyond windows and the positions that were trained
        llama = llama_cpp.Llama(
            str(written.file), n_ctx=context, n_threads=1, logits_all=True, verbose=False, type_k=0, type_v=0
        )
        assert llama.tokenize((TEXT * 6).encode(), add_bos=False) == ids
        with torch.no_grad():
            hidden = written.model.hidden(torch.tensor([ids[:count]]), torch.zeros(1, count, dtype=torch.int32))
            ours = written.model.logits(hidden[0])
        llama.eval(ids[:count])
        theirs = torch.from_numpy(llama.scores[:count].copy())
        llama.close()
        exact = 1e-3 if "gemma" in written.kind else 2e-5  # llama.cpp looks GELU up in a table of float16 numbers
        assert (theirs - ours).abs().max() < exact * ours.abs().max()

"""Hugging Face models: packed rows against transformers document by document, strict loading, exact saving."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import qat_lora.models.load as models
from qat_lora.errors import ModelError
from qat_lora.files.checksums import checkpoint_sha256, seal
from qat_lora.layers.calibrate.quantize import quantize_model
from qat_lora.layers.convert import prepare_base, quant_layers
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.models.copies import copy_tokenizer, save_with_tensors
from qat_lora.models.load import (
    load_model,
    load_tokenizer,
    make_qwen3,
    resolve_model,
    save_quantised,
    tokenizer_sha256,
)
from qat_lora.quant.presets import PRESETS, preset

SMALL = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]
FAMILIES = {  # class prefix, and what the family adds; windows are shorter than the longest document
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3 sliding": ("Qwen3", {"use_sliding_window": True, "sliding_window": 4, "layer_types": MIXED}),
    "qwen3 all sliding": ("Qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),  # biases in q, k and v
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral sliding": ("Mistral", {"sliding_window": 4}),
    "mixtral sliding": ("Mixtral", {"sliding_window": 4, "num_local_experts": 2}),
    "phi3 sliding": ("Phi3", {"sliding_window": 4}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 8,
            "layer_types": MIXED,
        },
    ),
    "gemma3": ("Gemma3", {"sliding_window": 4, "query_pre_attn_scalar": 8, "layer_types": MIXED}),
    "granite": ("Granite", {"logits_scaling": 4.0, "attention_multiplier": 0.5, "residual_multiplier": 0.7}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
}
NAMES = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}
LENGTHS = ((9, 1, 12, 2), (24,), (5, 19))  # documents of each row of 24


def make(folder, family, tiny, **change):
    """Write a random model of a family with the tiny tokenizer, larger than life so that every part matters."""
    prefix, settings = FAMILIES[family]
    config_name, model_name = NAMES.get(prefix, (f"{prefix}Config", f"{prefix}ForCausalLM"))
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**(SMALL | settings | change))
    module = getattr(transformers, model_name)(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    module.save_pretrained(folder)
    copy_tokenizer(tiny.teacher, folder)
    return folder


def packed_rows():
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 320, (len(LENGTHS), 24), generator=draw)
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in LENGTHS])
    return ids, documents


def one_by_one(module, ids):
    """Transformers' own logits, every document alone in a forward of its own."""
    rows = []
    for row, lengths in zip(ids, LENGTHS, strict=True):
        with torch.no_grad():
            rows.append(torch.cat([module(part[None]).logits[0] for part in row.split(list(lengths))]))
    return torch.stack(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_are_transformers_document_by_document(family, tiny, tmp_path):
    folder = make(tmp_path / "m", family, tiny)
    ids, documents = packed_rows()
    expected = one_by_one(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval(), ids)
    model = load_model(str(folder))
    with torch.no_grad():
        hidden = model.hidden(ids, documents)
        logits = model.logits(hidden.flatten(0, 1)).reshape(expected.shape)
        head = model.lm_head()
        z = hidden @ head.weight_VH.T * head.logit_scale
        z = z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)
    assert logits.dtype == torch.float32
    assert torch.allclose(logits, expected, atol=1e-5, rtol=1e-5), (logits - expected).abs().max()
    assert torch.allclose(z, expected, atol=1e-5, rtol=1e-5)
    assert model.vocab_size == 320 and model.max_positions == 64
    model.tile_attention()
    with torch.no_grad():
        tiled = model.logits(model.hidden(ids, documents).flatten(0, 1)).reshape(expected.shape)
    torch.testing.assert_close(tiled, expected, rtol=1e-4, atol=1e-4)
    assert model.mask_form() == "first"
    with torch.no_grad():  # masks of transformers' own, as its `generate` makes them
        whole = model.module(input_ids=ids).logits
        alone = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()(input_ids=ids).logits
    torch.testing.assert_close(whole, alone, rtol=1e-4, atol=1e-4)
    # The comparison has teeth: as one document, the same tokens give other logits.
    with torch.no_grad():
        other = model.logits(model.hidden(ids, torch.zeros_like(documents)).flatten(0, 1)).reshape(expected.shape)
    assert (other[0] - expected[0]).abs().max() > 0.01
    assert torch.allclose(other[1], expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", [f for f in FAMILIES if "sliding" in f or "gemma" in f])
def test_windows_are_really_used(family, tiny, tmp_path):
    ids, documents = packed_rows()
    model = load_model(str(make(tmp_path / "m", family, tiny)))
    with torch.no_grad():
        narrow = model.hidden(ids, documents)
        model.module.config.sliding_window = 24
        assert (model.hidden(ids, documents) - narrow).abs().max() > 1e-3


SCALINGS = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0},
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_scaled_positions_are_kept_beyond_the_original_length(kind, tiny, tmp_path):
    scaling = SCALINGS[kind] | {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 8}
    folder = make(tmp_path / "m", "llama", tiny, rope_parameters=scaling)  # 64 positions; documents of up to 24
    ids, documents = packed_rows()
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    expected = one_by_one(reference, ids)
    model = load_model(str(folder))
    assert model.max_positions == 64
    for tile in (lambda: None, model.tile_attention):
        tile()
        with torch.no_grad():
            logits = model.logits(model.hidden(ids, documents).flatten(0, 1)).reshape(expected.shape)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    plain = load_model(str(make(tmp_path / "plain", "llama", tiny)))
    with torch.no_grad():
        other = plain.logits(plain.hidden(ids, documents).flatten(0, 1)).reshape(expected.shape)
    assert (other - expected)[1, 8:].abs().max() > 0.01  # the weights are the same, the positions are not
    models.save_model(model.module, tmp_path / "saved")
    copy_tokenizer(folder, tmp_path / "saved")
    assert load_model(str(tmp_path / "saved")).config.rope_parameters == reference.config.rope_parameters


@pytest.mark.parametrize(
    ("family", "change"),
    [("granite", {"attention_dropout": 0.5}), ("phi3 sliding", {"resid_pdrop": 0.5, "attention_dropout": 0.5})],
)
def test_dropout_of_pre_training_is_off_while_a_student_trains(family, change, tiny, tmp_path):
    model = load_model(str(make(tmp_path / "m", family, tiny, **change)))
    ids, documents = packed_rows()
    scored = model.hidden(ids, documents)
    model.module.train()
    assert torch.equal(model.hidden(ids, documents), scored)


@pytest.mark.parametrize("change", [{"s_aux": torch.zeros(4)}, {"dropout": 0.1}])
def test_attention_with_sinks_or_dropout_is_refused(change):
    attend, query, first = models.attention.tiled_or(pytest.fail), torch.ones(1, 4, 3, 8), torch.zeros(1, 1, 1, 3).int()
    with pytest.raises(ModelError, match="dropout or sinks, as of Linear"):
        attend(torch.nn.Linear(1, 1), query, query, query, first, scaling=1.0, **change)


@pytest.mark.parametrize(("family", "kinds"), [("qwen3", "full"), ("gemma2", "capped"), ("gemma3", "mixed")])
def test_the_library_gets_a_mask_of_a_block_of_queries_at_a_time(family, kinds, tiny, tmp_path, monkeypatch):
    """Windows, capped scores, blocks that do not divide the row: the numbers of one piece, and of our blocks."""
    model = load_model(str(make(tmp_path / "m", family, tiny)))
    ids, documents = packed_rows()
    masks, library = [], models._attend_as_transformers
    watched = lambda *given, **others: masks.append(tuple(given[4].shape[2:])) or library(*given, **others)  # noqa: E731
    monkeypatch.setattr(models, "_attend_as_transformers", watched)
    model._attend(models.LIBRARY, models.attention.library_or_blocked)
    with torch.no_grad():
        whole = model.hidden(ids, documents)
        assert set(masks) == (set() if kinds == "capped" else {(24, 24)})
        masks.clear()
        monkeypatch.setattr(models.attention, "BLOCK", 7)
        torch.testing.assert_close(model.hidden(ids, documents), whole, rtol=1e-4, atol=1e-4)
        full, windows_of_4 = {(7, 7), (7, 14), (7, 21), (3, 24)}, {(7, 7), (7, 10), (3, 6)}
        assert set(masks) == {"full": full, "mixed": full | windows_of_4, "capped": set()}[kinds]
    masks.clear()
    torch.testing.assert_close(model.hidden(ids, documents), whole, rtol=1e-4, atol=1e-4)
    assert not masks  # every block's mask would be kept for the backward pass


@pytest.mark.parametrize("attention", ["tiled", "library", "library without gradients"])
def test_no_tensor_of_a_forward_and_backward_has_l_squared_numbers(attention):
    length = 5000
    model = make_qwen3(None, 64, hidden=16, layers=1, heads=1, kv_heads=1, mlp=8, max_position_embeddings=length)
    if attention == "tiled":
        model.tile_attention()
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **kwargs or {})
            parts = result if isinstance(result, tuple | list) else [result]
            largest = max([largest, *(part.untyped_storage().nbytes() for part in parts if torch.is_tensor(part))])
            return result

    with Watch():
        documents = (torch.arange(length) // 1000)[None]
        with torch.set_grad_enabled("without" not in attention):
            hidden = model.hidden(torch.zeros(1, length, dtype=torch.int64), documents)
        if hidden.requires_grad:
            hidden.sum().backward()
    assert largest < length * length / 2  # bytes; scores of a block of 512 queries in float32 are the largest


def test_gpt2_works_as_a_teacher(tiny, tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=320, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    copy_tokenizer(tiny.teacher, tmp_path)
    ids, documents = packed_rows()
    expected = one_by_one(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), ids)
    model = load_model(str(tmp_path))
    with torch.no_grad():
        logits = model.logits(model.hidden(ids, documents).flatten(0, 1)).reshape(expected.shape)
    assert torch.allclose(logits, expected, atol=1e-5, rtol=1e-5)
    assert model.max_positions == 64


def test_an_attention_that_we_cannot_mask_is_refused(tiny, tmp_path):
    model = load_model(str(make(tmp_path / "m", "qwen3", tiny)))
    model.module.config.layer_types = ["chunked_attention"] * 3
    with pytest.raises(ModelError, match="chunked_attention is not supported"):
        model.hidden(*packed_rows())


def test_padding_rows_of_the_vocabulary_are_cut(tiny):
    model = load_model(str(tiny.teacher))
    short, hidden = model.with_vocabulary(300), torch.randn(3, 64)
    assert (model.vocab_size, short.vocab_size, model.with_vocabulary(999).vocab_size) == (320, 300, 320)
    assert torch.equal(short.logits(hidden), model.logits(hidden)[:, :300])
    assert short.lm_head().vocab_size == 300 and short.lm_head().weight_VH.shape[0] == 320


# Strict loading


def damaged(tiny, tmp_path, change):
    folder = shutil.copytree(tiny.teacher, tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


UP = "model.layers.1.mlp.up_proj.weight"


def remove(tensors):
    del tensors[UP]


def add(tensors):
    tensors["model.layers.1.mlp.extra.weight"] = torch.zeros(3)


def reshape(tensors):
    tensors[UP] = tensors[UP][:-1].contiguous()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (remove, rf"missing.*{UP}"),
        (add, r"unexpected.*mlp\.extra\.weight"),
        (reshape, rf"mismatched.*{UP} \(shape \(95, 64\), the model wants \(96, 64\)\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, reason, tiny, tmp_path):
    with pytest.raises(ModelError, match=reason) as refused:
        load_model(damaged(tiny, tmp_path, change))
    assert "\n" not in str(refused.value)


def test_quantised_checkpoints_are_as_strict(quantised, tmp_path):
    for i, change in enumerate(("codes", "scale")):
        folder = shutil.copytree(quantised, tmp_path / str(i))
        tensors = load_file(folder / "model.safetensors")
        del tensors[f"model.layers.1.mlp.up_proj.{change}"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        seal(folder)
        with pytest.raises(ModelError, match=rf"missing.*up_proj\.{change}"):
            load_model(str(folder))


def test_other_broken_folders_are_one_clear_line(tiny, tmp_path):
    (tmp_path / "empty").mkdir()
    pickled = shutil.copytree(tiny.teacher, tmp_path / "pickled")
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    cut = shutil.copytree(tiny.teacher, tmp_path / "cut")
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    foreign = shutil.copytree(tiny.teacher, tmp_path / "foreign")
    config = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps(config | {"model_type": "no_such_model"}))
    gptq = shutil.copytree(tiny.teacher, tmp_path / "gptq")
    (gptq / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    (tmp_path / "best.pt").write_bytes(b"pickle")
    for name, reason in {
        str(tmp_path / "empty"): "has no config.json",
        str(tmp_path / "absent"): "there is no folder",
        str(pickled): "no .safetensors weights",
        str(cut): "does not load as a causal language model",
        str(foreign): "no_such_model",
        str(gptq): "is quantised by gptq; give the unquantised model",
        str(tmp_path / "best.pt"): "pickled file",
        "no-such-folder": "there is no folder",
        "runs/best.pt": "there is no folder",
        "runs/x.safetensors": "there is no folder",
    }.items():
        with pytest.raises(ModelError, match=reason) as refused:
            load_model(name)
        assert "\n" not in str(refused.value) and str(refused.value).startswith("model: "), name


def test_the_spellings_of_the_guide_mean_the_folder(tiny, tmp_path):
    best = shutil.copytree(tiny.teacher, tmp_path / "best")
    for name in (best, tmp_path / "best.pt", best / "model.safetensors"):
        assert resolve_model(str(name)) == best


# Saving


@pytest.fixture(scope="module")
def quantised(tiny, tmp_path_factory):
    return quantise(tiny, tmp_path_factory.mktemp("quantised") / "w2g64", "w2g64")[1]


def quantise(tiny, out, name, method="absmax", source=None):
    model = load_model(str(source or tiny.teacher))
    quantize_model(model.module, preset(name), method, quiet=True)
    save_quantised(model, out, preset(name), {"init": method})
    return model, out


def logits_of(model):
    ids, documents = packed_rows()
    with torch.no_grad():
        return model.logits(model.hidden(ids, documents).flatten(0, 1))


@pytest.mark.parametrize("name", PRESETS)
def test_saved_and_loaded_is_the_same_bit_for_bit(name, tiny, wide, tmp_path):
    model, out = quantise(wide if PRESETS[name].rules[0][1].step_bits else tiny, tmp_path / name, name)
    expected, again = logits_of(model), load_model(str(out))
    assert torch.equal(logits_of(again), expected)
    assert len(quant_layers(again.module)) == 14
    prepare_base(again.module, train_scales=False)
    assert torch.equal(logits_of(again), expected)
    ids, _ = packed_rows()
    plain = AutoModelForCausalLM.from_pretrained(out)
    assert all(p.dtype in (torch.float32, torch.uint8) for p in plain.state_dict().values())
    assert torch.equal(plain(ids).logits, model.module(ids).logits)
    stored = load_file(out / "model.safetensors")
    for layer in quant_layers(model.module):
        kinds = {key.rsplit(".")[-1]: t.dtype for key, t in stored.items() if key.startswith(layer + ".")}
        packed = {"codes"} | kinds.keys() & {"zeros", "steps", "minima"}
        assert {kinds.pop(key) for key in packed} == {torch.uint8}
        assert set(kinds.values()) == {torch.float16}
    # Saving what was loaded gives the same bytes again: nothing is quantised anew.
    save_quantised(again, tmp_path / "again", preset(name), {"init": "absmax"})
    assert checkpoint_sha256(tmp_path / "again") == checkpoint_sha256(out)


def test_biases_and_kept_layers_survive(tiny, tmp_path):
    source = make(tmp_path / "dense", "llama", tiny)
    model = load_model(str(source))
    chosen = preset("w3g128", keep=(r"layers\.0\.",))
    quantize_model(model.module, chosen, "mse", quiet=True)
    save_quantised(model, tmp_path / "q", chosen, {})
    again = load_model(str(tmp_path / "q"))
    assert torch.equal(logits_of(again), logits_of(model)) and len(quant_layers(again.module)) == 14


def test_loading_forms_no_weight_and_draws_none(quantised, monkeypatch):
    """transformers initialises every linear layer that it does not know to be loaded: 12 s at 0.6 B."""
    formed = []
    monkeypatch.setattr(QuantLinear, "effective", lambda layer: formed.append(layer) or torch.zeros(1))
    before = torch.get_rng_state()
    model = load_model(str(quantised))
    assert len(quant_layers(model.module)) == 14 and not formed
    assert torch.equal(torch.get_rng_state(), before)


def test_overrides_and_a_quantised_head_survive(tiny, tmp_path):
    source = make(tmp_path / "dense", "llama", tiny, tie_word_embeddings=False)
    model = load_model(str(source))
    chosen = preset("w2g64", override=(r"layers\.0\.mlp=w4g64a", "q_proj=nf4g64"), lm_head="w4g128")
    quantize_model(model.module, chosen, "mse", quiet=True)
    bits = {name: layer.spec.bits for name, layer in quant_layers(model.module).items()}
    assert len(bits) == 22 and bits["lm_head"] == bits["model.layers.0.mlp.up_proj"] == 4
    assert bits["model.layers.1.self_attn.q_proj"] == 4 and bits["model.layers.1.mlp.up_proj"] == 2
    save_quantised(model, tmp_path / "q", chosen, {})
    again = load_model(str(tmp_path / "q"))
    assert torch.equal(logits_of(again), logits_of(model)) and len(quant_layers(again.module)) == 22


def test_a_head_in_blocks_survives_with_the_embedding_that_it_is(wide, tmp_path):
    model = load_model(str(wide.teacher))
    chosen = preset("q2_k", override=("o_proj=q4_0",), lm_head="q6_k")
    quantize_model(model.module, chosen, "absmax", quiet=True)
    save_quantised(model, tmp_path / "q", chosen, {})
    again = load_model(str(tmp_path / "q"))
    layers = quant_layers(again.module)
    assert layers["lm_head"].spec.step_bits == 8 and len(layers) == 15
    assert torch.equal(logits_of(again), logits_of(model))


@pytest.mark.parametrize("name", ["w2g64", "q4a4"])
def test_bfloat16_rounds_activations_and_never_scales(name, tiny, tmp_path):
    model, out = quantise(tiny, tmp_path / "q", name)
    ours = load_model(str(out), dtype="bfloat16")
    ids, _ = packed_rows()
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    for module in (ours.module, theirs):
        assert module.dtype == torch.bfloat16
        for layer, reference in zip(quant_layers(module).values(), quant_layers(model.module).values(), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(layer.scales, reference.scales, strict=True))
            assert torch.equal(layer.weight, reference.weight)
    assert torch.equal(ours.module(ids).logits, theirs(ids).logits)
    exact = logits_of(model)
    assert (logits_of(ours) - exact).abs().mean() < 0.05 * exact.abs().mean()


def test_a_bfloat16_model_can_be_saved_and_loaded(tiny, quantised, tmp_path):
    model = load_model(str(quantised), dtype="bfloat16")
    save_quantised(model, tmp_path / "low", preset("w2g64"), {})
    again = load_model(str(tmp_path / "low"), dtype="bfloat16")
    assert torch.equal(logits_of(again), logits_of(model))


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="reads Linux's list of mapped files")
@pytest.mark.parametrize(
    ("stored", "dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]
)
def test_weights_of_the_files_own_type_are_not_copied(tiny, tmp_path, stored, dtype):
    """Processes that load the same files then share one copy; a conversion, the control, cannot be shared."""
    module = AutoModelForCausalLM.from_pretrained(tiny.teacher, dtype=getattr(torch, stored))
    module.save_pretrained(tmp_path)
    copy_tokenizer(tiny.teacher, tmp_path)
    model = load_model(str(tmp_path), dtype=dtype)
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    pages = [[int(n, 16) for n in line[0].split("-")] for line in lines if line[-1].startswith(str(tmp_path))]
    mapped = [any(a <= p.data_ptr() < b for a, b in pages) for p in model.module.parameters()]
    assert mapped == [stored == dtype] * len(mapped) and mapped


def test_save_with_tensors_changes_those_only(quantised, tmp_path):
    model = load_model(str(quantised))
    scales = prepare_base(model.module, train_scales=True)
    with torch.no_grad():
        for scale in scales.values():
            scale.mul_(1.25)
    out = save_with_tensors(quantised, tmp_path / "out", scales)
    before, after = load_file(quantised / "model.safetensors"), load_file(out / "model.safetensors")
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        expected = scales[name].detach().half() if name in scales else tensor
        assert torch.equal(after[name], expected), name
        assert torch.equal(after[name], tensor) == (name not in scales)
    assert checkpoint_sha256(out) != checkpoint_sha256(quantised)
    for layer in quant_layers(model.module).values():  # the trained scales as stored: float16
        for scale in layer.scales:
            scale.data = scale.data.half().float()
    assert torch.equal(logits_of(load_model(str(out))), logits_of(model))
    same_tokens = [tokenizer_sha256(load_tokenizer(folder)) for folder in (quantised, out)]
    assert same_tokens[0] == same_tokens[1]


def test_tensors_that_the_checkpoint_lacks_are_refused(quantised, tmp_path):
    with pytest.raises(ModelError, match="lacks the tensors model.layers.9.x.scale"):
        save_with_tensors(quantised, tmp_path / "out", {"model.layers.9.x.scale": torch.ones(1, 1)})
    name = "model.layers.0.mlp.up_proj.scale"
    with pytest.raises(ModelError, match=rf"{name} has shape \(1, 1\)"):
        save_with_tensors(quantised, tmp_path / "out", {name: torch.ones(1, 1)})


def test_a_model_that_sees_of_a_family_not_checked_is_refused_by_that_name(tmp_path):
    text = {"model_type": "gemma2", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "head_dim": 16}
    image = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    image |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "projection_dim": 32}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=image, projection_dim=32)
    transformers.PaliGemmaForConditionalGeneration(config).save_pretrained(tmp_path / "pali")
    with pytest.raises(ModelError, match="paligemma, which sees or hears, is not supported; allowed: gemma3, "):
        load_model(str(tmp_path / "pali"))


# Fingerprints


def test_the_weights_fingerprint_follows_the_weights_only(tiny, tmp_path):
    folder = shutil.copytree(tiny.teacher, tmp_path / "copy")
    first = checkpoint_sha256(tiny.teacher)
    (folder / "README.md").write_text("notes")
    save_file({"x": torch.zeros(1)}, folder / "adapter_start.safetensors")  # a help for training, not the weights
    assert checkpoint_sha256(folder) == first
    tensors = load_file(folder / "model.safetensors")
    tensors[UP][0, 0] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert checkpoint_sha256(folder) != first
    with pytest.raises(ModelError, match="no .safetensors weights"):
        checkpoint_sha256(tiny.text)


def test_an_adapter_folder_has_a_fingerprint_too(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    first = checkpoint_sha256(tmp_path)
    save_file({"x": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    assert checkpoint_sha256(tmp_path) != first


def test_the_tokenizer_fingerprint_follows_the_ids_only(tiny, tmp_path):
    tokenizer = load_tokenizer(tiny.teacher)
    first = tokenizer_sha256(tokenizer)
    tokenizer("some text", max_length=8, truncation=True)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "again")
    assert tokenizer_sha256(load_tokenizer(tmp_path / "again")) == first
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_sha256(tokenizer) != first
    models.make_tokenizer(["another text altogether"], 270, tmp_path / "other")
    assert tokenizer_sha256(load_tokenizer(tmp_path / "other")) != first


def test_a_folder_without_tokenizer_is_refused(tiny, tmp_path):
    shutil.copyfile(tiny.teacher / "config.json", tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"^tokenizer: .* has no tokenizer.json") as refused:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mistral sliding"])
def test_hidden_reads_nothing_back(family, tiny, tmp_path):
    """On XLA a value read on the host stops the device; on meta tensors it cannot be read at all."""
    model = load_model(str(make(tmp_path / "m", family, tiny)))
    model.module.to("meta")
    ids, documents = (t.to("meta") for t in packed_rows())
    with torch.no_grad():
        assert model.hidden(ids, documents).shape == (3, 24, 32)

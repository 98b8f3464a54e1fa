"""Every dense and hybrid family of `docs/models.md`, whole: cache, quantise, recover, score, export, score again.

Models are random and small; what a family's logits are checked against is in `test_models_load.py` and
`test_models_hybrid.py`, mixtures and models that see have tests of their own.
"""

import json
from dataclasses import replace

import pytest
from models.test_models_hybrid import FAMILIES as HYBRID
from models.test_models_hybrid import make as make_hybrid
from models.test_models_load import FAMILIES as DENSE
from models.test_models_load import make as make_dense
from toy_pipeline import cache_options, call, eval_options, export_options, part, quantize_options, recover_options

from qat_lora.errors import ModelError
from qat_lora.models.copies import copy_tokenizer

WIDE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
SCALED = {"initializer_range": 0.1, "max_position_embeddings": 256}
HEADS = {"linear_num_value_heads": 8, "mamba_n_heads": 16, "mamba_d_ssm": 128}
FORMS = ("merged", "adapter", "compressed-tensors", "gguf")
REFUSED = {  # in words
    "gguf": ("cohere", *HYBRID),
    "compressed-tensors": ("qwen3_next", "qwen3_5_moe_text", "granitemoehybrid", "lfm2_moe"),
}
FEW = ("llama", "granitemoehybrid")  # in every run of the tests; the others in the full one
EVERY = [f for f in (*DENSE, *HYBRID) if "sliding" not in f or f == "phi3 sliding"]


@pytest.mark.parametrize("family", [f if f in FEW else pytest.param(f, marks=pytest.mark.slow) for f in EVERY])
def test_a_family_goes_through_every_command(family, tiny, tmp_path):
    if family in DENSE:
        scaled = {"query_pre_attn_scalar": 16, "layer_types": None} if "gemma" in family else {}
        scaled |= {"sliding_window": None} if "phi3" in family else {}  # which llama.cpp leaves out
        make_dense(tmp_path / "teacher", family, tiny, **WIDE | SCALED | scaled)
    else:
        wide = {name: count for name, count in HEADS.items() if name in HYBRID[family][1]}
        model = make_hybrid(family, **WIDE | SCALED | wide)
        model.module.save_pretrained(tmp_path / "teacher")
        copy_tokenizer(tiny.teacher, tmp_path / "teacher")
    own = tiny._replace(teacher=tmp_path / "teacher")
    cache = call("build_cache", cache_options(own, tmp_path / "cache"))
    made = quantize_options(own, tmp_path / "student", cache, preset="q4_0", start_rank=2)
    student = call("quantize", made)
    options = recover_options(student, cache, tmp_path / "run", run=part(tmp_path / "run"))
    options = replace(options, train=replace(options.train, lr=1e-3), loop=replace(options.loop, max_steps=4))
    run = call("recover", options)
    scores = call("evaluate", eval_options(own, {"a": run}, tmp_path / "scores", eval_rows=8))
    assert 0 < scores["a"]["kl"] < 1 and json.loads((student / "result.json").read_text())["quantised_share"] > 0.9
    for form in FORMS:
        if form == "gguf" and family == "qwen2":  # its own class reads the toy's tokenizer otherwise than a plain one
            continue
        asked = export_options(run, tmp_path / form, form=form, embedding_bits=16 if form == "gguf" else None)
        if family in REFUSED.get(form, ()):
            with pytest.raises(ModelError, match="GGUF export of .* is not supported|is not written for the experts"):
                call("export", asked)
            continue
        options = eval_options(own, {"a": call("export", asked)}, tmp_path / f"{form}-scores", eval_rows=8)
        assert call("evaluate", options)["a"]["kl"] == pytest.approx(scores["a"]["kl"], rel=0.02)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_layers_of_gemma_in_another_order_than_llama_cpps_are_not_exported_to_it(family, tiny, tmp_path):
    make_dense(tmp_path / "teacher", family, tiny, **WIDE | SCALED | {"query_pre_attn_scalar": 16})
    student = call("quantize", quantize_options(tiny._replace(teacher=tmp_path / "teacher"), tmp_path / "student"))
    with pytest.raises(ModelError, match="another order of local and global layers than llama.cpp's is not supported"):
        call("export", export_options(student, tmp_path / "gguf", form="gguf"))

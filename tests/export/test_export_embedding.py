"""The embedding in few bits: weighted by what the head reads, exact in the file, its loss measured."""

import json

import pytest
import torch
from toy_pipeline import call, export_options, quantize_options

from qat_lora.commands import export
from qat_lora.data.sources import TextConfig
from qat_lora.errors import ConfigError
from qat_lora.export import containers
from qat_lora.export.containers import dense_tables, head_importance, quantized_table
from qat_lora.models.load import CausalLM, load_model
from qat_lora.options import ExportOptions
from qat_lora.quant.presets import preset

gguf = pytest.importorskip("gguf")


def test_what_the_head_reads(tiny):
    model = load_model(str(tiny.teacher))
    ids = torch.randint(300, (2, 9))
    mask = torch.rand(2, 8) < 0.7
    batch = {"input_ids": ids, "document_ids": torch.zeros_like(ids, dtype=torch.int32), "target_mask": mask}
    with torch.no_grad():
        states = model.module.model(ids).last_hidden_state[:, :-1].double()
    expected = torch.stack([states[r, p] ** 2 for r, p in mask.nonzero().tolist()]).mean(0)
    found = head_importance(model, [batch, batch], kept := [])
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
    assert len(kept) == 2 and all(torch.equal(x[:, :-1].double(), states) for x in kept)
    gain = model.module.model.norm.weight.detach()
    torch.testing.assert_close(head_importance(model, None, []), gain**2, rtol=1e-4, atol=0)
    assert list(dense_tables(model.module)) == ["model.embed_tokens"]  # tied: one matrix


def test_columns_that_count_more_are_kept_better(monkeypatch):
    torch.manual_seed(0)
    weight, spec = torch.randn(40, 64), preset("q4_0").spec_for("embedding")
    importance = torch.rand(64) ** 8
    monkeypatch.setattr(containers, "PIECE", 16 * 64)
    weighted, alike = (quantized_table(weight, spec, given, True) for given in (importance, None))
    cost = [((q.dense(spec) - weight).double() ** 2 * importance).sum() for q in (weighted, alike)]
    assert cost[0] < 0.9 * cost[1]
    monkeypatch.setattr(containers, "PIECE", 64 * 64)
    whole = quantized_table(weight, spec, importance, True)
    assert torch.equal(whole.dense(spec), weighted.dense(spec))


@pytest.mark.parametrize(
    ("hidden", "bits", "kind"), [(64, None, "Q4_0"), (256, None, "Q4_K"), (256, 6, "Q6_K"), (64, 8, "Q8_0")]
)
def test_the_file_holds_the_table_exactly_and_the_result_its_cost(hidden, bits, kind, tiny, wide, tmp_path):
    source, name = (wide, "q2_k") if hidden == 256 else (tiny, "q2_0")
    model = load_model(str(source.teacher))
    student = call("quantize", quantize_options(source, tmp_path / "q", preset=name))
    text = TextConfig(dataset=str(tiny.text))
    for given in (TextConfig(), text):
        options = export_options(student, tmp_path / f"out{bool(given.dataset)}", form="gguf", embedding_bits=bits)
        out = call("export", options, text=given, length=32)
        result = json.loads((out / "result.json").read_text())
        tensors = {t.name: t for t in gguf.GGUFReader(out / "base.gguf").tensors}
        assert tensors["token_embd.weight"].tensor_type.name == kind and "output.weight" not in tensors
        assert tensors["blk.0.attn_q.weight"].tensor_type.name == {"q2_k": "Q2_K", "q2_0": "Q2_0"}[name]
        assert result["layers_rounded"] == 0 and "bits a weight, weight error 0." in result["embedding"]
        size, weights = (out / "base.gguf").stat().st_size, sum(p.numel() for p in model.module.parameters())
        assert result["bits_over_all_weights"] == pytest.approx(8 * size / weights, abs=1e-3)
        assert (result["kl_of_rounding"] == "not measured: give --dataset") == (given.dataset is None)
    assert 0 < result["kl_of_rounding"] < 0.1
    if hidden == 64 and bits is None:
        spec = preset("q4_0").spec_for("x")
        table = model.module.get_input_embeddings().weight
        ours = quantized_table(table, spec, head_importance(model, None, []), True).dense(spec)
        tensor = {t.name: t for t in gguf.GGUFReader(tmp_path / "outFalse" / "base.gguf").tensors}["token_embd.weight"]
        assert torch.equal(torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)), ours)


def test_what_a_container_holds_exactly_is_not_copied_to_measure_the_rest(tiny, tmp_path, monkeypatch):
    seen, with_containers = [], export.with_containers

    def spy(module, found):
        seen.extend((module, with_containers(module, found)))
        return seen[1]

    monkeypatch.setattr(export, "with_containers", spy)
    student = call("quantize", quantize_options(tiny, tmp_path / "q", preset="q2_0"))
    options = export_options(student, tmp_path / "out", form="gguf")
    call("export", options, text=TextConfig(dataset=str(tiny.text)), length=32)
    ours, theirs = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in seen)
    assert ours.keys() == theirs.keys() and len(ours) > 30
    assert {name for name in ours if ours[name].data_ptr() != theirs[name].data_ptr()} == {"model.embed_tokens.weight"}
    assert seen[1].lm_head.weight is seen[1].model.embed_tokens.weight  # tied as before


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"embedding_bits: 5 is not supported; allowed: 4.5, 6, 8, 16"):
        ExportOptions(student="x", form="gguf", embedding_bits=5)
    with pytest.raises(ConfigError, match="embedding_bits: means nothing with --form merged"):
        ExportOptions(student="x", embedding_bits=8)


def test_an_export_computes_hidden_states_twice(tmp_path, tiny, monkeypatch):
    """Those of the student serve the head's importance and the comparison, as many as are kept."""
    seen, found, hidden = [], [], CausalLM.hidden
    student = call("quantize", quantize_options(tiny, tmp_path / "q", preset="q2_0"))
    monkeypatch.setattr(CausalLM, "hidden", lambda *given: seen.append(1) or hidden(*given))
    for kept, calls in (1 << 14, 4), (1, 5), (0, 6):  # on two batches of four rows
        monkeypatch.setattr(containers, "KEPT", kept)
        options = export_options(student, tmp_path / f"out{kept}", form="gguf")
        out = call("export", options, text=TextConfig(dataset=str(tiny.text)), length=32, eval_rows=8)
        found.append(json.loads((out / "result.json").read_text())["kl_of_rounding"])
        assert len(seen) == calls
        seen.clear()
    assert found[0] == found[1] == found[2] > 0

"""Every form of export against its real reader, from the command's own function down to the logits."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from toy_pipeline import cache_options, call, eval_options, export_options, part, quantize_options, recover_options
from transformers import AutoModelForCausalLM, AutoTokenizer

from qat_lora.commands.generate import generate
from qat_lora.data.sources import TextConfig
from qat_lora.errors import ConfigError, ModelError, OutputExistsError, QatLoraError
from qat_lora.files.checksums import seal
from qat_lora.layers.calibrate.quantize import quantize_model
from qat_lora.layers.convert import bits_per_weight
from qat_lora.models.hub import HubConfig
from qat_lora.models.load import load_model, save_quantised
from qat_lora.models.student import open_student
from qat_lora.options import ExportOptions, GenerateOptions
from qat_lora.quant.presets import preset
from qat_lora.runtime.launch.select import select_runtime

# Between PEFT and transformers: the one reads an attribute that the other has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
ROOT = Path(__file__).resolve().parents[2]
IDS = torch.arange(3, 51).reshape(2, 24)
PRESETS = ("w2g64", "w3g128", "w4g128", "apple2", "q4_r32", "q4a4", "q2a4", "q2a2")
EXACT = PRESETS[:4]


@pytest.fixture(scope="module")
def recovered(tiny, tmp_path_factory):
    """A cache, a student, a short recovery and its scores: what a user has before an export."""
    root = tmp_path_factory.mktemp("forms")
    cache = call("build_cache", cache_options(tiny, root / "cache", num_rows=32))
    student = call("quantize", quantize_options(tiny, root / "student", cache))
    run = call("recover", recover_options(student, cache, root / "run"))
    call("evaluate", eval_options(tiny, {"run": run}, root / "eval"))
    return run


def quantised(tiny, name, folder):
    model = load_model(str(tiny.teacher))
    quantize_model(model.module, preset(name), "mse", quiet=True)
    save_quantised(model, folder, preset(name), {"model": str(tiny.teacher)})
    return folder


def our_logits(name):
    model = open_student(str(name), HubConfig()).model
    with torch.no_grad():
        return model.logits(model.hidden(IDS, torch.zeros_like(IDS)).flatten(0, 1)).reshape(*IDS.shape, -1)


def theirs(model):
    with torch.no_grad():
        return model(IDS).logits.float()


def test_adapter_pair_in_peft(recovered, tmp_path):
    out = call("export", export_options(recovered, tmp_path / "pair", form="adapter"))
    base = AutoModelForCausalLM.from_pretrained(out / "base")
    plain = theirs(base)
    logits = theirs(PeftModel.from_pretrained(base, out).eval())
    wanted = our_logits(recovered)
    assert (logits - wanted).abs().max() <= 1e-5 < (plain - wanted).abs().max()
    assert torch.equal(our_logits(out), wanted)  # our loader takes the base in the folder
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"
    assert not any(str(recovered) in file.read_text() for file in out.rglob("*config.json"))


def test_the_pair_checks_its_base(recovered, tmp_path):
    out = call("export", export_options(recovered, tmp_path / "pair", form="adapter"))
    file = out / "base" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(".scale"))
    tensors[name] = tensors[name] * 1.01
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="model.safetensors: is not what was written"):
        our_logits(out)
    seal(out / "base")
    with pytest.raises(ModelError, match="another base"):
        our_logits(out)


@pytest.mark.parametrize("name", PRESETS)
def test_compressed_tensors_in_transformers(name, tiny, tmp_path):
    student = quantised(tiny, name, tmp_path / "student")
    text = TextConfig(dataset=str(tiny.held_out))
    options = export_options(student, tmp_path / "ct", form="compressed-tensors", text=text, length=32, eval_rows=4)
    out = call("export", options)
    result = json.loads((out / "result.json").read_text())
    wanted, logits = our_logits(student), theirs(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32))
    if name in EXACT:
        assert (logits - wanted).abs().max() <= 1e-3 and torch.equal(logits, wanted)
        assert result["layers_rounded"] == 0 and "kl_of_rounding" not in result
    else:
        kl = torch.nn.functional.kl_div(logits.log_softmax(-1), wanted.log_softmax(-1), None, None, "none", True)
        assert result["layers_exact"] == 0 and 0 < result["weight_error_mean"] <= result["weight_error_worst"] < 0.2
        assert 0.2 < result["kl_of_rounding"] / float(kl.sum(-1).mean()) < 5  # other text, same size
        assert str(result["kl_of_rounding"]) in (out / "README.md").read_text()
    with safe_open(out / "model.safetensors", "pt") as file:
        packed = [file.get_tensor(key) for key in file.keys() if key.endswith("weight_packed")]  # noqa: SIM118
    assert len(packed) == 14 and all(tensor.dtype == torch.int32 for tensor in packed)


def test_three_bits_hold_half_integers_too(tiny, tmp_path):
    student = quantised(tiny, "w2g64", tmp_path / "student")
    out = call("export", export_options(student, tmp_path / "ct", form="compressed-tensors", container_bits=3))
    logits = theirs(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32))
    assert torch.equal(logits, our_logits(student))
    assert "3-bit codes are packed as compressed-tensors" in (out / "README.md").read_text()
    with pytest.raises(ConfigError, match="container_bits: 2 cannot hold half codes exactly; give 3"):
        call("export", export_options(student, tmp_path / "two", form="compressed-tensors", container_bits=2))
    assert not (tmp_path / "two").exists()


def test_peft_puts_the_adapter_on_the_packed_base(recovered, tmp_path):
    out = call("export", export_options(recovered, tmp_path / "ct", form="compressed-tensors"))
    base = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    theirs(base)  # compressed-tensors unpacks in the first forward
    logits = theirs(PeftModel.from_pretrained(base, out / "adapter").eval())
    assert (logits - our_logits(recovered)).abs().max() <= 1e-3


def test_every_card_runs_as_printed(recovered, tmp_path):
    """Each in an empty namespace, one Python for all: what an earlier one imports, no later one needs."""
    spec = importlib.util.spec_from_file_location("consumers", ROOT / "benchmarks" / "consumers.py")
    consumers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(consumers)
    exports = {"merged": recovered, "packed": recovered.parent / "student", "packed and adapter": recovered}
    exports["adapter"] = recovered
    program = "import os\n"
    for name, student in exports.items():
        form = "compressed-tensors" if "packed" in name else name
        out = call("export", export_options(student, tmp_path / name, form=form))
        file = str(tmp_path / f"{name}.safetensors")
        then = consumers.LOGITS.format(cast="", ids=IDS[0].tolist(), file=file)
        program += f"os.chdir({str(out)!r})\nexec({consumers.block_of(out) + then!r}, {{}})\n"
    environment = {**os.environ, "USE_TORCH_XLA": "0"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, student in exports.items():
        logits = load_file(tmp_path / f"{name}.safetensors")["logits"]
        assert (logits - our_logits(student)[0]).abs().max() <= 1e-3, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_dense(recovered, tmp_path, dtype):
    options = export_options(recovered, tmp_path / "merged")
    out = call("export", options, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert str(model.dtype) == f"torch.{dtype}"
    gap = (theirs(model) - our_logits(recovered)).abs().max()
    assert gap <= (1e-5 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("form", ["merged", "adapter", "compressed-tensors"])
def test_our_own_commands_open_what_was_exported(recovered, tiny, tmp_path, form):
    """Scores, text and logits of an export are those of the run, adapter included."""
    out = call("export", export_options(recovered, tmp_path / "out", form=form))
    assert (our_logits(out) - our_logits(recovered)).abs().max() <= 1e-5
    scores = call("evaluate", eval_options(tiny, {"run": recovered, "export": out}, tmp_path / "eval", eval_rows=6))
    assert scores["export"]["kl"] == pytest.approx(scores["run"]["kl"], abs=1e-6) and scores["run"]["kl"] > 1e-3
    runtime = select_runtime("cpu")

    def text(student):
        options = GenerateOptions(student=str(student), prompt="the model", max_new_tokens=6, run=part("-"))
        return runtime.launch(lambda: generate(options, runtime))

    assert text(out) == text(recovered)


def test_a_packed_base_that_was_changed_is_refused(recovered, tmp_path):
    out = call("export", export_options(recovered, tmp_path / "ct", form="compressed-tensors"))
    assert str(recovered) not in (out / "config.json").read_text()  # or `push` would refuse it
    _steps(out)
    seal(out)
    with pytest.raises(ModelError, match="another base"):
        open_student(str(out), HubConfig())
    with pytest.raises(ModelError, match="quantised by compressed-tensors"):
        load_model(str(out))  # to quantise it anew, say


def test_gguf_is_no_model_to_quantise(recovered, tmp_path):
    out = call("export", export_options(recovered, tmp_path / "gguf", form="gguf"))
    with pytest.raises(ModelError, match=r"GGUF export, for `eval` and `chat`"):
        load_model(str(out))


@pytest.mark.parametrize("name", PRESETS)
def test_size_on_disk_is_the_bits_that_are_printed(name, tiny, tmp_path):
    folder = quantised(tiny, name, tmp_path / "student")
    model = load_model(str(folder))
    bits = bits_per_weight(model.module)["base"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = {key: file.get_tensor(key).nbytes for key in file.keys()}  # noqa: SIM118
    parts = ("codes", "scale", "scale_a", "scale_b", "values", "zeros")
    stored = sum(size for key, size in sizes.items() if key.rsplit(".", 1)[1] in parts)
    weights = sum(64 * 64 * 2 + 32 * 64 * 2 + 3 * 96 * 64 for _ in range(2))
    assert 8 * stored / weights == pytest.approx(bits, rel=0.02)
    assert (folder / "model.safetensors").stat().st_size - sum(sizes.values()) < 16_384  # the header and nothing else


def test_card_and_folder(recovered, tmp_path):
    options = export_options(
        recovered, tmp_path / "out", form="adapter", scores=str(recovered.parent / "eval"), license="apache-2.0"
    )
    out = call("export", options)
    card = (out / "README.md").read_text()
    for words in (
        "license: apache-2.0",
        "library_name: peft",
        "w2g64",
        "| teacher | teacher |",
        "files 24",
        "qat-lora export",
    ):
        assert words in card, words
    assert re.search(r"\| run +\|", card) and str(recovered.parent) not in card
    assert len(AutoTokenizer.from_pretrained(out)) > 256
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*")}
    assert call("export", options) == out and before == {file: file.stat().st_mtime_ns for file in out.rglob("*")}
    with pytest.raises(OutputExistsError, match="form was"):
        call("export", options, form="merged")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(OutputExistsError, match="no qat-lora run made"):
        call("export", export_options(recovered, tmp_path / "mine"))
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["letter.txt"]


def test_a_failed_write_leaves_nothing_that_loads(recovered, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qat_lora.commands.export.copy_tokenizer", full)
    with pytest.raises(OSError, match="No space"):
        call("export", export_options(recovered, tmp_path / "out"))
    assert not list(tmp_path.rglob("*.safetensors"))


def _cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _rename(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.upper.codes"] = tensors.pop("model.layers.0.mlp.up_proj.codes")
    save_file(tensors, file, metadata={"format": "pt"})


def _scale(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({k: v * 2 if k.endswith(".scale") else v for k, v in tensors.items()}, file, metadata={"format": "pt"})


def _steps(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors = {k: v * 2 if k.endswith("weight_scale") else v for k, v in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})


def _tokenizer(folder):
    file = folder / "tokenizer.json"
    plain = json.loads(file.read_text())
    plain["model"]["vocab"]["zzz"] = plain["model"]["vocab"].pop(list(plain["model"]["vocab"])[-1])
    plain["model"]["merges"] = plain["model"]["merges"][:-1]
    file.write_text(json.dumps(plain))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, "does not load"),
        (_rename, "tensors"),
        (_scale, "another base"),
        (_tokenizer, "another tokenizer"),
    ],
)
@pytest.mark.parametrize("form", ["merged", "gguf"])
def test_what_does_not_belong_together_is_refused(recovered, tiny, tmp_path, damage, words, form):
    pair = call("export", export_options(recovered, tmp_path / "pair", form="adapter"))
    damage(pair / "base")
    with pytest.raises(QatLoraError, match="is not what was written"):
        call("export", export_options(pair, tmp_path / "out", form=form))
    seal(pair / "base")
    with pytest.raises(QatLoraError, match=words) as caught:
        call("export", export_options(pair, tmp_path / "out", form=form))
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_refused_before_anything_is_written(tiny, recovered, tmp_path):
    student = recovered.parent / "student"
    for form, given, words in (
        ("adapter", student, "has no adapter"),
        ("compressed-tensors", tiny.teacher, "no quantised layer"),
        ("merged", tiny.teacher, "nothing to merge"),
    ):
        with pytest.raises(ModelError, match=words):
            call("export", export_options(given, tmp_path / "out", form=form))
    with pytest.raises(ConfigError, match="scores"):
        call("export", export_options(recovered, tmp_path / "out", scores=str(tmp_path)))
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="exact_only"):
        ExportOptions(student="x", exact_only=True)
    with pytest.raises(ConfigError, match="container_bits: 9"):
        ExportOptions(student="x", form="compressed-tensors", container_bits=9)

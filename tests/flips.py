"""Flips single bits in what a toy pipeline wrote, one at a time, and asks the commands that read the file.

Used by `test_flips.py` for a few flips and, as a script (FOLDER COUNT SEED), by `benchmarks/flips.py` for many.
"""

import contextlib
import io
import json
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path

import torch
from torch import nn
from toy_model import make_toy
from toy_pipeline import cache_options, call, eval_options, export_options, part, quantize_options, recover_options

from qat_lora import cli
from qat_lora.errors import QatLoraError
from qat_lora.export.card import read_origin, read_scores
from qat_lora.export.hub import files_to_upload, upload_summary
from qat_lora.files import outputs
from qat_lora.files.checksums import read_object, seal, sha256_of
from qat_lora.generate.sample import open_backend
from qat_lora.models.adapter import STARTS, load_starts
from qat_lora.models.hub import HubConfig
from qat_lora.models.load import load_tokenizer
from qat_lora.models.student import adapter_folder, open_student
from qat_lora.options import QatOptions, RunConfig
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.train.checkpoint import STATE, checkpoints, load_checkpoint
from qat_lora.train.loop import LoopConfig
from qat_lora.train.metrics import check_log, read_metrics
from qat_lora.train.optim import OptimConfig, build_optimizer

LOOP = LoopConfig(batch_size=8, max_steps=4, log_steps=1, eval_steps=2, save_steps=2)
MARKS = ("qat_lora_run.json", "qat_lora_files.txt", "config.yaml", "result.json", "report.json", "scores.json")
"""Files of a run that its mark answers for, and those that say what the run is."""
UNREAD = (".png", ".md", ".html", "COMPLETE")
FORMS = ("adapter", "compressed-tensors", "merged", "gguf")


def make(tiny, root, forms=FORMS, whole=True):
    """Run the pipeline on a teacher and texts; everything is under `root`."""
    root.mkdir()
    cache = call("build_cache", cache_options(tiny, root.with_name("cache"), num_rows=32, eval_rows=4))
    student = call("quantize", quantize_options(tiny, root / "student", cache, calibration_rows=16))
    train = {"loop": LOOP, "train": OptimConfig(lr=2e-3, scale_lr=2e-3, warmup_steps=1)}
    run = call("recover", recover_options(student, cache, root / "run", train_scales=True, **train))
    for form in forms:
        call("export", export_options(run, root / form, form=form))
    if whole:
        plain = call("recover", recover_options(student, cache, root / "plain", **train))
        qat = QatOptions(checkpoint=str(student), kd_cache_dir=str(cache), run=part(root / "qat"), **train)
        call("qat", qat)
        call("evaluate", eval_options(tiny, {"run": run, "plain": plain}, root / "eval"))
    return root


def opened(folder):
    """Return all that opening a model gives: its scores, its adapter starts, its tokenizer, and what it is called."""
    student = open_student(str(folder), HubConfig())
    model, ids = student.model, torch.arange(24).reshape(2, 12)
    with torch.inference_mode():
        logits = model.logits(model.hidden(ids, torch.zeros(2, 12, dtype=torch.int32)))
    starts = [t.tolist() for f in load_starts(model.folder).values() for t in (f.a_RI, f.b_OR)]
    tokenizer = load_tokenizer(model.folder)
    words = [tokenizer("the model of a layer").input_ids, tokenizer.chat_template, tokenizer.eos_token_id]
    file = model.folder / STARTS
    return logits.numpy().tobytes(), student.sha256, starts, file.is_file() and sha256_of(file), words


def checkpoint(folder):
    """Return a function that resumes from a checkpoint."""
    from safetensors.torch import load_file

    shapes = {name: tensor.shape for name, tensor in load_file(folder / "trained.safetensors").items()}
    wanted = json.loads((folder / "state.json").read_text())["fingerprint"]

    def read():
        trained = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        kinds = {"adapter": {}, "scales": {}}
        for name, parameter in trained.items():
            kinds["adapter" if "lora_" in name else "scales"][name] = parameter
        used = {kind: tensors for kind, tensors in kinds.items() if tensors}
        optimizer = build_optimizer(OptimConfig(), used, select_runtime("cpu"))
        state = load_checkpoint(folder, trained, optimizer, wanted)
        tensors = [*trained.values(), *(v for s in optimizer.state.values() for v in s.values())]
        return [t.detach().numpy().tobytes() for t in tensors], state

    return read


def logs(run):
    for name, mark in read_object(checkpoints(run / "checkpoints")[-1] / STATE)["logs"].items():
        check_log(run / name, mark)
    return read_metrics(run / "metrics.jsonl", "loss"), read_metrics(run / "evaluations.jsonl")


def spoken(folder):
    runtime = select_runtime("cpu")
    try:
        return open_backend(str(folder), HubConfig(), RunConfig(quiet=True, dtype="float32"), runtime).description
    except ImportError as error:  # llama.cpp is not here; what is refused is refused before
        return str(error)


def marked(folder, mark, name):
    """Return what commands read of a run besides its models: the files that another command asks for, then all."""
    found = []
    if name == "result.json" and (folder / "README.md").is_file():
        found.append(upload_summary(folder, files_to_upload(folder)))  # push
    if name == "scores.json":
        found.append(read_scores(str(folder)))  # export
    if name == "config.yaml" and adapter_folder(str(folder)):
        found.append(read_origin(None, adapter_folder(str(folder))))  # export
    if found:
        return found
    found = [outputs.claim(folder, mark["settings"]["command"], _without(mark["settings"]), False)]
    outputs.files.release(folder)
    return [*found, outputs.files.listed(folder)] if name == outputs.files.LIST else [*found, cli._plain(folder)]


def _without(settings):
    return {name: value for name, value in settings.items() if name != "command"}


def reader(root, file):
    """Return the function that stands for the commands which read a file, None where none does; and the file's kind."""
    inside = file.relative_to(root).parts
    top = root / inside[0]
    if file.name in MARKS:
        mark = json.loads((top / "qat_lora_run.json").read_text())
        return (lambda: marked(top, mark, file.name)), f"run: {file.name}"
    if file.name.endswith(UNREAD):
        return None, "not read"
    if "checkpoints" in inside:
        return checkpoint(file.parent), f"checkpoint: {file.name}"
    if file.suffix == ".jsonl":
        return (lambda: logs(top)), f"log: {file.name}"
    if inside[0] == "gguf":
        return (lambda: spoken(top)), f"gguf: {file.suffix}"
    unit = next((p for p in (file.parent, *file.parents) if (p / "adapter_config.json").is_file()), file.parent)
    if (top / "adapter").is_dir():
        unit = top
    return (
        lambda: opened(unit)
    ), f"{'adapter' if unit != file.parent or file.name[:7] == 'adapter' else 'model'}: " + (
        "tokenizer" if "token" in file.name else file.name
    )


def flip(file, bit):
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def outcome(read, expected, file):
    """Return what became of a damaged file: refused, harmless, SILENT, unnamed or traceback."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            found = read()
    except QatLoraError as error:
        named = file.name in str(error) or file.stem in str(error)
        return "refused" if named and "\n" not in str(error) else f"unnamed: {error}"
    except Exception as error:
        return f"traceback: {type(error).__name__}: {error}"
    if found == expected or file.name == outputs.files.LIST and found[1][1] < expected[1][1]:
        return "harmless"  # a name less: its file is then not the run's, and stays
    return "SILENT"


def flips(root, count, seed, wanted=lambda kind: True):
    """Flip `count` bits, as many in each kind of file as in the others; yield (kind, file, bit, outcome)."""
    kinds = defaultdict(list)
    for file in sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size):
        kinds[reader(root, file)[1]].append(file)
    draw, expected = random.Random(seed), {}
    unread = kinds.pop("not read", [])
    names = sorted(filter(wanted, kinds))
    for i in range(count):
        kind = names[i % len(names)]
        file = draw.choice(kinds[kind])
        read, _ = reader(root, file)
        whole = file.read_bytes()
        if file not in expected:
            expected[file] = read()
        bit = draw.randrange(8 * len(whole))
        try:
            flip(file, bit)
            yield kind, file.relative_to(root).as_posix(), bit, outcome(read, expected[file], file)
        finally:
            file.write_bytes(whole)
    if unread:
        yield "not read", str(len(unread)), 0, "not read"


def counted(found):
    """Return the outcomes by kind of file, and every fault in words."""
    counts, faults = defaultdict(Counter), []
    for kind, file, bit, what in found:
        counts[kind][what.split(":")[0]] += 1
        if what.split(":")[0] not in ("refused", "harmless", "not read"):
            faults.append(f"{file}, bit {bit}: {what}")
    return {kind: dict(by) for kind, by in sorted(counts.items())}, faults


def main(folder, count, seed):
    from toy_paths import Tiny

    root = Path(folder)
    torch.set_num_threads(1)
    make_toy(root, 20)
    seal(root / "teacher")
    work = make(Tiny(root / "teacher", root / "text", root / "held-out"), root / "work")
    kinds, faults = counted(flips(work, count, seed))
    print(json.dumps({"kinds": kinds, "faults": len(faults), "found": faults}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

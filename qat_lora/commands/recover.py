"""`recover`: train a recovery adapter on a student, from a KD cache or a text."""

from pathlib import Path
from typing import Any

import torch

from qat_lora.errors import ConfigError
from qat_lora.export.forms import display_name
from qat_lora.export.gguf import save_lora
from qat_lora.export.gguf_model import architecture
from qat_lora.files import outputs
from qat_lora.files.checksums import checkpoint_sha256
from qat_lora.files.folders import atomic_dir
from qat_lora.files.gguf_header import ADAPTER, GGUF
from qat_lora.layers.convert import add_lora, stored_tensors
from qat_lora.models.adapter import load_starts, save_adapter, starts_sha256
from qat_lora.models.load import CausalLM, copy_tokenizer, load_model, save_with_tensors
from qat_lora.models.student import with_tokenizer
from qat_lora.options import RecoverOptions
from qat_lora.runtime.base import Runtime
from qat_lora.setup.common import check_fits, fetch, run_name, say, text_inputs
from qat_lora.setup.trainable import check_codes, check_made_of, recovery_parts
from qat_lora.setup.training_data import cache_training_data, text_training_data
from qat_lora.setup.training_run import Groups, TrainingRun, by_replicas, complete_run, in_steps, train_student


def recover(options: RecoverOptions, runtime: Runtime) -> Path:
    """Train a recovery adapter from a KD cache or a text; return the run's folder."""
    run, loop = options.run, options.loop
    student = str(options.checkpoint or options.model)
    out = Path(run.out or f"runs/recovery_{run_name(student)}{by_replicas(loop, runtime)}")
    data = cache_training_data(options) if options.uses_cache else None
    fetch(runtime, student, options.hub, "checkpoint" if options.checkpoint else "model")
    model = load_model(student, options.hub, run.dtype, dequantize=True)
    is_gguf = model.folder.suffix == GGUF
    if is_gguf:
        _check_gguf(options, model)
        teacher = None if data is None else data.rows.manifest.fingerprint.teacher
        model = with_tokenizer(model, [options.tokenizer] if options.tokenizer else [model.folder.parent, teacher])
    elif options.tokenizer is not None:
        raise ConfigError(f"tokenizer: {student} has its own; leave it out")
    if data is None:
        data = text_training_data(options, model)
    else:
        check_fits(data.rows, model)
        model = data.with_vocabulary(model)
    if options.checkpoint and options.model and not options.train.train_codes:
        say(run, f"--model {options.model} is not read: the student is --checkpoint {options.checkpoint}")
    train_codes, full = options.train.train_codes > 0, list[CausalLM]()  # dropped before training begins
    check_codes(model, options.train_scales, train_codes)
    if train_codes and options.checkpoint and options.model:
        fetch(runtime, options.model, options.hub)
        full.append(load_model(options.model, options.hub, "float32"))
        check_made_of(full[0], model)
    plan = TrainingRun("recover", in_steps(options, data, runtime), data, runtime, out)
    settings = {
        "base_sha256": checkpoint_sha256(model.folder, None if run.overwrite else outputs.noted(out)),
        "starts_sha256": starts_sha256(model.folder),
        **({"model_sha256": checkpoint_sha256(full[0].folder)} if full else {}),
        **plan.decisive(("head_k", "train_scales", "train_norms", "start", "lora", "train")),
    }
    starts = load_starts(model.folder) if options.start == "auto" else {}
    torch.manual_seed(run.seed)
    add_lora(model.module, options.lora, starts)

    def groups() -> Groups:
        # A frozen base is multiplied in bfloat16 under autocast, so it is formed in it, once.
        dtype = torch.bfloat16 if loop.autocast else model.module.dtype
        near = full.pop() if full else None
        return recovery_parts(model, options.train_scales, options.train_norms, dtype, train_codes, near)

    def announce(groups: Groups) -> str:
        count = sum(tensor.numel() for tensors in groups.values() for tensor in tensors.values())
        begin = "from the quantisation error" if starts else "at zero"
        with_base = ", the adapter goes with a base of its own" if train_codes else ""
        return f"{count:,} numbers train, adapters start {begin}{with_base} · {out}"

    def export(groups: Groups, folder: Path) -> None:
        """Write the student as an adapter folder, at once; what training changed of its base goes into it."""
        base, trained = model.folder, groups["scales"] | groups["block_scales"] | groups["norms"]
        changed = {**trained, **(stored_tensors(model.module) if train_codes else {})}
        with atomic_dir(folder) as draft:
            sha256 = checkpoint_sha256(base)
            if changed:
                sha256 = checkpoint_sha256(save_with_tensors(base, draft / "base", changed))
                base = folder / "base"
            if is_gguf:  # of other engines' bases, `qat-lora export` writes the adapter in their form
                save_lora(model, draft / ADAPTER, display_name(str(base)))
                copy_tokenizer(model.tokenizer_folder, draft)
            save_adapter(model.module, options.lora, draft, base, sha256)

    def work() -> dict[str, Any]:
        return train_student(plan, model, groups, announce, export, settings)

    inputs = [options.checkpoint, options.model, options.kd_cache_dir, *text_inputs(options.text), model.folder]
    done = complete_run(plan, settings, [*inputs, options.tokenizer], work, "adapter")
    if is_gguf:
        say(run, f"llama-server -m {model.folder} --lora {done / 'best' / ADAPTER}")
    return done


def _check_gguf(options: RecoverOptions, model: CausalLM) -> None:
    """Refuse what no adapter of a GGUF file can hold, before anything is trained."""
    if options.train_norms:
        raise ConfigError("train_norms: the norms of a GGUF file stay as they are in it; leave it out")
    architecture(model)

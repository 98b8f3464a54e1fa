"""`recover`: train a recovery adapter on a student, from a KD cache or a text."""

from pathlib import Path
from typing import Any

import torch

from qat_lora.errors import ConfigError
from qat_lora.export.forms import display_name
from qat_lora.export.gguf import save_lora
from qat_lora.export.gguf_model import architecture
from qat_lora.files import outputs
from qat_lora.files.checksums import checkpoint_sha256, sha256_of
from qat_lora.files.folders import atomic_dir
from qat_lora.files.gguf_header import ADAPTER, GGUF
from qat_lora.layers.calibrate.fisher import zeros_in
from qat_lora.layers.convert import add_lora, quant_layers
from qat_lora.models.adapter import STARTS, allocated_ranks, load_starts, save_adapter
from qat_lora.models.copies import copy_tokenizer, save_with_tensors
from qat_lora.models.load import CausalLM, load_model
from qat_lora.models.student import with_tokenizer
from qat_lora.options import RecoverOptions
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.host.signals import stop_signals
from qat_lora.setup import training
from qat_lora.setup.common import check_fits, fetch, keep_dtype, run_name, say, text_inputs
from qat_lora.setup.trainable import check_is_student, check_scales, check_twin, joint_warnings, recovery_parts
from qat_lora.setup.training import TrainingRun, by_replicas, complete_run, in_steps, train_student
from qat_lora.setup.unfinished import Unfinished, remove_pieces
from qat_lora.train.blockwise import BLOCK_LR, BlockTraining, blocks_of, reconstruct
from qat_lora.train.optim import Groups, OptimConfig


def recover(options: RecoverOptions, runtime: Runtime) -> Path:
    """Train a recovery adapter from a KD cache or a text; return the run's folder."""
    run, loop = options.run, options.loop
    student = str(options.checkpoint or options.model)
    out = Path(run.out or f"runs/recovery_{run_name(student)}{by_replicas(loop, runtime)}")
    options = keep_dtype(options, runtime, outputs.settings_of(out, "recover").get("dtype"))
    run = options.run
    data = training.cache_training_data(options) if options.uses_cache else None
    fetch(runtime, student, options.hub, "checkpoint" if options.checkpoint else "model")
    model = load_model(student, options.hub, run.dtype, dequantize=True)
    is_gguf = model.folder.suffix == GGUF
    if is_gguf:  # what no adapter of such a file can hold is refused before anything is trained
        if options.train_norms:
            raise ConfigError("train_norms: the norms of a GGUF file stay as they are in it; leave it out")
        architecture(model)
        teacher = None if data is None else data.rows.manifest.fingerprint.teacher
        model = with_tokenizer(model, [options.tokenizer] if options.tokenizer else [model.folder.parent, teacher])
    elif options.tokenizer is not None:
        raise ConfigError(f"tokenizer: {student} has its own; leave it out")
    if data is None:
        data = training.text_training_data(options, model)
    else:
        check_fits(data.rows, model)
        check_is_student(model, student, data.rows.manifest.fingerprint)
        model = data.with_vocabulary(model)
    if options.checkpoint and options.model and not options.blockwise:
        say(run, f"--model {options.model} is not read: the student is --checkpoint {options.checkpoint}")
    check_scales(model, options.train_scales)
    plan = TrainingRun("recover", in_steps(options, data, runtime), data, runtime, out)
    settings = {
        "base_sha256": checkpoint_sha256(model.folder),
        "starts_sha256": sha256_of(model.folder / STARTS) if (model.folder / STARTS).is_file() else None,
        **plan.decisive(("head_k", "train_scales", "train_norms", "start", "lora", "train")),
    }
    full = None
    if options.blockwise:
        if runtime.replicas > 1 or runtime.layer_scan() is not None:
            needs = f"one process on a CPU or GPU trains block by block, and this is {runtime.description}"
            raise ConfigError(f"blockwise: {needs}; leave it out")
        full = load_model(str(options.model), options.hub, "stored")
        check_twin(model, full)
        settings |= {"blockwise": True, "model_sha256": checkpoint_sha256(full.folder)}
    starts = load_starts(model.folder) if options.start == "auto" else {}
    torch.manual_seed(run.seed)
    ranks = None if options.lora.recovery_r else allocated_ranks(model.folder)
    adapters = add_lora(model.module, options.lora, starts, ranks)
    given = {name: len(layer.lora_A) for name, layer in adapters.items()}
    for warning in joint_warnings(model.folder, given, bool(starts)):
        say(run, warning)

    # A frozen base is multiplied in bfloat16 under autocast, so it is formed in it, once.
    dtype = torch.bfloat16 if loop.autocast else model.module.dtype

    def groups() -> Groups:
        last = f"{blocks_of(model.module)}.{model.config.num_hidden_layers - 1}" if options.blockwise else ""
        return recovery_parts(model, options.train_scales, options.train_norms, dtype, last)

    def announce(groups: Groups) -> str:
        n = sum(tensor.numel() for tensors in groups.values() for tensor in tensors.values())
        return f"{n:,} numbers train, adapters start {'from the quantisation error' if starts else 'at zero'} · {out}"

    def export(groups: Groups, folder: Path) -> None:
        """Write the student as an adapter folder, at once; what training changed of its base goes into it."""
        base, changed = model.folder, groups["scales"] | groups["block_scales"] | groups["norms"]
        if options.blockwise and options.train_scales:  # those of the layers before the last are not in its groups
            scales = {name: layer.named_scales() for name, layer in quant_layers(model.module).items()}
            changed |= {f"{name}.{part}": scale for name, own in scales.items() for part, scale in own.items()}
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
        shares = {"blocks": _block_by_block(plan, model, full, dtype)} if full else {}
        return train_student(plan, model, groups, announce, export, settings) | shares

    inputs = [options.checkpoint, options.model, options.kd_cache_dir, *text_inputs(options.text), model.folder]
    done = complete_run(plan, settings, [*inputs, options.tokenizer], work, "adapter")
    if options.blockwise:
        remove_pieces(out)
    if is_gguf:
        say(run, f"llama-server -m {model.folder} --lora {done / 'best' / ADAPTER}")
    return done


def _block_by_block(plan: TrainingRun, model: CausalLM, full: CausalLM, dtype: torch.dtype) -> list[dict[str, float]]:
    """Train the adapters of all decoder layers but the last, whose output is logits, each on the rows of the run."""
    options, runtime, out, rows = plan.options, plan.runtime, plan.out, plan.data.rows
    assert isinstance(options, RecoverOptions)
    loop, run, layers = options.loop, options.run, model.config.num_hidden_layers - 1
    steps = loop.max_steps * loop.accumulation(1)
    if runtime.attention == "tiled":
        model.tile_attention()
        full.tile_attention()
    runtime.place(model.module)
    states = 16 * steps * loop.batch_size * rows.manifest.fingerprint.length * model.config.hidden_size
    say(run, f"block by block: {layers} layers of {steps} steps, {states / 1e9:.3g} GB of hidden states in {out}")

    def prepare(name: str, _block: Any, _full: Any) -> Groups:
        return recovery_parts(model, options.train_scales, False, dtype, name)

    with stop_signals() as stopped:
        work = Unfinished(out, "layers", layers, stopped)
        whole = rows.batches(0, steps, loop.batch_size, seed=run.seed)
        batches = [{name: batch[name] for name in ("input_ids", "document_ids")} for batch in whole]
        how = prepare, OptimConfig(lr=BLOCK_LR), steps, zeros_in(out), runtime, work, run.quiet
        shares = reconstruct(model, full, batches, BlockTraining(*how), leave=1)
    say(run, "error of each layer's output: " + ", ".join("{before:.4f} -> {after:.4f}".format(**x) for x in shares))
    return shares

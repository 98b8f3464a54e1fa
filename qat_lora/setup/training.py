"""One training run: what it learns from and is measured on, and the way from a claimed folder to a complete one.

A KD cache and a text alone serve batches in the same order and shapes, so the loop knows no difference. What differs is
the objective (a text has no teacher, so only the cross-entropy is left), the number that evaluations report, and what
identifies the data. `recover` and `qat` differ in what trains and is exported. The folder is claimed by the settings
that decide the result: the same command goes on, another is refused. Only the main process writes.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from qat_lora.cache.format.codec import OPTIONAL
from qat_lora.cache.read.dataset import KDCacheDataset, LaterConfig, MixedCaches
from qat_lora.config import save_yaml, to_dict
from qat_lora.data.framing import describe_packing
from qat_lora.data.packing import ENCODERS, TextDataset, make_encoder, pack_rows, take_eval
from qat_lora.data.sources import describe_source, open_documents
from qat_lora.errors import CacheError, ConfigError
from qat_lora.evaluate.report import save_json
from qat_lora.files import outputs
from qat_lora.layers.stacked import apart, parameters_at, stack_layers, trained_paths
from qat_lora.losses.objective import OPTIONAL_ARRAYS, ObjectiveConfig, choose_estimator, objective_loss, wanted
from qat_lora.models.load import DTYPES, CausalLM, load_tokenizer, tokenizer_sha256
from qat_lora.options import QatOptions, RecoverOptions, RunConfig
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.host.machine import large_tensors_apart
from qat_lora.runtime.launch.select import status_line
from qat_lora.runtime.sharded import sharded_bytes
from qat_lora.setup.common import fit_attention, fits_positions, picture, say
from qat_lora.train.callbacks import LoopHooks, RunSettings
from qat_lora.train.loop import LoopConfig, train
from qat_lora.train.metrics import plot_curve
from qat_lora.train.optim import Groups, TrainState
from qat_lora.train.step import PreparedObjective, remember
from qat_lora.types import LMHead

MANY_PASSES = 20  # over the same rows, from which on a run says so
T = TypeVar("T", RecoverOptions, QatOptions)


@dataclass(frozen=True)
class TrainingData:
    """Training rows, evaluation rows, and what is minimised on them."""

    rows: Any  # of training: `KDCacheDataset` or `TextDataset`
    evaluation: Any  # rows kept apart, None where there are none
    objective: ObjectiveConfig
    identity: dict[str, Any]  # what tells this data from other data, for the run's settings

    @property
    def metric(self) -> str:
        """What evaluations report: `kl` to the teacher, where the cache lacks it `kl_bound`, or `nll` of the text."""
        if isinstance(self.rows, TextDataset):
            return "nll"
        held = self.rows.fingerprint.contents
        exact = self.objective.is_dense or not held.top_k or held.tail_entropy
        return "kl" if exact else "kl_bound"

    def with_vocabulary(self, model: CausalLM) -> CausalLM:
        """Return the model with the vocabulary of the cache, without padded rows."""
        return model.with_vocabulary(self.rows.manifest.fingerprint.vocab_size)


def cache_training_data(options: RecoverOptions | QatOptions) -> TrainingData:
    """Open the KD cache of a run; CacheError: there is none, it is damaged, or lacks what the objective reads."""
    objective, path = options.objective, str(options.kd_cache_dir)
    if isinstance(options, RecoverOptions) and options.learn == "kd+ce" and not objective.ce_weight:
        objective = replace(objective, ce_weight=1.0)
    temperatures, checked = objective.cached_temperatures, options.verify_rows
    later = options.later if isinstance(options, RecoverOptions) else LaterConfig()
    rows = MixedCaches(path, options.preload, options.head_k, temperatures=temperatures, verify_rows=checked)
    rows.join(later, options.loop.until_step or options.loop.max_steps)
    if objective.estimator == "auto" and rows.fingerprint.contents.entropy:  # of draws alone
        objective = replace(objective, estimator="sampled")
    check_arrays(rows, objective)
    kept = None
    if rows.manifest.rows("eval"):
        held = rows.fingerprint.contents
        k = None if held.tail_entropy else options.head_k  # tail draws go with all entries only
        kept = KDCacheDataset(path, k=k, split="eval", verify_rows=checked)
        # Draws are served where they give the KL.
        drawn = {"draw_ids": held.entropy, "tail_draw_ids": held.tail_entropy}
        kept.optional = ["teacher_hidden", *(name for name, gives_kl in drawn.items() if gives_kl)]
    identity = {"cache": rows.manifest.fingerprint.sha256, **(to_dict(later) if later.later_caches else {})}
    return TrainingData(rows, kept, objective, identity)


def check_arrays(dataset: KDCacheDataset, objective: ObjectiveConfig) -> None:
    """Let a cache serve what the objective and the log's KL read and nothing else.

    CacheError names an array or draws that the objective needs and the cache lacks.
    """
    if objective.topk_user and not dataset.k:
        fits = "sampled" if dataset.fingerprint.contents.entropy else "full"
        advice = f"give --estimator {fits}" if objective.topk_user.startswith("estimator") else "set it to 0"
        lack = "needs the teacher's likeliest tokens, and the KD cache was built with --top-k 0"
        raise CacheError(f"top_k: {objective.topk_user} {lack}; {advice}, or build one with --top-k 64")
    if objective.kd_weight == 0 or choose_estimator(objective, OPTIONAL) != "hybrid":
        dataset.optional = [name for name in OPTIONAL if name != "tail_draw_ids"]  # refused behind --head-k
    held = {name: torch.empty(1, 1, *array.shape[2:]) for name, array in dataset.rows([0]).items()}
    objective = replace(objective, estimator=choose_estimator(objective, held))
    own = OPTIONAL_ARRAYS.get(objective.estimator, ()) if objective.kd_weight > 0 else ()
    for name in objective.optional_arrays:
        user = f"estimator {objective.estimator}" if name in own else "hidden_weight"
        if dataset.fingerprint.contents.lzma and name in held and objective.draws not in (None, held[name].shape[-1]):
            raise CacheError(f"draws: {objective.draws} of stratified draws are biased; allowed: all, so leave it out")
        wanted(held, name, user, objective.draws if name.endswith("draw_ids") else None)
    dataset.optional = objective.optional_arrays
    contents = dataset.fingerprint.contents
    measured_by_draws = contents.tail_entropy and dataset.k == contents.top_k
    if measured_by_draws and objective.reads_logits and not objective.is_dense:
        others = (name for name in dataset.optional if name != "tail_draw_ids")
        dataset.optional = ("tail_draw_ids", *others)


def text_training_data(options: RecoverOptions, model: CausalLM) -> TrainingData:
    """Pack a run's text into rows, whole documents kept apart for evaluation; TextError: too little, or no chats."""
    fits_positions(model, options.length)
    tokenizer = load_tokenizer(model.tokenizer_folder, options.hub.trust_remote_code)
    encode = ENCODERS[options.learn](make_encoder(tokenizer))
    documents = partial(open_documents, options.text)
    kept, first = take_eval(documents, encode, options.length, options.eval_rows)
    objective = replace(options.objective, ce_weight=options.objective.ce_weight or 1.0, kd_weight=0.0)
    objective = replace(objective, hard_top1_weight=0.0, hard_top1_end=None, hidden_weight=0.0)
    identity = {
        "text": describe_source(options.text),
        "packing": describe_packing(tokenizer),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        **{name: getattr(options, name) for name in ("learn", "length", "num_rows", "eval_rows")},
    }
    rows = TextDataset(pack_rows(documents(first), encode, options.length), options.num_rows)
    return TrainingData(rows, TextDataset(kept) if kept else None, objective, identity)


def prepare(
    objective: ObjectiveConfig, dataset: Any, model: CausalLM, loop: LoopConfig, seed: int, runtime: Runtime
) -> PreparedObjective:
    """Return what `train` takes of a model before step 1; ConfigError: too many anchor rows, or no such walk."""
    if objective.loss_walk == "auto":
        objective = replace(objective, loss_walk=runtime.loss_walk)
    objective = replace(objective, loss_chunk_mb=runtime.loss_chunk_mb(objective.loss_chunk_mb))
    if objective.loss_walk == "kernel" != runtime.loss_walk:
        needs = f"needs Triton and an NVIDIA GPU, A100 or later, and this is {runtime.description}"
        raise ConfigError(f"loss_walk: kernel {needs}; give auto, positions or vocabulary")
    arrays = dataset.rows([0])
    if objective.kd_weight > 0:
        objective = replace(objective, estimator=choose_estimator(objective, arrays))
    teacher_lm_head = anchor = None
    no_topk = isinstance(dataset, KDCacheDataset) and not dataset.k  # then evaluations need the teacher's output head
    if (no_topk and "entropy" not in arrays) or (objective.kd_weight > 0 and objective.estimator == "full"):
        held = dataset.teacher_lm_head()
        bias_V = None if held.bias_V is None else held.bias_V.to(runtime.device)
        teacher_lm_head = replace(held, weight_VH=held.weight_VH.to(runtime.device), bias_V=bias_V)
    if objective.anchor_weight > 0:
        if objective.anchor_samples > len(dataset):
            most = f"more than the {len(dataset)} that there are to train on; give at most {len(dataset)}"
            raise ConfigError(f"anchor_samples: {objective.anchor_samples} rows are {most}")
        was_training = model.module.training
        model.module.eval()
        with runtime.autocast(torch.bfloat16 if loop.autocast else torch.float32):
            anchor = remember(model, dataset, objective, loop.batch_size, seed, runtime)
        model.module.train(was_training)
    return PreparedObjective(objective, teacher_lm_head, objective.kl_name(arrays), anchor)


def evaluation_objective(objective: ObjectiveConfig, teacher_lm_head: LMHead | None) -> ObjectiveConfig:
    """Return the KL at temperature 1 that evaluations report: exact with the teacher's head, else `ghost`.

    Beside `ghost` stands the unbiased `kl`, where batches hold `tail_entropy`; it is then what is reported.
    """
    distance = ObjectiveConfig("ghost" if teacher_lm_head is None else "full")
    return replace(distance, loss_chunk_mb=objective.loss_chunk_mb, loss_walk=objective.loss_walk)


def evaluation(
    data: TrainingData, model: CausalLM, loop: LoopConfig, runtime: Runtime, teacher_lm_head: LMHead | None = None
) -> Callable[[], float] | None:
    """Return what measures the mean loss per token on rows kept apart, or None; masked rows fill up its last batch."""
    rows = data.evaluation
    if rows is None:
        return None
    objective = evaluation_objective(data.objective, teacher_lm_head)
    if isinstance(rows, KDCacheDataset) and rows.fingerprint.contents.entropy:
        objective = replace(objective, estimator="sampled")
    if data.metric == "nll":
        objective = replace(objective, kd_weight=0.0, ce_weight=1.0)
    batch_rows = loop.batch_size * runtime.replicas
    # Made once, and two: zeros made in every evaluation, or one tensor in both places, are more graphs on XLA.
    no_loss, no_tokens = (torch.zeros((), device=runtime.device) for _ in range(2))
    share = {"replica": runtime.rank, "replicas": runtime.processes}
    batches = partial(rows.batches, 0, rows.steps_per_epoch(batch_rows), batch_rows // runtime.processes, **share)

    def evaluate() -> float:
        was_training = model.module.training
        model.module.eval()
        total, count = no_loss, no_tokens
        with torch.no_grad():
            for batch in runtime.feed(batches()):
                with runtime.autocast(torch.bfloat16 if loop.autocast else torch.float32):
                    hidden = model.hidden(batch["input_ids"], batch["document_ids"])
                    result = objective_loss(hidden, model.lm_head(), batch, objective, teacher_lm_head=teacher_lm_head)
                total, count = total + result.terms.get("kl", result.loss_sum), count + result.token_count
                runtime.mark_step()
            if runtime.replicas > 1:
                total, count = runtime.all_reduce_mean(torch.stack([total, count])).unbind()
        model.module.train(was_training)
        return float(total) / max(float(count), 1.0)

    return evaluate


def in_steps(options: T, data: TrainingData, runtime: Runtime) -> T:
    """Return the options with the steps that their epochs mean; say where steps are many passes over few rows."""
    loop = options.loop.for_rows(len(data.rows), runtime.replicas)
    step_rows = loop.step_rows(runtime.replicas)
    passes = loop.max_steps / data.rows.steps_per_epoch(step_rows)
    if passes > MANY_PASSES and loop.epochs is None:
        say(options.run, f"{loop.max_steps:,} steps are {passes:,.0f} passes over all rows; --epochs sets their number")
    if len(data.rows) < step_rows:
        masked = f"a step has {step_rows:,} rows, and only {len(data.rows):,} are there: the rest are masked"
        say(options.run, f"{masked}; give a smaller --batch-size or --accumulation-steps")
    return replace(options, loop=loop)


def by_replicas(loop: LoopConfig, runtime: Runtime) -> str:
    """Return the end of a default name for a run whose steps grow with the number of replicas: it is another run."""
    return f"_x{runtime.replicas}" if runtime.replicas > 1 and loop.global_batch_size is None else ""


@dataclass(frozen=True)
class TrainingRun:
    """What all steps of a run share."""

    command: str
    options: RecoverOptions | QatOptions
    data: TrainingData
    runtime: Runtime
    out: Path

    @property
    def batch_rows(self) -> int:
        """Rows of an optimizer step over all replicas."""
        return self.options.loop.step_rows(self.runtime.replicas)

    def decisive(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the settings that decide the result of any training run, and the options `keys` of this one's."""
        loop, run, objective = self.options.loop, self.options.run, to_dict(self.data.objective)
        plain = to_dict(self.options)
        for name in ("loss_chunk_mb", "loss_walk"):  # who was told to lower the chunk goes on where the run was
            del objective[name]
        found = self.data.identity | {"objective": objective, "dtype": run.dtype, "seed": run.seed}
        found |= {name: getattr(loop, name) for name in ("autocast", "max_steps", "early_stop")}
        # Micro-batches of other sizes make the same step of other rows, but not of these: each step has one.
        anchor_rows = loop.batch_size * self.runtime.replicas if objective["anchor_weight"] > 0 else None
        found |= {"anchor_batch_rows": anchor_rows, "global_batch_rows": self.batch_rows}
        return found | {key: plain[key] for key in keys}


def complete_run(
    plan: TrainingRun, settings: dict[str, Any], inputs: Sequence[Any], work: Callable[[], dict[str, Any]], what: str
) -> Path:
    """Claim the run's folder by its `settings`, sparing `inputs`, do its work, complete and return it."""
    run, loop, out, runtime = plan.options.run, plan.options.loop, plan.out, plan.runtime
    with outputs.lock_dir(out) if runtime.is_main else contextlib.nullcontext():
        claim = partial(outputs.claim, out, plan.command, settings, run.overwrite, inputs)
        if runtime.agree(runtime.is_main and claim()):  # what it raises in the main process ends all
            say(run, f"{out} is complete already")
            return out
        if runtime.is_main:
            save_yaml(plan.options, out / "config.yaml")
        result = work()
        if result["step"] == loop.until_step != loop.max_steps:
            say(run, f"stopped after step {loop.until_step} of {loop.max_steps}, as --until-step says: {out / 'last'}")
            return out
        runtime.barrier("before_final_save")
        if runtime.is_main:
            save_json(result, out / "result.json")
            picture(run, lambda: plot_curve(out / "metrics.jsonl", out / "evaluations.jsonl", out / "curve.png"))
            outputs.complete(out)
    best, stopped = result["best_step"], " (stopped early)" if result["stopped_early"] else ""
    kept = f"last {what} (no evaluation to choose by)" if best is None else f"best {what} (step {best})"
    say(run, f"{result['step']} steps{stopped}, {kept} in {out / 'best'}")
    return out


def train_student(
    plan: TrainingRun,
    model: CausalLM,
    groups: Callable[[], Groups],
    announce: Callable[[Groups], str],
    export: Callable[[Groups, Path], None],
    fingerprint: dict[str, Any],
) -> dict[str, Any]:
    """Place the student, prepare what its objective needs, and run the loop; return its result.

    `groups` puts the student into its training state and returns what trains; resumed runs share the `fingerprint`.
    """
    run, loop, runtime, data = plan.options.run, plan.options.loop, plan.runtime, plan.data
    say(run, status_line(runtime, DTYPES[run.dtype], plan.batch_rows))
    fit_attention(model, runtime)
    paths = place_student(model, groups, runtime, run)
    state = TrainState(model, parameters_at(model.module, paths))
    if loop.gradient_checkpointing:
        model.checkpoint_gradients(runtime.checkpoint_function())
    runtime.shard_frozen(model.module)
    runtime.barrier("before_warmup")
    say(run, announce(state.groups))
    prepared = prepare(data.objective, data.rows, model, loop, run.seed, runtime)
    measured = replace(data, objective=prepared.objective)

    def export_as(name: str) -> None:
        with apart(model.module):
            export(parameters_at(model.module, paths), plan.out / name)

    evaluate = evaluation(measured, model, loop, runtime, prepared.teacher_lm_head)
    hooks = LoopHooks(evaluate, export_as, data.metric)
    settings = RunSettings(plan.out, run.seed, fingerprint, run.quiet)
    # Freed tensors of 1 to 32 MB stay in pieces in glibc's heap: a third of a checkpointed step's memory.
    with large_tensors_apart() if loop.gradient_checkpointing else contextlib.nullcontext():
        return train(state, data.rows, prepared, plan.options.train, loop, hooks, runtime, settings)


def place_student(
    model: CausalLM, groups: Callable[[], Groups], runtime: Runtime, run: RunConfig
) -> dict[str, dict[str, str]]:
    """Place a student in its training state, its layers stacked where the runtime loops over them; return what trains.

    On the host: a device would hold both forms, and a TPU multiply low-rank scales in bfloat16, unlike the export.
    """
    scan = runtime.layer_scan()
    if scan is None and not runtime.shard_base:
        runtime.place(model.module)
        return trained_paths(model.module, groups())
    paths = trained_paths(model.module, groups())
    stacked, layers = stack_layers(model.module, scan) if scan is not None else (0, 0)
    if odd := layers - stacked:
        say(run, f"{odd} of {layers} layers differ from their neighbours or have dropout: traced one by one")
    runtime.place(model.module)
    if runtime.shard_base:
        here, whole = sharded_bytes(model.module)
        say(run, f"frozen weights of the layers: {here:,} of {whole:,} bytes in each process")
    return paths

"""The training objective: a weighted sum of named terms, from one config and one pass over the logits.

`kd` is the distance to the cached teacher, `ce` the cross-entropy with the text's next token, `hard_top1` that with the
teacher's top-1 token, `hidden` the relative squared error of the last hidden states. Only `kd` is softened, so only it
carries T². `anchor`, the distance to the student before training, has rows of its own: `train/step.py` runs it as a
micro-batch. The config alone decides which terms exist, and their weights at a step come in separately: a term that
disappeared once its weight had annealed to 0 would change the compiled graph.

It also gives the KL at T = 1 for the log, the distance that evaluations report, whatever is minimised. It is `kl` only
where it is that of the whole vocabulary: by `full`, or unbiased by draws with the teacher's entropy on what they stand
for, which the cache holds as one number a row (`entropy` of draws alone, `tail_entropy` of draws from the tail). Where
there is neither, it is the bound of `ghost` and is called `kl_bound`: at a real vocabulary, half of the KL.

A sparse teacher is only correct with the mass of its tail at the same temperature, 1 - Σ_topK exp(z/T)/Z_T, which only
the cache's builder saw: a temperature that the batch does not carry is refused. Draws are right at T = 1 only.
"""

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from qat_lora.config import HELP, option, settings
from qat_lora.errors import CacheError, ConfigError
from qat_lora.losses import estimators
from qat_lora.losses.estimators import DenseTerm, Term, TopKTerm
from qat_lora.losses.fused.gradients import lm_head_logits, real_vocabulary
from qat_lora.losses.fused.op import CHUNK_BYTES, LossSum, fused_linear_kd
from qat_lora.types import Batch, LMHead, LossWalk, SparseTeacher, temperature_key

EstimatorName = Literal[
    "auto", "ghost", "renorm", "reverse", "jsd", "skew", "skew_reverse", "hybrid", "sampled", "full"
]
"""`auto`: `hybrid` (better at every K, docs/numerics.md) where the cache has draws from the tail, else `ghost`."""
OPTIONAL_ARRAYS = {"hybrid": ("tail_draw_ids",), "sampled": ("draw_ids",), "full": ("teacher_hidden",)}
"""Keys of a batch that an estimator needs beyond top K and tail mass; a cache has them on request only."""
KL_NAMES = ("kl", "kl_bound")  # of the KL to the teacher at T = 1, and of a number that lies below it
_BUILD_FLAGS = {"tail_draw_ids": "--tail-draws 8", "draw_ids": "--draws 32", "teacher_hidden": "--hidden"}

_weight = functools.partial(option, min=0)


@settings
class ObjectiveConfig:
    """What a recovery run minimises."""

    estimator: EstimatorName = option("auto", HELP["estimator"])
    mixture: float | None = option(None, HELP["mixture"], above=0, below=1)
    draws: int | None = option(None, HELP["draws"], unit="draws", min=1)
    temperature: float = option(1.0, "softening of student and teacher; the cache must be built with it", above=0)
    temperature_schedule: tuple[float, ...] = option((), HELP["temperature_schedule"])
    temperature_end: float | None = option(None, HELP["temperature_end"], above=0)
    kd_weight: float = _weight(1.0, "weight of the distance to the cached teacher")
    ce_weight: float = _weight(0.0, "weight of the cross-entropy with the text's next token")
    hard_top1_weight: float = _weight(0.0, "weight of the cross-entropy with the teacher's likeliest token, at first")
    hard_top1_end: float | None = _weight(None, "that weight at the end of training, linear in between; none: constant")
    hidden_weight: float = _weight(0.0, "weight of the relative squared error of the last hidden states")
    anchor_weight: float = _weight(0.0, HELP["anchor_weight"], alias="anchor_kl_weight")
    anchor_samples: int = option(32, "training rows on which that student is remembered", unit="rows", min=1)
    loss_chunk_mb: int | None = option(None, HELP["loss_chunk_mb"], unit="MiB", min=1)
    loss_walk: Literal["auto", LossWalk] = option("auto", HELP["loss_walk"])

    def __post_init__(self) -> None:
        if self.temperature_schedule and (self.temperature != 1.0 or min(self.temperature_schedule) <= 0):
            what = ",".join(f"{t:g}" for t in self.temperature_schedule)
            raise ConfigError(f"temperature_schedule: {what}; give numbers above 0, and leave --temperature out")
        if self.temperature_end is not None and (self.estimator != "full" or self.temperature_schedule):
            what = "a cache holds the teacher at some temperatures, and only estimator full makes it at any"
            remedy = "give --estimator full (cache build --hidden) and no schedule, or --temperature-schedule alone"
            raise ConfigError(f"temperature_end: {what}; {remedy}")
        if self.estimator in ("hybrid", "sampled") and {*self.temperatures} != {1.0}:
            given = ",".join(f"{t:g}" for t in self.temperatures)
            what = f"{given} does not go with estimator {self.estimator}, whose draws are at temperature 1"
            raise ConfigError(f"temperature: {what}; give --temperature 1, or --estimator ghost or full")
        for name, users in {"mixture": tuple(estimators.MIXTURES), "draws": ("hybrid", "sampled")}.items():
            if getattr(self, name) is not None and self.estimator not in users:
                what = f"for estimators {', '.join(users)} only, and it is {self.estimator}"
                raise ConfigError(f"{name}: {what}; leave it out, or name one")
        if not self.weights_at(0.0).keys() - {"anchor"}:
            what = "all are 0, which leaves nothing to learn"
            raise ConfigError(f"kd_weight, ce_weight, hard_top1_weight, hidden_weight: {what}; set one above 0")

    @property
    def optional_arrays(self) -> tuple[str, ...]:
        """Keys of a batch that these terms need and that a cache has on request only."""
        names = OPTIONAL_ARRAYS.get(self.estimator, ()) if self.kd_weight > 0 else ()
        return (*names, *(("teacher_hidden",) if self.hidden_weight > 0 and "teacher_hidden" not in names else ()))

    @property
    def cached_temperatures(self) -> tuple[float, ...]:
        """Temperatures whose normalisers are read: 1 for evaluations, and its own; the exact KL makes its own."""
        return tuple(sorted({1.0, *self.temperatures})) if self.kd_weight > 0 and self.estimator != "full" else (1.0,)

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures of a run, in turn."""
        return self.temperature_schedule or (self.temperature,)

    def at(self, progress: float) -> "ObjectiveConfig":
        """Return the objective at a progress of training from 0 to 1, with one temperature."""
        if not self.temperature_schedule:
            return self
        turn = min(int(progress * len(self.temperatures)), len(self.temperatures) - 1)
        return replace(self, temperature=self.temperatures[turn], temperature_schedule=())

    @property
    def loss_chunk_bytes(self) -> int:
        """Bytes of float32 logits that the loss holds at once; a CPU's until the device was asked."""
        return CHUNK_BYTES if self.loss_chunk_mb is None else self.loss_chunk_mb * 2**20

    @property
    def is_dense(self) -> bool:
        """Whether the term `kd` is the exact KL over the vocabulary."""
        return self.estimator == "full" and self.kd_weight > 0

    @property
    def reads_logits(self) -> bool:
        """Whether a term reads the student's logits, beside which a KL can be measured."""
        return bool(self.weights_at(0.0).keys() & {"kd", "ce", "hard_top1"})

    def kl_name(self, arrays: Container[str]) -> Literal["kl", "kl_bound"] | None:
        """Return what `objective_loss` gives for batches with these arrays: the `kl`, a bound of it, or neither."""
        if self.is_dense or (self.kd_weight > 0 and "entropy" in arrays):
            return "kl"
        if not (self.reads_logits and "head_ids" in arrays and "lse" in arrays):
            return None
        return "kl" if "tail_entropy" in arrays else "kl_bound"

    @property
    def topk_user(self) -> str | None:
        """The setting of a term that reads the teacher's top K; None where none does."""
        if self.kd_weight > 0 and self.estimator not in ("sampled", "full"):
            return f"estimator {self.estimator}"
        return "hard_top1_weight" if "hard_top1" in self.weights_at(0.0) else None

    def weights_at(self, progress: float) -> dict[str, float]:
        """Return the weight of every term at a progress of training from 0 to 1; same names at any progress."""
        start = self.hard_top1_weight
        end = start if self.hard_top1_end is None else self.hard_top1_end
        largest = {name: getattr(self, f"{name}_weight") for name in ("kd", "ce", "hard_top1", "hidden", "anchor")}
        largest["hard_top1"] = max(start, end)
        weights = largest | {"hard_top1": start + (end - start) * min(max(progress, 0.0), 1.0)}
        return {name: weight for name, weight in weights.items() if largest[name] > 0}

    def numbers_at(self, progress: float) -> dict[str, float]:
        """Return what a step reads as data: its weights and, where the temperature moves on at every step, `T`."""
        if self.temperature_end is None:
            return self.weights_at(progress)
        # T(p) = T_0 + (T_1 - T_0) p. Trials of `--lr auto` measure one step after their end, where p is above 1.
        temperature = self.temperature + (self.temperature_end - self.temperature) * min(max(progress, 0.0), 1.0)
        return self.weights_at(progress) | {"T": temperature}


def weight_tensors(weights: Mapping[str, float], send: Callable[[Sequence[float]], Tensor]) -> dict[str, Tensor]:
    """Return weights as data on a device, tensors of one entry; `send` is `Runtime.numbers`.

    PyTorch/XLA compiles numbers and 0-d tensors of 0 or 1 into graphs and merges equal ones, so annealing recompiles.
    """
    return {name: send([value]) for name, value in weights.items()}


def objective_loss(
    hidden_BLH: Tensor,
    lm_head: LMHead,
    batch: Batch,
    config: ObjectiveConfig,
    weights: Mapping[str, float | Tensor] | None = None,
    teacher_lm_head: LMHead | None = None,
) -> LossSum:
    """Return the objective of a micro-batch, added up over the positions that its `target_mask` keeps.

    Shifted here, once: position p of a row has seen tokens 0..p and is scored on token p+1. With `weights` in a batch,
    sums are Σ w · loss, the count Σ w. The argument `weights` is `numbers_at` this step, or `weight_tensors`; by
    default those at the start. `anchor`, not for this batch, is left out; `teacher_lm_head` is for `full`.

    CacheError: the batch lacks the temperature, or an array that a term needs; names the build flag.
    """
    names = config.weights_at(0.0)
    numbers = weights or config.numbers_at(0.0)
    weights = {name: w.reshape(()) if isinstance(w, Tensor) else w for name, w in numbers.items()}
    if config.topk_user and "head_ids" not in batch:
        what = f"{config.topk_user} needs the teacher's likeliest tokens, and the batch holds none"
        remedy = "train from a KD cache built with --top-k 1 or more, or set only ce_weight above 0"
        raise CacheError(f"head_ids: {what}; {remedy}")
    hidden_NH = hidden_BLH[:, :-1].reshape(-1, hidden_BLH.shape[-1])
    mask_N = batch["target_mask"].reshape(-1)
    if "weights" in batch:
        mask_N = mask_N * batch["weights"].reshape(-1)
    terms: list[Term] = []
    if "kd" in names:
        terms += _kd_terms(batch, config, weights, teacher_lm_head)
    if "ce" in names:
        terms.append(estimators.label_term(batch["input_ids"][:, 1:].reshape(-1), weights["ce"], "ce"))
    if "hard_top1" in names:
        terms.append(estimators.label_term(batch["head_ids"][..., 0].reshape(-1), weights["hard_top1"], "hard_top1"))
    kl_name = config.kl_name(batch)
    kd_is_it = kl_name is not None and _kd_is_kl(config, batch)
    if kl_name is not None and not kd_is_it:
        terms.append(_kl_term(terms[0], batch, kl_name))
    parts: list[LossSum] = []
    if terms:
        walk = "positions" if config.loss_walk == "auto" else config.loss_walk
        size, rows = config.loss_chunk_bytes, len(hidden_BLH)
        parts.append(fused_linear_kd(hidden_NH, lm_head, terms, mask_N, chunk_bytes=size, walk=walk, rows=rows))
    if "hidden" in names:
        teacher_NH = wanted(batch, "teacher_hidden", "hidden_weight")
        if teacher_NH.shape != hidden_NH.shape:
            what = f"the teacher's hidden states are {teacher_NH.shape[-1]} wide, the student's {hidden_NH.shape[-1]}"
            raise ConfigError(f"hidden_weight: {what}; only equal widths can be compared, so set it to 0")
        error_sum, count = estimators.hidden_error_sum(hidden_NH, teacher_NH, mask_N)
        parts.append(LossSum(error_sum * weights["hidden"], count, {"hidden": error_sum.detach()}))
    loss_sum = parts[0].loss_sum if len(parts) == 1 else parts[0].loss_sum + parts[1].loss_sum
    by_name = {name: x for part in parts for name, x in part.terms.items()}
    if kl_name is not None and kd_is_it:
        by_name[kl_name] = by_name["kd"]
    if kl_name == "kl" and not config.is_dense:  # of draws, which lack the teacher's entropy
        entropy_B1 = batch["entropy"] if "entropy" in batch else batch["tail_entropy"]
        counts_B1 = mask_N.reshape(len(hidden_BLH), -1).sum(-1, True)
        by_name["kl"] = by_name["kl"] - (counts_B1 * entropy_B1).sum()
    return LossSum(loss_sum, parts[0].token_count, by_name)


def _kd_is_kl(config: ObjectiveConfig, batch: Batch) -> bool:
    """Return whether the term `kd` is what the log gives as the KL or its bound, but for the teacher's entropy."""
    if config.kd_weight == 0 or config.temperature != 1.0 or config.temperature_end is not None:
        return False
    if config.is_dense or "entropy" in batch:
        return True
    estimator = choose_estimator(config, batch)
    if "tail_entropy" not in batch:
        return estimator == "ghost"
    # With the first of the draws alone it would be unbiased too, but vary more: the entropy is that of all.
    return estimator == "hybrid" and config.draws in (None, batch["tail_draw_ids"].shape[-1])


def _kl_term(first: Term, batch: Batch, name: Literal["kl", "kl_bound"]) -> Term:
    """Return the term that measures the KL or its bound at T = 1 beside a `first` term, without a gradient."""
    if isinstance(first, DenseTerm):
        return replace(first, weight=0.0, name=name, temperature=1.0)
    teacher = sparse_teacher_from_batch(batch)
    if isinstance(first, TopKTerm):  # one softmax, since the ids are the same
        teacher = teacher._replace(ids_NK=first.teacher.ids_NK)
    draw_ids_ND = wanted(batch, "tail_draw_ids", "kl").long() if name == "kl" else None
    return estimators.KLTerm(teacher, name=name, draw_ids_ND=draw_ids_ND)


def choose_estimator(config: ObjectiveConfig, arrays: Container[str]) -> EstimatorName:
    """Return the estimator that `auto` means for a cache with these arrays; any other name as it is."""
    if config.estimator != "auto":
        return config.estimator
    return "hybrid" if "tail_draw_ids" in arrays and {*config.temperatures} == {1.0} else "ghost"


def wanted(batch: Batch, key: str, user: str, draws: int | None = None) -> Tensor:
    """Return an optional array of a batch, the first `draws` of draws; CacheError, with the build flag, for too few."""
    flag = _BUILD_FLAGS[key]
    if key not in batch:
        raise CacheError(f"{key}: {user} needs it, and the KD cache was built without; build one with {flag}")
    array = batch[key].flatten(0, 1)
    if draws is not None and draws > (held := array.shape[1]):
        flag = f"{flag.split()[0]} {draws}"
        raise CacheError(f"draws: {draws} are asked for, the KD cache holds {held}; build one with {flag}")
    return array if draws is None else array[:, :draws]


def _kd_terms(
    batch: Batch, config: ObjectiveConfig, numbers: Mapping[str, float | Tensor], lm_head: LMHead | None
) -> list[Term]:
    estimator, temperature, weight = choose_estimator(config, batch), config.temperature, numbers["kd"]
    if estimator == "full":
        hidden_NH = wanted(batch, "teacher_hidden", "estimator full")
        if lm_head is None:
            raise CacheError("teacher_head: estimator full needs the teacher's output head; build with --hidden")
        return [DenseTerm(hidden_NH, lm_head, weight, "kd", numbers.get("T", temperature))]
    if estimator == "sampled":
        return [estimators.sampled_term(wanted(batch, "draw_ids", "estimator sampled", config.draws).long(), weight)]
    teacher = sparse_teacher_from_batch(batch, temperature)
    if estimator == "hybrid":
        ids_ND = wanted(batch, "tail_draw_ids", "estimator hybrid", config.draws).long()
        return estimators.hybrid_terms(teacher, ids_ND, weight)
    if estimator in estimators.MIXTURES:
        mixture, share = estimators.MIXTURES[estimator]
        return [TopKTerm(teacher, functools.partial(mixture, share=config.mixture or share), weight, "kd")]
    return [TopKTerm(teacher, estimators.ESTIMATORS[estimator], weight, "kd")]


def sparse_teacher_from_batch(batch: Batch, temperature: float = 1.0) -> SparseTeacher:
    """Return the cached teacher at every position of a batch, flattened to N = B·(L-1).

    The rounding error of the top-K logits, in half precision, is spread over all K+1 outcomes, so that they add up to
    one and no loss can drop below zero. CacheError where the batch holds no normaliser for this temperature.
    """
    lse_key, tail_key = temperature_key("lse", temperature), temperature_key("log_tail", temperature)
    if lse_key not in batch or tail_key not in batch:
        held = sorted(float(k.partition("@")[2] or 1) for k in batch if k.partition("@")[0] == "lse")
        names = ",".join(f"{t:g}" for t in held)
        wanted = ",".join(f"{t:g}" for t in sorted({*held, temperature}))
        known = f"the KD cache has the teacher's normaliser for {names or 'none'} only"
        remedy = f"train with one of those, or build the cache with --temperatures {wanted}"
        raise CacheError(f"temperature {temperature:g}: {known}, and the tail cannot be derived from another; {remedy}")
    ids_BLK = batch["head_ids"]
    entries = ids_BLK.shape[-1]
    log_t_NK = (batch["head_logits"].float() / temperature - batch[lse_key].float()[..., None]).reshape(-1, entries)
    log_tail_N = batch[tail_key].float().reshape(-1)
    log_mass_N = estimators.log_add(log_t_NK.logsumexp(-1), log_tail_N)
    ids_NK = ids_BLK.reshape(-1, entries).long()
    return SparseTeacher(ids_NK, log_t_NK - log_mass_N[:, None], log_tail_N - log_mass_N, temperature)


@torch.no_grad()
def sparse_teacher_from_logits(logits_NV: Tensor, k: int, temperature: float = 1.0) -> SparseTeacher:
    """Return the top-k entries and the exact log mass of the others; it copies the logits: pass chunks, unpadded."""
    z_NV = logits_NV.to(estimators.wide_dtype(logits_NV.dtype)) / temperature
    top = z_NV.topk(k, dim=-1)
    log_tail_N = z_NV.scatter(-1, top.indices, float("-inf")).logsumexp(-1)
    log_total_N = estimators.log_add(top.values.logsumexp(-1), log_tail_N)
    return SparseTeacher(top.indices, top.values - log_total_N[:, None], log_tail_N - log_total_N, temperature)


@torch.no_grad()
def sparse_teacher_from_hidden(hidden_NH: Tensor, lm_head: LMHead, k: int, chunk_bytes: int) -> SparseTeacher:
    """Return the same from hidden states, with `chunk_bytes` of float32 logits at a time; at most the vocabulary."""
    vocab, dtype = lm_head.vocab_size, lm_head.weight_VH.dtype
    wide = estimators.wide_dtype(dtype)
    real = real_vocabulary(lm_head, dtype, wide)
    chunks = hidden_NH.to(dtype).split(max(1, chunk_bytes // (4 * vocab)))
    parts = [sparse_teacher_from_logits(lm_head_logits(x_CH, real, wide), min(k, vocab))[:3] for x_CH in chunks]
    ids_NK, log_probs_NK, log_tail_N = map(torch.cat, zip(*parts, strict=True))
    return SparseTeacher(ids_NK, log_probs_NK, log_tail_N)

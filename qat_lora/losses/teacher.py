"""From a cache's batch, or from logits in memory, to the numbers that the estimators compare with.

A sparse teacher is only correct together with the mass outside its head, which depends on the temperature: it is
1 - Σ_S exp(z/T)/Z_T, which needs Z_T, a sum over the whole vocabulary that only the builder of the cache saw.
Guessing it from the mass at T = 1 (leftover^(1/T), say, as if the tail were one token) is wrong by orders of
magnitude, so a temperature that the batch does not carry is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qat_lora.errors import CacheError
from qat_lora.losses.estimators import log_add
from qat_lora.losses.fused.by_token import project
from qat_lora.types import Batch, LMHead, SparseTeacher, temperature_key


def sparse_teacher_from_batch(batch: Batch, temperature: float = 1.0) -> SparseTeacher:
    """Return the cached teacher at every position of a batch, flattened to N = B·(L-1).

    The head is stored in half precision, its mass and the tail's in full; what the rounding took or gave is spread
    over the head and tail alike, so that the K+1 outcomes add up to one and no loss can drop below zero.

    Raises:
        CacheError: the batch holds no normaliser for this temperature.
    """
    lse_key, tail_key = temperature_key("lse", temperature), temperature_key("log_tail", temperature)
    if lse_key not in batch or tail_key not in batch:
        held = sorted(float(k.partition("@")[2] or 1) for k in batch if k.partition("@")[0] == "lse")
        names = ",".join(f"{t:g}" for t in held)
        wanted = ",".join(f"{t:g}" for t in sorted({*held, temperature}))
        raise CacheError(
            f"temperature {temperature:g}: the KD cache has the teacher's normaliser for {names or 'none'} only, "
            f"and the tail's mass cannot be derived from another one; train with one of those, or build the cache "
            f"with --temperatures {wanted}"
        )
    ids_BLK = batch["head_ids"]
    entries = ids_BLK.shape[-1]
    log_t_NK = (batch["head_logits"].float() / temperature - batch[lse_key].float()[..., None]).reshape(-1, entries)
    log_tail_N = batch[tail_key].float().reshape(-1)
    log_mass_N = log_add(log_t_NK.logsumexp(-1), log_tail_N)
    return SparseTeacher(
        ids_BLK.reshape(-1, entries).long(), log_t_NK - log_mass_N[:, None], log_tail_N - log_mass_N, temperature
    )


@torch.no_grad()
def sparse_teacher_from_logits(logits_NV: Tensor, k: int, temperature: float = 1.0) -> SparseTeacher:
    """Return the k likeliest entries of each position and the exact log mass of the others.

    Holds one copy of the logits: pass chunks.
    Slice padding off first.

    Raises:
        ValueError: k is not between 1 and the vocabulary.
    """
    if not 1 <= k <= logits_NV.shape[-1]:
        raise ValueError(f"k {k}: expected 1 to {logits_NV.shape[-1]}, the number of logits")
    wide = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
    z_NV = logits_NV.to(wide) / temperature
    top = z_NV.topk(k, dim=-1)
    log_tail_N = z_NV.scatter(-1, top.indices, float("-inf")).logsumexp(-1)
    log_total_N = log_add(top.values.logsumexp(-1), log_tail_N)
    return SparseTeacher(top.indices, top.values - log_total_N[:, None], log_tail_N - log_total_N, temperature)


@torch.no_grad()
def sparse_teacher_from_hidden(
    hidden_NH: Tensor, head: LMHead, k: int, chunk_bytes: int, temperature: float = 1.0
) -> SparseTeacher:
    """Return the same from hidden states and output head, with `chunk_bytes` of float32 logits at a time.

    Where the vocabulary has fewer than k entries, all of them are kept.
    """
    vocab = head.vocab_size
    weight_VH = head.weight_VH[:vocab]
    wide = torch.float64 if weight_VH.dtype == torch.float64 else torch.float32
    bias_V = None if head.bias_V is None else head.bias_V[:vocab].to(wide)
    parts = []
    for hidden_CH in hidden_NH.to(weight_VH.dtype).split(max(1, chunk_bytes // (4 * vocab))):
        logits_CV, _ = project(hidden_CH, weight_VH, bias_V, head.logit_scale, head.softcap, wide, False)
        parts.append(sparse_teacher_from_logits(logits_CV, min(k, vocab), temperature))
    ids, log_probs, log_tail = (torch.cat([part[i] for part in parts]) for i in range(3))  # type: ignore[misc]
    return SparseTeacher(ids, log_probs, log_tail, temperature)

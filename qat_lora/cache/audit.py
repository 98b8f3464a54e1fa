"""How far a cache is from its teacher: the teacher runs again on some rows, and its full distribution is compared.

The teacher's own probabilities p come from float32 logits over the whole vocabulary, in float64 from there on. The
cache gives, for its first k entries, their probabilities and the mass of all others, as a training run with
`--head-k k` reads them. Three figures for each k, means over the positions that count as targets, at temperature 1:

* `kl_stored`: KL(p ‖ q) where q has the stored head, and the stored tail mass spread in the teacher's own proportions.
  Inside the tail both then agree, so by the chain rule this full-vocabulary KL *is* the KL on k + 1 outcomes (the head,
  and "anything else"). It is the error of storing: values rounded to fp16, sums to float32. q is normalised first, as
  the losses do; `mass_defect` says how far head and tail were from summing to one.
* `tail_mass`: the teacher's probability outside the k entries, which no storing error describes.
* `kl_even_tail`: the same full-vocabulary KL with the tail mass spread evenly over the other V - k tokens, which is all
  that can be rebuilt from the cache alone. That it is much larger is no defect: a loss that treats the tail as one
  outcome does not use this spread. It says what such a loss cannot see.

Where the teacher now runs on another device, number format or batch than when the cache was built, its last bits differ
and `kl_stored` includes that. `same_ids` and `same_values` tell: the shares of positions at which all K ids, and all
K fp16 values, are those that this run would store.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from qat_lora.cache import format as fmt
from qat_lora.cache.reader import CacheReader
from qat_lora.cache.records import Fingerprint
from qat_lora.errors import CacheError
from qat_lora.types import Batch, LanguageModel

SMALLEST_K = 4
COLUMNS = (
    ("k", "K", "d"),
    ("bytes_per_token", "bytes/token", ",.1f"),
    ("kl_stored", "KL stored", ".2e"),
    ("kl_stored_max", "largest", ".2e"),
    ("tail_mass", "tail mass", ".4f"),
    ("kl_even_tail", "KL even tail", ".4f"),
)


@torch.no_grad()
def audit(
    teacher: LanguageModel,
    path: str | Path,
    teacher_sha256: str,
    *,
    rows: int = 8,
    device: torch.device | str = "cpu",
    chunk_bytes: int = 64 << 20,
) -> dict[str, Any]:
    """Compare training rows of a cache, evenly spread, with what its teacher says now.

    Shards are not checked as a whole (`cache verify` does that).

    Args:
        teacher: the model, on `device` already.
        path: the cache folder.
        teacher_sha256: of the model's weights.
        rows: how many rows; all, if there are fewer.
        device: where the token ids go.
        chunk_bytes: float64 logits held at a time.

    Returns:
        JSON values: `rows`, `positions`, `same_ids`, `same_values`, `mass_defect` (largest |sum - 1|), and `by_k`, a
        list of dicts with `k`, `bytes_per_token` and the figures described above (nats).

    Raises:
        CacheError: no finished cache, another teacher, no position that counts in these rows.
    """
    reader = CacheReader(path, verify=False)
    held = reader.fingerprint
    check_teacher(held, path, teacher_sha256, teacher.vocab_size)
    chosen = np.unique(np.linspace(0, reader.rows("train") - 1, rows).astype(np.int64))
    ks = head_sizes(held.top_k)
    parts = [_audit_row(teacher, reader, int(row), ks, device, chunk_bytes) for row in chosen]
    values = {name: np.concatenate([part[name] for part in parts], axis=-1) for name in parts[0]}
    positions = values["same_ids"].size
    if not positions:
        raise CacheError(f"{path}: none of the {len(chosen)} rows looked at has a target; give more --rows")
    by_k = [
        {
            "k": k,
            "bytes_per_token": _bytes_per_token(held, k),
            "kl_stored": float(values["kl_stored"][i].mean()),
            "kl_stored_max": float(values["kl_stored"][i].max()),
            "tail_mass": float(values["tail_mass"][i].mean()),
            "kl_even_tail": float(values["kl_even_tail"][i].mean()),
        }
        for i, k in enumerate(ks)
    ]
    return {
        "rows": len(chosen),
        "positions": positions,
        "same_ids": float(values["same_ids"].mean()),
        "same_values": float(values["same_values"].mean()),
        "mass_defect": float(values["mass_defect"].max()),
        "by_k": by_k,
    }


def check_teacher(held: Fingerprint, path: str | Path, teacher_sha256: str, vocab_size: int) -> None:
    """Raise CacheError unless a model is the one that a cache was made by."""
    if teacher_sha256 != held.teacher_sha256 or vocab_size < held.vocab_size:
        raise CacheError(
            f"teacher: its weights are {teacher_sha256[:16]}…, the cache {path} was made by {held.teacher} with "
            f"{held.teacher_sha256[:16]}…; an audit needs the same teacher: give its folder"
        )


def head_sizes(top_k: int) -> list[int]:
    """Return 4, 8, 16, … below K, and K."""
    sizes = [top_k]
    k = SMALLEST_K
    while k < top_k:
        sizes.insert(-1, k)
        k *= 2
    return sizes


def _bytes_per_token(held: Fingerprint, k: int) -> float:
    """Return what a cache of the same rows with K = k takes, records apart."""
    return fmt.row_bytes(fmt.array_table(held.length, k, held.vocab_size, held.temperatures)) / held.length


def _audit_row(
    teacher: LanguageModel, reader: CacheReader, row: int, ks: list[int], device: torch.device | str, chunk_bytes: int
) -> dict[str, np.ndarray]:
    """Return the figures of a row's targets: arrays [n], or [len(ks), n] where they depend on k."""
    held = reader.fingerprint
    stored = {k: reader.read("train", [row], k, (1.0,)) for k in ks}
    whole = stored[held.top_k]
    ids_BL, documents_BL = (torch.from_numpy(whole[name]).to(device) for name in ("input_ids", "document_ids"))
    hidden_NH = teacher.hidden(ids_BL, documents_BL)[0, :-1]
    parts, start = [], 0
    for hidden in hidden_NH.split(max(1, chunk_bytes // (8 * held.vocab_size))):
        logits_NV = teacher.logits(hidden)[:, : held.vocab_size].float().cpu()  # not every device has float64
        part = slice(start, start + len(hidden))
        parts.append(_compare(logits_NV, {k: _positions(batch, part) for k, batch in stored.items()}))
        start = part.stop
    counts = whole["target_mask"][0]
    return {name: torch.cat([p[name] for p in parts], dim=-1).numpy()[..., counts] for name in parts[0]}


def _positions(batch: Batch, part: slice) -> dict[str, torch.Tensor]:
    names = ("head_ids", "head_logits", "lse", "log_tail")
    return {name: torch.from_numpy(batch[name][0, part]) for name in names}


def _compare(logits_NV: torch.Tensor, stored: dict[int, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the figures of N positions."""
    vocab_size, top_k = logits_NV.shape[-1], max(stored)
    ids_NK = stored[top_k]["head_ids"].long()
    log_p_NV = torch.log_softmax(logits_NV.double(), dim=-1)
    head_NK = log_p_NV.gather(-1, ids_NK)
    outside_NV = log_p_NV.scatter(-1, ids_NK, -torch.inf)
    tail_N = torch.logsumexp(outside_NV, dim=-1)
    tail_plogp_N = _plogp(outside_NV).sum(-1)
    figures: dict[str, list[torch.Tensor]] = {"kl_stored": [], "tail_mass": [], "kl_even_tail": [], "mass_defect": []}
    for k, read in stored.items():
        dropped_NK = head_NK[:, k:]
        log_tail_N = torch.logsumexp(torch.cat([tail_N[:, None], dropped_NK], dim=-1), dim=-1)
        log_p = torch.cat([head_NK[:, :k], log_tail_N[:, None]], dim=-1)
        head = read["head_logits"].double() - read["lse"].double()[:, None]
        log_q = torch.cat([head, read["log_tail"].double()[:, None]], dim=-1)
        log_sum = torch.logsumexp(log_q, dim=-1, keepdim=True)
        terms = log_p.exp() * (log_p - log_q + log_sum)
        kl = torch.where(log_p > -torch.inf, terms, 0.0).sum(-1)
        # Within the tail: sum of p log p, less what "anything else" as one outcome has of it, against 1 / (V - k).
        inside = tail_plogp_N + _plogp(dropped_NK).sum(-1) - _plogp(log_tail_N)
        figures["kl_stored"].append(kl)
        figures["tail_mass"].append(log_tail_N.exp())
        figures["kl_even_tail"].append(kl + inside + log_tail_N.exp() * np.log(max(1, vocab_size - k)))
        figures["mass_defect"].append((log_sum.exp() - 1).abs()[:, 0])
    fresh = torch.topk(logits_NV, top_k, dim=-1)
    values = (fresh.values - fresh.values[:, :1]).clamp(min=-65504.0).half()
    return {
        **{name: torch.stack(lists) for name, lists in figures.items()},
        "same_ids": (fresh.indices == ids_NK).all(-1),
        "same_values": (values == stored[top_k]["head_logits"].half()).all(-1),
    }


def _plogp(log_p: torch.Tensor) -> torch.Tensor:
    return torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0.0)


def table_rows(report: dict[str, Any]) -> list[list[str]]:
    """Return header and rows of text cells, one row a K."""
    body = [[format(row[key], form) for key, _, form in COLUMNS] for row in report["by_k"]]
    return [[title for _, title, _ in COLUMNS], *body]


def summary(report: dict[str, Any]) -> str:
    """Return one line on what was looked at."""
    return (
        f"{report['positions']:,} positions in {report['rows']} rows; ids as stored at {report['same_ids']:.1%}, "
        f"values at {report['same_values']:.1%}; head and tail sum to 1 within {report['mass_defect']:.1e}"
    )

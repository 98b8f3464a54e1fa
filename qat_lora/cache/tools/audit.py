"""The distance of a cache from its teacher: the teacher runs again on some rows, and full distributions are compared.

The teacher's probabilities p come from float32 logits over the whole vocabulary, in float64 from there on; the cache
gives its first k entries and the mass of all others. Means over the positions that count, at temperature 1:

* `kl_stored`: KL(p ‖ q), where q, normalised, spreads the stored tail mass in the teacher's own proportions: the KL on
  k + 1 outcomes by the chain rule, and so the error of storing.
* `tail_mass`: the teacher's probability outside the k entries, which no storing error describes.
* `kl_even_tail`: the KL with the tail mass even over the other V - k tokens, which a one-outcome tail cannot see.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.codec import decode_values, encode_values
from qat_lora.cache.format.records import Fingerprint
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.location import Place
from qat_lora.errors import CacheError
from qat_lora.types import Batch, LanguageModel, LMHead

Figures = dict[tuple[str, str, int], Tensor]  # of N positions by name, encoding and k; shares of all have neither
CHUNK_BYTES = 64 << 20  # of float64 logits that are held at a time
COLUMNS = [("k", "K", ",d"), ("encoding", "stored as", "s"), ("bytes_per_token", "bytes/token", ",.1f")]
COLUMNS += [("kl_stored", "KL stored", ".2e"), ("kl_stored_max", "largest", ".2e")]
COLUMNS += [("tail_mass", "tail mass", ".4f"), ("kl_even_tail", "KL even tail", ".4f")]


@torch.no_grad()
def audit(
    teacher: LanguageModel, path: Place, teacher_sha256: str, *, rows: int = 8, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Compare training rows of a cache, evenly spread, with what its teacher, on `device` already, says now.

    Returned are JSON values: `rows`, `positions`; `same_ids`, `same_values`, `same_hidden`, the shares of positions at
    which this run would store the same (other devices and batches give other last bits, which `kl_stored` includes);
    `mass_defect`, the largest |sum - 1| of top K and tail; and `by_k`, the figures described above for each k (nats;
    for hidden states K = V: the stored LM head at the stored states). `others` are those of other encodings: what
    `uint8` would have cost. CacheError: no finished cache, another teacher, no position that counts in these rows.
    """
    dataset = KDCacheDataset(path, verify=False)
    held = dataset.fingerprint
    if not (held.top_k or held.contents.hidden):
        raise CacheError(f"{path}: holds draws alone, nothing to compare; allowed: caches with --top-k or --hidden")
    check_teacher(held, path, teacher_sha256, teacher.vocab_size)
    chosen = np.unique(np.linspace(0, len(dataset) - 1, rows).astype(np.int64))
    lm_head = dataset.teacher_lm_head() if held.contents.hidden else None
    parts = [_audit_row(teacher, dataset, int(row), lm_head, device) for row in chosen]
    values = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    positions = next(iter(values.values())).size
    if not positions:
        raise CacheError(f"{path}: none of the {len(chosen)} rows looked at has a target; give more --rows")
    lines = []
    for (name, encoding, k), kl in values.items():
        if name == "kl_stored":
            other = {"top_k": 0} if encoding == "hidden" else {"top_k": k, "value_dtype": encoding, "hidden": 0}
            own = held.contents._replace(tail_draws=0, draws=0, **other)  # the same rows, without records and LM head
            size = fmt.row_bytes(fmt.array_table(own)) / held.length
            line = {"k": k, "encoding": encoding, "bytes_per_token": size}
            line |= {"kl_stored": float(kl.mean()), "kl_stored_max": float(kl.max())}
            tails = {tail: float(values[tail, encoding, k].mean()) for tail in ("tail_mass", "kl_even_tail")}
            lines.append(line | tails)
    defects = [float(v.max()) for key, v in values.items() if key[:2] == ("mass_defect", held.value_dtype)]
    by_k, others = ([x for x in lines if (x["encoding"] == held.value_dtype) is same] for same in (True, False))
    found: dict[str, Any] = {"rows": len(chosen), "positions": positions}
    found |= {name: float(v.mean()) for (name, _, _), v in values.items() if name.startswith("same_")}
    return found | {"mass_defect": max(defects, default=0.0), "by_k": by_k, "others": others}


def check_teacher(held: Fingerprint, path: Place, teacher_sha256: str, vocab_size: int) -> None:
    """Raise CacheError unless a model is the one that a cache was made by."""
    if teacher_sha256 != held.teacher_sha256 or vocab_size < held.vocab_size:
        made = f"the cache {path} was made by {held.teacher} with {held.teacher_sha256[:16]}…"
        remedy = "an audit needs the same teacher: give its folder"
        raise CacheError(f"teacher: its weights are {teacher_sha256[:16]}…, {made}; {remedy}")


def topk_sizes(top_k: int) -> list[int]:
    """Return 4, 8, 16, … below K, and K; nothing for K = 0."""
    return sorted({top_k, *(4 << i for i in range(30) if 4 << i < top_k)} - {0})


def _audit_row(
    teacher: LanguageModel, dataset: KDCacheDataset, row: int, lm_head: LMHead | None, device: torch.device | str
) -> dict[tuple[str, str, int], np.ndarray]:
    """Return the figures of a row's targets, arrays [n]."""
    held = dataset.fingerprint
    stored = {(held.value_dtype, k): dataset.rows([row], k, ()) for k in topk_sizes(held.top_k)}
    whole = dataset.rows([row])
    exact, *coarser = fmt.VALUE_DTYPES
    for other in coarser if held.top_k and held.value_dtype == exact else ():
        codes = encode_values(whole["head_logits"], other, max(held.temperatures))  # of all K, as a builder would
        stored |= {(other, k): {**stored[exact, k], "head_logits": decode_values(codes, k)} for _, k in [*stored]}
    ids_BL, documents_BL = (torch.from_numpy(whole[name]).to(device) for name in ("input_ids", "document_ids"))
    hidden_NH = teacher.hidden(ids_BL, documents_BL)[0, :-1]
    parts, size = [], max(1, CHUNK_BYTES // (8 * held.vocab_size))
    for number, hidden in enumerate(hidden_NH.split(size)):
        logits_NV = teacher.logits(hidden)[:, : held.vocab_size].float().cpu()  # not every device has float64
        part = slice(number * size, number * size + len(hidden))
        log_p_NV = torch.log_softmax(logits_NV.double(), dim=-1)
        figures: Figures = {}
        if held.top_k:
            ids_NK = torch.from_numpy(whole["head_ids"][0, part]).long()
            outside_NV = log_p_NV.scatter(-1, ids_NK, -torch.inf)
            truth = log_p_NV.gather(-1, ids_NK), outside_NV.logsumexp(-1), _plogp(outside_NV).sum(-1)
            for (encoding, k), batch in stored.items():
                read = {n: torch.from_numpy(batch[n][0, part]).double() for n in ("head_logits", "lse", "log_tail")}
                found = _compare(truth, held.vocab_size, read, k)
                figures |= {(name, encoding, k): values for name, values in found.items()}
            figures |= _same(logits_NV, whole, part, held)
        if lm_head is not None:
            figures |= _compare_hidden(log_p_NV, hidden.float().cpu(), whole["teacher_hidden"][0, part], lm_head)
        parts.append(figures)
    return {name: torch.cat([p[name] for p in parts]).numpy()[whole["target_mask"][0]] for name in parts[0]}


def _compare(truth: Sequence[Tensor], vocab_size: int, read: Mapping[str, Tensor], k: int) -> dict[str, Tensor]:
    """Return figures for the first k of K entries; `truth`: log p of the K and of all others, the others' Σ p log p."""
    topk_NK, tail_N, tail_plogp_N = truth
    dropped_NK = topk_NK[:, k:]
    log_tail_N = torch.logsumexp(torch.cat([tail_N[:, None], dropped_NK], dim=-1), dim=-1)
    log_p = torch.cat([topk_NK[:, :k], log_tail_N[:, None]], dim=-1)
    log_q = torch.cat([read["head_logits"] - read["lse"][:, None], read["log_tail"][:, None]], dim=-1)
    log_sum = torch.logsumexp(log_q, dim=-1, keepdim=True)
    kl = torch.where(log_p > -torch.inf, log_p.exp() * (log_p - log_q + log_sum), 0.0).sum(-1)
    # Within the tail: sum of p log p, less what "anything else" as one outcome has of it, against 1 / (V - k).
    inside = tail_plogp_N + _plogp(dropped_NK).sum(-1) - _plogp(log_tail_N)
    even = kl + inside + log_tail_N.exp() * np.log(max(1, vocab_size - k))
    defect = (log_sum.exp() - 1).abs()[:, 0]
    return {"kl_stored": kl, "tail_mass": log_tail_N.exp(), "kl_even_tail": even, "mass_defect": defect}


def _same(logits_NV: Tensor, whole: Batch, part: slice, held: Fingerprint) -> Figures:
    fresh = torch.topk(logits_NV, held.top_k, dim=-1)
    logits = (fresh.values - fresh.values[:, :1]).numpy()
    values = decode_values(encode_values(logits, held.value_dtype, max(held.temperatures)), held.top_k)
    return {
        ("same_ids", "", 0): torch.from_numpy((fresh.indices.numpy() == whole["head_ids"][0, part]).all(-1)).double(),
        ("same_values", "", 0): torch.from_numpy((values == whole["head_logits"][0, part]).all(-1)).double(),
    }


def _compare_hidden(log_p_NV: Tensor, fresh_NH: Tensor, stored: np.ndarray, lm_head: LMHead) -> Figures:
    """Return the figures of N positions that were stored as hidden states: K is the whole vocabulary."""
    stored_NH = torch.from_numpy(stored)
    bias = None if lm_head.bias_V is None else lm_head.bias_V.float()
    logits_NV = torch.nn.functional.linear(stored_NH.float(), lm_head.weight_VH.float(), bias) * lm_head.logit_scale
    if lm_head.softcap is not None:
        logits_NV = lm_head.softcap * torch.tanh(logits_NV / lm_head.softcap)
    kl = (log_p_NV.exp() * (log_p_NV - torch.log_softmax(logits_NV.double(), dim=-1))).sum(-1)
    vocab_size = log_p_NV.shape[-1]
    return {
        ("kl_stored", "hidden", vocab_size): kl,
        ("tail_mass", "hidden", vocab_size): torch.zeros_like(kl),
        ("kl_even_tail", "hidden", vocab_size): kl,
        ("same_hidden", "", 0): (fresh_NH.half() == stored_NH).all(-1).double(),
    }


def _plogp(log_p: Tensor) -> Tensor:
    return torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0.0)


def table_rows(report: dict[str, Any]) -> list[list[str]]:
    """Return header and rows of text cells, one row a K."""
    lines = (*report["by_k"], *report.get("others", []))
    body = [[format(line[key], form) for key, _, form in COLUMNS] for line in lines]
    return [[title for _, title, _ in COLUMNS], *body]


def summary(report: dict[str, Any]) -> str:
    """Return one line on what was looked at."""
    kinds = {"same_ids": "ids", "same_values": "values", "same_hidden": "hidden states"}
    same = ", ".join(f"{words} at {report[name]:.1%}" for name, words in kinds.items() if name in report)
    sums = f"head and tail sum to 1 within {report['mass_defect']:.1e}"
    return f"{report['positions']:,} positions in {report['rows']} rows; as stored: {same}; {sums}"

"""A few positions at a time, the whole vocabulary for each: the walk that serves every term, output head and device.

A chunk's logits become its loss and its gradients on the spot. On GPUs and XLA this is also the faster walk. On XLA the
chunks are one loop in the graph (`runtime/xla/loop.py`), all of one shape, the last filled with masked positions; and
each takes its part of *every* row of text: where rows are spread over devices, consecutive positions lie on one alone.

Numerical core, see `_sparse_group`: the top-K logits are taken out *before* the exponential, so the tail is summed on
its own scale. log(1 - b) is then accurate at any size; 1 - Σ p would be noise below 1e-7.

Single entries of rows are indexed, but for bfloat16 on XLA. One scalar costs a TPU as much as a vector: the top 128 of
4,096 positions would be 1.6 million turns. An id is 128 · high + low, so with `high_CEG` and `low_CEW` one-hot and the
vocabulary as a matrix [G, W],

    read: rows_CEW = high @ logits_CGW, of which `low` picks one,     write: highᵀ @ (low · value) = values_CGW,

a twentieth of the operations of the output head's own product, and exact where inputs are bfloat16.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qat_lora.losses.fused import gradients
from qat_lora.losses.fused.gradients import Group, Task, Walked
from qat_lora.runtime.xla.loop import scan
from qat_lora.runtime.xla.runtime import is_xla_device

LANES = 128  # W: the width of a TPU's vector, so that [C, V] and [C, G, W] are one order in memory
TILE = 16
"""Rows of a bfloat16 tile of a TPU: a matrix that ends within one is copied to be filled up, gigabytes a chunk."""
Sums = dict[int, Tensor]  # each term's loss sum, by its index among all terms
GroupParts = tuple[Sums, Tensor | None]  # and the gradient with respect to the logits


class Entries(NamedTuple):
    """Some entries of each of C rows; `high_CEG` and `low_CEW` are one-hot, where that is the way."""

    ids: Sequence[Tensor]  # int64 [C, E_i] each; repeated ids stand for themselves
    high_CEG: Tensor | None = None
    low_CEW: Tensor | None = None


def walk_positions(task: Task, chunk_tokens: int, rows: int = 1) -> Walked:
    """Return sums and gradients; `chunk_tokens` positions, which are of `rows` rows of text, are projected at once."""
    if is_xla_device(task.hidden_NH):
        return _loop_in_graph(task, chunk_tokens, rows)
    d_weight, d_bias = gradients.head_zeros(task)
    parts: list[Sums] = []
    d_hidden: list[Tensor] = []
    for start in range(0, task.hidden_NH.shape[0], chunk_tokens):
        chunk = gradients.with_tensors(task, itemgetter(slice(start, start + chunk_tokens)), lambda x: x)
        sums, d_hidden_CH = _walk_chunk(chunk, d_weight, d_bias)
        parts.append(sums)
        d_hidden += [] if d_hidden_CH is None else [d_hidden_CH]
    sums = {index: torch.stack([part[index] for part in parts]).sum() for index in parts[0]}
    return Walked(sums, torch.cat(d_hidden) if task.wanted.hidden else None, d_weight, d_bias)


def _loop_in_graph(task: Task, chunk_tokens: int, rows: int) -> Walked:
    """Walk by one loop of XLA, over equal parts of every row."""
    vocab, count = task.lm_head.vocab_size, task.hidden_NH.shape[0] // rows
    part = -(-count // -(-count * rows // chunk_tokens))
    part = part if part < TILE else -(-part // TILE) * TILE
    chunks = -(-count // part)
    if one_hot_like(task.hidden_NH):
        task = gradients.with_tensors(task, lambda x: x, _filled)
    cuts: list[Tensor] = []
    constants: list[Tensor] = []

    def cut(value_N: Tensor) -> Tensor:
        value = value_N.unflatten(0, (rows, count))
        value = pad(value, (*[0, 0] * (value.dim() - 2), 0, chunks * part - count))
        cuts.append(value.unflatten(1, (chunks, part)).transpose(0, 1).flatten(1, 2))
        return value_N

    def note(value: Tensor) -> Tensor:
        constants.append(value)
        return value

    def body(carry: list[Tensor], cuts: list[Tensor], constants: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        next_cut, next_constant, totals = iter(cuts), iter(constants), iter(carry)
        chunk = gradients.with_tensors(task, lambda _: next(next_cut), lambda _: next(next_constant))
        sums, d_hidden = _walk_chunk(chunk, *(next(totals) if has else None for has in task.wanted[1:]))
        return carry, [*sums.values(), *([] if d_hidden is None else [d_hidden])]

    gradients.with_tensors(task, cut, note)
    totals = [total for total in gradients.head_zeros(task) if total is not None]
    totals, outputs = scan(body, totals, cuts, constants)
    indices = [index for group in task.groups for index in group.indices]
    sums = {index: outputs.pop(0).sum() for index in indices}
    d_head = iter(total[:vocab] for total in totals)
    d_weight, d_bias = (next(d_head) if has else None for has in task.wanted[1:])
    if not task.wanted.hidden:
        return Walked(sums, None, d_weight, d_bias)
    hidden = outputs[0].unflatten(1, (rows, part)).transpose(0, 1).flatten(1, 2)
    return Walked(sums, hidden[:, :count].flatten(0, 1), d_weight, d_bias)


def _filled(value: Tensor) -> Tensor:
    """Return a tensor of the vocabulary with as many rows as products with one-hots want."""
    return pad(value, (*[0, 0] * (value.dim() - 1), 0, -len(value) % LANES)) if value.dim() else value


def _walk_chunk(task: Task, d_weight: Tensor | None, d_bias: Tensor | None) -> tuple[Sums, Tensor | None]:
    """Return the sums and the gradient of a task that is one chunk; add to those of the output head in place."""
    wanted, lm_head = task.wanted, task.lm_head
    product_CV = task.hidden_NH @ lm_head.weight_VH.t()
    entries = [entries_of(gradients.entry_ids(group, task.mask_N), product_CV) for group in task.groups]
    entry_logits = [_entry_logits(product_CV, of_group, task) for of_group in entries]
    logits_CV, slope_CV = gradients.full_logits(product_CV, lm_head, task.wide, any(wanted))
    sums: Sums = {}
    grad_CV: Tensor | None = None
    for group, of_group, logits in zip(task.groups, entries, entry_logits, strict=True):
        z_CV = _soften(logits_CV, group.temperature, in_place=group is task.groups[-1])
        entry_z = [_soften(logits_CE, group.temperature, in_place=True) for logits_CE in logits]
        part, part_CV = (_dense_group if group.dense else _sparse_group)(z_CV, entry_z, of_group, group, task)
        sums |= part
        grad_CV = part_CV if grad_CV is None or part_CV is None else grad_CV.add_(part_CV)
    if grad_CV is None:
        return sums, None
    if slope_CV is not None:
        grad_CV.mul_(slope_CV)
    if lm_head.logit_scale != 1.0:
        grad_CV.mul_(lm_head.logit_scale)
    if d_weight is not None:
        d_weight.addmm_(grad_CV.to(task.wide).t(), task.hidden_NH.to(task.wide))
    if d_bias is not None:
        d_bias.add_(grad_CV.sum(0, dtype=task.wide))
    return sums, grad_CV.to(task.hidden_NH.dtype) @ lm_head.weight_VH if wanted.hidden else None


def _entry_logits(product_CV: Tensor, entries: Entries, task: Task) -> list[Tensor]:
    """Return the logits of entries alone, from rows of products h Wᵀ that are read before they are overwritten."""
    found = []
    for ids_CE, product_CE in zip(entries.ids, read(product_CV, entries), strict=True):
        bias_V = task.lm_head.bias_V
        bias_CE = None if bias_V is None else bias_V.expand(len(ids_CE), -1).gather(1, ids_CE)
        found.append(gradients.finish_logits(product_CE, bias_CE, task.lm_head, task.wide)[0])
    return found


def _soften(logits: Tensor, temperature: float | Tensor, *, in_place: bool) -> Tensor:
    """Return logits / T, which may be overwritten; the argument is overwritten only if `in_place`."""
    if in_place:
        return logits if gradients.is_number(temperature, 1.0) else logits.div_(temperature)
    return logits.clone() if gradients.is_number(temperature, 1.0) else logits / temperature


def _sparse_group(z_CV: Tensor, entry_z: list[Tensor], entries: Entries, group: Group, task: Task) -> GroupParts:
    """Top-K and point terms; overwrites `z_CV`."""
    if group.ids_NK is not None:
        z_CV = remove_first(z_CV, entries)
    max_C1 = z_CV.amax(1, keepdim=True)  # of the tail, so that its largest entry becomes exp(0)
    max_C1 = torch.where(max_C1 == float("-inf"), torch.zeros_like(max_C1), max_C1)  # an empty tail
    z_CV, temperature, at_1 = z_CV.sub_(max_C1), group.temperature, list[Tensor]()
    if group.kl and temperature != 1.0:
        at_1.append(max_C1[:, 0] * temperature + (z_CV * temperature).exp_().sum(1).log())
    tail_CV = z_CV.exp_()
    sum_C = tail_CV.sum(1)
    part = gradients.group_gradient(task, group, entry_z, max_C1[:, 0] + sum_C.log(), *at_1)
    if not any(task.wanted):
        return part.sums, None
    share_C = part.tail_C / sum_C.clamp_min(1)  # the sum is at least 1, or 0 for an empty tail
    return part.sums, add(tail_CV.mul_(share_C[:, None]), entries, part.entries)


def _dense_group(z_CV: Tensor, entry_z: list[Tensor], entries: Entries, group: Group, task: Task) -> GroupParts:
    """The exact KL, Σ_V t log(t/p) with dz = p - t, and point terms next to it; overwrites `z_CV`."""
    log_z_C1 = z_CV.logsumexp(1, keepdim=True)
    log_p_CV = z_CV.sub_(log_z_C1)
    zero_C = torch.zeros_like(log_p_CV[:, 0])  # the log of the softmax's sum, since log p is normalised
    part = gradients.group_gradient(task, group, [z_CD - log_z_C1 for z_CD in entry_z], zero_C)
    ((index, term),) = group.dense
    hidden_CH = term.hidden_NH.masked_fill(gradients.skipped(task.mask_N)[:, None], 0).to(term.lm_head.weight_VH.dtype)
    z_CV = _soften(gradients.lm_head_logits(hidden_CH, term.lm_head, task.wide), term.temperature, in_place=True)
    log_t_CV = z_CV.sub_(z_CV.logsumexp(1, keepdim=True))
    t_CV = log_t_CV.exp()
    distance_CV = log_t_CV.sub_(log_p_CV).masked_fill_(t_CV == 0, 0).mul_(t_CV)
    sums = part.sums | {index: gradients.keep(distance_CV.sum(1), task.mask_N).sum()}
    if not any(task.wanted):
        return sums, None
    share_C = gradients.keep(zero_C + task.scales[index], task.mask_N) / group.temperature
    grad_CV = log_p_CV.exp_().mul_((part.tail_C + share_C)[:, None]).sub_(t_CV.mul_(share_C[:, None]))
    return sums, add(grad_CV, entries, part.entries)


def one_hot_like(values: Tensor) -> bool:
    """Return whether entries of these rows are to be found by products; the rows are then multiples of `LANES`."""
    return values.dtype == torch.bfloat16 and is_xla_device(values)


def entries_of(ids: Sequence[Tensor], rows_CV: Tensor) -> Entries:
    """Return the entries of `rows_CV` with these ids; of any rows of this shape, too."""
    if not ids or not one_hot_like(rows_CV):
        return Entries(ids)
    ids_CE1 = torch.cat(list(ids), 1).int()[..., None]
    high_CEG = ids_CE1 // LANES == torch.arange(rows_CV.shape[1] // LANES, dtype=torch.int32, device=rows_CV.device)
    low_CEW = ids_CE1 % LANES == torch.arange(LANES, dtype=torch.int32, device=rows_CV.device)
    return Entries(ids, high_CEG.to(rows_CV.dtype), low_CEW.to(rows_CV.dtype))


def read(rows_CV: Tensor, entries: Entries) -> list[Tensor]:
    """Return the values at the entries, [C, E_i] for each list of ids."""
    if entries.high_CEG is None or entries.low_CEW is None:
        return [rows_CV.gather(1, ids_CE) for ids_CE in entries.ids]
    groups_CEW = entries.high_CEG @ rows_CV.unflatten(1, (-1, LANES))
    values_CE = torch.where(entries.low_CEW > 0, groups_CEW, torch.zeros_like(groups_CEW)).sum(2)
    return list(values_CE.split([ids_CE.shape[1] for ids_CE in entries.ids], 1))


def remove_first(rows_CV: Tensor, entries: Entries) -> Tensor:
    """Return rows with -inf at the entries of the first list; may overwrite them."""
    if entries.high_CEG is None or entries.low_CEW is None:
        return rows_CV.scatter_(1, entries.ids[0], float("-inf"))
    count = entries.ids[0].shape[1]
    return rows_CV.masked_fill(_to_dense(entries.high_CEG[:, :count], entries.low_CEW[:, :count]) > 0, float("-inf"))


def add(rows_CV: Tensor, entries: Entries, values: Sequence[Tensor]) -> Tensor:
    """Return rows with values [C, E_i] added at the first entries; may overwrite them. By products all is bfloat16."""
    if entries.high_CEG is None or entries.low_CEW is None:
        for ids_CE, values_CE in zip(entries.ids, values, strict=False):
            rows_CV.scatter_add_(1, ids_CE, values_CE)
        return rows_CV
    values_CE1 = torch.cat(list(values), 1)[..., None]
    count = values_CE1.shape[1]
    high_CEG, low_CEW = entries.high_CEG[:, :count], entries.low_CEW[:, :count]
    dense_CV = _to_dense(high_CEG, low_CEW * values_CE1.to(low_CEW.dtype))
    return rows_CV.to(dense_CV.dtype) + dense_CV  # wide, the sum would make the product wide, and written as such


def _to_dense(high_CEG: Tensor, values_CEW: Tensor) -> Tensor:
    return (high_CEG.transpose(1, 2) @ values_CEW).flatten(1)

"""Slow float64 references for the tests of `qat_lora.losses`: numpy loops and dense autograd, nothing shared."""

import math

import numpy as np
import torch

from qat_lora.types import LMHead, SparseTeacher


def log_softmax(row):
    top = max(row)
    total = math.fsum(math.exp(x - top) for x in row if x > -math.inf)
    return [x - top - math.log(total) for x in row]


def make_teacher(rng, count, vocab, k, temperature=1.0, spread=3.0):
    """Return random teacher logits (numpy float64) and the sparse teacher made of them by plain loops."""
    logits = rng.normal(size=(count, vocab)) * spread
    ids, log_t, log_m = [], [], []
    for row in logits:
        log_probs = np.array(log_softmax(list(row / temperature)))
        order = np.argsort(-log_probs, kind="stable")
        ids.append(order[:k])
        log_t.append(log_probs[order[:k]])
        rest = math.fsum(math.exp(x) for x in log_probs[order[k:]])
        log_m.append(math.log(rest) if rest > 0 else -math.inf)
    teacher = SparseTeacher(
        torch.tensor(np.array(ids)),
        torch.tensor(np.array(log_t)),
        torch.tensor(log_m, dtype=torch.float64),
        temperature,
    )
    return logits, teacher


def numpy_loss(name, student_row, teacher_row, k, temperature=1.0, share=None):
    """Return one position's loss from full logits, in the words of the definition; no T²."""
    log_p, log_t = log_softmax(list(student_row / temperature)), log_softmax(list(teacher_row / temperature))
    order = sorted(range(len(log_t)), key=lambda j: -log_t[j])
    head, tail = order[:k], order[k:]
    rest_p, rest_t = math.fsum(math.exp(log_p[j]) for j in tail), math.fsum(math.exp(log_t[j]) for j in tail)
    if name == "full":
        return math.fsum(math.exp(log_t[j]) * (log_t[j] - log_p[j]) for j in order)
    if name == "ghost":
        inside = math.fsum(math.exp(log_t[j]) * (log_t[j] - log_p[j]) for j in head)
        return inside + (rest_t * math.log(rest_t / rest_p) if tail else 0.0)
    if name == "reverse":
        inside = math.fsum(math.exp(log_p[j]) * (log_p[j] - log_t[j]) for j in head)
        return inside + (rest_p * math.log(rest_p / rest_t) if tail else 0.0)
    if name in ("jsd", "skew", "skew_reverse"):
        tails = [(rest_t, rest_p)] if tail else []
        pairs = [(math.exp(log_t[j]), math.exp(log_p[j])) for j in head] + tails

        def kl(first, second):
            return math.fsum(a * math.log(a / b) for a, b in zip(first, second, strict=True) if a > 0)

        t, p = zip(*pairs, strict=True)
        of_teacher = 1 - share if name == "skew_reverse" else share
        mixed = [of_teacher * a + (1 - of_teacher) * b for a, b in pairs]
        if name == "jsd":
            return share * kl(t, mixed) + (1 - share) * kl(p, mixed)
        return kl(t if name == "skew" else p, mixed)
    a, b = math.fsum(math.exp(log_t[j]) for j in head), math.fsum(math.exp(log_p[j]) for j in head)
    return math.fsum(math.exp(log_t[j]) / a * (log_t[j] - math.log(a) - log_p[j] + math.log(b)) for j in head)


def identity_head(vocab, dtype=torch.float64):
    """Return an output head whose logits are the hidden states themselves, so that dL/dhidden is dL/dlogits."""
    return LMHead(torch.eye(vocab, dtype=dtype), vocab)


def dense_head(hidden_NH, weight_VH, vocab, bias_V=None, scale=1.0, cap=None):
    """Return full logits under autograd, with padding as -inf in effect (cut off)."""
    raw = hidden_NH @ weight_VH.T
    if bias_V is not None:
        raw = raw + bias_V
    raw = raw * scale
    if cap is not None:
        raw = torch.tanh(raw / cap) * cap
    return raw[:, :vocab]


def dense_ghost(logits_NV, teacher):
    """Return the ghost loss of every position under autograd, times T²."""
    log_p = torch.log_softmax(logits_NV / teacher.temperature, -1)
    inside = torch.zeros_like(log_p, dtype=torch.bool).scatter(1, teacher.ids_NK, True)
    rest = log_p.masked_fill(inside, -math.inf).logsumexp(-1)
    t, m = teacher.log_probs_NK.exp(), teacher.log_tail_N.exp()
    head = (t * (teacher.log_probs_NK - log_p.gather(1, teacher.ids_NK))).sum(-1)
    return (head + m * (teacher.log_tail_N - rest)) * teacher.temperature**2

"""The Triton kernel in Triton's interpreter, or on a GPU, against dense float64 autograd.

`TRITON_INTERPRET=1 python kernel_cases.py`, or `python kernel_cases.py cuda`, writes a line of JSON for every case: its
name, the largest error of a term's sum relative to the sum, and the largest error of a gradient relative to the largest
entry of its row. The KL that is logged beside the terms is one of the sums, and must change no bit of the others.
"""

import json
import math
import sys
import warnings
from dataclasses import fields, is_dataclass, replace

import numpy as np
import torch
from losses_oracle import dense_ghost, dense_head, identity_head, log_softmax, make_teacher, numpy_loss
from torch.utils._pytree import tree_map

from qat_lora.losses import estimators
from qat_lora.losses.estimators import KLTerm, PointTerm, TopKTerm, label_term
from qat_lora.losses.fused import triton_kernel
from qat_lora.losses.fused.op import fused_linear_kd
from qat_lora.types import LMHead, SparseTeacher

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
PLAIN = {"count": 5, "vocab": 131, "k": 7, "estimator": "ghost", "temperature": 1.0, "dtype": "float32"}
CASES = {
    "ghost": {},
    "renorm": {"estimator": "renorm"},
    "reverse": {"estimator": "reverse"},
    "topk_part": {"estimator": "topk_part"},
    "one row, one entry": {"count": 1, "k": 1},
    "the top K is the vocabulary": {"vocab": 31, "k": 31},
    "the same, reverse": {"vocab": 31, "k": 31, "estimator": "reverse"},
    "the same, renorm": {"vocab": 31, "k": 31, "estimator": "renorm"},
    "a vocabulary of one block": {"vocab": 64, "k": 3},
    "more entries than a block": {"vocab": 1009, "k": 130},
    "softened": {"temperature": 2.0},
    "softened reverse": {"temperature": 0.7, "estimator": "reverse"},
    "ragged mask": {"mask": True},
    "nothing counts": {"mask": "none"},
    "soft cap, scale, bias": {"cap": 3.0, "scale": 0.5, "bias": True},
    "soft cap, softened, masked": {"cap": 2.0, "temperature": 1.7, "mask": True, "estimator": "renorm"},
    "bias and scale": {"scale": 0.25, "bias": True, "estimator": "reverse"},
    "draws and labels": {"points": True},
    "draws, capped, masked": {"points": True, "cap": 4.0, "mask": True, "estimator": "topk_part"},
    "draws, softened": {"points": True, "temperature": 2.0},
    "points alone": {"k": 0, "points": True, "mask": True},
    "two softmaxes": {"temperature": 2.0, "label": True, "mask": True},
    "an empty tail": {"spread": 40.0, "estimator": "reverse"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, reverse, draws": {"dtype": "bfloat16", "estimator": "reverse", "points": True},
    "bfloat16, capped, softened": {"dtype": "bfloat16", "cap": 3.0, "temperature": 2.0, "points": True, "mask": True},
    "float16": {"dtype": "float16", "points": True},
    "a trained head": {"width": 6, "bias": True, "points": True, "mask": True, "scale": 0.5},
    "a trained head, capped": {"width": 6, "cap": 3.0, "temperature": 2.0},
    "a trained head, bfloat16": {"dtype": "bfloat16", "width": 6, "bias": True, "points": True},
    "real blocks": {"count": 3, "vocab": 20_001, "k": 100, "width": 4, "points": True, "block": 8_192},
}


def dense_topk(name, logits_NV, teacher):
    """Return a sparse term's loss at every position under autograd, times T², in the words of the definition."""
    whole = teacher.ids_NK.shape[1] == logits_NV.shape[1]  # no tail
    if name == "ghost" and not whole:
        return dense_ghost(logits_NV, teacher)
    log_p = torch.log_softmax(logits_NV / teacher.temperature, -1)
    log_q, log_t, log_m = log_p.gather(1, teacher.ids_NK), teacher.log_probs_NK, teacher.log_tail_N
    if name == "renorm":
        log_q, log_t = log_q.log_softmax(-1), log_t.log_softmax(-1)
    if name != "reverse":
        loss = (log_t.exp() * (log_t - log_q)).sum(-1)
    else:
        loss = (log_q.exp() * (log_q - log_t)).sum(-1)
        if not whole:
            inside = torch.zeros_like(log_p, dtype=torch.bool).scatter(1, teacher.ids_NK, True)
            rest = log_p.masked_fill(inside, -math.inf).logsumexp(-1)
            loss = loss + rest.exp() * (rest - log_m)
    return loss * teacher.temperature**2


def point_terms(rng, case, teacher):
    """Return draws that repeat and hit the top K, with labels where the softmax is theirs; an infinite mask test."""
    count, temperature = case["count"], case["temperature"]
    terms = []
    if case.get("points"):
        ids = torch.tensor(rng.integers(0, case["vocab"], (count, 5)))
        ids[:, 1] = ids[:, 0]
        if case["k"]:
            ids[:, 2:4] = teacher.ids_NK[:, :1]
        weights = torch.tensor(rng.random((count, 5)))
        terms.append(PointTerm(ids, weights, 0.4, "draws", temperature))
    if case.get("label") or (case.get("points") and temperature == 1.0):
        terms.append(label_term(torch.tensor(rng.integers(0, case["vocab"], count)), torch.tensor(0.3), "label"))
    return terms


def spoiled(term, mask):
    """Return a term that holds rubbish where the mask is not set."""
    out = ~mask
    if isinstance(term, PointTerm):
        ids, weights = term.ids_ND.clone(), term.weights_ND.clone()
        ids[out], weights[out] = -100, math.nan
        return PointTerm(ids, weights, term.weight, term.name, term.temperature)
    ids, log_t, log_m = (x.clone() for x in term.teacher[:3])
    ids[out], log_t[out], log_m[out] = 2**40, math.nan, math.inf
    return TopKTerm(SparseTeacher(ids, log_t, log_m, term.temperature), term.estimator, term.weight, term.name)


def kl_teacher(teacher, logits, mask, given):
    """Return the teacher at temperature 1, with the ids of a top-K term where there is one."""
    order = teacher.ids_NK.numpy()
    log_t = np.array([log_softmax(list(row)) for row in logits])
    tail = np.array(log_t)
    np.put_along_axis(tail, order, -math.inf, 1)
    log_probs = torch.tensor(np.take_along_axis(log_t, order, 1))
    exact = TopKTerm(SparseTeacher(teacher.ids_NK, log_probs, torch.tensor(tail).logsumexp(1)))
    kl = on_device(spoiled(exact, mask)).teacher
    return kl._replace(ids_NK=given[0].teacher.ids_NK) if isinstance(given[0], TopKTerm) else kl


def on_device(given):
    """Return terms or tensors with every tensor on the kernel's device."""

    def moved(leaf):
        if is_dataclass(leaf):
            return replace(leaf, **{field.name: on_device(getattr(leaf, field.name)) for field in fields(leaf)})
        return leaf.to(DEVICE) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(moved, given)


def run(settings):
    """Return the largest errors of sums and of gradients."""
    case = PLAIN | settings
    rng = np.random.default_rng(1)
    triton_kernel.BLOCK_V = case.get("block", 64)
    count, vocab, dtype = case["count"], case["vocab"], getattr(torch, case["dtype"])
    teacher_logits, teacher = make_teacher(rng, count, vocab, max(1, case["k"]), case["temperature"])
    terms = point_terms(rng, case, teacher)
    if case["k"]:
        terms.insert(0, TopKTerm(teacher, getattr(estimators, case["estimator"]), 0.8, "kd"))
    width, bias = case.get("width"), torch.tensor(rng.normal(size=vocab + 3)) if case.get("bias") else None
    if width:  # a head with padding, that trains
        hidden = torch.tensor(rng.normal(size=(count, width)))
        head = LMHead(torch.tensor(rng.normal(size=(vocab + 3, width))), vocab, bias)
    else:  # one whose products are the hidden states themselves, so that rounding is the kernel's alone
        hidden = torch.tensor(rng.normal(size=(count, vocab)) * case.get("spread", 3.0))
        head = LMHead(identity_head(vocab).weight_VH, vocab, None if bias is None else bias[:vocab])
    hidden = hidden.to(dtype)
    mask = torch.ones(count, dtype=torch.bool)
    if case.get("mask"):
        mask[(slice(None) if case["mask"] == "none" else slice(1, None, 2))] = False
    low = [hidden.clone(), head.weight_VH.to(dtype), None if head.bias_V is None else head.bias_V.float()]
    low[0][~mask] = math.nan
    exact = [None if x is None else x.double() for x in (hidden, low[1], low[2])]
    low = on_device(low)
    trained = [i for i, x in enumerate(low) if x is not None and (i != 1 or width)]
    for i in trained:
        low[i].requires_grad_()
        exact[i].requires_grad_()

    scale, cap = case.get("scale", 1.0), case.get("cap")
    given = [spoiled(term, mask) for term in terms]
    given, on_mask = on_device(given), mask.to(DEVICE)
    own = LMHead(low[1], vocab, low[2], scale, cap)
    result = fused_linear_kd(low[0], own, given, on_mask, chunk_tokens=2, walk="kernel")
    without = fused_linear_kd(low[0].detach(), own, given, on_mask, chunk_tokens=2, walk="kernel")
    kl = kl_teacher(teacher, teacher_logits, mask, given)
    logged = fused_linear_kd(low[0], own, [*given, KLTerm(kl)], on_mask, chunk_tokens=2, walk="kernel")
    drawn = torch.tensor(rng.integers(0, vocab, (count, 3)))
    with_draws = [*given, KLTerm(kl, draw_ids_ND=drawn.masked_fill(~mask[:, None], -100).to(DEVICE))]
    by_draws = fused_linear_kd(low[0], own, with_draws, on_mask, chunk_tokens=2, walk="kernel")
    inputs = [low[i] for i in trained]
    plain, other = (torch.autograd.grad(x.loss_sum, inputs, retain_graph=True) for x in (result, logged))
    assert result.loss_sum == logged.loss_sum and all(map(torch.equal, plain, other))
    result.loss_sum.backward()
    logits = dense_head(exact[0], exact[1], vocab, exact[2], scale, cap)
    total, sum_errors = torch.zeros((), dtype=torch.float64), []
    for term in terms:
        if isinstance(term, TopKTerm):
            losses = dense_topk(case["estimator"], logits, term.teacher)
        else:
            log_p = (logits / term.temperature).log_softmax(-1).gather(1, term.ids_ND)
            losses = -(term.weights_ND * log_p).sum(1) * term.temperature**2
        part = losses[mask].sum()
        total = total + part * term.weight
        for got in (result, without):
            sum_errors.append(abs(got.terms[term.name].item() - part.item()) / max(1.0, abs(part.item())))
    rows = [x[mask.numpy()] for x in (logits.detach().numpy(), teacher_logits)]
    wanted = sum(numpy_loss("ghost", *row, max(1, case["k"])) for row in zip(*rows, strict=True))
    sum_errors.append(abs(logged.terms["kl"].item() - wanted) / max(1.0, abs(wanted)))
    log_p = logits.detach().log_softmax(-1)
    exact_kl = kl_teacher(teacher, teacher_logits, torch.ones_like(mask), given=[None])
    log_t = exact_kl.log_probs_NK.cpu()
    wanted = (log_t.exp() * (log_t - log_p.gather(1, teacher.ids_NK))).sum(1)
    tail = torch.where(exact_kl.log_tail_N.cpu() > -math.inf, log_p.gather(1, drawn).mean(1), 0)
    wanted = (wanted - exact_kl.log_tail_N.cpu().exp() * tail)[mask].sum().item()
    sum_errors.append(abs(by_draws.terms["kl"].item() - wanted) / max(1.0, abs(wanted)))
    total.backward()
    sum_errors.append(abs(result.loss_sum.item() - total.item()) / max(1.0, abs(total.item())))
    gradient_errors = []
    for i in trained:
        got, want = low[i].grad.double().cpu(), exact[i].grad
        largest = want.abs().amax(-1, keepdim=True).clamp_min(0.02)
        gradient_errors.append(((got - want).abs() / largest).nan_to_num(math.inf).max().item())
        if not i:
            assert (got[~mask] == 0).all()
    return max(sum_errors), max(gradient_errors)


def unknown_id():
    """Return whether an id outside the vocabulary makes the loss NaN and leaves all other rows' gradients alone."""
    rng = np.random.default_rng(0)
    logits, teacher = make_teacher(rng, 6, 40, 4)
    gradients, losses = [], []
    for ids in (teacher.ids_NK, teacher.ids_NK.clone().index_fill_(0, torch.tensor([2]), 47)):
        hidden = torch.tensor(logits, dtype=torch.float32, device=DEVICE).requires_grad_()
        head, term = on_device([identity_head(40, torch.float32), TopKTerm(teacher._replace(ids_NK=ids))])
        loss = fused_linear_kd(hidden, head, [term], walk="kernel").loss_sum
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, hidden)[0])
    others = [0, 1, 3, 4, 5]
    return math.isnan(losses[1]) and bool((gradients[0][others] == gradients[1][others]).all())


if __name__ == "__main__":
    np.seterr(all="ignore")  # the interpreter computes infinities and NaN as a GPU does, and NumPy remarks on them
    warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
    for name, settings in CASES.items():
        sys.stdout.write(json.dumps([name, *run(settings)]) + "\n")
    sys.stdout.write(json.dumps(["unknown id", unknown_id()]) + "\n")

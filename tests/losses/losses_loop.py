"""Programs that the tests of the loop on XLA run in processes of their own: `python losses_loop.py NAME`; JSON out."""

import json
import re
import sys

import numpy as np
import torch
import torch_xla
from losses_oracle import dense_ghost, dense_head, make_teacher, numpy_loss

from qat_lora.losses.estimators import (
    DenseTerm,
    KLTerm,
    TopKTerm,
    hybrid_terms,
    label_term,
    renorm,
    reverse,
    sampled_term,
)
from qat_lora.losses.fused.by_token import add, entries_of, read, remove_first
from qat_lora.losses.fused.op import fused_linear_kd
from qat_lora.types import LMHead

ROWS, LENGTH, VOCAB, WIDTH = 3, 11, 31, 6  # four chunks of three positions a row, the last with one left over
COUNT = ROWS * LENGTH


def log_t_and_p(logits, teacher):
    log_p = (logits / teacher.temperature).log_softmax(-1)
    return teacher.log_probs_NK, log_p.gather(1, teacher.ids_NK), log_p


def expected(name, logits, teacher, points, other):
    """Each position's loss under autograd from full logits, with T²."""
    squared = teacher.temperature**2
    log_t, inside, log_p = log_t_and_p(logits, teacher)
    if name == "ghost" and teacher.ids_NK.shape[1] == VOCAB:  # no tail: the whole KL
        return (log_t.exp() * (log_t - inside)).sum(-1) * squared
    if name == "ghost":
        return dense_ghost(logits, teacher)
    if name == "renorm":
        log_t, inside = log_t.log_softmax(-1), inside.log_softmax(-1)
        return (log_t.exp() * (log_t - inside)).sum(-1) * squared
    if name == "reverse":
        outside = log_p.scatter(1, teacher.ids_NK, -torch.inf).logsumexp(-1)
        tail = outside.exp() * (outside - teacher.log_tail_N)
        return ((inside.exp() * (inside - log_t)).sum(-1) + tail) * squared
    if name == "sampled":
        return -log_p.gather(1, points).mean(-1) * squared
    if name == "hybrid":
        mass = teacher.log_tail_N.exp()
        return (log_t.exp() * (log_t - inside)).sum(-1) - mass * log_p.gather(1, points).mean(-1)
    log_t = (other / teacher.temperature).log_softmax(-1)
    return (log_t.exp() * (log_t - log_p)).sum(-1) * squared


def oracle():
    """The largest relative error of loss and gradients in float64, for every estimator."""
    xla, found = torch_xla.device(), {}
    cases = [("ghost", 5, 1.0), ("ghost", 31, 2.0), ("renorm", 5, 1.7), ("reverse", 5, 2.0), ("hybrid", 5, 1.0)]
    for name, k, temperature in [*cases, ("sampled", 5, 1.0), ("full", 5, 1.7)]:
        rng = np.random.default_rng(k)
        _, teacher = make_teacher(rng, COUNT, VOCAB, k, temperature)
        own_logits, logged = make_teacher(np.random.default_rng(k), COUNT, VOCAB, k)
        points = torch.tensor(rng.integers(0, VOCAB, size=(COUNT, 4)))
        points[:, 1] = points[:, 0]
        hidden, weight, bias = (
            torch.tensor(rng.normal(size=shape)) for shape in ((COUNT, WIDTH), (VOCAB + 3, WIDTH), VOCAB + 3)
        )
        other, mask = torch.tensor(rng.normal(size=(COUNT, WIDTH))), torch.tensor(rng.random(COUNT) < 0.7)
        leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
        logits, teacher_logits = dense_head(hidden, weight, VOCAB, bias, 0.5, 3.0), other @ weight.detach()[:VOCAB].T
        want = expected(name, logits, teacher, points, teacher_logits)[mask].sum() * 0.8
        want = want + torch.nn.functional.cross_entropy(logits[mask], points[mask, 0], reduction="sum") * 0.3
        wanted = torch.autograd.grad(want, leaves)

        there = [x.detach().to(xla).requires_grad_() for x in leaves]
        teacher = teacher._replace(**{n: getattr(teacher, n).to(xla) for n in ("ids_NK", "log_probs_NK", "log_tail_N")})
        logged = logged._replace(
            ids_NK=teacher.ids_NK, log_probs_NK=logged.log_probs_NK.to(xla), log_tail_N=logged.log_tail_N.to(xla)
        )
        points, weight_there = points.to(xla), torch.tensor(0.8, dtype=torch.float64).to(xla)
        terms = {
            "hybrid": lambda t=teacher, p=points, w=weight_there: hybrid_terms(t, p, w),
            "sampled": lambda p=points, w=weight_there, x=temperature: [sampled_term(p, w, x)],
            "full": lambda h=other, w=weight, x=temperature: [
                DenseTerm(h.to(xla), LMHead(w.detach().to(xla), VOCAB), 0.8, temperature=x)
            ],
        }.get(name, lambda t=teacher, n=name, w=weight_there: [TopKTerm(t, *OWN[n], weight=w)])()
        head = LMHead(there[1], VOCAB, there[2], 0.5, 3.0)
        broken = there[0].masked_fill(~mask.to(xla)[:, None], torch.nan)
        terms = [*terms, label_term(points[:, 0], 0.3)]
        plain = fused_linear_kd(broken, head, terms, mask.to(xla), chunk_tokens=9, rows=ROWS)
        plain = torch.autograd.grad(plain.loss_sum, there[0], retain_graph=True)[0].cpu()
        drawn = torch.tensor(np.random.default_rng(2).integers(0, VOCAB, size=(COUNT, 3)))
        if name != "full":
            terms += [KLTerm(logged), KLTerm(logged, name="by draws", draw_ids_ND=drawn.to(xla))]
        got = fused_linear_kd(broken, head, terms, mask.to(xla), chunk_tokens=9, rows=ROWS)
        given = torch.autograd.grad(got.loss_sum, there)
        errors = [abs(got.loss_sum.item() / want.item() - 1)]
        errors += [((g.cpu() - w).norm() / w.norm()).item() for g, w in zip(given, wanted, strict=True)]
        if name != "full":
            rows = zip(logits.detach()[mask].numpy(), own_logits[mask.numpy()], strict=True)
            errors.append(abs(got.terms["kl"].item() / sum(numpy_loss("ghost", *row, k) for row in rows) - 1))
            log_p = logits.detach().log_softmax(-1)
            log_t, ids = logged.log_probs_NK.cpu(), logged.ids_NK.cpu()
            values = (log_t.exp() * (log_t - log_p.gather(1, ids))).sum(1)
            values = values - logged.log_tail_N.cpu().exp() * log_p.gather(1, drawn).mean(1)
            errors.append(abs(got.terms["by draws"].item() / values[mask].sum().item() - 1))
            errors.append(float(not torch.equal(plain, given[0].cpu())))
        found[f"{name} {k}"] = max(errors)
    return found


OWN = {"ghost": (), "renorm": (renorm,), "reverse": (reverse,)}


def bf16(device, count, chunk, vocab=300, k=7, rows=2):
    """A graph in bfloat16: loss and gradient of the hidden states, not computed yet."""
    rng = np.random.default_rng(1)
    _, teacher = make_teacher(rng, count, vocab, k)
    teacher = teacher._replace(
        ids_NK=teacher.ids_NK.to(device),
        log_probs_NK=teacher.log_probs_NK.float().to(device),
        log_tail_N=teacher.log_tail_N.float().to(device),
    )
    hidden, weight = (torch.tensor(rng.normal(size=(n, 16))).bfloat16().to(device) for n in (count, vocab))
    hidden.requires_grad_()
    draws = torch.tensor(rng.integers(0, vocab, size=(count, 3))).to(device)
    terms = [*hybrid_terms(teacher, draws), label_term(draws[:, 0], 0.3)]
    result = fused_linear_kd(hidden, LMHead(weight, vocab, None, 1.0, 20.0), terms, chunk_tokens=chunk, rows=rows)
    result.loss_sum.backward()
    return result.loss_sum.detach(), hidden.grad


def products():
    """One-hot products against indexing; the loss in bfloat16 against the CPU's; operations by number of chunks."""
    xla = torch_xla.device()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 384, generator=generator).mul(30).bfloat16()
    ids = [torch.randperm(384, generator=generator)[:9].expand(5, -1).contiguous(), torch.tensor([[3, 3]] * 5)]
    values = [torch.randn(5, n, generator=generator).bfloat16() for n in (9, 2)]
    here = entries_of(ids, rows)
    there = entries_of([x.to(xla) for x in ids], rows.to(xla))
    spread = [add(torch.zeros(5, 384), here, [v.float() for v in values])]
    spread.append(add(torch.zeros(5, 384).to(xla), there, [v.to(xla) for v in values]).cpu().float())
    found = {
        "by_products": [here.high_CEG is not None, there.high_CEG is not None],
        "read": all(torch.equal(a, b.cpu()) for a, b in zip(read(rows, here), read(rows.to(xla), there), strict=True)),
        "removed": torch.equal(remove_first(rows.clone(), here), remove_first(rows.to(xla), there).cpu()),
        "added": (spread[0] - spread[1]).abs().max().item(),
    }
    (loss, gradient), (own, own_gradient) = bf16(xla, 26, 8), bf16(torch.device("cpu"), 26, 8)
    found["loss"] = abs(loss.item() / own.item() - 1)
    found["gradient"] = ((gradient.cpu() - own_gradient).float().norm() / own_gradient.float().norm()).item()
    for chunks in (4, 16):
        text = torch_xla._XLAC._get_xla_tensors_hlo([*bf16(xla, 32 * chunks, 32)])
        names = re.findall(r"^\s*(?:ROOT )?%?\S+ = .*? ([a-z0-9-]+)\(", text, re.M)
        found[f"{chunks} chunks"] = [len(names), names.count("while"), names.count("gather") + names.count("scatter")]
    return found


def spmd():
    """One loss with the rows over four devices, its partitioned program dumped by XLA; and the same on one."""
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    count, rows, device = xr.global_runtime_device_count(), 8, torch_xla.device()
    mesh = xs.Mesh(np.arange(count), (count,), ("data",))
    teacher = make_teacher(np.random.default_rng(1), rows * LENGTH, VOCAB, 5)[1]
    arrays = [teacher.ids_NK, teacher.log_probs_NK.float(), teacher.log_tail_N.float()]
    arrays.append(torch.randn(rows * LENGTH, WIDTH, generator=torch.Generator().manual_seed(0)))
    placed = [x.unflatten(0, (rows, LENGTH)).to(device) for x in arrays]
    for x in placed:
        xs.mark_sharding(x, mesh, ("data", *[None] * (x.ndim - 1)))
    torch_xla.sync()
    weight = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1))
    results = []
    for ids, log_probs, log_tail, hidden, head in ((*placed, weight.to(device)), (*arrays, weight)):
        hidden = hidden.detach().bfloat16().requires_grad_()
        flat = [x.flatten(0, 1) if x.device.type == "xla" else x for x in (ids, log_probs, log_tail, hidden)]
        term = TopKTerm(teacher._replace(ids_NK=flat[0], log_probs_NK=flat[1], log_tail_N=flat[2]))
        sum_ = fused_linear_kd(flat[3], LMHead(head.bfloat16(), VOCAB), [term], chunk_tokens=24, rows=rows).loss_sum
        sum_.backward()
        results.append((sum_.detach(), hidden.grad.flatten()))
        torch_xla.sync()
    (loss, gradient), (own, own_gradient) = results
    difference = (gradient.cpu() - own_gradient).float().norm() / own_gradient.float().norm()
    return {"devices": count, "loss": abs(loss.item() / own.item() - 1), "gradient": difference.item()}


if __name__ == "__main__":
    print(json.dumps({"oracle": oracle, "products": products, "spmd": spmd}[sys.argv[1]]()))

"""Losses on full logits or hidden states: for small vocabularies, and for code that has the logits anyway.

Plain log_softmax and products. `F.kl_div` is avoided on purpose: its argument order, its four reductions
(`mean` divides by the vocabulary too) and its NaN at teacher probability zero are a well-known source of silently
wrong distillation, and it was one of the operators that fell back to the CPU on XLA.

Everything is computed in float32, or in float64 for float64 inputs. Padded vocabulary entries: slice them off on
both sides, or set both sides to -inf.
"""

import torch
from torch import Tensor

from qat_lora.losses.estimators import weighted, wide_dtype


def kd_soft_ce(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the mean soft cross-entropy -Σ softmax(teacher/T) · log_softmax(student/T), times T², as a scalar.

    Both arguments are [..., V]; the mean is over all leading positions, so drop masked ones first or use
    `fused_linear_kd`. The gradient goes to the student only. The minimum is the teacher's entropy times T², not zero.
    Static shapes, no host read: safe on XLA. ValueError where shapes differ, or the temperature is not positive.
    """
    if student_logits.shape != teacher_logits.shape:
        what = f"student {tuple(student_logits.shape)} and teacher {tuple(teacher_logits.shape)} differ"
        remedy = "both must have one shape, so slice padded vocabulary entries off the wider one"
        raise ValueError(f"kd_soft_ce: {what}; {remedy}")
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: expected a number above 0")
    wide = wide_dtype(torch.promote_types(student_logits.dtype, teacher_logits.dtype))
    teacher = torch.softmax(teacher_logits.detach().to(wide) / temperature, dim=-1)
    log_student = torch.log_softmax(student_logits.to(wide) / temperature, dim=-1)
    return -weighted(teacher, log_student).sum(-1).mean() * temperature**2


def hidden_error_sum(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the relative squared error of hidden states [..., H], summed over positions, and how many counted.

    At a position: mean over H of (student - teacher)², divided by the mean over H of teacher². Models differ in the
    scale of their hidden states by orders of magnitude, also within a row (massive activations); relative, 1 is what a
    student of zeros would have, everywhere, so that a weight means the same for every model.
    """
    wide, keep = wide_dtype(torch.promote_types(student.dtype, teacher.dtype)), mask.bool()[..., None]
    # Masked before the square: a NaN in padding would come back through its derivative.
    student, teacher = student.masked_fill(~keep, 0), teacher.masked_fill(~keep, 0).detach().to(wide)
    scale = teacher.square().mean(-1).clamp_min(torch.finfo(torch.float32).tiny)
    loss = (student.to(wide) - teacher).square().mean(-1) / scale
    return torch.where(mask.bool(), loss * mask, torch.zeros_like(loss)).sum(), mask.sum(dtype=torch.float32)

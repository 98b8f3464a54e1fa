"""What a planned run takes of the machine, for `doctor`: the plans of `--dry-run`, as bytes of memory and disk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qat_lora.options import QatOptions, QuantizeOptions, RecoverOptions
from qat_lora.plan.qat import plan_qat
from qat_lora.plan.recover import plan_quantising, plan_recovery
from qat_lora.registry import Requirements
from qat_lora.runtime.launch.select import runs_on_host


def of_recover(options: RecoverOptions) -> Requirements:
    """Return what a recovery takes.

    Raises:
        QatLoraError: what the run itself would refuse.
    """
    plan = plan_recovery(_quiet(options))
    # A checkpoint: what trains, two moments, perhaps an average. An export: halves, and the base of trained scales.
    kept = options.loop.keep_checkpoints + 1
    disk = kept * 16 * plan["trained"] + 3 * (2 * plan["trained"] + options.train_scales * plan["stored_bytes"])
    memory = plan["total_bytes"]
    host = memory if runs_on_host(options.run.device, options.run.tpu) else plan["bytes"]["weights"]
    return Requirements("this recovery", memory, host, disk)


def of_quantize(options: QuantizeOptions) -> Requirements:
    """Return what quantising takes.

    Raises:
        QatLoraError: what the run itself would refuse.
    """
    plan = plan_quantising(_quiet(options))
    starts = 4 * options.start_rank * plan["inputs_and_outputs"]
    # Twice: finished blocks are kept until the whole is written.
    disk = 2 * (plan["stored_bytes"] + starts) + plan["scratch_bytes"]
    return Requirements("this quantisation", plan["weights_bytes"], plan["weights_bytes"], disk)


def of_qat(options: QatOptions) -> Requirements:
    """Return what `qat` takes.

    Raises:
        QatLoraError: what the run itself would refuse.
    """
    plan = plan_qat(_quiet(options))
    made = plan["start_bytes"] > 0
    disk = (options.loop.keep_checkpoints + 1) * 12 * plan["trained"] + (3 + made) * plan["stored_bytes"]
    disk += plan["scratch_bytes"]
    total, start, beside = plan["total_bytes"], plan["start_bytes"], plan["host_bytes"]
    if runs_on_host(options.run.device, options.run.tpu):
        return Requirements("this training", max(total + beside, start), max(total + beside, start), disk)
    original = 4 * plan["parameters"] if options.from_scratch else 0  # on the host while its copy is quantised
    return Requirements("this training", max(total, start - original), max(beside, start), disk)


def _quiet(options: Any) -> Any:
    return replace(options, run=replace(options.run, json=True))

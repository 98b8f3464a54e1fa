"""What a planned run takes of the machine, for `doctor`: the plans of `--dry-run`, as bytes of memory and disk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qat_lora.app.planning import plan_quantising, plan_recovery
from qat_lora.app.planning_qat import plan_qat
from qat_lora.diagnose.doctor import Needs, on_host
from qat_lora.errors import ConfigError


def needs(words: str, options: Any) -> Needs:
    """Return what a planned run takes of the machine, for `doctor`.

    Raises:
        ConfigError: a command whose needs shapes do not tell.
        QatLoraError: what the run itself would refuse.
    """
    quiet = replace(options, run=replace(options.run, json=True))
    if words == "recover":
        plan = plan_recovery(quiet)
        # A checkpoint: what trains, two moments, perhaps an average. An export: halves, and the base of trained scales.
        kept = options.loop.keep_checkpoints + 1
        disk = kept * 16 * plan["trained"] + 3 * (2 * plan["trained"] + options.train_scales * plan["stored_bytes"])
        memory = plan["total_bytes"]
        host = memory if on_host(options.run.device, options.run.tpu) else plan["bytes"]["weights"]
        return Needs("this recovery", memory, host, disk)
    if words == "quantize":
        plan = plan_quantising(quiet)
        starts = 4 * options.start_rank * plan["inputs_and_outputs"]
        # Twice: finished blocks are kept until the whole is written.
        disk = 2 * (plan["stored_bytes"] + starts) + plan["scratch_bytes"]
        return Needs("this quantisation", plan["weights_bytes"], plan["weights_bytes"], disk)
    if words == "qat":
        plan = plan_qat(quiet)
        made = plan["start_bytes"] > 0
        disk = (options.loop.keep_checkpoints + 1) * 12 * plan["trained"] + (3 + made) * plan["stored_bytes"]
        disk += plan["scratch_bytes"]
        total, start, beside = plan["total_bytes"], plan["start_bytes"], plan["host_bytes"]
        if on_host(options.run.device, options.run.tpu):
            return Needs("this training", max(total + beside, start), max(total + beside, start), disk)
        original = 4 * plan["parameters"] if options.from_scratch else 0  # on the host while its copy is quantised
        return Needs("this training", max(total, start - original), max(beside, start), disk)
    raise ConfigError(
        f"doctor: {words} is not planned from shapes; allowed: recover, qat, quantize (a cache has its own --dry-run)"
    )

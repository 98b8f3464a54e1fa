"""The command that says how much memory, time and money a recovery run will need, from a config.json alone."""

from __future__ import annotations

from typing import Any

from qat_lora.options import EstimateOptions
from qat_lora.plan import memory
from qat_lora.plan.devices import named
from qat_lora.runtime.base import Runtime


def estimate(options: EstimateOptions, runtime: Runtime) -> dict[str, Any]:
    """Return (and print, unless `--json`) parameter counts, bytes of a run on one replica, time and cost.

    Raises:
        ModelError: no config.json, or an architecture that transformers does not know.
        ConfigError: an unknown preset or device, or patterns that match no layer.
    """
    devices = named(options.devices)
    config, module = memory.skeleton(options)
    report = {
        **memory.summary(config, module, options, devices),
        "effective_batch": options.batch_size * options.accumulation_steps * runtime.replicas,
    }
    if options.table:
        report["table"] = memory.table(config, module, options, report["attention"])
    if not options.run.json:
        print(memory.report_text(report, options, runtime.replicas))
    return report

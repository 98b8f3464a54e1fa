"""`estimate`: how much memory, time and money a recovery run will need, from a model's config.json alone."""

from pathlib import Path
from typing import Any

from qat_lora.options import EstimateOptions
from qat_lora.plan.devices import named
from qat_lora.plan.memory import GIB, forecast, shown_device, skeleton
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.precision import with_dtype


def estimate(options: EstimateOptions, runtime: Runtime) -> dict[str, Any]:
    """Return (print without `--json`) counts, bytes of a run on one replica, time, cost; ModelError, ConfigError."""
    devices = named(options.devices)
    options = with_dtype(options, shown_device(options, devices)[0])[0]
    rows = options.batch_size * options.accumulation_steps * runtime.replicas
    report = forecast(skeleton(options), options, devices) | {"effective_batch": rows}
    if not options.run.json:
        print(_text(report, options, runtime.replicas))
    return report


def _text(report: dict[str, Any], options: EstimateOptions, replicas: int) -> str:
    texts = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    form, steps, of_device, note = texts.rstrip().split("\n---\n")
    stored = f" ({report['stored_bytes_of_quantised'] / GIB:.3f} GiB stored)" if report["quantised"] else ""
    places = [name for name, there in report["devices"].items() if there["attention"] == report["attention"]]
    told = {"stored": stored, "places": f", as on {', '.join(places)}" if places else "", "replicas": replicas}
    told |= {"s": "s" if replicas > 1 else "", "dtype": options.run.dtype, "rank": options.lora.rank}
    lines = [form.format(**{**vars(options), **report, **told})]
    sizes = {**report["bytes"], "together": report["total_bytes"]}
    lines += [f"{name:<18}{size / GIB:>9.3f} GiB" for name, size in sizes.items() if size]
    lines.append(steps.format(**vars(options), flops_per_token=report["flops_per_token"]))
    for name, there in report["devices"].items():
        fit, cost = "fits" if there["fits"] else "does not fit", f"{there['usd']:,.2f} USD" if there["usd"] else "-"
        lines.append(of_device.format(**there, name=name, fit=fit, cost=cost, gib=there["total_bytes"] / GIB))
    return "\n".join([*lines, "", note])

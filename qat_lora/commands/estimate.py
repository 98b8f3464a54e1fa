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
    lines = [f"{options.model}: {report['parameters']:,} parameters, {report['quantised']:,} of them quantised"]
    if report["quantised"]:
        lines[0] += f" ({report['stored_bytes_of_quantised'] / GIB:.3f} GiB stored)"
    lines.append(f"{report['trained']:,} numbers train (rank {options.lora.rank})")
    lines.append(
        f"batch {options.batch_size} x {options.length} tokens, {options.accumulation_steps} micro-batches, "
        f"{replicas} replica{'s' if replicas > 1 else ''}: effective batch {report['effective_batch']}"
    )
    places = [name for name, there in report["devices"].items() if there["attention"] == report["attention"]]
    step = f"a step in {options.run.dtype} with {report['attention']} attention"
    lines += ["", step + (f", as on {', '.join(places)}" if places else "")]
    lines += [f"{name:<18}{size / GIB:>9.3f} GiB" for name, size in report["bytes"].items() if size]
    lines.append(f"{'together':<18}{report['total_bytes'] / GIB:>9.3f} GiB")
    rate, work = f"{options.utilisation:.0%} of the peak rate", f"{report['flops_per_token']:.3g} operations a token"
    lines += ["", f"{options.max_steps} steps at {rate}, {work}"]
    for name, there in report["devices"].items():
        cost = f"{there['usd']:,.2f} USD" if there["usd"] else "-"
        fits = "fits" if there["fits"] else "does not fit"
        lines.append(
            f"{name:<9}{there['total_bytes'] / GIB:>8.2f} GiB  {fits:<12}{there['hours']:>9.2f} h{cost:>14}"
            f"{there['tokens']:>16,} tokens {there['tokens_per_s']:>9,.0f}/s, bound by: {there['bound']}"
        )
    note = Path(__file__).with_name("estimate.txt").read_text(encoding="utf-8")
    return "\n".join([*lines, "", note.rstrip()])

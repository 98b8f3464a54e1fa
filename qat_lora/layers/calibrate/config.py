"""The settings that turn a full-precision model into codes and scales.

One declaration serves two commands, `quantize` and `qat --from-scratch`, which make the same student from the same
settings. Their option classes inherit it, with another default or help line where they differ, so that a setting
cannot be added to one and forgotten in the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qat_lora.config import option
from qat_lora.quant.initialize import Method


@dataclass(frozen=True)
class QuantizeConfig:
    """How weights become codes and scales: the same for `quantize` and for `qat --from-scratch`."""

    model: str | None = option(None, "full-precision model: Hugging Face folder or Hub name")
    preset: str | None = option(None, "how weights are stored", alias="config")
    keep: tuple[str, ...] = option((), "patterns of layers that stay unquantised", unit="regular expressions")
    override: tuple[str, ...] = option(
        (), "layers that another preset stores, the first match decides", unit="list of PATTERN=PRESET"
    )
    quantize_head: str | None = option(
        None, "preset of the output head, and of the embedding where both are one; default: kept"
    )
    init: Method = option(
        "descent",
        "start of codes: absmax or mse rounding; with text also awq (clipping), gptq and descent (compensated)",
    )
    calibrate_on: Literal["student", "teacher"] = option(
        "student",
        "inputs that awq, gptq and descent fit a layer to: as quantised layers before it put out, or as teacher",
    )
    metric: Literal["fisher", "outputs"] = option(
        "fisher", "cost of an error: to the model's predictions (needs a backward pass) or to the layer's own outputs"
    )
    calibration_rows: int = option(128, "rows of calibration text", unit="rows", min=1)

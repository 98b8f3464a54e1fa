"""Run a command of the app on a chosen device: the device first, everything heavy after.

transformers decides at import whether PyTorch/XLA is used, so the choice of the device has to come before the
import of `app`. That order is kept in this one place; command line, scripts, notebooks and the Python API all
start here.
"""

from __future__ import annotations

import importlib
from typing import Any

from qat_lora.runtime.select import select_runtime


def run(command: str, options: Any, module: str = "qat_lora.app") -> Any:
    """Run `module.command(options, runtime)` on every process of the chosen device.

    Args:
        command: name of the function, for example `recover`.
        options: its options; `options.run` names the device.
        module: where the function lives.

    Raises:
        QatLoraError: with a message for people.
    """
    runtime = select_runtime(options.run.device, options.run.tpu)
    return runtime.launch(lambda: getattr(importlib.import_module(module), command)(options, runtime))

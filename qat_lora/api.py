"""The commands as Python functions, with a command's settings as keywords.

    folder = qat_lora.quantize_model(model="Qwen/Qwen3-0.6B", preset="q4_r32", kd_cache_dir="caches/wikitext103")

Every setting of the command line is a keyword, under the name or the alias that it has there and with the same
checks and defaults, since both are read off the same option class, an object of which may be given in their place;
`recipe` names a YAML file. To quantise a module in memory, use `qat_lora.layers.calibrate.quantize.quantize_model`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qat_lora.config import resolve, setting_path
from qat_lora.errors import ConfigError
from qat_lora.registry import COMMANDS
from qat_lora.runtime.launch.start import run

if TYPE_CHECKING:
    from qat_lora import options as of


def build_kd_cache(options: of.CacheBuildOptions | None = None, /, **settings: Any) -> Path:
    """Write a teacher's logits to a KD cache, as `qat-lora cache build` (`teacher`, `dataset`); return its folder."""
    return _call("cache build", options, settings)


def quantize_model(options: of.QuantizeOptions | None = None, /, **settings: Any) -> Path:
    """Quantise a model and its adapter start, as `qat-lora quantize` (`model`, `preset`, `out`); return its folder."""
    return _call("quantize", options, settings)


def train_recovery_lora(options: of.RecoverOptions | None = None, /, **settings: Any) -> Path:
    """Train an adapter, as `qat-lora recover` (`checkpoint`, `kd_cache_dir`); return the run, whose `best` it is."""
    return _call("recover", options, settings)


def evaluate_models(options: of.EvalOptions | None = None, /, **settings: Any) -> dict[str, Any]:
    """Score students beside their teacher, as `qat-lora eval` (`teacher`, `students`, `dataset`); return figures."""
    return _call("eval", options, settings)


def generate_text(options: of.GenerateOptions | None = None, /, **settings: Any) -> str | list[dict[str, str]]:
    """Continue `prompt` or the lines of `prompts`, as `qat-lora generate`; return the text, or prompts with texts."""
    return _call("generate", options, settings)


def export_student(options: of.ExportOptions | None = None, /, **settings: Any) -> Path:
    """Write a student for other tools, as `qat-lora export` (`student`, `form`, `out`); return the folder."""
    return _call("export", options, settings)


def _call(words: str, options: Any, settings: dict[str, Any]) -> Any:
    command = COMMANDS[words]
    cls = command.options_class()
    if options is None:
        recipe = settings.pop("recipe", None)
        options = resolve(cls, recipe=recipe, flags={setting_path(cls, name): v for name, v in settings.items()})
    elif settings:
        raise ConfigError(f"{next(iter(settings))}: give either {command.options} or settings by name, not both")
    elif not isinstance(options, cls):
        raise ConfigError(f"options: expected {command.options}, got {type(options).__name__}")
    return run(command, options)

"""The forms that a student can be exported in, the formats that one engine reads without rounding, and their bytes.

A form is added with a module that has a `plan`, an entry in `forms.yaml`, its name in the `--form` option, and Python
that loads it in `usage/`, once more with an adapter beside it. Modules are named as text: two need the extra `export`.

A target size is meant of what the engine gets, not of our own folder: llama.cpp and MLX keep an embedding on a 4-bit
grid, MLX adds a bias to every step, compressed-tensors writes the LM head dense. Counted are the tensors of base and
adapter, as `qat-lora inspect` does; names, headers (tens of kB) and the tokenizer come on top. Formats are presets that
an export holds exactly, with blocks that divide a layer's rows.
"""

import importlib
import math
import os
from collections.abc import Callable, Mapping
from collections.abc import Container as Names
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import yaml
from torch import Tensor

from qat_lora.errors import ConfigError
from qat_lora.export.containers import BLOCK, SUPER, Container, dense_tables
from qat_lora.export.gguf_model import own_tensors
from qat_lora.extras import require
from qat_lora.layers.convert import block_of
from qat_lora.models.load import CausalLM
from qat_lora.models.student import Student
from qat_lora.quant.presets import PRESETS, Engine
from qat_lora.quant.spec import QuantSpec
from qat_lora.terminal import redact


@dataclass(frozen=True)
class ExportJob:
    """The student to export and the settings of the form."""

    name: str  # the student as the user named it
    student: Student
    adapter: Path | None  # folder of its adapter
    tokenizer: Any
    dtype: str  # of all tensors that have no type of their own: a key of `models.load.DTYPES`
    container_bits: int | None = None
    exact_only: bool = False
    embedding_bits: float | None = None  # of the embedding and of an LM head without codes; None for as they are
    importance: Callable[[], Tensor] | None = None  # `containers.head_importance`: mean square of the LM head's input
    quiet: bool = True  # no progress bars


@dataclass(frozen=True)
class ExportPlan:
    """What an export will write, once everything that could be refused has been checked."""

    write: Callable[[Path], None]  # fills an empty folder; the command adds tokenizer, model card and checksums
    # Quantised layers as the container holds them, None for one that is written dense.
    containers: Mapping[str, Container | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # for the model card and the terminal
    # Embedding and LM head as the container holds them, where the export quantised them.
    tables: Mapping[str, Container] = field(default_factory=dict)


def usage(form: str, adapter: bool) -> str:
    """Return the Python that loads an export, run in its folder alone, as tests and `benchmarks/consumers.py` do."""
    file = Path(__file__).with_name("usage") / f"{form}+adapter.txt"
    return (file if adapter and file.is_file() else file.with_name(f"{form}.txt")).read_text(encoding="utf-8").strip()


def display_name(path: str) -> str:
    """Return a name for people: the last part of a path or URL without credentials, a Hub name as it is."""
    path = redact(path)
    is_path = path.startswith((".", "/", "~", "\\")) or path.count("/") > 1 or os.path.exists(path)
    return PurePath(path).name if is_path else path


class Form(NamedTuple):
    """An entry of the table."""

    module: str  # has `plan(job) -> ExportPlan`, or a function of another name after a colon
    library: str  # `library_name` on the model card
    needs: str = ""  # package of the extra `export`
    dtype: str = ""  # of the dense tensors where the user names none; empty: the full-precision model's
    engine: Engine | None = None  # by whose formats codes are laid out, None where weights are dense

    def plan(self, job: ExportJob) -> ExportPlan:
        """Check everything that may be refused, by a QatLoraError, and return what will be written."""
        if self.needs:
            require(self.needs, "export")
        module, _, function = self.module.partition(":")
        return getattr(importlib.import_module(f"qat_lora.export.{module}"), function or "plan")(job)


_TABLES = yaml.safe_load(Path(__file__).with_name("forms.yaml").read_text(encoding="utf-8"))
FORMS = {name: Form(**of) for name, of in _TABLES["forms"].items()}
SEEING = tuple(_TABLES["seeing"])  # forms of models that see
FORMATS: dict[Engine, list[str]] = _TABLES["formats"]


def formats(engine: Engine, name: str, module: Any) -> list[QuantSpec]:
    """Return the formats of an engine whose blocks divide a layer's rows; ConfigError where none does."""
    columns = module.get_submodule(name).in_features
    specs = [spec for preset in FORMATS[engine] if (spec := PRESETS[preset].rules[0][1]) is not None]
    found = [spec for spec in specs if columns % (SUPER if spec.step_bits else spec.group_size or 1) == 0]
    if not found:
        raise ConfigError(f"engine: no block of {engine} divides the {columns} inputs of {name}; give --keep {name}")
    return found


def layer_bytes(engine: Engine, spec: QuantSpec, rows: int, columns: int) -> int:
    """Return the bytes of a weight [O, I] in one of the engine's `formats`, without its layer's bias."""
    beside = {"mlx": 2 * rows * spec.groups(columns), "vllm": 16}  # biases of groups; the weight's shape
    return spec.stored_bits(rows, columns) // 8 + beside.get(engine, 0)


def adapter_bytes(engine: Engine, rows: int, columns: int, rank: int) -> int:
    """Return the bytes of the factors of a rank on a weight [O, I]: float16, and Q8_0 where llama.cpp's blocks fit."""
    in_blocks = [engine == "llama.cpp" and width % BLOCK == 0 for width in (columns, rank)]
    return sum(rank * n * 34 // 32 if q8 else 2 * rank * n for q8, n in zip(in_blocks, (columns, rows), strict=True))


def other_bytes(engine: Engine, module: Any, quantised: Names[str], itemsize: int) -> int:
    """Return the bytes of all tensors but weights of `quantised` layers, tied once, by the bytes of a number."""
    of_codes = {id(part.weight) for name, part in module.named_modules() if name in quantised}
    tables = {id(table.weight) for table in dense_tables(module).values()}
    total = 0
    for name, parameter in module.named_parameters():
        vector, is_table, size = parameter.ndim == 1, id(parameter) in tables, float(itemsize)
        if engine == "llama.cpp":
            size = 4.5 / 8 if is_table else 4 if vector else size
        elif engine == "mlx":
            bits = 4.5 if parameter.shape[-1] % 64 == 0 else 5
            size = bits / 8 if is_table else 4 if vector and block_of(name) is None else 2
        total += 0 if id(parameter) in of_codes else math.ceil(parameter.numel() * size)
    if engine == "llama.cpp" and module.device.type != "meta":  # shapes alone lack the factors of scaled positions
        total += sum(tensor.nbytes for _, tensor in own_tensors(CausalLM(module, Path())))
    return total

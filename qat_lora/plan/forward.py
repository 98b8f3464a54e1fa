"""`--dry-run` of commands that train nothing: `eval`, `export`, and `cache build` where the weights are not here.

Shapes tell what they hold: a student computes by dense weights whatever its files hold (`prepare_base`), in the type of
the run. Only a float32 teacher of `eval` stays in its files on a CPU, but for a piece of its head (`upcast`).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from qat_lora.cache.build.builder import CHUNK_BYTES
from qat_lora.cache.build.writer import Partition
from qat_lora.cache.format import layout as fmt
from qat_lora.errors import ConfigError
from qat_lora.evaluate.score import chunk_positions
from qat_lora.export.card import cache_of_run
from qat_lora.export.containers import KEPT, dense_tables
from qat_lora.export.forms import FORMS, layer_bytes, other_bytes
from qat_lora.files.gguf_header import BASE
from qat_lora.layers.calibrate.upcast import PIECE
from qat_lora.layers.convert import quant_layers, weight_count
from qat_lora.models.adapter import joint_ranks, read_adapter
from qat_lora.models.hub import local_folder
from qat_lora.models.load import DTYPES, stored_dtype
from qat_lora.models.student import adapter_folder, local_base
from qat_lora.options import CacheBuildOptions, EstimateOptions, EvalOptions, ExportOptions, RunConfig
from qat_lora.plan.devices import attention_on, likely
from qat_lora.plan.memory import GIB, IMPORTS_BYTES, forecast, meta_student, needing
from qat_lora.plan.step import Shapes
from qat_lora.plan.training import config_name, device_of, is_here, last_lines, parts_text, replicas_of
from qat_lora.registry import DryRun, Requirements
from qat_lora.runtime.launch.select import runs_on_host
from qat_lora.runtime.precision import with_dtype

ROWS = 10_000  # where all of a text is read, whose length is not known
WRITE_S = 2.5e-8  # to read, decode and write a weight: 12 to 21 s for 0.6 B on one core, by form


def plan_cache(options: CacheBuildOptions) -> DryRun:
    """Plan a cache by its teacher's config; ModelError: there is none; ConfigError: the teacher is a server's."""
    if options.served.teacher_url is not None:
        raise ConfigError("teacher_url: a server's memory and time cannot be planned here; leave it out")
    options, share = with_dtype(options, device_of(options.run))[0], Partition.parse(options.builder)
    shapes, rows = _shapes(str(options.teacher), options.run), share.of(options.num_rows or ROWS)
    rows += options.eval_rows * (share.builder == 0)
    given = options.length, options.top_k, options.vocab_size or shapes.vocab_size, sorted(set(options.temperatures))
    weighted = int(options.positions != "all" or options.text.weight_field is not None)
    width = shapes.config.hidden_size * options.hidden
    held = fmt.Contents(*given, options.value_dtype, options.draws_from_tail, options.draws, weighted, hidden=width)
    logits = min(CHUNK_BYTES, 4 * options.teacher_batch_size * options.length * held.vocab_size)
    disk = rows * fmt.row_bytes(fmt.array_table(held)) + 2 * width * held.vocab_size
    assumed = [] if options.num_rows else [f"--num-rows is not given: {ROWS:,} rows are taken"]
    asked = _asked(options.teacher, rows, options.length, options.teacher_batch_size, options.run)
    sizes = {"weights": _bytes(shapes, options.run)[0], "logits": logits}
    return _plan("this build", shapes, asked, 1, sizes, disk, assumed)


def plan_eval(options: EvalOptions) -> DryRun:
    """Plan an evaluation; ModelError: the teacher has no config.json."""
    options = with_dtype(options, device_of(options.run))[0]
    run, models = options.run, 1 + len(options.students)
    shapes, texts = _shapes(str(options.teacher), run), len(options.domain) + (options.text.dataset is not None)
    (whole, tables), vocab = _bytes(shapes, run), shapes.vocab_size
    in_files = runs_on_host(run.device, run.tpu) and run.dtype == "float32"
    sizes = {"weights": (models - 1) * whole + (min(tables, 4 * PIECE) if in_files else whole)}
    sizes["logits"] = 4 * (models + 4) * vocab * chunk_positions(vocab)
    students = [word.rpartition("=")[2] for word in options.students]
    assumed = ["students have the teacher's shape"] * (models > 1)
    assumed += [f"{name} is not here yet" for name in students if not is_here(name)]
    assumed += [] if options.eval_rows else [f"all rows of a text are {ROWS:,}"]
    assumed += ["tasks and continuations are not timed"] * bool(options.health.generate or options.harness.tasks)
    asked = _asked(options.teacher, texts * (options.eval_rows or ROWS), options.row_length, options.batch_size, run)
    return _plan("this evaluation", shapes, asked, models, sizes, 0, assumed)


def plan_export(options: ExportOptions) -> DryRun:
    """Plan an export; ModelError: the student, or its base, has no config.json."""
    student, run, form = str(options.student), replace(options.run, dtype="float32"), FORMS[options.form]
    adapter, gguf = adapter_folder(student), Path(student).expanduser() / BASE
    base = gguf if gguf.is_file() else (local_base(adapter) or read_adapter(adapter).base) if adapter else student
    shapes, stored = _shapes(str(base), run), stored_dtype(local_folder(base, "config.json") or Path(base))
    width = DTYPES[(form.dtype or stored) if options.dtype == "auto" else options.dtype].itemsize
    layers, (whole, tables), disk = quant_layers(shapes.module), _bytes(shapes, run), width * shapes.module.rest_weights
    sizes = {"weights": whole, "tables": 2 * tables, "codes": (form.engine == "mlx") * whole * 9 // 32}  # a byte each
    if form.engine:
        disk += other_bytes(form.engine, shapes.module, layers, width)
        disk += sum(layer_bytes(form.engine, x.spec, x.out_features, x.in_features) for x in layers.values())
        disk += int(tables * ((options.embedding_bits or 4.5) - 4.5)) // 32
        if adapter:
            disk += sum(file.stat().st_size for file in adapter.glob("*.safetensors"))
        else:  # the start beside which codes were chosen, in float16
            ranks = joint_ranks(Path(student).expanduser())
            for name, layer in layers.items():
                disk += 2 * ranks.get(name, 0) * (layer.in_features + layer.out_features)
    else:
        disk = sizes["written"] = disk + width * weight_count(shapes.module)
    has_text = options.text.dataset is not None or cache_of_run(adapter) is not None
    passes = (2 + (options.eval_rows * options.length > KEPT)) * (form.engine in ("llama.cpp", "mlx") and has_text)
    assumed = ["codes fit the form, as those of another grid are rounded to take more"] if form.engine else []
    assumed += [] if passes else ["nothing is measured: the time is that of files on one core"]
    asked = _asked(options.student, options.eval_rows, options.length, 4, run)
    return _plan("this export", shapes, asked, passes, sizes, disk, assumed)


def _shapes(name: str, run: RunConfig) -> Shapes:
    config, module = meta_student(config_name(name), None, DTYPES[run.dtype])
    return Shapes(config.get_text_config(), module, {}, 0, False, 0, passes=1)


def _bytes(shapes: Shapes, run: RunConfig) -> tuple[int, int]:
    """Return the bytes of all weights in the run's type, and those of embedding and head in float32."""
    tables = 4 * sum(table.weight.numel() for table in dense_tables(shapes.module).values())
    return DTYPES[run.dtype].itemsize * weight_count(shapes.module), tables


def _asked(name: str | None, rows: int, length: int, batch_size: int, run: RunConfig) -> EstimateOptions:
    given: dict[str, Any] = {"length": length, "batch_size": batch_size, "max_steps": -(-rows // batch_size)}
    return EstimateOptions(model=name, run=run, head_k=0, attention=attention_on(device_of(run)), **given)


def _plan(
    what: str, shapes: Shapes, asked: EstimateOptions, passes: int, sizes: dict[str, int], disk: int, assumed: list[str]
) -> DryRun:
    """Return the plan of so many passes over `asked.max_steps` batches; `sizes` are bytes of what is held."""
    replicas, on_host = replicas_of(asked.run, assumed), runs_on_host(asked.run.device, asked.run.tpu)
    asked = replace(asked, max_steps=-(-asked.max_steps // replicas))
    found = forecast(shapes, asked, likely(device_of(asked.run), replicas))
    sizes |= {"activations": found["bytes"]["working memory"], "imports": IMPORTS_BYTES * on_host}
    total, devices = sum(sizes.values()), found["devices"]
    for there in devices.values():
        there |= {name: passes * there[name] for name in ("hours", "usd")}
        there["tokens_per_s"] = there["tokens_per_s"] / passes if passes else 0
        there["hours"] += WRITE_S * found["parameters"] * ("tables" in sizes) / 3600  # an export's files
        there |= needing(total, there["memory_bytes"])
    rows = asked.max_steps * asked.batch_size * replicas
    report = {"model": asked.model, "parameters": found["parameters"], "passes": passes, "rows": rows}
    report |= {"length": asked.length, "tokens": rows * asked.length, "bytes": sizes, "total_bytes": total}
    report["operations"] = passes * rows * asked.length * found["flops_per_token"]
    report |= {"disk_bytes": disk, "devices": devices, "assumed": assumed}
    form = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").rstrip()
    told = {"gib": total / GIB, "parts": parts_text(sizes), "disk_gib": disk / GIB, "dtype": asked.run.dtype}
    text = "\n".join([form.format(**report, **told), *last_lines(report, asked.utilisation)])
    return DryRun(report, text, Requirements(what, total, total if on_host else IMPORTS_BYTES + sizes["weights"], disk))

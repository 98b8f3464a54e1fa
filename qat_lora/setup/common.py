"""Functions that several commands need: status lines, optional pictures, models, batches of text."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.store import read_manifest
from qat_lora.data.framing import describe_packing
from qat_lora.data.packing import PackedRow, draw_rows, make_encoder, pack_rows
from qat_lora.data.sources import TextConfig, describe_source, open_documents
from qat_lora.errors import ConfigError, MissingExtraError, ModelError
from qat_lora.files.gguf_header import GGUF
from qat_lora.layers.stacked import forget_layers, stack_layers
from qat_lora.models.hub import HubConfig
from qat_lora.models.load import DTYPES, FILE_SUFFIXES, CausalLM, load_tokenizer, resolve_model, tokenizer_sha256
from qat_lora.models.teachers import LlamaCppModel
from qat_lora.options import QatOptions, QuantizeOptions, RunConfig
from qat_lora.runtime.base import Runtime
from qat_lora.terminal import redact
from qat_lora.types import Batch

T = TypeVar("T", bound=Any)  # the settings of a command


def say(run: RunConfig, line: str) -> None:
    """Print a status line, unless the user wants quiet or JSON."""
    if not (run.quiet or run.json):
        print(redact(line), flush=True)


def picture(run: RunConfig, draw: Callable[[], None]) -> None:
    """Draw a picture if matplotlib is there; without it a run is complete all the same."""
    try:
        draw()
    except MissingExtraError as error:
        say(run, f"no picture: {error}")


def fetch(runtime: Runtime, name: str, hub: HubConfig, setting: str = "model") -> None:
    """Let the main process download a model, named by `setting`, that is not here, while others wait for the files."""
    if runtime.is_main:
        try:
            resolve_model(name, hub.revision)
        except ModelError as error:
            raise ModelError(setting + str(error).removeprefix("model")) from None
    runtime.barrier("model_download")


def with_teacher(options: QatOptions) -> QatOptions:
    """Return options with the cache's teacher as the model to quantise, where one is needed and none was given."""
    if options.model is not None or not options.from_scratch:
        return options
    return replace(options, model=read_manifest(str(options.kd_cache_dir)).fingerprint.teacher)


def fit_attention(model: CausalLM, runtime: Runtime) -> None:
    """Let attention keep no scores for the backward pass, in the runtime's way."""
    if runtime.attention == "tiled":
        model.tile_attention()
    elif runtime.attention == "blocked":
        model.block_attention(runtime.kept, runtime.attention_kernel)
    elif runtime.attention == "flex":
        model.compile_layers()


def place_teacher(model: CausalLM, runtime: Runtime) -> None:
    """Place a model that only reads rows, its layers stacked where the runtime loops over them."""
    scan = runtime.layer_scan()
    if scan is not None:
        stack_layers(model.module, scan)
        forget_layers(model.module)
    runtime.place(model.module)


def run_name(model: str) -> str:
    """Return what a run is called after the model it begins with: its last part, without the suffix of a file."""
    path = Path(model)
    return path.stem if path.suffix in (*FILE_SUFFIXES, GGUF) else path.name


def fits_positions(model: CausalLM | LlamaCppModel, length: int) -> None:
    """Raise ConfigError for rows longer than the model has positions."""
    if model.max_positions is not None and length > model.max_positions:
        limit = model.max_positions
        raise ConfigError(f"length: {length} tokens are more than the model's {limit} positions; give {limit} or less")


def check_fits(dataset: KDCacheDataset, model: CausalLM) -> None:
    """Raise CacheError unless the model can learn from the cache."""
    tokenizer = load_tokenizer(model.tokenizer_folder)
    dataset.check_student(tokenizer_sha256(tokenizer), model.vocab_size, model.max_positions)


def text_batches(text: TextConfig, tokenizer: Any, length: int, rows: int, batch_rows: int) -> Iterator[Batch]:
    """Return `batches_of` the packed rows of a text; one that is missing or blank is refused here, not at the first."""
    packed = pack_rows(open_documents(text), make_encoder(tokenizer), length)
    return batches_of(itertools.islice(packed, rows or None), length, batch_rows)


def keep_dtype(options: T, runtime: Runtime, begun: object) -> T:
    """Return options with the type that a run began with, `begun`, where `--dtype auto` would choose another here.

    A run that began on a processor with units for bfloat16 goes on in bfloat16 on any other. None: nothing began.
    """
    run = options.run
    forced = run.overwrite or getattr(options, "float32_for", "")
    if not runtime.auto_dtype or forced or begun not in DTYPES or begun == run.dtype:
        return options
    say(run, f"dtype: {begun}, as this run began; it would be {run.dtype} on this device")
    return replace(options, run=replace(run, dtype=begun))


def text_inputs(text: TextConfig) -> list[str | None]:
    """Return the files and folders of this machine that a text is read from."""
    return [text.dataset, text.files_from]


READ_A_ROW = 64  # rows of a text that are read for each one drawn for calibration


def calibration_batch_rows(length: int) -> int:
    """Return the rows of a calibration batch, fewer long ones: of each the Fisher pass keeps what every block gets."""
    return max(1, min(8, 2048 // length))


def calibration_rows(batches: Iterator[Batch], rows: int) -> Iterator[Batch]:
    """Return at most `rows` rows of batches without rows of padding, which statistics would count like text."""
    for batch in batches:
        real = np.flatnonzero(batch["target_mask"].any(axis=1))[:rows]
        rows -= len(real)
        if len(real):
            yield {name: batch[name][real] for name in ("input_ids", "document_ids", "target_mask")}


def cached_calibration_rows(dataset: KDCacheDataset, rows: int, seed: int) -> Iterator[Batch]:
    """Return some rows of a cache for calibration; all where it has fewer."""
    batch_rows = calibration_batch_rows(dataset.manifest.fingerprint.length)
    return calibration_rows(dataset.batches(0, -(-min(rows, len(dataset)) // batch_rows), batch_rows, seed=seed), rows)


def calibration(options: QuantizeOptions, model: CausalLM) -> tuple[Iterator[Batch], str]:
    """Return the rows to calibrate on, and what their text is, wherever it lies."""
    length = options.calibration_length
    rows = options.rows_of(length)
    if options.kd_cache_dir is not None:
        dataset = KDCacheDataset(options.kd_cache_dir)
        check_fits(dataset, model)
        rows = options.rows_of(dataset.manifest.fingerprint.length)
        return cached_calibration_rows(dataset, rows, options.run.seed), dataset.manifest.fingerprint.sha256
    fits_positions(model, length)
    tokenizer = load_tokenizer(model.tokenizer_folder, options.hub.trust_remote_code)
    packed = pack_rows(open_documents(options.text), make_encoder(tokenizer), length)

    def drawn() -> Iterator[PackedRow]:
        kept, read = draw_rows(packed, rows, READ_A_ROW * rows, options.run.seed)
        say(options.run, f"calibration: drew {len(kept):,} of {read:,} rows read")
        yield from kept

    source = f"{READ_A_ROW * rows} rows read of {describe_source(options.text)}"
    source += f"; {describe_packing(tokenizer)}"
    return calibration_rows(batches_of(drawn(), length, calibration_batch_rows(length)), rows), source


def batches_of(taken: Iterator[PackedRow], length: int, batch_rows: int) -> Iterator[Batch]:
    """Return rows as numpy batches of one fixed shape; missing rows of the last are masked."""
    while chunk := list(itertools.islice(taken, batch_rows)):
        batch = {name: np.zeros((batch_rows, length), np.int32) for name in ("input_ids", "document_ids")}
        batch["target_mask"] = np.zeros((batch_rows, length - 1), np.bool_)
        for i, row in enumerate(chunk):
            batch["input_ids"][i] = row.input_ids
            batch["document_ids"][i] = np.cumsum(row.doc_starts) - 1
            batch["target_mask"][i] = row.loss_mask[1:] > 0
        yield batch

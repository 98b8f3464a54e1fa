"""Runs the teacher over rows of text and writes its outputs to a cache.

The teacher is a `LanguageModel`: hidden states first, then logits for as few positions at a time as `chunk_bytes`
allows. At 151,936 entries a batch of 8 × 1,024 tokens has 5 GB of float32 logits, and `topk` and `logsumexp` want
copies of that; nothing of that size exists here. Shapes are the same for every batch (the last is filled with rows that
are not written), so that a compiling device compiles once. Packing, checksums and disk run in one background thread,
hidden behind the teacher's next forward; an exception on either side stops both and surfaces here.

The cost of a build is measured (`forecast`): a teacher's rate follows from its size only within a factor of three or
so, three batches tell it within a few percent. Bytes are computed: a shard's layout is a pure function of its rows.
"""

import collections
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from tqdm.auto import tqdm

from qat_lora.cache.build.served import ServedTeacher
from qat_lora.cache.build.topk import position_weights, row_uniforms, sparse_arrays
from qat_lora.cache.build.writer import CacheWriter
from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.codec import DRAWN, encode_rows
from qat_lora.cache.format.compressed import compress_rows
from qat_lora.cache.format.records import Fingerprint
from qat_lora.cache.storage.location import LocalFolder, Place, locate
from qat_lora.data.packing import PackedRow
from qat_lora.errors import CacheError, ConfigError, TextError
from qat_lora.runtime.host.signals import stop_signals
from qat_lora.types import LanguageModel

_QUEUED_BATCHES = 2
CHUNK_BYTES = 512 << 20  # a matrix product with fewer rows than this gives (883 at V = 151,936) is slow on a CPU
TIMED_BATCHES = 3


class ForwardSettings(NamedTuple):
    """How the teacher runs; its outputs do not depend on it."""

    batch_rows: int = 8  # of a forward
    device: torch.device | str = "cpu"  # where the token ids go; the teacher is there already
    chunk_bytes: int = CHUNK_BYTES  # of float32 logits held at a time
    piece_bytes: int | None = None  # of float32 logits worked on at a time (`Runtime.piece_bytes`); None for a chunk
    positions: tuple[str, float] = ("all", 1.0)  # by what positions are drawn, and the share; `position_weights`


Teacher = LanguageModel | ServedTeacher
_Batch = list[tuple[str, PackedRow]]  # rows with their splits
_DEFAULTS = ForwardSettings()


@torch.no_grad()
def teacher_arrays(
    teacher: LanguageModel,
    input_ids_BL: torch.Tensor,
    document_ids_BL: torch.Tensor,
    held: fmt.Contents,
    uniforms: Mapping[str, torch.Tensor],
    settings: ForwardSettings = _DEFAULTS,
) -> dict[str, torch.Tensor]:
    """Return arrays for `codec.encode_rows`, on the teacher's device; `uniforms` [B, L-1, D, 2]: of those to draw."""
    batch, length = input_ids_BL.shape
    hidden = teacher.hidden(input_ids_BL, document_ids_BL)[:, :-1]
    kept = {"teacher_hidden": hidden.float()} if held.hidden else {}
    if not (held.top_k or uniforms):
        return kept
    # Whole rows, or equal parts of one. Every row is cut in the same way, wherever it stands in its batch: the shape of
    # a matrix product can decide the last bit of what it gives.
    most, rows, part = max(1, settings.chunk_bytes // (4 * held.vocab_size)), 1, length - 1
    if most < part:
        part = -(-part // -(-part // most))
    else:
        rows = max(rows for rows in range(1, 1 + min(batch, most // part)) if batch % rows == 0)

    def chunks_of(values: torch.Tensor) -> list[torch.Tensor]:
        return [chunk for group in values.split(rows) for chunk in group.flatten(0, 1).split(rows * part)]

    numbers = {name: chunks_of(values) for name, values in uniforms.items()}
    chunks = []
    for number, part_NH in enumerate(chunks_of(hidden)):
        logits_NV = teacher.logits(part_NH)[:, : held.vocab_size]
        part_uniforms = {name: parts[number] for name, parts in numbers.items()}
        chunks.append(sparse_arrays(logits_NV, held.top_k, held.temperatures, part_uniforms, settings.piece_bytes))
    joined = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    return kept | {name: values.reshape(batch, length - 1, *values.shape[1:]) for name, values in joined.items()}


def build_kd_cache(
    teacher: Teacher,
    rows: Iterable[PackedRow],
    writer: CacheWriter,
    settings: ForwardSettings = _DEFAULTS,
    *,
    eval_rows: Sequence[PackedRow] = (),
    max_rows: int | None = None,
    quiet: bool = False,
) -> None:
    """Run the teacher over the rows and complete the cache of an entered writer; a signal stops the writer instead.

    `rows` are the training rows from `writer.resume_state().cursor` on; `eval_rows` all that are kept apart for
    evaluation, also when resuming, and none in builders other than the first, whose they are. At `max_rows` training
    rows (those of earlier runs counted) this builder has ended.

    ConfigError: a batch, K or vocabulary that the teacher cannot serve.
    CacheError: a row of another length, logits that are NaN, a full disk.
    """
    fingerprint = writer.fingerprint
    batch_rows = settings.batch_rows
    if batch_rows < 1 or (max_rows is not None and max_rows < 1):
        raise ConfigError(f"batch_rows, max_rows: {batch_rows} and {max_rows} given; allowed: 1 or more")
    if fingerprint.vocab_size > teacher.vocab_size:
        held = f"{fingerprint.vocab_size:,} entries, the teacher {fingerprint.teacher} has {teacher.vocab_size:,}"
        raise ConfigError(f"vocab_size: the cache is to hold {held}; allowed: as many or fewer")
    state = writer.resume_state()
    if state.finished:
        return
    left = None if max_rows is None else max(0, max_rows - state.rows)
    eval_left = [] if state.rows else eval_rows[state.eval_rows :]
    train_left = itertools.islice(rows, left)
    work = itertools.chain((("eval", row) for row in eval_left), (("train", row) for row in train_left))
    total = None if left is None else (left + len(eval_left)) * fingerprint.length
    bar = tqdm(total=total, desc="teacher", unit="tok", unit_scale=True, disable=quiet, dynamic_ncols=True)
    bar.set_postfix_str(f"{bytes_per_token(fingerprint):.0f} bytes/token")
    with stop_signals() as stopped, bar, _written_behind(writer) as put:
        while not stopped and (batch := list(itertools.islice(work, batch_rows))):
            put(run_batch(teacher, [row for _, row in batch], fingerprint, settings), batch)
            bar.update(len(batch) * fingerprint.length)
    if stopped:
        writer.stop()
    else:
        writer.finish()


def run_batch(
    teacher: Teacher, rows: Sequence[PackedRow], fingerprint: Fingerprint, settings: ForwardSettings = _DEFAULTS
) -> dict[str, np.ndarray]:
    """Return the arrays that `codec.encode_rows` takes, [batch_rows, ...] also of fewer rows."""
    held, device, shape = fingerprint.contents, settings.device, (settings.batch_rows, fingerprint.length)
    kinds = {"input_ids": np.int32, "loss_mask": np.uint8, "doc_starts": np.bool_}
    inputs: dict[str, np.ndarray] = {name: np.zeros(shape, kind) for name, kind in kinds.items()}
    for place, row in enumerate(rows):
        for name, array in inputs.items():
            values = getattr(row, name)
            if values.shape != shape[1:]:
                raise CacheError(f"{name}: a row has shape {values.shape}; this cache needs {shape[1:]}")
            array[place] = values
    inputs["documents"] = np.cumsum(inputs["doc_starts"], axis=1, dtype=np.int32)
    documents_BP = np.ones((shape[0], shape[1] - 1), np.float32)  # the weights of their documents
    for place, row in enumerate(rows if held.weights else ()):
        documents_BP[place] = 1 if row.weights is None else row.weights[1:]
    if isinstance(teacher, ServedTeacher):
        return {**inputs, **teacher.arrays(inputs, held), **({"weights": documents_BP} if held.weights else {})}
    ids_BL, documents_BL = (torch.from_numpy(inputs[name]).to(device) for name in ("input_ids", "documents"))
    uniforms = {}
    for name, size in held.id_lists.items():
        if name in DRAWN:
            numbers = row_uniforms(fingerprint.seed, name, rows, (*shape, size), bool(held.lzma))
            uniforms[DRAWN[name]] = torch.from_numpy(numbers).to(device)
    if held.entropy or settings.positions[0] == "entropy":
        uniforms["entropy"] = torch.zeros(shape[0], shape[1] - 1, 1)  # says that it is wanted
    arrays = fetched(teacher_arrays(teacher, ids_BL, documents_BL, held, uniforms, settings))
    entropy_BP = arrays.pop("entropy", None)
    tail_entropy_BP = arrays.pop("tail_entropy", None)
    weights_BP = inputs["loss_mask"][:, 1:] != 0
    if held.weights:
        by, share = settings.positions if settings.positions[0] != "all" else ("all", 1.0)
        chosen = row_uniforms(fingerprint.seed, "weights", rows, (*shape, 1))[:, 0, 0, 0]
        weights_BP = position_weights(weights_BP, entropy_BP if by == "entropy" else None, share, chosen)
        for key in DRAWN.values() & arrays.keys():
            arrays[key] *= (weights_BP > 0)[..., None]  # no bytes for what counts nothing
        arrays["weights"] = weights_BP = weights_BP * documents_BP
    for name, values_BP in {"entropy": entropy_BP, "tail_entropy": tail_entropy_BP}.items():
        if name in held.entropies:
            means_B = (values_BP * weights_BP).sum(-1) / np.maximum(weights_BP.sum(-1), 1e-9)
            arrays[name] = means_B[:, None].astype(np.float32)
    return {**inputs, **arrays}


def fetched(arrays: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return arrays of a device as NumPy's, in one transfer: XLA would run the whole teacher again for every array."""
    # As float32, ids in two halves that it holds exactly: reading the bits as another type ends a graph on XLA.
    parts: list[torch.Tensor] = []
    for values in arrays.values():
        parts += [values] if values.is_floating_point() else [(values & 0xFFFF).float(), (values >> 16).float()]
    numbers = iter(torch.cat([part.flatten() for part in parts]).cpu().split([part.numel() for part in parts]))
    found = {}
    for name, values in arrays.items():
        flat = next(numbers)
        if not values.is_floating_point():
            flat = flat.to(values.dtype) + (next(numbers).to(values.dtype) << 16)
        found[name] = flat.reshape(values.shape).numpy()
    return found


def bytes_per_token(fingerprint: Fingerprint) -> float:
    """Return what a cache takes, headers and records apart; before compression, if there is any."""
    return fmt.row_bytes(fingerprint.arrays) / fingerprint.length


@contextlib.contextmanager
def _written_behind(writer: CacheWriter) -> Iterator[Callable[[dict[str, np.ndarray], _Batch], None]]:
    """Yield what hands a batch to a thread that writes; errors of either side are raised here, and stop both."""
    waiting: collections.deque[Future[None]] = collections.deque()

    def append(before: Future[None] | None, arrays: dict[str, np.ndarray], batch: _Batch) -> None:
        if before is not None:
            before.result()
        first = 0
        for split, group in itertools.groupby(batch, key=lambda item: item[0]):
            cursors = [row.cursor for _, row in group]
            part = slice(first, first + len(cursors))
            writer.append({name: array[part] for name, array in arrays.items()}, cursors, split)
            first = part.stop

    def put(arrays: dict[str, np.ndarray], batch: _Batch) -> None:
        while waiting and (waiting[0].done() or len(waiting) > _QUEUED_BATCHES):
            waiting.popleft().result()
        waiting.append(pool.submit(append, waiting[-1] if waiting else None, arrays, batch))

    with ThreadPoolExecutor(1, "cache-writer") as pool:
        try:
            yield put
            for written in waiting:
                written.result()
        finally:
            pool.shutdown(cancel_futures=True)


class Forecast(NamedTuple):
    """The cost of a build, or of one builder's share of it."""

    rows: int  # for training; with a row limit the limit, unless the text was seen to end before
    eval_rows: int
    tokens: int
    tokens_per_second: float
    hours: float
    bytes: int
    bytes_per_token: float
    free_bytes: int | None  # on the cache folder's file system; None on an object store, which tells of no end

    def lines(self) -> str:
        """Return it as text for a terminal."""
        room = "unknown: an object store tells of no limit"
        if self.free_bytes is not None:
            enough = self.free_bytes > self.bytes
            verdict = "enough" if enough else "NOT ENOUGH: choose another --out or fewer --num-rows"
            room = f"{self.free_bytes / 1e6:,.1f} MB, {verdict}"
        return (
            f"rows      {self.rows:,} for training, {self.eval_rows:,} for evaluation, {self.tokens:,} tokens\n"
            f"time      {self.hours:,.3g} hours at {self.tokens_per_second:,.0f} tokens a second\n"
            f"size      {self.bytes / 1e6:,.1f} MB, {self.bytes_per_token:.0f} bytes a token\n"
            f"free      {room}"
        )


class Size(NamedTuple):
    """What a build is to write beyond what its rows say."""

    eval_rows: int = 0  # of the evaluation split that this build writes
    max_rows: int | None = None  # the build stops there
    shard_rows: int | None = None  # as in `CacheWriter`
    lm_head_bytes: int = 0  # stored once


def forecast(
    teacher: Teacher,
    rows: Iterable[PackedRow],
    fingerprint: Fingerprint,
    out: Place,
    size: Size,
    settings: ForwardSettings,
    *,
    quiet: bool = False,
) -> Forecast:
    """Time a few batches and say what building the rows will take; TextError if there is not a single row.

    Without `max_rows` all `rows`, from their beginning, are packed, to be counted; `out` need not exist, nor is made.
    """
    batch_rows, max_rows, eval_rows = settings.batch_rows, size.max_rows, size.eval_rows
    rest = iter(rows)
    first = list(itertools.islice(rest, min(batch_rows, max_rows or batch_rows)))
    if not first:
        raise TextError("text: has no row to time; give more text")
    arrays = run_batch(teacher, first, fingerprint, settings)  # compiles, fills caches
    seen, durations, ended = len(first), [], False
    for _ in range(TIMED_BATCHES):
        begun = time.perf_counter()
        batch = list(itertools.islice(rest, batch_rows))
        ended = len(batch) < batch_rows
        run_batch(teacher, batch or first, fingerprint, settings)
        durations.append(time.perf_counter() - begun)
        seen += len(batch)
    if max_rows is None:
        seen += sum(1 for _ in tqdm(rest, desc="count", unit="row", disable=quiet, dynamic_ncols=True))
    count = seen if max_rows is None else min(seen, max_rows) if ended else max_rows
    per_shard = size.shard_rows or fmt.default_shard_rows(fingerprint.arrays)
    total_bytes = size.lm_head_bytes
    for full, last in (divmod(part, per_shard) for part in (count, eval_rows)):
        for shards, of in ((full, per_shard), (int(last > 0), last)):  # sidecars and manifest add some 2 KB a shard
            total_bytes += shards * fingerprint.layout(of, 0).total_bytes
    tokens = (count + eval_rows) * fingerprint.length
    if (held := fingerprint.contents).lzma:  # as these rows compress
        packed = compress_rows([encode_rows(arrays, fingerprint)], held, fingerprint.arrays)
        total_bytes += tokens // held.length * sum(map(len, packed)) // batch_rows
    place = locate(out)
    rate = batch_rows * fingerprint.length / statistics.median(durations)
    free = place.free_bytes() if isinstance(place, LocalFolder) else None
    return Forecast(count, eval_rows, tokens, rate, tokens / rate / 3600, total_bytes, total_bytes / tokens, free)

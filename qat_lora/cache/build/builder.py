"""Runs the teacher over rows of text and writes what it says to a cache.

The teacher is a `LanguageModel`: hidden states first, logits after, for as few positions at a time as
`chunk_bytes` allows. At 151,936 entries a batch of 8 × 1,024 tokens has 5 GB of float32 logits, and `topk` and
`logsumexp` want copies of that; here nothing of that size exists (`sparse` takes a chunk's logits apart). Shapes are
the same for every batch (the last is filled with rows that are not written), so that a compiling device compiles once.

Packing, checksums and disk run in one background thread behind a short queue, hidden behind the teacher's next
forward. An exception on either side stops both and surfaces here.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from qat_lora.cache.build.topk import sparse_arrays
from qat_lora.cache.build.uniforms import row_uniforms
from qat_lora.cache.build.writer import CacheWriter
from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.codec import DRAWN
from qat_lora.cache.format.records import Fingerprint
from qat_lora.errors import CacheError, ConfigError
from qat_lora.types import LanguageModel

_QUEUED_BATCHES = 2
CHUNK_BYTES = 512 << 20  # a matrix product with fewer rows than this gives (883 at V = 151,936) is slow on a CPU


class Row(Protocol):
    """One row of L tokens, as `text.packing` yields it."""

    @property
    def input_ids(self) -> np.ndarray:
        """int32 [L]."""

    @property
    def loss_mask(self) -> np.ndarray:
        """uint8 [L], 1 where the token counts as a target."""

    @property
    def doc_starts(self) -> np.ndarray:
        """Boolean [L], True where a document begins."""

    @property
    def cursor(self) -> Any:
        """JSON value: the source's position after this row."""


class BuildReport(NamedTuple):
    """How a build ended."""

    train_rows: int
    eval_rows: int
    bytes_per_token: float
    finished: bool
    """False if it was asked to stop (SIGTERM, SIGHUP) before the rows ended: the same call goes on from there."""
    waiting_for: tuple[int, ...] = ()
    """Builders of the same cache that have not ended; the last of them writes the manifest."""


@torch.no_grad()
def teacher_arrays(
    teacher: LanguageModel,
    input_ids_BL: torch.Tensor,
    document_ids_BL: torch.Tensor,
    *,
    vocab_size: int,
    top_k: int,
    temperatures: Sequence[float],
    uniforms: Mapping[str, torch.Tensor] | None = None,
    keep_hidden: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    piece_bytes: int | None = None,
) -> dict[str, torch.Tensor]:
    """Return head and tail of a batch, on the teacher's device.

    Args:
        teacher: the model.
        input_ids_BL: rows of tokens.
        document_ids_BL: which document of its row a token belongs to.
        vocab_size: V.
        top_k: K; 0 for no head and no sums.
        temperatures: of the sums.
        uniforms: what is to be drawn, `tail_draw_ids` or `draw_ids`, and the random numbers [B, L-1, D, 2] for it.
        keep_hidden: whether to return hidden states.
        chunk_bytes: float32 logits held at a time.
        piece_bytes: float32 logits worked on at a time (`sparse`); None for a chunk.

    Returns:
        `head_ids` int32 and `head_logits` float32 [B, L-1, K] in rank order, `lse`, `log_tail` float32 [B, L-1] for
        every temperature; where they are asked for `tail_draw_ids`, `draw_ids` int32 [B, L-1, D] and
        `teacher_hidden` float32 [B, L-1, H].
    """
    batch, length = input_ids_BL.shape
    hidden = teacher.hidden(input_ids_BL, document_ids_BL)[:, :-1]
    kept = {"teacher_hidden": hidden.float()} if keep_hidden else {}
    if not (top_k or uniforms):
        return kept
    rows, part = _chunk_shape(batch, length - 1, max(1, chunk_bytes // (4 * vocab_size)))

    def chunks_of(values: torch.Tensor) -> list[torch.Tensor]:
        return [chunk for group in values.split(rows) for chunk in group.flatten(0, 1).split(rows * part)]

    numbers = {name: chunks_of(values) for name, values in (uniforms or {}).items()}
    chunks = [
        sparse_arrays(
            teacher.logits(part_NH)[:, :vocab_size],
            top_k,
            temperatures,
            {name: parts[number] for name, parts in numbers.items()},
            piece_bytes,
        )
        for number, part_NH in enumerate(chunks_of(hidden))
    ]
    joined = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    return kept | {name: values.reshape(batch, length - 1, *values.shape[1:]) for name, values in joined.items()}


def _chunk_shape(batch: int, positions: int, most: int) -> tuple[int, int]:
    """Return rows and positions of a chunk of at most `most` positions: whole rows, or equal parts of one.

    Every row is cut in the same way, wherever it stands in its batch: the shape of a matrix product can decide the
    last bit of what it gives.
    """
    if most < positions:
        return 1, -(-positions // -(-positions // most))
    return max(rows for rows in range(1, 1 + min(batch, most // positions)) if batch % rows == 0), positions


def build_kd_cache(
    teacher: LanguageModel,
    rows: Iterable[Row],
    writer: CacheWriter,
    *,
    eval_rows: Sequence[Row] = (),
    batch_rows: int = 8,
    device: torch.device | str = "cpu",
    max_rows: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    piece_bytes: int | None = None,
    quiet: bool = False,
) -> BuildReport:
    """Run the teacher over the rows and complete the cache.

    Args:
        teacher: the model; it must be on `device` already.
        rows: training rows from `writer.resume_state().cursor` on.
        writer: an entered `CacheWriter`; its fingerprint says L, K, V and the temperatures.
        eval_rows: all rows kept apart for evaluation, `fingerprint.eval_rows` of them, also when resuming; none in
            builders other than the first, whose they are.
        batch_rows: rows of a forward.
        device: where the token ids go.
        max_rows: stop at this many training rows of this builder (those of earlier runs counted): it has ended.
        chunk_bytes: float32 logits held at a time.
        piece_bytes: float32 logits worked on at a time (`Runtime.piece_bytes`); None for a chunk.
        quiet: no progress bar.

    Raises:
        ConfigError: a batch, K or vocabulary that the teacher cannot serve.
        CacheError: a row of another length, logits that are NaN, a full disk.
    """
    fingerprint = writer.fingerprint
    if batch_rows < 1 or (max_rows is not None and max_rows < 1):
        raise ConfigError(f"batch_rows, max_rows: {batch_rows} and {max_rows} given; allowed: 1 or more")
    if fingerprint.vocab_size > teacher.vocab_size:
        raise ConfigError(
            f"vocab_size: the cache is to hold {fingerprint.vocab_size:,} entries, the teacher "
            f"{fingerprint.teacher} has {teacher.vocab_size:,}; allowed: as many or fewer"
        )
    wanted = 0 if writer.share.builder else fingerprint.eval_rows
    if len(eval_rows) != wanted:
        raise ConfigError(
            f"eval_rows: {len(eval_rows)} rows for --eval-rows {fingerprint.eval_rows} in builder {writer.share}; "
            f"allowed: {wanted}"
        )
    state = writer.resume_state()
    if state.finished:
        return _report(writer)
    left = None if max_rows is None else max(0, max_rows - state.rows)
    eval_left = [] if state.rows else eval_rows[state.eval_rows :]
    work = itertools.chain(
        (("eval", row) for row in eval_left), (("train", row) for row in itertools.islice(rows, left))
    )
    total_rows = None if left is None else left + len(eval_left)
    with _stop_on_signal() as stop, _progress(fingerprint, total_rows, quiet) as bar, _Behind(writer) as behind:
        while not stop.is_set() and (batch := list(itertools.islice(work, batch_rows))):
            taken = [row for _, row in batch]
            arrays = run_batch(teacher, taken, fingerprint, batch_rows, device, chunk_bytes, piece_bytes)
            behind.put(arrays, batch)
            bar.update(len(batch) * fingerprint.length)
    if stop.is_set():
        writer.stop()
    else:
        writer.finish()
    return _report(writer)


def run_batch(
    teacher: LanguageModel,
    rows: Sequence[Row],
    fingerprint: Fingerprint,
    batch_rows: int,
    device: torch.device | str,
    chunk_bytes: int = CHUNK_BYTES,
    piece_bytes: int | None = None,
) -> dict[str, np.ndarray]:
    """Run the teacher over at most `batch_rows` rows.

    Returns:
        The arrays that `codec.encode_rows` takes, [batch_rows, ...] whatever the number of rows.
    """
    inputs = _inputs(rows, batch_rows, fingerprint.length)
    ids_BL, documents_BL = (torch.from_numpy(inputs[name]).to(device) for name in ("input_ids", "documents"))
    held = fingerprint.contents
    numbers = {
        DRAWN[name]: row_uniforms(fingerprint.seed, name, rows, batch_rows, held.length, size)
        for name, size in held.id_lists.items()
        if name in DRAWN
    }
    arrays = teacher_arrays(
        teacher,
        ids_BL,
        documents_BL,
        vocab_size=held.vocab_size,
        top_k=held.top_k,
        temperatures=held.temperatures,
        uniforms={name: torch.from_numpy(values).to(device) for name, values in numbers.items()},
        keep_hidden=held.hidden > 0,
        chunk_bytes=chunk_bytes,
        piece_bytes=piece_bytes,
    )
    return {**inputs, **fetched(arrays)}


def fetched(arrays: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return arrays of a device as NumPy's, in one transfer.

    A device that collects work until something is read (XLA) would run the whole teacher again for every array.
    """
    # As float32, ids in two halves that it holds exactly: reading the bits as another type ends a graph on XLA.
    parts = [part for values in arrays.values() for part in _as_floats(values)]
    numbers = iter(torch.cat([part.flatten() for part in parts]).cpu().split([part.numel() for part in parts]))
    found = {}
    for name, values in arrays.items():
        flat = next(numbers)
        if not values.is_floating_point():
            flat = flat.to(values.dtype) + (next(numbers).to(values.dtype) << 16)
        found[name] = flat.reshape(values.shape).numpy()
    return found


def _as_floats(values: torch.Tensor) -> list[torch.Tensor]:
    """Return float32 tensors that hold an array: itself, or the low and high 16 bits of ids."""
    return [values] if values.is_floating_point() else [(values & 0xFFFF).float(), (values >> 16).float()]


def _report(writer: CacheWriter) -> BuildReport:
    state = writer.resume_state()
    table, length = writer.fingerprint.arrays, writer.fingerprint.length
    bytes_per_token = fmt.row_bytes(table) / length
    return BuildReport(state.rows, state.eval_rows, bytes_per_token, not writer.stopped, writer.waiting_for())


def _inputs(rows: Sequence[Row], batch_rows: int, length: int) -> dict[str, np.ndarray]:
    """Stack rows to [batch_rows, L], filled up with empty rows."""
    arrays: dict[str, np.ndarray] = {
        "input_ids": np.zeros((batch_rows, length), np.int32),
        "loss_mask": np.zeros((batch_rows, length), np.uint8),
        "doc_starts": np.zeros((batch_rows, length), np.bool_),
    }
    for place, row in enumerate(rows):
        for name, array in arrays.items():
            values = getattr(row, name)
            if values.shape != (length,):
                raise CacheError(f"{name}: a row has shape {values.shape}; this cache needs ({length},)")
            array[place] = values
    return arrays | {"documents": np.cumsum(arrays["doc_starts"], axis=1, dtype=np.int32)}


class _Behind:
    """Hands batches to the writer in one background thread; leaving waits until all are written."""

    def __init__(self, writer: CacheWriter) -> None:
        self._writer = writer
        self._queue: queue.Queue[tuple[dict[str, np.ndarray], list[tuple[str, Row]]] | None]
        self._queue = queue.Queue(_QUEUED_BATCHES)
        self._error: BaseException | None = None
        self._given_up = False
        self._thread = threading.Thread(target=self._work, name="cache-writer", daemon=True)

    def __enter__(self) -> _Behind:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._given_up = kind is not None
        self._queue.put(None)
        self._thread.join()
        if kind is None:
            self._raise()

    def put(self, arrays: dict[str, np.ndarray], batch: list[tuple[str, Row]]) -> None:
        self._raise()
        self._queue.put((arrays, batch))

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        # After an error the queue is still emptied, so that the teacher's side never waits for a dead thread.
        while (item := self._queue.get()) is not None:
            if self._error is not None or self._given_up:
                continue
            try:
                self._append(*item)
            except BaseException as error:  # raised again in the other thread
                self._error = error

    def _append(self, arrays: dict[str, np.ndarray], batch: list[tuple[str, Row]]) -> None:
        first = 0
        for split, group in itertools.groupby(batch, key=lambda item: item[0]):
            cursors = [row.cursor for _, row in group]
            part = slice(first, first + len(cursors))
            self._writer.append({name: array[part] for name, array in arrays.items()}, cursors, split)
            first = part.stop


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGHUP set; a second one acts as before, and so does an ignored one (nohup)."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event  # only the main thread may set handlers
        return

    def handler(number: int, _frame: object) -> None:
        event.set()
        signal.signal(number, before[number])

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {n: old for n in numbers if (old := signal.getsignal(n)) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield event
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _progress(fingerprint: Any, total_rows: int | None, quiet: bool) -> Any:
    from tqdm import tqdm

    total = None if total_rows is None else total_rows * fingerprint.length
    bar = tqdm(total=total, desc="teacher", unit="tok", unit_scale=True, disable=quiet, dynamic_ncols=True)
    bar.set_postfix_str(f"{fmt.row_bytes(fingerprint.arrays) / fingerprint.length:.0f} bytes/token")
    return bar

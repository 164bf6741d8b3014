"""State machine of the writer to shared streams: one event in, effects out.

Owns admission, the open buffer, the order of uploads and commits, and the outcome of each append.
No clock, I/O or event loop is used here: `shared_writer` feeds the events, and carries out
`effects` in their order after each.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from streammeta.client.config import STREAMS_MAX, WriterConfig
from streammeta.client.errors import (
    NodeFencedError,
    NodeNotRegisteredError,
    OutcomeUnknownError,
    RejectedError,
    WriterClosedError,
    rejection,
)
from streammeta.client.writing.batch import Waiter
from streammeta.client.writing.shared_batches import (
    BatchIdentity,
    SharedBatch,
    SharedObject,
    SharedVerdict,
)
from streammeta.v1 import common_pb2

ROWS_MAX = STREAMS_MAX
"""Rows that the controllers accept in one commit."""


class SharedStage(Enum):
    """What happens to a closed buffer."""

    SEALED = 0
    UPLOADING = 1
    UPLOADED = 2
    COMMITTING = 3


@dataclass(slots=True, eq=False)
class SharedUpload:
    """A closed buffer: the batches to commit, sorted by stream, and their object.

    The object may contain more streams, which the commit leaves out.
    """

    batches: list[SharedBatch]
    stage: SharedStage = SharedStage.SEALED
    content: SharedObject | None = None
    object_id: int = -1
    reuploads: int = 0


@dataclass(slots=True)
class BufferOpened:
    """The open buffer got its first batch. It is to be sealed after the linger time."""


@dataclass(slots=True)
class Upload:
    """A buffer is to be encoded, if it is not yet, and stored under a fresh id."""

    upload: SharedUpload


@dataclass(slots=True)
class Submit:
    """A stored object is to be committed with its batches. No other commit is in flight."""

    upload: SharedUpload


@dataclass(slots=True)
class Wake:
    """A waiter may continue: an append that waits for space has to be tried again."""

    waiter: Waiter


Effect: TypeAlias = BufferOpened | Upload | Submit | Wake


class SharedWriterCore:
    """Appends to shared streams between admission and outcome.

    Invariants, after every event:

    - Each admitted batch is in one place until it is answered, which happens once: in a buffer in
      flight, in the open one, or with a batch there that it repeats and whose answer it gets.
    - The batches of a stream in flight, followed by those in the open buffer, are in the order of
      their appends. So they are committed in this order, without those that fail.
    - At most one commit is in flight, of the oldest buffer. At most `parallel_uploads` buffers are
      being stored.
    - The batches of a stream in a buffer enter its commit all together, or return to the open
      buffer all together.
    - After a batch of a producer has failed without a verdict, no later one of its sequence that
      was admitted before is committed.
    - `buffered` is the cost of all batches that are not answered, at most `max_buffer_bytes`.
    - A flush ends when all batches admitted before it are answered.
    """

    def __init__(self, config: WriterConfig) -> None:
        self._config = config
        self.effects: list[Effect] = []
        self.buffered = 0
        self.is_closed = False
        self.fenced: Exception | None = None
        self.in_flight: deque[SharedUpload] = deque()
        """Closed buffers, the oldest first."""
        self._open: list[SharedBatch] = []
        self._open_bytes = 0
        # In the order of admission, with its number. An OrderedDict finds its first key in constant
        # time after many removals, which a dict does not.
        self._unanswered: OrderedDict[SharedBatch, int] = OrderedDict()
        self._last_number = 0
        self._repeats: dict[SharedBatch, list[SharedBatch]] = {}
        """Batches that a commit rejected as repeats of another one in it, by that one."""
        self._waiting: deque[Waiter] = deque()
        self._flushes: deque[tuple[int, Waiter]] = deque()
        self._newest_id = -1

    # -- admission

    def require_accepting(self) -> None:
        """Raise why appends are rejected, if they are."""
        if self.is_closed:
            raise WriterClosedError("append to a shared stream came after close")
        if self.fenced is not None:
            raise self.fenced

    def admit(self, batch: SharedBatch, waiter: Waiter | None = None) -> bool:
        """Add a batch to the open buffer. Return False if it has to wait for space."""
        # A newcomer waits behind those that wait already, even if it fits.
        if self._waiting and self._waiting[0] is not waiter:
            return False
        if self.buffered + batch.cost > self._config.max_buffer_bytes:
            return False

        self._last_number += 1
        self._unanswered[batch] = self._last_number
        self.buffered += batch.cost
        if not self._open:
            self.effects.append(BufferOpened())
        self._open.append(batch)
        self._open_bytes += batch.size
        if self._open_bytes >= self._config.shared_batch_bytes or len(self._open) >= ROWS_MAX:
            self.seal()
        return True

    def wait(self, waiter: Waiter) -> None:
        """Queue an append behind those that wait for space. It is woken when it may fit."""
        self._waiting.append(waiter)

    def leave(self, waiter: Waiter) -> None:
        """Remove an append from the queue, admitted or not."""
        self._waiting.remove(waiter)
        self._wake()

    def make_space(self) -> None:
        """Seal the open buffer early for an append that waits, if its upload can begin soon."""
        is_half_full = 2 * self._open_bytes >= self._config.shared_batch_bytes
        if is_half_full or len(self.in_flight) < self._config.parallel_uploads:
            self.seal()

    def flush(self, waiter: Waiter) -> None:
        """Seal the open buffer, and wake `waiter` when all batches of now are answered."""
        self.seal()
        self._flushes.append((self._last_number, waiter))
        self._wake()

    def close(self) -> None:
        """Admit nothing from now on."""
        self.is_closed = True
        self._wake()

    def seal(self) -> None:
        """Close the open buffer, in several if it exceeds the limits of one."""
        while self._open:
            rows = self._rows_of_next()
            taken, self._open = self._open[:rows], self._open[rows:]
            # Stable, so that the batches of a stream stay in their order.
            taken.sort(key=lambda batch: batch.stream_id)
            self.in_flight.append(SharedUpload(taken))
        self._open_bytes = 0
        self._start_uploads()

    def _rows_of_next(self) -> int:
        size = 0
        for rows, batch in enumerate(self._open[:ROWS_MAX], 1):
            size += batch.size
            if size >= self._config.shared_batch_bytes:
                return rows
        return min(len(self._open), ROWS_MAX)

    def _wake(self) -> None:
        if self._waiting:
            self.effects.append(Wake(self._waiting[0]))
        oldest = next(iter(self._unanswered.values()), self._last_number + 1)
        while self._flushes and self._flushes[0][0] < oldest:
            self.effects.append(Wake(self._flushes.popleft()[1]))

    # -- uploads

    def _start_uploads(self) -> None:
        free = self._config.parallel_uploads
        for upload in self.in_flight:
            if free <= 0:
                return
            if upload.stage is SharedStage.SEALED:
                upload.stage = SharedStage.UPLOADING
                self.effects.append(Upload(upload))
            free -= upload.stage is SharedStage.UPLOADING

    def stored(self, upload: SharedUpload, object_id: int) -> None:
        """Note that the object of a buffer is stored under this id."""
        upload.object_id = object_id
        self._end_upload(upload, SharedStage.UPLOADED)

    def not_stored(self, upload: SharedUpload, error: Exception) -> None:
        """Fail a buffer whose object can't be stored."""
        if upload in self.in_flight:
            self._fail(upload, error)

    def _end_upload(self, upload: SharedUpload, stage: SharedStage) -> None:
        # A fence or a close has failed it meanwhile.
        if upload in self.in_flight:
            upload.stage = stage
            self._start_uploads()
            self._submit_next()

    # -- commits

    def _submit_next(self) -> None:
        while self.in_flight and self.in_flight[0].stage is SharedStage.UPLOADED:
            oldest = self.in_flight[0]
            if not oldest.batches:
                # All of its streams went to a later buffer.
                self.in_flight.popleft()
            elif oldest.object_id < self._newest_id:
                # A node's stream set objects are in the order of their ids. An earlier buffer was
                # stored again.
                self._store_again(oldest)
                return
            else:
                oldest.stage = SharedStage.COMMITTING
                self._newest_id = oldest.object_id
                self.effects.append(Submit(oldest))
                return

    def _store_again(self, upload: SharedUpload) -> None:
        upload.stage = SharedStage.UPLOADING
        self.effects.append(Upload(upload))

    def unknown(self, upload: SharedUpload) -> None:
        """Note that a commit got no answer in time: it is repeated under the same object id.

        If the first attempt took effect, the controllers recognise it by the id.
        """
        if upload not in self.in_flight:
            return
        if self.fenced is None:
            self.effects.append(Submit(upload))
        else:
            # A fenced node's commits may wait for a controller that never answers them.
            self._fail(
                upload, OutcomeUnknownError(f"the commit of object {upload.object_id}", self.fenced)
            )

    def rejected(self, upload: SharedUpload, error: Exception) -> None:
        """Fail a buffer whose commit was rejected as a whole."""
        if upload in self.in_flight:
            self._fail(upload, error)

    def answered(self, upload: SharedUpload, verdict: SharedVerdict) -> None:
        """Answer the batches of a commit, and gather those again that have to be repeated."""
        if upload not in self.in_flight:
            return
        subject = f"commit of object {upload.object_id}"
        if common_pb2.ERROR_CODE_OBJECT_NOT_EXIST in verdict.codes:
            upload.reuploads += 1
            if upload.reuploads <= self._config.reupload_attempts:
                self._store_again(upload)
            else:
                self._fail(upload, rejection(common_pb2.ERROR_CODE_OBJECT_NOT_EXIST, subject))
            return

        self.in_flight.popleft()
        again: list[SharedBatch] = []
        firsts: dict[BatchIdentity | None, SharedBatch] = {}
        fencing: Exception | None = None
        for batch, code, offset in zip(upload.batches, verdict.codes, verdict.offsets, strict=True):
            if code == common_pb2.ERROR_CODE_STREAM_ROWS_REJECTED:
                again.append(batch)
                firsts[batch.identity] = batch
                continue
            is_repeat = code == common_pb2.ERROR_CODE_DUPLICATE_BATCH and offset < 0
            if is_repeat and batch.identity in firsts:
                # The commit rejected the first one because of this repeat.
                self._repeats.setdefault(firsts[batch.identity], []).append(batch)
                continue
            outcome = _outcome(batch, code, offset, subject)
            if isinstance(outcome, NodeFencedError | NodeNotRegisteredError):
                fencing = outcome
            self._answer(batch, outcome)

        if again:
            self._gather_again(again)
        if fencing is not None:
            self.fence(fencing)
        self._submit_next()
        self._wake()

    # -- failures

    def fence(self, error: Exception) -> None:
        """Fail everything that is not being committed: the process lost its node id."""
        if self.fenced is None:
            self.fenced = error
            self._drop(lambda upload: error, keeps_submitted=True)

    def abandon(self) -> None:
        """Fail everything, at the end of the time that `close` has."""

        def error(upload: SharedUpload | None) -> Exception:
            was_submitted = upload is not None and upload.stage is SharedStage.COMMITTING
            end = "they may be committed" if was_submitted else "they are not committed"
            return WriterClosedError(f"the upload of records was cancelled, {end}")

        self._drop(error, keeps_submitted=False)

    def _drop(
        self, error: Callable[[SharedUpload | None], Exception], *, keeps_submitted: bool
    ) -> None:
        kept: deque[SharedUpload] = deque()
        for upload in self.in_flight:
            if keeps_submitted and upload.stage is SharedStage.COMMITTING:
                kept.append(upload)
                continue
            for batch in upload.batches:
                self._answer(batch, error(upload))
        for batch in self._open:
            self._answer(batch, error(None))
        self.in_flight, self._open, self._open_bytes = kept, [], 0
        self._wake()

    def _fail(self, upload: SharedUpload, error: Exception) -> None:
        """Fail a buffer without verdicts on its batches, and what may not follow it."""
        self.in_flight.remove(upload)
        for batch in upload.batches:
            self._answer(batch, error)
        if isinstance(error, NodeFencedError | NodeNotRegisteredError):
            self.fence(error)

        broken = {batch.sequence_key for batch in upload.batches} - {None}
        if broken:
            self._fail_sequences(broken, error)
        self._start_uploads()
        self._submit_next()
        self._wake()

    def _fail_sequences(self, broken: set[tuple[int, int, int] | None], error: Exception) -> None:
        """Fail later batches of producers' sequences that have a gap now.

        The controllers would accept them from a producer that they do not know yet.
        """
        places = [*(upload.batches for upload in self.in_flight), self._open]
        streams = {
            batch.stream_id
            for batches in places
            for batch in batches
            if batch.sequence_key in broken
        }
        if not streams:
            return
        behind = self._take_back(streams)
        for batch in behind:
            if batch.sequence_key in broken:
                self._answer(batch, error)
        self._put_first([batch for batch in behind if batch.sequence_key not in broken])

    def _gather_again(self, again: Sequence[SharedBatch]) -> None:
        """Put batches into the next buffer, in front of all later ones of their streams."""
        later = self._take_back({batch.stream_id for batch in again})
        self._put_first([*again, *later])

    def _take_back(self, streams: set[int]) -> list[SharedBatch]:
        """Remove all batches of these streams that are not being committed, and return them."""
        taken: list[SharedBatch] = []

        def keep(batches: list[SharedBatch]) -> list[SharedBatch]:
            taken.extend(batch for batch in batches if batch.stream_id in streams)
            return [batch for batch in batches if batch.stream_id not in streams]

        for upload in self.in_flight:
            if upload.stage is not SharedStage.COMMITTING:
                upload.batches = keep(upload.batches)
        self.in_flight = deque(
            upload
            for upload in self.in_flight
            if upload.batches or upload.stage is not SharedStage.SEALED
        )
        self._open = keep(self._open)
        return taken

    def _put_first(self, batches: list[SharedBatch]) -> None:
        """Put batches at the front of the open buffer. It is sealed: they have waited already."""
        self._open = batches + self._open
        self.seal()

    def _answer(self, batch: SharedBatch, outcome: int | Exception) -> None:
        for answered in (batch, *self._repeats.pop(batch, ())):
            del self._unanswered[answered]
            self.buffered -= answered.cost
            answered.answer(outcome)


def _outcome(batch: SharedBatch, code: int, offset: int, subject: str) -> int | RejectedError:
    """Return the first offset of a batch, or the error that its verdict means."""
    is_placed = code in (common_pb2.ERROR_CODE_NONE, common_pb2.ERROR_CODE_DUPLICATE_BATCH)
    if is_placed and offset >= 0:
        return offset
    if code == common_pb2.ERROR_CODE_NONE:
        code = common_pb2.ERROR_CODE_OFFSETS_UNKNOWN
    who = "" if batch.producer is None else f" by {batch.producer}"
    return rejection(
        code, f"append of {batch.count} offsets to stream {batch.stream_id}{who} ({subject})"
    )

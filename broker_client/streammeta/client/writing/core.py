"""State machine of a stream writer: one event in, effects out.

Owns admission, the open batch, and the turns of the batches in flight. No clock, I/O or event loop
is used here: `writer` feeds the events, and carries out `effects` in their order after each.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from streammeta.client.arguments import INT32_MAX
from streammeta.client.config import RUN_OVERHEAD, UPLOAD_BYTES_MAX, WriterConfig
from streammeta.client.errors import NodeFencedError, NodeNotRegisteredError, WriterClosedError
from streammeta.client.writing.admission import AttachedStreams, check_offsets
from streammeta.client.writing.batch import BatchUpload, Stage, Waiter
from streammeta.client.writing.record_buffer import StreamRun, WriterStream

_UNENCODED_MAX = 1024 * 1024
"""Limit of sealed bytes that are not encoded yet. Above it the open batch is sealed at half of its
size: records being encoded exist twice for a moment, and the buffer's limit does not count that."""


@dataclass(slots=True)
class BatchOpened:
    """The open batch got its first run. It is to be sealed after the linger time."""


@dataclass(slots=True)
class BatchSealed:
    """A batch is to be processed: it enters each stage in turn, and is settled at the end."""

    batch: BatchUpload


@dataclass(slots=True)
class Answer:
    """The outcomes of runs are known. The appends that they contain are to be answered."""

    runs: Sequence[StreamRun]


@dataclass(slots=True)
class Wake:
    """A waiter may continue: an append that waits for space has to be tried again."""

    waiter: Waiter


@dataclass(slots=True)
class Fenced:
    """Another process or node replaced this one. The writer never accepts an append again."""

    error: Exception


Effect: TypeAlias = BatchOpened | BatchSealed | Answer | Wake | Fenced


class WriterCore:
    """Records of one writer between admission and outcome.

    Invariants, after every event:

    - The records of a stream have consecutive offsets in the order of their appends, first in the
      batches in flight and then in the open batch. They are submitted in this order. A batch
      that begins to submit leaves out the streams that have failed, which prevents gaps.
    - A run has one outcome: success only if its commit was accepted, else the first error. With a
      log, appends have their answer before, and their runs stay in the open batch after a failure.
    - `buffered` is the cost of all unsettled runs, at most `max_buffer_bytes` at each admission,
      and of the copies that wait for the log. Appends that wait for space are admitted in the order
      of their calls.
    - Batches enter each stage in the order of sealing. At most `parallel_uploads` of them upload
      at a time, and one is in each other stage. While the order is held, none begins to submit.
    - A batch that finishes has no earlier batch in flight. One that ends before is settled at once.
    - A flush ends when all batches sealed before it are settled, or when the node is fenced.
    - After `reject`, `fence` or `close` nothing is admitted. The first fencing error is permanent.
      Runs that are not submitted yet fail with it at once. Only the controllers' answer settles
      the others.
    """

    def __init__(
        self, config: WriterConfig, streams: AttachedStreams, *, is_logged: bool = False
    ) -> None:
        self._config = config
        self._streams = streams
        self._is_logged = is_logged
        self.effects: list[Effect] = []
        self.buffered = 0
        """Bytes admitted and not settled, overhead and copies for the log included."""
        self.is_closed = False
        self.rejection: Exception | None = None
        """Error of every append, None while appends are accepted."""
        self.fenced: Exception | None = None
        self._open: dict[WriterStream, StreamRun] = {}
        self._open_bytes = 0
        self._unencoded_bytes = 0
        self._waiting: deque[Waiter] = deque()
        self._flushes: list[tuple[int, Waiter]] = []
        self._last_number = 0
        # Batches that have not passed each stage. An OrderedDict finds its first key in constant
        # time after many removals, which a dict does not.
        self._ahead: dict[Stage, OrderedDict[BatchUpload, None]] = {
            stage: OrderedDict() for stage in Stage if stage is not Stage.SEALED
        }
        # No batch may begin to submit while the order is held: the limit of that stage is 0 then.
        self._limits = dict.fromkeys(Stage, 1) | {Stage.UPLOAD: config.parallel_uploads}
        self.in_flight = self._ahead[Stage.FINISH]
        """Batches that are sealed and not settled, the oldest first."""

    # -- admission

    def accepting(self, stream_id: int) -> WriterStream:
        """Return a stream that accepts appends, or raise why it does not."""
        if self.is_closed:
            raise WriterClosedError(f"append to stream {stream_id} came after close")
        if self.rejection is not None:
            raise self.rejection

        # The subject of an error is built for an error only: this runs once a record.
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._streams.require(stream_id, f"append to stream {stream_id}")
        if stream.failure is not None:
            raise stream.error_after_failure()
        return stream

    def admit(
        self, stream: WriterStream, offsets: int, cost: int, size: int, waiter: Waiter | None = None
    ) -> StreamRun | None:
        """Return the run for an append, None while it has to wait for space.

        It takes `cost` bytes of the buffer and `size` bytes of an object. The caller adds records
        of `offsets` offsets to the run and reports them with `count_append`, before any other
        event. Raises `LimitExceededError` if the stream has no such offsets left.
        """
        # A newcomer waits behind those that wait already, even if it fits.
        if self._waiting and self._waiting[0] is not waiter:
            return None

        run = self._open.get(stream)
        # The object format counts the offsets of a run in 32 bits.
        if run is not None and run.end_offset + offsets - run.start_offset > INT32_MAX:
            run = None
        # The first record of a stream in a batch also pays for its run.
        if run is None:
            cost += RUN_OVERHEAD
        if self.buffered + cost > self._config.max_buffer_bytes or size > UPLOAD_BYTES_MAX:
            return None
        if self._unencoded_bytes > _UNENCODED_MAX and self._is_half_full:
            return None
        check_offsets(stream, offsets)
        return self._open_run(stream) if run is None else run

    @property
    def _is_half_full(self) -> bool:
        return 2 * self._open_bytes >= self._config.upload_bytes

    def _open_run(self, stream: WriterStream) -> StreamRun:
        if stream in self._open or len(self._open) >= self._config.max_streams:
            self.seal()
        if not self._open:
            self.effects.append(BatchOpened())
        run = self._open[stream] = StreamRun(stream)
        run.cost = RUN_OVERHEAD
        self.buffered += RUN_OVERHEAD
        return run

    def count_append(self, run: StreamRun, cost: int, size: int) -> None:
        """Note that `run` contains the records of the append that was admitted to it."""
        run.stream.next_offset = run.end_offset
        run.cost += cost
        self.buffered += cost
        self._open_bytes += size
        if self._open_bytes >= self._config.upload_bytes:
            self.seal()

    def wait(self, waiter: Waiter) -> None:
        """Queue an append behind those that wait for space. It is woken when it may fit."""
        self._waiting.append(waiter)

    def leave(self, waiter: Waiter) -> None:
        """Remove an append from the queue, admitted or not."""
        self._waiting.remove(waiter)
        self._wake_append()

    def make_space(self) -> None:
        """Seal the open batch early for an append that waits, if its upload can begin soon."""
        if len(self.in_flight) < self._config.parallel_uploads or self._is_half_full:
            self.seal()

    def charge(self, cost: int) -> None:
        """Count copies of records that wait for the log."""
        self.buffered += cost

    def release(self, cost: int) -> None:
        """Note that the log no longer keeps copies of `cost` bytes."""
        self.buffered -= cost
        self._wake_append()

    def _wake_append(self) -> None:
        if self._waiting:
            self.effects.append(Wake(self._waiting[0]))

    # -- ending

    def flush(self, waiter: Waiter) -> None:
        """Seal the open batch, and wake `waiter` when every batch is settled."""
        self.seal()
        self._flushes.append((self._last_number, waiter))
        self._wake_flushes()

    def _wake_flushes(self) -> None:
        if not self._flushes:
            return
        oldest = next(iter(self.in_flight), None)
        # A fenced node's batches may wait for a controller that never answers them.
        while self._flushes and (
            oldest is None or self.fenced is not None or self._flushes[0][0] < oldest.number
        ):
            self.effects.append(Wake(self._flushes.pop(0)[1]))

    def close(self) -> None:
        """Admit nothing from now on."""
        self.is_closed = True
        self._wake_append()

    def reject(self, error: Exception) -> None:
        """Reject all appends with `error` until `accept`."""
        self.rejection = error
        self._wake_append()

    def accept(self) -> None:
        """Accept appends again, unless the node is fenced."""
        self.rejection = self.fenced

    def fence(self, error: Exception) -> None:
        """Fail everything at once: the process no longer owns its node id."""
        if self.fenced is not None:
            return
        self.fenced = error
        self.effects.append(Fenced(error))
        self.reject(error)

        self._drop(list(self._open.values()), error)
        self._open = {}
        self._open_bytes = 0

        # A submitted batch may still be committed: only the controllers' answer settles it.
        for batch in self._ahead[Stage.SUBMIT]:
            for run in batch.runs:
                batch.failures.setdefault(run, error)
                run.settle(error)
            self.effects.append(Answer(batch.runs))
        self._wake_flushes()

    # -- the turns of batches

    def seal(self) -> None:
        """Start the upload of the open batch and begin an empty one."""
        if not self._open:
            return
        self._last_number += 1
        batch = BatchUpload(list(self._open.values()), self._open_bytes, self._last_number)
        for ahead in self._ahead.values():
            ahead[batch] = None
        self._unencoded_bytes += self._open_bytes
        self._open = {}
        self._open_bytes = 0
        self.effects.append(BatchSealed(batch))

    def enter(self, batch: BatchUpload, stage: Stage) -> bool:
        """End the present stage of `batch`. Return whether it has entered the next one.

        If it has to wait, the caller sets `batch.turn` before any other event. It is woken when the
        batch has entered the stage.
        """
        left = batch.stage
        assert stage == left + 1, f"a batch in stage {left} can't enter {stage}"
        if left is not Stage.SEALED:
            self._pass(batch, left)
            self._grant_turns(left)
        # Most batches need not wait, and a turn costs more than the rest of this method.
        if batch not in islice(self._ahead[stage], self._limits[stage]):
            return False
        batch.begin(stage)
        return True

    def hold(self) -> None:
        """Let no other batch submit until all submitted ones are settled.

        A batch is committed again. The controllers rejected the later ones because it was missing.
        """
        self._limits[Stage.SUBMIT] = 0

    def settle(self, batch: BatchUpload) -> None:
        """End `batch`, in any stage. Unless it is committed or has failed, it was cancelled."""
        was_submitted = batch not in self._ahead[Stage.SUBMIT]
        remaining = [stage for stage, ahead in self._ahead.items() if batch in ahead]
        for stage in remaining:
            self._pass(batch, stage)

        for run in batch.runs:
            self.buffered -= run.cost
            if run in batch.committed:
                run.stream.acknowledged = run.end_offset
                run.settle(None)
            else:
                cancelled = run.cut_short(was_submitted=was_submitted)
                self._fail(run, batch.failures.get(run) or cancelled)
        self.effects.append(Answer(batch.runs))

        if self._limits[Stage.SUBMIT] == 0:
            oldest = next(iter(self.in_flight), None)
            if oldest is None or oldest.stage < Stage.SUBMIT:
                self._limits[Stage.SUBMIT] = 1
                self._grant_turns(Stage.SUBMIT)
        for stage in remaining:
            self._grant_turns(stage)
        self._wake_append()
        self._wake_flushes()

    def _pass(self, batch: BatchUpload, stage: Stage) -> None:
        """Note that `batch` has passed `stage`."""
        del self._ahead[stage][batch]
        if stage is Stage.ENCODE:
            self._unencoded_bytes -= batch.encoded_bytes
            self._wake_append()

    def _grant_turns(self, stage: Stage) -> None:
        """Wake batches that wait for `stage` and may enter it."""
        for batch in islice(self._ahead[stage], self._limits[stage]):
            if batch.turn is not None and stage == batch.stage + 1:
                self.effects.append(Wake(batch.turn))
                batch.begin(stage)

    # -- outcomes

    def _fail(self, run: StreamRun, error: Exception) -> None:
        """Fail a run and the records of its stream in the open batch."""
        run.settle(error)
        if run.stream.failure is None:
            run.stream.failure = error
        # The whole node lost its identity, so no other batch can succeed.
        if isinstance(error, NodeFencedError | NodeNotRegisteredError):
            self.fence(error)
        # With a log the later records are acknowledged already and stay in the log.
        if not self._is_logged and (later := self._open.pop(run.stream, None)) is not None:
            self._open_bytes -= later.encoded_bytes
            self._drop([later], run.stream.error_after_failure())

    def _drop(self, runs: Sequence[StreamRun], error: Exception) -> None:
        """Fail runs of the open batch."""
        for run in runs:
            run.settle(error)
            self.buffered -= run.cost
        self.effects.append(Answer(runs))

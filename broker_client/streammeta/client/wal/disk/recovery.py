"""Recovery of a restarted broker: a verdict for each record of its write-ahead log.

Decides for each record whether an object already contains it, whether it is to be uploaded, or
whether it can't be committed and is set aside. The decision is pure. `recover_into` asks the
controllers and carries the decision out. Each process opens its streams under new epochs, so the
range of a record's epoch shows how much the record's process committed. Offsets after that range
may be records of another process, or records that an earlier recovery uploaded from the same log. A
comparison with the stored records decides.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.errors import OffsetTrimmedError, StreamNotFoundError
from streammeta.client.model import StreamDescription
from streammeta.client.nodes.session import BrokerSession, OpenedStream
from streammeta.client.reading.reader import StreamReader
from streammeta.client.resources.resources import ClosedAtExit
from streammeta.client.wal.disk.record_log import RecordLog
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.protocol.base import ObjectStore

# Comparison of logged records with stored ones, for records whose writer is unknown.
#
# An interrupted recovery leaves some of its uploads committed. Only the records themselves show
# whether a stream contains them, or another process's records at the same offsets.


class StoredRecords(ClosedAtExit):
    """Reads records of streams to compare them. The first comparison creates the reader."""

    def __init__(self, client: ControllerClient, store: ObjectStore, namespace: str) -> None:
        self._place = (client, store, namespace)
        self._reader: StreamReader | None = None

    async def contain(self, record: RecordBatch) -> bool:
        """Return whether the stream contains this record at its offsets, under any epoch.

        Raises the errors of reading: an unreadable record is not known to differ.
        """
        if self._reader is None:
            self._reader = StreamReader(*self._place)
        try:
            found = await self._reader.read(record.stream_id, record.base_offset, record.end_offset)
        # Trimmed or deleted records are not needed, so they count as not stored.
        except (OffsetTrimmedError, StreamNotFoundError):
            return False
        wanted = (record.base_offset, record.count, record.payload)
        stored = [(batch.base_offset, batch.count, batch.payload) for batch in found]
        return stored == [wanted]

    async def close(self) -> None:
        """Release the reader, if there is one."""
        if self._reader is not None:
            await self._reader.close()
            self._reader = None


_DESCRIBED_AT_ONCE = 1_000


class Verdict(Enum):
    """Verdict on one record."""

    COMMITTED = "committed"  # an object contains it, or the stream is trimmed past it
    UPLOAD = "upload"  # it continues the stream
    ASIDE = "aside"  # it can't be committed


@dataclass(frozen=True, slots=True)
class MissingRanges:
    """Ranges between two epochs, which together had the offsets `[start_offset, end_offset)`."""

    after_epoch: int
    before_epoch: int
    start_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class StreamHistory:
    """A stream's epochs so far, for records of epochs that the node does not own.

    `ends` is the end offset of each epoch's range, `pending` the half-open offset ranges below them
    that were never committed. `missing` stands for ranges that the controllers have dropped because
    they were empty or stream objects cover them.
    """

    start_offset: int
    ends: Mapping[int, int]
    pending: tuple[tuple[int, int], ...] = ()
    missing: tuple[MissingRanges, ...] = ()

    @property
    def end_offset(self) -> int:
        """The end of the stream."""
        return max(self.ends.values(), default=self.start_offset)

    def end_of(self, epoch: int) -> tuple[int, int] | None:
        """Return the smallest and the largest offset at which an epoch's range may have ended.

        They differ if that range is missing. Returns None if the stream had no such epoch.
        """
        end = self.ends.get(epoch)
        if end is not None:
            return end, end
        for gap in self.missing:
            if gap.after_epoch < epoch < gap.before_epoch:
                return gap.start_offset, gap.end_offset
        return None


@dataclass(slots=True)
class Comparison:
    """Results of comparing doubtful records with the stored ones, by stream and epoch.

    `equal_to` is the end of the consecutive records that are stored as the log has them.
    `differing` has the streams and epochs with a record that is not: all their later offsets belong
    to another writer.
    """

    equal_to: dict[tuple[int, int], int] = field(default_factory=dict)
    differing: set[tuple[int, int]] = field(default_factory=set)

    def note(self, record: RecordBatch, *, is_stored: bool) -> None:
        """Record the result for one record. Call it in order for each stream and epoch."""
        key = (record.stream_id, record.epoch)
        if is_stored:
            self.equal_to[key] = record.end_offset
        else:
            self.differing.add(key)


@dataclass(frozen=True, slots=True)
class AsideRun:
    """Consecutive offsets `[start_offset, end_offset)` that can't be committed, and the reason."""

    stream_id: int
    epoch: int
    start_offset: int
    end_offset: int
    reason: str


@dataclass(slots=True)
class RecoveryReport:
    """Records by verdict, the set-aside runs in log order, and their file or key."""

    committed: int = 0
    uploaded: int = 0
    set_aside: int = 0
    aside: list[AsideRun] = field(default_factory=list)
    file: Path | str | None = None


class RecoveryPlan:
    """Validates the records of a log one by one, in log order.

    `held` are the streams that this process owns, as the controllers list them. `histories` has
    other streams, and owned streams with records of older epochs. `newest` has the newest epoch of
    each stream in the logs. Records of older epochs are not continued, because their process itself
    continued from another offset. `comparison` decides whether doubtful records are stored.
    """

    def __init__(
        self,
        held: Iterable[OpenedStream],
        histories: Mapping[int, StreamHistory] | None = None,
        newest: Mapping[int, int] | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        self._held = {stream.stream_id: stream for stream in held}
        # Advances with each uploaded record, as later records of the log continue there.
        self._next = {stream_id: stream.next_offset for stream_id, stream in self._held.items()}
        self._histories = {} if histories is None else histories
        self._newest = {} if newest is None else newest
        self._comparison = Comparison() if comparison is None else comparison
        self._uploaded_to: dict[tuple[int, int], int] = {}
        self.report = RecoveryReport()

    def is_doubtful(self, record: RecordBatch) -> bool:
        """Return whether only a comparison can decide if the stream contains exactly this record.

        Such a record belongs to an earlier process and is, perhaps, after the range of its epoch.
        Doubtful records are compared in log order, before or while they are validated.
        """
        held = self._held.get(record.stream_id)
        history = self._histories.get(record.stream_id)
        if history is None or (held is not None and held.epoch == record.epoch):
            return False

        bounds = history.end_of(record.epoch)
        if bounds is None or record.base_offset < history.start_offset:
            return False
        least, largest = bounds
        return (
            least < record.end_offset <= history.end_offset
            and record.base_offset <= self._reach(record, largest)
        )

    def _reach(self, record: RecordBatch, largest_end: int) -> int:
        """Return the end of the offsets known to be of the record's epoch, -1 if one differs."""
        key = (record.stream_id, record.epoch)
        if key in self._comparison.differing:
            return -1
        return self._uploaded_to.get(key, self._comparison.equal_to.get(key, largest_end))

    def validate(self, record: RecordBatch) -> Verdict:
        """Decide about the next record of the log, and add it to the report."""
        held = self._held.get(record.stream_id)
        if held is not None and held.epoch == record.epoch:
            verdict = self._validate_held(held, record)
        else:
            verdict = self._validate_former(record)

        if not isinstance(verdict, Verdict):
            self.report.set_aside += 1
            self._note_aside(record, verdict)
            return Verdict.ASIDE
        if verdict is Verdict.UPLOAD:
            self.report.uploaded += 1
        else:
            self.report.committed += 1
        return verdict

    def _validate_held(self, held: OpenedStream, record: RecordBatch) -> Verdict | str:
        """Return the verdict, or the reason for setting the record aside."""
        if record.end_offset <= held.next_offset:
            return Verdict.COMMITTED
        expected = self._next[record.stream_id]
        if record.base_offset != expected:
            return f"it does not continue the stream, which ends at offset {expected}"
        self._next[record.stream_id] = record.end_offset
        return Verdict.UPLOAD

    def _validate_former(self, record: RecordBatch) -> Verdict | str:
        """Validate a record of an epoch that this process does not own.

        It is uploaded only if no other process has records in the stream after that epoch.
        """
        history = self._histories.get(record.stream_id)
        if history is None:
            return "the stream does not exist, or no longer"
        if record.end_offset <= history.start_offset:
            return Verdict.COMMITTED

        bounds = history.end_of(record.epoch)
        if bounds is None:
            return f"the stream has no range of epoch {record.epoch}"

        # Offsets up to `least` are committed for certain, and up to `equal_to` they were compared.
        least, largest = bounds
        key = (record.stream_id, record.epoch)
        if record.end_offset > self._comparison.equal_to.get(key, least):
            if self._continues(record, largest):
                self._next[record.stream_id] = self._uploaded_to[key] = record.end_offset
                return Verdict.UPLOAD
            return f"epoch {record.epoch} of the stream ended at offset {largest}"

        # Inside the stream but never committed: the stream was closed before the upload arrived.
        if any(a < record.end_offset and record.base_offset < b for a, b in history.pending):
            return f"epoch {record.epoch} of the stream was closed before it was committed"

        return Verdict.COMMITTED

    def _continues(self, record: RecordBatch, largest_end: int) -> bool:
        """Return whether a record of a former epoch follows its data at the stream's end."""
        held = self._held.get(record.stream_id)
        if held is None or held.epoch < record.epoch:
            return False
        # A newer process of the node wrote to the stream from another offset.
        if self._newest.get(record.stream_id, record.epoch) > record.epoch:
            return False
        end = self._next[record.stream_id]
        return record.base_offset == end == self._reach(record, largest_end)

    def _note_aside(self, record: RecordBatch, reason: str) -> None:
        runs = self.report.aside
        last = runs[-1] if runs else None
        begin = record.base_offset

        # Consecutive records with the same reason become one run of the report.
        if last is not None and (last.stream_id, last.epoch, last.end_offset, last.reason) == (
            record.stream_id,
            record.epoch,
            record.base_offset,
            reason,
        ):
            begin = runs.pop().start_offset
        runs.append(AsideRun(record.stream_id, record.epoch, begin, record.end_offset, reason))


async def recover_into(
    log: RecordLog,
    session: BrokerSession,
    upload: Callable[[RecordBatch], Awaitable[object]],
    store: ObjectStore | None = None,
) -> RecoveryReport:
    """Pass uncommitted records to `upload`, in log order, after setting the others aside.

    `upload` adds a record to the upload buffer without logging it again. Doubtful records are
    compared with the records in `store`, or set aside without one. The caller trims the log to
    `recovered_end` when all records are committed. Raises the errors of `upload`, of reading, of
    the controllers and of the log. A new process may repeat it then.
    """
    held = {stream.stream_id: stream.epoch for stream in session.inherited}
    newest: dict[int, int] = {}
    asked: set[int] = set()
    for record in log.recover():
        note_newest(newest, record)
        if held.get(record.stream_id) != record.epoch:
            asked.add(record.stream_id)

    histories = await stream_histories(session.client, asked)
    # Shared by all plans below, so that records are read only once.
    comparison = Comparison()
    if store is not None:
        doubts = RecoveryPlan(session.inherited, histories, newest, comparison)
        async with StoredRecords(session.client, store, session.namespace) as stored:
            for record in log.recover():
                if doubts.is_doubtful(record):
                    comparison.note(record, is_stored=await stored.contain(record))

    # Two passes: nothing may be uploaded before the other records are durable somewhere else.
    sorting = RecoveryPlan(session.inherited, histories, newest, comparison)
    unwanted = (record for record in log.recover() if sorting.validate(record) is Verdict.ASIDE)
    sorting.report.file = await log.set_aside(unwanted, "found at the start of a broker")

    plan = RecoveryPlan(session.inherited, histories, newest, comparison)
    for record in log.recover():
        if plan.validate(record) is Verdict.UPLOAD:
            await upload(record)
    return sorting.report


def note_newest(newest: dict[int, int], record: RecordBatch) -> None:
    """Raise the newest epoch of a record's stream to the record's."""
    if newest.get(record.stream_id, -1) < record.epoch:
        newest[record.stream_id] = record.epoch


async def stream_histories(
    client: ControllerClient, stream_ids: Iterable[int]
) -> dict[int, StreamHistory]:
    """Look up the epochs of streams. Missing streams are left out."""
    ids = sorted(stream_ids)
    histories: dict[int, StreamHistory] = {}
    for at in range(0, len(ids), _DESCRIBED_AT_ONCE):
        batch = ids[at : at + _DESCRIBED_AT_ONCE]
        async for stream in client.describe_streams(batch, include_ranges=True):
            histories[stream.stream_id] = _history(stream)
    return histories


def _history(described: StreamDescription) -> StreamHistory:
    missing: list[MissingRanges] = []
    index, epoch, end = -1, -1, 0
    for range_ in described.ranges:
        # Indexes count dropped ranges too, so a jump shows that some are missing.
        if range_.range_index > index + 1:
            missing.append(MissingRanges(epoch, range_.epoch, end, range_.start_offset))
        index, epoch, end = range_.range_index, range_.epoch, range_.end_offset
    return StreamHistory(
        described.start_offset,
        {range_.epoch: range_.end_offset for range_ in described.ranges},
        (*described.pending, *described.lost),
        tuple(missing),
    )

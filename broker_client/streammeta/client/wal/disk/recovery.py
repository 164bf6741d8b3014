"""Recovery of a restarted broker: a verdict for each record of its write-ahead log.

Decides for each record whether an object has it already, whether it is to be uploaded, or whether
it can't be: then it is set aside. The decision is pure; `recover_into` asks the controllers and
carries it out. Each process opens its streams under epochs of its own, so the range of a record's
epoch says what the process committed that wrote it. Offsets behind that range may hold records of
another process, or those that an earlier recovery uploaded from this very log: a comparison with
the stored records tells which.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.model import StreamDescription
from streammeta.client.nodes.session import BrokerSession, OpenedStream
from streammeta.client.wal.disk.record_log import RecordLog
from streammeta.client.wal.disk.stored_records import StoredRecords
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.protocol.base import ObjectStore

_DESCRIBED_AT_ONCE = 1_000


class Verdict(Enum):
    """Verdict on one record."""

    COMMITTED = "committed"  # an object has it, or the stream was trimmed behind it
    UPLOAD = "upload"  # it continues the stream
    ASIDE = "aside"  # it can't be committed


@dataclass(frozen=True, slots=True)
class MissingRanges:
    """Ranges between two epochs, which had the offsets `[start_offset, end_offset)` together."""

    after_epoch: int
    before_epoch: int
    start_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class StreamHistory:
    """A stream's epochs so far, for records of epochs that the node does not hold.

    `ends` is the end offset of the range of each epoch, `owed` the offset ranges below them that
    were never committed, half open. `missing` stands for ranges that the controllers have dropped,
    as they were empty or stream objects cover them.
    """

    start_offset: int
    ends: Mapping[int, int]
    owed: tuple[tuple[int, int], ...] = ()
    missing: tuple[MissingRanges, ...] = ()

    @property
    def end_offset(self) -> int:
        """The end of the stream."""
        return max(self.ends.values(), default=self.start_offset)

    def end_of(self, epoch: int) -> tuple[int, int] | None:
        """Return the least and the largest offset at which an epoch's range can have ended.

        They differ if that range is missing. None: the stream had no such epoch.
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

    `equal_to` is the end of the records that were found stored as the log has them, one behind the
    other. Of those in `differing` a record was not: all later ones are another writer's offsets.
    """

    equal_to: dict[tuple[int, int], int] = field(default_factory=dict)
    differing: set[tuple[int, int]] = field(default_factory=set)

    def note(self, record: RecordBatch, *, is_stored: bool) -> None:
        """Remember the result for one record; those of a stream and epoch come in order."""
        key = (record.stream_id, record.epoch)
        if is_stored:
            self.equal_to[key] = record.end_offset
        else:
            self.differing.add(key)


@dataclass(frozen=True, slots=True)
class AsideRun:
    """Consecutive offsets `[start_offset, end_offset)` that can't be committed, and why."""

    stream_id: int
    epoch: int
    start_offset: int
    end_offset: int
    reason: str


@dataclass(slots=True)
class RecoveryReport:
    """Records by verdict, the runs set aside in log order, and the file, or key, they are in."""

    committed: int = 0
    uploaded: int = 0
    set_aside: int = 0
    aside: list[AsideRun] = field(default_factory=list)
    file: Path | str | None = None


class RecoveryPlan:
    """Judges the records of a log one by one, in log order.

    `held` are the streams that this process holds, as the controllers list them; `histories` those
    of other streams, and of held streams with records of older epochs. `newest` are the newest
    epochs that the logs have records of, by stream: records of older ones are not continued, as
    their process itself went on from another offset. Doubtful records count as stored or not by
    `comparison`.
    """

    def __init__(
        self,
        held: Iterable[OpenedStream],
        histories: Mapping[int, StreamHistory] | None = None,
        newest: Mapping[int, int] | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        self._held = {stream.stream_id: stream for stream in held}
        self._next = {stream_id: stream.next_offset for stream_id, stream in self._held.items()}
        self._histories = {} if histories is None else histories
        self._newest = {} if newest is None else newest
        self._comparison = Comparison() if comparison is None else comparison
        self._uploaded_to: dict[tuple[int, int], int] = {}
        self.report = RecoveryReport()

    def is_doubtful(self, record: RecordBatch) -> bool:
        """Return whether only a comparison tells if the stream holds this very record.

        It is of an earlier process, and lies behind the range of its epoch, or perhaps so. Doubtful
        records have to be compared in log order, before or while they are judged.
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
        """Return up to where the stream holds nothing but its epoch's records; -1: not even so."""
        key = (record.stream_id, record.epoch)
        if key in self._comparison.differing:
            return -1
        return self._uploaded_to.get(key, self._comparison.equal_to.get(key, largest_end))

    def judge(self, record: RecordBatch) -> Verdict:
        """Decide about the next record of the log, and note it in the report."""
        held = self._held.get(record.stream_id)
        if held is not None and held.epoch == record.epoch:
            judged = self._judge_held(held, record)
        else:
            judged = self._judge_former(record)
        if not isinstance(judged, Verdict):
            self.report.set_aside += 1
            self._note_aside(record, judged)
            return Verdict.ASIDE
        if judged is Verdict.UPLOAD:
            self.report.uploaded += 1
        else:
            self.report.committed += 1
        return judged

    def _judge_held(self, held: OpenedStream, record: RecordBatch) -> Verdict | str:
        """Return the verdict, or the reason for setting the record aside."""
        if record.end_offset <= held.next_offset:
            return Verdict.COMMITTED
        expected = self._next[record.stream_id]
        if record.base_offset != expected:
            return f"it does not continue the stream, which ends at offset {expected}"
        self._next[record.stream_id] = record.end_offset
        return Verdict.UPLOAD

    def _judge_former(self, record: RecordBatch) -> Verdict | str:
        """Judge a record of an epoch that this process does not hold.

        It is uploaded only if the stream holds nothing of any other process behind that epoch.
        """
        history = self._histories.get(record.stream_id)
        if history is None:
            return "the stream does not exist (any more)"
        if record.end_offset <= history.start_offset:
            return Verdict.COMMITTED
        bounds = history.end_of(record.epoch)
        if bounds is None:
            return f"the stream has no range of epoch {record.epoch}"
        least, largest = bounds
        key = (record.stream_id, record.epoch)
        if record.end_offset > self._comparison.equal_to.get(key, least):
            if self._continues(record, largest):
                self._next[record.stream_id] = self._uploaded_to[key] = record.end_offset
                return Verdict.UPLOAD
            return f"epoch {record.epoch} of the stream ended at offset {largest}"
        if any(a < record.end_offset and record.base_offset < b for a, b in history.owed):
            return f"epoch {record.epoch} of the stream was closed before it was committed"
        return Verdict.COMMITTED

    def _continues(self, record: RecordBatch, largest_end: int) -> bool:
        """Return whether a record of a former epoch follows its epoch's data, at the very end."""
        held = self._held.get(record.stream_id)
        if held is None or held.epoch < record.epoch:
            return False
        if self._newest.get(record.stream_id, record.epoch) > record.epoch:
            return False
        end = self._next[record.stream_id]
        return record.base_offset == end == self._reach(record, largest_end)

    def _note_aside(self, record: RecordBatch, reason: str) -> None:
        runs = self.report.aside
        last = runs[-1] if runs else None
        begin = record.base_offset
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

    `upload` takes a record into the upload buffer, and not into the log again. Doubtful
    records are compared with those in `store`; without it they are set aside. The caller trims the
    log to `recovered_end` when all of it is committed. Raises the errors of `upload`, of reading,
    the controllers and the log; a new process may repeat it then.
    """
    held = {stream.stream_id: stream.epoch for stream in session.inherited}
    newest: dict[int, int] = {}
    asked: set[int] = set()
    for record in log.recover():
        note_newest(newest, record)
        if held.get(record.stream_id) != record.epoch:
            asked.add(record.stream_id)

    histories = await stream_histories(session.client, asked)
    comparison = Comparison()
    if store is not None:
        doubts = RecoveryPlan(session.inherited, histories, newest, comparison)
        async with StoredRecords(session.client, store, session.namespace) as stored:
            for record in log.recover():
                if doubts.is_doubtful(record):
                    comparison.note(record, is_stored=await stored.hold(record))

    sorting = RecoveryPlan(session.inherited, histories, newest, comparison)
    unwanted = (record for record in log.recover() if sorting.judge(record) is Verdict.ASIDE)
    sorting.report.file = await log.set_aside(unwanted, "found at the start of a broker")

    plan = RecoveryPlan(session.inherited, histories, newest, comparison)
    for record in log.recover():
        if plan.judge(record) is Verdict.UPLOAD:
            await upload(record)
    return sorting.report


def note_newest(newest: dict[int, int], record: RecordBatch) -> None:
    """Raise the newest epoch of a record's stream to the record's."""
    if newest.get(record.stream_id, -1) < record.epoch:
        newest[record.stream_id] = record.epoch


async def stream_histories(
    client: ControllerClient, stream_ids: Iterable[int]
) -> dict[int, StreamHistory]:
    """Ask the controllers for the epochs of streams; those that don't exist are left out."""
    ids = sorted(stream_ids)
    histories: dict[int, StreamHistory] = {}
    for at in range(0, len(ids), _DESCRIBED_AT_ONCE):
        batch = ids[at : at + _DESCRIBED_AT_ONCE]
        async for one in client.describe_streams(batch, include_ranges=True):
            histories[one.stream_id] = _history(one)
    return histories


def _history(described: StreamDescription) -> StreamHistory:
    missing: list[MissingRanges] = []
    index, epoch, end = -1, -1, 0
    for range_ in described.ranges:
        if range_.range_index > index + 1:
            missing.append(MissingRanges(epoch, range_.epoch, end, range_.start_offset))
        index, epoch, end = range_.range_index, range_.epoch, range_.end_offset
    return StreamHistory(
        described.start_offset,
        {range_.epoch: range_.end_offset for range_ in described.ranges},
        (*described.pending, *described.lost),
        tuple(missing),
    )

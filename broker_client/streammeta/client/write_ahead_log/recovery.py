"""Recovery of a restarted broker: a verdict for each record of its write-ahead log.

Decides for each record whether an object has it already, whether it is to be uploaded, or whether
it can't be: then it is set aside. The decision is pure; `recover_into` asks the controllers and
carries it out. A record of a stream's epoch counts as committed only below the end of the range of
that very epoch: other offsets may hold records of another broker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from streammeta.client.controller_client import ControllerClient
from streammeta.client.model import StreamDescription
from streammeta.client.session import BrokerSession, OpenedStream
from streammeta.client.write_ahead_log.record_log import RecordLog
from streammeta.storage.object_format.record import RecordBatch

_DESCRIBED_AT_ONCE = 1_000


class Verdict(Enum):
    """Verdict on one record."""

    COMMITTED = "committed"  # an object has it, or the stream was trimmed behind it
    UPLOAD = "upload"  # it continues the stream
    ASIDE = "aside"  # it can't be committed


@dataclass(frozen=True, slots=True)
class StreamHistory:
    """A stream's epochs so far, for records of epochs that the node does not hold.

    `ends` is the end offset of the range of each epoch, `owed` the offset ranges below them that
    were never committed, half open.
    """

    start_offset: int
    ends: Mapping[int, int]
    owed: tuple[tuple[int, int], ...] = ()


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
    of other streams, and of held streams with records of older epochs.
    """

    def __init__(
        self, held: Iterable[OpenedStream], histories: Mapping[int, StreamHistory] | None = None
    ) -> None:
        self._held = {stream.stream_id: stream for stream in held}
        self._next = {stream_id: stream.next_offset for stream_id, stream in self._held.items()}
        self._histories = {} if histories is None else histories
        self.report = RecoveryReport()

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
        """Judge a record of an epoch that this process does not hold: it uploads none of those."""
        history = self._histories.get(record.stream_id)
        if history is None:
            return "the stream does not exist (any more)"
        if record.end_offset <= history.start_offset:
            return Verdict.COMMITTED
        end = history.ends.get(record.epoch)
        if end is None:
            return f"the stream has no range of epoch {record.epoch}"
        if record.end_offset > end:
            return f"epoch {record.epoch} of the stream ended at offset {end}"
        if any(a < record.end_offset and record.base_offset < b for a, b in history.owed):
            return f"epoch {record.epoch} of the stream was closed before it was committed"
        return Verdict.COMMITTED

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
) -> RecoveryReport:
    """Pass uncommitted records to `upload`, in log order, after setting the others aside.

    `upload` takes a record into the upload buffer, and not into the log again. The caller trims
    the log to `recovered_end` when all of it is committed. Raises the errors of `upload`, the
    controllers and the log; a new process may repeat it then.
    """
    held = {stream.stream_id: stream.epoch for stream in session.inherited}
    asked = {
        record.stream_id for record in log.recover() if held.get(record.stream_id) != record.epoch
    }
    histories = await stream_histories(session.client, asked)
    sorting = RecoveryPlan(session.inherited, histories)
    unwanted = (record for record in log.recover() if sorting.judge(record) is Verdict.ASIDE)
    sorting.report.file = await log.set_aside(unwanted, "found at the start of a broker")
    plan = RecoveryPlan(session.inherited, histories)
    for record in log.recover():
        if plan.judge(record) is Verdict.UPLOAD:
            await upload(record)
    return sorting.report


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
    return StreamHistory(
        described.start_offset,
        {one.epoch: one.end_offset for one in described.ranges},
        (*described.pending, *described.lost),
    )

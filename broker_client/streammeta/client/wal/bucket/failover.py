"""Failover: seals the log of a departed node and commits its acknowledged records.

Owns the order of the steps. This or another process may repeat each of them:

1. The controllers fence the node, and its logs are sealed.
2. Each record is validated against the end of its stream. Records that continue a stream are
   uploaded, records that can't be committed are set aside.
3. The streams are closed, and only then the logs are discarded.

Records after a missing or damaged slot get no verdict: then nothing is closed or deleted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from streammeta.client import errors
from streammeta.client.model import NodeIdentity, Recovery
from streammeta.client.nodes.session import BrokerSession, Heartbeat, OpenedStream
from streammeta.client.resources.resources import ClosedAtExit
from streammeta.client.wal.bucket.bucket_slots import BucketSlots, SlotStore
from streammeta.client.wal.bucket.config import WAL_CONFIG
from streammeta.client.wal.bucket.departed_node import DepartedNode, PendingStream
from streammeta.client.wal.bucket.reading import (
    SealedLog,
    discard_log,
    list_logs,
    read_log,
    seal_log,
)
from streammeta.client.wal.bucket.setting_aside import write_aside
from streammeta.client.wal.disk.recovery import (
    Comparison,
    RecoveryPlan,
    StoredRecords,
    StreamHistory,
    Verdict,
    note_newest,
)
from streammeta.storage.errors import StorageError
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_log.slot import LogName, Sealer
from streammeta.storage.object_store.protocol.base import ObjectStore

CHUNK_BYTES = 32 * 1024 * 1024
"""Bytes of records that are uploaded, or set aside, together."""

LEFT_ALONE_S = 30.0
"""Seconds after which an assigned node without a log in the bucket is logged."""

_CHUNK_STREAMS = 10_000
_ATTEMPTS = 5
"""Limit of attempts with rejected uploads, which mean that others commit in the node's name."""

_THREADS = 5

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class FailoverReport:
    """Result of a failover: records by verdict, keys of set-aside objects, closed streams."""

    node: NodeIdentity
    committed: int = 0
    uploaded: int = 0
    set_aside: int = 0
    aside_keys: list[str] = field(default_factory=list)
    closed_streams: int = 0

    @property
    def is_empty(self) -> bool:
        """True if there was nothing to do."""
        return not (self.committed or self.uploaded or self.set_aside or self.closed_streams)


class Departed(Protocol):
    """A departed node at the controllers. See `DepartedNode`."""

    @property
    def node(self) -> NodeIdentity:
        """The process to recover."""
        ...

    async def list_pending(self) -> list[PendingStream]:
        """List the streams that the node has open or has to upload."""
        ...

    async def histories(self, stream_ids: Iterable[int]) -> Mapping[int, StreamHistory]:
        """Return the epochs of streams."""
        ...

    async def is_stored(self, record: RecordBatch) -> bool:
        """Return whether the stream contains exactly this record."""
        ...

    async def upload(self, records: Mapping[int, Sequence[RecordBatch]]) -> bool:
        """Upload records in the node's name. Return False if some were rejected."""
        ...

    async def close(self, streams: Sequence[PendingStream]) -> None:
        """Close streams in the node's name."""
        ...


async def recover_node(
    slots: SlotStore,
    namespace: str,
    departed: Departed,
    me: Sealer,
    chunk_bytes: int = CHUNK_BYTES,
) -> FailoverReport:
    """Commit a departed node's acknowledged records, close its streams, and discard its logs.

    It may be repeated. Raises `FailoverSupersededError`, `FailoverUnsettledError`,
    `DamagedSlotError`, the error that rejects this process as recoverer, and errors of controllers
    and store.
    """
    node = departed.node
    found = await list_logs(slots, namespace, node.node_id)
    newest = max(found, default=node.node_epoch)
    # A newer process has sealed and read the older logs itself.
    if newest > node.node_epoch:
        raise errors.FailoverSupersededError(node.node_id, node.node_epoch, newest)
    # The store answers, so the node may be fenced: only the assigned recoverer may seal its log.
    await departed.list_pending()
    names = [log.name for epoch, log in found.items() if epoch < node.node_epoch]
    # Even if the listing does not show it: a stale listing must not lose records.
    names.append(LogName(namespace, node.node_id, node.node_epoch))
    sealed = [log for name in names if (log := await seal_log(slots, name, me)) is not None]

    for _ in range(_ATTEMPTS):
        pending = await departed.list_pending()
        attempt = _Attempt(slots, names[-1], departed, pending, chunk_bytes)
        if await attempt.run(sealed):
            report = attempt.report
            # Streams with only a pending upload are closed already.
            streams = [stream for stream in pending if stream.upload_end is None]
            # The logs are discarded last: until the streams are closed a repeat needs the records.
            await departed.close(streams)
            report.closed_streams = len(streams)
            for log in sealed:
                await discard_log(slots, log.name, me)
            return report
    raise errors.FailoverUnsettledError(node.node_id, node.node_epoch, _ATTEMPTS)


class _Attempt:
    """One pass over all records, with the streams that were pending at its beginning."""

    def __init__(
        self,
        slots: SlotStore,
        name: LogName,
        departed: Departed,
        pending: list[PendingStream],
        chunk_bytes: int,
    ) -> None:
        self.report = FailoverReport(departed.node)
        self._slots = slots
        self._name = name
        self._departed = departed
        self._chunk_bytes = chunk_bytes
        self._pending = {stream.stream_id: stream for stream in pending}
        self._histories: dict[int, StreamHistory] = {}
        self._asked: set[int] = set()
        self._newest: dict[int, int] = {}
        self._knows_newest = False
        self._comparison = Comparison()
        # The plan sees later additions: it shares these mappings and the comparison.
        self._plan = RecoveryPlan(
            [
                OpenedStream(
                    stream.stream_id, stream.epoch, stream.start_offset, stream.next_offset
                )
                for stream in pending
            ],
            self._histories,
            self._newest,
            self._comparison,
        )
        self._wanted: dict[int, list[RecordBatch]] = {}
        self._aside: list[RecordBatch] = []
        self._bytes = 0

    async def run(self, logs: Sequence[SealedLog]) -> bool:
        """Validate all records and upload the missing ones. Return False if one was rejected."""
        for log in logs:
            async for records in read_log(self._slots, log):
                await self._learn(records, logs)
                for record in records:
                    if self._plan.is_doubtful(record):
                        is_stored = await self._departed.is_stored(record)
                        self._comparison.note(record, is_stored=is_stored)
                    self._sort(record)
                    if self._is_full and not await self._flush():
                        return False
        return await self._flush()

    async def _learn(self, records: Sequence[RecordBatch], logs: Sequence[SealedLog]) -> None:
        """Look up the epochs of streams that the node does not own at the records' epoch."""
        foreign = {record.stream_id for record in records if not self._is_owned(record)}
        asked = foreign - self._asked
        if asked:
            self._histories.update(await self._departed.histories(asked))
            self._asked |= asked
        # Streams that another epoch took over need the newest epochs of all logs, read once.
        if not self._knows_newest and asked & self._pending.keys():
            self._knows_newest = True
            for log in logs:
                # A second pass, but only when another epoch owns a stream, which is rare.
                async for found in read_log(self._slots, log):
                    for record in found:
                        note_newest(self._newest, record)

    def _is_owned(self, record: RecordBatch) -> bool:
        stream = self._pending.get(record.stream_id)
        return stream is not None and stream.epoch == record.epoch

    def _sort(self, record: RecordBatch) -> None:
        """Add one record to the list of its verdict."""
        verdict = self._plan.validate(record)
        if verdict is Verdict.COMMITTED:
            self.report.committed += 1
            return
        if verdict is Verdict.UPLOAD and self._is_pending(record):
            self.report.uploaded += 1
            # A later process may have raised the stream's epoch and died before its recovery.
            current = replace(record, epoch=self._pending[record.stream_id].epoch)
            self._wanted.setdefault(record.stream_id, []).append(current)
        else:
            self.report.set_aside += 1
            self._aside.append(record)
        self._bytes += record.encoded_size

    def _is_pending(self, record: RecordBatch) -> bool:
        """Return False if the stream was closed before the record was acknowledged."""
        stream = self._pending[record.stream_id]
        if stream.upload_end is None:
            return True
        return record.epoch == stream.epoch and record.end_offset <= stream.upload_end

    @property
    def _is_full(self) -> bool:
        return self._bytes >= self._chunk_bytes or len(self._wanted) >= _CHUNK_STREAMS

    async def _flush(self) -> bool:
        """Upload and set aside the collected records. Return False if one was rejected."""
        wanted, self._wanted = self._wanted, {}
        aside, self._aside = self._aside, []
        self._bytes = 0
        # Set aside before the upload: a crash between them repeats both, and loses neither.
        reason = "found in the log of a departed node"
        key = await write_aside(self._slots, self._name, aside, reason)
        if key is not None:
            _log.error("%d acknowledged records can't be committed: %s", len(aside), key)
            self.report.aside_keys.append(key)
        return not wanted or await self._departed.upload(wanted)


class FailoverWorker(ClosedAtExit):
    """Recovers the nodes that the controllers assign to a session's process, one at a time.

    `reports` has the completed failovers. A failed one is retried when the next heartbeat still
    assigns it. Nodes whose logs are not in the bucket are left alone: they come back, or the
    process recovers them otherwise. A node that stays assigned for `LEFT_ALONE_S` is logged.
    `clock` returns seconds.
    """

    def __init__(
        self,
        session: BrokerSession,
        store: ObjectStore,
        heartbeat: Heartbeat,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reports: list[FailoverReport] = []
        self._session = session
        self._store = store
        self._heartbeat = heartbeat
        self._slots = BucketSlots(store, _THREADS)
        self._clock = clock
        self._left_alone: dict[Recovery, float] = {}
        self._warned: set[Recovery] = set()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop. The broker that is assigned next continues a failover in progress."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._slots.close()

    async def _run(self) -> None:
        while True:
            await self._heartbeat.assigned.wait()
            # Before the work: an assignment that arrives meanwhile sets the event again.
            self._heartbeat.assigned.clear()
            for recovery in self._heartbeat.recoveries:
                if recovery.wal_config == WAL_CONFIG:
                    await self._recover(NodeIdentity(recovery.node_id, recovery.node_epoch))
            self._warn_of_left_alone(self._heartbeat.recoveries)

    def _warn_of_left_alone(self, assigned: Iterable[Recovery]) -> None:
        """Warn of nodes without a log in the bucket that stay assigned."""
        now = self._clock()
        others = [recovery for recovery in assigned if recovery.wal_config != WAL_CONFIG]
        self._left_alone = {recovery: self._left_alone.get(recovery, now) for recovery in others}
        self._warned &= self._left_alone.keys()
        for recovery, since in self._left_alone.items():
            if now - since >= LEFT_ALONE_S and recovery not in self._warned:
                self._warned.add(recovery)
                _log.warning(
                    "node %d has been assigned to this broker for %d s, and has no write-ahead log"
                    " in the bucket: start that broker again, or, if its log is lost, run"
                    " `streammeta node abandon --close-streams`",
                    recovery.node_id,
                    now - since,
                )

    async def _recover(self, node: NodeIdentity) -> None:
        session, store, own = self._session, self._store, self._session.node
        try:
            async with StoredRecords(session.client, store, session.namespace) as stored:
                report = await recover_node(
                    self._slots,
                    session.namespace,
                    DepartedNode(session, node, store, stored),
                    Sealer(own.node_id, own.node_epoch),
                )
        except (errors.BrokerClientError, StorageError, errors.WriteAheadLogError) as error:
            _log.warning("failover of node %d failed, retrying: %s", node.node_id, error)
        except Exception:  # noqa: BLE001 - it must not stop the failover of other nodes
            _log.exception("failover of node %d failed, retrying", node.node_id)
        else:
            if report.is_empty:
                # The controllers assign the node until they notice that its streams are closed.
                return
            _log.info("node %d is recovered: %s", node.node_id, report)
            self.reports.append(report)

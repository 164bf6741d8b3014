"""Failover: the log of a departed node is sealed, and what it acknowledged is committed.

Owns the order of the steps, any of which may be repeated by this or another process: the node is
fenced at the controllers, its logs are sealed, each record is judged by where its stream ends, what
continues a stream is uploaded, what can't be committed is set aside, streams are closed, and only
then the logs are discarded. Records behind a missing or damaged slot get no verdict: nothing is
closed or deleted then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from streammeta.client.errors import BrokerClientError
from streammeta.client.model import NodeIdentity, Recovery
from streammeta.client.nodes.session import BrokerSession, Heartbeat, OpenedStream
from streammeta.client.resources.resources import ClosedAtExit
from streammeta.client.wal.bucket.bucket_slots import BucketSlots, SlotStore
from streammeta.client.wal.bucket.config import WAL_CONFIG
from streammeta.client.wal.bucket.departed_node import DepartedNode, OwedStream
from streammeta.client.wal.bucket.reading import (
    SealedLog,
    discard_log,
    list_logs,
    read_log,
    seal_log,
)
from streammeta.client.wal.bucket.setting_aside import write_aside
from streammeta.client.wal.disk.errors import WriteAheadLogError
from streammeta.client.wal.disk.recovery import (
    Comparison,
    RecoveryPlan,
    StreamHistory,
    Verdict,
    note_newest,
)
from streammeta.client.wal.disk.stored_records import StoredRecords
from streammeta.storage.errors import StorageError
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_log.slot import Sealer
from streammeta.storage.object_log.slot_keys import LogName
from streammeta.storage.object_store.protocol.base import ObjectStore

CHUNK_BYTES = 32 * 1024 * 1024
"""Records that are uploaded, or set aside, together."""

LEFT_ALONE_S = 30.0
"""Time in seconds for which a node without a log in the bucket is named until it is told of."""

_CHUNK_STREAMS = 10_000
_ATTEMPTS = 5
"""Judgements that may find their uploads refused: something else commits in the node's name."""

_THREADS = 5

_log = logging.getLogger(__name__)


class FailoverSupersededError(BrokerClientError):
    """A newer process of the node has a log: it recovers what its earlier ones left."""

    def __init__(self, node: NodeIdentity, newer: int) -> None:
        super().__init__(
            f"process {node.node_epoch} of node {node.node_id} is not recovered here: its newer"
            f" process {newer} does so itself"
        )


class FailoverUnsettledError(BrokerClientError):
    """Uploads were refused again and again; the log is kept, and nothing was closed."""

    def __init__(self, node: NodeIdentity) -> None:
        super().__init__(
            f"the uploads for process {node.node_epoch} of node {node.node_id} were refused"
            f" {_ATTEMPTS} times, as if others committed in its name; its log is kept, and the next"
            " heartbeat that names it begins anew"
        )


@dataclass(slots=True)
class FailoverReport:
    """Result of a failover: records by verdict, the keys of those set aside, streams closed."""

    node: NodeIdentity
    committed: int = 0
    uploaded: int = 0
    set_aside: int = 0
    aside_keys: list[str] = field(default_factory=list)
    closed_streams: int = 0

    @property
    def is_empty(self) -> bool:
        """True if nothing was left to do."""
        return not (self.committed or self.uploaded or self.set_aside or self.closed_streams)


class Departed(Protocol):
    """A departed node at the controllers; see `DepartedNode`."""

    @property
    def node(self) -> NodeIdentity:
        """The process that is recovered."""
        ...

    async def owed(self) -> list[OwedStream]:
        """List what the node has open or owes."""
        ...

    async def histories(self, stream_ids: Iterable[int]) -> Mapping[int, StreamHistory]:
        """Return the epochs of streams."""
        ...

    async def is_stored(self, record: RecordBatch) -> bool:
        """Return whether the stream holds this very record."""
        ...

    async def upload(self, records: Mapping[int, Sequence[RecordBatch]]) -> bool:
        """Upload records in the node's name; False: some were refused."""
        ...

    async def close(self, streams: Sequence[OwedStream]) -> None:
        """Close streams in the node's name."""
        ...


async def recover_node(
    slots: SlotStore,
    namespace: str,
    departed: Departed,
    me: Sealer,
    chunk_bytes: int = CHUNK_BYTES,
) -> FailoverReport:
    """Commit what a departed node acknowledged, close its streams, and discard its logs.

    Raises `FailoverSupersededError`, `FailoverUnsettledError`, `DamagedSlotError`, what refuses
    this process as recoverer, and errors of controllers and store. It may be repeated.
    """
    node = departed.node
    found = await list_logs(slots, namespace, node.node_id)
    newest = max(found, default=node.node_epoch)
    if newest > node.node_epoch:
        raise FailoverSupersededError(node, newest)
    # The store answers, so the node may be fenced: its log is sealed only by who may recover it.
    await departed.owed()
    names = [log.name for epoch, log in found.items() if epoch < node.node_epoch]
    names.append(LogName(namespace, node.node_id, node.node_epoch))
    sealed = [one for name in names if (one := await seal_log(slots, name, me)) is not None]
    for _ in range(_ATTEMPTS):
        attempt = _Attempt(slots, names[-1], departed, await departed.owed(), chunk_bytes)
        if await attempt.carry_out(sealed):
            report = attempt.report
            streams = [one for one in attempt.owed if one.owed_to is None]
            await departed.close(streams)
            report.closed_streams = len(streams)
            for one in sealed:
                await discard_log(slots, one.name, me)
            return report
    raise FailoverUnsettledError(node)


class _Attempt:
    """One judgement of all records, by what is owed at its beginning."""

    def __init__(
        self,
        slots: SlotStore,
        name: LogName,
        departed: Departed,
        owed: list[OwedStream],
        chunk_bytes: int,
    ) -> None:
        self.owed = owed
        self.report = FailoverReport(departed.node)
        self._slots = slots
        self._name = name
        self._departed = departed
        self._chunk_bytes = chunk_bytes
        self._held = {one.stream_id: one for one in owed}
        self._histories: dict[int, StreamHistory] = {}
        self._asked: set[int] = set()
        self._newest: dict[int, int] = {}
        self._knows_newest = False
        self._comparison = Comparison()
        self._plan = RecoveryPlan(
            [
                OpenedStream(one.stream_id, one.epoch, one.start_offset, one.next_offset)
                for one in owed
            ],
            self._histories,
            self._newest,
            self._comparison,
        )
        self._wanted: dict[int, list[RecordBatch]] = {}
        self._aside: list[RecordBatch] = []
        self._bytes = 0

    async def carry_out(self, logs: Sequence[SealedLog]) -> bool:
        """Judge all records and upload what is wanted; False: an upload was refused."""
        for log in logs:
            async for records in read_log(self._slots, log):
                await self._learn(records, logs)
                for record in records:
                    if self._plan.is_doubtful(record):
                        is_stored = await self._departed.is_stored(record)
                        self._comparison.note(record, is_stored=is_stored)
                    self._take(record)
                    if self._is_full and not await self._pass_on():
                        return False
        return await self._pass_on()

    async def _learn(self, records: Sequence[RecordBatch], logs: Sequence[SealedLog]) -> None:
        """Ask for the epochs of streams that the node does not hold as the records say."""
        asked = {one.stream_id for one in records if not self._is_held(one)} - self._asked
        if asked:
            self._histories.update(await self._departed.histories(asked))
            self._asked |= asked
        if not self._knows_newest and asked & self._held.keys():
            self._knows_newest = True
            for log in logs:
                async for found in read_log(self._slots, log):
                    for record in found:
                        note_newest(self._newest, record)

    def _is_held(self, record: RecordBatch) -> bool:
        held = self._held.get(record.stream_id)
        return held is not None and held.epoch == record.epoch

    def _take(self, record: RecordBatch) -> None:
        """Put one record where its verdict says."""
        verdict = self._plan.judge(record)
        if verdict is Verdict.COMMITTED:
            self.report.committed += 1
            return
        if verdict is Verdict.UPLOAD and self._is_owed(record):
            self.report.uploaded += 1
            # A later process may have raised the stream's epoch, and died before its recovery.
            under_held = replace(record, epoch=self._held[record.stream_id].epoch)
            self._wanted.setdefault(record.stream_id, []).append(under_held)
        else:
            self.report.set_aside += 1
            self._aside.append(record)
        self._bytes += record.encoded_size

    def _is_owed(self, record: RecordBatch) -> bool:
        """True unless the stream was closed before the record was acknowledged."""
        held = self._held[record.stream_id]
        if held.owed_to is None:
            return True
        return record.epoch == held.epoch and record.end_offset <= held.owed_to

    @property
    def _is_full(self) -> bool:
        return self._bytes >= self._chunk_bytes or len(self._wanted) >= _CHUNK_STREAMS

    async def _pass_on(self) -> bool:
        """Upload and set aside what was taken; False: an upload was refused."""
        wanted, self._wanted = self._wanted, {}
        aside, self._aside = self._aside, []
        self._bytes = 0
        reason = "found in the log of a departed node"
        key = await write_aside(self._slots, self._name, aside, reason)
        if key is not None:
            _log.error("%d acknowledged records can't be committed: %s", len(aside), key)
            self.report.aside_keys.append(key)
        return not wanted or await self._departed.upload(wanted)


class FailoverWorker(ClosedAtExit):
    """Recovers the nodes that the controllers assign to a session's process, one at a time.

    `reports` are those of the failovers that are done. One that failed is tried again when the next
    heartbeat still names it. Nodes whose logs are not in the bucket are left alone: they come back,
    or the process recovers them otherwise. One that is named for `LEFT_ALONE_S` all the same is
    told of in the log. `clock` gives seconds.
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
        self._told: set[Recovery] = set()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop; a failover under way is left to the broker that is assigned next."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._slots.close()

    async def _run(self) -> None:
        while True:
            await self._heartbeat.assigned.wait()
            self._heartbeat.assigned.clear()
            for recovery in self._heartbeat.recoveries:
                if recovery.wal_config == WAL_CONFIG:
                    await self._recover(NodeIdentity(recovery.node_id, recovery.node_epoch))
            self._tell_of_left(self._heartbeat.recoveries)

    def _tell_of_left(self, named: Iterable[Recovery]) -> None:
        """Warn of nodes without a log in the bucket that have been named for long."""
        now = self._clock()
        others = [one for one in named if one.wal_config != WAL_CONFIG]
        self._left_alone = {one: self._left_alone.get(one, now) for one in others}
        self._told &= self._left_alone.keys()
        for one, since in self._left_alone.items():
            if now - since >= LEFT_ALONE_S and one not in self._told:
                self._told.add(one)
                _log.warning(
                    "node %d has been assigned to this broker for %d s, and has no write-ahead log"
                    " in the bucket: start that broker again, or, if its log is lost, run"
                    " `streammeta node abandon --close-streams`",
                    one.node_id,
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
        except (BrokerClientError, StorageError, WriteAheadLogError) as error:
            _log.warning("node %d is not recovered yet: %s", node.node_id, error)
        except Exception:  # noqa: BLE001 - other nodes must be recovered all the same
            _log.exception("node %d is not recovered yet", node.node_id)
        else:
            if report.is_empty:
                return  # the controllers have not noticed yet that it is done
            _log.info("node %d is recovered: %s", node.node_id, report)
            self.reports.append(report)

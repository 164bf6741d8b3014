"""A failover's verdicts and order, over a store in memory and a departed node in the test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from streammeta.client import NodeIdentity, errors
from streammeta.client.wal.bucket.bucket_slots import BucketSlots
from streammeta.client.wal.bucket.config import ObjectLogConfig
from streammeta.client.wal.bucket.departed_node import PendingStream
from streammeta.client.wal.bucket.failover import FailoverReport, recover_node
from streammeta.client.wal.bucket.log import ObjectLog
from streammeta.client.wal.bucket.setting_aside import read_aside
from streammeta.client.wal.disk.config import LogIdentity
from streammeta.client.wal.disk.recovery import StreamHistory
from streammeta.storage.errors import AccessDeniedError
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_log.slot import LogName, Sealer
from streammeta.storage.object_store.protocol.base import Body
from tests.broker_client.wal_tools import encoded
from tests.kit.memory_store import MemoryObjectStore

NAMESPACE = "_streammeta_test"
NODE, EPOCH = 7, 3
ONE_EACH = ObjectLogConfig(linger_s=0.001, slot_bytes=1)


@dataclass
class Node:
    """A departed node: each refusal is one upload refused, after which `then` are the ends."""

    streams: list[PendingStream]
    refusals: int = 0
    then: list[PendingStream] | None = None
    ranges: Mapping[int, int] = field(default_factory=lambda: {EPOCH: 2})
    close_error: Exception | None = None
    is_assigned: bool = True
    node: NodeIdentity = field(default_factory=lambda: NodeIdentity(NODE, 1))
    uploads: list[RecordBatch] = field(default_factory=list)
    stored: list[RecordBatch] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    async def list_pending(self) -> list[PendingStream]:
        self.calls.append("owed")
        if not self.is_assigned:
            raise errors.NodeFencedError("a recovery")
        return self.streams

    async def histories(self, stream_ids: Iterable[int]) -> Mapping[int, StreamHistory]:
        return {stream: StreamHistory(0, self.ranges) for stream in stream_ids if stream < 9}

    async def is_stored(self, record: RecordBatch) -> bool:
        return record in self.stored

    async def upload(self, records: Mapping[int, Sequence[RecordBatch]]) -> bool:
        self.calls.append("upload")
        if self.refusals:
            self.refusals -= 1
            self.streams = self.then or self.streams
            return False
        self.uploads += [stored for some in records.values() for stored in some]
        return True

    async def close(self, streams: Sequence[PendingStream]) -> None:
        self.calls.append("close")
        if self.close_error is not None:
            raise self.close_error
        self.closed += [stream.stream_id for stream in streams]


def record(stream_id: int, offset: int, epoch: int = EPOCH) -> RecordBatch:
    return RecordBatch(stream_id, epoch, offset, 1, b"%d.%d" % (stream_id, offset))


async def logged(
    store: MemoryObjectStore, records: Sequence[RecordBatch], node_epoch: int = 1
) -> None:
    """Leave a log with these records, acknowledged and not trimmed, one a slot."""
    log = await ObjectLog.open(store, LogIdentity(NAMESPACE, NODE, node_epoch), ONE_EACH)
    async with log:
        await asyncio.gather(*(asyncio.shield(log.append(*encoded(batch))) for batch in records))


async def recovered(store: MemoryObjectStore, node: Node) -> FailoverReport:
    slots = BucketSlots(store, 2)
    try:
        return await recover_node(slots, NAMESPACE, node, Sealer(8, 1), chunk_bytes=100)
    finally:
        slots.close()


def is_discarded(store: MemoryObjectStore, node_epoch: int = 1) -> bool:
    return LogName(NAMESPACE, NODE, node_epoch).recovered_key in store.objects()


def owed(stream_id: int, next_offset: int, owed_to: int | None = None) -> PendingStream:
    return PendingStream(stream_id, EPOCH, 0, next_offset, owed_to)


async def test_what_continues_a_stream_is_uploaded_and_the_rest_is_set_aside() -> None:
    store = MemoryObjectStore()
    records = [record(1, 4), record(1, 5), record(2, 8), record(1, 6), record(1, 8), record(9, 0)]
    await logged(store, [*records, record(3, 1), record(3, 2)])
    node = Node([owed(1, 5), owed(2, 8)])
    report = await recovered(store, node)
    assert {upload.payload for upload in node.uploads} == {b"1.5", b"2.8", b"1.6"}
    assert (report.committed, report.uploaded, report.set_aside) == (2, 3, 3)
    aside = [stored for key in report.aside_keys for stored in read_aside(store, key, NAMESPACE)[1]]
    assert aside == [records[4], records[5], record(3, 2)]
    assert node.closed == [1, 2]
    assert node.calls[-1] == "close"
    assert is_discarded(store)


async def test_a_stream_closed_before_its_last_upload_is_recovered_up_to_its_end() -> None:
    store = MemoryObjectStore()
    await logged(store, [record(1, offset) for offset in range(5)])
    node = Node([owed(1, 1, owed_to=3)])
    report = await recovered(store, node)
    assert node.uploads == [record(1, 1), record(1, 2)]
    assert (report.committed, report.set_aside) == (1, 2)
    assert node.closed == []


async def test_after_a_refused_upload_everything_is_judged_anew() -> None:
    store = MemoryObjectStore()
    await logged(store, [record(1, 0), record(1, 1), record(2, 0)])
    node = Node([owed(1, 0), owed(2, 0)], refusals=1, then=[owed(1, 1), owed(2, 0)])
    report = await recovered(store, node)
    assert sorted(upload.payload for upload in node.uploads) == [b"1.1", b"2.0"]
    assert (report.committed, report.uploaded, report.set_aside) == (1, 2, 0)


async def test_uploads_that_are_refused_again_and_again_leave_everything_as_it_is() -> None:
    store = MemoryObjectStore()
    await logged(store, [record(1, 0)])
    node = Node([owed(1, 0)], refusals=100)
    with pytest.raises(errors.FailoverUnsettledError):
        await recovered(store, node)
    assert node.closed == []
    assert not is_discarded(store)
    node.refusals = 0
    assert (await recovered(store, node)).uploaded == 1


async def test_who_is_not_assigned_seals_nothing() -> None:
    store = MemoryObjectStore()
    log = await ObjectLog.open(store, LogIdentity(NAMESPACE, NODE, 1), ONE_EACH)
    async with log:
        with pytest.raises(errors.NodeFencedError):
            await recovered(store, Node([owed(1, 0)], is_assigned=False))
        await asyncio.shield(log.append(*encoded(record(1, 0))))


async def test_damage_closes_and_deletes_nothing_and_commits_what_is_before_it() -> None:
    store = MemoryObjectStore()
    await logged(store, [record(1, offset) for offset in range(6)])
    key = LogName(NAMESPACE, NODE, 1).slot_key(5)
    good = store.objects()[key]
    store.put(key, good[:-1])
    node = Node([owed(1, 0)])
    with pytest.raises(errors.DamagedSlotError, match=key):
        await recovered(store, node)
    assert node.closed == []
    assert not is_discarded(store)
    assert node.uploads == [record(1, offset) for offset in range(len(node.uploads))]
    store.put(key, good)
    node.streams, before = [owed(1, len(node.uploads))], list(node.uploads)
    await recovered(store, node)
    assert node.uploads == [record(1, offset) for offset in range(6)]
    assert len(before) < 5


async def test_logs_of_earlier_processes_are_recovered_first() -> None:
    store = MemoryObjectStore()
    await logged(store, [record(1, 0)], 1)
    await logged(store, [record(1, 1)], 2)
    node = Node([owed(1, 0)], node=NodeIdentity(NODE, 2))
    await recovered(store, node)
    assert node.uploads == [record(1, 0), record(1, 1)]
    assert is_discarded(store, 1)
    assert is_discarded(store, 2)


async def test_a_newer_process_recovers_by_itself() -> None:
    store = MemoryObjectStore()
    await logged(store, [record(1, 0)], 2)
    before = store.objects()
    with pytest.raises(errors.FailoverSupersededError, match="process 2"):
        await recovered(store, Node([owed(1, 0)]))
    assert store.objects() == before


async def test_a_recovery_that_is_repeated_has_nothing_left_to_do() -> None:
    store = MemoryObjectStore()
    await logged(store, [record(1, 0)])
    node = Node([owed(1, 0)])
    await recovered(store, node)
    node.streams = []
    assert (await recovered(store, node)).is_empty


async def test_a_log_stays_until_the_streams_of_its_node_are_closed() -> None:
    store = MemoryObjectStore()
    await logged(store, [record(1, 0)])
    node = Node([owed(1, 0), owed(2, 5, owed_to=5)], close_error=errors.NodeFencedError("closing"))
    with pytest.raises(errors.NodeFencedError):
        await recovered(store, node)
    assert not is_discarded(store)
    node.close_error, node.streams = None, [owed(1, 1), owed(2, 5, owed_to=5)]
    report = await recovered(store, node)
    assert (report.committed, report.closed_streams) == (1, 1)
    assert is_discarded(store)


async def test_a_log_stays_if_records_can_not_be_set_aside() -> None:
    class NoAside(MemoryObjectStore):
        def put(self, key: str, data: Body, **options: Any) -> None:
            if "/aside/" in key:
                raise AccessDeniedError("no right to write there")
            super().put(key, data, **options)

    store = NoAside()
    await logged(store, [record(1, 0), record(9, 0)])
    node = Node([owed(1, 0)])
    with pytest.raises(AccessDeniedError):
        await recovered(store, node)
    assert node.closed == []
    assert not is_discarded(store)


async def test_all_records_set_aside_of_a_large_log_can_be_read_though_in_several_objects() -> None:
    store = MemoryObjectStore()
    lost = [record(9, offset) for offset in range(20)]
    await logged(store, lost)
    report = await recovered(store, Node([]))
    assert report.set_aside == 20
    assert len(report.aside_keys) == len(set(report.aside_keys)) > 3
    aside = [stored for key in report.aside_keys for stored in read_aside(store, key, NAMESPACE)[1]]
    assert aside == lost


async def test_a_large_log_is_uploaded_in_several_parts() -> None:
    store = MemoryObjectStore()
    await logged(store, [record(1, offset) for offset in range(20)])
    node = Node([owed(1, 0)])
    await recovered(store, node)
    assert node.calls.count("upload") > 3
    assert node.uploads == [record(1, offset) for offset in range(20)]


async def test_a_part_that_is_refused_ends_the_attempt_before_the_next_one() -> None:
    """What follows it would leave a hole, or be refused as well."""
    store = MemoryObjectStore()
    await logged(store, [record(1, offset) for offset in range(20)])
    node = Node([owed(1, 0)], refusals=1, then=[owed(1, 1)])
    report = await recovered(store, node)
    assert node.uploads == [record(1, offset) for offset in range(1, 20)]
    assert (report.committed, report.uploaded) == (1, 19)


async def test_doubtful_records_count_as_committed_only_if_the_stream_holds_them() -> None:
    """Of epoch 2 the stream has offsets 0 and 1, a former recovery stored 2, and others 3."""
    store = MemoryObjectStore()
    records = [record(1, offset, epoch=2) for offset in range(5)]
    await logged(store, records)
    node = Node([owed(1, 4)], ranges={2: 2, EPOCH: 4}, stored=[records[2]])
    report = await recovered(store, node)
    assert (report.committed, report.uploaded, report.set_aside) == (3, 0, 2)
    assert read_aside(store, report.aside_keys[0], NAMESPACE)[1] == records[3:]


async def test_records_of_an_earlier_process_are_uploaded_under_the_epoch_in_force() -> None:
    """A later process had opened the stream under it, and died before its own recovery."""
    store = MemoryObjectStore()
    await logged(store, [record(1, offset, epoch=2) for offset in range(4)])
    node = Node([owed(1, 2)], ranges={2: 2, EPOCH: 2})
    report = await recovered(store, node)
    assert (report.committed, report.uploaded) == (2, 2)
    assert node.uploads == [record(1, 2), record(1, 3)]


async def test_a_record_of_an_older_epoch_does_not_continue_a_stream_with_newer_ones() -> None:
    """The node itself went on from another offset: its stream was trimmed, or taken over."""
    store = MemoryObjectStore()
    older, newer = record(1, 2, epoch=2), record(1, 2)
    await logged(store, [older, newer])
    node = Node([owed(1, 2)], ranges={2: 2, EPOCH: 2})
    report = await recovered(store, node)
    assert node.uploads == [newer]
    assert (report.uploaded, report.set_aside) == (1, 1)
    assert read_aside(store, report.aside_keys[0], NAMESPACE)[1] == [older]


@pytest.mark.parametrize("kind", ["committed", "uploaded", "set_aside", "closed_streams"])
def test_a_report_of_anything_is_not_empty(kind: str) -> None:
    assert FailoverReport(NodeIdentity(NODE, 1)).is_empty
    report = FailoverReport(NodeIdentity(NODE, 1))
    setattr(report, kind, 1)
    assert not report.is_empty

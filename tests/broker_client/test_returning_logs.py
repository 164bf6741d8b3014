"""Write-ahead logs that come back after their node has gone on without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import OpenedStream, StreamClient, StreamClientConfig
from streammeta.client.config import WriterConfig
from streammeta.client.parts import BrokerSession
from streammeta.client.wal.bucket.config import ObjectLogConfig
from streammeta.client.wal.bucket.setting_aside import read_aside
from streammeta.client.wal.disk.recovery import (
    Comparison,
    MissingRanges,
    RecoveryPlan,
    StreamHistory,
    Verdict,
    note_newest,
)
from streammeta.client.wal.disk.set_aside import read_set_aside
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.local import LocalObjectStore
from tests.kit.fake_broker import broker

COMMITTED, UPLOAD, ASIDE = Verdict.COMMITTED, Verdict.UPLOAD, Verdict.ASIDE


@dataclass
class Logged:
    """A node whose processes have a log, on disk or in the bucket, or have none."""

    cluster: LocalCluster
    node_id: int
    config: StreamClientConfig
    epoch: int = 0

    async def start(self, config: StreamClientConfig | None = None) -> StreamClient:
        """Start the node's next process, with its log unless another configuration is given."""
        self.epoch += 1
        return await StreamClient.open(
            self.cluster.endpoints,
            self.cluster.store_uri,
            node_id=self.node_id,
            node_epoch=self.epoch,
            config=config or self.config,
        )

    async def acknowledge(self) -> int:
        """Commit offsets 0 to 4 of a stream, acknowledge 5 to 9 in the log alone, and die."""
        client = await self.start()
        (stream_id,) = await client.create_streams([{}])
        (await client.open_streams([stream_id])).require_all()
        for number in range(5):
            await client.append(stream_id, b"early %d" % number)
        await client.flush()
        for number in range(5, 10):
            assert await client.append(stream_id, b"logged %d" % number) == number
        await client.writer.close(0)
        await client.close()
        return stream_id

    async def set_aside(self, client: StreamClient) -> Sequence[RecordBatch]:
        assert client.recovery is not None
        place = client.recovery.file
        if isinstance(place, Path):
            return [entry for entry in read_set_aside(place) if isinstance(entry, RecordBatch)]
        assert place is not None
        store = LocalObjectStore(Path(self.cluster.store_uri.removeprefix("file://")))
        return read_aside(store, place, client.session.namespace)[1]


LOGLESS = StreamClientConfig(writer=WriterConfig(linger_s=0.01), allow_missing_log=True)
_NODES = iter(range(9000, 10000))


@pytest.fixture(params=["disk", "bucket"])
def logged(request: pytest.FixtureRequest, cluster: LocalCluster, tmp_path: Path) -> Logged:
    writer = WriterConfig(linger_s=60.0, durability="wal")
    config = StreamClientConfig(writer=writer, wal_directory=tmp_path / "log")
    if request.param == "bucket":
        in_bucket = ObjectLogConfig(linger_s=0.01)
        config = replace(config, wal_directory=None, object_log=in_bucket)
    return Logged(cluster, next(_NODES), config)


async def payloads(client: StreamClient, stream_id: int) -> list[bytes]:
    return [stored.payload async for stored in client.iterate(stream_id)]


EARLY = [b"early %d" % number for number in range(5)]
LATE = [b"logged %d" % number for number in range(5, 10)]


@pytest.mark.parametrize("count", [1, 3, 5, 8])
async def test_a_log_is_set_aside_whole_after_others_wrote(logged: Logged, count: int) -> None:
    stream_id = await logged.acknowledge()
    other = await logged.start(LOGLESS)
    others = [b"other %d" % number for number in range(count)]
    for number, payload in enumerate(others, start=5):
        assert await other.append(stream_id, payload) == number
    await other.close()

    back = await logged.start()
    assert back.recovery is not None
    assert (back.recovery.uploaded, back.recovery.set_aside) == (0, 5)
    assert [stored.payload for stored in await logged.set_aside(back)] == LATE
    assert await back.append(stream_id, b"next") == 5 + count
    await back.flush()
    assert await payloads(back, stream_id) == [*EARLY, *others, b"next"]
    await back.close()


async def test_a_log_that_returns_when_nobody_wrote_is_uploaded(logged: Logged) -> None:
    stream_id = await logged.acknowledge()
    for _ in range(3):  # each ends one range and begins another; empty ones are dropped
        await (await logged.start(LOGLESS)).close()
    back = await logged.start()
    assert back.recovery is not None
    assert (back.recovery.uploaded, back.recovery.set_aside) == (5, 0)
    assert await payloads(back, stream_id) == [*EARLY, *LATE]
    await back.close()


async def test_a_log_returns_to_a_stream_that_was_closed_and_opened_again(logged: Logged) -> None:
    stream_id = await logged.acknowledge()
    other = await logged.start(LOGLESS)
    (await other.close_streams([stream_id])).require_all()
    (await other.open_streams([stream_id])).require_all()
    assert await other.append(stream_id, b"other") == 5
    await other.close()
    back = await logged.start()
    assert back.recovery is not None
    assert (back.recovery.uploaded, back.recovery.set_aside) == (0, 5)
    await back.close()


async def test_every_process_opens_inherited_streams_under_its_epoch(logged: Logged) -> None:
    stream_id = await logged.acknowledge()
    epochs = []
    for _ in range(3):
        client = await logged.start()
        (opened,) = client.inherited
        assert opened.stream_id == stream_id
        epochs.append(opened.epoch)
        await client.close()
    assert epochs == sorted({0, *epochs} - {0})


async def test_ten_thousand_streams_are_inherited_in_two_calls() -> None:
    async with broker() as b:
        await b.opened(10_000, epoch=3)
        before = b.cluster.calls["OpenStreams"]
        session = await BrokerSession.open(b.client, b.session.node.node_id, 2)
        assert [stream.epoch for stream in session.inherited] == [4] * 10_000
        assert b.cluster.calls["OpenStreams"] == before + 2


# -- the plan alone


def record(epoch: int, begin: int, end: int) -> RecordBatch:
    return RecordBatch(1, epoch, begin, end - begin, b"%d" % begin)


def judged(
    history: StreamHistory, records: Sequence[RecordBatch], stored: Sequence[RecordBatch] = ()
) -> list[Verdict]:
    """Judge a log of a stream that this process holds under epoch 9, from its end on."""
    newest: dict[int, int] = {}
    for batch in records:
        note_newest(newest, batch)
    held = [OpenedStream(1, 9, history.start_offset, history.end_offset)]
    comparison = Comparison()
    plan = RecoveryPlan(held, {1: history}, newest, comparison)
    for batch in records:
        if plan.is_doubtful(batch):
            comparison.note(batch, is_stored=batch in stored)
    return [plan.validate(batch) for batch in records]


LOG = [record(7, 4, 5), *(record(7, number, number + 1) for number in range(5, 10))]


def test_an_interrupted_recovery_goes_on_where_its_uploads_ended() -> None:
    history = StreamHistory(0, {7: 5, 8: 7, 9: 7})
    verdicts = judged(history, LOG, stored=LOG[1:3])
    assert verdicts == [COMMITTED, COMMITTED, COMMITTED, UPLOAD, UPLOAD, UPLOAD]


def test_a_record_that_another_wrote_bars_all_that_follow() -> None:
    history = StreamHistory(0, {7: 5, 8: 7, 9: 7})
    assert judged(history, LOG, stored=LOG[1:2]) == [COMMITTED, COMMITTED, *[ASIDE] * 4]
    assert judged(history, LOG, stored=LOG[2:3]) == [COMMITTED, *[ASIDE] * 5]


def test_a_record_across_the_end_is_not_continued() -> None:
    history = StreamHistory(0, {7: 5, 8: 7, 9: 7})
    log = [record(7, 5, 6), record(7, 6, 8), record(7, 8, 9)]
    assert judged(history, log, stored=log) == [COMMITTED, ASIDE, ASIDE]


def test_records_that_their_own_process_gave_up_are_not_continued() -> None:
    """After a failed write the process opened the stream again and went on from its end."""
    history = StreamHistory(0, {7: 5, 8: 5, 9: 5})
    log = [record(7, 5, 6), record(7, 6, 7), record(8, 5, 6)]
    assert judged(history, log) == [ASIDE, ASIDE, UPLOAD]


def test_a_range_that_was_dropped_leaves_its_records_in_doubt() -> None:
    dropped = (MissingRanges(6, 8, 3, 6),)
    history = StreamHistory(0, {6: 3, 8: 6, 9: 6}, missing=dropped)
    log = [record(7, number, number + 1) for number in range(4, 8)]
    assert judged(history, log, stored=log[:2]) == [COMMITTED, COMMITTED, UPLOAD, UPLOAD]
    assert judged(history, log) == judged(history, log, stored=log[1:2]) == [ASIDE] * 4
    unknown = [record(5, 6, 7), record(10, 6, 7)]
    assert judged(history, unknown) == [ASIDE, ASIDE]


async def test_a_broker_opens_again_what_it_has_open(cluster: LocalCluster) -> None:
    """That is the way back from a failed write."""
    async with await Logged(cluster, next(_NODES), LOGLESS).start() as client:
        (stream_id,) = await client.create_streams([{}])
        (await client.open_streams([stream_id])).require_all()
        assert await client.append(stream_id, b"0") == 0
        for wish in ([stream_id], {stream_id: 7}):
            (opened,) = (await client.open_streams(wish)).require_all().values()
            at = opened.next_offset
            assert await client.append(stream_id, b"%d" % at) == at
        pending = await client.writer.append(stream_id, b"3")
        with pytest.raises(ValueError, match="acknowledged"):
            await client.open_streams([stream_id])
        assert await pending == 3
        assert await payloads(client, stream_id) == [b"0", b"1", b"2", b"3"]


async def test_sessions_take_over_before_they_are_handed_out(cluster: LocalCluster) -> None:
    async with await Logged(cluster, node_id := next(_NODES), LOGLESS).start() as client:
        (stream_id,) = await client.create_streams([{}])
        (await client.open_streams({stream_id: 5})).require_all()
        session = await BrokerSession.open(client.controllers, node_id, 2)
        assert session.inherited == (OpenedStream(stream_id, 6, 0, 0),)
        (await session.open_streams({stream_id: 6})).require_all()  # as after a lost answer

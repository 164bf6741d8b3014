"""Acknowledged records are there once, in their place, and refused ones are not. Always.

With a write-ahead log appends are acknowledged by the log, which forgets what is committed.

In a seeded storm of faults on an in-process cluster leaders move, answers are lost, ids expire,
streams are taken away, a store fails. Every payload says where it belongs.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from streammeta.client import WriterConfig, errors
from streammeta.client.controllers.bucket_check import BucketCheck
from streammeta.client.controllers.methods import COMMIT_STREAM_SET_OBJECT, PREPARE_OBJECTS
from streammeta.client.errors import WriteAheadLogBrokenError, WriteAheadLogFullError
from streammeta.client.parts import BrokerSession, StreamWriter
from streammeta.client.wal.disk.config import LogConfig, LogIdentity
from streammeta.client.wal.disk.log import WriteAheadLog
from streammeta.client.writing import wal_acks
from streammeta.client.writing.batch import BatchUpload
from streammeta.client.writing.uploader import Uploader
from streammeta.storage.backoff import Backoff
from streammeta.storage.errors import AccessDeniedError, StoreUnavailableError
from streammeta.storage.object_format.record import RecordBatch, decode_record
from streammeta.storage.object_store.protocol.base import Body
from streammeta.storage.object_store.protocol.patience import Patience
from tests.kit.fake_broker import NEVER, Broker, broker, writing
from tests.kit.fake_cluster import NAMESPACE
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.seeds import seeds
from tests.kit.waiting import until

COMMITS = "CommitStreamSetObject"


class FakeLog(WriteAheadLog):
    """A log in memory; the test says when a group is on disk."""

    def __init__(self, recovered: Iterable[RecordBatch] = ()) -> None:
        self.recovered = list(recovered)
        self.records: list[RecordBatch] = []
        self.trims: list[int] = []
        self.aside: list[RecordBatch] = []
        self.group: asyncio.Future[None] | None = None
        self.room = True
        self._config = LogConfig()
        self.recovered_end = self.end = len(self.recovered)

    def has_room(self, size: int) -> bool:
        return self.room or size == 0

    def append(self, header: bytes, payload: bytes) -> asyncio.Future[None]:
        self.records.append(decode_record(memoryview(header + payload), 0))
        self.end += 1
        if self.group is None:
            self.group = asyncio.get_running_loop().create_future()
        return self.group

    def finish(self, error: Exception | None = None) -> None:
        """Let the group that is gathered be on disk, or fail."""
        group, self.group = self.group, None
        assert group is not None
        if error is None:
            group.set_result(None)
        else:
            group.set_exception(error)

    def trim(self, position: int) -> None:
        self.trims.append(position)

    def recover(self) -> Iterator[RecordBatch]:
        return iter(self.recovered)

    async def set_aside(self, records: Iterable[RecordBatch], reason: str) -> Path | None:
        assert not self.trims, "trimmed before it was set aside"
        self.aside.extend(records)
        return None


def config(**changes: Any) -> WriterConfig:
    return WriterConfig(**{"linger_s": NEVER, "durability": "wal", **changes})


def writer_of(b: Broker, log: FakeLog | WriteAheadLog, **changes: Any) -> StreamWriter:
    return StreamWriter(b.session, b.store, config(**changes), log=log)


async def test_an_append_is_acknowledged_when_its_group_is_on_disk_not_before() -> None:
    log = FakeLog()
    async with writing(2, log=log, durability="wal") as (b, writer):
        first = [await writer.append(i % 2, b"%d" % i) for i in range(4)]
        assert [record.payload for record in log.records] == [b"0", b"1", b"2", b"3"]
        held = writer.buffered_bytes
        await asyncio.sleep(0)
        assert not any(ack.done() for ack in first)
        log.finish()
        assert await asyncio.gather(*first) == [0, 0, 1, 1]
        assert writer.buffered_bytes < held, "what is on disk still counts twice"
        later = await writer.append_many(0, [b"4", b"5"])
        assert not later.done()
        assert b.cluster.calls[COMMITS] == 0
        log.finish()
        assert await later == 2
        await writer.flush()
        assert log.trims == [6]
        assert writer.buffered_bytes == 0
        assert await b.payloads(0) == [b"0", b"2", b"4", b"5"]


async def test_the_log_keeps_what_is_not_committed() -> None:
    log = FakeLog()
    async with writing(log=log, durability="wal", upload_bytes=1) as (b, writer):
        gate = asyncio.Event()

        async def hold(_: Any) -> None:
            if b.cluster.calls[COMMITS] > 1:
                await gate.wait()

        b.cluster.hooks[COMMITS] = hold
        await writer.append(0, b"x")
        log.finish()
        await until(lambda: log.trims == [1], "trim behind the first commit")
        await writer.append(0, b"x")
        log.finish()
        await until(lambda: b.cluster.calls[COMMITS] == 2, "second commit")
        assert log.trims == [1]
        gate.set()
        await writer.flush()
        assert log.trims == [1, 2]


async def test_passing_failures_are_repeated_until_then(caplog: pytest.LogCaptureFixture) -> None:
    log = FakeLog()
    async with writing(
        2, log=log, deadline=1.0, durability="wal", commit_deadline_s=0.1, upload_bytes=1
    ) as (b, writer):
        b.store.fail_next("put", StoreUnavailableError("down"))
        unavailable = grpc.StatusCode.UNAVAILABLE
        b.cluster.fail_next(PREPARE_OBJECTS, unavailable, times=15)
        b.cluster.fail_next(COMMIT_STREAM_SET_OBJECT, unavailable, applied=True, times=12)
        for i in range(6):
            await writer.append(i % 2, b"%d" % i)
        log.finish()
        await writer.flush()
        assert log.trims[-1] == 6
        assert await b.payloads(0) == [b"0", b"2", b"4"]
        assert await b.payloads(1) == [b"1", b"3", b"5"]
    assert "retrying" in caplog.text
    assert "preparation of objects failed, retrying in" in caplog.text


async def test_close_leaves_in_the_log_what_it_could_not_commit() -> None:
    log = FakeLog()
    async with writing(log=log, durability="wal") as (b, writer):
        b.cluster.fail_next(PREPARE_OBJECTS, grpc.StatusCode.UNAVAILABLE, times=10_000)
        ack = await writer.append(0, b"x")
        log.finish()
        await writer.close(0.2)
        assert ack.result() == 0
        assert log.trims == []


async def test_rejected_records_are_set_aside_then_trimmed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = FakeLog()
    async with writing(2, log=log, durability="wal") as (b, writer):
        await b.steal(1)
        for i in range(4):
            await writer.append(i % 2, b"%d" % i)
        log.finish()
        await writer.flush()
        assert log.aside == [record for record in log.records if record.stream_id == 1]
        assert log.trims == [4]
        assert await b.payloads(0) == [b"0", b"2"]
    assert "acknowledged records of stream 1 [0, 2) can't be committed" in caplog.text


async def test_a_fenced_node_trims_nothing() -> None:
    log = FakeLog()
    async with writing(log=log, durability="wal") as (b, writer):
        await writer.append(0, b"x")
        log.finish()
        await BrokerSession.open(b.client, 1000, 2)
        with pytest.raises(errors.NodeEpochExpiredError):
            await writer.flush()
    assert (log.trims, log.aside) == ([], [])


async def test_a_full_disk_makes_appends_wait_for_their_commit() -> None:
    log = FakeLog()
    async with writing(log=log, durability="wal") as (b, writer):
        gate = b.hold()
        ack = await writer.append(0, b"x")
        log.room = False
        log.finish(WriteAheadLogFullError("no space"))
        waiting = asyncio.create_task(writer.append(0, b"y"))
        await until(lambda: b.cluster.calls[COMMITS] == 1, "commit that makes room")
        assert not ack.done(), "neither logged nor committed, and acknowledged"
        gate.set()
        assert await ack == 0
        log.room = True
        await writer.flush()
        second = await waiting
        log.finish()
        assert await second == 1


async def test_a_broken_log_bars_appends_and_what_it_had_acknowledged_is_committed() -> None:
    log = FakeLog()
    async with writing(log=log, durability="wal") as (b, writer):
        first = await writer.append(0, b"x")
        log.finish()
        second = await writer.append(0, b"y")
        broken = WriteAheadLogBrokenError(Path("wal"), "EIO")
        log.finish(broken)
        assert await first == 0
        with pytest.raises(WriteAheadLogBrokenError):
            await second
        with pytest.raises(WriteAheadLogBrokenError):
            await writer.append(0, b"z")
        await writer.flush()
        assert (await b.payloads(0))[:1] == [b"x"]


async def test_recovery_uploads_what_is_not_committed_and_only_that(tmp_path: Path) -> None:
    async with broker() as b:
        streams = await b.opened(2)
        identity = LogIdentity(NAMESPACE, 1000, 1)
        log = await WriteAheadLog.open(tmp_path, identity)
        writer = writer_of(b, log, upload_bytes=1)
        writer.attach(streams)
        for number in range(3):
            assert await (await writer.append(0, b"committed %d" % number)) == number
        await writer.flush()
        b.cluster.fail_next(PREPARE_OBJECTS, grpc.StatusCode.UNAVAILABLE, times=10_000)
        b.cluster.fail_next(COMMIT_STREAM_SET_OBJECT, grpc.StatusCode.UNAVAILABLE, times=10_000)
        acks = [await writer.append(number % 2, b"logged %d" % number) for number in range(6)]
        assert await asyncio.gather(*acks) == [3, 0, 4, 1, 5, 2]
        await writer.close(0.1)
        await log.close()
        for method in (PREPARE_OBJECTS, COMMIT_STREAM_SET_OBJECT):
            b.cluster.fail_next(method, grpc.StatusCode.UNAVAILABLE, times=0)

        b.session = await BrokerSession.open(b.client, 1000, 2)
        log = await WriteAheadLog.open(tmp_path, LogIdentity(NAMESPACE, 1000, 2))
        async with writer_of(b, log) as writer:
            writer.attach(b.session.inherited)
            with pytest.raises(errors.RecoveryNeededError, match=r"recover\(\)"):
                await writer.append(0, b"too early")
            report = await writer.recover()
            assert report.uploaded == 6
            assert log.trimmed == log.recovered_end
            assert await (await writer.append(0, b"new")) == 6
        await log.close()
        logged = [b"logged %d" % number for number in range(6)]
        committed = [b"committed %d" % number for number in range(3)]
        assert await b.payloads(0) == [*committed, *logged[::2], b"new"]
        assert await b.payloads(1) == logged[1::2]


async def test_a_recovery_that_fails_trims_nothing_then_or_later() -> None:
    async with broker() as b:
        streams = await b.opened(1)
        b.session = await BrokerSession.open(b.client, 1000, 2)
        log = FakeLog([RecordBatch(0, 0, 0, 1, b"x")])
        b.cluster.map.expire_prepared()

        async def steal(_: Any) -> None:
            b.cluster.map.streams[0].epoch += 1

        b.cluster.hooks[COMMITS] = steal
        async with writer_of(b, log) as writer:
            writer.attach(streams)
            with pytest.raises(errors.StreamFencedError):
                await writer.recover()
            with pytest.raises(errors.StreamFencedError):
                await writer.append(0, b"y")
        assert log.trims == []


async def test_a_passing_failure_does_not_end_trimming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wal_acks, "_PATIENCE", Patience(Backoff(0.001, 0.002)))
    log = FakeLog()
    async with writing(2, log=log, durability="wal", upload_bytes=1) as (b, writer):
        await b.steal(1)
        failures = [AccessDeniedError("the clock is wrong"), StoreUnavailableError("down")] * 3
        set_aside = log.set_aside

        async def fail_first(records: Iterable[RecordBatch], reason: str) -> Path | None:
            if failures:
                raise failures.pop()
            return await set_aside(records, reason)

        log.set_aside = fail_first  # type: ignore[method-assign]
        await writer.append(1, b"lost")
        log.finish()
        await writer.flush()
        assert [record.payload for record in log.aside] == [b"lost"]
        assert log.trims == [1]


async def test_what_could_not_be_set_aside_is_not_trimmed_by_a_later_batch() -> None:
    log = FakeLog()
    async with writing(2, log=log, durability="wal", upload_bytes=1) as (b, writer):
        await b.steal(1)

        async def fail(*_: Any) -> None:
            raise WriteAheadLogFullError("no space")

        log.set_aside = fail  # type: ignore[method-assign, assignment]
        await writer.append(1, b"lost")
        await writer.append(0, b"kept")
        log.finish()
        await writer.flush()
        assert log.trims == []
        assert await b.payloads(0) == [b"kept"]


def test_durability_and_log_belong_together() -> None:
    with pytest.raises(ValueError, match="log"):
        config().check_log(None)
    with pytest.raises(ValueError, match="log"):
        WriterConfig().check_log(FakeLog())


STREAMS = 12
ROUNDS = 60
SEEDS = seeds(2, start=1, variable="STREAMMETA_SEEDS")
LOST = (
    (grpc.StatusCode.UNAVAILABLE, ""),
    (grpc.StatusCode.ABORTED, "OUTCOME_UNKNOWN"),
    (grpc.StatusCode.DEADLINE_EXCEEDED, ""),
)


@dataclass
class Storm:
    """One writer under faults, and what it was told of each record."""

    b: Broker
    writer: StreamWriter
    rng: random.Random
    epochs: dict[int, int]
    acks: list[tuple[int, int, bytes, asyncio.Future[int]]] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    number: int = 0

    async def write(self, count: int) -> None:
        for _ in range(count):
            stream_id = self.rng.randrange(STREAMS)
            self.number += 1
            payload = b"%d:%d:" % (stream_id, self.number) + bytes(self.rng.randrange(300))
            try:
                base = self.writer.next_offset(stream_id)
                if self.rng.random() < 0.2:
                    ack = await self.writer.append_many(stream_id, [payload] * 3)
                else:
                    ack = await self.writer.append(stream_id, payload, self.rng.randrange(1, 4))
            except errors.RejectedError:
                await self.reopen(stream_id)
                continue
            self.acks.append((stream_id, base, payload, ack))

    async def reopen(self, stream_id: int) -> None:
        """Take a stream back that failed; it goes on where the map says."""
        await self.writer.flush()
        self.epochs[stream_id] += 2
        opened = await self.b.session.open_streams({stream_id: self.epochs[stream_id]})
        self.writer.attach(opened.require_all().values())

    async def strike(self) -> None:
        """Let one thing go wrong."""
        cluster, rng = self.b.cluster, self.rng
        fault = rng.choice(["lost", "lost", "prepare", "leader", "expire", "steal", "store", "no"])
        self.faults[fault] += 1
        if fault == "lost":
            status, reason = rng.choice(LOST)
            applied = rng.random() < 0.5
            cluster.fail_next(COMMIT_STREAM_SET_OBJECT, status, reason, applied=applied)
        elif fault == "prepare":
            cluster.fail_next(PREPARE_OBJECTS, grpc.StatusCode.UNAVAILABLE, applied=True)
        elif fault == "leader":
            cluster.move_leader(rng.randrange(3))
        elif fault == "expire":
            cluster.map.expire_prepared()
        elif fault == "steal":
            stream_id = rng.randrange(STREAMS)
            # Each thief is another node, or it would take over what the one before has stolen.
            thief = await BrokerSession.open(self.b.client, 1000 + self.faults["steal"], 1)
            await thief.open_streams({stream_id: self.epochs[stream_id] + 1})
        elif fault == "store":
            self.b.store.fail_next("put", StoreUnavailableError("try later"))

    async def check(self, seed: int) -> None:
        """Compare what is there with what was told."""
        there: dict[int, dict[int, bytes]] = {}
        reader = self.b.reader()
        for stream_id in range(STREAMS):
            stream = self.b.cluster.map.streams[stream_id]
            at = 0
            for piece in stream.pieces:
                assert piece.start == at, f"seed {seed}: a gap or an overlap in stream {stream_id}"
                at = piece.end
            records = [record async for record in reader.iterate(stream_id)]
            there[stream_id] = {record.base_offset: record.payload for record in records}
            assert len(there[stream_id]) == len(records)
        await reader.close()
        outcomes: Counter[str] = Counter()
        written = {payload for rows in there.values() for payload in rows.values()}
        for stream_id, base, payload, ack in self.acks:
            where = f"seed {seed}: stream {stream_id} offset {base}"
            error = ack.exception()
            outcomes[type(error).__name__] += 1
            if error is None:
                assert ack.result() == base, where
                assert there[stream_id][base] == payload, where
            elif not isinstance(error, errors.OutcomeUnknownError):
                assert payload not in written, f"{where} was refused with {error!r}, and is there"
        assert outcomes["NoneType"] > len(self.acks) / 2, f"seed {seed}: {outcomes}"
        assert len(self.faults) > 4, f"seed {seed}: {self.faults}"


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_storm_of_faults(seed: int) -> None:

    rng = random.Random(seed)
    config = WriterConfig(
        linger_s=0.01,
        upload_bytes=4_000,
        max_buffer_bytes=100_000,
        split_bytes=2_000,
        block_bytes=500,
        parallel_uploads=3,
        commit_deadline_s=10.0,
    )
    async with broker(3) as b:
        streams = await b.opened(STREAMS)
        epochs = {stream.stream_id: stream.epoch for stream in streams}
        async with StreamWriter(b.session, b.store, config) as writer:
            writer.attach(streams)
            storm = Storm(b, writer, rng, epochs)
            for _ in range(ROUNDS):
                await storm.write(rng.randrange(30))
                if rng.random() < 0.5:
                    await storm.strike()
                await asyncio.sleep(rng.choice([0, 0, 0.002, 0.02]))
            await writer.flush()
            assert writer.buffered_bytes == 0, f"seed {seed}"
        await storm.check(seed)


async def test_several_commits_are_under_way_at_a_time() -> None:
    async with writing(2, upload_bytes=1) as (b, writer):
        gate = b.hold()
        acks = [await writer.append(number % 2, b"x") for number in range(10)]
        await until(lambda: len(b.store.objects()) == 10, "uploads behind a held commit")
        assert not any(ack.done() for ack in acks)
        gate.set()
        order: list[int] = []
        for number, ack in enumerate(acks):
            ack.add_done_callback(partial(_note, order, number))
        assert await asyncio.gather(*acks) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        assert order == list(range(10)), "acknowledged in another order than appended"


class GatedStore(MemoryObjectStore):
    """Lets puts wait, in their threads, while the gate is closed; `waiting` of them do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.waiting = 0

    def let_others_pass(self) -> threading.Event:
        """Open the gate for puts from now on; the result opens it for those that wait."""
        gate, self.gate = self.gate, threading.Event()
        self.gate.set()
        return gate

    def put(self, key: str, data: Body, **options: Any) -> None:
        if not self.gate.is_set():
            self.waiting += 1
            assert self.gate.wait(60)
        super().put(key, data, **options)


async def test_a_slow_upload_holds_back_the_commits_behind_it() -> None:
    store = GatedStore()
    async with writing(2, upload_bytes=1, store=store) as (b, writer):
        first = await writer.append(0, b"x")
        await until(lambda: store.waiting == 1, "slow upload")
        gate = store.let_others_pass()
        later = [await writer.append(number % 2, b"y") for number in range(6)]
        await until(lambda: len(store.objects()) == 6, "the uploads behind it")
        assert b.cluster.calls[COMMITS] == 0
        gate.set()
        assert await asyncio.gather(first, *later) == [0, 1, 0, 2, 1, 3, 2]


@pytest.mark.parametrize("streams", [1, 2], ids=["stream objects", "set objects"])
async def test_while_a_batch_is_committed_anew_no_later_one_is_submitted(streams: int) -> None:
    """Each would be refused, be uploaded anew, and so delay those behind it for ever.

    Set objects that were uploaded meanwhile have ids that were overtaken, and get new ones.
    """
    store = GatedStore()
    async with writing(streams, upload_bytes=34 * streams, store=store) as (b, writer):
        store.gate.set()
        answer = asyncio.Event()

        async def expire_first(request: Any) -> None:
            number = b.cluster.calls[COMMITS]
            if number <= 5:
                await answer.wait()
            if number == 1:
                b.cluster.map.prepared.discard(0)

        b.cluster.hooks[COMMITS] = expire_first
        acks = [await writer.append(number % streams, b"x") for number in range(5 * streams)]
        await until(lambda: len(store.objects()) == 5, "uploads")
        store.gate.clear()
        answer.set()
        await until(lambda: store.waiting == 1, "upload of the first batch anew")
        gate = store.let_others_pass()
        acks += [await writer.append(number % streams, b"y") for number in range(5 * streams)]
        await until(lambda: len(store.objects()) == 10, "uploads of later batches")
        assert b.cluster.calls[COMMITS] == 5
        gate.set()
        offsets = [number // streams for number in range(10 * streams)]
        assert await asyncio.gather(*acks) == offsets
        for stream in b.cluster.map.streams.values() if streams > 1 else ():
            held = [piece.object_id for piece in stream.pieces]
            assert held == sorted(held), "a later set object has a smaller id"
        assert len(store.objects()) == (15 if streams == 1 else 20)


async def test_later_batches_have_later_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = 0
    encode, passed = Uploader.encode, BucketCheck.require

    async def counted(uploader: Uploader, batch: BatchUpload) -> None:
        nonlocal encoded
        await encode(uploader, batch)
        encoded += 1

    async def first_waits(check: BucketCheck) -> None:
        monkeypatch.setattr(BucketCheck, "require", passed)
        await until(lambda: encoded == 2, "both batches")
        await passed(check)

    monkeypatch.setattr(Uploader, "encode", counted)
    monkeypatch.setattr(BucketCheck, "require", first_waits)
    async with writing(upload_bytes=34) as (b, writer):
        await asyncio.gather(*[await writer.append(0, b"x") for _ in range(2)])
        held = [piece.object_id for piece in b.cluster.map.streams[0].pieces]
        assert held == [0, 1]


async def test_nothing_is_committed_once_the_outcome_before_it_was_called_unknown() -> None:
    """Although the map would take it: a writer told so begins anew where the map says."""
    store = GatedStore()
    async with writing(upload_bytes=1, commit_deadline_s=0.2, store=store) as (b, writer):
        store.gate.set()
        lost = grpc.StatusCode.UNAVAILABLE
        b.cluster.fail_next(COMMIT_STREAM_SET_OBJECT, lost, applied=True, times=10_000)
        first = await writer.append(0, b"x")
        await until(lambda: b.cluster.map.streams[0].end == 1, "commit whose answer is lost")
        store.gate.clear()
        second = await writer.append(0, b"y")
        with pytest.raises(errors.OutcomeUnknownError):
            await first
        b.cluster.fail_next(COMMIT_STREAM_SET_OBJECT, lost, times=0)
        store.gate.set()
        with pytest.raises(errors.StreamFailedError, match="unknown"):
            await second
        await writer.flush()
        assert b.cluster.map.streams[0].end == 1


def _note(order: list[int], number: int, _: asyncio.Future[int]) -> None:
    order.append(number)

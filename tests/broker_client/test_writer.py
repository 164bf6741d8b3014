"""How a writer works and ends: what is acknowledged is in map and store, once, in order."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from streammeta.client import SilentObserver, errors
from streammeta.client.config import ACK_OVERHEAD, RECORD_OVERHEAD, RUN_OVERHEAD
from streammeta.client.controllers.methods import COMMIT_STREAM_SET_OBJECT, PREPARE_OBJECTS
from streammeta.client.parts import BrokerSession, StreamWriter
from streammeta.client.writing import store_uploads
from streammeta.client.writing.object_ids import STOCK_MIN
from streammeta.storage import errors as storage_errors
from streammeta.storage.backoff import Backoff
from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_format.index_block import StreamRange
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import INT32_MAX
from streammeta.storage.object_store.protocol import patience
from streammeta.storage.object_store.protocol.patience import Patience
from tests.kit.fake_broker import Broker, broker, writing
from tests.kit.fake_cluster import NAMESPACE
from tests.kit.waiting import until

COMMITS = "CommitStreamSetObject"


class Recorder(SilentObserver):
    """Keeps what it was told, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[Any]]] = []

    async def on_prepared(self, object_ids: Sequence[int], deadline_ms: int) -> None:
        self.seen.append(("prepared", list(object_ids)))

    async def on_uploaded(self, keys: Sequence[str]) -> None:
        self.seen.append(("uploaded", list(keys)))

    async def on_committed(self, object_ids: Sequence[int], ranges: Sequence[StreamRange]) -> None:
        self.seen.append(("committed", list(object_ids)))

    async def on_rejected(self, object_ids: Sequence[int], error: Exception) -> None:
        self.seen.append(("refused", list(object_ids)))


async def told(writer: StreamWriter, *stream_ids: int) -> list[Any]:
    """Append a record to each of the streams and flush; return their offsets or errors."""
    acks = [await writer.append(stream_id, b"x") for stream_id in stream_ids]
    await writer.flush()
    return await asyncio.gather(*acks, return_exceptions=True)


def commits_of(b: Broker) -> list[Any]:
    return b.cluster.requests[COMMITS]


async def test_records_of_many_streams_come_back_as_written() -> None:
    seed = 20
    rng = random.Random(seed)
    async with writing(20, upload_bytes=20_000, split_bytes=3_000, block_bytes=1_000) as (
        b,
        writer,
    ):
        written: dict[int, list[bytes]] = {stream_id: [] for stream_id in range(20)}
        acks: list[tuple[asyncio.Future[int], int]] = []
        for _ in range(1_000):
            stream_id = rng.choice([0, 0, 0, *written])
            payload, count = rng.randbytes(rng.randrange(300)), rng.randrange(1, 4)
            wanted = writer.next_offset(stream_id)
            acks.append((await writer.append(stream_id, payload, count), wanted))
            written[stream_id].append(payload)
        await writer.flush()
        assert all(ack.result() == wanted for ack, wanted in acks), f"seed {seed}"
        assert writer.buffered_bytes == 0
        assert b.cluster.calls[COMMITS] > 3, "upload_bytes did not trigger uploads"
        for stream_id, payloads in written.items():
            assert await b.payloads(stream_id) == payloads, f"seed {seed}, stream {stream_id}"
        kinds = {piece.kind for stream in b.cluster.map.streams.values() for piece in stream.pieces}
        assert len(kinds) == 2, "expected both set objects and stream objects"


async def test_size_uploads_without_flush_or_linger() -> None:
    async with writing(upload_bytes=100) as (b, writer):
        first = await writer.append(0, bytes(60))
        await writer.append(0, bytes(60))
        assert await first == 0
        assert b.cluster.calls[COMMITS] == 1


async def test_stream_count_uploads_without_flush_or_linger() -> None:
    async with writing(3, max_streams=2) as (_, writer):
        acks = [await writer.append(i, b"x") for i in range(3)]
        await acks[0]
        await acks[1]
        assert not acks[2].done()


async def test_a_full_buffer_pushes_back_and_keeps_its_bound() -> None:
    three = 3 * (100 + RECORD_OVERHEAD + ACK_OVERHEAD) + RUN_OVERHEAD
    async with writing(max_buffer_bytes=three, upload_bytes=three) as (b, writer):
        gate = b.hold()
        appends = [asyncio.create_task(writer.append(0, bytes([i]) * 100)) for i in range(8)]
        await until(lambda: b.cluster.calls[COMMITS] == 1, "commit of the full buffer")
        assert [task.done() for task in appends] == [True] * 3 + [False] * 5
        assert writer.buffered_bytes == three
        gate.set()
        acks = [await task for task in appends]
        await writer.flush()
        assert [ack.result() for ack in acks] == list(range(8))
        assert await b.payloads(0) == [bytes([i]) * 100 for i in range(8)]


async def test_a_record_larger_than_the_buffer_is_refused_at_once() -> None:
    async with writing(max_buffer_bytes=2000, upload_bytes=2000) as (_, writer):
        for append in (writer.append(0, bytes(2000)), writer.append_many(0, [bytes(10)] * 100)):
            with pytest.raises(errors.LimitExceededError, match="2000"):
                await append
        assert (writer.next_offset(0), writer.buffered_bytes) == (0, 0)


async def test_leader_change_in_mid_commit_is_invisible() -> None:
    async with writing(2, members=3) as (b, writer):

        async def kill_leader(_: Any) -> None:
            if b.cluster.leader == 0:
                b.cluster.move_leader(1)
                await b.cluster.kill(0)

        b.cluster.hooks[COMMITS] = kill_leader
        assert await told(writer, 0, 1, 0) == [0, 0, 1]
        assert b.client.leader == b.cluster.endpoints[1]


@pytest.mark.parametrize("streams", [1, 3])
async def test_a_lost_answer_to_a_commit_does_not_duplicate_it(streams: int) -> None:
    async with broker() as b:
        opened = await b.opened(streams)
        for status, reason in (
            (grpc.StatusCode.UNAVAILABLE, ""),
            (grpc.StatusCode.ABORTED, "OUTCOME_UNKNOWN"),
        ):
            b.cluster.fail_next(COMMIT_STREAM_SET_OBJECT, status, reason, applied=True)
            async with StreamWriter(b.session, b.store) as writer:
                writer.attach(await b.reopened((stream.stream_id for stream in opened), 0))
                assert set(await told(writer, *range(streams))) <= {0, 1}
        assert b.cluster.calls[COMMITS] == 4
        ids = [(commit.object_id, *commit.stream_objects.object_id) for commit in commits_of(b)]
        assert ids[0] == ids[1] != ids[2] == ids[3]
        for i in range(streams):
            assert await b.payloads(i) == [b"x", b"x"]


async def test_an_expired_object_is_uploaded_again_under_a_new_id() -> None:
    seen = Recorder()
    async with writing(3, observer=seen, split_bytes=100) as (b, writer):

        async def expire_once(_: Any) -> None:
            if b.cluster.calls[COMMITS] == 1:
                b.cluster.map.expire_prepared()

        b.cluster.hooks[COMMITS] = expire_once
        acks = [await writer.append(i, bytes(200 if i == 2 else 5)) for i in range(3)]
        await writer.flush()
        assert [ack.result() for ack in acks] == [0, 0, 0]
        first, second = [0, 1], [STOCK_MIN, STOCK_MIN + 1]
        assert seen.seen == [
            ("prepared", first),
            ("uploaded", [key_for(i, NAMESPACE) for i in first]),
            ("refused", [0]),
            ("refused", [1]),
            ("prepared", second),
            ("uploaded", [key_for(i, NAMESPACE) for i in second]),
            ("committed", second),
        ]
        assert await b.payloads(2) == [bytes(200)]


async def test_only_the_expired_object_of_a_batch_is_uploaded_again() -> None:
    async with writing(3, split_bytes=100) as (b, writer):

        async def expire_stream_object(request: Any) -> None:
            if b.cluster.calls[COMMITS] == 1:
                b.cluster.map.prepared.discard(request.stream_objects.object_id[0])

        b.cluster.hooks[COMMITS] = expire_stream_object
        acks = [await writer.append(i, bytes(200 if i == 2 else 5)) for i in range(3)]
        await writer.flush()
        await asyncio.gather(*acks)
        held = [b.cluster.map.streams[i].pieces[0].object_id for i in range(3)]
        assert held == [0, 0, STOCK_MIN]


@pytest.mark.parametrize("attempts", [0, 2])
async def test_objects_that_keep_expiring_are_given_up(attempts: int) -> None:
    async with writing(reupload_attempts=attempts) as (b, writer):

        async def expire(_: Any) -> None:
            b.cluster.map.expire_prepared()

        b.cluster.hooks[COMMITS] = expire
        ack = await writer.append(0, b"x")
        await writer.flush()
        with pytest.raises(errors.ObjectExpiredError):
            ack.result()
        assert b.cluster.calls[COMMITS] == attempts + 1


async def test_set_objects_keep_the_order_of_their_ids_after_a_new_upload() -> None:
    """The second batch was submitted before the first was uploaded anew, so it has to follow."""
    seen = Recorder()
    async with writing(2, observer=seen, upload_bytes=2 * 34) as (b, writer):
        both = asyncio.Event()

        async def expire_first(request: Any) -> None:
            if request.object_id == 0:
                await both.wait()
                b.cluster.map.prepared.discard(0)

        b.cluster.hooks[COMMITS] = expire_first
        acks = [await writer.append(i % 2, b"x") for i in range(4)]
        await until(lambda: sum(stage == "uploaded" for stage, _ in seen.seen) == 2, "both uploads")
        both.set()
        await asyncio.gather(*acks)
        orders = [request.order_id for request in commits_of(b)]
        assert orders == [0, 1, STOCK_MIN, STOCK_MIN + 1]
        held = [piece.object_id for piece in b.cluster.map.streams[0].pieces]
        assert held == sorted(held)


async def test_a_later_batch_asks_for_ids_only_after_the_earlier_one_has_its_own() -> None:
    async with writing(upload_bytes=1) as (b, writer):
        gate = b.hold("PrepareObjects")
        acks = [await writer.append(0, b"x") for _ in range(3)]
        await until(lambda: b.cluster.calls["PrepareObjects"] == 1, "first prepare")
        await b.client.describe_cluster()  # a later call comes back: a second was not sent
        assert b.cluster.calls["PrepareObjects"] == 1
        gate.set()
        assert await asyncio.gather(*acks) == [0, 1, 2]
        assert [piece.object_id for piece in b.cluster.map.streams[0].pieces] == [0, 1, 2]


async def test_after_an_unknown_outcome_the_reopened_stream_tells_what_happened() -> None:
    async with writing(commit_deadline_s=0.2) as (b, writer):
        lost = grpc.StatusCode.UNAVAILABLE
        b.cluster.fail_next(COMMIT_STREAM_SET_OBJECT, lost, applied=True, times=10_000)
        ack = await writer.append(0, b"x")
        await writer.flush()
        with pytest.raises(errors.OutcomeUnknownError):
            ack.result()
        b.cluster.fail_next(COMMIT_STREAM_SET_OBJECT, lost, times=0)
        writer.attach(await b.reopened([0], 1))
        assert await b.payloads(0) == [b"x"]
        ack = await writer.append(0, b"y")
        await writer.flush()
        assert ack.result() == 1
        assert await b.payloads(0) == [b"x", b"y"]


async def test_a_newer_process_of_the_node_stops_the_writer() -> None:
    async with writing(2) as (b, writer):
        ack = await writer.append(0, b"x")
        await BrokerSession.open(b.client, 1000, 2)
        with pytest.raises(errors.NodeEpochExpiredError):
            await writer.flush()
        with pytest.raises(errors.NodeEpochExpiredError):
            ack.result()
        with pytest.raises(errors.NodeEpochExpiredError):
            await writer.append(1, b"x")
        assert b.cluster.map.streams[0].end == 0


@pytest.mark.parametrize("split_bytes", [1, 1000], ids=["stream objects", "set object"])
async def test_one_bad_stream_fails_alone_until_it_is_attached_again(split_bytes: int) -> None:
    seen = Recorder()
    async with writing(3, observer=seen, split_bytes=split_bytes) as (b, writer):
        await b.steal(1)
        outcomes = await told(writer, *range(3))
        assert (outcomes[0], outcomes[2]) == (0, 0)
        assert isinstance(outcomes[1], errors.StreamFencedError)
        assert "commit of stream 1 [0, 1) in object" in str(outcomes[1])
        with pytest.raises(errors.StreamFailedError, match="stream 1"):
            await writer.append(1, b"y")
        writer.attach(await b.reopened([1], 6))
        ack = await writer.append(1, b"z")
        await writer.flush()
        assert ack.result() == 0
        assert await b.payloads(1) == [b"z"]
        assert (("refused", [1]) in seen.seen) == (split_bytes == 1)


async def test_nothing_is_committed_behind_a_failed_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second batch is in the store already when the first one's failure comes to bar it."""
    stored = threading.Event()
    async with writing(2, upload_bytes=4) as (b, writer):
        put = b.store.put

        def put_unless_lost(key: str, data: bytes, **more: Any) -> None:
            if b"lost" in bytes(data):
                assert stored.wait(60)
                raise storage_errors.StoreRejectedError("no space")
            put(key, data, **more)
            stored.set()

        monkeypatch.setattr(b.store, "put", put_unless_lost)
        first = await writer.append(0, b"lost")
        later = [await writer.append(0, b"abc"), await writer.append(1, b"other")]
        await writer.flush()
        outcomes = await asyncio.gather(*[first, *later], return_exceptions=True)
        assert isinstance(outcomes[0], errors.UploadFailedError)
        assert isinstance(outcomes[1], errors.StreamFailedError)
        assert outcomes[2] == 0
        assert writer.buffered_bytes == 0
        assert b.cluster.map.streams[0].end == 0
        assert await b.payloads(1) == [b"other"]


async def test_an_object_the_store_refuses_fails_its_streams_and_no_others() -> None:
    async with writing(2, split_bytes=1, upload_threads=1) as (b, writer):
        rejected = storage_errors.StoreRejectedError("no space")
        b.store.fail_next("put", rejected)
        outcomes = await told(writer, *range(2))
        assert isinstance(outcomes[0], errors.UploadFailedError)
        assert outcomes[0].__cause__ is rejected
        assert outcomes[1] == 0


@pytest.mark.parametrize(
    "error",
    [
        storage_errors.AccessDeniedError("RequestTimeTooSkewed"),
        storage_errors.StoreUnavailableError("InternalError"),
        storage_errors.StoreUnavailableError("SlowDown", throttled=True, retry_after_s=86_400.0),
    ],
    ids=str,
)
async def test_a_store_that_fails_for_a_while_fails_no_stream(
    error: storage_errors.StorageError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "RETRY_AFTER_S_MAX", 0.01)
    monkeypatch.setattr(store_uploads, "_PATIENCE", Patience(Backoff(0.01, 0.02)))
    async with writing(1) as (b, writer):
        b.store.fail_next("put", error, times=12)
        b.store.fail_next("get_range", error, times=3)  # of the bucket's marker
        assert await told(writer, 0) == [0]
        assert await b.payloads(0) == [b"x"]


async def test_a_store_that_keeps_failing_fails_the_append_at_the_deadline() -> None:
    async with writing(1, commit_deadline_s=0.2) as (b, writer):
        b.store.fail_next("put", storage_errors.AccessDeniedError("revoked"), times=10_000)
        (outcome,) = await told(writer, 0)
        assert isinstance(outcome, errors.UploadFailedError)
        assert isinstance(outcome.__cause__, storage_errors.AccessDeniedError)


async def test_a_writer_closes_in_its_time_while_the_store_refuses() -> None:
    async with writing(1) as (b, writer):
        b.store.fail_next("put", storage_errors.AccessDeniedError("revoked"), times=10_000)
        ack = await writer.append(0, b"x")
        await writer.close(0.05)
        with pytest.raises(errors.WriterClosedError):
            await ack


async def test_a_batch_of_which_no_stream_is_valid_names_each_stream() -> None:
    async with writing(2) as (b, writer):
        await b.session.close_streams({1: 0})
        await b.steal(0)
        outcomes = await told(writer, *range(2))
        assert [type(outcome) for outcome in outcomes] == [
            errors.StreamFencedError,
            errors.StreamNotOpenedError,
        ]
        for i, outcome in enumerate(outcomes):
            assert f"commit of stream {i} [0, 1) in object 0 by node 1000" in str(outcome)


async def test_a_wrong_offset_tells_where_the_stream_ends() -> None:
    async with writing(2) as (b, writer):
        b.cluster.map.streams[1].end = 30
        outcomes = await told(writer, *range(2))
        assert outcomes[0] == 0
        assert isinstance(outcomes[1], errors.OffsetMismatchError)
        assert (outcomes[1].stream_id, outcomes[1].wanted, outcomes[1].got) == (1, 30, 0)


async def test_unreachable_controllers_fail_the_records_after_the_deadline() -> None:
    async with writing(deadline=0.3, commit_deadline_s=0.3) as (b, writer):
        b.cluster.fail_next(PREPARE_OBJECTS, grpc.StatusCode.UNAVAILABLE, times=10_000)
        ack = await writer.append(0, b"x")
        await writer.flush()
        with pytest.raises(errors.ControllerUnavailableError, match="PrepareObjects"):
            ack.result()
        assert b.store.objects() == {}


async def test_what_an_observer_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(SilentObserver):
        async def on_uploaded(self, keys: Sequence[str]) -> None:
            raise RuntimeError(f"can't count {keys}")

    async with writing(observer=Broken()) as (_, writer):
        assert await told(writer, 0) == [0]
    assert "can't count" in caplog.text


async def test_close_flushes_and_refuses_what_comes_after() -> None:
    async with writing() as (_, writer):
        ack = await writer.append(0, b"x")
        await writer.close()
        assert ack.result() == 0
        with pytest.raises(errors.WriterClosedError):
            await writer.append(0, b"y")


async def test_a_cancelled_upload_is_not_acknowledged() -> None:
    async with writing() as (b, writer):
        stuck = b.hold()
        ack = await writer.append(0, b"x")
        before = asyncio.all_tasks()
        flushing = asyncio.create_task(writer.flush())
        await until(lambda: b.cluster.calls[COMMITS] == 1, "commit")
        ours = {task for task in asyncio.all_tasks() - before if "_process_batch" in repr(task)}
        assert len(ours) == 1
        ours.pop().cancel()
        await flushing
        with pytest.raises(errors.WriterClosedError, match=r"stream 0 \[0, 1\)"):
            ack.result()
        stuck.set()


async def test_only_attached_streams_take_appends() -> None:
    async with writing() as (b, writer):
        (stream,) = await b.opened(1)
        with pytest.raises(errors.StreamNotOpenedError):
            await writer.append(stream.stream_id, b"x")
        writer.attach([stream])
        await writer.append(stream.stream_id, b"x")
        with pytest.raises(ValueError, match="Flush"):
            writer.attach([stream])


async def test_close_gives_up_at_its_deadline_and_says_what_is_known() -> None:
    async with writing(upload_bytes=1, parallel_uploads=1) as (b, writer):
        b.hold()
        prepares = asyncio.Event()

        async def hold_prepares(request: Any) -> None:
            if b.cluster.calls[COMMITS]:
                await prepares.wait()

        b.cluster.hooks["PrepareObjects"] = hold_prepares
        submitted = await writer.append(0, b"x")
        await until(lambda: b.cluster.calls[COMMITS] == 1, "commit")
        later = [await writer.append(0, b"y") for _ in range(20)]
        loop = asyncio.get_running_loop()
        start = loop.time()
        await writer.close(0.3)
        assert loop.time() - start < 3
        with pytest.raises(errors.WriterClosedError, match="committed"):
            submitted.result()
        ends = await asyncio.gather(*later, return_exceptions=True)
        assert "it was not committed" in str(ends[-1])
        assert writer.buffered_bytes == 0
        prepares.set()


async def test_appends_that_wait_for_room_are_refused_by_close() -> None:
    room = RUN_OVERHEAD + RECORD_OVERHEAD + ACK_OVERHEAD + 100
    async with writing(max_buffer_bytes=room, upload_bytes=room) as (b, writer):
        gate = b.hold()
        ack = await writer.append(0, bytes(100))
        waiting = asyncio.create_task(writer.append(0, b"y"))
        await until(lambda: b.cluster.calls[COMMITS] == 1, "commit of the full buffer")
        closing = asyncio.create_task(writer.close())
        with pytest.raises(errors.WriterClosedError, match="close"):
            await waiting
        gate.set()
        await closing
        assert ack.result() == 0


async def test_a_node_that_is_taken_over_fails_everything_at_once() -> None:
    """Also what is being uploaded, what waits in the buffer and who waits for room."""
    room = 2 * (RUN_OVERHEAD + RECORD_OVERHEAD + ACK_OVERHEAD + 10)
    async with writing(2, max_buffer_bytes=room, upload_bytes=RUN_OVERHEAD) as (b, writer):
        gate = b.hold("PrepareObjects")
        first = await writer.append(0, b"x" * 10)
        flushing = asyncio.create_task(writer.flush())
        await until(lambda: b.cluster.calls["PrepareObjects"] == 1, "the upload's prepare")
        second = await writer.append(1, b"y" * 10)
        waiting = asyncio.create_task(writer.append(0, b"z"))
        await asyncio.sleep(0)
        error = errors.NodeFencedError("heartbeat")
        writer._heartbeat._on_taken_over(error)
        for failed in (first, second, waiting, flushing, writer.flush()):
            with pytest.raises(errors.NodeFencedError) as raised:
                await failed
            assert raised.value is error, "one error, everywhere"
        with pytest.raises(errors.NodeFencedError):
            await writer.append(1, b"x")
        gate.set()
        await writer.close()
        assert b.cluster.calls[COMMITS] == 0
        assert writer.buffered_bytes == 0


async def test_many_records_at_once_are_one_append() -> None:
    async with writing() as (b, writer):
        first = await writer.append_many(0, [b"a", b"bc"])
        second = await writer.append(0, b"d", 5)
        third = await writer.append_many(0, [bytearray(b"e")])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="payloads"):
            await writer.append_many(0, [])
        with pytest.raises(TypeError):
            await writer.append_many(0, [b"x", "y"])  # type: ignore[list-item]
        assert writer.next_offset(0) == 8
        await writer.flush()
        assert [ack.result() for ack in (first, second, third)] == [0, 2, 7]
        assert await b.payloads(0) == [b"a", b"bc", b"d", b"e"]


@pytest.mark.parametrize("split_bytes", [1, 1000], ids=["stream objects", "set object"])
async def test_time_bounds_and_checksums_travel_with_the_commit(split_bytes: int) -> None:
    async with writing(2, split_bytes=split_bytes) as (b, writer):
        await writer.append(0, b"x", timestamp_ms=50)
        await writer.append(0, b"x", timestamp_ms=40, max_timestamp_ms=45)
        await writer.append_many(1, [b"y", b"z"], timestamp_ms=10, max_timestamp_ms=60)
        for wrong in ({"timestamp_ms": -1}, {"max_timestamp_ms": 5}):
            with pytest.raises(ValueError, match="timestamp_ms is"):
                await writer.append(0, b"x", **wrong)
        with pytest.raises(ValueError, match="max_timestamp_ms"):
            await writer.append(0, b"x", timestamp_ms=5, max_timestamp_ms=4)
        await writer.flush()
        await writer.append(0, b"x")
        await writer.append(1, b"x", timestamp_ms=7)
        await writer.flush()
        first, second = b.cluster.requests[COMMITS]
        if split_bytes == 1:
            rows = first.stream_objects
            assert list(rows.min_timestamp_ms) == [40, 10]
            assert list(rows.max_timestamp_ms) == [50, 60]
            assert list(second.stream_objects.min_timestamp_ms) == [-1, 7]
            checksums = dict(zip(rows.object_id, rows.crc32c, strict=True))
        else:
            assert (first.min_timestamp_ms, first.max_timestamp_ms) == (10, 60)
            assert not second.HasField("min_timestamp_ms"), "one record has no time"
            checksums = {first.object_id: first.crc32c}
        for object_id, told in checksums.items():
            checksum = ObjectChecksum()
            checksum.update(b.store.get_range(key_for(object_id, NAMESPACE)))
            assert told == checksum.value


async def test_a_batch_ends_before_its_offsets_leave_32_bits() -> None:
    async with writing() as (b, writer):
        counts = [INT32_MAX - 1, 1, 1, INT32_MAX]
        acks = [await writer.append(0, b"x", count) for count in counts]
        await writer.flush()
        assert [ack.result() for ack in acks] == [0, INT32_MAX - 1, INT32_MAX, INT32_MAX + 1]
        spans = [piece.end - piece.start for piece in b.cluster.map.streams[0].pieces]
        assert spans == [INT32_MAX, 1, INT32_MAX]

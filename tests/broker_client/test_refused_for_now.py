"""Heartbeats, and what a controller can't take now: asked again at a bounded rate, or ended.

A full disk, too much under way, a quota: the reason of the status decides, not its code alone.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import pytest

from streammeta.client import errors
from streammeta.client.controllers import methods
from streammeta.client.model import HeartbeatAnswer, heartbeat_answer
from streammeta.client.nodes.session import LAST_BEAT_S, BrokerSession
from streammeta.client.parts import ControllerClient, Heartbeat, StreamWriter
from streammeta.client.wal.disk.config import LogIdentity
from streammeta.client.wal.disk.log import WriteAheadLog
from streammeta.controller.grpc_server.limits import Limits
from streammeta.rpc import connections
from streammeta.rpc.failures import Reason, read_failure
from streammeta.rpc.leader_router import FailureKind, LeaderRouter
from streammeta.v1 import common_pb2, nodes_pb2, streams_pb2
from tests.broker_client.wal_tools import LOG
from tests.kit.crash_disk import CrashDisk
from tests.kit.fake_broker import broker, writing
from tests.kit.fake_cluster import NAMESPACE, FakeCluster
from tests.kit.grpc_servers import served
from tests.kit.waiting import until

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
FOR_NOW = [
    (EXHAUSTED, "DISK_FULL"),
    (EXHAUSTED, "BUSY"),
    (EXHAUSTED, "SOME_QUOTA"),
    (grpc.StatusCode.UNAVAILABLE, "SOME_PAUSE"),
]
FOREVER = 10**6
RETRIES_PER_SECOND = 20
"""Far above what one call makes, far below a tight loop."""

CONFIG: dict[str, Any] = {"linger_s": 0.01, "upload_bytes": 2_000, "max_buffer_bytes": 20_000}


async def fill(writer: StreamWriter, stream_id: int, count: int) -> list[bytes]:
    """Append `count` records and wait until all are acknowledged."""
    payloads = [b"%d" % number * 10 for number in range(count)]
    acks = [await writer.append(stream_id, payload) for payload in payloads]
    assert await asyncio.gather(*acks) == list(range(count))
    return payloads


@pytest.mark.parametrize(("status", "reason"), FOR_NOW)
async def test_a_call_is_repeated_until_it_is_taken(status: grpc.StatusCode, reason: str) -> None:
    async with broker() as b:
        b.cluster.fail_next(methods.CREATE_STREAMS, status, reason, times=3)
        assert await b.session.create_streams([{}]) == [0]
        assert b.cluster.calls["CreateStreams"] == 4
        assert len(set(b.cluster.request_ids["CreateStreams"])) == 1
        assert b.client.leader == b.cluster.endpoints[0]


@pytest.mark.parametrize(("status", "reason"), FOR_NOW)
async def test_the_deadline_ends_a_call_never_taken(status: grpc.StatusCode, reason: str) -> None:
    async with FakeCluster() as cluster, ControllerClient(cluster.endpoints) as client:
        cluster.fail_next(methods.CREATE_STREAMS, status, reason, times=FOREVER)
        began = time.monotonic()
        with pytest.raises(errors.ControllerUnavailableError, match=reason) as caught:
            await client.call(methods.CREATE_STREAMS, streams_pb2.CreateStreamsRequest(), 1.0)
        assert caught.value.reason == reason
        assert caught.value.retriable
        assert "send less in one request" not in str(caught.value)
        seconds = time.monotonic() - began
        assert 2 <= cluster.calls["CreateStreams"] <= RETRIES_PER_SECOND * seconds


@pytest.mark.parametrize("reason", ["LIMIT_EXCEEDED", ""])
async def test_a_request_over_a_limit_is_refused_at_once(reason: str) -> None:
    """Without a reason it is the transport that refuses a message for its size."""
    async with FakeCluster() as cluster, ControllerClient(cluster.endpoints) as client:
        cluster.fail_next(methods.CREATE_STREAMS, EXHAUSTED, reason, times=FOREVER)
        with pytest.raises(errors.LimitExceededError):
            await client.call(methods.CREATE_STREAMS, streams_pb2.CreateStreamsRequest())
        assert cluster.calls["CreateStreams"] == 1


@pytest.mark.parametrize(("status", "reason"), FOR_NOW)
@pytest.mark.parametrize("method", [methods.PREPARE_OBJECTS, methods.COMMIT_STREAM_SET_OBJECT])
async def test_a_writer_waits_under_its_bound_and_loses_nothing(
    status: grpc.StatusCode, reason: str, method: methods.Method[Any, Any]
) -> None:
    async with writing(2, **CONFIG) as (b, writer):
        b.cluster.fail_next(method, status, reason, times=FOREVER)
        acks: list[asyncio.Future[int]] = []

        async def produce() -> None:
            for number in range(60):
                ack = await writer.append(0, b"%d" % number * 500)
                acks.append(ack)

        producer = asyncio.create_task(produce())
        began = time.monotonic()
        calls = b.cluster.calls
        await until(lambda: calls[method.name] >= 4, "fourth attempt")
        assert calls[method.name] <= 4 + RETRIES_PER_SECOND * (time.monotonic() - began)
        assert not producer.done(), "60 records do not fit the buffer"
        assert not any(ack.done() for ack in acks)
        assert writer.buffered_bytes <= CONFIG["max_buffer_bytes"]
        b.cluster.fail_next(method, status, reason, times=0)
        await producer
        assert await asyncio.gather(*acks) == list(range(60))
        wanted = await fill(writer, 1, 3)
        assert await b.payloads(1) == wanted
        assert await b.payloads(0) == [b"%d" % number * 500 for number in range(60)]


@pytest.mark.parametrize("method", [methods.PREPARE_OBJECTS, methods.COMMIT_STREAM_SET_OBJECT])
async def test_a_write_ahead_log_acknowledges_meanwhile(method: methods.Method[Any, Any]) -> None:
    async with (
        await WriteAheadLog.open(LOG, LogIdentity(NAMESPACE, 1000, 1), files=CrashDisk()) as log,
        # Its deadline passes again and again; the log has promised the records all the same.
        writing(log=log, durability="wal", linger_s=0.01, commit_deadline_s=0.2) as (b, writer),
    ):
        b.cluster.fail_next(method, EXHAUSTED, "DISK_FULL", times=FOREVER)
        wanted = await fill(writer, 0, 5)
        await until(lambda: b.cluster.calls[method.name] >= 6, "sixth attempt")
        b.cluster.fail_next(method, EXHAUSTED, "DISK_FULL", times=0)
        await writer.flush()
        assert await b.payloads(0) == wanted


async def test_a_commit_over_a_limit_ends_its_batch_at_once() -> None:
    async with writing(**CONFIG) as (b, writer):
        b.cluster.fail_next(methods.COMMIT_STREAM_SET_OBJECT, EXHAUSTED, "LIMIT_EXCEEDED")
        with pytest.raises(errors.LimitExceededError):
            await (await writer.append(0, b"x"))
        assert b.cluster.calls["CommitStreamSetObject"] == 1


async def test_a_commit_that_is_never_taken_ends_at_the_commit_deadline_and_says_why() -> None:
    async with writing(linger_s=0.01, commit_deadline_s=0.5) as (b, writer):
        b.cluster.fail_next(methods.COMMIT_STREAM_SET_OBJECT, EXHAUSTED, "DISK_FULL", times=FOREVER)
        with pytest.raises(errors.OutcomeUnknownError, match="DISK_FULL"):
            await (await writer.append(0, b"x"))


async def test_ids_are_asked_for_until_the_commit_deadline_not_that_of_a_call() -> None:
    async with writing(deadline=0.2, **CONFIG) as (b, writer):
        b.cluster.fail_next(methods.PREPARE_OBJECTS, EXHAUSTED, "DISK_FULL", times=4)
        assert await (await writer.append(0, b"x")) == 0


async def test_what_the_next_leader_refuses_keeps_its_own_error() -> None:
    async with writing(2, members=2, **CONFIG) as (b, writer):
        calls = b.cluster.calls
        b.cluster.fail_next(methods.COMMIT_STREAM_SET_OBJECT, EXHAUSTED, "DISK_FULL", times=FOREVER)
        lost, kept = [await writer.append(stream_id, b"x") for stream_id in range(2)]
        b.cluster.map.streams[0].epoch += 1
        await until(lambda: calls["CommitStreamSetObject"] >= 2, "refusals")
        b.cluster.move_leader(1)
        b.cluster.fail_next(methods.COMMIT_STREAM_SET_OBJECT, EXHAUSTED, "DISK_FULL", times=0)
        assert await kept == 0
        with pytest.raises(errors.StreamFencedError):
            await lost
        assert await (await writer.append(1, b"y")) == 1
        assert b.client.leader == b.cluster.endpoints[1]
        assert await b.payloads(1) == [b"x", b"y"]


def test_waits_between_retries_are_jittered() -> None:
    """Two clients that were refused at the same time do not return in step."""

    def waits(seed: int) -> list[float]:
        router = LeaderRouter(["a:1"], random.Random(seed))
        return [router.record_failure("a:1", FailureKind.NOT_NOW, n).wait for n in range(1, 9)]

    assert waits(1) != waits(2)
    assert all(wait > 0 for wait in waits(1))


class FakeSession:
    """A session whose heartbeats are answered as told, then as the last one."""

    def __init__(self, outcomes: Sequence[HeartbeatAnswer | Exception]) -> None:
        self.outcomes = list(outcomes)
        self.sent = 0
        self.closes: list[float | None] = []

    async def heartbeat(
        self, *, closes: bool = False, deadline_s: float | None = None
    ) -> HeartbeatAnswer:
        if closes:
            self.closes.append(deadline_s)
            return SHORT
        outcome = self.outcomes[min(self.sent, len(self.outcomes) - 1)]
        self.sent += 1
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


SHORT = heartbeat_answer(
    nodes_pb2.HeartbeatResponse(
        session_timeout_ms=8,
        recoveries=[nodes_pb2.Recovery(node_id=1001, node_epoch=3)],
        compactions=[common_pb2.NodeIdentity(node_id=1002, node_epoch=4)],
    )
)
UNAVAILABLE = errors.ControllerUnavailableError("Heartbeat", 1.0, {})


def heartbeat_of(session: FakeSession, told: list[errors.BrokerClientError]) -> Heartbeat:
    return Heartbeat(session, told.append, random.Random(1))  # type: ignore[arg-type]


async def test_it_goes_on_and_names_what_is_to_be_done_for_others() -> None:
    told: list[errors.BrokerClientError] = []
    session = FakeSession([SHORT])
    async with heartbeat_of(session, told) as heartbeat:
        heartbeat.start()
        await until(lambda: session.sent > 5, "heartbeats")
        assert [recovery.node_id for recovery in heartbeat.recoveries] == [1001]
        assert [(one.node_id, one.node_epoch) for one in heartbeat.compactions] == [(1002, 4)]
    sent = session.sent
    assert (told, session.sent) == ([], sent)
    assert session.closes == [LAST_BEAT_S]  # the end is on purpose
    await heartbeat.close()
    assert session.closes == [LAST_BEAT_S]


async def test_an_end_that_is_not_clean_is_no_close() -> None:
    session = FakeSession([SHORT])
    heartbeat = heartbeat_of(session, [])
    heartbeat.start()
    await until(lambda: session.sent > 0, "a heartbeat")
    await heartbeat.close(cleanly=False)
    assert session.closes == []


async def test_one_that_does_not_get_through_is_not_the_last() -> None:
    session = FakeSession([SHORT, UNAVAILABLE, RuntimeError("a defect"), UNAVAILABLE, SHORT])
    async with heartbeat_of(session, []):
        await until(lambda: session.sent > 6, "heartbeats after failures")


@pytest.mark.parametrize(
    "error", [errors.NodeEpochExpiredError("heartbeat"), errors.NodeFencedError("heartbeat")]
)
async def test_a_takeover_ends_it_and_is_told(error: errors.BrokerClientError) -> None:
    told: list[errors.BrokerClientError] = []
    session = FakeSession([SHORT, error])
    async with heartbeat_of(session, told):
        await until(lambda: bool(told), "the news")
        assert told == [error]
    assert session.sent == 2
    assert session.closes == []


async def test_controllers_without_sessions_are_asked_once() -> None:
    told: list[errors.BrokerClientError] = []
    session = FakeSession([errors.UnsupportedError("Heartbeat")])
    async with heartbeat_of(session, told):
        await until(lambda: session.sent == 1, "the heartbeat")
    assert told == []


async def test_a_writer_keeps_its_session_until_a_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[HeartbeatAnswer] = []
    refusals: list[Exception] = []

    async def heartbeat(_: BrokerSession, **__: object) -> HeartbeatAnswer:
        for refusal in refusals:
            raise refusal
        answers.append(SHORT)
        return SHORT

    monkeypatch.setattr(BrokerSession, "heartbeat", heartbeat)
    async with writing(linger_s=0.01) as (b, writer):
        await (await writer.append(0, b"x"))
        await until(lambda: len(answers) > 2, "heartbeats")
        refusals.append(errors.NodeFencedError("heartbeat"))
        with pytest.raises(errors.NodeFencedError):
            await append_for_ever(writer)
        assert await b.payloads(0)


async def append_for_ever(writer: StreamWriter) -> None:
    while True:
        await (await writer.append(0, b"x"))


_CALLS = 40
_ATTEMPTS_MAX = 20
"""Attempts of one call, far below those of a tight loop."""
METHOD = methods.DESCRIBE_STREAMS
REQUEST = streams_pb2.DescribeStreamsRequest()


class Answering(grpc.GenericRpcHandler):
    """Answers every call by an empty message, once a coroutine has ended."""

    def __init__(self, wait: Callable[[], Awaitable[None]]) -> None:
        self._wait = wait

    def service(self, handler_call_details: Any) -> Any:
        async def answer(_: bytes, __: Any) -> bytes:
            await self._wait()
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[FailureKind]:
    """Give the failures that the client's calls are repeated for."""
    seen: list[FailureKind] = []
    failed = LeaderRouter.record_failure

    def noting(router: LeaderRouter, endpoint: str, kind: FailureKind, *more: Any) -> Any:
        seen.append(kind)
        return failed(router, endpoint, kind, *more)

    monkeypatch.setattr(LeaderRouter, "record_failure", noting)
    return seen


async def test_a_call_above_the_limit_is_repeated_until_then(failures: list[FailureKind]) -> None:
    has_room, arrived = asyncio.Event(), 0

    async def wait() -> None:
        nonlocal arrived
        arrived += 1
        await has_room.wait()

    async with (
        served(Answering(wait), limits=Limits(calls=2)) as endpoint,
        connections.client_channel(endpoint) as channel,
        ControllerClient([endpoint]) as client,
    ):
        call: Any = channel.unary_unary(METHOD.path)
        under_way = [asyncio.ensure_future(call(b"")) for _ in range(2)]
        await until(lambda: arrived == 2, "as many calls as may be")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"")
        failure = read_failure(refused.value)
        assert (failure.code, failure.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            Reason.BUSY,
        )
        repeated = asyncio.create_task(client.call(METHOD, REQUEST))
        await until(lambda: len(failures) >= 2, "a second refusal")
        has_room.set()
        assert await repeated == streams_pb2.DescribeStreamsResponse()
        await asyncio.gather(*under_way)
    assert set(failures) == {FailureKind.NOT_NOW}
    assert len(failures) < _ATTEMPTS_MAX


async def test_calls_not_begun_by_a_busy_controller_are_repeated(
    failures: list[FailureKind],
) -> None:
    """Those beyond what may wait are cancelled; to the client their outcome is unknown."""
    few = Limits(waiting_some=2, waiting_most=4, begun_a_turn=1)

    async def hold_up() -> None:
        time.sleep(0.01)  # noqa: ASYNC251 - a loop that is busy

    async with (
        served(Answering(hold_up), limits=few) as endpoint,
        ControllerClient([endpoint]) as client,
    ):
        answers = await asyncio.gather(*(client.call(METHOD, REQUEST) for _ in range(_CALLS)))
    assert answers == [streams_pb2.DescribeStreamsResponse()] * _CALLS
    assert set(failures) == {FailureKind.UNREACHABLE}
    assert len(failures) < _ATTEMPTS_MAX * _CALLS

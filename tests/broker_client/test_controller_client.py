"""Calls reach the leader, repeat only what is safe, end in time; clients spread over the others."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections import Counter
from typing import Any, cast

import grpc
import pytest

from streammeta.client import errors
from streammeta.client.controllers import methods
from streammeta.client.controllers.bucket_check import BucketCheck
from streammeta.client.controllers.channels import ControllerSpread
from streammeta.client.model import ClusterDescription, cluster_description
from streammeta.client.parts import BrokerSession, ControllerClient
from streammeta.storage.cluster_files.bucket_marker import BucketMarker, create_marker
from streammeta.storage.errors import WrongBucketError
from streammeta.v1 import admin_pb2, objects_pb2, streams_pb2
from tests.kit.fake_broker import broker
from tests.kit.fake_cluster import NAMESPACE, FakeCluster
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.waiting import until


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def test_a_killed_leader_is_noticed_at_once() -> None:
    """The reset connection, not the timeout of an attempt, sends the call on."""
    async with broker(3) as b:
        await b.opened(1)
        await b.cluster.kill(0)
        b.cluster.move_leader(1)
        began = time.monotonic()
        await b.opened(1)
        assert time.monotonic() - began < 0.9, "longer than one attempt may last"
        assert b.client.leader == b.cluster.endpoints[1]


async def test_one_slow_answer_of_a_leader_that_was_not_given_cuts_nothing_off() -> None:
    """Nothing else happens: no election, and the one endpoint that was given is a follower's."""
    is_slow = asyncio.Event()

    async def answer_late(_: Any) -> None:
        if is_slow.is_set():
            await asyncio.Event().wait()

    async with FakeCluster(3) as cluster:
        cluster.move_leader(2)
        cluster.hooks["CreateStreams"] = answer_late
        client = ControllerClient(cluster.endpoints[:1], attempt_timeout_s=0.2)
        async with client:
            request = objects_pb2.PrepareObjectsRequest(count=1, ttl_ms=60_000)
            await client.call(methods.PREPARE_OBJECTS, request)
            is_slow.set()
            with pytest.raises(errors.ControllerUnavailableError):
                await client.call(methods.CREATE_STREAMS, streams_pb2.CreateStreamsRequest(), 0.5)
            assert client.router.silent_s > 0
            is_slow.clear()
            await client.call(methods.CREATE_STREAMS, streams_pb2.CreateStreamsRequest())
            assert client.leader == cluster.endpoints[2]
            assert client.router.silent_s == 0


async def test_a_call_with_less_time_than_an_attempt_leaves_a_leader_that_hangs() -> None:
    hanging = asyncio.Event()

    async def hang(_: Any) -> None:
        if hanging.is_set():
            await asyncio.Event().wait()

    async with FakeCluster(2) as cluster:
        cluster.hooks["PrepareObjects"] = hang
        async with ControllerClient(cluster.endpoints, attempt_timeout_s=60) as client:
            request = objects_pb2.PrepareObjectsRequest(count=1, ttl_ms=60_000)
            await client.call(methods.PREPARE_OBJECTS, request)
            hanging.set()
            while client.leader == cluster.endpoints[0]:
                with pytest.raises(errors.ControllerUnavailableError):
                    await client.call(methods.PREPARE_OBJECTS, request, 0.25)
            hanging.clear()
            cluster.move_leader(1)
            await client.call(methods.PREPARE_OBJECTS, request)
            assert client.leader == cluster.endpoints[1]


async def test_a_client_learns_controllers_that_it_was_not_given() -> None:
    async with FakeCluster(3) as cluster:
        cluster.listed = cluster.endpoints
        async with ControllerClient(cluster.endpoints[:1]) as client:
            await client.describe_cluster()
            assert set(client.router.known) == set(cluster.endpoints)


async def test_a_lost_answer_is_asked_for_again_under_the_same_request_id() -> None:
    async with broker(3) as b:
        for status, reason in (
            (grpc.StatusCode.UNAVAILABLE, ""),
            (grpc.StatusCode.ABORTED, "OUTCOME_UNKNOWN"),
            (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE"),
        ):
            b.cluster.fail_next(methods.CREATE_STREAMS, status, reason, applied=True)
            before = len(b.cluster.map.streams)
            ids = await b.session.create_streams([{}, {}])
            assert ids == [before, before + 1]
            assert len(b.cluster.map.streams) == before + 2, "the retry created streams again"
        sent = b.cluster.request_ids["CreateStreams"]
        assert len(set(sent)) == 3
        assert all(1 <= len(page) <= 64 for page in sent)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequestError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.LimitExceededError),
        (grpc.StatusCode.PERMISSION_DENIED, errors.PermissionDeniedError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.UnsupportedError),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.RejectedError),
        (grpc.StatusCode.INTERNAL, errors.ControllerDefectError),
        (grpc.StatusCode.ABORTED, errors.ControllerDefectError),
    ],
)
async def test_a_refused_call_is_never_repeated(
    status: grpc.StatusCode, kind: type[errors.RejectedError]
) -> None:
    async with broker() as b:
        b.cluster.fail_next(methods.PREPARE_OBJECTS, status, "LIMIT_EXCEEDED", times=99)
        with pytest.raises(kind, match="fake LIMIT_EXCEEDED") as caught:
            await b.client.call(methods.PREPARE_OBJECTS, objects_pb2.PrepareObjectsRequest())
        assert type(caught.value) is kind
        assert b.cluster.calls["PrepareObjects"] == 1


async def test_the_deadline_ends_a_call_and_names_the_endpoints() -> None:
    endpoints = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    async with ControllerClient(endpoints, rng=random.Random(1)) as client:
        with pytest.raises(
            errors.ControllerUnavailableError, match=r"GetObjects.*0\.3 s"
        ) as caught:
            await client.call(methods.GET_OBJECTS, objects_pb2.GetObjectsRequest(), 0.3)
        assert set(caught.value.tried) == set(endpoints)
        assert all("UNAVAILABLE" in seen for seen in caught.value.tried.values())


async def test_a_silent_controller_costs_one_attempt_not_the_call() -> None:
    async with FakeCluster(2) as cluster:
        stuck = asyncio.Event()

        async def silent_once(_: Any) -> None:
            if cluster.calls["DescribeStreams"] == 1:
                cluster.move_leader(1 - cluster.leader)
                await stuck.wait()

        cluster.hooks["DescribeStreams"] = silent_once
        async with ControllerClient(cluster.endpoints, attempt_timeout_s=0.2) as client:
            await client.call(methods.DESCRIBE_STREAMS, streams_pb2.DescribeStreamsRequest(), 10.0)
        stuck.set()


async def test_a_proxy_for_the_internet_is_not_asked_for_controllers() -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
        for name in ("no_proxy", "no_grpc_proxy"):
            environment.delenv(name, raising=False)
        async with FakeCluster() as cluster, ControllerClient(cluster.endpoints) as client:
            await client.call(methods.DESCRIBE_STREAMS, streams_pb2.DescribeStreamsRequest(), 5.0)


@pytest.mark.parametrize("silent", [False, True])
async def test_a_closed_client_fails_its_calls_and_connects_no_more(silent: bool) -> None:
    """Calls that search for the leader fail, and those that wait for an answer."""
    async with FakeCluster() as cluster:
        never = asyncio.Event()

        async def hang(_: Any) -> None:
            await never.wait()

        if silent:
            cluster.hooks["DescribeStreams"] = hang
        else:
            cluster.leader = -1
        client = ControllerClient(cluster.endpoints)
        call = client.call(methods.DESCRIBE_STREAMS, streams_pb2.DescribeStreamsRequest())
        waiting = asyncio.create_task(call)
        await until(lambda: cluster.calls["DescribeStreams"] >= (1 if silent else 3), "attempts")
        await client.close()
        with pytest.raises(errors.ClientClosedError):
            await waiting
        with pytest.raises(errors.ClientClosedError):
            await client.describe_cluster()
        never.set()


async def test_any_controller_names_the_namespace() -> None:
    async with FakeCluster(3) as cluster, ControllerClient(cluster.endpoints) as client:
        cluster.leader = -1
        assert await client.object_namespace() == NAMESPACE
        assert client.leader is None, "an answer that any member gives does not make it leader"


async def test_registration_finds_what_an_earlier_process_left_open_and_fences_it() -> None:
    async with broker() as b:
        opened = await b.opened(2)
        newer = await BrokerSession.open(b.client, 1000, 2)
        assert [id_.stream_id for id_ in newer.inherited] == [stream.stream_id for stream in opened]
        with pytest.raises(errors.NodeEpochExpiredError, match=r"1000.*1"):
            await BrokerSession.open(b.client, 1000, 1)
        with pytest.raises(errors.NodeEpochExpiredError):
            await b.session.heartbeat()


async def test_one_unknown_stream_does_not_keep_the_others_closed() -> None:
    async with broker() as b:
        ids = await b.session.create_streams([{}] * 3)
        outcomes = await b.session.open_streams({ids[0]: 0, 999: 0, ids[2]: 0})
        assert sorted(outcomes.done) == [ids[0], ids[2]]
        assert isinstance(outcomes.failed[999], errors.StreamNotFoundError)
        with pytest.raises(errors.StreamNotFoundError, match="999"):
            outcomes.require_all()
        closed = await b.session.close_streams({ids[0]: 0, 999: 0})
        assert (list(closed.done), list(closed.failed)) == ([ids[0]], [999])


CHECKED = "_streammeta_checked"


class Described:
    """A client of a cluster that says its UUID when it is let."""

    deadline_s = 30.0

    def __init__(self, cluster_uuid: str) -> None:
        self.cluster_uuid = cluster_uuid
        self.may_answer = asyncio.Event()
        self.asked = 0

    async def describe_cluster(self) -> ClusterDescription:
        self.asked += 1
        await self.may_answer.wait()
        answer = admin_pb2.DescribeClusterResponse(
            cluster_id="checked", cluster_uuid=self.cluster_uuid, object_namespace=CHECKED
        )
        return cluster_description(answer)


def check_of(client: Described) -> BucketCheck:
    store = MemoryObjectStore()
    marker = BucketMarker(cluster_id="checked", cluster_uuid="u-1", namespace=CHECKED, created_ms=1)
    create_marker(store, marker)
    return BucketCheck(cast(ControllerClient, cast(Any, client)), store, CHECKED)


async def test_all_that_wait_share_one_check_and_one_that_is_cancelled_ends_no_other() -> None:

    client = Described("u-1")
    check = check_of(client)
    waiting = [asyncio.create_task(check.require()) for _ in range(20)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    client.may_answer.set()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(ended[0], asyncio.CancelledError)
    assert ended[1:] == [None] * 19
    await check.require()
    assert client.asked == 1


async def test_a_check_that_failed_is_made_again_when_it_is_asked_for_again() -> None:

    client = Described("u-2")
    client.may_answer.set()
    check = check_of(client)
    ended = await asyncio.gather(*(check.require() for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in ended] == [WrongBucketError] * 3
    assert client.asked == 1
    client.cluster_uuid = "u-1"
    await check.require()
    assert client.asked == 2


ALL = ("a:1", "b:1", "c:1")


def spread(seed: int, *given: str) -> ControllerSpread:
    return ControllerSpread(given or ALL, random.Random(seed))


def test_many_clients_spread_evenly_over_all_but_the_leader() -> None:
    firsts = Counter(spread(seed).order("b:1")[0] for seed in range(1_000))
    assert firsts.keys() == {"a:1", "c:1"}
    assert max(firsts.values()) < 600
    assert all(spread(seed).order("b:1")[-1] == "b:1" for seed in range(20))


def test_one_client_has_one_order_and_the_next_leader_changes_no_more_than_its_own_place() -> None:
    one = spread(7)
    order = one.order(None)
    assert order == one.order(None)
    assert sorted(order) == sorted(ALL)
    assert [endpoint for endpoint in one.order("a:1") if endpoint != "a:1"] == [
        endpoint for endpoint in order if endpoint != "a:1"
    ]


def test_who_failed_comes_behind_the_others_and_before_the_leader() -> None:
    one = spread(3)
    first, second = one.order("b:1")[:2]
    one.prefer_others(first)
    assert one.order("b:1") == [second, first, "b:1"]
    one.clear_failure(first)
    assert one.order("b:1") == [first, second, "b:1"]
    one.prefer_others(first)
    one.learn(ALL, "b:1")
    assert one.order(None) == [first, second, "b:1"], "a new list forgets failures"


def test_controllers_that_are_learned_are_asked_too() -> None:
    one = spread(1, "b:1")
    assert one.order("b:1") == ["b:1"]
    one.learn(["a:1", "b:1", "", "d:1"], "b:1")
    assert sorted(one.order("b:1")) == ["a:1", "b:1", "d:1"]
    assert one.order(None)[-1] == "b:1", "as learned"
    assert one.order("d:1")[-1] == "d:1", "a call has found the next leader meanwhile"


def test_a_leader_with_two_names_comes_last_with_both() -> None:
    one = spread(1, "localhost:1")
    one.learn(ALL, "b:1")
    assert one.order("localhost:1")[:2] == [
        endpoint for endpoint in one.order("localhost:1") if endpoint in ("a:1", "c:1")
    ]


def test_a_leader_is_left_only_for_one_that_works() -> None:
    one = spread(1)
    assert one.has_better("b:1", "b:1")
    assert not one.has_better("a:1", "b:1")
    one.prefer_others("a:1")
    assert one.has_better("b:1", "b:1")
    one.prefer_others("c:1")
    assert not one.has_better("b:1", "b:1")
    assert not spread(1, "b:1").has_better("b:1", "b:1"), "alone"

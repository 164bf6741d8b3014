"""Watch over real gRPC: in order, once, filtered, resumable, and never a burden on the server."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from streammeta.client.controllers import metadata_watch
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.controllers.metadata_watch import Change, MetadataWatch
from streammeta.client.controllers.methods import DESCRIBE_CLUSTER, GET_KVS, PUT_KVS, Method
from streammeta.client.errors import ControllerUnavailableError, InvalidRequestError
from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.metadata.tables.values import column
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.records.codec import encode_records
from streammeta.controller.records.record import KVsPut, Record, StreamsTrimmed
from streammeta.controller.rpc.watch import service as watch_module
from streammeta.controller.rpc.watch.service import WatchHandler
from streammeta.controller.runtime.writer.change_feed import ChangeFeed
from streammeta.rpc.connections import client_channel
from streammeta.rpc.failures import read_failure
from streammeta.rpc.method_facts import BATCH_MAX
from streammeta.rpc.method_rows import WATCHED_PREFIXES_MAX
from streammeta.v1 import admin_pb2, kv_pb2, records_pb2
from streammeta.v1 import metadata_pb2 as pb
from tests.kit.grpc_servers import started
from tests.kit.real_cluster import leader_of, running_cluster

ENDED = ("OK", "", dict[str, str]())
SERVICE = "streammeta.v1.MetadataService"


def kv(key: str, size: int = 1) -> KVsPut:
    return KVsPut(namespaces=("",), keys=(key,), values=(bytes(size),))


def trimmed(*stream_ids: int) -> StreamsTrimmed:
    return StreamsTrimmed(stream_id=column(stream_ids), start_offset=column(stream_ids))


class Node:
    """A controller as far as watchers see one: a feed that the test extends, and its server."""

    def __init__(self) -> None:
        self.changes = ChangeFeed(ring_bytes=1 << 20)

    async def __aenter__(self) -> "Node":
        handler: Any = grpc.unary_stream_rpc_method_handler(
            WatchHandler(self.changes).watch, request_deserializer=pb.WatchRequest.FromString
        )
        self._server, self.endpoint = await started(
            grpc.method_handlers_generic_handler(SERVICE, {"Watch": handler})
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        await self._server.stop(None)

    def commit(self, *entries: Record | None) -> None:
        """Commit one entry after the other; None is a control record."""
        for entry in entries:
            at = self.changes.end_offset
            kind = BatchKind.CONTROL if entry is None else BatchKind.DATA
            payload = b"{}" if entry is None else encode_records([entry])
            batch = Batch(EndOffset(at), Epoch(1), kind, (payload,))
            self.changes.extend([batch], at + 1)


@contextlib.asynccontextmanager
async def nodes(count: int) -> AsyncIterator[list[Node]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Node()) for _ in range(count)]


@pytest_asyncio.fixture
async def node() -> AsyncIterator[Node]:
    async with Node() as started:
        yield started


@contextlib.asynccontextmanager
async def watching(node: Node, **request: Any) -> AsyncIterator[Any]:
    async with client_channel(node.endpoint) as channel:
        call: Any = channel.unary_stream(
            f"/{SERVICE}/Watch",
            request_serializer=pb.WatchRequest.SerializeToString,
            response_deserializer=pb.WatchResponse.FromString,
        )(pb.WatchRequest(**request))
        yield call
        call.cancel()


async def next_change(call: Any) -> tuple[int, records_pb2.RecordSet]:
    while True:
        response = await call.read()
        assert response is not grpc.aio.EOF
        if response.records:
            return response.offset, records_pb2.RecordSet.FromString(response.records)


async def status_of(call: Any) -> tuple[str, str, dict[str, str]]:
    """The status that a call ends with, its reason and what is said besides."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        failure = read_failure(error)
        return failure.code.name, failure.reason, dict(failure.metadata)
    return ENDED


async def test_a_watch_tells_what_was_and_what_is_to_come(node: Node) -> None:
    node.commit(None, kv("a"), kv("b"))
    async with watching(node, from_offset=2) as call:
        offset, records = await next_change(call)
        assert (offset, list(records.records[0].kvs_put.keys)) == (2, ["b"])
        node.commit(kv("c"))
        assert (await next_change(call))[0] == 3


async def test_filters_cut_rows_and_entries(node: Node) -> None:
    node.commit(kv("a"), trimmed(1, 2, 3), trimmed(9), trimmed(3))
    async with watching(node, kinds=[pb.ENTITY_KIND_STREAM], stream_ids=[3, 1]) as call:
        offset, records = await next_change(call)
        column_bytes = records.records[0].streams_trimmed.stream_id
        assert (offset, column_bytes) == (1, column([1, 3]).tobytes())
        assert (await next_change(call))[0] == 3


async def test_a_watch_of_a_prefix_gets_no_other_keys(node: Node) -> None:
    node.commit(kv("other"), kv("group/a"), kv("other"), kv("group/b"))
    asked = [pb.KVPrefix(prefix="group/")]
    async with watching(node, kinds=[pb.ENTITY_KIND_KV], kv_prefixes=asked) as call:
        for offset, key in ((1, "group/a"), (3, "group/b")):
            got, records = await next_change(call)
            assert (got, list(records.records[0].kvs_put.keys)) == (offset, [key])


async def test_a_watcher_without_changes_learns_where_to_resume(node: Node) -> None:
    node.commit(kv("a"), kv("b"), None)
    async with watching(node, kinds=[pb.ENTITY_KIND_NODE]) as call:
        first, second = await call.read(), await call.read()
        for told in (first, second):
            assert (told.offset, told.high_watermark, told.records) == (2, 3, b"")


async def test_an_offset_above_the_end_is_waited_for(node: Node) -> None:
    node.commit(kv("a"))
    async with watching(node, from_offset=3) as call:
        assert (await call.read()).offset == 2
        node.commit(kv("b"), kv("c"), kv("d"))
        assert (await next_change(call))[0] == 3


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"from_offset": -1}, "from_offset"),
        ({"kinds": [77]}, "kinds"),
        ({"stream_ids": [-1]}, "stream_ids"),
        ({"node_ids": [-2]}, "node_ids"),
        ({"stream_ids": range(BATCH_MAX + 1)}, "stream_ids"),
        ({"kv_prefixes": [pb.KVPrefix()] * (WATCHED_PREFIXES_MAX + 1)}, "kv_prefixes"),
    ],
)
async def test_bad_requests_are_refused(
    node: Node, request_fields: dict[str, Any], field: str
) -> None:
    async with watching(node, **request_fields) as call:
        assert await status_of(call) == ("INVALID_ARGUMENT", "INVALID_FIELD", {"field": field})


async def test_what_is_gone_from_the_ring_needs_a_snapshot(node: Node) -> None:
    node.commit(*(kv(f"{number}", size=100_000) for number in range(20)))
    async with watching(node, from_offset=3) as call:
        assert (await call.read()).snapshot_required
        assert await status_of(call) == ENDED


async def test_a_snapshot_that_is_loaded_meanwhile_needs_one_at_the_watcher_too(node: Node) -> None:
    node.commit(kv("a"))
    async with watching(node) as call:
        assert (await next_change(call))[0] == 0
        node.changes.restart(100)
        while not (told := await call.read()).snapshot_required:
            pass
        assert told.offset + 1 == 1, "where the sequence broke"
        assert await status_of(call) == ENDED


async def overflow(node: Node) -> None:
    """Commit 30 MB: more than a connection takes on."""
    for number in range(60):
        node.commit(kv(f"{number}", size=500_000))
        await asyncio.sleep(0.005)


async def test_a_watcher_that_does_not_read_is_cut_off_and_told_where_to_resume(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "PROGRESS_S", 0.1)
    async with watching(node) as call:
        node.commit(kv("first"))
        assert (await next_change(call))[0] == 0
        await overflow(node)
        code, reason, told = await status_of(call)
        assert (code, reason) == ("RESOURCE_EXHAUSTED", "WATCHER_TOO_SLOW")
        assert 0 < int(told["from_offset"]) <= 60


async def test_a_watcher_that_never_reads_again_does_not_keep_his_place(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "PROGRESS_S", 0.1)
    monkeypatch.setattr(watch_module, "ABORT_PATIENCE_S", 0.1)
    monkeypatch.setattr(watch_module, "WATCHERS_MAX", 1)

    async with watching(node) as stuck:
        node.commit(kv("first"))
        await next_change(stuck)
        await overflow(node)
        start = node.changes.start_offset
        async with following([node.endpoint], from_offset=start) as other:
            assert isinstance(await anext(changes(other)), Change)


async def test_watchers_are_limited(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "WATCHERS_MAX", 1)

    node.commit(kv("a"))
    async with watching(node) as first:
        await next_change(first)
        async with watching(node) as second:
            code, reason, _ = await status_of(second)
            assert (code, reason) == ("RESOURCE_EXHAUSTED", "BUSY")
    async with following([node.endpoint]) as again:  # the first one's place is free
        assert isinstance(await anext(changes(again)), Change)


# -- the client


@contextlib.asynccontextmanager
async def following(endpoints: list[str], **options: Any) -> AsyncIterator[MetadataWatch]:
    async with following_with(endpoints, **options) as (_, watch):
        yield watch


@contextlib.asynccontextmanager
async def following_with(
    endpoints: list[str], **options: Any
) -> AsyncIterator[tuple[ControllerClient, MetadataWatch]]:
    async with ControllerClient(endpoints) as client:
        yield client, MetadataWatch(client, **options)


async def changes(watch: MetadataWatch) -> AsyncGenerator[Change, None]:
    async with contextlib.aclosing(watch.follow()) as answers:
        async for answer in answers:
            if answer is not None:
                yield answer


async def test_the_client_goes_on_elsewhere_without_gap_or_repeat() -> None:
    async with nodes(3) as cluster:
        for node in cluster:
            node.commit(*(kv(f"{number}") for number in range(10)))
        endpoints = [node.endpoint for node in cluster]
        async with following_with(endpoints) as (client, watch):
            seen: list[int] = []
            async for event in changes(watch):
                seen.append(event.offset)
                if len(seen) == 5:
                    assert client.tally.watch_restarts == 0
                    served = next(n for n in cluster if n.endpoint == watch.endpoint)
                    await served.stop()
                if len(seen) == 10:
                    for node in cluster:
                        node.commit(kv("more"))
                if len(seen) == 11:
                    break
            assert seen == list(range(11))
            assert watch.endpoint != served.endpoint
            assert watch.next_offset == 11
            assert client.tally.watch_restarts >= 1


async def test_the_client_gives_up_a_controller_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "PROGRESS_S", 3600.0)  # silent as a machine that hangs

    async with nodes(2) as cluster:
        for node in cluster:
            node.commit(kv("a"))
        endpoints = [node.endpoint for node in cluster]
        async with following(endpoints, silence_s=0.2) as watch:
            events = changes(watch)
            await anext(events)
            hangs = watch.endpoint
            other = next(node for node in cluster if node.endpoint != hangs)
            other.commit(kv("b"))
            assert (await anext(events)) == Change(
                1, records_pb2.RecordSet.FromString(encode_records([kv("b")]))
            )
            assert watch.endpoint == other.endpoint


async def test_a_watch_ends_only_when_no_controller_has_its_next_change() -> None:
    async with nodes(3) as cluster:
        for node in cluster:
            node.commit(*(kv(f"{number}") for number in range(10)))
        for node in cluster[:2]:
            node.changes.restart(10)
        endpoints = [node.endpoint for node in cluster]
        async with following(endpoints, from_offset=4) as watch:
            events = changes(watch)
            assert (await anext(events)).offset == 4
            await events.aclose()
        cluster[2].changes.restart(10)
        async with following(endpoints, from_offset=4) as watch:
            assert [event async for event in watch.follow()] == []
            assert watch.next_offset == 4


async def test_the_client_says_whom_it_tried_and_what_was_refused(node: Node) -> None:
    unknown: Any = [99]
    async with following([node.endpoint], kinds=unknown) as watch:
        with pytest.raises(InvalidRequestError, match="kinds"):
            await anext(watch.follow())
    await node.stop()
    async with following([node.endpoint], deadline_s=0.2) as watch:
        with pytest.raises(ControllerUnavailableError, match=node.endpoint):
            await anext(watch.follow())


# -- real processes


async def put(client: ControllerClient, number: int) -> None:
    item = kv_pb2.KVToPut(key=f"k{number:05}", value=b"v")
    answer = await client.call(PUT_KVS, kv_pb2.PutKVsRequest(items=[item]))
    assert answer.results[0].error == 0


@pytest.mark.process
def test_a_watch_outlives_the_controllers_it_watches(tmp_path: Path) -> None:
    """Whichever is watched is killed, twice; every write is seen once, in order."""
    with running_cluster(tmp_path) as cluster:
        leader = leader_of(cluster)

        async def scenario() -> None:
            leader_first = [cluster.endpoints[leader - 1]]
            leader_first += [
                endpoint for endpoint in cluster.endpoints if endpoint != leader_first[0]
            ]
            async with (
                ControllerClient(cluster.endpoints, deadline_s=60) as client,
                following(leader_first, kinds=[pb.ENTITY_KIND_KV], silence_s=3) as watch,
            ):
                writing = asyncio.create_task(write_and_kill(client, watch))
                keys, offsets = [], []
                async for event in changes(watch):
                    offsets.append(event.offset)
                    keys += [key for record in event.records.records for key in record.kvs_put.keys]
                    if keys[-1] == "k00299":
                        break
                await writing
                assert keys == [f"k{number:05}" for number in range(300)]
                assert offsets == sorted(set(offsets))

        async def write_and_kill(client: ControllerClient, watch: MetadataWatch) -> None:
            for number in range(300):
                if number in (100, 200):
                    watched = cluster.endpoints.index(watch.endpoint) + 1
                    await asyncio.to_thread(cluster.children[watched].kill)
                    if number == 100:
                        await put(client, number)  # the other two have elected a leader
                        await asyncio.to_thread(cluster.start, watched)
                        continue
                    await asyncio.to_thread(cluster.start, watched)
                await put(client, number)

        asyncio.run(asyncio.wait_for(scenario(), 100))


async def known(client: ControllerClient) -> set[str]:
    """Return the endpoints that a controller names; those of voters come a moment after a start."""
    answer = await client.call(DESCRIBE_CLUSTER, admin_pb2.DescribeClusterRequest())
    return {controller.endpoint for controller in answer.controllers if controller.endpoint}


TRANSFER_LEADERSHIP = Method(
    admin_pb2.TransferLeadershipRequest, admin_pb2.TransferLeadershipResponse
)


@pytest.mark.process
def test_watches_and_session_reads_keep_off_the_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that is told of the leader alone finds the others; a watch leaves a new leader."""
    monkeypatch.setattr(metadata_watch, "LEAVE_LEADER_WITHIN_S", 0.0)
    with running_cluster(tmp_path) as cluster:
        leader = cluster.endpoints[leader_of(cluster) - 1]

        async def scenario() -> None:
            async with ControllerClient([leader], deadline_s=60) as client:
                watch = MetadataWatch(client, kinds=[pb.ENTITY_KIND_KV])
                await put(client, 0)
                while len(await known(client)) < len(cluster.endpoints):  # noqa: ASYNC110 - asks
                    await asyncio.sleep(0.05)
                events = changes(watch)
                await anext(events)
                assert watch.endpoint != leader
                asked = [*client.endpoints, watch.endpoint]
                assert client._channels.endpoints <= set(asked)
                for number in range(1, 20):
                    await put(client, number)
                    assert client.seen_offset > watch.next_offset
                    query = kv_pb2.GetKVsRequest(keys=[kv_pb2.KVKey(key=f"k{number:05}")])
                    seen = await client.read(GET_KVS, query)
                    assert seen.results[0].value == b"v"
                    await anext(events)
                assert client._channels.endpoints <= set(asked), "the reads went where the watch is"
                to = cluster.endpoints.index(watch.endpoint) + 1
                await client.call(
                    TRANSFER_LEADERSHIP, admin_pb2.TransferLeadershipRequest(to_node_id=to)
                )
                for number in range(20, 30):
                    await put(client, number)
                    await anext(events)
                assert client.leader == cluster.endpoints[to - 1]
                assert watch.endpoint != client.leader

        asyncio.run(asyncio.wait_for(scenario(), 100))

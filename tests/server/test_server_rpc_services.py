"""Every RPC of the map carries its fields to the map and back; a bad one names its field."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio

from streammeta.controller.rpc.calls import error_mapping
from streammeta.controller.rpc.calls.interceptors import CallPipeline
from streammeta.controller.rpc.services.routes import LeaderView, routed, routes
from streammeta.controller.runtime.load.admission import LIMITS
from streammeta.controller.trust.authenticator import Authenticator
from streammeta.rpc.failures import read_failure
from streammeta.rpc.method_facts import RequestClass
from streammeta.v1 import common_pb2, metadata_pb2, nodes_pb2, objects_pb2, records_pb2, streams_pb2
from streammeta.v1.common_pb2 import (
    ERROR_CODE_COMPACTED_OBJECTS_NOT_FOUND,
    ERROR_CODE_NODE_EPOCH_EXPIRED,
    ERROR_CODE_NODE_EPOCH_NOT_EXIST,
    ERROR_CODE_NONE,
    ERROR_CODE_OFFSET_NOT_MATCHED,
    ERROR_CODE_STREAM_NOT_CLOSED,
)
from streammeta.v1.metadata_pb2_grpc import MetadataServiceStub
from tests.kit.waiting import until
from tests.server.rpc_server import NODE, SESSION_TIMEOUT_MS, Rpcs, serving


@pytest_asyncio.fixture
async def rpcs() -> AsyncIterator[Rpcs]:
    async with serving() as leader:
        yield leader


NODES = "NodeService"
OBJECTS = "ObjectService"


def commit(object_id: int, *rows: tuple[int, int, int]) -> objects_pb2.CommitStreamSetObjectRequest:
    return objects_pb2.CommitStreamSetObjectRequest(
        node=NODE,
        on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
        object_id=object_id,
        order_id=object_id,
        object_size=100,
        ranges=objects_pb2.RangeColumns(
            stream_id=[row[0] for row in rows],
            start_offset=[row[1] for row in rows],
            end_offset=[row[2] for row in rows],
        ),
    )


async def committed(rpcs: Rpcs, request: objects_pb2.CommitStreamSetObjectRequest) -> None:
    answer = await rpcs.ask(request)
    assert answer.error == ERROR_CODE_NONE
    assert list(answer.range_errors) == [ERROR_CODE_NONE] * len(request.ranges.stream_id)


async def slices(rpcs: Rpcs, *starts: tuple[int, int]) -> list[objects_pb2.ObjectList]:
    """Find the objects from each (stream id, offset) on."""
    queries = [objects_pb2.ObjectQuery(stream_id=stream, start_offset=at) for stream, at in starts]
    return list((await rpcs.ask(objects_pb2.GetObjectsRequest(queries=queries))).results)


async def nodes(rpcs: Rpcs, **fields: object) -> list[nodes_pb2.NodeDescription]:
    request = nodes_pb2.GetNodesRequest(**fields)  # type: ignore[arg-type]
    answer = await rpcs.ask(request)
    return list(answer.nodes)


async def test_a_node_from_its_id_to_its_end(rpcs: Rpcs) -> None:
    issue = nodes_pb2.GetNextNodeIdRequest(request_id="first")
    for _ in range(2):
        assert (await rpcs.ask(issue)).node_id == 1000
    await rpcs.register()
    for name, locked in (("LockNode", True), ("UnlockNode", False)):
        request = getattr(nodes_pb2, f"{name}Request")(node_id=1000)
        assert (await rpcs.ask(request)).error == ERROR_CODE_NONE
        (node,) = await nodes(rpcs)
        assert node.locked is locked
    (stream_id,) = await rpcs.open_streams(1)
    leave = nodes_pb2.UnregisterNodeRequest(node=NODE)
    assert (await rpcs.ask(leave)).error == ERROR_CODE_STREAM_NOT_CLOSED
    close = streams_pb2.CloseStreamsRequest(
        node=NODE, streams=[streams_pb2.StreamToClose(stream_id=stream_id, stream_epoch=1)]
    )
    await rpcs.ask(close)
    assert (await rpcs.ask(leave)).error == ERROR_CODE_NONE
    assert await nodes(rpcs) == []
    lock = nodes_pb2.LockNodeRequest(node_id=1000)
    assert (await rpcs.ask(lock)).error == ERROR_CODE_NODE_EPOCH_NOT_EXIST


async def test_heartbeats_renew_a_session_that_nodes_show(rpcs: Rpcs) -> None:
    beat = nodes_pb2.HeartbeatRequest(node=NODE)
    assert (await rpcs.ask(beat)).error == ERROR_CODE_NODE_EPOCH_NOT_EXIST
    await rpcs.register()
    (silent,) = await nodes(rpcs)
    assert (silent.state, silent.supervised) == (nodes_pb2.NODE_STATE_UNKNOWN, False)
    answer = await rpcs.ask(beat)
    assert (answer.error, answer.session_timeout_ms) == (ERROR_CODE_NONE, SESSION_TIMEOUT_MS)
    assert not answer.recoveries
    assert not answer.compactions
    (heard,) = await nodes(rpcs)
    assert (heard.state, heard.supervised) == (nodes_pb2.NODE_STATE_ACTIVE, True)
    assert not heard.HasField("compacted_by")
    old = common_pb2.NodeIdentity(node_id=1000, node_epoch=0)
    answer = await rpcs.ask(nodes_pb2.HeartbeatRequest(node=old))
    assert answer.error == ERROR_CODE_NODE_EPOCH_EXPIRED


async def test_streams_are_found_by_all_their_tags(rpcs: Rpcs) -> None:
    await rpcs.begin(streams=1, objects=1)
    topic, other = (common_pb2.Tag(key="topic", value=value) for value in ("orders", "payments"))
    zones = [common_pb2.Tag(key="zone", value=value) for value in "ab"]
    new = [streams_pb2.NewStream(tags=[topic, zone]) for zone in zones]
    new.append(streams_pb2.NewStream(tags=[other, zones[0]]))
    created = await rpcs.ask(
        streams_pb2.CreateStreamsRequest(request_id="tags", node=NODE, streams=new)
    )
    first, second, _ = created.stream_ids

    page = common_pb2.PageRequest(page_size=1)
    answer = await rpcs.ask(streams_pb2.FindStreamsRequest(tags=[topic], page=page))
    assert [stream.stream_id for stream in answer.streams] == [first]
    assert list(answer.streams[0].tags) == [topic, zones[0]]
    page.page_token = answer.next_page_token
    answer = await rpcs.ask(streams_pb2.FindStreamsRequest(tags=[topic], page=page))
    assert [stream.stream_id for stream in answer.streams] == [second]
    assert answer.next_page_token == ""
    answer = await rpcs.ask(streams_pb2.FindStreamsRequest(tags=[zones[0], topic]))
    assert [stream.stream_id for stream in answer.streams] == [first]


async def test_a_fast_close_is_owed_described_and_given_up(rpcs: Rpcs) -> None:
    (stream_id,), first = await rpcs.begin(streams=1, objects=1)
    await committed(rpcs, commit(first, (stream_id, 0, 10)))
    close = streams_pb2.CloseStreamsRequest(
        node=NODE,
        streams=[streams_pb2.StreamToClose(stream_id=stream_id, stream_epoch=1, end_offset=25)],
    )
    closed = await rpcs.ask(close)
    assert list(closed.errors) == [ERROR_CODE_NONE]
    owed = streams_pb2.PendingUpload(
        node_id=1000, stream_id=stream_id, start_offset=10, end_offset=25
    )
    describe = streams_pb2.DescribeStreamsRequest(stream_ids=[stream_id])
    described = await rpcs.ask(describe)
    assert list(described.streams[0].pending_uploads) == [owed]
    assert [node.pending_upload_count for node in await nodes(rpcs)] == [1]
    opening = await rpcs.ask(streams_pb2.GetOpeningStreamsRequest(node=NODE))
    assert [(id_.end_offset, id_.upload_end_offset) for id_ in opening.streams] == [(10, 25)]

    abandon = streams_pb2.AbandonUploadsRequest(node_id=1000, stream_ids=[stream_id])
    gave_up = await rpcs.ask(abandon)

    assert gave_up.error == ERROR_CODE_NONE
    assert list(gave_up.abandoned) == [owed]
    described = await rpcs.ask(describe)
    assert not described.streams[0].pending_uploads
    lost = streams_pb2.OffsetRange(start_offset=10, end_offset=25)
    assert list(described.streams[0].lost) == [lost]
    found = await slices(rpcs, *((stream_id, start) for start in (0, 12)))
    assert [node.lost_end_offset for node in found] == [0, 25]
    assert not found[0].HasField("lost_end_offset")


async def test_a_stream_may_be_in_several_results_of_a_compaction_of_an_upload_never(
    rpcs: Rpcs,
) -> None:
    (stream_id,), first = await rpcs.begin(streams=1, objects=4)
    several = commit(first, (stream_id, 0, 4), (stream_id, 6, 10))
    refused = await rpcs.refusal(f"{OBJECTS}/CommitStreamSetObject", several)
    assert refused[2] == {"field": "ranges.stream_id[1]"}
    await committed(rpcs, commit(first, (stream_id, 0, 10)))
    several.object_id = several.order_id = first + 1
    several.compacted_object_ids.append(first)
    several.stream_objects.CopyFrom(
        objects_pb2.StreamObjectColumns(
            object_id=[first + 3, first + 2], object_size=[1, 1], stream_id=[stream_id] * 2,
            start_offset=[5, 4], end_offset=[6, 5],
        )
    )  # fmt: skip
    await committed(rpcs, several)
    (found,) = await slices(rpcs, (stream_id, 0))
    ends = [(object_.object_id - first, object_.end_offset) for object_ in found.objects]
    assert ends == [(1, 4), (2, 5), (3, 6), (1, 10)]


async def test_a_nodes_set_objects_are_listed_page_by_page(rpcs: Rpcs) -> None:
    (stream_id,), first = await rpcs.begin(streams=1, objects=3)
    for number in range(3):
        upload = commit(first + number, (stream_id, number, number + 1))
        if number == 1:
            upload.min_timestamp_ms, upload.max_timestamp_ms, upload.crc32c = 0, 70, 0
        await committed(rpcs, upload)

    request = nodes_pb2.ListStreamSetObjectsRequest(node_id=1000)
    request.page.page_size = 2
    pages: list[list[int]] = []
    while not pages or request.page.page_token:
        page = await rpcs.ask(request)
        assert (page.error, page.total) == (ERROR_CODE_NONE, 3)
        pages.append([object_.object_id - first for object_ in page.objects])
        request.page.page_token = page.next_page_token
        known = [one.max_timestamp_ms for one in page.objects if one.HasField("max_timestamp_ms")]
        assert known == [70] * (len(pages) == 1)
        assert [item.crc32c for item in page.objects if item.HasField("crc32c")] == [0] * len(known)
    assert pages == [[0, 1], [2]]
    (held,) = await nodes(rpcs, include_stream_set_objects=True)
    assert [one.object_id - first for one in held.stream_set_objects] == [0, 1, 2]

    request.node_id = 1001
    page = await rpcs.ask(request)
    assert page.error == ERROR_CODE_NODE_EPOCH_NOT_EXIST
    request.page.page_size = -1
    refused = await rpcs.refusal(f"{NODES}/ListStreamSetObjects", request)
    assert refused[2] == {"field": "page.page_size"}


async def test_stream_objects_are_linked_by_a_composite(rpcs: Rpcs) -> None:
    (stream_id,), first = await rpcs.begin(streams=1, objects=3)
    upload = objects_pb2.CommitStreamSetObjectRequest(
        node=NODE,
        on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
        stream_objects=objects_pb2.StreamObjectColumns(
            object_id=[first], object_size=[7], stream_id=[stream_id],
            start_offset=[0], end_offset=[10],
        ),
    )  # fmt: skip
    await committed(rpcs, upload)
    compaction = objects_pb2.CommitStreamObjectRequest(
        node=NODE,
        object_id=first + 1,
        object_size=7,
        stream_id=stream_id,
        stream_epoch=1,
        start_offset=0,
        end_offset=10,
        attributes=1,
        source_object_ids=[first],
        operations=[objects_pb2.SOURCE_OPERATION_KEEP_DATA],
    )
    for _ in range(2):
        assert (await rpcs.ask(compaction)).error == ERROR_CODE_NONE
    described = await rpcs.ask(objects_pb2.DescribeObjectsRequest(object_ids=[first]))
    assert described.objects[0].composite_id == first + 1
    assert described.objects[0].state == common_pb2.OBJECT_STATE_LINKED
    compaction.object_id = first + 2
    assert (await rpcs.ask(compaction)).error == ERROR_CODE_COMPACTED_OBJECTS_NOT_FOUND
    compaction.operations[0] = 9  # type: ignore[call-overload]
    refused = await rpcs.refusal(f"{OBJECTS}/CommitStreamObject", compaction)
    assert refused == ("INVALID_ARGUMENT", "INVALID_FIELD", {"field": "operations[0]"})


async def test_what_is_known_of_objects_content_comes_back(rpcs: Rpcs) -> None:
    streams, first = await rpcs.begin(streams=2, objects=5)
    upload = commit(first, (streams[0], 0, 10))
    upload.min_timestamp_ms, upload.max_timestamp_ms, upload.crc32c = 0, 70, 0
    upload.stream_objects.CopyFrom(
        objects_pb2.StreamObjectColumns(
            object_id=[first + 1], object_size=[7], stream_id=[streams[1]],
            start_offset=[0], end_offset=[10], crc32c=[(1 << 32) - 1],
        )
    )  # fmt: skip
    await committed(rpcs, upload)
    checked = commit(first + 2, (streams[0], 10, 20))
    checked.crc32c = 9
    await committed(rpcs, checked)
    await committed(rpcs, commit(first + 3, (streams[0], 20, 30)))
    compaction = objects_pb2.CommitStreamObjectRequest(
        node=NODE,
        object_id=first + 4,
        object_size=7,
        stream_id=streams[1],
        stream_epoch=1,
        start_offset=0,
        end_offset=10,
        source_object_ids=[first + 1],
        operations=[objects_pb2.SOURCE_OPERATION_DELETE],
        min_timestamp_ms=5,
        max_timestamp_ms=6,
        crc32c=1 << 31,
    )
    assert (await rpcs.ask(compaction)).error == ERROR_CODE_NONE
    described = await rpcs.ask(objects_pb2.DescribeObjectsRequest())
    crc = (1 << 32) - 1
    assert [*map(known, described.objects)] == [
        *((0, 70, 0), (None, None, crc)),
        *((None, None, 9), (None, None, None), (5, 6, 1 << 31)),
    ]
    found = await slices(rpcs, *((stream_id, 0) for stream_id in streams))
    assert [[*map(known, page.objects)] for page in found] == [
        *([(0, 70, 0), (None, None, 9), (None, None, None)], [(5, 6, 1 << 31)]),
    ]
    upload.object_id, upload.max_timestamp_ms = first + 9, -2
    refused = await rpcs.refusal(f"{OBJECTS}/CommitStreamSetObject", upload)
    assert refused[2] == {"field": "max_timestamp_ms"}


def known(
    message: objects_pb2.ObjectSlice | objects_pb2.ObjectDescription,
) -> tuple[int | None, int | None, int | None]:
    """Time bounds and checksum, None where the field is absent."""
    return (
        message.min_timestamp_ms if message.HasField("min_timestamp_ms") else None,
        message.max_timestamp_ms if message.HasField("max_timestamp_ms") else None,
        message.crc32c if message.HasField("crc32c") else None,
    )


async def test_verdicts_of_a_refused_commit(rpcs: Rpcs) -> None:
    streams, first = await rpcs.begin(streams=2, objects=1)
    request = commit(first, (streams[0], 0, 10), (streams[1], 3, 5))
    answer = await rpcs.ask(request)
    assert answer.error == ERROR_CODE_OFFSET_NOT_MATCHED
    assert list(answer.range_errors) == [ERROR_CODE_NONE, ERROR_CODE_OFFSET_NOT_MATCHED]


async def test_bytes_that_are_no_message_are_the_callers_mistake(rpcs: Rpcs) -> None:
    for method in (f"{OBJECTS}/CommitStreamSetObject", f"{NODES}/Heartbeat", "KVService/PutKVs"):
        refused = await rpcs.refusal(method, b"\xff\xff\xff")
        assert refused == ("INVALID_ARGUMENT", "INVALID_FIELD", {"field": "message"})
    assert rpcs.controller.is_active


async def test_a_call_that_meets_its_deadline_says_what_to_do(
    rpcs: Rpcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(error_mapping, "_ANSWER_BEFORE_S", 59.5)  # the answer may be held up
    monkeypatch.setattr(error_mapping, "_SHARE_OF_DEADLINE", 0)
    await rpcs.register()
    rpcs.log.commit = lambda: None  # type: ignore[method-assign]
    request = nodes_pb2.LockNodeRequest(node_id=NODE.node_id)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rpcs.ask(request, timeout=60)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    details = raised.value.details() or ""
    assert "may still take effect" in details
    assert "repeat it with the same" in details
    failure = read_failure(raised.value)
    assert failure.reason == "DEADLINE"


class LateContext:
    """A call whose deadline has passed before it is looked at."""

    auth_context = staticmethod(lambda: {"transport_security_type": [b"insecure"]})

    def time_remaining(self) -> float:
        return -0.001

    async def abort(self, code: grpc.StatusCode, _: str, __: object) -> None:
        raise AbortedError(code)


class AbortedError(Exception):
    """How the call ended."""


async def test_a_passed_deadline_decides_nothing(rpcs: Rpcs) -> None:
    await rpcs.register()
    before = rpcs.log.next_offset
    view = LeaderView(rpcs.sessions.state, lambda _: -1)
    method, context = "streammeta.v1.NodeService.LockNode", cast(Any, LateContext())
    route = routes("here", view)[method]
    with pytest.raises(AbortedError, match="DEADLINE_EXCEEDED"):
        await CallPipeline(Authenticator("here")).wrap(method, routed(route, rpcs.controller))(
            nodes_pb2.LockNodeRequest(node_id=1000), context
        )
    assert rpcs.log.next_offset == before


async def test_few_copies_of_the_map_are_made_at_a_time(rpcs: Rpcs) -> None:
    gate, kind = rpcs.controller.gate, RequestClass.SNAPSHOT
    get: Any = rpcs.channel.unary_stream("/streammeta.v1.MetadataService/GetSnapshot")
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(LIMITS[kind].running):
            await stack.enter_async_context(gate.admitted(kind))
        read = asyncio.ensure_future(get(b"").read())
        await until(lambda: gate.admission.waiting(kind) == 1, "a call that waits")
        assert not read.done()
    assert metadata_pb2.GetSnapshotResponse.FromString(await read).total_bytes > 0


async def test_a_snapshot_that_is_refused_holds_nothing(rpcs: Rpcs) -> None:
    end_offset = rpcs.log.next_offset
    get: Any = rpcs.channel.unary_stream("/streammeta.v1.MetadataService/GetSnapshot")
    too_long = {"hold_ms": 604_800_001}
    for fields in ({"not_before_offset": end_offset + 1}, {"hold_ms": -1}, too_long):
        request = metadata_pb2.GetSnapshotRequest(**{"hold_ms": 1000, **fields})
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await get(request.SerializeToString()).read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert next(iter(fields)) in str(refused.value.details())
    assert rpcs.log.next_offset == end_offset


async def test_a_snapshot_holds_deletions_from_before_it(rpcs: Rpcs) -> None:
    await rpcs.register()
    stub: Any = MetadataServiceStub(rpcs.channel)
    request = metadata_pb2.GetSnapshotRequest(hold_ms=60_000, not_before_offset=1)
    (end_offset,) = {chunk.end_offset async for chunk in stub.GetSnapshot(request)}
    async for change in stub.Watch(metadata_pb2.WatchRequest()):
        records = records_pb2.RecordSet.FromString(change.records).records
        if any(record.HasField("deletions_held") for record in records):
            break
    assert change.offset < end_offset
    (hold,) = (record.deletions_held for record in records)
    assert hold.until_ms - hold.since_ms == 60_000

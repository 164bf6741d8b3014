"""No answer, event or status is larger than clients of gRPC accept by default.

Every method has a row here, and every field of an answer that repeats or holds text a bound; a new
method or field without one fails.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import fields
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from streammeta.controller.features import SUPPORTED
from streammeta.controller.grpc_server.limits import ANSWER_BYTES_MAX, REQUEST_BYTES_MAX
from streammeta.controller.lifecycle.failover import COMPACTIONS_LISTED_MAX
from streammeta.controller.metadata.api import answer_budget as budget
from streammeta.controller.metadata.api.answers import (
    CommitStreamSetObjectAnswer,
    KVResult,
    SharedRowResults,
)
from streammeta.controller.metadata.api.commit_validation import COMMIT_ROWS_MAX
from streammeta.controller.metadata.api.requests import SetFeatureLevel
from streammeta.controller.records.codec import encode_records
from streammeta.controller.records.record import KVsPut
from streammeta.controller.rpc.calls.caller_addresses import OBSERVERS_MAX
from streammeta.controller.rpc.services.contract import CHUNK_BYTES_MAX
from streammeta.rpc.contract import SERVICES
from streammeta.rpc.failures import RpcFailure, read_failure
from streammeta.rpc.method_facts import BATCH_MAX
from streammeta.v1 import common_pb2, kv_pb2, metadata_pb2, nodes_pb2, objects_pb2, streams_pb2
from tests.kit.grpc_servers import stock_channel
from tests.server.rpc_server import NODE, Rpcs, serving

_STOCK_BYTES = 4 << 20
"""What grpc-java, grpc-go and grpcio accept by default."""

_TEXT_BYTES = 512
_VOTERS = 100

_BOUNDS: Mapping[str, int] = {
    "CreateStreamsResponse.stream_ids": BATCH_MAX,
    "OpenStreamsResponse.streams": BATCH_MAX,
    "CloseStreamsResponse.errors": BATCH_MAX,
    "TrimStreamsResponse.errors": BATCH_MAX,
    "TrimStreamsResponse.start_offsets": BATCH_MAX,
    "DeleteStreamsResponse.errors": BATCH_MAX,
    "CheckObjectsResponse.states": BATCH_MAX,
    "CommitStreamSetObjectResponse.range_errors": COMMIT_ROWS_MAX // 2,
    "CommitStreamSetObjectResponse.stream_object_errors": COMMIT_ROWS_MAX // 2,
    "CommitStreamSetObjectResponse.trim_errors": BATCH_MAX,
    "CommitStreamSetObjectResponse.trim_start_offsets": BATCH_MAX,
    "SharedRowResults.errors": COMMIT_ROWS_MAX,
    "SharedRowResults.start_offset": COMMIT_ROWS_MAX,
    "CommitStreamObjectResponse.trim_errors": BATCH_MAX,
    "CommitStreamObjectResponse.trim_start_offsets": BATCH_MAX,
    "CommitNamedObjectsResponse.errors": BATCH_MAX,
    "DeleteNamedObjectsResponse.errors": BATCH_MAX,
    "AdoptObjectsResponse.results": BATCH_MAX,
    "AdoptionResult.range_errors": COMMIT_ROWS_MAX // BATCH_MAX,
    "HeartbeatResponse.compactions": COMPACTIONS_LISTED_MAX,
    "DescribeClusterResponse.controllers": _VOTERS + OBSERVERS_MAX,
    "DescribeQuorumResponse.voters": _VOTERS,
    "DescribeQuorumResponse.observers": OBSERVERS_MAX,
    "GetSnapshotResponse.data": CHUNK_BYTES_MAX,
    "StateHashResponse.hash": 32,
    "StateHashResponse.log_hash": 16,
    "GetOpeningStreamsResponse.streams": 2 * 10_000,
}
"""Items of a list and bytes of a field by message and name; a text has `_TEXT_BYTES` at most."""

_BUDGETED = {
    "KVService.GetKVs": "results",
    "KVService.PutKVs": "results",
    "KVService.DeleteKVs": "results",
    "KVService.ListKVs": "entries namespace_names",
    "NodeService.GetNodes": "nodes",
    "NodeService.ListStreamSetObjects": "objects",
    "NodeService.Heartbeat": "recoveries",
    "StreamService.DescribeStreams": "streams",
    "StreamService.FindStreams": "streams",
    "StreamService.AbandonUploads": "abandoned",
    "ObjectService.GetObjects": "results",
    "ObjectService.DescribeObjects": "objects",
    "ObjectService.DescribeNamedObjects": "objects",
    "ObjectService.ListStreamObjects": "objects",
    # Values are returned if the commit is rejected, starts if it is made.
    "ObjectService.CommitStreamSetObject": "kv_results trim_start_offsets",
    "ObjectService.CommitStreamObject": "kv_results",
    "ObjectService.CommitPipeline": "commits uploads",
    "MetadataService.Watch": "records changes",
}
"""Fields that together hold at most the budget of an answer, by method."""

METHODS = [method for service in SERVICES.values() for method in service.methods]


def largest(kind: Descriptor, left_out: str = "") -> Any:
    """Return a message whose fields are as large as they may be, but for those left out."""
    message: Any = GetMessageClass(kind)()
    for field in kind.fields:
        if field.name not in left_out.split():
            fill(message, field)
    return message


def fill(message: Any, field: FieldDescriptor) -> None:
    bound = f"{message.DESCRIPTOR.name}.{field.name}"
    if field.is_repeated:
        value = largest_value(field, bound)
        getattr(message, field.name).extend([value] * _BOUNDS[bound])
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(largest(field.message_type))
    else:
        setattr(message, field.name, largest_value(field, bound))


def largest_value(field: FieldDescriptor, bound: str) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_MESSAGE:
            assert field.message_type is not None
            return largest(field.message_type)
        case FieldDescriptor.TYPE_STRING:
            return "x" * _TEXT_BYTES
        case FieldDescriptor.TYPE_BYTES:
            return bytes(_BOUNDS[bound])
        case FieldDescriptor.TYPE_BOOL:
            return True
        case FieldDescriptor.TYPE_ENUM:
            assert field.enum_type is not None
            return max(value.number for value in field.enum_type.values)
        case FieldDescriptor.TYPE_INT32:
            return -1 if bound.endswith(("attributes",)) else (1 << 31) - 1
        case FieldDescriptor.TYPE_UINT32:
            return (1 << 32) - 1
        case _:
            return (1 << 63) - 1


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.full_name)
def test_the_largest_answer_of_every_method_is_accepted_by_stock_clients(method: Any) -> None:
    name = f"{method.containing_service.name}.{method.name}"
    budgeted = _BUDGETED.get(name, "")
    assert set(budgeted.split()) <= {field.name for field in method.output_type.fields}
    size = largest(method.output_type, budgeted).ByteSize()
    assert size + (budget.ANSWER_BYTES if budgeted else 0) < _STOCK_BYTES


def test_the_bounds_of_server_item_and_entry_are_those_of_stock_clients() -> None:
    assert ANSWER_BYTES_MAX == _STOCK_BYTES
    assert max(budget.ITEM_BYTES_MAX, budget.ENTRY_BYTES_MAX) <= budget.ANSWER_BYTES


_ITEM_FIELDS: Mapping[str, tuple[Any, int]] = {
    "a slice": (objects_pb2.ObjectSlice, budget._SLICE_BYTES),
    "a range": (streams_pb2.StreamRange, budget.RANGE_BYTES),
    "a listed stream object": (objects_pb2.StreamObject, budget.STREAM_SET_OBJECT_BYTES),
    "a stream object": (streams_pb2.StreamObjectRange, budget.RANGE_BYTES),
    "an upload that is owed": (streams_pb2.PendingUpload, budget.RANGE_BYTES),
    "offsets that are lost": (streams_pb2.OffsetRange, budget.RANGE_BYTES),
    "an opened stream": (streams_pb2.OpeningStream, 2 * budget.RANGE_BYTES),
}


@pytest.mark.parametrize("item", _ITEM_FIELDS)
def test_an_item_is_no_larger_than_it_counts(item: str) -> None:
    message, counted = _ITEM_FIELDS[item]
    assert largest(message.DESCRIPTOR).ByteSize() + 2 <= counted


def test_the_answer_to_a_commit_is_no_larger_than_it_counts() -> None:
    value = KVResult(error=common_pb2.ERROR_CODE_KEY_EXIST, value=bytes(1_000), version=1 << 62)  # type: ignore[arg-type]
    answer = CommitStreamSetObjectAnswer(
        error=common_pb2.ERROR_CODE_KEY_EXIST,  # type: ignore[arg-type]
        range_errors=np.full(300, 599),
        stream_object_errors=np.full(300, 599),
        kv_results=(value,) * 10,
        trim_errors=(common_pb2.ERROR_CODE_STREAM_NOT_OPENED,) * 10,  # type: ignore[arg-type]
        trim_start_offsets=((1 << 62),) * 10,
        shared=SharedRowResults(
            errors=np.full(300, 706), start_offset=np.full(300, 1 << 62), committed_at_ms=1 << 62
        ),
    )
    message = objects_pb2.CommitStreamSetObjectResponse(
        error=common_pb2.ERROR_CODE_KEY_EXIST,
        range_errors=[common_pb2.ERROR_CODE_STREAM_INNER_ERROR] * 300,
        stream_object_errors=[common_pb2.ERROR_CODE_STREAM_INNER_ERROR] * 300,
        kv_results=[
            kv_pb2.KVResult(
                error=common_pb2.ERROR_CODE_KEY_EXIST,
                value=value.value,
                version=value.version,
                found=True,
            )
        ]
        * 10,
        trim_errors=[common_pb2.ERROR_CODE_STREAM_NOT_OPENED] * 10,
        trim_start_offsets=[1 << 62] * 10,
        shared_results=objects_pb2.SharedRowResults(
            errors=[common_pb2.ERROR_CODE_OFFSETS_UNKNOWN] * 300,
            start_offset=[1 << 62] * 300,
            committed_at_ms=1 << 62,
        ),
    )
    assert {field.name for field in fields(answer)} == {
        field.name.removesuffix("_results") if "shared" in field.name else field.name
        for field in message.DESCRIPTOR.fields
    }
    assert message.ByteSize() + 8 <= budget.commit_bytes(answer)


# -- as clients with default limits see it


@pytest_asyncio.fixture
async def rpcs() -> AsyncIterator[Rpcs]:
    """A leader, and a channel without any option."""
    async with serving() as leader, stock_channel(leader.endpoint) as channel:
        leader.channel = channel
        yield leader


def values(count: int, size: int = 900_000, prefix: str = "k") -> list[kv_pb2.KVToPut]:
    return [kv_pb2.KVToPut(key=f"{prefix}{index}", value=bytes(size)) for index in range(count)]


async def keys(rpcs: Rpcs) -> list[str]:
    answer = await rpcs.ask(kv_pb2.ListKVsRequest(keys_only=True))
    return [entry.key for entry in answer.entries]


async def failure_of(call: Any) -> RpcFailure:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return read_failure(raised.value)


def is_limit(failure: RpcFailure, field: str, limit: int) -> bool:
    said = (failure.code.name, failure.reason, dict(failure.metadata))
    over = {"field": field, "limit": str(limit)}
    return said == ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED", over)


async def test_values_that_no_answer_could_bring_back_are_not_put(rpcs: Rpcs) -> None:
    failure = await failure_of(rpcs.ask(kv_pb2.PutKVsRequest(items=values(6))))
    assert is_limit(failure, "items", budget.ANSWER_BYTES)
    assert await keys(rpcs) == []
    answer = await rpcs.ask(kv_pb2.PutKVsRequest(items=values(4)))
    assert [len(result.value) for result in answer.results] == [900_000] * 4


async def test_a_log_entry_that_no_watch_could_send_is_not_made(rpcs: Rpcs) -> None:
    items = [kv_pb2.KVToPut(key=f"{index:05d}".ljust(1_024, "k")) for index in range(5_000)]
    failure = await failure_of(rpcs.ask(kv_pb2.PutKVsRequest(items=items)))
    assert is_limit(failure, "request", budget.ENTRY_BYTES_MAX)
    (stream_id,), first = await rpcs.begin(streams=1, objects=1)
    await rpcs.controller.write(SetFeatureLevel(level=3))
    commit = commit_of(first, stream_id, 0, values(6))
    failure = await failure_of(rpcs.ask(commit))
    assert is_limit(failure, "request", budget.ENTRY_BYTES_MAX)
    assert await keys(rpcs) == []
    tags = [common_pb2.Tag(key=f"{index}", value="t" * 1_000) for index in range(16)]
    streams = [streams_pb2.NewStream(tags=tags)] * 400
    create = streams_pb2.CreateStreamsRequest(request_id="many", node=NODE, streams=streams)
    failure = await failure_of(rpcs.ask(create))
    assert is_limit(failure, "request", budget.ENTRY_BYTES_MAX)


def commit_of(
    object_id: int, stream_id: int, start: int, puts: list[kv_pb2.KVToPut]
) -> objects_pb2.CommitStreamSetObjectRequest:
    return objects_pb2.CommitStreamSetObjectRequest(
        node=NODE,
        object_id=object_id,
        order_id=object_id,
        object_size=100,
        ranges=objects_pb2.RangeColumns(
            stream_id=[stream_id], stream_epoch=[1], start_offset=[start], end_offset=[start + 10]
        ),
        on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
        kv_puts=puts,
    )


async def test_commits_of_a_message_share_the_size_of_its_answer(rpcs: Rpcs) -> None:
    (stream_id,), first = await rpcs.begin(streams=1, objects=3)
    await rpcs.controller.write(SetFeatureLevel(level=3))
    for prefix in "ab":
        await rpcs.ask(kv_pb2.PutKVsRequest(items=values(3, prefix=prefix)))
    taken = [values(3, 1, prefix) for prefix in "ab"]
    commits = [commit_of(first + at, stream_id, 0, puts) for at, puts in enumerate(taken)]
    message = objects_pb2.CommitPipelineRequest(sequence=7, commits=commits)
    sent: Any = iter([message.SerializeToString()])
    call: Any = rpcs.channel.stream_stream("/streammeta.v1.ObjectService/CommitPipeline")(sent)
    failure = await failure_of(call.read())
    assert failure.metadata["field"] == "commits"
    assert failure.metadata["sequence"] == "7"
    assert failure.reason == "LIMIT_EXCEEDED"


async def test_shared_rows_of_a_message_share_the_size_of_its_answer(rpcs: Rpcs) -> None:
    _, first = await rpcs.begin(streams=1, objects=21)
    await rpcs.controller.write(SetFeatureLevel(level=SUPPORTED.highest))
    shared = streams_pb2.CreateStreamsRequest(
        request_id="shared", node=NODE, streams=[streams_pb2.NewStream(shared=True)]
    )
    (stream_id,) = (await rpcs.ask(shared)).stream_ids
    rows = objects_pb2.SharedRowColumns(
        stream_id=[stream_id] * COMMIT_ROWS_MAX, record_count=[1] * COMMIT_ROWS_MAX
    )
    commits = [
        objects_pb2.CommitStreamSetObjectRequest(
            node=NODE,
            object_id=object_id,
            order_id=object_id,
            object_size=100,
            on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
            shared_rows=rows,
        )
        for object_id in range(first, first + 21)
    ]
    answer = await rpcs.ask(commits[0])
    assert list(answer.shared_results.start_offset) == list(range(COMMIT_ROWS_MAX))
    assert not answer.shared_results.errors, "no verdicts at all are NONE"
    message = objects_pb2.CommitPipelineRequest(sequence=7, commits=commits[1:])
    sent: Any = iter([message.SerializeToString()])
    call: Any = rpcs.channel.stream_stream("/streammeta.v1.ObjectService/CommitPipeline")(sent)
    failure = await failure_of(call.read())
    assert failure.metadata["field"] == "commits"
    assert failure.reason == "LIMIT_EXCEEDED"


async def test_a_watch_passes_a_change_that_no_message_holds(rpcs: Rpcs) -> None:
    """An entry of a version without the bound: a snapshot brings it, and the watch goes on."""
    many = tuple(f"k{index}" for index in range(6))
    record = KVsPut(namespaces=("",) * 6, keys=many, values=(bytes(900_000),) * 6)
    at = rpcs.log.next_offset
    rpcs.controller.cluster_metadata.apply(at, (record,))
    rpcs.log.append([encode_records((record,))], required_base_offset=at)
    await rpcs.ask(kv_pb2.PutKVsRequest(items=values(4, prefix="n")))

    async def watch(from_offset: int, *, combine: bool) -> list[metadata_pb2.WatchResponse]:
        call: Any = rpcs.channel.unary_stream(
            "/streammeta.v1.MetadataService/Watch",
            request_serializer=metadata_pb2.WatchRequest.SerializeToString,
            response_deserializer=metadata_pb2.WatchResponse.FromString,
        )(metadata_pb2.WatchRequest(from_offset=from_offset, may_combine=combine))
        found: list[metadata_pb2.WatchResponse] = []
        while not found or not (found[-1].snapshot_required or found[-1].records):
            found.append(await call.read())
        call.cancel()
        return found

    for combine in (True, False):
        (*_, last) = await watch(at, combine=combine)
        assert last.snapshot_required
        (*_, last) = await watch(at + 1, combine=combine)
        assert last.records


async def test_a_refusal_that_quotes_a_long_request_is_read_by_stock_clients(rpcs: Rpcs) -> None:
    long = "\N{PILE OF POO}" * 100_000
    request = nodes_pb2.RegisterNodeRequest(node=NODE, process_id=long)
    failure = await failure_of(rpcs.ask(request))
    assert (failure.code.name, failure.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert failure.message.endswith("bytes")
    key = ("streammeta-read-after", "9" * 6_000)
    failure = await failure_of(rpcs.ask(objects_pb2.DescribeObjectsRequest(), metadata=(key,)))
    assert (failure.code.name, failure.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")


async def test_a_request_that_is_too_large_is_refused_with_its_limit(rpcs: Rpcs) -> None:
    request = kv_pb2.PutKVsRequest(items=values(1, REQUEST_BYTES_MAX))
    failure = await failure_of(rpcs.ask(request))
    assert is_limit(failure, "message", REQUEST_BYTES_MAX)

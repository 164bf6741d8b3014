"""RPCs that the map answers: which request and answer of it stand behind each.

Decodes, submits and encodes; decides nothing. Answers of GetObjects, which have thousands of rows,
are written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.ids import NONE_ID
from streammeta.controller.lifecycle.sessions import NodeState
from streammeta.controller.metadata import answers, requests
from streammeta.controller.metadata.values import Int64Column, ObjectState, Tags, column
from streammeta.controller.rpc import wire_columns
from streammeta.controller.rpc.conversion import Conversion, Write, not_set
from streammeta.controller.rpc.request_guard import (
    Context,
    UnaryHandler,
    guarded,
    longest_wait_ms,
    quote_offset,
    read_after,
)
from streammeta.controller.runtime.admission import class_of
from streammeta.controller.runtime.commit_joining import CommitJoiner
from streammeta.controller.runtime.controller import MetadataController
from streammeta.controller.trust.auditor import note_rows
from streammeta.controller.trust.door import current_caller
from streammeta.controller.trust.method_rules import WAL_CONFIG_SHOWN_TO
from streammeta.controller.trust.namespaces import require_namespaces
from streammeta.rpc.contract import SERVICES
from streammeta.v1 import common_pb2, nodes_pb2, objects_pb2, streams_pb2

MAP_SERVICES = tuple(
    SERVICES[name] for name in ("StreamService", "ObjectService", "NodeService", "KVService")
)
"""The services of which the map answers most calls."""

ROUTES: Mapping[str, tuple[type, type]] = {
    "CreateStreams": (requests.CreateStreams, answers.CreateStreamsAnswer),
    "OpenStreams": (requests.OpenStreams, answers.OpenStreamsAnswer),
    "CloseStreams": (requests.CloseStreams, answers.StreamErrorsAnswer),
    "TrimStreams": (requests.TrimStreams, answers.StreamErrorsAnswer),
    "DeleteStreams": (requests.DeleteStreams, answers.StreamErrorsAnswer),
    "DescribeStreams": (requests.DescribeStreams, answers.DescribeStreamsAnswer),
    "GetOpeningStreams": (requests.GetOpeningStreams, answers.GetOpeningStreamsAnswer),
    "AbandonUploads": (requests.AbandonUploads, answers.AbandonUploadsAnswer),
    "PrepareObjects": (requests.PrepareObjects, answers.PrepareObjectsAnswer),
    "CommitStreamObject": (requests.CommitStreamObject, answers.ErrorAnswer),
    "GetObjects": (requests.GetObjects, answers.GetObjectsAnswer),
    "DescribeObjects": (requests.DescribeObjects, answers.DescribeObjectsAnswer),
    "CheckObjects": (requests.CheckObjects, answers.CheckObjectsAnswer),
    "RegisterNode": (requests.RegisterNode, answers.ErrorAnswer),
    "UnregisterNode": (requests.UnregisterNode, answers.ErrorAnswer),
    "GetNodes": (requests.GetNodes, answers.GetNodesAnswer),
    "ListStreamSetObjects": (requests.ListStreamSetObjects, answers.ListStreamSetObjectsAnswer),
    "GetNextNodeId": (requests.GetNextNodeId, answers.NodeIdAnswer),
    "LockNode": (requests.SetNodeLock, answers.ErrorAnswer),
    "UnlockNode": (requests.SetNodeLock, answers.ErrorAnswer),
    "PutKVs": (requests.PutKVs, answers.KVResultsAnswer),
    "GetKVs": (requests.GetKVs, answers.KVResultsAnswer),
    "DeleteKVs": (requests.DeleteKVs, answers.KVResultsAnswer),
    "ListKVs": (requests.ListKVs, answers.ListKVsAnswer),
}
"""Request and answer of the map by method; CommitStreamSetObject has its own way, in columns."""

_CONSTANTS: Mapping[str, Mapping[str, object]] = {
    "LockNode": {"locked": True},
    "UnlockNode": {"locked": False},
}
"""Fields of requests that the method stands for."""

_TIME_FIELDS = {
    ObjectState.PREPARED: "deadline_ms",
    ObjectState.COMMITTED: "committed_at_ms",
    ObjectState.LINKED: "committed_at_ms",
    ObjectState.MARK_DESTROYED: "marked_at_ms",
}
"""Field of a description that holds the one time the map keeps of an object in a state."""


@dataclass(frozen=True, slots=True)
class Route:
    """Translation of one unary RPC; `writes` is True for mutations, False for queries.

    Calls that arrive together are decided together if it `joins` them.
    """

    decode: Callable[[Any], Any]
    encode: Callable[[Any], Message]
    writes: bool
    joins: bool = False


@dataclass(frozen=True, slots=True)
class LeaderView:
    """The leader's knowledge of a node beside the map: its state, and its compacting node."""

    state_of: Callable[[int], NodeState]
    compacted_by: Callable[[int], int]


def routes(cluster_id: str, view: LeaderView) -> Mapping[str, Route]:
    """Return the routes by full name, e.g. `streammeta.v1.KVService.PutKVs`."""
    conversion = PLAIN.extended(
        writes={
            answers.NodeDescription: _node_writer(view),
            answers.ObjectDescription: _object_description,
        }
    )
    table = {
        "streammeta.v1.ObjectService.CommitStreamSetObject": Route(
            wire_columns.commit_stream_set_object_in,
            wire_columns.commit_stream_set_object_out,
            writes=True,
            joins=True,
        )
    }
    for method in (method for service in MAP_SERVICES for method in service.methods):
        if method.name in ROUTES:
            request, answer = ROUTES[method.name]
            constants = _CONSTANTS.get(method.name, {})
            given = {"cluster_id": cluster_id} if method.name == "CheckObjects" else {}
            # The map reads the ids of the requests alone that it remembers.
            unread = {"request_id"} - {part.name for part in fields(request)}
            message = GetMessageClass(method.input_type)
            decode = conversion.reader(request, message, *unread, **constants)
            encode = _BY_HAND.get(method.name) or conversion.writer(
                answer, GetMessageClass(method.output_type), *given
            )
            is_write = issubclass(request, requests.WriteRequest)
            table[method.full_name] = Route(decode, partial(encode, **given), is_write)
    return table


def routed(route: Route, controller: MetadataController) -> UnaryHandler:
    """Return the handler that submits a route's requests to the loop; reads may name an offset."""
    write = CommitJoiner(controller).write if route.joins else controller.write

    async def handle(request: Message, context: Context) -> Message:
        caller = current_caller()
        decoded = route.decode(request)
        require_namespaces(caller, decoded)
        if route.joins:
            note_rows(len(decoded.ranges.stream_id))
        kind = class_of(decoded, writes=route.writes)
        async with controller.gate.admitted(kind, context.time_remaining()):
            if route.writes:
                answered = await write(decoded, caller.held_to)
            else:
                answered = await controller.read(
                    decoded, at_least=read_after(context), timeout_ms=longest_wait_ms(context)
                )
            quote_offset(context, answered.offset)
            return route.encode(answered.answer)

    return guarded(handle)


# -- kinds with rules of their own


def _tags(messages: Iterable[common_pb2.Tag], path: str) -> Tags:
    tags = tuple((tag.key, tag.value) for tag in messages)
    if len(dict(tags)) != len(tags):
        keys = ", ".join(key for key, _ in tags)
        raise InvalidRequestError(path, f"a key appears twice among {keys}; wanted once each")
    return tags


def _object_query(query: objects_pb2.ObjectQuery, path: str) -> requests.ObjectQuery:
    if not query.HasField("stream_id"):
        raise not_set(f"{path}.stream_id")
    end_offset = query.end_offset if query.HasField("end_offset") else NONE_ID
    return requests.ObjectQuery(query.stream_id, query.start_offset, end_offset, query.limit)


def _check_operations(request: requests.CommitStreamObject) -> None:
    if len(request.source_object_ids) and not request.operations:
        raise InvalidRequestError(
            "operations", f"got none, must be one a source, {len(request.source_object_ids)}"
        )


def _get_objects_out(answer: answers.GetObjectsAnswer) -> objects_pb2.GetObjectsResponse:
    message = objects_pb2.GetObjectsResponse()
    for result in answer.results:
        _fill_list(message.results.add(), result)
    return message


def _fill_list(message: objects_pb2.ObjectList, result: answers.ObjectList) -> None:
    # Setting fields one by one takes a sixth of the time that naming them to `add` takes.
    message.error = cast(common_pb2.ErrorCode.ValueType, int(result.error))
    if result.stream_start_offset != NONE_ID:
        message.stream_start_offset = result.stream_start_offset
        message.stream_end_offset = result.stream_end_offset
    if result.lost_end_offset != NONE_ID:
        message.lost_end_offset = result.lost_end_offset
    add = message.objects.add
    for object_id, kind, start_offset, end_offset, size, attributes in result.objects.places():
        one = add()
        one.object_id = object_id
        one.kind = cast(common_pb2.ObjectKind.ValueType, kind)
        one.start_offset = start_offset
        one.end_offset = end_offset
        one.object_size = size
        one.attributes = attributes
    if result.objects.has_facts:
        _fill_facts(message, result.objects)


def _fill_facts(message: objects_pb2.ObjectList, slices: answers.ObjectSlices) -> None:
    for one, facts in zip(message.objects, slices.facts(), strict=True):
        min_timestamp_ms, max_timestamp_ms, crc32c = facts
        if max_timestamp_ms >= 0:
            one.min_timestamp_ms = min_timestamp_ms
            one.max_timestamp_ms = max_timestamp_ms
        if crc32c >= 0:
            one.crc32c = crc32c


def _object_description(one: answers.ObjectDescription) -> Message:
    return cast(Message, _write_object(one, **{_TIME_FIELDS[one.state]: one.timestamp_ms}))


def _node_writer(view: LeaderView) -> Write:
    def node(one: answers.NodeDescription) -> Message:
        state = NodeState.FENCED if one.failover else view.state_of(one.node_id)
        compactor = view.compacted_by(one.node_id)
        compacted_by = None if compactor == NONE_ID else compactor
        if one.wal_config and not current_caller().has_any(WAL_CONFIG_SHOWN_TO):
            one = replace(one, wal_config="")
        return cast(Message, _write_node(one, state=state, compacted_by=compacted_by))

    return node


PLAIN = Conversion(
    reads={
        Tags: _tags,
        Int64Column: lambda rows, _: column(rows),
        requests.ObjectQuery: _object_query,
    },
    writes={
        Tags: lambda tags: [common_pb2.Tag(key=key, value=value) for key, value in tags],
        tuple[int, int]: lambda ends: streams_pb2.OffsetRange(
            start_offset=ends[0], end_offset=ends[1]
        ),
        Int64Column: lambda rows: rows.tolist(),
    },
    checks={requests.CommitStreamObject: _check_operations},
)
"""Conversion of the map's requests and answers, but for what the leader adds to descriptions."""

_write_object = PLAIN.writer(
    answers.ObjectDescription, objects_pb2.ObjectDescription, *_TIME_FIELDS.values()
)
_write_node = PLAIN.writer(
    answers.NodeDescription, nodes_pb2.NodeDescription, "state", "compacted_by"
)

_BY_HAND: Mapping[str, Callable[..., Message]] = {"GetObjects": _get_objects_out}
"""Encoders that are not planned, by method."""

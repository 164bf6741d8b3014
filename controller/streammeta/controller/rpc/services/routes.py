"""RPCs answered by the metadata: the request and answer types of each.

Decodes, submits and encodes. Answers of GetObjects, with thousands of rows, are encoded by hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import Any, TypeAlias, cast

import numpy as np
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.ids import NONE_ID
from streammeta.controller.lifecycle.broker_sessions import Heard, NodeState
from streammeta.controller.metadata.api import answers, named_answers, object_listings, requests
from streammeta.controller.metadata.api.object_slices import ObjectQuery, ObjectQueryColumns
from streammeta.controller.metadata.tables.values import Int64Column, ObjectState, Tags, column
from streammeta.controller.rpc.calls import error_mapping
from streammeta.controller.rpc.codec import wire_columns
from streammeta.controller.rpc.codec.conversion import Conversion, Write, not_set
from streammeta.controller.runtime.load.admission import TurnBudget, class_of
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.controller.runtime.writer.unary_batching import CommitBatcher
from streammeta.controller.trust.audit.auditor import note_rows
from streammeta.controller.trust.authenticator import WAL_CONFIG_SHOWN_TO, current_caller
from streammeta.controller.trust.namespaces import require_fields
from streammeta.rpc.contract import SERVICES
from streammeta.rpc.methods import METHODS, PACKAGE, facts_of
from streammeta.v1 import common_pb2, nodes_pb2, objects_pb2, streams_pb2

MAP_SERVICES = tuple(
    SERVICES[name] for name in ("StreamService", "ObjectService", "NodeService", "KVService")
)
"""The services of which the map answers most calls."""

_COMMIT = "ObjectService.CommitStreamSetObject"

ROUTES: Mapping[str, tuple[type, type]] = {
    "CreateStreams": (requests.CreateStreams, answers.CreateStreamsAnswer),
    "OpenStreams": (requests.OpenStreams, answers.OpenStreamsAnswer),
    "CloseStreams": (requests.CloseStreams, answers.ErrorsAnswer),
    "TrimStreams": (requests.TrimStreams, answers.TrimStreamsAnswer),
    "DeleteStreams": (requests.DeleteStreams, answers.ErrorsAnswer),
    "DescribeStreams": (requests.DescribeStreams, answers.DescribeStreamsAnswer),
    "FindStreams": (requests.FindStreams, answers.FindStreamsAnswer),
    "GetOpeningStreams": (requests.GetOpeningStreams, answers.GetOpeningStreamsAnswer),
    "AbandonUploads": (requests.AbandonUploads, answers.AbandonUploadsAnswer),
    "IssueProducerIds": (requests.IssueProducerIds, answers.IssueProducerIdsAnswer),
    "PrepareObjects": (requests.PrepareObjects, answers.PrepareObjectsAnswer),
    "CommitStreamObject": (requests.CommitStreamObject, answers.CommitStreamObjectAnswer),
    "GetObjects": (requests.GetObjects, answers.GetObjectsAnswer),
    "DescribeObjects": (requests.DescribeObjects, answers.DescribeObjectsAnswer),
    "CommitNamedObjects": (requests.CommitNamedObjects, answers.ErrorsAnswer),
    "DeleteNamedObjects": (
        requests.DeleteNamedObjects,
        named_answers.DeleteNamedObjectsAnswer,
    ),
    "DescribeNamedObjects": (
        requests.DescribeNamedObjects,
        named_answers.DescribeNamedObjectsAnswer,
    ),
    "CheckObjects": (requests.CheckObjects, answers.CheckObjectsAnswer),
    "RegisterNode": (requests.RegisterNode, answers.ErrorAnswer),
    "UnregisterNode": (requests.UnregisterNode, answers.ErrorAnswer),
    "GetNodes": (requests.GetNodes, answers.GetNodesAnswer),
    "ListStreamSetObjects": (
        object_listings.ListStreamSetObjects,
        answers.ListStreamSetObjectsAnswer,
    ),
    "ListStreamObjects": (object_listings.ListStreamObjects, answers.ListStreamObjectsAnswer),
    "GetNextNodeId": (requests.GetNextNodeId, answers.NodeIdAnswer),
    "LockNode": (requests.SetNodeLock, answers.ErrorAnswer),
    "UnlockNode": (requests.SetNodeLock, answers.ErrorAnswer),
    "PutKVs": (requests.PutKVs, answers.KVResultsAnswer),
    "GetKVs": (requests.GetKVs, answers.KVResultsAnswer),
    "DeleteKVs": (requests.DeleteKVs, answers.KVResultsAnswer),
    "ListKVs": (requests.ListKVs, answers.ListKVsAnswer),
}
"""Request and answer types by method. CommitStreamSetObject is converted in columns instead."""

FEW_QUERIES = 8
"""Maximum number of queries that a GetObjects answers row by row. More are answered in columns."""

PIECE_SLICES = 1_000
"""Size of a piece of a large answer, in results and slices together."""

PIECE_ITEMS = 250
"""Size of a piece of an answer that is a list, in items."""

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


Encode: TypeAlias = Callable[..., Message | Iterator[Message]]
"""Function that encodes an answer. The concatenated pieces of a large answer are its encoding."""


@dataclass(frozen=True, slots=True)
class Route:
    """Translation of one unary RPC, named as in `ObjectService.GetObjects`.

    Calls that arrive together are decided together if it `joins` them.
    """

    method: str
    decode: Callable[[Any], Any]
    encode: Encode
    joins: bool = False


@dataclass(frozen=True, slots=True)
class LeaderView:
    """The leader's own knowledge of a node: state, last heartbeat, compacting node."""

    state_of: Callable[[int], NodeState]
    compacted_by: Callable[[int], int]
    heard: Callable[[int], Heard | None] = lambda _: None


def routes(cluster_id: str, view: LeaderView) -> Mapping[str, Route]:
    """Return the routes by full name, e.g. `streammeta.v1.KVService.PutKVs`."""
    conversion = PLAIN.extended(
        writes={
            answers.NodeDescription: _node_writer(view),
            answers.ObjectDescription: _object_description,
        }
    )
    table = {
        f"{PACKAGE}.{_COMMIT}": Route(
            _COMMIT,
            wire_columns.commit_stream_set_object_in,
            wire_columns.commit_stream_set_object_out,
            joins=True,
        )
    }
    for method in (method for service in MAP_SERVICES for method in service.methods):
        if method.name in ROUTES:
            request, answer = ROUTES[method.name]
            constants = _CONSTANTS.get(method.name, {})
            given = {"cluster_id": cluster_id} if method.name == "CheckObjects" else {}
            # The metadata reads only the ids of requests that it remembers. `deleting` is for
            # the audit log.
            unread = {"request_id", "deleting"} - {part.name for part in fields(request)}
            message = GetMessageClass(method.input_type)
            decode = conversion.reader(request, message, *unread, **constants)
            encode = _BY_HAND.get(method.name)
            if encode is None:
                encode = conversion.writer(answer, GetMessageClass(method.output_type), *given)
                items = METHODS[method.full_name].answer_list
                if items is not None and items.is_split:
                    encode = _in_pieces(encode, items.field)
            name = method.full_name.removeprefix(f"{PACKAGE}.")
            table[method.full_name] = Route(name, decode, partial(encode, **given))

    return table


def _in_pieces(encode: Encode, items: str) -> Encode:
    """Return an encoder of answers with a list in the field `items`, a long one in pieces."""

    def encode_list(answer: Any) -> Message | Iterator[Message]:
        listed = getattr(answer, items)
        if len(listed) <= PIECE_ITEMS:
            return encode(answer)
        parts = (listed[at : at + PIECE_ITEMS] for at in range(0, len(listed), PIECE_ITEMS))
        return (cast(Message, encode(replace(answer, **{items: part}))) for part in parts)

    return encode_list


def routed(route: Route, controller: MetadataController) -> error_mapping.UnaryHandler:
    """Return the handler that submits a route's requests. Reads may name a minimum offset."""
    write = CommitBatcher(controller).write if route.joins else controller.write

    turns = controller.answer_turns
    facts = facts_of(route.method)
    work = facts.work
    assert work is not None, f"{route.method} has no admission class: use a separate handler"

    async def handle(request: Message, context: error_mapping.Context) -> Message | bytes:
        caller = current_caller()
        decoded = route.decode(request)
        require_fields(caller, route.method, decoded)
        if route.joins:
            note_rows(len(decoded.ranges.stream_id) + len(decoded.shared_rows))

        kind = class_of(work, decoded)
        async with controller.gate.admitted(kind, context.time_remaining()):
            if not facts.is_read:
                began = time.perf_counter()
                answered = await write(decoded, caller.held_to)
                if route.joins:
                    answer = cast(answers.CommitStreamSetObjectAnswer, answered.answer)
                    took_s = time.perf_counter() - began
                    controller.commits.add(1, bool(answer.error), took_s)
            else:
                at_least = error_mapping.read_after(context)
                if at_least is None:
                    answered = await controller.read(decoded)
                else:
                    answered = await controller.read(
                        decoded, at_least, error_mapping.longest_wait_ms(context)
                    )
            error_mapping.quote_offset(context, answered.offset)
            encoded = route.encode(answered.answer)
            return encoded if isinstance(encoded, Message) else await _joined(encoded, turns)

    return error_mapping.guarded(handle)


async def _joined(pieces: Iterator[Message], turns: TurnBudget) -> bytes:
    """Encode an answer piece by piece, each in its own turn of the event loop."""
    encoded: list[bytes] = []
    await turns.take(1)
    for piece in pieces:
        encoded.append(piece.SerializeToString())
        await turns.take(1)
    return b"".join(encoded)


# -- kinds with rules of their own


def _tags(messages: Iterable[common_pb2.Tag], path: str) -> Tags:
    tags = tuple((tag.key, tag.value) for tag in messages)
    if len(dict(tags)) != len(tags):
        keys = ", ".join(key for key, _ in tags)
        raise InvalidRequestError(path, f"a key appears twice among {keys}; expected once each")
    return tags


def _object_query(query: objects_pb2.ObjectQuery, path: str) -> ObjectQuery:
    if not query.HasField("stream_id"):
        raise not_set(f"{path}.stream_id")
    end_offset = query.end_offset if query.HasField("end_offset") else NONE_ID
    return ObjectQuery(query.stream_id, query.start_offset, end_offset, query.limit)


def _object_queries(messages: Sequence[objects_pb2.ObjectQuery], path: str) -> requests.Queries:
    if len(messages) <= FEW_QUERIES:
        return tuple(
            _object_query(query, f"{path}[{index}]") for index, query in enumerate(messages)
        )

    queries = list(messages)
    for index, query in enumerate(queries):
        if not query.HasField("stream_id"):
            raise not_set(f"{path}[{index}].stream_id")

    ends = [query.end_offset if query.HasField("end_offset") else NONE_ID for query in queries]
    return ObjectQueryColumns(
        column([query.stream_id for query in queries]),
        column([query.start_offset for query in queries]),
        column(ends),
        column([query.limit for query in queries]),
    )


def _check_operations(request: requests.CommitStreamObject) -> None:
    if len(request.source_object_ids) and not request.operations:
        raise InvalidRequestError(
            "operations", f"got none, must be one a source, {len(request.source_object_ids)}"
        )


def _get_objects_out(
    answer: answers.GetObjectsAnswer,
) -> objects_pb2.GetObjectsResponse | Iterator[objects_pb2.GetObjectsResponse]:
    lists = answer.results
    if isinstance(lists, answers.ObjectLists):
        return _pieces(lists)
    message = objects_pb2.GetObjectsResponse()
    for result in lists:
        head = (
            result.error,
            result.stream_start_offset,
            result.stream_end_offset,
            result.lost_end_offset,
        )
        _fill_list(message.results.add(), head, result.objects.places(), result.objects.facts())
    return message


def _pieces(lists: answers.ObjectLists) -> Iterator[objects_pb2.GetObjectsResponse]:
    """Encode results in columns, about `PIECE_SLICES` of their slices at a time."""
    work = lists.bounds + np.arange(len(lists.bounds))
    first = 0
    while first < len(lists):
        end = max(first + 1, int(work[:-1].searchsorted(work[first] + PIECE_SLICES)))
        slices = lists.slices.part(int(lists.bounds[first]), int(lists.bounds[end]))
        places, facts = slices.places(), slices.facts()
        message = objects_pb2.GetObjectsResponse()
        for *head, count in lists.heads(first, end):
            _fill_list(message.results.add(), head, islice(places, count), islice(facts, count))
        yield message
        first = end


def _fill_list(
    message: objects_pb2.ObjectList,
    head: Sequence[int],
    places: Iterable[tuple[int, int, int, int, int, int]],
    facts: Iterable[tuple[int, int, int]],
) -> None:
    # Setting fields one by one takes a sixth of the time that naming them to `add` takes.
    error, stream_start_offset, stream_end_offset, lost_end_offset = head
    message.error = cast(common_pb2.ErrorCode.ValueType, int(error))
    if stream_start_offset != NONE_ID:
        message.stream_start_offset = stream_start_offset
        message.stream_end_offset = stream_end_offset

    if lost_end_offset != NONE_ID:
        message.lost_end_offset = lost_end_offset

    add: Callable[[], Any] = message.objects.add
    for object_id, kind, start_offset, end_offset, size, attributes in places:
        object_ = add()
        object_.object_id = object_id
        object_.kind = kind
        object_.start_offset = start_offset
        object_.end_offset = end_offset
        object_.object_size = size
        object_.attributes = attributes

    # Without facts of any object there are none to go through.
    for object_, (min_timestamp_ms, max_timestamp_ms, crc32c) in zip(message.objects, facts):  # noqa: B905
        if max_timestamp_ms >= 0:
            object_.min_timestamp_ms = min_timestamp_ms
            object_.max_timestamp_ms = max_timestamp_ms
        if crc32c >= 0:
            object_.crc32c = crc32c


def _object_description(object_: answers.ObjectDescription) -> Message:
    return cast(
        Message, _write_object(object_, **{_TIME_FIELDS[object_.state]: object_.timestamp_ms})
    )


def _node_writer(view: LeaderView) -> Write:
    def node(description: answers.NodeDescription) -> Message:
        state = NodeState.FENCED if description.failover else view.state_of(description.node_id)
        compactor = view.compacted_by(description.node_id)
        compacted_by = None if compactor == NONE_ID else compactor
        if description.wal_config and not current_caller().has_any(WAL_CONFIG_SHOWN_TO):
            description = replace(description, wal_config="")
        return cast(Message, _write_node(description, state=state, compacted_by=compacted_by))

    return node


PLAIN = Conversion(
    {
        Tags: _tags,
        Int64Column: lambda rows, _: column(rows),
        requests.Queries: _object_queries,
    },
    {
        Tags: lambda tags: [common_pb2.Tag(key=key, value=value) for key, value in tags],
        tuple[int, int]: lambda ends: streams_pb2.OffsetRange(
            start_offset=ends[0], end_offset=ends[1]
        ),
        Int64Column: lambda rows: rows.tolist(),
    },
    {requests.CommitStreamObject: _check_operations},
)
"""Conversion of requests and answers, without the leader's additions to descriptions."""

_write_object = PLAIN.writer(
    answers.ObjectDescription, objects_pb2.ObjectDescription, *_TIME_FIELDS.values()
)
_write_node = PLAIN.writer(
    answers.NodeDescription, nodes_pb2.NodeDescription, "state", "compacted_by"
)

_BY_HAND: Mapping[str, Encode] = {"GetObjects": _get_objects_out}
"""Encoders that are not planned, by method."""

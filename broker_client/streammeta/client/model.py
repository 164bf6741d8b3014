"""Answers of the controllers as frozen values of the client, without protobuf messages.

Owns the translation of answers that callers see. Hot paths (commits, lookups) translate their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from streammeta.v1 import admin_pb2, common_pb2, nodes_pb2, objects_pb2, streams_pb2

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """One process of a node: a restarted process has a larger `node_epoch`."""

    node_id: int
    node_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A fenced node whose data this process is to recover, with its write-ahead log's address."""

    node_id: int
    node_epoch: int
    wal_config: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatAnswer:
    """Answer to a heartbeat.

    `may_shutdown`: the node has no pending upload. A node that is silent for `session_timeout_s`
    seconds is fenced. `compactions` are departed nodes whose stream set objects this process is to
    compact.
    """

    may_shutdown: bool
    session_timeout_s: float
    recoveries: tuple[Recovery, ...]
    compactions: tuple[NodeIdentity, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDescription:
    """A cluster as the controller `answered_by` knows it. None and empty texts are unknown.

    `high_watermark` is the committed end of the log. `bucket_problem` is the reason why no object
    ids are issued, as far as that controller knows.
    """

    cluster_id: str
    cluster_uuid: str
    object_namespace: str
    leader_id: int | None
    leader_endpoint: str
    epoch: int
    high_watermark: int | None
    answered_by: int
    bucket_problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDescription:
    """A node and its newest process.

    `state` is by the leader's sessions: active, fenced, controlled_shutdown or unknown. With
    `failover` another node recovers its data, `recovered_by` names the one that is to do so, if
    any. A `locked` node alone may open the streams that it owned last, a `departed` one is
    unregistered, a `supervised` one is fenced by its silence.
    """

    node_id: int
    node_epoch: int
    state: str
    wal_config: str
    tags: Mapping[str, str]
    failover: bool
    recovered_by: int | None
    locked: bool
    departed: bool
    supervised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRange:
    """The offsets `[start_offset, end_offset)` that one node wrote in one epoch.

    `range_index` counts all ranges of the stream, including dropped ones.
    """

    range_index: int
    epoch: int
    start_offset: int
    end_offset: int
    node_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDescription:
    """A stream. Epoch and node are None if it was never opened.

    A shared stream has no node, and is never open.
    `ranges` are empty unless requested. `pending` are offset ranges that former owners still have
    to upload, `lost` the abandoned ones.
    """

    stream_id: int
    epoch: int | None
    node_id: int | None
    is_open: bool
    is_shared: bool
    start_offset: int
    end_offset: int
    tags: Mapping[str, str]
    ranges: tuple[StreamRange, ...]
    pending: tuple[tuple[int, int], ...]
    lost: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamObject:
    """A committed object with one stream, whose data in it is `[start_offset, end_offset)`.

    `kind` is stream or composite. Times are milliseconds since 1970. Unknown facts are None.
    """

    stream_id: int
    object_id: int
    kind: str
    start_offset: int
    end_offset: int
    object_size: int
    attributes: int
    committed_at_ms: int
    min_timestamp_ms: int | None
    max_timestamp_ms: int | None
    crc32c: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSetObject:
    """A committed object of a node with many streams. Times and facts are as in `StreamObject`.

    `order_id` is its position among the node's objects, `data_time_ms` the commit time of its
    oldest data. `ranges` are (stream id, start offset, end offset), empty unless requested.
    """

    object_id: int
    order_id: int
    object_size: int
    attributes: int
    committed_at_ms: int
    data_time_ms: int
    range_count: int
    ranges: tuple[tuple[int, int, int], ...]
    min_timestamp_ms: int | None
    max_timestamp_ms: int | None
    crc32c: int | None


def node_message(node: NodeIdentity) -> common_pb2.NodeIdentity:
    """Return the protobuf message of `node`."""
    return common_pb2.NodeIdentity(node_id=node.node_id, node_epoch=node.node_epoch)


def heartbeat_answer(answer: nodes_pb2.HeartbeatResponse) -> HeartbeatAnswer:
    """Translate an answer."""
    return _translate(
        HeartbeatAnswer,
        answer,
        session_timeout_s=answer.session_timeout_ms / 1000,
        recoveries=tuple(_translate(Recovery, recovery) for recovery in answer.recoveries),
        compactions=tuple(_translate(NodeIdentity, node) for node in answer.compactions),
    )


def cluster_description(answer: admin_pb2.DescribeClusterResponse) -> ClusterDescription:
    """Translate an answer."""
    return _translate(ClusterDescription, answer)


def node_description(node: nodes_pb2.NodeDescription) -> NodeDescription:
    """Translate a row of an answer."""
    return _translate(
        NodeDescription,
        node,
        state=nodes_pb2.NodeState.Name(node.state).removeprefix("NODE_STATE_").lower(),
        tags={tag.key: tag.value for tag in node.tags},
    )


def stream_description(stream: streams_pb2.StreamDescription) -> StreamDescription:
    """Translate a row of an answer."""
    return _translate(
        StreamDescription,
        stream,
        is_open=stream.state == common_pb2.STREAM_STATE_OPENED,
        is_shared=stream.state == common_pb2.STREAM_STATE_SHARED,
        tags={tag.key: tag.value for tag in stream.tags},
        ranges=tuple(_translate(StreamRange, range_) for range_ in stream.ranges),
        pending=tuple(
            (range_.start_offset, range_.end_offset) for range_ in stream.pending_uploads
        ),
        lost=tuple((range_.start_offset, range_.end_offset) for range_ in stream.lost),
    )


def stream_object(object_: objects_pb2.StreamObject) -> StreamObject:
    """Translate a row of an answer."""
    kind = common_pb2.ObjectKind.Name(object_.kind).removeprefix("OBJECT_KIND_").lower()
    return _translate(StreamObject, object_, kind=kind)


def stream_set_object(object_: nodes_pb2.StreamSetObject) -> StreamSetObject:
    """Translate a row of an answer."""
    held = object_.ranges
    ranges = zip(held.stream_id, held.start_offset, held.end_offset, strict=True)
    return _translate(StreamSetObject, object_, ranges=tuple(ranges))


def _translate(kind: type[ValueT], message: Message, /, **others: Any) -> ValueT:
    """Build a `kind` from the fields of `message` with the same names, None if absent."""
    # Fields are matched by name, so a new field needs no code here.
    names = kind.__dataclass_fields__.keys() - others.keys()  # type: ignore[attr-defined]
    values = {name: _value(message, name) for name in names}
    return kind(**values, **others)


def _value(message: Message, name: str) -> Any:
    field = message.DESCRIPTOR.fields_by_name[name]
    return None if field.has_presence and not message.HasField(name) else getattr(message, name)

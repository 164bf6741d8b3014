"""Answers of the controllers as the client's own frozen values, without messages of the wire.

Owns the translation of answers that callers see. Hot paths (commits, lookups) translate their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import Message

from streammeta.v1 import admin_pb2, common_pb2, nodes_pb2, streams_pb2


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

    `may_shutdown`: the node owes no upload. A node that is silent for `session_timeout_s` seconds
    is fenced. `compactions` are departed nodes whose set objects this process is to compact.
    """

    may_shutdown: bool
    session_timeout_s: float
    recoveries: tuple[Recovery, ...]
    compactions: tuple[NodeIdentity, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDescription:
    """A cluster as the controller `answered_by` knows it; -1 and empty texts are unknown.

    `high_watermark` is the committed end of the log. `bucket_problem` says why no object ids are
    issued, as far as that controller knows.
    """

    cluster_id: str
    cluster_uuid: str
    object_namespace: str
    leader_id: int
    leader_endpoint: str
    epoch: int
    high_watermark: int
    answered_by: int
    bucket_problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRange:
    """The offsets `[start_offset, end_offset)` that were written in one epoch, by one node."""

    epoch: int
    start_offset: int
    end_offset: int
    node_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDescription:
    """A stream; epoch and node are -1 if it was never opened.

    `ranges` are empty unless they were asked for. `pending` are offset ranges that former owners
    still owe an upload for, `lost` those that were given up.
    """

    stream_id: int
    epoch: int
    node_id: int
    is_open: bool
    start_offset: int
    end_offset: int
    tags: Mapping[str, str]
    ranges: tuple[StreamRange, ...]
    pending: tuple[tuple[int, int], ...]
    lost: tuple[tuple[int, int], ...]


def node_message(node: NodeIdentity) -> common_pb2.NodeIdentity:
    """Return the message that carries `node` in a request."""
    return common_pb2.NodeIdentity(node_id=node.node_id, node_epoch=node.node_epoch)


def heartbeat_answer(answer: nodes_pb2.HeartbeatResponse) -> HeartbeatAnswer:
    """Translate an answer."""
    return HeartbeatAnswer(
        may_shutdown=answer.may_shutdown,
        session_timeout_s=answer.session_timeout_ms / 1000,
        recoveries=tuple(
            Recovery(node_id=one.node_id, node_epoch=one.node_epoch, wal_config=one.wal_config)
            for one in answer.recoveries
        ),
        compactions=tuple(NodeIdentity(one.node_id, one.node_epoch) for one in answer.compactions),
    )


def cluster_description(answer: admin_pb2.DescribeClusterResponse) -> ClusterDescription:
    """Translate an answer."""
    return ClusterDescription(
        **{name: getattr(answer, name) for name in ClusterDescription.__dataclass_fields__}
        | {name: _optional(answer, name) for name in ("leader_id", "high_watermark")}
    )


def stream_description(one: streams_pb2.StreamDescription) -> StreamDescription:
    """Translate a row of an answer."""
    return StreamDescription(
        stream_id=one.stream_id,
        epoch=_optional(one, "epoch"),
        node_id=_optional(one, "node_id"),
        is_open=one.state == common_pb2.STREAM_STATE_OPENED,
        start_offset=one.start_offset,
        end_offset=one.end_offset,
        tags={tag.key: tag.value for tag in one.tags},
        ranges=tuple(
            StreamRange(
                epoch=each.epoch,
                start_offset=each.start_offset,
                end_offset=each.end_offset,
                node_id=each.node_id,
            )
            for each in one.ranges
        ),
        pending=tuple((each.start_offset, each.end_offset) for each in one.pending_uploads),
        lost=tuple((each.start_offset, each.end_offset) for each in one.lost),
    )


def _optional(message: Message, field: str) -> int:
    value: int = getattr(message, field)
    return value if message.HasField(field) else -1

"""Translates what the quorum's messages are made of to protobuf and back, and checks it.

A value that no correct peer sends is refused here, before the core sees it: a negative offset must
not become a size to allocate, nor damage between two controllers part of a log.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import google_crc32c

from streammeta.controller.config import ConfigError, check_reachable
from streammeta.controller.ids import ClusterId, DirectoryId, EndOffset, Epoch, NodeId
from streammeta.controller.quorum.messages import (
    Batch,
    BatchKind,
    EpochEnd,
    QuorumError,
    RequestHeader,
    ResponseHeader,
    SnapshotId,
)
from streammeta.controller.quorum.voters import ReplicaKey, Voter
from streammeta.v1 import quorum_pb2 as pb

DIRECTORY_ID_CHARS_MAX = 64
"""More than any UUID has; ids are compared, stored in every voter set and shown, never parsed."""

_NONE = -1
_BATCH_FIELDS = struct.Struct(">QQBI")


class BadMessageError(ValueError):
    """A message that no correct peer sends; the text says what is wrong."""


def not_negative(field: str, value: int) -> int:
    """Return `value`; raises BadMessageError if it is below 0."""
    if value < 0:
        raise BadMessageError(f"{field}: {value}; must not be negative")
    return value


def at_least_one(field: str, value: int) -> int:
    """Return `value`; raises BadMessageError if it is below 1."""
    if value < 1:
        raise BadMessageError(f"{field}: {value}; must be at least 1")
    return value


def epoch_of(field: str, value: int) -> Epoch:
    """Return an epoch; raises BadMessageError if it is below 0."""
    return Epoch(not_negative(field, value))


def offset_of(field: str, value: int) -> EndOffset:
    """Return an offset of the log; raises BadMessageError if it is below 0."""
    return EndOffset(not_negative(field, value))


# -- replicas


def key_to_pb(key: ReplicaKey) -> pb.ReplicaKey:
    """Translate a replica's key."""
    return pb.ReplicaKey(node_id=key.node_id, directory_id=key.directory_id or "")


def key_from_pb(field: str, key: pb.ReplicaKey) -> ReplicaKey:
    """Translate a replica's key; raises BadMessageError, like all that follow."""
    node_id = NodeId(not_negative(f"{field}.node_id", key.node_id))
    if len(key.directory_id) > DIRECTORY_ID_CHARS_MAX:
        raise BadMessageError(
            f"{field}.directory_id: {len(key.directory_id)} characters; "
            f"at most {DIRECTORY_ID_CHARS_MAX}"
        )
    return ReplicaKey(node_id, DirectoryId(key.directory_id) if key.directory_id else None)


def voter_to_pb(voter: Voter) -> pb.Voter:
    """Translate a voter."""
    return pb.Voter(key=key_to_pb(voter.key), endpoint=voter.endpoint)


def voter_from_pb(field: str, voter: pb.Voter) -> Voter:
    """Translate a voter; its endpoint must be `host:port`, for others will connect to it."""
    try:
        check_reachable(f"{field}.endpoint", voter.endpoint)
    except ConfigError as error:
        raise BadMessageError(str(error)) from None
    return Voter(key_from_pb(f"{field}.key", voter.key), voter.endpoint)


# -- headers


def request_header_to_pb(header: RequestHeader) -> pb.QuorumRequestHeader:
    """Translate a request's header."""
    return pb.QuorumRequestHeader(
        cluster_id=header.cluster_id,
        sender=key_to_pb(header.sender),
        receiver=key_to_pb(header.receiver),
        epoch=header.epoch,
        incarnation=header.incarnation,
        request_id=header.request_id,
        is_founder=header.is_founder,
    )


def request_header_from_pb(header: pb.QuorumRequestHeader) -> RequestHeader:
    """Translate a request's header."""
    return RequestHeader(
        cluster_id=ClusterId(header.cluster_id),
        sender=key_from_pb("header.sender", header.sender),
        receiver=key_from_pb("header.receiver", header.receiver),
        epoch=epoch_of("header.epoch", header.epoch),
        incarnation=header.incarnation,
        request_id=header.request_id,
        is_founder=header.is_founder,
    )


def response_header_to_pb(header: ResponseHeader, endpoint: str) -> pb.QuorumResponseHeader:
    """Translate an answer's header; `endpoint` is that of the leader it names, or empty."""
    return pb.QuorumResponseHeader(
        sender=header.sender,
        receiver=header.receiver,
        epoch=header.epoch,
        leader_id=_NONE if header.leader_id is None else header.leader_id,
        leader_endpoint=endpoint if header.leader_id is not None else "",
        error=pb.QuorumError.ValueType(header.error),
        incarnation=header.incarnation,
        request_id=header.request_id,
    )


def response_header_from_pb(header: pb.QuorumResponseHeader) -> ResponseHeader:
    """Translate an answer's header."""
    try:
        error = QuorumError(header.error)
    except ValueError:
        raise BadMessageError(f"header.error: {header.error} is unknown here") from None
    leader_id = None
    if header.leader_id != _NONE:
        leader_id = NodeId(not_negative("header.leader_id", header.leader_id))
    return ResponseHeader(
        sender=NodeId(not_negative("header.sender", header.sender)),
        receiver=NodeId(not_negative("header.receiver", header.receiver)),
        epoch=epoch_of("header.epoch", header.epoch),
        leader_id=leader_id,
        error=error,
        incarnation=header.incarnation,
        request_id=header.request_id,
    )


# -- the log


def batch_checksum(batch: Batch) -> int:
    """Return the checksum that `LogBatch` documents."""
    count = len(batch.payloads)
    fields = _BATCH_FIELDS.pack(batch.base_offset, batch.epoch, batch.kind, count)
    lengths = struct.pack(f">{count}I", *map(len, batch.payloads))
    return int(google_crc32c.value(b"".join((fields, lengths, *batch.payloads))))


def batch_to_pb(batch: Batch) -> pb.LogBatch:
    """Translate a batch, with its checksum."""
    return pb.LogBatch(
        base_offset=batch.base_offset,
        epoch=batch.epoch,
        kind=pb.BatchKind.ValueType(batch.kind),
        payloads=batch.payloads,
        checksum=batch_checksum(batch),
    )


def batches_from_pb(messages: Iterable[pb.LogBatch]) -> tuple[Batch, ...]:
    """Translate batches, each whole and unharmed, each beginning where the one before it ends."""
    batches: list[Batch] = []
    for message in messages:
        batch = _batch_from_pb(message)
        if batches and not _continues(batch, batches[-1]):
            raise BadMessageError(
                f"batch at {batch.base_offset} of epoch {batch.epoch} does not continue the one "
                f"before it, which ends at {batches[-1].end_offset} in epoch {batches[-1].epoch}"
            )
        batches.append(batch)
    return tuple(batches)


def _batch_from_pb(message: pb.LogBatch) -> Batch:
    try:
        batch = Batch(
            EndOffset(message.base_offset),
            Epoch(message.epoch),
            BatchKind(message.kind),
            tuple(message.payloads),
        )
        checksum = batch_checksum(batch)
    except (ValueError, struct.error) as error:
        raise BadMessageError(f"batch at {message.base_offset}: {error}") from None
    if checksum != message.checksum:
        raise BadMessageError(f"batch at {message.base_offset}: its checksum does not match")
    if not batch.payloads:
        raise BadMessageError(f"batch at {message.base_offset}: it is empty")
    return batch


def _continues(batch: Batch, before: Batch) -> bool:
    return batch.base_offset == before.end_offset and batch.epoch >= before.epoch


def epoch_end_to_pb(end: EpochEnd | None) -> pb.EpochEnd | None:
    """Translate where an epoch ends; None for none."""
    return None if end is None else pb.EpochEnd(epoch=end.epoch, end_offset=end.end_offset)


def epoch_end_from_pb(field: str, end: pb.EpochEnd) -> EpochEnd:
    """Translate where an epoch ends."""
    return EpochEnd(
        epoch_of(f"{field}.epoch", end.epoch), offset_of(f"{field}.end_offset", end.end_offset)
    )


def snapshot_id_to_pb(snapshot_id: SnapshotId | None) -> pb.SnapshotId | None:
    """Translate a snapshot's name; None for none."""
    if snapshot_id is None:
        return None
    return pb.SnapshotId(end_offset=snapshot_id.end_offset, epoch=snapshot_id.epoch)


def snapshot_id_from_pb(snapshot_id: pb.SnapshotId) -> SnapshotId:
    """Translate a snapshot's name."""
    return SnapshotId(
        offset_of("snapshot_id.end_offset", snapshot_id.end_offset),
        epoch_of("snapshot_id.epoch", snapshot_id.epoch),
    )

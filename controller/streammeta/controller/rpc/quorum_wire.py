"""Translation of the quorum's messages to protobuf and back, with checks.

`EXCHANGES` gives, for every kind of request, the method that carries it and the translation of it
and of its answer. A value that no correct peer sends is refused here with BadMessageError, before
the core sees it: a negative offset must not become a size to allocate, nor damage between two
controllers part of a log.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import google_crc32c
from google.protobuf.message import Message

from streammeta.controller.config import ConfigError, check_reachable
from streammeta.controller.ids import ClusterId, DirectoryId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.quorum.messages import (
    Batch,
    BatchKind,
    BeginQuorumEpochRequest,
    BeginQuorumEpochResponse,
    EndQuorumEpochRequest,
    EndQuorumEpochResponse,
    EpochEnd,
    FetchRequest,
    FetchResponse,
    FetchSnapshotRequest,
    FetchSnapshotResponse,
    QuorumError,
    Request,
    RequestHeader,
    ResponseHeader,
    UpdateVoterRequest,
    UpdateVoterResponse,
    VoteRequest,
    VoteResponse,
)
from streammeta.controller.quorum.voters import ReplicaKey, Voter
from streammeta.v1 import quorum_pb2 as pb

DIRECTORY_ID_CHARS_MAX = 64
"""More than any UUID has; ids are compared, stored in every voter set and shown, never parsed."""

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
    if not key.HasField("node_id"):
        raise BadMessageError(f"{field}.node_id: not set; it is a node id, 0 or more")
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
        leader_id=header.leader_id,
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
    if header.HasField("leader_id"):
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


DIGEST_BYTES = 32
"""Length of a SHA-256."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """How one kind of request and its answer travel.

    `response_to_pb` takes the answer and the endpoint of the leader that its header names.
    """

    method: str
    request_to_pb: Callable[[Any], Message]
    request_from_pb: Callable[[Any], Any]
    response_to_pb: Callable[[Any, str], Message]
    response_from_pb: Callable[[Any], Any]


def _bare_response_to_pb(message: Callable[..., Message]) -> Callable[[Any, str], Message]:
    """Return the translation of answers that consist of a header."""
    return lambda response, endpoint: message(
        header=response_header_to_pb(response.header, endpoint)
    )


def _bare_response_from_pb(response: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda message: response(header=response_header_from_pb(message.header))


# -- Vote


def _vote_request_to_pb(request: VoteRequest) -> pb.VoteRequest:
    return pb.VoteRequest(
        header=request_header_to_pb(request.header),
        pre_vote=request.pre_vote,
        last_epoch=request.last_epoch,
        end_offset=request.end_offset,
    )


def _vote_request_from_pb(message: pb.VoteRequest) -> VoteRequest:
    return VoteRequest(
        header=request_header_from_pb(message.header),
        pre_vote=message.pre_vote,
        last_epoch=epoch_of("last_epoch", message.last_epoch),
        end_offset=offset_of("end_offset", message.end_offset),
    )


def _vote_response_to_pb(response: VoteResponse, endpoint: str) -> pb.VoteResponse:
    return pb.VoteResponse(
        header=response_header_to_pb(response.header, endpoint),
        pre_vote=response.pre_vote,
        granted=response.granted,
    )


def _vote_response_from_pb(message: pb.VoteResponse) -> VoteResponse:
    return VoteResponse(
        header=response_header_from_pb(message.header),
        pre_vote=message.pre_vote,
        granted=message.granted,
    )


# -- BeginQuorumEpoch


def _begin_request_to_pb(request: BeginQuorumEpochRequest) -> pb.BeginQuorumEpochRequest:
    return pb.BeginQuorumEpochRequest(header=request_header_to_pb(request.header))


def _begin_request_from_pb(message: pb.BeginQuorumEpochRequest) -> BeginQuorumEpochRequest:
    return BeginQuorumEpochRequest(header=request_header_from_pb(message.header))


# -- EndQuorumEpoch


def _end_request_to_pb(request: EndQuorumEpochRequest) -> pb.EndQuorumEpochRequest:
    return pb.EndQuorumEpochRequest(
        header=request_header_to_pb(request.header),
        preferred_successors=map(key_to_pb, request.preferred_successors),
    )


def _end_request_from_pb(message: pb.EndQuorumEpochRequest) -> EndQuorumEpochRequest:
    return EndQuorumEpochRequest(
        header=request_header_from_pb(message.header),
        preferred_successors=tuple(
            key_from_pb("preferred_successors", key) for key in message.preferred_successors
        ),
    )


# -- Fetch


def _fetch_request_to_pb(request: FetchRequest) -> pb.FetchRequest:
    return pb.FetchRequest(
        header=request_header_to_pb(request.header),
        fetch_offset=request.fetch_offset,
        last_epoch=request.last_epoch,
        high_watermark=request.high_watermark,
        read_round=request.read_round,
        max_wait_ms=request.max_wait_ms,
        max_bytes=request.max_bytes,
        answered_request_id=request.answered_request_id,
        is_disk_full=request.is_disk_full,
    )


def _fetch_request_from_pb(message: pb.FetchRequest) -> FetchRequest:
    return FetchRequest(
        header=request_header_from_pb(message.header),
        fetch_offset=offset_of("fetch_offset", message.fetch_offset),
        last_epoch=epoch_of("last_epoch", message.last_epoch),
        high_watermark=offset_of("high_watermark", message.high_watermark),
        read_round=not_negative("read_round", message.read_round),
        max_wait_ms=not_negative("max_wait_ms", message.max_wait_ms),
        max_bytes=not_negative("max_bytes", message.max_bytes),
        answered_request_id=not_negative("answered_request_id", message.answered_request_id),
        is_disk_full=message.is_disk_full,
    )


def _fetch_response_to_pb(response: FetchResponse, endpoint: str) -> pb.FetchResponse:
    return pb.FetchResponse(
        header=response_header_to_pb(response.header, endpoint),
        high_watermark=response.high_watermark,
        log_start_offset=response.log_start_offset,
        read_round=response.read_round,
        diverging=epoch_end_to_pb(response.diverging),
        snapshot_id=snapshot_id_to_pb(response.snapshot_id),
        batches=map(batch_to_pb, response.batches),
    )


def _fetch_response_from_pb(message: pb.FetchResponse) -> FetchResponse:
    diverging, snapshot_id = None, None
    if message.HasField("diverging"):
        diverging = epoch_end_from_pb("diverging", message.diverging)
    if message.HasField("snapshot_id"):
        snapshot_id = snapshot_id_from_pb(message.snapshot_id)
    kinds = (diverging is not None) + (snapshot_id is not None) + bool(message.batches)
    if kinds > 1:
        raise BadMessageError("diverging, snapshot_id, batches: at most one of them may be given")
    return FetchResponse(
        header=response_header_from_pb(message.header),
        high_watermark=offset_of("high_watermark", message.high_watermark),
        log_start_offset=offset_of("log_start_offset", message.log_start_offset),
        read_round=not_negative("read_round", message.read_round),
        diverging=diverging,
        snapshot_id=snapshot_id,
        batches=batches_from_pb(message.batches),
    )


# -- FetchSnapshot


def _snapshot_request_to_pb(request: FetchSnapshotRequest) -> pb.FetchSnapshotRequest:
    return pb.FetchSnapshotRequest(
        header=request_header_to_pb(request.header),
        snapshot_id=snapshot_id_to_pb(request.snapshot_id),
        position=request.position,
        max_bytes=request.max_bytes,
        answered_request_id=request.answered_request_id,
    )


def _snapshot_request_from_pb(message: pb.FetchSnapshotRequest) -> FetchSnapshotRequest:
    return FetchSnapshotRequest(
        header=request_header_from_pb(message.header),
        snapshot_id=snapshot_id_from_pb(message.snapshot_id),
        position=not_negative("position", message.position),
        max_bytes=at_least_one("max_bytes", message.max_bytes),
        answered_request_id=not_negative("answered_request_id", message.answered_request_id),
    )


def _snapshot_response_to_pb(
    response: FetchSnapshotResponse, endpoint: str
) -> pb.FetchSnapshotResponse:
    return pb.FetchSnapshotResponse(
        header=response_header_to_pb(response.header, endpoint),
        snapshot_id=snapshot_id_to_pb(response.snapshot_id),
        total_bytes=response.total_bytes,
        position=response.position,
        data=response.data,
        file_digest=response.digest,
    )


def _snapshot_response_from_pb(message: pb.FetchSnapshotResponse) -> FetchSnapshotResponse:
    response = FetchSnapshotResponse(
        header=response_header_from_pb(message.header),
        snapshot_id=snapshot_id_from_pb(message.snapshot_id),
        total_bytes=not_negative("total_bytes", message.total_bytes),
        position=not_negative("position", message.position),
        data=message.data,
        digest=message.file_digest,
    )
    if response.header.error is QuorumError.NONE:
        _check_snapshot_bytes(response)
    return response


def _check_snapshot_bytes(response: FetchSnapshotResponse) -> None:
    end = response.position + len(response.data)
    if end > response.total_bytes:
        raise BadMessageError(
            f"data: ends at byte {end} of a snapshot of {response.total_bytes} bytes"
        )
    if len(response.digest) != DIGEST_BYTES:
        raise BadMessageError(
            f"file_digest: {len(response.digest)} bytes; a SHA-256 has {DIGEST_BYTES}"
        )


# -- UpdateVoter


def _update_request_to_pb(request: UpdateVoterRequest) -> pb.UpdateVoterRequest:
    return pb.UpdateVoterRequest(
        header=request_header_to_pb(request.header), voter=voter_to_pb(request.voter)
    )


def _update_request_from_pb(message: pb.UpdateVoterRequest) -> UpdateVoterRequest:
    request = UpdateVoterRequest(
        header=request_header_from_pb(message.header),
        voter=voter_from_pb("voter", message.voter),
    )
    if request.voter.key != request.header.sender:
        raise BadMessageError("voter.key: not the sender's; a voter speaks for itself alone")
    return request


EXCHANGES: Mapping[type[Request], Exchange] = {
    VoteRequest: Exchange(
        "Vote",
        _vote_request_to_pb,
        _vote_request_from_pb,
        _vote_response_to_pb,
        _vote_response_from_pb,
    ),
    BeginQuorumEpochRequest: Exchange(
        "BeginQuorumEpoch",
        _begin_request_to_pb,
        _begin_request_from_pb,
        _bare_response_to_pb(pb.BeginQuorumEpochResponse),
        _bare_response_from_pb(BeginQuorumEpochResponse),
    ),
    EndQuorumEpochRequest: Exchange(
        "EndQuorumEpoch",
        _end_request_to_pb,
        _end_request_from_pb,
        _bare_response_to_pb(pb.EndQuorumEpochResponse),
        _bare_response_from_pb(EndQuorumEpochResponse),
    ),
    FetchRequest: Exchange(
        "Fetch",
        _fetch_request_to_pb,
        _fetch_request_from_pb,
        _fetch_response_to_pb,
        _fetch_response_from_pb,
    ),
    FetchSnapshotRequest: Exchange(
        "FetchSnapshot",
        _snapshot_request_to_pb,
        _snapshot_request_from_pb,
        _snapshot_response_to_pb,
        _snapshot_response_from_pb,
    ),
    UpdateVoterRequest: Exchange(
        "UpdateVoter",
        _update_request_to_pb,
        _update_request_from_pb,
        _bare_response_to_pb(pb.UpdateVoterResponse),
        _bare_response_from_pb(UpdateVoterResponse),
    ),
}

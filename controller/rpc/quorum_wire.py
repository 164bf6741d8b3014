"""Translates the quorum's messages to protobuf and back; decides nothing.

A batch carries a checksum, verified on arrival: damage between two controllers must not become
part of a log.
"""

from __future__ import annotations

import struct

import google_crc32c

from controller.ids import ClusterId, DirectoryId, EndOffset, Epoch, NodeId
from controller.quorum.messages import (
    Batch,
    BatchKind,
    BeginQuorumEpochRequest,
    BeginQuorumEpochResponse,
    EndQuorumEpochRequest,
    EndQuorumEpochResponse,
    EpochEnd,
    FetchRequest,
    FetchResponse,
    QuorumError,
    RequestHeader,
    ResponseHeader,
    VoteRequest,
    VoteResponse,
)
from controller.quorum.voters import ReplicaKey
from proto import quorum_pb2 as pb

MAX_MESSAGE_BYTES = 64 << 20
"""Room for a fetch of 8 MiB, or one batch that is larger, with all framing."""

MESSAGE_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
"""gRPC options that servers and channels of the quorum need."""

_NONE = -1
_BATCH_FIELDS = struct.Struct(">QQBI")


class BadMessageError(ValueError):
    """A message that no correct peer sends; the text says what is wrong."""


def batch_checksum(batch: Batch) -> int:
    """Return the checksum that `LogBatch` documents."""
    count = len(batch.payloads)
    fields = _BATCH_FIELDS.pack(batch.base_offset, batch.epoch, batch.kind, count)
    lengths = struct.pack(f">{count}I", *map(len, batch.payloads))
    return int(google_crc32c.value(b"".join((fields, lengths, *batch.payloads))))


# -- parts


def _key_to_pb(key: ReplicaKey) -> pb.ReplicaKey:
    return pb.ReplicaKey(node_id=key.node_id, directory_id=key.directory_id or "")


def _key_from_pb(key: pb.ReplicaKey) -> ReplicaKey:
    directory = DirectoryId(key.directory_id) if key.directory_id else None
    return ReplicaKey(NodeId(key.node_id), directory)


def _request_header_to_pb(header: RequestHeader) -> pb.QuorumRequestHeader:
    return pb.QuorumRequestHeader(
        cluster_id=header.cluster_id,
        sender=_key_to_pb(header.sender),
        receiver=_key_to_pb(header.receiver),
        epoch=header.epoch,
        incarnation=header.incarnation,
        request_id=header.request_id,
    )


def _request_header_from_pb(header: pb.QuorumRequestHeader) -> RequestHeader:
    if header.sender.node_id < 0 or header.epoch < 0:
        raise BadMessageError("header: node id and epoch must not be negative")
    return RequestHeader(
        cluster_id=ClusterId(header.cluster_id),
        sender=_key_from_pb(header.sender),
        receiver=_key_from_pb(header.receiver),
        epoch=Epoch(header.epoch),
        incarnation=header.incarnation,
        request_id=header.request_id,
    )


def _response_header_to_pb(header: ResponseHeader, endpoint: str) -> pb.QuorumResponseHeader:
    return pb.QuorumResponseHeader(
        sender=header.sender,
        receiver=header.receiver,
        epoch=header.epoch,
        leader_id=_NONE if header.leader_id is None else header.leader_id,
        leader_endpoint=endpoint,
        error=pb.QuorumError.ValueType(header.error),
        incarnation=header.incarnation,
        request_id=header.request_id,
    )


def _response_header_from_pb(header: pb.QuorumResponseHeader) -> ResponseHeader:
    try:
        error = QuorumError(header.error)
    except ValueError:
        raise BadMessageError(f"header: unknown error {header.error}") from None
    return ResponseHeader(
        sender=NodeId(header.sender),
        receiver=NodeId(header.receiver),
        epoch=Epoch(header.epoch),
        leader_id=None if header.leader_id == _NONE else NodeId(header.leader_id),
        error=error,
        incarnation=header.incarnation,
        request_id=header.request_id,
    )


def _batch_to_pb(batch: Batch) -> pb.LogBatch:
    return pb.LogBatch(
        base_offset=batch.base_offset,
        epoch=batch.epoch,
        kind=pb.BatchKind.ValueType(batch.kind),
        payloads=batch.payloads,
        checksum=batch_checksum(batch),
    )


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
    return batch


# -- requests


def vote_request_to_pb(request: VoteRequest) -> pb.VoteRequest:
    """Translate a request."""
    return pb.VoteRequest(
        header=_request_header_to_pb(request.header),
        pre_vote=request.pre_vote,
        last_epoch=request.last_epoch,
        end_offset=request.end_offset,
    )


def vote_request_from_pb(message: pb.VoteRequest) -> VoteRequest:
    """Translate a request; raises BadMessageError, like all that follow."""
    return VoteRequest(
        header=_request_header_from_pb(message.header),
        pre_vote=message.pre_vote,
        last_epoch=Epoch(message.last_epoch),
        end_offset=EndOffset(message.end_offset),
    )


def begin_request_to_pb(request: BeginQuorumEpochRequest) -> pb.BeginQuorumEpochRequest:
    """Translate a request."""
    return pb.BeginQuorumEpochRequest(header=_request_header_to_pb(request.header))


def begin_request_from_pb(message: pb.BeginQuorumEpochRequest) -> BeginQuorumEpochRequest:
    """Translate a request."""
    return BeginQuorumEpochRequest(header=_request_header_from_pb(message.header))


def end_request_to_pb(request: EndQuorumEpochRequest) -> pb.EndQuorumEpochRequest:
    """Translate a request."""
    return pb.EndQuorumEpochRequest(
        header=_request_header_to_pb(request.header),
        preferred_successors=map(_key_to_pb, request.preferred_successors),
    )


def end_request_from_pb(message: pb.EndQuorumEpochRequest) -> EndQuorumEpochRequest:
    """Translate a request."""
    return EndQuorumEpochRequest(
        header=_request_header_from_pb(message.header),
        preferred_successors=tuple(map(_key_from_pb, message.preferred_successors)),
    )


def fetch_request_to_pb(request: FetchRequest) -> pb.FetchRequest:
    """Translate a request."""
    return pb.FetchRequest(
        header=_request_header_to_pb(request.header),
        fetch_offset=request.fetch_offset,
        last_epoch=request.last_epoch,
        high_watermark=request.high_watermark,
        read_round=request.read_round,
        max_wait_ms=request.max_wait_ms,
        max_bytes=request.max_bytes,
    )


def fetch_request_from_pb(message: pb.FetchRequest) -> FetchRequest:
    """Translate a request."""
    return FetchRequest(
        header=_request_header_from_pb(message.header),
        fetch_offset=EndOffset(message.fetch_offset),
        last_epoch=Epoch(message.last_epoch),
        high_watermark=EndOffset(message.high_watermark),
        read_round=message.read_round,
        max_wait_ms=message.max_wait_ms,
        max_bytes=message.max_bytes,
    )


# -- responses


def vote_response_to_pb(response: VoteResponse, endpoint: str) -> pb.VoteResponse:
    """Translate an answer; `endpoint` is that of the leader it names, or empty."""
    return pb.VoteResponse(
        header=_response_header_to_pb(response.header, endpoint),
        pre_vote=response.pre_vote,
        granted=response.granted,
    )


def vote_response_from_pb(message: pb.VoteResponse) -> VoteResponse:
    """Translate an answer."""
    return VoteResponse(
        header=_response_header_from_pb(message.header),
        pre_vote=message.pre_vote,
        granted=message.granted,
    )


def begin_response_to_pb(
    response: BeginQuorumEpochResponse, endpoint: str
) -> pb.BeginQuorumEpochResponse:
    """Translate an answer."""
    return pb.BeginQuorumEpochResponse(header=_response_header_to_pb(response.header, endpoint))


def begin_response_from_pb(message: pb.BeginQuorumEpochResponse) -> BeginQuorumEpochResponse:
    """Translate an answer."""
    return BeginQuorumEpochResponse(header=_response_header_from_pb(message.header))


def end_response_to_pb(
    response: EndQuorumEpochResponse, endpoint: str
) -> pb.EndQuorumEpochResponse:
    """Translate an answer."""
    return pb.EndQuorumEpochResponse(header=_response_header_to_pb(response.header, endpoint))


def end_response_from_pb(message: pb.EndQuorumEpochResponse) -> EndQuorumEpochResponse:
    """Translate an answer."""
    return EndQuorumEpochResponse(header=_response_header_from_pb(message.header))


def fetch_response_to_pb(response: FetchResponse, endpoint: str) -> pb.FetchResponse:
    """Translate an answer."""
    diverging = response.diverging
    return pb.FetchResponse(
        header=_response_header_to_pb(response.header, endpoint),
        high_watermark=response.high_watermark,
        log_start_offset=response.log_start_offset,
        read_round=response.read_round,
        diverging=None
        if diverging is None
        else pb.EpochEnd(epoch=diverging.epoch, end_offset=diverging.end_offset),
        batches=map(_batch_to_pb, response.batches),
    )


def fetch_response_from_pb(message: pb.FetchResponse) -> FetchResponse:
    """Translate an answer."""
    diverging = None
    if message.HasField("diverging"):
        diverging = EpochEnd(
            Epoch(message.diverging.epoch), EndOffset(message.diverging.end_offset)
        )
    return FetchResponse(
        header=_response_header_from_pb(message.header),
        high_watermark=EndOffset(message.high_watermark),
        log_start_offset=EndOffset(message.log_start_offset),
        read_round=message.read_round,
        diverging=diverging,
        batches=tuple(map(_batch_from_pb, message.batches)),
    )

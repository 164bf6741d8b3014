"""Translates the quorum's messages to protobuf and back; decides nothing.

`EXCHANGES` says for every kind of request which method carries it and how it and its answer are
translated. Translations from protobuf raise BadMessageError for what no correct peer sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from streammeta.controller.quorum.messages import (
    BeginQuorumEpochRequest,
    BeginQuorumEpochResponse,
    EndQuorumEpochRequest,
    EndQuorumEpochResponse,
    FetchRequest,
    FetchResponse,
    FetchSnapshotRequest,
    FetchSnapshotResponse,
    QuorumError,
    Request,
    UpdateVoterRequest,
    UpdateVoterResponse,
    VoteRequest,
    VoteResponse,
)
from streammeta.controller.rpc.quorum_wire_parts import (
    BadMessageError,
    at_least_one,
    batch_to_pb,
    batches_from_pb,
    epoch_end_from_pb,
    epoch_end_to_pb,
    epoch_of,
    key_from_pb,
    key_to_pb,
    not_negative,
    offset_of,
    request_header_from_pb,
    request_header_to_pb,
    response_header_from_pb,
    response_header_to_pb,
    snapshot_id_from_pb,
    snapshot_id_to_pb,
    voter_from_pb,
    voter_to_pb,
)
from streammeta.v1 import quorum_pb2 as pb

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


def _begin_response_to_pb(
    response: BeginQuorumEpochResponse, endpoint: str
) -> pb.BeginQuorumEpochResponse:
    return pb.BeginQuorumEpochResponse(header=response_header_to_pb(response.header, endpoint))


def _begin_response_from_pb(message: pb.BeginQuorumEpochResponse) -> BeginQuorumEpochResponse:
    return BeginQuorumEpochResponse(header=response_header_from_pb(message.header))


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


def _end_response_to_pb(
    response: EndQuorumEpochResponse, endpoint: str
) -> pb.EndQuorumEpochResponse:
    return pb.EndQuorumEpochResponse(header=response_header_to_pb(response.header, endpoint))


def _end_response_from_pb(message: pb.EndQuorumEpochResponse) -> EndQuorumEpochResponse:
    return EndQuorumEpochResponse(header=response_header_from_pb(message.header))


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


def _update_response_to_pb(response: UpdateVoterResponse, endpoint: str) -> pb.UpdateVoterResponse:
    return pb.UpdateVoterResponse(header=response_header_to_pb(response.header, endpoint))


def _update_response_from_pb(message: pb.UpdateVoterResponse) -> UpdateVoterResponse:
    return UpdateVoterResponse(header=response_header_from_pb(message.header))


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
        _begin_response_to_pb,
        _begin_response_from_pb,
    ),
    EndQuorumEpochRequest: Exchange(
        "EndQuorumEpoch",
        _end_request_to_pb,
        _end_request_from_pb,
        _end_response_to_pb,
        _end_response_from_pb,
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
        _update_response_to_pb,
        _update_response_from_pb,
    ),
}

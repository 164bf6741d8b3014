"""Translation of the quorum's messages to protobuf and back, with checks.

`EXCHANGES` gives, for every kind of request, the method that carries it and the translation of it
and of its answer. A value that no correct peer sends is refused here with InvalidRequestError,
before the core sees it: a negative offset must not become a size to allocate, nor damage between
two controllers part of a log.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import google_crc32c
from google.protobuf.message import Message

from streammeta.controller.config import check_reachable
from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.ids import DirectoryId, EndOffset, Epoch, NodeId
from streammeta.controller.quorum.messages import (
    Batch,
    BatchKind,
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
    ResponseHeader,
    UpdateVoterRequest,
    UpdateVoterResponse,
    VoteRequest,
    VoteResponse,
)
from streammeta.controller.quorum.voters import Voter
from streammeta.controller.rpc.conversion import Conversion, checked, not_negative
from streammeta.controller.runtime.interfaces import Endpoints
from streammeta.v1 import quorum_pb2 as pb

DIRECTORY_ID_CHARS_MAX = 64
"""More than any UUID has; ids are compared, stored in every voter set and shown, never parsed."""

DIGEST_BYTES = 32
"""Length of a SHA-256."""

_BATCH_FIELDS = struct.Struct(">QQBI")


# -- batches


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


def _batch_from_pb(message: pb.LogBatch, path: str) -> Batch:
    where = f"batch at {message.base_offset}"
    try:
        batch = Batch(
            EndOffset(message.base_offset),
            Epoch(message.epoch),
            BatchKind(message.kind),
            tuple(message.payloads),
        )
        checksum = batch_checksum(batch)
    except (ValueError, struct.error) as error:
        raise InvalidRequestError(path, f"{where}: {error}") from None
    if checksum != message.checksum:
        raise InvalidRequestError(path, f"{where}: its checksum does not match")
    if not batch.payloads:
        raise InvalidRequestError(path, f"{where}: it is empty")
    return batch


# -- checks of whole messages and parts


def _directory_id(text: str, path: str) -> DirectoryId | None:
    if len(text) > DIRECTORY_ID_CHARS_MAX:
        raise InvalidRequestError(path, f"{len(text)} characters; at most {DIRECTORY_ID_CHARS_MAX}")
    return DirectoryId(text) if text else None


def _check_voter(voter: Voter) -> None:
    """Require endpoints as `host:port`, for others will connect to them."""
    checked(check_reachable, voter.endpoint, "voter.endpoint")
    if voter.client_endpoint is not None:
        checked(check_reachable, voter.client_endpoint, "voter.client_endpoint")


def _check_fetch(request: FetchRequest) -> None:
    for name in ("read_round", "max_wait_ms", "max_bytes", "answered_request_id"):
        not_negative(getattr(request, name), name)


def _check_fetched(response: FetchResponse) -> None:
    """Require one kind of content, and batches of which each begins where the one before ends."""
    not_negative(response.read_round, "read_round")
    kinds = (response.diverging, response.snapshot_id, response.batches or None)
    if kinds.count(None) < len(kinds) - 1:
        raise InvalidRequestError(
            "diverging, snapshot_id, batches", "at most one of them may be given"
        )
    for before, batch in pairwise(response.batches):
        if batch.base_offset != before.end_offset or batch.epoch < before.epoch:
            raise InvalidRequestError(
                "batches",
                f"batch at {batch.base_offset} of epoch {batch.epoch} does not continue the one "
                f"before it, which ends at {before.end_offset} in epoch {before.epoch}",
            )


def _check_fetch_snapshot(request: FetchSnapshotRequest) -> None:
    not_negative(request.position, "position")
    not_negative(request.answered_request_id, "answered_request_id")
    if request.max_bytes < 1:
        raise InvalidRequestError("max_bytes", f"{request.max_bytes}; must be at least 1")


def _check_snapshot_bytes(response: FetchSnapshotResponse) -> None:
    not_negative(response.total_bytes, "total_bytes")
    not_negative(response.position, "position")
    end = response.position + len(response.data)
    if response.header.error is not QuorumError.NONE:
        return
    if end > response.total_bytes:
        raise InvalidRequestError(
            "data", f"ends at byte {end} of a snapshot of {response.total_bytes} bytes"
        )
    if len(response.file_digest) != DIGEST_BYTES:
        raise InvalidRequestError(
            "file_digest", f"{len(response.file_digest)} bytes; a SHA-256 has {DIGEST_BYTES}"
        )


def _check_update(request: UpdateVoterRequest) -> None:
    if request.voter.key != request.header.sender:
        raise InvalidRequestError("voter.key", "not the sender's; a voter speaks for itself alone")


# -- messages

_PARTS = Conversion(
    reads={
        NodeId: not_negative,
        Epoch: not_negative,
        EndOffset: not_negative,
        DirectoryId: _directory_id,
        Batch: _batch_from_pb,
    },
    writes={Batch: batch_to_pb},
    checks={
        Voter: _check_voter,
        FetchRequest: _check_fetch,
        FetchResponse: _check_fetched,
        FetchSnapshotRequest: _check_fetch_snapshot,
        FetchSnapshotResponse: _check_snapshot_bytes,
        UpdateVoterRequest: _check_update,
    },
)
# The leader's endpoints are no part of an answer; the transport knows them.
_LEADER = ("leader_endpoint", "leader_client_endpoint")
_read_header = _PARTS.reader(ResponseHeader, pb.QuorumResponseHeader, *_LEADER)
_write_header = _PARTS.writer(ResponseHeader, pb.QuorumResponseHeader, *_LEADER)

MESSAGES = _PARTS.extended(reads={ResponseHeader: _read_header})
"""Conversion of the quorum's messages and their parts."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """How one kind of request and its answer travel.

    `response_to_pb` takes the answer and the endpoints of the leader that its header names.
    """

    method: str
    request_to_pb: Callable[[Any], Message]
    request_from_pb: Callable[[Any], Any]
    response_to_pb: Callable[[Any, Endpoints], Message]
    response_from_pb: Callable[[Any], Any]


def _exchange(request: type, response: type) -> Exchange:
    """Return the exchange of two kinds, whose messages have the same names."""
    request_class, response_class = getattr(pb, request.__name__), getattr(pb, response.__name__)
    write = MESSAGES.writer(response, response_class, "header")

    def response_to_pb(answer: Any, leader: Endpoints) -> Message:
        named = Endpoints() if answer.header.leader_id is None else leader
        header = _write_header(
            answer.header,
            leader_endpoint=named.peers or "",
            leader_client_endpoint=named.clients or "",
        )
        message: Message = write(answer, header=header)
        return message

    return Exchange(
        method=request.__name__.removesuffix("Request"),
        request_to_pb=MESSAGES.writer(request, request_class),
        request_from_pb=MESSAGES.reader(request, request_class),
        response_to_pb=response_to_pb,
        response_from_pb=MESSAGES.reader(response, response_class),
    )


EXCHANGES: Mapping[type[Request], Exchange] = {
    VoteRequest: _exchange(VoteRequest, VoteResponse),
    BeginQuorumEpochRequest: _exchange(BeginQuorumEpochRequest, BeginQuorumEpochResponse),
    EndQuorumEpochRequest: _exchange(EndQuorumEpochRequest, EndQuorumEpochResponse),
    FetchRequest: _exchange(FetchRequest, FetchResponse),
    FetchSnapshotRequest: _exchange(FetchSnapshotRequest, FetchSnapshotResponse),
    UpdateVoterRequest: _exchange(UpdateVoterRequest, UpdateVoterResponse),
}

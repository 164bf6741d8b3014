"""Codec of the quorum's messages: dataclasses to frame payloads and back, with checks.

There is one function for each kind of frame and direction. A value that no correct peer sends is
rejected here with InvalidRequestError, before it reaches the core. A negative offset must not
become a size to allocate, and corruption between two controllers must not enter the log.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, TypeAlias

from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.controller.peers.frames import FrameKind
from streammeta.controller.peers.wire_parts import (
    FieldReader,
    answer_part,
    ask_part,
    batch_parts,
    flag,
    key_part,
    not_negative,
    read_answer,
    read_ask,
    read_batches,
    read_key,
    require_end,
    require_reachable,
    text_part,
    unpack_fields,
)
from streammeta.controller.quorum import messages
from streammeta.controller.quorum.voters import Voter
from streammeta.controller.runtime.interfaces import Endpoints

DIGEST_BYTES = 32
"""Length of a SHA-256."""

Parts: TypeAlias = list[bytes]
"""A payload in consecutive parts."""


# -- votes and announcements

_VOTE = struct.Struct(">qqB")
_VOTED = struct.Struct(">BB")
_COUNT = struct.Struct(">B")


def _encode_vote_request(request: messages.VoteRequest) -> Parts:
    return [
        ask_part(request.header),
        _VOTE.pack(request.last_epoch, request.end_offset, request.pre_vote),
    ]


def _read_vote_request(data: bytes) -> messages.VoteRequest:
    header, position = read_ask(data)
    last_epoch, end_offset, pre_vote = unpack_fields(_VOTE, data, position, "end_offset")
    require_end(data, position + _VOTE.size)
    not_negative(("last_epoch", "end_offset"), (last_epoch, end_offset))
    return messages.VoteRequest(
        header=header,
        pre_vote=flag(pre_vote, "pre_vote"),
        last_epoch=last_epoch,
        end_offset=end_offset,
    )


def _encode_vote_answer(response: messages.VoteResponse, leader: Endpoints) -> Parts:
    return [answer_part(response.header, leader), _VOTED.pack(response.pre_vote, response.granted)]


def _read_vote_answer(data: bytes) -> tuple[messages.VoteResponse, Endpoints]:
    header, leader, position = read_answer(data)
    pre_vote, granted = unpack_fields(_VOTED, data, position, "granted")
    require_end(data, position + _VOTED.size)
    response = messages.VoteResponse(
        header=header, pre_vote=flag(pre_vote, "pre_vote"), granted=flag(granted, "granted")
    )
    return response, leader


def _begin_epoch(request: messages.BeginQuorumEpochRequest) -> Parts:
    return [ask_part(request.header)]


def _read_begin_epoch(data: bytes) -> messages.BeginQuorumEpochRequest:
    header, position = read_ask(data)
    require_end(data, position)
    return messages.BeginQuorumEpochRequest(header=header)


def _end_epoch(request: messages.EndQuorumEpochRequest) -> Parts:
    successors = request.preferred_successors
    return [ask_part(request.header), _COUNT.pack(len(successors)), *map(key_part, successors)]


def _read_end_epoch(data: bytes) -> messages.EndQuorumEpochRequest:
    header, position = read_ask(data)
    reader = FieldReader(data, position)
    (count,) = reader.fields(_COUNT, "preferred_successors")
    successors = tuple(read_key(reader, f"preferred_successors[{index}]") for index in range(count))
    reader.end()
    return messages.EndQuorumEpochRequest(header=header, preferred_successors=successors)


_Bare: TypeAlias = (
    messages.BeginQuorumEpochResponse
    | messages.EndQuorumEpochResponse
    | messages.UpdateVoterResponse
)
"""Answers that consist of a header only."""


def _bare(response: _Bare, leader: Endpoints) -> Parts:
    return [answer_part(response.header, leader)]


def _bare_reader(kind: type[_Bare]) -> Callable[[bytes], tuple[_Bare, Endpoints]]:
    def read(data: bytes) -> tuple[_Bare, Endpoints]:
        header, leader, position = read_answer(data)
        require_end(data, position)
        return kind(header=header), leader

    return read


def _update_voter(request: messages.UpdateVoterRequest) -> Parts:
    voter = request.voter
    return [
        ask_part(request.header),
        key_part(voter.key),
        text_part(voter.endpoint),
        text_part(voter.client_endpoint or ""),
    ]


def _read_update_voter(data: bytes) -> messages.UpdateVoterRequest:
    header, position = read_ask(data)
    reader = FieldReader(data, position)
    key, peers = read_key(reader, "voter.key"), reader.text("voter.endpoint")
    clients = reader.text("voter.client_endpoint")
    reader.end()
    require_reachable("voter.endpoint", peers)
    if clients:
        require_reachable("voter.client_endpoint", clients)
    if key != header.sender:
        raise InvalidRequestError("voter.key", "must be the sender's own key")
    return messages.UpdateVoterRequest(header=header, voter=Voter(key, peers, clients or None))


# -- replication

_FETCH = struct.Struct(">qqqqqqqB")
_FETCH_NAMES = (
    "fetch_offset", "last_epoch", "high_watermark", "read_round", "max_wait_ms", "max_bytes",
    "answered_request_id",
)  # fmt: skip
_numbers_of_fetch = attrgetter(*_FETCH_NAMES)
_FETCHED = struct.Struct(">qqqBI")
_FETCHED_NAMES = ("high_watermark", "log_start_offset", "read_round")
_POINT = struct.Struct(">qq")
_DIVERGING, _SNAPSHOT, _BATCHES = 1, 2, 4


def _encode_fetch_request(request: messages.FetchRequest) -> Parts:
    fields = _FETCH.pack(*_numbers_of_fetch(request), request.is_disk_full)
    return [ask_part(request.header), fields]


def _read_fetch_request(data: bytes) -> messages.FetchRequest:
    header, position = read_ask(data)
    fields = unpack_fields(_FETCH, data, position, "fetch_offset")
    require_end(data, position + _FETCH.size)
    not_negative(_FETCH_NAMES, fields[:7])

    return messages.FetchRequest(
        header=header,
        fetch_offset=fields[0],
        last_epoch=fields[1],
        high_watermark=fields[2],
        read_round=fields[3],
        max_wait_ms=fields[4],
        max_bytes=fields[5],
        answered_request_id=fields[6],
        is_disk_full=flag(fields[7], "is_disk_full"),
    )


def _encode_fetch_answer(response: messages.FetchResponse, leader: Endpoints) -> Parts:
    diverging, snapshot_id, batches = response.diverging, response.snapshot_id, response.batches
    content = (
        (_DIVERGING if diverging is not None else 0)
        | (_SNAPSHOT if snapshot_id is not None else 0)
        | (_BATCHES if batches else 0)
    )
    fields = _FETCHED.pack(
        response.high_watermark,
        response.log_start_offset,
        response.read_round,
        content,
        len(batches),
    )
    parts = [answer_part(response.header, leader), fields]
    if diverging is not None:
        parts.append(_POINT.pack(diverging.epoch, diverging.end_offset))
    if snapshot_id is not None:
        parts.append(_POINT.pack(snapshot_id.epoch, snapshot_id.end_offset))
    for batch in batches:
        parts += batch_parts(batch)

    return parts


def _read_fetch_answer(data: bytes) -> tuple[messages.FetchResponse, Endpoints]:
    header, leader, position = read_answer(data)
    fields = unpack_fields(_FETCHED, data, position, "high_watermark")
    position += _FETCHED.size
    high_watermark, log_start_offset, read_round, content, count = fields
    not_negative(_FETCHED_NAMES, fields[:3])
    if content not in (0, _DIVERGING, _SNAPSHOT, _BATCHES):
        raise InvalidRequestError(
            "diverging, snapshot_id, batches", "at most one of them may be set"
        )

    diverging: messages.EpochEnd | None = None
    snapshot_id: SnapshotId | None = None
    batches: tuple[messages.Batch, ...] = ()
    if content == _BATCHES:
        batches, position = read_batches(data, position, count)
    elif content == _DIVERGING:
        epoch, end, position = _read_point(data, position, "diverging")
        diverging = messages.EpochEnd(epoch, end)
    elif content == _SNAPSHOT:
        epoch, end, position = _read_point(data, position, "snapshot_id")
        snapshot_id = SnapshotId(end, epoch)

    require_end(data, position)
    response = messages.FetchResponse(
        header=header,
        high_watermark=high_watermark,
        log_start_offset=log_start_offset,
        read_round=read_round,
        diverging=diverging,
        snapshot_id=snapshot_id,
        batches=batches,
    )
    return response, leader


def _read_point(data: bytes, position: int, name: str) -> tuple[Epoch, EndOffset, int]:
    epoch, end_offset = unpack_fields(_POINT, data, position, name)
    not_negative((f"{name}.epoch", f"{name}.end_offset"), (epoch, end_offset))
    return epoch, end_offset, position + _POINT.size


# -- snapshots

_FETCH_SNAPSHOT = struct.Struct(">qqqqq")
_FETCH_SNAPSHOT_NAMES = (
    "snapshot_id.end_offset", "snapshot_id.epoch", "position", "max_bytes", "answered_request_id",
)  # fmt: skip
_numbers_of_fetch_snapshot = attrgetter(*_FETCH_SNAPSHOT_NAMES)
_CHUNK = struct.Struct(">qqqqBI")
_CHUNK_NAMES = ("snapshot_id.end_offset", "snapshot_id.epoch", "total_bytes", "position")
_numbers_of_chunk = attrgetter(*_CHUNK_NAMES)


def _fetch_snapshot(request: messages.FetchSnapshotRequest) -> Parts:
    fields = _FETCH_SNAPSHOT.pack(*_numbers_of_fetch_snapshot(request))
    return [ask_part(request.header), fields]


def _read_fetch_snapshot(data: bytes) -> messages.FetchSnapshotRequest:
    header, place = read_ask(data)
    fields = unpack_fields(_FETCH_SNAPSHOT, data, place, "snapshot_id")
    require_end(data, place + _FETCH_SNAPSHOT.size)
    not_negative(_FETCH_SNAPSHOT_NAMES, fields)
    end_offset, epoch, position, max_bytes, answered_request_id = fields
    if max_bytes < 1:
        raise InvalidRequestError("max_bytes", f"{max_bytes}, must be at least 1")
    return messages.FetchSnapshotRequest(
        header=header,
        snapshot_id=SnapshotId(end_offset, epoch),
        position=position,
        max_bytes=max_bytes,
        answered_request_id=answered_request_id,
    )


def _chunk(response: messages.FetchSnapshotResponse, leader: Endpoints) -> Parts:
    lengths = len(response.file_digest), len(response.data)
    fields = _CHUNK.pack(*_numbers_of_chunk(response), *lengths)
    return [answer_part(response.header, leader), fields, response.file_digest, response.data]


def _read_chunk(data: bytes) -> tuple[messages.FetchSnapshotResponse, Endpoints]:
    header, leader, place = read_answer(data)
    reader = FieldReader(data, place)
    fields = reader.fields(_CHUNK, "snapshot_id")
    not_negative(_CHUNK_NAMES, fields[:4])
    end_offset, epoch, total_bytes, position, digest_length, length = fields
    response = messages.FetchSnapshotResponse(
        header=header,
        snapshot_id=SnapshotId(end_offset, epoch),
        total_bytes=total_bytes,
        position=position,
        file_digest=reader.raw(digest_length, "file_digest"),
        data=reader.raw(length, "data"),
    )
    reader.end()
    if header.error is messages.QuorumError.NONE:
        _check_chunk(response)

    return response, leader


def _check_chunk(response: messages.FetchSnapshotResponse) -> None:
    end = response.position + len(response.data)
    if end > response.total_bytes:
        raise InvalidRequestError(
            "data", f"ends at byte {end} of a snapshot of {response.total_bytes} bytes"
        )
    if len(response.file_digest) != DIGEST_BYTES:
        raise InvalidRequestError(
            "file_digest", f"has {len(response.file_digest)} bytes, must have {DIGEST_BYTES}"
        )


# -- all kinds

REQUEST_KINDS: Mapping[type[messages.Request], FrameKind] = {
    messages.VoteRequest: FrameKind.VOTE,
    messages.BeginQuorumEpochRequest: FrameKind.BEGIN_QUORUM_EPOCH,
    messages.EndQuorumEpochRequest: FrameKind.END_QUORUM_EPOCH,
    messages.FetchRequest: FrameKind.FETCH,
    messages.FetchSnapshotRequest: FrameKind.FETCH_SNAPSHOT,
    messages.UpdateVoterRequest: FrameKind.UPDATE_VOTER,
}
ANSWER_KINDS: Mapping[FrameKind, FrameKind] = {
    kind: FrameKind(kind + 16) for kind in REQUEST_KINDS.values()
}
"""Kind of the answer to each kind of request."""

_REQUEST_ENCODERS: Mapping[FrameKind, Callable[[Any], Parts]] = {
    FrameKind.VOTE: _encode_vote_request,
    FrameKind.BEGIN_QUORUM_EPOCH: _begin_epoch,
    FrameKind.END_QUORUM_EPOCH: _end_epoch,
    FrameKind.FETCH: _encode_fetch_request,
    FrameKind.FETCH_SNAPSHOT: _fetch_snapshot,
    FrameKind.UPDATE_VOTER: _update_voter,
}
_REQUEST_DECODERS: Mapping[FrameKind, Callable[[bytes], messages.Request]] = {
    FrameKind.VOTE: _read_vote_request,
    FrameKind.BEGIN_QUORUM_EPOCH: _read_begin_epoch,
    FrameKind.END_QUORUM_EPOCH: _read_end_epoch,
    FrameKind.FETCH: _read_fetch_request,
    FrameKind.FETCH_SNAPSHOT: _read_fetch_snapshot,
    FrameKind.UPDATE_VOTER: _read_update_voter,
}
_ANSWER_ENCODERS: Mapping[
    type[messages.Response], tuple[FrameKind, Callable[[Any, Endpoints], Parts]]
]
_ANSWER_ENCODERS = {
    messages.VoteResponse: (FrameKind.VOTE_ANSWER, _encode_vote_answer),
    messages.BeginQuorumEpochResponse: (FrameKind.BEGIN_QUORUM_EPOCH_ANSWER, _bare),
    messages.EndQuorumEpochResponse: (FrameKind.END_QUORUM_EPOCH_ANSWER, _bare),
    messages.FetchResponse: (FrameKind.FETCH_ANSWER, _encode_fetch_answer),
    messages.FetchSnapshotResponse: (FrameKind.FETCH_SNAPSHOT_ANSWER, _chunk),
    messages.UpdateVoterResponse: (FrameKind.UPDATE_VOTER_ANSWER, _bare),
}
_ANSWER_DECODERS: Mapping[FrameKind, Callable[[bytes], tuple[messages.Response, Endpoints]]] = {
    FrameKind.VOTE_ANSWER: _read_vote_answer,
    FrameKind.BEGIN_QUORUM_EPOCH_ANSWER: _bare_reader(messages.BeginQuorumEpochResponse),
    FrameKind.END_QUORUM_EPOCH_ANSWER: _bare_reader(messages.EndQuorumEpochResponse),
    FrameKind.FETCH_ANSWER: _read_fetch_answer,
    FrameKind.FETCH_SNAPSHOT_ANSWER: _read_chunk,
    FrameKind.UPDATE_VOTER_ANSWER: _bare_reader(messages.UpdateVoterResponse),
}


def encode_request(request: messages.Request) -> tuple[FrameKind, Parts]:
    """Return the kind of a request's frame, and its payload."""
    kind = REQUEST_KINDS[type(request)]
    return kind, _REQUEST_ENCODERS[kind](request)


def decode_request(kind: FrameKind, payload: bytes) -> messages.Request:
    """Read a request.

    Raises:
        InvalidRequestError: it is malformed, or holds a value that no correct peer sends.
    """
    return _REQUEST_DECODERS[kind](payload)


def encode_answer(response: messages.Response, leader: Endpoints) -> tuple[FrameKind, Parts]:
    """Return the kind of an answer's frame, and its payload.

    `leader` are the addresses of the leader that its header names.
    """
    kind, encode = _ANSWER_ENCODERS[type(response)]
    return kind, encode(response, leader)


def decode_answer(kind: FrameKind, payload: bytes) -> tuple[messages.Response, Endpoints]:
    """Read an answer, and the addresses of the leader that its header names.

    Raises:
        InvalidRequestError: it is malformed, or holds a value that no correct peer sends.
    """
    return _ANSWER_DECODERS[kind](payload)

"""Frames of the connections between controllers: a fixed header, then a payload.

The header is the payload's length u32, the kind u8, three reserved bytes of zero, the call id u64,
and a CRC-32C u32 of all these and the payload; integers are big-endian. The parser is told which
kinds may come and how long each may be, and refuses everything else from the header alone, before
any payload is kept. Does no I/O and knows no message.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum, unique
from typing import NamedTuple, TypeAlias

import google_crc32c


@unique
class FrameKind(IntEnum):
    """Content of a frame. An answer's number is that of its request plus 16."""

    HELLO = 1
    HELLO_ANSWER = 2
    VOTE = 16
    BEGIN_QUORUM_EPOCH = 17
    END_QUORUM_EPOCH = 18
    FETCH = 19
    FETCH_SNAPSHOT = 20
    UPDATE_VOTER = 21
    VOTE_ANSWER = 32
    BEGIN_QUORUM_EPOCH_ANSWER = 33
    END_QUORUM_EPOCH_ANSWER = 34
    FETCH_ANSWER = 35
    FETCH_SNAPSHOT_ANSWER = 36
    UPDATE_VOTER_ANSWER = 37
    FAILURE = 48
    """No answer will come to this call; the payload is the reason as UTF-8."""


STOPPING = "this replica is stopping"
"""Reason in the failure of a request that reaches a replica while it stops."""


class FrameError(Exception):
    """Bytes that are no frame, or a frame that may not come here; the connection is of no use."""


class Frame(NamedTuple):
    """One frame; `call_id` ties an answer to its request, and is 0 in a hello."""

    kind: FrameKind
    call_id: int
    payload: bytes


PayloadLimits: TypeAlias = Mapping[FrameKind, int]
"""Kinds that may come, and the maximum length of their payloads in bytes."""

HELLO_BYTES_MAX = 1 << 10
REQUEST_BYTES_MAX = 64 << 10
"""Every request is a header and a few numbers; the longest names voters and addresses."""
SMALL_ANSWER_BYTES_MAX = 4 << 10
FETCHED_BYTES_MAX = 64 << 20
"""Room for a Fetch of 8 MiB, or one batch that is larger, with all framing."""
CHUNK_BYTES_MAX = 16 << 20
"""Room for a part of a snapshot, of which 1 MiB is requested at once."""

HELLO_ONLY: PayloadLimits = {FrameKind.HELLO: HELLO_BYTES_MAX}
"""Frames that a listener takes first."""
HELLO_ANSWER_ONLY: PayloadLimits = {FrameKind.HELLO_ANSWER: HELLO_BYTES_MAX}
"""Frames that a dialler takes first."""
CONTROL_REQUESTS: PayloadLimits = {
    FrameKind.VOTE: REQUEST_BYTES_MAX,
    FrameKind.BEGIN_QUORUM_EPOCH: REQUEST_BYTES_MAX,
    FrameKind.END_QUORUM_EPOCH: REQUEST_BYTES_MAX,
    FrameKind.FETCH: REQUEST_BYTES_MAX,
    FrameKind.UPDATE_VOTER: REQUEST_BYTES_MAX,
}
"""Frames that a listener takes after the hello of a connection for control."""
BULK_REQUESTS: PayloadLimits = {FrameKind.FETCH_SNAPSHOT: REQUEST_BYTES_MAX}
"""Frames that a listener takes after the hello of a connection for bulk."""
ANSWERS: PayloadLimits = {
    FrameKind.VOTE_ANSWER: SMALL_ANSWER_BYTES_MAX,
    FrameKind.BEGIN_QUORUM_EPOCH_ANSWER: SMALL_ANSWER_BYTES_MAX,
    FrameKind.END_QUORUM_EPOCH_ANSWER: SMALL_ANSWER_BYTES_MAX,
    FrameKind.FETCH_ANSWER: FETCHED_BYTES_MAX,
    FrameKind.FETCH_SNAPSHOT_ANSWER: CHUNK_BYTES_MAX,
    FrameKind.UPDATE_VOTER_ANSWER: SMALL_ANSWER_BYTES_MAX,
    FrameKind.FAILURE: SMALL_ANSWER_BYTES_MAX,
}
"""Frames that a dialler takes after the hello was answered."""

_FIELDS = struct.Struct(">IB3sQ")
_CHECKSUM = struct.Struct(">I")
_HEADER = struct.Struct(">IB3sQI")
_RESERVED = bytes(3)
HEADER_BYTES = _HEADER.size


def seal(kind: FrameKind, call_id: int, parts: Sequence[bytes]) -> bytes:
    """Return a frame whose payload is `parts`, joined."""
    fields = _FIELDS.pack(sum(map(len, parts)), kind, _RESERVED, call_id)
    checksum = google_crc32c.value(fields)
    for part in parts:
        checksum = google_crc32c.extend(checksum, part)
    return b"".join((fields, _CHECKSUM.pack(checksum), *parts))


class FrameParser:
    """Takes the bytes of one direction of a connection, gives its frames in order."""

    def __init__(self, limits: PayloadLimits) -> None:
        self._limits = limits
        self._buffer = bytearray()
        self._wanted = HEADER_BYTES
        """Bytes that must be there before a look at them is worthwhile."""

    @property
    def buffered(self) -> int:
        """Bytes that are kept: at most those of one frame, and those fed at once after it."""
        return len(self._buffer)

    def expect(self, limits: PayloadLimits) -> None:
        """Take these kinds from the next frame on."""
        self._limits = limits

    def feed(self, data: bytes) -> None:
        """Take further bytes; `next` gives the frames that they complete."""
        self._buffer += data

    def next(self) -> Frame | None:
        """Return the next whole frame, None while there is none.

        Raises:
            FrameError: the bytes are no frame, or one that may not come now.
        """
        buffer = self._buffer
        if len(buffer) < self._wanted:
            return None

        length, number, reserved, call_id, checksum = _HEADER.unpack_from(buffer)
        kind = self._checked_kind(length, number, reserved)
        end = HEADER_BYTES + length
        if len(buffer) < end:
            self._wanted = end
            return None

        fields, payload = bytes(buffer[: _FIELDS.size]), bytes(buffer[HEADER_BYTES:end])
        if google_crc32c.extend(google_crc32c.value(fields), payload) != checksum:
            raise FrameError(f"the checksum of a {kind.name} of {length} bytes does not match")

        del buffer[:end]
        self._wanted = HEADER_BYTES
        return Frame(kind, call_id, payload)

    def _checked_kind(self, length: int, number: int, reserved: bytes) -> FrameKind:
        """Return the kind that a header names; raises FrameError if it may not come."""
        kind = _KINDS.get(number)
        if kind is None:
            raise FrameError(f"frame of unknown kind {number}")
        if reserved != _RESERVED:
            raise FrameError(f"{kind.name}: reserved bytes are {reserved.hex()}; must be zero")
        limit = self._limits.get(kind)
        if limit is None:
            wanted = ", ".join(one.name for one in self._limits)
            raise FrameError(f"{kind.name} came where only {wanted} may come")
        if length > limit:
            raise FrameError(f"{kind.name} of {length} bytes; at most {limit}")
        return kind


_KINDS: Mapping[int, FrameKind] = {int(kind): kind for kind in FrameKind}

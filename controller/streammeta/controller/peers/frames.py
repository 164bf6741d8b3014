"""Frames of the connections between controllers: a fixed header, then a payload.

The header is the payload's length u32, the kind u8, three reserved zero bytes, the call id u64, and
a CRC-32C u32 of all these and the payload. Integers are big-endian. The parser knows the allowed
kinds and their maximum lengths, and rejects everything else from the header alone, before it stores
any payload. Does no I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum, unique
from typing import NamedTuple, TypeAlias

import google_crc32c


@unique
class FrameKind(IntEnum):
    """Content of a frame. An answer's number is its request's number plus 16."""

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
    """No answer will come to this call. The payload is the reason as UTF-8."""


STOPPING = "this replica is stopping"
"""Failure reason of a request that reaches a stopping replica."""


class FrameError(Exception):
    """Bytes that are not a frame, or a frame that is not allowed here. The connection must end."""


class Frame(NamedTuple):
    """One frame. `call_id` matches an answer to its request, and is 0 in a hello."""

    kind: FrameKind
    call_id: int
    payload: bytes


PayloadLimits: TypeAlias = Mapping[FrameKind, int]
"""Allowed kinds, and the maximum length of their payloads in bytes."""

HELLO_BYTES_MAX = 1 << 10
REQUEST_BYTES_MAX = 64 << 10
"""Every request is a header and a few numbers. The longest ones name voters and addresses."""
SMALL_ANSWER_BYTES_MAX = 4 << 10
# A batch is never split, so one larger than the requested bytes travels alone.
FETCHED_BYTES_MAX = 64 << 20
"""Space for a Fetch of 8 MiB, or for one larger batch, with all framing."""
CHUNK_BYTES_MAX = 16 << 20
"""Space for a snapshot chunk, of which 1 MiB is requested at a time."""

HELLO_ONLY: PayloadLimits = {FrameKind.HELLO: HELLO_BYTES_MAX}
"""Frames that a listener accepts first."""
HELLO_ANSWER_ONLY: PayloadLimits = {FrameKind.HELLO_ANSWER: HELLO_BYTES_MAX}
"""Frames that a dialler accepts first."""
CONTROL_REQUESTS: PayloadLimits = {
    FrameKind.VOTE: REQUEST_BYTES_MAX,
    FrameKind.BEGIN_QUORUM_EPOCH: REQUEST_BYTES_MAX,
    FrameKind.END_QUORUM_EPOCH: REQUEST_BYTES_MAX,
    FrameKind.FETCH: REQUEST_BYTES_MAX,
    FrameKind.UPDATE_VOTER: REQUEST_BYTES_MAX,
}
"""Frames that a listener accepts after the hello of a control connection."""
BULK_REQUESTS: PayloadLimits = {FrameKind.FETCH_SNAPSHOT: REQUEST_BYTES_MAX}
"""Frames that a listener accepts after the hello of a bulk connection."""
ANSWERS: PayloadLimits = {
    FrameKind.VOTE_ANSWER: SMALL_ANSWER_BYTES_MAX,
    FrameKind.BEGIN_QUORUM_EPOCH_ANSWER: SMALL_ANSWER_BYTES_MAX,
    FrameKind.END_QUORUM_EPOCH_ANSWER: SMALL_ANSWER_BYTES_MAX,
    FrameKind.FETCH_ANSWER: FETCHED_BYTES_MAX,
    FrameKind.FETCH_SNAPSHOT_ANSWER: CHUNK_BYTES_MAX,
    FrameKind.UPDATE_VOTER_ANSWER: SMALL_ANSWER_BYTES_MAX,
    FrameKind.FAILURE: SMALL_ANSWER_BYTES_MAX,
}
"""Frames that a dialler accepts after its hello was answered."""

_FIELDS = struct.Struct(">IB3sQ")
_CHECKSUM = struct.Struct(">I")
_HEADER = struct.Struct(">IB3sQI")
_RESERVED = bytes(3)
HEADER_BYTES = _HEADER.size


def seal(kind: FrameKind, call_id: int, parts: Sequence[bytes]) -> bytes:
    """Return a frame whose payload is the concatenation of `parts`."""
    fields = _FIELDS.pack(sum(map(len, parts)), kind, _RESERVED, call_id)
    # The header is covered too: a wrong length or call id must not go unnoticed.
    checksum = google_crc32c.value(fields)
    for part in parts:
        checksum = google_crc32c.extend(checksum, part)
    return b"".join((fields, _CHECKSUM.pack(checksum), *parts))


class FrameParser:
    """Parser of one direction of a connection: bytes in, frames out in order."""

    def __init__(self, limits: PayloadLimits) -> None:
        self._limits = limits
        self._buffer = bytearray()
        self._wanted = HEADER_BYTES
        """Buffered bytes needed before parsing can make progress."""

    @property
    def buffered(self) -> int:
        """Buffered bytes: at most one frame, and the data received along with its end."""
        return len(self._buffer)

    def expect(self, limits: PayloadLimits) -> None:
        """Accept these kinds from the next frame on."""
        self._limits = limits

    def feed(self, data: bytes) -> None:
        """Add received bytes. `next` returns the frames that they complete."""
        self._buffer += data

    def next(self) -> Frame | None:
        """Return the next whole frame, None if there is none.

        Raises:
            FrameError: the bytes are not a frame, or the frame is not allowed now.
        """
        buffer = self._buffer
        # Large frames arrive in many pieces. This avoids parsing the header for each of them.
        if len(buffer) < self._wanted:
            return None

        # The header is checked before the payload arrives: a wrong length must not reserve memory.
        length, number, reserved, call_id, checksum = _HEADER.unpack_from(buffer)
        kind = self._check_kind(length, number, reserved)
        end = HEADER_BYTES + length
        if len(buffer) < end:
            self._wanted = end
            return None

        fields, payload = bytes(buffer[: _FIELDS.size]), bytes(buffer[HEADER_BYTES:end])
        # TCP checksums miss about one error in 65,536, and a flipped bit could change a vote.
        if google_crc32c.extend(google_crc32c.value(fields), payload) != checksum:
            raise FrameError(f"the checksum of a {kind.name} of {length} bytes does not match")

        del buffer[:end]
        self._wanted = HEADER_BYTES
        return Frame(kind, call_id, payload)

    def _check_kind(self, length: int, number: int, reserved: bytes) -> FrameKind:
        """Return the kind named by a header. Raises FrameError if it is not allowed."""
        kind = _KINDS.get(number)
        if kind is None:
            raise FrameError(f"frame of unknown kind {number}")
        # Zero today, so that a later version can give these bytes a meaning.
        if reserved != _RESERVED:
            raise FrameError(f"{kind.name}: reserved bytes are {reserved.hex()}, must be zero")
        limit = self._limits.get(kind)
        if limit is None:
            allowed = ", ".join(kind.name for kind in self._limits)
            raise FrameError(f"{kind.name} is not allowed here, only {allowed}")
        if length > limit:
            raise FrameError(f"{kind.name} has {length} bytes, the limit is {limit}")
        return kind


_KINDS: Mapping[int, FrameKind] = {int(kind): kind for kind in FrameKind}

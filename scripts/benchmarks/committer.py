"""What a system must be able to do to be driven by `commit_load`, whichever system it is.

One commit checks that the end offsets of some streams are what the writer believes, advances them
and records the object that holds the new ranges: all or nothing, durable when it is answered.
"""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:  # earlier commits, as baselines, have no such module
    from streammeta.rpc.tls import TlsFiles

STEP = 10
"""Offsets that each commit advances its streams by."""

OBJECT_BYTES = 1_000_000
FIRST_STREAM_ID = 1_000_000
"""Of the streams that the load names itself; ids take the width that they have in use."""


class LoadError(Exception):
    """The system answered with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one run asks of a system."""

    endpoint: str
    ranges: int
    """Streams of one commit."""
    in_flight: int
    objects: int = 20_000
    """Object ids that are prepared beforehand, where a system issues them."""
    tls: "TlsFiles | None" = None
    """The caller's files for TLS; None: plain text."""


class Committer(Protocol):
    """Commits to one system over connections of its own."""

    async def open(self) -> None:
        """Connect, and create the streams of every slot."""

    def commit(self, slot: int) -> Awaitable[None]:
        """Make the next commit of a slot, which has streams of its own.

        Raises:
            LoadError: it was refused.
            Http2Error, OSError: the connection broke.
        """

    async def close(self) -> None:
        """Release the connections."""


@dataclass(slots=True)
class SlotStreams:
    """The streams of one slot, whose end offsets move together."""

    ids: list[int]
    end_offset: int = 0

    def columns(self) -> tuple[bytes, bytes]:
        """Return the start and the end offsets of the next commit, little-endian int64 each."""
        count = len(self.ids)
        if count == 1:
            start = self.end_offset.to_bytes(8, "little")
            return start, (self.end_offset + STEP).to_bytes(8, "little")
        starts = np.full(count, self.end_offset, dtype="<i8")
        return starts.tobytes(), (starts + STEP).tobytes()

    def advance(self) -> None:
        """Take note that the next commit was acknowledged."""
        self.end_offset += STEP


def id_column(ids: list[int]) -> bytes:
    """Return ids as little-endian int64."""
    return np.array(ids, dtype="<i8").tobytes()


def own_streams(load: Load) -> list[SlotStreams]:
    """Return the slots of a system whose streams the load names itself."""
    return [
        SlotStreams(list(range(first, first + load.ranges)))
        for first in range(
            FIRST_STREAM_ID, FIRST_STREAM_ID + load.in_flight * load.ranges, load.ranges
        )
    ]

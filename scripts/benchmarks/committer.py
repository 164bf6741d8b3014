"""Interface by which `commit_load` drives any system.

One commit checks that the end offsets of some streams are as the writer expects, advances them and
records the object that contains the new ranges: all or nothing, and durable when it is answered.
"""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from scripts.benchmarks.figures import BenchmarkError
from streammeta.tls.files import TlsFiles

STEP = 10
"""Offsets by which each commit advances its streams."""

OBJECT_BYTES = 1_000_000
FIRST_STREAM_ID = 1_000_000
"""First id of streams that the load numbers itself, of a width as in production."""


class LoadError(BenchmarkError):
    """The system answered with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One run's load on a system."""

    endpoint: str
    ranges: int
    """Streams of one commit."""
    in_flight: int
    objects: int = 20_000
    """Object ids to prepare beforehand, where the system issues them."""
    tls: Sequence[str] = ()
    """Paths of the caller's authority, certificate and key; none for plain text."""

    @property
    def files(self) -> TlsFiles | None:
        """The caller's files for TLS."""
        return TlsFiles(*map(Path, self.tls)) if self.tls else None


class Committer(Protocol):
    """Commits to one system over its own connections."""

    async def open(self) -> None:
        """Connect, and create the streams of every slot."""

    def commit(self, slot: int) -> Awaitable[object]:
        """Make the next commit of a slot, on the slot's own streams.

        Raises:
            LoadError: the system rejected it.
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
        # Most commits have one range, and numpy is slow for one number.
        if count == 1:
            start = self.end_offset.to_bytes(8, "little")
            return start, (self.end_offset + STEP).to_bytes(8, "little")
        starts = np.full(count, self.end_offset, dtype="<i8")
        return starts.tobytes(), (starts + STEP).tobytes()

    def advance(self) -> None:
        """Note that the next commit was acknowledged."""
        self.end_offset += STEP


def id_column(ids: Sequence[int]) -> bytes:
    """Return ids as little-endian int64."""
    return np.array(ids, dtype="<i8").tobytes()


def own_streams(load: Load) -> list[SlotStreams]:
    """Return the slots of a system whose streams the load numbers itself."""
    end = FIRST_STREAM_ID + load.in_flight * load.ranges
    return [
        SlotStreams(list(range(first, first + load.ranges)))
        for first in range(FIRST_STREAM_ID, end, load.ranges)
    ]

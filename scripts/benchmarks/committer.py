"""Load of commits on any system, by the same client process and the system's committer.

One commit checks that the end offsets of some streams are as the writer expects, advances them and
records the object that contains the new ranges: all or nothing, and durable when it is answered.
Each commit in flight belongs to a slot with its own streams. The slot's next commit follows when
the answer comes, so commits never conflict.
"""

import asyncio
import gc
import importlib
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from scripts.benchmarks.figures import BenchmarkError, latencies
from scripts.benchmarks.http2 import Http2Connection
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


class Connected:
    """Connection of a committer that speaks HTTP/2."""

    def __init__(self, load: Load) -> None:
        self._load = load

    async def open(self) -> None:
        """Connect."""
        self._connection = await Http2Connection.connect(self._load.endpoint, self._load.files)

    async def close(self) -> None:
        """Release the connection."""
        self._connection.close()


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


WARM_UP_S = 1.0
_COMMITTERS: Mapping[str, tuple[str, str]] = {
    "unary": ("streammeta_client", "UnaryCommitter"),
    "pipelined": ("streammeta_client", "PipelinedCommitter"),
    "put": ("streammeta_client", "Putter"),
    "product": ("streammeta_client", "ProductCommitter"),
    "shared": ("shared_client", "SharedCommitter"),
    "idempotent": ("shared_client", "IdempotentCommitter"),
    "zookeeper": ("peers.zookeeper_client", "ZookeeperCommitter"),
    "etcd": ("peers.etcd_client", "EtcdCommitter"),
    "postgresql-shared": ("peers.postgresql_client", "PostgresqlCommitter"),
    "postgresql-idempotent": ("peers.postgresql_client", "PostgresqlIdempotentCommitter"),
    "floor-pipelined": ("floor", "PipelinedFloor"),
    "floor-unary": ("floor", "UnaryFloor"),
    "streammeta-reads": ("ten_reads", "StreammetaReads"),
    "etcd-reads": ("ten_reads", "EtcdReads"),
    "zookeeper-reads": ("ten_reads", "ZookeeperReads"),
}
"""Module and class of each kind of load. The first six are ways to call streammeta."""


def committer_of(system: str, load: Load) -> Committer:
    """Return the committer of a system. Only its module is imported: others may need an extra."""
    module, name = _COMMITTERS[system]
    committer: Committer = getattr(importlib.import_module(f"scripts.benchmarks.{module}"), name)(
        load
    )
    return committer


async def load_commits(*, system: str, seconds: float, **load: Any) -> dict[str, object]:
    """Commit for `seconds` after a warm-up and return figures.

    `load` are the fields of `Load`. Prints `ready measuring` and `ready measured` around the time
    that counts.
    """
    # The collector's pauses are no latencies of a server, and a run is short.
    gc.disable()
    wanted = Load(**load)
    committer = committer_of(system, wanted)
    began = ends = float("inf")
    answered: list[tuple[float, float]] = []

    async def commit_until_end(slot: int) -> None:
        asked = time.monotonic()
        while asked < ends:
            await committer.commit(slot)
            now = time.monotonic()
            answered.append((asked, now))
            asked = now

    await committer.open()
    try:
        async with asyncio.TaskGroup() as group:
            for slot in range(wanted.in_flight):
                group.create_task(commit_until_end(slot))
            # The first commits wait for connections and caches, so they do not count.
            await asyncio.sleep(WARM_UP_S)
            cpu_s, began = time.process_time(), time.monotonic()
            ends = began + seconds
            print("ready measuring", flush=True)
            await asyncio.sleep(seconds)
            cpu_s = time.process_time() - cpu_s
            print("ready measured", flush=True)
    finally:
        await committer.close()

    counted = [(asked, at) for asked, at in answered if began <= at < ends]
    if not counted:
        raise LoadError(f"no commit was acknowledged within {seconds:.0f} s")
    return {
        "commits": len(counted),
        "commits_in_all": len(answered),
        "commits_per_s": round(len(counted) / seconds, 1),
        **latencies([at - asked for asked, at in counted]),
        "client_cpu_s": round(cpu_s, 3),
    }

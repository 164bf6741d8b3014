"""What reading costs: requests and bytes for each MiB read, and MiB/s from a local directory.

Streams are written through a controller and the product's writer. Then they are read in the three
ways that matter: from start to end side by side, a record here and there, and tailing while more is
written. Each way has a reader of its own that has nothing in memory, and all share this process.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.benchmarks.bench_cluster import running_cluster
from scripts.benchmarks.figures import Outcome, Table
from streammeta.client import (
    BrokerSession,
    ControllerClient,
    ReaderConfig,
    ReaderStats,
    StreamReader,
    StreamTail,
    StreamWriter,
    WriterConfig,
)
from streammeta.storage.object_store.local import LocalObjectStore

MIB = 1 << 20
NODE_ID, NODE_EPOCH = 900_001, 1
FETCH_BYTES = 1 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much is written and read; sizes in bytes unless named otherwise."""

    streams: int = 16
    record_bytes: int = 1_024
    total_mib: int = 128
    random_reads: int = 500
    tail_commits: int = 40
    tail_records: int = 20
    """Records of each stream in one of these commits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one way of reading cost; bytes are those of payload unless they were fetched."""

    way: str
    payload_bytes: int
    seconds: float
    stats: ReaderStats

    @property
    def mib(self) -> float:
        """Payload read, in MiB."""
        return self.payload_bytes / MIB

    def figures(self) -> dict[str, float]:
        """Return what two commits are compared by."""
        return {
            f"{self.way}_gets_per_mib": round(self.stats.requests / self.mib, 3),
            f"{self.way}_fetched_mib_per_mib": round(self.stats.bytes_fetched / MIB / self.mib, 3),
            f"{self.way}_mib_per_s": round(self.mib / self.seconds, 3),
        }

    def row(self) -> tuple[object, ...]:
        """Return a row of the table."""
        return (self.way, round(self.mib, 1), *self.figures().values(), self.stats.lookups)


@dataclass(frozen=True, slots=True)
class _Place:
    """Store to read from and controllers to ask."""

    session: BrokerSession
    store: LocalObjectStore
    writer: StreamWriter
    stream_ids: tuple[int, ...]

    def reader(self) -> StreamReader:
        return StreamReader(self.session.client, self.store, self.session.namespace, ReaderConfig())


async def measure(root: Path, settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Write streams and read them in every way."""
    with running_cluster(root, 1) as cluster:
        store = LocalObjectStore(root / "bucket")
        async with ControllerClient(cluster.endpoints) as client:
            session = await BrokerSession.open(client, NODE_ID, NODE_EPOCH)
            ids = await session.create_streams([{}] * settings.streams)
            opened = (await session.open_streams(dict.fromkeys(ids, 1))).require_all()
            async with StreamWriter(session, store, WriterConfig(linger_s=60.0)) as writer:
                writer.attach(opened.values())
                place = _Place(session, store, writer, tuple(ids))
                progress(f"reading: write {settings.total_mib} MiB to {settings.streams} streams")
                per_stream = settings.total_mib * MIB // settings.streams // settings.record_bytes
                await _append(place, settings, per_stream)
                costs = [
                    await _measured(place, way, read, settings, progress)
                    for way, read in (
                        ("sequential", _read_whole),
                        ("random", _read_here_and_there),
                        ("tailing", _tail),
                    )
                ]
    return _outcome(settings, costs)


async def _append(place: _Place, settings: Settings, records: int) -> None:
    """Append so many records to each stream and commit them."""
    payload = random.Random(1).randbytes(settings.record_bytes)
    acks: list[asyncio.Future[int]] = []
    for number in range(records):
        acks += [await place.writer.append(each, payload) for each in place.stream_ids]
        if number % 64 == 63:
            await asyncio.sleep(0)
    await place.writer.flush()
    await asyncio.gather(*acks)


async def _measured(
    place: _Place,
    way: str,
    read: Callable[[_Place, StreamReader, Settings], Awaitable[int]],
    settings: Settings,
    progress: Callable[[str], None],
) -> Cost:
    progress(f"reading: {way}")
    async with place.reader() as reader:
        began = time.monotonic()
        payload_bytes = await read(place, reader, settings)
        seconds = time.monotonic() - began
        return Cost(way=way, payload_bytes=payload_bytes, seconds=seconds, stats=reader.stats)


async def _read_whole(place: _Place, reader: StreamReader, _settings: Settings) -> int:
    """Read all streams from start to end, side by side."""

    async def read(stream_id: int) -> int:
        at = done = 0
        while (fetched := await reader.fetch(stream_id, at, FETCH_BYTES)).records:
            at = fetched.next_offset
            done += fetched.payload_bytes
        return done

    return sum(await asyncio.gather(*map(read, place.stream_ids)))


async def _read_here_and_there(place: _Place, reader: StreamReader, settings: Settings) -> int:
    """Read single records at random offsets, one after the other."""
    rng, done = random.Random(2), 0
    ends = {each: (await reader.fetch(each, 0, 1)).end_offset for each in place.stream_ids}
    for _ in range(settings.random_reads):
        stream_id = rng.choice(place.stream_ids)
        fetched = await reader.fetch(stream_id, rng.randrange(ends[stream_id]), 1)
        done += fetched.payload_bytes
    return done


async def _tail(place: _Place, reader: StreamReader, settings: Settings) -> int:
    """Follow all streams while small objects are committed."""
    wanted = settings.tail_commits * settings.tail_records
    tails = [reader.tail(each, place.writer.next_offset(each)) for each in place.stream_ids]

    async def follow(tail: StreamTail) -> int:
        async with tail:
            return sum([len((await anext(tail)).payload) for _ in range(wanted)])

    following = asyncio.gather(*map(follow, tails))
    for _ in range(settings.tail_commits):
        await _append(place, settings, settings.tail_records)
    return sum(await following)


def _outcome(settings: Settings, costs: Sequence[Cost]) -> Outcome:
    return Outcome(
        benchmark="reading",
        settings=asdict(settings),
        figures={name: value for cost in costs for name, value in cost.figures().items()},
        details={cost.way: {"seconds": cost.seconds, **asdict(cost.stats)} for cost in costs},
        tables=(
            Table(
                title=f"Reading {settings.streams} streams of {settings.record_bytes}-byte records",
                columns=(
                    "way",
                    "MiB",
                    "GETs/MiB",
                    "MiB fetched/MiB",
                    "MiB/s",
                    "lookups",
                ),
                rows=tuple(cost.row() for cost in costs),
            ),
        ),
    )

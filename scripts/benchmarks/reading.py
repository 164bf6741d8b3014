"""Cost of reading: requests and bytes for each MiB read, and MiB/s from a local directory.

Streams are written through a controller and the product's writer. Then they are read in three ways:
from start to end in parallel, single records at random, and tailing during more writes. Each way
has its own reader with nothing in memory, and all share this process.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.benchmarks.client_place import MIB, Place, running_place
from scripts.benchmarks.figures import Outcome, Progress, Table
from scripts.benchmarks.options import option
from streammeta.client import StreamTail, WriterConfig
from streammeta.client.parts import StreamReader

FETCH_BYTES = 1 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Amount of data to write and read, with sizes in bytes unless the name says otherwise."""

    streams: int = option(16, "streams written and read")
    record_bytes: int = option(1_024, "payload of a record")
    total_mib: int = option(128, "MiB written to all streams")
    random_reads: int = option(500, "reads of one record at random")
    tail_commits: int = 40
    tail_records: int = 20
    """Records of each stream in one of these commits."""


async def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Write streams and read them in every way."""
    figures: dict[str, float] = {}
    details, rows = {}, []
    async with running_place(root, settings.streams, WriterConfig(linger_s=60.0)) as place:
        progress(f"reading: write {settings.total_mib} MiB to {settings.streams} streams")
        per_stream = settings.total_mib * MIB // settings.streams // settings.record_bytes
        await _append(place, settings, per_stream)
        ways: dict[str, Callable[[Place, StreamReader, Settings], Awaitable[int]]] = {
            "sequential": _read_whole,
            "random": _read_at_random,
            "tailing": _tail,
        }
        for way, read in ways.items():
            progress(f"reading: {way}")
            async with place.reader() as reader:
                began = time.monotonic()
                payload_bytes = await read(place, reader, settings)
                seconds, stats = time.monotonic() - began, reader.stats
            mib = payload_bytes / MIB
            found = {
                "gets_per_mib": round(stats.requests / mib, 3),
                "fetched_mib_per_mib": round(stats.bytes_fetched / MIB / mib, 3),
                "mib_per_s": round(mib / seconds, 3),
            }
            figures |= {f"{way}_{name}": value for name, value in found.items()}
            details[way] = {"seconds": seconds, **asdict(stats)}
            rows.append({"way": way, "mib": mib, **found, "lookups": stats.lookups})

    table = Table.of(
        f"Reading {settings.streams} streams of {settings.record_bytes}-byte records",
        rows,
        "way | MiB = mib | GETs/MiB = gets_per_mib | MiB fetched/MiB = fetched_mib_per_mib"
        " | MiB/s = mib_per_s | lookups",
    )
    return Outcome(benchmark="reading", figures=figures, details=details, tables=[table])


async def _append(place: Place, settings: Settings, records: int) -> None:
    """Append so many records to each stream and commit them."""
    payload = random.Random(1).randbytes(settings.record_bytes)
    acks: list[asyncio.Future[int]] = []
    for number in range(records):
        acks += [await place.writer.append(stream_id, payload) for stream_id in place.stream_ids]
        # The uploads need turns of the event loop too.
        if number % 64 == 63:
            await asyncio.sleep(0)
    await place.writer.flush()
    await asyncio.gather(*acks)


async def _read_whole(place: Place, reader: StreamReader, _settings: Settings) -> int:
    """Read all streams from start to end in parallel; return the bytes of payload."""

    async def read(stream_id: int) -> int:
        at = done = 0
        while (fetched := await reader.fetch(stream_id, at, FETCH_BYTES)).records:
            at = fetched.next_offset
            done += fetched.payload_bytes
        return done

    return sum(await asyncio.gather(*map(read, place.stream_ids)))


async def _read_at_random(place: Place, reader: StreamReader, settings: Settings) -> int:
    """Read single records at random offsets, one after the other."""
    rng, done = random.Random(2), 0
    ends = {
        stream_id: (await reader.fetch(stream_id, 0, 1)).end_offset
        for stream_id in place.stream_ids
    }
    for _ in range(settings.random_reads):
        stream_id = rng.choice(place.stream_ids)
        fetched = await reader.fetch(stream_id, rng.randrange(ends[stream_id]), 1)
        done += fetched.payload_bytes
    return done


async def _tail(place: Place, reader: StreamReader, settings: Settings) -> int:
    """Follow all streams while small objects are committed."""
    wanted = settings.tail_commits * settings.tail_records
    tails = [
        reader.tail(stream_id, place.writer.next_offset(stream_id))
        for stream_id in place.stream_ids
    ]

    async def follow(tail: StreamTail) -> int:
        async with tail:
            return sum([len((await anext(tail)).payload) for _ in range(wanted)])

    following = asyncio.gather(*map(follow, tails))
    for _ in range(settings.tail_commits):
        await _append(place, settings, settings.tail_records)
    return sum(await following)

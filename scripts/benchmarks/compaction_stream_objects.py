"""Stream objects of one stream made into one object, in three ways: what each asks of the store.

The store copies them, or they are fetched and sent again, or they are linked and stay as they are.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.benchmarks.committer import LoadError
from scripts.benchmarks.compaction_place import MIB, Place, require_same, running_place
from scripts.benchmarks.compaction_settings import StreamObjects
from scripts.benchmarks.figures import Outcome, Table
from streammeta.client import WriterConfig
from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.stream_object_compactor import StreamObjectCompactor
from streammeta.storage.compaction.stream_objects import StreamCompaction
from streammeta.storage.object_store.calls import StoreMetrics

WAYS = (
    ("copied by the store", StreamCompaction.MERGE_LARGE, True),
    ("fetched and sent", StreamCompaction.MERGE_LARGE, False),
    ("linked", StreamCompaction.LINK, True),
)
RECORD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What one way took; bytes are those that passed through the process."""

    way: str
    objects_before: int
    objects_after: int
    gets: int
    puts: int
    multiparts: int
    parts: int
    copies: int
    bytes_read: int
    bytes_written: int
    seconds: float
    gets_per_mib_before: float
    gets_per_mib_after: float


async def measure(root: Path, settings: StreamObjects, progress: Callable[[str], None]) -> Outcome:
    """Compact a stream in each way."""
    config = WriterConfig(upload_bytes=2 * settings.object_mib * MIB, linger_s=600.0)
    done: list[Requests] = []
    async with running_place(root, len(WAYS), config) as place:
        for stream_id, (way, kind, by_store) in zip(place.stream_ids, WAYS, strict=True):
            progress(f"compaction: {settings.objects} stream objects, {way}")
            await _write(place, stream_id, settings)
            done.append(await _compacted(place, stream_id, way, kind, by_store=by_store))
    return _outcome(settings, done)


async def _write(place: Place, stream_id: int, settings: StreamObjects) -> None:
    payloads = [bytes(RECORD_BYTES)] * (settings.object_mib * MIB // RECORD_BYTES)
    for _ in range(settings.objects):
        ack = await place.writer.append_many(stream_id, payloads)
        await place.writer.flush()
        await ack


async def _compacted(
    place: Place, stream_id: int, way: str, kind: StreamCompaction, *, by_store: bool
) -> Requests:
    session = place.session
    compactor = StreamObjectCompactor(
        session.client,
        session.node,
        session.namespace,
        place.store,
        CompactionConfig(server_side_copy=by_store),
    )
    reads = await place.read([stream_id])
    before, began = place.store.metrics(), time.monotonic()
    try:
        report = await compactor.compact(stream_id, kind)
    finally:
        compactor.close()
    seconds, after = time.monotonic() - began, place.store.metrics()
    if report.error is not None or report.left_out or len(report.made) != 1:
        raise LoadError(f"stream objects were not compacted: {report}")
    reads_after = await place.read([stream_id])
    require_same(reads, reads_after)
    return Requests(
        way=way,
        objects_before=len(report.made[0].source_ids),
        objects_after=len(report.made),
        gets=_asked(before, after, "get_range"),
        puts=_asked(before, after, "put"),
        multiparts=_asked(before, after, "start_multipart"),
        parts=_asked(before, after, "upload_part"),
        copies=_asked(before, after, "copy_part"),
        bytes_read=report.figures.bytes_read,
        bytes_written=report.figures.bytes_written,
        seconds=round(seconds, 3),
        gets_per_mib_before=reads.gets_per_mib,
        gets_per_mib_after=reads_after.gets_per_mib,
    )


def _asked(before: StoreMetrics, after: StoreMetrics, operation: str) -> int:
    return after.of(operation).requests - before.of(operation).requests


def _outcome(settings: StreamObjects, done: Sequence[Requests]) -> Outcome:
    figures: dict[str, float] = {}
    for each in done:
        prefix = "stream_objects_" + each.way.replace(" ", "_")
        figures |= {
            f"{prefix}_gets": each.gets,
            f"{prefix}_copies": each.copies,
            f"{prefix}_mib_moved": round((each.bytes_read + each.bytes_written) / MIB, 3),
        }
    columns = (
        *("way", "objects", "after", "GET", "PUT", "uploads in parts", "parts", "copies"),
        *("MiB read", "MiB written", "seconds", "cold GETs/MiB", "after"),
    )
    rows = tuple(
        (
            *(each.way, each.objects_before, each.objects_after, each.gets, each.puts),
            *(each.multiparts, each.parts, each.copies),
            *(round(each.bytes_read / MIB, 2), round(each.bytes_written / MIB, 2)),
            *(each.seconds, each.gets_per_mib_before, each.gets_per_mib_after),
        )
        for each in done
    )
    title = f"{settings.objects} stream objects of {settings.object_mib} MiB made one"
    return Outcome(
        benchmark="compaction-stream-objects",
        settings=asdict(settings),
        figures=figures,
        details={"ways": [asdict(each) for each in done]},
        tables=(Table(title=title, columns=columns, rows=rows),),
    )

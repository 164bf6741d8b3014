"""Requests to merge the stream objects of one stream into one object, in three ways.

The store copies them, or they are fetched and sent again, or they are linked and stay as they are.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks.client_place import MIB, Place, require_same, running_place
from scripts.benchmarks.committer import LoadError
from scripts.benchmarks.figures import Outcome, Progress, Table
from streammeta.client import WriterConfig
from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.stream_object_compactor import StreamObjectCompactor
from streammeta.storage.compaction.stream_objects import StreamCompaction

WAYS = (
    ("copied by the store", StreamCompaction.MERGE_LARGE, True),
    ("fetched and sent", StreamCompaction.MERGE_LARGE, False),
    ("linked", StreamCompaction.LINK, True),
)
RECORD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamObjects:
    """Number and size of the stream objects that become one."""

    objects: int = 12
    object_mib: int = 8


async def measure(root: Path, settings: StreamObjects, progress: Progress) -> Outcome:
    """Compact a stream in each way."""
    config = WriterConfig(upload_bytes=2 * settings.object_mib * MIB, linger_s=600.0)
    done: list[dict[str, Any]] = []
    async with running_place(root, len(WAYS), config) as place:
        for stream_id, (way, kind, by_store) in zip(place.stream_ids, WAYS, strict=True):
            progress(f"compaction: {settings.objects} stream objects, {way}")
            await _write(place, stream_id, settings)
            done.append(await _compact(place, stream_id, way, kind, by_store=by_store))
    return _outcome(settings, done)


async def _write(place: Place, stream_id: int, settings: StreamObjects) -> None:
    payloads = [bytes(RECORD_BYTES)] * (settings.object_mib * MIB // RECORD_BYTES)
    for _ in range(settings.objects):
        ack = await place.writer.append_many(stream_id, payloads)
        await place.writer.flush()
        await ack


async def _compact(
    place: Place, stream_id: int, way: str, kind: StreamCompaction, *, by_store: bool
) -> dict[str, Any]:
    session, config = place.session, CompactionConfig(server_side_copy=by_store)
    compactor = StreamObjectCompactor(
        session.client, session.node, session.namespace, place.store, config
    )
    reads = await place.read([stream_id])
    before, began = place.requests(), time.monotonic()
    try:
        report = await compactor.compact(stream_id, kind)
    finally:
        compactor.close()
    seconds, after = time.monotonic() - began, place.requests()
    if report.error is not None or report.left_out or len(report.made) != 1:
        raise LoadError(f"stream objects were not compacted: {report}")

    reads_after = await place.read([stream_id])
    require_same(reads, reads_after)
    made = {name: count - before[name] for name, count in after.items()}
    figures = report.figures
    return {
        "way": way,
        "objects_before": len(report.made[0].source_ids),
        "objects_after": len(report.made),
        "gets": made["get_range"],
        "puts": made["put"],
        "multiparts": made["start_multipart"],
        "parts": made["upload_part"],
        "copies": made["copy_part"],
        "bytes_read": figures.bytes_read,
        "bytes_written": figures.bytes_written,
        "mib_read": figures.bytes_read / MIB,
        "mib_written": figures.bytes_written / MIB,
        "seconds": round(seconds, 3),
        "gets_per_mib_before": reads.gets_per_mib,
        "gets_per_mib_after": reads_after.gets_per_mib,
    }


def _outcome(settings: StreamObjects, done: Sequence[Mapping[str, Any]]) -> Outcome:
    figures: dict[str, float] = {}
    for found in done:
        prefix = "stream_objects_" + found["way"].replace(" ", "_")
        figures[f"{prefix}_gets"] = found["gets"]
        figures[f"{prefix}_copies"] = found["copies"]
        figures[f"{prefix}_mib_moved"] = round(found["mib_read"] + found["mib_written"], 3)
    table = Table.of(
        f"{settings.objects} stream objects of {settings.object_mib} MiB merged into one",
        done,
        "way | objects = objects_before | after = objects_after | GET = gets | PUT = puts"
        " | uploads in parts = multiparts | parts | copies | MiB read = mib_read"
        " | MiB written = mib_written | seconds | cold GETs/MiB = gets_per_mib_before"
        " | GETs/MiB after = gets_per_mib_after",
    )

    return Outcome(
        benchmark="compaction-stream-objects",
        settings=asdict(settings),
        figures=figures,
        details={"ways": done},
        tables=[table],
    )

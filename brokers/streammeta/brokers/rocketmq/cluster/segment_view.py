"""View of a broker's queues as a directory of the peer's files, byte for byte.

Renders segments, uploaded index files and the metadata file into an empty directory, which the
peer's classes then open as their own. Reads only what is committed; nothing of the store changes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from streammeta.brokers.rocketmq.cluster.cluster_store import QueueStore
from streammeta.brokers.rocketmq.formats.metadata import (
    METADATA_FILE,
    MetadataTable,
    QueueMetadata,
    SegmentMetadata,
    SegmentStatus,
)
from streammeta.brokers.rocketmq.formats.names import SegmentType, index_path, segment_path
from streammeta.brokers.rocketmq.segments.file_segment import SegmentReadError

_READ_BYTES = 4 << 20


async def render(store: QueueStore, cluster: str, directory: Path) -> MetadataTable:
    """Write all files of a broker below a directory; return the metadata written.

    Segments lie below `files/`. Raises `FileExistsError` if the directory holds anything, and
    `SegmentReadError` if a segment has fewer bytes than the metadata says.
    """
    _begin(directory)
    known, table = store.keeper.table, MetadataTable(last_topic_id=store.keeper.table.last_topic_id)
    table.topics.update(known.topics)
    for queue, file in store.files.items():
        table.queues[queue] = QueueMetadata(queue, file.min_offset, file.commit_offset)
    for one in known.segments.values():
        if one.kind is not SegmentType.INDEX and one.status is not SegmentStatus.DELETED:
            await _copy(store, cluster, directory, one, table)
    await _copy_index(store, cluster, directory, table)
    config = directory / METADATA_FILE
    config.parent.mkdir(parents=True)
    config.write_text(table.encode())
    return table


def _begin(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty; name a new directory")


async def _copy_index(
    store: QueueStore, cluster: str, directory: Path, table: MetadataTable
) -> None:
    """Copy uploaded index files; theirs follow each other by bytes, ours are named by their begin.

    One that is not uploaded has no compacted form yet, and is made into it here.
    """
    base, path = 0, index_path(store.broker)
    for begin_ms, end_ms, data in await store.index.compacted():
        target = directory / "files" / segment_path(cluster, path, SegmentType.INDEX, base)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        table.put_segment(
            SegmentMetadata(
                path,
                SegmentType.INDEX,
                base,
                SegmentStatus.SEALED,
                len(data),
                begin_ms,
                begin_ms,
                end_ms,
                end_ms,
            )
        )
        base += len(data)


async def _copy(
    store: QueueStore, cluster: str, directory: Path, one: SegmentMetadata, table: MetadataTable
) -> None:
    segment = store.segments.segment(one.path, one.kind, one.base_offset)
    target = directory / "files" / segment_path(cluster, one.path, one.kind, one.base_offset)
    target.parent.mkdir(parents=True, exist_ok=True)
    position = 0
    with target.open("wb") as file:
        while position < one.size:
            data = await segment.read(position, min(_READ_BYTES, one.size - position))
            if not data:
                raise SegmentReadError(position, one.size - position, position)
            file.write(data)
            position += len(data)
    table.put_segment(replace(one))

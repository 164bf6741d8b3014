"""View of a broker's queues as a directory of the peer's files, byte for byte.

Renders segments, uploaded index files and the metadata file into an empty directory, which the
peer's classes then open. Reads only committed data, and never changes the store.
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
    """Write all files of a broker below a directory. Return the written metadata.

    Segments lie below `files/`. Raises `FileExistsError` if the directory is not empty, and
    `SegmentReadError` if a segment has fewer bytes than its metadata says.
    """
    _begin(directory)
    known, table = store.keeper.table, MetadataTable(last_topic_id=store.keeper.table.last_topic_id)
    table.topics.update(known.topics)

    for queue, file in store.files.items():
        table.queues[queue] = QueueMetadata(queue, file.min_offset, file.commit_offset)
    # Index files are copied separately, because their names differ.
    for segment in known.segments.values():
        if segment.kind is not SegmentType.INDEX and segment.status is not SegmentStatus.DELETED:
            await _copy(store, cluster, directory, segment, table)

    await _copy_index(store, cluster, directory, table)
    config = directory / METADATA_FILE
    config.parent.mkdir(parents=True)
    config.write_text(table.encode())
    return table


def _begin(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    # Files of an earlier view would mix with the new ones.
    if any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty. Name a new directory")


async def _copy_index(
    store: QueueStore, cluster: str, directory: Path, table: MetadataTable
) -> None:
    """Copy index files in their compacted form, creating it for local ones.

    The peer names them by the total size of the earlier files, the store by their begin.
    """
    base, path = 0, index_path(store.broker)
    for begin_ms, end_ms, data in await store.index.read_compacted():
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
    store: QueueStore, cluster: str, directory: Path, noted: SegmentMetadata, table: MetadataTable
) -> None:
    segment = store.segments.segment(noted.path, noted.kind, noted.base_offset)
    target = directory / "files" / segment_path(cluster, noted.path, noted.kind, noted.base_offset)
    target.parent.mkdir(parents=True, exist_ok=True)
    position = 0
    with target.open("wb") as file:
        # In blocks: a segment may be larger than memory.
        while position < noted.size:
            data = await segment.read(position, min(_READ_BYTES, noted.size - position))
            if not data:
                raise SegmentReadError(position, noted.size - position, position)
            file.write(data)
            position += len(data)

    table.put_segment(replace(noted))

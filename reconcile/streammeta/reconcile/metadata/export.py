"""Export of a snapshot of the metadata: its objects as Parquet.

Owns the columns of the comparison. The snapshot comes from `GetSnapshot` and contains everything
acknowledged before the call. The checkpoint reader decodes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.controller.snapshot.checkpoint_file import CheckpointError, CheckpointReader
from streammeta.reconcile.cluster.controller_client import LeaderClient
from streammeta.reconcile.parquet.arrow_start import return_memory
from streammeta.reconcile.vocabulary import errors, tables
from streammeta.reconcile.vocabulary.verdicts import ABSENT, WANTED_STATES, Int64Column, Reading
from streammeta.v1 import metadata_pb2

_COLUMN_NAMES = {
    "object_id": "object_id",
    "state": "map_state",
    "object_size": "map_size",
    "timestamp_ms": "map_time_ms",
    "attributes": "map_attributes",
    "node_id": "map_node",
    "kind": "map_kind",
}
_CHECKPOINT = "map.checkpoint"
_OBJECTS = "objects.parquet"


@dataclass(frozen=True, slots=True)
class MetadataExport:
    """Description of a snapshot: its cluster, its offset in the log, and its counts.

    `committed_objects` counts objects that must be in the bucket: committed or linked.
    `issued_below` is the bound of object ids that the cluster claims in its bucket.
    """

    cluster_id: str
    cluster_uuid: str
    issued_below: int
    end_offset: int
    epoch: int
    next_object_id: int
    next_stream_id: int
    objects: int
    committed_objects: int


def export_metadata(leader: LeaderClient, folder: Path) -> MetadataExport:
    """Write the objects of the metadata, as of this call or later, into a new `folder` as Parquet.

    Raises:
        ControllerError: no leader sent a snapshot.
        MetadataExportError: the copy is damaged, or this version can't read it.
    """
    folder.mkdir()
    copy = folder / _CHECKPOINT
    with copy_of_metadata(leader, copy) as checkpoint, CheckpointReader.open(copy) as beside:
        return write_objects(checkpoint, beside, folder / _OBJECTS)


@contextmanager
def copy_of_metadata(leader: LeaderClient, path: Path) -> Iterator[CheckpointReader]:
    """Yield a verified copy of the metadata, as of this call or later. Deletes its file at the end.

    Raises:
        ControllerError: no leader sent a snapshot.
        MetadataExportError: the copy is damaged, or this version can't read it.
    """
    end_offset, epoch = fetch_snapshot(leader, path)
    identity = SnapshotId(EndOffset(end_offset), Epoch(epoch))
    try:
        with CheckpointReader.open(path) as checkpoint:
            checkpoint.verify()
            if checkpoint.id != identity:
                raise errors.MetadataExportError(
                    f"copy of the metadata is {checkpoint.id}, but was sent as {identity}. Run the"
                    " command again"
                )
            yield checkpoint
    except (CheckpointError, OSError) as error:
        raise errors.MetadataExportError(
            f"copy of the metadata can't be read ({error}). Run the command again, with the"
            " controllers' version of streammeta"
        ) from error
    finally:
        path.unlink(missing_ok=True)


def fetch_snapshot(leader: LeaderClient, path: Path) -> tuple[int, int]:
    """Write a copy of the metadata to `path`, and return its end offset and epoch.

    Raises:
        ControllerError: no leader sent a snapshot.
        MetadataExportError: the snapshot is incomplete, or can't be written.
    """
    return leader.read_snapshot(partial(_write_chunks, path))


def _write_chunks(
    path: Path, chunks: Iterator[metadata_pb2.GetSnapshotResponse]
) -> tuple[int, int]:
    identity: tuple[int, int, int] | None = None
    written = 0
    try:
        with path.open("wb") as file:
            for chunk in chunks:
                described = (chunk.end_offset, chunk.epoch, chunk.total_bytes)
                if identity not in (None, described) or chunk.position != written:
                    raise errors.MetadataExportError(
                        f"copy of the metadata broke at byte {written}: got position"
                        f" {chunk.position} of {described}, expected the next chunk of {identity}."
                        " Run the command again"
                    )
                identity = described
                written += file.write(chunk.data)
    except OSError as error:
        raise errors.MetadataExportError(
            f"copy of the metadata can't be written to {path} ({os.strerror(error.errno or 0)})."
            " Free space or choose another folder for --plan"
        ) from error

    if identity is None or identity[2] != written:
        wanted = identity[2] if identity else "at least one chunk"
        raise errors.MetadataExportError(
            f"copy of the metadata ended at byte {written}, expected {wanted}. Run the command"
            " again"
        )

    return identity[0], identity[1]


def write_objects(
    checkpoint: CheckpointReader, beside: CheckpointReader, path: Path
) -> MetadataExport:
    """Write the columns of the comparison, and count the objects that must be in the bucket.

    `beside` is the same file, opened a second time, so that objects and their facts are read in
    parallel, with one batch of each in memory.
    """
    objects = committed = 0
    try:
        counters = checkpoint.columns("counters")
        (next_object_id,) = counters["next_object_id"]
        (next_stream_id,) = counters["next_stream_id"]
        claim = checkpoint.columns("bucket_claim")
        (cluster_uuid,), (issued_below,) = claim["cluster_uuid"], claim["issued_below"]
        checksums = _Checksums(beside)
        with tables.table_writer(path, tables.MAP_COLUMNS) as writer:
            for batch in checkpoint.batches("objects"):
                rows = _metadata_rows(batch, checksums)
                writer.write_batch(rows)
                objects += rows.num_rows
                committed += int(np.isin(rows["map_state"].to_numpy(), WANTED_STATES).sum())
    except (KeyError, ValueError) as error:
        raise errors.MetadataExportError(
            f"copy of the metadata has other columns than this version reads ({error}). Use the"
            " controllers' version of streammeta"
        ) from error

    return_memory()
    return MetadataExport(
        cluster_id=checkpoint.cluster_id,
        cluster_uuid=str(cluster_uuid),
        issued_below=int(issued_below),
        end_offset=checkpoint.id.end_offset,
        epoch=checkpoint.id.epoch,
        next_object_id=int(next_object_id),
        next_stream_id=int(next_stream_id),
        objects=objects,
        committed_objects=committed,
    )


def _metadata_rows(batch: pa.RecordBatch, checksums: _Checksums) -> pa.RecordBatch:
    schema = tables.arrow_schema(tables.MAP_COLUMNS)
    values = {renamed: batch[name].cast(pa.int64()) for name, renamed in _COLUMN_NAMES.items()}
    values["map_crc"] = pa.array(checksums.of(batch["object_id"].to_numpy()))
    values["reading"] = pa.array(np.full(batch.num_rows, Reading.UNREAD, dtype=np.int64))
    return pa.RecordBatch.from_pydict(values, schema=schema)


class _Checksums:
    """Checksums of objects. Requests and the section have the same order, by id."""

    def __init__(self, checkpoint: CheckpointReader) -> None:
        self._batches = checkpoint.batches("object_facts")
        self._ids: Int64Column = np.empty(0, dtype=np.int64)
        self._values: Int64Column = np.empty(0, dtype=np.int64)
        self._has_ended = False

    def of(self, ids: Int64Column) -> Int64Column:
        """Return the checksums of the ascending `ids`, `ABSENT` where unknown."""
        if not len(ids):
            return np.empty(0, dtype=np.int64)
        while not self._has_ended and not (len(self._ids) and self._ids[-1] >= ids[-1]):
            self._read()
        found = np.full(len(ids), ABSENT, dtype=np.int64)
        at = np.searchsorted(self._ids, ids)
        inside = np.flatnonzero(at < len(self._ids))
        hits = inside[self._ids[at[inside]] == ids[inside]]
        found[hits] = self._values[at[hits]]
        past = int(np.searchsorted(self._ids, ids[-1], side="right"))
        self._ids, self._values = self._ids[past:].copy(), self._values[past:].copy()
        return found

    def _read(self) -> None:
        batch = next(self._batches, None)
        if batch is None:
            self._has_ended = True
            return
        self._ids = np.concatenate([self._ids, batch["object_id"].to_numpy()])
        self._values = np.concatenate([self._values, batch["crc32c"].to_numpy()])

"""Export of a snapshot of the map: its objects as Parquet.

Owns the columns that the comparison uses. The snapshot comes from `GetSnapshot`, contains
everything acknowledged before the call, and is read with the checkpoint reader.
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
import pyarrow.parquet as pq

from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.controller.snapshot.checkpoint_file import CheckpointError, CheckpointReader
from streammeta.reconcile.errors import MapExportError
from streammeta.reconcile.leader import LeaderClient
from streammeta.reconcile.tables import MAP_COLUMNS, arrow_schema
from streammeta.reconcile.verdicts import ABSENT, WANTED_STATES, Int64Column, Reading
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
class MapExport:
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
    objects: int
    committed_objects: int


def export_map(leader: LeaderClient, folder: Path) -> MapExport:
    """Write the objects of the map, as of this call or later, into a new `folder` as Parquet.

    Raises:
        ControllerError: no leader sent a copy of the map.
        MapExportError: the copy is damaged, or of a kind that this version can't read.
    """
    folder.mkdir()
    with copied_map(leader, folder / _CHECKPOINT) as checkpoint:
        return _write_objects(checkpoint, folder / _OBJECTS)


@contextmanager
def copied_map(leader: LeaderClient, path: Path) -> Iterator[CheckpointReader]:
    """Give a verified copy of the map, as of this call or later; its file at `path` is deleted.

    Raises:
        ControllerError: no leader sent a copy of the map.
        MapExportError: the copy is damaged, or of a kind that this version can't read.
    """
    end_offset, epoch = fetch_snapshot(leader, path)
    identity = SnapshotId(EndOffset(end_offset), Epoch(epoch))
    try:
        with CheckpointReader.open(path) as checkpoint:
            checkpoint.verify()
            if checkpoint.id != identity:
                raise MapExportError(
                    f"the copy of the map says it is {checkpoint.id}, but was sent as {identity};"
                    " run the command again"
                )
            yield checkpoint
    except (CheckpointError, OSError) as error:
        raise MapExportError(
            f"the copy of the map can't be read ({error}); run the command again, with the version"
            " of streammeta that the controllers run"
        ) from error
    finally:
        path.unlink(missing_ok=True)


def fetch_snapshot(leader: LeaderClient, path: Path) -> tuple[int, int]:
    """Write a copy of the map to `path`, whole or not at all; returns (end offset, epoch).

    Raises:
        ControllerError: no leader sent it.
        MapExportError: what was sent is not one whole file, or can't be written.
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
                    raise MapExportError(
                        f"the copy of the map broke at byte {written}: got position"
                        f" {chunk.position} of {described}, wanted it to go on with {identity};"
                        " run the command again"
                    )
                identity = described
                written += file.write(chunk.data)
    except OSError as error:
        raise MapExportError(
            f"the copy of the map can't be written to {path} ({os.strerror(error.errno or 0)});"
            " free space or choose another folder for --plan"
        ) from error
    if identity is None or identity[2] != written:
        wanted = identity[2] if identity else "at least one chunk"
        raise MapExportError(
            f"the copy of the map ended at byte {written}, wanted {wanted}; run the command again"
        )
    return identity[0], identity[1]


def _write_objects(checkpoint: CheckpointReader, path: Path) -> MapExport:
    """Write the columns that the comparison uses; count what must be in the bucket."""
    try:
        (next_object_id,) = checkpoint.columns("counters")["next_object_id"]
        claim = checkpoint.columns("bucket_claim")
        (cluster_uuid,), (issued_below,) = claim["cluster_uuid"], claim["issued_below"]
        objects = checkpoint.table("objects").select(list(_COLUMN_NAMES))
        facts = checkpoint.columns("object_facts")
        checksums = _by_id(objects["object_id"].to_numpy(), facts["object_id"], facts["crc32c"])
    except (KeyError, ValueError) as error:
        raise MapExportError(
            f"the copy of the map has other columns than this version reads ({error}); use the"
            " version of streammeta that the controllers run"
        ) from error
    renamed = objects.rename_columns(list(_COLUMN_NAMES.values()))
    renamed = renamed.append_column("map_crc", pa.array(checksums))
    unread = np.full(objects.num_rows, Reading.UNREAD, dtype=np.int64)
    renamed = renamed.append_column("reading", pa.array(unread))
    schema = arrow_schema(MAP_COLUMNS)
    pq.write_table(renamed.select(schema.names).cast(schema), path)
    states = renamed.column("map_state").to_numpy()
    return MapExport(
        cluster_id=checkpoint.cluster_id,
        cluster_uuid=str(cluster_uuid),
        issued_below=int(issued_below),
        end_offset=checkpoint.id.end_offset,
        epoch=checkpoint.id.epoch,
        next_object_id=int(next_object_id),
        objects=objects.num_rows,
        committed_objects=int(np.isin(states, WANTED_STATES).sum()),
    )


def _by_id(ids: Int64Column, known: Int64Column, values: Int64Column) -> Int64Column:
    """The value of each id, `ABSENT` for those that are not among the ascending `known`."""
    found = np.full(len(ids), ABSENT, dtype=np.int64)
    at = np.searchsorted(known, ids)
    inside = np.flatnonzero(at < len(known))
    hits = inside[known[at[inside]] == ids[inside]]
    found[hits] = values[at[hits]]
    return found

"""Inputs of reconciliation: tables, inventories and checkpoints of a bucket of any size.

One of a hundred objects is unknown to the metadata.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from scripts.benchmarks.listed_bucket import ETAG_STEP, MODIFIED_MS, NAMESPACE, OBJECT_BYTES
from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.controller.snapshot.checkpoint_file import write_checkpoint
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.vocabulary.tables import (
    LISTING_COLUMNS,
    MAP_COLUMNS,
    ROWS_A_GROUP,
    arrow_schema,
    record_batch,
    table_writer,
)
from streammeta.reconcile.vocabulary.verdicts import Int64Column
from streammeta.storage.object_format.object_key import key_for
from streammeta.v1 import common_pb2

ORPHANS_ONE_IN = 100
TAKEN_MS = MODIFIED_MS + 30 * 86_400_000
"""Time of an inventory."""
CHECKPOINT, INVENTORY = "map.checkpoint", "listed"
"""File of the metadata, and folder of the inventory."""
_SHARDS = 16
_MAP_ROWS = 100_000
_FILE_ROWS = 500_000


def write_tables(folder: Path, keys: int) -> None:
    """Write the listing of a bucket, in the order of keys, and its metadata."""
    listing = folder / plan_folder.LISTING
    listing.mkdir(parents=True)
    for shard in range(_SHARDS):
        ids = np.arange(shard, keys, _SHARDS, dtype=np.int64)
        # S3 lists keys in their order, and a key begins with the reversed id.
        ids = ids[np.argsort(_key_prefix(ids), kind="stable")]
        path = listing / f"shard-{shard:05d}.parquet"
        with table_writer(path, LISTING_COLUMNS) as writer:
            for first in range(0, len(ids), ROWS_A_GROUP):
                writer.write_batch(_listing_rows(ids[first : first + ROWS_A_GROUP]))
    write_metadata(folder, keys)


def write_metadata(folder: Path, keys: int) -> None:
    """Write the table of the objects that the metadata knows."""
    place = folder / plan_folder.MAP
    place.mkdir(parents=True)
    with table_writer(place / "objects.parquet", MAP_COLUMNS) as writer:
        for ids in _chunks(keys, _MAP_ROWS):
            known = ids[ids % ORPHANS_ONE_IN != 0]
            columns = {
                name: np.zeros(len(known), np.int64) for name in arrow_schema(MAP_COLUMNS).names
            }
            columns |= {
                "object_id": known,
                "map_state": np.full(len(known), common_pb2.OBJECT_STATE_COMMITTED, np.int64),
                "map_size": np.full(len(known), OBJECT_BYTES, np.int64),
                "map_time_ms": np.full(len(known), MODIFIED_MS, np.int64),
            }
            writer.write_batch(record_batch(MAP_COLUMNS, columns))


def write_inventory(folder: Path, keys: int) -> None:
    """Write an inventory in Parquet, and a checkpoint of the metadata, as controllers send it."""
    (folder / INVENTORY).mkdir(parents=True)
    for number, ids in enumerate(_chunks(keys, _FILE_ROWS)):
        table = pa.table(
            {
                "path": [key_for(object_id, NAMESPACE) for object_id in ids.tolist()],
                "size": np.full(len(ids), OBJECT_BYTES),
                "modified": np.full(len(ids), MODIFIED_MS),
            }
        )
        pq.write_table(table, folder / INVENTORY / f"part-{number:05d}.parquet")

    ids = np.arange(keys, dtype=np.int64)
    known = ids[ids % ORPHANS_ONE_IN != 0]
    zeros = np.zeros(len(known), np.int64)
    objects = {
        "object_id": known,
        "state": np.full(len(known), common_pb2.OBJECT_STATE_COMMITTED, np.int8),
        "kind": zeros.astype(np.int8),
        "attributes": zeros.astype(np.int32),
        "node_id": zeros.astype(np.int32),
        "object_size": np.full(len(known), OBJECT_BYTES),
        "timestamp_ms": np.full(len(known), MODIFIED_MS),
    }
    sections = {
        "counters": {name: np.array([1 << 40]) for name in ("next_object_id", "next_stream_id")},
        "objects": objects,
        "bucket_claim": {"cluster_uuid": ["bench"], "issued_below": np.array([1 << 40])},
        "object_facts": {"object_id": known, "crc32c": known & 0xFFFFFFFF},
    }
    with (folder / CHECKPOINT).open("wb") as file:
        write_checkpoint(file, SnapshotId(EndOffset(1), Epoch(1)), "bench", sections)


def _chunks(keys: int, size: int) -> Iterator[Int64Column]:
    for start in range(0, keys, size):
        yield np.arange(start, min(start + size, keys), dtype=np.int64)


def _key_prefix(ids: Int64Column) -> Int64Column:
    """Return the number in the eight hex digits at the beginning of a key: the id's, reversed."""
    reversed_ids = np.zeros_like(ids)
    for digit in range(8):
        reversed_ids = reversed_ids << 4 | ids >> 4 * digit & 15
    return reversed_ids


def _listing_rows(ids: Int64Column) -> pa.RecordBatch:
    count = len(ids)
    return record_batch(
        LISTING_COLUMNS,
        {
            "key": [key_for(object_id, NAMESPACE) for object_id in ids.tolist()],
            "size": np.full(count, OBJECT_BYTES),
            "modified_ms": np.full(count, MODIFIED_MS),
            "etag": [f"{object_id * ETAG_STEP % (1 << 128):032x}" for object_id in ids.tolist()],
            "owner": np.zeros(count, dtype=np.int64),
            "object_id": ids,
            "note": [""] * count,
        },
    )

"""Bucket listing in shards on Spark executors, with the owner of every key.

Shards are adjacent ranges of the key order, so every key is in exactly one; they are cut where the
keys of this project are spread evenly. Knows nothing of the map.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from streammeta.reconcile.session import arrow_schema, job_errors, record_batch
from streammeta.reconcile.verdicts import Owner
from streammeta.storage.bucket_marker import is_own_key
from streammeta.storage.object_format.object_key import (
    ForeignKey,
    OtherClusterKey,
    OwnKey,
    cluster_namespace,
    parse_key,
)
from streammeta.storage.object_store.address import open_object_store
from streammeta.storage.object_store.base import ObjectInfo, ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NAMESPACE_PREFIX = cluster_namespace("x")[:-1]
_HEX_DIGITS = "0123456789abcdef"
_ROWS_A_BATCH = 5000
_TASKS_A_CORE = 4

# `object_id` is null in a key that names no object; `note` is another's namespace, or why a key is
# foreign.
_LISTING_COLUMNS = (
    "key string, size long, modified_ms long, etag string, owner long, object_id long, note string"
)
_UPLOAD_COLUMNS = "key string, upload_id string, started_ms long"


@dataclass(frozen=True, slots=True)
class Shard:
    """The keys behind `after`, up to and including `last`; None: no bound on that side."""

    after: str | None
    last: str | None


def shards_of(digits: int) -> tuple[Shard, ...]:
    """Cut all possible keys into 16^digits + 1 shards at every hex prefix of that length."""
    cuts = ["".join(prefix) for prefix in itertools.product(_HEX_DIGITS, repeat=digits)]
    return tuple(
        Shard(after, last) for after, last in zip([None, *cuts], [*cuts, None], strict=True)
    )


def list_shard(store: ObjectStore, shard: Shard) -> Iterator[ObjectInfo]:
    """The objects of one shard, in key order."""
    listed = store.list_objects(start_after=shard.after)
    if shard.last is None:
        return listed
    last = shard.last.encode()
    return itertools.takewhile(lambda info: info.key.encode() <= last, listed)


def write_listing(
    spark: SparkSession, uri: str, namespace: str, shards: Iterable[Shard], folder: Path
) -> int:
    """List the whole bucket into Parquet files in `folder`; returns the number of keys.

    Raises:
        SparkJobError: a shard could not be listed to its end; carries the store's message.
    """
    cut = [(shard.after, shard.last) for shard in shards]
    tasks = min(len(cut), _TASKS_A_CORE * spark.sparkContext.defaultParallelism)
    with job_errors("listing the bucket"):
        plan = spark.createDataFrame(cut, "after string, last string").repartition(tasks)
        plan.mapInArrow(_lister(uri, namespace), _LISTING_COLUMNS).write.parquet(str(folder))
        return spark.read.schema(_LISTING_COLUMNS).parquet(str(folder)).count()


def write_uploads(store: ObjectStore, folder: Path) -> int:
    """Write the unfinished multipart uploads to `folder` as Parquet; returns how many there are."""
    folder.mkdir()
    total = 0
    uploads = store.list_multipart_uploads()
    with pq.ParquetWriter(folder / "uploads.parquet", arrow_schema(_UPLOAD_COLUMNS)) as writer:
        while page := list(itertools.islice(uploads, _ROWS_A_BATCH)):
            columns = ("key", "upload_id", "started_ms")
            values = {name: [getattr(upload, name) for upload in page] for name in columns}
            writer.write_batch(record_batch(_UPLOAD_COLUMNS, values))
            total += len(page)
    return total


def _lister(
    uri: str, namespace: str
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make the function that an executor runs: shards in, listed keys out, with its own store."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        shards = [Shard(**row) for batch in batches for row in batch.to_pylist()]
        if not shards:
            return
        with closing(open_object_store(uri)) as store:
            for shard in shards:
                listed = list_shard(store, shard)
                while page := list(itertools.islice(listed, _ROWS_A_BATCH)):
                    yield _listing_rows(page, namespace)

    return run


def _listing_rows(page: list[ObjectInfo], namespace: str) -> pa.RecordBatch:
    owners = [owner_of(info.key, namespace) for info in page]
    values = {
        "key": [info.key for info in page],
        "size": [info.size for info in page],
        "modified_ms": [info.last_modified_ms for info in page],
        "etag": [info.etag for info in page],
        "owner": [int(owner) for owner, _, _ in owners],
        "object_id": [object_id for _, object_id, _ in owners],
        "note": [note for _, _, note in owners],
    }
    return record_batch(_LISTING_COLUMNS, values)


def owner_of(key: str, namespace: str) -> tuple[Owner, int | None, str]:
    """Owner of `key`, the object id it names, and a note for the report."""
    if is_own_key(key, namespace):
        return Owner.MARKER, None, ""
    other = key.partition("/")[0]
    if other.startswith(_NAMESPACE_PREFIX) and other != namespace:
        return Owner.OTHER_CLUSTER, None, other
    match parse_key(key, namespace):
        case OwnKey(object_id):
            return Owner.OWN, object_id, ""
        case OtherClusterKey(object_id, other):
            return Owner.OTHER_CLUSTER, object_id, other
        case ForeignKey(reason):
            return Owner.FOREIGN, None, reason

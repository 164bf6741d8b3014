"""Bucket listing in shards, with the owner of every key.

Shards are adjacent ranges of the key order, so every key is in exactly one. They are cut where the
cluster's keys are spread evenly.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from streammeta.reconcile.listing.key_owners import owner_columns, owner_of
from streammeta.reconcile.vocabulary import errors, tables, verdicts
from streammeta.storage.object_store.protocol.base import ObjectInfo, ObjectStore

_HEX_DIGITS = "0123456789abcdef"
# Five pages: Arrow's cost per batch is spread over more rows.
_ROWS_A_BATCH = 5000
_SAMPLE = 1000  # one page
_PREFIX_DIGITS = 8
_KEYS_A_SHARD = 50_000
_MOST_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Shard:
    """The keys after `after`, up to and including `last`. None means no bound."""

    after: str | None
    last: str | None


def shards_of(digits: int) -> tuple[Shard, ...]:
    """Cut all possible keys into 16^digits + 1 shards at every hex prefix of that length."""
    return _between(["".join(prefix) for prefix in itertools.product(_HEX_DIGITS, repeat=digits)])


def shards_between(cuts: Sequence[str]) -> tuple[Shard, ...]:
    """Cut all possible keys at `cuts`, which ascend in the order of UTF-8.

    Raises:
        ConfigurationError: the cuts do not ascend, or one is empty.
    """
    encoded = [cut.encode() for cut in cuts]
    if not all(encoded) or any(low >= high for low, high in itertools.pairwise(encoded)):
        raise errors.ConfigurationError(f"cuts are {','.join(cuts)!r}, expected keys that ascend")
    return _between(cuts)


def _between(cuts: Sequence[str]) -> tuple[Shard, ...]:
    return tuple(
        Shard(after, last) for after, last in zip([None, *cuts], [*cuts, None], strict=True)
    )


def shards_of_content(store: ObjectStore, namespace: str) -> tuple[Shard, ...]:
    """Cut a bucket so that a shard has at most about 50,000 objects of the cluster.

    Ids are spread evenly over the prefixes of keys, so the range of the first keys gives an
    estimate of their total number.

    Raises:
        StorageError: the bucket can't be read.
    """
    # From "0" on, because keys of objects begin with a hex digit.
    first = itertools.islice(list_shard(store, Shard("0", None)), _SAMPLE)
    prefixes = [
        info.key.partition("/")[0]
        for info in first
        if owner_of(info.key, namespace)[0] is verdicts.Owner.OWN
    ]
    # An estimate from few keys would be far off.
    if len(prefixes) < _SAMPLE // 2:
        return shards_of(1)  # few keys, or other keys come first
    # Share of the key space that the sample covers, if ids are spread evenly.
    reached = int(prefixes[-1], 16) / 16 ** len(prefixes[-1])
    keys = len(prefixes) / max(reached, 16**-_PREFIX_DIGITS)
    digits = next((digit for digit in (1, 2) if keys / 16**digit <= _KEYS_A_SHARD), _MOST_DIGITS)
    return shards_of(digits)


def list_shard(store: ObjectStore, shard: Shard) -> Iterator[ObjectInfo]:
    """Yield the objects of a shard, in key order."""
    listed = store.list_objects(start_after=shard.after)
    if shard.last is None:
        return listed
    last = shard.last.encode()
    # Keys are compared as bytes, in the order in which stores list.
    return itertools.takewhile(lambda info: os.fsencode(info.key) <= last, listed)


def listed_rows(
    store: ObjectStore, shard: Shard, namespace: str
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the keys of a shard with their owners, in key order."""
    listed = list_shard(store, shard)
    while page := list(itertools.islice(listed, _ROWS_A_BATCH)):
        yield _listing_rows(page, namespace)


def write_uploads(store: ObjectStore, folder: Path) -> int:
    """Write the unfinished multipart uploads to `folder` as Parquet, and return their number."""
    folder.mkdir()
    total = 0
    uploads = store.list_multipart_uploads()
    with pq.ParquetWriter(
        folder / "uploads.parquet", tables.arrow_schema(tables.UPLOAD_COLUMNS)
    ) as writer:
        while page := list(itertools.islice(uploads, _ROWS_A_BATCH)):
            columns = ("key", "upload_id", "started_ms")
            values = {name: [getattr(upload, name) for upload in page] for name in columns}
            writer.write_batch(tables.record_batch(tables.UPLOAD_COLUMNS, values))
            total += len(page)
    return total


def _listing_rows(page: list[ObjectInfo], namespace: str) -> pa.RecordBatch:
    keys = pa.array([_as_text(info.key) for info in page], pa.string())
    owners, object_ids, notes = owner_columns(keys, namespace)
    values = {
        "key": keys,
        "size": [info.size for info in page],
        "modified_ms": [info.last_modified_ms for info in page],
        "etag": [info.etag for info in page],
        "owner": owners,
        "object_id": object_ids,
        "note": notes,
    }
    return tables.record_batch(tables.LISTING_COLUMNS, values)


def _as_text(key: str) -> str:
    r"""Escape bytes of a key that are not UTF-8, as in a file's name: "a\xff"."""
    return key if key.isascii() else os.fsencode(key).decode("utf-8", "backslashreplace")

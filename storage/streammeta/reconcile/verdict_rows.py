"""Rows of the report, made of a listing that was joined with the map: the same for both engines.

A joined batch has the columns of the listing, and those of the map; null where one side has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from streammeta.reconcile.listing import owner_of
from streammeta.reconcile.tables import VERDICT_COLUMNS, arrow_schema, record_batch
from streammeta.reconcile.verdicts import (
    ABSENT,
    NUMBERED,
    Int64Column,
    JoinedColumns,
    Rules,
    Verdict,
    verdict_numbers,
)
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.base import OldVersion


def judged_rows(joined: pa.RecordBatch, rules: Rules, namespace: str) -> pa.RecordBatch:
    """Return the rows of the report, without those of which there is nothing to report."""
    numbers = verdict_numbers(_columns_of(joined), rules)
    verdicts = pa.DictionaryArray.from_arrays(numbers, [str(one) for one in NUMBERED])
    rows = _verdict_rows(joined, verdicts.cast(pa.string()), namespace)
    to_report = numbers != 0
    return rows if to_report.all() else rows.filter(pa.array(to_report))


def version_rows(versions: Sequence[OldVersion], namespace: str) -> pa.RecordBatch:
    """Return rows of the report on versions that are not current; their ids are the notes."""
    names = {True: Verdict.DELETE_MARKER, False: Verdict.OLD_VERSION}
    found: dict[str, Any] = {
        "key": [one.key for one in versions],
        "object_id": [owner_of(one.key, namespace)[1] for one in versions],
        "verdict": [str(names[one.is_delete_marker]) for one in versions],
        "note": [one.version_id for one in versions],
        "size": [one.size for one in versions],
        "modified_ms": [one.last_modified_ms for one in versions],
    }
    nothing = {name: [None] * len(versions) for name in arrow_schema(VERDICT_COLUMNS).names}
    return record_batch(VERDICT_COLUMNS, nothing | found)


def upload_rows(uploads: pa.RecordBatch, namespace: str) -> pa.RecordBatch:
    """Return rows of the report on unfinished uploads; their ids are the notes.

    An upload is no key: it never takes the place of the object that it would have become.
    """
    count = uploads.num_rows
    keys = uploads["key"].to_pylist()
    values: dict[str, Any] = {
        name: [None] * count for name in arrow_schema(VERDICT_COLUMNS).names
    } | {
        "key": keys,
        "object_id": [owner_of(key, namespace)[1] for key in keys],
        "verdict": [str(Verdict.UNFINISHED_UPLOAD)] * count,
        "note": uploads["upload_id"],
        "modified_ms": uploads["started_ms"],
    }
    return record_batch(VERDICT_COLUMNS, values)


def _columns_of(batch: pa.RecordBatch) -> JoinedColumns:
    def column(name: str) -> Int64Column:
        values: Int64Column = batch.column(name).fill_null(ABSENT).to_numpy(zero_copy_only=False)
        return values.astype(np.int64, copy=False)

    return JoinedColumns(**{name: column(name) for name in JoinedColumns.__dataclass_fields__})


def _verdict_rows(batch: pa.RecordBatch, verdicts: pa.Array, namespace: str) -> pa.RecordBatch:
    """The report's rows; an object that the bucket lacks is given the key it should have."""
    copied = ("note", "size", "modified_ms", "etag", "map_state", "map_size", "map_node")
    values: dict[str, Any] = {name: batch.column(name) for name in copied}
    values |= {"object_id": batch.column("object_id"), "verdict": verdicts}
    unnamed = batch.column("key").null_count > 0
    values["key"] = _named(batch, namespace) if unnamed else batch.column("key")
    return record_batch(VERDICT_COLUMNS, values)


def _named(batch: pa.RecordBatch, namespace: str) -> list[str]:
    ids: list[Any] = batch.column("object_id").to_pylist()
    keys: list[str | None] = batch.column("key").to_pylist()
    return [
        key_for(object_id, namespace) if key is None else key
        for key, object_id in zip(keys, ids, strict=True)
    ]

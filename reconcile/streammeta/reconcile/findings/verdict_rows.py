"""Rows of the report without a listed key: missing objects, uploads, noncurrent versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streammeta.reconcile.listing.key_owners import owner_of
from streammeta.reconcile.vocabulary import verdicts
from streammeta.reconcile.vocabulary.tables import VERDICT_COLUMNS, arrow_schema, record_batch
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.base import OldVersion


def unlisted_rows(
    ids: verdicts.Int64Column,
    of_map: Mapping[str, verdicts.Int64Column],
    rules: verdicts.Rules,
    namespace: str,
) -> tuple[pa.RecordBatch, npt.NDArray[np.int8]]:
    """Return rows of the report for objects in the metadata without a listed key.

    Objects with an empty verdict are omitted. The others get the key that they should have. The
    second value is the number of each row's verdict.
    """
    absent = np.full(len(ids), verdicts.ABSENT, dtype=np.int64)
    names = verdicts.JoinedColumns.__dataclass_fields__
    columns = {name: of_map.get(name, absent) for name in names} | {"object_id": ids}
    numbers = verdicts.verdict_numbers(verdicts.JoinedColumns(**columns), rules)
    kept = np.flatnonzero(numbers)
    numbers = numbers[kept]
    nothing = {name: [None] * len(kept) for name in arrow_schema(VERDICT_COLUMNS).names}
    found: dict[str, Any] = {
        "key": [key_for(object_id, namespace) for object_id in ids[kept].tolist()],
        "object_id": ids[kept],
        "verdict": [str(verdicts.NUMBERED[number]) for number in numbers.tolist()],
        **{name: of_map[name][kept] for name in ("map_state", "map_size", "map_node")},
    }
    return record_batch(VERDICT_COLUMNS, nothing | found), numbers


def version_rows(versions: Sequence[OldVersion], namespace: str) -> pa.RecordBatch:
    """Return rows of the report for noncurrent versions, with their ids as notes."""
    names = {True: verdicts.Verdict.DELETE_MARKER, False: verdicts.Verdict.OLD_VERSION}
    found: dict[str, Any] = {
        "key": [version.key for version in versions],
        "object_id": [owner_of(version.key, namespace)[1] for version in versions],
        "verdict": [str(names[version.is_delete_marker]) for version in versions],
        "note": [version.version_id for version in versions],
        "size": [version.size for version in versions],
        "modified_ms": [version.last_modified_ms for version in versions],
    }
    nothing = {name: [None] * len(versions) for name in arrow_schema(VERDICT_COLUMNS).names}
    return record_batch(VERDICT_COLUMNS, nothing | found)


def upload_rows(uploads: pa.RecordBatch, namespace: str) -> pa.RecordBatch:
    """Return rows of the report for unfinished uploads, with their ids as notes.

    An upload is not a key, so it never counts as the object that it would become.
    """
    count = uploads.num_rows
    keys = uploads["key"].to_pylist()
    values: dict[str, Any] = {
        name: [None] * count for name in arrow_schema(VERDICT_COLUMNS).names
    } | {
        "key": keys,
        "object_id": [owner_of(key, namespace)[1] for key in keys],
        "verdict": [str(verdicts.Verdict.UNFINISHED_UPLOAD)] * count,
        "note": uploads["upload_id"],
        "modified_ms": uploads["started_ms"],
    }
    return record_batch(VERDICT_COLUMNS, values)

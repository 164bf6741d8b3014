"""Reading of committed objects: checksum, footer, index or links.

Reads a sample or all objects completely, in the planning process. The findings go into the table of
the metadata's objects, for the verdict rules. An object that seems damaged is read twice, because a
store may return wrong bytes once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from streammeta.reconcile.vocabulary.tables import MAP_COLUMNS, arrow_schema, files_of, read_batches
from streammeta.reconcile.vocabulary.verdicts import ABSENT, WANTED_STATES, Reading
from streammeta.storage.errors import CorruptObjectError, ObjectNotFoundError
from streammeta.storage.object_format import composite, object_key, object_reader
from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.v1 import common_pb2

_READS_AT_ONCE = 8
_PIECE = 4 * 1024 * 1024
_READ = "read.parquet"


def read_objects(
    store: ObjectStore, of_map: Path, namespace: str, share: float, seed: int
) -> Mapping[Reading, int]:
    """Read the fraction `share`, 0..1, of the objects in the table `of_map`, and note the findings.

    `seed` determines the sample. Returns the number of objects by finding.

    Raises:
        StorageError: an object could not be read. The table is unchanged.
    """
    chance = np.random.default_rng(seed)
    counts: Counter[Reading] = Counter()
    before = files_of(of_map)
    draft = of_map / "read.draft"

    try:
        with (
            pq.ParquetWriter(draft, arrow_schema(MAP_COLUMNS)) as writer,
            ThreadPoolExecutor(_READS_AT_ONCE) as pool,
        ):
            for rows in read_batches(of_map, MAP_COLUMNS):
                wanted = np.isin(rows["map_state"].to_numpy(), WANTED_STATES)
                drawn = np.flatnonzero(wanted & (chance.random(rows.num_rows) < share))
                chosen = rows.take(pa.array(drawn)).to_pylist()
                keys = [object_key.key_for(row["object_id"], namespace) for row in chosen]
                found = list(
                    pool.map(
                        lambda key, row: reading_of(store, key, row["map_kind"], row["map_crc"]),
                        keys,
                        chosen,
                    )
                )
                counts.update(found)
                writer.write_batch(_noted(rows, drawn.tolist(), found))
    except BaseException:
        draft.unlink(missing_ok=True)
        raise

    for path in before:
        path.unlink()

    draft.rename(of_map / _READ)
    return counts


def reading_of(store: ObjectStore, key: str, kind: int, crc32c: int) -> Reading:
    """Read an object of a `common_pb2.ObjectKind`. A `crc32c` of `ABSENT` is not compared.

    An absent object is `UNREAD`. Raises `StorageError`.
    """
    try:
        found = _read(store, key, kind, crc32c)
        return found if found is Reading.SOUND else _read(store, key, kind, crc32c)
    except ObjectNotFoundError:
        return Reading.UNREAD


def _read(store: ObjectStore, key: str, kind: int, crc32c: int) -> Reading:
    size = store.head(key).size
    checksum = ObjectChecksum()
    for at in range(0, size, _PIECE):
        checksum.update(store.get_range(key, at, min(at + _PIECE, size)))
    if crc32c not in (ABSENT, checksum.value):
        return Reading.CHECKSUM_DIFFERS
    try:
        _check_form(store, key, kind, size)
    except CorruptObjectError:
        return Reading.MALFORMED
    return Reading.SOUND


def _check_form(store: ObjectStore, key: str, kind: int, size: int) -> None:
    """Raise `CorruptObjectError` unless footer and index, or links, can be read."""
    if kind == common_pb2.OBJECT_KIND_NAMED:
        return  # a broker's object, with any content
    if kind == common_pb2.OBJECT_KIND_COMPOSITE:
        composite.decode_composite(store.get_range(key), source=key)
        return
    # Only commits of stream set objects assign offsets. Elsewhere they would be taken for absolute.
    may_be_relative = kind == common_pb2.OBJECT_KIND_STREAM_SET
    reader = object_reader.ObjectReader(key, size, accept_relative=may_be_relative)
    while (wanted := reader.needed) is not None:
        reader.receive(store.get_range(key, wanted.start, wanted.end))


def _noted(rows: pa.RecordBatch, places: list[int], found: list[Reading]) -> pa.RecordBatch:
    readings = rows["reading"].to_numpy().copy()
    readings[places] = found
    at = rows.schema.get_field_index("reading")
    return rows.set_column(at, rows.schema.field(at), pa.array(readings))

"""Columns of the tables of plan and apply, and helpers for folders of Parquet files.

Columns are defined in Spark's form, "key string, size long", with only these two types, so that
both engines share the definition. A table is a folder of Parquet files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# `object_id` is null in a key of no object. `note` is another cluster's namespace, or the reason
# why a key is foreign.
LISTING_COLUMNS = (
    "key string, size long, modified_ms long, etag string, owner long, object_id long, note string"
)
UPLOAD_COLUMNS = "key string, upload_id string, started_ms long"
MAP_COLUMNS = (
    "object_id long, map_state long, map_size long, map_time_ms long, map_attributes long,"
    " map_node long, map_kind long, map_crc long, reading long"
)
VERDICT_COLUMNS = (
    "key string, object_id long, verdict string, note string, size long, modified_ms long,"
    " etag string, map_state long, map_size long, map_node long"
)
CANDIDATE_COLUMNS = "key string, object_id long, size long, modified_ms long, etag string"
# A row is a range of a stream in an object, or an object without ranges, with a null range.
LOSS_COLUMNS = (
    "key string, object_id long, verdict string, stream_id long, start_offset long,"
    " end_offset long, committed_ms long, min_timestamp_ms long, max_timestamp_ms long,"
    " map_size long, map_node long"
)
OUTCOME_COLUMNS = "key string, object_id long, size long, outcome string, detail string"


ROWS_A_GROUP = 20_000
"""Rows of a row group of a listing, and of a batch."""

# Arrow reads ahead by this much for each column.
_READ_BYTES = 1 << 18
# Small groups are read together. Each open group needs a buffer per column.
_ROWS_TO_READ, _GROUPS_TO_READ = 40_000, 16

_FEW_VALUES = ("verdict", "note", "owner", "map_state", "map_kind", "map_node", "reading")
"""Columns with few distinct values. A dictionary of other columns costs time and saves nothing."""

_RANDOM = ("etag",)
"""Columns that do not compress."""


def arrow_schema(columns: str) -> pa.Schema:
    """Return the Arrow schema of a column definition."""
    kinds = {"string": pa.string(), "long": pa.int64()}
    pairs = (column.split() for column in columns.split(","))
    return pa.schema([pa.field(name, kinds[kind]) for name, kind in pairs])


def record_batch(columns: str, values: Mapping[str, Any]) -> pa.RecordBatch:
    """Return rows with these columns, from a list or Arrow array for each of them."""
    return pa.RecordBatch.from_pydict(values, schema=arrow_schema(columns))


def writer_options(schema: pa.Schema) -> dict[str, Any]:
    """Return the fastest options of a Parquet writer for these columns.

    Nothing reads statistics, so they are omitted.
    """
    few = [name for name in schema.names if name in _FEW_VALUES]
    numbers = [field.name for field in schema if field.type == pa.int64()]
    return {
        "use_dictionary": few,
        "column_encoding": {name: "DELTA_BINARY_PACKED" for name in numbers if name not in few},
        "compression": {name: "none" if name in _RANDOM else "lz4" for name in schema.names},
        "write_statistics": False,
    }


def table_writer(where: Path | pa.NativeFile, columns: str) -> pq.ParquetWriter:
    """Return a writer of one file of a table, with `writer_options`."""
    schema = arrow_schema(columns)
    return pq.ParquetWriter(where, schema, **writer_options(schema))


def files_of(folder: Path) -> list[Path]:
    """Return the files of a table, by name, or an empty list without the folder."""
    return sorted(folder.glob("*.parquet"))


def count_rows(folder: Path) -> int:
    """Return the number of rows of a table from the files' metadata."""
    # Reads the footers only, not the rows.
    return sum(pq.read_metadata(path).num_rows for path in files_of(folder))


def read_batches(folder: Path, columns: str) -> Iterator[pa.RecordBatch]:
    """Read columns of a table, file by file, in bounded memory."""
    for path in files_of(folder):
        yield from read_file(path, columns)


def read_file(path: Path, columns: str) -> Iterator[pa.RecordBatch]:
    """Read columns of one file of a table, like `read_batches`."""
    schema = arrow_schema(columns)
    with open_table_file(path) as file:
        for groups in groups_to_read(file.metadata):
            # More rows, or Arrow's threads for columns, cost memory and save no time.
            pieces = file.iter_batches(ROWS_A_GROUP, groups, schema.names, use_threads=False)
            for batch in pieces:
                rows = batch.select(schema.names)
                # Files of Spark or of earlier versions may have other types for the same values,
                # such as large strings.
                yield rows if rows.schema.equals(schema) else rows.cast(schema)


def open_table_file(path: Path, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Open one file of a table, with its `metadata` if known."""
    # Without a buffer Arrow reads a whole column chunk, up to 128 MiB in files of Spark.
    return pq.ParquetFile(path, metadata=metadata, buffer_size=_READ_BYTES)


def gather_batches(pieces: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches of at least `rows` rows, except the last."""
    waiting: list[pa.RecordBatch] = []
    count = 0
    for piece in pieces:
        waiting.append(piece)
        count += piece.num_rows
        # Joins and sorts cost per batch, so small row groups are merged first.
        if count >= rows:
            yield pa.concat_batches(waiting)
            waiting, count = [], 0
    if waiting:
        yield pa.concat_batches(waiting)


def groups_to_read(metadata: pq.FileMetaData) -> Iterator[list[int]]:
    """Yield row groups to read together. Arrow keeps a buffer per column of each open group."""
    groups: list[int] = []
    count = 0
    for number in range(metadata.num_row_groups):
        groups.append(number)
        count += metadata.row_group(number).num_rows
        if count >= _ROWS_TO_READ or len(groups) == _GROUPS_TO_READ:
            yield groups
            groups, count = [], 0
    if groups:
        yield groups


@dataclass(frozen=True, slots=True)
class Tally:
    """Number of keys and bytes in the bucket. A missing object counts 0 bytes."""

    keys: int = 0
    size: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.keys + other.keys, self.size + other.size)


class Counts:
    """Keys and bytes for each value of a column."""

    def __init__(self, column: str) -> None:
        self._column = column
        self._found: defaultdict[Any, Tally] = defaultdict(Tally)

    def add(self, rows: pa.RecordBatch) -> None:
        """Count the rows of a batch."""
        table = pa.Table.from_batches([rows]).select([self._column, "size"])
        counted = table.group_by(self._column).aggregate([([], "count_all"), ("size", "sum")])
        for row in counted.to_pylist():
            self._found[row[self._column]] += Tally(row["count_all"], row["size_sum"] or 0)

    def tallies(self) -> dict[Any, Tally]:
        """Return the tally of each value."""
        return self._found

"""Columns of the tables of plan and apply, as Arrow has them, and small helpers on Parquet folders.

Columns are written as Spark writes them, "key string, size long", with these two types alone, so
that both engines have one definition. A table is a folder of Parquet files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# `object_id` is null in a key that names no object; `note` is another's namespace, or why a key is
# foreign.
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
# A row is a range of a stream in an object, or an object that holds none: the range is null then.
LOSS_COLUMNS = (
    "key string, object_id long, verdict string, stream_id long, start_offset long,"
    " end_offset long, committed_ms long, min_timestamp_ms long, max_timestamp_ms long,"
    " map_size long, map_node long"
)
OUTCOME_COLUMNS = "key string, object_id long, size long, outcome string, detail string"


ROWS_A_GROUP = 20_000
"""Rows of a row group of a listing, and of a batch that is read."""

_READ_BYTES = 1 << 18
_ROWS_TO_READ, _GROUPS_TO_READ = 40_000, 16

_FEW_VALUES = ("verdict", "note", "owner", "map_state", "map_kind", "map_node", "reading")
"""Columns of few different values; a dictionary of any other costs time and saves nothing."""

_RANDOM = ("etag",)
"""Columns that no compression makes smaller."""


def arrow_schema(columns: str) -> pa.Schema:
    """The Arrow schema of such columns."""
    kinds = {"string": pa.string(), "long": pa.int64()}
    pairs = (column.split() for column in columns.split(","))
    return pa.schema([pa.field(name, kinds[kind]) for name, kind in pairs])


def record_batch(columns: str, values: Mapping[str, Any]) -> pa.RecordBatch:
    """Rows with these columns, from one list or Arrow array for each of them."""
    return pa.RecordBatch.from_pydict(values, schema=arrow_schema(columns))


def writer_options(schema: pa.Schema) -> dict[str, Any]:
    """Options of a Parquet writer for columns of tables: what is soonest written and read.

    Statistics are left out, which nothing reads.
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
    """A writer of one file of a table, with `writer_options`."""
    schema = arrow_schema(columns)
    return pq.ParquetWriter(where, schema, **writer_options(schema))


def files_of(folder: Path) -> list[Path]:
    """The files of a table, by name; none if there is no such folder."""
    return sorted(folder.glob("*.parquet"))


def count_rows(folder: Path) -> int:
    """The number of rows of a table; the rows themselves are not read."""
    return sum(pq.read_metadata(path).num_rows for path in files_of(folder))


def read_batches(folder: Path, columns: str) -> Iterator[pa.RecordBatch]:
    """Read these columns of a table, file by file, in memory that does not grow with the files."""
    for path in files_of(folder):
        yield from read_file(path, columns)


def read_file(path: Path, columns: str) -> Iterator[pa.RecordBatch]:
    """Read these columns of one file of a table, as `read_batches` does."""
    schema = arrow_schema(columns)
    with open_table_file(path) as file:
        for groups in groups_to_read(file.metadata):
            # More rows, and columns in threads of Arrow's own, cost memory and save no time.
            pieces = file.iter_batches(ROWS_A_GROUP, groups, schema.names, use_threads=False)
            for batch in pieces:
                rows = batch.select(schema.names)
                yield rows if rows.schema.equals(schema) else rows.cast(schema)


def open_table_file(path: Path, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Open one file of a table; with its `metadata`, if that is known."""
    # Without a buffer a column is read whole, and Spark's pieces of one have up to 128 MiB.
    return pq.ParquetFile(path, metadata=metadata, buffer_size=_READ_BYTES)


def gathered(pieces: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of so many, or a few more."""
    waiting: list[pa.RecordBatch] = []
    count = 0
    for piece in pieces:
        waiting.append(piece)
        count += piece.num_rows
        if count >= rows:
            yield pa.concat_batches(waiting)
            waiting, count = [], 0
    if waiting:
        yield pa.concat_batches(waiting)


def groups_to_read(metadata: pq.FileMetaData) -> Iterator[list[int]]:
    """Row groups to read together: all at once would keep a buffer for each column of each."""
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
    """Number of keys and of bytes in the bucket; a missing object counts 0 bytes."""

    keys: int
    size: int


class Counts:
    """Keys and bytes for each value of a column."""

    def __init__(self, column: str) -> None:
        self._column = column
        self._found: dict[Any, Tally] = {}

    def add(self, rows: pa.RecordBatch) -> None:
        """Count the rows of a batch."""
        table = pa.Table.from_batches([rows]).select([self._column, "size"])
        counted = table.group_by(self._column).aggregate([([], "count_all"), ("size", "sum")])
        for row in counted.to_pylist():
            before = self._found.get(row[self._column], Tally(0, 0))
            self._found[row[self._column]] = Tally(
                before.keys + row["count_all"], before.size + (row["size_sum"] or 0)
            )

    def tallies(self) -> dict[Any, Tally]:
        """All that were counted."""
        return self._found

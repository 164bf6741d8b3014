"""Verdicts on a listing in this process: one pass over its numeric columns, batch by batch.

The report contains the keys, etags and notes of the listing unchanged, so their bytes are copied
without decoding, except for candidates. The columns of the join and the verdict rules are added.
One thread reads and joins the next batches, and another one copies the finished ones.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from streammeta.reconcile.engines.background import BackgroundWriter, prefetch
from streammeta.reconcile.engines.metadata_join import Joined, MetadataJoin
from streammeta.reconcile.findings.verdict_rows import unlisted_rows
from streammeta.reconcile.listing.repeated_keys import in_order_of_partitions
from streammeta.reconcile.parquet.arrow_start import return_memory
from streammeta.reconcile.parquet.splice import (
    Pages,
    Presence,
    Splice,
    SplicePart,
    name_pages,
    number_pages,
    open_splice,
)
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.vocabulary import errors, tables, verdicts

_FILE = "part-00000.parquet"
_LISTED = ("owner", "object_id", "size", "modified_ms")
_NAMED = ("key", "etag")
_OF_MAP = ("map_state", "map_size", "map_node")
_ORPHAN = verdicts.NUMBERED.index(verdicts.Verdict.ORPHAN)
_Numbers = npt.NDArray[np.int8]


def judge_locally(
    draft: Path, rules: verdicts.Rules, namespace: str
) -> Mapping[verdicts.Verdict, tables.Tally]:
    """See `Engine.judge`."""
    counts = _Counts()
    with ExitStack() as stack:
        # Unbuffered, because other threads read it by position.
        scratch = stack.enter_context(tempfile.TemporaryFile(dir=draft, buffering=0))
        spread = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=draft)))
        metadata = MetadataJoin(draft / plan_folder.MAP, scratch)
        listing = draft / plan_folder.LISTING
        files = in_order_of_partitions(listing, metadata.partitions_of, spread)
        report = stack.enter_context(_Report(draft))
        writer = stack.enter_context(BackgroundWriter())
        for piece, joined in prefetch(_join_pieces(files, metadata)):
            # All rows of a piece at once. A call per row would take most of the time.
            numbers = verdicts.verdict_numbers(_joined_columns(piece, joined), rules)
            # Number 0 is for objects without a listed key, and every row here has one.
            if not numbers.all():
                raise errors.ReconcileError(
                    f"{piece.path.name} of the listing has a key without a size. Make a new plan"
                )
            counts.add(numbers, piece.columns["size"])
            made = list(_made_pages(numbers, joined, piece.rows_of_groups()))
            writer.submit(partial(report.add_listed, piece, numbers, made))
        # After all rows: an object is missing only if no row matched it.
        for ids, columns in metadata.unmet():
            rows, numbers = unlisted_rows(ids, columns, rules, namespace)
            counts.add(numbers, np.zeros(len(numbers), dtype=np.int64))
            writer.submit(partial(report.add_rows, rows))

    return_memory()
    return counts.tallies()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Row groups of a file of the listing, with the columns for the verdict rules."""

    path: Path
    metadata: pq.FileMetaData
    groups: Sequence[int]
    columns: Mapping[str, verdicts.Int64Column]

    def rows_of_groups(self) -> list[int]:
        """The number of rows of each row group."""
        return [self.metadata.row_group(group).num_rows for group in self.groups]


def _join_pieces(files: Iterable[Path], metadata: MetadataJoin) -> Iterator[tuple[_Piece, Joined]]:
    for piece in _pieces(files):
        yield piece, metadata.join(piece.columns["owner"], piece.columns["object_id"])


def _pieces(files: Iterable[Path]) -> Iterator[_Piece]:
    for path in files:
        with tables.open_table_file(path) as file:
            for groups in tables.groups_to_read(file.metadata):
                table = file.read_row_groups(groups, columns=_LISTED, use_threads=False)
                columns = {name: _numbers_of(table.column(name)) for name in _LISTED}
                yield _Piece(path, file.metadata, groups, columns)


def _numbers_of(column: pa.ChunkedArray) -> verdicts.Int64Column:
    filled = column.fill_null(verdicts.ABSENT) if column.null_count else column
    values: verdicts.Int64Column = filled.to_numpy()
    return values


def _joined_columns(piece: _Piece, joined: Joined) -> verdicts.JoinedColumns:
    """Return the input of the verdict rules. No rule for listed keys uses the commit time."""
    wanted = verdicts.JoinedColumns.__dataclass_fields__
    metadata = {name: column for name, column in joined.columns.items() if name in wanted}
    return verdicts.JoinedColumns(**piece.columns, **metadata, map_time_ms=verdicts.ABSENT)


class _Counts:
    """Keys and bytes by the number of their verdict."""

    def __init__(self) -> None:
        self._found: defaultdict[int, tables.Tally] = defaultdict(tables.Tally)

    def add(self, numbers: _Numbers, sizes: verdicts.Int64Column) -> None:
        """Count rows. The verdict number 0 stands for no verdict."""
        for number, count in _present(numbers):
            # Usually one verdict covers the whole batch.
            chosen = sizes if count == len(numbers) else sizes[numbers == number]
            self._found[number] += tables.Tally(count, int(chosen.sum()))

    def tallies(self) -> dict[verdicts.Verdict, tables.Tally]:
        """Return the tally of each verdict."""
        return {
            verdicts.Verdict(verdicts.NUMBERED[number]): tally
            for number, tally in self._found.items()
            if number
        }


def _present(numbers: _Numbers) -> list[tuple[int, int]]:
    """Return the occurring numbers, ascending, with their counts."""
    counts = np.bincount(numbers)
    return [(number, int(counts[number])) for number in np.flatnonzero(counts).tolist()]


class _Report:
    """Tables of verdicts and candidates under construction. For one thread at a time."""

    def __init__(self, draft: Path) -> None:
        self._verdicts_folder = draft / plan_folder.VERDICTS
        self._candidates_folder = draft / plan_folder.CANDIDATES
        self._stack = ExitStack()
        self._source = _Source()

    def __enter__(self) -> _Report:
        for folder in (self._verdicts_folder, self._candidates_folder):
            folder.mkdir()
        with ExitStack() as stack:
            schema = tables.arrow_schema(tables.VERDICT_COLUMNS)
            splice = open_splice(self._verdicts_folder / _FILE, schema)
            self._verdicts: Splice = stack.enter_context(splice)
            candidates = tables.table_writer(
                self._candidates_folder / _FILE, tables.CANDIDATE_COLUMNS
            )
            self._candidates = stack.enter_context(candidates)
            stack.enter_context(self._source)
            # Only if every file opened. Otherwise the inner stack closes the opened ones.
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.__exit__(*failure)  # type: ignore[arg-type]

    def add_listed(
        self, piece: _Piece, numbers: _Numbers, made: Sequence[Mapping[str, Pages]]
    ) -> None:
        """Add rows of a listing, with the new columns of each row group."""
        self._source.go_to(piece)
        for group, pages in zip(piece.groups, made, strict=True):
            self._verdicts.add(SplicePart(self._source.file, piece.metadata, group), pages)
        self._add_candidates(piece, np.flatnonzero(numbers == _ORPHAN))

    def _add_candidates(self, piece: _Piece, orphans: npt.NDArray[np.intp]) -> None:
        """Write the orphans of a piece, reading only row groups with orphans."""
        first = 0
        named: list[pa.Table] = []
        for group, count in zip(piece.groups, piece.rows_of_groups(), strict=True):
            # Orphans ascend, so the rows of a group are a slice.
            rows = orphans[slice(*np.searchsorted(orphans, (first, first + count)))] - first
            first += count
            if len(rows):
                table = self._source.table.read_row_group(group, _NAMED, use_threads=False)
                named.append(table.take(pa.array(rows)))

        if named:
            found = pa.concat_tables(named)
            columns = {name: found.column(name) for name in _NAMED}
            columns |= {name: column[orphans] for name, column in piece.columns.items()}
            schema = self._candidates.schema
            columns = {name: columns[name] for name in schema.names}
            self._candidates.write_table(pa.table(columns, schema=schema))

    def add_rows(self, rows: pa.RecordBatch) -> None:
        """Add rows of the report without a listed key."""
        if rows.num_rows:
            with pa.BufferOutputStream() as sink:
                with tables.table_writer(sink, tables.VERDICT_COLUMNS) as writer:
                    writer.write_batch(rows)
                written = sink.getvalue()
            metadata = pq.read_metadata(pa.BufferReader(written))
            for group in range(metadata.num_row_groups):
                self._verdicts.add(SplicePart(pa.BufferReader(written), metadata, group), {})


class _Source:
    """The current file of the listing."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._stack = ExitStack()
        self.file: FileIO
        self.table: pq.ParquetFile

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def go_to(self, piece: _Piece) -> None:
        """Open the file of a piece unless it is open already."""
        if piece.path != self._path:
            self._stack.close()
            self._path = piece.path
            self.file = self._stack.enter_context(piece.path.open("rb", buffering=0))
            self.table = self._stack.enter_context(
                tables.open_table_file(piece.path, piece.metadata)
            )


def _made_pages(
    numbers: _Numbers, joined: Joined, rows_of_groups: Sequence[int]
) -> Iterator[Mapping[str, Pages]]:
    """Yield the new columns of each row group: of the join and the verdicts."""
    ends = itertools.accumulate(rows_of_groups)
    for rows in [slice(end - count, end) for end, count in zip(ends, rows_of_groups, strict=True)]:
        presence = Presence(joined.is_known[rows])
        pages = {name: number_pages(joined.columns[name][rows], presence) for name in _OF_MAP}
        yield pages | {"verdict": name_pages(numbers[rows], verdicts.NUMBERED)}

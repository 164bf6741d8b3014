"""Verdicts on a listing in the process itself: one pass over its numbers, batch by batch.

Keys, etags and notes of a listing are in the report as they are in the listing, so their bytes are
copied and nothing of them is decoded, but for candidates. What the join and the ladder add is
written beside them. One thread reads and joins ahead, and one copies behind.
"""

from __future__ import annotations

import itertools
import tempfile
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

from streammeta.reconcile.engines.background import Behind, ahead
from streammeta.reconcile.engines.metadata_join import Joined, MetadataJoin
from streammeta.reconcile.findings.verdict_rows import unlisted_rows
from streammeta.reconcile.listing.order import in_order_of_partitions
from streammeta.reconcile.parquet.arrow_start import return_memory
from streammeta.reconcile.parquet.pages import Pages, Presence, name_pages, number_pages
from streammeta.reconcile.parquet.splice import Splice, SplicePart, open_splice
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.vocabulary.errors import ReconcileError
from streammeta.reconcile.vocabulary.tables import (
    CANDIDATE_COLUMNS,
    VERDICT_COLUMNS,
    Tally,
    arrow_schema,
    groups_to_read,
    open_table_file,
    table_writer,
)
from streammeta.reconcile.vocabulary.verdicts import (
    ABSENT,
    NUMBERED,
    Int64Column,
    JoinedColumns,
    Rules,
    Verdict,
    verdict_numbers,
)

_FILE = "part-00000.parquet"
_LISTED = ("owner", "object_id", "size", "modified_ms")
_NAMED = ("key", "etag")
_OF_MAP = ("map_state", "map_size", "map_node")
_ORPHAN = NUMBERED.index(Verdict.ORPHAN)
_Numbers = npt.NDArray[np.int8]


def judge_locally(draft: Path, rules: Rules, namespace: str) -> Mapping[Verdict, Tally]:
    """See `Engine.judge`."""
    counts = _Counts()
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryFile(dir=draft, buffering=0))
        spread = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=draft)))
        of_map = MetadataJoin(draft / plan_folder.MAP, scratch)
        listing = draft / plan_folder.LISTING
        files = in_order_of_partitions(listing, of_map.partitions_of, spread)
        report = stack.enter_context(_Report(draft))
        behind = stack.enter_context(Behind())
        for piece, joined in ahead(_joined(files, of_map)):
            numbers = verdict_numbers(_judged_by(piece, joined), rules)
            if not numbers.all():
                raise ReconcileError(f"{piece.path.name} of the listing has a key without a size")
            counts.add(numbers, piece.columns["size"])
            made = list(_made_pages(numbers, joined, piece.rows_of_groups()))
            behind.take(partial(report.add_listed, piece, numbers, made))
        for ids, columns in of_map.unmet():
            rows, numbers = unlisted_rows(ids, columns, rules, namespace)
            counts.add(numbers, np.zeros(len(numbers), dtype=np.int64))
            behind.take(partial(report.add_rows, rows))

    return_memory()
    return counts.tallies()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some row groups of a file of the listing, with the columns that are judged."""

    path: Path
    metadata: pq.FileMetaData
    groups: Sequence[int]
    columns: Mapping[str, Int64Column]

    def rows_of_groups(self) -> list[int]:
        """The number of rows of each row group."""
        return [self.metadata.row_group(group).num_rows for group in self.groups]


def _joined(files: Iterable[Path], of_map: MetadataJoin) -> Iterator[tuple[_Piece, Joined]]:
    for piece in _pieces(files):
        yield piece, of_map.join(piece.columns["owner"], piece.columns["object_id"])


def _pieces(files: Iterable[Path]) -> Iterator[_Piece]:
    for path in files:
        with open_table_file(path) as file:
            for groups in groups_to_read(file.metadata):
                table = file.read_row_groups(groups, columns=_LISTED, use_threads=False)
                columns = {name: _numbers_of(table.column(name)) for name in _LISTED}
                yield _Piece(path, file.metadata, groups, columns)


def _numbers_of(column: pa.ChunkedArray) -> Int64Column:
    filled = column.fill_null(ABSENT) if column.null_count else column
    values: Int64Column = filled.to_numpy()
    return values


def _judged_by(piece: _Piece, joined: Joined) -> JoinedColumns:
    """What the ladder looks at. When objects were committed matters to none that is listed."""
    wanted = JoinedColumns.__dataclass_fields__
    of_map = {name: column for name, column in joined.columns.items() if name in wanted}
    return JoinedColumns(**piece.columns, **of_map, map_time_ms=ABSENT)


class _Counts:
    """Keys and bytes by the number of their verdict."""

    def __init__(self) -> None:
        self._found: dict[int, Tally] = {}

    def add(self, numbers: _Numbers, sizes: Int64Column) -> None:
        """Count rows; a verdict of the number 0 is none."""
        for number, count in _present(numbers):
            of_it = sizes if count == len(numbers) else sizes[numbers == number]
            before = self._found.get(number, Tally(0, 0))
            self._found[number] = Tally(before.keys + count, before.size + int(of_it.sum()))

    def tallies(self) -> dict[Verdict, Tally]:
        """All that were counted."""
        return {Verdict(NUMBERED[number]): tally for number, tally in self._found.items() if number}


def _present(numbers: _Numbers) -> list[tuple[int, int]]:
    """The numbers that occur, ascending, and how often."""
    counts = np.bincount(numbers)
    return [(number, int(counts[number])) for number in np.flatnonzero(counts).tolist()]


class _Report:
    """The tables of verdicts and candidates under way. Work of one thread at a time."""

    def __init__(self, draft: Path) -> None:
        self._verdicts_folder = draft / plan_folder.VERDICTS
        self._candidates_folder = draft / plan_folder.CANDIDATES
        self._stack = ExitStack()
        self._source = _Source()

    def __enter__(self) -> _Report:
        for folder in (self._verdicts_folder, self._candidates_folder):
            folder.mkdir()
        with ExitStack() as stack:
            schema = arrow_schema(VERDICT_COLUMNS)
            splice = open_splice(self._verdicts_folder / _FILE, schema)
            self._verdicts: Splice = stack.enter_context(splice)
            candidates = table_writer(self._candidates_folder / _FILE, CANDIDATE_COLUMNS)
            self._candidates = stack.enter_context(candidates)
            stack.enter_context(self._source)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.__exit__(*failure)  # type: ignore[arg-type]

    def add_listed(
        self, piece: _Piece, numbers: _Numbers, made: Sequence[Mapping[str, Pages]]
    ) -> None:
        """Add rows of a listing, with the columns that were made for each of its row groups."""
        self._source.go_to(piece)
        for group, pages in zip(piece.groups, made, strict=True):
            self._verdicts.add(SplicePart(self._source.file, piece.metadata, group), pages)
        self._add_candidates(piece, np.flatnonzero(numbers == _ORPHAN))

    def _add_candidates(self, piece: _Piece, orphans: npt.NDArray[np.intp]) -> None:
        """Write these rows of a piece; of a row group without any nothing is read."""
        first = 0
        named: list[pa.Table] = []
        for group, count in zip(piece.groups, piece.rows_of_groups(), strict=True):
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
        """Add rows of the report that no listing has."""
        if rows.num_rows:
            with pa.BufferOutputStream() as sink:
                with table_writer(sink, VERDICT_COLUMNS) as writer:
                    writer.write_batch(rows)
                written = sink.getvalue()
            metadata = pq.read_metadata(pa.BufferReader(written))
            for group in range(metadata.num_row_groups):
                self._verdicts.add(SplicePart(pa.BufferReader(written), metadata, group), {})


class _Source:
    """The file of the listing that is copied from."""

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
        """Open the file of a piece, unless it is open."""
        if piece.path != self._path:
            self._stack.close()
            self._path = piece.path
            self.file = self._stack.enter_context(piece.path.open("rb", buffering=0))
            self.table = self._stack.enter_context(open_table_file(piece.path, piece.metadata))


def _made_pages(
    numbers: _Numbers, joined: Joined, rows_of_groups: Sequence[int]
) -> Iterator[Mapping[str, Pages]]:
    """Columns that the join and the ladder add to each row group of a listing."""
    ends = itertools.accumulate(rows_of_groups)
    for rows in [slice(end - count, end) for end, count in zip(ends, rows_of_groups, strict=True)]:
        presence = Presence(joined.is_known[rows])
        pages = {name: number_pages(joined.columns[name][rows], presence) for name in _OF_MAP}
        yield pages | {"verdict": name_pages(numbers[rows], NUMBERED)}

"""Order of a listing's keys for a join by partitions, and keys with more than one row.

A listing of the bucket has the order of keys, which is also the order of partitions. An inventory
may have any order, and each of its batches would need every partition. Its rows are therefore
spread over one file per partition and read file by file. This needs disk for a second copy of the
listing, and memory for one partition.

A listing of the bucket has each key once, but a table or an inventory may not. The newest row of a
key counts. Ties are broken by size, then by etag. Rows of noncurrent versions and delete markers
all count.

Finding such keys takes 8 bytes of disk per key and a sort in pieces. Only a listing with repeated
keys is rewritten, in parts small enough for memory.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streammeta.reconcile.parquet.arrow_start import return_memory
from streammeta.reconcile.vocabulary import tables
from streammeta.reconcile.vocabulary.tables import LISTING_COLUMNS, ROWS_A_GROUP, table_writer
from streammeta.reconcile.vocabulary.verdicts import ABSENT, Int64Column, Owner

_ROWS_A_BATCH = 20_000
_USED_COLUMNS = "owner long, object_id long"

PartitionsOf: TypeAlias = Callable[[pa.RecordBatch], npt.NDArray[np.uint8]]
"""Returns the partition of each row, 0 for a row in none."""


def in_order_of_partitions(
    listing: Path, partitions_of: PartitionsOf, scratch: Path
) -> Iterator[Path]:
    """Yield the files of a listing, with its rows in the order of partitions.

    `scratch` is an empty folder for files, which the caller removes.
    """
    # The first batch of each file is a sample. A wrong guess costs time, not correctness.
    if all(map(_is_ascending, map(partitions_of, _first_batches(listing)))):
        yield from tables.files_of(listing)
        return

    spread(listing, partitions_of, scratch)
    return_memory()
    for path in sorted(scratch.iterdir()):
        with (
            pa.OSFile(str(path)) as file,
            pa.ipc.open_stream(file) as pieces,
            tables.table_writer(path.with_suffix(".parquet"), tables.LISTING_COLUMNS) as writer,
        ):
            for rows in tables.gather_batches(pieces, _ROWS_A_BATCH):
                writer.write_batch(rows)
        # Frees the space of each part before the next one is rewritten.
        path.unlink()
        yield path.with_suffix(".parquet")


def _first_batches(listing: Path) -> Iterator[pa.RecordBatch]:
    for path in tables.files_of(listing):
        yield from itertools.islice(tables.read_file(path, _USED_COLUMNS), 1)


def _is_ascending(numbers: npt.NDArray[np.uint8]) -> bool:
    own = numbers[numbers > 0]  # others, which are in no partition, lie anywhere among them
    return not np.any(own[1:] < own[:-1])


def spread(listing: Path, partitions_of: PartitionsOf, scratch: Path) -> None:
    """Write the rows of each partition to a separate file, named by the partition."""
    schema = tables.arrow_schema(tables.LISTING_COLUMNS)
    writers: dict[int, pa.ipc.RecordBatchStreamWriter] = {}
    with ExitStack() as stack:
        for listed in tables.read_batches(listing, tables.LISTING_COLUMNS):
            numbers = partitions_of(listed)
            # Stable, so rows of one partition keep the order of their keys.
            order = np.argsort(numbers, kind="stable")
            rows = listed.take(pa.array(order))
            for number, part in runs(numbers[order]):
                if number not in writers:
                    sink = stack.enter_context(pa.OSFile(str(scratch / f"{number:03d}"), "wb"))
                    writers[number] = stack.enter_context(pa.ipc.new_stream(sink, schema))
                writers[number].write_batch(rows.slice(part.start, part.stop - part.start))


def runs(numbers: npt.NDArray[np.uint8]) -> Iterator[tuple[int, slice]]:
    """Yield each run of equal numbers with its slice."""
    if not len(numbers):
        return
    cuts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
    for start, end in itertools.pairwise(cuts):
        yield int(numbers[start]), slice(start, end)


OF_VERSIONS = (Owner.OLD_VERSION, Owner.DELETE_MARKER)
"""Owners of rows that are not current keys. A key may have any number of them."""

PRECEDENCE = ("modified_ms", "size", "etag")
"""Columns that select the row of a key: the greatest values count, null is the least."""

# 8 MiB of numbers are sorted at once.
_NUMBERS_AT_ONCE = 1 << 20
_READ_AT_ONCE = 1 << 18
_PARTS = 256


class KeyNumbers:
    """File with a number for each listed key. Equal keys have equal numbers.

    Several threads may add rows at once.
    """

    def __init__(self, scratch: BinaryIO) -> None:
        """Store the numbers in `scratch`, an empty unbuffered file."""
        self._file = scratch
        self._count = 0
        self._lock = threading.Lock()

    def add(self, rows: pa.RecordBatch) -> None:
        """Add the keys of rows of a listing. Raises `OSError` if the disk is full."""
        numbers = _numbers(_without_versions(rows))
        with self._lock:
            numbers.tofile(self._file)
            self._count += len(numbers)

    def may_repeat(self) -> bool:
        """Return whether two numbers are equal, which is very rare for different keys."""
        # A power of two, so the lowest bits select the class of a number.
        classes = 1 << max(0, (self._count - 1) // _NUMBERS_AT_ONCE).bit_length()
        return any(self._has_equal(number, classes - 1) for number in range(classes))

    def _has_equal(self, wanted: int, mask: int) -> bool:
        """Return whether two numbers with these lowest bits are equal."""
        found = [block[block & mask == wanted] for block in self._blocks()]
        numbers = np.concatenate(found) if found else np.zeros(0, np.int64)
        numbers.sort()
        return bool(np.any(numbers[1:] == numbers[:-1]))

    def _blocks(self) -> Iterator[Int64Column]:
        self._file.seek(0)
        while len(block := np.fromfile(self._file, np.int64, _READ_AT_ONCE)):
            yield block


def keep_one_row_a_key(listing: Path) -> None:
    """Rewrite a listing with the counting row of each key, in the order of partitions."""
    made = listing.with_name(f"{listing.name}-anew")
    made.mkdir()
    with tempfile.TemporaryDirectory(dir=listing.parent) as scratch:
        spread(listing, _parts, Path(scratch))
        for number, part in enumerate(sorted(Path(scratch).iterdir())):
            with pa.OSFile(str(part)) as file, pa.ipc.open_stream(file) as stream:
                table = _one_row_a_key(stream.read_all())
            with table_writer(made / f"part-{number:05d}.parquet", LISTING_COLUMNS) as writer:
                writer.write_table(table, row_group_size=ROWS_A_GROUP)
    # The draft of a plan is private, so nobody sees the moment without a listing.
    shutil.rmtree(listing)
    made.rename(listing)


def _one_row_a_key(table: pa.Table) -> pa.Table:
    """Return the counting rows among all rows of some keys."""
    is_of_versions = _is_of_versions(table["owner"])
    of_versions = table.filter(is_of_versions)
    order = [("key", "ascending"), *((name, "descending") for name in PRECEDENCE)]
    rows = table.filter(pc.invert(is_of_versions)).sort_by(order)
    if rows.num_rows:
        keys = rows["key"].combine_chunks()
        is_first = pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1))
        rows = rows.filter(pa.concat_arrays([pa.array([True]), is_first]))
    return pa.concat_tables([rows, of_versions])


def _parts(rows: pa.RecordBatch) -> npt.NDArray[np.uint8]:
    """Return the part of each row, for an own object the first two digits of its key."""
    low = _numbers(rows) % _PARTS
    return ((low & 15) << 4 | low >> 4).astype(np.uint8)


def _without_versions(rows: pa.RecordBatch) -> pa.RecordBatch:
    owners = rows.column("owner")
    # Usually, and much cheaper than a filter.
    if not owners.to_numpy().any():  # all own
        return rows
    return rows.filter(pc.invert(_is_of_versions(owners)))


def _is_of_versions(owners: Any) -> Any:
    return pc.is_in(owners, pa.array([int(owner) for owner in OF_VERSIONS]))


def _numbers(rows: pa.RecordBatch) -> Int64Column:
    """Return a number for each row's key: an own object's id, or the hash of the key."""
    numbers: Int64Column = rows.column("object_id").fill_null(ABSENT).to_numpy()
    others = np.flatnonzero(rows.column("owner").to_numpy() != Owner.OWN)
    if len(others):
        numbers = numbers.copy()
        keys = rows.column("key").take(pa.array(others)).to_pylist()
        # Only equality within this process matters, so the random seed of `hash` does no harm.
        numbers[others] = [hash(key) for key in keys]
    return numbers

"""Keys with more than one row in a listing, of which one counts.

A listing of the bucket has each key once, but a table or an inventory may not. The newest row of a
key counts. Ties are broken by size, then by etag. Rows of noncurrent versions and delete markers
all count.

Finding such keys takes 8 bytes of disk per key and a sort in pieces. Only a listing with repeated
keys is rewritten, in parts small enough for memory.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streammeta.reconcile.listing.order import spread
from streammeta.reconcile.vocabulary.tables import LISTING_COLUMNS, ROWS_A_GROUP, table_writer
from streammeta.reconcile.vocabulary.verdicts import ABSENT, Int64Column, Owner

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

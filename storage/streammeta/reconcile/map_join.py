"""Join of listed keys with the objects of the map, in memory that does not grow with either.

The map is spread once over partitions of a scratch file, by the digits that begin a key: a listing
in the order of keys, or near it, works through one partition after the other. A batch in any other
order is joined the same, with more reading. Beside a few partitions, memory holds one bit an
object: whether it was met. Knows nothing of verdicts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streammeta.reconcile.listing_order import runs
from streammeta.reconcile.tables import LISTING_COLUMNS, arrow_schema, read_batches
from streammeta.reconcile.verdicts import ABSENT, Int64Column, Owner

_RECORD = np.dtype(
    [
        ("object_id", np.int64),
        ("map_size", np.int64),
        ("map_time_ms", np.int64),
        ("map_attributes", np.int32),
        ("map_node", np.int32),
        ("map_state", np.int32),
        ("reading", np.int32),
    ]
)
"""What the comparison uses of an object; numbers have the widths that the map's protocol gives."""

_USED_COLUMNS = ", ".join(f"{name} long" for name in _RECORD.names or ())
_JOINED = tuple(name for name in _RECORD.names or () if name != "object_id")
_MOST_DIGITS = 2
OBJECTS_A_PARTITION = 65_536
KEPT_BYTES = 32 << 20

_ROWS_A_BATCH = 20_000
_SPARSE = 8
"""Places of a partition's directory for each of its objects, beyond which ids are searched for."""

_Records = npt.NDArray[Any]
_Rows: TypeAlias = slice | npt.NDArray[np.intp]


class _Partition:
    """Objects in the order of their ids, column by column, and which of them were met.

    Ids of a partition end in the same `shared_bits`, and few are left out between the least and
    the largest: so a directory has the row of each, by what is left of the id.
    """

    def __init__(self, records: _Records, is_met: npt.NDArray[np.bool_], shared_bits: int) -> None:
        self.columns = {name: records[name].astype(np.int64) for name in _JOINED}
        self.ids: Int64Column = records["object_id"].astype(np.int64)
        self.is_met = is_met
        self._bits = shared_bits
        self._directory: npt.NDArray[np.int32] | None = None
        if len(self.ids):
            places = self._places(self.ids)
            if places[-1] < _SPARSE * len(places):
                self._directory = np.full(int(places[-1]) + 1, -1, dtype=np.int32)
                self._directory[places] = np.arange(len(places), dtype=np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        directory = 0 if self._directory is None else self._directory.nbytes
        return (len(self.columns) + 1) * self.ids.nbytes + directory

    def find(self, wanted: Int64Column) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """Return the row of each of the wanted ids, and whether there is one."""
        if self._directory is None:
            at = np.searchsorted(self.ids, wanted)
            at[at == len(self.ids)] = 0
            return at, self.ids[at] == wanted
        places = self._places(wanted)
        is_inside = (places >= 0) & (places < len(self._directory))
        if not is_inside.all():
            places = np.where(is_inside, places, 0)
        rows = self._directory[places]
        return rows, is_inside & (rows >= 0)

    def _places(self, ids: Int64Column) -> Int64Column:
        places: Int64Column = (ids - self.ids[0]) >> self._bits
        return places


class MapJoin:
    """The objects of a map's table by id, and those of them that were met in the bucket."""

    def __init__(
        self,
        folder: Path,
        scratch: BinaryIO,
        *,
        objects_a_partition: int = OBJECTS_A_PARTITION,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """Spread the table in `folder` over partitions; they take 40 bytes an object.

        They lie in the file `scratch`, which is empty and without a buffer. Partitions with more
        than `objects_a_partition` objects are cut in 16, twice at most; those used last stay in
        memory, one at least, up to `kept_bytes`.
        """
        self._kept_bytes = kept_bytes
        counts = np.zeros(16**_MOST_DIGITS, dtype=np.int64)
        for rows in read_batches(folder, "object_id long"):
            ids: Int64Column = rows.column("object_id").to_numpy()
            counts += np.bincount(_partitions(ids, _MOST_DIGITS), minlength=len(counts))
        self._digits = _digits_for(int(counts.sum()), objects_a_partition)
        counts = counts.reshape(16**self._digits, -1).sum(axis=1)
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        self._kept: OrderedDict[int, _Partition] = OrderedDict()
        self._size = 0
        self._met: dict[int, npt.NDArray[np.uint8]] = {}
        self._file = scratch
        self._spread(folder)

    def join(self, listed: pa.RecordBatch) -> pa.RecordBatch:
        """Add to rows of the listing what the map has of them, null where it has nothing."""
        ids: Int64Column = listed.column("object_id").fill_null(ABSENT).to_numpy()
        is_own = listed.column("owner").to_numpy() == Owner.OWN
        found = {name: np.zeros(len(ids), dtype=np.int64) for name in _JOINED}
        is_known = np.zeros(len(ids), dtype=np.bool_)
        own = np.flatnonzero(is_own & (ids >= 0))
        for number, rows in self._by_partition(ids, own):
            partition = self._partition(number)
            if not len(partition.ids):
                continue
            at, hits = partition.find(ids[rows])
            known: _Rows = rows
            if not hits.all():
                known, at = np.arange(len(ids))[rows][hits], at[hits]
            partition.is_met[at] = True
            for name, column in partition.columns.items():
                found[name][known] = column[at]
            is_known[known] = True
        nulls = len(ids) - int(np.count_nonzero(is_known))
        validity = pa.py_buffer(np.packbits(is_known, bitorder="little")) if nulls else None
        for name, column in found.items():
            buffers = [validity, pa.py_buffer(column)]
            array = pa.Array.from_buffers(pa.int64(), len(ids), buffers, nulls)
            listed = listed.append_column(name, array)
        return listed

    def partitions_of(self, listed: pa.RecordBatch) -> npt.NDArray[np.uint8]:
        """Return the partition of each row of the listing, 0 for keys that are no objects."""
        ids: Int64Column = listed.column("object_id").fill_null(ABSENT).to_numpy()
        is_own = (listed.column("owner").to_numpy() == Owner.OWN) & (ids >= 0)
        return np.where(is_own, _partitions(ids, self._digits), np.uint8(0))

    def unmet(self) -> Iterator[pa.RecordBatch]:
        """The objects that no key of the listing belongs to, as joined rows."""
        nothing = [field for field in arrow_schema(LISTING_COLUMNS) if field.name != "object_id"]
        for number in range(len(self._starts)):
            if self._is_all_met(number):
                continue
            partition = self._partition(number)
            rest = np.flatnonzero(~partition.is_met)
            for first in range(0, len(rest), _ROWS_A_BATCH):
                rows = rest[first : first + _ROWS_A_BATCH]
                values = {field.name: pa.nulls(len(rows), field.type) for field in nothing}
                values |= {name: column[rows] for name, column in partition.columns.items()}
                values["object_id"] = partition.ids[rows]
                yield pa.RecordBatch.from_pydict(values)

    def _spread(self, folder: Path) -> None:
        ends = self._starts.copy()
        for rows in read_batches(folder, _USED_COLUMNS):
            records = np.zeros(rows.num_rows, dtype=_RECORD)
            for name in _RECORD.names or ():
                records[name] = rows.column(name).to_numpy()
            numbers = _partitions(records["object_id"], self._digits)
            order = np.argsort(numbers, kind="stable")
            records, numbers = records[order], numbers[order]
            for part, rows_of_it in runs(numbers):
                self._file.seek(int(ends[part]) * _RECORD.itemsize)
                self._file.write(records[rows_of_it].data)
                ends[part] += rows_of_it.stop - rows_of_it.start

    def _by_partition(
        self, ids: Int64Column, rows: npt.NDArray[np.intp]
    ) -> Iterator[tuple[int, _Rows]]:
        """Those ascending `rows` of `ids` that are of one partition, for each of them."""
        numbers = _partitions(ids[rows], self._digits)
        if len(numbers) and np.any(numbers[1:] < numbers[:-1]):
            order = np.argsort(numbers, kind="stable")
            rows, numbers = rows[order], numbers[order]
        for number, part in runs(numbers):
            of_it = rows[part]
            first, end = int(of_it[0]), int(of_it[-1]) + 1
            yield number, slice(first, end) if end - first == len(of_it) else of_it

    def _partition(self, number: int) -> _Partition:
        kept = self._kept.get(number)
        if kept is not None:
            self._kept.move_to_end(number)
            return kept
        loaded = self._load(number)
        self._kept[number] = loaded
        self._size += loaded.nbytes
        while len(self._kept) > 1 and self._size > self._kept_bytes:
            dropped, partition = self._kept.popitem(last=False)
            self._size -= partition.nbytes
            self._met[dropped] = np.packbits(partition.is_met)
        return loaded

    def _is_all_met(self, number: int) -> bool:
        """Whether a partition that is not in memory has no object left that was not met."""
        met = self._met.get(number)
        if met is None:
            return False
        count = int(self._ends[number] - self._starts[number])
        return bool(np.unpackbits(met, count=count).all())

    def _load(self, number: int) -> _Partition:
        count = int(self._ends[number] - self._starts[number])
        self._file.seek(int(self._starts[number]) * _RECORD.itemsize)
        records: _Records = np.fromfile(self._file, dtype=_RECORD, count=count)
        if len(records) != count:
            raise OSError(f"the scratch file has {len(records)} of {count} records of a partition")
        ids = records["object_id"]
        if np.any(ids[1:] < ids[:-1]):
            records = records[np.argsort(ids, kind="stable")]
        met = self._met.pop(number, None)
        is_met = (
            np.zeros(count, dtype=np.bool_)
            if met is None
            else np.unpackbits(met, count=count).astype(np.bool_)
        )
        return _Partition(records, is_met, 4 * self._digits)


def _digits_for(objects: int, wanted: int) -> int:
    """Hex digits to cut by, so that a partition has `wanted` objects or fewer, if it can be."""
    digits = 0
    while digits < _MOST_DIGITS and objects > wanted * 16**digits:
        digits += 1
    return digits


def _partitions(ids: Int64Column, digits: int) -> npt.NDArray[np.uint8]:
    """Partition of each id: the first digits of its key, which are its last ones, turned round."""
    number = np.zeros(len(ids), dtype=np.uint8)
    for digit in range(digits):
        number <<= 4
        number |= (ids >> 4 * digit & 15).astype(np.uint8)
    return number

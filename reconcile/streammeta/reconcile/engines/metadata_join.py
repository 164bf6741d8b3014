"""Join of listed keys with the objects in the metadata, in bounded memory.

The objects are spread once over partitions of a scratch file, by the first digits of their keys. A
listing roughly in key order then works through one partition after the other. Rows in any other
order are joined too, with more reads. Memory contains a few partitions, and one bit per object that
says whether a row matched it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streammeta.reconcile.engines.background import BackgroundWriter, prefetch
from streammeta.reconcile.listing.repeated_keys import runs
from streammeta.reconcile.parquet.arrow_start import return_memory
from streammeta.reconcile.vocabulary import tables, verdicts

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
"""Fields of an object for the comparison, with the widths of the metadata's protocol."""

_WORDS = _RECORD.itemsize // 8
"""Words of a record. Moving records as rows of words takes a tenth of the time."""

_NAMES = _RECORD.names or ()
_USED_COLUMNS = ", ".join(f"{name} long" for name in _NAMES)
JOINED = ("map_size", "map_attributes", "map_node", "map_state", "reading")
"""Columns that the join adds to listed rows."""

_UNMET = (*JOINED, "map_time_ms")

_MOST_DIGITS = 2
# 2.6 MB of records, which one read brings into memory.
OBJECTS_A_PARTITION = 65_536
# A few partitions of the default size. A listing in key order needs one or two.
KEPT_BYTES = 16 << 20

_ROWS_A_RUN = 65_536
_ROWS_A_BATCH = 20_000
_SPARSE = 8
"""Maximum directory entries per object of a partition. A sparser partition uses binary search."""

_Words = npt.NDArray[np.int64]
_Rows: TypeAlias = slice | npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Joined:
    """Metadata of listed rows: `JOINED` columns, `ABSENT` for unknown objects."""

    is_known: npt.NDArray[np.bool_]
    columns: Mapping[str, npt.NDArray[Any]]


class _Partition:
    """Objects ordered by id, and whether rows matched them.

    A last row of `ABSENT`, at numpy's index -1, stands for every unknown id. The ids of a partition
    share their last `shared_bits` and are dense, so a directory maps the rest of an id to its row.
    """

    def __init__(self, words: _Words, is_met: npt.NDArray[np.bool_], shared_bits: int) -> None:
        records = words.reshape(-1).view(_RECORD)
        self.columns = {name: np.ascontiguousarray(records[name]) for name in _UNMET}
        self.ids: verdicts.Int64Column = np.ascontiguousarray(words[:-1, 0])
        self.is_met = is_met
        self._bits = shared_bits
        self._directory: npt.NDArray[np.int32] | None = None
        if len(self.ids):
            places = self._places(self.ids)
            # A directory finds a row in one step, but costs memory for every gap between ids.
            if places[-1] < _SPARSE * len(places):
                self._directory = np.full(int(places[-1]) + 1, -1, dtype=np.int32)
                self._directory[places] = np.arange(len(places), dtype=np.int32)

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes."""
        directory = 0 if self._directory is None else self._directory.nbytes
        columns = sum(column.nbytes for column in self.columns.values())
        return columns + self.ids.nbytes + self.is_met.nbytes + directory

    def rows_of(self, wanted: verdicts.Int64Column) -> npt.NDArray[np.intp]:
        """Return the row of each wanted id, -1 for unknown ids."""
        if not len(self.ids):
            return np.full(len(wanted), -1)
        if self._directory is None:
            at = np.searchsorted(self.ids, wanted)
            # Ids after the last one. The comparison below rejects row 0 for them.
            at[at == len(self.ids)] = 0
            return np.where(self.ids[at] == wanted, at, -1)
        places = self._places(wanted)
        is_inside = places.view(np.uint64) < len(self._directory)  # negative places wrap around
        rows = self._directory.take(places, mode="clip").astype(np.intp)
        rows[~is_inside] = -1
        return rows

    def _places(self, ids: verdicts.Int64Column) -> verdicts.Int64Column:
        places: verdicts.Int64Column = (ids - self.ids[0]) >> self._bits
        return places


class MetadataJoin:
    """Objects of the metadata by id, and the matches of listed rows."""

    def __init__(
        self,
        folder: Path,
        scratch: BinaryIO,
        *,
        objects_a_partition: int = OBJECTS_A_PARTITION,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """Spread the table in `folder` over partitions, with 40 bytes per object.

        The empty, unbuffered file `scratch` stores them. A partition with more than
        `objects_a_partition` objects is divided by 16, at most twice. Recently used partitions stay
        in memory, up to `kept_bytes` but at least one.
        """
        self._kept_bytes = kept_bytes
        self._digits = _digits_for(tables.count_rows(folder), objects_a_partition)
        self._count = 16**self._digits
        self._first_digits = _first_digits(self._digits)
        self._kept: OrderedDict[int, _Partition] = OrderedDict()
        self._size = 0
        self._met: dict[int, npt.NDArray[np.uint8]] = {}
        self._file = scratch
        self._descriptor = scratch.fileno()
        self._places = self._spread(folder)

    def join(self, owners: verdicts.Int64Column, ids: verdicts.Int64Column) -> Joined:
        """Find the metadata of listed rows. A negative id names no object."""
        found = {name: np.full(len(ids), verdicts.ABSENT, dtype=_RECORD[name]) for name in JOINED}
        is_known = np.zeros(len(ids), dtype=np.bool_)
        own = np.flatnonzero((owners == verdicts.Owner.OWN) & (ids >= 0))

        for number, rows in self._by_partition(ids, own):
            partition = self._partition(number)
            at = partition.rows_of(ids[rows])
            partition.is_met[at] = True
            is_known[rows] = at >= 0
            for name, column in found.items():
                if isinstance(rows, slice):
                    # In the default mode, which can fail, numpy buffers `out` in a copy.
                    partition.columns[name].take(at, out=column[rows], mode="wrap")
                else:
                    column[rows] = partition.columns[name].take(at)

        return Joined(is_known, found)

    def partitions_of(self, listed: pa.RecordBatch) -> npt.NDArray[np.uint8]:
        """Return the partition of each row of a listing, 0 for keys of no object."""
        ids: verdicts.Int64Column = listed.column("object_id").fill_null(verdicts.ABSENT).to_numpy()
        is_own = (listed.column("owner").to_numpy() == verdicts.Owner.OWN) & (ids >= 0)
        return np.where(is_own, self._partitions(ids), np.uint8(0))

    def unmet(self) -> Iterator[tuple[verdicts.Int64Column, Mapping[str, verdicts.Int64Column]]]:
        """Yield the objects without a listed row: ids, and `JOINED` with `map_time_ms`."""
        for number in range(self._count):
            if self._is_all_met(number):
                continue
            partition = self._partition(number)
            rest = np.flatnonzero(~partition.is_met[:-1])
            for first in range(0, len(rest), _ROWS_A_BATCH):
                rows = rest[first : first + _ROWS_A_BATCH]
                columns = {name: partition.columns[name][rows] for name in _UNMET}
                yield (
                    partition.ids[rows],
                    {name: column.astype(np.int64) for name, column in columns.items()},
                )

    def _spread(self, folder: Path) -> npt.NDArray[np.int64]:
        """Write runs of rows, each in the order of partitions.

        Returns, for each run, the first row of each partition in the file, and the run's end.
        """
        position = 0
        places: list[list[int]] = []
        with BackgroundWriter() as writer:
            for run in _runs_of_words(prefetch(tables.read_batches(folder, _USED_COLUMNS))):
                numbers = self._partitions(run[:, 0])
                ordered = run.take(np.argsort(numbers, kind="stable"), axis=0)
                writer.submit(partial(self._write, ordered))
                counts = np.bincount(numbers, minlength=self._count)
                ends = position + np.cumsum(counts)
                places.append([position, *ends.tolist()])
                position += len(run)
        return_memory()
        return np.array(places, dtype=np.int64).reshape(-1, self._count + 1)

    def _partitions(self, ids: verdicts.Int64Column) -> npt.NDArray[np.uint8]:
        """Return the partition of each id: the first digits of its key, its last reversed."""
        return self._first_digits.take(ids & 0xFF)

    def _by_partition(
        self, ids: verdicts.Int64Column, rows: npt.NDArray[np.intp]
    ) -> Iterator[tuple[int, _Rows]]:
        """Yield each partition with its rows among the ascending `rows` of `ids`."""
        numbers = self._partitions(ids if len(rows) == len(ids) else ids[rows])
        if np.any(numbers[1:] < numbers[:-1]):
            order = np.argsort(numbers, kind="stable")
            rows, numbers = rows[order], numbers[order]
        for number, part in runs(numbers):
            chosen = rows[part]
            first, end = int(chosen[0]), int(chosen[-1]) + 1
            # A slice avoids copies of the columns.
            yield number, slice(first, end) if end - first == len(chosen) else chosen

    def _partition(self, number: int) -> _Partition:
        kept = self._kept.get(number)
        if kept is not None:
            self._kept.move_to_end(number)
            return kept
        loaded = self._load(number)
        self._kept[number] = loaded
        self._size += loaded.nbytes
        # The least recently used one goes first. The current one has to stay.
        while len(self._kept) > 1 and self._size > self._kept_bytes:
            dropped, partition = self._kept.popitem(last=False)
            self._size -= partition.nbytes
            # One bit per object survives, because losses are known only at the end.
            self._met[dropped] = np.packbits(partition.is_met)
        return loaded

    def _is_all_met(self, number: int) -> bool:
        """Return whether all objects of a partition outside memory were matched."""
        met = self._met.get(number)
        if met is None:
            return False
        return bool(np.unpackbits(met, count=self._size_of(number)).all())

    def _size_of(self, number: int) -> int:
        return int((self._places[:, number + 1] - self._places[:, number]).sum())

    def _load(self, number: int) -> _Partition:
        count = self._size_of(number)
        words = np.empty((count + 1, _WORDS), dtype=np.int64)
        words[-1] = verdicts.ABSENT
        rest = _bytes_of(words)

        for start, end in self._places[:, number : number + 2].tolist():
            size = (end - start) * _RECORD.itemsize
            self._read(start * _RECORD.itemsize, rest[:size])
            rest = rest[size:]

        ids = words[:-1, 0]
        # Runs are ordered by partition, not by id, so several runs have to be sorted here.
        if np.any(ids[1:] < ids[:-1]):
            words[:-1] = words.take(np.argsort(ids, kind="stable"), axis=0)

        met = self._met.pop(number, None)
        is_met = (
            np.zeros(count + 1, dtype=np.bool_)
            if met is None
            else np.unpackbits(met, count=count + 1).astype(np.bool_)
        )
        return _Partition(words, is_met, 4 * self._digits)

    def _write(self, words: _Words) -> None:
        view = _bytes_of(words)
        while len(view):
            view = view[self._file.write(view) :]

    def _read(self, position: int, wanted: memoryview) -> None:
        """Fill `wanted` from a byte of the scratch file on."""
        while wanted:
            # Positioned reads need no lock and no seek.
            count = os.preadv(self._descriptor, [wanted], position)
            if not count:
                raise OSError(
                    f"scratch file ends {len(wanted)} bytes before the end of a partition"
                )
            wanted = wanted[count:]
            position += count


def _runs_of_words(batches: Iterator[pa.RecordBatch]) -> Iterator[_Words]:
    """Yield large runs of records, because each run costs a read per partition."""
    words = np.empty((_ROWS_A_RUN, _WORDS), dtype=np.int64)
    records = words.reshape(-1).view(_RECORD)
    used = 0

    for batch in batches:
        for first in range(0, batch.num_rows, _ROWS_A_RUN):
            part = batch.slice(first, _ROWS_A_RUN)
            if used + part.num_rows > _ROWS_A_RUN:
                yield words[:used]
                used = 0
            place = records[used : used + part.num_rows]
            for name in _NAMES:
                place[name] = part.column(name).to_numpy()
            used += part.num_rows

    if used:
        yield words[:used]


def _bytes_of(words: _Words) -> memoryview:
    return memoryview(words.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _first_digits(digits: int) -> npt.NDArray[np.uint8]:
    """Return the first `digits` of an id's key, by the id's last byte."""
    # A key starts with the reversed hex digits of its id.
    last = np.arange(256)
    turned = ((last & 15) << 4 | last >> 4) >> 4 * (_MOST_DIGITS - digits)
    return turned.astype(np.uint8)


def _digits_for(objects: int, wanted: int) -> int:
    """Return the number of hex digits for partitions of at most `wanted` objects, if possible."""
    digits = 0
    while digits < _MOST_DIGITS and objects > wanted * 16**digits:
        digits += 1
    return digits

"""Order of listed keys for a join by partitions: unchanged, or spread over files first.

A listing of the bucket has the order of keys, which is also the order of partitions. An inventory
may have any order, and each of its batches would need every partition. Its rows are therefore
spread over one file per partition and read file by file. This needs disk for a second copy of the
listing, and memory for one partition.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streammeta.reconcile.parquet.arrow_start import return_memory
from streammeta.reconcile.vocabulary import tables

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

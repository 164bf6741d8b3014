"""Listings and tables for the join: order by partitions, no row lost, and bounded memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streammeta.reconcile.listing import order as listing_order
from streammeta.reconcile.listing.order import in_order_of_partitions
from streammeta.reconcile.vocabulary.tables import (
    CANDIDATE_COLUMNS,
    LISTING_COLUMNS,
    arrow_schema,
    read_batches,
    record_batch,
)
from streammeta.reconcile.vocabulary.verdicts import Owner

_FOREIGN = -1


def _numbers(rows: pa.RecordBatch | pa.Table) -> npt.NDArray[np.uint8]:
    ids = rows.column("object_id").to_numpy()
    return np.where(ids < 0, 0, ids % 16).astype(np.uint8)


def _write(listing: Path, files: Sequence[Sequence[int]]) -> None:
    listing.mkdir()
    for number, ids in enumerate(files):
        values = {
            "key": [f"{one}/{place}" for place, one in enumerate(ids)],
            "size": [1] * len(ids),
            "modified_ms": [2] * len(ids),
            "etag": ["e"] * len(ids),
            "owner": [int(Owner.FOREIGN if one < 0 else Owner.OWN) for one in ids],
            "object_id": list(ids),
            "note": [""] * len(ids),
        }
        table = pa.Table.from_batches([record_batch(LISTING_COLUMNS, values)])
        pq.write_table(table, listing / f"part-{number:05d}.parquet", row_group_size=50)


def _read(listing: Path, scratch: Path) -> tuple[list[pa.Table], bool]:
    """Return the files' rows, and whether they were spread."""
    scratch.mkdir()
    found = list(in_order_of_partitions(listing, _numbers, scratch))
    return [pq.read_table(path) for path in found], any(scratch.iterdir())


def test_files_in_the_order_of_partitions_are_read_as_they_lie(tmp_path: Path) -> None:
    files = [[3, _FOREIGN, 19, 7, _FOREIGN, 15], [1, 2, _FOREIGN, 3], [_FOREIGN]]
    _write(tmp_path / "listing", files)
    found, is_spread = _read(tmp_path / "listing", tmp_path / "scratch")
    assert not is_spread
    assert [rows.column("object_id").to_pylist() for rows in found] == files


@pytest.mark.parametrize("rows_a_batch", [1, 100, 10_000])
def test_rows_in_any_order_come_by_partition_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_a_batch: int
) -> None:
    monkeypatch.setattr(listing_order, "_ROWS_A_BATCH", rows_a_batch)
    rng = random.Random(rows_a_batch)
    ids = [*range(900), *[_FOREIGN] * 100]
    rng.shuffle(ids)
    _write(tmp_path / "listing", [ids[:600], ids[600:]])
    found, is_spread = _read(tmp_path / "listing", tmp_path / "scratch")
    assert is_spread
    numbers = [number for rows in found for number in _numbers(rows).tolist()]
    assert numbers == sorted(numbers)
    whole = pa.concat_tables(found).to_pylist()
    listed = pq.read_table(tmp_path / "listing").to_pylist()
    assert sorted(map(str, whole)) == sorted(map(str, listed))


_ROWS = 4_000


def test_memory_of_reading_does_not_grow_with_a_file(tmp_path: Path) -> None:
    columns = {name: [1] * _ROWS for name in arrow_schema(CANDIDATE_COLUMNS).names}
    texts = {"key": [str(number) for number in range(_ROWS)], "etag": ["e"] * _ROWS}
    table = pa.table(columns | texts, schema=arrow_schema(CANDIDATE_COLUMNS))
    before = pa.total_allocated_bytes()
    allocated = []
    for groups in (20, 400):
        folder = tmp_path / str(groups)
        folder.mkdir()
        pq.write_table(table, folder / "part.parquet", row_group_size=_ROWS // groups)
        keys = []
        most = 0
        for rows in read_batches(folder, CANDIDATE_COLUMNS):
            keys += rows.column("key").to_pylist()
            most = max(most, pa.total_allocated_bytes() - before)
        assert keys == texts["key"]
        allocated.append(most)
    assert allocated[1] < 1.5 * allocated[0]

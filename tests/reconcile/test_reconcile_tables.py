"""Tables of plans are read in memory that does not grow with them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from streammeta.reconcile.vocabulary.tables import CANDIDATE_COLUMNS, arrow_schema, read_batches

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

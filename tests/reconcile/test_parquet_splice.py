"""Files spliced of columns of others: the same rows for every reader, and no misfits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streammeta.reconcile.parquet_splice import SpliceError, SplicePart, open_splice
from streammeta.reconcile.tables import arrow_schema, table_writer

_LEFT = "key string, size long, owner long, etag string"
_RIGHT = "verdict string, map_size long"
_BOTH = "key string, verdict string, size long, etag string, map_size long"


def _rows(columns: str, count: int, rng: random.Random) -> pa.Table:
    def value(field: pa.Field) -> Any:
        if rng.random() < 0.2:
            return None
        if field.type == pa.int64():
            return rng.choice((0, -1, 2**62, -(2**63), rng.randrange(1000)))
        return rng.choice(("", "ü\0", "live", f"{rng.randrange(1 << 60):032x}"))

    schema = arrow_schema(columns)
    values = {field.name: [value(field) for _ in range(count)] for field in schema}
    return pa.table(values, schema=schema)


def _written(path: Path, table: pa.Table, groups: Sequence[int], **options: Any) -> pq.FileMetaData:
    first = 0
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        for count in groups:
            writer.write_table(table.slice(first, count))
            first += count
    return pq.read_metadata(path)


def _spliced(path: Path, columns: str, parts: Sequence[tuple[Path, Sequence[int]]]) -> pa.Table:
    with open_splice(path, arrow_schema(columns)) as splice:
        opened = [pa.OSFile(str(part)) for part, _ in parts]
        splice.add(
            [
                SplicePart(file, pq.read_metadata(part), groups)
                for file, (part, groups) in zip(opened, parts, strict=True)
            ]
        )
    return pq.read_table(path)


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "lz4"])
@pytest.mark.parametrize("use_dictionary", [True, False])
def test_columns_of_two_files_are_one_table_for_every_reader(
    tmp_path: Path, compression: str, use_dictionary: bool
) -> None:
    rng = random.Random(f"{compression} {use_dictionary}")
    groups = [5, 1, 0, 300, 17]
    left, right = _rows(_LEFT, sum(groups), rng), _rows(_RIGHT, sum(groups), rng)
    for name, table in (("left", left), ("right", right)):
        _written(
            tmp_path / name, table, groups, compression=compression, use_dictionary=use_dictionary
        )
    numbers = range(pq.read_metadata(tmp_path / "left").num_row_groups)
    parts = [(tmp_path / "left", numbers), (tmp_path / "right", numbers)]
    found = _spliced(tmp_path / "both.parquet", _BOTH, parts)

    names = arrow_schema(_BOTH).names
    wanted = pa.table(
        {name: (left if name in left.schema.names else right)[name] for name in names}
    )
    assert found.schema.equals(arrow_schema(_BOTH))
    assert found.to_pylist() == wanted.to_pylist()
    with duckdb.connect() as database:
        query = f"select * from read_parquet('{tmp_path}/both.parquet')"
        by_database = database.execute(query).fetchall()
    assert by_database == [tuple(row.values()) for row in wanted.to_pylist()]


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("spark")
def test_spark_reads_a_spliced_file(tmp_path: Path) -> None:
    from pyspark.sql import SparkSession

    spark = SparkSession.getActiveSession()
    assert spark is not None
    table = _rows(_BOTH, 500, random.Random(7))
    for name, columns in (("left", _LEFT), ("right", _RIGHT)):
        with table_writer(tmp_path / name, columns) as writer:
            given = {
                field.name: table[field.name]
                if field.name in table.schema.names
                else pa.nulls(500, field.type)
                for field in arrow_schema(columns)
            }
            writer.write_table(pa.table(given, schema=arrow_schema(columns)), row_group_size=200)
    parts = [(tmp_path / name, range(3)) for name in ("left", "right")]
    _spliced(tmp_path / "both.parquet", _BOTH, parts)
    found = spark.read.parquet(str(tmp_path / "both.parquet")).collect()
    assert [row.asDict() for row in found] == table.to_pylist()


def test_some_row_groups_of_one_file_after_the_other(tmp_path: Path) -> None:
    table = _rows(_BOTH, 60, random.Random(3))
    _written(tmp_path / "a", table, [10, 20, 30])
    with (
        open_splice(tmp_path / "some.parquet", table.schema) as splice,
        pa.OSFile(str(tmp_path / "a")) as file,
    ):
        metadata = pq.read_metadata(tmp_path / "a")
        splice.add([SplicePart(file, metadata, [2])])
        splice.add([SplicePart(file, metadata, [0])])
    found = pq.read_table(tmp_path / "some.parquet")
    assert found.to_pylist() == [*table.slice(30).to_pylist(), *table.slice(0, 10).to_pylist()]


def test_a_table_without_rows(tmp_path: Path) -> None:
    with open_splice(tmp_path / "none.parquet", arrow_schema(_BOTH)):
        pass
    found = pq.read_table(tmp_path / "none.parquet")
    assert found.schema.equals(arrow_schema(_BOTH))
    assert found.num_rows == 0


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    rng = random.Random(1)
    _written(tmp_path / "left", _rows(_LEFT, 10, rng), [10])
    _written(tmp_path / "right", _rows(_RIGHT, 9, rng), [9])
    _written(tmp_path / "other", pa.table({"verdict": [1] * 10, "map_size": ["x"] * 10}), [10])
    _written(tmp_path / "brotli", _rows(_RIGHT, 10, rng), [10], compression="brotli")
    out, left = tmp_path / "out.parquet", (tmp_path / "left", [0])
    with pytest.raises(SpliceError, match=r"row groups \(0, 0\) have \[9, 10\] rows"):
        _spliced(out, _BOTH, [left, (tmp_path / "right", [0])])
    with pytest.raises(SpliceError, match=r"column verdict is .*INT64.*, wanted .*BYTE_ARRAY"):
        _spliced(out, _BOTH, [left, (tmp_path / "other", [0])])
    with pytest.raises(SpliceError, match="column verdict is in none of the 1 parts"):
        _spliced(out, _BOTH, [left])
    with pytest.raises(SpliceError, match=r"column verdict is .*compressed by BROTLI; wanted"):
        _spliced(out, _BOTH, [left, (tmp_path / "brotli", [0])])
    metadata = pq.read_metadata(tmp_path / "left")
    cut = pa.BufferReader((tmp_path / "left").read_bytes()[:30])
    with (
        pytest.raises(SpliceError, match="a file ends at byte 30, wanted"),
        open_splice(out, arrow_schema(_LEFT)) as splice,
    ):
        splice.add([SplicePart(cut, metadata, [0])])

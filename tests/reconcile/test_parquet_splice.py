"""Parquet of plans: spliced columns, and listings in the order that the join needs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streammeta.reconcile.listing import repeated_keys
from streammeta.reconcile.listing.repeated_keys import in_order_of_partitions
from streammeta.reconcile.parquet.splice import (
    Pages,
    Presence,
    SpliceError,
    SplicePart,
    name_pages,
    number_pages,
    open_splice,
)
from streammeta.reconcile.vocabulary.tables import (
    CANDIDATE_COLUMNS,
    LISTING_COLUMNS,
    arrow_schema,
    read_batches,
    record_batch,
)
from streammeta.reconcile.vocabulary.verdicts import Owner

_LEFT = "key string, size long, owner long, etag string"
_MADE = "verdict string, map_size long"
_NAMES = ("", "live", "orphan", "ü\0")
Made: TypeAlias = Mapping[str, Pages]
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


def _spliced(
    path: Path, columns: str, source: Path, groups: Sequence[int], made: Sequence[Made] = ()
) -> pa.Table:
    metadata = pq.read_metadata(source)
    with open_splice(path, arrow_schema(columns)) as splice, pa.OSFile(str(source)) as file:
        for place, group in enumerate(groups):
            splice.add(SplicePart(file, metadata, group), made[place] if made else {})
    return pq.read_table(path)


def _made(names: Sequence[str], sizes: Sequence[int | None]) -> Made:
    """Pages of the columns `_MADE`, of one row group."""
    is_present = np.array([size is not None for size in sizes], dtype=np.bool_)
    numbers = np.array([0 if size is None else size for size in sizes], dtype=np.int64)
    places = np.array([_NAMES.index(name) for name in names], dtype=np.int8)
    pages = number_pages(numbers, Presence(is_present))
    return {"verdict": name_pages(places, _NAMES), "map_size": pages}


def _both(left: pa.Table, names: Sequence[str], sizes: Sequence[int | None]) -> pa.Table:
    """The table that a splice should be, whose columns `_MADE` are these."""
    made = {"verdict": pa.array(names), "map_size": pa.array(sizes, pa.int64())}
    columns = {
        name: made[name] if name in made else left[name] for name in arrow_schema(_BOTH).names
    }
    return pa.table(columns, schema=arrow_schema(_BOTH))


_GROUPS = (5, 1, 0, 300, 17, 200, 140, 9)


def _columns(rng: random.Random) -> Iterator[tuple[list[str], list[int | None]]]:
    """Names and sizes of each row group: far apart, alike, a few alike, and none at all."""
    kinds: list[Sequence[int | None]] = [
        (0, -1, 2**62, -(2**63), 2**63 - 1, None),
        (7,),
        (7,),
        (0, 200, None),
        (1000,),
        (None,),
        (-(2**31), 2**31, 70_000, None),
        (3, None),
    ]
    for count, values in zip(_GROUPS, kinds, strict=True):
        yield rng.choices(_NAMES, k=count), rng.choices(values, k=count)


def _written_both(folder: Path, seed: str, **options: Any) -> tuple[pa.Table, pa.Table]:
    """A spliced file `both.parquet`, as Arrow reads it, and the table that it should be."""
    rng = random.Random(seed)
    left = _rows(_LEFT, sum(_GROUPS), rng)
    metadata = _written(folder / "left", left, _GROUPS, **options)
    columns = list(_columns(rng))
    numbers = range(metadata.num_row_groups)
    made = [_made(*column) for column in columns]
    found = _spliced(folder / "both.parquet", _BOTH, folder / "left", numbers, made)
    names, sizes = ([value for one in part for value in one] for part in zip(*columns, strict=True))
    return found, _both(left, names, sizes)


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "lz4"])
@pytest.mark.parametrize("use_dictionary", [True, False])
def test_copied_and_made_columns_join(
    tmp_path: Path, compression: str, use_dictionary: bool
) -> None:
    options = {"compression": compression, "use_dictionary": use_dictionary}
    found, wanted = _written_both(tmp_path, str(options), **options)
    assert found.schema.equals(arrow_schema(_BOTH))
    assert found.to_pylist() == wanted.to_pylist()
    with duckdb.connect() as database:
        query = f"select * from read_parquet('{tmp_path}/both.parquet')"
        by_database = database.execute(query).fetchall()
    assert by_database == [tuple(row.values()) for row in wanted.to_pylist()]


@pytest.mark.parametrize("spread", [0, 1, 200, 300, 70_000, 2**33, 2**62])
def test_numbers_as_far_apart_as_bytes_hold(tmp_path: Path, spread: int) -> None:
    rng = random.Random(spread)
    sizes = [rng.choice((None, rng.randint(-spread, spread), spread)) for _ in range(1000)]
    left = _rows(_LEFT, len(sizes), rng)
    _written(tmp_path / "left", left, [len(sizes)])
    names = rng.choices(_NAMES, k=len(sizes))
    made = [_made(names, sizes)]
    found = _spliced(tmp_path / "both.parquet", _BOTH, tmp_path / "left", [0], made)
    assert found.to_pylist() == _both(left, names, sizes).to_pylist()


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("vectorized", ["true", "false"])
def test_spark_reads_a_spliced_file(tmp_path: Path, vectorized: str) -> None:
    from pyspark.sql import SparkSession

    spark = SparkSession.getActiveSession()
    assert spark is not None
    _, wanted = _written_both(tmp_path, "7", compression="lz4", use_dictionary=False)
    spark.conf.set("spark.sql.parquet.enableVectorizedReader", vectorized)
    try:
        found = spark.read.parquet(str(tmp_path / "both.parquet")).collect()
    finally:
        spark.conf.unset("spark.sql.parquet.enableVectorizedReader")
    assert [row.asDict() for row in found] == wanted.to_pylist()


@pytest.mark.parametrize("use_dictionary", [True, False])
@pytest.mark.parametrize("groups", [(0,), (0, 3, 0, 2), (4, 0)])
def test_empty_row_groups_are_left_out(
    tmp_path: Path, groups: Sequence[int], use_dictionary: bool
) -> None:
    """Readers such as polars refuse a chunk without a value: it has no page of values."""
    rng = random.Random(4)
    left = _rows(_LEFT, sum(groups), rng)
    metadata = _written(tmp_path / "left", left, groups, use_dictionary=use_dictionary)
    assert metadata.num_row_groups == len(groups), "the writer makes row groups without rows"
    names, sizes = rng.choices(_NAMES, k=sum(groups)), [7] * sum(groups)
    starts = [sum(groups[:number]) for number in range(len(groups))]
    made = [
        _made(names[start : start + count], sizes[start : start + count])
        for start, count in zip(starts, groups, strict=True)
    ]
    found = _spliced(tmp_path / "both.parquet", _BOTH, tmp_path / "left", range(len(groups)), made)
    assert found.to_pylist() == _both(left, names, sizes).to_pylist()
    spliced = pq.read_metadata(tmp_path / "both.parquet")
    rows = [spliced.row_group(number).num_rows for number in range(spliced.num_row_groups)]
    assert rows == [count for count in groups if count]


def test_some_row_groups_of_one_file_after_the_other(tmp_path: Path) -> None:
    table = _rows(_BOTH, 60, random.Random(3))
    _written(tmp_path / "a", table, [10, 20, 30])
    found = _spliced(tmp_path / "some.parquet", _BOTH, tmp_path / "a", [2, 0])
    assert found.to_pylist() == [*table.slice(30).to_pylist(), *table.slice(0, 10).to_pylist()]


def test_a_table_without_rows(tmp_path: Path) -> None:
    with open_splice(tmp_path / "none.parquet", arrow_schema(_BOTH)):
        pass
    found = pq.read_table(tmp_path / "none.parquet")
    assert found.schema.equals(arrow_schema(_BOTH))
    assert found.num_rows == 0


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    rng = random.Random(1)
    left, out = tmp_path / "left", tmp_path / "out.parquet"
    _written(left, _rows(_LEFT, 10, rng), [10])
    _written(tmp_path / "brotli", _rows(_BOTH, 10, rng), [10], compression="brotli")
    never_null = pa.schema([pa.field("key", pa.string(), nullable=False)])
    _written(tmp_path / "never-null", pa.table({"key": ["a"]}, schema=never_null), [1])
    made = _made(["live"] * 10, [1] * 10)
    with pytest.raises(SpliceError, match=r"verdict.*9.*10"):
        _spliced(out, _BOTH, left, [0], [_made(["live"] * 9, [1] * 9)])
    with pytest.raises(SpliceError, match=r"INT64.*BYTE_"):
        _spliced(out, _BOTH, left, [0], [{**made, "verdict": made["map_size"]}])
    with pytest.raises(SpliceError, match="map_size"):
        _spliced(out, _BOTH, left, [0], [{"verdict": made["verdict"]}])
    with pytest.raises(SpliceError, match="BROTLI"):
        _spliced(out, "key string", tmp_path / "brotli", [0])
    with pytest.raises(SpliceError, match=r"\(0, 0\).*\(1, 0\)"):
        _spliced(out, "key string", tmp_path / "never-null", [0])
    metadata = pq.read_metadata(left)
    cut = pa.BufferReader(left.read_bytes()[:30])
    with (
        pytest.raises(SpliceError, match="byte 30"),
        open_splice(out, arrow_schema(_LEFT)) as splice,
    ):
        splice.add(SplicePart(cut, metadata, 0), {})


_FOREIGN = -1


def _numbers(rows: pa.RecordBatch | pa.Table) -> npt.NDArray[np.uint8]:
    ids = rows.column("object_id").to_numpy()
    return np.where(ids < 0, 0, ids % 16).astype(np.uint8)


def _write(listing: Path, files: Sequence[Sequence[int]]) -> None:
    listing.mkdir()
    for number, ids in enumerate(files):
        values = {
            "key": [f"{number}/{place}" for place, number in enumerate(ids)],
            "size": [1] * len(ids),
            "modified_ms": [2] * len(ids),
            "etag": ["e"] * len(ids),
            "owner": [int(Owner.FOREIGN if number < 0 else Owner.OWN) for number in ids],
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
    monkeypatch.setattr(repeated_keys, "_ROWS_A_BATCH", rows_a_batch)
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

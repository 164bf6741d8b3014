"""Data sources for Spark: the map of a cluster, a checkpoint or an export; a bucket's listing."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from streammeta.cli.recovery.snapshot_command import DirectoryTarget
from streammeta.controller.snapshot.checkpoint_file import CheckpointReader
from streammeta.controller.snapshot.parquet_export import export_parquet
from streammeta.reconcile import register
from streammeta.reconcile.engines.spark_session import job_errors
from streammeta.reconcile.listing.key_owners import owner_of
from streammeta.reconcile.listing.shards import Shard, list_shard, shards_between, shards_of_content
from streammeta.reconcile.vocabulary import errors
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.base import ObjectInfo
from tests.reconcile.fake_controller import (
    COMMITTED,
    OTHER,
    OWN,
    FakeMap,
    LocalBucket,
    MapObject,
    Scene,
    own,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

LIVE = {"table": "objects", "connect": "h:1, h:2", "copies": "b"}
TABLES = ("objects", "object_ranges", "counters", "bucket_claim")


@pytest.fixture
def session(spark: None) -> SparkSession:
    """The session of the tests, with both formats registered as a user does."""
    from pyspark.sql import SparkSession

    from streammeta.reconcile.listing.source import ListingSource
    from streammeta.reconcile.metadata.source import MetadataSource

    running = SparkSession.getActiveSession()
    assert running is not None
    running.dataSource.register(MetadataSource)
    running.dataSource.register(ListingSource)
    return running


@pytest.fixture
def checkpoint(state: FakeMap, tmp_path: Path) -> Path:
    """A checkpoint file of a map with some objects."""
    state.objects = {
        i: MapObject(COMMITTED, size=i, ranges=((1, i, i + 1), (2, 5 * i, 5 * i + 5)))
        for i in range(30)
    }
    path = tmp_path / "map.checkpoint"
    path.write_bytes(state.checkpoint())
    return path


def expected(path: Path, table: str) -> list[dict[str, Any]]:
    """The rows of a section, in order."""
    with CheckpointReader.open(path) as reader:
        rows: list[dict[str, Any]] = reader.table(table).to_pylist()
        return rows


@pytest.mark.timeout(300)
def test_a_checkpoint_an_export_and_a_live_cluster_have_the_same_tables(
    session: SparkSession, checkpoint: Path, endpoint: str, tmp_path: Path
) -> None:
    (tmp_path / "export").mkdir()
    with CheckpointReader.open(checkpoint) as reader:
        export_parquet(reader, DirectoryTarget(tmp_path / "export"), overwrite=False)
    origins: list[dict[str, str]] = [
        {"checkpoint": str(checkpoint)},
        {"export": str(tmp_path / "export")},
        {"connect": endpoint, "copies": str(tmp_path / "copies")},
    ]
    for origin in origins:
        for table in TABLES:
            read = session.read.format("streammeta").options(**origin, table=table).load()
            assert [row.asDict() for row in read.collect()] == expected(checkpoint, table)
    joined = session.read.format("streammeta").options(**origins[0], table="objects").load()
    ranges = session.read.format("streammeta").options(**origins[1], table="object_ranges").load()
    assert joined.where("object_size >= 20").join(ranges, "object_id").count() == 20


@pytest.mark.timeout(300)
def test_a_table_of_a_live_cluster_stays_at_the_offset_that_it_was_copied_at(
    session: SparkSession, checkpoint: Path, state: FakeMap, endpoint: str, tmp_path: Path
) -> None:
    calls: list[int] = []
    state.on_snapshot = lambda: calls.append(1)
    options = {"connect": endpoint, "copies": str(tmp_path / "copies"), "table": "objects"}
    read = session.read.format("streammeta").options(**options).load()
    assert read.count() == 30
    (copy,) = (tmp_path / "copies").iterdir()
    assert copy.name.startswith("00000000000000000009-0000000004-")
    assert len(calls) == 1, "one copy serves schema and partitions"


def test_the_tables_of_a_query_share_one_copy_unless_it_is_old(
    state: FakeMap, checkpoint: Path, endpoint: str, tmp_path: Path
) -> None:
    from streammeta.reconcile.metadata.source import copy_metadata

    copies = tmp_path / "copies"
    calls: list[int] = []
    state.on_snapshot = lambda: calls.append(1)
    options = {"connect": endpoint, "copies": str(copies)}
    for table in TABLES:
        source(**options, table=table).schema()
    assert len(calls) == 1

    (copy,) = copies.iterdir()
    os.utime(copy, (copy.stat().st_atime, copy.stat().st_mtime - 61))
    source(**options, table="objects").schema()
    assert len(calls) == 2
    os.utime(copy, (copy.stat().st_atime, copy.stat().st_mtime + 3600))
    source(**options, table="objects").schema()
    assert len(calls) == 3, "a copy from the future is of no known age"
    source(**options, table="objects", reuse="0").schema()
    assert len(calls) == 4
    copy_metadata(endpoint, str(copies))
    assert len(calls) == 5
    with pytest.raises(errors.ControllerError):
        source(connect="127.0.0.1:1", copies=str(copies), table="objects", wait="0").schema()


def test_only_columns_of_the_option_or_schema_are_read(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    with CheckpointReader.open(checkpoint) as reader:
        export_parquet(reader, DirectoryTarget(tmp_path / "export"), overwrite=False)
    for origin in ({"checkpoint": str(checkpoint)}, {"export": str(tmp_path / "export")}):
        chosen = source(**origin, table="objects", columns="object_size, object_id")
        assert chosen.schema().names == ["object_size", "object_id"]
        for reader in (
            chosen.reader(chosen.schema()),
            source(**origin, table="objects").reader(chosen.schema()),
        ):
            (part,) = reader.partitions()
            rows = pa.Table.from_batches(list(reader.read(part)))
            assert rows.column_names == ["object_size", "object_id"]
            assert rows.column("object_id").to_pylist() == list(range(30))


@pytest.mark.parametrize("columns", ["object_id,colour", "object_id,object_id", "", "object_id,"])
def test_columns_that_are_not_there_are_refused(checkpoint: Path, columns: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=r"'columns'.*object_id"):
        source(checkpoint=str(checkpoint), table="objects", columns=columns).schema()


def test_a_schema_that_is_not_of_the_table_is_refused(checkpoint: Path) -> None:
    from pyspark.sql.types import StringType, StructType

    from streammeta.reconcile.listing.source import ListingSource

    objects = source(checkpoint=str(checkpoint), table="objects")
    listing = ListingSource({"store": "file:///tmp/none", "namespace": OWN})
    for of in (objects, listing):
        with pytest.raises(errors.ConfigurationError, match="'x'"):
            of.reader(StructType().add("x", StringType()))
        with pytest.raises(errors.ConfigurationError, match="'object_id'"):
            of.reader(StructType().add("object_id", StringType()))


@pytest.mark.timeout(300)
def test_filters_are_pushed_down_and_change_no_answer(
    session: SparkSession, checkpoint: Path, bucket: LocalBucket
) -> None:
    register(session)
    for i in range(40):
        bucket.put(own(i))
    bucket.put("zoo/x")
    objects = session.read.format("streammeta").options(checkpoint=str(checkpoint), table="objects")
    listing = session.read.format("streammeta.listing").options(store=bucket.uri, namespace=OWN)
    plain = objects.load().toPandas()
    for where in ("object_id < 5", "object_id in (3, 7) and object_size > 3", "object_id <> 4"):
        found = objects.load().where(where)
        assert sorted(row["object_id"] for row in found.collect()) == sorted(
            plain.query(where.replace("<>", "!="))["object_id"]
        )
    assert listing.load().where("key like 'zoo%'").count() == 1
    assert listing.load().where("key like 'zoo%'").rdd.getNumPartitions() == 1
    assert listing.load().where(f"key = '{own(3)}'").rdd.getNumPartitions() == 1
    assert listing.load().where("owner = 0").count() == 40
    assert listing.load().where("object_id >= 30").count() == 10


@pytest.mark.timeout(300)
def test_a_format_used_wrongly_says_how_to_use_it(session: SparkSession, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException, match="'table'"):
        session.read.format("streammeta").load()
    with pytest.raises(PySparkException, match="'store'"):
        session.read.format("streammeta.listing").option("namespace", OWN).load().count()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"table": "objects"}, "of no source, expected one of connect, checkpoint, export"),
        ({"table": "objects", "export": "a", "checkpoint": "b"}, "checkpoint, export, expected"),
        ({"table": "objects", "connect": "h:1"}, "needs the option 'copies' with 'connect'"),
        ({"table": "objects", "export": "a", "copies": "b"}, "'copies' with 'connect', and only"),
        ({"table": "objects", "export": "a", "colour": "b"}, "no option 'colour'"),
        ({"export": "a"}, "needs the option 'table'"),
        (LIVE | {"wait": "soon"}, "'wait' as 'soon', expected seconds of 0 or more"),
        (LIVE | {"wait": ""}, "'wait' as '', expected seconds of 0 or more"),
        (LIVE | {"wait": "-1"}, "'wait' as '-1', expected seconds"),
        (LIVE | {"wait": "nan"}, "'wait' as 'nan', expected seconds"),
        (LIVE | {"wait": "inf"}, "'wait' as 'inf', expected seconds"),
        (LIVE | {"reuse": "-1"}, "'reuse' as '-1', expected seconds of 0 or more, such as 60"),
        (LIVE | {"connect": "h:1,"}, "'connect' as 'h:1,', expected controllers as HOST:PORT"),
        (LIVE | {"connect": "h"}, "'connect' as 'h', expected controllers as HOST:PORT"),
    ],
)
def test_map_options_that_make_no_sense_are_refused(options: dict[str, str], named: str) -> None:
    from streammeta.reconcile.metadata.source import MetadataSource

    with pytest.raises(errors.ConfigurationError, match=named):
        MetadataSource(options)


@pytest.mark.parametrize(
    "store", ["data", "s3:/data", "s3://data?pathStyle=maybe", "file://relative", "s3://"]
)
def test_a_store_that_is_none_is_refused_by_the_driver(store: str) -> None:
    from streammeta.reconcile.listing.source import ListingSource

    with pytest.raises(errors.ConfigurationError, match=r"'store'.*s3://"):
        ListingSource({"store": store, "namespace": OWN, "cuts": "4,8"})


def source(**options: str) -> Any:
    """The data source, as Spark makes it."""
    from streammeta.reconcile.metadata.source import MetadataSource

    return MetadataSource(options)


def test_a_checkpoint_that_is_damaged_or_has_no_such_table_is_refused(checkpoint: Path) -> None:
    with pytest.raises(errors.MetadataExportError, match=r"'colours'.*bucket_claim"):
        source(checkpoint=str(checkpoint), table="colours").schema()
    body = bytearray(checkpoint.read_bytes())
    body[len(body) // 2] ^= 1
    checkpoint.write_bytes(body)
    read = source(checkpoint=str(checkpoint), table="objects")
    with pytest.raises(errors.MetadataExportError, match="damaged"):
        read.reader(read.schema()).partitions()
    with pytest.raises(errors.MetadataExportError):
        source(checkpoint=f"{checkpoint}.gone", table="objects").schema()


def test_an_export_that_is_incomplete_or_none_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    with pytest.raises(errors.MetadataExportError):
        source(export=str(folder), table="objects").schema()
    with CheckpointReader.open(checkpoint) as reader:
        export_parquet(reader, DirectoryTarget(folder), overwrite=False)
    with pytest.raises(errors.MetadataExportError, match="'colours'"):
        source(export=str(folder), table="colours").schema()
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"complete": False}))
    with pytest.raises(errors.MetadataExportError, match="complete"):
        source(export=str(folder), table="objects").schema()


def test_a_copy_that_breaks_off_leaves_no_file(scene: Scene, tmp_path: Path) -> None:
    from streammeta.reconcile.metadata.source import copy_metadata

    scene.state.snapshot = scene.state.checkpoint()[:-1]
    with pytest.raises(errors.MetadataExportError):
        copy_metadata(scene.endpoint, str(tmp_path / "copies"))
    with pytest.raises(errors.ControllerError):
        copy_metadata("127.0.0.1:1", str(tmp_path / "copies"), wait_s=0)
    assert list((tmp_path / "copies").iterdir()) == []


def test_runs_of_batches_are_whole_and_none_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    from streammeta.reconcile.metadata import source as source_module

    monkeypatch.setattr(source_module, "_PARTITION_ROWS", 10)
    for counts in ([], [3], [11], [4, 4, 4], [10, 10], [1, 12, 1], [0, 0, 10, 1]):
        runs = [(run.first, run.end) for run in source_module._runs(counts)]  # type: ignore[attr-defined]
        assert [at for first, end in runs for at in range(first, end)] == list(range(len(counts)))
        assert all(sum(counts[a:b]) <= 10 or b - a == 1 for a, b in runs)


@pytest.mark.timeout(300)
def test_the_listing_of_a_bucket_is_a_table(session: SparkSession, bucket: LocalBucket) -> None:
    keys = [own(i) for i in range(40)] + [key_for(905, OTHER), "zoo/Ümlaut", f"{own(7)}.bak"]
    for key in keys:
        bucket.put(key)
    options = {"store": bucket.uri, "namespace": OWN}
    read = session.read.format("streammeta.listing").options(**options).load()
    rows = {row["key"]: row for row in read.collect()}
    assert set(rows) == {info.key for info in bucket.store.list_objects()}
    for key, row in rows.items():
        owner, object_id, note = owner_of(key, OWN)
        assert (row["owner"], row["object_id"], row["note"]) == (owner, object_id, note)
    assert read.rdd.getNumPartitions() == 17
    cut = session.read.format("streammeta.listing").options(**options, cuts="3,a").load()
    assert cut.rdd.getNumPartitions() == 3
    assert cut.exceptAll(read).count() == 0
    assert cut.count() == len(rows)


def test_jobs_are_named_by_their_work_and_other_jobs_keep_theirs(session: SparkSession) -> None:
    context = session.sparkContext
    context.setJobDescription("of somebody else")
    found = []

    def fail() -> None:
        with job_errors("looking at keys"):
            found.append(context.getLocalProperty("spark.job.description"))
            session.sql("select raise_error('told to fail')").collect()

    with pytest.raises(errors.SparkJobError):
        fail()
    assert found == ["streammeta reconcile: looking at keys"]
    assert context.getLocalProperty("spark.job.description") == "of somebody else"


@pytest.mark.parametrize("cuts", [["b", "a"], ["a", "a"], ["a", ""]])
def test_cuts_that_do_not_ascend_are_refused(cuts: list[str]) -> None:
    with pytest.raises(errors.ConfigurationError, match="ascend"):
        shards_between(cuts)


@pytest.mark.parametrize(
    ("objects", "shards"),
    [(0, 17), (400, 17), (20_000, 17), (3_000_000, 257), (40_000_000, 4097)],
)
def test_a_bucket_is_cut_by_what_it_holds(objects: int, shards: int) -> None:
    chance = random.Random(5)
    first = sorted(_first_keys(objects, chance))

    class Store:
        def list_objects(self, prefix: str = "", start_after: str | None = None) -> Any:
            return (ObjectInfo(key, 1, 1, "") for key in first if key > (start_after or ""))

    found = shards_of_content(Store(), OWN)  # type: ignore[arg-type]
    assert len(found) == shards
    assert (found[0].after, found[-1].last) == (None, None)
    assert all(earlier.last == two.after for earlier, two in itertools.pairwise(found))


def _first_keys(objects: int, chance: random.Random) -> list[str]:
    """The keys of a bucket of so many objects of random ids that come first, 1,500 or all."""
    bound = 2**32
    if objects <= 30_000:
        return [own(chance.randrange(bound)) for _ in range(objects)]
    share = 1500 / objects
    reached = [chance.random() * share for _ in range(1500)]
    return [own(int(f"{int(share * bound):08x}"[::-1], 16)) for share in reached]


def test_shards_hold_every_key_once(tmp_path: Path) -> None:
    bucket = LocalBucket(tmp_path / "b")
    for i in range(60):
        bucket.put(own(i * 37))
    for key in ("a", "zz", "0/b"):
        bucket.put(key)
    shards = shards_of_content(bucket.store, OWN)
    listed = [info.key for shard in shards for info in list_shard(bucket.store, shard)]
    assert listed == [info.key for info in bucket.store.list_objects()]
    assert shards[0] == Shard(None, "0")


def test_types_that_spark_lacks_are_widened() -> None:
    from streammeta.reconcile.metadata.source import _spark_schema

    made = _spark_schema(pa.schema([("a", pa.uint64()), ("b", pa.uint8()), ("c", pa.string())]))
    assert made == pa.schema([("a", pa.int64()), ("b", pa.int16()), ("c", pa.string())])

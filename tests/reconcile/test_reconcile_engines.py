"""Engines: the same plan from both, the choice between them, the local join, and a lean start."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streammeta.cli.reconcile.reconcile_command import plan_command
from streammeta.controller.snapshot import checkpoint_file
from streammeta.controller.snapshot.checkpoint_file import CheckpointReader
from streammeta.reconcile.engines import engine_choice, local_engine
from streammeta.reconcile.engines.engine import Engine, EngineName
from streammeta.reconcile.engines.engine_choice import AUTO_KEYS, open_engine
from streammeta.reconcile.engines.local_engine import LocalEngine
from streammeta.reconcile.engines.metadata_join import MetadataJoin
from streammeta.reconcile.engines.spark_session import SparkConfig
from streammeta.reconcile.listing import shards
from streammeta.reconcile.listing.shards import Shard, shards_of
from streammeta.reconcile.metadata.export import write_objects
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.vocabulary import tables
from streammeta.reconcile.vocabulary.errors import ReconcileError
from streammeta.reconcile.vocabulary.verdicts import ABSENT, Owner, Rules
from streammeta.storage.errors import AccessDeniedError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.base import ObjectStore
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

SPARK = SparkConfig()


def table_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a plan's table, in the order of keys."""
    rows: list[dict[str, Any]] = pq.read_table(folder / name).to_pylist()
    return sorted(rows, key=lambda row: row["key"])


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("spark")
def test_both_engines_write_the_same_plan(
    bucket: LocalBucket, state: FakeMap, endpoint: str, tmp_path: Path
) -> None:
    seed = 7_411
    print(f"seed {seed}")
    chance = random.Random(seed)
    states = (0, 1, 2, 3, 5, 77)
    for object_id in chance.sample(range(900, 1100), 120):
        bucket.put(own(object_id), chance.randrange(3), young=chance.random() < 0.2)
    for object_id in chance.sample(range(900, 1100), 120):
        state.objects[object_id] = MapObject(
            chance.choice(states),
            size=chance.randrange(3),
            time_ms=chance.choice((1, 2**52)),
            attributes=chance.choice((0, 1)),
        )
    for object_id in (0, 0xABC, 1 << 31, 0x1_2345_6789, 1 << 40):
        state.objects[object_id] = MapObject(COMMITTED, time_ms=1)  # missing: its key is made up
    for key in (key_for(905, OTHER), f"{own(906)}.bak", "zoo/<b>", "Ümlaut", "\u2028", "0"):
        bucket.put(key)
    config = PlanConfig(
        bucket.address, (endpoint,), tmp_path / "local", engine=EngineName.LOCAL, max_share=1
    )
    by_local = plan(config)
    by_spark = plan(replace(config, folder=tmp_path / "spark", engine=EngineName.SPARK))

    for name in (plan_folder.VERDICTS, plan_folder.CANDIDATES):
        assert table_of(tmp_path / "local", name) == table_of(tmp_path / "spark", name)
    assert (by_local.engine, by_spark.engine) == ("local", "spark")
    assert (by_local.classes, by_local.guards) == (by_spark.classes, by_spark.guards)
    assert len(by_local.classes) >= 12, by_local.classes


def test_a_small_bucket_starts_no_jvm(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "spark_engine", lambda *_: pytest.fail("Spark"))
    scene.fill(range(30))
    made = plan(scene.config("p"))
    assert made.engine == "local"


class FakeSpark(LocalEngine):
    """Stands in for Spark."""

    name = EngineName.SPARK


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[SparkConfig]:
    """Sessions of Spark that were started, none of them real."""
    found: list[SparkConfig] = []

    @contextmanager
    def start(config: SparkConfig, _is_ending: object) -> Iterator[Engine]:
        found.append(config)
        yield FakeSpark()

    monkeypatch.setattr(engine_choice, "spark_engine", start)
    return found


def list_with(engine: Engine, bucket: LocalBucket, folder: Path) -> int:
    """List the bucket and check that each key is there once."""
    listed = engine.list_bucket(bucket.address, OWN, shards_of(1), folder)
    assert len(pq.read_table(folder)["key"].unique()) == listed
    return listed


@pytest.mark.parametrize(("keys", "name"), [(20, EngineName.LOCAL), (19, EngineName.SPARK)])
def test_auto_goes_over_to_spark_for_a_larger_bucket(
    bucket: LocalBucket, tmp_path: Path, started: list[SparkConfig], keys: int, name: EngineName
) -> None:
    for object_id in range(19):
        bucket.put(own(object_id))
    said: list[str] = []
    with open_engine(EngineName.AUTO, SPARK, said.append, keys) as engine:
        assert list_with(engine, bucket, tmp_path / "listing") == 20, "the marker is a key too"
        assert engine.name is name
    assert (len(started), len(said)) == ((1, 1) if name is EngineName.SPARK else (0, 0))


@pytest.mark.parametrize(("name", "installed"), [("local", True), ("auto", False)])
def test_without_spark_a_bucket_of_any_size_is_listed_here(
    scene: Scene,
    started: list[SparkConfig],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    installed: bool,
) -> None:
    scene.bucket.put(own(1))
    if not installed:
        monkeypatch.setattr(engine_choice, "find_spec", lambda _name: None)
    with open_engine(EngineName(name), SPARK, pytest.fail, 0) as engine:
        assert list_with(engine, scene.bucket, scene.root / "listing") == 2
    assert started == []


def test_help_and_page_name_the_number_of_keys_that_auto_goes_by() -> None:
    (option,) = (param for param in plan_command.params if param.name == "engine")
    assert isinstance(option, click.Option)
    assert f"auto selects Spark above {AUTO_KEYS:,} keys" in str(option.help)
    page = Path(__file__).parents[2] / "docs/operations/reconcile.md"
    assert f"in the process itself (`local`) up to {AUTO_KEYS:,} keys" in page.read_text()


def test_a_shard_that_fails_ends_the_listing_with_its_error(
    bucket: LocalBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for object_id in range(40):
        bucket.put(own(object_id))
    real = shards.listed_rows

    def refuse_one(store: ObjectStore, shard: Shard, namespace: str) -> Iterator[pa.RecordBatch]:
        if shard.after == "7":
            raise AccessDeniedError("told to refuse")
        return real(store, shard, namespace)

    monkeypatch.setattr(local_engine, "listed_rows", refuse_one)
    with pytest.raises(AccessDeniedError, match="told to refuse"):
        LocalEngine().list_bucket(bucket.address, OWN, shards_of(1), tmp_path / "listing")


ids = st.sampled_from([0, 1, 2, 3, 15, 16, 17, 32, 255, 256, 257, 4096, 1 << 40])
listed_keys = st.lists(st.tuples(st.sampled_from(Owner), st.none() | ids), max_size=12)


@given(listed_keys, st.dictionaries(ids, st.integers(1, 5)), st.sampled_from([1, 3, 100]))
@example([(Owner.OWN, 1), (Owner.OTHER_CLUSTER, 2), (Owner.OWN, 3)], {1: 1, 2: 2, 3: 3}, 100)
def test_the_join_agrees_with_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory,
    keys: list[tuple[Owner, int | None]],
    of_map: dict[int, int],
    objects_a_partition: int,
) -> None:
    folder = tmp_path_factory.mktemp("map")
    rows = {name: list(of_map.values()) for name in tables.arrow_schema(tables.MAP_COLUMNS).names}
    table = tables.record_batch(tables.MAP_COLUMNS, rows | {"object_id": list(of_map)})
    pq.write_table(pa.Table.from_batches([table]), folder / "objects.parquet")
    owners = np.array([int(owner) for owner, _ in keys], dtype=np.int64)
    listed = np.array([ABSENT if id_ is None else id_ for _, id_ in keys], dtype=np.int64)

    limits = {"objects_a_partition": objects_a_partition, "kept_bytes": 0}
    with tempfile.TemporaryFile(buffering=0) as scratch:
        joining = MetadataJoin(folder, scratch, **limits)
        joined = joining.join(owners, listed)
        unmet = [
            (value, column.tolist()[row])
            for found, columns in joining.unmet()
            for row, value in enumerate(found.tolist())
            for column in columns.values()
        ]

    expected = [
        of_map.get(object_id, ABSENT) if owner is Owner.OWN and object_id is not None else ABSENT
        for owner, object_id in keys
    ]
    assert joined.is_known.tolist() == [value != ABSENT for value in expected]
    for name in ("map_state", "map_size", "map_attributes", "map_node", "reading"):
        assert joined.columns[name].tolist() == expected
    met = {object_id for owner, object_id in keys if owner is Owner.OWN}
    left = sorted(set(of_map) - met)
    assert sorted(unmet) == [(object_id, of_map[object_id]) for object_id in left for _ in range(6)]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.booleans()), unique_by=lambda pair: pair[0]),
    st.integers(1, 4),
)
def test_the_map_is_exported_in_pieces_with_the_checksums_that_commits_gave(
    tmp_path_factory: pytest.TempPathFactory, objects: list[tuple[int, bool]], rows: int
) -> None:
    state = FakeMap(chunk_bytes=1 << 20)
    state.objects = {
        object_id: MapObject(COMMITTED, size=object_id, crc=object_id + 500 if has_sum else -1)
        for object_id, has_sum in objects
    }
    folder = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint_file, "BATCH_ROWS", rows)
        body = state.checkpoint()
    (folder / "map.checkpoint").write_bytes(body)
    copy = folder / "map.checkpoint"
    with CheckpointReader.open(copy) as checkpoint, CheckpointReader.open(copy) as beside:
        exported = write_objects(checkpoint, beside, folder / "objects.parquet")
    found = pq.read_table(folder / "objects.parquet").select(["object_id", "map_size", "map_crc"])
    assert [tuple(row.values()) for row in found.to_pylist()] == [
        (id_, id_, id_ + 500 if has_sum else -1) for id_, has_sum in sorted(objects)
    ]
    assert (exported.objects, exported.committed_objects) == (len(objects), len(objects))


def test_a_listing_with_a_key_without_a_size_is_refused(tmp_path: Path) -> None:
    for name in (plan_folder.LISTING, plan_folder.MAP):
        (tmp_path / name).mkdir()
    row = {"key": own(1), "owner": 0, "object_id": 1, "modified_ms": 5, "size": None}
    values = {name: [row.get(name)] for name in tables.arrow_schema(tables.LISTING_COLUMNS).names}
    with tables.table_writer(
        tmp_path / plan_folder.LISTING / "a.parquet", tables.LISTING_COLUMNS
    ) as writer:
        writer.write_batch(tables.record_batch(tables.LISTING_COLUMNS, values))
    rules = Rules(next_object_id=9, young_from_ms=9, unlisted_from_ms=9)
    with pytest.raises(ReconcileError, match=r"a\.parquet"):
        LocalEngine().judge(tmp_path, rules, OWN)


RUN = """
import atexit, sys
from importlib.machinery import PathFinder

HEAVY = ("pandas", "pyspark", "psutil", "boto3")
found = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name in {absent!r} else found(name, path, target)

PathFinder.find_spec = find_spec
atexit.register(lambda: print("loaded", *(name for name in HEAVY if name in sys.modules)))
sys.argv = ["streammeta", *{words!r}]
from streammeta.cli.main import main
main()
"""


@pytest.mark.process
@pytest.mark.parametrize("absent", [(), ("pandas", "pyspark", "psutil")], ids=["spark", "no spark"])
def test_a_small_plan_needs_neither_pandas_nor_spark(absent: tuple[str, ...], scene: Scene) -> None:
    scene.state.objects = {i: MapObject(COMMITTED, size=10) for i in range(30)}
    for object_id in range(31):
        scene.bucket.put(own(object_id))
    folder = str(scene.root / "p")
    plan = [
        "reconcile",
        "plan",
        "--store",
        scene.bucket.uri,
        "--connect",
        scene.endpoint,
        "--plan",
        folder,
    ]
    for words in (plan, ["reconcile", "apply", "--plan", folder, "--yes"]):
        code = RUN.format(absent=absent, words=words)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "loaded", done.stdout
    assert scene.bucket.keys().isdisjoint({own(30)})


PANDAS_AFTERWARDS = """
from streammeta.reconcile.parquet.arrow_start import start_arrow
start_arrow()
import pyarrow as pa
assert pa.table({"a": [1, 2]}).to_pandas()["a"].tolist() == [1, 2]
import pandas
assert pa.array(pandas.Series([1, 2])).to_pylist() == [1, 2]
"""


@pytest.mark.process
def test_arrow_converts_to_pandas_once_that_is_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PANDAS_AFTERWARDS],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr

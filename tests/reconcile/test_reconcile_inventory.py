"""Inventories: the plan that a listing gives, what an old listing can't tell, what is refused."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from streammeta.cli.root import cli
from streammeta.reconcile.listing.inventory import fetch, read_inventory
from streammeta.reconcile.listing.inventory_rows import inventory_rows
from streammeta.reconcile.listing.key_owners import owner_columns, owner_of
from streammeta.reconcile.plan import INVENTORY_LAG_MS, PlanConfig, plan
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.plans.plan_folder import check_plan
from streammeta.reconcile.vocabulary import errors
from streammeta.reconcile.vocabulary.verdicts import Verdict
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.address import StoreAddress
from tests.reconcile.fake_controller import (
    COMMITTED,
    OTHER,
    OWN,
    FakeMap,
    LocalBucket,
    MapObject,
    Scene,
    example_plan,
    own,
)
from tests.reconcile.inventories import LONG_AGO_MS, Listed, write_inventory, write_manifest
from tests.storage.s3_servers import running_ministack

DAY_MS = 24 * 3_600_000
NOW_MS = LONG_AGO_MS + 100 * DAY_MS
ODD_KEYS = ("zoo/a b", "zoo/a+b", "zoo/100%", "zoo/Ümlaut", 'zoo/"quoted",', "zoo/line\nbreak")
KINDS = ("CSV", "ORC", "Parquet")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The verdicts of a plan, without etags, which inventories and folders do not share."""
    rows = pq.read_table(folder / plan_folder.VERDICTS).drop_columns(["etag", "modified_ms"])
    return sorted(rows.to_pylist(), key=lambda row: (row["key"], row["verdict"]))


@pytest.mark.timeout(300)
def test_each_inventory_plans_like_a_listing(scene: Scene, make_plan: Callable[..., Any]) -> None:
    scene.state.objects = {i: MapObject(COMMITTED, size=10) for i in range(20)}
    for object_id in range(5, 30):
        scene.bucket.put(own(object_id))
    for key in (key_for(905, OTHER), f"{own(906)}.bak", *ODD_KEYS):
        scene.bucket.put(key)
    listed = [Listed(object_.key, object_.size) for object_ in scene.bucket.store.list_objects()]
    by_listing, found = make_plan("listed")
    assert found.candidates.keys == 10
    for kind in KINDS:
        # Taken long after what the map lacks was committed, so that what it lacks is missing.
        manifest = write_inventory(scene.root / kind, listed, kind, started_ms=NOW_MS)
        by_inventory, result = make_plan(f"by-{kind}", inventory=str(manifest))
        assert rows_of(by_inventory) == rows_of(by_listing)
        assert result.guards == found.guards
        assert (result.inventory, result.listing_started_ms) == (str(manifest), NOW_MS)


@pytest.mark.timeout(300)
def test_old_versions_and_delete_markers_are_counted_and_never_compared(
    bucket: LocalBucket, state: FakeMap, tmp_path: Path, make_plan: Callable[..., Any]
) -> None:
    state.objects = {7: MapObject(COMMITTED, size=10)}
    bucket.put(own(7))
    rows = [
        Listed(own(7), version="b"),
        Listed(own(7), 99, version="a", is_latest=False),
        Listed(own(8), None, version="d", is_marker=True),
        Listed(own(8), version="c", is_latest=False),
        Listed(own(9), None, version="f", is_marker=True, is_latest=False),
        Listed(own(9), version="e"),
    ]
    for kind in KINDS:
        manifest = write_inventory(tmp_path / kind, rows, kind)
        folder, result = make_plan(f"by-{kind}", inventory=str(manifest), unsafe_grace=True)
        counted = {str(verdict): tally.keys for verdict, tally in result.classes.items()}
        expected = {"live": 1, "orphan": 0, "too_young": 1, "old_version": 2, "delete_marker": 2}
        assert counted == {name: keys for name, keys in expected.items() if keys}
        notes = {
            (row["verdict"], row["note"])
            for row in rows_of(folder)
            if row["verdict"] in {"old_version", "delete_marker"}
        }
        assert notes == {
            *(("old_version", "a"), ("old_version", "c")),
            *(("delete_marker", "d"), ("delete_marker", "f")),
        }


@pytest.mark.timeout(300)
def test_what_came_after_an_inventory_is_neither_missing_nor_an_orphan(
    bucket: LocalBucket, state: FakeMap, tmp_path: Path, make_plan: Callable[..., Any]
) -> None:
    taken_ms = NOW_MS
    grace_ms = 3_600_000
    state.objects = {
        1: MapObject(COMMITTED, size=10, time_ms=taken_ms + 1),  # the inventory can't have it
        2: MapObject(COMMITTED, size=10, time_ms=taken_ms - INVENTORY_LAG_MS),  # it may lack it
        3: MapObject(COMMITTED, size=10, time_ms=taken_ms - INVENTORY_LAG_MS - 1),
    }
    for object_id in (1, 2, 3):
        bucket.put(own(object_id))
    rows = [
        Listed(own(10), modified_ms=taken_ms - grace_ms),
        Listed(own(11), modified_ms=taken_ms - grace_ms - 1000),
        Listed(own(12), modified_ms=taken_ms + 5000),
    ]
    manifest = write_inventory(tmp_path, rows, started_ms=taken_ms)
    folder, result = make_plan("plan", inventory=str(manifest), grace_ms=grace_ms)
    verdicts = {row["object_id"]: row["verdict"] for row in rows_of(folder)}
    assert verdicts == {
        1: Verdict.UNLISTED,
        2: Verdict.UNLISTED,
        3: Verdict.MISSING,
        10: Verdict.TOO_YOUNG,
        11: Verdict.ORPHAN,
        12: Verdict.TOO_YOUNG,
    }
    # A look at the bucket itself finds what the inventory lacked: nothing is reported lost.
    assert (result.lost, result.losses.refuted) == (0, 1)


def test_an_inventory_is_read_before_the_map_is_copied(scene: Scene, tmp_path: Path) -> None:
    manifest = write_inventory(tmp_path / "lists", [Listed(own(5))])
    files = sorted((tmp_path / "lists").rglob("*.csv.gz"))
    broken: list[Path] = []

    def break_inventory() -> None:
        for path in files:
            path.unlink()
            broken.append(path)

    scene.state.on_snapshot = break_inventory
    scene.state.objects = {6: MapObject(COMMITTED)}
    config = PlanConfig(
        scene.bucket.address,
        (scene.endpoint,),
        tmp_path / "plan",
        inventory=str(manifest),
        max_share=1,
    )
    assert plan(config).classes[Verdict.TOO_YOUNG].keys == 1
    assert broken == files


def test_a_plan_of_an_old_inventory_is_applied_while_its_copy_of_the_map_is_new() -> None:
    now_ms = 1_000_000_000_000
    old = replace(
        example_plan(now_ms),
        listing_started_ms=now_ms - 9 * DAY_MS,
        young_from_ms=now_ms - 10 * DAY_MS,
    )
    check_plan(Path("p"), replace(old, inventory="lists/manifest.json"), now_ms)
    with pytest.raises(errors.PlanError, match="216 h old"):
        check_plan(Path("p"), old, now_ms)
    late = replace(old, inventory="lists/manifest.json", created_at_ms=now_ms - DAY_MS - 1)
    with pytest.raises(errors.PlanError, match="24 h old"):
        check_plan(Path("p"), late, now_ms)


def read_all(address: Path, bucket: str = "bucket", **settings: Any) -> list[str]:
    """The keys of an inventory."""
    inventory = read_inventory(str(address), bucket, settings.get("taken_ms"), NOW_MS)
    return [
        key
        for file in inventory.files
        for batch in inventory_rows(inventory, file, OWN)
        for key in batch["key"].to_pylist()
    ]


GOOD = [Listed(own(5)), Listed(own(6))]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"sourceBucket": "other"}, "sourceBucket is 'other', but --store is the bucket 'bucket'"),
        ({"sourceBucket": None}, "sourceBucket is None"),
        ({"version": "2030-01-01"}, "version is '2030-01-01'"),
        ({"fileFormat": "Avro"}, "fileFormat is 'Avro'"),
        ({"creationTimestamp": "yesterday"}, "creationTimestamp is 'yesterday'"),
        ({"creationTimestamp": str(NOW_MS + 1000)}, "1 s in the future"),
        ({"fileSchema": ""}, "fileSchema is ''"),
        ({"fileSchema": "Bucket, Key, LastModifiedDate"}, "no column 'size'"),
        ({"fileSchema": "Bucket, Key, Size"}, "no column 'lastmodifieddate'"),
        (
            {"fileSchema": "Bucket, Key, VersionId, Size, LastModifiedDate"},
            "no column 'islatest'",
        ),
        ({"files": None}, "files is None"),
        ({"files": [{"size": 1, "MD5checksum": "0" * 32}]}, r"files\[0\].key is None"),
        ({"files": [{"key": "a", "size": "1", "MD5checksum": "0" * 32}]}, "size is '1'"),
        ({"files": [{"key": "a", "size": 1, "MD5checksum": "x"}]}, "MD5checksum is 'x'"),
        ({"files": [{"key": "a", "size": 1, "MD5checksum": "0" * 32}] * 2}, "for the second time"),
        (
            {"files": [{"key": "../a", "size": 1, "MD5checksum": "0" * 32}]},
            r"without '\.\.'",
        ),
        ({"files": [{"key": "a", "size": 1, "MD5checksum": "0" * 32}]}, "'a' is not below"),
    ],
)
def test_a_foreign_manifest_is_refused(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(errors.InventoryError, match=named):
        read_all(write_inventory(tmp_path, GOOD, **fields))


def test_a_manifest_with_another_checksum_or_none_is_refused(tmp_path: Path) -> None:
    manifest = write_inventory(tmp_path, GOOD)
    assert sorted(read_all(manifest)) == [own(5), own(6)]
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    with pytest.raises(errors.InventoryError, match=r"manifest\.checksum says"):
        read_all(manifest)
    manifest.with_name("manifest.checksum").unlink()
    with pytest.raises(errors.InventoryError, match=r"manifest\.json.*manifest\.checksum"):
        read_all(manifest)


def test_the_newest_whole_inventory_of_a_prefix_is_read(tmp_path: Path) -> None:
    dated = write_inventory(tmp_path, [Listed("a")]).parent
    prefix = f"{dated.parent}/"
    for date in ("2026-05-09T01-00Z", "2026-05-10T01-00Z", "2026-05-11T01-00Z", "2027-notes"):
        shutil.copytree(dated, dated.with_name(date))
    (dated.parent / "2026-05-11T01-00Z" / "manifest.checksum").unlink()
    found = read_inventory(prefix, "bucket", None, NOW_MS)
    assert found.place == f"{prefix}2026-05-10T01-00Z/manifest.json"
    for path in dated.parent.glob("2026-*/manifest.checksum"):
        path.unlink()
    with pytest.raises(errors.InventoryError, match="inventory"):
        read_inventory(prefix, "bucket", None, NOW_MS)


def test_a_manifest_that_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.InventoryError, match="JSON"):
        read_all(write_manifest(tmp_path, [1]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_other_bytes_or_another_size_is_refused(tmp_path: Path, kind: str) -> None:
    manifest = write_inventory(tmp_path, GOOD, kind, parts=1)
    path = Path(json.loads(manifest.read_text())["files"][0]["key"])
    path = tmp_path / path
    body = path.read_bytes()
    path.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(errors.InventoryError, match=r"files\[\]\.MD5checksum is"):
        read_all(manifest)
    path.write_bytes(body[:-1])
    with pytest.raises(errors.InventoryError, match=r"files\[\]\.size is"):
        read_all(manifest)


class EndedError(Exception):
    """What ends the work on a file."""


def test_the_check_of_a_copy_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streammeta.reconcile.listing.inventory._PIECE", 1)
    inventory = read_inventory(str(write_inventory(tmp_path, GOOD)), "bucket", None, NOW_MS)
    pieces = []

    def go_on() -> None:
        pieces.append(1)
        if len(pieces) == 3:
            raise EndedError

    with pytest.raises(EndedError):
        fetch(inventory, inventory.files[0], tmp_path, go_on)
    assert len(pieces) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("row", "named"),
    [
        (Listed(own(5), bucket="other"), "bucket is 'other', but --store is the bucket 'bucket'"),
        (Listed(own(5), size=None), "size is empty in 1 rows"),
        (Listed(own(5), size=-1), "size is -1"),
        (Listed(""), "key is empty in 1 rows"),
    ],
)
def test_a_foreign_row_names_its_column(tmp_path: Path, kind: str, row: Listed, named: str) -> None:
    with pytest.raises(errors.InventoryError, match=named):
        read_all(write_inventory(tmp_path, [*GOOD, row], kind))


@pytest.mark.parametrize("number", [0, 1])
def test_a_broken_file_ends_a_plan_with_its_name_and_leaves_none(
    bucket: LocalBucket, make_plan: Callable[..., Any], tmp_path: Path, number: int
) -> None:
    manifest = write_inventory(tmp_path / "lists", GOOD)
    sorted((tmp_path / "lists").rglob("*.csv.gz"))[number].write_bytes(b"x")
    with pytest.raises((errors.InventoryError, errors.SparkJobError), match=rf"{number}\.csv\.gz"):
        make_plan("plan", inventory=str(manifest))
    assert not (tmp_path / "plan").exists()


def test_a_csv_without_versions_is_read(tmp_path: Path) -> None:
    manifest = write_inventory(tmp_path, GOOD, with_versions=False)
    assert sorted(read_all(manifest)) == [own(5), own(6)]


NAMES = [
    ("path", "size", "modified"),
    ("file_path", "size", "last_modified"),
    ("path", "length", "modificationTime"),
    ("key", "size", "modified_ms"),
]


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("prefix", ["", "s3a://bucket/"])
def test_a_table_of_path_size_and_time_is_read(
    tmp_path: Path, names: tuple[str, ...], kind: str, prefix: str
) -> None:
    columns = ([prefix + own(5), prefix + own(6)], [10, 11], [LONG_AGO_MS, LONG_AGO_MS + 1])
    table = pa.table(dict(zip(names, columns, strict=True)))
    path = tmp_path / f"part-0.{kind}"
    if kind == "csv":
        pa_csv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    (tmp_path / "_SUCCESS").touch()
    assert read_all(tmp_path, taken_ms=NOW_MS) == [own(5), own(6)]
    assert read_all(path, taken_ms=NOW_MS) == [own(5), own(6)]


def test_times_of_a_table_may_be_timestamps_or_text(tmp_path: Path) -> None:
    texts = ["2023-11-14T22:13:20Z", "2023-11-14 22:13:20.000", "2023-11-14T23:13:20+01:00"]
    found = []
    for number, moments in enumerate(
        (
            texts,
            pa.array([LONG_AGO_MS], pa.timestamp("ms")),
            pa.array([LONG_AGO_MS * 1000]).cast(pa.timestamp("us", "UTC")),
        )
    ):
        path = tmp_path / f"{number}.parquet"
        table = {"path": ["a"] * len(moments), "size": [1] * len(moments), "modified": moments}
        pq.write_table(pa.table(table), path)
        inventory = read_inventory(str(path), "bucket", NOW_MS, NOW_MS)
        (batch,) = inventory_rows(inventory, inventory.files[0], OWN)
        found += batch["modified_ms"].to_pylist()
    assert found == [LONG_AGO_MS] * 5


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"path": ["s3://other/a"], "size": [1], "modified": [1]}, "path is 's3://other/a'"),
        ({"path": ["a"], "modified": [1]}, "no column 'size'"),
        ({"path": ["a"], "size": ["big"], "modified": [1]}, "size is not an integer"),
        ({"path": ["a"], "size": [1], "modified": ["soon"]}, "lastmodifieddate is not a time"),
    ],
)
def test_a_wrong_table_names_its_column(tmp_path: Path, table: dict[str, Any], named: str) -> None:
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(errors.InventoryError, match=named):
        read_all(tmp_path / "a.parquet", taken_ms=NOW_MS)


def test_a_table_needs_its_moment_and_a_manifest_has_one(tmp_path: Path) -> None:
    pq.write_table(pa.table({"path": ["a"], "size": [1], "modified": [1]}), tmp_path / "a.parquet")
    with pytest.raises(errors.InventoryError, match="--taken-at"):
        read_all(tmp_path / "a.parquet")
    with pytest.raises(errors.InventoryError, match="--taken-at"):
        read_all(write_inventory(tmp_path, GOOD), taken_ms=NOW_MS)
    with pytest.raises(errors.InventoryError, match="future"):
        read_all(tmp_path / "a.parquet", taken_ms=NOW_MS + 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.InventoryError, match="files"):
        read_all(tmp_path / "empty", taken_ms=NOW_MS)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"inventory_taken_ms": 5}, "--taken-at is given without --inventory"),
        ({"inventory": "m", "versions": True}, "Leave --versions"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=named):
        plan(PlanConfig(StoreAddress.parse("file:///b"), ("h:1",), tmp_path / "p", **settings))


def test_the_command_reads_an_inventory_and_says_which(
    bucket: LocalBucket, state: FakeMap, endpoint: str, tmp_path: Path
) -> None:
    state.objects = {1: MapObject(COMMITTED, size=10)}
    bucket.put(own(1))
    pq.write_table(
        pa.table({"path": [own(1)], "size": [10], "modified": [1]}), tmp_path / "a.parquet"
    )
    words = ["reconcile", "plan", "--store", bucket.uri, "--connect", endpoint, "--format", "json"]
    words += ["--plan", str(tmp_path / "plan"), "--inventory", str(tmp_path / "a.parquet")]
    taken = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    done = CliRunner().invoke(cli, [*words, "--taken-at", taken])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["inventory"] == str(tmp_path / "a.parquet")
    refused = CliRunner().invoke(cli, [*words, "--taken-at", "yesterday"])
    assert refused.exit_code == 2
    assert "not a time with its zone" in refused.output


segments = st.sampled_from(
    [
        OWN,
        OTHER,
        "00000000",
        "50000000",
        "a5000000",
        "5",
        "005",
        "165",
        "4294967296",
        "cluster.json",
    ]
)
some_keys = st.one_of(
    st.integers(0, 2**33).map(own),
    st.integers(0, 2**63 - 1).map(lambda object_id: key_for(object_id, OTHER)),
    st.lists(segments, min_size=1, max_size=4).map("/".join),
    st.text(min_size=1).filter(lambda text: text.isprintable()),
)


@given(st.lists(some_keys), st.sampled_from([OWN, "a5000000"]))
def test_owners_of_many_keys_are_those_of_each(keys: list[str], namespace: str) -> None:
    owners, ids, notes = owner_columns(pa.array(keys, pa.string()), namespace)
    got = list(zip(owners.to_pylist(), ids.to_pylist(), notes.to_pylist(), strict=True))
    assert got == [
        (int(owner), id_, note) for owner, id_, note in (owner_of(key, namespace) for key in keys)
    ]


@pytest.mark.s3
def test_an_inventory_is_read_from_the_bucket_that_it_lies_in(tmp_path: Path) -> None:
    rows = [Listed(own(number)) for number in range(5000)]
    manifest = write_inventory(tmp_path, rows)
    with running_ministack() as server:
        server.create_bucket("lists")
        place = server.uri("lists")
        address = place.replace("lists", f"lists/{manifest.relative_to(tmp_path)}", 1)
        store = open_object_store(place)
        with pytest.raises(errors.InventoryError, match=r"manifest\.json"):
            read_inventory(address, "bucket", None, NOW_MS)
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        for path in files:
            store.put(str(path.relative_to(tmp_path)), path.read_bytes())
        inventory = read_inventory(address, "bucket", None, NOW_MS)
        found = [
            key
            for file in inventory.files
            for batch in inventory_rows(inventory, file, OWN)
            for key in batch["key"].to_pylist()
        ]
        assert sorted(found) == sorted(row.key for row in rows)
        assert "secretKey" not in inventory.place
        prefix = address.replace("2026-05-01T01-00Z/manifest.json", "")
        assert read_inventory(prefix, "bucket", None, NOW_MS).files == inventory.files
        with pytest.raises(errors.InventoryError, match="inventory"):
            read_inventory(prefix.replace("daily", "weekly"), "bucket", None, NOW_MS)
        store.delete_many([inventory.files[1].name])
        store.close()
        with pytest.raises(errors.InventoryError, match=r"'lists/bucket/daily/data/1\.csv\.gz'"):
            list(inventory_rows(inventory, inventory.files[1], OWN))

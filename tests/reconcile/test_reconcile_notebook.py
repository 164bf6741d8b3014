"""Plan and apply as a notebook calls them: DataFrames in and out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from streammeta import reconcile
from streammeta.reconcile import apply, open_plan, plan
from streammeta.reconcile.apply import ApplyConfig
from streammeta.reconcile.apply import apply as apply_plan
from streammeta.reconcile.vocabulary.errors import ConfigurationError, PlanError
from tests.reconcile.fake_controller import COMMITTED, FakeMap, LocalBucket, MapObject, own

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture
def session(spark: None) -> SparkSession:
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    assert running is not None
    return running


@pytest.fixture
def orphans(state: FakeMap, bucket: LocalBucket) -> list[str]:
    """A bucket with 150 of 151 objects of the map, and 6 orphans."""
    state.objects = {i: MapObject(COMMITTED, size=10, ranges=((1, i, i + 1),)) for i in range(151)}
    for object_id in range(150):
        bucket.put(own(object_id))
    return [bucket.put(own(200 + i), 4 + i) for i in range(6)]


def keys(frame: Any) -> list[str]:
    return sorted(row["key"] for row in frame.collect())


def test_a_plan_has_tables_and_some_of_its_candidates_are_deleted(
    session: SparkSession, orphans: list[str], bucket: LocalBucket, endpoint: str, tmp_path: Path
) -> None:
    said: list[str] = []
    made = plan(bucket.uri, endpoint, tmp_path / "p", max_share=1, progress=said.append)
    assert keys(made.candidates) == sorted(orphans)
    counts = made.verdicts.where("verdict <> 'marker'").groupBy("verdict").count().collect()
    assert {row["verdict"]: row["count"] for row in counts} == {
        "live": 150,
        "orphan": 6,
        "missing": 1,
    }
    assert keys(made.losses) == [own(150)]
    assert said

    chosen = made.candidates.where("size >= 8")
    dry = apply(made, candidates=chosen, progress=said.append)
    assert {row["outcome"] for row in dry.outcomes.collect()} == {"would_delete"}
    done = apply(tmp_path / "p", candidates=chosen, delete=True, progress=said.append)

    assert keys(done.outcomes) == sorted(orphans[4:])
    assert not list((tmp_path / "p").glob("chosen-*"))
    assert {row["outcome"] for row in done.outcomes.collect()} == {"deleted"}
    assert done.result.complete
    left = {info.key for info in bucket.store.list_objects()}
    assert left & set(orphans) == set(orphans[:4])
    rest = apply(open_plan(tmp_path / "p"), delete=True, progress=said.append)
    outcomes = sorted(row["outcome"] for row in rest.outcomes.collect())
    assert outcomes == ["deleted"] * 4 + ["gone"] * 2


def test_a_listing_can_be_a_dataframe(
    session: SparkSession, orphans: list[str], bucket: LocalBucket, endpoint: str, tmp_path: Path
) -> None:
    from pyspark.sql import functions as sql

    infos = list(bucket.store.list_objects())
    three_days_ms = 3 * 24 * 3600 * 1000  # an inventory may be two days behind
    rows = [
        (info.key, info.size, info.last_modified_ms - three_days_ms, info.etag) for info in infos
    ]
    listed = session.createDataFrame(rows, "key string, size long, at long, e_tag string")
    listed = listed.withColumn("last_modified", sql.timestamp_millis("at")).drop("at")
    taken_ms = min(info.last_modified_ms for info in infos)
    made = plan(
        bucket.uri,
        endpoint,
        tmp_path / "p",
        inventory=listed,
        inventory_taken_ms=taken_ms,
        max_share=1,
    )
    assert keys(made.candidates) == sorted(orphans)
    assert [entry.name for entry in tmp_path.glob("*p*inventory*")] == []


def test_a_key_that_is_no_candidate_is_refused(
    session: SparkSession, orphans: list[str], bucket: LocalBucket, endpoint: str, tmp_path: Path
) -> None:
    made = plan(bucket.uri, endpoint, tmp_path / "p", max_share=1)
    strange = session.createDataFrame([(orphans[0],), (own(3),)], "key string")
    with pytest.raises(PlanError, match=f"'{own(3)}'"):
        apply(made, candidates=strange, delete=True)
    with pytest.raises(ConfigurationError, match="'key'"):
        apply(made, candidates=strange.withColumnRenamed("key", "name"), delete=True)
    # Other columns of a chosen row are the plan's, whatever the frame says.
    forged = made.candidates.where(f"key = '{orphans[0]}'").selectExpr("key", "1 as object_id")
    assert keys(apply(made, candidates=forged).outcomes) == [orphans[0]]
    assert set(orphans) <= {info.key for info in bucket.store.list_objects()}


def test_an_option_that_is_unknown_is_named(session: SparkSession, tmp_path: Path) -> None:
    said = r"option 'graze_ms' is unknown. Known options: .*patience"
    with pytest.raises(ConfigurationError, match=said):
        plan("file:///tmp", "h:1", tmp_path, graze_ms=1)
    made = reconcile.Plan(tmp_path, None, session)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=said):
        apply(made, graze_ms=1)


def test_a_missing_session_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from pyspark.sql import SparkSession

    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    with pytest.raises(ConfigurationError, match="Spark session"):
        plan("file:///tmp", "h:1", tmp_path)


def test_a_table_that_a_plan_lacks_is_named(session: SparkSession, tmp_path: Path) -> None:
    made = reconcile.Plan(tmp_path, None, session)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="candidates"):
        assert made.candidates


def test_candidates_are_chosen_of_a_whole_plan_alone(
    session: SparkSession, orphans: list[str], bucket: LocalBucket, endpoint: str, tmp_path: Path
) -> None:
    folder = plan(bucket.uri, endpoint, tmp_path / "p", max_share=1).folder
    chosen = tmp_path / "chosen"
    (folder / "candidates").rename(chosen)
    with pytest.raises(PlanError, match="missing"):
        apply_plan(ApplyConfig(folder, delete=True, chosen=chosen))
    assert set(orphans) <= {info.key for info in bucket.store.list_objects()}

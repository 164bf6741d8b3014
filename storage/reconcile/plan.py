"""Makes a plan: lists the bucket, then copies the map, and says of every key what it is.

The listing ends before the copy of the map is taken. So an object committed meanwhile is in the
map and never looks like an orphan, and an id found in the bucket was issued before the copy was
taken. Nothing here deletes anything.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from storage.object_format.object_key import cluster_namespace, key_for
from storage.object_store.factory import without_secrets
from storage.reconcile import plan_folder
from storage.reconcile.classify import ABSENT, Int64Column, JoinedColumns, Rules, Verdict, judge
from storage.reconcile.errors import ConfigurationError, PlanError
from storage.reconcile.guards import GuardSettings, check_guards
from storage.reconcile.leader import LeaderClient
from storage.reconcile.listing import (
    open_store,
    shards_of,
    write_listing,
    write_uploads,
)
from storage.reconcile.map_export import MAP_COLUMNS, MapExport, export_map
from storage.reconcile.plan_folder import PlanResult, Tally
from storage.reconcile.session import SparkConfig, job_errors, spark_session
from storage.reconcile.tables import record_batch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Progress = Callable[[str], None]

_NAMESPACE_PREFIX = cluster_namespace("x")[:-1]
_LISTING = "listing"
_CLOCK_SKEW_MS = 10 * 60 * 1000
_VERDICT_COLUMNS = (
    "key string, object_id long, verdict string, note string, size long, modified_ms long,"
    " etag string, map_state long, map_size long"
)


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What to compare and how careful to be.

    `store` may carry credentials, which are not written down. `connect` are HOST:PORT of
    controllers. An unknown object younger than `grace_ms` when the listing starts is left alone.
    More candidates than the fraction `max_share` of the cluster's keys make a plan that can't be
    applied. `namespace` None means the cluster's own. `shard_digits` 1 lists in 17 shards, 2 in
    257. `patience_s` is how long to wait for a leader.
    """

    store: str
    connect: tuple[str, ...]
    folder: Path
    grace_ms: int = 3_600_000
    max_share: float = 0.2
    allow_empty_map: bool = False
    namespace: str | None = None
    patience_s: float = 15.0
    shard_digits: int = 1
    spark: SparkConfig = field(default_factory=SparkConfig)


def plan(config: PlanConfig, progress: Progress = lambda _line: None) -> PlanResult:
    """Compare bucket and map, and write the plan folder; `progress` hears one line per stage.

    The plan is written also when guards failed: it is a report then, which apply refuses.

    Raises:
        ReconcileError: what was asked for makes no sense, the controllers do not answer, the
            folder exists, or Spark failed. There is no plan then.
        StorageError: the bucket can't be read.
    """
    _check_config(config)
    plan_folder.refuse_existing(config.folder)
    with LeaderClient(config.connect, config.patience_s) as leader:
        cluster_id = leader.check_objects([0]).cluster_id
    namespace = _namespace_for(config, cluster_id)
    store = open_store(config.store)
    try:
        progress(f"starting Spark on {config.spark.master}")
        with (
            plan_folder.new_plan_folder(config.folder) as draft,
            spark_session(config.spark) as spark,
        ):
            started_ms = _now_ms()
            _list(spark, config, namespace, draft, progress)
            progress("copying the map")
            exported = _export(config, cluster_id, draft / plan_folder.MAP)
            rules = Rules(
                next_object_id=exported.next_object_id,
                young_from_ms=started_ms - config.grace_ms,
                unlisted_from_ms=started_ms - _CLOCK_SKEW_MS,
            )
            progress(f"comparing with {exported.objects} objects of the map")
            classes = _write_verdicts(spark, draft, rules, namespace)
            uploads = write_uploads(store, draft / plan_folder.UPLOADS)
            result = _result(config, namespace, exported, rules, started_ms, classes, uploads)
            plan_folder.write_plan_file(draft, result)
    finally:
        store.close()
    return result


def _check_config(config: PlanConfig) -> None:
    if not config.connect:
        raise ConfigurationError("--connect names no controller; give at least one HOST:PORT")
    if config.grace_ms < 0:
        raise ConfigurationError(f"--grace is {config.grace_ms} ms, wanted 0 or more")
    if not 0 <= config.max_share <= 1:
        raise ConfigurationError(f"--max-share is {config.max_share}, wanted 0..1")


def _namespace_for(config: PlanConfig, cluster_id: str) -> str:
    """The namespace to look for; refuses one that says itself to be another cluster's."""
    own = cluster_namespace(cluster_id)
    chosen = config.namespace or own
    if chosen != own and chosen.startswith(_NAMESPACE_PREFIX):
        raise ConfigurationError(
            f"--namespace {chosen!r} belongs to another cluster: the controllers at"
            f" {', '.join(config.connect)} are {cluster_id!r}, whose namespace is {own!r}"
        )
    return chosen


def _export(config: PlanConfig, cluster_id: str, folder: Path) -> MapExport:
    """Copy the map and make sure whose it is."""
    with LeaderClient(config.connect, config.patience_s) as leader:
        exported = export_map(leader, folder)
    if exported.cluster_id != cluster_id:
        raise PlanError(
            f"the copy of the map is of cluster {exported.cluster_id!r}, but CheckObjects answered"
            f" for {cluster_id!r}; let --connect name controllers of one cluster"
        )
    return exported


def _list(
    spark: SparkSession, config: PlanConfig, namespace: str, draft: Path, progress: Progress
) -> None:
    shards = shards_of(config.shard_digits)
    progress(f"listing {without_secrets(config.store)} in {len(shards)} shards")
    keys = write_listing(spark, config.store, namespace, shards, draft / _LISTING)
    progress(f"listed {keys} keys")


def _write_verdicts(
    spark: SparkSession, draft: Path, rules: Rules, namespace: str
) -> dict[Verdict, Tally]:
    """Write the verdict table and the candidates; returns keys and bytes per verdict."""
    from pyspark.sql import functions as sql

    verdicts_path = str(draft / plan_folder.VERDICTS)
    with job_errors("comparing bucket and map"):
        joined = _joined(spark, draft)
        judged = joined.mapInArrow(_judge_rows(rules, namespace), _VERDICT_COLUMNS)
        judged.write.parquet(verdicts_path)
        verdicts = spark.read.schema(_VERDICT_COLUMNS).parquet(verdicts_path)
        candidates = verdicts.where(sql.col("verdict") == str(Verdict.ORPHAN))
        candidates.select("key", "object_id", "size", "modified_ms", "etag").write.parquet(
            str(draft / plan_folder.CANDIDATES)
        )
        counted = verdicts.groupBy("verdict").agg(
            sql.count("*").alias("keys"), sql.coalesce(sql.sum("size"), sql.lit(0)).alias("size")
        )
        rows = counted.collect()
    shutil.rmtree(draft / _LISTING)
    found = {Verdict(row["verdict"]): Tally(row["keys"], row["size"]) for row in rows}
    return {verdict: found[verdict] for verdict in Verdict if verdict in found}


def _joined(spark: SparkSession, draft: Path) -> DataFrame:
    """Keys of ours with what the map knows of them, objects without a key, and all other keys."""
    from pyspark.sql import functions as sql

    listing = spark.read.parquet(str(draft / _LISTING))
    of_map = spark.read.schema(MAP_COLUMNS).parquet(str(draft / plan_folder.MAP))
    own = listing.where(sql.col("owner") == 0)
    both = own.join(of_map, "object_id", "full_outer")
    return both.unionByName(listing.where(sql.col("owner") != 0), allowMissingColumns=True)


def _judge_rows(
    rules: Rules, namespace: str
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make the function that an executor runs: joined rows in, verdict rows out."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            verdicts = judge(_columns_of(batch), rules)
            reported = pa.array(verdicts != "")
            rows = _verdict_rows(batch, verdicts.tolist(), namespace)
            yield rows.filter(reported)

    return run


def _columns_of(batch: pa.RecordBatch) -> JoinedColumns:
    def column(name: str) -> Int64Column:
        values: Int64Column = batch.column(name).fill_null(ABSENT).to_numpy(zero_copy_only=False)
        return values.astype(np.int64)

    return JoinedColumns(
        owner=column("owner"),
        object_id=column("object_id"),
        listed_size=column("size"),
        modified_ms=column("modified_ms"),
        map_state=column("map_state"),
        map_size=column("map_size"),
        map_time_ms=column("map_time_ms"),
        map_attributes=column("map_attributes"),
    )


def _verdict_rows(batch: pa.RecordBatch, verdicts: list[str], namespace: str) -> pa.RecordBatch:
    """The report's rows; an object that the bucket lacks is given the key it should have."""
    copied = ("note", "size", "modified_ms", "etag", "map_state", "map_size")
    values: dict[str, Any] = {name: batch.column(name) for name in copied}
    values |= {"object_id": batch.column("object_id"), "verdict": verdicts}
    unnamed = batch.column("key").null_count > 0
    values["key"] = _named(batch, namespace) if unnamed else batch.column("key")
    return record_batch(_VERDICT_COLUMNS, values)


def _named(batch: pa.RecordBatch, namespace: str) -> list[str]:
    ids: list[Any] = batch.column("object_id").to_pylist()
    keys: list[str | None] = batch.column("key").to_pylist()
    return [
        key_for(object_id, namespace) if key is None else key
        for key, object_id in zip(keys, ids, strict=True)
    ]


def _result(
    config: PlanConfig,
    namespace: str,
    exported: MapExport,
    rules: Rules,
    started_ms: int,
    classes: dict[Verdict, Tally],
    uploads: int,
) -> PlanResult:
    counts = {verdict: tally.keys for verdict, tally in classes.items()}
    settings = GuardSettings(config.max_share, config.allow_empty_map)
    return PlanResult(
        cluster_id=exported.cluster_id,
        store=without_secrets(config.store),
        namespace=namespace,
        connect=config.connect,
        created_at_ms=_now_ms(),
        listing_started_ms=started_ms,
        young_from_ms=rules.young_from_ms,
        map_end_offset=exported.end_offset,
        map_epoch=exported.epoch,
        next_object_id=exported.next_object_id,
        map_objects=exported.objects,
        classes=classes,
        unfinished_uploads=uploads,
        guards=check_guards(counts, exported.committed_objects, settings),
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

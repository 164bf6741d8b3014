"""Reconciliation on Spark: listing, join and deletion spread over executors.

The local engine uses the same functions for rows. This module only distributes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from streammeta.reconcile.deletion.order import DeletionOrder
from streammeta.reconcile.deletion.run_signals import relayed
from streammeta.reconcile.deletion.tasks import carry_out
from streammeta.reconcile.engines import engine, task_tracing
from streammeta.reconcile.engines.spark_session import SparkConfig, job_errors, spark_session
from streammeta.reconcile.listing.inventory import Inventory
from streammeta.reconcile.listing.inventory_rows import inventory_rows
from streammeta.reconcile.listing.repeated_keys import OF_VERSIONS, PRECEDENCE
from streammeta.reconcile.listing.shards import Shard
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.vocabulary import attempts, tables, verdicts
from streammeta.reconcile.vocabulary.tables import VERDICT_COLUMNS, arrow_schema
from streammeta.reconcile.vocabulary.verdicts import Owner, Rules, Verdict
from streammeta.storage.object_store.protocol.address import StoreAddress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_Batches = Iterable[pa.RecordBatch]


@contextmanager
def spark_engine(
    config: SparkConfig, is_ending: Callable[[], bool] = lambda: False
) -> Iterator[SparkEngine]:
    """Yield an engine on the running Spark session of the process, or on a new one.

    Once `is_ending` is true no task deletes a further batch.

    Raises as `spark_session`.
    """
    with spark_session(config) as spark:
        yield SparkEngine(spark, is_ending)


class SparkEngine:
    """See `Engine`."""

    name = engine.EngineName.SPARK

    def __init__(self, spark: SparkSession, is_ending: Callable[[], bool]) -> None:
        self._spark = spark
        self._is_ending = is_ending

    def list_bucket(
        self, address: StoreAddress, namespace: str, shards: Sequence[Shard], listing: Path
    ) -> int:
        """See `Engine.list_bucket`. Raises `SparkJobError` with the store's message."""
        from streammeta.reconcile.listing.source import ListingSource

        cuts = ",".join(shard.last for shard in shards if shard.last is not None)
        with job_errors("listing the bucket"):
            self._spark.dataSource.register(ListingSource)
            source = self._spark.read.format(ListingSource.FORMAT)
            source = source.options(store=address.uri, namespace=namespace, cuts=cuts)
            source.load().write.parquet(str(listing))
        return tables.count_rows(listing)

    def list_inventory(self, inventory: Inventory, namespace: str, listing: Path) -> int:
        """See `Engine.list_inventory`. Each file is one task. Raises `SparkJobError`."""
        count = len(inventory.files)
        with job_errors(f"reading the inventory {inventory.place}"):
            files = self._spark.range(0, count, 1, max(1, count))
            listed = files.mapInArrow(
                _inventory_reader(inventory, namespace), tables.LISTING_COLUMNS
            )
            listed.write.parquet(str(listing))
        return tables.count_rows(listing)

    def count_owners(self, listing: Path) -> Mapping[Owner, tables.Tally]:
        """See `Engine.count_owners`."""
        with job_errors("counting the listing"):
            rows = self._read(listing, tables.LISTING_COLUMNS)
            found = _tallies(_own_keys(rows).unionByName(_other_rows(rows)), "owner")
        return {Owner(owner): tally for owner, tally in found.items()}

    def judge(self, draft: Path, rules: Rules, namespace: str) -> Mapping[Verdict, tables.Tally]:
        """See `Engine.judge`."""
        from pyspark.sql import functions as sql

        path = draft / plan_folder.VERDICTS
        with job_errors("comparing bucket and map"):
            judged_table(self._joined(draft), rules, namespace).write.parquet(str(path))
            verdicts = self._read(path, tables.VERDICT_COLUMNS)
            candidates = verdicts.where(sql.col("verdict") == str(Verdict.ORPHAN))
            names = [column.split()[0] for column in tables.CANDIDATE_COLUMNS.split(",")]
            candidates.select(*names).write.parquet(str(draft / plan_folder.CANDIDATES))
        # Two columns of few values: another job would take longer than to read them here.
        counts = tables.Counts("verdict")
        for rows in tables.read_batches(path, "verdict string, size long"):
            counts.add(rows)
        return {Verdict(verdict): tally for verdict, tally in counts.tallies().items()}

    def delete(self, order: DeletionOrder, candidates: Path, outcomes: Path) -> None:
        """See `Engine.delete`. A task has its share of the rate, and of the order of keys."""
        with (
            job_errors(f"deleting (deleted objects are recorded below {order.undo_folder})"),
            relayed(self._is_ending, Path(order.signals_folder)),
        ):
            tasks = max(1, min(self._spark.sparkContext.defaultParallelism, int(order.keys_per_s)))
            share = replace(order, keys_per_s=order.keys_per_s / tasks)
            rows = self._read(candidates, tables.CANDIDATE_COLUMNS)
            spread = rows.repartitionByRange(tasks, "key").sortWithinPartitions("key")
            deleter = _deleter(share, task_tracing.tracing_of_tasks())
            spread.mapInArrow(deleter, tables.OUTCOME_COLUMNS).write.parquet(str(outcomes))

    def _read(self, table: Path, columns: str) -> DataFrame:
        return self._spark.read.schema(columns).parquet(str(table))

    def _joined(self, draft: Path) -> DataFrame:
        """Our keys with their facts in the metadata, objects without a key, and all other rows."""
        listing = self._read(draft / plan_folder.LISTING, tables.LISTING_COLUMNS)
        of_map = self._read(draft / plan_folder.MAP, tables.MAP_COLUMNS)
        both = _own_keys(listing).join(of_map, "object_id", "full_outer")
        return both.unionByName(_other_rows(listing), allowMissingColumns=True)


def _own_keys(listing: DataFrame) -> DataFrame:
    """The row that counts of each key of ours; spread and sorted as a join by id needs them."""
    from pyspark.sql import functions as sql

    return _one_row_of_each(listing.where(sql.col("owner") == int(Owner.OWN)), "object_id")


def _other_rows(listing: DataFrame) -> DataFrame:
    """The row that counts of each other key, and all rows on versions."""
    from pyspark.sql import functions as sql

    owner = sql.col("owner")
    is_of_versions = owner.isin([int(version) for version in OF_VERSIONS])
    keys = listing.where((owner != int(Owner.OWN)) & ~is_of_versions)
    return _one_row_of_each(keys, "key").unionByName(listing.where(is_of_versions))


def _one_row_of_each(rows: DataFrame, column: str) -> DataFrame:
    """Of the rows with one value of a column, the first by precedence."""
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    order = [sql.col(name).desc_nulls_last() for name in PRECEDENCE]
    place = sql.row_number().over(Window.partitionBy(column).orderBy(*order))
    return rows.withColumn("place", place).where(sql.col("place") == 1).drop("place")


def _tallies(table: DataFrame, column: str) -> dict[Any, tables.Tally]:
    """Count the keys and bytes of a table for each value of a column."""
    from pyspark.sql import functions as sql

    counted = table.groupBy(column).agg(
        sql.count("*").alias("keys"), sql.coalesce(sql.sum("size"), sql.lit(0)).alias("size")
    )
    return {row[column]: tables.Tally(row["keys"], row["size"]) for row in counted.collect()}


def _inventory_reader(
    inventory: Inventory, namespace: str
) -> Callable[[_Batches], Iterator[pa.RecordBatch]]:
    """Make the function that an executor runs: numbers of files in, listed keys out."""

    def run(batches: _Batches) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                yield from inventory_rows(inventory, inventory.files[number], namespace)

    return run


def _deleter(
    order: DeletionOrder, traced: task_tracing.TaskTracing
) -> Callable[[_Batches], Iterator[pa.RecordBatch]]:
    """Make the function that an executor runs: candidates in, outcomes out."""

    def run(batches: _Batches) -> Iterator[pa.RecordBatch]:
        given = iter(batches)
        with traced.trace():
            yield from carry_out(order, _this_attempt(), given)
        # Of a run that is to end some are left, which Spark wants to be rid of all the same.
        for _ in given:
            pass

    return run


def _this_attempt() -> attempts.Attempt:
    """Return the attempt that runs here.

    Spark counts attempts of a task from 0 again when it repeats a stage; only the id of the attempt
    is unique.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        return attempts.ONLY_ATTEMPT
    return attempts.Attempt(context.partitionId(), context.taskAttemptId())


if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def judged_table(joined: DataFrame, rules: verdicts.Rules, namespace: str) -> DataFrame:
    """Return the rows of the report, without rows that need no report."""
    from pyspark.sql import functions as sql

    key = sql.coalesce("key", _key_of("object_id", namespace)).alias("key")
    made = {"key": key, "verdict": _verdict(rules).alias("verdict")}
    columns = (made.get(name, sql.col(name)) for name in arrow_schema(VERDICT_COLUMNS).names)
    return joined.select(*columns).where(sql.col("verdict") != "")


def _verdict(rules: verdicts.Rules) -> Column:
    """The first verdict of the ladder whose condition holds."""
    from pyspark.sql import functions as sql

    def column(name: str) -> Column:
        return sql.coalesce(sql.col(name), sql.lit(verdicts.ABSENT))

    rows = verdicts.JoinedColumns(
        **{name: column(name) for name in verdicts.JoinedColumns.__dataclass_fields__}
    )
    return reduce(
        lambda below, rule: sql.when(rule[0], sql.lit(str(rule[1]))).otherwise(below),
        reversed(verdicts.ladder(rows, rules)),
        sql.lit(str(verdicts.OTHERWISE)),
    )


def _key_of(object_id: str, namespace: str) -> Column:
    """Return the key of an object, like `key_for`."""
    from pyspark.sql import functions as sql

    digits = sql.lower(sql.hex(sql.col(object_id)))
    zeros = sql.repeat(sql.lit("0"), sql.lit(8) - sql.length(digits))
    prefix = sql.concat(sql.reverse(digits), zeros)
    return sql.concat_ws("/", prefix, sql.lit(namespace), sql.col(object_id).cast("string"))

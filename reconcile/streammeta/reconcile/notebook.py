"""Reconciliation for notebooks and jobs: `plan` and `apply` with DataFrames.

Both run on the caller's Spark session and write the command's folders, so the command can apply a
plan from a notebook, and the other way round. The folder of a plan has to be on a path that driver
and executors share.
"""

from __future__ import annotations

import dataclasses
import inspect
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from streammeta.reconcile.apply import ApplyConfig, ApplyResult
from streammeta.reconcile.apply import apply as apply_plan
from streammeta.reconcile.cluster.identity import parse_store
from streammeta.reconcile.plan import PlanConfig
from streammeta.reconcile.plan import plan as make_plan
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.plans.plan_folder import PlanResult, read_plan_file
from streammeta.reconcile.vocabulary import errors, tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_Config = TypeVar("_Config", PlanConfig, ApplyConfig)

_CHOSEN = "chosen"
"""Prefix of a plan's subfolders with the candidates that a caller of `apply` has chosen."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan in its folder, and its tables.

    `result` has counts and guards. A plan with failed guards is a report and can't be applied.
    """

    folder: Path
    result: PlanResult
    spark: SparkSession

    @property
    def verdicts(self) -> DataFrame:
        """Every key of the bucket and every missing object, with its verdict."""
        return _read(self.spark, self.folder / plan_folder.VERDICTS, tables.VERDICT_COLUMNS)

    @property
    def candidates(self) -> DataFrame:
        """The keys that `apply` may delete: key, object_id, size, modified_ms and etag."""
        return _read(self.spark, self.folder / plan_folder.CANDIDATES, tables.CANDIDATE_COLUMNS)

    @property
    def losses(self) -> DataFrame:
        """Ranges of streams in missing or damaged objects, each confirmed by a second check."""
        return _read(self.spark, self.folder / plan_folder.LOSSES, tables.LOSS_COLUMNS)


@dataclass(frozen=True, slots=True)
class Applied:
    """An applied plan. `result` has the counts and says whether every candidate was settled."""

    result: ApplyResult
    spark: SparkSession

    @property
    def outcomes(self) -> DataFrame:
        """One row for each candidate: key, object_id, size, outcome and detail."""
        return _read(self.spark, self.result.run_folder / "outcomes", tables.OUTCOME_COLUMNS)


def plan(
    store: str,
    connect: str | Sequence[str],
    folder: str | Path,
    *,
    inventory: DataFrame | str | None = None,
    spark: SparkSession | None = None,
    progress: Callable[[str], None] = print,
    **options: Any,
) -> Plan:
    """Compare a bucket with the metadata of its cluster, without deleting anything.

    `store` is the bucket's address, `connect` are controllers as HOST:PORT. An `inventory` replaces
    the listing of the bucket. It is an address, or a DataFrame with the columns key, size and
    last_modified, which needs `inventory_taken_ms`. `spark` defaults to the active Spark session.
    `options` are fields of `PlanConfig`, such as `grace_ms`, `max_share` or `tls`.

    Raises:
        ConfigurationError: an option is unknown or invalid, or no Spark session is active.
        ReconcileError, StorageError: see `streammeta.reconcile.plan.plan`.
    """
    spark = _spark_session(spark)
    endpoints = tuple(connect.split(",")) if isinstance(connect, str) else tuple(connect)
    config = _config(
        PlanConfig,
        options,
        store=parse_store(store),
        connect=endpoints,
        folder=Path(folder).absolute(),
    )
    if inventory is None or isinstance(inventory, str):
        result = make_plan(dataclasses.replace(config, inventory=inventory), progress)
        return Plan(config.folder, result, spark)

    # Next to the plan, which is on a path that driver and executors share. A temporary folder is
    # not.
    place = config.folder.with_name(f".{config.folder.name}-inventory-{secrets.token_hex(4)}")
    with _written(inventory, place) as table:
        result = make_plan(dataclasses.replace(config, inventory=str(table)), progress)
    return Plan(config.folder, result, spark)


def open_plan(folder: str | Path, spark: SparkSession | None = None) -> Plan:
    """Return an existing plan. Raises `PlanError` unless `folder` contains one."""
    path = Path(folder).absolute()
    return Plan(path, read_plan_file(path), _spark_session(spark))


def apply(
    plan: Plan | str | Path,
    *,
    candidates: DataFrame | None = None,
    progress: Callable[[str], None] = print,
    **options: Any,
) -> Applied:
    """Check every candidate of a plan with the leader, and delete it with `delete=True`.

    `candidates` selects candidates of the plan by key. All other columns come from the plan.
    `options` are fields of `ApplyConfig`, such as `delete`, `quarantine`, `tag` or `keys_per_s`.

    Raises:
        ConfigurationError: an option is unknown or invalid.
        PlanError: a chosen key is not a candidate of the plan.
        ReconcileError, StorageError: see `streammeta.reconcile.apply.apply`.
    """
    made = plan if isinstance(plan, Plan) else open_plan(plan)
    config = _config(ApplyConfig, options, folder=made.folder)
    if candidates is None:
        return Applied(apply_plan(config, progress), made.spark)

    place = made.folder / f"{_CHOSEN}-{secrets.token_hex(4)}"
    with _written(_choose(made, candidates), place) as table:
        result = apply_plan(dataclasses.replace(config, chosen=table), progress)
    return Applied(result, made.spark)


def register(spark: SparkSession | None = None) -> None:
    """Register the data sources `streammeta` and `streammeta.listing`, with filters pushed down.

    Sets `spark.sql.python.filterPushdown.enabled` where Spark has it, from version 4.1.
    """
    from streammeta.reconcile.listing.source import ListingSource, PushingListingSource
    from streammeta.reconcile.listing.source_filters import has_pushdown
    from streammeta.reconcile.metadata.source import MetadataSource, PushingMetadataSource

    spark = _spark_session(spark)
    if has_pushdown():
        # Spark rejects a source with pushFilters unless the option is set.
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
        spark.dataSource.register(PushingMetadataSource)
        spark.dataSource.register(PushingListingSource)
    else:
        spark.dataSource.register(MetadataSource)
        spark.dataSource.register(ListingSource)


def _spark_session(given: SparkSession | None) -> SparkSession:
    from pyspark.sql import SparkSession

    found = given or SparkSession.getActiveSession()
    if found is None:
        raise errors.ConfigurationError(
            "no Spark session is active. Start one with SparkSession.builder.getOrCreate(), or"
            " pass it as spark=..."
        )
    return found


def _config(kind: Callable[..., _Config], options: dict[str, Any], **own: Any) -> _Config:
    # Parameters of this module's functions can't be set a second time as options.
    known = set(inspect.signature(kind).parameters) - {"inventory", "spark", "chosen", *own}
    for name in options:
        if name not in known:
            raise errors.ConfigurationError(
                f"option {name!r} is unknown. Known options: {', '.join(sorted(known))}"
            )
    return kind(**own, **options)


def _read(spark: SparkSession, table: Path, columns: str) -> DataFrame:
    if not table.is_dir():
        raise errors.PlanError(f"{table} is missing from the plan. Read the reason in plan.json")
    return spark.read.schema(columns).parquet(str(table))


@contextmanager
def _written(table: DataFrame, folder: Path) -> Iterator[Path]:
    """Write a table to a new folder, and delete the folder at the end."""
    try:
        table.write.parquet(str(folder))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _choose(plan: Plan, candidates: DataFrame) -> DataFrame:
    """Return the plan's rows of the chosen keys."""
    if "key" not in candidates.columns:
        raise errors.ConfigurationError(
            f"candidates has the columns {', '.join(candidates.columns)}, expected one named 'key'"
        )
    keys = candidates.select("key").distinct()
    # A key outside the plan passed no verdict and no guard.
    strangers = keys.join(plan.candidates, "key", "left_anti")
    if found := strangers.take(1):
        raise errors.PlanError(
            f"{strangers.count()} chosen keys are not candidates of the plan, such as"
            f" {found[0]['key']!r}. Choose rows of plan.candidates"
        )
    # Only keys come from the caller. A size or etag of the caller would weaken the check before a
    # deletion.
    return plan.candidates.join(keys, "key", "left_semi")

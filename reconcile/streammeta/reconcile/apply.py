"""Application of a plan: check every candidate with the leader again, then delete it.

A dry run makes the same checks and reports the keys to delete. Applying a plan twice is harmless,
because deleted objects are found absent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from streammeta.reconcile.cluster import identity, lease
from streammeta.reconcile.cluster.controller_client import LeaderClient
from streammeta.reconcile.deletion.order import DeletionOrder, Outcome
from streammeta.reconcile.engines import spark_session
from streammeta.reconcile.engines.engine import EngineName
from streammeta.reconcile.engines.engine_choice import AUTO_KEYS, open_engine
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.vocabulary import tables
from streammeta.reconcile.vocabulary.errors import ConfigurationError, PlanError
from streammeta.rpc import tracing
from streammeta.storage.object_store.protocol.address import StoreAddress
from streammeta.tls.files import CallerFiles

_OUTCOMES = "outcomes"
_AUDIT = "audit"
_SIGNALS = "signals"
# Shown on a terminal. The outcomes table has all keys.
_EXAMPLES = 10

AHEAD_ADVICE = (
    "candidates are kept, because their records are ahead of the metadata's streams. Unless a"
    " broker ended before it committed them, the metadata was rolled back. In that case stop the"
    " brokers, bring back the controllers' newest disks or restore a backup, and adopt these"
    " objects"
)


@dataclass(frozen=True, slots=True)
class ApplyConfig:
    """Plan to apply, and options.

    - `store`, `connect`: None means the plan's values. Pass a store with credentials in its URI
      again.
    - `delete`: False is a dry run.
    - `quarantine`: keep copies of deleted objects for `undo`. `tag`: tag objects and delete
      nothing. The two exclude each other.
    - `keys_per_s`: rate limit of the whole run, >= 1.
    - `patience_s`: how long to wait for a leader, each time.
    - `tls`: the files must be at the same paths on every executor's machine. Without it, calls are
      in plain text.
    - `auto_keys`: the largest number of candidates for which the automatic choice of the engine
      stays in this process. `spark` configures the other engine.
    - `is_ending`: no task starts another batch once it returns true.
    - `chosen`: check only the candidates of this table, a folder of Parquet files with the columns
      of the plan's candidates.
    """

    folder: Path
    store: StoreAddress | None = None
    connect: tuple[str, ...] | None = None
    delete: bool = False
    quarantine: bool = False
    tag: bool = False
    keys_per_s: int = 500
    patience_s: float = 15.0
    tls: CallerFiles | None = None
    engine: EngineName = EngineName.AUTO
    auto_keys: int = AUTO_KEYS
    spark: spark_session.SparkConfig = field(default_factory=spark_session.SparkConfig)
    is_ending: Callable[[], bool] = lambda: False
    chosen: Path | None = None


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """Outcomes of the candidates. `run_folder` has a row for each, and the undo records.

    `left` is the number of candidates without an outcome, because the run ended early. `examples`
    are a few keys that were, or would be, deleted. `problems` are a few distinct reasons of failed
    and refused keys. `ahead` are a few keys ahead of the metadata, with their offsets. `engine` is
    the engine that did the work.
    """

    run_folder: Path
    deleted: bool
    outcomes: Mapping[Outcome, tables.Tally]
    examples: tuple[str, ...]
    problems: tuple[str, ...]
    ahead: tuple[tuple[str, str], ...] = ()
    left: int = 0
    engine: str = ""

    @property
    def warning(self) -> str:
        """Explanation and next step for candidates ahead of the metadata, empty without any."""
        ahead = self.outcomes.get(Outcome.AHEAD_OF_METADATA)
        return f"{ahead.keys} {AHEAD_ADVICE}" if ahead else ""

    @property
    def complete(self) -> bool:
        """Whether every candidate was settled: none failed, skipped, refused or left."""
        unsettled = (Outcome.FAILED, Outcome.SKIPPED, Outcome.REFUSED)
        return not self.left and not any(self.outcomes.get(outcome) for outcome in unsettled)


@tracing.traced("streammeta.reconcile.apply")
def apply(config: ApplyConfig, progress: Callable[[str], None] = lambda _line: None) -> ApplyResult:
    """Check every candidate of a plan with the leader, and delete it if `config.delete`.

    Raises:
        PlanError: the plan does not exist, its guards failed, it is too old, or it is for another
            cluster, bucket or endpoint.
        LeaseError: another run deletes in the bucket.
        ReconcileError: the controllers do not answer, or Spark failed. Keys may have been deleted
            before a Spark failure, each after an undo record was written.
        StorageError: the bucket can't be reached, or has no marker of the plan's cluster.
    """
    if config.keys_per_s < 1:
        raise ConfigurationError(f"--rate is {config.keys_per_s} keys/s, expected at least 1")
    if config.quarantine and config.tag:
        raise ConfigurationError("--quarantine and --tag exclude each other. Give one of them")

    # Cheap checks of the plan come first. The controllers and the bucket are asked only for a plan
    # that may be applied.
    plan = plan_folder.read_plan_file(config.folder)
    plan_folder.check_plan(config.folder, plan, time.time_ns() // 1_000_000)
    store = config.store or identity.parse_store(plan.store)
    connect = config.connect or plan.connect
    plan_folder.check_store(store, plan)

    with LeaderClient(connect, config.patience_s, config.tls) as leader:
        # Every task checks again before each batch. This check fails early, before any engine
        # starts.
        _check_cluster(store, leader, plan)

    all_candidates = _candidates(config.folder, plan)
    candidates = config.chosen or all_candidates
    count = tables.count_rows(candidates)
    run_folder = config.folder / plan_folder.RUNS / lease.new_run(_kind(config))
    order = DeletionOrder(
        store=store,
        connect=connect,
        tls=config.tls,
        patience_s=config.patience_s,
        identity=plan.identity,
        next_object_id=plan.next_object_id or 0,
        # Plans of earlier versions do not have it. With 0 no stream counts as deleted.
        next_stream_id=plan.next_stream_id or 0,
        # Absolute, because executors have another working directory.
        undo_folder=str((run_folder / plan_folder.UNDO).absolute()),
        audit_folder=str((run_folder / _AUDIT).absolute()),
        signals_folder=str((run_folder / _SIGNALS).absolute()),
        keys_per_s=config.keys_per_s,
        delete=config.delete,
        quarantine=config.quarantine,
        tag=config.tag,
        run=run_folder.name,
    )

    with (
        # Before the engine: starting Spark takes seconds, and a second run should fail at once.
        _lease(order),
        open_engine(
            config.engine, config.spark, progress, config.auto_keys, config.is_ending
        ) as engine,
    ):
        seconds = math.ceil(count / config.keys_per_s) if config.delete else 0
        progress(
            f"checking {count} candidates"
            + (f" and deleting, {seconds} s or more at {config.keys_per_s} keys/s" * config.delete)
        )
        tracing.note({"engine": engine.name, "candidates": count})
        engine.delete(order, candidates, run_folder / _OUTCOMES)
        worked = engine.name

    return replace(_summarize(run_folder, config.delete, count), engine=worked)


def _check_cluster(
    address: StoreAddress, leader: LeaderClient, plan: plan_folder.PlanResult
) -> None:
    """Check that controllers and bucket still belong to the plan."""
    plan_folder.check_identity(identity.identify(leader), plan, leader.endpoints)
    with closing(identity.open_store(address)) as store:
        # Claims are read before the leader is asked. A leader that is newer than the claims passes,
        # a leader restored to an earlier state fails.
        claimed_below = identity.check_bucket(store, plan.identity)
    identity.check_standing(
        leader.check_objects([0]),
        plan.identity,
        claimed_below=claimed_below,
        next_object_id=plan.next_object_id or 0,
    )


def _kind(config: ApplyConfig) -> str:
    if not config.delete:
        return "dry"
    if config.tag:
        return "tag"
    return "quarantine" if config.quarantine else "delete"


@contextmanager
def _lease(order: DeletionOrder) -> Iterator[None]:
    """Hold the lease of the bucket's namespace, except in a dry run."""
    # A dry run changes nothing, so it may run next to another run.
    if not order.delete:
        yield
        return
    with (
        closing(identity.open_store(order.store)) as store,
        lease.held_lease(store, order.identity.namespace, order.run),
    ):
        yield


def _candidates(folder: Path, plan: plan_folder.PlanResult) -> Path:
    path = folder / plan_folder.CANDIDATES
    if not path.is_dir():
        raise PlanError(f"{path} is missing from the plan. Make a new plan")
    found = tables.count_rows(path)
    # The guards checked this number. A table with other rows was never checked by them.
    if found != plan.candidates.keys:
        raise PlanError(
            f"{path} has {found} candidates, but plan.json says {plan.candidates.keys}. Make a new"
            " plan, this folder was changed"
        )
    return path


def _summarize(run_folder: Path, deleted: bool, candidates: int) -> ApplyResult:
    done = (
        (Outcome.DELETED, Outcome.QUARANTINED, Outcome.TAGGED)
        if deleted
        else (Outcome.WOULD_DELETE,)
    )
    counts = tables.Counts("outcome")
    examples: list[str] = []
    problems: dict[str, None] = {}
    ahead: list[tuple[str, str]] = []

    for rows in tables.read_batches(run_folder / _OUTCOMES, tables.OUTCOME_COLUMNS):
        counts.add(rows)
        if len(examples) < _EXAMPLES:
            examples += _values(rows, "key", *done)
        if len(problems) < _EXAMPLES:
            # A dict keeps the order and drops repeats: one cause usually fails thousands of keys.
            problems |= dict.fromkeys(_values(rows, "detail", Outcome.FAILED, Outcome.REFUSED))
        if len(ahead) < _EXAMPLES:
            keys = _values(rows, "key", Outcome.AHEAD_OF_METADATA)
            ahead += zip(keys, _values(rows, "detail", Outcome.AHEAD_OF_METADATA), strict=True)

    outcomes = {Outcome(name): tally for name, tally in counts.tallies().items()}
    return ApplyResult(
        run_folder=run_folder,
        deleted=deleted,
        outcomes=outcomes,
        left=candidates - sum(tally.keys for tally in outcomes.values()),
        examples=tuple(examples[:_EXAMPLES]),
        problems=tuple(problems)[:_EXAMPLES],
        ahead=tuple(ahead[:_EXAMPLES]),
    )


def _values(rows: pa.RecordBatch, column: str, *outcomes: Outcome) -> list[str]:
    wanted = pc.is_in(rows.column("outcome"), pa.array([str(outcome) for outcome in outcomes]))
    values: list[str] = rows.filter(wanted).column(column).to_pylist()
    return values

"""Planning: list the bucket, copy a snapshot of the metadata, and compute a verdict for every key.

The listing ends before the snapshot. An object committed meanwhile is therefore in the metadata and
never looks like an orphan, and every id in the bucket was issued before the snapshot. If a later
step fails, the plan is a report of the completed steps. Planning deletes nothing.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow.parquet as pq

from streammeta.reconcile.cluster.controller_client import LeaderClient
from streammeta.reconcile.cluster.identity import (
    ClusterIdentity,
    check_bucket,
    identify,
    open_store,
    place_of,
    settled_below,
    undecided_ids,
)
from streammeta.reconcile.engines.engine import Engine, EngineName
from streammeta.reconcile.engines.engine_choice import AUTO_KEYS, open_engine
from streammeta.reconcile.engines.spark_session import SparkConfig
from streammeta.reconcile.findings import deep_read, verdict_rows
from streammeta.reconcile.findings.losses import confirm_losses
from streammeta.reconcile.listing.inventory import Inventory, read_inventory
from streammeta.reconcile.listing.shards import shards_of, shards_of_content, write_uploads
from streammeta.reconcile.metadata.export import MetadataExport, export_metadata
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.plans.plan_folder import CLOCK_SKEW_MS, PlanResult, check_grace
from streammeta.reconcile.reports.page import FIGURE_COLUMNS, Figures, figures_of, report_page
from streammeta.reconcile.vocabulary import errors, tables, verdicts
from streammeta.rpc import tracing
from streammeta.storage.errors import StorageError
from streammeta.storage.object_store.protocol import base
from streammeta.storage.object_store.protocol.address import StoreAddress
from streammeta.tls.files import CallerFiles

# Bounds memory, and keeps Parquet's row groups large enough.
_VERSIONS_A_BATCH = 5000

INVENTORY_LAG_MS = 48 * 3600 * 1000
"""Objects stored within this time before an inventory's start may be missing from it. S3 gives no
guarantee, and delivers within two days."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """Bucket and cluster to compare, and safety limits.

    - `store`: its address may contain credentials, which are never written to the plan.
    - `connect`: controllers as HOST:PORT.
    - `grace_ms`: unknown objects younger than this at the start of the listing are left alone. Less
      than `plan_folder.GRACE_FLOOR_MS` needs `unsafe_grace`.
    - `max_share`, `max_candidates`: with more candidates, as a fraction of the cluster's keys or as
      a number, the plan can't be applied.
    - `namespace`: the expected namespace of the cluster, only for confirmation.
    - `shard_digits`: 1 lists in 17 shards, 2 in 257, None in as many as suit the bucket.
    - `patience_s`: how long to wait for a leader. `tls`: without it, calls are in plain text.
    - `auto_keys`: the largest bucket for which the automatic choice of the engine stays in this
      process. `spark` configures the other engine.
    - `deep_share`: fraction of the objects in the metadata to read, 0..1.
    - `versions`: also list noncurrent versions.
    - `inventory`: replaces the listing. Address of a manifest, or path of a table that was started
      at `inventory_taken_ms`.
    """

    store: StoreAddress
    connect: tuple[str, ...]
    folder: Path
    grace_ms: int = 3_600_000
    unsafe_grace: bool = False
    max_share: float = 0.2
    max_candidates: int = 10_000
    allow_empty_map: bool = False
    namespace: str | None = None
    patience_s: float = 15.0
    tls: CallerFiles | None = None
    shard_digits: int | None = None
    engine: EngineName = EngineName.AUTO
    auto_keys: int = AUTO_KEYS
    spark: SparkConfig = field(default_factory=SparkConfig)
    deep_share: float = 0.0
    versions: bool = False
    inventory: str | None = field(default=None, repr=False)
    inventory_taken_ms: int | None = None


@tracing.traced("streammeta.reconcile.plan")
def plan(config: PlanConfig, progress: Progress = lambda _line: None) -> PlanResult:
    """Compare bucket and metadata, and write the plan folder. `progress` gets a line per stage.

    The plan is also written if guards failed, or if the metadata or the unfinished uploads could
    not be read after the listing. It is then a report of the known facts.

    Raises: ReconcileError: the options are contradictory, the controllers do not answer at the
    start or belong to another cluster than the bucket, the folder exists, or Spark failed. No plan
    is written. StorageError: the bucket can't be read, or has no marker of the cluster.
    """
    _check_config(config)
    plan_folder.refuse_existing(config.folder)
    with LeaderClient(config.connect, config.patience_s, config.tls) as leader:
        # Before the listing, which may take hours, so a wrong address fails at once.
        identity = identify(leader)

    _confirm_namespace(config, identity)
    with closing(open_store(config.store)) as store:
        claimed_below = check_bucket(store, identity)
        # Before the export: a restore that ends later is in the exported metadata or still
        # undecided.
        undecided = undecided_ids(store, identity)
        inventory = _inventory(config)
        # An inventory may have started before a restore.
        settled = 0 if inventory else settled_below(store, identity)
        with (
            plan_folder.new_plan_folder(config.folder) as draft,
            open_engine(config.engine, config.spark, progress, config.auto_keys) as engine,
        ):
            # The grace period counts back from here. An object stored after this moment is young.
            started_ms = _now_ms() if inventory is None else inventory.started_ms
            listed = _list(engine, config, store, inventory, identity.namespace, draft, progress)
            uploads, unlisted = _uploads(store, draft)
            progress("copying the metadata")
            # After the listing, so that every listed object of a commit is known. The other order
            # would make fresh objects look like orphans.
            exported = _export(config, identity, draft / plan_folder.MAP)
            result = PlanResult(
                cluster_id=identity.cluster_id,
                cluster_uuid=identity.cluster_uuid,
                # Plans are shared and attached to reports.
                store=str(config.store),
                place=place_of(config.store),
                namespace=identity.namespace,
                connect=config.connect,
                created_at_ms=_now_ms(),
                listing_started_ms=started_ms,
                young_from_ms=started_ms - config.grace_ms,
                unsafe_grace=config.unsafe_grace,
                engine=engine.name,
                inventory="" if inventory is None else inventory.place,
                unfinished_uploads=uploads,
                unknown=unlisted,
            )
            if isinstance(exported, MetadataExport):
                result = _read(config, store, draft, result, progress)
                progress(f"comparing with {exported.objects} objects in the metadata")
                result = _compare(
                    *(engine, config, draft, result, listed, exported, claimed_below),
                    undecided=undecided,
                    settled=settled,
                )
                result = _confirm_losses(config, store, draft, result, progress)
                result = _add_versions(config, store, draft, result, progress)
            else:
                result = _report_without_metadata(engine, draft, result, listed, exported)
            _write(draft, config.folder, result)

    tracing.note({"engine": result.engine, "candidates": result.candidates.keys})
    return result


def _check_config(config: PlanConfig) -> None:
    if not config.connect:
        raise errors.ConfigurationError(
            "--connect names no controller. Give at least one HOST:PORT"
        )

    check_grace(config.grace_ms, is_unsafe=config.unsafe_grace)
    if not 0 <= config.max_share <= 1:
        raise errors.ConfigurationError(f"--max-share is {config.max_share}, expected 0..1")
    if not 0 <= config.deep_share <= 1:
        raise errors.ConfigurationError(f"--deep is {config.deep_share}, expected 0..1")
    if config.inventory is None and config.inventory_taken_ms is not None:
        raise errors.ConfigurationError("--taken-at is given without --inventory. Leave it out")
    if config.inventory is not None and config.versions:
        raise errors.ConfigurationError(
            "--versions lists the bucket, but --inventory replaces the listing. Leave --versions"
            " out, an inventory with versions counts them"
        )
    if config.max_candidates < 0:
        raise errors.ConfigurationError(
            f"--max-candidates is {config.max_candidates}, expected 0 or more"
        )


def _confirm_namespace(config: PlanConfig, identity: ClusterIdentity) -> None:
    if config.namespace not in (None, identity.namespace):
        raise errors.ConfigurationError(
            f"--namespace is {config.namespace!r}, but the controllers at"
            f" {', '.join(config.connect)} belong to {identity.describe()}. Leave the option out,"
            " or let --connect name the cluster that owns this namespace"
        )


@tracing.traced("streammeta.reconcile.uploads")
def _uploads(store: base.ObjectStore, draft: Path) -> tuple[int | None, tuple[str, ...]]:
    """List unfinished uploads. The plan does not depend on them, so a failure is only noted."""
    folder = draft / plan_folder.UPLOADS
    try:
        return write_uploads(store, folder), ()
    except StorageError as error:
        shutil.rmtree(folder)
        return None, (f"unfinished multipart uploads could not be listed: {error}",)


@tracing.traced("streammeta.reconcile.snapshot")
def _export(config: PlanConfig, identity: ClusterIdentity, folder: Path) -> MetadataExport | str:
    """Export the metadata and check its cluster. Returns the reason if the export failed."""
    try:
        with LeaderClient(config.connect, config.patience_s, config.tls) as leader:
            exported = export_metadata(leader, folder)
    except (errors.ControllerError, errors.MetadataExportError) as error:
        # A partial copy must not be compared: each missing object would look like an orphan.
        shutil.rmtree(folder, ignore_errors=True)
        return f"the metadata could not be copied: {error}"
    # The address may name another cluster since the first call, as after a restore.
    if (exported.cluster_id, exported.cluster_uuid) != (identity.cluster_id, identity.cluster_uuid):
        raise errors.PlanError(
            f"copy of the metadata belongs to cluster {exported.cluster_id!r}, UUID"
            f" {exported.cluster_uuid or 'unknown'}, but the leader belongs to"
            f" {identity.describe()}. Let --connect name controllers of one cluster"
        )
    return exported


def _inventory(config: PlanConfig) -> Inventory | None:
    if config.inventory is None:
        return None
    taken_ms = config.inventory_taken_ms
    return read_inventory(config.inventory, config.store.bucket, taken_ms, _now_ms())


@tracing.traced("streammeta.reconcile.list")
def _list(
    engine: Engine,
    config: PlanConfig,
    store: base.ObjectStore,
    inventory: Inventory | None,
    namespace: str,
    draft: Path,
    progress: Progress,
) -> int:
    """Write the listing to the draft, and return the number of rows."""
    listing = draft / plan_folder.LISTING
    if inventory is None:
        digits = config.shard_digits
        shards = shards_of_content(store, namespace) if digits is None else shards_of(digits)
        progress(f"listing {config.store} in {len(shards)} shards")
        rows = engine.list_bucket(config.store, namespace, shards, listing)
        progress(f"listed {rows} keys")
    else:
        progress(f"reading the {len(inventory.files)} files of inventory {inventory.place}")
        rows = engine.list_inventory(inventory, namespace, listing)
        progress(f"read {rows} rows")
    tracing.note({"rows": rows})
    return rows


@tracing.traced("streammeta.reconcile.join")
def _compare(
    engine: Engine,
    config: PlanConfig,
    draft: Path,
    basis: PlanResult,
    listed: int,
    exported: MetadataExport,
    claimed_below: int,
    *,
    undecided: tuple[tuple[int, int], ...],
    settled: int,
) -> PlanResult:
    """Add the results of the comparison with the metadata to `basis`.

    `listed` is the number of rows of the listing.
    """
    rules = verdicts.Rules(
        next_object_id=exported.next_object_id,
        young_from_ms=basis.young_from_ms,
        unlisted_from_ms=basis.listing_started_ms - _listing_lag_ms(basis),
        undecided=undecided,
        settled_below=settled,
    )
    # One pass over listing and metadata, in the chosen engine.
    found = engine.judge(draft, rules, basis.namespace)
    classes = _sort_by_verdict({**found, **_write_upload_verdicts(draft, basis)})
    # The verdicts contain all of its columns, and the listing is the largest table.
    shutil.rmtree(draft / plan_folder.LISTING)
    evidence = verdicts.Evidence(
        counts={verdict: tally.keys for verdict, tally in classes.items()},
        map_objects=exported.committed_objects,
        issued_below=exported.issued_below,
        claimed_below=claimed_below,
    )
    guards = verdicts.check_guards(
        evidence,
        max_share=config.max_share,
        max_candidates=config.max_candidates,
        allow_empty_map=config.allow_empty_map,
    )

    return replace(
        basis,
        map_end_offset=exported.end_offset,
        map_epoch=exported.epoch,
        next_object_id=exported.next_object_id,
        next_stream_id=exported.next_stream_id,
        map_objects=exported.objects,
        # Rows of verdicts without a listed key would count as repeats.
        repeated_rows=listed
        - sum(found[verdict].keys for verdict in found.keys() - verdicts.NOT_LISTED),
        classes=classes,
        guards=guards,
    )


def _listing_lag_ms(basis: PlanResult) -> int:
    """Return the time before a listing's start whose new objects may be missing from it."""
    return INVENTORY_LAG_MS if basis.inventory else CLOCK_SKEW_MS


def _write_upload_verdicts(
    draft: Path, basis: PlanResult
) -> Mapping[verdicts.Verdict, tables.Tally]:
    if not basis.unfinished_uploads:
        return {}
    path = draft / plan_folder.VERDICTS / "unfinished-uploads.parquet"
    with pq.ParquetWriter(path, tables.arrow_schema(tables.VERDICT_COLUMNS)) as writer:
        for uploads in tables.read_batches(draft / plan_folder.UPLOADS, tables.UPLOAD_COLUMNS):
            writer.write_batch(verdict_rows.upload_rows(uploads, basis.namespace))
    return {verdicts.Verdict.UNFINISHED_UPLOAD: tables.Tally(basis.unfinished_uploads, 0)}


def _add_versions(
    config: PlanConfig, store: base.ObjectStore, draft: Path, basis: PlanResult, progress: Progress
) -> PlanResult:
    """Add noncurrent versions to the verdicts, if requested."""
    if not config.versions:
        return basis
    progress("listing noncurrent versions")
    with tracing.span("streammeta.reconcile.versions"):
        return _list_versions(store, draft, basis)


def _list_versions(store: base.ObjectStore, draft: Path, basis: PlanResult) -> PlanResult:
    counts = tables.Counts("verdict")
    path = draft / plan_folder.VERDICTS / "old-versions.parquet"
    listed = store.list_old_versions()
    try:
        with pq.ParquetWriter(path, tables.arrow_schema(tables.VERDICT_COLUMNS)) as writer:
            while page := list(itertools.islice(listed, _VERSIONS_A_BATCH)):
                rows = verdict_rows.version_rows(page, basis.namespace)
                writer.write_batch(rows)
                counts.add(rows)
    except StorageError as error:
        # Half a table would look like a complete one.
        path.unlink()
        return _note_unknown(basis, f"noncurrent versions could not be listed: {error}")
    found = {verdicts.Verdict(verdict): tally for verdict, tally in counts.tallies().items()}
    return replace(basis, classes=_sort_by_verdict({**basis.classes, **found}))


def _read(
    config: PlanConfig, store: base.ObjectStore, draft: Path, basis: PlanResult, progress: Progress
) -> PlanResult:
    """Read the requested share of the objects in the metadata."""
    if config.deep_share == 0:
        return basis

    progress(f"reading {config.deep_share:.1%} of the objects in the metadata")
    try:
        with tracing.span("streammeta.reconcile.read"):
            found = deep_read.read_objects(
                store,
                draft / plan_folder.MAP,
                basis.namespace,
                config.deep_share,
                basis.listing_started_ms,
            )
    except StorageError as error:
        return _note_unknown(basis, f"objects could not be read: {error}")

    return replace(basis, read={reading.name.lower(): found[reading] for reading in sorted(found)})


@tracing.traced("streammeta.reconcile.confirm")
def _confirm_losses(
    config: PlanConfig, store: base.ObjectStore, draft: Path, basis: PlanResult, progress: Progress
) -> PlanResult:
    """Look up missing and damaged objects again, because the first finding may have been wrong."""
    if basis.suspected:
        progress(f"looking up {basis.suspected} missing or damaged objects again")

    try:
        with LeaderClient(config.connect, config.patience_s, config.tls) as leader:
            losses = confirm_losses(store, leader, draft)
    except StorageError as error:
        return _note_unknown(
            basis, f"{basis.suspected} missing or damaged objects could not be confirmed: {error}"
        )

    confirmed = replace(basis, losses=losses)
    # Objects without an answer are neither confirmed nor refuted, and the report has to say so.
    if losses.objects + losses.refuted < basis.suspected:
        return _note_unknown(
            confirmed,
            f"only {losses.objects + losses.refuted} of {basis.suspected} missing or damaged"
            " objects were looked up again",
        )

    return confirmed


def _note_unknown(basis: PlanResult, sentence: str) -> PlanResult:
    return replace(basis, unknown=(*basis.unknown, sentence))


def _report_without_metadata(
    engine: Engine, draft: Path, basis: PlanResult, listed: int, reason: str
) -> PlanResult:
    owners = engine.count_owners(draft / plan_folder.LISTING)
    return replace(
        basis,
        repeated_rows=listed - sum(tally.keys for tally in owners.values()),
        classes=_sort_by_verdict(
            {verdicts.WITHOUT_METADATA[owner]: tally for owner, tally in owners.items()}
        ),
        unknown=(*basis.unknown, reason),
        guards=verdicts.fail_without_metadata(reason),
    )


@tracing.traced("streammeta.reconcile.write")
def _write(draft: Path, folder: Path, result: PlanResult) -> None:
    figures: Figures | None = None
    if result.next_object_id is not None:
        rows = tables.read_batches(draft / plan_folder.VERDICTS, FIGURE_COLUMNS)
        figures = figures_of(rows, result.listing_started_ms)
    path = draft / plan_folder.REPORT_FILE
    page = report_page(result, figures, plan_folder.earlier_plans(folder, result))
    path.write_text(page, encoding="utf-8")
    # Last, because a folder with this file counts as complete.
    plan_folder.write_plan_file(draft, result)


def _sort_by_verdict(
    found: Mapping[verdicts.Verdict, tables.Tally],
) -> dict[verdicts.Verdict, tables.Tally]:
    return {verdict: found[verdict] for verdict in verdicts.Verdict if verdict in found}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

"""`streammeta restore adopt` and `finish`: adoption of objects newer than the backup.

Reads the metadata from a snapshot, and the bucket. The planner in `storage` chooses the objects,
and the leader validates them again.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from streammeta.cli.framework.client import (
    ControllerClient,
    describe_cluster,
    leaders_view,
    store_option,
)
from streammeta.cli.framework.connecting import with_client
from streammeta.cli.framework.output import CommandError, Output, say_progress, with_output
from streammeta.cli.recovery import predecessors, snapshot_command
from streammeta.cli.recovery.backup_command import open_backup, open_store
from streammeta.storage.adoption import model, planner
from streammeta.storage.cluster_files.bucket_marker import check_marker, read_marker
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.v1 import admin_pb2, common_pb2
from streammeta.v1.admin_pb2_grpc import AdminServiceStub

if TYPE_CHECKING:
    from streammeta.cli.recovery.adoption_survey import MetadataState, Missing

BACKUP_WAIT_S = 60.0
"""Seconds that `finish` waits for the first backup of the new cluster."""

DESCRIBED_WITHIN_S = 10.0
"""Seconds after which a controller must know the UUID of its cluster."""

_LEFT = ("object_id", "stream_id", "start_offset", "end_offset", "why")


@click.command()
@with_client(snapshot_command.DOWNLOAD_TIMEOUT_S)
@store_option
@click.option(
    "--dry-run", is_flag=True, help="Show the objects that would be adopted. Change nothing."
)
@click.option("--yes", is_flag=True, help="Adopt it.")
@click.option(
    "--pass-gaps",
    is_flag=True,
    help="Adopt objects after a gap too. Offsets in the gap are lost.",
)
@predecessors.stopped_option
@with_output
def adopt(
    *,
    client: ControllerClient,
    store: str,
    dry_run: bool,
    yes: bool,
    pass_gaps: bool,
    old_controllers_stopped: bool,
    output: Output,
) -> None:
    """Adopt objects that brokers wrote after the backup into the restored metadata.

    With --yes the command first waits until no controller of the old cluster can acknowledge
    changes: 35 s after the new cluster started, unless --old-controllers-stopped was given.

    The command reads every undecided object. Objects that the backup knows, and that were compacted
    and deleted since, are replaced with the compacted ones. `lost` lists data that can't be adopted
    and may have been acknowledged: it follows a gap, belongs to a stream that the backup does not
    know, is damaged, or conflicts with other objects. `missing` lists offsets of the metadata that
    no object in the bucket contains. The command can be interrupted and repeated.

    A stream that was trimmed beyond its restored end has a gap there. --pass-gaps adopts the
    objects after a gap, and `gaps` lists it. Offsets that a broker still has in its own log are in
    a gap too, and --pass-gaps loses them. Without the option the objects after a gap stay `lost`
    until the broker uploads those offsets.

    \b
    Example:
      streammeta restore adopt --connect 127.0.0.1:9091 --store file:///objects --dry-run
    """
    if dry_run == yes:
        raise click.UsageError("choose --dry-run or --yes")
    cluster = describe_restored(client)
    # The old cluster could still add objects that a survey before its fence would miss.
    if yes:
        _wait_for_fence(cluster, store, is_declared=old_controllers_stopped)
    surveyed = _survey(client, cluster, store, passes_gaps=pass_gaps)

    if surveyed is None:
        raise CommandError(
            "NOT_RECOVERING",
            f"cluster {cluster.cluster_id!r} is not in recovery mode",
            "adopt objects after `streammeta restore apply` and before `streammeta restore finish`",
        )

    if yes and surveyed.plan.torn:
        # Copies have ids of their own. A new survey finds them like all other objects.
        _copy_torn(surveyed, cluster, store)
        surveyed = _survey(client, cluster, store, passes_gaps=pass_gaps) or surveyed
    if yes:
        # Each batch is one atomic change. After an interruption, a new survey finds the rest.
        for number, batch in enumerate(surveyed.plan.batches, 1):
            _adopt(client, batch)
            say_progress(f"adopted batch {number} of {len(surveyed.plan.batches)}")

    _report(output, surveyed)
    output.summary({"adopted": len(surveyed.plan.objects) if yes else 0})


@click.command()
@with_client(snapshot_command.DOWNLOAD_TIMEOUT_S)
@store_option
@click.option(
    "--leave-behind",
    is_flag=True,
    help="Finish although some objects could be adopted, or may have been acknowledged.",
)
@click.option(
    "--from",
    "backups",
    metavar="URI",
    help="Backup store of the new cluster. The command waits until it contains the end of"
    " recovery mode.",
)
@predecessors.stopped_option
@with_output
def finish(
    *,
    client: ControllerClient,
    store: str,
    leave_behind: bool,
    backups: str | None,
    old_controllers_stopped: bool,
    output: Output,
) -> None:
    """End recovery mode: brokers may write again, starting at the current stream ends.

    The command waits as `adopt` does before its last look at the bucket.

    Objects that are left behind stay in the bucket, but the metadata does not adopt them later.
    Their offsets are issued again. `lost` and `missing` count the ranges that `adopt` lists under
    these names. Repeating the command after recovery mode has ended is harmless.

    \b
    Example:
      streammeta restore finish --connect 127.0.0.1:9091 --store file:///objects --from file:///backups
    """
    cluster = describe_restored(client)
    # Wait before the last look at the bucket, so that no object can appear afterwards.
    _wait_for_fence(cluster, store, is_declared=old_controllers_stopped)
    surveyed = _survey(client, cluster, store)
    if surveyed is not None:
        _require_settled(surveyed, leave_behind=leave_behind)
        output.summary({"lost": len(surveyed.plan.lost), "missing": len(surveyed.missing)})
    answer = predecessors.call_when_fenced(
        client,
        lambda channel: AdminServiceStub(channel).FinishRestore,
        admin_pb2.FinishRestoreRequest(),
    )
    output.summary({"was_recovering": answer.was_recovering})

    # A backup from before this point would be restored into recovery mode again.
    if backups is not None:
        output.summary({"backup_end": _backed_up(client, backups)})


@dataclass(frozen=True, slots=True)
class _Surveyed:
    """Contents of the bucket compared with the metadata."""

    undecided: range
    objects: int
    bytes: int
    plan: planner.AdoptionPlan
    missing: tuple[Missing, ...]
    state: MetadataState
    present: Set[int]
    """Ids of the objects in the bucket."""


def describe_restored(client: ControllerClient) -> admin_pb2.DescribeClusterResponse:
    """Return the description of the restored cluster.

    A controller that has just started does not know it yet and is asked again for a while.
    """
    deadline = time.monotonic() + DESCRIBED_WITHIN_S
    while True:
        cluster = describe_cluster(client)
        if cluster.cluster_uuid or time.monotonic() > deadline:
            return cluster
        time.sleep(0.1)


def _wait_for_fence(
    cluster: admin_pb2.DescribeClusterResponse, address: str, *, is_declared: bool
) -> None:
    """Wait until the old cluster can neither acknowledge nor upload more objects."""
    with open_store(address) as store:
        # The mark must not end up in the bucket of another cluster.
        require_own(store, cluster)
        predecessors.wait_for_fence(
            store,
            cluster.object_namespace,
            cluster_uuid=cluster.cluster_uuid,
            is_declared=is_declared,
        )


def require_own(store: ObjectStore, cluster: admin_pb2.DescribeClusterResponse) -> None:
    """Check that the bucket belongs to the cluster. Raises `WrongBucketError`."""
    check_marker(
        read_marker(store, cluster.object_namespace),
        cluster_id=cluster.cluster_id,
        cluster_uuid=cluster.cluster_uuid,
        namespace=cluster.object_namespace,
    )


def _survey(
    client: ControllerClient,
    cluster: admin_pb2.DescribeClusterResponse,
    address: str,
    *,
    passes_gaps: bool = False,
) -> _Surveyed | None:
    """Compare the leader's metadata with the bucket. Return None outside of recovery mode."""
    from streammeta.cli.recovery.adoption_survey import list_missing, read_map_state
    from streammeta.storage.adoption.planner import plan_adoption
    from streammeta.storage.adoption.survey import find_present, list_stored, read_candidates

    with open_store(address) as store, tempfile.TemporaryFile() as copy:
        # A plan from another cluster's bucket would adopt that cluster's data.
        require_own(store, cluster)
        snapshot_command.download(client, copy)
        state = read_map_state(copy)
        if state is None:
            return None
        # Listed once, so that presence and candidates are of one moment.
        stored = list(list_stored(store, cluster.object_namespace))
        present = find_present(store, cluster.object_namespace, stored, state.held)
        undecided = [object_ for object_ in stored if state.is_candidate(object_.object_id)]
        found = list(
            read_candidates(
                store,
                cluster.object_namespace,
                undecided,
                lambda count: say_progress(f"read {count} of {len(undecided)} objects", ends="\r"),
            )
        )
    unusable = [finding for finding in found if isinstance(finding, model.LeftBehind)]
    candidates = [finding for finding in found if not isinstance(finding, model.LeftBehind)]
    # Other objects may replace those whose bytes are missing.
    heads = state.stream_heads(present)
    plan = plan_adoption(heads, state.next_stream_id, candidates, passes_gaps=passes_gaps)
    adopted = (range_ for object_ in plan.objects for range_ in object_.ranges)
    return _Surveyed(
        state.undecided,
        len(undecided),
        sum(object_.size for object_ in undecided),
        # Unreadable objects are reported like those that the planner leaves behind.
        replace(plan, left=(*plan.left, *unusable)),
        tuple(list_missing(state.held, present, adopted)),
        state,
        present,
    )


def _copy_torn(
    surveyed: _Surveyed, cluster: admin_pb2.DescribeClusterResponse, address: str
) -> None:
    """Copy objects of which only some streams can be adopted. The copies are adopted.

    The copies use the last of the undecided ids. No cluster issued these, and none will.
    """
    from streammeta.storage.adoption.survey import copy_torn

    free = (
        object_id
        for object_id in reversed(surveyed.undecided)
        if surveyed.state.is_candidate(object_id) and object_id not in surveyed.present
    )
    with open_store(address) as store:
        copy_torn(store, cluster.object_namespace, surveyed.plan.torn, free)


def to_request(batch: planner.AdoptionBatch) -> admin_pb2.AdoptObjectsRequest:
    """Return the request that adopts some objects."""
    request = admin_pb2.AdoptObjectsRequest(replaced_object_ids=batch.replaced)
    for object_ in batch.objects:
        item = request.objects.add(object_id=object_.object_id, object_size=object_.size)
        for part in object_.ranges:
            item.ranges.add(
                stream_id=part.stream_id,
                stream_epoch=part.epoch,
                start_offset=part.start,
                end_offset=part.end,
                after_gap=part.after_gap,
            )
    return request


def _adopt(client: ControllerClient, batch: planner.AdoptionBatch) -> None:
    answer = predecessors.call_when_fenced(
        client, lambda channel: AdminServiceStub(channel).AdoptObjects, to_request(batch)
    )
    # One failed object rejects its whole batch.
    for stored, result in zip(batch.objects, answer.results, strict=True):
        if result.error != common_pb2.ERROR_CODE_NONE:
            name = common_pb2.ErrorCode.Name(result.error).removeprefix("ERROR_CODE_")
            raise CommandError(
                name,
                f"object {stored.object_id} and those in its batch were not adopted: {name}",
                "earlier batches are adopted. Repeat the command, which makes a new plan. If"
                " no node is known (NODE_EPOCH_NOT_EXIST), start a broker first",
            )


def _report(output: Output, surveyed: _Surveyed) -> None:
    plan = surveyed.plan
    # Harmless reasons are only counted. All others are listed as `lost`.
    left = Counter(str(finding.why) for finding in plan.left if finding.why in model.HARMLESS)
    ranges = [part for object_ in plan.objects for part in object_.ranges]
    output.summary(
        {
            "undecided_from": surveyed.undecided.start,
            "undecided_below": surveyed.undecided.stop,
            "objects": surveyed.objects,
            "bytes": surveyed.bytes,
            "adoptable": len(plan.objects),
            "replaced": len(plan.replaced),
            "torn": len(plan.torn),
            "streams": len({part.stream_id for part in ranges}),
            "offsets": sum(part.end - part.start for part in ranges),
            "not_needed": sum(left.values()),
        }
    )
    columns = ("object_id", "ranges", "bytes")
    adopted = [(object_.object_id, len(object_.ranges), object_.size) for object_ in plan.objects]
    output.rows("adopt", columns, adopted)
    output.rows("not_needed_by", ("why", "ranges"), sorted(left.items()))
    output.rows("lost", _LEFT, [_cells(finding) for finding in plan.lost])
    missing = [
        (range_.object_id, range_.stream_id, range_.start, range_.end)
        for range_ in surveyed.missing
    ]
    output.rows("missing", _LEFT[:-1], missing)

    output.rows("gaps", _LEFT[1:-1], plan.gaps)


def _cells(one: model.LeftBehind) -> tuple[int, int, int, int, str]:
    return one.object_id, one.stream_id, one.start, one.end, str(one.why)


def _require_settled(surveyed: _Surveyed, *, leave_behind: bool) -> None:
    adoptable, lost = len(surveyed.plan.objects), len(surveyed.plan.lost)
    # Missing ranges do not count here, because adoption can't bring them back.
    if leave_behind or not (adoptable or lost):
        return
    raise CommandError(
        "LEFT_BEHIND",
        f"recovery mode continues: {adoptable} objects are adoptable, {lost} ranges can't be"
        " adopted and may have been acknowledged (`lost`), and no object in the bucket contains"
        f" {len(surveyed.missing)} ranges (`missing`)",
        "`streammeta restore adopt` lists them, adopts them with --yes, and with --pass-gaps"
        " also those after a gap. Use --leave-behind to finish without them",
    )


def _backed_up(client: ControllerClient, address: str) -> int:
    """Wait until the backup contains the whole log, verify it, and return its end."""
    from streammeta.controller.backup.verification import newest_file, verify

    cluster = describe_restored(client)
    # Asked after the change, so that it includes the end of recovery mode.
    committed = leaders_view(client).high_watermark
    deadline = time.monotonic() + BACKUP_WAIT_S
    end_offset = 0
    while end_offset < committed:
        if time.monotonic() > deadline:
            raise CommandError(
                "NO_BACKUP",
                f"recovery mode is over, and the backup reaches {end_offset}, not "
                f"{committed}, after {BACKUP_WAIT_S:.0f} s",
                "see `backup_failed` in the leader's log, and start the controllers with "
                "--backup-store",
            )
        end_offset = _end_of_backup(address, cluster, newest_file)
    # Done only once the new backup is proven to be readable.
    with open_backup(address, cluster.cluster_id, cluster.cluster_uuid) as archive:
        if verify(archive.inventory(), archive, is_all=False).damages:
            raise CommandError(
                "DAMAGED",
                "recovery mode is over, but the backup of the new cluster is damaged",
                "`streammeta backup verify` lists the damaged files",
            )
    return end_offset


def _end_of_backup(
    address: str,
    cluster: admin_pb2.DescribeClusterResponse,
    newest_file: Callable[..., Any],
) -> int:
    try:
        with open_backup(address, cluster.cluster_id, cluster.cluster_uuid) as archive:
            newest = newest_file(archive.inventory(), archive)
    except CommandError as error:
        # The controllers may not have written a first file yet.
        if error.code != "NO_BACKUP":
            raise
        newest = None
    return 0 if newest is None else newest.end_offset

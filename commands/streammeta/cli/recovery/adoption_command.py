"""`streammeta restore adopt` and `finish`: what the bucket holds beyond the backup, and its end.

Reads the map by a snapshot and the bucket; what is adopted is decided by the planner in `storage`
and judged again by the leader.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from streammeta.cli.framework.client import ControllerClient, store_option
from streammeta.cli.framework.connecting import with_client
from streammeta.cli.framework.output import CommandError, Output, say_progress, with_output
from streammeta.cli.recovery.backup_command import opened_backup
from streammeta.cli.recovery.predecessors import call_when_fenced, stopped_option, wait_for_fence
from streammeta.cli.recovery.snapshot_command import DOWNLOAD_TIMEOUT_S, download
from streammeta.controller.config import ConfigError
from streammeta.storage.adoption.model import HARMLESS, LeftBehind
from streammeta.storage.adoption.planner import AdoptionBatch, AdoptionPlan
from streammeta.storage.cluster_files.bucket_marker import check_marker, read_marker
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.v1 import admin_pb2, common_pb2
from streammeta.v1.admin_pb2_grpc import AdminServiceStub

if TYPE_CHECKING:
    from streammeta.cli.recovery.adoption_survey import MetadataState, Missing

BACKUP_WAIT_S = 60.0
"""Time that `finish` waits for the first backup of the new cluster, in seconds."""

DESCRIBED_WITHIN_S = 10.0
"""Time in which a controller must know the cluster's UUID, in seconds."""

_LEFT = ("object_id", "stream_id", "start_offset", "end_offset", "why")


@click.command()
@with_client(DOWNLOAD_TIMEOUT_S)
@store_option
@click.option("--dry-run", is_flag=True, help="Tell what would be adopted; change nothing.")
@click.option("--yes", is_flag=True, help="Adopt it.")
@click.option(
    "--pass-gaps",
    is_flag=True,
    help="Adopt what comes after a gap too; offsets in the gap are lost.",
)
@stopped_option
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
    """Take what brokers wrote after the backup from the bucket into the restored map.

    With --yes the command waits first until no controller of the old cluster can acknowledge
    changes: 35 s after the new cluster began, unless --old-controllers-stopped was given.

    Every undecided object is read. Objects of the map that were compacted since, and deleted, are
    replaced with the compactions. `lost` is what can't be adopted and may have been acknowledged:
    after a gap, of a stream that the map does not know, damaged, or in conflict. `missing` are
    offsets of the map that no object in the bucket has. Can be interrupted and repeated.

    A stream that was trimmed beyond the restored end has a gap there. --pass-gaps adopts what
    follows, and `gaps` lists it. Offsets that a broker still has in its own log are in a gap as
    well, and are lost too: without the option what follows stays `lost` until they are uploaded.

    \b
    Example:
      streammeta restore adopt --connect 127.0.0.1:9091 --store file:///objects --dry-run
    """
    if dry_run == yes:
        raise click.UsageError("give either --dry-run or --yes")
    cluster = described(client)
    if yes:
        _wait_for_fence(cluster, store, is_declared=old_controllers_stopped)
    surveyed = _surveyed(client, cluster, store, passes_gaps=pass_gaps)
    if surveyed is None:
        raise CommandError(
            "NOT_RECOVERING",
            f"cluster {cluster.cluster_id!r} is not in recovery mode",
            "objects are adopted after `streammeta restore apply`, before `streammeta restore "
            "finish`",
        )
    if yes and surveyed.plan.torn:
        _copy_torn(surveyed, cluster, store)
        surveyed = _surveyed(client, cluster, store, passes_gaps=pass_gaps) or surveyed
    if yes:
        for number, batch in enumerate(surveyed.plan.batches, 1):
            _adopt(client, batch)
            say_progress(f"adopted batch {number} of {len(surveyed.plan.batches)}")
    _report(output, surveyed)
    output.summary({"adopted": len(surveyed.plan.objects) if yes else 0})


@click.command()
@with_client(DOWNLOAD_TIMEOUT_S)
@store_option
@click.option(
    "--leave-behind",
    is_flag=True,
    help="Although objects are left that could be adopted, or that may have been acknowledged.",
)
@click.option(
    "--from",
    "backups",
    metavar="URI",
    help="The new cluster's --backup-store: wait until it holds the end of recovery mode.",
)
@stopped_option
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
    """End recovery mode: brokers may write again, from the streams' ends as they are now.

    Waits as `adopt` does before it looks at the bucket for the last time.

    What is left behind stays in the bucket and is not taken into the map any more; offsets that it
    holds are issued again. `lost` and `missing` count the ranges that `adopt` lists under these
    names. Harmless if recovery mode is over.

    \b
    Example:
      streammeta restore finish --connect 127.0.0.1:9091 --store file:///objects --from file:///backups
    """
    cluster = described(client)
    _wait_for_fence(cluster, store, is_declared=old_controllers_stopped)
    surveyed = _surveyed(client, cluster, store)
    if surveyed is not None:
        _require_settled(surveyed, leave_behind=leave_behind)
        output.summary({"lost": len(surveyed.plan.lost), "missing": len(surveyed.missing)})
    answer = call_when_fenced(
        client,
        lambda channel: AdminServiceStub(channel).FinishRestore,
        admin_pb2.FinishRestoreRequest(),
    )
    output.summary({"was_recovering": answer.was_recovering})
    if backups is not None:
        output.summary({"backup_end": _backed_up(client, backups)})


@dataclass(frozen=True, slots=True)
class _Surveyed:
    """Contents of the bucket compared with the map."""

    undecided: range
    objects: int
    bytes: int
    plan: AdoptionPlan
    missing: tuple[Missing, ...]
    state: MetadataState
    present: Set[int]
    """Ids of objects that the bucket has."""


def described(client: ControllerClient) -> admin_pb2.DescribeClusterResponse:
    """Ask for the cluster that is restored.

    A controller that has just started knows nothing of it; it is asked again for a while.
    """
    deadline = time.monotonic() + DESCRIBED_WITHIN_S
    while True:
        cluster = client.call(
            lambda channel: AdminServiceStub(channel).DescribeCluster,
            admin_pb2.DescribeClusterRequest(),
        )
        if cluster.cluster_uuid or time.monotonic() > deadline:
            return cluster
        time.sleep(0.1)


def _wait_for_fence(
    cluster: admin_pb2.DescribeClusterResponse, address: str, *, is_declared: bool
) -> None:
    """Wait until whatever the old cluster acknowledged is in the bucket, and nothing is added."""
    with opened_store(address) as store:
        _require_own(store, cluster)
        wait_for_fence(
            store,
            cluster.object_namespace,
            cluster_uuid=cluster.cluster_uuid,
            is_declared=is_declared,
        )


def _require_own(store: ObjectStore, cluster: admin_pb2.DescribeClusterResponse) -> None:
    """Require that the bucket is the cluster's; raises `WrongBucketError`."""
    check_marker(
        read_marker(store, cluster.object_namespace),
        cluster_id=cluster.cluster_id,
        cluster_uuid=cluster.cluster_uuid,
        namespace=cluster.object_namespace,
    )


def _surveyed(
    client: ControllerClient,
    cluster: admin_pb2.DescribeClusterResponse,
    address: str,
    *,
    passes_gaps: bool = False,
) -> _Surveyed | None:
    """Compare the leader's map with the bucket; None if it is not in recovery mode."""
    from streammeta.cli.recovery.adoption_survey import list_missing, read_map_state
    from streammeta.storage.adoption.planner import plan_adoption
    from streammeta.storage.adoption.survey import find_present, list_stored, read_candidates

    with opened_store(address) as store, tempfile.TemporaryFile() as copy:
        _require_own(store, cluster)
        download(client, copy)
        state = read_map_state(copy)
        if state is None:
            return None
        stored = list(list_stored(store, cluster.object_namespace))
        present = find_present(store, cluster.object_namespace, stored, state.held)
        undecided = [one for one in stored if state.is_candidate(one.object_id)]
        found = list(
            read_candidates(
                store,
                cluster.object_namespace,
                undecided,
                lambda count: say_progress(f"read {count} of {len(undecided)} objects", ends="\r"),
            )
        )
    unusable = [one for one in found if isinstance(one, LeftBehind)]
    candidates = [one for one in found if not isinstance(one, LeftBehind)]
    heads = state.stream_heads(present)
    plan = plan_adoption(heads, state.next_stream_id, candidates, passes_gaps=passes_gaps)
    adopted = (part for one in plan.objects for part in one.ranges)
    return _Surveyed(
        state.undecided,
        len(undecided),
        sum(one.size for one in undecided),
        replace(plan, left=(*plan.left, *unusable)),
        tuple(list_missing(state.held, present, adopted)),
        state,
        present,
    )


def _copy_torn(
    surveyed: _Surveyed, cluster: admin_pb2.DescribeClusterResponse, address: str
) -> None:
    """Copy objects that the map can keep for some of their streams alone; the copies are adopted.

    Ids at the end of the undecided ones were issued by no cluster, and none will issue them.
    """
    from streammeta.storage.adoption.survey import copy_torn

    free = (
        object_id
        for object_id in reversed(surveyed.undecided)
        if surveyed.state.is_candidate(object_id) and object_id not in surveyed.present
    )
    with opened_store(address) as store:
        copy_torn(store, cluster.object_namespace, surveyed.plan.torn, free)


def to_request(batch: AdoptionBatch) -> admin_pb2.AdoptObjectsRequest:
    """Return the request that adopts some objects."""
    request = admin_pb2.AdoptObjectsRequest(replaced_object_ids=batch.replaced)
    for one in batch.objects:
        item = request.objects.add(object_id=one.object_id, object_size=one.size)
        for part in one.ranges:
            item.ranges.add(
                stream_id=part.stream_id,
                stream_epoch=part.epoch,
                start_offset=part.start,
                end_offset=part.end,
                after_gap=part.after_gap,
            )
    return request


def _adopt(client: ControllerClient, batch: AdoptionBatch) -> None:
    answer = call_when_fenced(
        client, lambda channel: AdminServiceStub(channel).AdoptObjects, to_request(batch)
    )
    for one, result in zip(batch.objects, answer.results, strict=True):
        if result.error != common_pb2.ERROR_CODE_NONE:
            name = common_pb2.ErrorCode.Name(result.error).removeprefix("ERROR_CODE_")
            raise CommandError(
                name,
                f"object {one.object_id} and those with it were not adopted: {name}",
                "batches before are adopted; repeat the command: it plans anew. If no node is "
                "known (NODE_EPOCH_NOT_EXIST), start a broker first",
            )


def _report(output: Output, surveyed: _Surveyed) -> None:
    plan = surveyed.plan
    left = Counter(str(one.why) for one in plan.left if one.why in HARMLESS)
    ranges = [part for one in plan.objects for part in one.ranges]
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
    adopted = [(one.object_id, len(one.ranges), one.size) for one in plan.objects]
    output.rows("adopt", columns, adopted)
    output.rows("not_needed_by", ("why", "ranges"), sorted(left.items()))
    output.rows("lost", _LEFT, [_cells(one) for one in plan.lost])
    missing = [(one.object_id, one.stream_id, one.start, one.end) for one in surveyed.missing]
    output.rows("missing", _LEFT[:-1], missing)
    output.rows("gaps", _LEFT[1:-1], plan.gaps)


def _cells(one: LeftBehind) -> tuple[int, int, int, int, str]:
    return one.object_id, one.stream_id, one.start, one.end, str(one.why)


def _require_settled(surveyed: _Surveyed, *, leave_behind: bool) -> None:
    adoptable, lost = len(surveyed.plan.objects), len(surveyed.plan.lost)
    if leave_behind or not (adoptable or lost):
        return
    raise CommandError(
        "LEFT_BEHIND",
        f"objects that can be adopted: {adoptable}; ranges that can't and may have been "
        f"acknowledged, `lost`: {lost}; ranges that no object in the bucket has, `missing`: "
        f"{len(surveyed.missing)}; recovery mode goes on",
        "`streammeta restore adopt` lists them, with --yes it adopts, with --pass-gaps also what "
        "comes after a gap; give --leave-behind to do without them",
    )


def _backed_up(client: ControllerClient, address: str) -> int:
    """Wait until the backup holds the log up to here, verify it, and return its end."""
    from streammeta.controller.backup.verification import newest_file, verify

    cluster = described(client)
    deadline = time.monotonic() + BACKUP_WAIT_S
    end_offset = 0
    while end_offset < cluster.high_watermark:
        if time.monotonic() > deadline:
            raise CommandError(
                "NO_BACKUP",
                f"recovery mode is over, and the backup reaches {end_offset}, not "
                f"{cluster.high_watermark}, after {BACKUP_WAIT_S:.0f} s",
                "see `backup_failed` in the leader's log, and start the controllers with "
                "--backup-store",
            )
        end_offset = _end_of_backup(address, cluster, newest_file)
    with opened_backup(address, cluster.cluster_id, cluster.cluster_uuid) as archive:
        if verify(archive.inventory(), archive, is_all=False).damages:
            raise CommandError(
                "DAMAGED",
                "recovery mode is over, and the new cluster's backup is damaged",
                "`streammeta backup verify` tells where",
            )
    return end_offset


def _end_of_backup(
    address: str,
    cluster: admin_pb2.DescribeClusterResponse,
    newest_file: Callable[..., Any],
) -> int:
    try:
        with opened_backup(address, cluster.cluster_id, cluster.cluster_uuid) as archive:
            newest = newest_file(archive.inventory(), archive)
    except CommandError as error:
        if error.code != "NO_BACKUP":
            raise
        newest = None
    return 0 if newest is None else newest.end_offset


@contextmanager
def opened_store(address: str) -> Iterator[ObjectStore]:
    """Open the bucket of objects; raises ConfigError or StorageError."""
    try:
        store = open_object_store(address)
    except ValueError as error:
        raise ConfigError(f"store: {error}") from error
    with closing(store):
        store.check()
        yield store

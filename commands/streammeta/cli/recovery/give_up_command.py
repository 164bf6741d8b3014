"""`streammeta restore give-up`: objects that a restore left behind become orphans.

Writes a mark into the bucket for each restore, after the leader has recorded it in its audit log.
Deletes nothing. From then on reconciliation classifies the objects by their age.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import click

from streammeta.cli.framework.client import ControllerClient, store_option
from streammeta.cli.framework.connecting import with_client
from streammeta.cli.framework.output import CommandError, Duration, Output, with_output
from streammeta.cli.recovery import adoption_command, backup_command, snapshot_command
from streammeta.storage.adoption.survey import StoredObject, list_stored
from streammeta.storage.cluster_files.bucket_marker import (
    Generation,
    GivenUp,
    give_up,
    read_undecided,
)
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.v1 import admin_pb2, admin_pb2_grpc

_COLUMNS = (
    *("number", "cluster_id", "restored_at", "undecided_from", "undecided_below"),
    *("objects", "bytes"),
)


@dataclass(frozen=True, slots=True)
class _Left:
    """A restore, and the objects under its undecided ids that the metadata does not know."""

    generation: Generation
    objects: Sequence[StoredObject]

    @property
    def size(self) -> int:
        """Total size of the objects in bytes."""
        return sum(object_.size for object_ in self.objects)


@click.command("give-up")
@with_client(snapshot_command.DOWNLOAD_TIMEOUT_S)
@store_option
@click.option(
    "--older-than",
    "older_than_ms",
    type=Duration(),
    default="7d",
    help="Skip restores and recoveries that are younger.",
)
@click.option(
    "--dry-run", is_flag=True, help="List the objects that would be given up. Change nothing."
)
@click.option("--yes", is_flag=True, help="Give them up.")
@with_output
def give_up_command(
    *,
    client: ControllerClient,
    store: str,
    older_than_ms: int,
    dry_run: bool,
    yes: bool,
    output: Output,
) -> None:
    """Give up the undecided objects that restores have left behind in the bucket.

    Run it after `streammeta restore finish`. The metadata does not contain these objects, and their
    offsets may have been issued again. They stay until they are old enough for `streammeta
    reconcile` to delete them as orphans. The leader records the command in its audit log. It can be
    repeated.

    \b
    Example:
      streammeta restore give-up --connect 127.0.0.1:9091 --store file:///objects --dry-run
    """
    if dry_run == yes:
        raise click.UsageError("choose --dry-run or --yes")
    cluster = adoption_command.describe_restored(client)
    now_ms = time.time_ns() // 1_000_000

    with backup_command.open_store(store) as objects:
        left = _survey(client, cluster, objects, now_ms - older_than_ms)
        if yes and left:
            # The leader records the command first, so that no mark exists without an audit entry.
            numbers = [restore.generation.number for restore in left]
            client.call(
                lambda channel: admin_pb2_grpc.AdminServiceStub(channel).FinishRestore,
                admin_pb2.FinishRestoreRequest(given_up=numbers),
            )
            for restore in left:
                give_up(objects, cluster.object_namespace, _mark(restore, cluster, now_ms))

    output.summary(
        {
            "objects": sum(len(restore.objects) for restore in left),
            "bytes": sum(restore.size for restore in left),
            "given_up": len(left) if yes else 0,
        }
    )
    output.rows(
        "restores",
        _COLUMNS,
        [_cells(restore) for restore in left],
    )


def _survey(
    client: ControllerClient,
    cluster: admin_pb2.DescribeClusterResponse,
    store: ObjectStore,
    before_ms: int,
) -> list[_Left]:
    """Return the leftovers of restores before a time, including restores without any."""
    namespace = cluster.object_namespace
    # A mark in another cluster's bucket would let reconciliation delete that cluster's objects.
    adoption_command.require_own(store, cluster)
    generations = [
        generation
        for generation in read_undecided(store, namespace)
        if generation.created_ms <= before_ms
    ]
    # The copy of the metadata may be large and is not needed without restores.
    if not generations:
        return []
    # List the bucket before the metadata: an object committed in between is then known, and kept.
    stored = list(list_stored(store, namespace))
    known = _known_ids(client, cluster)

    return [
        _Left(
            generation,
            [
                object_
                for object_ in stored
                if generation.undecided_from <= object_.object_id < generation.undecided_below
                and object_.object_id not in known
            ],
        )
        for generation in generations
    ]


def _known_ids(
    client: ControllerClient, cluster: admin_pb2.DescribeClusterResponse
) -> Collection[int]:
    """Return the ids of all known objects. The cluster must not be in recovery mode."""
    from streammeta.cli.recovery.adoption_survey import read_map_state, read_object_ids

    with tempfile.TemporaryFile() as copy:
        snapshot_command.download(client, copy)
        if read_map_state(copy) is not None:
            raise CommandError(
                "RECOVERING",
                f"cluster {cluster.cluster_id!r} is in recovery mode: its objects can be adopted",
                "run `streammeta restore adopt` and `streammeta restore finish` first",
            )
        return frozenset(read_object_ids(copy).tolist())


def _mark(left: _Left, cluster: admin_pb2.DescribeClusterResponse, now_ms: int) -> GivenUp:
    return GivenUp(
        cluster_uuid=cluster.cluster_uuid,
        number=left.generation.number,
        objects=len(left.objects),
        bytes=left.size,
        created_ms=now_ms,
    )


def _cells(left: _Left) -> tuple[int, str, str, int, int, int, int]:
    generation = left.generation
    restored_at = datetime.fromtimestamp(generation.created_ms / 1000, UTC)
    return (
        generation.number,
        generation.cluster_id,
        restored_at.isoformat(timespec="seconds"),
        generation.undecided_from,
        generation.undecided_below,
        len(left.objects),
        left.size,
    )

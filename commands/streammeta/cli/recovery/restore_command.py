"""`streammeta restore`: a new cluster from a backup, by a plan and new directories.

It connects to no controller. It reads the backup and the bucket of objects. `apply` writes one
marker into the bucket.
"""

from __future__ import annotations

import hashlib
import io
import time
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streammeta.cli.controller.storage_command import data_dir_option, parse_voters, read_voters
from streammeta.cli.framework.client import store_option
from streammeta.cli.framework.output import CommandError, Output, with_output
from streammeta.cli.recovery import adoption_command, predecessors
from streammeta.cli.recovery.backup_command import cluster_options, open_backup, open_store
from streammeta.cli.recovery.give_up_command import give_up_command
from streammeta.controller import config, ids
from streammeta.controller.journal.directory import FirstCheckpoint, check_empty, format_directory
from streammeta.controller.quorum.voters import VoterSet
from streammeta.storage import durable_files, json_files
from streammeta.storage.cluster_files import bucket_marker
from streammeta.storage.cluster_files.backup_files import Folder, Inventory
from streammeta.storage.object_format.object_key import cluster_namespace, cluster_of
from streammeta.storage.object_store.protocol.base import ObjectStore

if TYPE_CHECKING:
    from streammeta.cli.recovery.adoption_survey import Missing
    from streammeta.controller.backup.archive import Archive
    from streammeta.controller.backup.checkpoints import SingleFile
    from streammeta.controller.backup.replaying import Replayed
    from streammeta.controller.backup.restoring import RestorePlan

MISSING_SHOWN = 1_000
"""Maximum number of missing ranges that a plan lists."""

_FILE = click.Path(path_type=Path, dir_okay=False)

_from_option = click.option(
    "--from",
    "address",
    required=True,
    metavar="URI",
    help="The backup store, as for `streammeta backup`, or a file that `backup now` wrote.",
)


@click.group()
def restore() -> None:
    """Create a new cluster from a backup, when the controllers of the old one are lost.

    First stop all remaining controllers of the old cluster. Controllers that still run and reach
    the bucket reject changes within seconds. A controller without access to the bucket rejects
    them half a minute later.

    \b
    Example:
      streammeta restore plan --from file:///backups --store file:///objects --plan demo-2.json \\
        --new-cluster-id demo-2 --voters 1@10.0.0.1:9091,2@10.0.0.2:9091,3@10.0.0.3:9091
    """


restore.add_command(adoption_command.adopt)
restore.add_command(adoption_command.finish)
restore.add_command(give_up_command)


@restore.command("plan")
@_from_option
@cluster_options
@store_option
@click.option(
    "--namespace", help="Second part of the object keys. [default: derived from the old cluster id]"
)
@click.option(
    "--new-cluster-id", required=True, help="Name of the new cluster, different from the old one."
)
@click.option(
    "--voters",
    required=True,
    metavar="ID@HOST:PORT,...",
    callback=read_voters,
    help="Voters of the new cluster, with their --peer-advertise.",
)
@click.option("--to-offset", type=click.IntRange(min=1), help="Restore the log below this offset.")
@click.option(
    "--to-time",
    type=click.DateTime(["%Y-%m-%dT%H:%M:%S"]),
    help="Restore everything committed by this time (UTC), at the granularity of backup segments.",
)
@click.option("--plan", "file", type=_FILE, help="File for the plan that `apply` reads.")
@click.option(
    "--supersede",
    is_flag=True,
    help="Restore although another cluster was restored over the old one since. That cluster"
    " is fenced too.",
)
@with_output
def plan_command(
    *,
    address: str,
    cluster_id: str | None,
    cluster_uuid: str | None,
    store: str,
    namespace: str | None,
    new_cluster_id: str,
    voters: VoterSet,
    to_offset: int | None,
    to_time: datetime | None,
    file: Path | None,
    supersede: bool,
    output: Output,
) -> None:
    """Show the result of a restore, and write a plan for it. Change nothing else.

    The command restores the backup in memory, by default to its end, and checks every byte.
    `missing` lists the first ranges whose objects are no longer in the bucket. `streammeta restore
    adopt` finds records that were compacted since, but not trimmed records or records of
    deleted streams.

    \b
    Example:
      streammeta restore plan --from file:///backups --store file:///objects --cluster-id demo \\
        --new-cluster-id demo-2 --voters 1@10.0.0.1:9091 --to-time 2026-01-31T12:00:00
    """
    if to_offset is not None and to_time is not None:
        raise click.UsageError("use --to-offset or --to-time, not both")
    try:
        config.check_cluster_id(new_cluster_id)
    except config.ConfigError as error:
        raise click.UsageError(f"new-{error}") from error

    # Restored completely, so that damage shows before the old cluster is fenced.
    with open_backup(address, cluster_id, cluster_uuid) as archive:
        inventory = archive.inventory()
        if to_time is not None:
            to_offset = _offset_at(archive, inventory, to_time)
        replayed = replay_backup(archive, inventory, to_offset)

    folder = archive.folder
    if new_cluster_id == folder.cluster_id:
        raise click.UsageError("--new-cluster-id: equals the old cluster's id. Choose another one")
    # The new cluster keeps the keys of the old one's objects, and so its namespace.
    namespace = namespace or cluster_namespace(folder.cluster_id)

    with open_store(store) as objects:
        if not supersede:  # the namespace may belong to a cluster restored since
            _require_owner(objects, namespace, folder)
        plan = _plan_of(replayed, folder, objects, namespace, new_cluster_id, voters)
        missing = _list_missing(replayed, objects, namespace)
    if file is not None:
        write_new(file, json_files.encode(plan))
    size = replayed.cluster_metadata.size()
    output.summary(
        {
            **{name: getattr(plan, name) for name in plan.__dataclass_fields__},
            "streams": size.streams,
            "objects": size.objects,
            "keys": size.keys,
            "missing_objects": len({row.object_id for row in missing}),
        }
    )
    rows = [(row.object_id, row.stream_id, row.start, row.end) for row in missing[:MISSING_SHOWN]]
    output.rows("missing", ("object_id", "stream_id", "start_offset", "end_offset"), rows)


def _list_missing(replayed: Replayed, objects: ObjectStore, namespace: str) -> list[Missing]:
    """Return the ranges of restored objects that are no longer in the bucket."""
    from streammeta.cli.recovery.adoption_survey import list_held, list_missing
    from streammeta.storage.adoption.survey import find_present, list_stored

    sections = replayed.cluster_metadata.freeze().sections()
    held = list_held(sections["objects"], sections["object_ranges"])
    present = find_present(objects, namespace, list_stored(objects, namespace), held)
    return list(list_missing(held, present))


@restore.command("apply")
@_from_option
@store_option
@click.option(
    "--plan", "file", type=_FILE, required=True, help="The plan, the same file for each controller."
)
@click.option(
    "--node-id", type=int, required=True, help="Id of this controller, one of the voters."
)
@data_dir_option
@predecessors.stopped_option
@with_output
def apply_command(
    *,
    address: str,
    store: str,
    file: Path,
    node_id: int,
    data_dir: Path,
    old_controllers_stopped: bool,
    output: Output,
) -> None:
    """Format an empty directory of one controller of the new cluster. Repeat it on each.

    The command first writes the marker of a new generation into the bucket of objects. Controllers
    of the old cluster that still run then reject writes and delete nothing: within seconds if they
    reach the bucket, otherwise when their lease of 30 s expires. Until then the new cluster changes
    nothing. The printed hashes must be equal on all controllers. Start the controllers with the new
    --cluster-id and the old cluster's --namespace.

    \b
    Example:
      streammeta restore apply --from file:///backups --store file:///objects --plan demo-2.json \
        --node-id 1 --data-dir /var/lib/streammeta
    """
    from streammeta.controller.backup.restoring import RestorePlan, require_same, write_checkpoint

    plan = json_files.decode(RestorePlan, str(file), file.read_bytes())
    voters = parse_voters(plan.voters)
    if voters.find(ids.NodeId(node_id)) is None:
        raise click.UsageError(
            f"--node-id: {node_id} is not one of the plan's voters, {plan.voters}"
        )
    # Checked before anything is written, above all before the marker.
    check_empty(data_dir, durable_files.PosixFileSystem())
    with open_backup(address, plan.from_cluster_id, plan.from_cluster_uuid) as archive:
        replayed = replay_backup(archive, archive.inventory(), plan.from_end_offset)
        # All controllers must start from one state, so the replay must have the plan's hash.
        require_same(replayed, plan)
    # The checkpoint is complete before the marker fences the old cluster.
    checkpoint = io.BytesIO()
    write_checkpoint(checkpoint, replayed, plan, voters)
    # The marker comes before the directory: new controllers must not meet unfenced old ones.
    with open_store(store) as objects:
        generation = take_over(objects, plan)
        # With the declaration in the bucket, the new controllers skip the wait.
        if old_controllers_stopped:
            predecessors.declare_stopped(objects, generation)
    identity = format_directory(
        data_dir,
        cluster_id=ids.ClusterId(plan.cluster_id),
        node_id=ids.NodeId(node_id),
        bootstrap_voters=voters,
        first_checkpoint=FirstCheckpoint(plan.snapshot_id, checkpoint.getvalue()),
    )
    output.summary(
        {
            "data_dir": str(data_dir),
            "cluster_id": plan.cluster_id,
            "namespace": plan.namespace,
            "directory_id": identity.directory_id,
            "log_start_offset": plan.end_offset,
            "state_hash": plan.state_hash,
            "sha256": hashlib.sha256(checkpoint.getvalue()).hexdigest(),
        }
    )
    output.note(name_certificates(plan.namespace, plan.from_cluster_id))
    if not old_controllers_stopped:
        output.note(
            f"The new cluster changes nothing for {bucket_marker.FENCE_WAIT_MS // 1000} s after its"
            " start, because controllers of the old one may acknowledge changes until then."
        )


def name_certificates(namespace: str, from_cluster_id: str) -> str:
    """Name the valid certificates of a restored cluster, and the option that accepts them."""
    by_default = cluster_of(namespace)
    option = f"{from_cluster_id} with --former-cluster-id {from_cluster_id}"
    if by_default is None:
        whose = option
    elif by_default == from_cluster_id:
        whose = by_default
    else:  # a restored cluster is restored again
        whose = f"{by_default}, or those of {option}"
    return (
        f"Over TLS start it with the certificates of cluster {whose}. They are valid in"
        " the new cluster too."
    )


def _offset_at(archive: Archive | SingleFile, inventory: Inventory, to_time: datetime) -> int:
    """Return the end of the last segment that was committed by a time."""
    from streammeta.controller.backup.chains import count_committed_by

    # The option is in UTC, and click returns it without a zone.
    to_ms = int(to_time.replace(tzinfo=UTC).timestamp() * 1_000)
    segments = sorted(inventory.segments, key=lambda one: one.end_offset)
    at = count_committed_by(segments, to_ms, inventory.written_ms, archive.segment_manifest)
    if at == 0:
        raise CommandError(
            "TOO_EARLY",
            "the backup contains no segment that was committed by then",
            "choose a later time, or --to-offset. `streammeta backup list` shows the offsets",
        )
    return segments[at - 1].end_offset


def replay_backup(
    archive: Archive | SingleFile, inventory: Inventory, end_offset: int | None
) -> Replayed:
    """Return the metadata of a backup at an offset, or at its end. Raises `CommandError`."""
    from streammeta.controller.backup.chains import chain_to, list_spans, newest_chain
    from streammeta.controller.backup.replaying import replay

    chain = newest_chain(inventory) if end_offset is None else chain_to(inventory, end_offset)
    if chain is None:
        known = ", ".join(f"{start} to {end}" for start, end in list_spans(inventory)) or "none"
        raise CommandError(
            "NOT_RESTORABLE",
            f"the backup can't be restored to offset {end_offset}. Possible offsets: {known}",
            "choose one of them as --to-offset",
        )
    return replay(chain, archive, end_offset=end_offset)


def _require_owner(objects: ObjectStore, namespace: str, folder: Folder) -> None:
    """Check that the namespace belongs to the cluster of the backup."""
    marker = bucket_marker.read_marker(objects, namespace)
    if marker is None or marker.cluster_uuid != folder.cluster_uuid:
        found = "no cluster" if marker is None else f"{marker.cluster_id} {marker.cluster_uuid}"
        raise CommandError(
            "WRONG_BUCKET",
            f"namespace {namespace!r} of the bucket belongs to {found}, the backup is of "
            f"{folder.cluster_id} {folder.cluster_uuid}",
            "name the old cluster's --store and --namespace. If another cluster was restored"
            " over it, restore the backup of that cluster, or use --supersede",
        )


def _plan_of(
    replayed: Replayed,
    folder: Folder,
    objects: ObjectStore,
    namespace: str,
    cluster_id: str,
    voters: VoterSet,
) -> RestorePlan:
    from streammeta.controller.backup import restoring

    generations = bucket_marker.read_generations(objects, namespace)
    view, cluster_metadata = replayed.cluster_metadata.freeze(), replayed.cluster_metadata
    # Ids below this may be in use. The bucket may know of later claims than the backup.
    issued_below = max(cluster_metadata.next_object_id, cluster_metadata.bucket_claim.issued_below)
    plan = restoring.RestorePlan(
        from_cluster_id=folder.cluster_id,
        from_cluster_uuid=folder.cluster_uuid,
        from_end_offset=replayed.position.end_offset,
        committed_by_ms=replayed.last_ms,
        cluster_id=cluster_id,
        cluster_uuid=str(uuid.uuid4()),
        namespace=namespace,
        voters=",".join(f"{voter.key.node_id}@{voter.endpoint}" for voter in voters),
        # Ahead of all that the lost controllers may have written after the backup.
        end_offset=replayed.position.end_offset + restoring.OFFSET_JUMP,
        epoch=replayed.epoch + restoring.EPOCH_JUMP,
        next_object_id=restoring.jump_object_id(
            issued_below, bucket_marker.read_claimed(objects, namespace)
        ),
        undecided_from=restoring.first_undecided_id(view, cluster_metadata.next_object_id),
        generation=generations[-1].number + 1 if generations else 2,
        created_ms=time.time_ns() // 1_000_000,
        state_hash="",
    )
    # The hash depends on the other fields of the plan.
    return replace(plan, state_hash=restoring.state_hash(view, plan))


def take_over(objects: ObjectStore, plan: RestorePlan) -> bucket_marker.Generation:
    """Write the marker of the new generation and return it. A repeat finds the marker.

    Raises:
        CommandError: another cluster has taken over the bucket, or the plan is too old.
    """
    from streammeta.controller.backup.restoring import OBJECT_ID_JUMP

    wanted = bucket_marker.Generation(
        cluster_id=plan.cluster_id,
        cluster_uuid=plan.cluster_uuid,
        namespace=plan.namespace,
        number=plan.generation,
        undecided_from=plan.undecided_from,
        undecided_below=plan.next_object_id,
        created_ms=plan.created_ms,
    )
    advice = "make a new plan"
    # Half of the reserve is used up. New ids of the old cluster could soon equal the plan's ids.
    if (
        bucket_marker.read_claimed(objects, plan.namespace)
        > plan.next_object_id - OBJECT_ID_JUMP // 2
    ):
        message = "the old cluster has issued too many object ids since the plan was made"
        raise CommandError("PLAN_TOO_OLD", message, advice)
    # Created once: a repetition finds its own marker, and a competitor's wins over this one.
    found = bucket_marker.create_generation(objects, wanted)
    if found != wanted or bucket_marker.read_generations(objects, plan.namespace)[-1] != wanted:
        message = (
            f"another restore or recovery has taken over the bucket: cluster {found.cluster_id!r}"
        )
        raise CommandError("SUPERSEDED", message, advice)
    return wanted


def write_new(file: Path, data: bytes) -> None:
    """Write a file durably. Raises `CommandError` if it exists."""
    # Reports and plans are evidence and never replaced.
    if file.exists():
        raise CommandError(
            "EXISTS", f"{file} already exists. The command left it unchanged", "name another"
        )
    durable_files.replace_file(durable_files.PosixFileSystem(), file, [data])

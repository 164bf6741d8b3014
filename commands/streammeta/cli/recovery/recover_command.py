"""`streammeta recover`: recovery from one survivor after the loss of a majority of the disks.

It connects to no controller. It reads stopped directories and the bucket of objects. `apply`
changes one directory and writes one marker into the bucket.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streammeta.cli.controller.storage_command import data_dir_option
from streammeta.cli.framework.client import store_option
from streammeta.cli.framework.output import CommandError, Output, with_output
from streammeta.cli.recovery import backup_command, predecessors, restore_command
from streammeta.controller.journal import directory, errors
from streammeta.controller.journal.inspection import open_stopped_directory
from streammeta.storage import json_files
from streammeta.storage.cluster_files import bucket_marker
from streammeta.storage.durable_files import PosixFileSystem
from streammeta.storage.object_format.object_key import cluster_namespace
from streammeta.storage.object_store.protocol.base import ObjectStore

if TYPE_CHECKING:
    from streammeta.controller.recover.planning import Circumstances, RecoveryPlan, Report

_FILE = click.Path(path_type=Path, dir_okay=False)
_EXISTING_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)


@click.group()
def recover() -> None:
    """Recover from one survivor when the disks of a majority are lost.

    Commits that only the lost disks contained are lost. Stop every remaining controller first.

    \b
    Example:
      streammeta recover inspect --data-dir /var/lib/streammeta --report 3.json
      streammeta recover plan --report 3.json --dead 1,2 --store file:///objects --plan plan.json
      streammeta recover apply --plan plan.json --data-dir /var/lib/streammeta \\
        --store file:///objects --yes
    """


@recover.command("inspect")
@data_dir_option
@click.option("--report", "file", type=_FILE, help="File for the report that `plan` reads.")
@with_output
def inspect_command(*, data_dir: Path, file: Path | None, output: Output) -> None:
    """Report the contents of a surviving directory. Change nothing in it.

    The controller must be stopped. The command reads and replays the whole log.

    \b
    Example:
      streammeta recover inspect --data-dir /var/lib/streammeta --report 3.json
    """
    from streammeta.controller.recover.survivor import read_survivor

    with _no_controller(), _refusals(), open_stopped_directory(data_dir) as (files, identity):
        report = read_survivor(data_dir, files, identity).report
    if file is not None:
        restore_command.write_new(file, json_files.encode(report))
    output.summary(asdict(report))


@recover.command("plan")
@click.option(
    "--report",
    "files",
    type=_EXISTING_FILE,
    multiple=True,
    required=True,
    help="Report of `inspect`, once for each surviving voter.",
)
@click.option(
    "--dead",
    required=True,
    metavar="ID,...",
    help="All voters whose disks are lost, and no others.",
)
@store_option
@click.option(
    "--namespace", help="Second part of the object keys. [default: derived from the cluster id]"
)
@click.option(
    "--from",
    "address",
    metavar="URI",
    help="A backup to compare with the survivors, as for `streammeta restore`.",
)
@click.option("--plan", "plan_file", type=_FILE, help="File for the plan that `apply` reads.")
@with_output
def plan_command(
    *,
    files: tuple[Path, ...],
    dead: str,
    store: str,
    namespace: str | None,
    address: str | None,
    plan_file: Path | None,
    output: Output,
) -> None:
    """Choose the most complete survivor, and write a plan to recover from it.

    Survivors and dead must be exactly the voters. The command fails while a majority survives, and
    if a backup reaches further than every survivor. It changes nothing but the plan's file.

    \b
    Example:
      streammeta recover plan --report 3.json --dead 1,2 --store file:///objects \\
        --from file:///backups --plan plan.json
    """
    from streammeta.controller.recover.planning import Report, choose_survivor, plan_recovery

    lost = _node_ids(dead)
    reports = [json_files.decode(Report, str(file), file.read_bytes()) for file in files]
    backup = None if address is None else _backup_point(address, reports[0])
    with _refusals():
        survivor = choose_survivor(reports, lost, backup=backup)
    with backup_command.open_store(store) as objects:
        namespace = namespace or cluster_namespace(survivor.cluster_id)
        # A plan for the wrong bucket would fence another cluster.
        _require_owner(objects, namespace, survivor)
        plan = plan_recovery(survivor, reports, lost, _circumstances(objects, namespace))
    if plan_file is not None:
        restore_command.write_new(plan_file, json_files.encode(plan))
    output.summary(
        {
            **asdict(plan),
            "backup_epoch": None if backup is None else backup[0],
            "backup_end_offset": None if backup is None else backup[1],
        }
    )
    columns = ("node_id", "last_epoch", "end_offset", "behind", "goes_on")
    output.note("")
    output.rows(
        "survivors",
        columns,
        [
            (
                report.node_id,
                *report.progress,
                max(0, survivor.end_offset - report.end_offset),
                report is survivor,
            )
            for report in reports
        ],
    )
    output.note(
        f"Commits that only the dead voters {plan.dead} contained are lost. Nobody can tell"
        " whether there were any."
    )


@recover.command("apply")
@click.option(
    "--plan", "plan_file", type=_EXISTING_FILE, required=True, help="Plan that `plan` wrote."
)
@data_dir_option
@store_option
@click.option(
    "--audit-log", type=_FILE, help="Audit log of the controller, which records the recovery."
)
@click.option("--yes", is_flag=True, help="Apply the changes. Without this option, only show them.")
@predecessors.stopped_option
@with_output
def apply_command(
    *,
    plan_file: Path,
    data_dir: Path,
    store: str,
    audit_log: Path | None,
    yes: bool,
    old_controllers_stopped: bool,
    output: Output,
) -> None:
    """Make the survivor the only voter, with its whole log.

    The command first writes a marker into the bucket. Lost controllers that return see it, reject
    writes and delete nothing. The command then waits 35 s, until controllers without access to the
    bucket reject writes too. --old-controllers-stopped skips the wait. The directory gets a new id
    and keeps its former contents in `recovery-N/before`. An interrupted command can be repeated.
    Afterwards start the controller and add voters.

    \b
    Example:
      streammeta recover apply --plan plan.json --data-dir /var/lib/streammeta \\
        --store file:///objects --yes
    """
    from streammeta.controller.recover.applying import Application
    from streammeta.controller.recover.planning import RecoveryPlan

    plan = json_files.decode(RecoveryPlan, str(plan_file), plan_file.read_bytes())
    files = PosixFileSystem(read_only=not yes)  # without --yes it rejects every change
    if not files.names(data_dir):
        raise errors.DirectoryNotFormattedError(
            f"{data_dir} is empty or missing. Name the survivor's directory"
        )
    with _no_controller(), _refusals():
        # A controller that starts now would write into a directory that is being replaced.
        lock = directory.lock_directory(files, data_dir)
        try:
            application = Application(data_dir, plan, files)
            was_done = application.is_done()
            if yes:
                with backup_command.open_store(store) as objects:
                    # The marker comes before the directory, so that two clusters never both write.
                    application.carry_out(lambda: _fence(objects, plan, audit_log))
                    # Controllers without the bucket miss the marker, so their lease must end.
                    predecessors.wait_for_fence(
                        objects,
                        plan.namespace,
                        cluster_uuid=plan.cluster_uuid,
                        is_declared=old_controllers_stopped,
                    )
                # OK is recorded last: marker, directory and wait are complete.
                _record(audit_log, plan, "OK")
            elif not was_done and not application.is_begun():
                # Without --yes, still check that this is the directory that the plan chose.
                application.survivor()
        finally:
            lock.release()
    output.summary(
        {
            "data_dir": str(data_dir),
            "node_id": plan.node_id,
            "directory_id": plan.directory_id,
            "log_start_offset": plan.end_offset,
            "kept_up_to_offset": plan.from_end_offset,
            "generation": plan.generation,
            "before": str(application.before),
            "done": yes or was_done,
        }
    )
    if not yes and not was_done:
        output.note("nothing was changed. Repeat with --yes to apply the plan")


def _circumstances(objects: ObjectStore, namespace: str) -> Circumstances:
    from streammeta.controller.recover.planning import Circumstances

    # A bucket that was never taken over is in its first generation.
    generations = bucket_marker.read_generations(objects, namespace)
    return Circumstances(
        namespace=namespace,
        claimed_below=bucket_marker.read_claimed(objects, namespace),
        generation=generations[-1].number + 1 if generations else 2,
        # New ids, so that a lost controller that returns is never taken for a member.
        cluster_uuid=str(uuid.uuid4()),
        directory_id=str(uuid.uuid4()),
        now_ms=time.time_ns() // 1_000_000,
    )


def _require_owner(objects: ObjectStore, namespace: str, survivor: Report) -> None:
    """Check that the namespace belongs to the survivors' cluster."""
    marker = bucket_marker.read_marker(objects, namespace)
    # A bucket without a marker fits survivors without a UUID.
    if (marker.cluster_uuid if marker else "") != survivor.cluster_uuid:
        found = "no cluster" if marker is None else f"{marker.cluster_id} {marker.cluster_uuid}"
        raise CommandError(
            "WRONG_BUCKET",
            f"namespace {namespace!r} of the bucket belongs to {found}, the survivors are of "
            f"{survivor.cluster_id} {survivor.cluster_uuid or 'no owner'}",
            "name the cluster's --store and --namespace. If the cluster was restored or"
            " recovered since, use that newer cluster, because these directories are older",
        )


def _backup_point(address: str, report: Report) -> tuple[int, int] | None:
    """Return epoch and end of the newest backup point of the cluster, None without any."""
    from streammeta.controller.backup.chains import newest_chain

    with backup_command.open_backup(address, report.cluster_id, report.cluster_uuid) as archive:
        chain = newest_chain(archive.inventory())
        if chain is None:
            return None
        if chain.segments:
            return archive.segment_manifest(chain.segments[-1]).last_epoch, chain.end_offset
        # Without segments the backup ends at its checkpoint.
        return (0 if chain.base is None else chain.base.epoch), chain.end_offset


def _fence(objects: ObjectStore, plan: RecoveryPlan, audit_log: Path | None) -> None:
    """Keep lost controllers that return from writing and deleting."""
    # On disk before the first change, so that even an interrupted recovery is on record.
    _record(audit_log, plan, "BEGUN")
    restore_command.take_over(objects, plan.restore)


def _record(path: Path | None, plan: RecoveryPlan, verdict: str) -> None:
    """Append a line to an audit log durably."""
    from streammeta.controller.trust.audit.file import AuditFile, Entry
    from streammeta.controller.trust.audit.lines import AuditLine, Verdict

    if path is None:
        return
    line = AuditLine(
        ts_ms=time.time_ns() // 1_000_000,
        node=plan.node_id,
        epoch=plan.epoch,
        leader=False,
        call="recover.apply",
        verdict=Verdict(verdict),
        target={"generation": plan.generation, "dead": plan.dead, "disk": plan.directory_id},
        offset=plan.from_end_offset,
    )
    log = AuditFile(PosixFileSystem(), path)
    try:
        log.append([Entry(line)])
        log.sync()
    finally:
        log.close()


def _node_ids(text: str) -> Sequence[int]:
    try:
        return [int(node_id) for node_id in text.split(",")]
    except ValueError as error:
        message = f"--dead: {text!r} is not a list of node ids, expected for example 1,2"
        raise click.UsageError(message) from error


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn the rejection of a recovery into a command's failure."""
    from streammeta.controller.recover.planning import RecoveryError

    try:
        yield
    except RecoveryError as error:
        raise CommandError(error.code, str(error), error.hint) from error


@contextmanager
def _no_controller() -> Iterator[None]:
    """Name the next step if a controller uses the directory."""
    try:
        yield
    except errors.DirectoryLockedError as error:
        message = "stop the controller first. A cluster with a running majority needs no recovery"
        raise CommandError("IN_USE", str(error), message) from error

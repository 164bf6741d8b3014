"""`streammeta storage`: format a controller's data directory, inspect a stopped one's.

It connects to no controller and works on the directory only, under the same lock.
"""

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path

import click

from streammeta.cli.framework.output import CommandError, Output, with_output
from streammeta.controller import config
from streammeta.controller.ids import ClusterId, DirectoryId, NodeId
from streammeta.controller.journal.directory import (
    META_NAME,
    DirectoryIdentity,
    check_identity,
    format_directory,
    read_identity,
)
from streammeta.controller.journal.errors import DirectoryLockedError
from streammeta.controller.journal.inspection import Inspection, open_stopped_directory
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.storage.durable_files import PosixFileSystem

_DAMAGE_COLUMNS = ("file", "byte", "offset", "what")
_DAMAGE = attrgetter(*_DAMAGE_COLUMNS)
"""One row for each damaged place. `offset` is the end of the intact log before it."""

_VOTER = re.compile(r"(?P<peer>[^/]+)(/(?P<directory>.+))?")


@click.group()
def storage() -> None:
    """Format a controller's data directory, and inspect a stopped controller's directory."""


data_dir_option = click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Data directory of the controller.",
)


def read_voters(
    _context: click.Context, _option: click.Parameter, value: str | None
) -> VoterSet | None:
    """Parse an option with `parse_voters`. None stays None."""
    try:
        return None if value is None else parse_voters(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def parse_voters(text: str) -> VoterSet:
    """Parse ID@HOST:PORT[/DIRECTORY-ID],... Raises ValueError with the defect."""
    voters = VoterSet()
    for entry in (part.strip() for part in text.split(",")):
        match = _VOTER.fullmatch(entry)
        # An entry that does not match becomes "@", for which parse_peers reports the expected form.
        ((node_id, endpoint),) = config.parse_peers(
            "voters", match["peer"] if match else "@"
        ).items()
        directory = match["directory"] if match else None
        key = ReplicaKey(node_id, _uuid(directory) if directory else None)
        voters = voters.with_voter(Voter(key, endpoint))
    return voters


def _directory_id(
    _context: click.Context, _option: click.Parameter, value: str | None
) -> DirectoryId | None:
    try:
        return None if value is None else _uuid(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _uuid(text: str) -> DirectoryId:
    try:
        # UUID() accepts braces, capitals and missing dashes. str() brings all of them into one
        # form.
        return DirectoryId(str(uuid.UUID(text)))
    except ValueError:
        raise ValueError(f"{text!r} is not a directory id, expected a UUID") from None


@storage.command("format")
@data_dir_option
@click.option(
    "--cluster-id", required=True, help="Name of the cluster, part of every object's key."
)
@click.option("--node-id", type=int, required=True, help="Id of this controller, 0 to 999.")
@click.option(
    "--voters",
    metavar="ID@HOST:PORT[/DIRECTORY-ID],...",
    callback=read_voters,
    help="First voters of a new cluster, including this controller, at their"
    " --peer-advertise. The option must be the same on each.",
)
@click.option(
    "--join",
    is_flag=True,
    help="For an existing cluster: this controller joins it, or returns after the loss of"
    " its disk. It does not vote until `streammeta quorum add-voter`.",
)
@click.option(
    "--directory-id",
    callback=_directory_id,
    metavar="UUID",
    help="Identity of this disk. [default: drawn at random]",
)
@click.option(
    "--ignore-formatted",
    is_flag=True,
    help="Accept a directory that is already formatted for this controller.",
)
@with_output
def format_command(
    *,
    data_dir: Path,
    cluster_id: str,
    node_id: int,
    voters: VoterSet | None,
    join: bool,
    directory_id: DirectoryId | None,
    ignore_formatted: bool,
    output: Output,
) -> None:
    """Format an empty directory for one controller, once.

    Never use --voters for a controller that has lost its disk: it would vote again in elections in
    which it has voted. Use --join, then remove the lost voter and add the new one.

    \b
    Example:
      streammeta storage format --data-dir /var/lib/streammeta --cluster-id demo --node-id 1 \\
        --voters 1@10.0.0.1:9091,2@10.0.0.2:9091,3@10.0.0.3:9091
    """
    # No default: a controller that should join must never start a cluster of its own by mistake.
    if (voters is None) != join:
        raise click.UsageError("use --voters for a new cluster, or --join for an existing one")
    try:
        config.check_cluster_id(cluster_id)
        config.check_controller_id("node-id", node_id)
    except config.ConfigError as error:
        raise click.UsageError(str(error)) from error

    identity = None
    if ignore_formatted:
        # A start script repeats `format` on every boot. Another identity in the directory still
        # fails.
        identity = _read_formatted(data_dir, ClusterId(cluster_id), NodeId(node_id), directory_id)
    was_formatted = identity is not None

    if identity is None:
        identity = format_directory(
            data_dir,
            cluster_id=ClusterId(cluster_id),
            node_id=NodeId(node_id),
            bootstrap_voters=voters,
            directory_id=directory_id,
        )

    output.summary(
        {
            "data_dir": str(data_dir),
            "directory_id": identity.directory_id,
            "formatted": not was_formatted,
        }
    )


def _read_formatted(
    data_dir: Path, cluster_id: ClusterId, node_id: NodeId, directory_id: DirectoryId | None
) -> DirectoryIdentity | None:
    # Read only, so that the check leaves no trace.
    files = PosixFileSystem(read_only=True)
    if META_NAME not in files.names(data_dir):
        return None
    identity = read_identity(data_dir, files)
    check_identity(identity, data_dir, cluster_id, node_id, directory_id)
    return identity


@storage.command("info")
@data_dir_option
@with_output
def info_command(*, data_dir: Path, output: Output) -> None:
    """Show the identity, the contents and the damage of a directory.

    The controller must be stopped. The command reads every batch of the log and changes nothing.

    \b
    Example:
      streammeta storage info --data-dir /var/lib/streammeta
    """
    with _inspect(data_dir) as inspection:
        inspection.run()
        _print_facts(output, inspection)


@storage.command("verify")
@data_dir_option
@with_output
def verify_command(*, data_dir: Path, output: Output) -> None:
    """Read every byte of the log and the snapshots. Exit 1 if anything is damaged.

    The controller must be stopped. The command changes nothing. A start repairs a damaged
    directory: the controller sets the damaged part aside, fetches the missing part from the leader,
    and does not vote until it is complete.

    \b
    Example:
      streammeta storage verify --data-dir /var/lib/streammeta --format json
    """
    with _inspect(data_dir) as inspection:
        # Arrow comes along with it; `--help` need not wait.
        from streammeta.controller.runtime.persistence.metadata_checkpoint import snapshot_check

        # Snapshots are decoded completely, because checksums alone do not prove that they can be
        # loaded.
        inspection.run(snapshot_check(inspection.identity.cluster_id))
        output.summary(
            {
                "batches": inspection.batch_count,
                "segments": len(inspection.segments),
                "snapshots": len(inspection.snapshots),
                "damages": len(inspection.findings),
            }
        )
        # Print the rows before the failure, so that people and programs see every damaged place.
        output.rows("damage", _DAMAGE_COLUMNS, map(_DAMAGE, inspection.findings))
        if inspection.findings:
            raise _list_damage(len(inspection.findings))


def _list_damage(count: int) -> CommandError:
    return CommandError(
        "DAMAGED",
        f"{count} places are damaged. Nothing was changed",
        "start the controller: it sets the damaged part aside and repairs itself from the leader",
    )


@contextmanager
def _inspect(data_dir: Path) -> Iterator[Inspection]:
    try:
        # The lock keeps a controller from starting meanwhile, which would change the files being
        # read.
        with open_stopped_directory(data_dir) as (files, identity):
            yield Inspection(data_dir, files, identity)
    except DirectoryLockedError as error:
        raise CommandError(
            "IN_USE",
            str(error),
            "stop the controller first, or query it while it runs: `streammeta quorum describe`",
        ) from error


def _print_facts(output: Output, facts: Inspection) -> None:
    """Print all facts about a directory."""
    identity, state = facts.identity, facts.state
    vote = state.vote if state else None
    lost = facts.record.lost if facts.record else None
    output.summary(
        {
            "cluster_id": identity.cluster_id,
            "node_id": identity.node_id,
            "directory_id": identity.directory_id,
            "epoch": state.epoch if state else None,
            "leader_id": state.leader_id if state else None,
            "voted_id": vote.node_id if vote else None,
            "voted_directory_id": vote.directory_id if vote else None,
            "log_start_offset": facts.start_offset,
            "log_end_offset": facts.end_offset,
            "flushed_end_offset": facts.flushed_end,
            "batches": facts.batch_count,
            "unflushed_torn_bytes": facts.torn_bytes,
            "reserve_bytes": facts.reserve_bytes,
            "repairs_up_to_offset": lost.end_offset if lost else None,
        }
    )
    voters = [
        (voter.key.node_id, voter.endpoint, voter.key.directory_id)
        for voter in identity.bootstrap_voters
    ]
    snapshots = [
        (s.name, s.snapshot_id.end_offset, s.snapshot_id.epoch, s.size) for s in facts.snapshots
    ]
    tables = (
        ("bootstrap_voters", ("node_id", "endpoint", "directory_id"), voters),
        ("epochs", ("epoch", "start_offset"), [(e.epoch, e.start_offset) for e in facts.epochs]),
        (
            "segments",
            ("file", "base_offset", "end_offset", "bytes"),
            [(s.name, s.base_offset, s.end_offset, s.size) for s in facts.segments],
        ),
        ("snapshots", ("file", "end_offset", "epoch", "bytes"), snapshots),
        ("damage", _DAMAGE_COLUMNS, [*map(_DAMAGE, facts.findings)]),
        ("put_aside", ("file",), [(name,) for name in facts.put_aside]),
    )

    for name, columns, rows in tables:
        if rows:
            # Programs get empty tables as well, so that each key always exists.
            output.note("")
        if rows or output.format == "json":
            output.rows(name, columns, rows)

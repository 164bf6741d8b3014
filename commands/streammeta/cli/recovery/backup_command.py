"""`streammeta backup`: list and verify backups, show their lag, write one as a file.

Controllers with `--backup-store` write the backups; see `controller.backup`.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streammeta.cli.framework.client import (
    ControllerClient,
    add_options,
    describe_cluster,
    leaders_view,
)
from streammeta.cli.framework.connecting import with_client
from streammeta.cli.framework.output import CommandError, Duration, Output, with_output
from streammeta.cli.recovery.snapshot_command import DOWNLOAD_TIMEOUT_S, download
from streammeta.controller.config import ConfigError
from streammeta.storage.cluster_files.backup_files import Folder, inventories
from streammeta.storage.durable_files import READABLE_MODE, PosixFileSystem, replace_file
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.base import ObjectStore

if TYPE_CHECKING:
    from streammeta.controller.backup.archive import Archive
    from streammeta.controller.backup.checkpoints import SingleFile

LAG_MAX_MS = 60_000
"""Default of the maximum lag of `status`, in milliseconds."""

_PIECE_BYTES = 1 << 20

VERIFY_METRICS = {
    "streammeta_backup_verify_damages": "Number of files that are damaged, missing or"
    " contradict others.",
    "streammeta_backup_verify_timestamp_seconds": "Time of the last read of the backup.",
}
"""Gauges that `verify --metrics-file` writes, by name. Their labels name the cluster."""

from_option = click.option(
    "--from",
    "address",
    required=True,
    metavar="URI",
    help="The backup store: s3://BUCKET?endpoint=URL&region=R&pathStyle=true or file:///DIR."
    " Set credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
)
"""Adds `--from`: argument `address: str`."""

cluster_options = add_options(
    click.option(
        "--cluster-id", help="Cluster of the backup. [default: the only one in the store]"
    ),
    click.option("--cluster-uuid", help="UUID of the cluster, if several have the same name."),
)
"""Adds `--cluster-id` and `--cluster-uuid`: arguments of these names, `str | None`."""


@click.group()
def backup() -> None:
    """Manage the backups that controllers write with --backup-store.

    \b
    Example:
      streammeta backup verify --from 's3://backups?region=eu-central-1'
    """


@backup.command("list")
@from_option
@with_output
def list_command(*, address: str, output: Output) -> None:
    """List the clusters with a backup in a store, and the offsets to which each can be restored.

    The command reads names only. `streammeta backup verify` reads the files.

    \b
    Example:
      streammeta backup list --from 's3://backups?region=eu-central-1'
    """
    from streammeta.controller.backup.chains import list_spans

    with open_store(address, "from") as store:
        found = inventories(store.list_objects("backup/"))
    clusters, restorable = [], []
    for folder, inventory in found.items():
        counts = (len(inventory.segments), len(inventory.checkpoints), len(inventory.unfinished))
        newest_ms = max(inventory.written_ms.values())
        clusters.append((folder.cluster_id, folder.cluster_uuid, *counts, newest_ms))
        restorable += [
            (folder.cluster_id, folder.cluster_uuid, *span) for span in list_spans(inventory)
        ]
    columns = ("cluster_id", "cluster_uuid")
    counted = ("segments", "checkpoints", "unfinished", "newest_ms")
    output.rows("backups", (*columns, *counted), clusters)
    output.note("")
    output.rows("restorable", (*columns, "from_offset", "to_offset"), restorable)


@backup.command("verify")
@from_option
@cluster_options
@click.option(
    "--all", "is_all", is_flag=True, help="Read every file, not only the files of the newest point."
)
@click.option(
    "--metrics-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the result to this file, for the textfile collector of node_exporter.",
)
@with_output
def verify_command(
    *,
    address: str,
    cluster_id: str | None,
    cluster_uuid: str | None,
    is_all: bool,
    metrics_file: Path | None,
    output: Output,
) -> None:
    """Restore the newest point in memory and check every byte. Exit 1 if anything is wrong.

    The command compares digests, the rolling hash of the log from file to file, and the hash of the
    metadata at each checkpoint. It changes nothing.

    \b
    Example:
      streammeta backup verify --from 's3://backups?region=eu-central-1' --cluster-id demo
    """
    from streammeta.controller.backup.verification import verify

    with open_backup(address, cluster_id, cluster_uuid) as archive:
        inventory = archive.inventory()
        verified = verify(inventory, archive, is_all=is_all)
    replayed = verified.replayed
    # Written before the failure is raised, so that an alert sees it.
    if metrics_file is not None:
        # A backup without any restorable point counts as one damage.
        is_lost = replayed is None and not verified.damages
        _write_metrics(metrics_file, archive.folder, len(verified.damages) + is_lost)
    output.summary(
        {
            "cluster_id": archive.folder.cluster_id,
            "cluster_uuid": archive.folder.cluster_uuid,
            "files": len(inventory.segments) + len(inventory.checkpoints),
            "unfinished": len(inventory.unfinished),
            "restorable_to": replayed and replayed.position.end_offset,
            "committed_by_ms": replayed and replayed.last_ms,
            "state_hash": replayed and replayed.cluster_metadata.state_hash().hex(),
            "log_hash": replayed and replayed.position.log_hash.hex(),
            "damages": len(verified.damages),
        }
    )
    damages = [(str(damage.name), damage.offset, damage.problem) for damage in verified.damages]
    output.rows("damage", ("file", "good_to_offset", "what"), damages)
    # A backup without a restorable point has failed, even if no file is damaged.
    if damages or replayed is None:
        raise CommandError(
            "DAMAGED",
            f"files that are damaged, missing or contradict others: {len(damages)}; nothing was "
            "changed",
            "points up to `good_to_offset` can be restored without the file. Keep the store"
            " unchanged, and let a controller start a new backup with another --backup-store",
        )


def _write_metrics(file: Path, folder: Folder, damages: int) -> None:
    labels = f'cluster_id="{folder.cluster_id}",cluster_uuid="{folder.cluster_uuid}"'
    values = (damages, time.time())
    text = "".join(
        f"# HELP {name} {meaning}\n# TYPE {name} gauge\n{name}{{{labels}}} {value}\n"
        for (name, meaning), value in zip(VERIFY_METRICS.items(), values, strict=True)
    )
    # Replaced atomically, and readable by the collector's user.
    replace_file(PosixFileSystem(mode=READABLE_MODE), file, [text.encode()])


@backup.command("status")
@from_option
@click.option(
    "--lag-max",
    "lag_max_ms",
    type=Duration(),
    default=LAG_MAX_MS,
    show_default=False,
    metavar="DURATION",
    help="Fail if committed entries have been missing for longer. [default: 1m]",
)
@with_client()
@with_output
def status_command(
    *, client: ControllerClient, address: str, lag_max_ms: int, output: Output
) -> None:
    """Show how far the backup lags behind the cluster. Exit 1 if the lag is too large.

    `lag_entries` is the number of committed entries that the backup does not contain. `lag_ms` is
    the age of its newest file if such entries exist. Both measure the loss if all controllers were
    lost.

    \b
    Example:
      streammeta backup status --from 's3://backups?region=eu-central-1' --connect 127.0.0.1:9091
    """
    from streammeta.controller.backup.verification import newest_file

    described = describe_cluster(client)
    committed = leaders_view(client).high_watermark
    with open_backup(address, described.cluster_id, described.cluster_uuid) as archive:
        newest = newest_file(archive.inventory(), archive)
    end_offset, copied_ms = (0, 0) if newest is None else (newest.end_offset, newest.last_ms)
    # The backup was read later, and may have passed the high watermark in the meantime.
    lag = max(0, committed - end_offset)
    # An old backup without missing entries is complete: nothing was committed since.
    lag_ms = max(0, time.time_ns() // 1_000_000 - copied_ms) if lag else 0
    output.summary(
        {
            "cluster_id": described.cluster_id,
            "committed_end": committed,
            "backup_end": end_offset,
            "lag_entries": lag,
            "lag_ms": lag_ms,
            "copied_by_ms": copied_ms,
        }
    )
    if lag_ms > lag_max_ms:
        raise CommandError(
            "LATE",
            f"the backup misses {lag} committed entries, the oldest for up to {lag_ms} ms",
            "see `backup_failed` in the leader's log. No data is lost while the controllers live",
        )


@backup.command("now")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@with_client(DOWNLOAD_TIMEOUT_S)
@with_output
def now_command(*, client: ControllerClient, file: Path, output: Output) -> None:
    """Write a checked copy of the metadata, with all changes acknowledged before, to a new file.

    FILE is a checkpoint for `streammeta snapshot` and `streammeta restore`. It appears once it is
    complete. The command never overwrites a file.

    \b
    Example:
      streammeta backup now --connect 127.0.0.1:9091 demo.checkpoint
    """
    from streammeta.controller.runtime.persistence.metadata_checkpoint import (
        log_hash_of,
        state_hash_of,
    )
    from streammeta.controller.snapshot.checkpoint_file import CheckpointError, CheckpointReader

    # Checked before the download, which may take long.
    if file.exists():
        raise CommandError(
            "EXISTS", f"{file} already exists. The command left it unchanged", "choose another name"
        )
    # Next to the file and not in /tmp, which is often small.
    with tempfile.TemporaryFile(dir=file.absolute().parent) as copy:
        download(client, copy)
        try:
            reader = CheckpointReader(copy, "the copy of the metadata")
            # Verified before the file appears, since its name promises a complete copy.
            reader.verify()
            hashes = {"state_hash": state_hash_of(reader), "log_hash": log_hash_of(reader)}
        except CheckpointError as error:
            raise CommandError("CHECKPOINT", str(error), "repeat the command") from error
        copy.seek(0)
        digest = hashlib.file_digest(copy, "sha256")
        copy.seek(0)
        replace_file(PosixFileSystem(), file, iter(lambda: copy.read(_PIECE_BYTES), b""))
    output.summary(
        {
            "file": str(file),
            "cluster_id": reader.cluster_id,
            "end_offset": reader.id.end_offset,
            "epoch": reader.id.epoch,
            "bytes": file.stat().st_size,
            "sha256": digest.hexdigest(),
            **{name: value.hex() for name, value in hashes.items()},
        }
    )


@contextmanager
def open_backup(
    address: str, cluster_id: str | None, cluster_uuid: str | None
) -> Iterator[Archive | SingleFile]:
    """Open one backup of a store, or a checkpoint file.

    Raises:
        ConfigError: the address does not parse.
        StorageError: the store can't be used.
        CommandError: the store contains no such backup, or several, or a damaged one.
    """
    from streammeta.controller.backup.archive import Archive
    from streammeta.controller.backup.checkpoints import SingleFile
    from streammeta.controller.backup.errors import BackupError

    try:
        # Without a scheme it is a file that `backup now` wrote.
        if "://" not in address:
            yield SingleFile(Path(address))
            return
        with open_store(address, "from") as store:
            prefix = f"backup/{cluster_id}/" if cluster_id else "backup/"
            folder = _choose(inventories(store.list_objects(prefix)), cluster_uuid)
            yield Archive(store, folder)
    except BackupError as error:
        hint = "`streammeta backup verify` lists all damage"
        raise CommandError("BACKUP", str(error), hint) from error


@contextmanager
def open_store(address: str, option: str = "store") -> Iterator[ObjectStore]:
    """Open the bucket that an option names. Raises ConfigError or StorageError."""
    try:
        store = open_object_store(address)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
    with closing(store):
        # A wrong address fails here, and not in the middle of the work.
        store.check()
        yield store


def _choose(found: Iterable[Folder], cluster_uuid: str | None) -> Folder:
    fit = [folder for folder in found if cluster_uuid in (None, folder.cluster_uuid)]
    if not fit:
        raise CommandError(
            "NO_BACKUP",
            "the store contains no such backup",
            "`streammeta backup list` shows the backups in the store. Controllers write them"
            " with --backup-store",
        )

    # Clusters of one name have different UUIDs. Never guess between them.
    if len(fit) > 1:
        names = ", ".join(f"{folder.cluster_id} {folder.cluster_uuid}" for folder in fit)
        raise CommandError(
            "AMBIGUOUS",
            f"the store contains several backups: {names}",
            "select one with --cluster-id and --cluster-uuid",
        )

    return fit[0]

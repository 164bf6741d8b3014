"""`streammeta snapshot`: inspect a checkpoint file, export the metadata as Parquet files.

An export goes to a directory or to a prefix in a bucket.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import click
import grpc

from streammeta.cli.framework.client import CallError, ControllerClient
from streammeta.cli.framework.connecting import Endpoints, connecting, timeout_option
from streammeta.cli.framework.output import EXIT_USAGE, CommandError, Output, with_output
from streammeta.controller.config import ConfigError
from streammeta.controller.snapshot import parquet_export
from streammeta.controller.snapshot.checkpoint_file import CheckpointError, CheckpointReader
from streammeta.storage.durable_files import PosixFileSystem, replace_file
from streammeta.storage.object_store.opening import open_with_path
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.tls.files import CallerFiles
from streammeta.v1 import metadata_pb2
from streammeta.v1.metadata_pb2_grpc import MetadataServiceStub

_UNFINISHED = ".tmp"


def open_target(address: str) -> parquet_export.ExportTarget:
    """Open a directory, or `s3://bucket/prefix?options`. Create the directory if needed.

    Raises:
        ConfigError: the address does not parse.
        StorageError: the bucket can't be used.
        OSError: the directory can't be used.
    """
    if "://" not in address:
        path = Path(address)
        path.mkdir(parents=True, exist_ok=True)
        return DirectoryTarget(path)
    if urlsplit(address).scheme != "s3":
        raise ConfigError(f"--to: {address!r}, expected a directory or s3://bucket/prefix?options")
    try:
        store, prefix = open_with_path(address)
    except ValueError as error:
        raise ConfigError(f"--to: {error}") from error
    store.check()
    return StoreTarget(store, prefix.strip("/"))


class DirectoryTarget:
    """Files in one directory, each written to a temporary name, flushed and renamed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> Iterator[str]:
        """See `ExportTarget.names`. Files that a crash left incomplete are ignored."""
        return (entry.name for entry in self._path.iterdir() if entry.suffix != _UNFINISHED)

    def read(self, name: str) -> bytes:
        """See `ExportTarget.read`."""
        return (self._path / name).read_bytes()

    def write(self, name: str, data: memoryview) -> None:
        """See `ExportTarget.write`."""
        replace_file(PosixFileSystem(), self._path / name, [bytes(data)])

    def delete(self, name: str) -> None:
        """See `ExportTarget.delete`."""
        (self._path / name).unlink(missing_ok=True)


class StoreTarget:
    """Objects of a store whose keys begin with `prefix`, or all objects if it is empty."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        # With the slash, keys of prefixes that only begin alike stay out.
        self._prefix = f"{prefix}/" if prefix else ""

    def names(self) -> Iterator[str]:
        """See `ExportTarget.names`."""
        for found in self._store.list_objects(self._prefix):
            yield found.key.removeprefix(self._prefix)

    def read(self, name: str) -> bytes:
        """See `ExportTarget.read`."""
        return self._store.get_range(self._prefix + name)

    def write(self, name: str, data: memoryview) -> None:
        """See `ExportTarget.write`."""
        self._store.put(self._prefix + name, data)

    def delete(self, name: str) -> None:
        """See `ExportTarget.delete`. A failed deletion raises its cause."""
        failed = self._store.delete_many([self._prefix + name]).failed
        if failed:
            # The store reports failed deletions by key and does not raise them.
            raise OSError("; ".join(f"{key}: {why}" for key, why in failed.items()))


DOWNLOAD_TIMEOUT_S = 600.0
"""Timeout in seconds. The whole metadata is sent, which takes long if it is large."""

_file_type = click.Path(path_type=Path, dir_okay=False)


@click.group()
def snapshot() -> None:
    """Inspect checkpoint files and copies of the metadata, and export them.

    `streammeta quorum snapshot` makes controllers write checkpoints.

    \b
    Example:
      streammeta snapshot export --connect 127.0.0.1:9091 --to parquet ./map
    """


@snapshot.command()
@click.argument("file", type=_file_type)
@with_output
def info(file: Path, output: Output) -> None:
    """Show the contents of a checkpoint file, and check every byte of it.

    \b
    Example:
      streammeta snapshot info 00000000000000001234-0000000005.checkpoint
    """
    with _checkpoint_file(file) as checkpoint:
        output.summary(
            {
                "cluster_id": checkpoint.cluster_id,
                "end_offset": checkpoint.id.end_offset,
                "epoch": checkpoint.id.epoch,
                "bytes": file.stat().st_size,
            }
        )
        output.note("")
        sections = [(entry.name, entry.rows, entry.length) for entry in checkpoint.entries.values()]
        output.rows("sections", ("section", "rows", "bytes"), sections)


@snapshot.command()
@click.argument("file", type=_file_type, required=False)
@connecting(Endpoints.OPTIONAL)
@timeout_option(DOWNLOAD_TIMEOUT_S)
@click.option(
    "--to",
    "target",
    type=(click.Choice(["parquet"]), str),
    required=True,
    metavar="parquet TARGET",
    help="A directory, or s3://BUCKET/PREFIX?endpoint=URL&region=R&pathStyle=true. Set"
    " credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
)
@click.option("--overwrite", is_flag=True, help="Replace the export at the target.")
@with_output
def export(
    *,
    file: Path | None,
    connect: tuple[str, ...] | None,
    tls: CallerFiles | None,
    timeout_s: float,
    target: tuple[str, str],
    overwrite: bool,
    output: Output,
) -> None:
    """Write a copy of the metadata as Parquet files, one per section, and a manifest.

    The copy is FILE. With --connect it is taken now and contains all changes acknowledged before.
    docs/format.md describes sections and columns. The command rejects a target that is not empty
    unless --overwrite is given. It never touches files that belong to no export.

    \b
    Examples:
      streammeta snapshot export --connect 127.0.0.1:9091 --to parquet ./map
      streammeta snapshot export 00000000000000001234-0000000005.checkpoint \\
          --to parquet 's3://lake/streammeta/2026-01-31?region=eu-central-1'
    """
    with _copy_of_map(file, connect, tls, timeout_s) as checkpoint:
        _, address = target
        written = parquet_export.export_parquet(
            checkpoint, open_target(address), overwrite=overwrite, progress=_say_progress
        )
        output.summary(
            {
                "cluster_id": checkpoint.cluster_id,
                "end_offset": checkpoint.id.end_offset,
                "epoch": checkpoint.id.epoch,
                # Without the query, which may contain access keys.
                "target": address.partition("?")[0],
                "manifest": parquet_export.MANIFEST,
            }
        )

    output.note("")
    rows = [(file.section, file.file, file.rows, file.bytes) for file in written]
    output.rows("files", ("section", "file", "rows", "bytes"), rows)


@contextlib.contextmanager
def _copy_of_map(
    file: Path | None, connect: tuple[str, ...] | None, tls: CallerFiles | None, timeout_s: float
) -> Iterator[CheckpointReader]:
    if file is not None:
        with _checkpoint_file(file) as checkpoint:
            yield checkpoint
        return

    if not connect:
        raise CommandError(
            "USAGE",
            "neither a checkpoint file nor --connect was given",
            "see `streammeta snapshot export --help`",
            exit_code=EXIT_USAGE,
        )

    # A copy may be larger than memory, so it goes to a file.
    with tempfile.TemporaryFile() as copy, ControllerClient(connect, timeout_s, tls) as client:
        download(client, copy)
        with _explain(), CheckpointReader(copy, "the copy of the metadata") as checkpoint:
            # Verified as a whole before anything is written to the target.
            checkpoint.verify()
            yield checkpoint


@contextlib.contextmanager
def _checkpoint_file(file: Path) -> Iterator[CheckpointReader]:
    with _explain(), CheckpointReader.open(file) as checkpoint:
        checkpoint.verify()
        yield checkpoint


@contextlib.contextmanager
def _explain() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        hint = "choose another one, or export with --connect"
        raise CommandError("CHECKPOINT", str(error), hint) from error


def download(client: ControllerClient, file: BinaryIO) -> None:
    """Write a copy of the leader's metadata to `file`, restarting whenever the leader changes.

    Raises:
        CallError: no leader sent a complete copy.
    """

    def receive(channel: grpc.Channel, seconds_left: float) -> int:
        # A new leader starts over, because parts of two controllers' copies do not fit together.
        file.seek(0)
        file.truncate()
        total_bytes = 0
        request = metadata_pb2.GetSnapshotRequest()
        for chunk in MetadataServiceStub(channel).GetSnapshot(request, timeout=seconds_left):
            file.write(chunk.data)
            total_bytes = chunk.total_bytes
            _say(f"downloaded {file.tell()} of {total_bytes} bytes", ends="\r")
        return total_bytes

    total_bytes = client.ask(receive)
    _say("")
    # A stream that ends early without an error must not pass as a copy.
    if file.tell() != total_bytes:
        raise CallError(
            "INCOMPLETE",
            f"the copy of the metadata has {total_bytes} bytes, but {file.tell()} arrived",
            "repeat the command. Repeating it is safe",
        )


def _say_progress(written: parquet_export.ExportedFile) -> None:
    _say(f"wrote {written.file}: {written.rows} rows, {written.bytes} bytes")


def _say(line: str, ends: str = "\n") -> None:
    """Show progress on a terminal only."""
    if sys.stderr.isatty():
        click.echo(line + ends, err=True, nl=False)

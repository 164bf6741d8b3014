"""`streammeta snapshot`: look into a copy of the map, and export it for tools that query tables."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import click
import grpc

from streammeta.cli.client import CallError, ControllerClient, parse_endpoints, timeout_option
from streammeta.cli.export_target import open_target
from streammeta.cli.output import (
    EXIT_USAGE,
    CommandError,
    OutputFormat,
    command_output,
    format_option,
)
from streammeta.controller.snapshot.checkpoint_file import CheckpointError, CheckpointReader
from streammeta.controller.snapshot.parquet_export import MANIFEST, ExportedFile, export_parquet
from streammeta.v1 import metadata_pb2
from streammeta.v1.metadata_pb2_grpc import MetadataServiceStub

DOWNLOAD_TIMEOUT_S = 600.0
"""The whole map is sent; a large one takes long."""

_file_type = click.Path(path_type=Path, dir_okay=False)


@click.group()
def snapshot() -> None:
    """Look into checkpoint files and copies of the map, and export them.

    `streammeta quorum snapshot` makes controllers write checkpoints.

    \b
    Example:
      streammeta snapshot export --connect 127.0.0.1:9091 --to parquet ./map
    """


@snapshot.command()
@click.argument("file", type=_file_type)
@format_option
def info(file: Path, output_format: OutputFormat) -> None:
    """Say what a checkpoint file holds, and check every byte of it.

    \b
    Example:
      streammeta snapshot info 00000000000000001234-0000000005.checkpoint
    """
    with command_output(output_format) as output, _checkpoint_file(file) as checkpoint:
        output.summary(
            {
                "cluster_id": checkpoint.cluster_id,
                "end_offset": checkpoint.id.end_offset,
                "epoch": checkpoint.id.epoch,
                "bytes": file.stat().st_size,
            }
        )
        output.note("")
        sections = [(each.name, each.rows, each.length) for each in checkpoint.entries.values()]
        output.rows("sections", ("section", "rows", "bytes"), sections)


@snapshot.command()
@click.argument("file", type=_file_type, required=False)
@click.option(
    "--connect",
    envvar="STREAMMETA_CONNECT",
    show_envvar=True,
    metavar="HOST:PORT[,HOST:PORT...]",
    callback=lambda context, parameter, value: (
        parse_endpoints(context, parameter, value) if value else ()
    ),
    help="Export what the leader's map holds now, instead of a file.",
)
@timeout_option(DOWNLOAD_TIMEOUT_S)
@click.option(
    "--to",
    "target",
    type=(click.Choice(["parquet"]), str),
    required=True,
    metavar="parquet TARGET",
    help="A directory, or s3://BUCKET/PREFIX?endpoint=URL&region=R&pathStyle=true; give credentials"
    " in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
)
@click.option("--overwrite", is_flag=True, help="Replace the export that is at the target.")
@format_option
def export(
    *,
    file: Path | None,
    connect: tuple[str, ...],
    timeout_s: float,
    target: tuple[str, str],
    overwrite: bool,
    output_format: OutputFormat,
) -> None:
    """Write a copy of the map as Parquet files, one a section, and a manifest.

    The copy is FILE, or with --connect one taken now, which holds everything acknowledged before.
    Sections and columns are described in docs/format.md. A target that is not empty is refused
    unless --overwrite is given; files that are of no export are never touched.

    \b
    Examples:
      streammeta snapshot export --connect 127.0.0.1:9091 --to parquet ./map
      streammeta snapshot export 00000000000000001234-0000000005.checkpoint \\
          --to parquet 's3://lake/streammeta/2026-01-31?region=eu-central-1'
    """
    with command_output(output_format) as output:
        with _copy_of_map(file, connect, timeout_s) as checkpoint:
            _, address = target
            written = export_parquet(
                checkpoint, open_target(address), overwrite=overwrite, progress=_say_progress
            )
            output.summary(
                {
                    "cluster_id": checkpoint.cluster_id,
                    "end_offset": checkpoint.id.end_offset,
                    "epoch": checkpoint.id.epoch,
                    "target": address.partition("?")[0],
                    "manifest": MANIFEST,
                }
            )
        output.note("")
        rows = [(one.section, one.file, one.rows, one.bytes) for one in written]
        output.rows("files", ("section", "file", "rows", "bytes"), rows)


@contextlib.contextmanager
def _copy_of_map(
    file: Path | None, connect: tuple[str, ...], timeout_s: float
) -> Iterator[CheckpointReader]:
    if file is not None:
        with _checkpoint_file(file) as checkpoint:
            yield checkpoint
        return
    if not connect:
        raise CommandError(
            "USAGE",
            "neither a checkpoint file nor --connect is given",
            "see `streammeta snapshot export --help`",
            exit_code=EXIT_USAGE,
        )
    with tempfile.TemporaryFile() as copy, ControllerClient(connect, timeout_s) as client:
        download(client, copy)
        with _explained(), CheckpointReader(copy, "the copy of the map") as checkpoint:
            checkpoint.verify()
            yield checkpoint


@contextlib.contextmanager
def _checkpoint_file(file: Path) -> Iterator[CheckpointReader]:
    with _explained(), CheckpointReader.open(file) as checkpoint:
        checkpoint.verify()
        yield checkpoint


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        hint = "take another one, or export with --connect"
        raise CommandError("CHECKPOINT", str(error), hint) from error


def download(client: ControllerClient, file: BinaryIO) -> None:
    """Write a copy of the leader's map to `file`, which is emptied whenever the leader changes.

    Raises:
        CallError: no leader sent a whole copy.
    """

    def take(channel: grpc.Channel) -> Callable[..., metadata_pb2.GetSnapshotResponse]:
        def receive(
            request: metadata_pb2.GetSnapshotRequest, timeout: float
        ) -> metadata_pb2.GetSnapshotResponse:
            file.seek(0)
            file.truncate()
            last = metadata_pb2.GetSnapshotResponse()
            for chunk in MetadataServiceStub(channel).GetSnapshot(request, timeout=timeout):
                file.write(chunk.data)
                last = chunk
                _say(f"downloaded {file.tell()} of {chunk.total_bytes} bytes", ends="\r")
            return last

        return receive

    # A stream is taken as one call, so that a lost leader is looked for as with every other one.
    last = client.call(cast(Any, take), metadata_pb2.GetSnapshotRequest())
    _say("")
    if file.tell() != last.total_bytes:
        raise CallError(
            "INCOMPLETE",
            f"the copy of the map has {last.total_bytes} bytes, {file.tell()} came",
            "repeat the command: doing so is safe",
        )


def _say_progress(written: ExportedFile) -> None:
    _say(f"wrote {written.file}: {written.rows} rows, {written.bytes} bytes")


def _say(line: str, ends: str = "\n") -> None:
    """Progress is for people at a terminal alone."""
    if sys.stderr.isatty():
        click.echo(line + ends, err=True, nl=False)

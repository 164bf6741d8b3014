"""Metadata that the shell opens: a live cluster, a checkpoint file, an export, a backup.

Every copy first becomes a checkpoint file, a temporary one for clusters, exports and backups. So
there is only one way to check and read it. Nothing else is written.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import grpc

from streammeta.cli.framework.client import CallError, ControllerClient, leaders_view
from streammeta.cli.framework.output import CommandError
from streammeta.cli.recovery import backup_command, restore_command, snapshot_command
from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.rpc.failures import read_failure
from streammeta.shell.state import Change, MetadataCopy
from streammeta.shell.tree import Directory
from streammeta.storage.parsing import parse_json
from streammeta.v1 import metadata_pb2, metadata_pb2_grpc

LIVE = "live"
"""Name of the metadata of the connected cluster."""

_HINT = "name a checkpoint file, the folder of a Parquet export, or BACKUP_URI@OFFSET"


class MetadataSources:
    """Metadata by name, for one shell. `close` deletes the temporary files.

    `client` calls the cluster, None without one. `address` is the metadata that the shell browses,
    None for the cluster.
    """

    def __init__(self, client: ControllerClient | None, address: str | None) -> None:
        self._client = client
        self.address = address
        self._files = ExitStack()
        self._opened: dict[str, MetadataCopy] = {}

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def copy(self) -> MetadataCopy:
        """See `MetadataSource.copy`."""
        return self.other(LIVE if self.address is None else self.address)

    def other(self, address: str) -> MetadataCopy:
        """See `MetadataSource.other`. Raises `CommandError` if it can't be opened."""
        if address == LIVE:
            # Live metadata changes, so each request gets a new copy. Files and backups do not.
            return self._live()
        if address not in self._opened:
            self._opened[address] = self._open(address)
        return self._opened[address]

    def tree(self) -> Directory:
        """Return the tree of the metadata that the shell browses, if it is not the cluster's."""
        # Loaded for files only, because Arrow loads slowly.
        from streammeta.controller.errors import DamagedMetadataError
        from streammeta.shell.copy_tree import copy_tree

        copy = self.copy()
        try:
            return copy_tree(copy)
        except DamagedMetadataError as error:
            raise CommandError("CHECKPOINT", f"{copy.name}: {error}", _HINT) from error

    def changes(self, from_offset: int | None) -> Iterator[Change]:
        """See `MetadataSource.changes`. Continues at another controller when one fails."""
        client = self._required_client("changes are")
        # Without an offset, begin at the leader's high watermark: only later changes are news.
        if from_offset is None:
            from_offset = leaders_view(client).high_watermark

        next_offset = from_offset
        while True:
            # A watch that fails later is opened again at the next offset, so no change is lost or
            # repeated.
            responses, first = client.ask(_watch(next_offset))
            try:
                for response in chain([first], responses):
                    if response.snapshot_required:
                        raise _gone_error(next_offset)
                    if response.records:
                        yield Change(response.offset, response.records)
                        next_offset = response.offset + 1
            except grpc.RpcError as error:
                # Only an unreachable controller is worth a retry. Any other failure would repeat.
                if read_failure(error).code is not grpc.StatusCode.UNAVAILABLE:
                    raise
            finally:
                # A generator that is closed early would leave the stream open on the controller.
                responses.cancel()

    def now_ms(self) -> int:
        """See `MetadataSource.now_ms`."""
        return time.time_ns() // 1_000_000

    def _required_client(self, what: str) -> ControllerClient:
        if self._client is None:
            raise CommandError(
                "NO_CLUSTER", f"{what} of a cluster, but no cluster was given", "add --connect"
            )
        return self._client

    def _live(self) -> MetadataCopy:
        file = self._temporary()
        snapshot_command.download(self._required_client("live metadata is"), cast(BinaryIO, file))
        return _read(file, LIVE)

    def _open(self, address: str) -> MetadataCopy:
        place, at, offset = address.rpartition("@")
        # A file whose name contains "@" and a number goes before a backup.
        if at and offset.isascii() and offset.isdigit() and not Path(address).exists():
            return self._backup(address, place, int(offset))
        path = Path(address)
        if path.is_dir():
            return self._export(path)
        try:
            file = self._files.enter_context(path.open("rb"))
        except OSError as error:
            raise CommandError("NO_MAP", f"{address}: {error.strerror}", _HINT) from error
        return _read(file, address)

    def _temporary(self) -> IO[bytes]:
        return self._files.enter_context(tempfile.TemporaryFile())

    def _export(self, path: Path) -> MetadataCopy:
        # Loaded for exports only, because Arrow loads slowly.
        import pyarrow as pa
        import pyarrow.parquet as pq

        from streammeta.controller.snapshot.checkpoint_file import write_checkpoint
        from streammeta.controller.snapshot.parquet_export import MANIFEST

        try:
            manifest = parse_json((path / MANIFEST).read_text())
            # The export writes its manifest first as incomplete. An interrupted one has missing
            # rows.
            if not manifest["complete"]:
                raise CommandError(
                    "EXPORT", f"{path}: the export was interrupted", "repeat it with --overwrite"
                )
            snapshot_id = SnapshotId(EndOffset(manifest["end_offset"]), Epoch(manifest["epoch"]))
            tables = {
                file["section"]: pq.read_table(path / file["file"]) for file in manifest["files"]
            }
            rows = {file["section"]: file["rows"] for file in manifest["files"]}
            # Files of two exports in one folder would otherwise be read as one state.
            if any(table.num_rows != rows[name] for name, table in tables.items()):
                raise ValueError(f"the numbers of rows of some files differ from {MANIFEST}")
            file = self._temporary()
            write_checkpoint(file, snapshot_id, manifest["cluster_id"], tables)
        # The manifest is a file of the user, so anything may be wrong with it.
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            raise CommandError(
                "EXPORT", f"{path} is not a complete export: {error!r}", _HINT
            ) from error
        return _read(file, str(path))

    def _backup(self, address: str, place: str, offset: int) -> MetadataCopy:
        from streammeta.controller.snapshot.checkpoint_file import write_checkpoint

        # No cluster id and no namespace: the backup names its own.
        # The address alone has to select one backup of the store.
        with backup_command.open_backup(place, None, None) as archive:
            found = restore_command.replay_backup(archive, archive.inventory(), offset)
            cluster_id = archive.folder.cluster_id
        snapshot_id = SnapshotId(
            EndOffset(found.cluster_metadata.applied_end_offset), Epoch(found.epoch)
        )
        file = self._temporary()
        write_checkpoint(file, snapshot_id, cluster_id, found.cluster_metadata.freeze().sections())
        return _read(file, address)


def _read(file: IO[bytes], name: str) -> MetadataCopy:
    """Check every byte of a checkpoint and return it as a copy."""
    from streammeta.controller.snapshot.checkpoint_file import CheckpointError, CheckpointReader

    try:
        reader = CheckpointReader(cast(BinaryIO, file), Path(name).name)
        # Verify before the first row: a damaged copy must not be shown as the truth.
        reader.verify()
    except CheckpointError as error:
        raise CommandError("CHECKPOINT", str(error), _HINT) from error
    return MetadataCopy(name, reader.cluster_id, reader.id.end_offset, reader.sections())


def _watch(
    from_offset: int,
) -> Callable[[grpc.Channel, float], tuple[Any, metadata_pb2.WatchResponse]]:
    """Return a function that opens a watch and waits for its first answer, a proof of service."""

    def begin(
        channel: grpc.Channel, _seconds_left: float
    ) -> tuple[Any, metadata_pb2.WatchResponse]:
        request = metadata_pb2.WatchRequest(from_offset=from_offset)
        responses = metadata_pb2_grpc.MetadataServiceStub(channel).Watch(request)
        return responses, next(responses, metadata_pb2.WatchResponse())

    return begin


def _gone_error(offset: int) -> CallError:
    return CallError(
        "GONE",
        f"changes from offset {offset} on are no longer available",
        "omit the offset, or compare the metadata with `diff`",
    )

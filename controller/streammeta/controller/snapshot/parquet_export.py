"""Export of a checkpoint's sections as Parquet files to a directory or bucket.

There is one file per section, `<section>.parquet`, with the section's columns and types unchanged,
and `manifest.json`, which contains the cluster, the end offset and the rows of each file. The
manifest is written first, listing the files to come, and again once they are complete, which it
states. The files of an export are therefore known even if it was interrupted. Files that are not in
the manifest at the target are never deleted or overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from streammeta.controller.errors import ApiError
from streammeta.controller.snapshot.checkpoint_file import CheckpointReader
from streammeta.storage.parsing import parse_json

MANIFEST = "manifest.json"
MANIFEST_VERSION = 2
SUFFIX = ".parquet"
ROW_GROUP_ROWS = 1 << 20


class ExportError(ApiError):
    """The target cannot accept the export. Nothing there was changed."""


class ExportTarget(Protocol):
    """A directory or bucket of files by name. Each appears completely or not at all."""

    def names(self) -> Iterator[str]:
        """Return all existing names, including foreign ones."""
        ...

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        ...

    def write(self, name: str, data: memoryview) -> None:
        """Write a file, replacing it."""
        ...

    def delete(self, name: str) -> None:
        """Delete a file, which may be missing."""
        ...


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A section's file. `bytes` is its size, 0 until it is written."""

    section: str
    file: str
    rows: int
    bytes: int = 0


Progress = Callable[[ExportedFile], None]


def export_parquet(
    checkpoint: CheckpointReader,
    target: ExportTarget,
    *,
    overwrite: bool,
    progress: Progress = lambda _: None,
) -> list[ExportedFile]:
    """Write every section of a checkpoint. Only one is in memory at a time.

    Raises:
        ExportError: the target is not empty, or with `overwrite` a file to replace is foreign.
        CheckpointError: the checkpoint is damaged.
    """
    planned = [
        ExportedFile(entry.name, entry.name + SUFFIX, entry.rows)
        for entry in checkpoint.entries.values()
    ]
    names = {file.file for file in planned}
    replaced = _check_target(target, overwrite, names)
    left = [ExportedFile("", name, 0) for name in sorted(replaced - names)]

    # First the plan: a second export after a crash may then replace the files of this one.
    target.write(MANIFEST, _manifest(checkpoint, [*planned, *left], is_complete=False))
    written = []
    for file in planned:
        data = _parquet_bytes(checkpoint.table(file.section))
        target.write(file.file, data)
        written.append(replace(file, bytes=len(data)))
        progress(written[-1])
    # After the new files, so that an interruption never leaves less than one export.
    for file in left:
        target.delete(file.file)

    target.write(MANIFEST, _manifest(checkpoint, written, is_complete=True))
    return written


def _check_target(target: ExportTarget, overwrite: bool, planned: set[str]) -> set[str]:
    """Return the files of the replaced export."""
    names = set(target.names())
    if names and not overwrite:
        raise ExportError(
            f"the target contains {len(names)} files, such as {min(names)!r}: choose an empty one, "
            "or use --overwrite to replace an export"
        )
    # Without a manifest no file there is known to be of an export.
    ours = _files_of(target.read(MANIFEST)) if MANIFEST in names else set()
    # Only files listed by an earlier export may be overwritten.
    foreign = (planned & names) - ours
    if foreign:
        raise ExportError(
            f"the target contains {min(foreign)!r}, which may not belong to an export, because no "
            f"{MANIFEST} there lists it: choose another target"
        )
    return ours & names


def _files_of(manifest: bytes) -> set[str]:
    try:
        manifest_fields = parse_json(manifest)
        version = manifest_fields["version"]
        files = {str(file["file"]) for file in manifest_fields["files"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ExportError(
            f"{MANIFEST} at the target does not belong to an export ({error!r}): "
            "choose another target"
        ) from error
    # Another version may list its files in another way.
    if version != MANIFEST_VERSION:
        raise ExportError(
            f"{MANIFEST} at the target has version {version}, this program writes "
            f"{MANIFEST_VERSION}: choose another target"
        )
    return files


def _manifest(
    checkpoint: CheckpointReader, files: Sequence[ExportedFile], *, is_complete: bool
) -> memoryview:
    content = {
        "version": MANIFEST_VERSION,
        "complete": is_complete,
        "cluster_id": checkpoint.cluster_id,
        "end_offset": checkpoint.id.end_offset,
        "epoch": checkpoint.id.epoch,
        "files": [asdict(file) for file in files],
    }
    return memoryview((json.dumps(content, indent=2) + "\n").encode())


def _parquet_bytes(table: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=ROW_GROUP_ROWS, compression="zstd")
    return memoryview(sink.getvalue())

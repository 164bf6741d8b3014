"""A checkpoint's sections as Parquet files in a directory or bucket, for tools that query tables.

One file a section, named `<section>.parquet`, with the section's columns and types unchanged; then
`manifest.json`, which names the cluster, the end offset and the rows of each file. The
manifest is written first, naming the files to come, and again when they are complete, which it
says: so what an export has left is known even if it was interrupted. Whatever the manifest at the
target does not name is never deleted nor overwritten.
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
    """The target can't take the export; nothing there was changed."""


class ExportTarget(Protocol):
    """A directory or bucket of files by name; each appears whole or not at all."""

    def names(self) -> Iterator[str]:
        """Every name that is there, foreign ones too."""
        ...

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        ...

    def write(self, name: str, data: memoryview) -> None:
        """Write a file, replacing it."""
        ...

    def delete(self, name: str) -> None:
        """Delete a file that may be gone already."""
        ...


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """One section's file; `bytes` is its size, 0 until it is written."""

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
    """Write every section of a checkpoint; only one is in memory at a time.

    Raises:
        ExportError: the target is not empty; with `overwrite`: files in the way are no export's.
        CheckpointError: the checkpoint is damaged.
    """
    planned = [
        ExportedFile(entry.name, entry.name + SUFFIX, entry.rows)
        for entry in checkpoint.entries.values()
    ]
    replaced = _make_room(target, overwrite, {one.file for one in planned})
    left = [ExportedFile("", name, 0) for name in sorted(replaced - {one.file for one in planned})]
    target.write(MANIFEST, _manifest(checkpoint, [*planned, *left], is_complete=False))
    written = []
    for one in planned:
        data = _parquet_bytes(checkpoint.table(one.section))
        target.write(one.file, data)
        written.append(replace(one, bytes=len(data)))
        progress(written[-1])
    for one in left:
        target.delete(one.file)
    target.write(MANIFEST, _manifest(checkpoint, written, is_complete=True))
    return written


def _make_room(target: ExportTarget, overwrite: bool, planned: set[str]) -> set[str]:
    """Return the files of the export that is replaced."""
    names = set(target.names())
    if names and not overwrite:
        raise ExportError(
            f"the target holds {len(names)} files, such as {min(names)!r}; choose an empty one, or "
            "give --overwrite to replace an export"
        )
    ours = _files_of(target.read(MANIFEST)) if MANIFEST in names else set()
    foreign = (planned & names) - ours
    if foreign:
        raise ExportError(
            f"the target holds {min(foreign)!r}, which is not known to be of an export because no "
            f"{MANIFEST} there names it; choose another target"
        )
    return ours & names


def _files_of(manifest: bytes) -> set[str]:
    try:
        said = parse_json(manifest)
        version, files = said["version"], {str(one["file"]) for one in said["files"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ExportError(
            f"{MANIFEST} at the target is not that of an export ({error!r}); choose another target"
        ) from error
    if version != MANIFEST_VERSION:
        raise ExportError(
            f"{MANIFEST} at the target has version {version}, this program writes "
            f"{MANIFEST_VERSION}; choose another target"
        )
    return files


def _manifest(
    checkpoint: CheckpointReader, files: Sequence[ExportedFile], *, is_complete: bool
) -> memoryview:
    said = {
        "version": MANIFEST_VERSION,
        "complete": is_complete,
        "cluster_id": checkpoint.cluster_id,
        "end_offset": checkpoint.id.end_offset,
        "epoch": checkpoint.id.epoch,
        "files": [asdict(one) for one in files],
    }
    return memoryview((json.dumps(said, indent=2) + "\n").encode())


def _parquet_bytes(table: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=ROW_GROUP_ROWS, compression="zstd")
    return memoryview(sink.getvalue())

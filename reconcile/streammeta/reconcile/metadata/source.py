"""Data source of the metadata for Spark: `streammeta`.

Reads a table of a live cluster, a checkpoint file or a Parquet export at one offset. The driver
requests a copy from a live cluster once, and all partitions read it from a folder that all machines
share. A partition is a run of record batches or row groups, and an executor has one of these in
memory. Works in any Spark session, independently of reconciliation.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import InputPartition

from streammeta.controller.config import ConfigError, check_endpoint
from streammeta.controller.snapshot import checkpoint_file, parquet_export
from streammeta.reconcile.cluster.controller_client import LeaderClient
from streammeta.reconcile.listing.table_source import Table, TableSource
from streammeta.reconcile.metadata.export import fetch_snapshot
from streammeta.reconcile.vocabulary.errors import (
    ConfigurationError,
    ControllerError,
    MetadataExportError,
)
from streammeta.storage.parsing import parse_json
from streammeta.tls.files import TlsError, TlsFiles

FORMAT = "streammeta"
_FROM = ("connect", "checkpoint", "export")
_TLS = ("tlsCa", "tlsCert", "tlsKey")
_OF_COMMANDS = re.compile(r"(?:--|^)tls-(ca|cert|key)\b")
"""Names of options in messages of commands."""
_PATIENCE_S = 15.0
_REUSE_S = 60.0
_PARTITION_ROWS = 1 << 20


class MetadataSource(TableSource):
    """Rows of a table of the metadata: `streams`, `objects`, `ranges`, `nodes` or another section.

    Options:

    - `table`, and exactly one of the sources: `connect`, controllers as HOST:PORT,HOST:PORT, with
      `copies`, a folder that all machines share, `checkpoint`, the path of a checkpoint file, or
      `export`, the folder of an export.
    - `columns`: the columns to read, by default all.
    - `reuse`: age in seconds up to which a copy is read again, so that the tables of a query are at
      one offset.
    - `tlsCa`, `tlsCert`, `tlsKey`: the driver's files for TLS, which executors do not need.
    - `wait`: seconds to look for a leader.
    """

    FORMAT = FORMAT
    OPTIONS = (*_FROM, "table", "columns", "copies", "reuse", "wait", *map(str.lower, _TLS))

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        _check_options(self._given)
        self._wait_s = _seconds(self._given, "wait", _PATIENCE_S)
        self._reuse_s = _seconds(self._given, "reuse", _REUSE_S)
        self._copy: str | None = None

    def table(self) -> Table:
        """Return the table in the copy or the export.

        Raises:
            ConfigurationError: the TLS files are unusable.
            ControllerError: no leader sent a snapshot.
            MetadataExportError: the table does not exist, or the file is damaged.
        """
        table = self._given["table"]
        if "export" in self._given:
            return _ExportTable(self._given["export"], table)
        if "checkpoint" in self._given:
            return _CheckpointTable(self._given["checkpoint"], table)
        if self._copy is None:  # schema and reader share the copy, and so the offset
            self._copy = self._fetch_copy()
        return _CheckpointTable(self._copy, table)

    def _fetch_copy(self) -> str:
        try:
            return copy_metadata(
                self._given["connect"],
                self._given["copies"],
                wait_s=self._wait_s,
                tls=_tls_files(self._given),
                reuse_s=self._reuse_s,
            )
        except TlsError as error:
            raise ConfigurationError(f"{FORMAT}: {_by_option(error)}") from error
        except ControllerError as error:
            raise ControllerError(_by_option(error)) from error


class PushingMetadataSource(MetadataSource):
    """A `MetadataSource` to which Spark pushes filters, where the Spark session allows it."""

    pushes_filters = True


def copy_metadata(
    connect: str,
    copies: str,
    *,
    wait_s: float = _PATIENCE_S,
    tls: TlsFiles | None = None,
    reuse_s: float = 0,
) -> str:
    """Write a copy of a live cluster's metadata to the folder `copies`, and return its path.

    `connect` are controllers as HOST:PORT,HOST:PORT. The file's name contains its offset, its epoch
    and a hash of the controllers, so an equal copy is replaced. A copy that is at most `reuse_s`
    seconds old is returned instead of a new one. For several tables at one offset, pass the path as
    the option `checkpoint` of each.

    Raises:
        ConfigurationError: `connect` is invalid.
        ControllerError: no leader sent a snapshot within `wait_s` seconds.
        MetadataExportError: the snapshot is incomplete, or can't be written.
        TlsError: the TLS files are unusable.
    """
    endpoints = _endpoints(connect)
    folder = Path(copies)
    asked = hashlib.sha256(",".join(sorted(endpoints)).encode()).hexdigest()[:8]
    if young := _young_copy(folder, asked, reuse_s):
        return str(young)

    draft = folder / f".copy-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with LeaderClient(endpoints, wait_s, tls) as leader:
            end_offset, epoch = fetch_snapshot(leader, draft)
        with _open_checkpoint(draft) as checkpoint:
            _verify(checkpoint)
        path = folder / f"{end_offset:020d}-{epoch:010d}-{asked}.checkpoint"
        draft.replace(path)
    except OSError as error:
        raise MetadataExportError(
            f"copy of the metadata can't be written to {folder} ({error.strerror}). Set the option"
            " 'copies' to another folder"
        ) from error
    finally:
        draft.unlink(missing_ok=True)

    return str(path)


copy_map = copy_metadata
"""Deprecated name of `copy_metadata`, for one version."""


def _young_copy(folder: Path, asked: str, reuse_s: float) -> Path | None:
    """Return the newest copy from the same controllers, or None if it is too old."""
    newest = max(folder.glob(f"*-{asked}.checkpoint"), default=None)
    if newest is None or not 0 <= time.time() - newest.stat().st_mtime < reuse_s:
        return None
    return newest


def _check_options(given: Mapping[str, str]) -> None:
    if not given.get("table"):
        raise ConfigurationError(
            f"{FORMAT} needs the option 'table': streams, objects, ranges, nodes or another section"
        )

    origins = [name for name in _FROM if given.get(name)]
    if len(origins) != 1:
        raise ConfigurationError(
            f"{FORMAT} has the options {', '.join(origins) or 'of no source'}, expected one of"
            f" {', '.join(_FROM)}"
        )
    if (origins == ["connect"]) != bool(given.get("copies")):
        raise ConfigurationError(
            f"{FORMAT} needs the option 'copies' with 'connect', and only then: a folder that the"
            " driver and all executors share, for the copy of the metadata"
        )

    if origins == ["connect"]:
        _endpoints(given["connect"])

    missing = [name for name in _TLS if not given.get(name.lower())]
    if missing and len(missing) < len(_TLS):
        raise ConfigurationError(
            f"{FORMAT} needs all of {', '.join(_TLS)}, or none. The option {missing[0]!r} is"
            " missing"
        )


def _endpoints(connect: str) -> tuple[str, ...]:
    endpoints = tuple(part.strip() for part in connect.split(","))
    for endpoint in endpoints:
        try:
            check_endpoint("connect", endpoint)
        except ConfigError as error:
            raise ConfigurationError(
                f"{FORMAT} has the option 'connect' as {connect!r}, expected controllers as"
                " HOST:PORT,HOST:PORT"
            ) from error
    return endpoints


def _seconds(given: Mapping[str, str], option: str, otherwise: float) -> float:
    text = given.get(option, str(otherwise))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(
            f"{FORMAT} has the option {option!r} as {text!r}, expected seconds of 0 or more,"
            f" such as {otherwise:g}"
        )
    return seconds


def _tls_files(given: Mapping[str, str]) -> TlsFiles | None:
    if not given.get("tlsca"):
        return None
    return TlsFiles(*(Path(given[name.lower()]) for name in _TLS))


def _by_option(error: Exception) -> str:
    """Return the message of an error with this format's option names."""
    text = str(error).replace(", or --profile", "").replace("--connect", "connect")
    return _OF_COMMANDS.sub(lambda found: f"tls{found[1].capitalize()}", text)


@dataclass
class _Rows(InputPartition):
    """Record batches or row groups `[first, end)` of a table."""

    first: int
    end: int


@dataclass(frozen=True)
class _CheckpointTable:
    """A section of a checkpoint file."""

    path: str
    name: str

    def schema(self) -> pa.Schema:
        with self._stream() as stream:
            return _spark_schema(stream.schema)

    def partitions(self, _filters: Sequence[object]) -> Sequence[InputPartition]:
        with _open_checkpoint(Path(self.path)) as checkpoint:
            _verify(checkpoint)
        with self._stream() as stream:
            return _runs([batch.num_rows for batch in stream])

    def read(self, rows: _Rows, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        with self._stream(columns) as stream:
            for number, batch in enumerate(stream):
                if number >= rows.end:
                    return
                if number >= rows.first:
                    yield batch

    def _stream(self, columns: Sequence[str] | None = None) -> pa.RecordBatchStreamReader:
        """Open the section's batches. Skipped batches and columns stay on the disk."""
        with _open_checkpoint(Path(self.path)) as checkpoint:
            entry = _section(checkpoint.entries, self.name, self.path)
        with pa.memory_map(self.path) as mapped:
            mapped.seek(entry.position)
            body = mapped.read_buffer(entry.length)
        if columns is None:
            return pa.ipc.open_stream(body)
        with pa.ipc.open_stream(body) as stream:
            places = sorted(stream.schema.get_field_index(name) for name in columns)
        return pa.ipc.open_stream(body, options=pa.ipc.IpcReadOptions(included_fields=places))


@dataclass(frozen=True)
class _ExportTable:
    """A file of a Parquet export."""

    folder: str
    name: str

    def schema(self) -> pa.Schema:
        return _spark_schema(pq.read_schema(self._path()))

    def partitions(self, _filters: Sequence[object]) -> Sequence[InputPartition]:
        found = pq.read_metadata(self._path())
        groups = range(found.num_row_groups)
        return _runs([found.row_group(group).num_rows for group in groups])

    def read(self, rows: _Rows, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(self._path()) as file:
            groups = range(rows.first, rows.end)
            if groups:
                yield from file.iter_batches(row_groups=groups, columns=list(columns))

    def _path(self) -> Path:
        """Return the table's file in a complete export."""
        folder = Path(self.folder)
        try:
            manifest = parse_json((folder / parquet_export.MANIFEST).read_text())
            is_complete = manifest["complete"] is True
            names = {entry["section"]: entry["file"] for entry in manifest["files"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MetadataExportError(
                f"{folder} is not an export of metadata ({error!r}). Name a folder of `streammeta"
                " snapshot export`, on a path that all machines share"
            ) from error

        if not is_complete:
            raise MetadataExportError(f"export {folder} is incomplete. Export the metadata again")
        if names.get(self.name) != self.name + parquet_export.SUFFIX:
            raise _no_table(self.name, names, self.folder)
        return folder / (self.name + parquet_export.SUFFIX)


def _runs(counts: Sequence[int]) -> list[InputPartition]:
    """Group batches into partitions of about `_PARTITION_ROWS` rows, at least one."""
    runs: list[InputPartition] = []
    first = rows = 0
    for number, count in enumerate(counts):
        if rows and rows + count > _PARTITION_ROWS:
            runs.append(_Rows(first, number))
            first, rows = number, 0
        rows += count
    return [*runs, _Rows(first, len(counts))]


def _spark_schema(schema: pa.Schema) -> pa.Schema:
    """Convert unsigned columns, which Spark does not have, to signed ones."""
    signed = {
        pa.uint8(): pa.int16(),
        pa.uint16(): pa.int32(),
        pa.uint32(): pa.int64(),
        pa.uint64(): pa.int64(),
    }
    return pa.schema([pa.field(field.name, signed.get(field.type, field.type)) for field in schema])


def _open_checkpoint(path: Path) -> checkpoint_file.CheckpointReader:
    try:
        return checkpoint_file.CheckpointReader.open(path)
    except (checkpoint_file.CheckpointError, OSError) as error:
        raise MetadataExportError(
            f"checkpoint {path} can't be read ({error}). Name one on a path that all machines share"
        ) from error


def _verify(checkpoint: checkpoint_file.CheckpointReader) -> None:
    try:
        checkpoint.verify()
    except checkpoint_file.CheckpointError as error:
        raise MetadataExportError(f"copy of the metadata is damaged: {error}") from error


def _section(
    entries: Mapping[str, checkpoint_file.SectionEntry], name: str, where: str
) -> checkpoint_file.SectionEntry:
    if name not in entries:
        raise _no_table(name, entries, where)
    return entries[name]


def _no_table(name: str, known: Mapping[str, object], where: str) -> MetadataExportError:
    return MetadataExportError(f"{where} has no table {name!r}. It has {', '.join(sorted(known))}")

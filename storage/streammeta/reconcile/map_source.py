"""The map as a data source for Spark: `streammeta`.

Reads a table of a live cluster, of a checkpoint file or of a Parquet export, whole and at one
offset: a live cluster is asked once, by the driver, for a copy that all partitions then read from a
folder that all machines share. A partition is a run of record batches, or of row groups, so no
executor has more than one of them in memory. Serves any Spark session, and knows nothing of
reconciliation's verdicts.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from streammeta.controller.config import ConfigError, check_endpoint
from streammeta.controller.snapshot.checkpoint_file import (
    CheckpointError,
    CheckpointReader,
    SectionEntry,
)
from streammeta.controller.snapshot.parquet_export import MANIFEST, SUFFIX
from streammeta.reconcile.errors import ConfigurationError, ControllerError, MapExportError
from streammeta.reconcile.leader import LeaderClient
from streammeta.reconcile.map_export import fetch_snapshot
from streammeta.rpc.tls import TlsError, TlsFiles
from streammeta.storage.parsing import parse_json

FORMAT = "streammeta"
_FROM = ("connect", "checkpoint", "export")
_TLS = ("tlsCa", "tlsCert", "tlsKey")
_OPTIONS = (*_FROM, "table", "copies", "wait", *(name.lower() for name in _TLS))
_OF_COMMANDS = re.compile(r"(?:--|^)tls-(ca|cert|key)\b")
"""Names of options as commands have them."""
_PATIENCE_S = 15.0
_PARTITION_ROWS = 1 << 20


class MapSource(DataSource):
    """Rows of one table of the map: `streams`, `objects`, `ranges`, `nodes`, or any other section.

    Options: `table`; and one of `connect`, controllers as HOST:PORT,HOST:PORT, with `copies`, a
    folder that all machines share; `checkpoint`, the path of a checkpoint file; `export`, the
    folder of an export. `tlsCa`, `tlsCert` and `tlsKey` are the driver's files for calling over
    TLS, which executors do not need, `wait` the seconds to look for a leader.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._given = _checked(options)
        self._wait_s = _wait_s(self._given)
        self._copy: str | None = None

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """The table's columns, as the copy or the export has them.

        Raises:
            ConfigurationError: the options make no sense, or the files for TLS are of no use.
            ControllerError: no leader sent a copy of the map.
            MapExportError: there is no such table, or the file is damaged.
        """
        return from_arrow_schema(_spark_schema(self._table().schema()))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Give the reader that Spark sends to executors. Raises as `schema`."""
        return _Reader(self._table())

    def _table(self) -> _CheckpointTable | _ExportTable:
        table = self._given["table"]
        if "export" in self._given:
            return _ExportTable(self._given["export"], table)
        if "checkpoint" in self._given:
            return _CheckpointTable(self._given["checkpoint"], table)
        if self._copy is None:  # kept from the schema to the reader: one copy, one offset
            self._copy = self._copied()
        return _CheckpointTable(self._copy, table)

    def _copied(self) -> str:
        try:
            return copy_map(
                self._given["connect"],
                self._given["copies"],
                wait_s=self._wait_s,
                tls=_tls_files(self._given),
            )
        except TlsError as error:
            raise ConfigurationError(f"{FORMAT}: {_by_option(error)}") from error
        except ControllerError as error:
            raise ControllerError(_by_option(error)) from error


def copy_map(
    connect: str, copies: str, *, wait_s: float = _PATIENCE_S, tls: TlsFiles | None = None
) -> str:
    """Write a copy of the map of a live cluster to the folder `copies`; return the file's path.

    `connect` are controllers as HOST:PORT,HOST:PORT. The file is named by its offset and epoch; a
    copy of the same is replaced by its equal. For several tables at one offset give the path as the
    option `checkpoint` of each.

    Raises:
        ConfigurationError: `connect` is not as it has to be.
        ControllerError: no leader sent it within `wait_s` seconds.
        MapExportError: what was sent is not one whole file, or can't be written.
        TlsError: the files for TLS are of no use.
    """
    endpoints = _endpoints(connect)
    folder = Path(copies)
    draft = folder / f".copy-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with LeaderClient(endpoints, wait_s, tls) as leader:
            end_offset, epoch = fetch_snapshot(leader, draft)
        with _opened(draft) as checkpoint:
            _verify(checkpoint)
        path = folder / f"{end_offset:020d}-{epoch:010d}.checkpoint"
        draft.replace(path)
    except OSError as error:
        raise MapExportError(
            f"a copy of the map can't be written to {folder} ({error.strerror}); name another"
            " folder as the option 'copies'"
        ) from error
    finally:
        draft.unlink(missing_ok=True)
    return str(path)


def _checked(options: Mapping[str, str]) -> Mapping[str, str]:
    given = {name.lower(): value for name, value in options.items()}
    for name in given:
        if name not in _OPTIONS:
            raise ConfigurationError(
                f"{FORMAT} has no option {name!r}; it has {', '.join(_OPTIONS)}"
            )
    if not given.get("table"):
        raise ConfigurationError(
            f"{FORMAT} needs the option 'table': streams, objects, ranges, nodes or another section"
        )
    origins = [name for name in _FROM if given.get(name)]
    if len(origins) != 1:
        raise ConfigurationError(
            f"{FORMAT} has the options {', '.join(origins) or 'of no map'}, wanted one of"
            f" {', '.join(_FROM)}"
        )
    if (origins == ["connect"]) != bool(given.get("copies")):
        raise ConfigurationError(
            f"{FORMAT} needs the option 'copies' with 'connect', and only then: a folder that the"
            " driver and all executors share, for the copy of the map that they read"
        )
    if origins == ["connect"]:
        _endpoints(given["connect"])
    missing = [name for name in _TLS if not given.get(name.lower())]
    if missing and len(missing) < len(_TLS):
        raise ConfigurationError(
            f"{FORMAT} needs all of {', '.join(_TLS)}, or none; the option {missing[0]!r} is"
            " missing"
        )
    return given


def _endpoints(connect: str) -> tuple[str, ...]:
    endpoints = tuple(part.strip() for part in connect.split(","))
    for endpoint in endpoints:
        try:
            check_endpoint("connect", endpoint)
        except ConfigError as error:
            raise ConfigurationError(
                f"{FORMAT} has the option 'connect' as {connect!r}, wanted controllers as"
                " HOST:PORT,HOST:PORT"
            ) from error
    return endpoints


def _wait_s(given: Mapping[str, str]) -> float:
    text = given.get("wait", str(_PATIENCE_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(
            f"{FORMAT} has the option 'wait' as {text!r}, wanted seconds of 0 or more, such as 15"
        )
    return seconds


def _tls_files(given: Mapping[str, str]) -> TlsFiles | None:
    if not given.get("tlsca"):
        return None
    return TlsFiles(*(Path(given[name.lower()]) for name in _TLS))


def _by_option(error: Exception) -> str:
    """The message of an error with the names that this format's options have."""
    text = str(error).replace(", or --profile", "").replace("--connect", "connect")
    return _OF_COMMANDS.sub(lambda found: f"tls{found[1].capitalize()}", text)


@dataclass
class _Rows(InputPartition):
    """Record batches, or row groups, `first` to `end` - 1 of a table."""

    first: int
    end: int


@dataclass(frozen=True)
class _CheckpointTable:
    """A section of a checkpoint file."""

    path: str
    name: str

    def schema(self) -> pa.Schema:
        with self._stream() as stream:
            return stream.schema

    def partitions(self) -> Sequence[InputPartition]:
        with _opened(Path(self.path)) as checkpoint:
            _verify(checkpoint)
        with self._stream() as stream:
            return _runs([batch.num_rows for batch in stream])

    def read(self, rows: _Rows) -> Iterator[pa.RecordBatch]:
        with self._stream() as stream:
            for number, batch in enumerate(stream):
                if number >= rows.end:
                    return
                if number >= rows.first:
                    yield batch

    def _stream(self) -> pa.RecordBatchStreamReader:
        """The section's batches; those that are skipped are not read from the disk."""
        with _opened(Path(self.path)) as checkpoint:
            entry = _section(checkpoint.entries, self.name, self.path)
        with pa.memory_map(self.path) as mapped:
            mapped.seek(entry.position)
            body = mapped.read_buffer(entry.length)
        return pa.ipc.open_stream(body)


@dataclass(frozen=True)
class _ExportTable:
    """A file of a Parquet export."""

    folder: str
    name: str

    def schema(self) -> pa.Schema:
        return pq.read_schema(self._path())

    def partitions(self) -> Sequence[InputPartition]:
        found = pq.read_metadata(self._path())
        return _runs([found.row_group(one).num_rows for one in range(found.num_row_groups)])

    def read(self, rows: _Rows) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(self._path()) as file:
            groups = range(rows.first, rows.end)
            if groups:
                yield from file.iter_batches(row_groups=groups)

    def _path(self) -> Path:
        """The file, if the export is whole and has it."""
        folder = Path(self.folder)
        try:
            said = parse_json((folder / MANIFEST).read_text())
            is_complete = said["complete"] is True
            names = {one["section"]: one["file"] for one in said["files"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MapExportError(
                f"{folder} is no export of a map ({error!r}); name a folder that `streammeta"
                " snapshot export` wrote, on a path that all machines share"
            ) from error
        if not is_complete:
            raise MapExportError(f"the export {folder} is not complete; export the map again")
        if names.get(self.name) != self.name + SUFFIX:
            raise _no_table(self.name, names, self.folder)
        return folder / (self.name + SUFFIX)


class _Reader(DataSourceReader):
    def __init__(self, table: _CheckpointTable | _ExportTable) -> None:
        self._table = table

    def partitions(self) -> Sequence[InputPartition]:
        return self._table.partitions()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Rows)
        for batch in self._table.read(partition):
            yield batch.cast(_spark_schema(batch.schema))


def _runs(counts: Sequence[int]) -> list[InputPartition]:
    """Group batches of so many rows into partitions of about `_PARTITION_ROWS`; at least one."""
    runs: list[InputPartition] = []
    first = rows = 0
    for number, count in enumerate(counts):
        if rows and rows + count > _PARTITION_ROWS:
            runs.append(_Rows(first, number))
            first, rows = number, 0
        rows += count
    return [*runs, _Rows(first, len(counts))]


def _spark_schema(schema: pa.Schema) -> pa.Schema:
    """The columns in types that Spark has: it knows no unsigned numbers."""
    signed = {
        pa.uint8(): pa.int16(),
        pa.uint16(): pa.int32(),
        pa.uint32(): pa.int64(),
        pa.uint64(): pa.int64(),
    }
    return pa.schema([pa.field(one.name, signed.get(one.type, one.type)) for one in schema])


def _opened(path: Path) -> CheckpointReader:
    try:
        return CheckpointReader.open(path)
    except (CheckpointError, OSError) as error:
        raise MapExportError(
            f"the checkpoint {path} can't be read ({error}); name one on a path that all machines"
            " share"
        ) from error


def _verify(checkpoint: CheckpointReader) -> None:
    try:
        checkpoint.verify()
    except CheckpointError as error:
        raise MapExportError(f"the copy of the map is damaged: {error}") from error


def _section(entries: Mapping[str, SectionEntry], name: str, where: str) -> SectionEntry:
    if name not in entries:
        raise _no_table(name, entries, where)
    return entries[name]


def _no_table(name: str, known: Mapping[str, object], where: str) -> MapExportError:
    return MapExportError(f"{where} has no table {name!r}; it has {', '.join(sorted(known))}")

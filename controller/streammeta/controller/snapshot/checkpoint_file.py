"""The checkpoint file, a snapshot of the metadata on disk: format, writer and reader.

A file `<end offset, 20 digits>-<epoch, 10 digits>.checkpoint` contains the state at the end
offset. The epoch belongs to the last entry below it. All integers are little-endian.


    header    8  magic "SMCHKPT1"
              4  u32 format version, 2
              8  u64 end offset
              8  u64 epoch
              2  u16 length of the cluster id, then the cluster id, UTF-8
              4  u32 CRC32C of the header so far
    sections     one Arrow IPC stream each, one after the other
    index        JSON: {"sections": [{"name", "position", "length", "rows", "crc32c"}, ...]}
    footer   32  SHA-256 of every byte before the footer
              4  u32 CRC32C of the index
              4  u32 length of the index
              8  magic "1TPKHCMS"

The footer is written last, so a file that was cut off has none and is rejected. Reading a section
checks its checksum, verifying the whole file its digest.

The first section, `voters`, contains the voters at the end offset: node_id (int64), directory_id
(text, empty if unknown), endpoint (text) and, once one is known, client_endpoint (text, empty if
unknown). The other sections are defined by the metadata. Columns are int64 or narrower integers,
booleans, text or bytes.

The writer works section by section, in pieces of a few megabytes. Only one section is in memory at
a time, and the interpreter's lock is held no longer than for one piece, because the writing thread
shares its process with commits. The reader rejects incomplete and damaged files, and those written
by a newer version. Every version keeps the header's layout. It needs only Arrow and a file, so that
tools and jobs can use it without a controller.
"""

import hashlib
import io
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol, TypeAlias, cast, runtime_checkable

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.controller.snapshot.section_reading import (
    CHUNK_BYTES,
    ColumnBuffers,
    SectionBody,
    is_fixed,
    read_into,
    read_numbers,
    to_list,
    to_numpy,
)
from streammeta.storage.parsing import parse_json

MAGIC = b"SMCHKPT1"
END_MAGIC = b"1TPKHCMS"
VERSION = 2
HEADER = struct.Struct("<8sIQQH")
CHECKSUM = struct.Struct("<I")
FOOTER = struct.Struct("<32sII8s")

BINARY_COLUMNS = frozenset({("kvs", "value")})
"""(section, column) of bytes. An empty column has no type, and text is the default."""


class CheckpointError(Exception):
    """A file that is not a complete checkpoint. The message names the problem."""


class NewerCheckpointError(CheckpointError):
    """A checkpoint that only a newer version can read."""


@dataclass(frozen=True, slots=True)
class SectionEntry:
    """Place of a section in the file."""

    name: str
    position: int
    length: int
    rows: int
    crc32c: int


_ENTRY_MEMBERS = frozenset(field.name for field in fields(SectionEntry))

BATCH_ROWS = 131_072
"""Rows per Arrow record batch."""

Columns: TypeAlias = Mapping[str, npt.NDArray[Any] | Sequence[Any]]


class Sink(Protocol):
    """A binary output that accepts bytes in order."""

    def write(self, data: bytes, /) -> object:
        """Write all of `data`."""
        ...


@runtime_checkable
class HashedSink(Sink, Protocol):
    """A sink that hashes its bytes from the first one on."""

    @property
    def digest(self) -> bytes:
        """SHA-256 of all bytes written."""
        ...


def write_checkpoint(
    sink: Sink,
    snapshot_id: SnapshotId,
    cluster_id: str,
    sections: Mapping[str, Columns | pa.Table],
) -> int:
    """Write a checkpoint at the start of a binary sink and return its size in bytes."""
    output = _Output(sink)
    output.write(_header(snapshot_id, cluster_id))

    entries = []
    for name in sections:
        table = _as_table(name, sections[name])
        body = _SectionSink(output)
        with pa.ipc.new_stream(body, table.schema) as writer:
            writer.write_table(table, max_chunksize=BATCH_ROWS)
        start = output.position - body.size
        entries.append(SectionEntry(name, start, body.size, table.num_rows, body.crc))

    # After the sections, whose sizes and checksums are known only now.
    index = json.dumps({"sections": [asdict(entry) for entry in entries]}).encode()
    output.write(index)
    # The digest is final once the index is written: it covers every byte before the footer.
    footer = FOOTER.pack(output.digest(), google_crc32c.value(index), len(index), END_MAGIC)
    sink.write(footer)
    return output.position + len(footer)


class _Output:
    """Counts and hashes bytes. A sink that hashes itself is not hashed twice."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._hash = None if isinstance(sink, HashedSink) else hashlib.sha256()
        self.position = 0

    def write(self, data: bytes) -> None:
        self._sink.write(data)
        if self._hash is not None:
            self._hash.update(data)
        self.position += len(data)

    def digest(self) -> bytes:
        return cast(HashedSink, self._sink).digest if self._hash is None else self._hash.digest()


class _SectionSink(io.RawIOBase):
    """The file that Arrow writes one section to. Counts its bytes and computes their checksum."""

    def __init__(self, output: _Output) -> None:
        super().__init__()
        self._output = output
        self.size = 0
        self.crc = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._output.write(data)
        self.size += len(data)
        self.crc = google_crc32c.extend(self.crc, data)
        return len(data)


def _header(snapshot_id: SnapshotId, cluster_id: str) -> bytes:
    name = cluster_id.encode()
    fixed = HEADER.pack(MAGIC, VERSION, snapshot_id.end_offset, snapshot_id.epoch, len(name))
    header = fixed + name
    return header + CHECKSUM.pack(google_crc32c.value(header))


def _as_table(section: str, columns: Columns | pa.Table) -> pa.Table:
    if isinstance(columns, pa.Table):
        return columns
    return pa.table({name: _as_array(section, name, values) for name, values in columns.items()})


# Arrow's own conversions import pandas if it is installed, which takes more than a second of one
# core. A controller cannot pause for that long.


def _as_array(section: str, name: str, values: npt.NDArray[Any] | Sequence[Any]) -> Any:
    if isinstance(values, np.ndarray):
        return _fixed_array(values)
    is_binary = (section, name) in BINARY_COLUMNS
    kind = pa.binary() if is_binary else pa.string()
    chunks = [
        _variable_array(kind, values[start : start + BATCH_ROWS])
        for start in range(0, len(values), BATCH_ROWS)
    ]
    return pa.chunked_array(chunks, type=kind)


def _fixed_array(values: npt.NDArray[Any]) -> "pa.Array[Any]":
    kind = pa.from_numpy_dtype(values.dtype)
    # Arrow stores booleans as bits.
    is_boolean = values.dtype == np.bool_
    data = np.packbits(values, bitorder="little") if is_boolean else np.ascontiguousarray(values)
    array: pa.Array[Any] = pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(data.data)])
    return array


def _variable_array(kind: pa.DataType, values: Sequence[str | bytes]) -> "pa.Array[Any]":
    encoded = [value.encode() if isinstance(value, str) else value for value in values]
    ends = np.zeros(len(encoded) + 1, dtype=np.int32)
    np.cumsum([len(value) for value in encoded], out=ends[1:])
    buffers = [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(encoded))]
    array: pa.Array[Any] = pa.Array.from_buffers(kind, len(encoded), buffers)
    return array


class CheckpointReader:
    """One open checkpoint file.

    `id` and `cluster_id` come from the header, `entries` from the index, `digest` from the footer.
    """

    def __init__(self, file: BinaryIO, name: str = "checkpoint") -> None:
        """Read and check header, index and footer. `file` is seekable.

        Raises:
            CheckpointError: they are missing or damaged.
        """
        self._file = file
        self._name = name
        self._size = file.seek(0, os.SEEK_END)
        self.id, self.cluster_id = self._read_header()
        self.digest, self._digest_end, self.entries = self._read_index()

    @classmethod
    def open(cls, path: Path) -> "CheckpointReader":
        """Open a file. Raises as the constructor does, or `OSError`."""
        file = path.open("rb")
        try:
            return cls(file, path.name)
        except CheckpointError:
            # The caller gets no reader that could close it.
            file.close()
            raise

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def table(self, section: str) -> pa.Table:
        """Return one section.

        Raises:
            CheckpointError: the section does not exist, or its bytes are damaged.
        """
        entry = self._entry(section)
        body = self._read(entry.position, entry.length)
        if google_crc32c.value(body) != entry.crc32c:
            raise self._checksum_error(entry)
        try:
            return pa.ipc.open_stream(body).read_all()
        except (pa.ArrowInvalid, OSError) as error:
            raise self._stream_error(section, error) from error

    def batches(self, section: str) -> Iterator[pa.RecordBatch]:
        """Yield one section piece by piece, of which only one is in memory.

        A piece is valid until the next one is requested, and nothing else may be read meanwhile.

        Raises:
            CheckpointError: the section does not exist, or, after the last piece, its bytes are
                damaged.
        """
        entry = self._entry(section)
        body = self._body(entry)
        try:
            yield from pa.ipc.open_stream(body)
        except (pa.ArrowInvalid, OSError) as error:
            raise self._stream_error(section, error) from error
        if body.rest_crc() != entry.crc32c:
            raise self._checksum_error(entry)

    def columns(self, section: str, buffers: ColumnBuffers | None = None) -> dict[str, Any]:
        """Return one section as numpy arrays (numbers) and lists (text, bytes). Raises likewise.

        Numbers are read into `buffers` batch by batch, so that a section of numbers is never in
        memory twice.
        """
        columns = self._numbers(self._entry(section), buffers or ColumnBuffers())
        if columns is not None:
            return columns
        table = self.table(section)
        return {
            name: to_numpy(values) if is_fixed(values.type) else to_list(values)
            for name, values in zip(table.column_names, table.columns, strict=True)
        }

    def sections(self, buffers: ColumnBuffers | None = None) -> Mapping[str, dict[str, Any]]:
        """Return the columns of every section, each read on access."""
        return _Sections(self, buffers or ColumnBuffers())

    def _numbers(
        self, entry: SectionEntry, buffers: ColumnBuffers
    ) -> dict[str, npt.NDArray[Any]] | None:
        """Return the columns of a section of numbers, or None if it has others as well."""
        body = self._body(entry)
        try:
            columns, problem = read_numbers(body, entry.name, entry.rows, buffers), ""
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError, OSError) as error:
            columns, problem = {}, str(error)
        if columns is None:
            return None
        # A damaged section may fail to parse first, but its checksum explains why.
        if body.rest_crc() != entry.crc32c:
            raise self._checksum_error(entry)
        if problem:
            raise self._stream_error(entry.name, problem)
        return columns

    def _entry(self, section: str) -> SectionEntry:
        entry = self.entries.get(section)
        if entry is None:
            raise self._error(f"has no section {section!r}, only {', '.join(self.entries)}")
        if entry.position < 0 or entry.position + entry.length > self._size:
            raise self._error(
                f"has {self._size} bytes, but {entry.length} at {entry.position} are needed: "
                "it was cut off"
            )
        return entry

    def _body(self, entry: SectionEntry) -> SectionBody:
        return SectionBody(self._file, entry.position, entry.length)

    def _checksum_error(self, entry: SectionEntry) -> CheckpointError:
        return self._error(
            f"section {entry.name!r} at byte {entry.position} does not match its checksum"
        )

    def column_names(self, section: str) -> list[str]:
        """Return the names of a section's columns without reading rows. Raises as `table` does."""
        entry = self._entry(section)
        try:
            return list(pa.ipc.open_stream(self._body(entry)).schema.names)
        except (pa.ArrowInvalid, OSError) as error:
            raise self._stream_error(section, error) from error

    def _stream_error(self, section: str, problem: object) -> CheckpointError:
        return self._error(f"section {section!r} is not an Arrow IPC stream: {problem}")

    def reject_newer(self, what: str) -> NoReturn:
        """Raise `NewerCheckpointError` for an unknown part of the file."""
        raise NewerCheckpointError(
            f"{self._name}: this version does not know {what}: a newer one wrote it, upgrade this "
            "one"
        )

    def verify(self) -> None:
        """Read the whole file and compare its digest.

        Raises:
            CheckpointError: some byte differs from those written.
        """
        state = hashlib.sha256()
        self._file.seek(0)
        left = self._digest_end
        buffer = memoryview(bytearray(CHUNK_BYTES))
        while left:  # in pieces: the file may be larger than memory
            size = read_into(self._file, buffer[: min(CHUNK_BYTES, left)])
            if not size:
                raise self._error(f"ends {left} bytes before its footer")
            state.update(buffer[:size])
            left -= size

        if state.digest() != self.digest:
            raise self._error(
                f"the digest of its {self._digest_end} bytes is {state.hexdigest()}, "
                f"the footer says {self.digest.hex()}: take another checkpoint"
            )

    def _read_header(self) -> tuple[SnapshotId, str]:
        fixed = self._read(0, HEADER.size)
        magic, version, end_offset, epoch, name_length = HEADER.unpack(fixed)
        if magic != MAGIC:
            raise self._error(f"begins with {magic!r}, a checkpoint begins with {MAGIC!r}")

        name = self._read(HEADER.size, name_length)
        (crc,) = CHECKSUM.unpack(self._read(HEADER.size + name_length, CHECKSUM.size))
        # Before the version: a damaged version must not be reported as a newer one.
        if google_crc32c.value(fixed + name) != crc:
            raise self._error("the header does not match its checksum")
        # Every version keeps the layout of the header, so an intact one can be trusted.
        if version > VERSION:
            self.reject_newer(f"format version {version}, only up to {VERSION}")
        if version < VERSION:
            raise self._error(f"has format version {version}, this program reads {VERSION}")
        return SnapshotId(EndOffset(end_offset), Epoch(epoch)), name.decode()

    def _read_index(self) -> tuple[bytes, int, dict[str, SectionEntry]]:
        footer_at = self._size - FOOTER.size
        digest, crc, index_length, magic = FOOTER.unpack(self._read(footer_at, FOOTER.size))
        if magic != END_MAGIC:
            raise self._error("has no footer at its end: it was cut off, take another checkpoint")

        index = self._read(footer_at - index_length, index_length)
        if google_crc32c.value(index) != crc:
            raise self._error("the section index does not match its checksum")

        members = parse_json(index, self._error)
        # An unknown member may change the meaning of known ones.
        added = {*members} - {"sections"}
        for entry in members["sections"]:
            added |= {*entry} - _ENTRY_MEMBERS
        if added:
            self.reject_newer(f"member {min(added)!r} of its index")
        entries = [SectionEntry(**entry) for entry in members["sections"]]
        return digest, footer_at, {entry.name: entry for entry in entries}

    def _read(self, position: int, length: int) -> bytes:
        if position < 0 or position + length > self._size:
            raise self._error(
                f"has {self._size} bytes, but {length} at {position} are needed: it was cut off"
            )
        self._file.seek(position)
        data = self._file.read(length)
        if len(data) < length:
            raise self._error(f"ends at byte {position + len(data)} while being read")
        return data

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._name}: {message}")


class _Sections(Mapping[str, dict[str, Any]]):
    def __init__(self, reader: CheckpointReader, buffers: ColumnBuffers) -> None:
        self._reader = reader
        self._buffers = buffers

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self._reader.columns(name, self._buffers)

    def __contains__(self, name: object) -> bool:
        return name in self._reader.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.entries)

    def __len__(self) -> int:
        return len(self._reader.entries)

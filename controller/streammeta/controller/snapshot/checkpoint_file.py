"""The checkpoint file, a snapshot of the map on disk: format, writer and reader.

A file `<end offset, 20 digits>-<epoch, 10 digits>.checkpoint` holds everything the log says below
the end offset; the epoch is that of the last entry below it. All integers are little-endian.

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

The footer is written last: a file that was cut off has none, and is refused. A section's checksum
is checked when it is read, the digest when the whole file is verified.

The section `voters`, the first, names the voters as of the end offset: node_id (int64),
directory_id (text, empty if not known), endpoint (text) and, once one is known, client_endpoint
(text, empty if not known). What the columns of the others hold is the map's matter; columns are
int64 or narrower integers, booleans, text or bytes.

The writer works section by section, in pieces of a few megabytes: only one section is in memory at
a time, and the interpreter's lock is held no longer than for one piece, because the writing thread
shares its process with commits. The reader refuses what is not complete and intact, and what a
newer version wrote; every version keeps the header's layout. It needs
nothing but Arrow and a file, so that tools and jobs may use it apart from the controller.
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
from streammeta.storage.parsing import parse_json

MAGIC = b"SMCHKPT1"
END_MAGIC = b"1TPKHCMS"
VERSION = 2
HEADER = struct.Struct("<8sIQQH")
CHECKSUM = struct.Struct("<I")
FOOTER = struct.Struct("<32sII8s")

BINARY_COLUMNS = frozenset({("kvs", "value")})
"""(section, column) of bytes; an empty column can't tell, and text is the rule."""


class CheckpointError(Exception):
    """A file that is no complete checkpoint; the message names what is wrong with it."""


class NewerCheckpointError(CheckpointError):
    """A checkpoint that holds what only a newer version can read."""


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
"""Rows of one Arrow record batch."""

Columns: TypeAlias = Mapping[str, npt.NDArray[Any] | Sequence[Any]]


class Sink(Protocol):
    """A binary output that takes bytes in order."""

    def write(self, data: bytes, /) -> object:
        """Take all of `data`."""
        ...


@runtime_checkable
class HashedSink(Sink, Protocol):
    """A sink that hashes what it takes, from the first byte on."""

    @property
    def digest(self) -> bytes:
        """SHA-256 of everything that was taken."""
        ...


def write_checkpoint(
    sink: Sink,
    snapshot_id: SnapshotId,
    cluster_id: str,
    sections: Mapping[str, Columns | pa.Table],
) -> int:
    """Write a checkpoint to any binary sink, at its beginning; return its size in bytes."""
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
    index = json.dumps({"sections": [asdict(entry) for entry in entries]}).encode()
    output.write(index)
    footer = FOOTER.pack(output.digest(), google_crc32c.value(index), len(index), END_MAGIC)
    sink.write(footer)
    return output.position + len(footer)


class _Output:
    """Counts and hashes what passes; what the sink hashes itself is not hashed twice."""

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
    """The file that Arrow writes one section to: counts it and sums it up."""

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


# Arrow's own conversions import pandas if it is installed, for more than a second of one core; a
# controller can't stand still for that long.


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


_CHUNK_BYTES = 1 << 20


class Rooms:
    """Places that columns of numbers are read into; a subclass may know better ones."""

    def zeros(self, section: str, column: str, rows: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return `rows` zeros of the column's type, or of a narrower one that its numbers fit."""
        return np.zeros(rows, dtype)

    def known(self, section: str, column: str) -> npt.NDArray[Any] | None:
        """Return an array that likely equals the column; it takes its place if it does."""
        return None


class CheckpointReader:
    """One checkpoint file, open.

    `id` and `cluster_id` come from the header, `entries` from the index, `digest` from the footer.
    """

    def __init__(self, file: BinaryIO, name: str = "checkpoint") -> None:
        """Read and check header, index and footer; `file` is seekable.

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
        """Open a file; raises as the constructor does, or `OSError`."""
        file = path.open("rb")
        try:
            return cls(file, path.name)
        except CheckpointError:
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
            CheckpointError: there is no such section, or its bytes are damaged.
        """
        entry = self._entry(section)
        body = self._read(entry.position, entry.length)
        if google_crc32c.value(body) != entry.crc32c:
            raise self._checksum_error(entry)
        try:
            return pa.ipc.open_stream(body).read_all()
        except (pa.ArrowInvalid, OSError) as error:
            raise self._error(f"section {section!r} is no Arrow IPC stream: {error}") from error

    def batches(self, section: str) -> Iterator[pa.RecordBatch]:
        """Yield one section piece by piece; no more of it is ever in memory.

        A piece is valid until the next one is asked for, and nothing else may be read meanwhile.

        Raises:
            CheckpointError: there is no such section, or, once all of it was read, its bytes are
                damaged.
        """
        entry = self._entry(section)
        body = _SectionBody(self._file, entry)
        try:
            yield from pa.ipc.open_stream(body)
        except (pa.ArrowInvalid, OSError) as error:
            raise self._error(f"section {section!r} is no Arrow IPC stream: {error}") from error
        if body.rest_crc() != entry.crc32c:
            raise self._checksum_error(entry)

    def columns(self, section: str, rooms: Rooms | None = None) -> dict[str, Any]:
        """Return one section as numpy arrays (numbers) and lists (text, bytes); raises likewise.

        Numbers are read into `rooms` batch by batch; no more of a section of numbers is ever in
        memory.
        """
        columns = self._numbers(self._entry(section), rooms or Rooms())
        if columns is not None:
            return columns
        table = self.table(section)
        return {
            name: _to_numpy(values) if _is_fixed(values.type) else _as_list(values)
            for name, values in zip(table.column_names, table.columns, strict=True)
        }

    def sections(self, rooms: Rooms | None = None) -> Mapping[str, dict[str, Any]]:
        """Return `columns` of every section, each read when it is asked for."""
        return _Sections(self, rooms or Rooms())

    def _numbers(self, entry: SectionEntry, rooms: Rooms) -> dict[str, npt.NDArray[Any]] | None:
        """Return the columns of a section of numbers, None of one that has others too."""
        body = _SectionBody(self._file, entry)
        try:
            columns, problem = _read_numbers(body, entry, rooms), ""
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError, OSError) as error:
            columns, problem = {}, str(error)
        if columns is None:
            return None
        if body.rest_crc() != entry.crc32c:
            raise self._checksum_error(entry)
        if problem:
            raise self._error(f"section {entry.name!r} is no Arrow IPC stream: {problem}")
        return columns

    def _entry(self, section: str) -> SectionEntry:
        entry = self.entries.get(section)
        if entry is None:
            raise self._error(f"has no section {section!r}, only {', '.join(self.entries)}")
        if entry.position < 0 or entry.position + entry.length > self._size:
            raise self._error(
                f"has {self._size} bytes, but {entry.length} at {entry.position} are wanted; "
                "it was cut off"
            )
        return entry

    def _checksum_error(self, entry: SectionEntry) -> CheckpointError:
        return self._error(
            f"section {entry.name!r} at byte {entry.position} does not match its checksum"
        )

    def column_names(self, section: str) -> list[str]:
        """Return the names of a section's columns; reads no row. Raises as `table` does."""
        entry = self._entry(section)
        try:
            return list(pa.ipc.open_stream(_SectionBody(self._file, entry)).schema.names)
        except (pa.ArrowInvalid, OSError) as error:
            raise self._error(f"section {section!r} is no Arrow IPC stream: {error}") from error

    def refuse_newer(self, what: str) -> NoReturn:
        """Raise `NewerCheckpointError` for something that this version does not know."""
        raise NewerCheckpointError(
            f"{self._name}: this version does not know {what}; a newer one wrote it, upgrade this "
            "one"
        )

    def verify(self) -> None:
        """Read the whole file and compare its digest.

        Raises:
            CheckpointError: some byte is not what was written.
        """
        state = hashlib.sha256()
        self._file.seek(0)
        left = self._digest_end
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while left:
            size = _read_into(self._file, buffer[: min(_CHUNK_BYTES, left)])
            if not size:
                raise self._error(f"ends {left} bytes before its footer")
            state.update(buffer[:size])
            left -= size
        if state.digest() != self.digest:
            raise self._error(
                f"the digest of its {self._digest_end} bytes is {state.hexdigest()}, "
                f"the footer says {self.digest.hex()}; take another checkpoint"
            )

    def _read_header(self) -> tuple[SnapshotId, str]:
        fixed = self._read(0, HEADER.size)
        magic, version, end_offset, epoch, name_length = HEADER.unpack(fixed)
        if magic != MAGIC:
            raise self._error(f"begins with {magic!r}, a checkpoint begins with {MAGIC!r}")
        name = self._read(HEADER.size, name_length)
        (crc,) = CHECKSUM.unpack(self._read(HEADER.size + name_length, CHECKSUM.size))
        if google_crc32c.value(fixed + name) != crc:
            raise self._error("the header does not match its checksum")
        if version > VERSION:  # of a header that is intact: every version keeps its layout
            self.refuse_newer(f"format version {version}, only up to {VERSION}")
        if version < VERSION:
            raise self._error(f"has format version {version}, this program reads {VERSION}")
        return SnapshotId(EndOffset(end_offset), Epoch(epoch)), name.decode()

    def _read_index(self) -> tuple[bytes, int, dict[str, SectionEntry]]:
        footer_at = self._size - FOOTER.size
        digest, crc, index_length, magic = FOOTER.unpack(self._read(footer_at, FOOTER.size))
        if magic != END_MAGIC:
            raise self._error("has no footer at its end; it was cut off, take another checkpoint")
        index = self._read(footer_at - index_length, index_length)
        if google_crc32c.value(index) != crc:
            raise self._error("the section index does not match its checksum")
        members = parse_json(index, self._error)
        added = {*members} - {"sections"}
        for entry in members["sections"]:
            added |= {*entry} - _ENTRY_MEMBERS
        if added:
            self.refuse_newer(f"member {min(added)!r} of its index")
        entries = [SectionEntry(**entry) for entry in members["sections"]]
        return digest, footer_at, {entry.name: entry for entry in entries}

    def _read(self, position: int, length: int) -> bytes:
        if position < 0 or position + length > self._size:
            raise self._error(
                f"has {self._size} bytes, but {length} at {position} are wanted; it was cut off"
            )
        self._file.seek(position)
        data = self._file.read(length)
        if len(data) < length:
            raise self._error(f"ends at byte {position + len(data)} while being read")
        return data

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._name}: {message}")


class _Sections(Mapping[str, dict[str, Any]]):
    def __init__(self, reader: CheckpointReader, rooms: Rooms) -> None:
        self._reader = reader
        self._rooms = rooms

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self._reader.columns(name, self._rooms)

    def __contains__(self, name: object) -> bool:
        return name in self._reader.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.entries)

    def __len__(self) -> int:
        return len(self._reader.entries)


def _read_into(file: BinaryIO, buffer: memoryview | npt.NDArray[np.uint8]) -> int:
    # Every binary file has the method; the type leaves it out.
    return int(file.readinto(buffer))  # type: ignore[attr-defined]


class _SectionBody(io.RawIOBase):
    """The file that Arrow reads one section from: piece by piece, each summed up.

    What a large read returns, which is a batch's numbers, is valid until the next large read, as
    they share their memory.
    """

    def __init__(self, file: BinaryIO, entry: SectionEntry) -> None:
        super().__init__()
        self._file = file
        self._left = entry.length
        self._memory = np.empty(0, np.uint8)
        self._crc = 0
        file.seek(entry.position)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return bytes(self._next(size))

    def read_buffer(self, size: int = -1) -> pa.Buffer:
        """Do what Arrow asks for instead of `read` if there is such a method."""
        return pa.py_buffer(self._next(size))

    def rest_crc(self) -> int:
        """Read what is left; return the checksum of the section."""
        while len(self._next(_CHUNK_BYTES)):
            pass
        return self._crc

    def _next(self, size: int) -> npt.NDArray[np.uint8]:
        wanted = self._left if size < 0 else min(size, self._left)
        piece, got = self._room(wanted), 0
        while got < wanted:
            part = piece[got : got + _CHUNK_BYTES]
            count = _read_into(self._file, part)
            if not count:
                break
            self._crc = google_crc32c.extend(self._crc, part[:count])
            got += count
        self._left -= wanted
        return piece[:got]

    def _room(self, size: int) -> npt.NDArray[np.uint8]:
        if size <= _CHUNK_BYTES:
            return np.empty(size, np.uint8)
        if size > len(self._memory):
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size]


class _Column:
    """A column of numbers while it is read, in order.

    Memory is touched only for what differs from the zeros, or the known column, that is there: the
    first touch of a page costs more than all else.
    """

    def __init__(self, entry: SectionEntry, name: str, dtype: np.dtype[Any], rooms: Rooms) -> None:
        self._place = (entry.name, name, entry.rows)
        self._rooms = rooms
        known = rooms.known(entry.name, name)
        if known is not None and len(known) == entry.rows and known.dtype == dtype:
            self.values, self._is_known = known, True
        else:
            self.values, self._is_known = rooms.zeros(*self._place, dtype), False

    def put(self, first: int, part: npt.NDArray[Any]) -> None:
        """Take the numbers of the rows from `first` on, behind those taken before."""
        rows = slice(first, first + len(part))
        if self._is_known:
            if np.array_equal(self.values[rows], part):
                return
            self._move(self._rooms.zeros(*self._place, part.dtype), first)
        if not _fits(part, self.values.dtype):
            self._move(np.zeros(len(self.values), part.dtype), first)
        if len(part) and (part[0] or part.any()):
            self.values[rows] = part

    def _move(self, room: npt.NDArray[Any], rows: int) -> None:
        room[:rows] = self.values[:rows]
        self.values, self._is_known = room, False


def _fits(part: npt.NDArray[Any], dtype: np.dtype[Any]) -> bool:
    if part.dtype == dtype or not len(part):
        return True
    bounds = np.iinfo(dtype)
    return bool(part.min() >= bounds.min and part.max() <= bounds.max)


def _read_numbers(
    body: _SectionBody, entry: SectionEntry, rooms: Rooms
) -> dict[str, npt.NDArray[Any]] | None:
    """Return the columns of a section; None, reading no row, unless all are numbers.

    Raises:
        ValueError: the rows are more or fewer, or their bytes fewer.
    """
    stream = pa.ipc.open_stream(body)
    if not all(_is_fixed(field.type) for field in stream.schema):
        return None
    columns = {
        field.name: _Column(entry, field.name, np.dtype(str(field.type)), rooms)
        for field in stream.schema
    }
    end = 0
    for batch in stream:
        first, end = end, end + batch.num_rows
        if end <= entry.rows:
            for values, field, column in zip(batch, stream.schema, columns.values(), strict=True):
                column.put(first, _chunk_to_numpy(values, np.dtype(str(field.type))))
    if end != entry.rows:
        raise ValueError(f"{end} rows, {entry.rows} according to the index")
    return {name: column.values for name, column in columns.items()}


def _as_list(values: "pa.ChunkedArray[Any]") -> list[Any]:
    # A piece at a time: one call for millions of texts would hold up the other threads of Python.
    return [value for chunk in values.chunks for value in chunk.to_pylist()]


def _is_fixed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _to_numpy(values: "pa.ChunkedArray[Any]") -> npt.NDArray[Any]:
    """Do what Arrow's `to_numpy` does, which imports pandas for more than a second of one core."""
    dtype = np.dtype(str(values.type))
    chunks = [_chunk_to_numpy(chunk, dtype) for chunk in values.chunks]
    return np.concatenate(chunks) if chunks else np.empty(0, dtype)


def _chunk_to_numpy(chunk: "pa.Array[Any]", dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    data = chunk.buffers()[1]
    if data is None:
        return np.empty(0, dtype)
    end = chunk.offset + len(chunk)
    if dtype == np.bool_:
        bits = np.frombuffer(memoryview(data), np.uint8)
        return np.unpackbits(bits, count=end, bitorder="little")[chunk.offset :].astype(np.bool_)
    return np.frombuffer(memoryview(data), dtype, count=end)[chunk.offset :]

"""Reads checkpoint files, a section at a time. Refuses what is not complete and intact.

Needs nothing but Arrow and a file, so that tools and jobs may use it apart from the controller.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streammeta.controller.snapshot.format import (
    CHECKSUM,
    END_MAGIC,
    FOOTER,
    HEADER,
    MAGIC,
    VERSION,
    CheckpointError,
    CheckpointId,
    SectionEntry,
)

_CHUNK_BYTES = 1 << 20


class CheckpointReader:
    """One checkpoint file, open. `id`, `cluster_id` and `entries` come from header and index."""

    def __init__(self, file: BinaryIO, name: str = "checkpoint") -> None:
        """Read and check header, index and footer; `file` is seekable.

        Raises:
            CheckpointError: they are missing or damaged.
        """
        self._file = file
        self._name = name
        self._size = file.seek(0, os.SEEK_END)
        self.id, self.cluster_id = self._read_header()
        self._digest, self._digest_end, self.entries = self._read_index()

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def table(self, section: str) -> pa.Table:
        """Return one section.

        Raises:
            CheckpointError: there is no such section, or its bytes are damaged.
        """
        entry = self.entries.get(section)
        if entry is None:
            raise self._error(f"has no section {section!r}, only {', '.join(self.entries)}")
        body = self._read(entry.position, entry.length)
        if google_crc32c.value(body) != entry.crc32c:
            raise self._error(
                f"section {section!r} at byte {entry.position} does not match its checksum"
            )
        try:
            return pa.ipc.open_stream(body).read_all()
        except (pa.ArrowInvalid, OSError) as error:
            raise self._error(f"section {section!r} is no Arrow IPC stream: {error}") from error

    def columns(self, section: str) -> dict[str, Any]:
        """Return one section as numpy arrays (numbers) and lists (text, bytes); raises likewise."""
        table = self.table(section)
        return {
            name: _to_numpy(values) if _is_fixed(values.type) else _as_list(values)
            for name, values in zip(table.column_names, table.columns, strict=True)
        }

    def sections(self) -> Mapping[str, dict[str, Any]]:
        """Return `columns` of every section, each read when it is asked for."""
        return _Sections(self)

    def verify(self) -> None:
        """Read the whole file and compare its digest.

        Raises:
            CheckpointError: some byte is not what was written.
        """
        state = hashlib.sha256()
        self._file.seek(0)
        left = self._digest_end
        while left:
            chunk = self._file.read(min(_CHUNK_BYTES, left))
            if not chunk:
                raise self._error(f"ends {left} bytes before its footer")
            state.update(chunk)
            left -= len(chunk)
        if state.digest() != self._digest:
            raise self._error(
                f"the digest of its {self._digest_end} bytes is {state.hexdigest()}, "
                f"the footer says {self._digest.hex()}; take another checkpoint"
            )

    def _read_header(self) -> tuple[CheckpointId, str]:
        fixed = self._read(0, HEADER.size)
        magic, version, end_offset, epoch, name_length = HEADER.unpack(fixed)
        if magic != MAGIC:
            raise self._error(f"begins with {magic!r}, a checkpoint begins with {MAGIC!r}")
        if version != VERSION:
            raise self._error(f"has format version {version}, this program reads {VERSION}")
        name = self._read(HEADER.size, name_length)
        (crc,) = CHECKSUM.unpack(self._read(HEADER.size + name_length, CHECKSUM.size))
        if google_crc32c.value(fixed + name) != crc:
            raise self._error("the header does not match its checksum")
        return CheckpointId(end_offset, epoch), name.decode()

    def _read_index(self) -> tuple[bytes, int, dict[str, SectionEntry]]:
        footer_at = self._size - FOOTER.size
        digest, crc, index_length, magic = FOOTER.unpack(self._read(footer_at, FOOTER.size))
        if magic != END_MAGIC:
            raise self._error("has no footer at its end; it was cut off, take another checkpoint")
        index = self._read(footer_at - index_length, index_length)
        if google_crc32c.value(index) != crc:
            raise self._error("the section index does not match its checksum")
        entries = [SectionEntry(**entry) for entry in json.loads(index)["sections"]]
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
    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self._reader.columns(name)

    def __contains__(self, name: object) -> bool:
        return name in self._reader.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.entries)

    def __len__(self) -> int:
        return len(self._reader.entries)


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

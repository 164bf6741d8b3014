"""Reading of one section of a checkpoint file: bytes with a checksum, columns into memory."""

import io
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

CHUNK_BYTES = 1 << 20
"""Bytes read or checked at once, so that other threads run in between."""


class ColumnBuffers:
    """Memory for columns of numbers that are read. A subclass may reuse existing arrays."""

    def zeros(self, section: str, column: str, rows: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return `rows` zeros of the column's type, or of a narrower one that its numbers fit."""
        return np.zeros(rows, dtype)

    def known(self, section: str, column: str) -> npt.NDArray[Any] | None:
        """Return an array that likely equals the column. It is used if it does."""
        return None


def read_into(file: BinaryIO, buffer: memoryview | npt.NDArray[np.uint8]) -> int:
    """Fill a buffer from a file and return the number of bytes read."""
    # Every binary file has the method, but the type omits it.
    return int(file.readinto(buffer))  # type: ignore[attr-defined]


class SectionBody(io.RawIOBase):
    """The file that Arrow reads one section from, in pieces, with a running checksum.

    The result of a large read, the numbers of a batch, is valid until the next large read, because
    large reads share memory.
    """

    def __init__(self, file: BinaryIO, position: int, length: int) -> None:
        super().__init__()
        self._file = file
        self._left = length
        self._memory = np.empty(0, np.uint8)
        self._crc = 0
        file.seek(position)

    def readable(self) -> bool:
        """Return True: Arrow asks before it reads."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes, or all that are left."""
        return bytes(self._next(size))

    def read_buffer(self, size: int = -1) -> pa.Buffer:
        """Read without a copy. Arrow prefers this method to `read`."""
        return pa.py_buffer(self._next(size))

    def rest_crc(self) -> int:
        """Read the remaining bytes and return the checksum of the section."""
        # Arrow need not read to the end, and the checksum covers all bytes.
        while len(self._next(CHUNK_BYTES)):
            pass
        return self._crc

    def _next(self, size: int) -> npt.NDArray[np.uint8]:
        wanted = self._left if size < 0 else min(size, self._left)
        piece, got = self._allocate(wanted), 0
        while got < wanted:
            part = piece[got : got + CHUNK_BYTES]
            count = read_into(self._file, part)
            # A file that ends early fails the checksum, which is compared later.
            if not count:
                break
            self._crc = google_crc32c.extend(self._crc, part[:count])
            got += count

        self._left -= wanted
        return piece[:got]

    def _allocate(self, size: int) -> npt.NDArray[np.uint8]:
        # Arrow keeps small buffers, such as a schema, so they are not shared.
        if size <= CHUNK_BYTES:
            return np.empty(size, np.uint8)
        if size > len(self._memory):
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size]


class _Column:
    """A column of numbers being read, in order.

    Memory is written only where it differs from the zeros, or from the known column, that it
    contains: the first write to a page costs more than everything else.
    """

    def __init__(
        self, section: str, name: str, rows: int, dtype: np.dtype[Any], buffers: ColumnBuffers
    ) -> None:
        self._place = (section, name, rows)
        self._buffers = buffers
        known = buffers.known(section, name)
        if known is not None and len(known) == rows and known.dtype == dtype:
            self.values, self._is_known = known, True
        else:
            self.values, self._is_known = buffers.zeros(*self._place, dtype), False

    def put(self, first: int, part: npt.NDArray[Any]) -> None:
        """Store the numbers of the rows from `first` on, after those stored before."""
        rows = slice(first, first + len(part))
        if self._is_known:
            # The known array serves as long as all rows agree with it.
            if np.array_equal(self.values[rows], part):
                return
            self._move(self._buffers.zeros(*self._place, part.dtype), first)
        # The buffer's narrower type was a guess that this batch disproves.
        if not _fits(part, self.values.dtype):
            self._move(np.zeros(len(self.values), part.dtype), first)
        # Writing zeros would only touch memory. `part[0]` mostly saves the scan.
        if len(part) and (part[0] or part.any()):
            self.values[rows] = part

    def _move(self, buffer: npt.NDArray[Any], rows: int) -> None:
        buffer[:rows] = self.values[:rows]
        self.values, self._is_known = buffer, False


def _fits(part: npt.NDArray[Any], dtype: np.dtype[Any]) -> bool:
    if part.dtype == dtype or not len(part):
        return True
    bounds = np.iinfo(dtype)
    return bool(part.min() >= bounds.min and part.max() <= bounds.max)


def read_numbers(
    body: SectionBody, section: str, rows: int, buffers: ColumnBuffers
) -> dict[str, npt.NDArray[Any]] | None:
    """Return the columns of a section. None, without reading rows, unless all are numbers.

    Raises:
        ValueError: the number of rows is wrong, or bytes are missing.
    """
    stream = pa.ipc.open_stream(body)
    if not all(is_fixed(field.type) for field in stream.schema):
        return None

    columns = {
        field.name: _Column(section, field.name, rows, np.dtype(str(field.type)), buffers)
        for field in stream.schema
    }

    end = 0
    for batch in stream:
        first, end = end, end + batch.num_rows
        # Surplus rows have no place in the buffers. The check below reports them.
        if end <= rows:
            for values, field, column in zip(batch, stream.schema, columns.values(), strict=True):
                column.put(first, _chunk_to_numpy(values, np.dtype(str(field.type))))
    if end != rows:
        raise ValueError(f"{end} rows, but the index has {rows}")
    return {name: column.values for name, column in columns.items()}


def to_list(values: "pa.ChunkedArray[Any]") -> list[Any]:
    """Return a column of texts or bytes as a list."""
    # In pieces, because one call for millions of texts would block the other Python threads.
    return [value for chunk in values.chunks for value in chunk.to_pylist()]


def is_fixed(kind: pa.DataType) -> bool:
    """Return whether a column of this type contains numbers."""
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def to_numpy(values: "pa.ChunkedArray[Any]") -> npt.NDArray[Any]:
    """Do as Arrow's `to_numpy`, which imports pandas for more than a second of one core."""
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

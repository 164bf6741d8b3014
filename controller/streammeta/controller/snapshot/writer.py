"""Writes checkpoint files, section by section, in pieces of a few megabytes.

Only one section is in memory at a time, and what is done with the interpreter's lock held takes no
longer than such a piece: the thread that writes shares its process with commits.
"""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, TypeAlias

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streammeta.controller.snapshot.format import (
    BINARY_COLUMNS,
    CHECKSUM,
    END_MAGIC,
    FOOTER,
    HEADER,
    MAGIC,
    VERSION,
    CheckpointId,
    SectionEntry,
)

BATCH_ROWS = 131_072
"""Rows of one Arrow record batch."""

Columns: TypeAlias = Mapping[str, npt.NDArray[Any] | Sequence[Any]]


class Sink(Protocol):
    """Where bytes go, in order."""

    def write(self, data: bytes, /) -> object:
        """Take all of `data`."""
        ...


def write_checkpoint(
    sink: Sink,
    checkpoint_id: CheckpointId,
    cluster_id: str,
    sections: Mapping[str, Columns | pa.Table],
) -> int:
    """Write a checkpoint to any binary sink; return its size in bytes."""
    output = _HashingSink(sink)
    output.write(_header(checkpoint_id, cluster_id))
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


class _HashingSink:
    """Counts and hashes what passes."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._hash = hashlib.sha256()
        self.position = 0

    def write(self, data: bytes) -> None:
        self._sink.write(data)
        self._hash.update(data)
        self.position += len(data)

    def digest(self) -> bytes:
        return self._hash.digest()


class _SectionSink(io.RawIOBase):
    """The file that Arrow writes one section to: counts it and sums it up."""

    def __init__(self, output: _HashingSink) -> None:
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


def _header(checkpoint_id: CheckpointId, cluster_id: str) -> bytes:
    name = cluster_id.encode()
    fixed = HEADER.pack(MAGIC, VERSION, checkpoint_id.end_offset, checkpoint_id.epoch, len(name))
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

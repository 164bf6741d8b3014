"""Undoing the compression of Kafka's record batches, within a bound.

Owns the codecs by their number in the attributes of a batch, and the framing that Kafka's clients
put around each (Kafka protocol guide, "Record Batch"; xerial's framing of snappy). Compressed bytes
may claim any size, so nothing is put out beyond the limit.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import Literal

from streammeta.storage.inspection.errors import PayloadError

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER_SIZE = 16
_LENGTH = struct.Struct(">i")
_GZIP_WINDOW = 16 + zlib.MAX_WBITS


class Compression(IntEnum):
    """How the records of a batch are compressed: bits 0-2 of its attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


def decompress(codec: Compression, data: memoryview, limit: int, *, origin: int = 0) -> bytes:
    """Return what `data` was before it was compressed.

    Raises `PayloadError` when it is malformed or gives more than `limit` bytes; `origin` is the
    position of `data[0]` in the payload, for the message.
    """
    match codec:
        case Compression.NONE:
            return bytes(data)
        case Compression.GZIP:
            return _gunzip(data, limit, origin)
        case Compression.SNAPPY:
            return _unsnap(data, limit, origin)
        case Compression.LZ4:
            return _from_frames("lz4", data, limit, origin)
        case Compression.ZSTD:
            return _from_frames("zstd", data, limit, origin)


def _gunzip(data: memoryview, limit: int, origin: int) -> bytes:
    inflating = zlib.decompressobj(_GZIP_WINDOW)
    try:
        out = inflating.decompress(data, limit + 1)
    except zlib.error as error:
        raise _malformed(Compression.GZIP, origin, error) from error
    if len(out) <= limit and not inflating.eof:
        raise _malformed(Compression.GZIP, origin, "it is cut short")
    return _bounded(out, limit, origin)


def _from_frames(codec: Literal["lz4", "zstd"], data: memoryview, limit: int, origin: int) -> bytes:
    """LZ4 frames and Zstandard frames, read as a stream: the size they claim is not believed."""
    import pyarrow as pa  # slow to import, and most payloads are not compressed

    try:
        with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(data)), codec) as stream:
            out: bytes = stream.read(limit + 1)
    except OSError as error:  # what Arrow raises on malformed frames
        raise _malformed(Compression[codec.upper()], origin, error) from error
    return _bounded(out, limit, origin)


def _unsnap(data: memoryview, limit: int, origin: int) -> bytes:
    """Read one snappy block, or blocks in the framing of Kafka's Java clients."""
    if bytes(data[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        return _unsnap_block(data, limit, origin)
    parts: list[bytes] = []
    at, left = _XERIAL_HEADER_SIZE, limit
    while at < len(data):
        if len(data) - at < _LENGTH.size:
            raise _malformed(Compression.SNAPPY, origin + at, "the length of a block is cut short")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if not 0 <= length <= len(data) - at:
            raise _malformed(
                Compression.SNAPPY, origin + at, f"a block has {length} of {len(data) - at} bytes"
            )
        parts.append(_unsnap_block(data[at : at + length], left, origin + at))
        left -= len(parts[-1])
        at += length
    return b"".join(parts)


def _unsnap_block(data: memoryview, limit: int, origin: int) -> bytes:
    import pyarrow as pa

    size = _snappy_size(data, origin)
    if size > limit:
        raise _too_large(limit, origin)
    try:
        out: bytes = pa.Codec("snappy").decompress(
            pa.py_buffer(data), decompressed_size=size, asbytes=True
        )
    except OSError as error:
        raise _malformed(Compression.SNAPPY, origin, error) from error
    return out


def _snappy_size(data: memoryview, origin: int) -> int:
    """Read the varint in front of a snappy block: what it becomes, at most 32 bits."""
    size = 0
    for index, byte in enumerate(data[:5]):
        size |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return size
    raise _malformed(Compression.SNAPPY, origin, "its size is cut short or too long")


def _bounded(out: bytes, limit: int, origin: int) -> bytes:
    if len(out) > limit:
        raise _too_large(limit, origin)
    return out


def _too_large(limit: int, origin: int) -> PayloadError:
    return PayloadError(
        origin,
        "decompressed size of the records",
        found=f"more than {limit} bytes",
        expected=f"at most {limit} bytes",
    )


def _malformed(codec: Compression, position: int, why: object) -> PayloadError:
    reason = " ".join(str(why).split())
    return PayloadError(
        position, f"{codec.name} data", found=f"malformed ({reason})", expected="well-formed data"
    )

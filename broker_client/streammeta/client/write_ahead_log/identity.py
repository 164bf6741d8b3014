"""Whose log it is, and the header with which each of its files begins.

Layout, big-endian: magic of 4 bytes, CRC-32C u32 of all that follows, version u16, namespace length
u16, node id i32, log id of 16 bytes, first sequence u64, namespace in UTF-8. The log id is drawn at
random when a log is made, and every checksum of a frame begins with it: frames never pass for those
of another log.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

from streammeta.client.arguments import INT32_MAX, check_int, check_text
from streammeta.client.write_ahead_log.errors import WrongLogError

SEGMENT_MAGIC = b"SMWL"
STATE_MAGIC = b"SMWS"
SET_ASIDE_MAGIC = b"SMWA"
VERSION = 1
LOG_ID_SIZE = 16
MAX_NAMESPACE_BYTES = 1024

_PREFIX = struct.Struct(">4sI")
_FIELDS = struct.Struct(">HHi16sQ")
_FIXED_SIZE = _PREFIX.size + _FIELDS.size
MAX_HEADER_SIZE = _FIXED_SIZE + MAX_NAMESPACE_BYTES


@dataclass(frozen=True, slots=True)
class LogIdentity:
    """The process that uses a log: `namespace` is that of the cluster's objects.

    A log belongs to one namespace and node for good; `node_epoch` grows from process to process.
    """

    namespace: str
    node_id: int
    node_epoch: int

    def __post_init__(self) -> None:
        """Refuse what a header can't hold."""
        check_text("namespace", self.namespace, "that of the cluster, `session.namespace`")
        check_int("node_id", self.node_id, 0, INT32_MAX)
        check_int("node_epoch", self.node_epoch)
        if len(self.namespace.encode()) > MAX_NAMESPACE_BYTES:
            raise ValueError(f"namespace is longer than {MAX_NAMESPACE_BYTES} bytes")


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The beginning of one file; the first record in it, if any, has `first_sequence`."""

    magic: bytes
    namespace: str
    node_id: int
    log_id: bytes
    first_sequence: int

    def encode(self) -> bytes:
        """Return the header's bytes."""
        name = self.namespace.encode()
        fields = _FIELDS.pack(VERSION, len(name), self.node_id, self.log_id, self.first_sequence)
        return _PREFIX.pack(self.magic, google_crc32c.value(fields + name)) + fields + name

    @property
    def size(self) -> int:
        """Bytes of the encoded header."""
        return _FIXED_SIZE + len(self.namespace.encode())


class BadHeaderError(Exception):
    """These bytes are not the header of a file of a log; the message says why."""


def decode_file_header(data: bytes, magic: bytes, path: Path) -> FileHeader:
    """Read the header at the beginning of `data`.

    Raises:
        BadHeaderError: it is not what was written.
        WrongLogError: another release wrote it; `path` is for the message.
    """
    if len(data) < _FIXED_SIZE:
        raise BadHeaderError(f"{len(data)} bytes, a header has at least {_FIXED_SIZE}")
    found, checksum = _PREFIX.unpack_from(data)
    if found != magic:
        raise BadHeaderError(f"starts with {bytes(found)!r}, wanted {magic!r}")
    version, length, node_id, log_id, first = _FIELDS.unpack_from(data, _PREFIX.size)
    end = _FIXED_SIZE + length
    if checksum != google_crc32c.value(data[_PREFIX.size : end]) or len(data) < end:
        raise BadHeaderError("the checksum of the file's header does not match")
    if version != VERSION:
        raise WrongLogError(
            f"{path} has version {version}, this release reads {VERSION}; use the release that"
            " wrote it"
        )
    return FileHeader(magic, data[_FIXED_SIZE:end].decode(), node_id, log_id, first)


def check_owner(header: FileHeader, identity: LogIdentity, path: Path) -> None:
    """Raise `WrongLogError` unless the file belongs to the node and namespace of `identity`."""
    if header.namespace != identity.namespace:
        raise WrongLogError(
            f"{path} belongs to namespace {header.namespace!r}, this broker to"
            f" {identity.namespace!r}; give it a directory of its own, or connect it to its cluster"
        )
    if header.node_id != identity.node_id:
        raise WrongLogError(
            f"{path} belongs to node {header.node_id}, this broker is node {identity.node_id};"
            " give it a directory of its own, or correct its node id"
        )

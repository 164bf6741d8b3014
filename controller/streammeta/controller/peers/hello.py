"""Hello: the first frame in each direction, with which two controllers identify each other.

The dialler names itself, its cluster, the node it wants and the purpose of the connection. The
listener names itself and its cluster, and accepts or rejects the connection. Pure: bytes in, values
out.

Hellos only grow at their end, and each version begins like the previous one, so a newer hello is
read as far as it is known. The connection uses the lower of both versions, which the answer states.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, unique

from streammeta.controller.features import UNTOLD, Levels, Software
from streammeta.controller.ids import ClusterId, NodeId

VERSION = 3
"""Version of the protocol between controllers, including frames, hellos and messages. Version 2
added the dialler's software to its hello. Version 3 added the address for callers with tokens to
the answer."""

OLDEST_VERSION = 1
"""Lowest supported version. Listeners of version 1 reject the hello of any other."""

_MAGIC = b"strmpeer"
_HELLO = struct.Struct(">8sHiiBBH")
_SOFTWARE = struct.Struct(">HHB")
_ANSWER = struct.Struct(">8sHiBB")
_LENGTH = struct.Struct(">H")


@unique
class Purpose(IntEnum):
    """Requests that a connection carries. Snapshots have their own, so that votes never queue."""

    CONTROL = 1
    BULK = 2


@unique
class Refusal(IntEnum):
    """Reason for which a listener closes the connection after its hello, NONE if it stays open."""

    NONE = 0
    UNKNOWN_VERSION = 1
    FOREIGN_CLUSTER = 2
    ANOTHER_NODE = 3
    CERTIFICATE_OF_ANOTHER = 4


class HelloError(Exception):
    """Bytes that are not a hello."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Hello of the dialler. Clients reach it at `client_endpoint`, empty if unknown."""

    cluster_id: ClusterId
    sender: NodeId
    receiver: NodeId
    purpose: Purpose
    client_endpoint: str = ""
    software: Software = UNTOLD
    """Software of the sender. Not part of version 1."""
    version: int = VERSION

    def encoded(self) -> bytes:
        """Return the payload of the hello's frame."""
        cluster, client = self.cluster_id.encode(), self.client_endpoint.encode()
        fields = _HELLO.pack(
            _MAGIC,
            self.version,
            self.sender,
            self.receiver,
            self.purpose,
            len(cluster),
            len(client),
        )
        return (
            fields
            + cluster
            + client
            + (_encode_software(self.software) if self.version > 1 else b"")
        )

    @classmethod
    def decoded(cls, payload: bytes) -> Hello:
        """Parse a payload. If its version is no longer supported, only the version is meaningful.

        Raises:
            HelloError: the payload is not a hello.
        """
        if len(payload) < _HELLO.size:
            raise HelloError(f"hello has {len(payload)} bytes, must have at least {_HELLO.size}")

        magic, version, sender, receiver, purpose, *lengths = _HELLO.unpack_from(payload)
        _require_magic(magic)
        # The layout of a version that is no longer supported is unknown.
        if version < OLDEST_VERSION:
            return cls(ClusterId(""), NodeId(0), NodeId(0), Purpose.CONTROL, version=version)

        # Names follow the fixed fields in the order of their lengths.
        (cluster, client), rest = _read_texts(payload[_HELLO.size :], lengths)
        software, rest = _read_software(rest) if version > 1 else (UNTOLD, rest)
        _require_end(rest, version)
        if sender < 0 or receiver < 0:
            raise HelloError(f"hello of node {sender} to node {receiver}: ids must be 0 or more")
        # A new purpose would need a new version, so an unknown one is damage.
        if purpose not in tuple(Purpose):
            raise HelloError(f"hello has purpose {purpose}, must be control (1) or bulk (2)")

        return cls(
            ClusterId(cluster),
            NodeId(sender),
            NodeId(receiver),
            Purpose(purpose),
            client,
            software,
            version,
        )


@dataclass(frozen=True, slots=True)
class HelloAnswer:
    """Hello of the listener. `version` is the one that both use from here on."""

    cluster_id: ClusterId
    node_id: NodeId
    refusal: Refusal = Refusal.NONE
    version: int = VERSION
    token_endpoint: str = ""
    """Where clients with tokens reach the listener, empty if nowhere. New in version 3."""

    def encoded(self) -> bytes:
        """Return the payload of the answer's frame."""
        cluster = self.cluster_id.encode()
        fields = _ANSWER.pack(_MAGIC, self.version, self.node_id, self.refusal, len(cluster))
        return fields + cluster + (_encode_text(self.token_endpoint) if self.version > 2 else b"")

    @classmethod
    def decoded(cls, payload: bytes) -> HelloAnswer:
        """Parse a payload. Raises HelloError if it is not an answer to a hello."""
        if len(payload) < _ANSWER.size:
            raise HelloError(f"answer has {len(payload)} bytes, must have at least {_ANSWER.size}")
        magic, version, node_id, refusal, length = _ANSWER.unpack_from(payload)
        _require_magic(magic)
        # The layout of other versions is unknown, so only the version is read.
        if not OLDEST_VERSION <= version <= VERSION:
            return cls(ClusterId(""), NodeId(0), Refusal.UNKNOWN_VERSION, version)
        (cluster,), rest = _read_texts(payload[_ANSWER.size :], [length])
        tokens, rest = _read_text(rest) if version > 2 else ("", rest)
        _require_end(rest, version)
        if refusal not in tuple(Refusal):
            raise HelloError(f"refusal {refusal} is unknown to this release")
        return cls(ClusterId(cluster), NodeId(node_id), Refusal(refusal), version, tokens)


def _encode_software(software: Software) -> bytes:
    text = software.version.encode()
    return _SOFTWARE.pack(software.levels.lowest, software.levels.highest, len(text)) + text


def _read_software(data: bytes) -> tuple[Software, bytes]:
    """Return the software at the start of `data`, and the rest."""
    if len(data) < _SOFTWARE.size:
        raise HelloError(f"software has {len(data)} bytes, must have at least {_SOFTWARE.size}")
    lowest, highest, length = _SOFTWARE.unpack_from(data)
    (version,), rest = _read_texts(data[_SOFTWARE.size :], [length])
    if not 0 < lowest <= highest:
        raise HelloError(f"levels are {lowest} to {highest}, must ascend from 1 or more")
    return Software(version, Levels(lowest, highest)), rest


def _encode_text(text: str) -> bytes:
    data = text.encode()
    return _LENGTH.pack(len(data)) + data


def _read_text(data: bytes) -> tuple[str, bytes]:
    """Return the length-prefixed text at the start of `data`, and the rest."""
    if len(data) < _LENGTH.size:
        raise HelloError(f"name has {len(data)} bytes, must have at least {_LENGTH.size}")
    (text,), rest = _read_texts(data[_LENGTH.size :], list(_LENGTH.unpack_from(data)))
    return text, rest


def _require_magic(magic: bytes) -> None:
    if magic != _MAGIC:
        raise HelloError(f"hello begins with {magic!r}, must begin with {_MAGIC!r}")


def _require_end(rest: bytes, version: int) -> None:
    """Require the end of the data, unless a newer version has added fields."""
    # A newer hello only grows at its end, and this release ignores the new fields.
    if rest and version <= VERSION:
        raise HelloError(f"{len(rest)} bytes follow the last field")


def _read_texts(data: bytes, lengths: list[int]) -> tuple[list[str], bytes]:
    """Return texts of the given lengths at the start of `data`, and the rest."""
    # Compared before slicing, because a slice beyond the end is shortened silently.
    if sum(lengths) > len(data):
        raise HelloError(f"names have {len(data)} bytes, but {sum(lengths)} are announced")
    texts, position = [], 0
    for length in lengths:
        try:
            texts.append(data[position : position + length].decode())
        except UnicodeDecodeError as error:
            raise HelloError(f"a name is not UTF-8: {error}") from None
        position += length
    return texts, data[position:]

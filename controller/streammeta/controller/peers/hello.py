"""Hello: the first frame of each direction, by which two controllers identify each other.

The dialler names itself, its cluster, the node it wants and what the connection is for; the
listener names itself and its cluster, and says whether it goes on. Pure: bytes in, values out.

Hellos grow at their end only, and each version's begins as that of the version before: a newer
hello is read as far as it is known. The lower version of both is spoken on the connection; the
answer states it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, unique

from streammeta.controller.features import UNTOLD, Levels, Software
from streammeta.controller.ids import ClusterId, NodeId

VERSION = 3
"""Version of the protocol between controllers: of frames, hellos and messages.

2 added the dialler's software to its hello, 3 the address for callers with tokens to the answer.
"""

OLDEST_VERSION = 1
"""Lowest version that is still spoken. Listeners of version 1 refuse the hello of any other."""

_MAGIC = b"strmpeer"
_HELLO = struct.Struct(">8sHiiBBH")
_SOFTWARE = struct.Struct(">HHB")
_ANSWER = struct.Struct(">8sHiBB")
_LENGTH = struct.Struct(">H")


@unique
class Purpose(IntEnum):
    """Requests that a connection carries; snapshots have their own, so that votes never queue."""

    CONTROL = 1
    BULK = 2


@unique
class Refusal(IntEnum):
    """Reason for which a listener closes the connection after its hello; NONE: it does not."""

    NONE = 0
    UNKNOWN_VERSION = 1
    FOREIGN_CLUSTER = 2
    ANOTHER_NODE = 3
    CERTIFICATE_OF_ANOTHER = 4


class HelloError(Exception):
    """Bytes that are no hello."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The dialler's hello; `client_endpoint` is where clients reach it, empty if unknown."""

    cluster_id: ClusterId
    sender: NodeId
    receiver: NodeId
    purpose: Purpose
    client_endpoint: str = ""
    software: Software = UNTOLD
    """Of the sender; not in a hello of version 1."""
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
        return fields + cluster + client + (_encoded(self.software) if self.version > 1 else b"")

    @classmethod
    def decoded(cls, payload: bytes) -> Hello:
        """Read a payload; of a version that is not spoken any more only the version counts.

        Raises:
            HelloError: it is no hello.
        """
        if len(payload) < _HELLO.size:
            raise HelloError(f"hello of {len(payload)} bytes; has at least {_HELLO.size}")

        magic, version, sender, receiver, purpose, *lengths = _HELLO.unpack_from(payload)
        _require_magic(magic)
        if version < OLDEST_VERSION:
            return cls(ClusterId(""), NodeId(0), NodeId(0), Purpose.CONTROL, version=version)

        (cluster, client), rest = _texts(payload[_HELLO.size :], lengths)
        software, rest = _software(rest) if version > 1 else (UNTOLD, rest)
        _require_end(rest, version)
        if sender < 0 or receiver < 0:
            raise HelloError(f"hello of node {sender} to node {receiver}; ids are 0 or more")
        if purpose not in tuple(Purpose):
            raise HelloError(f"hello for purpose {purpose}; wanted control (1) or bulk (2)")

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
    """The listener's hello; `version` is the one that both speak from here on."""

    cluster_id: ClusterId
    node_id: NodeId
    refusal: Refusal = Refusal.NONE
    version: int = VERSION
    token_endpoint: str = ""
    """Where clients with tokens reach the listener; empty: nowhere. Not before version 3."""

    def encoded(self) -> bytes:
        """Return the payload of the answer's frame."""
        cluster = self.cluster_id.encode()
        fields = _ANSWER.pack(_MAGIC, self.version, self.node_id, self.refusal, len(cluster))
        return fields + cluster + (_encoded_text(self.token_endpoint) if self.version > 2 else b"")

    @classmethod
    def decoded(cls, payload: bytes) -> HelloAnswer:
        """Read a payload; raises HelloError if it is no answer to a hello."""
        if len(payload) < _ANSWER.size:
            raise HelloError(f"answer of {len(payload)} bytes; has at least {_ANSWER.size}")
        magic, version, node_id, refusal, length = _ANSWER.unpack_from(payload)
        _require_magic(magic)
        if not OLDEST_VERSION <= version <= VERSION:
            return cls(ClusterId(""), NodeId(0), Refusal.UNKNOWN_VERSION, version)
        (cluster,), rest = _texts(payload[_ANSWER.size :], [length])
        tokens, rest = _text(rest) if version > 2 else ("", rest)
        _require_end(rest, version)
        if refusal not in tuple(Refusal):
            raise HelloError(f"refusal {refusal} is none that this release knows")
        return cls(ClusterId(cluster), NodeId(node_id), Refusal(refusal), version, tokens)


def _encoded(software: Software) -> bytes:
    text = software.version.encode()
    return _SOFTWARE.pack(software.levels.lowest, software.levels.highest, len(text)) + text


def _software(data: bytes) -> tuple[Software, bytes]:
    """Return the software at the start of `data`, and what follows it."""
    if len(data) < _SOFTWARE.size:
        raise HelloError(f"{len(data)} bytes of software; has at least {_SOFTWARE.size}")
    lowest, highest, length = _SOFTWARE.unpack_from(data)
    (version,), rest = _texts(data[_SOFTWARE.size :], [length])
    if not 0 < lowest <= highest:
        raise HelloError(f"levels {lowest} to {highest}; the lowest is 1 or more, then the highest")
    return Software(version, Levels(lowest, highest)), rest


def _encoded_text(text: str) -> bytes:
    data = text.encode()
    return _LENGTH.pack(len(data)) + data


def _text(data: bytes) -> tuple[str, bytes]:
    """Return the text behind its length at the start of `data`, and what follows it."""
    if len(data) < _LENGTH.size:
        raise HelloError(f"{len(data)} bytes of a name; has at least {_LENGTH.size}")
    (text,), rest = _texts(data[_LENGTH.size :], list(_LENGTH.unpack_from(data)))
    return text, rest


def _require_magic(magic: bytes) -> None:
    if magic != _MAGIC:
        raise HelloError(f"begins with {magic!r}; a controller's begins with {_MAGIC!r}")


def _require_end(rest: bytes, version: int) -> None:
    """Require that nothing follows, unless a newer version has added it."""
    if rest and version <= VERSION:
        raise HelloError(f"{len(rest)} bytes behind the last field")


def _texts(data: bytes, lengths: list[int]) -> tuple[list[str], bytes]:
    """Return texts of the given lengths at the start of `data`, and what follows them."""
    if sum(lengths) > len(data):
        raise HelloError(f"{len(data)} bytes of names, where {sum(lengths)} are announced")
    texts, position = [], 0
    for length in lengths:
        try:
            texts.append(data[position : position + length].decode())
        except UnicodeDecodeError as error:
            raise HelloError(f"a name is not UTF-8: {error}") from None
        position += length
    return texts, data[position:]

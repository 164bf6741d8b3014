"""Hello: the first frame of each direction, by which two controllers identify each other.

The dialler names itself, its cluster, the node it wants and what the connection is for; the
listener names itself and its cluster, and says whether it goes on. Pure: bytes in, values out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, unique

from streammeta.controller.ids import ClusterId, NodeId

VERSION = 1
"""Version of the protocol between controllers: of frames, hellos and messages."""

_MAGIC = b"strmpeer"
_HELLO = struct.Struct(">8sHiiBBH")
_ANSWER = struct.Struct(">8sHiBB")


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
        return fields + cluster + client

    @classmethod
    def decoded(cls, payload: bytes) -> Hello:
        """Read a payload; of another version only the version counts.

        Raises:
            HelloError: it is no hello.
        """
        if len(payload) < _HELLO.size:
            raise HelloError(f"hello of {len(payload)} bytes; has at least {_HELLO.size}")
        magic, version, sender, receiver, purpose, *lengths = _HELLO.unpack_from(payload)
        _require_magic(magic)
        if version != VERSION:
            return cls(ClusterId(""), NodeId(0), NodeId(0), Purpose.CONTROL, version=version)
        cluster, client = _texts(payload[_HELLO.size :], lengths)
        if sender < 0 or receiver < 0:
            raise HelloError(f"hello of node {sender} to node {receiver}; ids are 0 or more")
        if purpose not in tuple(Purpose):
            raise HelloError(f"hello for purpose {purpose}; wanted control (1) or bulk (2)")
        return cls(ClusterId(cluster), NodeId(sender), NodeId(receiver), Purpose(purpose), client)


@dataclass(frozen=True, slots=True)
class HelloAnswer:
    """The listener's hello."""

    cluster_id: ClusterId
    node_id: NodeId
    refusal: Refusal = Refusal.NONE

    def encoded(self) -> bytes:
        """Return the payload of the answer's frame."""
        cluster = self.cluster_id.encode()
        return _ANSWER.pack(_MAGIC, VERSION, self.node_id, self.refusal, len(cluster)) + cluster

    @classmethod
    def decoded(cls, payload: bytes) -> HelloAnswer:
        """Read a payload; raises HelloError if it is no answer to a hello."""
        if len(payload) < _ANSWER.size:
            raise HelloError(f"answer of {len(payload)} bytes; has at least {_ANSWER.size}")
        magic, version, node_id, refusal, length = _ANSWER.unpack_from(payload)
        _require_magic(magic)
        if version != VERSION:
            return cls(ClusterId(""), NodeId(0), Refusal.UNKNOWN_VERSION)
        (cluster,) = _texts(payload[_ANSWER.size :], [length])
        if refusal not in tuple(Refusal):
            raise HelloError(f"refusal {refusal} is none that this release knows")
        return cls(ClusterId(cluster), NodeId(node_id), Refusal(refusal))


def _require_magic(magic: bytes) -> None:
    if magic != _MAGIC:
        raise HelloError(f"begins with {magic!r}; a controller's begins with {_MAGIC!r}")


def _texts(data: bytes, lengths: list[int]) -> list[str]:
    """Return texts of the given lengths, which fill `data`."""
    if sum(lengths) != len(data):
        raise HelloError(f"{len(data)} bytes of names, where {sum(lengths)} are announced")
    texts, position = [], 0
    for length in lengths:
        try:
            texts.append(data[position : position + length].decode())
        except UnicodeDecodeError as error:
            raise HelloError(f"a name is not UTF-8: {error}") from None
        position += length
    return texts

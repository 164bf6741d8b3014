"""Parts of the quorum's messages on the wire: numbers, texts, headers, voters and batches.

Numbers are big-endian and signed, and most must not be negative. Texts are UTF-8 with a length
prefix. The constant part of a connection's headers is encoded and decoded once and cached.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import google_crc32c

from streammeta.controller.config import ConfigError, check_reachable
from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.ids import ClusterId, DirectoryId, NodeId
from streammeta.controller.quorum import messages
from streammeta.controller.quorum.voters import ReplicaKey
from streammeta.controller.runtime.interfaces import Endpoints

DIRECTORY_ID_CHARS_MAX = 64
"""Longer than any UUID. Ids are compared, stored in every voter set and shown, never parsed."""

_NO_LEADER = -1
_LENGTH = struct.Struct(">H")


# -- texts and numbers


@lru_cache(maxsize=256)
def text_part(text: str) -> bytes:
    """Return a text with its length prefix."""
    data = text.encode()
    return _LENGTH.pack(len(data)) + data


class FieldReader:
    """Reader of a payload's fields in order. Raises InvalidRequestError where it is too short."""

    def __init__(self, data: bytes, position: int = 0) -> None:
        self._data = data
        self.position = position

    def fields(self, layout: struct.Struct, what: str) -> tuple[Any, ...]:
        """Return fields of a fixed layout."""
        values = unpack_fields(layout, self._data, self.position, what)
        self.position += layout.size
        return values

    def raw(self, length: int, what: str) -> bytes:
        """Return `length` bytes."""
        end = self.position + length
        if end > len(self._data):
            raise too_short(what, self._data, end)
        data = self._data[self.position : end]
        self.position = end
        return data

    def text(self, what: str) -> str:
        """Return a text."""
        (length,) = self.fields(_LENGTH, what)
        try:
            return self.raw(length, what).decode()
        except UnicodeDecodeError as error:
            raise InvalidRequestError(what, f"not UTF-8: {error.reason}") from None

    def end(self) -> None:
        """Require the end of the payload."""
        require_end(self._data, self.position)


def unpack_fields(layout: struct.Struct, data: bytes, position: int, what: str) -> tuple[Any, ...]:
    """Return the fields at a position. Raises InvalidRequestError if the data ends before."""
    try:
        return layout.unpack_from(data, position)
    except struct.error:
        raise too_short(what, data, position + layout.size) from None


def too_short(what: str, data: bytes, wanted: int) -> InvalidRequestError:
    """Return the error for data that ends within a field."""
    return InvalidRequestError(
        what, f"the message has {len(data)} bytes, must have at least {wanted}"
    )


def require_end(data: bytes, position: int) -> None:
    """Raise InvalidRequestError unless the data ends here."""
    if position != len(data):
        raise InvalidRequestError("message", f"{len(data) - position} bytes follow its last field")


def not_negative(names: Sequence[str], values: Sequence[int]) -> None:
    """Reject the first of the named values that is negative."""
    if min(values) < 0:
        name, value = next(pair for pair in zip(names, values, strict=True) if pair[1] < 0)
        raise InvalidRequestError(name, f"{value}, must be 0 or more")


def flag(number: int, name: str) -> bool:
    """Return a boolean. Raises InvalidRequestError if the number is neither 0 nor 1."""
    if number > 1:
        raise InvalidRequestError(name, f"{number}, must be 0 or 1")
    return number == 1


# -- replicas and voters

_NODE = struct.Struct(">i")


def key_part(key: ReplicaKey) -> bytes:
    """Return a replica's key."""
    return _NODE.pack(key.node_id) + text_part(key.directory_id or "")


def read_key(reader: FieldReader, path: str) -> ReplicaKey:
    """Read a replica's key."""
    (node_id,) = reader.fields(_NODE, f"{path}.node_id")
    not_negative((f"{path}.node_id",), (node_id,))
    directory = reader.text(f"{path}.directory_id")
    if len(directory) > DIRECTORY_ID_CHARS_MAX:
        raise InvalidRequestError(
            f"{path}.directory_id",
            f"has {len(directory)} characters, the limit is {DIRECTORY_ID_CHARS_MAX}",
        )
    return ReplicaKey(NodeId(node_id), DirectoryId(directory) if directory else None)


def require_reachable(path: str, endpoint: str) -> None:
    """Raise InvalidRequestError unless the endpoint is `host:port`, because others will use it."""
    try:
        check_reachable(path, endpoint)
    except ConfigError as error:
        raise InvalidRequestError(path, str(error).removeprefix(f"{path}: ")) from None


# -- headers

_ASKED = struct.Struct(">qqqBH")
_ASKED_NAMES = ("header.epoch", "header.incarnation", "header.request_id")
_ANSWERED = struct.Struct(">iiqqqiB")
_ANSWERED_NAMES = (
    "header.sender", "header.receiver", "header.epoch", "header.incarnation", "header.request_id",
)  # fmt: skip


@lru_cache(maxsize=64)
def _identities(cluster_id: str, sender: ReplicaKey, receiver: ReplicaKey) -> bytes:
    """Return the constant part of a connection's request headers."""
    return text_part(cluster_id) + key_part(sender) + key_part(receiver)


@lru_cache(maxsize=64)
def _read_identities(data: bytes) -> tuple[ClusterId, ReplicaKey, ReplicaKey]:
    reader = FieldReader(data)
    cluster_id = ClusterId(reader.text("header.cluster_id"))
    sender, receiver = read_key(reader, "header.sender"), read_key(reader, "header.receiver")
    reader.end()
    return cluster_id, sender, receiver


def ask_part(header: messages.RequestHeader) -> bytes:
    """Return the header of a request."""
    names = _identities(header.cluster_id, header.sender, header.receiver)
    fixed = _ASKED.pack(
        header.epoch, header.incarnation, header.request_id, header.is_founder, len(names)
    )
    return fixed + names


def read_ask(data: bytes) -> tuple[messages.RequestHeader, int]:
    """Return the header of a request, and its end."""
    epoch, incarnation, request_id, is_founder, length = unpack_fields(_ASKED, data, 0, "header")
    not_negative(_ASKED_NAMES, (epoch, incarnation, request_id))
    end = _ASKED.size + length
    if end > len(data):
        raise too_short("header", data, end)

    cluster_id, sender, receiver = _read_identities(data[_ASKED.size : end])
    header = messages.RequestHeader(
        cluster_id=cluster_id,
        sender=sender,
        receiver=receiver,
        epoch=epoch,
        incarnation=incarnation,
        request_id=request_id,
        is_founder=flag(is_founder, "header.is_founder"),
    )
    return header, end


def answer_part(header: messages.ResponseHeader, leader: Endpoints) -> bytes:
    """Return the header of an answer. Addresses are included only with a leader's id."""
    leader_id = _NO_LEADER if header.leader_id is None else header.leader_id
    if leader_id == _NO_LEADER:
        leader = Endpoints()
    fixed = _ANSWERED.pack(
        header.sender,
        header.receiver,
        header.epoch,
        header.incarnation,
        header.request_id,
        leader_id,
        header.error,
    )
    return b"".join((fixed, text_part(leader.peers or ""), text_part(leader.clients or "")))


def read_answer(data: bytes) -> tuple[messages.ResponseHeader, Endpoints, int]:
    """Return the header of an answer, the leader's addresses, and the header's end."""
    fixed = unpack_fields(_ANSWERED, data, 0, "header")
    not_negative(_ANSWERED_NAMES, fixed[:5])
    sender, receiver, epoch, incarnation, request_id, leader_id, number = fixed
    if leader_id < _NO_LEADER:
        raise InvalidRequestError("header.leader_id", f"{leader_id}, must be -1 or more")

    error = _ERRORS.get(number)
    if error is None:
        known = ", ".join(f"{error.name} ({error.value})" for error in messages.QuorumError)
        raise InvalidRequestError("header.error", f"{number}, must be one of {known}")

    end = _text_end(data, _text_end(data, _ANSWERED.size))
    header = messages.ResponseHeader(
        sender=sender,
        receiver=receiver,
        epoch=epoch,
        leader_id=None if leader_id == _NO_LEADER else leader_id,
        error=error,
        incarnation=incarnation,
        request_id=request_id,
    )
    return header, _read_leader(data[_ANSWERED.size : end]), end


_ERRORS = {int(error): error for error in messages.QuorumError}


def _text_end(data: bytes, position: int) -> int:
    """Return the end of the text at a position."""
    (length,) = unpack_fields(_LENGTH, data, position, "header.leader_endpoint")
    end: int = position + _LENGTH.size + length
    if end > len(data):
        raise too_short("header.leader_endpoint", data, end)
    return end


@lru_cache(maxsize=64)
def _read_leader(data: bytes) -> Endpoints:
    reader = FieldReader(data)
    peers, clients = reader.text("header.leader_endpoint"), reader.text("header.leader_clients")
    reader.end()
    return Endpoints(peers or None, clients or None)


# -- batches

_BATCH = struct.Struct(">qqBI")
_CHECKSUM = struct.Struct(">I")


class _BatchEncoder:
    """Encoder of batches that caches the last one, because a leader sends it to every follower."""

    def __init__(self) -> None:
        self._last: messages.Batch | None = None
        self._parts = (b"", b"")

    def parts(self, batch: messages.Batch) -> tuple[bytes, bytes]:
        """Return the parts of `_encode_batch`."""
        if batch is not self._last:
            self._last, self._parts = batch, _encode_batch(batch)
        return self._parts


batch_parts = _BatchEncoder().parts
"""Return a batch and the CRC-32C of its bytes: fields, lengths of the payloads, payloads."""


def _encode_batch(batch: messages.Batch) -> tuple[bytes, bytes]:
    count = len(batch.payloads)
    fields = _BATCH.pack(batch.base_offset, batch.epoch, batch.kind, count)
    lengths = struct.pack(f">{count}I", *map(len, batch.payloads))
    data = b"".join((fields, lengths, *batch.payloads))
    return data, _CHECKSUM.pack(google_crc32c.value(data))


def _read_batch(data: bytes, start: int, path: str) -> tuple[messages.Batch, int]:
    """Return the batch at a position, and its end."""
    base_offset, epoch, number, count = unpack_fields(_BATCH, data, start, path)
    position = start + _BATCH.size
    # The count is untrusted, so it is compared with the data before anything is allocated.
    if position + 4 * count > len(data):
        raise too_short(f"{path}: batch at {base_offset}", data, position + 4 * count)

    lengths = struct.unpack_from(f">{count}I", data, position)
    position += 4 * count
    end = position + sum(lengths)
    (checksum,) = unpack_fields(_CHECKSUM, data, end, f"{path}: batch at {base_offset}")
    if google_crc32c.value(data[start:end]) != checksum:
        raise InvalidRequestError(path, f"batch at {base_offset}: its checksum does not match")

    _check_batch(path, base_offset, epoch, number, count)
    payloads = []
    for length in lengths:
        payloads.append(data[position : position + length])
        position += length

    return messages.Batch(
        base_offset, epoch, messages.BatchKind(number), tuple(payloads)
    ), end + _CHECKSUM.size


def _check_batch(path: str, base_offset: int, epoch: int, kind: int, count: int) -> None:
    not_negative((f"{path}.base_offset", f"{path}.epoch"), (base_offset, epoch))
    if kind not in _BATCH_KINDS:
        raise InvalidRequestError(path, f"batch at {base_offset} has the unknown kind {kind}")
    if not count:
        raise InvalidRequestError(path, f"batch at {base_offset} is empty")


_BATCH_KINDS = frozenset(int(kind) for kind in messages.BatchKind)


def read_batches(data: bytes, position: int, count: int) -> tuple[tuple[messages.Batch, ...], int]:
    """Return batches, each of which must continue the previous one, and their end."""
    batches: list[messages.Batch] = []
    for _ in range(count):
        batch, position = _read_batch(data, position, "batches")
        batches.append(batch)
    for before, batch in pairwise(batches):
        if batch.base_offset != before.end_offset or batch.epoch < before.epoch:
            raise InvalidRequestError(
                "batches",
                f"batch at {batch.base_offset} of epoch {batch.epoch} does not continue the one "
                f"before it, which ends at {before.end_offset} in epoch {before.epoch}",
            )
    return tuple(batches), position

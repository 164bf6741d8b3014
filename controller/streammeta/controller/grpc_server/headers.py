"""Headers of calls: blocks of HPACK (RFC 7541) in, what a call begins with out, and back.

Blocks are decoded by the package hpack. A block that leaves the dynamic table as it was means the
same again until the table changes, so what it means is kept until then: clients repeat theirs.
What is sent is literal, so that the other side's table is never used. Does no I/O.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from hpack import Decoder, HPACKError

from streammeta.controller.grpc_server.frames import ErrorCode, Http2Error

BLOCK_BYTES_MAX = 32 << 10
"""Longest block that is decoded; of a longer one only what changes the table is."""

LIST_BYTES_MAX = 64 << 10
"""Longest list of headers that a block may stand for; beyond it the connection ends."""

_ENTRY_BYTES = 32
"""Bytes that a header counts beside its name and value (RFC 9113, 6.5.2)."""

FIELDS_MAX = LIST_BYTES_MAX // _ENTRY_BYTES
"""Headers of a block, decoded or passed over, beyond which the connection ends."""

TABLE_UPDATES_MAX = 16
"""Changes of the table's size that may begin a block: an encoder needs two (RFC 7541, 4.2)."""

STEP_BYTES = 64
"""Bytes of a block that are as much work as a header."""

_ENTRY_BYTES_MAX = 16 << 10
"""Encoded bytes beyond which a name or value is longer than any table, however it is encoded."""

KEPT_BLOCKS_MAX = 64
KEPT_BLOCK_BYTES_MAX = 1_024
"""Blocks of which one connection keeps what they mean."""

MetadataValue: TypeAlias = str | bytes
Metadata: TypeAlias = tuple[tuple[str, MetadataValue], ...]


@dataclass(frozen=True, slots=True)
class Head:
    """The headers of one call."""

    path: str = ""
    timeout_s: float | None = None
    metadata: Metadata = ()
    """What the caller says beside its request; names of HTTP and of gRPC itself are left out."""
    encoding: str = "identity"
    """By what its messages may be compressed."""
    http_status: int = 200
    """Another one refuses a request that is none of gRPC."""
    content_length: int | None = None
    """Bytes of the request, if its client says how many there are."""
    is_malformed: bool = False
    """It breaks a rule of HTTP/2."""
    may_end: bool = False
    """It may come after the data of a request: there is no pseudo-header in it."""
    is_too_large: bool = False
    """It is beyond the size that the other side was told."""


_MALFORMED = Head(is_malformed=True)
_TRAILERS = Head(is_malformed=True, may_end=True)
_OF_HOPS = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_LISTS = frozenset({b"te", b"grpc-accept-encoding", b"accept-encoding"})
_SINGLE = frozenset(
    {*(b"content-type", b"content-length", b"host"), *(b"grpc-timeout", b"grpc-encoding")}
)
_OWN = _LISTS | _SINGLE
"""Names of HTTP and of gRPC itself: those that may come several times, and those that may not."""
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_TIMEOUT_DIGITS_MAX = 8
_LENGTH_DIGITS_MAX = 18

_LETTERS = b"abcdefghijklmnopqrstuvwxyz"
_NAME_BYTES = b"!#$%&'*+-.^_`|~0123456789" + _LETTERS
_METHOD_BYTES = _NAME_BYTES + _LETTERS.upper()
_SCHEME_BYTES = b"+-.0123456789" + _LETTERS + _LETTERS.upper()
_VISIBLE_BYTES = bytes(range(0x21, 0x7F))
_VALUE_BYTES = b"\t " + _VISIBLE_BYTES + bytes(range(0x80, 0x100))
_BLANKS = (b" ", b"\t")
_PSEUDO_BYTES = {
    b":method": _METHOD_BYTES,
    b":scheme": _SCHEME_BYTES,
    b":path": _VISIBLE_BYTES,
    b":authority": _VISIBLE_BYTES.replace(b"@", b""),  # no names of users (RFC 9113, 8.3.1)
}
"""Bytes of values: other ones could begin another header, or request, wherever they are written."""


class HeaderDecoder:
    """Decodes the blocks of one connection, all of them and in their order."""

    def __init__(self, list_bytes_max: int) -> None:
        """Headers of more than `list_bytes_max` are decoded and refused."""
        self._list_bytes_max = list_bytes_max
        self._decoder = Decoder(max_header_list_size=LIST_BYTES_MAX)
        self._kept: dict[bytes, Head] = {}
        self.steps = 0
        """Work so far: one for each header and each `STEP_BYTES` of a block that was not kept."""

    def decode(self, block: bytes) -> Head:
        """Return what a block means.

        Raises:
            Http2Error: it is no block, or too large to be decoded.
        """
        kept = self._kept.get(block)
        if kept is not None:
            return kept
        table = self._decoder.header_table
        before = (table.maxsize, len(table.dynamic_entries), _newest(table.dynamic_entries))
        found = self._fields(block)
        after = (table.maxsize, len(table.dynamic_entries), _newest(table.dynamic_entries))
        head = _head(found, self._list_bytes_max)
        # A new entry is another object; one that only pushes others out changes their number.
        if before[:2] != after[:2] or before[2] is not after[2]:
            self._kept.clear()
        elif len(block) <= KEPT_BLOCK_BYTES_MAX:
            if len(self._kept) >= KEPT_BLOCKS_MAX:
                self._kept.clear()
            self._kept[block] = head
        return head

    def _fields(self, block: bytes) -> Sequence[tuple[bytes, bytes]]:
        _require_few_updates(block)
        self.steps += len(block) // STEP_BYTES
        try:
            found = list(self._decoder.decode(block, raw=True))
        except HPACKError as error:
            self.steps += min(len(block), FIELDS_MAX)  # as many as may have been decoded
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, f"headers: {error}") from None
        self.steps += len(found)
        return found

    def skipper(self) -> BlockSkipper:
        """Return what takes the next block, in pieces, if it is too long to be decoded."""
        self._kept.clear()
        return BlockSkipper(self, self._decoder)


def _require_few_updates(block: bytes) -> None:
    """Raise Http2Error if too many changes of the table's size begin a block."""
    at = updates = 0
    while at < len(block) and block[at] & 0xE0 == _UPDATE:
        updates += 1
        if updates > TABLE_UPDATES_MAX:
            raise _too_many_updates()
        read = _read_integer(block, at, 5)
        if read is None:
            return
        at = read[1]


def _too_many_updates() -> Http2Error:
    return Http2Error(
        ErrorCode.ENHANCE_YOUR_CALM,
        f"headers: more than {TABLE_UPDATES_MAX} changes of the table's size in a block",
    )


class BlockSkipper:
    """Passes over a block in pieces, but for what it changes in the table: later blocks need it."""

    def __init__(self, work: HeaderDecoder, decoder: Decoder) -> None:
        """Count steps at `work`."""
        self._work = work
        self._decoder = decoder
        self._buffer = b""
        self._passing = 0
        self._fields = self._updates = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            Http2Error: they are of no block, or of too many headers.
        """
        self._work.steps += len(data) // STEP_BYTES
        passed = min(self._passing, len(data))
        self._passing -= passed
        buffer, at = self._buffer + data[passed:], 0
        try:
            while at < len(buffer):
                end = self._end_of(buffer, at)
                if end is None:
                    break
                self._count(buffer[at])
                at = end
        except HPACKError as error:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, f"headers: {error}") from None
        self._passing += max(0, at - len(buffer))
        self._buffer = buffer[at:]

    def _count(self, first: int) -> None:
        """Count a header or a change of the table; raises Http2Error above a bound."""
        self._work.steps += 1
        if first & 0xE0 != _UPDATE:
            self._fields += 1
            if self._fields > FIELDS_MAX:
                raise Http2Error(
                    ErrorCode.ENHANCE_YOUR_CALM, f"more than {FIELDS_MAX} headers in a block"
                )
            return
        self._updates += 1
        if self._fields:
            raise Http2Error(
                ErrorCode.COMPRESSION_ERROR, "headers: a change of the table's size amid a block"
            )
        if self._updates > TABLE_UPDATES_MAX:
            raise _too_many_updates()

    def end(self) -> Head:
        """Return what the block means: a refusal; raises Http2Error if it is cut short."""
        if self._buffer or self._passing:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, "headers: cut short")
        return Head(is_too_large=True)

    def _end_of(self, data: bytes, at: int) -> int | None:
        """Return where one header ends, which may be still to come; None if that is not known."""
        first = data[at]
        if first & 0x80:
            return _after(_read_integer(data, at, 7))
        adds, updates = bool(first & 0x40), first & 0xE0 == _UPDATE
        read = _read_integer(data, at, 6 if adds else 5 if updates else 4)
        if read is None or updates:
            if read is not None:
                self._decoder.decode(data[at : read[1]], raw=True)
            return _after(read)
        name, place = read
        if not name:
            named = _read_integer(data, place, 7)
            if named is None:
                return None
            if named[0] > _ENTRY_BYTES_MAX:
                raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"a name of {named[0]} bytes")
            place = named[0] + named[1]
        valued = _read_integer(data, place, 7)
        if valued is None:
            return None
        end = valued[0] + valued[1]
        if not adds:
            return end
        if valued[0] > _ENTRY_BYTES_MAX:
            table = self._decoder.header_table
            table.add(b"", bytes(table.maxsize))  # longer than the table: it is empty then
            return end
        if end > len(data):
            return None
        self._decoder.decode(data[at:end], raw=True)
        return end


def _after(read: tuple[int, int] | None) -> int | None:
    return None if read is None else read[1]


_INTEGER_BYTES_MAX = 5

_UPDATE = 0x20
"""Upper three bits of the byte that begins a change of the table's size."""


def _read_integer(data: bytes, at: int, prefix_bits: int) -> tuple[int, int] | None:
    """Return an integer of HPACK and where it ends; None if it is not all there."""
    if at >= len(data):
        return None
    most = (1 << prefix_bits) - 1
    value = data[at] & most
    if value < most:
        return value, at + 1
    for number, each in enumerate(data[at + 1 : at + 1 + _INTEGER_BYTES_MAX]):
        value += (each & 0x7F) << 7 * number
        if each < 0x80:
            return value, at + 2 + number
    if len(data) > at + _INTEGER_BYTES_MAX:
        raise Http2Error(ErrorCode.COMPRESSION_ERROR, "headers: an integer without an end")
    return None


def _newest(entries: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, bytes] | None:
    return entries[0] if entries else None


def _head(headers: Sequence[tuple[bytes, bytes]], list_bytes_max: int) -> Head:
    pseudo: dict[bytes, bytes] = {}
    own: dict[bytes, bytes] = {}
    metadata: list[tuple[str, MetadataValue]] = []
    if sum(len(name) + len(value) + _ENTRY_BYTES for name, value in headers) > list_bytes_max:
        return Head(is_too_large=True)  # whatever it says, and before all of it is looked at

    for name, value in headers:
        if name[:1] == b":":
            if name in pseudo or own or metadata or not _is_pseudo(name, value):
                return _MALFORMED
            pseudo[name] = value
        elif not _is_sound(name, value) or (name in own and name in _SINGLE):
            return _MALFORMED
        elif name in _OWN:
            own[name] = value
        else:
            try:
                metadata.append(_metadatum(name, value))
            except ValueError:
                return _MALFORMED
    return _judged(pseudo, own, tuple(metadata)) if pseudo else _TRAILERS


def _is_pseudo(name: bytes, value: bytes) -> bool:
    return name in _PSEUDO and _is_of(_PSEUDO_BYTES[name], value)


def _is_sound(name: bytes, value: bytes) -> bool:
    if not name or not _is_of(_NAME_BYTES, name) or name in _OF_HOPS:
        return False
    if name == b"te" and value != b"trailers":
        return False
    has_blank_ends = value[:1] in _BLANKS or value[-1:] in _BLANKS
    return _is_of(_VALUE_BYTES, value) and not has_blank_ends


def _is_of(allowed: bytes, value: bytes) -> bool:
    """Return whether all bytes of a value are among those that are allowed."""
    return not value.translate(None, allowed)


def _metadatum(name: bytes, value: bytes) -> tuple[str, MetadataValue]:
    if not name.endswith(b"-bin"):
        return name.decode("ascii"), value.decode("latin-1")
    try:
        decoded = base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
    return name.decode("ascii"), decoded


def _judged(pseudo: Mapping[bytes, bytes], own: Mapping[bytes, bytes], metadata: Metadata) -> Head:
    method, path = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    if not method or not pseudo.get(b":scheme") or not _is_path(method, path):
        return _MALFORMED
    authority = pseudo.get(b":authority")
    if authority is not None and own.get(b"host", authority).lower() != authority.lower():
        return _MALFORMED
    try:
        head = Head(
            path=path.decode("ascii"),
            timeout_s=_timeout(own.get(b"grpc-timeout")),
            metadata=metadata,
            encoding=own.get(b"grpc-encoding", b"identity").decode("ascii"),
            content_length=_length(own.get(b"content-length")),
        )
    except ValueError:
        return _MALFORMED
    if method != b"POST":
        return replace(head, http_status=405)
    kind = own.get(b"content-type", b"")
    if kind != b"application/grpc" and not kind.startswith(
        (b"application/grpc+", b"application/grpc;")
    ):
        return replace(head, http_status=415)
    return head


def _is_path(method: bytes, path: bytes) -> bool:
    return path[:1] == b"/" or (path == b"*" and method == b"OPTIONS")


def _length(value: bytes | None) -> int | None:
    """Return a number of bytes; raises ValueError."""
    if value is None:
        return None
    if not value.isdigit() or len(value) > _LENGTH_DIGITS_MAX:
        raise ValueError("content-length is not a number")
    return int(value)


def _timeout(value: bytes | None) -> float | None:
    """Return a timeout in seconds; raises ValueError."""
    if value is None:
        return None
    text = value.decode("ascii")
    digits, unit = text[:-1], text[-1:]
    if not digits.isdecimal() or len(digits) > _TIMEOUT_DIGITS_MAX or unit not in _UNITS:
        raise ValueError(f"grpc-timeout: {text!r}")
    return int(digits) * _UNITS[unit]


def _integer(value: int, prefix_bits: int, first: int = 0) -> bytes:
    most = (1 << prefix_bits) - 1
    if value < most:
        return bytes((first | value,))
    made = bytearray((first | most,))
    value -= most
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def literal(name: bytes, value: bytes) -> bytes:
    """Return one header of a block, which changes no table."""
    return b"".join((b"\0", _integer(len(name), 7), name, _integer(len(value), 7), value))


NO_TABLE = b"\x20"
"""Begin of the next block after the other side has asked for a smaller table: none is used."""

ANSWER_HEAD = b"\x88" + b"\x0f\x10" + _integer(16, 7) + b"application/grpc"
"""Block that begins every answer: :status 200 and content-type."""

ACCEPTED_ENCODINGS: Metadata = (("grpc-accept-encoding", "identity"),)
"""Names the encodings of messages that are accepted: none compresses."""

STATUS_OK = literal(b"grpc-status", b"0")
"""Block that ends a call which was answered."""


def refusal_head(http_status: int) -> bytes:
    """Return the block of an answer to a request that is none of gRPC."""
    return literal(b":status", str(http_status).encode())


def status(
    code: int, message: str = "", metadata: Iterable[tuple[str, MetadataValue]] = ()
) -> bytes:
    """Return the block that ends a call, without that of its begin."""
    parts = [STATUS_OK if not code else literal(b"grpc-status", str(code).encode())]
    if message:
        parts.append(literal(b"grpc-message", _escaped(message)))
    parts.append(metadata_block(metadata))
    return b"".join(parts)


def metadata_block(metadata: Iterable[tuple[str, MetadataValue]]) -> bytes:
    """Return the block of some metadata; bytes belong to names that end in `-bin`."""
    return b"".join(
        literal(
            name.encode("ascii"),
            base64.b64encode(value) if isinstance(value, bytes) else value.encode("ascii"),
        )
        for name, value in metadata
    )


def _escaped(message: str) -> bytes:
    """Return a text as `grpc-message` wants it: printable ASCII, all else as %XX."""
    raw = message.encode("utf-8", "replace")
    if raw.isascii() and b"%" not in raw and message.isprintable():
        return raw
    return b"".join(
        bytes((each,)) if 0x20 <= each <= 0x7E and each != 0x25 else b"%%%02X" % each
        for each in raw
    )

"""Headers of calls: decodes HPACK blocks (RFC 7541) of requests, and encodes blocks of answers.

The package hpack decodes blocks. A block that leaves the dynamic table unchanged has the same
meaning until the table changes, so its meaning is cached: clients repeat their blocks. Answers use
literals only, so the client's table stays unused. Does no I/O.
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
"""Maximum size of a block that is decoded. Longer blocks are only scanned for table changes."""

LIST_BYTES_MAX = 64 << 10
"""Maximum size of a decoded list of headers. A larger one ends the connection."""

_ENTRY_BYTES = 32
"""Overhead of a header in addition to name and value (RFC 9113, 6.5.2)."""

FIELDS_MAX = LIST_BYTES_MAX // _ENTRY_BYTES
"""Maximum number of headers in a block, decoded or skipped. More end the connection."""

TABLE_UPDATES_MAX = 16
"""Maximum number of table size updates in a block. An encoder needs two (RFC 7541, 4.2)."""

STEP_BYTES = 64
"""Bytes of a block that cost as much work as one header."""

_ENTRY_BYTES_MAX = 16 << 10
"""Encoded size above which a name or value exceeds any table, however it is encoded."""

KEPT_BLOCKS_MAX = 64
KEPT_BLOCK_BYTES_MAX = 1_024
"""Maximum number and size of cached blocks of one connection."""

MetadataValue: TypeAlias = str | bytes
Metadata: TypeAlias = tuple[tuple[str, MetadataValue], ...]


@dataclass(frozen=True, slots=True)
class Head:
    """The headers of one call."""

    path: str = ""
    timeout_s: float | None = None
    metadata: Metadata = ()
    """Metadata of the caller, without the names of HTTP and gRPC itself."""
    encoding: str = "identity"
    """Compression of the request's messages."""
    http_status: int = 200
    """HTTP status of the answer. Other values than 200 reject a request that is not gRPC."""
    content_length: int | None = None
    """Size of the request in bytes, None if the client does not state it."""
    is_malformed: bool = False
    """Whether it violates a rule of HTTP/2."""
    may_end: bool = False
    """Whether it may follow the data of a request, because it has no pseudo-header."""
    is_too_large: bool = False
    """Whether it exceeds the size that was announced to the client."""


_MALFORMED = Head(is_malformed=True)
_TRAILERS = Head(is_malformed=True, may_end=True)
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_LISTS = frozenset({b"te", b"grpc-accept-encoding", b"accept-encoding"})
_SINGLE = frozenset(
    {*(b"content-type", b"content-length", b"host"), *(b"grpc-timeout", b"grpc-encoding")}
)
_OWN = _LISTS | _SINGLE
"""Names of HTTP and of gRPC itself: those that may repeat, and those that may not."""
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
        """Work so far: one step per header, and one per `STEP_BYTES` of a block that was not
        cached.
        """

    def decode(self, block: bytes) -> Head:
        """Return the meaning of a block.

        Raises:
            Http2Error: the block is invalid, or too large to be decoded.
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
        """Return a skipper for the next block, which is too long to be decoded."""
        # Skipping may change the table without the comparison that `decode` makes.
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
    """Skips a block in pieces, and applies its table changes: later blocks depend on them."""

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
        """Count a header or a table change. Raises Http2Error above a limit."""
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
                ErrorCode.COMPRESSION_ERROR, "headers: table size update inside a block"
            )

        if self._updates > TABLE_UPDATES_MAX:
            raise _too_many_updates()

    def end(self) -> Head:
        """Return a rejection. Raises Http2Error if the block is incomplete."""
        if self._buffer or self._passing:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, "headers: cut short")
        return Head(is_too_large=True)

    def _end_of(self, data: bytes, at: int) -> int | None:
        """Return the end of a header, which may lie beyond `data`.

        None if the end is still unknown.
        """
        first = data[at]
        # Indexed: the whole header is a number, and the table does not change (RFC 7541, 6.1).
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
        # Literals without indexing leave the table alone, so their bytes need not be kept.
        if not adds:
            return end
        if valued[0] > _ENTRY_BYTES_MAX:
            table = self._decoder.header_table
            # An entry larger than the table empties it (RFC 7541, 4.4).
            table.add(b"", bytes(table.maxsize))
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
    """Return an HPACK integer and its end, None if `data` does not contain all of it."""
    if at >= len(data):
        return None
    most = (1 << prefix_bits) - 1
    value = data[at] & most
    if value < most:
        return value, at + 1
    for number, byte in enumerate(data[at + 1 : at + 1 + _INTEGER_BYTES_MAX]):
        value += (byte & 0x7F) << 7 * number
        if byte < 0x80:
            return value, at + 2 + number
    if len(data) > at + _INTEGER_BYTES_MAX:
        raise Http2Error(ErrorCode.COMPRESSION_ERROR, "headers: unterminated integer")
    return None


def _newest(entries: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, bytes] | None:
    return entries[0] if entries else None


def _head(headers: Sequence[tuple[bytes, bytes]], list_bytes_max: int) -> Head:
    pseudo: dict[bytes, bytes] = {}
    own: dict[bytes, bytes] = {}
    metadata: list[tuple[str, MetadataValue]] = []
    if sum(len(name) + len(value) + _ENTRY_BYTES for name, value in headers) > list_bytes_max:
        # Checked before anything else, so a huge list costs no further work.
        return Head(is_too_large=True)

    for name, value in headers:
        # Pseudo-headers come first and once (RFC 9113, 8.3).
        if name[:1] == b":":
            if name in pseudo or own or metadata or not _is_pseudo(name, value):
                return _MALFORMED
            pseudo[name] = value
        elif not _is_valid(name, value) or (name in own and name in _SINGLE):
            return _MALFORMED
        elif name in _OWN:
            own[name] = value
        else:
            try:
                metadata.append(_decode_metadata(name, value))
            except ValueError:
                return _MALFORMED
    return _validate(pseudo, own, tuple(metadata)) if pseudo else _TRAILERS


def _is_pseudo(name: bytes, value: bytes) -> bool:
    return name in _PSEUDO and _has_only(_PSEUDO_BYTES[name], value)


def _is_valid(name: bytes, value: bytes) -> bool:
    if not name or not _has_only(_NAME_BYTES, name) or name in _HOP_BY_HOP:
        return False
    # HTTP/2 allows no other value (RFC 9113, 8.2.2).
    if name == b"te" and value != b"trailers":
        return False
    has_blank_ends = value[:1] in _BLANKS or value[-1:] in _BLANKS
    return _has_only(_VALUE_BYTES, value) and not has_blank_ends


def _has_only(allowed: bytes, value: bytes) -> bool:
    """Return whether all bytes of a value are allowed."""
    return not value.translate(None, allowed)


def _decode_metadata(name: bytes, value: bytes) -> tuple[str, MetadataValue]:
    if not name.endswith(b"-bin"):
        return name.decode("ascii"), value.decode("latin-1")
    try:
        # gRPC lets senders omit the padding.
        decoded = base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
    return name.decode("ascii"), decoded


def _validate(
    pseudo: Mapping[bytes, bytes], own: Mapping[bytes, bytes], metadata: Metadata
) -> Head:
    method, path = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    if not method or not pseudo.get(b":scheme") or not _is_path(method, path):
        return _MALFORMED

    # Two different hosts would let a proxy and this server see different requests.
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
    """Return a number of bytes. Raises ValueError."""
    if value is None:
        return None
    if not value.isdigit() or len(value) > _LENGTH_DIGITS_MAX:
        raise ValueError("content-length is not a number")
    return int(value)


def _timeout(value: bytes | None) -> float | None:
    """Return a timeout in seconds. Raises ValueError."""
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
"""Prefix of the next block after the client has requested a smaller table."""


def refusal_head(http_status: int) -> bytes:
    """Return the block of an answer to a request that is none of gRPC."""
    return literal(b":status", str(http_status).encode())


def status(
    code: int, message: str = "", metadata: Iterable[tuple[str, MetadataValue]] = ()
) -> bytes:
    """Return the block that ends a call, without the block of its beginning."""
    parts = [STATUS_OK if not code else literal(b"grpc-status", str(code).encode())]
    if message:
        parts.append(literal(b"grpc-message", _escaped(message)))
    parts.append(metadata_block(metadata))
    return b"".join(parts)


def metadata_block(metadata: Iterable[tuple[str, MetadataValue]]) -> bytes:
    """Return the block of some metadata.

    Values of type bytes belong to names that end in `-bin`.
    """
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
        bytes((byte,)) if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte
        for byte in raw
    )

"""ZooKeeper's wire format (jute), as far as a load of `multi` requests needs it.

Big-endian. Strings, buffers and packets follow their length. Layouts are from `zookeeper.jute` of
ZooKeeper 3.8.
"""

import struct
from collections.abc import Sequence

CREATE, GET_DATA, SET_DATA, SYNC, PING, MULTI, MULTI_READ = 1, 4, 5, 9, 11, 14, 22
REPLY_HEADER_BYTES = 16
STAT_BYTES = 68
_ALL_PERMISSIONS = 0x1F
_PING_XID = -2
_END_OF_MULTI = struct.pack(">i?i", -1, True, -1)


def packet(body: bytes) -> bytes:
    """Return a body after its length."""
    return buffer(body)


def buffer(data: bytes) -> bytes:
    """Return bytes, or a string's UTF-8, after their length."""
    return struct.pack(">i", len(data)) + data


def connect_request(session_timeout_ms: int) -> bytes:
    """Return the first packet of a new session."""
    return packet(struct.pack(">iqiq", 0, 0, session_timeout_ms, 0) + buffer(bytes(16)) + b"\0")


def request(xid: int, kind: int, body: bytes) -> bytes:
    """Return the packet of a request."""
    return packet(struct.pack(">ii", xid, kind) + body)


def ping() -> bytes:
    """Return the packet that keeps an idle session alive."""
    return request(_PING_XID, PING, b"")


def create_request(path: bytes, data: bytes) -> bytes:
    """Return CreateRequest of a persistent node that every client may use."""
    entry = struct.pack(">i", _ALL_PERMISSIONS) + buffer(b"world") + buffer(b"anyone")
    return buffer(path) + buffer(data) + struct.pack(">i", 1) + entry + struct.pack(">i", 0)


def multi(operations: Sequence[tuple[int, bytes]], kind: int = MULTI) -> bytes:
    """Return the packet of a multi of operations, each with its kind and its request."""
    parts = [struct.pack(">i?i", kind_of, False, -1) + body for kind_of, body in operations]
    return request(1, kind, b"".join((*parts, _END_OF_MULTI)))


def multi_read(paths: Sequence[bytes]) -> bytes:
    """Return the packet of a request that reads many nodes."""
    return multi([(GET_DATA, buffer(path) + b"\0") for path in paths], MULTI_READ)


def data_count_of_multi_read(body: bytes) -> int:
    """Return how many nodes' data a reply to `multi_read` contains."""
    _, _, error = struct.unpack_from(">iqi", body)
    at, count = REPLY_HEADER_BYTES, 0
    while error == 0 and at < len(body):
        kind, is_done, _ = struct.unpack_from(">i?i", body, at)
        if is_done or kind != GET_DATA:
            break
        (size,) = struct.unpack_from(">i", body, at + 9)
        at += 9 + 4 + max(0, size) + STAT_BYTES
        count += 1
    return count


def error_of_multi(body: bytes) -> int:
    """Return the error of a reply to a multi, 0 if all operations succeeded."""
    _, _, error = struct.unpack_from(">iqi", body)
    at = REPLY_HEADER_BYTES
    # A multi that failed lists an error for each operation, and 0 for those not to blame.
    while error == 0 and at + 9 <= len(body):
        kind, is_done, _ = struct.unpack_from(">i?i", body, at)
        if is_done or kind != -1:
            break
        (error,) = struct.unpack_from(">i", body, at + 9)
        at += 13
    return int(error)

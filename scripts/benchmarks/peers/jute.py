"""ZooKeeper's wire format (jute), as much as a load of `multi` requests needs.

Big-endian; strings and buffers follow their length, -1 for none; each packet follows its length.
Layouts are those of `zookeeper.jute` of ZooKeeper 3.8.
"""

import struct

CREATE, GET_DATA, SET_DATA, SYNC, PING, MULTI, MULTI_READ = 1, 4, 5, 9, 11, 14, 22
PING_XID = -2
REPLY_HEADER_BYTES = 16
STAT_BYTES = 68
ALL_PERMISSIONS = 0x1F


def packet(body: bytes) -> bytes:
    """Return a body after its length."""
    return struct.pack(">i", len(body)) + body


def buffer(data: bytes) -> bytes:
    """Return bytes, or a string's UTF-8, after their length."""
    return struct.pack(">i", len(data)) + data


def connect_request(session_timeout_ms: int) -> bytes:
    """Return the first packet of a new session: ConnectRequest."""
    return packet(struct.pack(">iqiq", 0, 0, session_timeout_ms, 0) + buffer(bytes(16)) + b"\0")


def request_header(xid: int, kind: int) -> bytes:
    """Return RequestHeader."""
    return struct.pack(">ii", xid, kind)


def ping() -> bytes:
    """Return the packet that keeps an idle session alive."""
    return packet(request_header(PING_XID, PING))


def multi_header(kind: int) -> bytes:
    """Return what precedes each operation of a multi."""
    return struct.pack(">i?i", kind, False, -1)


def end_of_multi() -> bytes:
    """Return what follows the last operation of a multi."""
    return struct.pack(">i?i", -1, True, -1)


def acl_anyone() -> bytes:
    """Return the access list that allows every client everything."""
    entry = struct.pack(">i", ALL_PERMISSIONS) + buffer(b"world") + buffer(b"anyone")
    return struct.pack(">i", 1) + entry


def create_request(path: str, data: bytes) -> bytes:
    """Return CreateRequest of a persistent node."""
    return buffer(path.encode()) + buffer(data) + acl_anyone() + struct.pack(">i", 0)


def multi(xid: int, operations: list[tuple[int, bytes]]) -> bytes:
    """Return the packet of a multi of operations, each its kind and its request."""
    parts = [request_header(xid, MULTI)]
    for kind, request in operations:
        parts += (multi_header(kind), request)
    return packet(b"".join((*parts, end_of_multi())))


def multi_read(xid: int, paths: list[str]) -> bytes:
    """Return the packet of a request that reads many nodes."""
    parts = [request_header(xid, MULTI_READ)]
    for path in paths:
        parts += (multi_header(GET_DATA), buffer(path.encode()), b"\0")
    return packet(b"".join((*parts, end_of_multi())))


def data_count_of_multi_read(body: bytes) -> int:
    """Return how many nodes' data a reply to `multi_read` holds."""
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


def reply_of_multi(body: bytes) -> tuple[int, int]:
    """Return the xid of a reply to a multi and its error, 0 if all of it was done."""
    xid, _, error = struct.unpack_from(">iqi", body)
    if error == 0 and len(body) > 16:
        kind, _, first_error = struct.unpack_from(">i?i", body, 16)
        if kind == -1:
            # A multi that failed lists an error for each operation; those not to blame have 0.
            error = _first_error(body, 16) or first_error
    return xid, error


def _first_error(body: bytes, at: int) -> int:
    while at + 9 <= len(body):
        _, is_done, _ = struct.unpack_from(">i?i", body, at)
        if is_done:
            break
        (error,) = struct.unpack_from(">i", body, at + 9)
        if error:
            return int(error)
        at += 13
    return 0

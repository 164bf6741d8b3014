"""The commit on PostgreSQL: one call of a stored function.

It updates the streams whose end offsets are as told, fails unless that was all of them, and inserts
the object with its ranges. A connection has one transaction at a time, so each slot has a
connection of its own. The function is called by a prepared statement with binary arrays
(protocol 3.0).
"""

import asyncio
import struct
from typing import cast

import numpy as np

from scripts.benchmarks.committer import STEP, Load, LoadError, SlotStreams, own_streams

SCHEMA = """
DROP TABLE IF EXISTS streams, objects;
CREATE TABLE streams (id bigint PRIMARY KEY, end_offset bigint NOT NULL) WITH (fillfactor = 50);
CREATE TABLE objects (
    id bigint PRIMARY KEY, stream_ids bigint[] NOT NULL, starts bigint[] NOT NULL,
    ends bigint[] NOT NULL
);
CREATE OR REPLACE FUNCTION commit_object(
    object_id bigint, stream_ids bigint[], starts bigint[], ends bigint[]
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    advanced bigint;
BEGIN
    UPDATE streams SET end_offset = row.new_end
        FROM unnest(stream_ids, starts, ends) AS row (stream_id, start, new_end)
        WHERE streams.id = row.stream_id AND streams.end_offset = row.start;
    GET DIAGNOSTICS advanced = ROW_COUNT;
    IF advanced <> cardinality(stream_ids) THEN
        RAISE EXCEPTION 'only % of % streams end where told', advanced, cardinality(stream_ids);
    END IF;
    INSERT INTO objects VALUES (object_id, stream_ids, starts, ends);
END
$$;
"""
USER = "postgres"
_PROTOCOL = 196_608
_INT8 = 20
_ELEMENT = np.dtype([("length", ">i4"), ("value", ">i8")])


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._error = ""
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass.
        self._transport = cast(asyncio.Transport, transport)
        body = struct.pack(">i", _PROTOCOL)
        body += f"user\0{USER}\0database\0postgres\0\0".encode()
        self._transport.write(struct.pack(">i", len(body) + 4) + body)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ready.done():
            self._ready.set_exception(ConnectionResetError(f"PostgreSQL hung up: {self._error}"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        at, received = 0, self._buffer
        while len(received) - at >= 5:
            kind, size = struct.unpack_from(">ci", received, at)
            end = at + 1 + size
            if len(received) < end:
                break
            if kind == b"E":
                self._error = bytes(received[at + 5 : end]).replace(b"\0", b" ").decode()
            elif kind == b"Z":
                self._on_ready()
            at = end
        del received[:at]

    def _on_ready(self) -> None:
        error, self._error = self._error, ""
        if self._ready.done():
            return
        if error:
            self._ready.set_exception(LoadError(f"PostgreSQL: {error}"))
        else:
            self._ready.set_result(None)

    async def wait_ready(self) -> None:
        """Wait until the connection takes requests."""
        await self._ready

    def ask(self, messages: bytes) -> asyncio.Future[None]:
        """Send what PostgreSQL answers with one ReadyForQuery."""
        assert self._transport is not None
        self._ready = asyncio.get_running_loop().create_future()
        self._transport.write(messages)
        return self._ready

    def close(self) -> None:
        if self._transport is not None:
            self._transport.write(message(b"X", b""))
            self._transport.close()


class PostgresqlCommitter:
    """Commits by a stored function."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._slots = own_streams(load)
        self._id_arrays = [int8_array(np.array(slot.ids)) for slot in self._slots]
        self._connections: list[_Connection] = []
        self._next_object_id = 1_000_000_000

    async def open(self) -> None:
        """Connect, make tables and function anew, and fill in the streams."""
        for _ in self._slots:
            self._connections.append(await _connect(self._load.endpoint))
        first = self._connections[0]
        await first.ask(query(SCHEMA))
        ids = [each for slot in self._slots for each in slot.ids]
        await first.ask(
            query(f"INSERT INTO streams SELECT id, 0 FROM generate_series({ids[0]}, {ids[-1]}) id")
        )
        await first.ask(query("VACUUM ANALYZE streams"))
        call = b"commit\0SELECT commit_object($1, $2, $3, $4)\0" + struct.pack(">h", 0)
        for connection in self._connections:
            await connection.ask(message(b"P", call) + message(b"S", b""))

    async def close(self) -> None:
        """Disconnect."""
        for connection in self._connections:
            connection.close()

    async def commit(self, slot: int) -> None:
        """Make the next commit of a slot."""
        streams = self._slots[slot]
        object_id, self._next_object_id = self._next_object_id, self._next_object_id + 1
        await self._connections[slot].ask(self._request(object_id, slot, streams))
        streams.advance()

    def _request(self, object_id: int, slot: int, streams: SlotStreams) -> bytes:
        count = len(streams.ids)
        parameters = (
            struct.pack(">q", object_id),
            self._id_arrays[slot],
            int8_array(np.full(count, streams.end_offset)),
            int8_array(np.full(count, streams.end_offset + STEP)),
        )
        bind = b"".join(
            (
                b"\0commit\0" + struct.pack(">hhh", 1, 1, len(parameters)),
                *(struct.pack(">i", len(each)) + each for each in parameters),
                struct.pack(">h", 0),
            )
        )
        execute = b"\0" + struct.pack(">i", 0)
        return message(b"B", bind) + message(b"E", execute) + message(b"S", b"")


async def check(endpoint: str) -> None:
    """Connect and disconnect.

    Raises:
        OSError: nobody listens, or PostgreSQL is not ready.
    """
    (await _connect(endpoint)).close()


async def _connect(endpoint: str) -> _Connection:
    host, _, port = endpoint.rpartition(":")
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(_Connection, host, int(port))
    await connection.wait_ready()
    return connection


def message(kind: bytes, body: bytes) -> bytes:
    """Return a message of the frontend."""
    return kind + struct.pack(">i", len(body) + 4) + body


def query(text: str) -> bytes:
    """Return a simple query."""
    return message(b"Q", text.encode() + b"\0")


def int8_array(values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bytes:
    """Return a bigint[] in binary: dimensions, no nulls, type, length, lower bound, elements."""
    elements = np.empty(len(values), dtype=_ELEMENT)
    elements["length"] = 8
    elements["value"] = values
    return struct.pack(">iiiii", 1, 0, _INT8, len(values), 1) + elements.tobytes()

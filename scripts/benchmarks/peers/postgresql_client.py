"""The commit on PostgreSQL: one call of a stored function.

It updates the streams whose end offsets are as expected, fails unless those were all, and inserts
the object with its ranges. A connection has one transaction at a time, so each slot has a
separate connection. The client is asyncpg, which calls the function by a prepared statement with
binary arrays.
"""

from typing import Any

import asyncpg

from scripts.benchmarks.committer import STEP, Load, LoadError, own_streams

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
        RAISE EXCEPTION 'only % of % streams end as expected', advanced, cardinality(stream_ids);
    END IF;
    INSERT INTO objects VALUES (object_id, stream_ids, starts, ends);
END
$$;
"""
USER = "postgres"


class PostgresqlCommitter:
    """Commits by a stored function."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._slots = own_streams(load)
        self._connections: list[Any] = []
        self._calls: list[Any] = []
        self._next_object_id = 1_000_000_000

    async def open(self) -> None:
        """Connect, create tables and function, and insert the streams."""
        for _ in self._slots:
            self._connections.append(await _connect(self._load.endpoint))
        first = self._connections[0]
        await first.execute(SCHEMA)
        ids = [stream_id for slot in self._slots for stream_id in slot.ids]
        await first.execute(
            f"INSERT INTO streams SELECT id, 0 FROM generate_series({ids[0]}, {ids[-1]}) id"
        )
        await first.execute("VACUUM ANALYZE streams")
        for connection in self._connections:
            self._calls.append(await connection.prepare("SELECT commit_object($1, $2, $3, $4)"))

    async def close(self) -> None:
        """Disconnect."""
        for connection in self._connections:
            await connection.close()

    async def commit(self, slot: int) -> None:
        """Make the next commit of a slot."""
        streams = self._slots[slot]
        object_id, self._next_object_id = self._next_object_id, self._next_object_id + 1
        start, count = streams.end_offset, len(streams.ids)
        starts, ends = [start] * count, [start + STEP] * count
        try:
            await self._calls[slot].fetchval(object_id, streams.ids, starts, ends)
        except asyncpg.PostgresError as error:
            raise LoadError(f"PostgreSQL: {error}") from error
        streams.advance()


async def check(endpoint: str) -> None:
    """Connect and disconnect.

    Raises:
        OSError: no process listens, or PostgreSQL is not ready.
    """
    await (await _connect(endpoint)).close()


async def _connect(endpoint: str) -> Any:
    host, _, port = endpoint.rpartition(":")
    try:
        return await asyncpg.connect(host=host, port=int(port), user=USER, database=USER, ssl=False)
    except asyncpg.CannotConnectNowError as error:
        raise ConnectionRefusedError(str(error)) from error

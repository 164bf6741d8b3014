"""The commit of shared rows on PostgreSQL: one call of a function (`postgresql_commit.sql`).

A connection has one transaction at a time, so each slot has a separate connection. The client is
asyncpg, which calls the function by a prepared statement with binary arrays.
"""

from pathlib import Path
from typing import Any, ClassVar

import asyncpg

from scripts.benchmarks.committer import OBJECT_BYTES, STEP, Load, LoadError, own_streams

SCHEMA = Path(__file__).with_name("postgresql_commit.sql").read_text(encoding="ascii")
CALL = "SELECT * FROM commit_rows($1, $2, $3, $4, $5, $6, $7, $8)"
USER = "postgres"
NODE_ID = 1_000
_EMPTY = "array_fill(-1::bigint, ARRAY[5])"
"""Five places for batches. A row that grew would leave the room of its page."""
_FIRST_OBJECT_ID = 1_000_000_000


class PostgresqlCommitter:
    """Commits rows without producers."""

    is_idempotent: ClassVar[bool] = False

    def __init__(self, load: Load) -> None:
        self._load = load
        self._slots = own_streams(load)
        self._connections: list[Any] = []
        self._calls: list[Any] = []
        self._next_object_id = _FIRST_OBJECT_ID
        self._counts = [STEP] * load.ranges
        self._epochs = [0] * load.ranges if self.is_idempotent else []

    async def open(self) -> None:
        """Connect, create tables and function, and insert the streams and their producers."""
        for _ in self._slots:
            self._connections.append(await connect(self._load.endpoint))
        ids = [stream_id for slot in self._slots for stream_id in slot.ids]
        await create_tables(self._connections[0], ids, with_producers=self.is_idempotent)
        for connection in self._connections:
            self._calls.append(await connection.prepare(CALL))

    async def close(self) -> None:
        """Write all pages, so that the server rests from now on, and disconnect."""
        if self._connections:
            await self._connections[0].execute("CHECKPOINT")
        for connection in self._connections:
            await connection.close()

    async def commit(self, slot: int) -> None:
        """Make the next commit of a slot."""
        streams = self._slots[slot]
        object_id, self._next_object_id = self._next_object_id, self._next_object_id + 1
        producers: tuple[list[int], ...] = ([], [], [])
        if self.is_idempotent:
            # Each stream has one producer, whose sequences are the stream's offsets.
            producers = (streams.ids, self._epochs, [streams.end_offset] * len(streams.ids))
        fixed = (object_id, OBJECT_BYTES, NODE_ID, streams.ids, self._counts)
        try:
            starts, errors = await self._calls[slot].fetchrow(*fixed, *producers)
        except asyncpg.PostgresError as error:
            raise LoadError(f"PostgreSQL: {error}") from error
        if errors is not None and any(errors):
            raise LoadError(f"PostgreSQL: errors of rows {sorted(set(errors))}")
        if starts[0] != streams.end_offset:
            raise LoadError(f"PostgreSQL: got start {starts[0]}, expected {streams.end_offset}")
        streams.advance()


class PostgresqlIdempotentCommitter(PostgresqlCommitter):
    """The same with an idempotent producer for each stream."""

    is_idempotent = True


async def create_tables(connection: Any, ids: list[int], *, with_producers: bool) -> None:
    """Create empty tables, the function, and streams of ascending `ids`.

    Each stream also gets a producer of its id in epoch 0 if asked for: the planner sees as many
    producers as there will be, and no plan is made for an empty table.
    """
    await connection.execute(SCHEMA)
    await connection.execute("INSERT INTO streams SELECT id, 0 FROM unnest($1::bigint[]) id", ids)
    if with_producers:
        await connection.execute(
            f"INSERT INTO producers SELECT id, id, 0, 0, {_EMPTY}, {_EMPTY}, {_EMPTY} FROM streams"
        )
    await connection.execute("VACUUM ANALYZE streams")
    await connection.execute("VACUUM ANALYZE producers")


async def connect(endpoint: str) -> Any:
    """Connect.

    Raises:
        OSError: no process listens, or PostgreSQL is not ready.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        return await asyncpg.connect(host=host, port=int(port), user=USER, database=USER, ssl=False)
    except asyncpg.CannotConnectNowError as error:
        raise ConnectionRefusedError(str(error)) from error

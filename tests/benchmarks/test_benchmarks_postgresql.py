"""The function that commits shared rows on PostgreSQL, and its benchmark beside streammeta."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks import shared
from scripts.benchmarks.peers import postgresql_server

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(postgresql_server.missing()), reason=postgresql_server.missing()),
]


@contextlib.asynccontextmanager
async def connected(root: Path) -> AsyncIterator[tuple[Any, Any]]:
    """Yield two connections to a server with the streams 1 to 3."""
    from scripts.benchmarks.peers.postgresql_client import connect, create_tables

    async with postgresql_server.running_postgresql(root) as (endpoint, _):
        connections = await connect(endpoint), await connect(endpoint)
        await create_tables(connections[0], [1, 2, 3], with_producers=False)
        yield connections
        for connection in connections:
            await connection.close()


async def commit(
    connection: Any, object_id: int, ids: list[int], *producers: list[int]
) -> tuple[list[int | None], list[int] | None]:
    """Commit 10 records to each stream; `producers` are ids, epochs and first sequences."""
    from scripts.benchmarks.peers.postgresql_client import CALL

    arrays = producers or ([], [], [])
    starts, errors = await connection.fetchrow(
        CALL, object_id, 99, 1, ids, [10] * len(ids), *arrays
    )
    return starts, errors


def files_of(directory: str) -> list[Path]:
    return list(Path(directory).glob("*"))


async def test_sequences_decide_and_one_bad_row_rejects_all(tmp_path: Path) -> None:
    async with connected(tmp_path) as (first, _):
        ids, producers = [1, 2], [7, 7]
        for turn in range(7):
            given = (producers, [0, 0], [turn * 10] * 2)
            assert await commit(first, turn, ids, *given) == ([turn * 10] * 2, [0, 0])

        async def errors_of(epochs: list[int], sequences: list[int]) -> Any:
            return await commit(first, 99, ids, producers, epochs, sequences)

        assert await errors_of([0, 0], [20, 70]) == ([20, None], [1, 0]), "among the newest five"
        assert await errors_of([0, 0], [10, 70]) == ([None, None], [2, 0]), "forgotten"
        assert await errors_of([1, 1], [0, 70]) == ([None, None], [0, 2]), "a new epoch begins at 0"
        assert await first.fetchval("SELECT sum(end_offset) FROM streams") == 140
        assert await first.fetchval("SELECT count(*) FROM objects") == 7
        assert await first.fetchval("SELECT count(*) FROM ranges") == 14

        assert await errors_of([1, 1], [0, 0]) == ([70, 70], [0, 0])
        assert await errors_of([1, 0], [0, 70]) == ([70, None], [1, 3])


async def test_commits_to_the_same_streams_at_once_leave_neither_gaps_nor_overlaps(
    tmp_path: Path,
) -> None:
    async with connected(tmp_path) as (first, second):

        async def commit_many(connection: Any, begin: int) -> None:
            for object_id in range(begin, begin + 20):
                await commit(connection, object_id, [1, 2, 3])

        await asyncio.gather(commit_many(first, 0), commit_many(second, 100))
        rows = await first.fetch("SELECT * FROM ranges ORDER BY stream_id, start_offset")
        for stream_id in (1, 2, 3):
            own = [row for row in rows if row["stream_id"] == stream_id]
            assert [row["start_offset"] for row in own] == list(range(0, 400, 10))
            assert [row["end_offset"] for row in own] == list(range(10, 410, 10))


async def test_a_stream_that_is_unknown_or_has_two_rows_is_refused(tmp_path: Path) -> None:
    import asyncpg

    async with connected(tmp_path) as (first, _):
        for ids in ([1, 4], [1, 1]):
            with pytest.raises(asyncpg.PostgresError, match="unknown"):
                await commit(first, 1, ids)


async def test_the_server_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    from scripts.benchmarks.peers.postgresql_client import connect

    async with postgresql_server.running_postgresql(tmp_path) as (endpoint, _):
        connection = await connect(endpoint)
        directory = await connection.fetchval("SHOW data_directory")
        await connection.close()
        assert "PG_VERSION" in [path.name for path in files_of(directory)]
    assert not files_of(directory)
    with pytest.raises(ConnectionRefusedError):
        await connect(endpoint)


def test_both_systems_take_their_turns(tmp_path: Path) -> None:
    settings = shared.Settings(rows=(3,), in_flight=(2,), rounds=1, seconds=0.5)
    outcome = asyncio.run(shared.measure(tmp_path, settings, lambda _: None))
    assert [row[:3] for row in outcome.tables[0].rows] == [("shared", 3, 2), ("idempotent", 3, 2)]
    assert all(value > 0 for value in outcome.figures.values())

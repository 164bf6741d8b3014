"""Questions to the map end with their reader, at whatever moment that is closed."""

from __future__ import annotations

import asyncio

import pytest

from streammeta.client import ReaderClosedError
from streammeta.client.reading.lookups import Lookups, StreamQuery
from tests.broker_client.client_helpers import broker

TURNS = range(6)
"""Of the event loop: before, while and after a question is handed over to the task that asks it."""


@pytest.mark.parametrize("turns", TURNS)
async def test_a_question_ends_when_the_reader_is_closed_after_any_turn(turns: int) -> None:
    async with broker() as b:
        never = asyncio.Event()

        async def hang(_: object) -> None:
            await never.wait()

        b.cluster.hooks["GetObjects"] = hang
        lookups = Lookups(b.client)
        asking = asyncio.create_task(lookups.ask(StreamQuery(7, 0)))
        for _ in range(turns):
            await asyncio.sleep(0)
        lookups.close()
        async with asyncio.timeout(5.0):
            with pytest.raises(ReaderClosedError, match="stream 7"):
                await asking
        never.set()

"""Nodes without a log in the bucket: told of when nothing happens to them, and only then."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

from streammeta.client import FailoverWorker, Recovery
from streammeta.client.object_log.failover import LEFT_ALONE_S
from tests.kit.fake_broker import broker, until

DEAD = Recovery(node_id=7, node_epoch=1, wal_config="")


@dataclass
class Beats:
    """A heartbeat that names what it is told to."""

    recoveries: tuple[Recovery, ...] = ()
    assigned: asyncio.Event = field(default_factory=asyncio.Event)

    async def name(self, *recoveries: Recovery) -> None:
        self.recoveries = recoveries
        self.assigned.set()
        await until(lambda: not self.assigned.is_set(), "look at the heartbeat")
        await asyncio.sleep(0)


async def test_a_node_without_a_log_is_told_of_once_when_nobody_recovers_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    beats: Any = Beats()
    async with broker() as b:
        worker = FailoverWorker(b.session, b.store, beats, lambda: now)
        with caplog.at_level(logging.WARNING):
            await beats.name(DEAD)
            now += LEFT_ALONE_S - 1
            await beats.name(DEAD)
            assert not caplog.records
            now += 1
            for _ in range(2):
                await beats.name(DEAD)
        await worker.close()
    (told,) = caplog.messages
    assert "node 7 has been assigned to this broker for 30 s" in told

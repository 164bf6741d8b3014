"""An offload killed before each of its calls: no half copy is readable, nothing is left over."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo
from streammeta.brokers.pulsar.formats.read_errors import NoSuchLedgerError
from streammeta.brokers.pulsar.ledger_streams import COPY_TAG
from streammeta.cli.local.local_cluster import LocalCluster, start_child
from streammeta.client import NamedObjects, StreamClient
from tests.brokers.clients.pulsar_broker import Shape, bodies, sources
from tests.kit.real_cluster import raise_level, running_cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

NODE, OTHER_NODE = 7, 8
LEDGERS = 2
_SCRIPT = Path(__file__).parent / "clients" / "pulsar_broker.py"
_ROOT = Path(__file__).parent.parent.parent


def _offload(cluster: LocalCluster, mode: str, crash_at: int) -> list[str] | None:
    """Run a broker; return the changes it asked for, None if it was killed before the end."""
    where = [",".join(cluster.endpoints), cluster.store_uri]
    command = [sys.executable, str(_SCRIPT), *where, str(NODE), mode, str(crash_at)]
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    child = start_child("pulsar", command, cluster.root / "pulsar.log", env)
    calls = []
    while line := child.read_line():
        calls.append(line.strip())
    code = child.process.wait()
    child.kill()
    assert code in (0, -9), child.log_tail()
    return calls if code == 0 else None


@asynccontextmanager
async def _shape(cluster: LocalCluster, mode: str) -> AsyncIterator[tuple[StreamClient, Shape]]:
    """Yield a client of another node, and what a broker of the shape has there."""
    async with await StreamClient.open(
        cluster.endpoints, cluster.store_uri, node_id=OTHER_NODE
    ) as client:
        yield client, Shape(client, mode, "ml", sources(LEDGERS))


async def _begin(cluster: LocalCluster, mode: str) -> None:
    """Save a list of closed ledgers, none of them offloaded."""
    async with _shape(cluster, mode) as (_, shape):
        store = shape.managed.store
        _, version = await store.load()
        sizes = {ledger_id: sum(map(len, bodies(ledger_id))) for ledger_id in range(1, LEDGERS + 1)}
        infos = [LedgerInfo(ledger, len(bodies(ledger)), size, 1) for ledger, size in sizes.items()]
        await store.save([*infos, LedgerInfo(LEDGERS + 1)], version)


async def _check(cluster: LocalCluster, mode: str) -> None:
    """Assert that a copy is readable whole or not at all, and nothing but what the list says."""
    async with _shape(cluster, mode) as (_, shape):
        await shape.managed.open()
        reader = shape.reader()
        for ledger in shape.managed.ledgers[:-1]:
            found = await reader.read(ledger.ledger_id, 0, ledger.entries - 1)
            assert [entry.data for entry in found] == bodies(ledger.ledger_id)
            if ledger.context is not None and not ledger.is_complete:
                await _whole_or_absent(shape, ledger.ledger_id, ledger.context.uuid)


async def _whole_or_absent(shape: Shape, ledger_id: int, uuid: str) -> None:
    try:
        handle = await shape.copies.open(ledger_id, uuid)
    except NoSuchLedgerError:
        return
    found = await handle.read(0, len(bodies(ledger_id)) - 1)
    assert [entry.data for entry in found] == bodies(ledger_id)


async def _settled(cluster: LocalCluster, mode: str) -> None:
    """Assert that every ledger is offloaded, and that there is one copy of each and no more."""
    await _check(cluster, mode)
    async with _shape(cluster, mode) as (client, shape):
        await shape.managed.open()
        closed = shape.managed.ledgers[:-1]
        assert all(info.is_complete for info in closed)
        named = [(info.ledger_id, info.context.uuid) for info in closed if info.context is not None]
        assert sorted(await shape.copies.list_copies()) == sorted(named)
        tagged = [
            id_ async for id_ in client.controllers.describe_streams() if COPY_TAG in id_.tags
        ]
        assert len(tagged) == (LEDGERS if mode == "native" else 0)
        assert not any(stream.is_open for stream in tagged)
        objects = NamedObjects(client.session, client.store).describe()
        assert len([item async for item in objects]) == (0 if mode == "native" else 2 * LEDGERS)
        assert await shape.managed.trim(LEDGERS + 1) == list(range(1, LEDGERS + 1))
        assert await shape.copies.list_copies() == []


@pytest.mark.parametrize("mode", ["native", "compatible"])
def test_an_offload_killed_before_each_of_its_calls_leaves_nothing_half(
    tmp_path: Path, mode: str
) -> None:
    with running_cluster(tmp_path, 1) as cluster:
        raise_level(cluster, 3)
        asyncio.run(_begin(cluster, mode))
        calls: list[str] | None = None
        crash_at = 1
        while calls is None:
            calls = _offload(cluster, mode, crash_at)
            asyncio.run(_check(cluster, mode))
            crash_at += 1
        # Calls to delete what the attempts before left come before those of an offload itself.
        assert crash_at > (10 if mode == "native" else 6), calls
        asyncio.run(_settled(cluster, mode))

"""A broker of Pulsar's shape as a process: closes ledgers and offloads them until it is killed.

Usage: pulsar_rolling_broker.py ENDPOINTS STORE NODE_ID. Prints a line for each ledger that is
offloaded: native ledgers to streams, compatible ones to named objects. Old ledgers are trimmed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace

from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo
from streammeta.brokers.pulsar.ledger_list import OffloadPolicy
from streammeta.client import StreamClient, StreamClientConfig, WriterConfig
from tests.brokers.clients.pulsar_broker import Shape, bodies
from tests.conformance.pulsar_offload import MemoryLedger

MODES = ("native", "compatible")
KEPT = 12
"""Ledgers of each managed ledger; those before are trimmed."""


class Written:
    """Ledgers as they were written: their entries follow from their ids."""

    async def open(self, ledger_id: int) -> MemoryLedger:
        return MemoryLedger(ledger_id, bodies(ledger_id))

    async def delete(self, ledger_id: int) -> None:
        pass


def shape_of(client: StreamClient, mode: str) -> Shape:
    """Return the managed ledger of a mode."""
    return Shape(client, mode, f"rolling-{mode}", Written(), lambda: time.time_ns() // 1_000_000)


async def _rolled(shape: Shape) -> int:
    """Close the open ledger, so that the list has one more; return its id."""
    managed = shape.managed
    ledgers, version = await managed.store.load()
    last = ledgers[-1] if ledgers else LedgerInfo(1)
    entries = bodies(last.ledger_id)
    now_ms = managed.now_ms()
    closed = replace(last, entries=len(entries), size=sum(map(len, entries)), timestamp_ms=now_ms)
    await managed.store.save([*ledgers[:-1], closed, LedgerInfo(last.ledger_id + 1)], version)
    await managed.open()
    return last.ledger_id


async def _live(client: StreamClient, mode: str) -> None:
    shape = shape_of(client, mode)
    await shape.managed.open()
    await shape.managed.sweep()
    while True:
        ledger_id = await _rolled(shape)
        await shape.managed.offload_due(OffloadPolicy(threshold_bytes=0))
        await shape.managed.delete_sources(0)
        print(f"offloaded {mode} {ledger_id}", flush=True)
        await shape.managed.trim(ledger_id - KEPT)


async def _run(endpoints: list[str], bucket: str, node_id: int) -> None:
    config = StreamClientConfig(writer=WriterConfig(linger_s=0.01))
    async with await StreamClient.open(endpoints, bucket, node_id=node_id, config=config) as client:
        await asyncio.gather(*(_live(client, mode) for mode in MODES))


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1].split(","), sys.argv[2], int(sys.argv[3])))

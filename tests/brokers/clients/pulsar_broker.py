"""A broker of Pulsar's shape as a process: sweeps, offloads what is closed, and ends.

Usage: pulsar_broker.py ENDPOINTS STORE NODE_ID MODE CRASH_AT. MODE is native or compatible. The
process kills itself before the call to the controllers with this number, counted from the first
change; 0: never. Prints the calls it made, one a line.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from streammeta.brokers.pulsar.blobs.named_blobs import NamedBlobs
from streammeta.brokers.pulsar.cluster_lists import ClusterListStore
from streammeta.brokers.pulsar.ledger_list import ManagedLedger, Sources
from streammeta.brokers.pulsar.ledger_reader import LedgerReader
from streammeta.brokers.pulsar.ledger_streams import DRIVER, LedgerStreams
from streammeta.brokers.pulsar.offloader import Offloader
from streammeta.client import NamedObjects, OwnerKey, StreamClient, WriterConfig
from streammeta.client.api.client_config import StreamClientConfig
from streammeta.client.parts import ControllerClient
from tests.conformance.pulsar_ledgers import Sources as MemorySources
from tests.conformance.pulsar_offload import MemoryLedger

READS = ("GetKVs", "ListKVs", "DescribeStreams", "DescribeNamedObjects", "Heartbeat")
BLOCK_BYTES = 2000


def bodies(ledger_id: int) -> list[bytes]:
    """Return the entries of a ledger."""
    return [f"{ledger_id}:{at}".encode() * (1 + at % 5) for at in range(250)]


def sources(count: int) -> MemorySources:
    """Return so many closed ledgers, from 1 on."""
    return MemorySources({id_: MemoryLedger(id_, bodies(id_)) for id_ in range(1, count + 1)})


class Shape:
    """A managed ledger over a client, its copies of one mode."""

    def __init__(
        self,
        client: StreamClient,
        mode: str,
        name: str,
        ledgers: Sources,
        now_ms: Callable[[], int] = lambda: 5,
    ) -> None:
        key = OwnerKey(name, "pulsar")
        session, store = client.session, client.store
        self.copies: LedgerStreams | Offloader
        if mode == "native":
            self.copies = LedgerStreams(client, name)
        else:
            named = NamedObjects(session, store)
            blobs = NamedBlobs(named, store, session.namespace, key, f"pulsar/{name}/")
            self.copies = Offloader(blobs, BLOCK_BYTES)
        driver = DRIVER if mode == "native" else "streammeta"
        lists = ClusterListStore(client.controllers, key)
        self.managed = ManagedLedger(name, lists, ledgers, self.copies, now_ms, driver)

    def reader(self) -> LedgerReader:
        return LedgerReader(self.managed, self.copies)


def crash_before(number: int) -> None:
    """Have this process kill itself before a change that it asks the controllers for."""
    call = ControllerClient.call
    made = 0

    async def counted(self: ControllerClient, method: Any, request: Any, *more: Any) -> Any:
        nonlocal made
        if method.name.rpartition("/")[2] not in READS:
            made += 1
            if made == number:
                os.kill(os.getpid(), signal.SIGKILL)
            print(method.name, flush=True)
        return await call(self, method, request, *more)

    ControllerClient.call = counted  # type: ignore[method-assign,assignment]


async def _run(endpoints: list[str], bucket: str, node_id: int, mode: str, number: int) -> None:
    config = StreamClientConfig(writer=WriterConfig(linger_s=0.01))
    async with await StreamClient.open(endpoints, bucket, node_id=node_id, config=config) as client:
        crash_before(number)
        managed = Shape(client, mode, "ml", sources(2)).managed
        await managed.open()
        await managed.sweep()
        await managed.offload([ledger for ledger in managed.ledgers[:-1] if not ledger.is_complete])


if __name__ == "__main__":
    words = sys.argv[1:]
    asyncio.run(_run(words[0].split(","), words[1], int(words[2]), words[3], int(words[4])))

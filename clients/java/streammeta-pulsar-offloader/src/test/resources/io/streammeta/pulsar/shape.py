"""The Python shape beside the offloader: reads a copy, and makes another one of the same ledger.

Usage: shape.py ENDPOINTS BUCKET PREFIX OWNERS UUID LEDGER NEW_UUID.
Prints the SHA-256 of the entries of UUID, then copies them to NEW_UUID, in blocks of 5000 bytes, as
a copy that the offloader can read and delete.
"""

import asyncio
import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

from streammeta.brokers.pulsar.blobs.named_blobs import NamedBlobs
from streammeta.brokers.pulsar.formats.ledger_values import LedgerMetadata
from streammeta.brokers.pulsar.offloader import Offloader
from streammeta.client import KeyValues, NamedObjects, OwnerKey
from streammeta.client.parts import BrokerSession, ControllerClient
from streammeta.storage.object_store.local import LocalObjectStore


@dataclass
class Source:
    ledger_id: int
    metadata: LedgerMetadata
    entries: list
    is_closed: bool = True

    async def read(self, first, last):
        return self.entries[first : last + 1]


async def main(endpoints, bucket, prefix, owners, uuid, ledger, new_uuid) -> None:
    store, ledger_id = LocalObjectStore(Path(bucket)), int(ledger)
    async with ControllerClient(endpoints.split(",")) as client:
        session = await BrokerSession.open(client, 77, 1)
        key = OwnerKey(f"{prefix}{new_uuid}-ledger-{ledger}", owners)
        await KeyValues(client).put(key.key, b"", namespace=owners)
        blobs = NamedBlobs(NamedObjects(session, store), store, session.namespace, key, prefix)
        offloader = Offloader(blobs, max_block_size=5000)

        handle = await offloader.open(ledger_id, uuid)
        entries = await handle.read(0, handle.metadata.last_entry)
        print(hashlib.sha256(b"".join(entry.data for entry in entries)).hexdigest())
        await offloader.offload(Source(ledger_id, handle.metadata, entries), new_uuid, {})


asyncio.run(main(*sys.argv[1:]))

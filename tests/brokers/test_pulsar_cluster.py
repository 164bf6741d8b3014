"""A managed ledger on real controllers: its list a key, its copies named objects of that key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streammeta.brokers.pulsar.blobs import BlobError, NoSuchBlobError
from streammeta.brokers.pulsar.cluster_lists import ClusterListStore
from streammeta.brokers.pulsar.ledger_list import ManagedLedger, ManagedLedgerFencedError
from streammeta.brokers.pulsar.ledger_reader import LedgerReader
from streammeta.brokers.pulsar.ledger_values import LedgerInfo
from streammeta.brokers.pulsar.named_blobs import NamedBlobs
from streammeta.brokers.pulsar.offloader import Offloader
from streammeta.client import BrokerSession, ControllerClient, NamedObjects, OwnerKey
from streammeta.storage.object_store.local import LocalObjectStore
from tests.conformance.pulsar_ledgers import Sources
from tests.conformance.pulsar_offload import MemoryLedger
from tests.kit.real_cluster import raise_level, running_cluster

pytestmark = pytest.mark.process
KEY = OwnerKey("ml", "ledgers")


def test_ledgers_are_offloaded_to_named_objects_and_a_second_owner_is_fenced(
    tmp_path: Path,
) -> None:
    with running_cluster(tmp_path) as cluster:
        raise_level(cluster, 3)
        asyncio.run(_lives(cluster.endpoints, tmp_path / "bucket"))


async def _lives(endpoints: list[str], bucket: Path) -> None:
    store = LocalObjectStore(bucket)
    async with ControllerClient(endpoints) as client:
        session = await BrokerSession.open(client, 7, 1)
        blobs = NamedBlobs(NamedObjects(session, store), store, session.namespace, KEY, "ml/")
        offloader = Offloader(blobs, max_block_size=600)
        bodies = [bytes([at]) * 50 for at in range(40)]
        sources = Sources({one: MemoryLedger(one, bodies) for one in (1, 2)})
        infos = [LedgerInfo(1, 40, 2000, 1), LedgerInfo(2, 40, 2000, 1), LedgerInfo(3)]
        version = await ClusterListStore(client, KEY).save(infos, 0)
        assert version > 0

        async def owner() -> ManagedLedger:
            lists = ClusterListStore(client, KEY)
            managed = ManagedLedger("ml", lists, sources, offloader, lambda: 5)
            await managed.open()
            return managed

        first, second = await owner(), await owner()
        assert await first.offload_prefix(3, 0) == (3, 0)
        wanted = list(sources.ledgers[1].entries)
        assert await first.delete_sources(0) == []
        await sources.delete(1)
        reader = LedgerReader(await owner(), offloader)
        assert await reader.read(1, 0, 39) == wanted
        assert await reader.read(1, 7, 9) == wanted[7:10]
        with pytest.raises(ManagedLedgerFencedError):
            await second.trim(2)
        assert second.is_fenced
        assert [one.ledger_id for one in (await owner()).ledgers] == [1, 2, 3]
        await _refusals(blobs)
        assert await first.trim(3) == [1, 2]
        names = [one.name async for one in NamedObjects(session, store).describe(prefix="ml/")]
        assert names == ["ml/other"]


async def _refusals(blobs: NamedBlobs) -> None:
    await blobs.put("other", b"abc", {"role": "data"})
    with pytest.raises(BlobError):
        await blobs.put("other", b"again", {})
    assert await blobs.read("other", 1, 9) == b"bc"
    assert await blobs.read("other", 3, 1) == b""
    with pytest.raises(NoSuchBlobError):
        await blobs.read("absent", 0, 1)
    with pytest.raises(NoSuchBlobError):
        await blobs.metadata("absent")

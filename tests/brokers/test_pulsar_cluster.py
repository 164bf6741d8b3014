"""A managed ledger on real controllers: its list a key, its copies named objects of that key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from streammeta.brokers.pulsar import ledger_list
from streammeta.brokers.pulsar.blobs.blobs import BlobError, NoSuchBlobError
from streammeta.brokers.pulsar.blobs.named_blobs import NamedBlobs
from streammeta.brokers.pulsar.cluster_lists import ClusterListStore
from streammeta.brokers.pulsar.formats import read_errors
from streammeta.brokers.pulsar.formats.blocks import Entry
from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo
from streammeta.brokers.pulsar.ledger_reader import LedgerReader
from streammeta.brokers.pulsar.ledger_streams import DRIVER, LedgerStreams, StreamLedger
from streammeta.brokers.pulsar.offloader import Offloader
from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import NamedObjects, OwnerKey, StreamClient
from streammeta.client.errors import BrokerClientError
from streammeta.client.parts import BrokerSession, ControllerClient
from streammeta.storage.object_store.local import LocalObjectStore
from tests.conformance.pulsar_ledgers import Sources
from tests.conformance.pulsar_offload import MemoryLedger
from tests.kit.real_cluster import raise_level, running_cluster

pytestmark = pytest.mark.process
KEY = OwnerKey("ml", "ledgers")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with running_cluster(tmp_path) as found:
        raise_level(found, 3)
        yield found


async def test_ledgers_are_offloaded_to_named_objects_and_a_second_owner_is_fenced(
    cluster: LocalCluster,
) -> None:
    endpoints, bucket = cluster.endpoints, cluster.root / "bucket"
    store = LocalObjectStore(bucket)
    async with ControllerClient(endpoints) as client:
        session = await BrokerSession.open(client, 7, 1)
        blobs = NamedBlobs(NamedObjects(session, store), store, session.namespace, KEY, "ml/")
        offloader = Offloader(blobs, max_block_size=600)
        bodies = [bytes([at]) * 50 for at in range(40)]
        sources = Sources({ledger_id: MemoryLedger(ledger_id, bodies) for ledger_id in (1, 2)})
        infos = [LedgerInfo(1, 40, 2000, 1), LedgerInfo(2, 40, 2000, 1), LedgerInfo(3)]
        version = await ClusterListStore(client, KEY).save(infos, 0)
        assert version > 0

        async def owner() -> ledger_list.ManagedLedger:
            lists = ClusterListStore(client, KEY)
            managed = ledger_list.ManagedLedger("ml", lists, sources, offloader, lambda: 5)
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
        with pytest.raises(ledger_list.ManagedLedgerFencedError):
            await second.trim(2)
        assert second.is_fenced
        assert [ledger.ledger_id for ledger in (await owner()).ledgers] == [1, 2, 3]
        await _refusals(blobs)
        assert await first.trim(3) == [1, 2]
        names = [name.name async for name in NamedObjects(session, store).describe(prefix="ml/")]
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


async def test_a_ledger_is_a_closed_stream_and_its_place_may_change(cluster: LocalCluster) -> None:
    endpoints, bucket = cluster.endpoints, cluster.root / "bucket"
    store = LocalObjectStore(bucket)
    bodies = [b"", *(bytes([at % 251]) * (at * 40) for at in range(300))]
    async with (
        await StreamClient.open(endpoints, store, node_id=7) as client,
        await StreamClient.open(endpoints, store, node_id=8) as other,
    ):
        session, lists = client.session, ClusterListStore(client.controllers, KEY)
        blobs = NamedBlobs(NamedObjects(session, store), store, session.namespace, KEY, "ml/")
        objects, streams = Offloader(blobs, 1 << 20), LedgerStreams(client, "ml")
        sources = Sources({ledger_id: MemoryLedger(ledger_id, bodies) for ledger_id in (1, 2)})
        size = sum(map(len, bodies))
        infos = [LedgerInfo(ledger_id, len(bodies), size, ledger_id) for ledger_id in (1, 2)]
        await lists.save([*infos, LedgerInfo(3)], 0)
        before = ledger_list.ManagedLedger("ml", lists, sources, objects, lambda: 5)
        await before.open()
        await before.offload_prefix(2, 0)
        after = ledger_list.ManagedLedger(
            "ml", lists, sources, streams, lambda: 5, DRIVER, former={"streammeta": objects}
        )
        await after.open()
        await after.offload_due(ledger_list.OffloadPolicy(threshold_bytes=0))
        assert await after.delete_sources(0) == []
        first, second = (ledger.context for ledger in after.ledgers[:-1])
        assert first is not None
        assert second is not None
        assert (first.driver, second.driver) == ("streammeta", DRIVER)
        await sources.delete(1)
        await sources.delete(2)
        reader = LedgerReader(after, streams, former={"streammeta": objects})
        for ledger_id in (1, 2):
            assert [entry.data for entry in await reader.read(ledger_id, 0, 300)] == bodies
            assert [entry.entry_id for entry in await reader.read(ledger_id, 7, 9)] == [7, 8, 9]
        handle = await LedgerStreams(other, "ml").open(2, second.uuid)
        assert (handle.metadata.last_entry, handle.metadata.length) == (300, size)
        assert handle.extra["ManagedLedgerName"] == "ml"
        assert handle.extra["s3managedledgeroffloadersoftwareversion"].startswith("streammeta ")
        await _native_refusals(handle, streams)
        # Another node deletes it as well: a closed stream belongs to nobody.
        await LedgerStreams(other, "ml").delete(2, second.uuid)
        await streams.delete(2, second.uuid)
        with pytest.raises(read_errors.NoSuchLedgerError):
            await streams.open(2, second.uuid)
        assert await after.trim(3) == [1, 2]
        assert await objects.list_copies() == await streams.list_copies() == []


async def _native_refusals(handle: StreamLedger, streams: LedgerStreams) -> None:
    for first, last in ((-1, 0), (0, 301), (5, 4)):
        with pytest.raises(read_errors.IncorrectParameterError):
            await handle.read(first, last)
    handle.close()
    with pytest.raises(read_errors.OffloadReadHandleClosedError):
        await handle.read(0, 0)
    uuid = "00000000-0000-4000-8000-000000000001"
    with pytest.raises(ValueError, match="empty"):
        await streams.offload(MemoryLedger(9, [b"a"], is_closed=False), uuid, {})
    torn = MemoryLedger(9, [b"a", b"b"])
    torn.entries[1] = torn.entries[0]
    with pytest.raises(ValueError, match=r"0\.\.0"):
        await streams.offload(torn, uuid, {})
    assert (9, uuid) not in await streams.list_copies()


async def test_a_copy_that_another_node_writes_is_kept_until_it_is_back(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 1) as cluster:
        raise_level(cluster, 3)
        uuid = "00000000-0000-4000-8000-000000000002"
        ledger = MemoryLedger(1, [b"a", b"b"])
        async with (
            await StreamClient.open(cluster.endpoints, cluster.store_uri, node_id=8) as other,
            await StreamClient.open(
                cluster.endpoints, cluster.store_uri, node_id=7, node_epoch=1
            ) as client,
        ):
            streams = LedgerStreams(client, "ml")
            stopped = asyncio.Event()

            async def read(first: int, last: int) -> list[Entry]:
                stopped.set()
                return await asyncio.Future()

            ledger.read = read  # type: ignore[method-assign]
            offload = asyncio.create_task(streams.offload(ledger, uuid, {}))
            await stopped.wait()
            elsewhere = LedgerStreams(other, "ml")
            assert await elsewhere.list_copies() == [(1, uuid)]
            with pytest.raises(read_errors.NoSuchLedgerError):
                await elsewhere.open(1, uuid)
            with pytest.raises(BrokerClientError):
                await elsewhere.delete(1, uuid)
            assert await elsewhere.list_copies() == [(1, uuid)]
            offload.cancel()
            with pytest.raises(asyncio.CancelledError):
                await offload
            assert await elsewhere.list_copies() == []

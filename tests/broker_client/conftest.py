"""Tests of the client: a real controller, and markers of fake clusters in every bucket."""

from collections.abc import AsyncIterator, Iterator

import pytest

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import StreamClient, StreamClientConfig, WriterConfig
from streammeta.client.wal.bucket import reading
from streammeta.storage.backoff import Backoff
from tests.broker_client.wal_tools import LateSlots
from tests.compaction.compaction_world import CLUSTER_ID, NAMESPACE
from tests.fake_bucket import put_fake_markers
from tests.kit.fake_cluster import NAMESPACE as FAKE_NAMESPACE
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.real_cluster import leader_of, running_cluster

FAST = StreamClientConfig(writer=WriterConfig(linger_s=0.01))


@pytest.fixture(autouse=True)
def _fake_markers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:  # its own: tests undo theirs
        put_fake_markers(monkeypatch, ("fake", FAKE_NAMESPACE), (CLUSTER_ID, NAMESPACE))
        yield


@pytest.fixture(scope="module")
def controllers() -> int:
    """Controllers of `cluster`; modules that need more override it."""
    return 1


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, controllers: int) -> Iterator[LocalCluster]:
    """Real controllers over a directory as the bucket, for all tests of a module."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), controllers) as running:
        leader_of(running)
        yield running


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[StreamClient]:
    """Node 1 of the cluster; it uploads almost at once."""
    place = (cluster.endpoints, cluster.store_uri)
    async with StreamClient.open(*place, node_id=1, config=FAST) as client:
        yield client


@pytest.fixture
def store() -> MemoryObjectStore:
    return MemoryObjectStore()


@pytest.fixture
def slots(store: MemoryObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateSlots]:
    """Slots in `store`, whose readers hardly pause between looks."""
    monkeypatch.setattr(reading, "PAUSES", Backoff(0.001, 0.01, jitter=0))
    found = LateSlots(store)
    yield found
    found.end()

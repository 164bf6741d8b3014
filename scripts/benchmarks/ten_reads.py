"""Linearizable reads of ten objects on streammeta and its peers, driven like commits.

| system | one read |
|---|---|
| streammeta | GetObjects of a stream, ten objects |
| etcd | Range of ten keys, linearizable by default |
| ZooKeeper | sync, and a read of ten nodes in one request, sent together |
"""

from typing import Any

from scripts.benchmarks.committer import Connected, Load, LoadError
from scripts.benchmarks.peers import jute
from scripts.benchmarks.peers.etcd_client import EtcdCommitter
from scripts.benchmarks.peers.zookeeper_client import ZookeeperCommitter
from scripts.benchmarks.protobuf_bytes import count_of_field, length_delimited, number
from scripts.benchmarks.streammeta_client import UnaryCommitter, get_objects

OBJECTS = 10
RANGE = "/etcdserverpb.KV/Range"
_RANGE_KVS = 2  # of RangeResponse


def _one_at_a_time(load: Load) -> Load:
    return Load(endpoint=load.endpoint, ranges=1, in_flight=1, objects=OBJECTS, tls=load.tls)


class StreammetaReads(Connected):
    """GetObjects over one connection."""

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self._committer = UnaryCommitter(_one_at_a_time(load))

    async def open(self) -> None:
        """Connect and commit ten objects of one stream."""
        await super().open()
        await self._committer.open()
        for _ in range(OBJECTS):
            await self._committer.commit(0)
        (self._stream_id,) = self._committer.stream_ids(0)

    async def close(self) -> None:
        """Drop the connections."""
        await self._committer.close()
        await super().close()

    async def commit(self, _slot: int) -> None:
        """Read all ten."""
        _require(await get_objects(self._connection, self._stream_id, 0, OBJECTS), "GetObjects")


class EtcdReads:
    """Range over the connection of a committer."""

    def __init__(self, load: Load) -> None:
        self._committer = EtcdCommitter(_one_at_a_time(load))

    async def open(self) -> None:
        """Connect and commit ten objects."""
        await self._committer.open()
        for _ in range(OBJECTS):
            await self._committer.commit(0)
        folder = self._committer.object_folder
        # Up to the first key after the folder: "0" follows "/".
        self._request = (
            length_delimited(1, folder)
            + length_delimited(2, folder[:-1] + b"0")
            + number(3, OBJECTS)
        )
        self._range: Any = self._committer.channel.unary_unary(RANGE)

    async def close(self) -> None:
        """Drop the connection."""
        await self._committer.close()

    async def commit(self, _slot: int) -> None:
        """Read all ten."""
        _require(count_of_field(await self._range(self._request), _RANGE_KVS), "Range")


class ZookeeperReads:
    """sync and multiRead over the session of a committer."""

    def __init__(self, load: Load) -> None:
        self._committer = ZookeeperCommitter(_one_at_a_time(load))

    async def open(self) -> None:
        """Begin a session and commit ten objects."""
        await self._committer.open()
        first = self._committer.next_object_id
        for _ in range(OBJECTS):
            await self._committer.commit(0)
        folder = self._committer.object_folder
        self._sync = jute.request(1, jute.SYNC, jute.buffer(folder[:-1].encode()))
        paths = [f"{folder}{number:010d}".encode() for number in range(first, first + OBJECTS)]
        self._reads = jute.multi_read(paths)

    async def close(self) -> None:
        """Drop the connection."""
        await self._committer.close()

    async def commit(self, _slot: int) -> None:
        """Read all ten, up to date."""
        synced = self._committer.session.ask(self._sync)
        read = self._committer.session.ask(self._reads)
        await synced
        _require(jute.data_count_of_multi_read(await read), "multiRead")


def _require(found: int, what: str) -> None:
    if found != OBJECTS:
        raise LoadError(f"{what} returned {found} objects, expected {OBJECTS}")

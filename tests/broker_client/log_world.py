"""A simulated world of a node whose logs come and go: real clients, a real map, virtual time.

Everything follows from one seed. The controller decides as it does, over a log in memory. The
network loses requests and answers, and delivers some of them late. A process that dies is cut off
from the network, the bucket and its disk: nobody sees the rest.

The payload of a record names the opening of its stream and its number in it. So the content of a
stream shows who wrote it, and whether something is missing before a record.
"""

from __future__ import annotations

import asyncio
import copy
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest

from streammeta.client import StreamClient, StreamClientConfig
from streammeta.client.api import stream_client
from streammeta.client.errors import BrokerClientError
from streammeta.client.parts import ControllerClient
from streammeta.client.wal.bucket.setting_aside import read_aside
from streammeta.client.wal.disk.set_aside import read_set_aside
from streammeta.controller.features import SUPPORTED
from streammeta.controller.lifecycle.broker_sessions import Sessions
from streammeta.controller.metadata.api.requests import SetFeatureLevel, WriteRequest
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.registries.nodes import Node
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.storage.errors import StorageError, StoreUnavailableError
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.protocol.calls import Tally
from streammeta.v1 import admin_pb2
from tests.broker_client.object_log_world import VirtualLoop
from tests.fake_bucket import FAKE_UUID
from tests.kit.fake_cluster import NAMESPACE
from tests.kit.local_calls import Link, LocalServices
from tests.kit.map_services import map_services
from tests.kit.memory_log import CommittingLog
from tests.kit.memory_store import MemoryObjectStore

CLUSTER = "fake"
ENDPOINT = "127.0.0.1:1"
SESSION_MS = 9_000

ResultT = TypeVar("ResultT")


class InlineLoop(VirtualLoop):
    """An event loop of virtual time that carries out the work of threads at once."""

    def run_in_executor(  # type: ignore[override]
        self, _: Any, work: Callable[..., ResultT], *args: Any
    ) -> asyncio.Future[ResultT]:
        done: asyncio.Future[ResultT] = self.create_future()
        try:
            done.set_result(work(*args))
        except Exception as error:  # noqa: BLE001 - it is the waiting caller's to handle
            done.set_exception(error)
        return done


class LoopClock:
    """The time of the running loop, in milliseconds."""

    def monotonic_ms(self) -> int:
        return 1_000_000 + round(asyncio.get_running_loop().time() * 1000)

    def wall_ms(self) -> int:
        return self.monotonic_ms()


class LinkedStore(MemoryObjectStore):
    """The bucket as one process reaches it; all views have the same objects.

    While `refuses_objects` is set, nothing but slots of logs can be written.
    """

    link: Link | None = None
    refuses_objects = False

    def seen_by(self, link: Link) -> LinkedStore:
        """Return the view of the process with this link."""
        view = copy.copy(self)
        view.link = link
        return view

    @contextmanager
    def _call(self, operation: str, deadline: float | None = None) -> Iterator[Tally]:
        if self.link is not None:
            self.link.count()
            if self.link.is_cut:
                raise StoreUnavailableError("the process is cut off")
        with super()._call(operation, deadline) as tally:
            yield tally

    def put(self, key: str, data: Any, **options: Any) -> None:
        if self.refuses_objects and "/wal/" not in key:
            raise StoreUnavailableError("the bucket takes no objects")
        super().put(key, data, **options)

    def until(self, deadline: float) -> LinkedStore:
        view = super().until(deadline)
        assert isinstance(view, LinkedStore)
        return view


class LinkedControllers(ControllerClient):
    """Controllers as one process reaches them."""

    def __init__(self, link: Link, rng: random.Random, **options: Any) -> None:
        super().__init__([ENDPOINT], rng=rng, **options)
        self._link = link

    def channel(self, endpoint: str) -> Any:
        return self._link.channel(endpoint)


@dataclass
class Ledger:
    """Promises that were made to the writers of records."""

    acknowledged: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """Stream and offset by payload."""
    committed: set[bytes] = field(default_factory=set)
    """Records that a process found committed."""

    def check(self, streams: dict[int, list[bytes]], aside: dict[bytes, tuple[int, int]]) -> None:
        """Compare the streams, and the records set aside, with the promises."""
        for stream_id, payloads in streams.items():
            check_runs(stream_id, payloads)
        for payload, (stream_id, offset) in self.acknowledged.items():
            held = streams[stream_id]
            if offset < len(held) and held[offset] == payload:
                continue
            place = f"{payload!r}, offset {offset} of stream {stream_id}"
            assert payload not in held, f"{place} is at another offset"
            assert payload not in self.committed, f"{place} was committed, and is lost"
            assert aside.get(payload) == (stream_id, offset), f"{place} is lost"


def check_runs(stream_id: int, payloads: list[bytes]) -> None:
    """Check that the records of an opening lie behind one another, from its first one on."""
    ended: set[int] = set()
    opening, number = -1, -1
    for offset, payload in enumerate(payloads):
        found, at = (int(part) for part in payload.split(b".")[:2])
        place = f"{payload!r} at offset {offset} of stream {stream_id}"
        if found != opening:
            ended.add(opening)
            assert found not in ended, f"{place} was spliced behind another writer's"
            opening, number = found, -1
        number += 1
        assert at == number, f"{place} was spliced: number {number} of its opening is not before it"


class World:
    """One run: the controller, the bucket, the disks, and the promises."""

    def __init__(self, rng: random.Random, disks: Path) -> None:
        self.rng = rng
        self.disks = disks
        self.badness = rng.choice([0.0, 0.05, 0.2])
        clock = LoopClock()
        self.store = LinkedStore(clock.wall_ms)
        self.ledger = Ledger()
        self.streams: list[int] = []
        self.openings = 0
        self.epochs: dict[int, int] = {}
        self.link: Link
        self.controller = MetadataController(ClusterMetadata(), clock)
        self._log = CommittingLog(self.controller)
        self.controller.bind(self._log)
        sessions = Sessions(SESSION_MS)
        sessions.lead(clock.monotonic_ms())
        self.services = LocalServices(
            (*map_services(CLUSTER, self.controller, sessions, clock), _described())
        )

    async def begin(self) -> None:
        """Lead, and run at the level of this version."""
        self._log.lead()
        await self.controller.write(SetFeatureLevel(level=SUPPORTED.highest))

    async def ask(self, request: WriteRequest) -> None:
        """Change the map as the controller itself, or an operator, does."""
        await self.controller.write(request)

    def registered(self, node_id: int) -> Node | None:
        """Return the last process of a node that has registered."""
        return self.controller.cluster_metadata.node(node_id)

    def new_link(self, badness: float) -> Link:
        self.link = Link(self.services, self.rng, badness)
        return self.link

    def controllers(self, _: Any = None, **options: Any) -> LinkedControllers:
        """Make the controllers of the process that starts."""
        options.pop("tls", None)
        return LinkedControllers(self.link, self.rng, **options)

    def next_epoch(self, node_id: int) -> int:
        self.epochs[node_id] = self.epochs.get(node_id, 0) + 1
        return self.epochs[node_id]

    async def read(self) -> dict[int, list[bytes]]:
        """Read all streams from their first record to their last one."""
        self.new_link(0.0)
        found: dict[int, list[bytes]] = {}
        async with await StreamClient.open([ENDPOINT], self.store) as client:
            for stream_id in self.streams:
                records = [record async for record in client.iterate(stream_id)]
                for offset, record in enumerate(records):
                    assert record.base_offset == offset, f"stream {stream_id}: {record} at {offset}"
                found[stream_id] = [record.payload for record in records]
        return found

    async def check_set_aside(self, places: Iterable[Path | str | None]) -> None:
        """Check that nothing is in its stream that a recovery has just set aside."""
        records = [record for place in places if place for record in self._set_aside_in(place)]
        if records:
            link, streams = self.link, await self.read()
            self.link = link
            for record in records:
                held = streams[record.stream_id][record.base_offset :][:1]
                assert held != [record.payload], f"{record} was set aside, and is in its stream"

    def set_aside(self) -> dict[bytes, tuple[int, int]]:
        """Find all records that recoveries have set aside, on disks and in the bucket."""
        places: list[Path | str] = sorted(self.disks.glob("*/*.aside"))
        listed = self.store.list_objects(f"{NAMESPACE}/wal/")
        places += [info.key for info in listed if "/aside/" in info.key]
        records = [record for place in places for record in self._set_aside_in(place)]
        return {record.payload: (record.stream_id, record.base_offset) for record in records}

    def _set_aside_in(self, place: Path | str) -> list[RecordBatch]:
        if isinstance(place, str):
            return read_aside(self.store, place, NAMESPACE)[1]
        return [part for part in read_set_aside(place) if isinstance(part, RecordBatch)]


class Process:
    """A process of a node with its log, or without one."""

    def __init__(self, world: World, node_id: int, config: StreamClientConfig) -> None:
        self.config = config
        self.node_id = node_id
        self.epoch = world.next_epoch(node_id)
        self.link = world.new_link(world.badness)
        self.link.on_cut = self._end_abruptly
        self.store = world.store.seen_by(self.link)
        self.client: StreamClient | None = None
        self._opening: asyncio.Task[StreamClient] | None = None
        self._world = world
        self._openings: dict[int, list[int]] = {}

    async def start(self, dies_after: int | None = None) -> bool:
        """Open the client; False: it died before, after `dies_after` requests."""
        self.link.cuts_after = dies_after
        self._opening = asyncio.create_task(self._open_client())
        try:
            self.client = await self._opening
        except (BrokerClientError, StorageError, asyncio.CancelledError):
            if not self.link.is_cut:
                raise
            self._restore_image()
            return False
        self.link.cuts_after = None
        if self.link.is_cut:
            await self.kill()
            return False
        if self.client.recovery is not None:
            await self._world.check_set_aside([self.client.recovery.file])
        for stream in self.client.inherited:
            self._opened(stream.stream_id)
        await self.open(set(self._world.streams) - self._openings.keys())
        return True

    async def _open_client(self) -> StreamClient:
        return await StreamClient.open(
            [ENDPOINT], self.store, node_id=self.node_id, node_epoch=self.epoch, config=self.config
        )

    async def create(self, count: int) -> None:
        """Create streams and open them."""
        ids = await self.running.create_streams([{}] * count)
        self._world.streams += ids
        await self.open(set(ids))

    @property
    def running(self) -> StreamClient:
        assert self.client is not None
        return self.client

    @property
    def streams(self) -> list[int]:
        return sorted(self._openings)

    async def open(self, stream_ids: set[int]) -> None:
        """Open streams, those that are not another node's; it may own them already."""
        if stream_ids:
            for stream_id in (await self.running.open_streams(sorted(stream_ids))).done:
                self._opened(stream_id)

    async def close_streams(self, stream_ids: list[int]) -> None:
        for stream_id in (await self.running.close_streams(stream_ids)).done:
            del self._openings[stream_id]

    def _opened(self, stream_id: int) -> None:
        self._world.openings += 1
        self._openings[stream_id] = [self._world.openings, 0]

    async def append(self, stream_id: int) -> None:
        """Append one record, and note its acknowledgement when it comes."""
        opening, number = self._openings[stream_id]
        payload = b"%d.%d." % (opening, number) + b"x" * self._world.rng.choice([0, 40, 300])
        acknowledged = await self.running.writer.append(stream_id, payload)
        self._openings[stream_id][1] += 1
        acknowledged.add_done_callback(partial(self._note, stream_id, payload))

    def _note(self, stream_id: int, payload: bytes, done: asyncio.Future[int]) -> None:
        if not done.cancelled() and done.exception() is None and not self.link.is_cut:
            self._world.ledger.acknowledged[payload] = (stream_id, done.result())

    async def flush(self) -> None:
        """Commit everything, and note what is committed."""
        await self.running.flush()
        if self.link.is_cut:
            return
        ends = {stream_id: self.running.writer.ends(stream_id)[0] for stream_id in self.streams}
        ledger = self._world.ledger
        for payload, (stream_id, offset) in ledger.acknowledged.items():
            opening = int(payload.split(b".")[0])
            if opening == self._openings.get(stream_id, [-1])[0] and offset < ends[stream_id]:
                ledger.committed.add(payload)

    async def meet_refusals(self) -> None:
        """Let uploads fail for a while: without a log for good, so streams are opened again."""
        self.store.refuses_objects = True
        await self.append(self._world.rng.choice(self.streams))
        if self.config.has_log:
            await asyncio.sleep(30)
        else:
            await self.running.flush()
        self.store.refuses_objects = False
        if not self.config.has_log:
            await self.open(set(self.streams))

    async def close(self, *, close_streams: bool = False) -> None:
        """End in order."""
        await self.running.close(close_streams=close_streams)

    async def kill(self) -> None:
        """End at once; what it has sent lands all the same."""
        self.link.cut()
        with suppress(BrokerClientError, StorageError):
            await self.running.writer.close(0)
        with suppress(BrokerClientError, StorageError):
            await self.running.close()
        self._restore_image()

    # -- the disk of a process that is cut off

    @property
    def _disk(self) -> Path | None:
        return None if self.config.wal_directory is None else Path(self.config.wal_directory)

    def _end_abruptly(self) -> None:
        """Keep the disk as it is, and give up a start: cut off, it would retry for ever."""
        if self._opening is not None:
            self._opening.cancel()
        if self._disk is not None and self._disk.exists():
            shutil.copytree(self._disk, _image_of(self._disk))

    def _restore_image(self) -> None:
        if self._disk is not None:
            shutil.rmtree(self._disk, ignore_errors=True)
            if _image_of(self._disk).exists():
                _image_of(self._disk).rename(self._disk)


def _image_of(disk: Path) -> Path:
    return disk.with_name(f"{disk.name}.image")


def simulated(seed: int, scenario: Callable[[World], Any], disks: Path) -> None:
    """Run a scenario from a seed, with empty `disks`; a failure names the seed."""

    class Seeded(random.Random):
        """Draws the same in each run, also where the product asks for no seed."""

        def __init__(self, given: Any = None) -> None:
            super().__init__(seed if given is None else given)

    async def run() -> None:
        world = World(random.Random(seed), disks)
        patch.setattr(stream_client, "ControllerClient", world.controllers)
        await world.begin()
        async with asyncio.timeout(36_000):
            await scenario(world)

    loop = InlineLoop()
    disks.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "Random", Seeded)
        random.seed(seed)
        try:
            loop.run_until_complete(run())
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
            shutil.rmtree(disks)


def _described() -> grpc.GenericRpcHandler:
    """Return the service that describes the cluster."""

    async def describe(_: bytes, __: Any) -> admin_pb2.DescribeClusterResponse:
        return admin_pb2.DescribeClusterResponse(
            cluster_id=CLUSTER,
            object_namespace=NAMESPACE,
            cluster_uuid=FAKE_UUID,
            controllers=[admin_pb2.Controller(endpoint=ENDPOINT)],
        )

    handler: Any = grpc.unary_unary_rpc_method_handler(
        describe, response_serializer=admin_pb2.DescribeClusterResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(
        "streammeta.v1.AdminService", {"DescribeCluster": handler}
    )

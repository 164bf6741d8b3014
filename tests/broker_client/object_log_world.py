"""A simulated world of object logs: virtual time, a bad store, a small map, brokers that die.

Everything follows from one seed. The store delays, reorders, loses and repeats requests and
answers; what was sent lands even if its sender is dead. Its listings may lag, object by object,
and its times may be wrong by weeks. The map refuses a fenced process. A zombie goes on
as if nothing had happened. A stalled process does nothing until it is resumed; its clock runs.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from streammeta.client.errors import NodeEpochExpiredError, NodeFencedError, WriteAheadLogError
from streammeta.client.model import NodeIdentity
from streammeta.client.nodes.session import OpenedStream
from streammeta.client.wal.bucket.config import ObjectLogConfig
from streammeta.client.wal.bucket.departed_node import PendingStream
from streammeta.client.wal.bucket.log import ObjectLog
from streammeta.client.wal.disk.config import LogIdentity
from streammeta.client.wal.disk.recovery import RecoveryPlan, StreamHistory, Verdict
from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_format.record import RECORD_HEADER_SIZE, RecordBatch, encode_record
from streammeta.storage.object_store.protocol.base import ObjectInfo

NAMESPACE = "_streammeta_sim"
NODE = 7
EPOCH = 3
"""The epoch that all streams are open with."""

SMALL = ObjectLogConfig(
    linger_s=0.05,
    slot_bytes=400,
    parallel_uploads=4,
    max_bytes=20_000,
    max_unflushed_bytes=4_000,
    close_deadline_s=5.0,
)

ResultT = TypeVar("ResultT")


class _TimeTravel(selectors.SelectSelector):
    """Waits by moving the clock of its loop."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing is left to happen, but somebody waits"
        self.loop.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only by waiting: a run takes no time, and repeats itself."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _TimeTravel()
        super().__init__(selector)
        selector.loop = self

    def time(self) -> float:
        return self.now


def simulated(seed: int, scenario: Callable[[World], Awaitable[None]]) -> None:
    """Run a scenario from a seed; a failure names the seed."""
    loop = VirtualLoop()
    try:
        loop.run_until_complete(_run(World(random.Random(seed)), scenario))
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


async def _run(world: World, scenario: Callable[[World], Awaitable[None]]) -> None:
    async with asyncio.timeout(3600):
        await scenario(world)


class BadStore:
    """A store of slots in memory; `badness` is the share of requests that something happens to.

    A listing shows a change up to `lag_s` seconds late. Times of objects are wrong by `skew_ms` at
    most.
    """

    def __init__(self, rng: random.Random, badness: float = 0.15) -> None:
        self.objects: dict[str, bytes] = {}
        self.badness = badness
        self.lag_s = 0.0
        self.skew_ms = 0
        self._rng = rng
        self._index: dict[str, ObjectInfo] = {}

    async def create(self, key: str, pieces: Sequence[bytes]) -> bool:
        data = b"".join(pieces)

        def apply() -> bool:
            if key not in self.objects:
                self._change(key, data)
            return self.objects[key] == data

        return await self._request(apply, may_repeat=True)

    async def put(self, key: str, data: bytes) -> None:
        await self._request(partial(self._change, key, data))

    async def get(self, key: str) -> bytes | None:
        return await self._request(partial(self.objects.get, key))

    async def list(self, prefix: str) -> list[ObjectInfo]:
        def apply() -> list[ObjectInfo]:
            return [info for key, info in sorted(self._index.items()) if key.startswith(prefix)]

        return await self._request(apply)

    async def delete(self, keys: Sequence[str]) -> None:
        def apply() -> None:
            for key in keys:
                self._change(key, None)

        await self._request(apply)

    def close(self) -> None:
        """Nothing to close."""

    def _change(self, key: str, data: bytes | None) -> None:
        """Write or delete an object now, and show it in listings later."""
        if data is None:
            self.objects.pop(key, None)
        else:
            self.objects[key] = data
        loop = asyncio.get_running_loop()
        skew = self._rng.randint(-self.skew_ms, self.skew_ms) if self.skew_ms else 0
        stamp_ms = round(loop.time() * 1000) + skew
        if self.lag_s:
            loop.call_later(self._rng.uniform(0, self.lag_s), self._show, key, stamp_ms)
        else:
            self._show(key, stamp_ms)

    def _show(self, key: str, stamp_ms: int) -> None:
        """Bring the listing's entry of an object up to date."""
        data = self.objects.get(key)
        if data is None:
            self._index.pop(key, None)
        else:
            self._index[key] = ObjectInfo(key, len(data), stamp_ms, "")

    async def _request(self, apply: Callable[[], ResultT], *, may_repeat: bool = False) -> ResultT:
        loop, rng = asyncio.get_running_loop(), self._rng
        answer: asyncio.Future[ResultT] = loop.create_future()

        def land() -> None:
            result = apply()
            if not answer.done():
                answer.set_result(result)

        def fail(why: str) -> None:
            if not answer.done():
                answer.set_exception(StoreUnavailableError(why))

        delay = rng.uniform(0.005, 0.1)
        fate = rng.random() / self.badness if self.badness else 1.0
        if fate < 0.25:
            loop.call_later(delay, fail, "the request was lost")
        elif fate < 0.5:
            # The answer is lost, and the request may land long after its sender has given up.
            loop.call_later(rng.uniform(0, 20), apply)
            loop.call_later(delay, fail, "no answer in time")
        elif fate < 0.75 and may_repeat:
            loop.call_later(delay, land)
            loop.call_later(delay + rng.uniform(0, 20), apply)
        else:
            slow = 10 if fate < 1 else 1
            loop.call_later(delay * rng.uniform(1, slow), land)
        result = await answer
        await asyncio.sleep(rng.uniform(0, 0.05))
        return result


class StallingStore:
    """The store as one process reaches it: a stalled process neither sends nor hears answers."""

    def __init__(self, store: BadStore) -> None:
        self.store = store
        self.running = asyncio.Event()
        self.running.set()

    async def create(self, key: str, pieces: Sequence[bytes]) -> bool:
        return await self._call(partial(self.store.create, key, pieces))

    async def put(self, key: str, data: bytes) -> None:
        await self._call(partial(self.store.put, key, data))

    async def get(self, key: str) -> bytes | None:
        return await self._call(partial(self.store.get, key))

    async def list(self, prefix: str) -> list[ObjectInfo]:
        return await self._call(partial(self.store.list, prefix))

    async def delete(self, keys: Sequence[str]) -> None:
        await self._call(partial(self.store.delete, keys))

    def close(self) -> None:
        """Nothing to close."""

    async def _call(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        await self.running.wait()
        try:
            return await call()
        finally:
            await self.running.wait()


@dataclass
class SimMap:
    """Streams of one node as controllers have them: payloads by stream, and who may speak."""

    rng: random.Random
    streams: dict[int, list[bytes]] = field(default_factory=lambda: {1: [], 2: [], 3: []})
    open_streams: set[int] = field(default_factory=lambda: {1, 2, 3})
    node_epoch: int = 0
    is_recovered: bool = False

    async def commit(
        self, epoch: int, rows: Mapping[int, Sequence[RecordBatch]], *, failover: bool = False
    ) -> set[int]:
        """Append rows whose start is the end of their stream; return the streams refused."""
        await self._travel()
        self._check(epoch, failover=failover)
        refused = set()
        for stream_id, records in rows.items():
            held = self.streams[stream_id]
            if stream_id not in self.open_streams or records[0].base_offset != len(held):
                refused.add(stream_id)
                continue
            for record in records:
                assert record.base_offset == len(held), "an upload has a gap"
                held.append(record.payload)
        await self._travel()
        return refused

    async def register(self, epoch: int) -> list[OpenedStream]:
        await self._travel()
        if epoch < self.node_epoch:
            raise NodeEpochExpiredError("registration")
        self.node_epoch, self.is_recovered = epoch, False
        ends = [OpenedStream(i, EPOCH, 0, len(self.streams[i])) for i in sorted(self.open_streams)]
        await self._travel()
        return ends

    async def owed(self, epoch: int) -> list[PendingStream]:
        await self._travel()
        self._check(epoch, failover=True)
        self.is_recovered = True
        found = [
            PendingStream(i, EPOCH, 0, len(self.streams[i])) for i in sorted(self.open_streams)
        ]
        await self._travel()
        return found

    async def close(self, epoch: int, stream_ids: Iterable[int]) -> None:
        await self._travel()
        self._check(epoch, failover=True)
        self.open_streams -= set(stream_ids)
        await self._travel()

    def _check(self, epoch: int, *, failover: bool) -> None:
        if epoch < self.node_epoch:
            raise NodeEpochExpiredError("a call")
        if self.is_recovered and not failover:
            raise NodeFencedError("a call")

    async def _travel(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, 0.05))


@dataclass
class SimDeparted:
    """The departed process of one epoch at the map."""

    map: SimMap
    node: NodeIdentity

    async def list_pending(self) -> list[PendingStream]:
        return await self.map.owed(self.node.node_epoch)

    async def histories(self, stream_ids: Iterable[int]) -> Mapping[int, StreamHistory]:
        return {i: StreamHistory(0, {EPOCH: len(self.map.streams[i])}) for i in stream_ids}

    async def is_stored(self, record: RecordBatch) -> bool:
        held = self.map.streams[record.stream_id]
        return held[record.base_offset] == record.payload

    async def upload(self, records: Mapping[int, Sequence[RecordBatch]]) -> bool:
        return not await self.map.commit(self.node.node_epoch, records, failover=True)

    async def close(self, streams: Sequence[PendingStream]) -> None:
        await self.map.close(self.node.node_epoch, [stream.stream_id for stream in streams])


class World:
    """One run: the store, the map, and what was acknowledged."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.store = BadStore(rng)
        self.map = SimMap(rng)
        self.acknowledged: dict[tuple[int, int], bytes] = {}

    def departed(self, epoch: int) -> SimDeparted:
        return SimDeparted(self.map, NodeIdentity(NODE, epoch))

    def note(self, record: RecordBatch, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and done.exception() is None:
            place = (record.stream_id, record.base_offset)
            assert self.acknowledged.get(place, record.payload) == record.payload, (
                f"two records of {place} were acknowledged"
            )
            self.acknowledged[place] = record.payload

    def check(self) -> None:
        """Compare the map with what was acknowledged."""
        for (stream_id, offset), payload in self.acknowledged.items():
            held = self.map.streams[stream_id]
            assert offset < len(held), f"stream {stream_id}, offset {offset}: {payload!r} is lost"
            assert held[offset] == payload, f"stream {stream_id}, offset {offset} is another's"
        for held in self.map.streams.values():
            assert len(held) == len(set(held)), "a record is there twice"


class SimBroker:
    """One process of the node: it logs records, commits them now and then, and trims its log."""

    def __init__(self, world: World, epoch: int, config: ObjectLogConfig = SMALL) -> None:
        self.config = config
        self.pauses = [0, 0.001, 0.02, 0.1]
        """Seconds between appends, drawn at random."""
        self._world = world
        self._epoch = epoch
        self._store = StallingStore(world.store)
        self._tasks: list[asyncio.Task[None]] = []
        self._pending: list[RecordBatch] = []
        self._committing = asyncio.Lock()
        self._ends: dict[int, int] = {}
        self.log: ObjectLog | None = None

    async def start(self) -> None:
        """Register, open the log, and commit what it holds; then write on."""
        opened = await self._world.map.register(self._epoch)
        loop = asyncio.get_running_loop()
        identity = LogIdentity(NAMESPACE, NODE, self._epoch)
        log_id = self._world.rng.randbytes(16)
        log = await self._again(
            lambda: ObjectLog.open_in(self._store, identity, self.config, log_id, loop.time)
        )
        self.log = log
        plan = RecoveryPlan(opened)
        self._ends = {stream.stream_id: stream.next_offset for stream in opened}
        rows: dict[int, list[RecordBatch]] = {}
        for record in log.recover():
            verdict = plan.validate(record)
            if verdict is Verdict.UPLOAD:
                rows.setdefault(record.stream_id, []).append(record)
                self._ends[record.stream_id] = record.end_offset
        if rows and await self._world.map.commit(self._epoch, rows):
            raise NodeFencedError("another committed")
        log.trim(log.recovered_end)
        self._tasks = [asyncio.create_task(work()) for work in (self._write, self._commit)]

    async def _again(self, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
        while True:
            try:
                return await work()
            except StoreUnavailableError:
                await asyncio.sleep(0.1)

    async def _write(self) -> None:
        rng, log = self._world.rng, self.log
        assert log is not None
        number = 0
        try:
            while True:
                stream_id = rng.choice(sorted(self._ends) or [1])
                if stream_id not in self._ends:
                    return
                payload = b"%d.%d." % (self._epoch, number) + b"x" * rng.choice([0, 30, 500])
                offset = self._ends[stream_id]
                record = RecordBatch(stream_id, EPOCH, offset, 1, payload)
                data = encode_record(record)
                if log.has_room(len(data)):
                    done = log.append(data[:RECORD_HEADER_SIZE], data[RECORD_HEADER_SIZE:])
                    done.add_done_callback(partial(self._world.note, record))
                    self._ends[stream_id] = offset + 1
                    self._pending.append(record)
                    number += 1
                await asyncio.sleep(rng.choice(self.pauses))
                await self._store.running.wait()
        except WriteAheadLogError:
            return

    async def _commit(self) -> None:
        while True:
            await asyncio.sleep(self._world.rng.uniform(0.1, 0.8))
            await self._store.running.wait()
            if not await self._commit_pending():
                return

    async def _commit_pending(self) -> bool:
        """Commit what was appended and trim the log; False: another speaks for the node."""
        log = self.log
        assert log is not None
        async with self._committing:
            batch, self._pending, end = self._pending, [], log.end
            rows: dict[int, list[RecordBatch]] = {}
            for record in batch:
                rows.setdefault(record.stream_id, []).append(record)
            try:
                if rows and await self._world.map.commit(self._epoch, rows):
                    return False
            except (NodeFencedError, NodeEpochExpiredError):
                return False
            log.trim(end)
            return True

    def stall(self) -> None:
        """Let the process do nothing until it is resumed."""
        self._store.running.clear()

    def resume(self) -> None:
        """Let a stalled process go on."""
        self._store.running.set()

    async def close(self) -> None:
        """End the process in order: what was appended is committed, and the log is closed."""
        log, (write, commit) = self.log, self._tasks
        assert log is not None
        write.cancel()
        await log.flush()
        await self._commit_pending()
        commit.cancel()
        await log.close()
        self.log = None

    def kill(self) -> None:
        """End the process at once; what it has sent lands all the same."""
        for task in self._tasks:
            task.cancel()
        if self.log is not None:
            log, self.log = self.log, None
            for sent in [*log._uploads, log._cleaning, log._sweeping]:
                if sent is not None:
                    sent.cancel()
            log._end(WriteAheadLogError("killed"))
            log._is_closed = True

"""A broker's part in the cluster: it knows the view, leads partitions, and moves those of the dead.

Owns the loop that reads the view, recovers nodes that the controllers name, appoints leaders where
this broker is the one to do so, and opens and closes logs accordingly. A log that has failed is
opened again under the next epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from streammeta.brokers.kafka.cluster.cluster import ClusterView, Leader, Topic, read_view
from streammeta.brokers.kafka.cluster.cluster_watch import follow_news
from streammeta.brokers.kafka.cluster.deleted_topics import delete_streams_of_deleted
from streammeta.brokers.kafka.cluster.keys import PRODUCER_BLOCK, Keys, leader_key, meta_key
from streammeta.brokers.kafka.cluster.refused_batches import RefusedBatches
from streammeta.brokers.kafka.cluster.takeover import close_streams_of
from streammeta.brokers.kafka.cluster.topic_configs import log_config
from streammeta.brokers.kafka.protocol.codes import Code, KafkaError
from streammeta.brokers.kafka.protocol.tally import BrokerTally
from streammeta.brokers.partition.errors import PartitionError
from streammeta.brokers.partition.log import PartitionLog
from streammeta.brokers.partition.log_clock import wall_clock_ms
from streammeta.brokers.partition.opening import (
    create_meta_stream,
    open_log,
    partition_tags,
)
from streammeta.client import (
    BrokerClientError,
    ControllerUnavailableError,
    StorageError,
    StreamClient,
    StreamEpochMismatchError,
    StreamFencedError,
)

VIEW_INTERVAL_S = 0.5
"""Longest time between two readings of the view; news make it shorter."""
OPENING_RETRIED_S = 0.05
"""Time until a partition that could not be opened is tried again, at first."""
HOUSEKEEPING_S = 30.0
SWEEP_S = 5.0
"""Time between two looks for streams of deleted topics."""
CLOSED_WITHIN_S = 10.0
"""Time in which a broker that ends closes its partitions."""
SETTLED_S = 5.0
"""Time without brokers that come or go, until partitions move to those that lead less."""

_NAMED_MAX = 10
_CLOSED_AT_ONCE = 32
"""Partitions that are closed side by side: they share objects and commits."""

_log = logging.getLogger(__name__)

Place = tuple[str, int]
"""Topic id and partition."""


@dataclass
class Broker:
    """One broker of a Kafka cluster. Make it with `open`; `close` hands its partitions over."""

    client: StreamClient
    keys: Keys
    cluster_id: str
    node_id: int
    tally: BrokerTally = field(default_factory=BrokerTally)
    default_partitions: int = 1
    creates_topics: bool = True
    view: ClusterView = field(default_factory=ClusterView)
    logs: dict[Place, PartitionLog] = field(default_factory=dict)
    refused: RefusedBatches = field(default_factory=RefusedBatches)
    _opening: dict[Place, asyncio.Task[None]] = field(default_factory=dict)
    _failed_openings: Counter[Place] = field(default_factory=Counter)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _refreshes: set[asyncio.Task[None]] = field(default_factory=set)
    _due: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _producer_ids: range = range(0)
    _producer_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _housekept_at: float = field(default_factory=time.monotonic)
    _swept_at: float = field(default_factory=time.monotonic)
    _changed_at: float = field(default_factory=time.monotonic)
    _read_at: float = field(default_factory=time.monotonic)

    @classmethod
    async def open(
        cls, client: StreamClient, host: str, port: int, tally: BrokerTally | None = None
    ) -> Broker:
        """Join the cluster at the address that clients are told. `client` has a node id."""
        described = await client.controllers.describe_cluster()
        keys = Keys(client.controllers, described.cluster_id)
        node = client.session.node
        broker = cls(client, keys, described.cluster_id, node.node_id, tally or BrokerTally())
        inherited = [one.stream_id for one in client.inherited]
        if inherited:
            await client.close_streams(inherited)
        address = {"host": host, "port": port, "node_epoch": node.node_epoch}
        await keys.put({f"broker/{node.node_id}": address})
        await broker.refresh()
        news = follow_news(client.controllers, keys, broker._news.set)
        broker._tasks = [asyncio.create_task(broker._run()), asyncio.create_task(news)]
        return broker

    @property
    def view_age_s(self) -> float:
        """Time since the view was read, in seconds."""
        return time.monotonic() - self._read_at

    @property
    def unavailable(self) -> int:
        """Partitions without a leader that lives, and those led here that are not open."""
        return sum(not self.is_available(*place) for place in self.view.partitions())

    def is_available(self, topic: Topic, partition: int) -> bool:
        """Return whether a partition has a leader that lives, and is open if that is this one."""
        leader = self.view.leader(topic, partition)
        if leader is None or leader.node_id != self.node_id:
            return leader is not None
        log = self.logs.get((topic.topic_id, partition))
        return log is not None and log.is_writable

    async def abandon(self) -> None:
        """Leave without a word, for another process speaks for the node or its partitions."""
        await self._end_tasks()
        for log in self.logs.values():
            log.give_up()

    async def close(self) -> None:
        """Leave in good order: others may open the partitions at once.

        Partitions that can't be closed in `CLOSED_WITHIN_S` are named in the log, and given up:
        others open them when the session has ended.
        """
        await self._end_tasks()
        deadline = asyncio.get_running_loop().time() + CLOSED_WITHIN_S
        room = asyncio.Semaphore(_CLOSED_AT_ONCE)
        await asyncio.gather(*(self._close_log(log, room, deadline) for log in self.logs.values()))
        if not self._report_unclosed():
            with contextlib.suppress(BrokerClientError, TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self.keys.delete([f"broker/{self.node_id}"])
        self.logs.clear()

    async def _close_log(self, log: PartitionLog, room: asyncio.Semaphore, deadline: float) -> None:
        with contextlib.suppress(BrokerClientError, PartitionError, StorageError, TimeoutError):
            async with asyncio.timeout_at(deadline), room:
                await log.close()

    def _report_unclosed(self) -> bool:
        """Give up the logs that are not closed, and name them; return whether there are any."""
        names = {topic.topic_id: topic.name for topic in self.view.topics.values()}
        unclosed = []
        for (topic_id, partition), log in self.logs.items():
            if log.is_released:
                continue
            log.give_up()
            name = f"{names.get(topic_id, topic_id)}-{partition}"
            lost = log.end_offset - log.high_watermark
            unclosed.append(f"{name} ({lost} offsets are not committed)" if lost else name)
        if unclosed:
            named = ", ".join(sorted(unclosed)[:_NAMED_MAX])
            _log.warning(
                "node %d ends without closing %d partitions, such as %s; producers were not"
                " answered for uncommitted records, and send them again",
                self.node_id,
                len(unclosed),
                named,
            )
        return bool(unclosed)

    async def _end_tasks(self) -> None:
        tasks = [*self._tasks, *self._refreshes, *self._opening.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # -- what requests need

    def topic(self, name: str) -> Topic:
        """Return a topic of the view. Raises `KafkaError`."""
        found = self.view.topics.get(name)
        if found is None:
            raise KafkaError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name!r}")
        return found

    def log_of(self, name: str, partition: int, leader_epoch: int = -1) -> PartitionLog:
        """Return the log of a partition that this broker leads. Raises `KafkaError`."""
        topic = self.topic(name)
        if not 0 <= partition < topic.partitions:
            raise KafkaError(Code.UNKNOWN_TOPIC_OR_PARTITION)
        log = self.logs.get((topic.topic_id, partition))
        if log is None or not log.is_writable:
            raise KafkaError(Code.NOT_LEADER_OR_FOLLOWER)
        if 0 <= leader_epoch < log.epoch:
            raise KafkaError(Code.FENCED_LEADER_EPOCH)
        if leader_epoch > log.epoch:
            raise KafkaError(Code.UNKNOWN_LEADER_EPOCH)
        return log

    async def next_producer_id(self) -> int:
        """Return a producer id that no broker of the cluster gives out again."""
        async with self._producer_lock:
            if not self._producer_ids:
                first = await self.keys.reserve_producer_ids()
                self._producer_ids = range(first, first + PRODUCER_BLOCK)
            taken, self._producer_ids = self._producer_ids[0], self._producer_ids[1:]
            return taken

    # -- the view

    async def refresh(self) -> None:
        """Read the view and act on it: recover, appoint, open, close.

        Those who ask before a reading has begun share it. It goes on when they give up: a stop
        between two steps would leave streams open that nobody writes.
        """
        if self._due is None:
            self._due = asyncio.create_task(self._refresh())
            self._refreshes.add(self._due)
            self._due.add_done_callback(self._refreshed)
        await asyncio.shield(self._due)

    async def _refresh(self) -> None:
        async with self._reading:
            self._due = None
            await self._read()
            owed = self.view.recoveries.get(self.node_id, ())
            controllers, own = self.client.controllers, self.client.session.node
            self.tally.recovered_streams += await close_streams_of(controllers, own, owed)
            if self.view.controller == self.node_id and await self._appoint():
                await self._read()
            await self._close_lost()
            self._configure()
            self._open_gained()

    def _refreshed(self, task: asyncio.Task[None]) -> None:
        self._refreshes.discard(task)
        if not task.cancelled():
            task.exception()  # those who asked may have given up

    async def until(self, is_so: Callable[[], bool], within_s: float) -> None:
        """Wait until the view or the open logs make `is_so` true, for so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not is_so():
                    await self._changed.wait()

    def _note_change(self) -> None:
        """Wake those who wait `until` something."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _read(self) -> None:
        former = self.view.brokers
        self.view = await read_view(self.keys, self.client.controllers, self.client.session.node)
        self._read_at = time.monotonic()
        self._note_change()
        if self.view.brokers != former:
            self._changed_at = time.monotonic()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(VIEW_INTERVAL_S):
                    await self._news.wait()
            self._news.clear()
            try:
                await self.refresh()
                if time.monotonic() - self._swept_at > SWEEP_S:
                    self._swept_at = time.monotonic()
                    await self._sweep()
                if time.monotonic() - self._housekept_at > HOUSEKEEPING_S:
                    self._housekept_at = time.monotonic()
                    await self._housekeep()
            except ControllerUnavailableError as error:
                _log.warning("the view is not renewed: %s", error)
            except Exception:  # noqa: BLE001 - partitions must be opened and closed all the same
                _log.exception("the view is not acted upon, it is read again")

    async def _appoint(self) -> bool:
        """Name leaders where there are none, or too many of a broker; say if any may be new."""
        is_settled = time.monotonic() - self._changed_at > SETTLED_S
        appointed = self.view.appointments() or (self.view.moves() if is_settled else {})
        await self.keys.put_at(
            {leader_key(*at): (one.document(), one.version) for at, one in appointed.items()}
        )
        return bool(appointed)

    def _led(self) -> Mapping[Place, tuple[Topic, Leader]]:
        return {
            (topic.topic_id, partition): (topic, leader)
            for topic, partition in self.view.partitions()
            if (leader := self.view.leader(topic, partition)) and leader.node_id == self.node_id
        }

    async def _close_lost(self) -> None:
        led = self._led()
        for place, log in list(self.logs.items()):
            topic_and_leader = led.get(place)
            if topic_and_leader is None or topic_and_leader[1].epoch != log.epoch:
                del self.logs[place]
                log.give_up()
                await self._close_streams(log)

    def _configure(self) -> None:
        """Give open logs the settings that their topics have now."""
        for topic in self.view.topics.values():
            config = log_config(topic.configs)
            for partition in range(topic.partitions):
                log = self.logs.get((topic.topic_id, partition))
                if log is not None:
                    log.config = config

    async def _close_streams(self, log: PartitionLog) -> None:
        with contextlib.suppress(BrokerClientError):
            await self.client.close_streams(log.stream_ids)

    def _open_gained(self) -> None:
        for place, (topic, leader) in self._led().items():
            log = self.logs.get(place)
            if place not in self._opening and (log is None or log.failure is not None):
                task = asyncio.create_task(self._open(topic, place, leader))
                self._opening[place] = task
                task.add_done_callback(lambda _, at=place: self._opening.pop(at, None))  # type: ignore[misc]

    async def _open(self, topic: Topic, place: Place, leader: Leader) -> None:
        """Open a log under its epoch; one that has failed, or an epoch that was used, moves on."""
        try:
            failed = self.logs.pop(place, None)
            if failed is not None:
                await self._close_streams(failed)
                await self._next_epoch(place, leader)
                return
            tags = partition_tags(*place)
            config = log_config(topic.configs)
            meta_id = await self._meta_stream(*place)
            self.logs[place] = await open_log(self.client, meta_id, leader.epoch, tags, config)
            self._failed_openings.pop(place, None)
            self._note_change()
        except (StreamFencedError, StreamEpochMismatchError):
            await self._next_epoch(place, leader)
        except (BrokerClientError, PartitionError, StorageError) as error:
            _log.warning("%s-%d is not open yet: %s", topic.name, place[1], error)
            self._retry_opening(place)

    def _retry_opening(self, place: Place) -> None:
        """Look again soon, since a former leader's streams may be closed at any moment."""
        pause_s = OPENING_RETRIED_S * 2 ** self._failed_openings[place]
        if pause_s < VIEW_INTERVAL_S:
            self._failed_openings[place] += 1
            asyncio.get_running_loop().call_later(pause_s, self._news.set)

    async def _next_epoch(self, place: Place, leader: Leader) -> None:
        following = Leader(self.node_id, leader.epoch + 1)
        with contextlib.suppress(BrokerClientError):
            await self.keys.put({leader_key(*place): following.document()}, leader.version)

    async def _meta_stream(self, topic_id: str, partition: int) -> int:
        key = meta_key(topic_id, partition)
        known = await self.keys.stream_id(key)
        if known is not None:
            return known
        created = await create_meta_stream(self.client, topic_id, partition)
        return await self.keys.claim_stream_id(key, created)

    async def _sweep(self) -> None:
        """Delete streams of topics that are deleted, if it is this broker that names leaders."""
        if self.view.controller == self.node_id:
            living = {topic.topic_id for topic in self.view.topics.values()}
            await delete_streams_of_deleted(self.client, self.keys, living, wall_clock_ms())

    async def _housekeep(self) -> None:
        for place, log in list(self.logs.items()):
            try:
                await log.housekeep()
            except (BrokerClientError, PartitionError, StorageError) as error:
                _log.warning("retention of %s-%d: %s", *place, error)

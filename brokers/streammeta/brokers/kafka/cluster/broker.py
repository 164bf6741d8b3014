"""A broker in its cluster: view, led partitions, and takeover from dead brokers.

Owns the loop that reads the view, recovers nodes named by the controllers, appoints leaders if this
broker is Kafka's controller, and opens and closes logs accordingly. A failed log is reopened under
the next epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from streammeta.brokers.kafka.cluster.cluster import (
    ClusterView,
    Endpoint,
    Leader,
    Topic,
    read_view,
)
from streammeta.brokers.kafka.cluster.cluster_watch import close_streams_of, watch_cluster
from streammeta.brokers.kafka.cluster.deleted_topics import delete_streams_of_deleted
from streammeta.brokers.kafka.cluster.keys import PRODUCER_BLOCK, Keys, leader_key, meta_key
from streammeta.brokers.kafka.cluster.refused_batches import RefusedBatches
from streammeta.brokers.kafka.cluster.shared_streams import (
    chosen_places,
    provide_streams,
    shared_partitions,
)
from streammeta.brokers.kafka.cluster.topic_configs import log_config
from streammeta.brokers.kafka.diskless.partition import LEADER_EPOCH, DisklessPartition
from streammeta.brokers.kafka.diskless.partitions import DisklessPartitions
from streammeta.brokers.kafka.diskless.placement import choose_broker
from streammeta.brokers.kafka.protocol.codes import Code, KafkaError
from streammeta.brokers.kafka.protocol.tally import BrokerTally
from streammeta.brokers.partition import opening
from streammeta.brokers.partition.errors import PartitionError
from streammeta.brokers.partition.log import PartitionLog
from streammeta.brokers.partition.log_clock import wall_clock_ms
from streammeta.client import StreamClient, errors

VIEW_INTERVAL_S = 0.5
"""Maximum interval between two reads of the view, in seconds. A watch event shortens it."""
OPENING_BACKOFF_S = 0.05
"""Initial backoff before a failed opening of a partition is retried, in seconds."""
HOUSEKEEPING_S = 30.0
SWEEP_S = 5.0
"""Interval between two searches for streams of deleted topics, in seconds."""
CLOSE_TIMEOUT_S = 10.0
"""Time limit for closing the partitions when the broker stops, in seconds."""
SETTLED_S = 5.0
"""Time without joining or leaving brokers before partitions are rebalanced, in seconds."""

_NAMED_MAX = 10
_CLOSES_MAX = 32
"""Partitions closed concurrently. They share objects and commits."""

_log = logging.getLogger(__name__)

SHARED_PRODUCERS_FROM = 2**40
"""First producer id of brokers with shared streams. Smaller ones are reserved in a key.

The controllers number the ids that they issue from 0, and the key does too.
"""

Place = tuple[str, int]
"""Topic id and partition."""

Log = PartitionLog | DisklessPartition
"""What serves a partition: its leader's log, or any broker's view of a shared stream."""


@dataclass
class Broker:
    """One broker of a Kafka cluster. Create it with `open`; `close` hands its partitions over.

    `diskless` are the partitions without leaders, None on a broker that does not serve them.
    """

    client: StreamClient
    keys: Keys
    cluster_id: str
    node_id: int
    tally: BrokerTally = field(default_factory=BrokerTally)
    default_partitions: int = 1
    creates_topics: bool = True
    rack: str | None = None
    diskless: DisklessPartitions | None = None
    view: ClusterView = field(default_factory=ClusterView)
    logs: dict[Place, PartitionLog] = field(default_factory=dict)
    refused: RefusedBatches = field(default_factory=RefusedBatches)
    _opening: dict[Place, asyncio.Task[None]] = field(default_factory=dict)
    _failed_openings: Counter[Place] = field(default_factory=Counter)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _view_changed: asyncio.Event = field(default_factory=asyncio.Event)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _refreshes: set[asyncio.Task[None]] = field(default_factory=set)
    _next_refresh: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _producer_ids: range = range(0)
    _producer_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _housekept_at: float = field(default_factory=time.monotonic)
    _swept_at: float = field(default_factory=time.monotonic)
    _changed_at: float = field(default_factory=time.monotonic)
    _read_at: float = field(default_factory=time.monotonic)

    @classmethod
    async def open(
        cls,
        client: StreamClient,
        host: str,
        port: int,
        tally: BrokerTally | None = None,
        *,
        rack: str | None = None,
        is_shared: bool = False,
    ) -> Broker:
        """Join the cluster with the advertised address. `client` needs a node id.

        With `is_shared` it serves diskless topics. Raises `RejectedError` for that below feature
        level 5.
        """
        described = await client.controllers.describe_cluster()
        keys = Keys(client.controllers, described.cluster_id)
        node = client.session.node
        broker = cls(client, keys, described.cluster_id, node.node_id, tally or BrokerTally())
        broker.rack = rack
        if is_shared:
            broker.diskless = DisklessPartitions(client)
            # Before others see it: below the feature level this fails.
            broker._producer_ids = await broker._reserve_producer_ids()
        # Streams of a former process of this node block their new leaders until they are closed.
        inherited = [stream.stream_id for stream in client.inherited]
        if inherited:
            await client.close_streams(inherited)
        address = Endpoint(host, port, node.node_epoch, rack, is_shared)
        await keys.put({f"broker/{node.node_id}": address.document()})
        await broker.refresh()
        news = watch_cluster(client, keys, broker._view_changed.set)
        broker._tasks = [asyncio.create_task(broker._run()), asyncio.create_task(news)]
        if broker.diskless is not None:
            broker._tasks.append(asyncio.create_task(broker.diskless.follow()))
        return broker

    @property
    def view_age_s(self) -> float:
        """Age of the view, in seconds."""
        return time.monotonic() - self._read_at

    @property
    def unavailable(self) -> int:
        """Number of partitions without a live leader, plus own ones that are not open."""
        return sum(not self.is_available(*place) for place in self.view.partitions())

    def is_available(self, topic: Topic, partition: int) -> bool:
        """Return whether a partition has a live leader, and is open if this broker leads it.

        Any live broker leads a partition of a diskless topic.
        """
        if topic.is_diskless:
            return partition < topic.provided and bool(self.view.servers(self.rack))
        leader = self.view.leader(topic, partition)
        if leader is None or leader.node_id != self.node_id:
            return leader is not None
        log = self.logs.get((topic.topic_id, partition))
        return log is not None and log.is_writable

    async def abandon(self) -> None:
        """Stop without closing anything: another process owns the node or its partitions now."""
        await self._end_tasks()
        for log in self.logs.values():
            log.give_up()

    async def close(self) -> None:
        """Stop and close the partitions, so that others can open them immediately.

        Partitions that can't be closed within `CLOSE_TIMEOUT_S` are logged and abandoned. Others
        open them after the session expires.
        """
        await self._end_tasks()
        deadline = asyncio.get_running_loop().time() + CLOSE_TIMEOUT_S
        slots = asyncio.Semaphore(_CLOSES_MAX)
        await asyncio.gather(*(self._close_log(log, slots, deadline) for log in self.logs.values()))
        # With open partitions the key stays, and others wait for the session to expire.
        if not self._report_unclosed():
            with contextlib.suppress(errors.BrokerClientError, TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self.keys.delete([f"broker/{self.node_id}"])
        self.logs.clear()

    async def _close_log(
        self, log: PartitionLog, slots: asyncio.Semaphore, deadline: float
    ) -> None:
        with contextlib.suppress(
            errors.BrokerClientError, PartitionError, errors.StorageError, TimeoutError
        ):
            async with asyncio.timeout_at(deadline), slots:
                await log.close()

    def _report_unclosed(self) -> bool:
        """Abandon and log the partitions that are not closed, and return whether there are any."""
        names = {topic.topic_id: topic.name for topic in self.view.topics.values()}
        open_names = []
        for (topic_id, partition), log in self.logs.items():
            if log.is_released:
                continue
            log.give_up()
            name = f"{names.get(topic_id, topic_id)}-{partition}"
            lost = log.end_offset - log.high_watermark
            open_names.append(f"{name} ({lost} uncommitted offsets)" if lost else name)

        if open_names:
            named = ", ".join(sorted(open_names)[:_NAMED_MAX])
            _log.warning(
                "node %d stops with %d partitions not closed, such as %s. Producers got no"
                " acknowledgement for uncommitted records and will resend them",
                self.node_id,
                len(open_names),
                named,
            )

        return bool(open_names)

    async def _end_tasks(self) -> None:
        tasks = [*self._tasks, *self._refreshes, *self._opening.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # -- lookups for requests

    def topic(self, name: str) -> Topic:
        """Return a topic of the view. Raises `KafkaError`."""
        found = self.view.topics.get(name)
        if found is None:
            raise KafkaError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name!r} does not exist")
        return found

    def leaders_of(self, topic: Topic) -> Sequence[Leader | None]:
        """Return the live leader of each partition of a topic, or the one to name as such."""
        if not topic.is_diskless:
            return [self.view.leader(topic, partition) for partition in range(topic.partitions)]
        nodes, provided = self.view.servers(self.rack), topic.provided
        return [
            Leader(choose_broker(nodes, topic.topic_id, partition), LEADER_EPOCH)
            if nodes and partition < provided
            else None
            for partition in range(topic.partitions)
        ]

    def log_of(self, name: str, partition: int, leader_epoch: int = -1) -> PartitionLog:
        """Return the log of a partition that this broker leads. Raises `KafkaError`."""
        log = self.logs.get(self._place_of(name, partition))
        if log is None or not log.is_writable:
            raise KafkaError(Code.NOT_LEADER_OR_FOLLOWER)
        _check_epoch(log.epoch, leader_epoch)
        return log

    def served(self, name: str, partition: int, leader_epoch: int = -1) -> Log:
        """Return what serves a partition that this broker leads or shares. Raises `KafkaError`."""
        place = self._place_of(name, partition)
        shared = None if self.diskless is None else self.diskless.get(place)
        if shared is None:
            return self.log_of(name, partition, leader_epoch)
        _check_epoch(shared.epoch, leader_epoch)
        return shared

    def _place_of(self, name: str, partition: int) -> Place:
        topic = self.topic(name)
        if not 0 <= partition < topic.partitions:
            raise KafkaError(Code.UNKNOWN_TOPIC_OR_PARTITION)
        return topic.topic_id, partition

    async def next_producer_id(self) -> int:
        """Return a producer id that no other broker of the cluster assigns."""
        async with self._producer_lock:
            if not self._producer_ids:
                self._producer_ids = await self._reserve_producer_ids()
            taken, self._producer_ids = self._producer_ids[0], self._producer_ids[1:]
            return taken

    async def _reserve_producer_ids(self) -> range:
        if self.diskless is None:
            first = await self.keys.reserve_producer_ids()
        else:
            issued = await self.client.session.issue_producer_ids(PRODUCER_BLOCK)
            first = SHARED_PRODUCERS_FROM + issued.start
        return range(first, first + PRODUCER_BLOCK)

    # -- the view

    async def refresh(self) -> None:
        """Read the view and act on it: recover, appoint, open, close.

        Callers before the read starts share it. It continues if they are cancelled: a stop between
        two steps would leave streams open that nobody writes.
        """
        if self._next_refresh is None:
            self._next_refresh = asyncio.create_task(self._refresh())
            self._refreshes.add(self._next_refresh)
            self._next_refresh.add_done_callback(self._finish_refresh)
        await asyncio.shield(self._next_refresh)

    async def _refresh(self) -> None:
        async with self._reading:
            self._next_refresh = None
            await self._read()
            recoveries = self.view.recoveries.get(self.node_id, ())
            session = self.client.session
            self.tally.recovered_streams += await close_streams_of(session, recoveries)
            # The second read makes this broker open its new partitions without waiting for an
            # interval.
            if self.view.controller == self.node_id and await self._appoint():
                await self._read()
            if self.diskless is not None:
                # One broker provides the streams of new partitions.
                if min(self.view.servers(None), default=-1) == self.node_id and (
                    await provide_streams(self.client, self.keys, self.view.topics.values())
                ):
                    await self._read()
                self.diskless.configure(shared_partitions(self.view.topics.values()))
            # Close before open: a lost partition's next leader waits for its streams.
            await self._close_lost()
            self._configure()
            self._open_gained()

    def _finish_refresh(self, task: asyncio.Task[None]) -> None:
        self._refreshes.discard(task)
        if not task.cancelled():
            task.exception()  # those who asked may have given up

    async def until(self, condition: Callable[[], bool], within_s: float) -> None:
        """Wait until a change of the view or the open logs makes `condition` true, or a timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not condition():
                    await self._changed.wait()

    def _note_change(self) -> None:
        """Wake the callers of `until`."""
        # A fresh event for the next change: waiters of the old one have seen this change.
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
                    await self._view_changed.wait()
            self._view_changed.clear()
            try:
                await self.refresh()
                if time.monotonic() - self._swept_at > SWEEP_S:
                    self._swept_at = time.monotonic()
                    await self._sweep()
                if time.monotonic() - self._housekept_at > HOUSEKEEPING_S:
                    self._housekept_at = time.monotonic()
                    await self._housekeep()
            except errors.ControllerUnavailableError as error:
                _log.warning("reading the view failed, retrying: %s", error)
            except Exception:  # noqa: BLE001 - partitions must be opened and closed all the same
                _log.exception("acting on the view failed, retrying after the next read")

    async def _appoint(self) -> bool:
        """Appoint missing leaders or rebalance, and return whether any leader may have changed."""
        # A restarting broker leaves and joins within seconds, and must not move partitions twice.
        is_settled = time.monotonic() - self._changed_at > SETTLED_S
        appointed = self.view.appointments() or (self.view.moves() if is_settled else {})
        await self.keys.put_at(
            {
                leader_key(*at): (leader.document(), leader.version)
                for at, leader in appointed.items()
            }
        )
        return bool(appointed)

    def _led_partitions(self) -> Mapping[Place, tuple[Topic, Leader]]:
        return {
            (topic.topic_id, partition): (topic, leader)
            for topic, partition in self.view.partitions()
            if (leader := self.view.leader(topic, partition)) and leader.node_id == self.node_id
        }

    async def _close_lost(self) -> None:
        led = self._led_partitions()
        for place, log in list(self.logs.items()):
            topic_and_leader = led.get(place)
            if topic_and_leader is None or topic_and_leader[1].epoch != log.epoch:
                del self.logs[place]
                log.give_up()
                await self._close_streams(log)

    def _configure(self) -> None:
        """Apply the current settings of topics to their open logs."""
        for topic in self.view.topics.values():
            config = log_config(topic.configs)
            for partition in range(topic.partitions):
                log = self.logs.get((topic.topic_id, partition))
                if log is not None:
                    log.config = config

    async def _close_streams(self, log: PartitionLog) -> None:
        with contextlib.suppress(errors.BrokerClientError):
            await self.client.close_streams(log.stream_ids)

    def _open_gained(self) -> None:
        for place, (topic, leader) in self._led_partitions().items():
            log = self.logs.get(place)
            if place not in self._opening and (log is None or log.failure is not None):
                task = asyncio.create_task(self._open(topic, place, leader))
                self._opening[place] = task
                task.add_done_callback(lambda _, at=place: self._opening.pop(at, None))  # type: ignore[misc]

    async def _open(self, topic: Topic, place: Place, leader: Leader) -> None:
        """Open a log under its epoch. A failed log or a used epoch moves to the next epoch."""
        try:
            failed = self.logs.pop(place, None)
            if failed is not None:
                await self._close_streams(failed)
                await self._next_epoch(place, leader)
                return

            tags = opening.partition_tags(*place)
            config = log_config(topic.configs)
            meta_id = await self._meta_stream(*place)
            self.logs[place] = await opening.open_log(
                self.client, meta_id, leader.epoch, tags, config
            )
            self._failed_openings.pop(place, None)
            self._note_change()
        except (errors.StreamFencedError, errors.StreamEpochMismatchError):
            await self._next_epoch(place, leader)
        except (errors.BrokerClientError, PartitionError, errors.StorageError) as error:
            _log.warning("opening %s-%d failed, retrying: %s", topic.name, place[1], error)
            self._retry_opening(place)

    def _retry_opening(self, place: Place) -> None:
        """Read the view again soon: a former leader's streams may be closed at any moment."""
        # Beyond the regular interval the loop reads the view anyway.
        pause_s = OPENING_BACKOFF_S * 2 ** self._failed_openings[place]
        if pause_s < VIEW_INTERVAL_S:
            self._failed_openings[place] += 1
            asyncio.get_running_loop().call_later(pause_s, self._view_changed.set)

    async def _next_epoch(self, place: Place, leader: Leader) -> None:
        following = Leader(self.node_id, leader.epoch + 1)
        with contextlib.suppress(errors.BrokerClientError):
            await self.keys.put({leader_key(*place): following.document()}, leader.version)

    async def _meta_stream(self, topic_id: str, partition: int) -> int:
        key = meta_key(topic_id, partition)
        known = await self.keys.stream_id(key)
        if known is not None:
            return known
        created = await opening.create_meta_stream(self.client, topic_id, partition)
        return await self.keys.claim_stream_id(key, created)

    async def _sweep(self) -> None:
        """Delete streams of deleted topics, if this broker is Kafka's controller."""
        if self.view.controller == self.node_id:
            living = {topic.topic_id for topic in self.view.topics.values()}
            await delete_streams_of_deleted(self.client, self.keys, living, wall_clock_ms())

    async def _housekeep(self) -> None:
        if self.diskless is not None:
            await self.diskless.retain(chosen_places(self.view, self.node_id))
        for place, log in list(self.logs.items()):
            try:
                await log.housekeep()
            except (errors.BrokerClientError, PartitionError, errors.StorageError) as error:
                _log.warning(
                    "retention of %s-%d failed, retrying at the next round: %s", *place, error
                )


def _check_epoch(epoch: int, leader_epoch: int) -> None:
    """Raise `KafkaError` if a client knows another leader epoch. It may know none, -1."""
    if 0 <= leader_epoch < epoch:
        raise KafkaError(Code.FENCED_LEADER_EPOCH)
    if leader_epoch > epoch:
        raise KafkaError(Code.UNKNOWN_LEADER_EPOCH)

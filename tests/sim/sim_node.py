"""One simulated node: a machine that can crash and start again, and be given a new disk.

Owns the machine: its disk, its clock, its lives. What runs in a life is the product's driver
(`sim_driver.py`) and controller (`sim_controller.py`), on an event loop of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from streammeta.controller.features import SUPPORTED
from streammeta.controller.ids import DirectoryId, NodeId, SnapshotId
from streammeta.controller.journal.directory import FirstCheckpoint, format_directory
from streammeta.controller.journal.journal import Journal
from streammeta.controller.quorum.config import QuorumConfig
from streammeta.controller.quorum.core import QuorumCore
from streammeta.controller.quorum.events import Event
from streammeta.controller.quorum.messages import Batch, Message
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.controller.runtime.replication import feature_check
from tests.sim.sim_backup import SimBackup
from tests.sim.sim_controller import SimService
from tests.sim.sim_disk import SimDisk
from tests.sim.sim_driver import SimDriver
from tests.sim.sim_storage import SimStorage
from tests.sim.sim_store import read_snapshot_voters
from tests.sim.sim_time import NodeClock, SimLoop, check, violated
from tests.sim.sim_watch import CLUSTER, Watch

if TYPE_CHECKING:
    from tests.sim.sim_world import World

DIRECTORY = Path("/node")
_EVERYTHING = 1 << 30
_RESERVE_BYTES = 6000
"""Room for a few elections and for what a leader had under way, whose batches are small here."""


@dataclass(frozen=True, slots=True)
class RemovedDisk:
    """A disk that lies on the shelf, with what was durable on it, and the replica that it is."""

    key: ReplicaKey
    disk: SimDisk


class SimNode:
    """A machine that can crash and start again, and be given a new disk."""

    def __init__(self, world: World, node_id: int, bootstrap: VoterSet) -> None:
        self.world = world
        self.node_id = node_id
        self.clock = NodeClock(
            world.rngs.time.randrange(100_000),
            1000 + world.rngs.time.randint(-world.profile.drift, world.profile.drift),
        )
        self.endpoint = f"node{node_id}:1"
        self.paused_until = 0
        self.slow_disk_until = 0
        self.asleep: list[Callable[[], None]] = []
        """What is to be done when the pause is over."""
        self.is_off_for_good = False
        self.effects_left: int | None = None
        """Effects to be carried out before the machine stops."""
        self.life = 0
        self.generation = -1
        self.core: QuorumCore | None = None
        self.levels = SUPPORTED
        """Feature levels of the version that is started here."""
        self.renew(bootstrap)

    # -- life

    @property
    def key(self) -> ReplicaKey:
        return self._key

    def renew(self, bootstrap: VoterSet) -> None:
        self.generation += 1
        self.disk = SimDisk()
        self._key = ReplicaKey(
            NodeId(self.node_id), DirectoryId(f"disk-{self.node_id}-{self.generation}")
        )
        format_directory(
            DIRECTORY,
            cluster_id=CLUSTER,
            node_id=NodeId(self.node_id),
            bootstrap_voters=bootstrap,
            directory_id=self._key.directory_id,
            files=self.disk,
        )
        self.world.ghost.on_new_replica(self._key, bootstrap)

    def renew_from(self, key: ReplicaKey, snapshot_id: SnapshotId, data: bytes) -> None:
        """Be another replica, whose log begins at the end of a snapshot."""
        self.generation += 1
        self.disk, self._key = SimDisk(), key
        format_directory(
            DIRECTORY,
            cluster_id=CLUSTER,
            node_id=NodeId(self.node_id),
            directory_id=key.directory_id,
            first_checkpoint=FirstCheckpoint(snapshot_id, data),
            files=self.disk,
        )
        self.world.ghost.on_new_replica(key, VoterSet())

    def remove_disk(self) -> RemovedDisk:
        """Return the disk of a node that has stopped, to be put back some time."""
        return RemovedDisk(self._key, self.disk)

    def put_back(self, removed: RemovedDisk) -> None:
        """Be an earlier replica again; the present disk is gone."""
        self._key, self.disk = removed.key, removed.disk

    def start(self) -> None:
        """Recover from the disk and take part."""
        world = self.world
        self.life += 1
        if self.levels != SUPPORTED:
            with patch.object(feature_check, "SUPPORTED", self.levels):
                feature_check.check_levels(DIRECTORY, self.disk)
        self.recover()
        self.watch = Watch(self, self.journal.quorum_state)
        self._tick_due: int | None = None
        self.loop = SimLoop(self)  # type: ignore[abstract]
        before = self.loop.enter()
        try:
            self._begin()
        finally:
            self.loop.leave(before)
        world.ghost.replicas[self._key].is_rotten = self.disk.is_rotten()
        self.check_voters()

    def recover(self) -> None:
        """Open the journal; what it holds must be what was promised."""
        ghost, was_rotten = self.world.ghost, self.disk.is_rotten()
        self.journal = self.open_journal()
        ghost.replicas[self._key].is_rotten |= was_rotten
        found, state = self.journal.log_start, self.journal.quorum_state
        ghost.on_start(self._key, found, self._recovered_batches(), state)

    def _begin(self) -> None:
        self.service = SimService(self)
        self.driver = SimDriver(
            self,
            config=self.configure(),
            journal=self.journal,
            state_machine=self.service.controller,
            rng=random.Random(self.world.rngs.nodes.getrandbits(64)),
        )
        self.service.controller.bind(self.driver)
        self.core = self.driver.core
        if self.world.backups is not None:
            self.loop.create_task(SimBackup(self).run())
        if self.world.restoration is not None:
            self.loop.create_task(self.world.restoration.watch_of(self))
        self.driver.start_now()

    def configure(self) -> QuorumConfig:
        """What this node's operator has configured."""
        world = self.world
        return QuorumConfig(
            cluster_id=CLUSTER,
            local=self._key,
            endpoint=self.endpoint,
            bootstrap_voters=self.journal.identity.bootstrap_voters,
            seeds=world.seeds,
            timings=world.timings,
            limits=world.limits,
        )

    def open_journal(self) -> Journal:
        return Journal.open(
            DIRECTORY,
            cluster_id=CLUSTER,
            node_id=NodeId(self.node_id),
            directory_id=self._key.directory_id,
            read_snapshot_voters=partial(read_snapshot_voters, self.levels),
            segment_bytes=self.world.segment_bytes,
            room_bytes=self.world.segment_bytes // 2,
            reserve_bytes=_RESERVE_BYTES,
            files=self.disk,
            monotonic=lambda: self.world.timeline.now / 1000,
        )

    def _recovered_batches(self) -> list[Batch]:
        found = self.journal.log_start
        batches: list[Batch] = []
        end = found.start_offset
        while end < found.end_offset:
            batches.extend(self.journal.read(end, _EVERYTHING))
            check(batches and batches[-1].end_offset > end, "recovered can be read", f"{self._key}")
            end = batches[-1].end_offset
        return batches

    def crash(self, *, power: bool) -> None:
        """Lose memory and, with the power, whatever the disk had not synced."""
        if self.core is not None:
            self.core = None
            self.loop.close()
        self.life += 1
        self.effects_left = None
        self.asleep.clear()
        if power:
            self.disk.crash(self.world.rngs.disk)
        else:
            self.disk.end_process()

    def now(self) -> int:
        return self.clock.show(self.world.timeline.now)

    monotonic_ms = now

    def wall_ms(self) -> int:
        """The time of day, which the quorum must not need."""
        raise AssertionError("the quorum asked for the time of day")

    @property
    def storage(self) -> SimStorage:
        return self.driver.storage

    @property
    def claimed_epoch(self) -> int | None:
        """The epoch in which this node serves writes, if it does."""
        return self.driver.epoch if self.core is not None and self.driver.is_leader else None

    @property
    def is_settled(self) -> bool:
        """Whether everything in its log is durable."""
        log = self.world.ghost.replicas[self._key].log
        return self.storage.is_idle and log.durable_end == log.end

    @property
    def voter(self) -> Voter:
        return Voter(self._key, self.endpoint)

    def disk_delay(self) -> int:
        """Draw how long a write or flush of this node takes."""
        delay = self.world.disk_delay()
        is_slow = self.world.timeline.now < self.slow_disk_until
        return delay + 20 + self.world.rngs.disk.randrange(130) if is_slow else delay

    # -- stepping

    def step(self, event: Event) -> None:
        """Feed one event, unless the node is down."""
        if self.core is not None:
            self.driver.stepper.feed(event)

    # -- what must be true of a node by itself

    def check_voters(self) -> None:
        """The voters in force are the last that the log names."""
        assert self.core is not None
        expected = self.world.ghost.replicas[self._key].log.voters
        if self.core.voters != expected:
            violated(
                "the last voters in the log are in force",
                f"{self._key} goes by {self.core.voters}, its log names {expected}",
            )

    # -- time

    def later(self, delay: int, action: Callable[[], None]) -> None:
        """Do something later in this life; a paused node does it when it wakes up."""
        self.world.later_for(self, delay, action)

    def schedule_tick(self, on_tick: Callable[[], None]) -> None:
        """Wake up at the core's next deadline."""
        assert self.core is not None
        deadline = self.core.next_deadline()
        if deadline is None:
            return
        now = self.world.timeline.now
        due = max(now, self.clock.when(deadline))
        known = self._tick_due
        if known is not None and now < known <= due:
            return  # wakes early and looks again
        self._tick_due = due

        def tick() -> None:
            if self._tick_due == due:  # else an earlier one has taken its place
                self._tick_due = None
                self.watch.on_tick(self.world.timeline.now)
                on_tick()

        self.later(due - now, tick)

    # -- sending

    def release(self, message: Message) -> None:
        self.world.ghost.on_sent(self._key, message)
        if self.world.tracing:
            self.world.note(f"{self.node_id} sends {message}")
        self.world.network.send(message)

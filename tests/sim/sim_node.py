"""One simulated node: the real core, journal and disk worker, on a disk that may fail at any call.

Plays the driver's part: steps the core and carries out its effects in order. Its disk work is in
`sim_storage.py`; what it is asked by clients and what it applies in `sim_service.py`. Methods
marked as hooks are there to be overridden with wrong behaviour.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from controller.ids import DirectoryId, NodeId
from controller.journal.directory import format_directory
from controller.journal.journal import Journal
from controller.loop.quorum_disk import Work, Write
from controller.loop.stepper import Stepper
from controller.quorum.config import QuorumConfig, QuorumState
from controller.quorum.core import QuorumCore
from controller.quorum.events import (
    AppendLog,
    ClearDamage,
    CommitAdvanced,
    Effect,
    Event,
    InstallSnapshot,
    LeadershipEnded,
    LeadershipStarted,
    PersistQuorumState,
    ReadIndexReady,
    ReadIndexRefused,
    ReadLog,
    ReadSnapshot,
    RoomChanged,
    Send,
    Tick,
    TransferRefused,
    TrimLog,
    TruncateLog,
    VoterChangeDone,
    VoterChangeRefused,
    VotersChanged,
    WriteSnapshotChunk,
)
from controller.quorum.log_view import LogStart
from controller.quorum.messages import Batch, BatchKind, Message
from controller.quorum.roles import Leader
from controller.quorum.voters import ReplicaKey, Voter, VoterSet
from tests.sim.sim_check import check, violated
from tests.sim.sim_disk import SimDisk, StoppedError
from tests.sim.sim_service import SimService
from tests.sim.sim_storage import SimStorage
from tests.sim.sim_store import read_snapshot_voters
from tests.sim.sim_time import NodeClock
from tests.sim.sim_watch import CLUSTER, Watch

if TYPE_CHECKING:
    from tests.sim.sim_world import World

DIRECTORY = Path("/node")
_EVERYTHING = 1 << 30


class WatchedCore(QuorumCore):
    """A core whose steps are looked at before and after."""

    def __init__(
        self,
        node: SimNode,
        config: QuorumConfig,
        state: QuorumState,
        log_start: LogStart,
        rng: random.Random,
    ) -> None:
        super().__init__(config, state, log_start, rng)
        self._node = node

    def step(self, now_ms: int, event: Event) -> list[Effect]:
        node = self._node
        if node.world.tracing:
            node.world.note(f"{node.node_id} takes {event}")
        node.watch.before(self, event, now_ms)
        effects = super().step(now_ms, event)
        node.watch.after(self, event, effects, now_ms)
        return effects


class SimStepper(Stepper):
    """The driver's stepper, woken by virtual time."""

    def __init__(self, node: SimNode, core: QuorumCore) -> None:
        super().__init__(
            core,
            node,
            take_appends=node.service.take_appends,
            carry_out=node.carry_out,
            on_error=_raise,
        )
        self._node = node

    def _set_timer(self) -> None:
        if self.is_running:
            self._node.schedule_tick()


def _raise(error: BaseException) -> None:
    raise error


@dataclass(frozen=True, slots=True)
class RemovedDisk:
    """A disk that lies on the shelf, with what was durable on it, and the replica that it is."""

    key: ReplicaKey
    disk: SimDisk


class SimNode:
    """A machine that can crash and start again, and be given a new disk."""

    service_class = SimService
    """A hook."""

    def __init__(self, world: World, node_id: int, bootstrap: VoterSet) -> None:
        self.world = world
        self.node_id = node_id
        self.clock = NodeClock(
            world.rngs.time.randrange(100_000),
            1000 + world.rngs.time.randint(-world.profile.drift, world.profile.drift),
        )
        self.endpoint = f"node{node_id}:1"
        self.paused_until = 0
        self.asleep: list[Callable[[], None]] = []
        """What is to be done when the pause is over."""
        self.is_off_for_good = False
        self.effects_left: int | None = None
        """Effects to be carried out before the machine stops."""
        self.life = 0
        self.generation = -1
        self.core: QuorumCore | None = None
        self.renew(bootstrap)

    # -- life

    @property
    def key(self) -> ReplicaKey:
        """Who this is: the node with its present disk."""
        return self._key

    def renew(self, bootstrap: VoterSet) -> None:
        """Put in an empty disk and format it."""
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
        was_rotten = self.disk.is_rotten()
        self.journal = self.open_journal()
        world.ghost.replicas[self._key].is_rotten |= was_rotten
        found = self.journal.log_start
        world.ghost.on_start(self._key, found, self._recovered_batches(), self.journal.quorum_state)
        self.storage = SimStorage(self, self.journal)
        self.watch = Watch(self, self.journal.quorum_state)
        self._tick_due: int | None = None
        self.service = self.service_class(self, found.snapshots[-1] if found.snapshots else None)
        self.core = WatchedCore(
            self,
            self.configure(),
            self.journal.quorum_state,
            found,
            random.Random(world.rngs.nodes.getrandbits(64)),
        )
        self.stepper = SimStepper(self, self.core)
        self.stepper.start()
        world.ghost.replicas[self._key].is_rotten = self.disk.is_rotten()
        self.check_voters()
        self.service.deliver()

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
        """Recover the data directory; a hook."""
        return Journal.open(
            DIRECTORY,
            cluster_id=CLUSTER,
            node_id=NodeId(self.node_id),
            directory_id=self._key.directory_id,
            read_snapshot_voters=read_snapshot_voters,
            segment_bytes=self.world.segment_bytes,
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
            self.stepper.stop()
        self.life += 1
        self.effects_left = None
        self.asleep.clear()
        if power:
            self.disk.crash(self.world.rngs.disk)
        else:
            self.disk.end_process()

    def now(self) -> int:
        """What this node's clock shows."""
        return self.clock.show(self.world.timeline.now)

    def monotonic_ms(self) -> int:
        """What this node's clock shows, for the driver's parts."""
        return self.now()

    def wall_ms(self) -> int:
        """The time of day, which the quorum must not need."""
        raise AssertionError("the quorum asked for the time of day")

    @property
    def is_settled(self) -> bool:
        """Whether everything in its log is durable."""
        log = self.world.ghost.replicas[self._key].log
        return self.storage.is_idle and log.durable_end == log.end

    @property
    def voter(self) -> Voter:
        """The replica that this node is, as a voter."""
        return Voter(self._key, self.endpoint)

    # -- stepping

    def step(self, event: Event) -> None:
        """Feed one event, unless the node is down."""
        if self.core is not None:
            self.stepper.feed(event)

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Carry out the effects of a step in order; the machine may stop between any two."""
        for effect in effects:
            if self.effects_left is not None:
                self.effects_left -= 1
                if self.effects_left < 0:
                    raise StoppedError
            self._carry_out_one(effect)
        if self.core is not None:
            self.watch.check_role(self.core)

    def _carry_out_one(self, effect: Effect) -> None:
        if self.world.tracing and not isinstance(effect, Send):
            self.world.note(f"{self.node_id} does {effect}")
        match effect:
            case Send():
                self.send(effect)
            case (
                AppendLog()
                | PersistQuorumState()
                | TruncateLog()
                | TrimLog()
                | InstallSnapshot()
                | ClearDamage()
            ):
                self.write(effect)
            case ReadLog() | WriteSnapshotChunk():
                self.storage.submit(effect)
            case ReadSnapshot():
                self.storage.read_snapshot(effect)
            case CommitAdvanced():
                self._on_commit(effect)
            case _:
                self._announce(effect)

    def _announce(self, effect: Effect) -> None:
        match effect:
            case LeadershipStarted():
                self._on_elected(effect)
            case LeadershipEnded(reason=reason):
                if "room" in reason:
                    self.world.count("leaders without room that hand over")
                self.service.on_leadership_ended()
            case ReadIndexReady(read_id=read_id, index=index):
                self.service.on_read_index(read_id, index)
            case ReadIndexRefused(read_id=read_id):
                self.service.on_read_index(read_id, None)
            case VotersChanged():
                self.check_voters()
            case VoterChangeDone() | VoterChangeRefused():
                self.world.operator.on_change_ended(effect)
            case TransferRefused():
                self.world.count("transfers refused")
            case RoomChanged(full_voters=full_voters):
                if full_voters:
                    self.world.count("majorities without room")
                self.service.on_room_changed()

    def write(self, effect: Write) -> None:
        """Note what the log and the quorum-state are to become, and queue the write."""
        ghost, core = self.world.ghost, self.core
        assert core is not None
        match effect:
            case AppendLog(batches=batches):
                role = core.role
                leads_from = role.epoch_start if isinstance(role, Leader) else None
                ghost.on_append(self._key, batches, core.high_watermark, leads_from)
                if any(batch.kind is BatchKind.CONTROL for batch in batches):
                    self.check_voters()
            case PersistQuorumState(state=state):
                self.watch.state = state
            case TruncateLog(end_offset=end_offset):
                self.world.count("truncations")
                ghost.on_truncate(self._key, end_offset, core.epoch)
                self.check_voters()
            case InstallSnapshot():
                ghost.on_installing(self._key)
            case ClearDamage():
                self.world.count("repairs completed")
                ghost.on_clearing_damage(self._key)
            case TrimLog():
                self.world.count("logs trimmed")
        self.storage.write(effect)

    def _on_commit(self, effect: CommitAdvanced) -> None:
        core = self.core
        assert core is not None
        self.world.ghost.on_commit(
            self._key, effect.high_watermark, core.epoch, is_leader=isinstance(core.role, Leader)
        )
        self.service.deliver()

    def _on_elected(self, effect: LeadershipStarted) -> None:
        self.world.count("elections won")
        self.world.ghost.on_elected(self._key, effect.epoch)
        self.service.on_elected(effect.epoch)

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

    def schedule_tick(self) -> None:
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
                self.step(Tick())

        self.later(due - now, tick)

    # -- sending

    def send(self, effect: Send) -> None:
        """Release a message, or hold it until its write is durable; a hook."""
        if not self.storage.hold(effect):
            self.release(effect.message)

    def prepare(self, work: Work) -> Work:
        """Return disk work as it is to be carried out; a hook."""
        return work

    def release(self, message: Message) -> None:
        """Let a message leave the node; a hook."""
        self.world.ghost.on_sent(self._key, message)
        if self.world.tracing:
            self.world.note(f"{self.node_id} sends {message}")
        self.world.network.send(message)

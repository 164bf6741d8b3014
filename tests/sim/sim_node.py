"""One simulated node: the real core and the real journal, on a disk that may fail at any call."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from controller.ids import ClusterId, NodeId
from controller.journal.journal import Journal
from controller.quorum.config import QuorumConfig
from controller.quorum.core import QuorumCore
from controller.quorum.events import (
    AppendLog,
    CommitAdvanced,
    Effect,
    Event,
    LeadershipEnded,
    LeadershipStarted,
    LogReadDone,
    PersistQuorumState,
    ReadIndexReady,
    ReadIndexRefused,
    ReadLog,
    Send,
    TruncateLog,
    WriteDone,
)
from controller.quorum.messages import Batch, Message
from controller.quorum.roles import Leader
from tests.sim.sim_disk import SimDisk
from tests.sim.sim_ghost import check

if TYPE_CHECKING:
    from tests.sim.sim_world import World

CLUSTER = ClusterId("sim")
_DIRECTORY = Path("/node")
_SEGMENT_BYTES = 700
_EVERYTHING = 1 << 30

Write = PersistQuorumState | AppendLog | TruncateLog


class SimNode:
    """A node that can crash and start again; what it holds in memory is in `core`."""

    def __init__(self, world: World, node_id: int, config: QuorumConfig) -> None:
        self.world = world
        self.node_id = node_id
        self.config = config
        self.disk = SimDisk()
        self.life = 0
        self.core: QuorumCore | None = None
        self.paused_until = 0
        self.clock_offset = world.rng.randrange(100_000)
        self.journal: Journal | None = None
        self._writes: list[Write] = []
        self._is_writing = False
        self._durable_token = 0
        self._held: list[Send] = []
        self.applied: list[Batch] = []
        self.reads: dict[int, int] = {}
        self._elected_epochs: list[int] = []

    # -- life

    def start(self) -> None:
        """Recover from the disk and take part."""
        world = self.world
        self.life += 1
        self.journal = self.open_journal()
        batches = list(self.journal.read(0, _EVERYTHING)) if self.life > 1 else []  # type: ignore[arg-type]
        while batches and batches[-1].end_offset < self.journal.log_start.end_offset:
            batches.extend(self.journal.read(batches[-1].end_offset, _EVERYTHING))
        world.ghost.on_start(self.node_id, batches)
        self._writes, self._held, self.applied, self.reads = [], [], [], {}
        self._elected_epochs = []
        self._is_writing = False
        self._durable_token = 0
        self.core = QuorumCore(
            self.config,
            self.journal.quorum_state,
            self.journal.log_start,
            random.Random(world.rng.getrandbits(64)),
        )
        self.carry_out(self.core.start(self.now()))

    def open_journal(self) -> Journal:
        return Journal.open(
            _DIRECTORY,
            cluster_id=CLUSTER,
            node_id=NodeId(self.node_id),
            format_if_empty=self.life == 1,
            segment_bytes=_SEGMENT_BYTES,
            files=self.disk,
        )

    def crash(self) -> None:
        """Lose memory and whatever the disk had not synced."""
        self.core = None
        self.journal = None
        self.disk.crash(self.world.rng)

    def now(self) -> int:
        return self.world.now + self.clock_offset

    @property
    def is_leader(self) -> bool:
        return self.core is not None and self.core.is_established

    # -- stepping

    def step(self, event: Event) -> None:
        """Feed one event, unless the node is down."""
        if self.core is not None:
            self.carry_out(self.core.step(self.now(), event))

    def carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            self._carry_out_one(effect)
        self.world.schedule_tick(self)

    def _carry_out_one(self, effect: Effect) -> None:
        ghost = self.world.ghost
        match effect:
            case Send():
                self.send(effect)
            case PersistQuorumState() | AppendLog() | TruncateLog():
                if isinstance(effect, AppendLog):
                    ghost.on_append(self.node_id, effect.batches)
                elif isinstance(effect, TruncateLog):
                    ghost.on_truncate(self.node_id, effect.end_offset)
                self._writes.append(effect)
                self._begin_writing()
            case CommitAdvanced(high_watermark=high_watermark):
                assert self.core is not None
                is_leader = isinstance(self.core.role, Leader)
                ghost.on_commit(self.node_id, high_watermark, self.core.epoch, is_leader=is_leader)
                self._apply(high_watermark)
            case LeadershipStarted(epoch=epoch):
                self.world.note(f"node {self.node_id} leads epoch {epoch}")
                ghost.on_elected(self.node_id, epoch)
                self._elected_epochs.append(epoch)
                self._note_durable_leadership()
            case ReadLog():
                self.world.later_for(self, self.world.disk_delay(), lambda: self._read_log(effect))
            case ReadIndexReady(read_id=read_id, index=index):
                self.world.counts["reads"] += 1
                ghost.on_read(self.node_id, index, self.reads.pop(read_id))
            case ReadIndexRefused(read_id=read_id):
                self.reads.pop(read_id)
            case LeadershipEnded():
                pass

    def _note_durable_leadership(self) -> None:
        if not self._writes and not self._is_writing:
            for epoch in self._elected_epochs:
                self.world.ghost.on_leader(self.node_id, self.life, epoch)
            self._elected_epochs.clear()

    def send(self, effect: Send) -> None:
        """Release a message, or hold it until its write is durable."""
        if effect.after > self._durable_token:
            self._held.append(effect)
        else:
            self.release(effect.message)

    def release(self, message: Message) -> None:
        self.world.ghost.on_sent(self.node_id, message)
        self.world.transmit(message)

    def _apply(self, high_watermark: int) -> None:
        assert self.core is not None
        assert self.journal is not None
        while (end := self.applied[-1].end_offset if self.applied else 0) < high_watermark:
            batches = self.core.log.read(
                end,  # type: ignore[arg-type]
                max_bytes=_EVERYTHING,
                end=high_watermark,  # type: ignore[arg-type]
            )
            if batches is None:
                batches = self.journal.read(end, 400)  # type: ignore[arg-type]
            check(batches, "committed can be read", f"node {self.node_id} at {end}")
            self.applied.extend(b for b in batches if b.end_offset <= high_watermark)

    # -- the disk

    def _begin_writing(self) -> None:
        if not self._is_writing and self._writes:
            self._is_writing = True
            self.world.later_for(self, self.world.disk_delay(), self._write)

    def _write(self) -> None:
        """Write all that is queued and sync once, as the driver's disk thread does."""
        assert self.journal is not None
        writes, self._writes = self._writes, []
        end = self.world.ghost.logs[self.node_id].durable_end
        for write in writes:
            self.perform(write)
            if isinstance(write, AppendLog):
                end = write.batches[-1].end_offset
            elif isinstance(write, TruncateLog):
                end = min(end, write.end_offset)
        self.journal.sync()
        # Writes queued since may have cut the log below `end`; on_truncate took that back.
        cuts = [write.end_offset for write in self._writes if isinstance(write, TruncateLog)]
        self.world.ghost.on_durable(self.node_id, min([end, *cuts]))
        self._is_writing = False
        self._durable_token = writes[-1].token
        self._note_durable_leadership()
        held, self._held = self._held, []
        for effect in held:
            self.send(effect)
        self._begin_writing()
        self.step(WriteDone(self._durable_token))

    def perform(self, write: Write) -> None:
        """Carry out one write; tests of the simulator sabotage it here."""
        assert self.journal is not None
        match write:
            case AppendLog(batches=batches):
                self.journal.append(batches)
            case TruncateLog(end_offset=end_offset):
                self.journal.truncate(end_offset)
            case PersistQuorumState(state=state):
                self.journal.write_quorum_state(state)

    def _read_log(self, effect: ReadLog) -> None:
        assert self.journal is not None
        self.world.counts["disk reads"] += 1
        batches = self.journal.read(effect.start_offset, effect.max_bytes)
        self.step(LogReadDone(effect.read_id, batches))

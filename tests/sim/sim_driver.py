"""The product's driver on simulated time, disks and network, with the ghost looking on.

Steps, appends, reads, delivery, leadership and the patience with a full disk are the product's own.
Here is only what stands in for threads, timers and connections, and what is noted of each effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from streammeta.controller.ids import SnapshotId
from streammeta.controller.journal.journal import Journal
from streammeta.controller.quorum import events
from streammeta.controller.quorum.core import QuorumCore
from streammeta.controller.quorum.messages import BatchKind, Request
from streammeta.controller.quorum.roles import Leader
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.runtime.interfaces import Endpoints, SnapshotPoint
from streammeta.controller.runtime.replication.core_loop import CoreLoop
from streammeta.controller.runtime.replication.quorum_driver import QuorumDriver
from tests.sim.sim_disk import StoppedError
from tests.sim.sim_storage import SimCheckpointer, SimStorage

if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode


class SimCoreLoop(CoreLoop):
    """The driver's stepper, woken by virtual time; each step is looked at before and after."""

    def __init__(self, node: SimNode, core: QuorumCore, **parts: Any) -> None:
        super().__init__(core, node, **parts)
        self._node = node
        self._asked: dict[int, int] = {}
        """What was committed when a proof of leadership was asked for, by its number."""

    def _step(self, event: events.Event) -> None:
        node, now = self._node, self._node.now()
        if node.world.tracing:
            node.world.note(f"{node.node_id} takes {event}")
        match event:
            case events.ReadIndexRequested(read_id=read_id):
                self._asked[read_id] = node.world.ghost.ledger.end
            case events.Append():
                node.world.count("batches appended")
        node.watch.before(self._core, event, now)
        effects = self._core.step(now, event)
        node.watch.after(self._core, event, effects, now)
        self._carry_out(effects)

    def committed_before(self, read_id: int) -> int:
        """What had been committed when this proof of leadership was asked for."""
        return self._asked.pop(read_id)

    def _set_timer(self) -> None:
        if self.is_running:
            self._node.schedule_tick(lambda: self.feed(events.Tick()))


class SimTransport:
    """Sends requests into the simulated network, and `SimDriver` answers too."""

    def __init__(self, node: SimNode) -> None:
        self._node = node

    def bind(self, listener: object) -> None:
        """What arrives is fed to the driver's stepper, whatever it is."""

    def send(self, request: Request) -> None:
        self._node.release(request)

    def set_voters(self, voters: VoterSet) -> None:
        """All are found by node id."""

    def endpoints(self, node_id: int) -> Endpoints:
        """Return where a node is found, by clients too."""
        return Endpoints(f"node{node_id}:1", f"node{node_id}:1")

    async def close(self) -> None:
        """Nothing is open."""


class SimDriver(QuorumDriver):
    """One replica; `node` must be what it runs on."""

    def __init__(self, node: SimNode, **parts: Any) -> None:
        self._node = node
        super().__init__(transport=SimTransport(node), clock=node, **parts)
        # Answers leave whether their calls still wait or not: networks repeat.
        self._outbox.answer = node.release  # type: ignore[assignment, method-assign]

    def _make_disk(self, journal: Journal) -> Any:
        return SimStorage(self._node, journal, self._on_report, self._on_full)

    def _make_checkpointer(self, *_: object) -> Any:
        return SimCheckpointer(self._node)

    def _make_core_loop(self) -> CoreLoop:
        return SimCoreLoop(
            self._node,
            self._core,
            take_appends=self._take_appends,
            carry_out=self._carry_out,
            on_error=self._fail,
        )

    @property
    def storage(self) -> SimStorage:
        return cast(SimStorage, self._disk)

    @property
    def sim_checkpointer(self) -> SimCheckpointer:
        return cast(SimCheckpointer, self.checkpointer)

    @property
    def core(self) -> QuorumCore:
        return self._core

    @property
    def stepper(self) -> SimCoreLoop:
        assert isinstance(self._core_loop, SimCoreLoop)
        return self._core_loop

    @property
    def delivered_end(self) -> int:
        """End of what was handed to the state machine."""
        return self._deliverer.end_offset

    def committed_point(self) -> SnapshotPoint:
        """Return where a snapshot of what was handed to the state machine ends."""
        end_offset = self._deliverer.end_offset
        return SnapshotPoint(
            SnapshotId(end_offset, self._deliverer.epoch),
            self._config.cluster_id,
            self._core.voters_at(end_offset),
        )

    def start_now(self) -> None:
        """Take part in the quorum; nothing of a start has to be waited for."""
        starting = self.start()
        try:
            starting.send(None)
        except StopIteration:
            return
        raise AssertionError("a start waits for something")

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        raise error  # the simulator decides what becomes of the process

    # -- effects

    def _carry_out(self, effects: Sequence[events.Effect]) -> None:
        """Carry out effects in order; the machine may stop between any two."""
        node = self._node
        for effect in effects:
            if node.effects_left is not None:
                node.effects_left -= 1
                if node.effects_left < 0:
                    raise StoppedError
            if node.world.tracing and not isinstance(effect, events.Send):
                node.world.note(f"{node.node_id} does {effect}")
            self._note(effect)
            super()._carry_out((effect,))
        if node.core is not None:
            node.watch.check_role(self._core)

    def _note(self, effect: events.Effect) -> None:
        """Tell the ghost what is about to happen."""
        node, ghost, world = self._node, self._node.world.ghost, self._node.world
        match effect:
            case events.Send():
                pass
            case events.AppendLog(batches=batches):
                role = self._core.role
                leads_from = role.epoch_start if isinstance(role, Leader) else None
                ghost.on_append(node.key, batches, self._core.high_watermark, leads_from)
                if any(batch.kind is BatchKind.CONTROL for batch in batches):
                    node.check_voters()
            case events.PersistQuorumState(state=state):
                node.watch.state = state
            case events.TruncateLog(end_offset=end_offset):
                world.count("truncations")
                ghost.on_truncate(node.key, end_offset, self._core.epoch)
                node.check_voters()
            case events.InstallSnapshot():
                ghost.on_installing(node.key)
            case events.ClearDamage():
                world.count("repairs completed")
                ghost.on_clearing_damage(node.key)
            case events.TrimLog():
                world.count("logs trimmed")
            case events.CommitAdvanced(high_watermark=high_watermark):
                is_leader = isinstance(self._core.role, Leader)
                ghost.on_commit(node.key, high_watermark, self._core.epoch, is_leader=is_leader)
            case events.LeadershipStarted(epoch=epoch):
                world.count("elections won")
                ghost.on_elected(node.key, epoch)
                world.weather.on_elected(node)
            case _:
                self._note_outcome(effect)

    def _note_outcome(self, effect: events.Effect) -> None:
        node, world = self._node, self._node.world
        match effect:
            case events.ReadIndexReady(read_id=read_id, index=index):
                before = self.stepper.committed_before(read_id)
                world.ghost.on_read_index(node.key, index, before)
            case events.ReadIndexRejected(read_id=read_id):
                self.stepper.committed_before(read_id)
            case events.VotersChanged():
                node.check_voters()
            case events.LeadershipEnded(reason=reason) if "disk is full" in reason:
                world.count("leaders without room that hand over")
            case events.FullVotersChanged(full_voters=full_voters) if full_voters:
                world.count("majorities without room")
            case events.VoterChangeDone() | events.VoterChangeRejected():
                world.operator.on_change_ended(effect)
            case events.TransferRejected():
                world.count("transfers refused")

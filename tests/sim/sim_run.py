"""One run from its seed to its outcome: storm, a core that is well, calm, and the last look."""

import gc
from collections import Counter
from dataclasses import dataclass, field, replace

from structlog.testing import capture_logs

from streammeta.controller.errors import InvariantError
from streammeta.controller.journal.errors import JournalError
from streammeta.controller.quorum.roles import Leader
from streammeta.controller.quorum.voters import VoterSet
from tests.linearizability.models import MODELS, Get, ReadObjects
from tests.linearizability.report import assert_linearizable
from tests.sim.sim_backup import Backups
from tests.sim.sim_clients import LIST_KEYS, VALUE_KEYS
from tests.sim.sim_controller import Answered, Outcome
from tests.sim.sim_network import two_way
from tests.sim.sim_node import SimNode
from tests.sim.sim_profiles import CALM
from tests.sim.sim_recovery import Recovery
from tests.sim.sim_store import Request
from tests.sim.sim_time import Trace, Violation, check
from tests.sim.sim_weather import FullDisks
from tests.sim.sim_world import World

_WITHIN_ELECTIONS = 80
"""Election timeouts within which a quorum that is well must make progress."""
_FOR_GOOD = 1 << 40
_BRIDGE = "cut off from some"
_ASK_AGAIN_MS = 50
_BACKED_UP_AFTER = 4
"""Entries more that the backup must have once it has caught up."""
_WATCHED_LONGER = 0.5
"""Share of the cores whose leader is watched for a while."""


@dataclass(frozen=True)
class Failure:
    """What went wrong in one run, with enough to look into it."""

    seed: int
    profile: str
    invariant: str
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = "\n".join(self.trace)
        return f"seed {self.seed} profile {self.profile}: {self.invariant}\n{lines}"


@dataclass(frozen=True)
class RunOutcome:
    seed: int
    events: int
    counts: Counter[str]
    failure: Failure | None
    trace_hash: str = field(default="")


class Run:
    def __init__(self, world: World) -> None:
        self.world = world
        self._within_ms = _WITHIN_ELECTIONS * world.timings.election_timeout_ms

    def go(self) -> None:
        world = self.world
        for node in world.nodes:
            node.start()
        world.begin()
        world.weather.begin()
        self._storm()
        if world.restoration is not None:
            world.restoration.go()
            return
        if world.rngs.losses.random() < world.profile.majorities_lost:
            world.weather.end()
            Recovery(world).go()
        if world.rngs.room.random() < world.profile.full_for_long:
            self._fill_for_long()
        if world.rngs.faults.random() < world.profile.core_first:
            self._heal_core_only()
        self._heal_everything()
        self._look_again()

    # -- phases

    def _storm(self) -> None:
        world, until = self.world, self.world.profile.duration_ms
        world.timeline.run_until(lambda: world.timeline.now >= until, until + 1)

    def _fill_for_long(self) -> None:
        """Nothing is wrong but that disks are full, for long."""
        world = self.world
        self._calm_down(world.nodes)
        if self._choose_core() is None:
            return
        self._await_progress(world.nodes, "all catch up before disks fill")
        FullDisks(world, world.rngs.room, lambda: _standing(world)).endure(self._within_ms)

    def _heal_core_only(self) -> None:
        """Break all but a core of the quorum for good; the core must make progress."""
        world = self.world
        core = self._choose_core()
        if core is None:
            world.counts["runs without a healthy majority"] += 1
            return
        world.counts["cores left alone with the broken"] += 1
        self._calm_down(core)
        broken = [self._break_for_good(node, core) for node in world.nodes if node not in core]
        slow = [(node.node_id, core[0].node_id) for node in world.nodes]
        world.network.slow_down(slow, _FOR_GOOD)
        # Behind a bridge some of the core may not hear the leader, and yet batches are committed.
        are_bridged = any(kind == _BRIDGE for kind in broken)
        self._await_progress(
            [] if are_bridged else core, "a core of the quorum that is well makes progress"
        )
        if world.rngs.faults.random() < _WATCHED_LONGER:
            self._await_stability(core)
        for node in world.nodes:
            node.is_off_for_good = False

    def _await_stability(self, core: list[SimNode]) -> None:
        """A broken node deposes no leader that is well, once the first stir is over."""
        world, patience = self.world, 5 * self.world.timings.fetch_timeout_ms
        world.timeline.run_until(lambda: False, patience)
        if not any(node.core and isinstance(node.core.role, Leader) for node in core):
            return  # a leader that is broken itself may let go whenever it notices
        before = world.counts["elections won"]
        world.timeline.run_until(lambda: False, patience)
        won = world.counts["elections won"] - before
        check(not won, "the well keep their leader", f"{won} elections, {_standing(world)}")

    def _choose_core(self) -> list[SimNode] | None:
        """Some nodes, no more than needed, that are a majority whichever voter set is in force."""
        world = self.world
        committed = len(world.ghost.ledger.batches)
        logs = [world.ghost.replicas[node.key].log for node in world.nodes]
        sets = [world.ghost.ledger.voters]
        sets += [log.voters for log in logs if log.voters_named_at > committed]
        sets += self._sets_to_come()
        order = list(world.nodes)
        world.rngs.faults.shuffle(order)
        core: list[SimNode] = []
        for voters in sets:
            members = [
                world.nodes[voter.key.node_id] for voter in voters if world.is_healthy(voter)
            ]
            members.sort(key=lambda node: (node not in core, order.index(node)))
            needed = len(voters) // 2 + 1
            if len(members) < needed:
                return None
            core += [node for node in members[:needed] if node not in core]
        return core

    def _sets_to_come(self) -> list[VoterSet]:
        """Sets that leaders are about to put in force, once a new voter has caught up."""
        to_come: list[VoterSet] = []
        for node in self.world.nodes:
            role = node.core.role if node.core is not None else None
            change = role.voter_change if isinstance(role, Leader) else None
            if change is not None and change.adding is not None and change.end_offset is None:
                assert node.core is not None
                to_come.append(node.core.voters.with_voter(change.adding))
        return to_come

    def _break_for_good(self, node: SimNode, core: list[SimNode]) -> str:
        world, rng = self.world, self.world.rngs.faults
        kind = rng.choice(["dead", "deaf", "mute", "cut off", _BRIDGE, "stopped", "full"])
        others = [other.node_id for other in world.nodes if other is not node]
        inward = {(other, node.node_id) for other in others}
        outward = {(node.node_id, other) for other in others}
        world.counts[f"broken for good: {kind}"] += 1
        if world.tracing:
            world.note(f"node {node.node_id} is {kind} for good")
        if kind == "dead":
            node.is_off_for_good = True
            world.crash(node, power=True)
        elif kind == "stopped":
            world.pause(node, _FOR_GOOD)
        elif kind == "full":
            node.disk.space = 0
        if kind in ("deaf", "cut off"):
            world.network.cut(inward, None)
        if kind in ("mute", "cut off"):
            world.network.cut(outward, None)
        if kind == _BRIDGE:
            lost = [other.node_id for other in core if rng.random() < 0.5]
            world.network.cut(two_way((node.node_id, other) for other in lost), None)
        return kind

    def _heal_everything(self) -> None:
        """Nothing is wrong any more: all must catch up, and the damaged vote again."""
        world = self.world
        self._calm_down(world.nodes)
        if self._choose_core() is None:
            world.counts["runs without a healthy majority"] += 1
            return
        self._await_progress(world.nodes, "all catch up in the end")
        known = world.timeline.run_until(self._are_voters_known, self._within_ms)
        check(known, "voters make themselves known", f"{world.ghost.ledger.voters}")
        if world.backups is not None:
            self._await_backup(world.backups)

    def _await_backup(self, backups: Backups) -> None:
        """The backup catches up with a bucket that is well, goes on, and is whole."""
        ledger = self.world.ghost.ledger
        self._await_backup_of(backups, ledger.end)
        self._await_backup_of(backups, ledger.end + _BACKED_UP_AFTER)
        backups.check_finally()

    def _await_backup_of(self, backups: Backups, end_offset: int) -> None:
        done = self.world.timeline.run_until(lambda: backups.end >= end_offset, self._within_ms)
        check(done, "the backup catches up", f"at {backups.end}, expected {end_offset}")

    def _calm_down(self, nodes: list[SimNode]) -> None:
        world = self.world
        world.weather.end()
        if world.tracing:
            world.note(f"healed: {[node.node_id for node in nodes]}")
        world.profile = replace(
            CALM,
            clients=world.profile.clients,
            think_ms=40,
            offsets_between_snapshots=world.profile.offsets_between_snapshots,
        )
        world.network.calm_down(world.profile)
        for node in nodes:
            node.is_off_for_good = False
            node.effects_left = None
            node.paused_until = 0
            world.wake(node)
            node.disk.crash_after = None
            node.disk.fail_sync_after = None
            node.disk.space = None
            world.restart(node)

    def _await_progress(self, nodes: list[SimNode], invariant: str) -> None:
        world = self.world
        goal = world.ghost.ledger.end

        def is_there() -> bool:
            return world.ghost.ledger.store.applied_end_offset > goal and all(
                node.core is not None
                and node.driver.delivered_end > goal
                and not node.core.is_repairing
                for node in nodes
            )

        if not world.timeline.run_until(is_there, self._within_ms):
            check(False, invariant, f"no progress in {self._within_ms} ms, {_standing(world)}")

    def _are_voters_known(self) -> bool:
        """Whether every voter that is there is known by its disk and its address."""
        world = self.world
        return all(
            voter == world.nodes[voter.key.node_id].voter
            for voter in world.ghost.ledger.voters
            if world.is_healthy(voter)
        )

    def _look_again(self) -> None:
        """Everything acknowledged is there, and what clients saw could have happened."""
        world = self.world
        world.clients_may_go_on = False
        pending: set[str] = {*VALUE_KEYS, *LIST_KEYS}
        for key in sorted(pending):
            self._read_finally(key, Get() if key in VALUE_KEYS else ReadObjects(), pending)
        done = world.timeline.run_until(lambda: not pending, self._within_ms)
        check(done, "reads end", f"no answer for {sorted(pending)}, {_standing(world)}")
        history = world.recorder.history()
        for model, keys in (("kv", VALUE_KEYS), ("stream", LIST_KEYS)):
            assert_linearizable([op for op in history if op.key in keys], MODELS[model])
        world.counts.update(world.ghost.ledger.map_watch.counts)

    def _read_finally(self, key: str, request: Request, pending: set[str]) -> None:
        world = self.world
        handle = world.recorder.invoke("last look", key, request)

        def ask() -> None:
            if key not in pending:
                return
            leader = next((node for node in world.nodes if node.claimed_epoch), None)
            if leader is not None:
                world.call(leader.node_id, key, request, None, on_outcome)
            world.timeline.later(_ASK_AGAIN_MS, ask)  # whom it asked may stop before it answers

        def on_outcome(outcome: Outcome) -> None:
            if isinstance(outcome, Answered) and key in pending:
                world.recorder.complete(handle, outcome.answer)
                pending.discard(key)

        ask()


def _standing(world: World) -> str:
    """State of all nodes, for a reader of a run in which nothing happens."""
    lines = [f"committed {world.ghost.ledger.end}"]
    for node in world.nodes:
        if node.core is None:
            lines.append(f"{node.node_id} down")
            continue
        core = node.core
        lines.append(
            f"{node.node_id} {type(core.role).__name__} epoch {core.epoch} leader {core.leader_id} "
            f"log [{core.log.start_offset}, {core.log.end_offset}) hw {core.high_watermark} "
            f"applied {node.driver.delivered_end} voter {core.is_voter} "
            f"repairing {core.is_repairing} full {node.driver.describe().is_disk_full}"
        )
    return "; ".join(lines)


def _attempt(seed: int, profile: str, trace: Trace | None) -> tuple[World | None, str | None]:
    world: World | None = None
    try:
        with capture_logs():
            world = World(seed, profile, trace=trace)
            Run(world).go()
    except (Violation, InvariantError, JournalError, AssertionError) as error:
        return world, f"{type(error).__name__}: {error}"
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, OSError) as error:
        return world, f"{type(error).__name__}: {error!r}"
    finally:
        if world is not None:
            world.close()
    return world, None


def simulate(seed: int, profile: str = "swarm", *, traced: bool = False) -> RunOutcome:
    """Run one seed to its end or to the first violation.

    A run is traced only if asked or, once more from its seed, if it failed.
    """
    gc.disable()
    try:
        trace = Trace() if traced else None
        world, wrong = _attempt(seed, profile, trace)
        events = world.timeline.events if world else 0
        counts = world.counts if world else Counter()
        if wrong is None:
            return RunOutcome(seed, events, counts, None, trace.digest() if trace else "")
        trace = Trace()
        _, again = _attempt(seed, profile, trace)
    finally:
        gc.enable()
    if again != wrong:
        wrong = f"{wrong}\nand when run again: {again}"
    failure = Failure(seed, profile, wrong, tuple(trace.lines))
    return RunOutcome(seed, events, counts, failure, trace.digest())

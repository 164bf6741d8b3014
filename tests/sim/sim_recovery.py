"""The disks of a majority are lost at once, and the most complete survivor goes on alone.

All nodes stop. A minority of the voters keeps its disks; the product's plan chooses among them, and
says in which epoch and at which offset the one that it chose goes on. Everybody else gets an empty
disk. An old one returns later, and must stop without having had any effect.

Here only losses are made that the plan can make good: where the survivors lack what was committed,
nothing is taken from anybody. What the plan gives up is checked before that, in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from streammeta.controller.ids import EndOffset
from streammeta.controller.journal.errors import JournalDamagedError
from streammeta.controller.quorum.messages import Batch, BatchKind, encode_voters
from streammeta.controller.quorum.voters import VoterSet, majority
from streammeta.controller.recover import planning
from streammeta.controller.recover.planning import RecoveryError, Report, voters_text
from tests.sim.sim_ledger import GhostLog
from tests.sim.sim_node import RemovedDisk, SimNode
from tests.sim.sim_store import encode_image
from tests.sim.sim_time import check
from tests.sim.sim_watch import CLUSTER

if TYPE_CHECKING:
    from tests.sim.sim_world import World

_TRIES = 10
_RETURNS_WITHIN_MS = 500


@dataclass(frozen=True, slots=True)
class _Survivor:
    """A voter whose disk is left, and what its log holds."""

    node: SimNode
    log: GhostLog
    report: Report


class Recovery:
    """One such loss."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rngs.losses

    def go(self) -> None:
        """Lose a majority and recover, if any choice of survivors has all that was committed."""
        world = self._world
        for node in world.nodes:
            node.is_off_for_good = True
            world.crash(node, power=True)
            node.disk.end_process()
            node.disk.space = None
        left = [survivor for survivor in map(self._read, world.nodes) if survivor is not None]
        for _ in range(_TRIES):
            plan = self._planned(left)
            if plan is not None:
                self._recover(plan)
                break
        else:
            world.count("majorities not lost: no survivors with everything")
        for node in world.nodes:
            node.is_off_for_good = False
            world.restart(node)

    def _read(self, node: SimNode) -> _Survivor | None:
        """Read a stopped voter's disk; None if it is damaged or the node does not vote."""
        world = self._world
        if not world.is_voter(node) or not any(
            voter.key.node_id == node.node_id and world.is_healthy(voter)
            for voter in world.ghost.ledger.voters
        ):
            return None
        try:
            node.recover()
        except JournalDamagedError:
            return None
        log, state = world.ghost.replicas[node.key].log, node.journal.quorum_state
        lost = node.journal.log_start.lost
        node.journal.close()
        if lost is not None:
            return None
        last = log.batches[-1].epoch if log.batches else 0
        assert node.key.directory_id is not None
        report = Report(
            cluster_id=CLUSTER,
            cluster_uuid="",
            node_id=node.node_id,
            directory_id=node.key.directory_id,
            epoch=state.epoch,
            last_epoch=last,
            end_offset=log.end,
            committed_end=0,
            log_hash="",
            voters=voters_text(log.voters),
            damages=0,
            is_repairing=0,
            feature_level=0,
            next_object_id=0,
            issued_below=0,
            undecided_from=0,
        )
        return _Survivor(node, log, report)

    def _planned(self, left: list[_Survivor]) -> planning.RecoveryPlan | None:
        """Choose a minority of the voters at random; return the plan, or None if it won't do."""
        world = self._world
        voters = world.ghost.ledger.voters
        most = min(len(left), majority(len(voters)) - 1)
        if most < 1:
            return None
        survivors = self._rng.sample(left, self._rng.randint(1, most))
        ids = {survivor.node.node_id for survivor in survivors}
        dead = [int(voter.key.node_id) for voter in voters if voter.key.node_id not in ids]
        reports = [survivor.report for survivor in survivors]
        try:
            best = planning.choose_survivor(reports, dead)
        except RecoveryError as error:
            world.count(f"recoveries refused: {error.code}")
            return None
        committed = world.ghost.ledger.batches
        taken = next(survivor for survivor in survivors if survivor.report is best)
        kept = taken.log.shares(committed)
        check(
            kept == max(survivor.log.shares(committed) for survivor in survivors),
            "a recovery keeps every commit that a survivor has",
            f"{taken.node.key} goes on with {kept} committed batches",
        )
        if kept < len(committed):
            return None
        circumstances = planning.Circumstances(
            namespace="",
            claimed_below=0,
            generation=2,
            cluster_uuid="",
            directory_id=f"disk-{best.node_id}-recovered",
            now_ms=0,
        )
        return planning.plan_recovery(best, reports, dead, circumstances)

    def _recover(self, plan: planning.RecoveryPlan) -> None:
        world = self._world
        world.count("majorities lost and recovered")
        survivor = world.nodes[plan.node_id]
        self._adopt(world.ghost.replicas[survivor.key].log, plan)
        others = [node for node in world.nodes if node is not survivor]
        old = {node.node_id: node.remove_disk() for node in others}
        for node in others:
            node.renew(VoterSet())
        # One at most: two may be a majority of before, which the bucket's marker is there for.
        lost = [node for node in others if str(node.node_id) in plan.dead.split(",")]
        self._return_later(returning := self._rng.choice(lost), old[returning.node_id])
        snapshot_id = plan.restore.snapshot_id
        ledger = world.ghost.ledger
        image = ledger.store.image(snapshot_id, plan.voters, ledger.log_hash_at(ledger.end))
        data = encode_image(image, world.rngs.nodes, world.snapshot_padding)
        survivor.renew_from(plan.voters.voters[0].key, snapshot_id, data)

    def _return_later(self, node: SimNode, removed: RemovedDisk) -> None:
        """Give a node its old disk again some time."""
        world = self._world

        def put_back() -> None:
            world.count("disks of before put back")
            world.crash(node, power=True)
            node.put_back(removed)

        world.timeline.later(self._rng.randrange(_RETURNS_WITHIN_MS), put_back)

    def _adopt(self, log: GhostLog, plan: planning.RecoveryPlan) -> None:
        """Take all that the survivor has for committed, and then the jump, as one more batch."""
        ledger = self._world.ghost.ledger
        for index in range(len(ledger.batches), len(log.batches)):
            ledger.at(index, log.batches[index], plan.epoch)
        jump = Batch(
            EndOffset(plan.end_offset - 1),
            plan.restore.snapshot_id.epoch,
            BatchKind.CONTROL,
            (encode_voters(plan.voters),),
        )
        ledger.at(len(ledger.batches), jump, plan.epoch)

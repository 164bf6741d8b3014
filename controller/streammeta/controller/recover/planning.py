"""Plan of a recovery: the survivor to go on from, and the numbers to go on with. Pure.

Survivors and dead must be exactly the voters that the most complete log names, so that no voter is
forgotten that may still vote. The most complete log is the one that every vote would prefer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from streammeta.controller.backup.restoring import EPOCH_JUMP, RestorePlan, jumped_object_id
from streammeta.controller.ids import DirectoryId, NodeId
from streammeta.controller.quorum.recovered_log import next_era
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet, majority
from streammeta.controller.recover.errors import RecoveryError
from streammeta.controller.recover.report import Report, voters_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """Source and result of a recovery; `from_*` are of the survivor, as its report says.

    The survivor goes on alone, with the disk `directory_id`, at `endpoint`. Its log begins at
    `end_offset`, behind `epoch`; it issues object ids from `next_object_id` on. Ids in
    `[undecided_from, next_object_id)` that its map does not know are undecided. `dead` are the
    lost voters' ids, separated by commas. `generation` is the number of its marker in the bucket.
    Times are in ms since 1970.
    """

    cluster_id: str
    namespace: str
    node_id: int
    endpoint: str
    from_cluster_uuid: str
    from_directory_id: str
    from_epoch: int
    from_last_epoch: int
    from_end_offset: int
    from_log_hash: str
    dead: str
    cluster_uuid: str
    directory_id: str
    end_offset: int
    epoch: int
    next_object_id: int
    undecided_from: int
    generation: int
    created_ms: int

    @property
    def voters(self) -> VoterSet:
        """The only voter: the survivor under its new disk."""
        key = ReplicaKey(NodeId(self.node_id), DirectoryId(self.directory_id))
        return VoterSet((Voter(key, self.endpoint),))

    @property
    def restore(self) -> RestorePlan:
        """The same as a restore from the survivor's log into the same cluster."""
        return RestorePlan(
            from_cluster_id=self.cluster_id,
            from_cluster_uuid=self.from_cluster_uuid,
            from_end_offset=self.from_end_offset,
            committed_by_ms=self.created_ms,
            cluster_id=self.cluster_id,
            cluster_uuid=self.cluster_uuid,
            namespace=self.namespace,
            voters=f"{self.node_id}@{self.endpoint}",
            end_offset=self.end_offset,
            epoch=self.epoch,
            next_object_id=self.next_object_id,
            undecided_from=self.undecided_from,
            generation=self.generation,
            created_ms=self.created_ms,
            state_hash="",
        )

    def sees(self, report: Report) -> bool:
        """Whether a directory is still the one that the plan was made for."""
        return (
            report.cluster_id,
            report.cluster_uuid,
            report.node_id,
            report.directory_id,
            report.epoch,
            *report.progress,
            report.log_hash,
        ) == (
            self.cluster_id,
            self.from_cluster_uuid,
            self.node_id,
            self.from_directory_id,
            self.from_epoch,
            self.from_last_epoch,
            self.from_end_offset,
            self.from_log_hash,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """Facts of the bucket and of the moment that a plan is made from.

    `claimed_below` is the highest claim on object ids in the bucket, `generation` the number of the
    next marker; the two UUIDs are new.
    """

    namespace: str
    claimed_below: int
    generation: int
    cluster_uuid: str
    directory_id: str
    now_ms: int


def chosen(
    reports: Sequence[Report],
    dead: Collection[int],
    *,
    backup: tuple[int, int] | None = None,
) -> Report:
    """Return the report of the survivor to go on from: the most complete, the lowest id of equals.

    `backup` are epoch and end of the newest point in a backup, if there is one.

    Raises:
        RecoveryError: a majority may be there, the dead and the survivors are not all voters, a
            report does not belong to the others or is of a damaged directory, or the backup has
            more.
    """
    _require_one_cluster(reports)
    _require_whole(reports)
    best = max(reports, key=lambda one: (one.progress, -one.node_id))
    _require_all_voters(best, reports, set(dead))
    _require_no_majority(best, reports)
    if backup is not None and backup > best.progress:
        raise RecoveryError(
            "BACKUP_IS_FURTHER",
            f"the backup reaches offset {backup[1]} of epoch {backup[0]}, the most complete "
            f"survivor, node {best.node_id}, offset {best.end_offset} of epoch {best.last_epoch}",
            "restore from the backup: `streammeta restore plan`; nothing that it has is lost then",
        )
    return best


def planned(
    survivor: Report,
    reports: Sequence[Report],
    dead: Collection[int],
    circumstances: Circumstances,
) -> RecoveryPlan:
    """Return the plan to go on from the survivor that was `chosen`."""
    voter = voters_of(survivor.voters).find(NodeId(survivor.node_id))
    assert voter is not None
    issued_below = max(survivor.next_object_id, survivor.issued_below)

    return RecoveryPlan(
        cluster_id=survivor.cluster_id,
        namespace=circumstances.namespace,
        node_id=survivor.node_id,
        endpoint=voter.endpoint,
        from_cluster_uuid=survivor.cluster_uuid,
        from_directory_id=survivor.directory_id,
        from_epoch=survivor.epoch,
        from_last_epoch=survivor.last_epoch,
        from_end_offset=survivor.end_offset,
        from_log_hash=survivor.log_hash,
        dead=",".join(map(str, sorted(dead))),
        cluster_uuid=circumstances.cluster_uuid,
        directory_id=circumstances.directory_id,
        end_offset=next_era(survivor.end_offset),
        epoch=max(one.epoch for one in reports) + EPOCH_JUMP,
        next_object_id=jumped_object_id(issued_below, circumstances.claimed_below),
        undecided_from=survivor.undecided_from,
        generation=circumstances.generation,
        created_ms=circumstances.now_ms,
    )


def _require_one_cluster(reports: Sequence[Report]) -> None:
    if not reports:
        message = "there is no report of a survivor"
        hint = "make one of each directory that is left: `streammeta recover inspect`"
        raise RecoveryError("NO_REPORT", message, hint)

    names = {report.cluster_id for report in reports}
    # A log that ends before the cluster's UUID, as an empty one does, contradicts none.
    uuids = {report.cluster_uuid for report in reports if report.cluster_uuid}
    if len(names) > 1 or len(uuids) > 1:
        named = "; ".join(
            f"node {one.node_id}: {one.cluster_id} {one.cluster_uuid}" for one in reports
        )
        raise RecoveryError(
            "FOREIGN_REPORT",
            f"the reports are of different clusters, or of before and after a recovery: {named}",
            "leave out those that do not belong to the cluster to recover",
        )

    seen = Counter(one.node_id for one in reports)
    if repeated := [node_id for node_id, count in seen.items() if count > 1]:
        raise RecoveryError(
            "REPEATED_REPORT",
            f"several reports are of node {repeated[0]}",
            "give one report of each node, that of the directory it used last",
        )


def _require_whole(reports: Sequence[Report]) -> None:
    for report in reports:
        name = f"the directory of node {report.node_id}"
        if report.damages:
            raise RecoveryError(
                "DAMAGED",
                f"{name} is damaged in {report.damages} places",
                "`streammeta storage verify` shows them; restore the disk, or count the node among "
                "the dead",
            )

        if report.is_repairing:
            raise RecoveryError(
                "REPAIRING",
                f"{name} has lost flushed batches to damage and has not got them back",
                "count the node among the dead, or restore from a backup: `streammeta restore`",
            )


def _require_all_voters(best: Report, reports: Sequence[Report], dead: set[int]) -> None:
    voters = voters_of(best.voters)
    wanted = {int(one.key.node_id) for one in voters}
    for report in reports:
        if not voters.contains(report.key):
            raise RecoveryError(
                "NOT_A_VOTER",
                f"node {report.node_id} with disk {report.directory_id} is none of the voters, "
                f"{best.voters}",
                "leave its report out; a node that votes with another disk is one of the dead",
            )

    living = {one.node_id for one in reports}
    if both := living & dead:
        raise RecoveryError(
            "DEAD_LIST",
            f"{_ids(both)} counted among the dead and reported too",
            "name only nodes as dead whose disks are lost for good",
        )

    if living | dead != wanted:
        missing, foreign = wanted - living - dead, dead - wanted
        missing_ones = f"; neither reported nor dead: {_ids(missing)}" if missing else ""
        foreign_ones = f"; no voters: {_ids(foreign)}" if foreign else ""
        raise RecoveryError(
            "DEAD_LIST",
            f"survivors and dead must be the voters {_ids(wanted)}{missing_ones}{foreign_ones}",
            "name in --dead all voters whose disks are lost, and no other; report all the others",
        )


def _require_no_majority(best: Report, reports: Sequence[Report]) -> None:
    count = len(voters_of(best.voters))
    if len(reports) >= majority(count):
        raise RecoveryError(
            "MAJORITY_IS_THERE",
            f"{len(reports)} of {count} voters have survived, which is a majority",
            "start them: they elect a leader and lose nothing; then replace the lost disks",
        )


def _ids(node_ids: Collection[int]) -> str:
    return ", ".join(map(str, sorted(node_ids)))

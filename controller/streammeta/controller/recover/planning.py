"""Plan of a recovery: the survivor to continue from, and the numbers to continue with. Pure.

Survivors and dead nodes must be exactly the voters named by the most complete log, so that no voter
that may still vote is forgotten. The most complete log is the one that every vote would prefer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

from streammeta.controller.backup.restoring import EPOCH_JUMP, RestorePlan, jump_object_id
from streammeta.controller.ids import DirectoryId, NodeId
from streammeta.controller.quorum.recovered_log import next_era
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet, majority

# Report of one surviving directory: identity, voters, and the end of the flushed log. Pure.
#
# Also owns the error of a recovery, whose messages name the problem and the next step.


class RecoveryError(Exception):
    """A recovery is rejected and nothing was changed. `code` is for programs, `hint` for people."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Contents of one directory. All of the log below `end_offset` was flushed.

    `epoch` is the highest that the node knew, `last_epoch` the last batch's. `voters` are the last
    ones named by the log, in the format of `voters_text`. Everything below `committed_end` is known
    to be committed, and entries above it may be. `damages` counts damaged places. `is_repairing` is
    1 for a replica that has lost flushed batches to damage. At the end of its log the node would
    issue object ids from `next_object_id` on, and may have issued ids below `issued_below`. No
    upload below `undecided_from` is pending.
    """

    cluster_id: str
    cluster_uuid: str
    node_id: int
    directory_id: str
    epoch: int
    last_epoch: int
    end_offset: int
    committed_end: int
    log_hash: str
    voters: str
    damages: int
    is_repairing: int
    feature_level: int
    next_object_id: int
    issued_below: int
    undecided_from: int

    @property
    def progress(self) -> tuple[int, int]:
        """Epoch and end of the log, which votes compare."""
        return self.last_epoch, self.end_offset

    @property
    def key(self) -> ReplicaKey:
        """The node and its disk."""
        return ReplicaKey(NodeId(self.node_id), DirectoryId(self.directory_id))


def voters_text(voters: VoterSet) -> str:
    """Return voters as ID@HOST:PORT/DIRECTORY-ID,... without unknown disks."""
    return ",".join(
        f"{voter.key.node_id}@{voter.endpoint}"
        + ("" if voter.key.directory_id is None else f"/{voter.key.directory_id}")
        for voter in voters
    )


def voters_of(text: str) -> VoterSet:
    """Parse the result of `voters_text`. Raises ValueError."""
    voters = VoterSet()
    for entry in filter(None, text.split(",")):
        # Host names and addresses have no slash.
        place, _, directory = entry.partition("/")
        node_id, _, endpoint = place.partition("@")
        key = ReplicaKey(NodeId(int(node_id)), DirectoryId(directory) if directory else None)
        voters = voters.with_voter(Voter(key, endpoint))
    return voters


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """Source and result of a recovery. `from_*` describe the survivor, as in its report.

    The survivor continues alone, with the disk `directory_id`, at `endpoint`. Its log begins at
    `end_offset`, after `epoch`. It issues object ids from `next_object_id` on. Ids in
    `[undecided_from, next_object_id)` that its metadata does not know are undecided. `dead` are the
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
        """The only voter: the survivor with its new disk."""
        key = ReplicaKey(NodeId(self.node_id), DirectoryId(self.directory_id))
        return VoterSet((Voter(key, self.endpoint),))

    @property
    def restore(self) -> RestorePlan:
        """The equivalent restore, from the survivor's log into the same cluster."""
        # What both plans name alike is the same in both.
        names = {part.name for part in fields(RestorePlan)} & {part.name for part in fields(self)}
        return RestorePlan(
            **{name: getattr(self, name) for name in names},
            from_cluster_id=self.cluster_id,
            committed_by_ms=self.created_ms,
            voters=f"{self.node_id}@{self.endpoint}",
            state_hash="",
        )

    def sees(self, report: Report) -> bool:
        """Whether a directory is unchanged since the plan was made."""
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
    """State of the bucket, and the new values that a plan is made from.

    `claimed_below` is the highest claim on object ids in the bucket, `generation` the number of the
    next marker. The two UUIDs are new.
    """

    namespace: str
    claimed_below: int
    generation: int
    cluster_uuid: str
    directory_id: str
    now_ms: int


def choose_survivor(
    reports: Sequence[Report],
    dead: Collection[int],
    *,
    backup: tuple[int, int] | None = None,
) -> Report:
    """Return the report of the survivor to continue from: the most complete, then the lowest id.

    `backup` are epoch and end of the newest point in a backup, if there is one.

    Raises:
        RecoveryError: a majority may have survived, the dead and the survivors are not all
            voters, a report belongs to another cluster or to a damaged directory, or the backup
            has more.
    """
    _require_one_cluster(reports)
    _require_whole(reports)
    # The order of votes: a log that wins it contains every acknowledged entry of the others.
    best = max(reports, key=lambda report: (report.progress, -report.node_id))
    _require_all_voters(best, reports, set(dead))
    _require_no_majority(best, reports)
    if backup is not None and backup > best.progress:
        raise RecoveryError(
            "BACKUP_IS_FURTHER",
            f"the backup reaches offset {backup[1]} of epoch {backup[0]}, but the most complete "
            f"survivor, node {best.node_id}, only {best.end_offset} of epoch {best.last_epoch}",
            "restore from the backup, which keeps all of its data: `streammeta restore plan`",
        )
    return best


def plan_recovery(
    survivor: Report,
    reports: Sequence[Report],
    dead: Collection[int],
    circumstances: Circumstances,
) -> RecoveryPlan:
    """Return the plan to continue from the survivor returned by `choose_survivor`."""
    # `choose_survivor` has checked that the survivor is one of these voters.
    voter = voters_of(survivor.voters).find(NodeId(survivor.node_id))
    assert voter is not None
    # Claimed ids may have been issued after the last entry of this log.
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
        # Above any epoch in which a lost node may still have voted.
        epoch=max(report.epoch for report in reports) + EPOCH_JUMP,
        next_object_id=jump_object_id(issued_below, circumstances.claimed_below),
        undecided_from=survivor.undecided_from,
        generation=circumstances.generation,
        created_ms=circumstances.now_ms,
    )


def _require_one_cluster(reports: Sequence[Report]) -> None:
    if not reports:
        message = "no report of a survivor was passed"
        hint = "make one for each remaining directory: `streammeta recover inspect`"
        raise RecoveryError("NO_REPORT", message, hint)

    names = {report.cluster_id for report in reports}
    # A log that ends before the cluster's UUID, like an empty one, contradicts no other.
    uuids = {report.cluster_uuid for report in reports if report.cluster_uuid}
    if len(names) > 1 or len(uuids) > 1:
        named = ", ".join(
            f"node {report.node_id}: {report.cluster_id} {report.cluster_uuid}"
            for report in reports
        )
        raise RecoveryError(
            "FOREIGN_REPORT",
            f"the reports are of different clusters, or of before and after a recovery: {named}",
            "omit the reports that do not belong to the cluster to recover",
        )

    seen = Counter(report.node_id for report in reports)
    if repeated := [node_id for node_id, count in seen.items() if count > 1]:
        raise RecoveryError(
            "REPEATED_REPORT",
            f"several reports are of node {repeated[0]}",
            "pass one report for each node, from the directory that it used last",
        )


def _require_whole(reports: Sequence[Report]) -> None:
    for report in reports:
        name = f"the directory of node {report.node_id}"
        if report.damages:
            raise RecoveryError(
                "DAMAGED",
                f"{name} is damaged in {report.damages} places",
                "restore the disk, or name the node as dead. See `streammeta storage verify`",
            )

        if report.is_repairing:
            raise RecoveryError(
                "REPAIRING",
                f"{name} has lost flushed batches to damage and has not restored them",
                "name the node as dead, or restore from a backup: `streammeta restore`",
            )


def _require_all_voters(best: Report, reports: Sequence[Report], dead: set[int]) -> None:
    voters = voters_of(best.voters)
    wanted = {int(voter.key.node_id) for voter in voters}
    for report in reports:
        if not voters.contains(report.key):
            raise RecoveryError(
                "NOT_A_VOTER",
                f"node {report.node_id} with disk {report.directory_id} is not one of the voters "
                f"{best.voters}",
                "omit its report: a node that votes with another disk counts as dead",
            )

    living = {report.node_id for report in reports}
    if both := living & dead:
        raise RecoveryError(
            "DEAD_LIST",
            f"{_ids(both)} named as dead, but also reported",
            "name only nodes as dead whose disks are permanently lost",
        )

    if living | dead != wanted:
        missing, foreign = wanted - living - dead, dead - wanted
        missing_ones = f", neither reported nor dead: {_ids(missing)}" if missing else ""
        foreign_ones = f", not voters: {_ids(foreign)}" if foreign else ""
        raise RecoveryError(
            "DEAD_LIST",
            f"survivors and dead must be the voters {_ids(wanted)}{missing_ones}{foreign_ones}",
            "name in --dead exactly the voters whose disks are lost, and report all the others",
        )


def _require_no_majority(best: Report, reports: Sequence[Report]) -> None:
    count = len(voters_of(best.voters))
    # A recovery fences the old cluster, which a majority does not need.
    if len(reports) >= majority(count):
        raise RecoveryError(
            "MAJORITY_IS_THERE",
            f"{len(reports)} of {count} voters have survived, which is a majority",
            "start them: they elect a leader and lose nothing. Then replace the lost disks",
        )


def _ids(node_ids: Collection[int]) -> str:
    return ", ".join(map(str, sorted(node_ids)))

"""Report of one surviving directory: identity, voters, and the end of the flushed log. Pure.

Also owns the error of a recovery, whose messages name the problem and the next step.
"""

from __future__ import annotations

from dataclasses import dataclass

from streammeta.controller.ids import DirectoryId, NodeId
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet


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

"""Report of one surviving directory: identity, voters, and the end of what was flushed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from streammeta.controller.ids import DirectoryId, NodeId
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Contents of one directory; all of the log below `end_offset` was flushed.

    `epoch` is the highest that the node knew, `last_epoch` that of the last batch. `voters` are the
    last that the log names, as `voters_text` writes them. Everything below `committed_end` is known
    to be committed, perhaps more. `damages` are damaged places, `is_repairing` is 1 for a replica
    that damage has taken flushed batches from. The map at the end would issue object ids from
    `next_object_id` on, and may have issued those below `issued_below`; below `undecided_from` no
    upload is under way.
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
        """Epoch and end of the log, by which a vote would compare it with another one."""
        return self.last_epoch, self.end_offset

    @property
    def key(self) -> ReplicaKey:
        """The node and its disk."""
        return ReplicaKey(NodeId(self.node_id), DirectoryId(self.directory_id))


def voters_text(voters: VoterSet) -> str:
    """Return voters as ID@HOST:PORT/DIRECTORY-ID,...; an unknown disk is left out."""
    return ",".join(
        f"{one.key.node_id}@{one.endpoint}"
        + ("" if one.key.directory_id is None else f"/{one.key.directory_id}")
        for one in voters
    )


def voters_of(text: str) -> VoterSet:
    """Read what `voters_text` returned; raises ValueError."""
    voters = VoterSet()
    for entry in filter(None, text.split(",")):
        place, _, directory = entry.partition("/")
        node_id, _, endpoint = place.partition("@")
        key = ReplicaKey(NodeId(int(node_id)), DirectoryId(directory) if directory else None)
        voters = voters.with_voter(Voter(key, endpoint))
    return voters

"""Messages between replicas, the replicated batch, and the payloads of control batches.

The vocabulary is KRaft's (KIP-595, KIP-853, KIP-996, KIP-1166). Replication is pulled, and a Fetch
at an offset durably acknowledges everything below it. Messages do not depend on a wire format,
which `streammeta.controller.peers` adds. The payload of a control batch is UTF-8 JSON with sorted
keys, so that a log can be read without this code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import field
from enum import IntEnum, unique
from typing import TypeAlias

from streammeta.controller.errors import InvariantError
from streammeta.controller.fast_dataclass import value
from streammeta.controller.ids import ClusterId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet


@unique
class BatchKind(IntEnum):
    """Recipient of a batch: the state machine, or the quorum itself."""

    DATA = 1
    CONTROL = 2


_BATCH_OVERHEAD_BYTES = 208
"""Memory of a batch's own objects and its slot in a list."""

_PAYLOAD_OVERHEAD_BYTES = 48
"""Memory of a payload except its bytes: object header, padding, and slot."""


@value()
class Batch:
    """The unit of replication, written and truncated as a whole.

    Each payload is opaque, takes one offset, and is atomic for the state machine. `base_offset` is
    the offset of the first payload, hence the end offset of the log before this batch.
    """

    base_offset: EndOffset
    epoch: Epoch
    kind: BatchKind
    payloads: tuple[bytes, ...]
    size: int = field(init=False, compare=False, repr=False)
    """Bytes of payload, without framing."""

    def __post_init__(self) -> None:
        # Computed once: sizes are summed for every append, Fetch and trim.
        object.__setattr__(self, "size", sum(map(len, self.payloads)))

    @property
    def end_offset(self) -> EndOffset:
        """The offset after the last payload."""
        return EndOffset(self.base_offset + len(self.payloads))

    @property
    def held_bytes(self) -> int:
        """Memory of the batch in bytes. In small batches most of it is overhead."""
        return self.size + _BATCH_OVERHEAD_BYTES + _PAYLOAD_OVERHEAD_BYTES * len(self.payloads)


@unique
class QuorumError(IntEnum):
    """Reasons to reject quorum requests. Kafka's protocol has the same numbers below 250."""

    NONE = 0
    NOT_LEADER = 6
    REQUEST_TIMED_OUT = 7
    INVALID_REQUEST = 42
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    SNAPSHOT_NOT_FOUND = 98
    POSITION_OUT_OF_RANGE = 99
    INCONSISTENT_CLUSTER_ID = 104
    INVALID_VOTER_KEY = 125
    DUPLICATE_VOTER = 126
    VOTER_NOT_FOUND = 127
    LOG_OF_BEFORE = 255
    """The sender's log is from before a recovery from the loss of a majority."""


@value(kw_only=True)
class RequestHeader:
    """Sender, receiver and epoch of a request.

    Each process draws a new `incarnation`, and `request_id` counts within it. An answer is
    therefore never matched to a request of an earlier process.
    """

    cluster_id: ClusterId
    sender: ReplicaKey
    receiver: ReplicaKey
    epoch: Epoch
    incarnation: int
    request_id: int
    is_founder: bool = False
    """The sender's disk was formatted for a first voter, so a voter key without a disk may mean it.
    A disk that replaced another one, or joined later, never sets it."""


@value(kw_only=True)
class ResponseHeader:
    """The answered request, and the epoch and leader of the sender."""

    sender: NodeId
    receiver: NodeId
    epoch: Epoch
    leader_id: NodeId | None
    error: QuorumError
    incarnation: int
    request_id: int


@value(kw_only=True)
class VoteRequest:
    """Asks for a vote in the header's epoch or, with `pre_vote`, whether one would be granted.

    A pre-vote is asked at the sender's current epoch and binds no voter (KIP-996).
    """

    header: RequestHeader
    pre_vote: bool
    last_epoch: Epoch
    end_offset: EndOffset


@value(kw_only=True)
class VoteResponse:
    """Answer to a `VoteRequest`."""

    header: ResponseHeader
    pre_vote: bool
    granted: bool


@value(kw_only=True)
class BeginQuorumEpochRequest:
    """The sender leads the header's epoch. Repeated as a heartbeat to voters that don't fetch."""

    header: RequestHeader


@value(kw_only=True)
class BeginQuorumEpochResponse:
    """Answer to a `BeginQuorumEpochRequest`."""

    header: ResponseHeader


@value(kw_only=True)
class EndQuorumEpochRequest:
    """The sender no longer leads the header's epoch. The best successors come first.

    A voter that isn't listed waits an election timeout before it campaigns.
    """

    header: RequestHeader
    preferred_successors: tuple[ReplicaKey, ...]


@value(kw_only=True)
class EndQuorumEpochResponse:
    """Answer to an `EndQuorumEpochRequest`."""

    header: ResponseHeader


@value(kw_only=True)
class FetchRequest:
    """Everything below `fetch_offset` is flushed at the sender, which asks for what follows.

    `high_watermark` (KIP-1166) and `read_round` are the highest the sender has seen, the latter in
    this epoch only. The answer may be delayed for `max_wait_ms`. `answered_request_id` is the
    sender's newest request that this leader has answered in this epoch, 0 before any. It shows that
    a follower can receive as well as send: one that only sends must not keep its leader in its
    role.
    """

    header: RequestHeader
    fetch_offset: EndOffset
    last_epoch: Epoch
    high_watermark: EndOffset
    read_round: int
    max_wait_ms: int
    max_bytes: int
    answered_request_id: int = 0
    is_disk_full: bool = False
    """The sender's disk is full, so it can't write any batches now."""


@value()
class EpochEnd:
    """End of an epoch in a log: the end offset of the last batch of `epoch`."""

    epoch: Epoch
    end_offset: EndOffset


@value(kw_only=True)
class FetchResponse:
    """Batches from the fetch offset on, or instructions to truncate or to fetch a snapshot.

    With `diverging` the logs diverge at or below that point. With `snapshot_id` the leader's log no
    longer reaches back to the fetch offset, and the snapshot has the missing entries.
    """

    header: ResponseHeader
    high_watermark: EndOffset
    log_start_offset: EndOffset
    read_round: int
    diverging: EpochEnd | None = None
    snapshot_id: SnapshotId | None = None
    batches: tuple[Batch, ...] = ()


@value(kw_only=True)
class FetchSnapshotRequest:
    """Asks for at most `max_bytes` of a snapshot from `position` on.

    `answered_request_id` is as in a `FetchRequest`.
    """

    header: RequestHeader
    snapshot_id: SnapshotId
    position: int
    max_bytes: int
    answered_request_id: int = 0


@value(kw_only=True)
class FetchSnapshotResponse:
    """Bytes of a snapshot file of `total_bytes`, whose SHA-256 is `file_digest`.

    Two replicas' files for the same id may differ byte by byte, hence the digest.
    """

    header: ResponseHeader
    snapshot_id: SnapshotId
    total_bytes: int = 0
    position: int = 0
    data: bytes = b""
    file_digest: bytes = b""


@value(kw_only=True)
class UpdateVoterRequest:
    """Endpoints and disk of the sender, which is a voter (KIP-853)."""

    header: RequestHeader
    voter: Voter


@value(kw_only=True)
class UpdateVoterResponse:
    """Answer to an `UpdateVoterRequest`. The change may not be committed yet."""

    header: ResponseHeader


VoterRequest: TypeAlias = VoteRequest | BeginQuorumEpochRequest | EndQuorumEpochRequest
"""Requests that any voter answers."""
LeaderRequest: TypeAlias = FetchRequest | FetchSnapshotRequest | UpdateVoterRequest
"""Requests that only the leader of their epoch answers."""
Request: TypeAlias = VoterRequest | LeaderRequest
Response: TypeAlias = (
    VoteResponse
    | BeginQuorumEpochResponse
    | EndQuorumEpochResponse
    | FetchResponse
    | FetchSnapshotResponse
    | UpdateVoterResponse
)
Message: TypeAlias = Request | Response


_VOTERS = "voters"
_VERSION = 1


def encode_leader_change(leader_id: NodeId, voters: VoterSet, granting: Iterable[NodeId]) -> bytes:
    """Return the first payload of every epoch: its leader, the voters, and the granted votes."""
    return _encode(
        {
            "type": "leader_change",
            "version": _VERSION,
            "leader_id": leader_id,
            # For people who read the log. Only the voters record changes the voters.
            "voters": [voter.key.node_id for voter in voters],
            "granting_voters": sorted(granting),
        }
    )


def encode_voters(voters: VoterSet) -> bytes:
    """Return the payload that makes these voters the current ones."""
    return _encode(
        {
            "type": _VOTERS,
            "version": _VERSION,
            "voters": voters.to_fields(),
        }
    )


def decode_voters(batch: Batch) -> VoterSet | None:
    """Return the voters named by a control batch, None if it names none.

    Raises:
        InvariantError: this release can't read a payload. A replica that ignored it would count
            other voters than its peers.
    """
    named: VoterSet | None = None
    for payload in batch.payloads:
        try:
            record = json.loads(payload)
            if record["type"] != _VOTERS:
                continue
            if record["version"] != _VERSION:
                raise ValueError(f"version is {record['version']}, must be {_VERSION}")
            named = VoterSet.from_fields(record["voters"])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise InvariantError(
                f"the control batch at offset {batch.base_offset} can't be read: {error!r}"
            ) from error
    return named


def _encode(record: dict[str, object]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()

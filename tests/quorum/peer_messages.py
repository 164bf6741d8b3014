"""One message of every kind that controllers send each other, for tests of their transport."""

import dataclasses
from typing import Any

from streammeta.controller.ids import ClusterId, DirectoryId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.quorum import messages
from streammeta.controller.quorum.voters import ReplicaKey, Voter

ASK = messages.RequestHeader(
    cluster_id=ClusterId("c"),
    sender=ReplicaKey(NodeId(0), DirectoryId("d")),
    receiver=ReplicaKey(NodeId(2)),
    epoch=Epoch(5),
    incarnation=(1 << 62) - 1,
    request_id=9,
    is_founder=True,
)
ANSWER = messages.ResponseHeader(
    sender=NodeId(2),
    receiver=NodeId(0),
    epoch=Epoch(5),
    leader_id=None,
    error=messages.QuorumError.NOT_LEADER,
    incarnation=3,
    request_id=9,
)
GOOD = dataclasses.replace(ANSWER, error=messages.QuorumError.NONE, leader_id=NodeId(2))
BATCH = messages.Batch(EndOffset(7), Epoch(5), messages.BatchKind.DATA, (b"a", b"", b"bc"))
NEXT = messages.Batch(EndOffset(10), Epoch(6), messages.BatchKind.CONTROL, (b"{}",))
SNAPSHOT = SnapshotId(EndOffset(70), Epoch(4))
VOTE = messages.VoteRequest(header=ASK, pre_vote=True, last_epoch=Epoch(4), end_offset=EndOffset(7))
FETCH = messages.FetchRequest(
    header=ASK,
    fetch_offset=EndOffset(7),
    last_epoch=Epoch(4),
    high_watermark=EndOffset(6),
    read_round=3,
    max_wait_ms=500,
    max_bytes=8,
    answered_request_id=5,
    is_disk_full=True,
)
FETCH_SNAPSHOT = messages.FetchSnapshotRequest(
    header=ASK, snapshot_id=SNAPSHOT, position=0, max_bytes=1 << 20, answered_request_id=6
)
UPDATE = messages.UpdateVoterRequest(header=ASK, voter=Voter(ASK.sender, "[::1]:9091", "h:9090"))
VOTED = messages.VoteResponse(header=ANSWER, pre_vote=False, granted=True)
FETCHED = messages.FetchResponse(
    header=GOOD, high_watermark=EndOffset(6), log_start_offset=EndOffset(2), read_round=3
)
CHUNK = messages.FetchSnapshotResponse(
    header=GOOD,
    snapshot_id=SNAPSHOT,
    total_bytes=10,
    position=4,
    data=b"\x00\xff",
    file_digest=bytes(range(32)),
)
REQUESTS: list[messages.Request] = [
    VOTE,
    messages.BeginQuorumEpochRequest(header=ASK),
    messages.EndQuorumEpochRequest(header=ASK, preferred_successors=(ASK.sender, ASK.receiver)),
    FETCH,
    FETCH_SNAPSHOT,
    UPDATE,
]
RESPONSES: list[messages.Response] = [
    VOTED,
    messages.BeginQuorumEpochResponse(header=GOOD),
    messages.EndQuorumEpochResponse(header=ANSWER),
    FETCHED,
    dataclasses.replace(FETCHED, diverging=messages.EpochEnd(Epoch(0), EndOffset(0))),
    dataclasses.replace(FETCHED, snapshot_id=SNAPSHOT),
    dataclasses.replace(FETCHED, batches=(BATCH, NEXT)),
    CHUNK,
    messages.FetchSnapshotResponse(
        header=dataclasses.replace(GOOD, error=messages.QuorumError.SNAPSHOT_NOT_FOUND),
        snapshot_id=SNAPSHOT,
    ),
    messages.UpdateVoterResponse(header=GOOD),
]


def with_field(value: Any, path: str, content: object) -> Any:
    """Return a copy of a message in which the field at a dotted path is another."""
    name, _, rest = path.partition(".")
    if rest:
        content = with_field(getattr(value, name), rest, content)
    return dataclasses.replace(value, **{name: content})

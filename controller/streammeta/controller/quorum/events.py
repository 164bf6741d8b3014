"""Input events and output effects of a replica.

Each step of the core takes the time and one `Event` and returns `Effect`s, which the driver
executes in order. Writes carry an ascending *token* and reach the disk in that order. A message
leaves only when the write it depends on, `Send.after`, is durable.
"""

from __future__ import annotations

from typing import TypeAlias

from streammeta.controller.fast_dataclass import value
from streammeta.controller.ids import EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.messages import Batch, Message, QuorumError
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet


@value()
class Tick:
    """Time has passed."""


@value()
class Received:
    """A message arrived. It may be late, duplicated, reordered or from another cluster."""

    message: Message


@value()
class RequestFailed:
    """The transport abandoned this request, so no answer will come."""

    peer: NodeId
    request_id: int


@value()
class PeerConnectionLost:
    """The peer reset or refused a connection: its process has probably ended."""

    peer: NodeId


@value()
class Append:
    """Replicate these payloads as one batch. Only valid for an established leader."""

    payloads: tuple[bytes, ...]


@value()
class WriteDone:
    """Every write up to this token is durable."""

    token: int


@value()
class StateDone:
    """The quorum-state of this token is durable, ahead of earlier writes."""

    token: int


@value()
class TimeLost:
    """The process did not run for this long, so no peer's silence counts during it."""

    lost_ms: int


@value()
class DiskFull:
    """The disk is full except for the reserve, or has room again.

    Waiting batches are in the log.
    """

    is_full: bool


@value()
class LogReadDone:
    """The batches that `ReadLog` requested, empty if they were removed."""

    read_id: int
    batches: tuple[Batch, ...]


@value()
class ReadIndexRequested:
    """A linearizable read asks for the offset up to which it must have applied the log."""

    read_id: int


@value()
class Resign:
    """Give up leadership, if this replica leads, and notify the voters."""


@value()
class TransferRequested:
    """Transfer leadership to this voter or, with None, to the voter with the longest log."""

    to: NodeId | None


@value()
class VoterChangeRequested:
    """Add a voter (a `Voter`) or remove one (a `ReplicaKey`). Only one change runs at a time."""

    change_id: int
    change: Voter | ReplicaKey


@value()
class SnapshotTaken:
    """The state machine wrote its own snapshot, durably, at the end of a committed batch."""

    snapshot_id: SnapshotId


@value()
class SnapshotChunk:
    """Bytes of a snapshot file of `total_bytes` whose SHA-256 is `digest`."""

    total_bytes: int
    data: bytes
    digest: bytes


@value()
class SnapshotReadDone:
    """The bytes that `ReadSnapshot` requested, None if the snapshot does not exist."""

    read_id: int
    chunk: SnapshotChunk | None


@value()
class SnapshotInstalled:
    """`InstallSnapshot` is done: the log begins and ends at the snapshot's end.

    `voters` are those named by the snapshot. None means that the file was invalid and removed, and
    the log is unchanged.
    """

    snapshot_id: SnapshotId
    voters: VoterSet | None


Event: TypeAlias = (
    Tick
    | Received
    | RequestFailed
    | PeerConnectionLost
    | Append
    | WriteDone
    | StateDone
    | TimeLost
    | DiskFull
    | LogReadDone
    | ReadIndexRequested
    | Resign
    | TransferRequested
    | VoterChangeRequested
    | SnapshotTaken
    | SnapshotReadDone
    | SnapshotInstalled
)


@value()
class LeadershipEnded:
    """The replica stopped leading `epoch`, for a reason that operators read.

    Always the first effect of its step.
    """

    epoch: Epoch
    reason: str


@value()
class PersistQuorumState:
    """Replace the quorum-state durably."""

    token: int
    state: QuorumState


@value()
class AppendLog:
    """Write these batches at the end of the log, durably."""

    token: int
    batches: tuple[Batch, ...]


@value()
class TruncateLog:
    """Truncate the log durably so that it ends at `end_offset`."""

    token: int
    end_offset: EndOffset


@value()
class TrimLog:
    """Delete batches below `start_offset`, a snapshot's end, and the snapshots that end below it.

    Nothing waits for it. After a crash the next one deletes the remains.
    """

    token: int
    start_offset: EndOffset


@value()
class WriteSnapshotChunk:
    """Write bytes of a snapshot download. Position 0 starts the file again."""

    snapshot_id: SnapshotId
    position: int
    data: bytes


@value()
class InstallSnapshot:
    """Verify the downloaded file, make it durable, and begin the log at its end.

    Answered by `SnapshotInstalled`. The snapshot must be durable before the log is deleted.
    """

    token: int
    snapshot_id: SnapshotId
    total_bytes: int
    digest: bytes


@value()
class ClearDamage:
    """Clear the damage mark durably: everything removed from this log is restored."""

    token: int


@value()
class ReadSnapshot:
    """Read at most `max_bytes` of a snapshot from `position`. Answered by `SnapshotReadDone`."""

    read_id: int
    snapshot_id: SnapshotId
    position: int
    max_bytes: int


@value()
class ReadLog:
    """Read whole batches from `start_offset`, at least one, about `max_bytes` of them."""

    read_id: int
    start_offset: EndOffset
    max_bytes: int


@value()
class Send:
    """Pass `message` to the transport once the write `after` is durable. It may be lost.

    Without `vouches_for_log` it waits only for the last quorum-state up to `after`, even if earlier
    writes are not done yet.
    """

    to: NodeId
    message: Message
    after: int
    vouches_for_log: bool = True


@value()
class CommitAdvanced:
    """Everything below `high_watermark` is committed."""

    high_watermark: EndOffset


@value()
class LeadershipStarted:
    """The replica was elected. It may be announced once it has applied past `epoch_start`."""

    epoch: Epoch
    epoch_start: EndOffset


@value()
class ReadIndexReady:
    """The read is linearizable when everything below `index` has been applied."""

    read_id: int
    index: EndOffset


@value()
class ReadIndexRejected:
    """The replica can't prove that it leads."""

    read_id: int


@value()
class VotersChanged:
    """These voters are current from now on, committed or not."""

    voters: VoterSet


@value()
class VoterChangeDone:
    """A requested change is committed below `end_offset`."""

    change_id: int
    end_offset: EndOffset


@value()
class VoterChangeRejected:
    """A requested change did not happen. With NOT_LEADER it may have happened."""

    change_id: int
    error: QuorumError
    reason: str


@value()
class FullVotersChanged:
    """Full disks of these voters prevent any commit. Empty: a majority has room.

    Reported by a leader. `LeadershipEnded` invalidates earlier reports.
    """

    full_voters: tuple[NodeId, ...]


@value()
class TransferRejected:
    """Leadership stays here. `LeadershipEnded` reports success."""

    reason: str


Outcome: TypeAlias = (
    ReadIndexReady
    | ReadIndexRejected
    | VotersChanged
    | VoterChangeDone
    | VoterChangeRejected
    | FullVotersChanged
    | TransferRejected
)
"""Effects that callers wait for."""

Effect: TypeAlias = (
    LeadershipEnded
    | PersistQuorumState
    | AppendLog
    | TruncateLog
    | TrimLog
    | WriteSnapshotChunk
    | InstallSnapshot
    | ClearDamage
    | ReadSnapshot
    | ReadLog
    | Send
    | CommitAdvanced
    | LeadershipStarted
    | Outcome
)

"""What a replica is fed and what it asks for in return.

Each step of the core takes the time and one `Event` and returns `Effect`s, which the driver carries
out in order. Writes carry a *token* that counts upwards; they reach the disk in that order, and a
message leaves only when the write it depends on, `Send.after`, is durable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from controller.ids import EndOffset, Epoch, NodeId
from controller.quorum.config import QuorumState
from controller.quorum.messages import Batch, Message


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived; it may be late, doubled, reordered or from another cluster."""

    message: Message


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The transport knows that this request will not be answered."""

    peer: NodeId
    request_id: int


@dataclass(frozen=True, slots=True)
class PeerConnectionLost:
    """The peer's end of a connection was reset or refused: its process is probably gone."""

    peer: NodeId


@dataclass(frozen=True, slots=True)
class Append:
    """Replicate these payloads as one batch; only for an established leader."""

    payloads: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class WriteDone:
    """Every write up to this token is durable."""

    token: int


@dataclass(frozen=True, slots=True)
class LogReadDone:
    """The batches that `ReadLog` asked for; empty if they are gone."""

    read_id: int
    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class ReadIndexRequested:
    """A linearizable read wants to know up to where it must have applied."""

    read_id: int


@dataclass(frozen=True, slots=True)
class Resign:
    """Give up leadership, if held, and say so to the voters."""


Event: TypeAlias = (
    Tick
    | Received
    | RequestFailed
    | PeerConnectionLost
    | Append
    | WriteDone
    | LogReadDone
    | ReadIndexRequested
    | Resign
)


@dataclass(frozen=True, slots=True)
class LeadershipEnded:
    """The replica stopped leading `epoch`. Always the first effect of its step."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class PersistQuorumState:
    """Replace the quorum-state, durably."""

    token: int
    state: QuorumState


@dataclass(frozen=True, slots=True)
class AppendLog:
    """Write these batches at the end of the log, durably."""

    token: int
    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class TruncateLog:
    """Cut the log so that it ends at `end_offset`, durably."""

    token: int
    end_offset: EndOffset


@dataclass(frozen=True, slots=True)
class ReadLog:
    """Read whole batches from `start_offset`, at least one, about `max_bytes` of them."""

    read_id: int
    start_offset: EndOffset
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Send:
    """Hand `message` to the transport once the write `after` is durable; it may be lost."""

    to: NodeId
    message: Message
    after: int


@dataclass(frozen=True, slots=True)
class CommitAdvanced:
    """Everything below `high_watermark` is committed."""

    high_watermark: EndOffset


@dataclass(frozen=True, slots=True)
class LeadershipStarted:
    """The replica was elected; it may be announced once it has applied past `epoch_start`."""

    epoch: Epoch
    epoch_start: EndOffset


@dataclass(frozen=True, slots=True)
class ReadIndexReady:
    """The read is linearizable when everything below `index` has been applied."""

    read_id: int
    index: EndOffset


@dataclass(frozen=True, slots=True)
class ReadIndexRefused:
    """The replica can't prove that it leads."""

    read_id: int


Effect: TypeAlias = (
    LeadershipEnded
    | PersistQuorumState
    | AppendLog
    | TruncateLog
    | ReadLog
    | Send
    | CommitAdvanced
    | LeadershipStarted
    | ReadIndexReady
    | ReadIndexRefused
)

"""Interfaces between the quorum driver, the replicated state machine and the peers' transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple, Protocol, TypeAlias

from streammeta.controller.errors import NotLeaderError
from streammeta.controller.ids import ClusterId, NodeId, SnapshotId
from streammeta.controller.quorum.messages import Batch, Request, Response
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.snapshot.checkpoint_file import Sink


@dataclass(frozen=True, slots=True)
class SnapshotPoint:
    """Identity of a snapshot: its end, its cluster, and the voters in force there."""

    snapshot_id: SnapshotId
    cluster_id: ClusterId
    voters: VoterSet


class Endpoints(NamedTuple):
    """Addresses of a controller, `host:port`; None for one that is not known."""

    peers: str | None = None
    """Where the other controllers reach it."""
    clients: str | None = None
    """Where clients reach it."""
    tokens: str | None = None
    """Where clients with tokens reach it; not part of answers to peers."""


Reply: TypeAlias = Callable[[Response | None], None]
"""Takes the answer to a peer's request, on the event loop; None: there will be none."""


class ReplicatedLog(Protocol):
    """The quorum, as the single writer sees it."""

    @property
    def next_offset(self) -> int:
        """Offset the next appended payload takes."""
        ...

    def append(self, payloads: Sequence[bytes], *, required_base_offset: int) -> int:
        """Append on the leader and return the end offset; see `QuorumDriver.append`."""
        ...

    async def append_turn(self) -> None:
        """Wait until an append is worth a batch; see `QuorumDriver.append_turn`."""
        ...

    def flush(self) -> None:
        """Begin the batch of what was appended in this turn; see `QuorumDriver.flush`."""
        ...

    @property
    def is_short_of_space(self) -> bool:
        """True if appended entries may wait for disk space indefinitely."""
        ...

    def require_disk_space(self) -> None:
        """Raise while full disks keep appends out; see `QuorumDriver.require_disk_space`."""
        ...

    def tell_flushed(self, end_offset: int, told: Callable[[], None]) -> None:
        """Call when it is on this node's disk; see `QuorumDriver.tell_flushed`."""
        ...

    async def read_barrier(self) -> int:
        """Prove leadership from now on; see `QuorumDriver.read_barrier`."""
        ...

    def leader_hint(self) -> NotLeaderError:
        """Return the error that names the leader, as far as this node knows it."""
        ...

    def hurry(self) -> None:
        """Deliver what is committed without a pause; see `QuorumDriver.hurry`."""
        ...

    def snapshot_point(self) -> SnapshotPoint:
        """End the forming batch; return the point in the log that the map has reached."""
        ...


class StateMachine(Protocol):
    """The replicated state. All calls but `load` are made on the event loop and must not block.

    None but `load` may raise.
    """

    def on_committed(self, batches: Sequence[Batch], high_watermark: int) -> None:
        """Take committed batches, control batches too, each once and in order.

        Everything below `high_watermark` has been delivered with this call, by batches or by a
        snapshot.
        """
        ...

    def on_leadership_claimed(self, epoch: int) -> None:
        """Start appending: this node leads and everything committed was delivered."""
        ...

    def on_leadership_lost(self) -> None:
        """Stop at once; entries appended and not delivered may or may not be committed."""
        ...

    def on_writes_refused(self) -> None:
        """Let no read wait for uncommitted entries: full disks may hold them up."""
        ...

    def on_writes_held_up(self) -> None:
        """Fail waiting writes: full disks hold up their entries."""
        ...

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for entries that are yet to be delivered."""
        ...

    def freeze(self, point: SnapshotPoint) -> Callable[[Sink], object]:
        """Return a writer of the state as it is now, which is that at `point`.

        The returned call is made in a thread, at any time, while the state goes on changing.
        """
        ...

    def load(self, file: BinaryIO, snapshot_id: SnapshotId) -> Callable[[], None]:
        """Read a snapshot in a thread, changing nothing.

        The returned call, made on the event loop, replaces the whole state by what was read.

        Raises:
            Exception: the file is not that snapshot; the replica can't go on.
        """
        ...


class PeerListener(Protocol):
    """Listener to the outcome of requests; all calls are made on the event loop."""

    def on_response(self, response: Response) -> None:
        """Take a peer's answer."""
        ...

    def on_request_failed(self, peer: NodeId, request_id: int) -> None:
        """Note that no answer will come."""
        ...

    def on_connection_lost(self, peer: NodeId) -> None:
        """Note that the peer reset or refused the connection: its process has probably ended."""
        ...


class PeerTransport(Protocol):
    """Transport of requests to the other replicas; owns their addresses."""

    def bind(self, listener: PeerListener) -> None:
        """Connect the listener; once, before the first `send`."""
        ...

    def send(self, request: Request) -> None:
        """Start sending to the request's receiver; never blocks, never raises."""
        ...

    def set_voters(self, voters: VoterSet) -> None:
        """Use these voters and their endpoints from now on."""
        ...

    def endpoints(self, node_id: NodeId) -> Endpoints:
        """Return the best known addresses of a node to publish to others."""
        ...

    async def close(self) -> None:
        """Cancel requests in flight and release connections."""
        ...

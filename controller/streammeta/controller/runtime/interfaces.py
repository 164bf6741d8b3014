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
    """Identity of a snapshot: its end, its cluster, and the voters at that point."""

    snapshot_id: SnapshotId
    cluster_id: ClusterId
    voters: VoterSet


class Endpoints(NamedTuple):
    """Addresses of a controller, `host:port`, None if unknown."""

    peers: str | None = None
    """Where the other controllers reach it."""
    clients: str | None = None
    """Where clients reach it."""
    tokens: str | None = None
    """Where clients with tokens reach it. Not part of answers to peers."""


Reply: TypeAlias = Callable[[Response | None], None]
"""Callback for the answer to a peer's request, on the event loop. None: there will be no answer."""


class ReplicatedLog(Protocol):
    """The quorum as the single writer sees it."""

    @property
    def next_offset(self) -> int:
        """Offset of the next appended payload."""
        ...

    def append(self, payloads: Sequence[bytes], *, required_base_offset: int) -> int:
        """Append on the leader and return the end offset. See `QuorumDriver.append`."""
        ...

    async def append_turn(self) -> None:
        """Wait until an append is worth a batch. See `QuorumDriver.append_turn`."""
        ...

    def flush(self) -> None:
        """Begin the batch with this turn's appends. See `QuorumDriver.flush`."""
        ...

    @property
    def is_short_of_space(self) -> bool:
        """Whether appended entries may wait for disk space indefinitely."""
        ...

    def require_disk_space(self) -> None:
        """Raise while full disks prevent appends. See `QuorumDriver.require_disk_space`."""
        ...

    def tell_flushed(self, end_offset: int, told: Callable[[], None]) -> None:
        """Call `told` when the log is on this node's disk. See `QuorumDriver.tell_flushed`."""
        ...

    async def read_barrier(self) -> int:
        """Prove leadership from now on. See `QuorumDriver.read_barrier`."""
        ...

    def leader_hint(self) -> NotLeaderError:
        """Return the error that names the leader, if known."""
        ...

    def hurry(self) -> None:
        """Deliver committed entries without a pause. See `QuorumDriver.hurry`."""
        ...

    def snapshot_point(self) -> SnapshotPoint:
        """End the open batch and return the log position that the metadata has reached."""
        ...


class StateMachine(Protocol):
    """The replicated state. All calls but `load` run on the event loop and must not block.

    Only `load` may raise.
    """

    def on_committed(self, batches: Sequence[Batch], high_watermark: int) -> None:
        """Apply committed batches, including control batches, each once and in order.

        After this call everything below `high_watermark` has been delivered, in batches or by a
        snapshot.
        """
        ...

    def on_leadership_claimed(self, epoch: int) -> None:
        """Start appending: this node leads and everything committed was delivered."""
        ...

    def on_leadership_lost(self) -> None:
        """Stop immediately. Entries appended and not delivered may or may not be committed."""
        ...

    def on_writes_refused(self) -> None:
        """Let no read wait for uncommitted entries, which full disks may delay."""
        ...

    def on_writes_held_up(self) -> None:
        """Fail waiting writes, because full disks delay their entries."""
        ...

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for entries that have not been delivered yet."""
        ...

    def freeze(self, point: SnapshotPoint) -> Callable[[Sink], object]:
        """Return a writer of the current state, which is the state at `point`.

        The returned function is called in a thread, at any time, while the state keeps changing.
        """
        ...

    def load(self, file: BinaryIO, snapshot_id: SnapshotId) -> Callable[[], None]:
        """Read a snapshot in a thread, without changing anything.

        The returned function, called on the event loop, replaces the whole state with the snapshot.

        Raises:
            Exception: the file is not that snapshot, and the replica can't continue.
        """
        ...


class PeerListener(Protocol):
    """Listener for the outcomes of requests. All calls are made on the event loop."""

    def on_response(self, response: Response) -> None:
        """Process a peer's answer."""
        ...

    def on_request_failed(self, peer: NodeId, request_id: int) -> None:
        """Record that no answer will come."""
        ...

    def on_connection_lost(self, peer: NodeId) -> None:
        """Record that the peer reset or refused the connection: its process has probably ended."""
        ...


class PeerTransport(Protocol):
    """Transport of requests to the other replicas, which owns their addresses."""

    def bind(self, listener: PeerListener) -> None:
        """Connect the listener. Call once, before the first `send`."""
        ...

    def send(self, request: Request) -> None:
        """Start sending to the request's receiver. Never blocks and never raises."""
        ...

    def set_voters(self, voters: VoterSet) -> None:
        """Use these voters and their endpoints from now on."""
        ...

    def endpoints(self, node_id: NodeId) -> Endpoints:
        """Return the best known addresses of a node, to publish to others."""
        ...

    async def close(self) -> None:
        """Cancel requests in flight and release connections."""
        ...

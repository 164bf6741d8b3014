"""Interfaces of the quorum driver: the replicated state machine and the transport to peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.quorum.messages import Batch, Request, Response, SnapshotId
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.snapshot.checkpoint_file import Sink


@dataclass(frozen=True, slots=True)
class SnapshotPoint:
    """Where a snapshot ends, and what it says besides the state: whose it is, and who votes."""

    snapshot_id: SnapshotId
    cluster_id: ClusterId
    voters: VoterSet


class StateMachine(Protocol):
    """What is replicated. All calls but `load` are made on the event loop and must not block.

    None but `load` may raise.
    """

    def on_committed(self, batches: Sequence[Batch], high_watermark: int) -> None:
        """Take committed batches, control batches too, each once and in order.

        Everything below `high_watermark` has been delivered with this call, by batches or by a
        snapshot.
        """
        ...

    def on_leadership_claimed(self, epoch: int) -> None:
        """Begin to append: this node leads and everything committed was delivered."""
        ...

    def on_leadership_lost(self) -> None:
        """Stop at once; what was appended and not delivered may or may not be committed."""
        ...

    def on_writes_refused(self) -> None:
        """Let no read wait for what was appended: it may be held up for want of room on disks."""
        ...

    def on_writes_held_up(self) -> None:
        """Tell callers that what was appended is held up for want of room on disks."""
        ...

    def freeze(self, point: SnapshotPoint) -> Callable[[Sink], object]:
        """Return what writes the state as it is now, which is that at `point`, to a file.

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
    """Told what became of requests; all calls on the event loop."""

    def on_response(self, response: Response) -> None:
        """A peer answered."""
        ...

    def on_request_failed(self, peer: NodeId, request_id: int) -> None:
        """No answer will come."""
        ...

    def on_connection_lost(self, peer: NodeId) -> None:
        """The peer's end was reset or refused: its process is probably gone."""
        ...


class PeerTransport(Protocol):
    """Carries requests to the other replicas, and knows where they are."""

    def bind(self, listener: PeerListener) -> None:
        """Connect the listener; once, before the first `send`."""
        ...

    def send(self, request: Request) -> None:
        """Start sending to the request's receiver; never blocks, never raises."""
        ...

    def set_voters(self, voters: VoterSet) -> None:
        """These voters, at these endpoints, are in force from now on."""
        ...

    def endpoint(self, node_id: NodeId) -> str | None:
        """Return where a node can be reached, as best known; None if it is not."""
        ...

    async def close(self) -> None:
        """Give up what is in flight and release connections."""
        ...

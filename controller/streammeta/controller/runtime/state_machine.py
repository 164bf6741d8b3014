"""What is replicated, as the quorum driver sees it: it takes batches and makes snapshots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from streammeta.controller.ids import ClusterId
from streammeta.controller.quorum.messages import Batch, SnapshotId
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.snapshot.writer import Sink


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

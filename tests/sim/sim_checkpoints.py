"""A simulated node's own checkpoints: of committed state, at the same offsets everywhere, slowly.

Takes the place of the driver's `Checkpointer`, whose files would be too large and too rarely alike:
here nodes often have snapshots of one id, whose bytes differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streammeta.controller.ids import SnapshotId
from streammeta.controller.journal.snapshots import SnapshotWriter
from streammeta.controller.runtime.quorum_disk import FinishSnapshot
from streammeta.storage.durable_files import DiskFullError
from tests.sim.sim_store import encode_image

if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode

_RETRY_MS = 120
_PIECE_BYTES = 150


class SimCheckpointer:
    """Writes one checkpoint at a time, every so many offsets."""

    def __init__(self, node: SimNode) -> None:
        self._node = node
        self._newest_end = 0
        self._is_writing = False

    # -- what the driver tells

    def start(self) -> None:
        """Begin; nothing is due before something is delivered."""

    def halt(self) -> None:
        """The replica ends, and with it this."""

    def abandon(self) -> None:
        """The log is about to begin above: what is written is dropped when it is finished."""

    def on_newest(self, _snapshot_id: SnapshotId) -> None:
        """One is durable under its name, written here or installed."""
        self._is_writing = False

    def on_dropped(self) -> None:
        """One was dropped for a newer one."""
        self._is_writing = False

    def on_loaded(self) -> None:
        """A snapshot replaced the state."""
        self._newest_end = self._node.driver.delivered_end

    def on_delivered(self, _size: int) -> None:
        """Take a checkpoint if one is due: at the same offsets everywhere."""
        every = self._node.world.profile.offsets_between_snapshots
        end = self._node.driver.delivered_end
        if every and end // every > self._newest_end // every and not self._is_writing:
            self._newest_end = end
            self._is_writing = True
            self._freeze()

    # -- writing

    def _freeze(self) -> None:
        node, world = self._node, self._node.world
        image = node.service.controller.image(node.driver.committed_point())
        world.ghost.check_snapshot(node.key, image.snapshot_id, image.voters)
        world.ghost.ledger.check_image(node.key, image)
        data = encode_image(image, world.rngs.nodes, world.snapshot_padding)
        pieces = [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]
        node.later(1, lambda: self._begin(image.snapshot_id, pieces))

    def _begin(self, snapshot_id: SnapshotId, pieces: list[bytes]) -> None:
        try:
            writer = self._node.journal.snapshots.begin(snapshot_id)
        except DiskFullError:
            self._give_up()
            return
        self._write_piece(writer, pieces)

    def _write_piece(self, writer: SnapshotWriter, pieces: list[bytes]) -> None:
        node = self._node
        try:
            if pieces:
                writer.write(pieces[0])
            else:
                writer.seal()
        except DiskFullError:
            writer.abandon()
            self._give_up()
            return
        if pieces:
            node.later(node.world.disk_delay(), lambda: self._write_piece(writer, pieces[1:]))
        else:
            node.storage.submit(FinishSnapshot(writer))

    def _give_up(self) -> None:
        self._node.world.count("snapshots given up")

        def retry() -> None:
            self._is_writing = False

        self._node.later(_RETRY_MS, retry)

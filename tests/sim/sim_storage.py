"""A simulated node's disk work: the real worker's steps, and checkpoints of committed state.

Stands for the driver's disk thread and for what the event loop writes itself, by the product's rule
and now and then by chance; tells the ghost what is durable when the worker says so.

Takes the place of the driver's `Checkpointer`, whose files would be too large and too rarely alike:
here nodes often have snapshots of one id, whose bytes differ.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from streammeta.controller.ids import EndOffset, SnapshotId
from streammeta.controller.journal.journal import Journal
from streammeta.controller.journal.snapshots import SnapshotWriter
from streammeta.controller.quorum import events
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.runtime.persistence import quorum_disk
from streammeta.controller.runtime.persistence.flush_scheduling import FlushPlace
from streammeta.controller.runtime.persistence.quorum_disk import FinishSnapshot
from streammeta.storage.durable_files import DiskFullError
from tests.sim.sim_store import decode_image, encode_image
from tests.sim.sim_time import violated

if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode

RETRY_FULL_MS = int(quorum_disk.RETRY_FULL_S * 1000)
_LATE_REPORTS = 0.2
"""Share of reports that reach the event loop a little after the work was done."""

_SLOW_ON_LOOP = 0.03
"""Share of flushes on the event loop that hold up the whole process for a while."""


class SimStorage:
    """The disk side of one life of a node."""

    def __init__(
        self,
        node: SimNode,
        journal: Journal,
        on_report: Callable[[quorum_disk.CoreReport | quorum_disk.StateWritten], None],
        on_full: Callable[[DiskFullError | None], None],
    ) -> None:
        """Take the callbacks of a `JournalThread`."""
        self._node = node
        self._world = node.world
        self._on_report = on_report
        self._on_full = on_full
        self._worker = quorum_disk.DiskWorker(journal)
        self._place = FlushPlace()
        self._haste = self._world.rngs.disk.choice((0.0, 0.5, 0.9, 1.0))
        """Share of appends for which the rule of the place is asked in this life."""
        self._here: list[events.AppendLog] = []
        """Appends that the event loop is about to write itself."""
        self._given = 0
        """Number of items of the queue not taken yet, for the rule."""
        self._queue: list[quorum_disk.Work] = []
        self._left: tuple[quorum_disk.Work, ...] = ()
        """What waits for room on the disk."""
        self._is_working = False
        self._is_full = False
        self._full_until = 0
        self._full_since: DiskFullError | None = None
        self._is_retrying = False
        """Whether room is looked for again later."""
        self._shortage_at_start = journal.reserve.shortage
        self._writes: deque[quorum_disk.Write] = deque()
        """What is not durable yet."""

    @property
    def is_idle(self) -> bool:
        """Whether everything ever submitted is durable."""
        is_done = not (self._here or self._queue or self._left or self._is_working)
        return is_done and not self._writes

    # -- what the driver asks

    def start(self) -> None:
        """Begin; work is taken from the beginning. Tell of a disk that is full already.

        That comes from the disk's thread, so not before the driver has started.
        """
        if (shortage := self._shortage_at_start) is not None:
            self._is_full, self._full_since = True, shortage
            self._place.record_results(0, is_disk_full=True)
            self._node.later(0, lambda: self._on_full(shortage))
            self._retry_later()

    async def stop(self) -> None:
        """End; simulated processes never stop of their own accord."""

    def submit(self, work: quorum_disk.Work, *, is_awaited: bool = False) -> None:
        """Queue work behind everything queued before, or leave it to the loop if that is idle.

        Chunks of snapshots are read apart from it.
        Writes are remembered until they are durable.
        """
        if (kind := _COUNTED.get(type(work))) is not None:
            self._world.count(kind)
        if isinstance(work, events.ReadSnapshot):
            self._read_snapshot(work)
            return
        if isinstance(work, quorum_disk.Write):
            self._writes.append(work)
        if isinstance(work, events.AppendLog) and self._is_here(work):
            self._here.append(work)
            if is_awaited:
                self._write_here()
            elif len(self._here) == 1:
                asyncio.get_running_loop().call_soon(self._write_here)
        else:
            here, self._here = self._here, []
            self._give((*here, work))

    def _read_snapshot(self, work: events.ReadSnapshot) -> None:
        """Read a chunk, as a thread of its own does."""

        def read() -> None:
            for report in self._worker.run((work,)).reports:
                self._hand_on(report)

        self._node.later(self._world.disk_delay(), read)

    # -- on the event loop

    def _is_here(self, work: events.AppendLog) -> bool:
        if self._world.rngs.disk.random() >= self._haste:
            return False
        size = sum(batch.size for item in (*self._here, work) for batch in item.batches)
        return self._place.is_loop(size, self._world.timeline.now / 1000)

    def _write_here(self) -> None:
        """Write and flush at once; a slow flush keeps the process from all else meanwhile."""
        work, self._here = self._here, []
        if not work:
            return
        world, node = self._world, self._node
        is_slow = world.timeline.now < node.slow_disk_until or (
            world.profile.slow_disk and world.rngs.disk.random() < _SLOW_ON_LOOP
        )
        took = node.disk_delay() if is_slow else 0
        world.count("flushes on the event loop")
        progress = self._worker.run(work, may_refill=False)
        self._place.record_loop_flush(took / 1000, (world.timeline.now + took) / 1000)
        if progress.full is not None:
            self._give(progress.left)
        if took:
            world.count("slow flushes on the event loop")
            world.pause(node, took)
            node.later(0, lambda: self._hand_on_all(progress.reports))
        else:
            self._hand_on_all(progress.reports)

    def _hand_on_all(self, reports: Sequence[quorum_disk.Report]) -> None:
        for report in reports:
            self._hand_on(report)

    # -- working

    def _give(self, work: Sequence[quorum_disk.Work]) -> None:
        self._place.record_work()
        self._given += 1
        self._queue.extend(work)
        self._begin()

    def _begin(self) -> None:
        if not self._is_working and self._given:
            self._is_working = True
            self._node.later(self._node.disk_delay(), self._work)

    def _retry(self) -> None:
        self._full_until = 0
        self._is_retrying = False
        if not self._is_working:
            self._is_working = True
            self._work()

    def _work(self) -> None:
        """Carry out all that is queued and flush once, as the driver's disk thread does."""
        work = (*self._left, *self._queue)
        self._queue.clear()
        given, self._given = self._given, 0
        if self._world.timeline.now < self._full_until:
            self._take(self._worker.serve(work), self._full_since, given)
            return
        progress = self._worker.run(work, may_refill=not self._is_retrying)
        if self._world.rngs.disk.random() < _LATE_REPORTS:
            self._node.later(1, lambda: self._take(progress, progress.full, given))
        else:
            self._take(progress, progress.full, given)

    def _take(self, progress: quorum_disk.Progress, full: DiskFullError | None, given: int) -> None:
        self._place.record_results(given, is_disk_full=full is not None)
        if (full is not None) != self._is_full:
            self._is_full = full is not None
            self._on_full(full)
        self._left = progress.left
        if progress.full is not None:
            self._full_since = progress.full
            if progress.left:
                self._full_until = self._world.timeline.now + RETRY_FULL_MS
        if full is not None and not self._is_retrying:
            self._retry_later()
        for report in progress.reports:
            self._hand_on(report)
        self._is_working = False
        self._begin()

    def _hand_on(self, report: quorum_disk.Report) -> None:
        """Tell the ghost and the driver, in the order of the reports."""
        match report:
            case quorum_disk.DiskReadDone(read=read, batches=batches):
                read.done(batches)
                return
            case quorum_disk.SnapshotDropped():
                self._node.driver.sim_checkpointer.on_dropped()
                return
            case quorum_disk.StateWritten(token=token):
                self._note_state_written(token)
            case events.WriteDone(token=token):
                self._note_durable(token)
            case events.SnapshotInstalled():
                self._note_installed(report)
            case events.SnapshotTaken():
                self._world.count("snapshots taken")
        self._on_report(report)

    def _retry_later(self) -> None:
        self._world.count("writes refused by a full disk")
        self._is_retrying = True
        self._node.later(RETRY_FULL_MS, self._retry)

    # -- what became durable

    def _note_durable(self, token: int) -> None:
        ghost, key = self._world.ghost, self._node.key
        end: int = ghost.replicas[key].log.durable_end
        while self._writes and self._writes[0].token <= token:
            match self._writes.popleft():
                case events.AppendLog(batches=batches):
                    end = batches[-1].end_offset
                case events.TruncateLog(end_offset=cut):
                    end = min(end, cut)
                case events.PersistQuorumState(state=state):
                    self._note_state(state)
                case events.TrimLog(start_offset=start_offset):
                    self._check_trimmed(start_offset)
                case events.ClearDamage():
                    ghost.on_damage_cleared(key)
        # Writes queued since may have cut the log below `end`; on_truncate took that back.
        cuts = [write.end_offset for write in self._writes if isinstance(write, events.TruncateLog)]
        ghost.on_durable(key, min([end, *cuts]))

    def _note_state_written(self, token: int) -> None:
        """A state was written ahead of what waits for room, and with it all older ones."""
        self._world.count("quorum-states written on a full disk")
        for write in [write for write in self._writes if write.token <= token]:
            if isinstance(write, events.PersistQuorumState):
                self._writes.remove(write)
                self._note_state(write.state)

    def _note_state(self, state: QuorumState) -> None:
        node, ghost = self._node, self._world.ghost
        ghost.on_state(node.key, state)
        if state.leader_id == node.node_id:
            ghost.on_leader(node.key, node.life, state.epoch)

    def _check_trimmed(self, start_offset: EndOffset) -> None:
        """What the log no longer has must be in a snapshot that is durable and right."""
        key, disk, ghost = self._node.key, self._node.disk, self._world.ghost
        if disk.is_rotten():
            return
        for path in disk.durable_names():
            end, _, suffix = path.name.partition("-")
            if suffix.endswith(".checkpoint") and int(end) >= start_offset:
                data = disk.durable(path)
                assert data is not None
                image = decode_image(data)
                ghost.check_snapshot(key, image.snapshot_id, image.voters)
                ghost.ledger.check_image(key, image)
                return
        violated("the log reaches back to a snapshot", f"{key} trims to {start_offset}")

    def _note_installed(self, report: events.SnapshotInstalled) -> None:
        if report.voters is None:
            self._world.count("downloaded snapshots refused")
            self._world.ghost.on_install_rejected(self._node.key)
            return
        self._world.count("snapshots installed")
        self._world.ghost.on_installed(self._node.key, report.snapshot_id, report.voters)


_COUNTED: dict[type, str] = {
    quorum_disk.DiskRead: "log reads for delivery",
    events.ReadLog: "log reads for followers",
    events.ReadSnapshot: "snapshot chunks read",
    events.WriteSnapshotChunk: "snapshot chunks written",
}


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

    def on_loaded(self, _size: int) -> None:
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

"""A controller over a replicated log in memory, whose high watermark the test moves by hand."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from io import BytesIO
from typing import Any

from streammeta.controller.errors import BusyError, NotLeaderError
from streammeta.controller.ids import ClusterId, EndOffset, Epoch, SnapshotId
from streammeta.controller.metadata.api.requests import CreateStreams, NewStream, RegisterNode
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables.values import NodeIdentity
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.runtime.interfaces import SnapshotPoint
from streammeta.controller.runtime.quorum_errors import NoDiskSpaceError
from streammeta.controller.runtime.writer.bucket_permits import MarkerLease
from streammeta.controller.runtime.writer.controller import MetadataController
from tests.kit.waiting import ManualClock


class MemoryLog:
    """Stands in for the quorum; `commit` is what a majority's acknowledgements would do."""

    def __init__(self, controller: MetadataController) -> None:
        self._controller = controller
        self.epoch = Epoch(0)
        self.batches: list[Batch] = []
        self.next_offset = 0
        self.committed = 0
        self.refuse_appends = False
        self.is_short_of_space = False
        self.is_deposed = False

    def lead(self) -> None:
        """Begin an epoch, commit its leader-change record and claim leadership."""
        self.epoch = Epoch(self.epoch + 1)
        self._add(BatchKind.CONTROL, (b"leader change",))
        self.commit()
        self._controller.on_leadership_claimed(self.epoch)

    def lose_leadership(self, *, truncate: bool) -> None:
        """End the epoch; with `truncate` another leader overwrites what was not committed."""
        self._controller.on_leadership_lost()
        if truncate:
            self.batches = [batch for batch in self.batches if batch.end_offset <= self.committed]
            self.next_offset = self.committed

    def flush(self) -> None:
        """Everything is in the log already."""

    async def append_turn(self) -> None:
        """Every append is a batch here."""

    def append(self, payloads: Sequence[bytes], *, required_base_offset: int) -> int:
        """Append on the leader, as `ReplicatedLog` says."""
        assert required_base_offset == self.next_offset
        if self.refuse_appends:
            raise BusyError("the uncommitted log is full")
        self._add(BatchKind.DATA, tuple(payloads))
        return self.next_offset

    def tell_flushed(self, end_offset: int, told: Callable[[], None]) -> None:
        """Everything is flushed at once here."""
        assert end_offset <= self.next_offset
        told()

    def require_disk_space(self) -> None:
        """Refuse while the test says that disks are full."""
        if self.is_short_of_space:
            raise NoDiskSpaceError("the disks are full")

    def commit(self) -> None:
        """Let everything appended become committed."""
        fresh = [batch for batch in self.batches if batch.base_offset >= self.committed]
        self.committed = self.next_offset
        self._controller.on_committed(fresh, self.committed)

    async def read_barrier(self) -> int:
        """Prove leadership, unless the test has deposed this leader behind its back."""
        if self.is_deposed:
            raise self.leader_hint()
        return self.committed

    def leader_hint(self) -> NotLeaderError:
        """No other could lead."""
        return NotLeaderError()

    def hurry(self) -> None:
        """Entries are delivered by the test."""

    def snapshot_point(self) -> SnapshotPoint:
        """Where a snapshot of what the map holds now ends; each append is a batch here."""
        end_offset = self.next_offset if self._controller.is_active else self.committed
        return SnapshotPoint(
            SnapshotId(EndOffset(end_offset), self.epoch), ClusterId("test"), VoterSet()
        )

    def load(self, cluster_metadata: ClusterMetadata, clock: ManualClock) -> None:
        """Have the controller load a checkpoint of another map, and lead again."""
        source = MetadataController(
            cluster_metadata, clock
        )  # a checkpoint is made by its controller
        source.bind(self)
        self.lose_leadership(truncate=False)
        point = self.snapshot_point()
        file = BytesIO()
        source.freeze(point)(file)
        file.seek(0)
        self._controller.load(file, point.snapshot_id)()
        self.lead()

    def _add(self, kind: BatchKind, payloads: tuple[bytes, ...]) -> None:
        batch = Batch(EndOffset(self.next_offset), self.epoch, kind, payloads)
        self.batches.append(batch)
        self.next_offset = batch.end_offset


NODE = NodeIdentity(7, 1)
REGISTER = RegisterNode(node=NODE)


class CommittingLog(MemoryLog):
    """Commits appended batches at the loop's next turn, unless held."""

    def __init__(self, controller: MetadataController) -> None:
        super().__init__(controller)
        self.is_held = False

    def append(self, payloads: Sequence[bytes], *, required_base_offset: int) -> int:
        end_offset = super().append(payloads, required_base_offset=required_base_offset)
        asyncio.get_running_loop().call_soon(self._commit_soon)
        return end_offset

    def release(self) -> None:
        """Commit what was held back, and what comes."""
        self.is_held = False
        self.commit()

    def _commit_soon(self) -> None:
        if not self.is_held and self.next_offset > self.committed:
            self.commit()


def create(request_id: str, count: int = 1) -> CreateStreams:
    return CreateStreams(request_id=request_id, node=NODE, streams=(NewStream(),) * count)


def new_controller(lease: MarkerLease | None = None) -> tuple[MetadataController, MemoryLog]:
    controller = MetadataController(ClusterMetadata(), ManualClock(), lease=lease)
    log = MemoryLog(controller)
    controller.bind(log)
    return controller, log


async def leading(lease: MarkerLease | None = None) -> tuple[MetadataController, MemoryLog]:
    """Return a leader at which `NODE` is registered."""
    controller, log = new_controller(lease)
    log.lead()
    await committed(log, controller.write(REGISTER))
    return controller, log


def new_follower(log: MemoryLog) -> MetadataController:
    """Return a controller that takes nothing from the log unless it is given."""
    follower = MetadataController(ClusterMetadata(), ManualClock())
    follower.bind(log)
    return follower


async def submit(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a request and let it run until it waits."""
    task = asyncio.create_task(work)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def committed(log: MemoryLog, work: Coroutine[Any, Any, Any]) -> Any:
    task = await submit(work)
    log.commit()
    return await task

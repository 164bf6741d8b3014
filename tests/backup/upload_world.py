"""A leader over a log in memory and its continuous backup; leaders change, logs are trimmed."""

from __future__ import annotations

import io
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from streammeta.controller.backup.archive import Archive
from streammeta.controller.backup.chains import newest_chain
from streammeta.controller.backup.replaying import replay
from streammeta.controller.backup.uploader import Backup
from streammeta.controller.backup.verification import verify
from streammeta.controller.ids import ClusterId, EndOffset, SnapshotId
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables.values import NodeIdentity
from streammeta.controller.quorum.messages import Batch
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.runtime.interfaces import SnapshotPoint
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_store.protocol.base import Body, Tags
from tests.backup.backup_world import FOLDER
from tests.kit.memory_store import MemoryObjectStore
from tests.lifecycle.lifecycle_world import World

DAY_MS = 86_400_000

DOWN = StoreUnavailableError("the bucket is away")


class FlakyStore(MemoryObjectStore):
    """A bucket that is away for the keys it is told to, before or after they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.down_for = ""
        self.is_late = False
        self.put_keys: list[str] = []

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, tags: Tags | None = None
    ) -> None:
        is_down = bool(self.down_for) and self.down_for in key
        if is_down and not self.is_late:
            raise DOWN
        super().put(key, data, if_absent=if_absent, tags=tags)
        self.put_keys.append(key)
        if is_down:
            raise DOWN


@dataclass(slots=True)
class MemorySource:
    """Reads the log of a world, committed or not; its checkpoints are on a disk of their own."""

    world: World
    start_offset: int = 0
    checkpoints: dict[SnapshotId, bytes] = field(default_factory=dict)

    async def read(self, start_offset: int, max_bytes: int) -> tuple[Batch, ...]:
        found: list[Batch] = []
        for batch in self.world.log.batches:
            if batch.base_offset < start_offset or start_offset < self.start_offset:
                continue
            if found and sum(range_.size for range_ in found) + batch.size > max_bytes:
                break
            found.append(batch)
        return tuple(found)

    @property
    def newest_checkpoint(self) -> SnapshotId | None:
        return max(self.checkpoints, default=None)

    def open_checkpoint(self, snapshot_id: SnapshotId) -> BinaryIO:
        if snapshot_id not in self.checkpoints:
            raise FileNotFoundError(snapshot_id.file_name)
        return io.BytesIO(self.checkpoints[snapshot_id])


class UploadWorld:
    """One leader at a time, its backup, and the bucket that all of them write to."""

    def __init__(self, store: MemoryObjectStore | None = None) -> None:
        self.world = World()
        self.store = store or MemoryObjectStore(self.world.clock.wall_ms)
        self.source = MemorySource(self.world)
        self.backup = self._new_backup()
        self._written = 0

    def _new_backup(self) -> Backup:
        return Backup(
            self.world.controller,
            self.source,
            self.store,
            self.world.clock,
            cluster_id=ClusterId(FOLDER.cluster_id),
            cluster_uuid=lambda: FOLDER.cluster_uuid,
            writer_version="0",
            interval_ms=10_000,
            keep_ms=DAY_MS,
        )

    @property
    def archive(self) -> Archive:
        return Archive(self.store, FOLDER)

    @property
    def committed(self) -> int:
        return self.world.log.committed

    async def start(self) -> UploadWorld:
        await self.world.start()
        return self

    async def write(self, count: int = 1) -> None:
        """Commit some entries, each in a batch."""
        for _ in range(count):
            await self.world.write(self._registration())

    async def write_together(self, count: int) -> None:
        """Commit some entries in one batch."""
        await self.write(count)
        batches = self.world.log.batches
        payloads = tuple(payload for batch in batches[-count:] for payload in batch.payloads)
        batches[-count:] = [replace(batches[-count], payloads=payloads)]

    def append_uncommitted(self) -> None:
        """Append an entry that no majority has."""
        self.world.log.is_held = True
        self.world.controller.submit((self._registration(),))

    def _registration(self) -> requests.RegisterNode:
        self._written += 1
        return requests.RegisterNode(node=NodeIdentity(2_000, self._written))

    def change_leader(self) -> None:
        """Let another controller lead, which has what was committed."""
        self.world.controller.on_leadership_lost()
        self.world.succeed()
        self.backup = self._new_backup()
        self.world.log.lead()

    def checkpoint(self) -> SnapshotId:
        """Write a checkpoint of what is committed on this controller's disk."""
        log = self.world.log
        found = SnapshotId(EndOffset(log.committed), log.epoch)
        replica = self._replica(log.committed)
        file = io.BytesIO()
        replica.freeze(SnapshotPoint(found, ClusterId(FOLDER.cluster_id), VoterSet()))(file)
        self.source.checkpoints[found] = file.getvalue()
        return found

    def trim(self) -> None:
        """Remove the log below the newest checkpoint, and the older ones."""
        newest = self.source.newest_checkpoint
        assert newest is not None
        self.source.start_offset = newest.end_offset
        self.source.checkpoints = {newest: self.source.checkpoints[newest]}

    async def step(self) -> None:
        """Let an interval pass."""
        self.world.clock.advance(10_000)
        await self.backup.step()

    def _replica(self, end_offset: int) -> MetadataController:
        """Return a controller that has replayed the log below an offset."""
        replica = MetadataController(ClusterMetadata(), self.world.clock)
        batches = [batch for batch in self.world.log.batches if batch.end_offset <= end_offset]
        replica.on_committed(batches, end_offset)
        return replica

    def restorable_end(self) -> int:
        """Return how far the backup can be restored; it must be whole, and a prefix of the log."""
        inventory = self.archive.inventory()
        for name in inventory.segments:
            assert name.end_offset <= self.committed, f"{name} holds what is not committed"
        verified = verify(inventory, self.archive, is_all=True)
        assert verified.damages == ()
        chain = newest_chain(inventory)
        if chain is None:
            return -1
        replayed = replay(chain, self.archive)
        wanted = self._replica(chain.end_offset)
        assert replayed.cluster_metadata.state_hash() == wanted.cluster_metadata.state_hash()
        assert replayed.position.log_hash == wanted._log_hash.value
        return chain.end_offset

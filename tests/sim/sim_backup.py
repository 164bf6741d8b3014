"""Backup of the simulated cluster: the product's uploader on every node, one bucket, its restorer.

The bucket fails, does what it was asked and says that it failed, goes away and comes back; leaders
overlap in it. Whatever is put must be committed, and a file must be there before its manifest. At
random moments, and at the end, points are restored and compared with the committed log.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO
from unittest.mock import patch

from streammeta.controller.backup import replaying, restoring, uploader, verification
from streammeta.controller.backup.archive import Archive
from streammeta.controller.backup.chains import chain_to, newest_chain
from streammeta.controller.backup.errors import BackupDamagedError, BackupError
from streammeta.controller.backup.replaying import BackupFiles, Replayed, replay
from streammeta.controller.backup.segments import Position, Writing, decode, new_segment
from streammeta.controller.backup.uploader import Backup
from streammeta.controller.backup.verification import verify
from streammeta.controller.journal.errors import BadSnapshotError
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables.values import ObjectState
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.records.codec import encode_records
from streammeta.controller.runtime.replication.log_source import LogSource
from streammeta.storage.cluster_files.backup_files import (
    MANIFEST_SUFFIX,
    CheckpointManifest,
    CheckpointName,
    Folder,
    SegmentName,
    parse_key,
)
from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_store.protocol.base import Body, DeleteResult, Tags
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.restore_plans import planned
from tests.sim.sim_controller import MapClock
from tests.sim.sim_store import Store, StoreImage, decode_image, record_of
from tests.sim.sim_time import check, violated
from tests.sim.sim_watch import CLUSTER

if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode
    from tests.sim.sim_world import World

FOLDER = Folder(CLUSTER, "8f14e45f-ceea-467f-a0e6-0f1e2d3c4b5a")
INTERVAL_MS = 40
_KEEP_MS = (50, 10_000)
_SEGMENT_BYTES = 250
_READ_BYTES = 100
_LOOK_MS = 150
_AWAY_MS, _THERE_MS = 900, 400
_FAILS = 0.04
_POINTS = 4
_SLOW = 0.05
"""Share of calls that are on their way for long, so that their senders may be deposed."""


class Bucket(MemoryObjectStore):
    """What all leaders write to; says at each put whether it may be."""

    def __init__(self, world: World) -> None:
        super().__init__(lambda: 1_000_000 + world.timeline.now)
        self._world = world
        self._rng = world.rngs.backup
        self.is_away = False

    def until(self, deadline: float) -> Bucket:
        """Real time does not count here."""
        return self

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, tags: Tags | None = None
    ) -> None:
        self._check_put(key)
        self._fail()
        super().put(key, data, if_absent=if_absent, tags=tags)
        if key.endswith(".checkpoint.json"):
            self._world.count("checkpoints in the backup")
        self._fail()

    def delete_many(self, keys: Iterable[str]) -> DeleteResult:
        self._fail()
        wanted = tuple(keys)
        there = self.objects()
        lone = [key for key in wanted if key + MANIFEST_SUFFIX in there]
        check(not lone, "a manifest goes before its file", f"{lone}")
        return super().delete_many(wanted)

    def _fail(self) -> None:
        if self._world.profile.backups and (self.is_away or self._rng.random() < _FAILS):
            self._world.count("calls of the backup's bucket that failed")
            raise StoreUnavailableError("the bucket is away")

    def _check_put(self, key: str) -> None:
        parsed = parse_key(key)
        if parsed is None:
            violated("keys of a backup are known", key)
        _, name, is_manifest = parsed
        committed = self._world.ghost.ledger.end
        check(name.end_offset <= committed, "only what is committed is backed up", f"{name}")
        if is_manifest:
            there = key.removesuffix(MANIFEST_SUFFIX) in self.objects()
            check(there, "a file is there before its manifest", key)


class SimBackup(Backup):
    """The uploader of one life of a node; its calls take simulated time."""

    def __init__(self, node: SimNode) -> None:
        backups = node.world.backups
        assert backups is not None
        super().__init__(
            node.service.controller,
            LogSource(node.driver, node.journal),
            backups.bucket,
            MapClock(node),
            cluster_id=CLUSTER,
            cluster_uuid=lambda: FOLDER.cluster_uuid,
            writer_version="0",
            interval_ms=INTERVAL_MS,
            keep_ms=backups.keep_ms,
        )
        self._node = node
        self._rng = node.world.rngs.backup

    async def _call(self, term: Any, call: Callable[[Any], Any], timeout_s: float = 0.0) -> Any:
        await asyncio.sleep(self._some_delay())
        try:
            result = call(self._store)  # a term that is over stops nothing on its way
        except Exception:
            self._require(term)
            raise
        await asyncio.sleep(self._some_delay())
        self._require(term)
        return result

    async def _read(self, term: Any, *where: int) -> list[Batch]:
        try:
            return await super()._read(term, *where)
        except uploader._TrimmedError:
            self._node.world.count("logs trimmed ahead of the backup")
            raise

    def _some_delay(self) -> float:
        return self._rng.randrange(400 if self._rng.random() < _SLOW else 8) / 1000


class Backups:
    """The bucket of a run, its weather, and what must be restorable from it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rngs.backup
        self.bucket = Bucket(world)
        self.keep_ms = self._rng.choice(_KEEP_MS)
        self._reached = 0
        self._patches = ExitStack()
        self._patches.enter_context(patch.object(uploader, "SEGMENT_BYTES", _SEGMENT_BYTES))
        self._patches.enter_context(patch.object(uploader, "READ_BYTES", _READ_BYTES))
        self._patches.enter_context(patch.object(uploader, "checkpoint_file", checkpoint_file))
        self._patches.enter_context(
            patch.object(uploader, "checkpoint_log_hash", checkpoint_log_hash)
        )

    def close(self) -> None:
        """Leave the product as it was."""
        self._patches.close()

    @property
    def archive(self) -> Archive:
        return Archive(self.bucket, FOLDER)

    def begin(self) -> None:
        """Let the bucket come and go, and restore now and then."""
        self._world.timeline.later(1 + self._rng.randrange(_THERE_MS), self._come_or_go)
        self._world.timeline.later(_LOOK_MS, self._look)

    def _come_or_go(self) -> None:
        self.bucket.is_away = not self.bucket.is_away and bool(self._world.profile.backups)
        if self._world.profile.backups:
            longest_ms = _AWAY_MS if self.bucket.is_away else _THERE_MS
            self._world.timeline.later(1 + self._rng.randrange(longest_ms), self._come_or_go)

    def _look(self) -> None:
        if self._world.clients_may_go_on:
            self.restore_some()
            self._world.timeline.later(_LOOK_MS, self._look)

    # -- what must hold

    @property
    def end(self) -> int:
        """The end of what can be restored; never less than before."""
        chain = newest_chain(self.archive.inventory())
        end = 0 if chain is None else chain.end_offset
        check(end >= self._reached, "what can be restored stays so", f"{end} after {self._reached}")
        self._reached = end
        return end

    def restore_some(self) -> None:
        """Restore the newest point and some others, each to what the committed log has there."""
        self._check_offers()
        ledger, ends = self._world.ghost.ledger, [self.end]
        if ledger.batches:
            some = self._rng.choices(ledger.batches, k=_POINTS)
            ends += [batch.end_offset for batch in some]
        for end in ends:
            replayed = self._restored(end)
            if replayed is not None:
                self._world.count("points restored")
                self._compare(replayed, end)

    def _check_offers(self) -> None:
        """Whatever point is asked for: the chain that is offered reaches it without a gap."""
        inventory = self.archive.inventory()
        for batch in self._world.ghost.ledger.batches:
            chain = chain_to(inventory, batch.end_offset)
            if chain is not None:
                reached = chain.start_offset
                for segment in chain.segments:
                    if segment.start_offset <= reached:
                        reached = segment.end_offset
                there = f"{reached} instead of {batch.end_offset}"
                check(reached >= batch.end_offset, "no chain has a gap", there)

    def _restored(self, end_offset: int) -> Replayed | None:
        chain = chain_to(self.archive.inventory(), end_offset)
        if chain is None:
            self._world.count("points before or between chains")
            return None
        try:
            with _stores():
                return replay(chain, self.archive, end_offset=end_offset)
        except BackupDamagedError as error:
            violated("a point that is offered can be restored", f"{end_offset}: {error}")

    def _compare(self, replayed: Replayed, end_offset: int) -> None:
        ledger, who = self._world.ghost.ledger, "the backup"
        restored: Any = replayed.cluster_metadata
        found = replayed.position
        check(found.end_offset == end_offset, "a point is restored to its end", f"{found}")
        if end_offset:
            ledger.check_state(who, end_offset, restored.hash, found.log_hash)
        if restored.has_map:
            ledger.map_watch.check_replica(who, end_offset, restored.map.state_hash())
            check_jumps(replayed, restored.map, ledger)

    def check_finally(self) -> None:
        """All is there and whole; another history that writes into it is found."""
        self.restore_some()
        verified = self._verify()
        check(not verified, "the backup is whole", f"{verified}")
        forged = self._forge()
        if forged is not None:
            check(bool(self._verify()), "another history is found", f"{forged}")
            self.archive.delete([forged])
            self._world.count("forged segments found")

    def _verify(self) -> tuple[BackupDamagedError, ...]:
        with _stores():
            return verify(self.archive.inventory(), self.archive, is_all=True).damages

    def _forge(self) -> SegmentName | None:
        """Put a good segment of another history, which ends where one that is there does."""
        segments = self.archive.inventory().segments
        for name in self._rng.sample(segments, len(segments)):
            batches = decode(*self.archive.segment(name))
            if len(batches) > 1 and batches[-1].kind is BatchKind.DATA:
                start = batches[-1].base_offset
                before = Position(start, self._world.ghost.ledger.log_hash_at(start))
                writing = Writing(
                    folder=FOLDER, first_ms=0, last_ms=0, feature_level=1, writer_version="0"
                )
                data, manifest = new_segment([_forged(batches[-1])], before, writing)
                if manifest.name not in segments:
                    self.archive.put(data, manifest)
                    return manifest.name
        return None


def _forged(batch: Batch) -> Batch:
    payload = encode_records((record_of("put", "forged", "1"),))
    payloads = (payload,) * len(batch.payloads)
    return Batch(batch.base_offset, batch.epoch, batch.kind, payloads)


# -- checkpoints, whose files are the simulator's own


class _Restored(Store):
    """A store that is replayed from a backup."""

    @property
    def has_map(self) -> bool:
        return self._map is not None

    def state_hash(self) -> bytes:
        return _hash_of(self.hash)


@dataclass(frozen=True, slots=True)
class _Loaded:
    cluster_metadata: Store
    log_hash: bytes


@contextmanager
def _stores() -> Iterator[None]:
    """Let restores replay the simulator's state machine."""
    with (
        patch.object(replaying, "ClusterMetadata", _Restored),
        patch.object(replaying, "load_checkpoint", _load_checkpoint),
        patch.object(verification, "load_checkpoint", _load_checkpoint),
    ):
        yield


def _load_checkpoint(
    name: CheckpointName, files: BackupFiles
) -> tuple[_Loaded, CheckpointManifest]:
    data, manifest = files.checkpoint(name)
    image = decode_image(data)
    if (image.snapshot_id.end_offset, image.snapshot_id.epoch) != (name.end_offset, name.epoch):
        raise BackupDamagedError(name, f"it is {image.snapshot_id}")
    return _Loaded(_Restored.of(image), image.log_hash), manifest


def checkpoint_log_hash(file: BinaryIO) -> bytes:
    """Stand in for the product's, which reads real checkpoints."""
    return _image(file.read()).log_hash


def _image(data: bytes) -> StoreImage:
    try:
        return decode_image(data)
    except BadSnapshotError as error:
        raise BackupError(f"a checkpoint can't be backed up: {error}") from error


def checkpoint_file(
    file: BinaryIO, folder: Folder, *, created_ms: int, feature_level: int, writer_version: str
) -> tuple[bytes, CheckpointManifest]:
    """Stand in for the product's, which reads real checkpoints."""
    data = file.read()
    image = _image(data)
    return data, CheckpointManifest(
        cluster_id=folder.cluster_id,
        cluster_uuid=folder.cluster_uuid,
        end_offset=image.snapshot_id.end_offset,
        epoch=image.snapshot_id.epoch,
        created_ms=created_ms,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        log_hash=image.log_hash.hex(),
        state_hash=_hash_of(image.hash).hex(),
        feature_level=feature_level,
        writer_version=writer_version,
    )


def _hash_of(store_hash: int) -> bytes:
    return store_hash.to_bytes(8, "big")


if TYPE_CHECKING:
    from tests.sim.sim_ledger import Ledger


def check_jumps(replayed: Replayed, cluster_metadata: ClusterMetadata, ledger: Ledger) -> None:
    """Ids, offsets and epochs of a restored cluster are above all of the committed history."""
    view, committed = cluster_metadata.freeze(), ledger.store.map
    next_object = committed.next_object_id
    plan = planned(replayed, next_object, cluster_metadata)
    sections = restoring.restore_sections(view, plan)
    after = ClusterMetadata.from_sections(sections, plan.end_offset)
    check(after.next_object_id >= next_object, "object ids jump", f"{after.next_object_id}")
    counters, known = sections["counters"], committed.freeze().sections()["counters"]
    for name in ("next_stream_id", "last_node_id"):
        was, is_ = int(known[name][0]), int(counters[name][0])
        check(is_ > was, "ids of streams and brokers jump", f"{name}: {is_} after {was}")
    check(plan.end_offset > ledger.end, "offsets jump", f"{plan.end_offset}")
    _check_known(after, committed, plan.undecided_from)


def _check_known(after: ClusterMetadata, committed: ClusterMetadata, undecided_from: int) -> None:
    """An object that is committed now is known after the restore, or undecided."""
    described: Any = committed.query(r.DescribeObjects())
    ids = tuple(item.object_id for item in described.objects if item.object_id < undecided_from)
    if not ids:
        return
    states: Any = after.query(r.CheckObjects(object_ids=ids))
    for object_id, state in zip(ids, states.states, strict=True):
        known = f"object {object_id} below {undecided_from}"
        check(state is not ObjectState.REMOVED, "what lives is not taken for an orphan", known)

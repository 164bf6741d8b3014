"""A log of random committed batches, the map at each of their ends, and backups of it in memory."""

from __future__ import annotations

import functools
import hashlib
import io
from dataclasses import dataclass, field
from random import Random

from streammeta.controller.backup.archive import Archive
from streammeta.controller.backup.segments import Position, Writing, advance_position, new_segment
from streammeta.controller.ids import ClusterId, EndOffset, Epoch, SnapshotId
from streammeta.controller.metadata.sections.frozen import FrozenMetadata
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.runtime.interfaces import SnapshotPoint
from streammeta.controller.runtime.persistence.metadata_checkpoint import FrozenCheckpoint
from streammeta.controller.runtime.persistence.state_hashes import EMPTY_LOG_HASH
from streammeta.storage.cluster_files.backup_files import CheckpointManifest, Folder, Manifest
from tests.kit.memory_store import MemoryObjectStore
from tests.metadata.map_pair import Pair
from tests.metadata.random_requests import RandomRequests

FOLDER = Folder("test", "8f14e45f-ceea-467f-a0e6-0f1e2d3c4b5a")
START_MS = 1_700_000_000_000


@dataclass(slots=True)
class RandomLog:
    """A committed log; `ends`, `views` and `positions` are those of its beginning and batches."""

    rng: Random
    batches: list[Batch] = field(default_factory=list)
    views: list[FrozenMetadata] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)

    @property
    def ends(self) -> list[int]:
        return [position.end_offset for position in self.positions]

    def view_at(self, end_offset: int) -> FrozenMetadata:
        return self.views[self.ends.index(end_offset)]

    def epoch_at(self, end_offset: int) -> Epoch:
        return self.batches[self.ends.index(end_offset) - 1].epoch

    def between(self, start_offset: int, end_offset: int) -> list[Batch]:
        return [batch for batch in self.batches if start_offset <= batch.base_offset < end_offset]


def random_log(seed: int, batch_count: int = 40) -> RandomLog:
    """Return a log whose batches hold some entries each, or a message of the quorum's own."""
    made = _made_log(seed, batch_count)
    rng = Random()
    rng.setstate(made.rng.getstate())
    return RandomLog(rng, list(made.batches), list(made.views), list(made.positions))


@functools.cache  # nearly every test of backups wants one of the same few, of immutable parts
def _made_log(seed: int, batch_count: int) -> RandomLog:
    rng = Random(seed)
    log, pair, requests, epoch = RandomLog(rng), Pair(), RandomRequests(rng), Epoch(1)
    log.views.append(pair.map.freeze())
    log.positions.append(Position(0, EMPTY_LOG_HASH))
    waiting = iter(requests.start(pair.model))
    while len(log.batches) < batch_count:
        base, payloads = log.ends[-1], list[bytes]()
        kind = BatchKind.DATA if rng.random() < 0.9 else BatchKind.CONTROL
        if kind is BatchKind.CONTROL:
            epoch, payloads = Epoch(epoch + 1), [b'{"type":"leader-change"}']
        while kind is BatchKind.DATA and len(payloads) < rng.choice((1, 1, 2, 5)):
            pair.now += rng.choice((1, 50))
            request = next(waiting, None) or requests.any(pair.model)
            known = len(pair.log)
            pair.write(request, base + len(payloads))
            payloads += [payload for _, payload in pair.log[known:]]
        batch = Batch(EndOffset(base), epoch, kind, tuple(payloads))
        log.batches.append(batch)
        log.views.append(pair.map.freeze())
        log.positions.append(advance_position(log.positions[-1], [batch]))
    return log


@dataclass(slots=True)
class Backup:
    """Backup of a log in a store in memory; its times count batches, a second each."""

    log: RandomLog
    store: MemoryObjectStore = field(default_factory=MemoryObjectStore)

    @property
    def archive(self) -> Archive:
        return Archive(self.store, FOLDER)

    def put_segment(self, start_offset: int, end_offset: int) -> None:
        """Store the batches between two ends, as some leader would."""
        batches = self.log.between(start_offset, end_offset)
        before = self.log.positions[self.log.ends.index(start_offset)]
        last_ms = self.ms_at(end_offset)
        writing = Writing(
            folder=FOLDER,
            first_ms=self.ms_at(start_offset),
            last_ms=last_ms,
            feature_level=2,
            writer_version="0",
        )
        self._put_at(last_ms, *new_segment(batches, before, writing))

    def put_checkpoint(self, end_offset: int) -> None:
        """Store a checkpoint of the map at an end."""
        name = SnapshotId(EndOffset(end_offset), self.log.epoch_at(end_offset))
        view = self.log.view_at(end_offset)
        log_hash = self.log.positions[self.log.ends.index(end_offset)].log_hash
        file = io.BytesIO()
        FrozenCheckpoint(SnapshotPoint(name, ClusterId("test"), VoterSet()), view, log_hash).write(
            file
        )
        data, now_ms = file.getvalue(), self.ms_at(end_offset)
        manifest = CheckpointManifest(
            cluster_id=FOLDER.cluster_id,
            cluster_uuid=FOLDER.cluster_uuid,
            end_offset=end_offset,
            epoch=name.epoch,
            created_ms=now_ms,
            size=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            log_hash=log_hash.hex(),
            state_hash=view.digest().hex(),
            feature_level=2,
            writer_version="0",
        )
        self._put_at(now_ms, data, manifest)

    def ms_at(self, end_offset: int) -> int:
        return START_MS + 1_000 * self.log.ends.index(end_offset)

    def put_randomly(self, segments_max: int = 6) -> None:
        """Store the whole log from some beginning on, in pieces that two leaders may have made."""
        rng, ends = self.log.rng, self.log.ends
        start = rng.choice((0, 0, rng.choice(ends[1 : len(ends) // 2])))
        if start:
            self.put_checkpoint(start)
        for end in rng.sample(ends[ends.index(start) + 1 :], 3):
            self.put_checkpoint(end)
        leaders = [start] * rng.choice((1, 2))
        while min(leaders) < ends[-1]:
            at = leaders.index(min(leaders))
            later = [end for end in ends if end > leaders[at]][: 1 + len(ends) // segments_max]
            end = rng.choice(later)
            self.put_segment(leaders[at], end)
            leaders[at] = end

    def _put_at(self, now_ms: int, data: bytes, manifest: Manifest) -> None:
        self.store._now_ms = lambda: now_ms
        self.archive.put(data, manifest)

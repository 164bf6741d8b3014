"""Time and memory of `streammeta restore plan` and `apply`, over a backup made for it.

The backup is a checkpoint of a map with streams and as many objects, and a segment of commits of
one range behind it. The commands run as children; their memory is what the kernel says of them.
"""

import io
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks.figures import Table
from scripts.benchmarks.map_driver import NOW_MS, MapDriver
from streammeta.cli.local_cluster import ChildFailedError
from streammeta.controller.backup.archive import Archive
from streammeta.controller.backup.checkpoints import checkpoint_file
from streammeta.controller.backup.segments import Position, Writing, new_segment
from streammeta.controller.ids import ClusterId, EndOffset, Epoch, SnapshotId
from streammeta.controller.metadata.cluster_map import ClusterMap
from streammeta.controller.metadata.requests import WriteRequest
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.records.codec import encode_records
from streammeta.controller.runtime.interfaces import SnapshotPoint
from streammeta.controller.runtime.map_checkpoint import FrozenCheckpoint
from streammeta.controller.runtime.state_hashes import EMPTY_LOG_HASH
from streammeta.storage.backup_files import Folder
from streammeta.storage.bucket_marker import BucketMarker, create_marker
from streammeta.storage.object_format.object_key import cluster_namespace
from streammeta.storage.object_store.address import open_object_store

COMMITS = 50_000
"""Commits behind the checkpoint, at most one a stream."""

FOLDER = Folder("bench", str(uuid.UUID(int=1)))
EPOCH = Epoch(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """What one restore took; memory is the peak of the process."""

    entities: int
    commits: int
    backup_mb: float
    plan_s: float
    plan_peak_mb: float
    apply_s: float
    apply_peak_mb: float

    def figures(self) -> Iterator[tuple[str, float]]:
        """Yield the measured values by name."""
        for name in ("plan_s", "plan_peak_mb", "apply_s", "apply_peak_mb"):
            yield name, getattr(self, name)


def measure(root: Path, entities: int) -> Restore:
    """Make a backup below `root`, and restore it; blocks.

    Raises:
        ChildFailedError: a command failed.
    """
    commits = min(COMMITS, entities)
    make_backup(root, entities, commits=commits)
    at = ("--from", f"file://{root / 'backups'}", "--store", f"file://{root / 'bucket'}")
    plan = str(root / "plan.json")
    new = ("--new-cluster-id", "restored", "--voters", "1@127.0.0.1:9", "--plan", plan)
    _, plan_s, plan_mb = restore_command("plan", *at, *new)
    made = ("--plan", plan, "--node-id", "1", "--data-dir", str(root / "data"))
    _, apply_s, apply_mb = restore_command("apply", *at, *made)
    size = sum(file.stat().st_size for file in (root / "backups").rglob("*") if file.is_file())
    return Restore(
        entities=entities,
        commits=commits,
        backup_mb=round(size / 1e6, 1),
        plan_s=round(plan_s, 2),
        plan_peak_mb=round(plan_mb, 1),
        apply_s=round(apply_s, 2),
        apply_peak_mb=round(apply_mb, 1),
    )


def table(restores: Sequence[Restore]) -> Table:
    """Return what is printed of restores."""
    return Table(
        title="Restores of a checkpoint and the commits behind it",
        columns=(
            *("streams and objects", "commits", "backup MB", "plan s", "plan peak MB"),
            *("apply s", "apply peak MB"),
        ),
        rows=tuple(
            (
                f"{each.entities:,}",
                f"{each.commits:,}",
                each.backup_mb,
                *(value for _, value in each.figures()),
            )
            for each in restores
        ),
    )


class _Recorded(MapDriver):
    """Keeps the entries that it makes from some time on."""

    entries: list[tuple[int, bytes]] | None = None

    def write(self, request: WriteRequest) -> Any:
        offset = self.map.applied_end_offset
        decision = self.map.decide(request, NOW_MS, offset)
        if decision.records:
            if self.entries is not None:
                self.entries.append((offset, encode_records(decision.records)))
            self.map.apply(offset, decision.records)
            self.map.forget_undo(offset + 1)
        return decision.answer


def make_backup(root: Path, streams: int, *, commits: int, has_objects: bool = True) -> int:
    """Make a backup and the bucket it belongs to below `root`; blocks.

    Each stream has an object if `has_objects`. Return the next object id of the map.
    """
    for name in ("backups", "bucket"):
        (root / name).mkdir()
    bucket = open_object_store(f"file://{root / 'bucket'}")
    namespace = cluster_namespace(FOLDER.cluster_id)
    marker = BucketMarker(
        cluster_id=FOLDER.cluster_id,
        cluster_uuid=FOLDER.cluster_uuid,
        namespace=namespace,
        created_ms=NOW_MS,
    )
    create_marker(bucket, marker)
    archive = Archive(open_object_store(f"file://{root / 'backups'}"), FOLDER)
    driver = _Recorded(ClusterMap())
    driver.add_streams(streams)
    if has_objects:
        driver.add_stream_objects(streams)
    _put_checkpoint(archive, driver.map)
    start = Position(driver.map.applied_end_offset, EMPTY_LOG_HASH)
    if not commits:
        return driver.map.next_object_id
    driver.entries = []
    for stream_id in range(commits):
        driver.commit(driver.upload(stream_id, 1))
    batches = [
        Batch(EndOffset(offset), EPOCH, BatchKind.DATA, (payload,))
        for offset, payload in driver.entries
    ]
    writing = Writing(
        folder=FOLDER, first_ms=NOW_MS, last_ms=NOW_MS, feature_level=1, writer_version="0"
    )
    archive.put(*new_segment(batches, start, writing))
    return driver.map.next_object_id


def _put_checkpoint(archive: Archive, cluster_map: ClusterMap) -> None:
    name = SnapshotId(EndOffset(cluster_map.applied_end_offset), EPOCH)
    point = SnapshotPoint(name, ClusterId(FOLDER.cluster_id), VoterSet())
    file = io.BytesIO()
    FrozenCheckpoint(point, cluster_map.freeze(), EMPTY_LOG_HASH).write(file)
    file.seek(0)
    made = checkpoint_file(file, FOLDER, created_ms=NOW_MS, feature_level=1, writer_version="0")
    archive.put(*made)


def restore_command(*words: str) -> tuple[dict[str, Any], float, float]:
    """Run `streammeta restore`; return its answer, its seconds, and its peak of memory in MB."""
    command = [sys.executable, "-m", "streammeta.cli.main", "restore", *words, "--format", "json"]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        text = output.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise ChildFailedError(f"streammeta restore {words[0]} failed: {text}")
    return json.loads(text), time.monotonic() - began, usage.ru_maxrss * 1024 / 1e6

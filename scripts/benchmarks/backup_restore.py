"""Time and memory of `streammeta restore`, with backups and buckets made for it.

For `plan` and `apply` the backup is a checkpoint of metadata with streams and as many objects, and
a later segment of commits of one range. For `adopt` a cluster of one controller is restored from a
backup of streams without objects. Later uploads of brokers are in the bucket, each with the next
records of some streams. The commands run as children, and the kernel reports their memory.
"""

import io
import json
import os
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from scripts.benchmarks.metadata_driver import NOW_MS, MetadataDriver
from streammeta.cli.local.local_cluster import PROGRAM, ChildFailedError, LocalCluster, free_ports
from streammeta.controller.backup.archive import Archive
from streammeta.controller.backup.checkpoints import checkpoint_file
from streammeta.controller.backup.segments import Position, Writing, new_segment
from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.runtime.persistence.state_hashes import EMPTY_LOG_HASH
from streammeta.storage.cluster_files.backup_files import Folder
from streammeta.storage.cluster_files.bucket_marker import BucketMarker, create_marker
from streammeta.storage.object_format.object_key import cluster_namespace, key_for
from streammeta.storage.object_format.object_writer import ObjectWriter
from streammeta.storage.object_format.record import INT64_MAX, RecordBatch
from streammeta.storage.object_store.opening import open_object_store

COMMITS = 50_000
"""Commits after the checkpoint, at most one a stream."""
STREAMS = 1_000
"""Streams of an adoption."""
RANGES = 10
"""Streams of one adopted object."""
RECORDS = 4
"""Records of each of these streams."""
PAYLOAD = bytes(range(256)) * 4
ADOPTING = "adopting"

FOLDER = Folder("bench", str(uuid.UUID(int=1)))
NAMESPACE = cluster_namespace(FOLDER.cluster_id)
EPOCH = Epoch(1)


Figures: TypeAlias = dict[str, float]
RESTORES = (
    "streams and objects = entities | commits | backup MB = backup_mb | plan s = plan_s"
    " | plan peak MB = plan_peak_mb | apply s = apply_s | apply peak MB = apply_peak_mb"
)
ADOPTIONS = (
    "objects | MB = mb | dry run s = survey_s | adopt s = adopt_s | repeat s = repeat_s"
    " | peak MB = peak_mb"
)
"""Columns of the tables."""


def measure_restore(root: Path, entities: int) -> Figures:
    """Make a backup in `root` and restore it. Blocks. Peaks are of each command's memory.

    Raises:
        ChildFailedError: a command failed.
    """
    commits = min(COMMITS, entities)
    _make_backup(root, entities, commits=commits)
    stores = ("--from", f"file://{root / 'backups'}", "--store", f"file://{root / 'bucket'}")
    plan = ("--plan", str(root / "plan.json"))
    new = ("--new-cluster-id", "restored", "--voters", "1@127.0.0.1:9")
    node = ("--node-id", "1", "--data-dir", str(root / "data"))
    _, plan_s, plan_mb = _restore("plan", *stores, *new, *plan)
    _, apply_s, apply_mb = _restore("apply", *stores, *plan, *node)
    size = sum(file.stat().st_size for file in (root / "backups").rglob("*") if file.is_file())

    return {
        "entities": entities,
        "commits": commits,
        "backup_mb": round(size / 1e6, 1),
        "plan_s": round(plan_s, 2),
        "plan_peak_mb": round(plan_mb, 1),
        "apply_s": round(apply_s, 2),
        "apply_peak_mb": round(apply_mb, 1),
    }


def measure_adoption(root: Path, objects: int) -> Figures:
    """Restore a cluster in `root` and adopt so many objects. Blocks.

    The survey reads and plans, the adoption adopts too, and a repeat has nothing left to read.

    Raises:
        ChildFailedError: a command or the controller failed, or objects were left out.
    """
    first_id = _make_backup(root, STREAMS, commits=0, has_objects=False)
    size = _fill_bucket(root, first_id, objects)
    cluster = _restore_cluster(root)
    at = ("--connect", cluster.connect, "--store", cluster.store_uri)
    try:
        cluster.start_all()
        _, survey_s, _ = _restore("adopt", "--dry-run", *at)
        done, adopt_s, peak_mb = _restore("adopt", "--yes", *at)
        again, repeat_s, _ = _restore("adopt", "--yes", *at)
        _restore("finish", *at)
    finally:
        cluster.stop_all()
    if (done["adopted"], again["adopted"]) != (objects, 0):
        raise ChildFailedError(f"adopted {done['adopted']} of {objects} objects: {done}")

    return {
        "objects": objects,
        "mb": round(size / 1e6, 1),
        "survey_s": round(survey_s, 2),
        "adopt_s": round(adopt_s, 2),
        "repeat_s": round(repeat_s, 2),
        "peak_mb": round(peak_mb, 1),
    }


def _make_backup(root: Path, streams: int, *, commits: int, has_objects: bool = True) -> int:
    """Make a backup and its bucket in `root`; return the metadata's next object id.

    Each stream has an object if `has_objects`.
    """
    for name in ("backups", "bucket"):
        (root / name).mkdir()
    marker = BucketMarker(
        cluster_id=FOLDER.cluster_id,
        cluster_uuid=FOLDER.cluster_uuid,
        namespace=NAMESPACE,
        created_ms=NOW_MS,
    )
    create_marker(open_object_store(f"file://{root / 'bucket'}"), marker)
    archive = Archive(open_object_store(f"file://{root / 'backups'}"), FOLDER)

    driver = MetadataDriver()
    driver.add_streams(streams)
    if has_objects:
        driver.add_stream_objects(streams)
    file = io.BytesIO()
    driver.freeze(FOLDER.cluster_id).write(file)
    file.seek(0)
    archive.put(
        *checkpoint_file(file, FOLDER, created_ms=NOW_MS, feature_level=1, writer_version="0")
    )

    start = Position(driver.metadata.applied_end_offset, EMPTY_LOG_HASH)
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
    if batches:
        archive.put(*new_segment(batches, start, writing))
    return driver.metadata.next_object_id


def _fill_bucket(root: Path, first_id: int, objects: int) -> int:
    """Put uploads that the backup does not have into the bucket; return their size."""
    bucket = open_object_store(f"file://{root / 'bucket'}")
    ends = np.zeros(STREAMS, dtype=np.int64)
    size = 0

    for number in range(objects):
        writer = ObjectWriter(part_size=INT64_MAX)
        for stream_id in sorted((number * RANGES + place) % STREAMS for place in range(RANGES)):
            start = int(ends[stream_id])
            writer.write(
                [
                    RecordBatch(stream_id, 1, start + place, 1, PAYLOAD[: 100 + place])
                    for place in range(RECORDS)
                ]
            )
            ends[stream_id] += RECORDS
        writer.finish()
        (data,) = writer.parts()
        bucket.put(key_for(first_id + number, NAMESPACE), data, if_absent=True)
        size += len(data)
    return size


def _restore_cluster(root: Path) -> LocalCluster:
    """Return a restored cluster of one controller, not started yet."""
    store_uri, namespace = f"file://{root / 'bucket'}", ("--namespace", NAMESPACE)
    stores = ("--from", f"file://{root / 'backups'}", "--store", store_uri)
    cluster = LocalCluster(root / ADOPTING, ADOPTING, store_uri, free_ports(1), namespace)
    plan = ("--plan", str(root / "adoption.json"))
    new = ("--new-cluster-id", ADOPTING, "--voters", f"1@{cluster.peer_endpoints[0]}")
    _restore("plan", *stores, *namespace, *new, *plan)
    _restore("apply", *stores, *plan, "--node-id", "1", "--data-dir", str(cluster.data_dir(1)))
    return cluster


def _restore(*words: str) -> tuple[dict[str, Any], float, float]:
    """Run `streammeta restore`; return its answer, its seconds, and its peak of memory in MB."""
    began = time.monotonic()
    command = [*PROGRAM, "restore", *words, "--format", "json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        text = output.read()
    # Only wait4 reports the peak of memory of one child.
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise ChildFailedError(f"streammeta restore {words[0]} failed: {text}")
    return json.loads(text), time.monotonic() - began, usage.ru_maxrss * 1024 / 1e6

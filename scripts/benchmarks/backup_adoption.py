"""Time and memory of `streammeta restore adopt`, over a bucket filled for it.

A cluster of one controller is restored from a backup of streams without objects. Brokers' uploads
since then lie in the bucket, each with the next records of some streams, and are adopted by the
command, run as a child.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.benchmarks.backup_restore import FOLDER, make_backup, restore_command
from scripts.benchmarks.figures import Table
from streammeta.cli.local_cluster import ChildFailedError, LocalCluster, free_ports
from streammeta.storage.object_format.object_key import cluster_namespace, key_for
from streammeta.storage.object_format.object_writer import ObjectWriter
from streammeta.storage.object_format.record import INT64_MAX, RecordBatch
from streammeta.storage.object_store.address import open_object_store

STREAMS = 1_000
RANGES = 10
"""Streams in one object."""
RECORDS = 4
"""Records of each of these streams."""
PAYLOAD = bytes(range(256)) * 4
CLUSTER = "adopting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """What one adoption took; memory is the peak of the command, `mb` the size of the objects."""

    objects: int
    mb: float
    survey_s: float
    """Of a dry run, which reads and plans."""
    adopt_s: float
    """Of a run that reads, plans and adopts."""
    repeat_s: float
    """Of the run after it, which finds nothing left to read."""
    peak_mb: float

    def figures(self) -> Iterator[tuple[str, float]]:
        """Yield the measured values by name."""
        for name in ("survey_s", "adopt_s", "repeat_s", "peak_mb"):
            yield name, getattr(self, name)


def measure(root: Path, objects: int) -> Adoption:
    """Restore a cluster below `root`, and adopt so many objects; blocks.

    Raises:
        ChildFailedError: a command or the controller failed, or not all was adopted.
    """
    first_id = make_backup(root, STREAMS, commits=0, has_objects=False)
    size = _fill(root, first_id, objects)
    cluster = _restored(root)
    at = ("--connect", cluster.connect, "--store", cluster.store_uri)
    try:
        cluster.start_all()
        _, survey_s, _ = restore_command("adopt", "--dry-run", *at)
        done, adopt_s, peak_mb = restore_command("adopt", "--yes", *at)
        again, repeat_s, _ = restore_command("adopt", "--yes", *at)
        restore_command("finish", *at)
    finally:
        cluster.stop_all()
    if (done["adopted"], again["adopted"]) != (objects, 0):
        raise ChildFailedError(f"adopted {done['adopted']} of {objects} objects: {done}")
    return Adoption(
        objects=objects,
        mb=round(size / 1e6, 1),
        survey_s=round(survey_s, 2),
        adopt_s=round(adopt_s, 2),
        repeat_s=round(repeat_s, 2),
        peak_mb=round(peak_mb, 1),
    )


def table(adoptions: Sequence[Adoption]) -> Table:
    """Return what is printed of adoptions."""
    return Table(
        title=f"Adoptions of objects with {RANGES} ranges of {RECORDS} records each",
        columns=("objects", "MB", "dry run s", "adopt s", "repeat s", "peak MB"),
        rows=tuple(
            (f"{each.objects:,}", each.mb, *(value for _, value in each.figures()))
            for each in adoptions
        ),
    )


def _fill(root: Path, first_id: int, objects: int) -> int:
    """Put the uploads that the backup does not know into the bucket; return their size."""
    bucket = open_object_store(f"file://{root / 'bucket'}")
    namespace = cluster_namespace(FOLDER.cluster_id)
    ends = np.zeros(STREAMS, dtype=np.int64)
    size = 0
    for number in range(objects):
        streams = sorted((number * RANGES + place) % STREAMS for place in range(RANGES))
        data = _object(streams, ends)
        bucket.put(key_for(first_id + number, namespace), data, if_absent=True)
        size += len(data)
    return size


def _object(streams: Sequence[int], ends: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> bytes:
    """Return an object with the next records of some streams, whose ends it moves."""
    writer = ObjectWriter(part_size=INT64_MAX)
    for stream_id in streams:
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
    return data


def _restored(root: Path) -> LocalCluster:
    """Return a restored cluster of one controller that is yet to start."""
    stores = ("--from", f"file://{root / 'backups'}", "--store", f"file://{root / 'bucket'}")
    namespace = ("--namespace", cluster_namespace(FOLDER.cluster_id))
    cluster = LocalCluster(
        root / CLUSTER, CLUSTER, f"file://{root / 'bucket'}", free_ports(1), namespace
    )
    plan = ("--plan", str(root / "adoption.json"))
    voters = ("--voters", f"1@{cluster.peer_endpoints[0]}")
    restore_command("plan", *stores, *namespace, "--new-cluster-id", CLUSTER, *voters, *plan)
    where = ("--node-id", "1", "--data-dir", str(cluster.data_dir(1)))
    restore_command("apply", *stores, *plan, *where)
    return cluster

"""Cost and lag of a continuous backup, and time and memory of restores and adoptions.

Two clusters of three controllers, one with a backup store in a directory and one without, get the
same load in alternating turns: commits of one range on one stream of messages, at a fixed rate. The
lag comes from the leader's metrics, read twenty times a second.

For `restore plan` and `apply` a backup is a checkpoint of metadata with streams and as many
objects, and a later segment of commits of one range. For `adopt` a cluster of one controller is
restored from a backup of streams without objects. Later uploads of brokers are in the bucket, each
with the next records of some streams. The commands run as children, and the kernel reports their
memory.
"""

import asyncio
import contextlib
import io
import json
import os
import subprocess
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from scripts.benchmarks.brokers import load_at_rate
from scripts.benchmarks.cluster import PATIENT, VOTERS, find_leader, http_options, running_cluster
from scripts.benchmarks.figures import Outcome, Progress, Table, Target, medians, percentile
from scripts.benchmarks.metadata_driver import NOW_MS, MetadataDriver
from scripts.benchmarks.options import option, seconds
from scripts.benchmarks.processes import read_result, wait_ready, working
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

SAMPLE_S = 0.05
P99_RATIO_MAX = 1.05
LARGE = 10_000_000
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
COLUMNS = (
    "backup | commits/s = commits_per_s | p50 ms = p50_ms | p99 ms = p99_ms"
    " | lag p50 s = lag_p50_s | lag p99 s = lag_p99_s"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Load of the two clusters, and sizes of restores and adoptions."""

    commits_per_s: int = option(10_000, "pipelined commits of one range")
    interval_ms: int = option(1_000, "milliseconds between two copies")
    """The product's own default is ten times that."""
    seconds: float = seconds(5.0, "of each turn")
    rounds: int = option(3, "turns of each cluster")
    sizes: tuple[int, ...] = option((1_000_000,), "streams, and as many objects, to restore")
    adoptions: tuple[int, ...] = option((10_000,), "objects to adopt after a restore")
    large: bool = option(False, f"restore {LARGE:,} too")


@dataclass(slots=True)
class _Side:
    """One of the two clusters, and the figures of its turns."""

    cluster: LocalCluster
    http_ports: Mapping[int, int]
    turns: list[dict[str, float]] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)


async def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Measure restores, adoptions and the two clusters."""
    restores, adoptions = [], []
    for size in sorted({*settings.sizes, *([LARGE] if settings.large else [])}):
        progress(f"backup: a restore of {size} streams and objects")
        place = root / f"restore-{size}"
        place.mkdir(parents=True)
        restores.append(await asyncio.to_thread(measure_restore, place, size))
    for count in sorted({*settings.adoptions}):
        progress(f"backup: an adoption of {count} objects")
        place = root / f"adoption-{count}"
        place.mkdir(parents=True)
        adoptions.append(await asyncio.to_thread(measure_adoption, place, count))

    store = root / "backups"
    store.mkdir()
    interval = ("--backup-interval-ms", str(settings.interval_ms))
    options = {"without": (), "with": ("--backup-store", f"file://{store}", *interval)}
    with contextlib.ExitStack() as stack:
        sides: dict[str, _Side] = {}
        for name, more in options.items():
            ports, own_options = http_options()
            cluster = stack.enter_context(
                running_cluster(root / name, VOTERS, (*PATIENT, *more), own_options)
            )
            sides[name] = _Side(cluster, ports)
        for turn in range(settings.rounds):
            for name, side in sides.items():
                progress(f"backup: turn {turn + 1}, {name} a backup")
                await _turn(side, settings, root)
    return _outcome(settings, sides, restores, adoptions)


async def _turn(side: _Side, settings: Settings, root: Path) -> None:
    leader = await find_leader(side.cluster)
    load = {"rate": settings.commits_per_s, "seconds": settings.seconds}
    output = root / "acknowledged.npz"
    async with working(
        root / "commits.log", load_at_rate, leader=leader.endpoint, output=output, **load
    ) as client:
        await wait_ready(client)
        async with _sampling(side, side.http_ports[leader.node_id]):
            await wait_ready(client)
        side.turns.append(await read_result(client))


@contextlib.asynccontextmanager
async def _sampling(side: _Side, port: int) -> AsyncIterator[None]:
    """Read the leader's metrics until the block ends, on both sides, so that both pay for it."""

    async def sample() -> None:
        while True:
            side.lags_s += await asyncio.to_thread(_read_lags_s, port)
            await asyncio.sleep(SAMPLE_S)

    sampling = asyncio.create_task(sample())
    try:
        yield
    finally:
        sampling.cancel()
        await asyncio.wait([sampling])


def _read_lags_s(port: int) -> list[float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    return [
        sample.value
        for family in text_string_to_metric_families(text)
        if family.name == "streammeta_backup_lag_seconds"
        for sample in family.samples
    ]


def _outcome(
    settings: Settings,
    sides: Mapping[str, _Side],
    restores: Sequence[Mapping[str, float]],
    adoptions: Sequence[Mapping[str, float]],
) -> Outcome:
    lags_s = sides["with"].lags_s
    found = {name: medians(side.turns) for name, side in sides.items()}
    ratio = found["with"]["p99_ms"] / found["without"]["p99_ms"]
    figures = {
        "lag_p50_s": percentile(lags_s, 0.5),
        "lag_p99_s": percentile(lags_s, 0.99),
        "p99_with_over_without": round(ratio, 3),
    }
    for name, turn in found.items():
        figures |= {f"{name}_{figure}": value for figure, value in turn.items()}
    for restore in restores:
        figures |= {f"restore_{restore['entities']}_{name}": at for name, at in restore.items()}
    for adoption in adoptions:
        figures |= {f"adoption_{adoption['objects']}_{name}": at for name, at in adoption.items()}
    lags = {name: figures[name] for name in ("lag_p50_s", "lag_p99_s")}
    rows = [{"backup": "without", **found["without"]}, {"backup": "with", **found["with"], **lags}]
    title = f"Commits with and without a backup every {settings.interval_ms} ms, medians"
    adopted = f"Adoptions of objects with {RANGES} ranges of {RECORDS} records each"
    target = "commit p99 with a backup, as a multiple of the p99 without"

    return Outcome(
        benchmark="backup",
        figures=figures,
        details={
            "without": sides["without"].turns,
            "with": sides["with"].turns,
            "lags_s": lags_s,
            "restores": restores,
            "adoptions": adoptions,
        },
        tables=[
            Table.of(title, rows, COLUMNS),
            Table.of("Restores of a checkpoint and the commits after it", restores, RESTORES),
            Table.of(adopted, adoptions, ADOPTIONS),
        ],
        targets=[Target(target, "at most", P99_RATIO_MAX, ratio)],
    )

"""The process that measures one map: memory, commits, freezing, checkpoint, reads.

    python -m scripts.benchmarks.map_probe --entities 1000000 --directory DIR
    python -m scripts.benchmarks.map_probe --set-objects 500

A process of its own for every map, so that its memory is that map's. Commits, reads and freezing
wait for nothing and are measured in CPU time of their thread, so that other work on the machine
does not count; checkpoints in time. Prints one JSON object.
"""

import argparse
import ctypes
import gc
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from scripts.benchmarks.figures import percentile
from scripts.benchmarks.map_driver import MapDriver
from streammeta.controller.ids import ClusterId, EndOffset, Epoch, SnapshotId
from streammeta.controller.metadata.cluster_map import ClusterMap
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.runtime.interfaces import SnapshotPoint
from streammeta.controller.runtime.map_checkpoint import FrozenCheckpoint, read_map

COMMITS = {1: 2_000, 100: 1_000, 1_600: 300}
"""How many are measured, by their ranges."""
STALL_RANGES = 100
COMMITS_AROUND = 1_000
"""Before and after a freeze."""
READS = 2_000
STREAMS_A_SET_OBJECT = 1_000
READ_LIMITS = (10, 1_000)
SEED = 1

Figures = dict[str, float]


def measure_map(entities: int, directory: Path) -> Figures:
    """Measure a map of so many streams, each with a range, and as many stream objects."""
    empty_map = ClusterMap()
    driver = MapDriver(empty_map)
    empty = _resident_bytes()
    began = time.perf_counter()
    driver.add_streams(entities)
    with_streams = _resident_bytes()
    driver.add_stream_objects(entities)
    with_objects = _resident_bytes()
    figures: Figures = {
        "entities": entities,
        "fill_s": time.perf_counter() - began,
        "memory_mb": (with_objects - empty) / 1e6,
        "stream_bytes": (with_streams - empty) / entities,
        "object_bytes": (with_objects - with_streams) / entities,
    }
    for ranges, count in COMMITS.items():
        if ranges <= entities:
            figures |= _commits(driver, entities, ranges, count)
    figures |= _freeze(driver, entities)
    figures |= _checkpoint(driver.map, directory / f"checkpoint-{entities}")
    return figures


def measure_reads(set_objects: int) -> Figures:
    """Measure GetObjects on a node's set objects, each with a range of every stream."""
    driver = MapDriver(ClusterMap())
    driver.add_streams(STREAMS_A_SET_OBJECT)
    for _ in range(set_objects):
        driver.commit(driver.upload(0, STREAMS_A_SET_OBJECT))
    dice, figures = random.Random(SEED), {"set_objects": float(set_objects)}
    for limit in READ_LIMITS:

        def read(limit: int = limit) -> None:
            stream_id = dice.randrange(STREAMS_A_SET_OBJECT)
            start = 0 if limit > READ_LIMITS[0] else dice.randrange(set_objects) * 10
            driver.read(stream_id, start, limit)

        times = [_timed_ms(read) for _ in range(READS)]
        figures |= _spread(f"read_{limit}", times)
    return figures


def _commits(driver: MapDriver, entities: int, ranges: int, count: int) -> Figures:
    return _spread(f"commit_{ranges}", [_commit_ms(driver, entities, ranges) for _ in range(count)])


def _commit_ms(driver: MapDriver, entities: int, ranges: int) -> float:
    first = _DICE.randrange(entities - ranges + 1)
    request = driver.upload(first, ranges)
    return _timed_ms(lambda: driver.commit(request))


def _freeze(driver: MapDriver, entities: int) -> Figures:
    """Freeze amid commits; a commit that comes meanwhile waits for it and for its own work."""
    ranges = min(STALL_RANGES, entities)
    before = [_commit_ms(driver, entities, ranges) for _ in range(COMMITS_AROUND)]
    views: list[object] = []
    freeze_ms = _timed_ms(lambda: views.append(driver.map.freeze()))
    after = [_commit_ms(driver, entities, ranges) for _ in range(COMMITS_AROUND)]
    views.clear()
    return {
        "freeze_ms": freeze_ms,
        "stall_ms": max(freeze_ms + after[0], *after),
        "before_p50_ms": percentile(before, 0.5),
        "before_max_ms": max(before),
        "after_p50_ms": percentile(after, 0.5),
        "after_max_ms": max(after),
    }


def _checkpoint(cluster_map: ClusterMap, path: Path) -> Figures:
    snapshot_id = SnapshotId(EndOffset(cluster_map.applied_end_offset), Epoch(1))
    point = SnapshotPoint(snapshot_id, ClusterId("bench"), VoterSet(()))
    frozen = FrozenCheckpoint(point, cluster_map.freeze(), bytes(32))
    before = _resident_bytes()
    began = time.perf_counter()
    with path.open("wb") as file:
        frozen.write(file)
    write_s = time.perf_counter() - began
    size = path.stat().st_size
    del frozen
    began = time.perf_counter()
    with path.open("rb") as file:
        loaded = read_map(file, snapshot_id)
    load_s = time.perf_counter() - began
    loaded_bytes = _resident_bytes() - before
    del loaded
    path.unlink()
    return {
        "checkpoint_write_s": write_s,
        "checkpoint_mb": size / 1e6,
        "checkpoint_load_s": load_s,
        "loaded_mb": loaded_bytes / 1e6,
    }


def _spread(name: str, values_ms: list[float]) -> Figures:
    return {
        f"{name}_p50_ms": percentile(values_ms, 0.5),
        f"{name}_p99_ms": percentile(values_ms, 0.99),
        f"{name}_max_ms": max(values_ms),
    }


def _timed_ms(function: Callable[[], object]) -> float:
    began = time.thread_time()
    function()
    return (time.thread_time() - began) * 1000


def _resident_bytes() -> int:
    """Return what the process holds, without what its allocator merely keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


_DICE = random.Random(SEED)


def main() -> None:
    """Measure what the command line says and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entities", type=int, help="streams, and objects")
    parser.add_argument("--set-objects", type=int)
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    if arguments.set_objects is not None:
        figures = measure_reads(arguments.set_objects)
    else:
        figures = measure_map(arguments.entities, arguments.directory)
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()

"""Process that measures one metadata: its memory, commits, freezing, checkpoint and reads.

Each size has a separate process, whose memory is this metadata's. Commits,
reads and freezing wait for nothing and are measured in CPU time of their thread, so that other work
on the machine does not count. Checkpoints are measured in elapsed time.
"""

import ctypes
import gc
import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.benchmarks.figures import latencies, percentile
from scripts.benchmarks.metadata_driver import BATCH_MAX, NODE, TOPIC, MetadataDriver
from scripts.benchmarks.processes import rss_bytes, thread_s
from streammeta.controller.metadata.api.requests import DeleteStreams, FindStreams, StreamToDelete
from streammeta.controller.metadata.tables.values import PageRequest
from streammeta.controller.runtime.persistence.metadata_checkpoint import read_metadata

COMMITS = {1: 2_000, 100: 1_000, 1_600: 300}
"""Number of measured commits, by their ranges."""
STALL_RANGES = 100
COMMITS_AROUND = 1_000
"""Commits before and after a freeze."""
READS = 2_000
STREAMS_OF_AN_SSO = 1_000
READ_LIMITS = (10, 1_000)
FOUND_AT_ONCE = 100

Figures = dict[str, float]


def measure_metadata(*, entities: int, directory: str) -> Figures:
    """Measure metadata of so many streams, each with a range, and as many stream objects."""
    driver, dice = MetadataDriver(), random.Random(1)
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

    def commit_s(ranges: int) -> float:
        request = driver.upload(dice.randrange(entities - ranges + 1), ranges)
        return thread_s(lambda: driver.commit(request))

    for ranges, count in COMMITS.items():
        if ranges <= entities:
            figures |= _spread(f"commit_{ranges}", [commit_s(ranges) for _ in range(count)])
    figures |= _freeze(driver, lambda: commit_s(min(STALL_RANGES, entities)))
    figures |= _checkpoint(driver, Path(directory) / f"checkpoint-{entities}")
    return _rounded(figures)


def measure_reads(*, set_objects: int) -> Figures:
    """Measure GetObjects with so many SSOs of a node, each with a range of every stream."""
    driver, dice = MetadataDriver(), random.Random(1)
    driver.add_streams(STREAMS_OF_AN_SSO)
    for _ in range(set_objects):
        driver.commit(driver.upload(0, STREAMS_OF_AN_SSO))

    figures: Figures = {"set_objects": set_objects}
    for limit in READ_LIMITS:

        def read(limit: int = limit) -> None:
            stream_id = dice.randrange(STREAMS_OF_AN_SSO)
            start = 0 if limit > READ_LIMITS[0] else dice.randrange(set_objects) * 10
            driver.read(stream_id, start, limit)

        figures |= _spread(f"read_{limit}", [thread_s(read) for _ in range(READS)])
    return _rounded(figures)


def measure_tags(*, entities: int) -> Figures:
    """Measure streams with two tags, one of them common, and their look-up."""
    driver, dice = MetadataDriver(), random.Random(1)
    empty = _resident_bytes()
    created_s = thread_s(lambda: driver.add_tagged_streams(entities))
    figures: Figures = {
        "entities": entities,
        "stream_bytes": (_resident_bytes() - empty) / entities,
        "create_us": created_s / entities * 1e6,
    }

    def find(tag: tuple[str, str], first: int) -> None:
        page = PageRequest(FOUND_AT_ONCE, f"{first}")
        driver.metadata.query(FindStreams(tags=(tag,), page=page))

    def find_common() -> None:
        find(TOPIC, dice.randrange(entities))

    def find_own() -> None:
        find(("partition", f"{dice.randrange(entities)}"), 0)

    figures |= _spread("find_own", [thread_s(find_own) for _ in range(READS)])
    figures |= _spread("find_common", [thread_s(find_common) for _ in range(READS)])
    streams = [StreamToDelete(stream_id, -1) for stream_id in range(min(entities, BATCH_MAX))]
    deletion = DeleteStreams(node=NODE, streams=tuple(streams))
    figures["delete_us"] = thread_s(lambda: driver.write(deletion)) / len(streams) * 1e6
    return _rounded(figures)


def _freeze(driver: MetadataDriver, commit_s: Callable[[], float]) -> Figures:
    """Freeze amid commits. The next commit waits for the freeze and for its own work."""
    before = [commit_s() * 1000 for _ in range(COMMITS_AROUND)]
    views: list[object] = []
    # The view is kept alive during the next commits, which then pay for copies.
    freeze_ms = thread_s(lambda: views.append(driver.metadata.freeze())) * 1000
    after = [commit_s() * 1000 for _ in range(COMMITS_AROUND)]
    views.clear()
    return {
        "freeze_ms": freeze_ms,
        "stall_ms": max(freeze_ms + after[0], *after),
        "before_p50_ms": percentile(before, 0.5),
        "before_max_ms": max(before),
        "after_p50_ms": percentile(after, 0.5),
        "after_max_ms": max(after),
    }


def _checkpoint(driver: MetadataDriver, path: Path) -> Figures:
    frozen = driver.freeze()
    snapshot_id = frozen.point.snapshot_id
    before = _resident_bytes()
    began = time.perf_counter()
    with path.open("wb") as file:
        frozen.write(file)
    write_s = time.perf_counter() - began
    size = path.stat().st_size
    del frozen

    began = time.perf_counter()
    with path.open("rb") as file:
        loaded = read_metadata(file, snapshot_id)
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


def _spread(name: str, values_s: list[float]) -> Figures:
    return {f"{name}_{figure}": value for figure, value in latencies(values_s, 4).items()}


def _rounded(figures: Mapping[str, float]) -> Figures:
    return {name: round(value, 4) for name, value in figures.items()}


def _resident_bytes() -> int:
    """Return the memory of the process without the memory that only its allocator keeps."""
    # Freed memory that the allocator keeps would count as the metadata's.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return rss_bytes(os.getpid())

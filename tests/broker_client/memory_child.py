"""Processes whose memory is measured: a reader, a writer and a compactor; each prints its figures.

Run as `python -m tests.broker_client.memory_child NAME ARGUMENTS`, one of `MEASURES` and a JSON
list: a process of its own has no other memory to hide in. Sizes are in bytes.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

from streammeta.client import ReaderConfig, WriterConfig
from streammeta.client.compaction.config import CompactionConfig, CompactionTarget
from streammeta.client.compaction.sso_compactor import SetObjectCompactor
from streammeta.client.model import NodeIdentity
from streammeta.client.parts import ControllerClient, StreamReader, StreamWriter
from streammeta.client.resources.resources import give_back
from streammeta.storage.compaction.selection import SelectionConfig
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.storage.object_store.protocol.base import Body
from streammeta.v1.common_pb2 import OBJECT_KIND_STREAM
from tests.compaction import compaction_world
from tests.fake_bucket import fake_markers_of_process
from tests.kit.built_objects import DEFAULT_BLOCK_SIZE_THRESHOLD, ObjectBuilder
from tests.kit.fake_broker import broker
from tests.kit.fake_cluster import NAMESPACE, Piece
from tests.kit.reader_world import placed

MIB = 1 << 20
READER = ReaderConfig(
    index_cache_bytes=2 * MIB, block_cache_bytes=12 * MIB, read_bytes=24 * MIB, max_slices=1_000
)
LIMIT_BYTES = READER.index_cache_bytes + READER.block_cache_bytes + READER.read_bytes
OBJECTS = 12
OBJECT_BYTES = 5 * MIB
READ_BYTES = 64 * 1024


def resident(field: str) -> int:
    """Read one of this process's memory figures, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(field)


def begin_new_peak() -> int:
    """Forget the highest figure so far; return the present one."""
    gc.collect()
    give_back()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


# ---- a reader ----


def write_objects(root: Path, payload: int) -> list[tuple[int, int]]:
    """Write `OBJECTS` objects of one stream each; return the size and the records of each.

    For another process than the one that is measured, so that their memory does not count.
    """
    store, rng, made = LocalObjectStore(root), random.Random(1), []
    count = OBJECT_BYTES // payload + 1
    for object_id in range(OBJECTS):
        builder = ObjectBuilder()
        records = [RecordBatch(object_id, 0, at, 1, rng.randbytes(payload)) for at in range(count)]
        builder.write(records)
        built = builder.finish()
        store.put(key_for(object_id, NAMESPACE), built.data)
        made.append((built.size, count))
    return made


async def read(root: str, objects: list[tuple[int, int]]) -> dict[str, int]:
    """Read all streams side by side, in turn and here and there."""
    async with placed() as place:
        streams = place.world.streams
        for stream_id, (size, count) in enumerate(objects):
            (each,) = place.world.create(1)
            streams[each].end = count
            streams[each].pieces = [Piece(stream_id, OBJECT_KIND_STREAM, 0, count, size)]
        reader = StreamReader(place.client, LocalObjectStore(root), NAMESPACE, READER)
        await reader.read(0, 0, max_bytes=1)
        before = most = resident("VmRSS")
        held = 0
        reading = asyncio.gather(*(read_all(reader, stream) for stream in streams))
        rng = random.Random(2)
        while not reading.done():
            each = rng.randrange(OBJECTS)
            at = rng.randrange(streams[each].end)
            await reader.read(each, at, max_bytes=READ_BYTES)
            most, held = max(most, resident("VmRSS")), max(held, reader.held_bytes)
        done = sum(await reading)
        await reader.close()
        return {"grown": most - before, "held": held, "read": done}


async def read_all(reader: StreamReader, stream_id: int) -> int:
    """Read a stream from start to end; return the bytes of payload."""
    at = done = 0
    while records := await reader.read(stream_id, at, max_bytes=READ_BYTES):
        done += sum(len(record.payload) for record in records)
        at = records[-1].end_offset
    return done


# ---- a writer ----


class GatedStore(LocalObjectStore):
    """Takes objects while `gate` is open, and keeps nothing."""

    def __init__(self) -> None:
        super().__init__(Path("/nonexistent"))
        self._counting = threading.Lock()
        self.gate = threading.Event()
        self.stored = 0

    def put(self, key: str, data: Body, **_: object) -> None:
        self.gate.wait()
        with self._counting:
            self.stored += len(data)


async def write(limit: int, record_bytes: int, streams: int, total: int) -> dict[str, int]:
    """Write `total` bytes, the store taking objects only while the buffer is about full."""
    store = GatedStore()
    config = WriterConfig(max_buffer_bytes=limit, upload_bytes=limit // 8)
    async with broker() as b, StreamWriter(b.session, store, config) as writer:
        writer.attach(await b.opened(streams))
        store.gate.set()
        await (await writer.append(0, bytes(record_bytes)))  # everything is loaded now
        before = begin_new_peak()
        admitted = found_full = 0
        while admitted < total:
            if writer.buffered_bytes > limit - MIB:
                found_full += 1
                store.gate.set()
            else:
                store.gate.clear()
            await writer.append(admitted % streams, bytes(record_bytes))
            admitted += record_bytes
            if admitted % 64 == 0:
                await asyncio.sleep(0)
        store.gate.set()
        await writer.flush()
        grown = resident("VmHWM") - before
    return {"grown": grown, "found_full": found_full, "stored": store.stored}


# ---- a compactor ----


async def compact(
    root: str,
    budget: int,
    total: int,
    object_bytes: int,
    streams: int,
    record_bytes: int,
    overlap: bool,
) -> dict[str, Any]:
    """Compact node 1, so that everything is loaded, and then node 2, which is measured."""
    world: Any = compaction_world.World(DEFAULT_BLOCK_SIZE_THRESHOLD)
    world.store = store = LocalObjectStore(root)
    records = [(1, record_bytes)] * max(1, object_bytes // streams // record_bytes)
    await world.register(1, 2)
    for node_id, count in ((1, 2), (2, total // object_bytes)):
        ids = await world.create(node_id, streams)
        for _ in range(count):
            await world.upload(node_id, dict.fromkeys(ids, records))
            for stream_id in ids:  # of which nothing is kept but the map and the files
                world.streams[stream_id].records.clear()
    config = CompactionConfig(
        memory_budget=budget, overlap=overlap, selection=SelectionConfig(growth=1)
    )
    async with world.map.served() as client:
        await compact_node(client, store, config, 1)
        before = begin_new_peak()
        figures = await compact_node(client, store, config, 2)
        return {**figures, "grown": resident("VmHWM") - before}


async def compact_node(
    client: ControllerClient, store: LocalObjectStore, config: CompactionConfig, node_id: int
) -> dict[str, Any]:
    """Run one cycle for a node; return its figures."""
    place = (client, NodeIdentity(node_id, 1), compaction_world.NAMESPACE, store)
    compactor = SetObjectCompactor(*place, config)
    report = await compactor.run_once(CompactionTarget(node_id, 1))
    compactor.close()
    assert not report.failures, report.failures
    assert not report.left_out, report.left_out
    return {name: getattr(report.figures, name) for name in report.figures.__slots__}


MEASURES = {"reader": read, "writer": write, "compactor": compact}

if __name__ == "__main__":
    world_markers = (compaction_world.CLUSTER_ID, compaction_world.NAMESPACE)
    fake_markers_of_process(("fake", NAMESPACE), world_markers)
    measure: Any = MEASURES[sys.argv[1]]
    print(json.dumps(asyncio.run(measure(*json.loads(sys.argv[2])))))

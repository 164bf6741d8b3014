"""A process of its own that reads a lot with many readers and prints what it grew by.

Objects are written by another process before, so that their memory does not count.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path

from streammeta.client import ReaderConfig, StreamReader
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.v1.common_pb2 import OBJECT_KIND_STREAM
from tests.fake_bucket import fake_markers_of_process
from tests.kit.built_objects import ObjectBuilder
from tests.kit.fake_cluster import NAMESPACE
from tests.kit.reader_world import Piece, placed

_MIB = 1 << 20
CONFIG = ReaderConfig(
    index_cache_bytes=2 * _MIB, block_cache_bytes=12 * _MIB, read_bytes=24 * _MIB, max_slices=1_000
)
LIMIT_BYTES = CONFIG.index_cache_bytes + CONFIG.block_cache_bytes + CONFIG.read_bytes
OBJECTS = 12
OBJECT_BYTES = 5 * _MIB
STORED_BYTES = OBJECTS * OBJECT_BYTES
READERS = 12
READ_BYTES = 64 * 1024


def write(root: Path, payload: int) -> None:
    """Write the objects of one stream each, and print their sizes and records."""
    store = LocalObjectStore(root)
    rng = random.Random(1)
    for object_id in range(OBJECTS):
        builder = ObjectBuilder()
        count = OBJECT_BYTES // payload + 1
        builder.write(
            [RecordBatch(object_id, 0, at, 1, rng.randbytes(payload)) for at in range(count)]
        )
        built = builder.finish()
        store.put(key_for(object_id, NAMESPACE), built.data)
        print(built.size, count)


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM, in bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def read_all(reader: StreamReader, stream_id: int) -> int:
    """Read a stream from start to end; return the bytes of payload."""
    at = done = 0
    while records := await reader.read(stream_id, at, max_bytes=READ_BYTES):
        done += sum(len(record.payload) for record in records)
        at = records[-1].end_offset
    return done


def written(root: Path, payload: int) -> list[tuple[int, int]]:
    """Let another process write the objects; return the size and the records of each."""
    listed = subprocess.run(
        [sys.executable, "-m", "tests.broker_client.reading_process", str(root), str(payload), "w"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split() for line in listed.stdout.splitlines()]
    return [(int(size), int(count)) for size, count in lines]


async def measure(root: Path, objects: list[tuple[int, int]]) -> dict[str, int]:
    """Read all streams side by side, in turn and here and there."""
    async with placed() as place:
        for stream_id, (size, count) in enumerate(objects):
            (each,) = place.world.create(1)
            stream = place.world.streams[each]
            stream.end = count
            stream.pieces = [Piece(stream_id, OBJECT_KIND_STREAM, 0, count, size)]
        reader = StreamReader(place.client, LocalObjectStore(root), NAMESPACE, CONFIG)
        await reader.read(0, 0, max_bytes=1)
        before = most = resident_bytes()
        held = 0
        reading = asyncio.gather(*(read_all(reader, i % OBJECTS) for i in range(READERS)))
        rng = random.Random(2)
        while not reading.done():
            each = rng.randrange(OBJECTS)
            at = rng.randrange(place.world.streams[each].end)
            await reader.read(each, at, max_bytes=READ_BYTES)
            most, held = max(most, resident_bytes()), max(held, reader.held_bytes)
        done = sum(await reading)
        await reader.close()
        return {"grown_bytes": most - before, "held_bytes": held, "read_bytes": done}


if __name__ == "__main__":
    fake_markers_of_process(("fake", NAMESPACE))
    directory, record_bytes = Path(sys.argv[1]), int(sys.argv[2])
    if len(sys.argv) > 3:
        write(directory, record_bytes)
    else:
        print(json.dumps(asyncio.run(measure(directory, written(directory, record_bytes)))))

"""A broker process whose producer outruns its store; prints how its memory grew, in bytes.

Run as a program: a process of its own has no other memory to hide in.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
from pathlib import Path

from streammeta.client import StreamWriter, WriterConfig
from streammeta.storage.object_store.base import Body
from streammeta.storage.object_store.local import LocalObjectStore
from tests.fake_bucket import fake_markers_of_process
from tests.kit.fake_broker import broker
from tests.kit.fake_cluster import NAMESPACE

MIB = 1024 * 1024


class GatedStore(LocalObjectStore):
    """Takes objects while `gate` is open, and keeps nothing."""

    def __init__(self) -> None:
        super().__init__(Path("/nonexistent"))
        self._counting = threading.Lock()
        self.gate = threading.Event()
        self.stored = 0

    def put(self, key: str, data: Body, **_: object) -> None:
        """Return once the gate is open."""
        self.gate.wait()
        with self._counting:
            self.stored += len(data)


def resident(field: str) -> int:
    """Read one of this process's memory figures, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(field)


def begin_new_peak() -> None:
    """Forget the highest figure so far."""
    Path("/proc/self/clear_refs").write_text("5")


async def run(limit: int, record_bytes: int, streams: int, total: int) -> None:
    """Write `total` bytes, the store taking objects only while the buffer is about full."""
    store = GatedStore()
    async with broker() as b:
        opened = await b.opened(streams)
        config = WriterConfig(max_buffer_bytes=limit, upload_bytes=limit // 8)
        async with StreamWriter(b.session, store, config) as writer:
            writer.attach(opened)
            store.gate.set()
            await (await writer.append(0, bytes(record_bytes)))  # everything is loaded now
            gc.collect()
            before = resident("VmRSS")
            begin_new_peak()
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
    print(json.dumps({"grown": grown, "found_full": found_full, "stored": store.stored}))


if __name__ == "__main__":
    fake_markers_of_process(("fake", NAMESPACE))
    asyncio.run(run(*map(int, sys.argv[1:])))

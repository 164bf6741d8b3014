"""A broker process whose producer outruns its store; prints how its memory grew, in bytes.

Run as a program: a process of its own has no other memory to hide in.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from pathlib import Path

from broker_client import StreamWriter, WriterConfig
from storage.object_store.base import Body
from storage.object_store.local import LocalObjectStore
from tests.broker_client.client_helpers import broker

MIB = 1024 * 1024


class SlowStore(LocalObjectStore):
    """Takes `bytes_per_second` over all threads together, and keeps nothing."""

    def __init__(self, bytes_per_second: int) -> None:
        super().__init__(Path("/nonexistent"))
        self._rate = bytes_per_second
        self._free_at = 0.0
        self.stored = 0

    def put(self, key: str, data: Body, **_: object) -> None:
        """Return when a store of that speed would have taken `data`."""
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + len(data) / self._rate
        time.sleep(self._free_at - now)
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


async def run(limit: int, record_bytes: int, streams: int, total: int, rate: int) -> None:
    """Write `total` bytes as fast as the writer admits them."""
    store = SlowStore(rate)
    async with broker() as b:
        opened = await b.opened(streams)
        config = WriterConfig(max_buffer_bytes=limit, upload_bytes=limit // 8)
        async with StreamWriter(b.session, store, config) as writer:
            writer.attach(opened)
            await (await writer.append(0, bytes(record_bytes)))  # everything is loaded now
            gc.collect()
            before = resident("VmRSS")
            begin_new_peak()
            admitted = waited = 0
            while admitted < total:
                writer_was_full = writer.buffered_bytes > limit - 2 * MIB
                waited += writer_was_full
                await writer.append(admitted % streams, bytes(record_bytes))
                admitted += record_bytes
                if admitted % 64 == 0:
                    await asyncio.sleep(0)
            await writer.flush()
            grown = resident("VmHWM") - before
    print(json.dumps({"grown": grown, "waited": waited, "stored": store.stored}))


if __name__ == "__main__":
    asyncio.run(run(*map(int, sys.argv[1:])))

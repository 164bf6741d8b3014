"""A broker process to be killed: it writes with a write-ahead log and notes what was acknowledged.

Run as `python -m tests.broker_client.wal_child SETTINGS`, a JSON object with the fields of
`Settings`. It takes itself away, as kill -9 does, at the ordered step.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from streammeta.client import SilentObserver
from streammeta.client.config import WriterConfig
from streammeta.client.parts import BrokerSession, ControllerClient, StreamWriter
from streammeta.client.wal.disk.config import LogConfig, LogIdentity
from streammeta.client.wal.disk.log import WriteAheadLog
from streammeta.storage.object_format.index_block import StreamRange
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.storage.object_store.protocol.base import Body
from tests.fake_bucket import fake_markers_of_process
from tests.kit.crash_disk import WatchedFiles
from tests.kit.doomed_child import Executioner
from tests.kit.fake_cluster import NAMESPACE

STEPS = ("write", "sync", "synced", "remove", "uploaded", "committed", "time")
"""Before a write, before and after its sync, before a segment goes, before and after a commit."""

SMALL_LOG = LogConfig(max_bytes=400_000, segment_bytes=30_000, group_bytes=4_000)
SMALL_WRITER = WriterConfig(
    upload_bytes=20_000,
    max_buffer_bytes=200_000,
    linger_s=0.02,
    split_bytes=9_000,
    durability="wal",
)


@dataclass(frozen=True)
class Settings:
    """`step` and `at`: die at the `at`-th time of this step, or after `at` ms; "" for never."""

    endpoints: Sequence[str]
    root: str
    node_epoch: int
    streams: int
    records: int
    seed: int
    step: str = ""
    at: int = 0

    def encode(self) -> str:
        return json.dumps(asdict(self))


class SlowStore(LocalObjectStore):
    """A store so slow that much is acknowledged long before it is committed."""

    def __init__(self, root: Path, seed: int) -> None:
        super().__init__(root)
        self._rng = random.Random(seed)

    def put(self, key: str, data: Body, **options: Any) -> None:
        time.sleep(self._rng.uniform(0, 0.06))
        super().put(key, data, **options)


class DoomedObserver(SilentObserver):
    def __init__(self, executioner: Executioner) -> None:
        self._executioner = executioner

    async def on_uploaded(self, keys: Sequence[str]) -> None:
        self._executioner.pass_by("uploaded")

    async def on_committed(self, object_ids: Sequence[int], ranges: Sequence[StreamRange]) -> None:
        self._executioner.pass_by("committed")


async def write_records(writer: StreamWriter, settings: Settings, streams: list[int]) -> None:
    """Append to the streams at random; note each record when, and only when, it is acknowledged."""
    rng = random.Random(settings.seed)
    notes = os.open(Path(settings.root) / "acknowledged", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(stream_id: int, name: str, ack: asyncio.Future[int]) -> None:
        os.write(notes, f"{stream_id} {ack.result()} {name}\n".encode())

    waiting: set[asyncio.Future[int]] = set()
    for number in range(settings.records):
        stream_id = rng.choice(streams)
        name = f"{settings.node_epoch}.{number}"
        payload = name.encode() + b" " * rng.choice([0, 10, 100, 2000])
        ack = await writer.append(stream_id, payload)
        ack.add_done_callback(partial(note, stream_id, name))
        waiting = {future for future in (*waiting, ack) if not future.done()}
        if rng.random() < 0.05:
            await asyncio.sleep(rng.random() * 0.005)
    await writer.flush()
    await asyncio.gather(*waiting)


async def live(settings: Settings) -> None:
    """Recover, say on the standard output what there was to recover, then write."""
    executioner = Executioner(settings.step, settings.at)
    executioner.start()
    root = Path(settings.root)
    async with ControllerClient(settings.endpoints, rng=random.Random(settings.seed)) as client:
        session = await BrokerSession.open(client, 1000, settings.node_epoch)
        log = await WriteAheadLog.open(
            root / "log",
            LogIdentity(session.namespace, 1000, settings.node_epoch),
            SMALL_LOG,
            files=WatchedFiles(lambda step, _: executioner.pass_by(step)),
        )
        store = SlowStore(root / "bucket", settings.seed)
        async with StreamWriter(
            session, store, SMALL_WRITER, DoomedObserver(executioner), log
        ) as writer:
            writer.attach(session.inherited)
            found = await writer.recover()
            print(json.dumps([found.committed, found.uploaded, found.set_aside]), flush=True)
            streams = [stream.stream_id for stream in session.inherited]
            if not streams:
                ids = await session.create_streams([{}] * settings.streams)
                opened = (await session.open_streams(dict.fromkeys(ids, 0))).require_all()
                writer.attach(opened.values())
                streams = ids
            await write_records(writer, settings, streams)
        await log.close()


if __name__ == "__main__":
    fake_markers_of_process(("fake", NAMESPACE))
    asyncio.run(live(Settings(**json.loads(sys.argv[1]))))

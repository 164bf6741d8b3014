"""A broker process that fills its streams up to a quota, whatever became of the process before it.

Run as `python -m tests.broker_client.marathon_broker SETTINGS`, a JSON object with the fields of
`Settings`. What a record holds follows from its stream and offset alone, so a new process goes on
where the map says that a stream ends. It notes up to where each stream is acknowledged; what it
finds counts as that, since the process before it may have been killed between commit and note.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from streammeta.client import ObjectLogConfig, StreamClient, StreamClientConfig, WriterConfig
from streammeta.client.errors import StreamNotClosedError
from streammeta.client.parts import StreamWriter
from streammeta.storage.object_store.local import LocalObjectStore

RECORD_BYTES = 100
MANY = 200
"""Records of one append, at most."""

_NOTE = struct.Struct(">qq")
_MIB = 1024 * 1024


@dataclass(frozen=True)
class Settings:
    """One process: its node, how many streams the node has, and how many records they are to hold.

    `durability` is that of the writer; the write-ahead log lies beside the notes, or, for
    "object_log", in the bucket. The next two are bounds of the writer. `adopted` are streams of a
    node that is gone, taken over once what it acknowledged has been recovered.
    """

    endpoints: list[str]
    root: str
    node_id: int
    node_epoch: int
    streams: int
    records: int
    durability: Literal["object", "wal", "object_log"]
    upload_bytes: int = _MIB // 4
    linger_s: float = 0.25
    adopted: tuple[int, ...] = ()

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @property
    def notes(self) -> Path:
        return Path(self.root) / f"acknowledged-{self.node_id}"


def payload_of(stream_id: int, offset: int) -> bytes:
    """Return the one payload that a stream may hold at an offset."""
    return (b"%d/%d|" % (stream_id, offset)).ljust(RECORD_BYTES, b".")


def read_notes(path: Path) -> Iterator[tuple[int, int]]:
    """Yield stream ids with the offset up to which they were acknowledged, as they came."""
    notes = path.read_bytes()
    yield from _NOTE.iter_unpack(notes[: len(notes) // _NOTE.size * _NOTE.size])


def count_notes(path: Path) -> int:
    """Return how many appends were acknowledged, and streams found."""
    return path.stat().st_size // _NOTE.size if path.exists() else 0


async def live(settings: Settings) -> None:
    """Take over what an earlier process left, and write until the quota is reached."""
    root = Path(settings.root)
    bounds = WriterConfig(
        upload_bytes=settings.upload_bytes,
        linger_s=settings.linger_s,
        max_buffer_bytes=32 * _MIB,
        durability="object" if settings.durability == "object" else "wal",
    )
    in_bucket = ObjectLogConfig(linger_s=0.02) if settings.durability == "object_log" else None
    log = root / f"log-{settings.node_id}" if settings.durability == "wal" else None
    async with await StreamClient.open(
        settings.endpoints,
        LocalObjectStore(root / "bucket"),
        node_id=settings.node_id,
        node_epoch=settings.node_epoch,
        config=StreamClientConfig(writer=bounds, wal_directory=log, object_log=in_bucket),
    ) as client:
        streams = [stream.stream_id for stream in client.inherited]
        if not streams and settings.adopted:
            await adopt(client, settings.adopted)
            streams = list(settings.adopted)
        elif not streams:
            streams = await client.create_streams([{}] * settings.streams)
            (await client.open_streams(dict.fromkeys(streams, 0))).require_all()
        await fill(client.writer, streams, settings)


async def adopt(client: StreamClient, streams: Iterable[int]) -> None:
    """Open streams as soon as whoever recovers the node before has closed them."""
    left = list(streams)
    while left:
        outcomes = await client.open_streams(left)
        for failure in outcomes.failed.values():
            if not isinstance(failure, StreamNotClosedError):
                raise failure
        left = list(outcomes.failed)
        await asyncio.sleep(0.2 if left else 0)


async def fill(writer: StreamWriter, streams: list[int], settings: Settings) -> None:
    """Append to the streams at random until they hold all records, acknowledged."""
    rng = random.Random(f"{settings.node_id}.{settings.node_epoch}")
    notes = os.open(settings.notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    failures: list[BaseException] = []

    def note(stream_id: int, end: int, ack: asyncio.Future[int]) -> None:
        failure = ack.exception()
        if failure is not None:
            failures.append(failure)
        else:
            os.write(notes, _NOTE.pack(stream_id, end))

    found = {stream_id: writer.next_offset(stream_id) for stream_id in streams}
    os.write(notes, b"".join(_NOTE.pack(*item) for item in found.items()))
    left = settings.records - sum(found.values())
    while left > 0 and not failures:
        stream_id, count = rng.choice(streams), min(left, rng.randint(1, MANY))
        start = writer.next_offset(stream_id)
        payloads = [payload_of(stream_id, start + place) for place in range(count)]
        ack = await writer.append_many(stream_id, payloads)
        ack.add_done_callback(partial(note, stream_id, start + count))
        left -= count
    await writer.flush()
    if failures:
        raise failures[0]


if __name__ == "__main__":
    asyncio.run(live(Settings(**json.loads(sys.argv[1]))))

"""Broker process of the demo: writes its share of the rows through `streammeta.client`.

Reports events as JSON lines on standard output. With `--hold` it stops at a stage of its
first upload, so that the demo can kill it there, or let it sleep until its objects have expired.
A restarted broker continues at the ends of its streams in the metadata: a row's number in its
stream is its offset.
"""

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from scripts.demonstration.dataset import NAMES, load
from streammeta.client import OpenedStream, SilentObserver, WriterConfig
from streammeta.client.parts import BrokerSession, ControllerClient, StreamWriter
from streammeta.storage.object_format.index_block import StreamRange
from streammeta.storage.object_store.opening import open_object_store
from streammeta.tls.files import tls_files

HOLD_AFTER_PREPARE = "after-prepare"
HOLD_AFTER_UPLOAD = "after-upload"

ROWS_IN_WINDOW = 4_000
"""Rows of the source that are grouped by stream into record batches."""


def say(event: str, **facts: object) -> None:
    """Report one event to the demo."""
    print(json.dumps({"event": event, "at": time.monotonic(), **facts}), flush=True)


class Reporter(SilentObserver):
    """Reports each stage of an upload, and stops the process once at one of them."""

    def __init__(self, hold: str | None) -> None:
        self._hold = hold

    async def on_prepared(self, object_ids: Sequence[int], deadline_ms: int) -> None:
        """Report, and stop this process with SIGSTOP if `--hold` names this stage."""
        say("prepared", objects=list(object_ids))
        if self._hold == HOLD_AFTER_PREPARE:
            self._hold = None
            os.kill(os.getpid(), signal.SIGSTOP)

    async def on_uploaded(self, keys: Sequence[str]) -> None:
        """Report, and wait forever if this process is to be killed here."""
        say("uploaded", keys=list(keys))
        if self._hold == HOLD_AFTER_UPLOAD:
            await asyncio.Event().wait()

    async def on_committed(self, object_ids: Sequence[int], ranges: Sequence[StreamRange]) -> None:
        """Report the number of committed rows."""
        rows = sum(range_.end_offset - range_.start_offset for range_ in ranges)
        say("committed", objects=list(object_ids), rows=rows)

    async def on_rejected(self, object_ids: Sequence[int], error: Exception) -> None:
        """Report objects that were committed too late."""
        say("refused", objects=list(object_ids), error=str(error))


async def run(arguments: argparse.Namespace) -> None:
    """Open this broker's streams, append the missing rows, close them."""
    index, count = arguments.share
    rows = load(arguments.data, arguments.rows).share(index, count).rows
    stream_ids: dict[str, int] = json.loads(arguments.streams.read_text())
    mine = sorted({stream_ids[key] for key, _ in rows})
    config = WriterConfig(
        upload_bytes=arguments.upload_bytes,
        ttl_s=arguments.ttl_ms / 1000,
        reupload_attempts=20,  # with a short time to live on a slow machine ids may expire again
    )
    tls = tls_files(arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
    async with ControllerClient(arguments.connect.split(","), tls=tls) as client:
        session = await BrokerSession.open(client, arguments.node_id, arguments.node_epoch)
        opened = await open_all(session, mine)
        store = open_object_store(arguments.store)
        async with StreamWriter(session, store, config, Reporter(arguments.hold)) as writer:
            writer.attach(opened.values())
            starts = {stream.stream_id: stream.next_offset for stream in opened.values()}
            batches = record_batches(rows, stream_ids, starts)
            acks = [await writer.append(*batch) for batch in batches]
            await writer.flush()
            await asyncio.gather(*acks)
        closed = await session.close_streams(
            {stream.stream_id: stream.epoch for stream in opened.values()}
        )
        closed.require_all()
    say("done", rows=len(rows))


async def open_all(session: BrokerSession, stream_ids: Sequence[int]) -> dict[int, OpenedStream]:
    """Open the streams, including streams that an earlier process of this node left open."""
    opened = {stream.stream_id: stream for stream in session.inherited}
    missing = {stream_id: 0 for stream_id in stream_ids if stream_id not in opened}
    if missing:
        opened.update((await session.open_streams(missing)).require_all())
    return opened


def record_batches(
    rows: Iterable[tuple[str, bytes]], stream_ids: dict[str, int], starts: dict[int, int]
) -> Iterator[tuple[int, bytes, int]]:
    """Yield (stream id, payload, row count), without rows that are already committed."""
    skip = dict(starts)
    window: dict[int, list[bytes]] = {}
    for number, (key, row) in enumerate(rows, start=1):
        stream_id = stream_ids[key]
        if skip[stream_id] > 0:
            skip[stream_id] -= 1
            continue
        window.setdefault(stream_id, []).append(row)
        if number % ROWS_IN_WINDOW == 0:
            yield from _joined(window)
            window = {}
    yield from _joined(window)


def _joined(window: dict[int, list[bytes]]) -> Iterator[tuple[int, bytes, int]]:
    for stream_id, rows in window.items():
        yield stream_id, b"\n".join(rows), len(rows)


def _share(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    return int(index), int(count)


def main() -> None:
    """Parse the command line and run the broker."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="example: broker --node-id 1001 --share 0/6 ..."
    )
    parser.add_argument("--connect", required=True, help="controllers, HOST:PORT,...")
    for name in ("--tls-ca", "--tls-cert", "--tls-key"):
        parser.add_argument(name, type=Path, help="of this broker, as `streammeta certs` makes it")
    parser.add_argument("--store", required=True, help="the bucket's URI")
    parser.add_argument("--streams", type=Path, required=True, help="JSON file: key to stream id")
    parser.add_argument("--node-id", type=int, required=True)
    parser.add_argument("--node-epoch", type=int, required=True)
    parser.add_argument("--data", choices=NAMES, required=True)
    parser.add_argument("--rows", type=int, help="use the first ROWS rows only")
    parser.add_argument("--share", type=_share, required=True, metavar="I/N")
    parser.add_argument("--upload-bytes", type=int, default=512 * 1024)
    parser.add_argument("--ttl-ms", type=int, default=600_000)
    parser.add_argument("--hold", choices=[HOLD_AFTER_PREPARE, HOLD_AFTER_UPLOAD])
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()

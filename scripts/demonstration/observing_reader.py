"""Reader of the demo, active while brokers upload and a compactor replaces their objects.

Owns a thread that reads streams one after another and compares each with the source: the records
of a stream must be the beginning of its rows. Reading never stops the demo, and its findings are
reported at the end.
"""

import asyncio
import random
import threading
from collections.abc import Mapping, Sequence

from scripts.demonstration.callers import Caller
from streammeta.client.parts import StreamReader
from streammeta.storage.object_store.opening import open_object_store

STREAMS_AT_ONCE = 40
PAUSE_S = 0.1
"""Pause between two reads, because the brokers use the same machine."""


class ObservingReader:
    """Reads random streams from `start` to `stop`; `expected` has each stream's rows, by id.

    `rows` counts equal rows, `streams` the reads of a stream, and `failure` describes the first
    difference.
    """

    def __init__(
        self,
        caller: Caller,
        store_uri: str,
        expected: Mapping[int, Sequence[bytes]],
        seed: int,
    ) -> None:
        self._caller = caller
        self._store_uri = store_uri
        self._expected = expected
        self._random = random.Random(seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observing reader", daemon=True)
        self.rows = 0
        self.streams = 0
        self.failure = ""

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """End after the current read."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._read())
        except Exception as error:  # noqa: BLE001 - told at the end of the demo
            self.failure = self.failure or f"{type(error).__name__}: {error}"

    async def _read(self) -> None:
        ids = sorted(self._expected)
        async with self._caller.client() as client:
            namespace = await client.object_namespace()
            reader = StreamReader(client, open_object_store(self._store_uri), namespace)
            while not self._stopping.is_set() and not self.failure:
                chosen = self._random.sample(ids, min(STREAMS_AT_ONCE, len(ids)))
                async for stream_id, records in reader.read_streams(chosen):
                    payloads = [bytes(record.payload) for record in records]
                    self._compare(stream_id, payloads)
                await asyncio.sleep(PAUSE_S)
            await reader.close()

    def _compare(self, stream_id: int, payloads: Sequence[bytes]) -> None:
        rows = [row for payload in payloads for row in payload.split(b"\n")]
        if rows != list(self._expected[stream_id][: len(rows)]):
            self.failure = f"stream {stream_id} differs from the source in its first {len(rows)}"
            return
        self.rows += len(rows)
        self.streams += 1

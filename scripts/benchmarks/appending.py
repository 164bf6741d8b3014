"""What writing takes: appends a second and the time to an acknowledgement, on each kind of store.

One producer appends records to many streams through the product's writer, a real controller beside
it. First as fast as the writer takes them: the rate. Then a tenth of that rate, evenly: the time
from an append to its acknowledgement, which holds the linger, the upload and the commit. The stores
are a local directory and a small S3 server on loopback, which is a process of its own.
"""

import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.benchmarks.bench_cluster import running_cluster
from scripts.benchmarks.figures import Outcome, Table, percentile
from scripts.demonstration.s3_endpoint import start_embedded
from streammeta.client import BrokerSession, ControllerClient, StreamWriter, WriterConfig
from streammeta.storage.object_store.address import open_object_store

NODE_ID, NODE_EPOCH = 900_002, 1
STORES = ("directory", "s3")
PACED_SHARE = 0.1
LINGER_S = 0.05
_MANY = 100
"""Records of one `append_many`."""
_TICK_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The load; `seconds` of each phase."""

    stores: tuple[str, ...] = STORES
    streams: int = 100
    record_bytes: int = 100
    seconds: float = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How one store was written to, by single appends or many at once."""

    store: str
    call: str
    appends_per_s: float
    mib_per_s: float
    paced_per_s: float
    acknowledged_ms: tuple[float, ...]

    def figures(self) -> dict[str, float]:
        """Return what two commits are compared by."""
        name = f"{self.store}_{self.call}"
        return {
            f"{name}_appends_per_s": round(self.appends_per_s),
            f"{name}_acknowledged_p50_ms": round(percentile(self.acknowledged_ms, 0.5), 1),
            f"{name}_acknowledged_p99_ms": round(percentile(self.acknowledged_ms, 0.99), 1),
        }

    def row(self) -> tuple[object, ...]:
        """Return a row of the table."""
        rate, p50, p99 = self.figures().values()
        paced = round(self.paced_per_s)
        return (self.store, self.call, rate, round(self.mib_per_s, 1), paced, p50, p99)


async def measure(root: Path, settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Write to each store in turn."""
    rates: list[Rate] = []
    for store in settings.stores:
        place = root / store
        place.mkdir(parents=True)
        rates += await _measure_store(place, store, settings, progress)
    return _outcome(settings, rates)


async def _measure_store(
    place: Path, name: str, settings: Settings, progress: Callable[[str], None]
) -> list[Rate]:
    with running_cluster(place, 1) as cluster:
        if name == "directory":
            return await _rates(cluster.endpoints, cluster.store_uri, name, settings, progress)
        endpoint = start_embedded("ministack", place)
        os.environ.update(endpoint.env)
        try:
            return await _rates(cluster.endpoints, endpoint.store_uri, name, settings, progress)
        finally:
            if endpoint.server is not None:
                endpoint.server.stop()


async def _rates(
    endpoints: Sequence[str],
    store_uri: str,
    name: str,
    settings: Settings,
    progress: Callable[[str], None],
) -> list[Rate]:
    store = open_object_store(store_uri)
    async with ControllerClient(endpoints) as client:
        session = await BrokerSession.open(client, NODE_ID, NODE_EPOCH)
        ids = await session.create_streams([{}] * settings.streams)
        opened = (await session.open_streams(dict.fromkeys(ids, 1))).require_all()
        rates = []
        async with StreamWriter(session, store, WriterConfig(linger_s=LINGER_S)) as writer:
            writer.attach(opened.values())
            for call, many in (("append", 1), ("append_many", _MANY)):
                progress(f"appending: {call} to {name}")
                rates.append(await _rate(_Load(writer, ids, settings, many), name, call))
    store.close()
    return rates


class _Load:
    """A producer that appends records to streams at random."""

    def __init__(
        self, writer: StreamWriter, ids: Sequence[int], settings: Settings, many: int
    ) -> None:
        self._writer = writer
        self._ids = ids
        self._payloads = [random.Random(1).randbytes(settings.record_bytes)] * many
        self._rng = random.Random(2)
        self.seconds = settings.seconds
        self.record_bytes = settings.record_bytes
        self.many = many

    async def append(self) -> asyncio.Future[int]:
        stream_id = self._rng.choice(self._ids)
        if self.many == 1:
            return await self._writer.append(stream_id, self._payloads[0])
        return await self._writer.append_many(stream_id, self._payloads)

    async def flood(self) -> float:
        """Append as fast as the writer takes it; return the records acknowledged a second."""
        began, appended = time.monotonic(), 0
        while time.monotonic() < began + self.seconds:
            for _ in range(64):
                await self.append()
            appended += 64 * self.many
            await asyncio.sleep(0)
        await self._writer.flush()
        return appended / (time.monotonic() - began)

    async def pace(self, records_per_s: float) -> list[float]:
        """Append evenly; return how long each acknowledgement took, in ms."""
        began, appended, taken = time.monotonic(), 0, list[float]()

        def acknowledged(since: float) -> Callable[[asyncio.Future[int]], None]:
            return lambda ack: taken.append((time.monotonic() - since, ack.result())[0] * 1000)

        while (now := time.monotonic()) < began + self.seconds:
            while appended < (now - began) * records_per_s:
                since = time.monotonic()
                (await self.append()).add_done_callback(acknowledged(since))
                appended += self.many
            await asyncio.sleep(_TICK_S)
        await self._writer.flush()
        return taken


async def _rate(load: _Load, store: str, call: str) -> Rate:
    flooded = await load.flood()
    paced = flooded * PACED_SHARE
    taken = await load.pace(paced)
    return Rate(
        store=store,
        call=call,
        appends_per_s=flooded,
        mib_per_s=flooded * load.record_bytes / (1 << 20),
        paced_per_s=paced,
        acknowledged_ms=tuple(taken),
    )


def _outcome(settings: Settings, rates: Sequence[Rate]) -> Outcome:
    return Outcome(
        benchmark="appending",
        settings=asdict(settings),
        figures={name: value for rate in rates for name, value in rate.figures().items()},
        details={
            f"{rate.store}_{rate.call}": {
                "flooded_per_s": rate.appends_per_s,
                "paced_per_s": rate.paced_per_s,
                "acknowledgements": len(rate.acknowledged_ms),
            }
            for rate in rates
        },
        tables=(
            Table(
                title=f"Appending {settings.record_bytes}-byte records to {settings.streams}"
                f" streams, linger {LINGER_S * 1000:.0f} ms",
                columns=(
                    "store",
                    "call",
                    "records/s",
                    "MiB/s",
                    "paced at",
                    "p50, ms",
                    "p99, ms",
                ),
                rows=tuple(rate.row() for rate in rates),
            ),
        ),
    )

"""Cost of writing: appends a second and the time to an acknowledgement, on each kind of store.

One producer appends records to many streams through the product's writer, with a real controller.
First as fast as the writer accepts them, which gives the rate. Then at a tenth of that rate,
evenly, which gives the time from an append to its acknowledgement: linger, upload and commit. The
stores are a local directory and a small S3 server on loopback, in a separate process.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from scripts.benchmarks.client_place import MIB, Place, running_place
from scripts.benchmarks.figures import Outcome, Progress, Table, percentile
from scripts.benchmarks.options import option, seconds
from scripts.demonstration.s3_endpoint import start_embedded
from streammeta.client import WriterConfig

Store: TypeAlias = Literal["directory", "s3"]
PACED_SHARE = 0.1
LINGER_S = 0.05
_MANY = 100
"""Records of one `append_many`."""
_TICK_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Stores, load, and length of each phase."""

    stores: tuple[Store, ...] = option(get_args(Store), "stores")
    streams: int = option(100, "streams appended to")
    record_bytes: int = option(100, "payload of a record")
    seconds: float = seconds(8.0, "of each phase")


async def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Write to each store in turn."""
    rates: list[dict[str, Any]] = []
    for store in settings.stores:
        place = root / store
        place.mkdir(parents=True)
        with _store_uri(place, store) as uri:
            config = WriterConfig(linger_s=LINGER_S)
            async with running_place(place, settings.streams, config, uri) as opened:
                for call, many in (("append", 1), ("append_many", _MANY)):
                    progress(f"appending: {call} to {store}")
                    rates.append(await _rate(_Load(opened, settings, many), store, call))
    return _outcome(settings, rates)


@contextlib.contextmanager
def _store_uri(place: Path, store: Store) -> Iterator[str | None]:
    if store == "directory":
        yield None
        return
    endpoint = start_embedded("ministack", place)
    os.environ.update(endpoint.env)
    try:
        yield endpoint.store_uri
    finally:
        if endpoint.server is not None:
            endpoint.server.stop()


class _Load:
    """A producer that appends records to streams at random."""

    def __init__(self, place: Place, settings: Settings, many: int) -> None:
        self._writer = place.writer
        self._ids = place.stream_ids
        self._payloads = [random.Random(1).randbytes(settings.record_bytes)] * many
        self._rng = random.Random(2)
        self.settings = settings
        self.many = many

    async def append(self) -> asyncio.Future[int]:
        stream_id = self._rng.choice(self._ids)
        if self.many == 1:
            return await self._writer.append(stream_id, self._payloads[0])
        return await self._writer.append_many(stream_id, self._payloads)

    async def flood(self) -> float:
        """Append as fast as the writer accepts, and return the records acknowledged a second."""
        began, appended = time.monotonic(), 0
        while time.monotonic() < began + self.settings.seconds:
            # Fewer turns of the loop than appends, or the loop itself would be measured.
            for _ in range(64):
                await self.append()
            appended += 64 * self.many
            await asyncio.sleep(0)
        await self._writer.flush()
        return appended / (time.monotonic() - began)

    async def pace(self, records_per_s: float) -> list[float]:
        """Append evenly and return the seconds of each acknowledgement."""
        began, appended, times_s = time.monotonic(), 0, list[float]()

        def note_from(since: float) -> Callable[[asyncio.Future[int]], None]:
            return lambda ack: times_s.append((time.monotonic() - since, ack.result())[0])

        while (now := time.monotonic()) < began + self.settings.seconds:
            while appended < (now - began) * records_per_s:
                since = time.monotonic()
                (await self.append()).add_done_callback(note_from(since))
                appended += self.many
            await asyncio.sleep(_TICK_S)
        await self._writer.flush()
        return times_s


async def _rate(load: _Load, store: str, call: str) -> dict[str, Any]:
    flooded = await load.flood()
    paced = flooded * PACED_SHARE
    times_s = await load.pace(paced)
    return {
        "store": store,
        "call": call,
        "appends_per_s": flooded,
        "mib_per_s": flooded * load.settings.record_bytes / MIB,
        "paced_per_s": paced,
        "acknowledgements": len(times_s),
        "p50_ms": round(percentile(times_s, 0.5) * 1000, 1),
        "p99_ms": round(percentile(times_s, 0.99) * 1000, 1),
    }


def _outcome(settings: Settings, rates: Sequence[Mapping[str, Any]]) -> Outcome:
    figures: dict[str, float] = {}
    details: dict[str, dict[str, float]] = {}
    for rate in rates:
        name = f"{rate['store']}_{rate['call']}"
        figures[f"{name}_appends_per_s"] = round(rate["appends_per_s"])
        figures[f"{name}_acknowledged_p50_ms"] = rate["p50_ms"]
        figures[f"{name}_acknowledged_p99_ms"] = rate["p99_ms"]
        details[name] = {
            "flooded_per_s": rate["appends_per_s"],
            "paced_per_s": rate["paced_per_s"],
            "acknowledgements": rate["acknowledgements"],
        }

    table = Table.of(
        f"Appending {settings.record_bytes}-byte records to {settings.streams} streams,"
        f" linger {LINGER_S * 1000:.0f} ms",
        rates,
        "store | call | records/s = appends_per_s | MiB/s = mib_per_s | paced at = paced_per_s"
        " | p50, ms = p50_ms | p99, ms = p99_ms",
    )
    return Outcome(benchmark="appending", figures=figures, details=details, tables=[table])

"""Compaction by a broker itself: its schedule, what ends it, and that others come first."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from streammeta.client import StreamClient, StreamClientConfig, WriterConfig
from streammeta.client.api import background_compaction
from streammeta.client.api.background_compaction import INTERVAL_S, BackgroundCompaction
from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.store_calls import StoreCalls
from streammeta.client.controllers.methods import GET_OBJECTS
from streammeta.client.errors import ControllerUnavailableError, NodeFencedError
from streammeta.client.resources import bandwidth
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.v1 import objects_pb2
from tests.kit.real_cluster import leader_of, running_cluster

# ---- the schedule ----


class Cycles:
    """Cycles that end as they are told, and the waits between them."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.waits: list[float] = []
        self.ran = 0
        self.ended = asyncio.Event()

    async def cycle(self) -> None:
        self.ran += 1
        outcome = self.outcomes.pop(0)
        if outcome is not None:
            raise outcome

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        if not self.outcomes:
            self.ended.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)


async def run(cycles: Cycles, seed: int = 1) -> BackgroundCompaction:
    background = BackgroundCompaction(
        cycles.cycle, INTERVAL_S, rng=random.Random(seed), sleep=cycles.sleep
    )
    background.start()
    return background


async def test_a_cycle_comes_every_twenty_minutes_and_the_first_ones_are_spread() -> None:
    cycles = Cycles(None, None, None)
    background = await run(cycles)
    await cycles.ended.wait()
    await background.close()
    assert INTERVAL_S == 20 * 60
    first, *others = cycles.waits
    assert 0.5 * INTERVAL_S <= first <= INTERVAL_S
    assert all(0.85 * INTERVAL_S <= wait <= 1.1 * INTERVAL_S for wait in others)
    assert cycles.ran == 3
    firsts = set()
    for seed in range(5):
        again = Cycles()
        background = await run(again, seed)
        await again.ended.wait()
        await background.close()
        firsts.add(again.waits[0])
    assert len(firsts) == 5


async def test_a_failure_does_not_end_it() -> None:
    unavailable = ControllerUnavailableError("Commit", 1.0, {})
    cycles = Cycles(unavailable, RuntimeError("a defect"), None)
    background = await run(cycles)
    await cycles.ended.wait()
    await background.close()
    assert cycles.ran == 3


async def test_a_newer_process_of_the_node_ends_it() -> None:
    cycles = Cycles(NodeFencedError("commit"), None)
    background = await run(cycles)
    assert background._task is not None
    await background._task
    assert cycles.ran == 1
    await background.close()


async def test_a_cycle_that_does_not_end_holds_up_no_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_compaction, "CLOSE_S", 0.01)
    began, ends = asyncio.Event(), asyncio.Event()

    async def cycle() -> None:
        began.set()
        while not ends.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await ends.wait()

    async def sleep(_seconds: float) -> None:
        await asyncio.sleep(0)

    background = BackgroundCompaction(cycle, INTERVAL_S, sleep=sleep)
    background.start()
    await began.wait()
    await background.close()
    assert not ends.is_set()
    ends.set()
    task = background._task
    assert task is not None
    while not task.done():  # the cycle has swallowed the first cancellation
        task.cancel()
        await asyncio.sleep(0)


# ---- bandwidth ----

RATE = 1_000.0


class Clock:
    """Time that passes while tasks sleep, and by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until - 1e-9:  # noqa: ASYNC110 - the test moves the time by hand
            await asyncio.sleep(0)

    async def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.05)):
            for _ in range(5):
                await asyncio.sleep(0)
            self.now += 0.05
        for _ in range(5):
            await asyncio.sleep(0)


def limited() -> tuple[Clock, bandwidth.Bandwidth]:
    clock = Clock()
    return clock, bandwidth.Bandwidth(RATE, clock.time, clock.sleep)


async def begun(*work: Coroutine[Any, Any, None]) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


async def test_without_a_rate_nothing_waits() -> None:
    band = bandwidth.Network().sent
    for grade in bandwidth.Grade:
        await asyncio.wait_for(band.take(grade, 10**12), 60)


async def test_uploads_never_wait_and_reads_wait_behind_them() -> None:
    clock, band = limited()
    for _ in range(3):
        await band.take(bandwidth.Grade.UPLOAD, 1_000)  # three seconds of traffic, at once
    (read,) = await begun(band.take(bandwidth.Grade.READ, 100))
    assert not read.done()
    await clock.pass_time(3 - bandwidth.READ_SLACK_S - 0.2)
    assert not read.done() or clock.now >= 100 * bandwidth.LEAST_SHARE / 2 / RATE
    await clock.pass_time(1)
    assert read.done()


async def test_compaction_comes_after_reads_that_wait() -> None:
    clock, band = limited()
    await band.take(bandwidth.Grade.UPLOAD, 1_000)
    compaction, read = await begun(
        band.take(bandwidth.Grade.COMPACTION, 500), band.take(bandwidth.Grade.READ, 500)
    )
    await clock.pass_time(0.8)
    assert (read.done(), compaction.done()) == (True, False)
    await clock.pass_time(1.0)
    assert compaction.done()


async def test_compaction_goes_on_at_its_least_share_while_others_take_all() -> None:
    clock, band = limited()
    await band.take(bandwidth.Grade.UPLOAD, 10**6)
    (compaction,) = await begun(band.take(bandwidth.Grade.COMPACTION, 50))
    await clock.pass_time(50 * bandwidth.LEAST_SHARE / RATE - 0.2)
    assert not compaction.done()
    await clock.pass_time(0.4)
    assert compaction.done()


async def test_uploads_beyond_the_rate_hold_up_others_for_a_bounded_time() -> None:
    clock, band = limited()
    for _ in range(3600):  # an hour of traffic at once
        await band.take(bandwidth.Grade.UPLOAD, 1_000)
    await clock.pass_time(bandwidth.UPLOADS_AHEAD_S + 0.2)
    (read, compaction) = await begun(
        band.take(bandwidth.Grade.READ, 10**4), band.take(bandwidth.Grade.COMPACTION, 10**4)
    )
    assert read.done()
    await clock.pass_time(bandwidth.UPLOADS_AHEAD_S + 0.2)
    assert compaction.done()


async def test_a_read_that_is_cancelled_holds_up_nothing() -> None:
    clock, band = limited()
    await band.take(bandwidth.Grade.UPLOAD, 1_000)
    (read,) = await begun(band.take(bandwidth.Grade.READ, 500))
    read.cancel()
    (compaction,) = await begun(band.take(bandwidth.Grade.COMPACTION, 10**6))
    await clock.pass_time(1.2)
    assert compaction.done()


@pytest.mark.parametrize("direction", ["read", "write"])
async def test_a_compactors_requests_take_the_lowest_grade_of_their_direction(
    direction: str, tmp_path: Path
) -> None:
    taken: list[tuple[str, bandwidth.Grade, int]] = []

    def noting(name: str) -> Callable[[bandwidth.Grade, int], Coroutine[Any, Any, None]]:
        async def take(grade: bandwidth.Grade, nbytes: int) -> None:
            taken.append((name, grade, nbytes))

        return take

    network = bandwidth.Network()
    network.received.take = noting("received")  # type: ignore[method-assign,assignment]
    network.sent.take = noting("sent")  # type: ignore[method-assign,assignment]
    calls = StoreCalls(LocalObjectStore(tmp_path), CompactionConfig(), network=network)
    await getattr(calls, direction)(77, lambda: None)
    calls.close()
    name = "received" if direction == "read" else "sent"
    assert taken == [(name, bandwidth.Grade.COMPACTION, 77)]


# ---- in a broker ----


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), "20m"])
def test_an_interval_is_positive_or_none(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="compaction_interval_s"):
        StreamClientConfig(compaction_interval_s=wrong)
    with pytest.raises(ValueError, match="network_rate"):
        StreamClientConfig(network_rate=-1.0)
    assert StreamClientConfig().compaction_interval_s == INTERVAL_S
    assert StreamClientConfig(compaction_interval_s=None).compaction_interval_s is None


@pytest.mark.process
async def test_a_broker_compacts_by_itself_beside_others_unless_that_is_switched_off(
    tmp_path: Path,
) -> None:
    fast = StreamClientConfig(
        writer=WriterConfig(linger_s=0.0), compaction_interval_s=0.2, network_rate=50e6
    )
    off = StreamClientConfig(writer=WriterConfig(linger_s=0.0), compaction_interval_s=None)
    with running_cluster(tmp_path, 1) as cluster:
        leader_of(cluster)
        where = (cluster.endpoints, cluster.store_uri)
        async with await StreamClient.open(*where, node_id=2, config=off) as quiet:
            assert quiet.background_compaction is None
        async with await StreamClient.open(*where) as reader:
            assert reader.background_compaction is None  # it has no node to compact
        async with await StreamClient.open(*where, node_id=1, config=fast) as client:
            (stream_id,) = await client.create_streams([{}])
            (await client.open_streams([stream_id])).require_all()
            for number in range(12):
                await client.append(stream_id, b"%d" % number)
            async with asyncio.timeout(60):
                while await _object_count(client, stream_id) >= 12:
                    await client.append(stream_id, b"more")
            await client.compact()  # beside the one in the background
            read = [record.payload async for record in client.iterate(stream_id)]
            assert read[:12] == [b"%d" % number for number in range(12)]


async def _object_count(client: StreamClient, stream_id: int) -> int:
    """Return the number of objects that hold the first records of a stream."""
    query = objects_pb2.ObjectQuery(stream_id=stream_id, start_offset=0, end_offset=12)
    request = objects_pb2.GetObjectsRequest(queries=[query])
    answer = await client.controllers.call(GET_OBJECTS, request)
    return len(answer.results[0].objects)

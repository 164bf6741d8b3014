"""Client process of the watches benchmark: many watches, or many commit pipelines, at one leader.

Opens them at a bounded rate, holds them for a time, and drops all connections at once. During the
watches small values are put at a bounded rate. Every pipeline commits once when it is opened, then
one after the other at a bounded rate, then all at once.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from scripts.benchmarks.committer import Load
from scripts.benchmarks.http2 import Http2Connection, Http2Error
from scripts.benchmarks.streammeta_client import (
    OpenSlot,
    PreparedIds,
    Putter,
    open_slots,
    upload_message,
)
from streammeta.v1 import metadata_pb2, records_pb2

Kind: TypeAlias = Literal["watches", "pipelines"]
PHASES = ("prepared", "opened", "held", "burst", "closed")
OPENED_A_SECOND = 1_000
CHANGES_A_SECOND = 100
"""Puts during the watches."""
CHANGES_IN_FLIGHT = 64
LAG_S = 1.0
MESSAGES_A_SECOND = 500
"""Messages on all pipelines together while they are held."""
WITHIN_S = 60.0
"""Longest time for all answers to a phase. Later answers count as missing."""
AFTER_CLOSE_S = 2.0


@dataclass(slots=True)
class Counts:
    """Outcome of one run."""

    opened: int = 0
    refused: int = 0
    missing: int = 0
    """Calls that were opened but had no answer in time."""
    messages: int = 0
    """Received messages: changes by watches, answers by pipelines."""
    changes: int = 0
    """Acknowledged puts during the watches."""
    fewest: int = 0
    """Changes that the slowest watch has received `LAG_S` after the last put's answer."""


@dataclass(slots=True)
class _Call:
    connection: Http2Connection
    stream_id: int = 0
    received: int = 0
    is_open: bool = False
    is_ended: bool = False
    slot: OpenSlot | None = None
    unanswered: int = 0

    def note_end(self) -> None:
        self.is_ended = True


class _Load:
    """Calls of one kind, on their own connections."""

    def __init__(self, endpoint: str, count: int) -> None:
        self.endpoint, self.count = endpoint, count
        self.calls: list[_Call] = []
        self.connections: list[Http2Connection] = []
        self.counts = Counts()

    async def prepare(self) -> None:
        """Set up everything that is not measured."""

    async def open(self) -> None:
        """Open all calls and wait for the first answer of each."""

    async def hold(self, seconds: float) -> None:
        """Keep the calls busy for `seconds`."""

    async def burst(self) -> None:
        """Use all calls at once."""

    def summarize(self) -> Counts:
        """Return the counts."""
        alive = [call for call in self.calls if not call.is_ended]
        self.counts.opened = sum(call.is_open for call in self.calls)
        self.counts.refused = len(self.calls) - len(alive)
        self.counts.missing = sum(not call.is_open or call.unanswered > 0 for call in alive)
        self.counts.messages = sum(call.received for call in alive)
        return self.counts


class _Watches(_Load):
    """Watches of every change from the present end of the log on."""

    async def open(self) -> None:
        request = metadata_pb2.WatchRequest(may_combine=True)
        for _, connection in zip(range(self.count), itertools.cycle(self.connections)):
            call = _Call(connection)

            def note(message: bytes, call: _Call = call) -> None:
                call.is_open = True
                if message:
                    response = metadata_pb2.WatchResponse.FromString(message)
                    call.received += len(records_pb2.RecordSet.FromString(response.records).records)

            connection.begin_watch(request, note, call.note_end)
            self.calls.append(call)
            await asyncio.sleep(1 / OPENED_A_SECOND)
        await _wait_until(lambda: all(call.is_open or call.is_ended for call in self.calls))

    async def hold(self, seconds: float) -> None:
        putter = Putter(Load(endpoint=self.endpoint, ranges=1, in_flight=1))
        await putter.open()
        for call in self.calls:
            call.received = 0

        async def put(key: int) -> None:
            # A leader that loses its leadership stops answering, which is a result, not a failure.
            with contextlib.suppress(Http2Error):
                await putter.commit(key)
                self.counts.changes += 1

        keys = itertools.count()
        putting: set[asyncio.Task[None]] = set()
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            if len(putting) < CHANGES_IN_FLIGHT:
                putting.add(task := asyncio.create_task(put(next(keys))))
                task.add_done_callback(putting.discard)
            await asyncio.sleep(1 / CHANGES_A_SECOND)
        await asyncio.gather(*putting)
        await putter.close()
        await asyncio.sleep(LAG_S)
        alive = (call.received for call in self.calls if not call.is_ended)
        self.counts.fewest = min(alive, default=0)


class _Pipelines(_Load):
    """Commit pipelines, each with its own stream."""

    async def prepare(self) -> None:
        control = await Http2Connection.connect(self.endpoint)
        load = Load(endpoint=self.endpoint, ranges=1, in_flight=self.count)
        self._slots = await open_slots(control, load)
        self._ids = PreparedIds(control)
        await self._ids.fetch(3 * self.count)

    async def open(self) -> None:
        path = "/streammeta.v1.ObjectService/CommitPipeline"
        for slot, connection in zip(self._slots, itertools.cycle(self.connections)):
            call = _Call(connection, slot=slot)

            def note(message: bytes, call: _Call = call) -> None:
                call.is_open = True
                call.unanswered -= 1
                call.received += 1

            call.stream_id = connection.open(path, note, call.note_end)
            self.calls.append(call)
            await self._commit(call)
            await asyncio.sleep(1 / OPENED_A_SECOND)
        await self._wait_answered()

    async def hold(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        for call in itertools.cycle([call for call in self.calls if not call.is_ended]):
            if time.monotonic() >= ends:
                break
            await self._commit(call)
            await asyncio.sleep(1 / MESSAGES_A_SECOND)
        await asyncio.sleep(max(0.0, ends - time.monotonic()))
        await self._wait_answered()

    async def burst(self) -> None:
        for call in self.calls:
            await self._commit(call)
        await self._wait_answered()

    async def _commit(self, call: _Call) -> None:
        if call.is_ended or call.slot is None:
            return
        message = upload_message([(call.slot, await self._ids.next())])
        call.slot.streams.advance()
        call.unanswered += 1
        call.connection.send(call.stream_id, message)

    async def _wait_answered(self) -> None:
        await _wait_until(lambda: all(call.is_ended or call.unanswered <= 0 for call in self.calls))


async def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110 - looks at thousands
        await asyncio.sleep(0.02)


async def follow(
    *, kind: Kind, endpoint: str, count: int, connections: int, seconds: float
) -> dict[str, int]:
    """Go through all phases and return the counts. Prints `ready PHASE` when a phase ends."""
    load = (_Watches if kind == "watches" else _Pipelines)(endpoint, count)
    await load.prepare()
    load.connections = [await Http2Connection.connect(endpoint) for _ in range(connections)]
    print("ready prepared", flush=True)
    await load.open()
    print("ready opened", flush=True)
    await load.hold(seconds)
    print("ready held", flush=True)
    await load.burst()
    print("ready burst", flush=True)

    counts = load.summarize()
    for connection in load.connections:
        connection.close()
    await asyncio.sleep(AFTER_CLOSE_S)
    print("ready closed", flush=True)
    return asdict(counts)

"""Client process of the watches benchmark: many watches, or many commit pipelines, at one leader.

    python -m scripts.benchmarks.follower_load --kind watches --endpoint HOST:PORT --count 1000 \
        --connections 100 --seconds 5

Opens them at a bounded rate, holds them for a time, drops all connections at once. Beside the
watches small values are put at a bounded rate. Every pipeline commits once when it is opened, then
one after the other at a bounded rate, then all at once. Prints `ready PHASE` when a phase ends, and
one JSON object with counts at the end.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import uvloop

from scripts.benchmarks.committer import Load
from scripts.benchmarks.http2 import Http2Connection, Http2Error
from scripts.benchmarks.streammeta_client import (
    OpenSlot,
    PreparedIds,
    Putter,
    open_slots,
    upload_message,
)
from streammeta.v1 import common_pb2, metadata_pb2, objects_pb2, records_pb2

KINDS = ("watches", "pipelines")
PHASES = ("prepared", "opened", "held", "burst", "closed")
OPENED_A_SECOND = 1_000
CHANGES_A_SECOND = 100
"""Puts beside the watches."""
CHANGES_IN_FLIGHT = 64
LAG_S = 1.0
MESSAGES_A_SECOND = 500
"""Messages on all pipelines together while they are held."""
WITHIN_S = 60.0
"""Longest time for all answers to a phase; what has not come then is counted as missing."""
AFTER_CLOSE_S = 2.0


@dataclass(slots=True)
class Counts:
    """Outcome of one run."""

    opened: int = 0
    refused: int = 0
    missing: int = 0
    """Opened, without an answer in time."""
    messages: int = 0
    """Received: changes by watches, answers by pipelines."""
    changes: int = 0
    """Puts beside the watches that were acknowledged."""
    fewest: int = 0
    """Changes that the watch with the fewest has received `LAG_S` after the last put's answer."""


class Followers(Protocol):
    """Calls of one kind, on connections of their own."""

    async def prepare(self) -> None:
        """Set up everything that is no part of the measurement."""

    async def open(self) -> None:
        """Open all calls and wait for the first answer of each."""

    async def hold(self, seconds: float) -> None:
        """Keep them busy for `seconds`."""

    async def burst(self) -> None:
        """Use all at once."""

    def close(self) -> Counts:
        """Drop all connections and return the counts."""


@dataclass(slots=True)
class _Call:
    connection: Http2Connection
    stream_id: int = 0
    received: int = 0
    is_open: bool = False
    is_ended: bool = False


async def _connections(endpoint: str, count: int) -> list[Http2Connection]:
    return [await Http2Connection.connect(endpoint) for _ in range(count)]


class Watches:
    """Watches of every change from the present end of the log on."""

    def __init__(self, endpoint: str, count: int, connections: int) -> None:
        self._endpoint, self._count, self._connection_count = endpoint, count, connections
        self._calls: list[_Call] = []
        self.changes = self.fewest = 0

    async def prepare(self) -> None:
        """Connect."""
        self._connections = await _connections(self._endpoint, self._connection_count)

    async def open(self) -> None:
        """Begin all watches."""
        request = _watch_request().SerializeToString()
        for _, connection in zip(range(self._count), itertools.cycle(self._connections)):
            self._begin(connection, request)
            await asyncio.sleep(1 / OPENED_A_SECOND)
        await _until(lambda: all(call.is_open or call.is_ended for call in self._calls))

    async def hold(self, seconds: float) -> None:
        """Put values for so long, and receive them everywhere."""
        putter = Putter(Load(endpoint=self._endpoint, ranges=1, in_flight=1))
        await putter.open()
        for call in self._calls:
            call.received = 0
        keys = itertools.count()
        putting: set[asyncio.Task[None]] = set()
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            if len(putting) < CHANGES_IN_FLIGHT:
                putting.add(task := asyncio.create_task(self._put(putter, next(keys))))
                task.add_done_callback(putting.discard)
            await asyncio.sleep(1 / CHANGES_A_SECOND)
        await asyncio.gather(*putting)
        await putter.close()
        await asyncio.sleep(LAG_S)
        self.fewest = min((each.received for each in self._calls if not each.is_ended), default=0)

    async def burst(self) -> None:
        """Nothing: changes come to all watches at once anyway."""

    def close(self) -> Counts:
        """Drop all connections."""
        alive = [call for call in self._calls if not call.is_ended]
        counts = Counts(
            opened=sum(call.is_open for call in self._calls),
            refused=sum(call.is_ended for call in self._calls),
            missing=sum(not call.is_open and not call.is_ended for call in self._calls),
            messages=sum(call.received for call in alive),
            changes=self.changes,
            fewest=self.fewest,
        )
        _drop(self._connections)
        return counts

    async def _put(self, putter: Putter, key: int) -> None:
        # A leader that loses its office answers no more; that is the finding, not a failure.
        with contextlib.suppress(Http2Error):
            await putter.commit(key)
            self.changes += 1

    def _begin(self, connection: Http2Connection, request: bytes) -> None:
        call = _Call(connection)

        def take(message: bytes) -> None:
            call.is_open = True
            if message:
                response = metadata_pb2.WatchResponse.FromString(message)
                call.received += len(records_pb2.RecordSet.FromString(response.records).records)

        def end() -> None:
            call.is_ended = True

        call.stream_id = connection.open("/streammeta.v1.MetadataService/Watch", take, end)
        connection.send(call.stream_id, request, is_last=True)
        self._calls.append(call)


def _watch_request() -> metadata_pb2.WatchRequest:
    request = metadata_pb2.WatchRequest()
    # A commit measured with these scripts as the baseline may not know the field.
    if "may_combine" in request.DESCRIPTOR.fields_by_name:
        request.may_combine = True
    return request


@dataclass(slots=True)
class _Pipeline(_Call):
    slot: OpenSlot | None = None
    unanswered: int = 0
    errors: int = field(default=0)


class Pipelines:
    """Commit pipelines, each with one stream of the map to itself."""

    def __init__(self, endpoint: str, count: int, connections: int) -> None:
        self._endpoint, self._count, self._connection_count = endpoint, count, connections
        self._pipelines: list[_Pipeline] = []

    async def prepare(self) -> None:
        """Create the streams, prepare object ids, connect."""
        self._control = await Http2Connection.connect(self._endpoint)
        load = Load(endpoint=self._endpoint, ranges=1, in_flight=self._count)
        self._slots = await open_slots(self._control, load)
        self._ids = PreparedIds(self._control)
        await self._ids.fetch(3 * self._count)
        self._connections = await _connections(self._endpoint, self._connection_count)

    async def open(self) -> None:
        """Begin all pipelines, each with a commit."""
        for slot, connection in zip(self._slots, itertools.cycle(self._connections)):
            await self._begin(connection, slot)
            await asyncio.sleep(1 / OPENED_A_SECOND)
        await self._answered()

    async def hold(self, seconds: float) -> None:
        """Commit on one after the other."""
        ends = time.monotonic() + seconds
        for pipeline in itertools.cycle(self._usable() or [None]):
            if pipeline is None or time.monotonic() >= ends:
                break
            await self._commit(pipeline)
            await asyncio.sleep(1 / MESSAGES_A_SECOND)
        await asyncio.sleep(max(0.0, ends - time.monotonic()))
        await self._answered()

    async def burst(self) -> None:
        """Commit on all at once."""
        for pipeline in self._usable():
            await self._commit(pipeline)
        await self._answered()

    def close(self) -> Counts:
        """Drop all connections."""
        pipelines = self._pipelines
        counts = Counts(
            opened=sum(each.received > 0 for each in pipelines),
            refused=sum(each.is_ended for each in pipelines),
            missing=sum(each.unanswered > 0 and not each.is_ended for each in pipelines),
            messages=sum(each.received for each in pipelines),
        )
        _drop([*self._connections, self._control])
        return counts

    async def _begin(self, connection: Http2Connection, slot: OpenSlot) -> None:
        pipeline = _Pipeline(connection, slot=slot)

        def take(message: bytes) -> None:
            answer = objects_pb2.CommitPipelineResponse.FromString(message)
            pipeline.errors += any(
                each != common_pb2.ERROR_CODE_NONE for each in answer.uploads.errors
            )
            pipeline.unanswered -= 1
            pipeline.received += 1

        def end() -> None:
            pipeline.is_ended = True

        path = "/streammeta.v1.ObjectService/CommitPipeline"
        pipeline.stream_id = connection.open(path, take, end)
        self._pipelines.append(pipeline)
        await self._commit(pipeline)

    async def _commit(self, pipeline: _Pipeline) -> None:
        if pipeline.is_ended or pipeline.slot is None:
            return
        message = upload_message([(pipeline.slot, await self._ids.next())])
        pipeline.slot.streams.advance()
        pipeline.unanswered += 1
        pipeline.connection.send(pipeline.stream_id, message)

    def _usable(self) -> list[_Pipeline]:
        return [each for each in self._pipelines if not each.is_ended]

    async def _answered(self) -> None:
        await _until(lambda: all(each.is_ended or each.unanswered <= 0 for each in self._pipelines))


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110 - looks at thousands
        await asyncio.sleep(0.02)


def _drop(connections: Sequence[Http2Connection]) -> None:
    for connection in connections:
        connection.close()


async def run(followers: Followers, seconds: float) -> Counts:
    """Go through all phases."""
    await followers.prepare()
    print("ready prepared", flush=True)
    await followers.open()
    print("ready opened", flush=True)
    await followers.hold(seconds)
    print("ready held", flush=True)
    await followers.burst()
    print("ready burst", flush=True)
    counts = followers.close()
    await asyncio.sleep(AFTER_CLOSE_S)
    print("ready closed", flush=True)
    return counts


def main() -> None:
    """Run the load named on the command line and print its counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--endpoint", required=True, help="of the leader")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    kind = Watches if arguments.kind == "watches" else Pipelines
    followers = kind(arguments.endpoint, arguments.count, arguments.connections)
    try:
        counts = uvloop.run(run(followers, arguments.seconds))
    except Http2Error as error:
        raise SystemExit(f"the leader did not serve: {error}") from None
    print(json.dumps({name: getattr(counts, name) for name in Counts.__slots__}), flush=True)


if __name__ == "__main__":
    main()

"""Client processes of the brokers benchmark: brokers that beat and watch, or commits at a rate.

    python -m scripts.benchmarks.broker_load brokers --leader HOST:PORT --watch-at HOST:PORT,... \
        --first 0 --count 100 --heartbeat-s 3 --output seen.npz
    python -m scripts.benchmarks.broker_load commits --leader HOST:PORT --rate 2000 --seconds 10 \
        --output acknowledged.npz

Brokers print `ready watching` once each has its first answers, and go on until SIGTERM. Commits
print `ready measuring` when the time begins to count, and `ready measured` when it ends. Either
writes what it saw and when to its output, by the machine's monotonic clock, and ends with one JSON
object.
"""

import argparse
import asyncio
import json
import random
import signal
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import uvloop

from scripts.benchmarks.committer import Load, LoadError
from scripts.benchmarks.figures import percentile
from scripts.benchmarks.http2 import Http2Connection, Http2Error
from scripts.benchmarks.streammeta_client import PipelinedCommitter, call
from streammeta.v1 import common_pb2, metadata_pb2, nodes_pb2

FIRST_NODE_ID = 2_000
JOINING_AT_ONCE = 16
SLOTS = 64
WARM_UP_S = 1.0
SPARE_S = 2.0
"""Seconds of commits for which ids are prepared beyond those that count."""


@dataclass(slots=True)
class Seen:
    """What the watches of this process received: which, up to which offset, and when."""

    watch: "array[int]" = field(default_factory=lambda: array("q"))
    offset: "array[int]" = field(default_factory=lambda: array("q"))
    at: "array[float]" = field(default_factory=lambda: array("d"))

    def save(self, path: Path) -> None:
        """Write columns for `numpy.load`."""
        np.savez(
            path,
            watch=np.array(self.watch, dtype=np.int64),
            offset=np.array(self.offset, dtype=np.int64),
            at=np.array(self.at, dtype=np.float64),
        )


class Broker:
    """One broker: a connection to the leader, and one to the controller that it watches at."""

    def __init__(self, number: int, heartbeat_s: float, seen: Seen) -> None:
        self._number = number
        self._node = common_pb2.NodeIdentity(node_id=FIRST_NODE_ID + number, node_epoch=1)
        self._interval_s = heartbeat_s
        self._seen = seen
        self._has_begun = asyncio.Event()
        self.latencies_s: list[float] = []
        self.missed = 0

    async def join(self, leader: str, watched: str) -> None:
        """Register, beat once, and watch all streams from the present on."""
        self._control = await Http2Connection.connect(leader)
        answer = await call(
            self._control,
            "NodeService/RegisterNode",
            nodes_pb2.RegisterNodeRequest(node=self._node),
            nodes_pb2.RegisterNodeResponse,
        )
        if answer.error != common_pb2.ERROR_CODE_NONE:
            raise LoadError(f"RegisterNode was answered with error {answer.error}")
        await self._beat()
        self._watching = await Http2Connection.connect(watched)
        request = metadata_pb2.WatchRequest(
            kinds=[metadata_pb2.ENTITY_KIND_STREAM], may_combine=True
        )
        path = "/streammeta.v1.MetadataService/Watch"
        stream_id = self._watching.open(path, self._take, self._ended)
        self._watching.send(stream_id, request.SerializeToString(), is_last=True)
        await self._has_begun.wait()

    async def beat_on(self) -> None:
        """Send heartbeats until cancelled, the first at a random time of the interval."""
        due = time.monotonic() + random.random() * self._interval_s
        while True:
            await asyncio.sleep(due - time.monotonic())
            await self._beat()
            due = max(due + self._interval_s, time.monotonic())

    def close(self) -> None:
        """Drop the connections."""
        self._control.close()
        self._watching.close()

    async def _beat(self) -> None:
        began = time.monotonic()
        request = nodes_pb2.HeartbeatRequest(node=self._node)
        try:
            async with asyncio.timeout(self._interval_s):
                answer = await call(
                    self._control, "NodeService/Heartbeat", request, nodes_pb2.HeartbeatResponse
                )
        except (TimeoutError, Http2Error):
            self.missed += 1
            return
        self.missed += answer.error != common_pb2.ERROR_CODE_NONE
        self.latencies_s.append(time.monotonic() - began)

    def _take(self, message: bytes) -> None:
        self._seen.watch.append(self._number)
        self._seen.offset.append(metadata_pb2.WatchResponse.FromString(message).offset)
        self._seen.at.append(time.monotonic())
        self._has_begun.set()

    def _ended(self) -> None:
        self._has_begun.set()


async def run_brokers(arguments: argparse.Namespace) -> dict[str, object]:
    """Join, go on until SIGTERM, and return counts."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    seen = Seen()
    numbers = range(arguments.first, arguments.first + arguments.count)
    brokers = [Broker(number, arguments.heartbeat_s, seen) for number in numbers]
    door = asyncio.Semaphore(JOINING_AT_ONCE)

    async def join(number: int, broker: Broker) -> None:
        async with door:
            watched = arguments.watch_at[number % len(arguments.watch_at)]
            await broker.join(arguments.leader, watched)

    await asyncio.gather(*map(join, numbers, brokers))
    beating = [asyncio.create_task(broker.beat_on()) for broker in brokers]
    print("ready watching", flush=True)
    await ended.wait()
    for task in beating:
        task.cancel()
    await asyncio.gather(*beating, return_exceptions=True)
    for broker in brokers:
        broker.close()
    await asyncio.to_thread(seen.save, arguments.output)
    latencies_s = [each for broker in brokers for each in broker.latencies_s]
    return {
        "sent": len(latencies_s) + sum(broker.missed for broker in brokers),
        "missed": sum(broker.missed for broker in brokers),
        "heartbeat_p99_ms": round(percentile(latencies_s, 0.99) * 1000, 2),
        "messages": len(seen.at),
    }


@dataclass(slots=True)
class Acknowledged:
    """Commits that were answered while the time counted."""

    object_id: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)


async def run_commits(arguments: argparse.Namespace) -> dict[str, object]:
    """Commit at the rate for so long, and return figures."""
    objects = int(arguments.rate * (WARM_UP_S + arguments.seconds + SPARE_S))
    load = Load(endpoint=arguments.leader, ranges=1, in_flight=SLOTS, objects=objects)
    committer = PipelinedCommitter(load)
    await committer.open()
    done = Acknowledged()
    begins = time.monotonic() + WARM_UP_S
    ends = begins + arguments.seconds

    async def commit_on(slot: int) -> None:
        interval_s = SLOTS / arguments.rate
        due = time.monotonic() + slot / SLOTS * interval_s
        while due < ends:
            await asyncio.sleep(due - time.monotonic())
            asked = time.monotonic()
            object_id = await committer.commit_next(slot)
            answered = time.monotonic()
            if begins <= answered < ends:
                done.object_id.append(object_id)
                done.at.append(answered)
                done.latencies_s.append(answered - asked)
            due += interval_s

    async with asyncio.TaskGroup() as group:
        for slot in range(SLOTS):
            group.create_task(commit_on(slot))
        await asyncio.sleep(begins - time.monotonic())
        print("ready measuring", flush=True)
        await asyncio.sleep(ends - time.monotonic())
        print("ready measured", flush=True)
    await committer.close()
    np.savez(
        arguments.output,
        object_id=np.array(done.object_id, dtype=np.int64),
        at=np.array(done.at, dtype=np.float64),
    )
    if not done.at:
        raise LoadError(f"no commit was acknowledged within {arguments.seconds:g} s")
    return {
        "commits_per_s": round(len(done.at) / arguments.seconds, 1),
        "p50_ms": round(percentile(done.latencies_s, 0.5) * 1000, 2),
        "p99_ms": round(percentile(done.latencies_s, 0.99) * 1000, 2),
    }


def main() -> None:
    """Run the load named on the command line and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    brokers, commits = kinds.add_parser("brokers"), kinds.add_parser("commits")
    for each in (brokers, commits):
        each.add_argument("--leader", required=True)
        each.add_argument("--output", type=Path, required=True)
    brokers.add_argument("--watch-at", type=lambda text: text.split(","), required=True)
    brokers.add_argument("--first", type=int, required=True)
    brokers.add_argument("--count", type=int, required=True)
    brokers.add_argument("--heartbeat-s", type=float, required=True)
    commits.add_argument("--rate", type=int, required=True)
    commits.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    run = run_brokers if arguments.kind == "brokers" else run_commits
    try:
        figures = uvloop.run(run(arguments))
    except Http2Error as error:
        raise SystemExit(f"the leader did not serve: {error}") from None
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()

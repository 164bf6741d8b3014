"""Client processes of the brokers benchmark: heartbeats and watches, and commits at a rate.

Either writes its observations and their times to a file, by the machine's monotonic clock.
"""

import asyncio
import random
import signal
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from scripts.benchmarks.committer import Load, LoadError
from scripts.benchmarks.figures import latencies, percentile
from scripts.benchmarks.http2 import Http2Connection, Http2Error
from scripts.benchmarks.streammeta_client import PipelinedCommitter, call
from streammeta.v1 import common_pb2, metadata_pb2, nodes_pb2

FIRST_NODE_ID = 2_000
JOINING_AT_ONCE = 16
SLOTS = 64
WARM_UP_S = 1.0
SPARE_S = 2.0
"""Seconds of commits for which ids are prepared beyond the measured ones."""


@dataclass(slots=True)
class Seen:
    """Messages of this process's watches: which watch, up to which offset, and when."""

    watch: "array[int]" = field(default_factory=lambda: array("q"))
    offset: "array[int]" = field(default_factory=lambda: array("q"))
    at: "array[float]" = field(default_factory=lambda: array("d"))

    def save(self, path: str) -> None:
        """Write columns for `numpy.load`."""
        watch, offset, at = (np.array(column) for column in (self.watch, self.offset, self.at))
        np.savez(path, watch=watch, offset=offset, at=at)


class Broker:
    """One broker: a connection to the leader, and one to the controller of its watch."""

    def __init__(self, number: int, heartbeat_s: float, seen: Seen) -> None:
        self._number = number
        self._node = common_pb2.NodeIdentity(node_id=FIRST_NODE_ID + number, node_epoch=1)
        self._interval_s = heartbeat_s
        self._seen = seen
        self._has_begun = asyncio.Event()
        self.latencies_s: list[float] = []
        self.missed = 0

    async def join(self, leader: str, watched: str) -> None:
        """Register, send a heartbeat, and watch all streams from now on."""
        self._control = await Http2Connection.connect(leader)
        answer = await call(
            self._control,
            "NodeService/RegisterNode",
            nodes_pb2.RegisterNodeRequest(node=self._node),
            nodes_pb2.RegisterNodeResponse,
        )
        if answer.error != common_pb2.ERROR_CODE_NONE:
            raise LoadError(f"RegisterNode was answered with error {answer.error}")
        await self._send_heartbeat()

        self._watching = await Http2Connection.connect(watched)
        kinds = [metadata_pb2.ENTITY_KIND_STREAM]
        request = metadata_pb2.WatchRequest(kinds=kinds, may_combine=True)
        self._watching.begin_watch(request, self._on_message, self._has_begun.set)
        await self._has_begun.wait()

    async def send_heartbeats(self) -> None:
        """Send heartbeats until cancelled, the first at a random time of the interval."""
        due = time.monotonic() + random.random() * self._interval_s
        while True:
            await asyncio.sleep(due - time.monotonic())
            await self._send_heartbeat()
            # A late heartbeat is not followed by a burst of missed ones.
            due = max(due + self._interval_s, time.monotonic())

    def close(self) -> None:
        """Drop the connections."""
        self._control.close()
        self._watching.close()

    async def _send_heartbeat(self) -> None:
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

    def _on_message(self, message: bytes) -> None:
        self._seen.watch.append(self._number)
        self._seen.offset.append(metadata_pb2.WatchResponse.FromString(message).offset)
        self._seen.at.append(time.monotonic())
        self._has_begun.set()


async def run_brokers(
    *, leader: str, watch_at: Sequence[str], first: int, count: int, heartbeat_s: float, output: str
) -> dict[str, object]:
    """Join, run until SIGTERM, and return counts. Prints `ready watching` once all have joined."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    seen = Seen()
    numbers = range(first, first + count)
    brokers = [Broker(number, heartbeat_s, seen) for number in numbers]
    joining = asyncio.Semaphore(JOINING_AT_ONCE)

    async def join(number: int, broker: Broker) -> None:
        async with joining:
            await broker.join(leader, watch_at[number % len(watch_at)])

    await asyncio.gather(*map(join, numbers, brokers))
    beating = [asyncio.create_task(broker.send_heartbeats()) for broker in brokers]
    print("ready watching", flush=True)
    await stopped.wait()
    for task in beating:
        task.cancel()
    await asyncio.gather(*beating, return_exceptions=True)
    for broker in brokers:
        broker.close()

    await asyncio.to_thread(seen.save, output)
    latencies_s = [seconds for broker in brokers for seconds in broker.latencies_s]
    missed = sum(broker.missed for broker in brokers)
    return {
        "sent": len(latencies_s) + missed,
        "missed": missed,
        "heartbeat_p99_ms": round(percentile(latencies_s, 0.99) * 1000, 2),
        "messages": len(seen.at),
    }


async def load_at_rate(*, leader: str, rate: int, seconds: float, output: str) -> dict[str, float]:
    """Commit at `rate` a second and return figures.

    Prints `ready measuring` and `ready measured` around the time that counts. Writes the object ids
    of its commits and the times of their answers to `output`.
    """
    objects = int(rate * (WARM_UP_S + seconds + SPARE_S))
    load = Load(endpoint=leader, ranges=1, in_flight=SLOTS, objects=objects)
    committer = PipelinedCommitter(load)
    await committer.open()
    object_ids: list[int] = []
    answered_at: list[float] = []
    latencies_s: list[float] = []
    begins = time.monotonic() + WARM_UP_S
    ends = begins + seconds

    async def commit_on(slot: int) -> None:
        interval_s = SLOTS / rate
        # Slots start evenly spread, so that commits arrive at a steady rate.
        due = time.monotonic() + slot / SLOTS * interval_s
        while due < ends:
            await asyncio.sleep(due - time.monotonic())
            asked = time.monotonic()
            object_id = await committer.commit(slot)
            answered = time.monotonic()
            if begins <= answered < ends:
                object_ids.append(object_id)
                answered_at.append(answered)
                latencies_s.append(answered - asked)
            due += interval_s

    async with asyncio.TaskGroup() as group:
        for slot in range(SLOTS):
            group.create_task(commit_on(slot))
        await asyncio.sleep(begins - time.monotonic())
        print("ready measuring", flush=True)
        await asyncio.sleep(ends - time.monotonic())
        print("ready measured", flush=True)
    await committer.close()
    if not answered_at:
        raise LoadError(f"no commit was acknowledged within {seconds:g} s")
    np.savez(output, object_id=np.array(object_ids), at=np.array(answered_at))
    figures = latencies(latencies_s, 2)
    return {
        "commits_per_s": round(len(answered_at) / seconds, 1),
        "p50_ms": figures["p50_ms"],
        "p99_ms": figures["p99_ms"],
    }

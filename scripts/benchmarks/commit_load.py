"""The client process of the commit benchmark: many one-range commits in flight at the leader.

    python -m scripts.benchmarks.commit_load --leader HOST:PORT --in-flight 64 --seconds 5

Each of the requests in flight belongs to a stream of its own and is followed by the next commit of
that stream when its answer comes. Speaks gRPC without the client library, whose cost is not
measured here. Prints `ready measuring` when the time begins to count and one JSON object at the
end.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvloop

from proto import common_pb2, kv_pb2, nodes_pb2, objects_pb2, streams_pb2
from scripts.benchmarks.figures import percentile

WARM_UP_S = 1.0
NODE_ID = 1_000
OBJECTS_A_PREPARE = 10_000
OBJECT_TTL_MS = 3_600_000
VALUE_BYTES = 100
OBJECT_BYTES = 1_000_000
STEP = 10
"""Offsets that each commit advances its stream by."""

Send = Callable[[Any], Awaitable[Any]]


class LoadError(Exception):
    """The controller answered with an error."""


@dataclass(slots=True)
class Window:
    """What was acknowledged while the time counted."""

    began: float = float("inf")
    ends: float = float("inf")
    latencies_s: list[float] = field(default_factory=list)

    def take(self, asked: float, answered: float) -> None:
        """Count a commit if it was answered within the window."""
        if self.began <= answered < self.ends:
            self.latencies_s.append(answered - asked)


class Calls:
    """The controller's RPCs over a few connections, used in turn."""

    def __init__(self, leader: str, channels: int) -> None:
        options = (
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", 64 << 20),
        )
        self._channels = [
            grpc.aio.insecure_channel(leader, options=options) for _ in range(channels)
        ]

    async def close(self) -> None:
        """Release the connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def method(self, path: str, response: type[Any], connection: int = 0) -> Send:
        """Return the RPC `path` over one of the connections."""
        send: Send = self._channels[connection % len(self._channels)].unary_unary(
            f"/streammeta.v1.{path}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=response.FromString,
        )
        return send


class ObjectIds:
    """Prepared object ids, fetched before they run out."""

    def __init__(self, calls: Calls, node: common_pb2.NodeIdentity) -> None:
        self._prepare = calls.method(
            "ObjectService/PrepareObjects", objects_pb2.PrepareObjectsResponse
        )
        self._node = node
        self._ids: list[int] = []

    async def fetch(self, count: int) -> None:
        """Prepare at least `count` more."""
        for number in range(-(-count // OBJECTS_A_PREPARE)):
            answer = await self._prepare(
                objects_pb2.PrepareObjectsRequest(
                    request_id=f"bench-{time.monotonic_ns()}-{number}",
                    node=self._node,
                    count=OBJECTS_A_PREPARE,
                    ttl_ms=OBJECT_TTL_MS,
                )
            )
            _require(answer.error, "PrepareObjects")
            first = answer.first_object_id
            self._ids.extend(reversed(range(first, first + OBJECTS_A_PREPARE)))

    async def next(self) -> int:
        """Return an id not used before."""
        while not self._ids:
            await self.fetch(OBJECTS_A_PREPARE)
        return self._ids.pop()


async def commit_ranges(
    calls: Calls, connection: int, stream_id: int, ids: ObjectIds, window: Window
) -> None:
    """Commit one range of one stream after the other until the window ends."""
    commit = calls.method(
        "ObjectService/CommitStreamSetObject",
        objects_pb2.CommitStreamSetObjectResponse,
        connection,
    )
    node, end_offset = _node(), 0
    while time.monotonic() < window.ends:
        object_id = await ids.next()
        request = objects_pb2.CommitStreamSetObjectRequest(
            node=node,
            object_id=object_id,
            order_id=object_id,
            object_size=OBJECT_BYTES,
            ranges=objects_pb2.RangeColumns(
                stream_id=[stream_id],
                stream_epoch=[1],
                start_offset=[end_offset],
                end_offset=[end_offset + STEP],
            ),
        )
        asked = time.monotonic()
        answer = await commit(request)
        window.take(asked, time.monotonic())
        _require(answer.error, "CommitStreamSetObject")
        end_offset += STEP


async def put_values(calls: Calls, connection: int, key: str, window: Window) -> None:
    """Put one small value after the other until the window ends."""
    put = calls.method("KVService/PutKVs", kv_pb2.PutKVsResponse, connection)
    item = kv_pb2.KVToPut(namespace="bench", key=key, value=bytes(VALUE_BYTES), overwrite=True)
    request = kv_pb2.PutKVsRequest(items=[item])
    while time.monotonic() < window.ends:
        asked = time.monotonic()
        answer = await put(request)
        window.take(asked, time.monotonic())
        _require(answer.results[0].error, "PutKVs")


async def open_streams(calls: Calls, count: int) -> list[int]:
    """Register the node, create and open streams, and return their ids."""
    node = _node()
    register = calls.method("NodeService/RegisterNode", nodes_pb2.RegisterNodeResponse)
    _require((await register(nodes_pb2.RegisterNodeRequest(node=node))).error, "RegisterNode")
    create = calls.method("StreamService/CreateStreams", streams_pb2.CreateStreamsResponse)
    created = await create(
        streams_pb2.CreateStreamsRequest(
            request_id=f"bench-{time.monotonic_ns()}",
            node=node,
            streams=[streams_pb2.NewStream() for _ in range(count)],
        )
    )
    _require(created.error, "CreateStreams")
    opened = await calls.method("StreamService/OpenStreams", streams_pb2.OpenStreamsResponse)(
        streams_pb2.OpenStreamsRequest(
            node=node,
            streams=[
                streams_pb2.StreamToOpen(stream_id=stream_id, stream_epoch=1)
                for stream_id in created.stream_ids
            ],
        )
    )
    for stream in opened.streams:
        _require(stream.error, "OpenStreams")
    return list(created.stream_ids)


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Drive the load and return its figures."""
    calls = Calls(arguments.leader, arguments.channels)
    window = Window()
    try:
        workers = await _workers(calls, window, arguments)
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker)
            await asyncio.sleep(WARM_UP_S)
            cpu = time.process_time()
            window.began = time.monotonic()
            window.ends = window.began + arguments.seconds
            print("ready measuring", flush=True)
            await asyncio.sleep(arguments.seconds)
            cpu = time.process_time() - cpu
            print("ready measured", flush=True)
    finally:
        await calls.close()
    return _figures(window, cpu, arguments.seconds)


async def _workers(calls: Calls, window: Window, arguments: argparse.Namespace) -> list[Any]:
    numbers = range(arguments.in_flight)
    if arguments.work == "put":
        return [put_values(calls, number, f"key-{number}", window) for number in numbers]
    streams = await open_streams(calls, arguments.in_flight)
    ids = ObjectIds(calls, _node())
    await ids.fetch(arguments.objects)
    return [commit_ranges(calls, number, streams[number], ids, window) for number in numbers]


def _figures(window: Window, cpu_s: float, seconds: float) -> dict[str, object]:
    if not window.latencies_s:
        raise LoadError(f"no commit was acknowledged within {seconds:.0f} s")
    return {
        "commits": len(window.latencies_s),
        "commits_per_s": round(len(window.latencies_s) / seconds, 1),
        "p50_ms": round(percentile(window.latencies_s, 0.5) * 1000, 3),
        "p99_ms": round(percentile(window.latencies_s, 0.99) * 1000, 3),
        "max_ms": round(max(window.latencies_s) * 1000, 3),
        "client_cpu_s": round(cpu_s, 3),
    }


def _node() -> common_pb2.NodeIdentity:
    return common_pb2.NodeIdentity(node_id=NODE_ID, node_epoch=1)


def _require(error: common_pb2.ErrorCode.ValueType, what: str) -> None:
    if error != common_pb2.NONE:
        raise LoadError(f"{what} was answered with error {common_pb2.ErrorCode.Name(error)}")


def main() -> None:
    """Run the load named on the command line and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leader", required=True)
    parser.add_argument("--work", choices=["commit", "put"], default="commit")
    parser.add_argument("--in-flight", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--channels", type=int, default=2)
    parser.add_argument("--objects", type=int, default=20_000, help="prepared beforehand")
    print(json.dumps(uvloop.run(run(parser.parse_args()))), flush=True)


if __name__ == "__main__":
    main()

"""Metadata watch: a stream of changes that fails over between controllers.

Any controller serves a watch from what is committed, so after a failure the next one is asked to go
on behind the last change that came. Each change is given out once and in order. When no controller
that answers still has what comes next, that is said by an event of its own: nothing is ever
skipped silently.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias

import grpc

from streammeta.client.arguments import (
    INT32_MAX,
    check_endpoints,
    check_int,
    check_ints,
    check_seconds,
)
from streammeta.client.controller_client import refusal
from streammeta.client.errors import ControllerUnavailableError
from streammeta.client.resources import warn_unclosed
from streammeta.rpc.connections import client_channel
from streammeta.rpc.failures import read_failure
from streammeta.rpc.leader_router import ELECTION_BACKOFF, kind_of
from streammeta.v1 import metadata_pb2, records_pb2

DEFAULT_DEADLINE_S = 30.0
DEFAULT_SILENCE_S = 5.0

_PATH = "/streammeta.v1.MetadataService/Watch"


@dataclass(frozen=True, slots=True)
class Change:
    """Changes of one log entry, or of several if the watch combines, reduced to the selection."""

    offset: int
    """Of the log entry, of the last if there are several."""
    records: records_pb2.RecordSet


@dataclass(frozen=True, slots=True)
class SnapshotRequired:
    """Changes from `from_offset` on are compacted away on every controller; the watch has ended.

    Take a copy of the map with GetSnapshot and watch again from its end offset.
    """

    from_offset: int


@dataclass(frozen=True, slots=True)
class Progress:
    """All changes asked for that lie below `next_offset` have been given out.

    `high_watermark` is the committed end of the log as last reported by any controller.
    """

    next_offset: int
    high_watermark: int


WatchEvent: TypeAlias = Change | SnapshotRequired | Progress


class MetadataWatch:
    """One watch; iterate over `follow()` once, on one event loop.

    Empty `kinds`, `stream_ids` and `node_ids` mean all. A controller that sends nothing for
    `silence_s`, not even its position, is given up for the next; after `deadline_s`
    without any that serves, the watch fails. `channel` gives the connection to an endpoint, which
    stays its owner's; without it the watch makes its own. With `progress` each answer of a
    controller is followed by how far the watch is. With `combine` a watch that is behind gets the
    changes of many log entries in one event, as a busy cluster with many watches needs it.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        from_offset: int = 0,
        kinds: Sequence[metadata_pb2.EntityKind.ValueType] = (),
        stream_ids: Sequence[int] = (),
        node_ids: Sequence[int] = (),
        silence_s: float = DEFAULT_SILENCE_S,
        deadline_s: float = DEFAULT_DEADLINE_S,
        rng: random.Random | None = None,
        channel: Callable[[str], grpc.aio.Channel] | None = None,
        progress: bool = False,
        combine: bool = False,
    ) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._endpoints = check_endpoints("endpoints", endpoints)
        self._request = metadata_pb2.WatchRequest(
            kinds=kinds,
            stream_ids=check_ints("stream_ids", stream_ids, "a sequence of stream ids"),
            node_ids=check_ints("node_ids", node_ids, "a sequence of node ids", INT32_MAX),
            may_combine=combine,
        )
        self._silence = check_seconds("silence_s", silence_s)
        self._deadline = check_seconds("deadline_s", deadline_s)
        self._rng = rng or random.Random()
        self._channel = channel or self._own_channel
        self._tells_progress = progress
        self._next_offset = check_int("from_offset", from_offset)
        self._high_watermark = -1
        self._endpoint = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        if getattr(self, "_channels", None):
            warn_unclosed(
                self,
                f"{len(self._channels)} connections to controllers; it may go on later at offset"
                f" {self._next_offset}",
                "use `async with MetadataWatch(...)` or `await watch.close()`",
            )

    async def close(self) -> None:
        """Close the watch's own connections."""
        channels = list(self._channels.values())
        self._channels.clear()
        await asyncio.gather(*(channel.close() for channel in channels))

    @property
    def next_offset(self) -> int:
        """Where to resume later: all changes asked for that lie below have been given out."""
        return self._next_offset

    @property
    def high_watermark(self) -> int:
        """Committed end of the log as last reported; -1 before the first report."""
        return self._high_watermark

    @property
    def endpoint(self) -> str:
        """The controller that serves the watch, or served it last; empty before the first."""
        return self._endpoint

    async def follow(self) -> AsyncGenerator[WatchEvent, None]:
        """Yield changes as they are committed, without end unless a snapshot is required.

        Raises `ControllerUnavailableError` after the deadline, and a `RefusedError` for a request
        that a controller refused.
        """
        search = _Search(self._endpoints, self._rng, self._deadline)
        while True:
            endpoint = search.endpoint
            try:
                async with contextlib.aclosing(self._responses(endpoint)) as responses:
                    async for response in responses:
                        if response.snapshot_required:
                            search.gone(endpoint)
                            break
                        self._endpoint = endpoint
                        search.served()
                        change = self._take(response)
                        if change is not None:
                            yield change
                        if self._tells_progress:
                            yield Progress(self._next_offset, self._high_watermark)
                    else:
                        search.failed(endpoint, "the watch ended")
            except grpc.aio.AioRpcError as error:
                search.failed(endpoint, _reason(error))
            except TimeoutError:
                search.failed(endpoint, f"nothing came for {self._silence:g} s")
            if search.is_gone_everywhere:
                yield SnapshotRequired(self._next_offset)
                return
            await search.turn()

    def _take(self, response: metadata_pb2.WatchResponse) -> Change | None:
        self._high_watermark = max(self._high_watermark, response.high_watermark)
        if response.offset < self._next_offset:
            return None  # only says where the watch stands
        self._next_offset = response.offset + 1
        if not response.records:
            return None
        return Change(response.offset, records_pb2.RecordSet.FromString(response.records))

    async def _responses(self, endpoint: str) -> AsyncGenerator[metadata_pb2.WatchResponse, None]:
        self._request.from_offset = self._next_offset
        call: Any = self._channel(endpoint).unary_stream(
            _PATH,
            request_serializer=metadata_pb2.WatchRequest.SerializeToString,
            response_deserializer=metadata_pb2.WatchResponse.FromString,
        )(self._request)
        try:
            while True:
                async with asyncio.timeout(self._silence):
                    response = await call.read()
                if response is grpc.aio.EOF:
                    return
                yield response
        finally:
            call.cancel()

    def _own_channel(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = client_channel(endpoint)
        return self._channels[endpoint]


class _Search:
    """Rotation over the controllers, with the failure of each since one last served the watch."""

    def __init__(self, endpoints: Sequence[str], rng: random.Random, deadline_s: float) -> None:
        self._endpoints = endpoints
        self._rng = rng
        self._deadline = deadline_s
        self._turn = rng.randrange(len(endpoints))
        self._loop = asyncio.get_running_loop()
        self.served()

    @property
    def endpoint(self) -> str:
        """The endpoint to ask now."""
        return self._endpoints[self._turn]

    @property
    def is_gone_everywhere(self) -> bool:
        """Whether all were asked, and those that answered no longer have the next change."""
        return bool(self._gone) and len(self._gone) + len(self._failed) >= len(self._endpoints)

    def served(self) -> None:
        """Note that a controller served the watch."""
        self._served_at = self._loop.time()
        self._rounds = 0
        self._gone: set[str] = set()
        self._failed: dict[str, str] = {}

    def gone(self, endpoint: str) -> None:
        """Note that a controller no longer has the next change."""
        self._failed.pop(endpoint, None)
        self._gone.add(endpoint)

    def failed(self, endpoint: str, reason: str) -> None:
        """Note that a controller failed to serve."""
        self._gone.discard(endpoint)
        self._failed[endpoint] = reason

    async def turn(self) -> None:
        """Move on to the next controller; wait after each round."""
        if self._loop.time() - self._served_at > self._deadline:
            raise ControllerUnavailableError("Watch", self._deadline, self._failed)
        self._turn = (self._turn + 1) % len(self._endpoints)
        self._rounds += 1
        if self._rounds >= len(self._endpoints):
            round_number = self._rounds // len(self._endpoints) - 1
            await asyncio.sleep(ELECTION_BACKOFF.wait(round_number, self._rng.random()))


def _reason(error: grpc.aio.AioRpcError) -> str:
    """Return why an attempt failed if another controller may serve; raise the error if not."""
    failure = read_failure(error)
    if failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED and failure.reason:
        return failure.text  # too many watchers, or this one was too slow: another may have room
    if kind_of(failure) is None:
        raise refusal("Watch", failure) from error
    return failure.text

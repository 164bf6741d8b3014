"""Metadata watch: a stream of changes that fails over between controllers.

Any controller serves a watch of committed changes. The client's `spread` chooses the controller,
and after a failure the next one continues after the last received change. A watch served by the
leader moves to another controller after a random delay. Each change is yielded once and in order,
and none is skipped: the watch ends when no reachable controller still has the next change. Private
to the package, because it returns records of the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from streammeta.client.arguments import check_client, check_int, check_ints, check_seconds
from streammeta.client.controllers.controller_client import ControllerClient, rejection
from streammeta.client.errors import ControllerUnavailableError
from streammeta.rpc.leader_router import ELECTION_BACKOFF, kind_of
from streammeta.v1 import metadata_pb2, records_pb2

DEFAULT_DEADLINE_S = 30.0
DEFAULT_SILENCE_S = 5.0

LEAVE_LEADER_WITHIN_S = 60.0
"""Time in which watches leave a new leader, in seconds, each after a random part of it."""

_PATH = "/streammeta.v1.MetadataService/Watch"


@dataclass(frozen=True, slots=True)
class Change:
    """Changes of one log entry, or of several if the watch combines, limited to the selection.

    `offset` belongs to the log entry, or to the last of several.
    """

    offset: int
    records: records_pb2.RecordSet


class MetadataWatch:
    """One watch over the connections of `client`. Iterate over `follow()` once.

    Empty `kinds` and `stream_ids` mean all. Empty `kv_prefixes`, of (namespace, prefix), mean all
    changes of keys. A controller that is silent for `silence_s`, without even a position, is
    replaced by the next one. After `deadline_s` without a controller the watch fails. With
    `combine` a watch that lags gets the changes of many log entries in one, which a busy cluster
    with many watches needs.

    All selected changes below `next_offset` have been yielded. A later watch continues there.
    `high_watermark` is the last reported committed end of the log, 0 before the first report.
    `endpoint` is the controller that serves or last served the watch, empty before the first.
    """

    def __init__(
        self,
        client: ControllerClient,
        *,
        from_offset: int = 0,
        kinds: Sequence[metadata_pb2.EntityKind.ValueType] = (),
        stream_ids: Sequence[int] = (),
        kv_prefixes: Sequence[tuple[str, str]] = (),
        silence_s: float = DEFAULT_SILENCE_S,
        deadline_s: float = DEFAULT_DEADLINE_S,
        combine: bool = False,
    ) -> None:
        check_client(client)
        self._client = client
        self._request = metadata_pb2.WatchRequest(
            kinds=kinds,
            stream_ids=check_ints("stream_ids", stream_ids, "a sequence of stream ids"),
            may_combine=combine,
            kv_prefixes=[
                metadata_pb2.KVPrefix(namespace=namespace, prefix=prefix)
                for namespace, prefix in kv_prefixes
            ],
        )
        self._silence = check_seconds("silence_s", silence_s)
        self._deadline = check_seconds("deadline_s", deadline_s)
        self.next_offset = check_int("from_offset", from_offset)
        self.high_watermark = 0
        self.endpoint = ""
        self._leaves_at: float | None = None

    async def follow(self) -> AsyncGenerator[Change | None, None]:
        """Yield a change, or None for progress alone, for each answer of a controller.

        Ends when changes from `next_offset` on are compacted away on every controller: take a
        snapshot and watch again from its end offset. Raises `ControllerUnavailableError` after the
        deadline, and a `RejectedError` for a rejected request.
        """
        await self._client.learn_controllers()
        search = _Search(self._client, self._deadline)
        while True:
            endpoint = search.endpoint
            try:
                async with contextlib.aclosing(self._responses(endpoint)) as responses:
                    async for response in responses:
                        if response.snapshot_required:
                            search.note_compacted(endpoint)
                            break
                        self.endpoint = endpoint
                        search.note_served()
                        yield self._read_change(response)
                        if await self._should_leave(endpoint):
                            break
                    else:
                        search.note_failure(endpoint, "the watch ended")
            except grpc.aio.AioRpcError as error:
                search.note_failure(endpoint, self._reason(error))
            except TimeoutError:
                search.note_failure(endpoint, f"no answer for {self._silence:g} s")

            if search.is_compacted_everywhere:
                return

            self._client.tally.watch_restarts += 1
            await search.move_on()

    async def _should_leave(self, endpoint: str) -> bool:
        """Return whether it is time to move from the leader to a less busy controller."""
        spread, leader = self._client.spread, self._client.leader
        if spread.leads(endpoint, leader):
            await self._client.learn_controllers()  # there may be new ones
        if not spread.has_better(endpoint, leader):
            self._leaves_at = None
            return False
        now = asyncio.get_running_loop().time()
        # Each watch leaves at its own time, or all would reconnect at once after an election.
        if self._leaves_at is None:
            self._leaves_at = now + random.random() * LEAVE_LEADER_WITHIN_S
        return now >= self._leaves_at

    def _read_change(self, response: metadata_pb2.WatchResponse) -> Change | None:
        # A controller that lags may report less than the previous one.
        self.high_watermark = max(self.high_watermark, response.high_watermark)
        if response.offset < self.next_offset:
            return None  # only reports the position of the watch
        # Before the change is yielded: a caller that stops there must not get it again.
        self.next_offset = response.offset + 1
        if not response.records:
            return None
        return Change(response.offset, records_pb2.RecordSet.FromString(response.records))

    async def _responses(self, endpoint: str) -> AsyncGenerator[metadata_pb2.WatchResponse, None]:
        self._request.from_offset = self.next_offset
        call: Any = self._client.channel(endpoint).unary_stream(
            _PATH,
            request_serializer=metadata_pb2.WatchRequest.SerializeToString,
            response_deserializer=metadata_pb2.WatchResponse.FromString,
        )(self._request)

        try:
            while True:
                async with asyncio.timeout(self._silence):
                    response = await self._read(call)
                if response is grpc.aio.EOF:
                    return
                yield response
        finally:
            # Also when the caller stops iterating, or the stream would stay open on the controller.
            call.cancel()

    async def _read(self, call: Any) -> Any:
        """Return the next response, or EOF, also when a new channel replaces this one."""
        try:
            return await call.read()
        except asyncio.CancelledError:
            if not self._client.was_replaced():
                raise
            return grpc.aio.EOF

    def _reason(self, error: grpc.aio.AioRpcError) -> str:
        """Return why an attempt failed if another controller may serve. Else raise the error."""
        failure = self._client.failure(error)
        if failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED and failure.reason:
            # Too many watchers, or this one was too slow: another controller may have capacity.
            return failure.text
        if kind_of(failure) is None:
            raise rejection("Watch", failure) from error
        return failure.text


class _Search:
    """Choice of the next controller, with each one's failure since the watch was last served."""

    def __init__(self, client: ControllerClient, deadline_s: float) -> None:
        self._client = client
        self._deadline = deadline_s
        self._loop = asyncio.get_running_loop()
        self._served_at = self._loop.time()
        self._rounds = 0
        self._tried: set[str] = set()
        self._compacted: set[str] = set()
        self._failed: dict[str, str] = {}
        self.endpoint = self._order()[0]

    def _order(self) -> list[str]:
        return self._client.spread.order(self._client.leader)

    @property
    def is_compacted_everywhere(self) -> bool:
        """Return whether no reachable controller has the next change."""
        return bool(self._compacted) and self._compacted | self._failed.keys() >= set(self._order())

    def note_served(self) -> None:
        """Record that a controller served the watch."""
        self._served_at = self._loop.time()
        self._rounds = 0
        self._tried.clear()
        self._compacted.clear()
        self._failed.clear()
        self._client.spread.clear_failure(self.endpoint)

    def note_compacted(self, endpoint: str) -> None:
        """Record that a controller no longer has the next change."""
        self._failed.pop(endpoint, None)
        self._compacted.add(endpoint)

    def note_failure(self, endpoint: str, reason: str) -> None:
        """Record that a controller failed to serve."""
        self._compacted.discard(endpoint)
        self._failed[endpoint] = reason
        self._client.spread.prefer_others(endpoint)

    async def move_on(self) -> None:
        """Choose the next controller. Wait after each round."""
        if self._loop.time() - self._served_at > self._deadline:
            raise ControllerUnavailableError("Watch", self._deadline, self._failed, is_read=True)
        self._tried.add(self.endpoint)
        # The order is read again each time: the list of controllers may have changed.
        if self._tried.issuperset(self._order()):
            self._tried.clear()
            await asyncio.sleep(ELECTION_BACKOFF.wait(self._rounds, random.random()))
            self._rounds += 1
            await self._client.learn_controllers()
        remaining = (endpoint for endpoint in self._order() if endpoint not in self._tried)
        self.endpoint = next(remaining)

"""Metadata watch: a stream of changes that fails over between controllers.

Any controller serves a watch from what is committed; the client's `spread` says which one is asked,
and after a failure the next one goes on behind the last change that came. A watch that finds itself
at the leader leaves for another controller in its own time. Each change is given out once and in
order, and nothing is ever skipped: the watch ends when no controller that answers still has what
comes next. Private to the package, for it hands out records of the wire.
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
from streammeta.client.controllers.controller_client import ControllerClient, refusal
from streammeta.client.errors import ControllerUnavailableError
from streammeta.rpc.leader_router import ELECTION_BACKOFF, kind_of
from streammeta.v1 import metadata_pb2, records_pb2

DEFAULT_DEADLINE_S = 30.0
DEFAULT_SILENCE_S = 5.0

LEAVE_LEADER_WITHIN_S = 60.0
"""Time in which watches leave a controller that has come to lead, in seconds, each at random."""

_PATH = "/streammeta.v1.MetadataService/Watch"


@dataclass(frozen=True, slots=True)
class Change:
    """Changes of one log entry, or of several if the watch combines, reduced to the selection.

    `offset` is that of the log entry, of the last if there are several.
    """

    offset: int
    records: records_pb2.RecordSet


class MetadataWatch:
    """One watch over the connections of `client`; iterate over `follow()` once.

    Empty `kinds` and `stream_ids` mean all; so do empty `kv_prefixes`, of (namespace, prefix), for
    changes of keys. A controller that sends nothing for `silence_s`, not
    even its position, is given up for the next; after `deadline_s` without any that serves, the
    watch fails. With `combine` a watch that is behind gets the changes of many log entries in one,
    as a busy cluster with many watches needs it.

    All changes asked for below `next_offset` have been given out; a later watch goes on there.
    `high_watermark` is the committed end of the log as last reported, 0 before the first report.
    `endpoint` is the controller that serves the watch, or served it last; empty before the first.
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
        """Yield what each answer of a controller brings: a change, or None for mere progress.

        Ends when changes from `next_offset` on are compacted away on every controller: take a
        snapshot and watch again from its end offset. Raises `ControllerUnavailableError` after the
        deadline, and a `RefusedError` for a request that a controller refused.
        """
        await self._client.learn_controllers()
        search = _Search(self._client, self._deadline)
        while True:
            endpoint = search.endpoint
            try:
                async with contextlib.aclosing(self._responses(endpoint)) as responses:
                    async for response in responses:
                        if response.snapshot_required:
                            search.gone(endpoint)
                            break
                        self.endpoint = endpoint
                        search.served()
                        yield self._take(response)
                        if await self._should_leave(endpoint):
                            break
                    else:
                        search.failed(endpoint, "the watch ended")
            except grpc.aio.AioRpcError as error:
                search.failed(endpoint, self._reason(error))
            except TimeoutError:
                search.failed(endpoint, f"nothing came for {self._silence:g} s")
            if search.is_gone_everywhere:
                return
            self._client.tally.watch_restarts += 1
            await search.turn()

    async def _should_leave(self, endpoint: str) -> bool:
        """Whether it is time to go from the leader to a controller that has less to do."""
        spread, leader = self._client.spread, self._client.leader
        if spread.leads(endpoint, leader):
            await self._client.learn_controllers()  # there may be others by now
        if not spread.has_better(endpoint, leader):
            self._leaves_at = None
            return False
        now = asyncio.get_running_loop().time()
        if self._leaves_at is None:
            self._leaves_at = now + random.random() * LEAVE_LEADER_WITHIN_S
        return now >= self._leaves_at

    def _take(self, response: metadata_pb2.WatchResponse) -> Change | None:
        self.high_watermark = max(self.high_watermark, response.high_watermark)
        if response.offset < self.next_offset:
            return None  # only says where the watch stands
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
            call.cancel()

    async def _read(self, call: Any) -> Any:
        """Return the next response, or EOF; also when the channel ends for a new one."""
        try:
            return await call.read()
        except asyncio.CancelledError:
            if not self._client.was_replaced():
                raise
            return grpc.aio.EOF

    def _reason(self, error: grpc.aio.AioRpcError) -> str:
        """Return why an attempt failed if another may serve; raise the error if not."""
        failure = self._client.failure(error)
        if failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED and failure.reason:
            return failure.text  # too many watchers, or this one was too slow: another has room
        if kind_of(failure) is None:
            raise refusal("Watch", failure) from error
        return failure.text


class _Search:
    """The next controller to ask, with the failure of each since one last served the watch."""

    def __init__(self, client: ControllerClient, deadline_s: float) -> None:
        self._client = client
        self._deadline = deadline_s
        self._loop = asyncio.get_running_loop()
        self._served_at = self._loop.time()
        self._rounds = 0
        self._tried: set[str] = set()
        self._gone: set[str] = set()
        self._failed: dict[str, str] = {}
        self.endpoint = self._order()[0]

    def _order(self) -> list[str]:
        return self._client.spread.order(self._client.leader)

    @property
    def is_gone_everywhere(self) -> bool:
        """Whether all were asked, and those that answered no longer have the next change."""
        return bool(self._gone) and self._gone | self._failed.keys() >= set(self._order())

    def served(self) -> None:
        """Note that a controller served the watch."""
        self._served_at = self._loop.time()
        self._rounds = 0
        self._tried.clear()
        self._gone.clear()
        self._failed.clear()
        self._client.spread.answered(self.endpoint)

    def gone(self, endpoint: str) -> None:
        """Note that a controller no longer has the next change."""
        self._failed.pop(endpoint, None)
        self._gone.add(endpoint)

    def failed(self, endpoint: str, reason: str) -> None:
        """Note that a controller failed to serve."""
        self._gone.discard(endpoint)
        self._failed[endpoint] = reason
        self._client.spread.failed(endpoint)

    async def turn(self) -> None:
        """Move on to the next controller; wait after each round."""
        if self._loop.time() - self._served_at > self._deadline:
            raise ControllerUnavailableError("Watch", self._deadline, self._failed, is_read=True)
        self._tried.add(self.endpoint)
        if self._tried.issuperset(self._order()):
            self._tried.clear()
            await asyncio.sleep(ELECTION_BACKOFF.wait(self._rounds, random.random()))
            self._rounds += 1
            await self._client.learn_controllers()
        self.endpoint = next(each for each in self._order() if each not in self._tried)

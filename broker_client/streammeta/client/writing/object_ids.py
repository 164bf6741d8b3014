"""Object ids, prepared ahead in batches.

Owns the stock of ids, their order and how long they stay valid. Ids are returned in ascending
order: later calls get larger ids. Unused ids expire on the controllers. Knows neither objects nor
the use of an id.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from streammeta.client.controllers import methods
from streammeta.client.errors import rejection
from streammeta.client.model import node_message
from streammeta.client.nodes.session import BrokerSession
from streammeta.v1 import common_pb2, objects_pb2

PREPARE_MAX = 10_000
"""Ids that one call may prepare."""

STOCK_MIN = 16
STOCK_MAX = 1024
"""Between these the stock doubles when it was used up in time, and halves when it was not."""


@dataclass(frozen=True, slots=True)
class TakenIds:
    """Ascending ids. Uncommitted ones expire at `deadline_ms` by the leader's clock."""

    ids: tuple[int, ...]
    deadline_ms: int


@dataclass(slots=True)
class _Stock:
    """Ids that are in use until the clock reaches `stale`."""

    ids: range
    deadline_ms: int
    stale: float


class ObjectIds:
    """Prepared ids of one session, each valid for at least half of `ttl_s` when taken.

    `deadline_s` limits one call for more ids, None for the client's default. `clock` returns
    monotonic seconds.
    """

    def __init__(
        self,
        session: BrokerSession,
        ttl_s: float,
        deadline_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._deadline = deadline_s
        self._session = session
        self._ttl_s = ttl_s
        self._stocks: deque[_Stock] = deque()
        self._amount = STOCK_MIN
        # Without it two calls could interleave their fetches, and ids would not be ascending.
        self._order = asyncio.Lock()

    async def take(self, count: int) -> TakenIds:
        """Return `count` ids, larger than all before. Calls are served in their order.

        Raises an error that fences the node, or `ControllerUnavailableError`. No id is lost then.
        """
        async with self._order:
            self._drop_stale()
            # Counted again after each call: the stock may have been discarded meanwhile.
            while (missing := count - sum(len(stock.ids) for stock in self._stocks)) > 0:
                wanted = min(PREPARE_MAX, max(self._amount, missing))
                self._stocks.append(await self._fetch(wanted))
            return self._hand_out(count)

    def discard(self) -> None:
        """Drop the stock after ids of its age have expired."""
        self._stocks.clear()

    def _drop_stale(self) -> None:
        now = self._clock()
        # Ids that expired unused: the stock was too large for the rate of uploads.
        while self._stocks and self._stocks[0].stale <= now:
            self._stocks.popleft()
            self._amount = max(STOCK_MIN, self._amount // 2)

    def _hand_out(self, count: int) -> TakenIds:
        ids: list[int] = []
        # The oldest stock has the earliest deadline, which is the safe one to report.
        deadline_ms = self._stocks[0].deadline_ms
        while len(ids) < count:
            stock = self._stocks[0]
            some = stock.ids[: count - len(ids)]
            ids.extend(some)
            stock.ids = stock.ids[len(some) :]
            if not stock.ids:
                self._stocks.popleft()
                # Used up before it became stale, so the next stock may be larger.
                self._amount = min(STOCK_MAX, self._amount * 2)
        return TakenIds(tuple(ids), deadline_ms)

    async def _fetch(self, count: int) -> _Stock:
        node = self._session.node
        # Before the call: the controllers start the lifetime while it is on its way.
        asked = self._clock()
        answer = await self._session.client.call(
            methods.PREPARE_OBJECTS,
            objects_pb2.PrepareObjectsRequest(
                node=node_message(node), count=count, ttl_ms=round(self._ttl_s * 1000)
            ),
            self._deadline,
        )

        if answer.error != common_pb2.ERROR_CODE_NONE:
            raise rejection(
                answer.error,
                f"preparing {count} objects for node {node.node_id} at epoch {node.node_epoch}",
            )
        ids = range(answer.first_object_id, answer.first_object_id + count)
        # Half of the lifetime is left for the upload and the commit.
        return _Stock(ids, answer.deadline_ms, asked + self._ttl_s / 2)

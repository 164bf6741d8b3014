"""Requests for blocks that are under way: each block once, and neighbours together.

Blocks that are asked for in the same turn of the event loop, by whomever, are fetched with as few
requests as make sense: streams that are tailed lie side by side in one object. A request goes on
while anybody waits for one of its blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from streammeta.client.object_source import Block, BlockRange, ObjectSource, merge_blocks
from streammeta.client.reading.block_cache import BlockKey


@dataclass(slots=True, eq=False)
class _Request:
    """One range of an object on its way, and the blocks in it that somebody wants."""

    wanted: list[_Wanted] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class _Wanted:
    """One block, how many wait for it, and what fetches it once it has been sent for."""

    block: Block
    data: asyncio.Future[bytes]
    waiting: int = 0
    request: _Request | None = None


class BlockRequests:
    """Fetches blocks from `source`."""

    def __init__(self, source: ObjectSource) -> None:
        self._source = source
        self._on_way: dict[BlockKey, _Wanted] = {}
        self._unsent: list[_Wanted] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._on_way

    async def get(self, blocks: Sequence[Block]) -> dict[BlockKey, bytes]:
        """Return the bytes of each block. Raises what a request for any of them does, at the end.

        Who is cancelled while he waits leaves the requests to the others who wait for them.
        """
        if not blocks:
            return {}
        wanted = [self._join(block) for block in blocks]
        try:
            await asyncio.wait([one.data for one in wanted])
            for one in wanted:
                if not one.data.cancelled():
                    one.data.exception()  # of several failures one is raised, all are heard of
            return {one.block.key: one.data.result() for one in wanted}
        finally:
            for one in wanted:
                self._leave(one)

    def close(self) -> None:
        """Give up all requests; who waits is cancelled."""
        for task in self._tasks:
            task.cancel()
        for one in self._on_way.values():
            one.data.cancel()

    def _join(self, block: Block) -> _Wanted:
        one = self._on_way.get(block.key)
        if one is None:
            loop = asyncio.get_running_loop()
            one = self._on_way[block.key] = _Wanted(block, loop.create_future())
            if not self._unsent:
                loop.call_soon(self._send)
            self._unsent.append(one)
        one.waiting += 1
        return one

    def _leave(self, one: _Wanted) -> None:
        one.waiting -= 1
        if one.waiting:
            return
        if self._on_way.get(one.block.key) is one:
            del self._on_way[one.block.key]
        if one.data.done():
            return
        one.data.cancel()
        request = one.request
        if request is not None and all(other.data.done() for other in request.wanted):
            assert request.task is not None
            request.task.cancel()

    def _send(self) -> None:
        unsent = {one.block.key: one for one in self._unsent if not one.data.done()}
        self._unsent = []
        for wanted in merge_blocks(one.block for one in unsent.values()):
            request = _Request([unsent[block.key] for block in wanted.blocks])
            for one in request.wanted:
                one.request = request
            request.task = asyncio.create_task(self._fetch(wanted, request))
            self._tasks.add(request.task)
            request.task.add_done_callback(self._tasks.discard)

    async def _fetch(self, wanted: BlockRange, request: _Request) -> None:
        try:
            datas = await self._source.fetch(wanted)
        except Exception as error:  # noqa: BLE001 - each who waits hears of it
            for one in request.wanted:
                if not one.data.done():
                    one.data.set_exception(error)
        else:
            for one, data in zip(request.wanted, datas, strict=True):
                if not one.data.done():
                    one.data.set_result(data)
        finally:
            for one in request.wanted:
                one.data.cancel()
                one.request = None  # no cycle keeps the bytes until the garbage is collected

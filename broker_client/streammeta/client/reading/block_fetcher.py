"""Block fetcher: blocks from the cache, from a request in flight, or from the store.

Owns the bound on blocks that are being read, with the records made of them. No block is requested
twice at the same time. Blocks requested in the same turn of the event loop are fetched with as few
requests as make sense: streams that are tailed lie side by side in one object. A request is
cancelled when nothing waits for its blocks any more. Prefetching evicts no block that a reader is
expected to read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from streammeta.client.config import ReaderStats
from streammeta.client.errors import CorruptObjectError
from streammeta.client.reading.block_cache import BlockCache, BlockData, BlockKey, Cursor
from streammeta.client.reading.object_source import (
    Block,
    BlockRange,
    ObjectIndex,
    ObjectSource,
    merge_blocks,
)
from streammeta.client.resources.resources import ByteBudget, all_of
from streammeta.storage.object_format.record import RecordBatch


@dataclass(slots=True, eq=False)
class _Request:
    """One range request in flight, and the blocks that callers want of it."""

    wanted: list[_Wanted] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class _Wanted:
    """One block, the number of its callers, and its request once that is sent."""

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

        A cancelled caller leaves its requests to the other callers that wait for them.
        """
        if not blocks:
            return {}
        wanted = [self._join(block) for block in blocks]
        try:
            await asyncio.wait([one.data for one in wanted])
            for one in wanted:
                if not one.data.cancelled():
                    one.data.exception()  # of several failures one is raised, all are retrieved
            return {one.block.key: one.data.result() for one in wanted}
        finally:
            for one in wanted:
                self._leave(one)

    def close(self) -> None:
        """Cancel all requests and their callers."""
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
        except Exception as error:  # noqa: BLE001 - every caller gets it
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


_DECODED_INLINE_BYTES = 64 * 1024
_DECODING_THREADS = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """A block, what was found of it in memory or the store, and the records in that."""

    block: Block
    found: BlockData
    records: list[RecordBatch]

    @property
    def found_size(self) -> int:
        """Bytes that what was found takes."""
        return len(self.found) if isinstance(self.found, bytes) else self.block.decoded_size


class BlockFetcher:
    """Reads blocks; holds at most `read_bytes` for those being read, beside `cache`."""

    def __init__(
        self, source: ObjectSource, cache: BlockCache, stats: ReaderStats, read_bytes: int
    ) -> None:
        self._source = source
        self._cache = cache
        self._stats = stats
        self._budget = ByteBudget(read_bytes)
        self._requests = BlockRequests(source)
        self._decoders = ThreadPoolExecutor(_DECODING_THREADS, thread_name_prefix="decode")

    @property
    def held_bytes(self) -> int:
        """Bytes of blocks and records that are being read."""
        return self._budget.held

    async def read(self, blocks: Sequence[Block], cursor: Cursor) -> tuple[list[ReadBlock], bool]:
        """Return the blocks with their records, and whether the store had to be waited for.

        Raises `CorruptObjectError`, `streammeta.storage.errors.ObjectNotFoundError`.
        """
        async with self._budget.hold(sum(block.cost for block in blocks)):
            found, waited = await self._collect(blocks)
            for block in blocks:
                cursor.ahead.pop(block.key, None)
            decoded, found = await self._decode_afresh(blocks, found)
            parts = zip(blocks, decoded, strict=True)
            return [ReadBlock(one, found[one.key], records) for one, records in parts], waited

    def settle(
        self,
        cursor: Cursor,
        blocks: Sequence[ReadBlock],
        next_offset: int,
        *,
        keep: bool,
    ) -> None:
        """Let go of blocks read up to `next_offset`; those behind it stay for the cursor.

        With `keep` the others stay while there is room.
        """
        before, cursor.partial = cursor.partial, None
        for one in blocks:
            block = one.block
            if block.entry.end_offset <= next_offset:
                self._cache.consumed(block.key, cursor, keep=keep)
                if keep and block.key not in self._cache:
                    self._cache.put(block.key, one.found, one.found_size, None)
                continue
            if cursor.partial is None:
                cursor.partial = block.key
            elif cursor.goes_on:
                cursor.ahead[block.key] = block.entry.size
                cursor.ahead_offset = max(cursor.ahead_offset, block.entry.end_offset)
            self._keep_for(cursor, one)
        if before is not None and before != cursor.partial:
            self._cache.consumed(before, cursor, keep=keep)

    def _keep_for(self, cursor: Cursor, one: ReadBlock) -> None:
        """Keep the records, which take more room than bytes but no more work, if there is room.

        Only a sequential reader is expected to continue.
        """
        reader = cursor if cursor.goes_on else None
        size = one.block.decoded_size
        if self._cache.has_room(one.block.key, size):
            self._cache.put(one.block.key, one.records, size, reader)
        else:
            self._cache.put(one.block.key, one.found, one.found_size, reader)

    async def look_at(self, block: Block) -> list[RecordBatch]:
        """Return the records of one block, which stays while there is room."""
        async with self._budget.hold(block.cost):
            found, _ = await self._collect([block])
            (records,), _ = await self._decode_afresh([block], found)
            if block.key not in self._cache:
                self._cache.put(block.key, records, block.decoded_size, None)
            return records

    async def read_ahead(self, blocks: Sequence[Block], cursor: Cursor) -> None:
        """Fetch blocks into the cache for `cursor`, as far as there is room.

        Failures are only logged: a read of the blocks requests them again and gets the error.
        """
        missing = self._note_ahead(blocks, cursor)
        try:
            await all_of(self._fetch_ahead(one, cursor) for one in merge_blocks(missing))
        except Exception as error:  # noqa: BLE001 - every caller gets it
            _log.debug("stream %d could not be read ahead: %s", cursor.stream_id, error)

    async def read_beside(self, blocks: Sequence[Block], reader: Cursor) -> None:
        """Fetch blocks that `reader` is expected to want, if there is room for them.

        They are requested in the turn in which this begins, so that they come with those of a read
        that is made in the same turn, where they are neighbours. Failures are only logged.
        """
        missing = [one for one in blocks if self.is_absent(one)]
        nbytes = 2 * sum(one.entry.size for one in missing)  # the ranges, and what is cut from them
        if not missing or not self._cache.reserve(nbytes):
            return
        try:
            datas = await self._requests.get(missing)
        except Exception as error:  # noqa: BLE001 - a read requests them again and gets the error
            _log.debug("stream %d could not be read ahead: %s", reader.stream_id, error)
            return
        finally:
            self._cache.release(nbytes)
        for block in missing:
            if block.entry.end_offset > reader.next_offset and block.key not in self._cache:
                self._cache.put(block.key, datas[block.key], len(datas[block.key]), None)

    def is_absent(self, block: Block) -> bool:
        """Return True for a block that is not in memory and was not requested."""
        return block.key not in self._cache and block.key not in self._requests

    def take_whole(self, index: ObjectIndex, data: bytes) -> None:
        """Keep all blocks of a small object while there is room."""
        for entry in index.index:
            block = Block(index.object_id, entry)
            if block.key not in self._cache:
                cut = data[entry.position : entry.position + entry.size]
                self._cache.put(block.key, cut, len(cut), None)

    def forget(self, object_id: int) -> None:
        """Drop the blocks of an object."""
        self._cache.forget_object(object_id)

    def close(self) -> None:
        """Give up what is being fetched."""
        self._requests.close()
        self._decoders.shutdown(wait=False, cancel_futures=True)

    async def _collect(self, blocks: Sequence[Block]) -> tuple[dict[BlockKey, BlockData], bool]:
        """Get the blocks, and tell whether any of them was not in memory."""
        found: dict[BlockKey, BlockData] = {}
        absent: list[Block] = []
        for block in blocks:
            data = self._cache.get(block.key)
            if data is None:
                absent.append(block)
            else:
                found[block.key] = data
        missing = sum(block.key not in self._requests for block in absent)
        self._stats.block_misses += missing
        self._stats.block_hits += len(blocks) - missing
        found.update(await self._requests.get(absent))
        return found, bool(absent)

    async def _decode_afresh(
        self, blocks: Sequence[Block], found: dict[BlockKey, BlockData]
    ) -> tuple[list[list[RecordBatch]], dict[BlockKey, BlockData]]:
        """Decode what was found; fetch it once more if it looks damaged, past all caches."""
        try:
            return await self._decode(blocks, found), found
        except CorruptObjectError as error:
            _log.warning("blocks look damaged, fetching them once more: %s", error)
        for object_id in {block.object_id for block in blocks}:
            self._cache.forget_object(object_id)
        found = dict(await self._requests.get(blocks))
        return await self._decode(blocks, found), found

    async def _decode(
        self, blocks: Sequence[Block], found: dict[BlockKey, BlockData]
    ) -> list[list[RecordBatch]]:
        def decode() -> list[list[RecordBatch]]:
            return [self._records(block, found[block.key]) for block in blocks]

        raw = sum(len(data) for data in found.values() if isinstance(data, bytes))
        if raw <= _DECODED_INLINE_BYTES:
            return decode()
        return await asyncio.get_running_loop().run_in_executor(self._decoders, decode)

    def _records(self, block: Block, data: BlockData) -> list[RecordBatch]:
        return self._source.decode(block, data) if isinstance(data, bytes) else data

    def _note_ahead(self, blocks: Sequence[Block], cursor: Cursor) -> list[Block]:
        """Set read-ahead to `blocks`; return those that are neither here nor on their way."""
        missing: list[Block] = []
        for block in blocks:
            if block.key in self._cache:
                self._cache.expect(block.key, cursor)
            elif block.key not in self._requests:
                missing.append(block)
                continue
            cursor.ahead[block.key] = block.entry.size
            cursor.ahead_offset = block.entry.end_offset
        return missing

    async def _fetch_ahead(self, wanted: BlockRange, cursor: Cursor) -> None:
        nbytes = wanted.end - wanted.start
        if len(wanted.blocks) > 1:
            nbytes *= 2  # the range, and the blocks that are cut from it
        if not self._cache.reserve(nbytes):
            return
        for block in wanted.blocks:
            cursor.ahead[block.key] = block.entry.size
            cursor.ahead_offset = max(cursor.ahead_offset, block.entry.end_offset)
        try:
            datas = await self._requests.get(wanted.blocks)
        except BaseException:
            for block in wanted.blocks:
                cursor.ahead.pop(block.key, None)
            raise
        finally:
            self._cache.release(nbytes)
        for block in wanted.blocks:
            data = datas[block.key]
            self._stats.blocks_read_ahead += 1
            if block.key in cursor.ahead:  # else its reader was faster, or was forgotten
                self._cache.put(block.key, data, len(data), cursor)

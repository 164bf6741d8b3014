"""Block fetcher: blocks from the cache, from a request in flight, or from the store.

Owns the limit on blocks being read, including their decoded records. No block is requested twice at
the same time. Blocks requested in the same iteration of the event loop share as few requests as
make sense: tailed streams are neighbours in one object. A request is cancelled when no caller waits
for its blocks. Prefetching evicts no block that a reader is expected to read.
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
    """One range request in flight, and its requested blocks."""

    wanted: list[_Wanted] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class _Wanted:
    """One block, the number of its callers, and its request once it is sent."""

    block: Block
    data: asyncio.Future[bytes]
    waiting: int = 0
    request: _Request | None = None


class BlockRequests:
    """Fetches blocks from `source`."""

    def __init__(self, source: ObjectSource) -> None:
        self._source = source
        self._in_flight: dict[BlockKey, _Wanted] = {}
        self._unsent: list[_Wanted] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._in_flight

    async def get(self, blocks: Sequence[Block]) -> dict[BlockKey, bytes]:
        """Return the bytes of each block. Raises the error of any request, after all have ended.

        A cancelled caller does not cancel requests that other callers wait for.
        """
        if not blocks:
            return {}
        wanted = [self._join(block) for block in blocks]
        try:
            await asyncio.wait([block_wanted.data for block_wanted in wanted])
            for block_wanted in wanted:
                if not block_wanted.data.cancelled():
                    # One failure is raised, but all must be retrieved, or asyncio logs them.
                    block_wanted.data.exception()
            return {block_wanted.block.key: block_wanted.data.result() for block_wanted in wanted}
        finally:
            for block_wanted in wanted:
                self._leave(block_wanted)

    def close(self) -> None:
        """Cancel all requests and their callers."""
        for task in self._tasks:
            task.cancel()
        for wanted in self._in_flight.values():
            wanted.data.cancel()

    def _join(self, block: Block) -> _Wanted:
        wanted = self._in_flight.get(block.key)
        if wanted is None:
            loop = asyncio.get_running_loop()
            wanted = self._in_flight[block.key] = _Wanted(block, loop.create_future())
            if not self._unsent:
                loop.call_soon(self._send)
            self._unsent.append(wanted)
        wanted.waiting += 1
        return wanted

    def _leave(self, wanted: _Wanted) -> None:
        wanted.waiting -= 1
        if wanted.waiting:
            return
        if self._in_flight.get(wanted.block.key) is wanted:
            del self._in_flight[wanted.block.key]
        if wanted.data.done():
            return

        wanted.data.cancel()
        request = wanted.request
        if request is not None and all(other.data.done() for other in request.wanted):
            assert request.task is not None
            request.task.cancel()

    def _send(self) -> None:
        unsent = {wanted.block.key: wanted for wanted in self._unsent if not wanted.data.done()}
        self._unsent = []
        for range_ in merge_blocks(wanted.block for wanted in unsent.values()):
            request = _Request([unsent[block.key] for block in range_.blocks])
            for wanted in request.wanted:
                wanted.request = request
            request.task = asyncio.create_task(self._fetch(range_, request))
            self._tasks.add(request.task)
            request.task.add_done_callback(self._tasks.discard)

    async def _fetch(self, range_: BlockRange, request: _Request) -> None:
        try:
            datas = await self._source.fetch(range_)
        except Exception as error:  # noqa: BLE001 - every caller receives it
            for wanted in request.wanted:
                if not wanted.data.done():
                    wanted.data.set_exception(error)
        else:
            for wanted, data in zip(request.wanted, datas, strict=True):
                if not wanted.data.done():
                    wanted.data.set_result(data)
        finally:
            for wanted in request.wanted:
                wanted.data.cancel()
                # A reference cycle would keep the bytes until the next garbage collection.
                wanted.request = None


_DECODED_INLINE_BYTES = 64 * 1024
_DECODING_THREADS = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """A block, its data from memory or the store, and the decoded records."""

    block: Block
    found: BlockData
    records: list[RecordBatch]

    @property
    def found_size(self) -> int:
        """Bytes of the block's data as found."""
        return len(self.found) if isinstance(self.found, bytes) else self.block.decoded_size


class BlockFetcher:
    """Reads blocks. Uses at most `read_bytes` for blocks being read, in addition to `cache`."""

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
        """Bytes of blocks and records being read."""
        return self._budget.held

    async def read(self, blocks: Sequence[Block], cursor: Cursor) -> tuple[list[ReadBlock], bool]:
        """Return the blocks with their records, and whether some came from the store.

        Raises `CorruptObjectError`, `streammeta.storage.errors.ObjectNotFoundError`.
        """
        # The budget covers bytes and decoded records, until the caller has the records.
        async with self._budget.hold(sum(block.cost for block in blocks)):
            found, waited = await self._collect(blocks)
            for block in blocks:
                cursor.ahead.pop(block.key, None)
            decoded, found = await self._decode_with_retry(blocks, found)
            parts = zip(blocks, decoded, strict=True)
            return [ReadBlock(block, found[block.key], records) for block, records in parts], waited

    def settle(
        self,
        cursor: Cursor,
        blocks: Sequence[ReadBlock],
        next_offset: int,
        *,
        keep: bool,
    ) -> None:
        """Release blocks read up to `next_offset`. Later blocks stay for the cursor.

        With `keep` the released blocks stay in the cache while there is space.
        """
        before, cursor.partial = cursor.partial, None
        for read_block in blocks:
            block = read_block.block
            if block.entry.end_offset <= next_offset:
                self._cache.release_block(block.key, cursor, keep=keep)
                if keep and block.key not in self._cache:
                    self._cache.put(block.key, read_block.found, read_block.found_size, None)
                continue
            if cursor.partial is None:
                cursor.partial = block.key
            elif cursor.goes_on:
                cursor.ahead[block.key] = block.entry.size
                cursor.ahead_offset = max(cursor.ahead_offset, block.entry.end_offset)
            self._keep_for(cursor, read_block)

        if before is not None and before != cursor.partial:
            self._cache.release_block(before, cursor, keep=keep)

    def _keep_for(self, cursor: Cursor, read_block: ReadBlock) -> None:
        """Keep the records if there is space, else the bytes: decoding twice costs more.

        Only a sequential reader is expected to continue.
        """
        reader = cursor if cursor.goes_on else None
        size = read_block.block.decoded_size
        if self._cache.has_room(read_block.block.key, size):
            self._cache.put(read_block.block.key, read_block.records, size, reader)
        else:
            self._cache.put(read_block.block.key, read_block.found, read_block.found_size, reader)

    async def look_at(self, block: Block) -> list[RecordBatch]:
        """Return the records of one block, which stays in the cache while there is space."""
        async with self._budget.hold(block.cost):
            found, _ = await self._collect([block])
            (records,), _ = await self._decode_with_retry([block], found)
            if block.key not in self._cache:
                self._cache.put(block.key, records, block.decoded_size, None)
            return records

    async def read_ahead(self, blocks: Sequence[Block], cursor: Cursor) -> None:
        """Fetch blocks into the cache for `cursor`, while there is space.

        Failures are only logged: a read of the blocks requests them again and raises the error.
        """
        missing = self._note_ahead(blocks, cursor)
        try:
            await all_of(self._fetch_ahead(range_, cursor) for range_ in merge_blocks(missing))
        except Exception as error:  # noqa: BLE001 - a read requests them again and gets the error
            _log.debug("stream %d could not be read ahead: %s", cursor.stream_id, error)

    async def read_beside(self, blocks: Sequence[Block], reader: Cursor) -> None:
        """Fetch blocks that `reader` is expected to read, if there is space for them.

        They are requested in the same iteration of the event loop as the read that starts this, so
        neighbouring blocks share its request. Failures are only logged.
        """
        missing = [block for block in blocks if self.is_absent(block)]
        # Twice: the ranges, and the blocks cut from them.
        nbytes = 2 * sum(block.entry.size for block in missing)
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
        """Return True for a block that is neither in memory nor requested."""
        return block.key not in self._cache and block.key not in self._requests

    def take_whole(self, index: ObjectIndex, data: bytes) -> None:
        """Keep the bytes of all blocks of a small object while there is space.

        The bases of a relative object's other streams are not known here. Who reads a block knows
        the base of its stream, and decodes the bytes with it.
        """
        for entry in index.index:
            key = index.object_id, entry.position
            if key not in self._cache:
                cut = data[entry.position : entry.position + entry.size]
                self._cache.put(key, cut, len(cut), None)

    def forget(self, object_id: int) -> None:
        """Drop the blocks of an object."""
        self._cache.forget_object(object_id)

    def close(self) -> None:
        """Cancel all requests."""
        self._requests.close()
        self._decoders.shutdown(wait=False, cancel_futures=True)

    async def _collect(self, blocks: Sequence[Block]) -> tuple[dict[BlockKey, BlockData], bool]:
        """Return the blocks' data, and whether some of it was not in memory."""
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

    async def _decode_with_retry(
        self, blocks: Sequence[Block], found: dict[BlockKey, BlockData]
    ) -> tuple[list[list[RecordBatch]], dict[BlockKey, BlockData]]:
        """Decode blocks. If one looks damaged, fetch all again from the store and retry."""
        try:
            return await self._decode(blocks, found), found
        except CorruptObjectError as error:
            _log.warning("blocks look damaged, fetching them once more: %s", error)
        # The damaged copy may be in the cache, so all blocks of the objects are dropped.
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
        # A thread switch costs more than decoding a few small blocks.
        if raw <= _DECODED_INLINE_BYTES:
            return decode()
        return await asyncio.get_running_loop().run_in_executor(self._decoders, decode)

    def _records(self, block: Block, data: BlockData) -> list[RecordBatch]:
        return self._source.decode(block, data) if isinstance(data, bytes) else data

    def _note_ahead(self, blocks: Sequence[Block], cursor: Cursor) -> list[Block]:
        """Set the read-ahead to `blocks` and return those that are neither cached nor requested."""
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
            nbytes *= 2  # the range, and the blocks cut from it
        # No space means that the cache is full of expected blocks: prefetching more would evict
        # them.
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
            # Without the entry its reader was faster, or was dropped.
            if block.key in cursor.ahead:
                self._cache.put(block.key, data, len(data), cursor)

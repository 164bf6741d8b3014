"""Object source: indexes and blocks of objects, fetched with few range requests.

Owns the cache of indexes, the merging of neighbouring blocks into one range request, the checksums
of blocks, and the errors for corrupt and missing objects. It knows objects and entries, not the
order of a stream. Cached indexes stay valid, since an object id is never reused. Bytes that look
damaged are fetched once more before they count as damaged: a transfer may be torn.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from streammeta.client.config import ReaderStats
from streammeta.client.errors import CorruptObjectError
from streammeta.client.reading.lookups import UNKNOWN_CRC, Slice
from streammeta.client.resources.bandwidth import Bandwidth, Grade
from streammeta.client.resources.resources import RecentlyUsed, SharedWork, StoreThreads
from streammeta.rpc import tracing
from streammeta.storage.backoff import Backoff
from streammeta.storage.errors import CorruptObjectError as BrokenFormatError
from streammeta.storage.errors import RangeNotSatisfiableError, StorageError
from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_format.composite import decode_composite
from streammeta.storage.object_format.index_block import UNLIMITED, IndexBlock, IndexEntry
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.object_reader import ObjectReader, read_entry
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.protocol.patience import Patience
from streammeta.storage.object_store.protocol.reads import merge_ranges

# Checksums of single blocks, computed from an object whose bytes match its recorded checksum.
#
# The object format has no checksum per block, and the metadata has one for all bytes. So an
# object is read once from end to end, in pieces. If all of it matches, so does each block, and
# its checksum verifies every later read of that block. Knows nothing of caches and threads.

PIECE_BYTES = 4 * 1024 * 1024
"""Bytes of an object in memory at a time while it is read from end to end."""


@dataclass(frozen=True, slots=True)
class LearnedChecksums:
    """CRC-32C of each block, in the order of the index, and the bytes after the blocks."""

    blocks: array[int]
    tail: bytes


def learn_checksums(
    get: Callable[[int, int], bytes], size: int, index: IndexBlock, crc32c: int, source: str
) -> LearnedChecksums:
    """Read an object with `get`, which returns a range, and compute its blocks' checksums.

    Raises `streammeta.storage.errors.CorruptObjectError` unless all bytes together have the
    checksum `crc32c`.
    """
    whole, block, blocks = ObjectChecksum(), ObjectChecksum(), array("I")
    ends = iter([entry.position + entry.size for entry in index])
    tail = bytearray()
    end = next(ends, None)

    for at in range(0, size, PIECE_BYTES):
        piece = memoryview(get(at, min(at + PIECE_BYTES, size)))
        whole.update(piece)
        while end is not None and end <= at + len(piece):
            block.update(piece[: max(0, end - at)])
            blocks.append(block.value)
            # A block may span several pieces, and a piece several blocks.
            piece, at, block = piece[end - at :], end, ObjectChecksum()  # noqa: PLW2901
            end = next(ends, None)
        if end is None:
            tail += piece
        else:
            block.update(piece)

    whole.verify(crc32c, source=source)
    return LearnedChecksums(blocks, bytes(tail))


WHOLE_OBJECT_BYTES = 128 * 1024
"""An object up to this size is fetched whole with its index: one request instead of two."""

# Memory of an index: six columns of 8 bytes each, and the Python objects around them.
_BYTES_PER_ENTRY = 52
_BYTES_PER_LINK = 64
_BYTES_PER_INDEX = 1024
_SPAN = "streammeta.read"

_PATIENCE = Patience(Backoff(first=0.1, longest=5.0))

_log = logging.getLogger(__name__)

_ResultT = TypeVar("_ResultT")


RECORD_BYTES = 256
"""Memory of a decoded record in addition to its encoded bytes."""


@dataclass(frozen=True, slots=True)
class Block:
    """One index entry and the object with its bytes. `crc32c` is their checksum.

    `entry` has the offsets of the stream. Those in the bytes are `base` less.
    """

    object_id: int
    entry: IndexEntry
    crc32c: int = UNKNOWN_CRC
    base: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """The identity of the block."""
        return self.object_id, self.entry.position

    @property
    def range(self) -> tuple[int, int]:
        """The block's range of bytes in the object."""
        return self.entry.position, self.entry.position + self.entry.size

    @property
    def decoded_size(self) -> int:
        """Estimated memory of its records, in bytes."""
        return self.entry.size + RECORD_BYTES * self.entry.record_count

    @property
    def cost(self) -> int:
        """Memory for reading it: its bytes and its records."""
        return self.entry.size + self.decoded_size


@dataclass(frozen=True, slots=True)
class ObjectIndex:
    """Index of an object. A composite also has the objects that contain its blocks.

    `linked_ids` are these objects, each from its position in `first_ordinals` on. `checksums`
    belong to the entries and are empty if unknown. The offsets of a `relative` object count from 0
    in each stream.
    """

    object_id: int
    index: IndexBlock
    linked_ids: tuple[int, ...] = ()
    first_ordinals: tuple[int, ...] = ()
    checksums: array[int] = field(default_factory=lambda: array("I"))
    relative: bool = False

    def find(
        self, stream_id: int, start: int, end: int, max_bytes: int, *, slice_start: int
    ) -> list[Block]:
        """List the blocks that contain `[start, end)` of a stream, up to a gap or `max_bytes`.

        `slice_start` is the start of the stream's slice of the object, the base of a relative one.
        """
        base = slice_start if self.relative else 0
        low, high = start - base, end if end == UNLIMITED else end - base
        found = self.index.find(stream_id, low, high, max_bytes)
        return [
            Block(self._holder(ordinal), entry.shifted(base), self._checksum(ordinal), base)
            for ordinal, entry in enumerate(found.entries, found.first_ordinal)
        ]

    def fits(self, stream_id: int, offsets: int) -> bool:
        """Return whether a slice of so many offsets is the whole stream in a relative object.

        With another one its start would not be the base. Slices of other objects always fit.
        """
        return not self.relative or self.index.end_of(stream_id) == offsets

    def _checksum(self, ordinal: int) -> int:
        return self.checksums[ordinal] if self.checksums else UNKNOWN_CRC

    def _holder(self, ordinal: int) -> int:
        if not self.linked_ids:
            return self.object_id
        return self.linked_ids[bisect_right(self.first_ordinals, ordinal) - 1]

    @property
    def cost(self) -> int:
        """Estimated memory of the index, in bytes."""
        # An estimate is enough: the cache has a budget, not a guarantee.
        links = _BYTES_PER_LINK * len(self.linked_ids)
        return _BYTES_PER_INDEX + _BYTES_PER_ENTRY * len(self.index) + links


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Bytes `[start, end)` of one object, and the blocks in them, by position."""

    object_id: int
    start: int
    end: int
    blocks: tuple[Block, ...]


def merge_blocks(blocks: Iterable[Block]) -> list[BlockRange]:
    """Cover `blocks` with few ranges: neighbours join if that wastes few bytes.

    `streammeta.storage.object_store.protocol.reads` sets the limit.
    """
    by_object: defaultdict[int, list[Block]] = defaultdict(list)
    for block in sorted(blocks, key=lambda block: block.key):
        by_object[block.object_id].append(block)
    return [
        BlockRange(object_id, range_.start, range_.end, tuple(same[i] for i in range_.members))
        for object_id, same in by_object.items()
        for range_ in merge_ranges([block.range for block in same])
    ]


@dataclass(frozen=True, slots=True)
class _Fetched:
    """An index, the cost of its requests, and the object's bytes if it was fetched whole."""

    index: ObjectIndex
    requests: int
    received: int
    whole: bytes | None = None


class ObjectSource:
    """Reads indexes and blocks of one cluster's objects and caches up to `cache_bytes` of indexes.

    An object of at most `verified_bytes` is read from end to end before any of its blocks, and
    compared with its recorded checksum, as is an object that is fetched whole. After that each
    block has a checksum. A request to the store takes at most `request_timeout_s` seconds, retries
    included.
    """

    def __init__(
        self,
        threads: StoreThreads,
        namespace: str,
        cache_bytes: int,
        request_timeout_s: float,
        stats: ReaderStats,
        verified_bytes: int = 0,
        on_whole: Callable[[ObjectIndex, bytes], None] = lambda _index, _data: None,
        received: Bandwidth | None = None,
    ) -> None:
        self.on_whole = on_whole
        self._threads = threads
        self._received = received or Bandwidth(0.0)
        self._namespace = namespace
        self._request_timeout = request_timeout_s
        self._verified_bytes = verified_bytes
        self.stats = stats
        self.cache: RecentlyUsed[ObjectIndex] = RecentlyUsed(cache_bytes)
        # Readers of neighbouring streams want the same index at the same time.
        self._fetching: SharedWork[tuple[int, bool], ObjectIndex] = SharedWork()

    def key(self, object_id: int) -> str:
        """Return the key of an object in this cluster's namespace."""
        return key_for(object_id, self._namespace)

    async def index(
        self, piece: Slice, stream_id: int, *, with_small_objects: bool = False
    ) -> ObjectIndex:
        """Return the index of the object of `piece`, read for `stream_id`, cached or fetched.

        `with_small_objects` fetches small objects whole and passes their bytes to `on_whole`.
        Raises `CorruptObjectError`, or `streammeta.storage.errors.ObjectNotFoundError` if the
        object is deleted.
        """
        # No expiry: an object id is never reused, and objects never change.
        cached = self.cache.get(piece.object_id)
        if cached is not None:
            self.stats.index_hits += 1
            return cached
        small = not piece.is_composite and piece.object_size <= WHOLE_OBJECT_BYTES
        whole = with_small_objects and small
        return await self._fetching.run(
            (piece.object_id, whole), lambda: self._fetch_index(piece, stream_id, whole=whole)
        )

    async def fetch(self, wanted: BlockRange) -> list[bytes]:
        """Fetch a range and return the bytes of each of its blocks. Raises as `index`."""
        with tracing.part(_SPAN, {"bytes": wanted.end - wanted.start}):
            await self._received.take(Grade.READ, wanted.end - wanted.start)
            cut = await self._retry(lambda: _twice(lambda: self._read_range(wanted)))
        self._count(1, wanted.end - wanted.start)
        return cut

    def decode(self, block: Block, data: bytes | memoryview) -> list[RecordBatch]:
        """Decode the records of a block. Raises `CorruptObjectError`."""
        key = self.key(block.object_id)
        try:
            return read_entry(block.entry, memoryview(data), key, base=block.base)
        except BrokenFormatError as error:
            raise CorruptObjectError(
                key, block.object_id, block.entry.stream_id, str(error)
            ) from error

    async def records(self, wanted: BlockRange) -> list[list[RecordBatch]]:
        """Fetch and decode a range. Return the records of each of its blocks. Raises as `index`."""

        def read() -> list[list[RecordBatch]]:
            parts = zip(wanted.blocks, self._read_range(wanted), strict=True)
            return [self.decode(block, data) for block, data in parts]

        with tracing.part(_SPAN, {"bytes": wanted.end - wanted.start}):
            await self._received.take(Grade.READ, wanted.end - wanted.start)
            decoded = await self._retry(lambda: _twice(read))
        self._count(1, wanted.end - wanted.start)
        return decoded

    def close(self) -> None:
        """Cancel all requests."""
        self._fetching.close()

    def _count(self, requests: int, received: int) -> None:
        self.stats.requests += requests
        self.stats.bytes_fetched += received

    async def _fetch_index(self, piece: Slice, stream_id: int, *, whole: bool) -> ObjectIndex:
        with tracing.part(_SPAN):
            fetched = await self._retry(
                lambda: _twice(lambda: self._read_index(piece, stream_id, whole=whole))
            )
            tracing.note({"bytes": fetched.received})
        # After the fetch, so that failures and retries do not count.
        self.stats.indexes_fetched += 1
        self._count(fetched.requests, fetched.received)
        self.cache.put(piece.object_id, fetched.index)
        if fetched.whole is not None:
            self.on_whole(fetched.index, fetched.whole)
        return fetched.index

    async def _retry(self, read: Callable[[], _ResultT]) -> _ResultT:
        """Run `read` in a thread, retrying failures that may pass until the request's timeout.

        The waits are here, because a waiting thread would block other reads.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._request_timeout

        for attempt in itertools.count():
            try:
                return await self._threads.run(read)
            except StorageError as error:
                wait = _PATIENCE.wait_s(error, attempt, ends_at - loop.time(), random.random())
                if wait is None:
                    raise
                _log.warning("read from the store failed, retrying in %.3g s: %s", wait, error)
            await asyncio.sleep(wait)
        raise AssertionError("attempts without end have ended")

    def _get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Read from the store, in a thread."""
        # The store's own retries end with the request.
        store = self._threads.store.until(time.monotonic() + self._request_timeout)
        return store.get_range(key, start, end)

    def _read_index(self, piece: Slice, stream_id: int, *, whole: bool) -> _Fetched:
        """Read an index, in a thread."""
        object_id, key = piece.object_id, self.key(piece.object_id)
        try:
            if piece.is_composite:
                # The recorded size covers the linked blocks, so the size of this object is unknown.
                data = self._get(key)
                _check_crc(piece, data, key)
                decoded = decode_composite(data, source=key)
                linked = tuple(link.object_id for link in decoded.links)
                index = ObjectIndex(object_id, decoded.index, linked, decoded.first_ordinals)
                return _Fetched(index, 1, len(data))

            # The parser asks for ranges, so the same code handles whole objects and partial reads.
            parser = ObjectReader(
                key, piece.object_size, accept_relative=piece.is_stream_set_object
            )
            is_small = piece.object_size <= WHOLE_OBJECT_BYTES
            is_whole = whole or (is_small and self._is_verified(piece))
            all_bytes = self._get(key, 0, piece.object_size) if is_whole else None
            requests, received = 0, 0
            if all_bytes is not None:
                requests, received = 1, len(all_bytes)
                _check_crc(piece, all_bytes, key)
            while (needed := parser.needed) is not None:
                if all_bytes is not None:
                    parser.receive(memoryview(all_bytes)[needed.start : needed.end])
                    continue
                data = self._get(key, needed.start, needed.end)
                requests, received = requests + 1, received + len(data)
                parser.receive(data)
            checksums: array[int] = array("I")
            if piece.crc32c != UNKNOWN_CRC and (is_whole or self._is_verified(piece)):
                checksums = self._learn(piece, key, parser, all_bytes).blocks
                received += 0 if is_whole else piece.object_size
            found = ObjectIndex(
                object_id, parser.index, checksums=checksums, relative=parser.relative
            )
            return _Fetched(found, requests, received, all_bytes if whole else None)
        except (BrokenFormatError, RangeNotSatisfiableError, ValueError) as error:
            raise CorruptObjectError(key, object_id, stream_id, str(error)) from error

    def _is_verified(self, piece: Slice) -> bool:
        """Return whether an object is compared with its checksum before its first use."""
        return piece.crc32c != UNKNOWN_CRC and piece.object_size <= self._verified_bytes

    def _learn(
        self, piece: Slice, key: str, parser: ObjectReader, all_bytes: bytes | None
    ) -> LearnedChecksums:
        """Compute the blocks' checksums from all bytes of an object, in a thread."""
        index = parser.index

        def get(start: int, end: int) -> bytes:
            return all_bytes[start:end] if all_bytes is not None else self._get(key, start, end)

        learned = learn_checksums(get, piece.object_size, index, piece.crc32c, key)
        # The index was read before the bytes were verified. It may be torn itself, so it is parsed
        # again from the verified bytes.
        size = index.data_size + len(learned.tail)
        again = ObjectReader(key, size, accept_relative=piece.is_stream_set_object)
        if (needed := again.needed) is not None and needed.start <= index.data_size:
            again.receive(bytes(index.data_size - needed.start) + learned.tail)
        else:
            again.receive(learned.tail[-(needed.end - needed.start) :] if needed else b"")
            again.receive(learned.tail)
        if list(again.index) != list(index) or again.relative != parser.relative:
            raise BrokenFormatError(
                key, index.data_size, "index", "another one at its second reading", "the same one"
            )
        return learned

    def _read_range(self, wanted: BlockRange) -> list[bytes]:
        """Fetch a range and cut it into blocks, in a thread."""
        key = self.key(wanted.object_id)
        try:
            data = self._get(key, wanted.start, wanted.end)
        except RangeNotSatisfiableError as error:
            stream_id = wanted.blocks[0].entry.stream_id
            raise CorruptObjectError(key, wanted.object_id, stream_id, str(error)) from error

        at = wanted.start
        # One block needs no copy.
        cut = [data]
        # Blocks may have gaps between them, which are fetched but not returned.
        if len(wanted.blocks) > 1:
            cut = [
                data[block.entry.position - at : block.entry.position - at + block.entry.size]
                for block in wanted.blocks
            ]

        for block, part in zip(wanted.blocks, cut, strict=True):
            self._check_block(block, part, key)
        return cut

    def _check_block(self, block: Block, data: bytes, key: str) -> None:
        if block.crc32c == UNKNOWN_CRC:
            return
        entry, found = block.entry, ObjectChecksum.of(data).value
        if len(data) != entry.size or found != block.crc32c:
            problem = (
                f"the block at byte {entry.position}, offsets {entry.start_offset} to"
                f" {entry.end_offset}, has {len(data)} bytes with the CRC-32C {found:#010x},"
                f" expected {entry.size} with {block.crc32c:#010x}"
            )
            raise CorruptObjectError(key, block.object_id, entry.stream_id, problem)


def _twice(read: Callable[[], _ResultT]) -> _ResultT:
    """Read again if the bytes look damaged the first time."""
    try:
        return read()
    except CorruptObjectError as error:
        _log.warning("bytes look damaged, fetching them again: %s", error)
        return read()


def _check_crc(piece: Slice, data: bytes, key: str) -> None:
    """Compare all bytes of an object with its recorded checksum, if it has one."""
    if piece.crc32c != UNKNOWN_CRC:
        ObjectChecksum.of(data).verify(piece.crc32c, source=key)

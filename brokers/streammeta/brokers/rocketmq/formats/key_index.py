"""Files of the key index: a hash table of messages by topic and key.

The local form grows with each put and chains the items of a slot. The compacted form, which is
uploaded, has the items of a slot in one run, newest first, and a look-up takes two reads. Does no
I/O. Source: `IndexStoreFile` of RocketMQ's module tieredstore.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from streammeta.brokers.rocketmq.formats.message import java_hash
from streammeta.storage.errors import PayloadError

BEGIN_MAGIC = 0xBCC50289
END_MAGIC = 0xBCC50285
_HEADER = struct.Struct(">Iqqii")
_SLOT = struct.Struct(">ii")
_ITEM = struct.Struct(">iiiqii")
_LOCAL_ITEM = struct.Struct(">iiiqiii")
HEADER_SIZE = _HEADER.size
SLOT_SIZE = _SLOT.size
LOCAL_ITEM_SIZE = _LOCAL_ITEM.size
ITEM_SIZE = _ITEM.size
MAX_HOPS = 512
"""Maximum number of items that a query follows in a chain."""
MAX_RUN_ITEMS = 1024
"""Maximum number of items that a query reads from a slot of a compacted file."""


class PutResult(StrEnum):
    """Outcomes of a put. The names are the source's."""

    SUCCESS = "SUCCESS"
    UNKNOWN_ERROR = "UNKNOWN_ERROR"
    FILE_FULL = "FILE_FULL"


@dataclass(frozen=True, slots=True)
class IndexItem:
    """One message under one key. `offset` is its place in the commit log, in bytes."""

    key_hash: int
    topic_id: int
    queue_id: int
    offset: int
    size: int
    seconds: int
    """Time since the file's begin, in seconds."""


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """The first 28 bytes of an index file. Times are ms since 1970."""

    magic: int
    begin_ms: int
    end_ms: int
    used_slots: int
    item_count: int

    @classmethod
    def decode(cls, data: bytes) -> IndexHeader:
        """Return the header. Raise `PayloadError` if the bytes are cut or not an index file."""
        if len(data) < HEADER_SIZE:
            raise PayloadError(0, "index header", f"{len(data)} bytes", f"{HEADER_SIZE} bytes")
        header = cls(*_HEADER.unpack_from(data))
        if header.magic not in (BEGIN_MAGIC, END_MAGIC):
            raise PayloadError(0, "index magic", f"{header.magic:#x}", "0xbcc50289 or 0xbcc50285")
        return header

    def encode(self) -> bytes:
        """Return the 28 bytes."""
        return _HEADER.pack(
            self.magic, self.begin_ms, self.end_ms, self.used_slots, self.item_count
        )


@dataclass(frozen=True, slots=True)
class TimeRange:
    """Times of messages in ms since 1970, both included."""

    begin_ms: int = 0
    end_ms: int = 2**63 - 1


ALL_TIMES = TimeRange()


def index_key(topic: str, key: str) -> str:
    """Return the text whose hash represents a key of a topic."""
    return f"{topic}#{key}"


def key_hash(text: str) -> int:
    """Return the hash of a key, 0..2147483647.

    One text in four thousand million has a Java hash without a positive counterpart. It gets 0
    here, and a negative slot in the peer's writer.
    """
    # The absolute value of -2^31 does not fit into 31 bits.
    value = abs(java_hash(text))
    return value if value <= 0x7FFFFFFF else 0


def slot_position(slot: int) -> int:
    """Return the position of a slot in both forms, in bytes."""
    return HEADER_SIZE + slot * SLOT_SIZE


def item_position(slots: int, number: int) -> int:
    """Return the position of an item of the local form. Items are numbered from 1."""
    return HEADER_SIZE + slots * SLOT_SIZE + number * LOCAL_ITEM_SIZE


class LocalIndex:
    """Index file open for puts, with `slots` slots and places for `max_items` - 1 items."""

    def __init__(self, begin_ms: int, slots: int = 5_000_000, max_items: int = 20_000_000) -> None:
        if slots < 1 or max_items < 2:
            raise ValueError(
                f"index has {slots} slots and {max_items} places, expected at least 1 and 2"
            )
        self.begin_ms = begin_ms
        self.end_ms = 0
        self.slots = slots
        self.max_items = max_items
        self._newest: dict[int, int] = {}
        self._items: list[tuple[IndexItem, int]] = []

    @property
    def item_count(self) -> int:
        """Number of items."""
        return len(self._items)

    @property
    def used_slots(self) -> int:
        """Number of slots that have items."""
        return len(self._newest)

    @property
    def is_full(self) -> bool:
        """Whether no further item has room."""
        return self.item_count + 1 >= self.max_items

    def header(self) -> IndexHeader:
        """Return the header of the file as it is now."""
        magic = END_MAGIC if self.is_full else BEGIN_MAGIC
        return IndexHeader(magic, self.begin_ms, self.end_ms, self.used_slots, self.item_count)

    def put(
        self,
        topic: str | None,
        topic_id: int,
        queue_id: int,
        keys: Iterable[str] | None,
        offset: int,
        size: int,
        timestamp_ms: int,
    ) -> PutResult:
        """Index a message under all of its keys, or under none."""
        if not topic:
            return PutResult.UNKNOWN_ERROR

        hashes = [key_hash(index_key(topic, key)) for key in keys or ()]
        if not hashes:
            return PutResult.SUCCESS
        # All keys of a message go into one file, so that a query finds it once.
        if self.item_count + len(hashes) >= self.max_items:
            return PutResult.FILE_FULL
        # Clocks may run backwards, and the format has no negative times.
        seconds = max(0, timestamp_ms - self.begin_ms) // 1000
        for value in hashes:
            item = IndexItem(value, topic_id, queue_id, offset, size, seconds)
            slot = value % self.slots
            self._items.append((item, self._newest.get(slot, 0)))
            self._newest[slot] = self.item_count
        self.end_ms = max(self.end_ms, timestamp_ms)
        return PutResult.SUCCESS

    def query(
        self, topic: str, key: str, max_items: int, times: TimeRange = ALL_TIMES
    ) -> list[IndexItem]:
        """Return at most `max_items` items of a key, newest first.

        Items of other keys with the same hash may be among them.
        """
        wanted = key_hash(index_key(topic, key))
        chain = self._chain(wanted % self.slots, MAX_HOPS)
        return list(_match_items(chain, wanted, self.begin_ms, max_items, times))

    def _chain(self, slot: int, limit: int | None = None) -> Iterator[IndexItem]:
        number, hops = self._newest.get(slot, 0), 0
        # A bound on hops keeps a query short if many keys share a slot.
        while number and (limit is None or hops < limit):
            item, number = self._items[number - 1]
            hops += 1
            yield item

    def encode(self) -> bytes:
        """Return the whole local file. Unused places are zeros."""
        slots = bytearray(self.slots * SLOT_SIZE)
        for slot, number in self._newest.items():
            _SLOT.pack_into(slots, slot * SLOT_SIZE, number, 0)

        items = bytearray(self.max_items * LOCAL_ITEM_SIZE)
        for number, (item, previous) in enumerate(self._items, start=1):
            _LOCAL_ITEM.pack_into(items, number * LOCAL_ITEM_SIZE, *_fields(item), previous)
        return self.header().encode() + slots + items

    @classmethod
    def decode(cls, data: bytes, slots: int, max_items: int) -> LocalIndex:
        """Return the index of a local file.

        Raises:
            PayloadError: the file is cut, or an item is chained to a later one.
        """
        header = IndexHeader.decode(data)
        wanted = item_position(slots, max_items)
        if len(data) < wanted or not 0 <= header.item_count < max_items:
            raise PayloadError(0, "index file", f"{len(data)} bytes", f"{wanted} bytes")

        index = cls(header.begin_ms, slots, max_items)
        index.end_ms = header.end_ms
        for number in range(1, header.item_count + 1):
            at = item_position(slots, number)
            *fields, previous = _LOCAL_ITEM.unpack_from(data, at)
            # A chain only leads to earlier items. A cycle would never end a query.
            if not 0 <= previous < number:
                raise PayloadError(at, "previous item", previous, f"0..{number - 1}")
            item = IndexItem(*fields)
            index._items.append((item, previous))
            index._newest[item.key_hash % slots] = number

        return index

    def compact(self) -> bytes:
        """Return the compacted form."""
        slots, runs = bytearray(), bytearray()
        # Runs follow the slots. Each slot contains the position and length of its run.
        start = HEADER_SIZE + self.slots * SLOT_SIZE
        for slot in range(self.slots):
            run = b"".join(_ITEM.pack(*_fields(item)) for item in self._chain(slot))
            slots += _SLOT.pack(start + len(runs), len(run))
            runs += run
        header = IndexHeader(
            END_MAGIC, self.begin_ms, self.end_ms, self.used_slots, self.item_count
        )
        return header.encode() + slots + runs


async def query_compacted(
    read: Callable[[int, int], Awaitable[bytes]],
    slots: int,
    topic: str,
    key: str,
    max_items: int,
    begin_ms: int,
    times: TimeRange = ALL_TIMES,
) -> list[IndexItem]:
    """Return items of a key from a compacted file, which `read(position, length)` reads.

    Raises:
        PayloadError: a slot or a run is cut.
    """
    wanted = key_hash(index_key(topic, key))
    at = slot_position(wanted % slots)
    slot = await read(at, SLOT_SIZE)
    if len(slot) != SLOT_SIZE:
        raise PayloadError(at, "index slot", f"{len(slot)} bytes", f"{SLOT_SIZE} bytes")

    position, length = _SLOT.unpack(slot)

    length = min(length, MAX_RUN_ITEMS * ITEM_SIZE)
    if length <= 0:
        return []
    run = await read(position, length)
    if len(run) != length or length % ITEM_SIZE:
        raise PayloadError(position, "run of items", f"{len(run)} bytes", f"{length} bytes")
    items = (IndexItem(*fields) for fields in _ITEM.iter_unpack(run))
    return list(_match_items(items, wanted, begin_ms, max_items, times))


def _fields(item: IndexItem) -> tuple[int, int, int, int, int, int]:
    return (item.key_hash, item.topic_id, item.queue_id, item.offset, item.size, item.seconds)


def _match_items(
    items: Iterable[IndexItem], wanted: int, begin_ms: int, max_items: int, times: TimeRange
) -> Iterator[IndexItem]:
    """Yield the items of a hash. Their times are whole seconds, so bounds are rounded."""
    found = 0
    for item in items:
        begins = begin_ms + item.seconds * 1000
        if found >= max_items:
            return
        # An item's second may begin before the range and still overlap it.
        if item.key_hash == wanted and begins <= times.end_ms and begins + 999 >= times.begin_ms:
            found += 1
            yield item

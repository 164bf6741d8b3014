"""Items of a consume queue: 20 bytes for each message, in the order of queue offsets.

Splits bytes of a commit log into the messages that items point at. Does no I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from streammeta.brokers.rocketmq.formats.message import CODA_SIZE, is_coda, is_message

_ITEM = struct.Struct(">qiq")
ITEM_SIZE = _ITEM.size


@dataclass(frozen=True, slots=True)
class ConsumeQueueItem:
    """Place of a message in the tiered commit log, in bytes, and the Java hash of its tags."""

    commit_log_offset: int
    message_size: int
    tags_code: int


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """Place of a message in the bytes of a read, and the index of its item."""

    start: int
    size: int
    item: int


def encode_item(item: ConsumeQueueItem) -> bytes:
    """Return the 20 bytes of an item."""
    return _ITEM.pack(item.commit_log_offset, item.message_size, item.tags_code)


def decode_items(data: bytes) -> list[ConsumeQueueItem]:
    """Return the items of a run. Raise `ValueError` unless its size is a multiple of 20."""
    if len(data) % ITEM_SIZE:
        raise ValueError(f"consume queue has {len(data)} bytes, expected a multiple of {ITEM_SIZE}")
    return [ConsumeQueueItem(*fields) for fields in _ITEM.iter_unpack(data)]


def split_messages(items: bytes, messages: bytes) -> list[FoundMessage]:
    """Find the messages of items in a read of the commit log that begins with the first item.

    An item that points at a coda means the message after it. Items without a message of their size
    at their place are left out. The search ends at the first item that ends after the read. An
    empty or cut run of items has no messages.
    """
    if not items or len(items) % ITEM_SIZE:
        return []
    return _split(decode_items(items), messages)


def _split(items: Sequence[ConsumeQueueItem], messages: bytes) -> list[FoundMessage]:
    origin = items[0].commit_log_offset
    found = []
    for number, item in enumerate(items):
        start = item.commit_log_offset - origin
        # Items may be out of order after a failover, and point before the read.
        if start < 0:
            continue
        if start + item.message_size > len(messages):
            break
        # Older versions let the item point at the coda before the message.
        if is_coda(messages, start):
            start += CODA_SIZE
        if is_message(messages, start, item.message_size):
            found.append(FoundMessage(start, item.message_size, number))

    return found

"""Budget of an answer in bytes, and the sizes of listed items.

An answer ends before the item that would exceed the budget, so that one call costs bounded time and
memory regardless of the metadata's size. The caller continues with the next page. Sizes are those
on the wire or slightly larger. Items that are slow to describe count for more than their bytes.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

import numpy as np

from streammeta.controller.errors import LimitExceededError
from streammeta.controller.metadata.api import answers
from streammeta.controller.metadata.api.named_answers import NamedObject
from streammeta.controller.metadata.tables.values import Int64Column, Tags

ANSWER_BYTES = (4 << 20) - (256 << 10)
"""Budget of the lists of an answer, in bytes. The rest of 4 MiB is for its other fields.

Clients of gRPC in Java, Go and Python accept messages of at most 4 MiB by default.
"""

ITEM_BYTES_MAX = ANSWER_BYTES
"""Maximum size of one item of a list, in bytes."""

ENTRY_BYTES_MAX = ANSWER_BYTES
"""Maximum size of a request's log entry, in bytes: a watch sends it in one message."""

RANGE_BYTES = 48
"""Size of a range of a stream."""

STREAM_SET_OBJECT_BYTES = 256
"""Size of a listed stream set object, or stream object, without its ranges."""

# Bytes per item. The large ones stand for time: describing a stream or an object takes about as
# long as sending this number of bytes.
_STREAM_BYTES = 4_096
_STREAM_LISTS_BYTES = 12_288
_OBJECT_BYTES = 8_192
_OBJECT_RANGE_BYTES = 27
_NODE_BYTES = 256
_QUERY_BYTES = 48
_SLICE_BYTES = 84
_ENTRY_BYTES = 32
_LISTED_BYTES = 4_096
_ERROR_BYTES = 2
_TRIM_BYTES = 12
_SHARED_ROW_BYTES = 10

SLICES_MAX = ANSWER_BYTES // _SLICE_BYTES
"""Number of slices above which an answer to several queries exceeds its budget."""

Item = TypeVar("Item")


def take_fitting(
    items: Iterable[Item], size_of: Callable[[Item], int]
) -> tuple[tuple[Item, ...], Item | None]:
    """Return the first items that fit into an answer, at least one, and the next item.

    The next item is None at the end. The iterable is not consumed past the next item.

    Raises:
        LimitExceededError: one item alone is too large to be sent.
    """
    fits: list[Item] = []
    left = ANSWER_BYTES
    for item in items:
        size = size_of(item)
        # One oversized item would never fit, and paging could not get past it.
        require_sendable(size, "item", "one item of the answer")
        if fits and size > left:
            return tuple(fits), item
        fits.append(item)
        left -= size
    return tuple(fits), None


def page_of(
    items: Iterable[Item], size: int, size_of: Callable[[Item], int]
) -> tuple[tuple[Item, ...], Item | None]:
    """Return the first items as `take_fitting` does, at most `size` of them."""
    found, following = take_fitting(islice(items, size + 1), size_of)
    return (found[:size], found[size]) if len(found) > size else (found, following)


def require_sendable(size: int, field: str, what: str) -> None:
    """Raise `LimitExceededError` if one item of an answer is too large to be sent."""
    if size > ITEM_BYTES_MAX:
        raise LimitExceededError(
            f"{what} is {size} bytes, at most {ITEM_BYTES_MAX}: "
            "omit included lists and read them page by page",
            field,
            ITEM_BYTES_MAX,
        )


def require_entry(size: int) -> None:
    """Raise `LimitExceededError` if a request's log entry is too large for a watch message."""
    if size > ENTRY_BYTES_MAX:
        raise LimitExceededError(
            f"request: its log entry is {size} bytes, at most {ENTRY_BYTES_MAX}: "
            "split it into smaller requests",
            "request",
            ENTRY_BYTES_MAX,
        )


def require_all(fit: int, asked: int, field: str, instead: str = "") -> None:
    """Raise unless an answer that must be complete contains all requested items.

    Raises:
        LimitExceededError: only the first `fit` fit. `instead` names an alternative.
    """
    if fit < asked:
        raise LimitExceededError(
            f"{field}: the answer to {asked} is over {ANSWER_BYTES} bytes: "
            f"request at most {fit} at once" + (f", or {instead}" if instead else ""),
            field,
            ANSWER_BYTES,
        )


def require_rest(used: int, field: str) -> None:
    """Raise `LimitExceededError` if requests that share an answer exceed its budget together."""
    if used > ANSWER_BYTES:
        raise LimitExceededError(
            f"{field}: the answer is over {ANSWER_BYTES} bytes: split it into smaller messages",
            field,
            ANSWER_BYTES,
        )


def stream_bytes(stream: answers.StreamDescription) -> int:
    """Return the size of a described stream."""
    spans = len(stream.ranges) + len(stream.stream_objects)
    spans += len(stream.pending_uploads) + len(stream.lost)
    looked_up = _STREAM_LISTS_BYTES if stream.ranges or stream.stream_objects else 0
    return _STREAM_BYTES + looked_up + _tags_bytes(stream.tags) + RANGE_BYTES * spans


def object_bytes(described: answers.ObjectDescription) -> int:
    """Return the size of a described object."""
    return _OBJECT_BYTES + _OBJECT_RANGE_BYTES * len(described.ranges.stream_id)


def node_bytes(node: answers.NodeDescription) -> int:
    """Return the size of a described node."""
    listed = STREAM_SET_OBJECT_BYTES * len(node.stream_set_objects)
    return _NODE_BYTES + text_bytes(node.wal_config) + _tags_bytes(node.tags) + listed


def object_list_bytes(result: answers.ObjectList) -> int:
    """Return the size of the answer to one query."""
    return _QUERY_BYTES + _SLICE_BYTES * len(result.objects)


def lists_that_fit(slices: Int64Column) -> int:
    """Return how many answers to queries fit, at least one, given their numbers of slices."""
    return _items_that_fit(_QUERY_BYTES + _SLICE_BYTES * slices)


def set_objects_that_fit(ranges: Int64Column) -> int:
    """Return how many listed stream set objects fit, given their numbers of included ranges."""
    return _items_that_fit(STREAM_SET_OBJECT_BYTES + _OBJECT_RANGE_BYTES * ranges)


def _items_that_fit(sizes: Int64Column) -> int:
    return max(1, int(np.cumsum(sizes).searchsorted(ANSWER_BYTES, side="right")))


def entry_bytes(entry: answers.KVEntry) -> int:
    """Return the size of a listed key."""
    return _LISTED_BYTES + text_bytes(entry.key) + len(entry.value)


def named_bytes(named: NamedObject) -> int:
    """Return the size of a described named object."""
    key = named.owner_key
    # At most 4 bytes of UTF-8 per character.
    owner = 0 if key is None else 4 * (len(key.namespace) + len(key.key))
    return _LISTED_BYTES + text_bytes(named.name) + owner + _tags_bytes(named.metadata)


def name_bytes(name: str) -> int:
    """Return the size of a listed namespace."""
    return _LISTED_BYTES + text_bytes(name)


def commit_bytes(answer: answers.Answer) -> int:
    """Return the size of the answer to one of several commits that share a message."""
    match answer:
        case answers.CommitStreamSetObjectAnswer():
            rows = len(answer.range_errors) + len(answer.stream_object_errors)
            values = sum(value_bytes(result.value) for result in answer.kv_results)
            trims = _TRIM_BYTES * len(answer.trim_errors)
            shared = 0 if answer.shared is None else _SHARED_ROW_BYTES * len(answer.shared.errors)
            return _ENTRY_BYTES + _ERROR_BYTES * rows + values + trims + shared
        case answers.CommitUploadsAnswer():
            return _ENTRY_BYTES + _ERROR_BYTES * (len(answer.errors) + len(answer.range_errors))
        case _:
            return 0


def value_bytes(value: bytes) -> int:
    """Return the size of a value read by its key."""
    return _ENTRY_BYTES + len(value)


def text_bytes(text: str) -> int:
    """Return the size of a text."""
    return _ENTRY_BYTES + len(text if text.isascii() else text.encode())


def _tags_bytes(tags: Tags) -> int:
    return sum(text_bytes(key) + text_bytes(value) for key, value in tags)

"""Budget of an answer in bytes, and the sizes of what answers list.

An answer ends where the next item would take it over the budget, so that one call costs a bounded
time and memory whatever the map holds; the caller goes on behind it. Sizes are those on the wire or
somewhat above. Items that take long to describe count for more than their bytes.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

import numpy as np

from streammeta.controller.errors import LimitExceededError
from streammeta.controller.metadata.api.answers import (
    Answer,
    CommitStreamSetObjectAnswer,
    CommitUploadsAnswer,
    KVEntry,
    NodeDescription,
    ObjectDescription,
    ObjectList,
    StreamDescription,
)
from streammeta.controller.metadata.api.named_answers import NamedObject
from streammeta.controller.metadata.tables.values import Int64Column, Tags

ANSWER_BYTES = (4 << 20) - (256 << 10)
"""Budget of the lists of an answer, in bytes; the rest of 4 MiB is for its other fields.

Clients of gRPC in Java, Go and Python accept messages of 4 MiB unless they are set up otherwise.
"""

ITEM_BYTES_MAX = ANSWER_BYTES
"""Maximum size of one item of a list, in bytes."""

ENTRY_BYTES_MAX = ANSWER_BYTES
"""Maximum size of a log entry that a request makes, in bytes: a watch sends it in one message."""

RANGE_BYTES = 48
"""Size of a stream's range or of a span of its offsets."""

SET_OBJECT_BYTES = 256
"""Size of a listed set object."""

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

SLICES_MAX = ANSWER_BYTES // _SLICE_BYTES
"""Slices beyond which an answer to several queries is over its budget."""

Item = TypeVar("Item")


def fitting(
    items: Iterable[Item], size_of: Callable[[Item], int]
) -> tuple[tuple[Item, ...], Item | None]:
    """Return the first items, as many as an answer may hold but one at least, and the next.

    The latter is None if there are no more. Items are taken one by one, up to the next.

    Raises:
        LimitExceededError: one item alone is too large to be sent.
    """
    fits: list[Item] = []
    left = ANSWER_BYTES
    for item in items:
        size = size_of(item)
        require_sendable(size, "item", "one item of the answer")
        if fits and size > left:
            return tuple(fits), item
        fits.append(item)
        left -= size
    return tuple(fits), None


def page_of(
    items: Iterable[Item], size: int, size_of: Callable[[Item], int]
) -> tuple[tuple[Item, ...], Item | None]:
    """Return what `fitting` does, at most `size` items; raises as it does."""
    found, following = fitting(islice(items, size + 1), size_of)
    return (found[:size], found[size]) if len(found) > size else (found, following)


def require_sendable(size: int, field: str, what: str) -> None:
    """Raise `LimitExceededError` if one item of an answer is too large to be sent."""
    if size > ITEM_BYTES_MAX:
        raise LimitExceededError(
            f"{what} is {size} bytes, at most {ITEM_BYTES_MAX}; "
            "leave included lists out and read them page by page",
            field,
            ITEM_BYTES_MAX,
        )


def require_entry(size: int) -> None:
    """Raise `LimitExceededError` if a request makes a log entry that a watch could not send."""
    if size > ENTRY_BYTES_MAX:
        raise LimitExceededError(
            f"request: its log entry is {size} bytes, at most {ENTRY_BYTES_MAX}; "
            "divide it into smaller requests",
            "request",
            ENTRY_BYTES_MAX,
        )


def require_all(fit: int, asked: int, field: str, instead: str = "") -> None:
    """Raise unless an answer that must not stop holds all that was asked for.

    Raises:
        LimitExceededError: only the first `fit` fit; `instead` says what takes the rest too.
    """
    if fit < asked:
        raise LimitExceededError(
            f"{field}: the answer to {asked} is over {ANSWER_BYTES} bytes; "
            f"ask for at most {fit} at once" + (f", or {instead}" if instead else ""),
            field,
            ANSWER_BYTES,
        )


def require_rest(used: int, field: str) -> None:
    """Raise `LimitExceededError` if requests that share an answer fill more than it may hold."""
    if used > ANSWER_BYTES:
        raise LimitExceededError(
            f"{field}: the answer is over {ANSWER_BYTES} bytes; divide it into smaller messages",
            field,
            ANSWER_BYTES,
        )


def stream_bytes(one: StreamDescription) -> int:
    """Return the size of a described stream."""
    spans = len(one.ranges) + len(one.stream_objects) + len(one.pending_uploads) + len(one.lost)
    looked_up = _STREAM_LISTS_BYTES if one.ranges or one.stream_objects else 0
    return _STREAM_BYTES + looked_up + _tags_bytes(one.tags) + RANGE_BYTES * spans


def object_bytes(one: ObjectDescription) -> int:
    """Return the size of a described object."""
    return _OBJECT_BYTES + _OBJECT_RANGE_BYTES * len(one.ranges.stream_id)


def node_bytes(one: NodeDescription) -> int:
    """Return the size of a described node."""
    held = SET_OBJECT_BYTES * len(one.stream_set_objects)
    return _NODE_BYTES + text_bytes(one.wal_config) + _tags_bytes(one.tags) + held


def object_list_bytes(one: ObjectList) -> int:
    """Return the size of the answer to one query."""
    return _QUERY_BYTES + _SLICE_BYTES * len(one.objects)


def lists_that_fit(slices: Int64Column) -> int:
    """Return how many answers to queries fit, but one at least, given their numbers of slices."""
    sizes = np.cumsum(_QUERY_BYTES + _SLICE_BYTES * slices)
    return max(1, int(sizes.searchsorted(ANSWER_BYTES, side="right")))


def entry_bytes(one: KVEntry) -> int:
    """Return the size of a listed key."""
    return _LISTED_BYTES + text_bytes(one.key) + len(one.value)


def named_bytes(one: NamedObject) -> int:
    """Return the size of a described named object."""
    owner = 0 if one.owner_key is None else len(one.owner_key.namespace) + len(one.owner_key.key)
    return _LISTED_BYTES + text_bytes(one.name) + 4 * owner + _tags_bytes(one.metadata)


def name_bytes(name: str) -> int:
    """Return the size of a listed namespace."""
    return _LISTED_BYTES + text_bytes(name)


def commit_bytes(one: Answer) -> int:
    """Return the size of the answer to one commit of several that share a message."""
    match one:
        case CommitStreamSetObjectAnswer():
            rows = len(one.range_errors) + len(one.stream_object_errors)
            values = sum(value_bytes(result.value) for result in one.kv_results)
            return _ENTRY_BYTES + _ERROR_BYTES * rows + values + _TRIM_BYTES * len(one.trim_errors)
        case CommitUploadsAnswer():
            return _ENTRY_BYTES + _ERROR_BYTES * (len(one.errors) + len(one.range_errors))
        case _:
            return 0


def value_bytes(value: bytes) -> int:
    """Return the size of a value that was asked for by its key."""
    return _ENTRY_BYTES + len(value)


def text_bytes(text: str) -> int:
    """Return the size of a text."""
    return _ENTRY_BYTES + len(text if text.isascii() else text.encode())


def _tags_bytes(tags: Tags) -> int:
    return sum(text_bytes(key) + text_bytes(value) for key, value in tags)

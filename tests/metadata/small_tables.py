"""Makes the map's tables tiny, so that a few entities reach what a million would.

Pages of a few rows, a directory whose newest part holds sixteen ids, arrays that grow at once, and
streams deleted two objects at a time. Nothing here changes an answer.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from streammeta.controller.metadata.registries import (
    object_indexes,
    object_queries,
    stream_decisions,
)
from streammeta.controller.metadata.registries.object_directory import ObjectDirectory
from streammeta.controller.metadata.tables import (
    section_checks,
    shared_views,
    stream_index,
    tables,
    values,
)

_SMALL = (
    (tables, "_PAGE_SHIFT", 2),
    (tables, "_PAGE_ROWS", 4),
    (tables, "_CAPACITY_MIN", 4),
    (tables, "RESERVE_ABOVE", 32),
    (tables, "RESERVED_ROWS", 128),
    (shared_views, "_PAGES", 8),
    (shared_views, "_MASK", 7),
    (values, "_CHUNK_ROWS", 3),
    (section_checks, "WINDOW_ROWS", 3),
    (stream_index, "_SHRINK_ABOVE", 4),
    (object_indexes, "_SPAN_SHIFT", 2),
    (object_queries, "_SPANS_AT_ONCE", 2),
    (stream_decisions, "DESTROYED_AT_ONCE_MAX", 2),
    (ObjectDirectory.__init__, "__defaults__", (16, 4)),
)


@contextmanager
def small_tables() -> Iterator[None]:
    """Make tables tiny; maps made meanwhile must not outlive it."""
    with ExitStack() as patches:
        for owner, name, value in _SMALL:
            patches.enter_context(patch.object(owner, name, value))
        yield

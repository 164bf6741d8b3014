"""Makes the map's tables tiny, so that a few entities reach what a million would.

Pages of a few rows, a directory whose newest part holds sixteen ids, arrays that grow at once, and
streams deleted two objects at a time. Nothing here changes an answer.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import streammeta.controller.metadata.object_indexes as node_objects
import streammeta.controller.metadata.objects as objects
import streammeta.controller.metadata.shared_views as shared_dict
import streammeta.controller.metadata.stream_decisions as stream_decisions
import streammeta.controller.metadata.stream_index as stream_index
import streammeta.controller.metadata.tables as columns
import streammeta.controller.metadata.values as paging
from streammeta.controller.metadata.object_directory import ObjectDirectory

_SMALL = (
    (columns, "_PAGE_SHIFT", 2),
    (columns, "_PAGE_ROWS", 4),
    (columns, "_CAPACITY_MIN", 4),
    (columns, "RESERVE_ABOVE", 32),
    (columns, "RESERVED_ROWS", 128),
    (shared_dict, "_PAGES", 8),
    (shared_dict, "_MASK", 7),
    (paging, "_CHUNK_ROWS", 3),
    (stream_index, "_SHRINK_ABOVE", 4),
    (node_objects, "_SPAN_SHIFT", 2),
    (objects, "_SPANS_AT_ONCE", 2),
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

"""Large memory that goes back to the system as soon as nobody looks at it any more.

The allocator of the C library keeps what is freed for later, and can't use it again when something
small has settled in it; a buffer that comes from the system itself has nothing of that.
"""

from __future__ import annotations

import mmap

HUGE_PAGE_WORTH = 8 * 1024 * 1024
"""Bytes from which on large pages, of 2 MiB each, take little more than is needed."""


def new_buffer(size: int) -> memoryview:
    """Return `size` writable bytes of 0, freed with the last view of them."""
    if not size:
        return memoryview(b"")
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE_WORTH:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)

"""Eras of log offsets, which identify logs from before a recovery.

A cluster recovered from one survivor continues at the first offset of the next era. The era of a
log's end therefore distinguishes the logs on both sides of a recovery, without a separate record.
No log outgrows an era: at a million entries per second one lasts nine years.
"""

from __future__ import annotations

from streammeta.controller.ids import EndOffset
from streammeta.controller.quorum.messages import FetchRequest, Request, VoteRequest

ERA_OFFSETS = 1 << 48
"""Offsets of one era. The first recovery starts the second era."""


def era_of(end_offset: int) -> int:
    """Return the number of recoveries that a log with this end has been through."""
    return end_offset // ERA_OFFSETS


def next_era(end_offset: int) -> EndOffset:
    """Return the offset at which a log with this end continues after a recovery."""
    return EndOffset((era_of(end_offset) + 1) * ERA_OFFSETS)


def is_from_before_recovery(end_offset: int, own_end: int) -> bool:
    """Whether a non-empty log that ends at `end_offset` is from an earlier era than one's own."""
    return end_offset > 0 and era_of(end_offset) < era_of(own_end)


def carries_log_from_before_recovery(request: Request, own_end: int) -> bool:
    """Whether the sender of a Fetch or Vote has a log from before the last recovery."""
    match request:
        case FetchRequest(fetch_offset=end_offset) | VoteRequest(end_offset=end_offset):
            return is_from_before_recovery(end_offset, own_end)
        case _:
            return False

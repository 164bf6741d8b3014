"""Jump of the log's offsets after the loss of a majority, by which logs of before are recognised.

A cluster that was recovered from one survivor goes on at the first offset of the next era, so the
era of its end tells the logs on both sides of a recovery apart, without any record of it. No log
grows through an era: at a million entries a second one lasts nine years.
"""

from __future__ import annotations

from streammeta.controller.ids import EndOffset
from streammeta.controller.quorum.messages import FetchRequest, Request, VoteRequest

ERA_OFFSETS = 1 << 48
"""Offsets of one era; the first recovery begins the second."""


def era_of(end_offset: int) -> int:
    """Return the number of recoveries that a log with this end has behind it."""
    return end_offset // ERA_OFFSETS


def next_era(end_offset: int) -> EndOffset:
    """Return the offset at which a log with this end goes on after a recovery."""
    return EndOffset((era_of(end_offset) + 1) * ERA_OFFSETS)


def is_of_before(end_offset: int, own_end: int) -> bool:
    """Whether a log that ends here is of an earlier era than one's own; an empty log is of none."""
    return end_offset > 0 and era_of(end_offset) < era_of(own_end)


def comes_from_before(request: Request, own_end: int) -> bool:
    """Whether the sender of a Fetch or Vote has a log of before the last recovery."""
    match request:
        case FetchRequest(fetch_offset=end_offset) | VoteRequest(end_offset=end_offset):
            return is_of_before(end_offset, own_end)
        case _:
            return False

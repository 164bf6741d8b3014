"""The arithmetic of majorities, apart so that it can be tested exhaustively and sabotaged."""

from __future__ import annotations

from collections.abc import Collection

from streammeta.controller.ids import EndOffset


def majority(voters: int) -> int:
    """Return the smallest count of `voters` replicas that any two of which overlap."""
    return voters // 2 + 1


def majority_end(flushed_ends: Collection[EndOffset]) -> EndOffset:
    """Return the highest offset that a majority has flushed, given one end for each voter."""
    return sorted(flushed_ends, reverse=True)[majority(len(flushed_ends)) - 1]


def committed_end(flushed_ends: Collection[EndOffset], epoch_start: EndOffset) -> EndOffset | None:
    """Return the high watermark a leader may announce, or None while it may announce none.

    It must lie beyond the start of the leader's epoch: batches of earlier epochs are committed
    only along with one of its own (Raft, figure 8; KAFKA-12619 for the strict comparison).
    """
    candidate = majority_end(flushed_ends)
    return candidate if candidate > epoch_start else None

"""The ring of committed entries: in order, bounded, and honest about what it no longer has."""

import random

import pytest

from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.runtime.writer.change_feed import (
    ENTRY_OVERHEAD_BYTES,
    Change,
    ChangeFeed,
    Cursor,
)


def batch(base_offset: int, *payloads: bytes, kind: BatchKind = BatchKind.DATA) -> Batch:
    return Batch(EndOffset(base_offset), Epoch(1), kind, payloads)


def drain(cursor: Cursor) -> list[Change]:
    found = []
    while (change := cursor.advance()) is not None:
        found.append(change)
    return found


def test_a_cursor_at_the_end_goes_past_what_holds_no_change_and_resumes_there() -> None:
    feed = ChangeFeed()
    cursor = feed.cursor(0)
    feed.extend([batch(0, b"control", kind=BatchKind.CONTROL)], 1)
    assert (cursor.advance(), cursor.next_offset) == (None, 1)
    feed.extend([batch(1, b"a")], 2)
    assert (cursor.advance(), cursor.next_offset) == (Change(1, b"a"), 2)


def test_the_ring_keeps_its_bytes_bounded_and_a_cursor_behind_it_is_lost() -> None:
    size = 100
    feed = ChangeFeed(ring_bytes=10 * (size + ENTRY_OVERHEAD_BYTES))
    slow = feed.cursor(0)
    for offset in range(10):
        feed.extend([batch(offset, bytes(size))], offset + 1)
    assert not slow.is_lost
    feed.extend([batch(10, bytes(size))], 11)
    assert slow.is_lost
    assert not slow.is_replaced
    assert feed.start_offset == 1
    assert feed.nbytes <= 10 * (size + ENTRY_OVERHEAD_BYTES)
    assert [change.offset for change in drain(feed.cursor(1))] == list(range(1, 11))


@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_a_cursor_that_is_not_lost_sees_each_entry_once(seed: int) -> None:
    """Against a plain list; thousands of entries, so that dropped places are given back."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    feed = ChangeFeed(ring_bytes=300 * (ENTRY_OVERHEAD_BYTES + 4))
    entries: dict[int, bytes] = {}
    cursors = {feed.cursor(rng.randrange(50)): dict[int, bytes]() for _ in range(5)}
    begins = {cursor: cursor.next_offset for cursor in cursors}
    end = 0
    for step in range(9_000):
        payloads = [f"{step:04}".encode() for _ in range(rng.randrange(1, 3))]
        kind = BatchKind.CONTROL if rng.random() < 0.1 else BatchKind.DATA
        if kind is BatchKind.DATA:
            entries |= {end + place: payload for place, payload in enumerate(payloads)}
        feed.extend([batch(end, *payloads, kind=kind)], end + len(payloads))
        end += len(payloads)
        for cursor, seen in cursors.items():
            if rng.random() < 0.1:
                assert not cursor.is_lost
                for change in drain(cursor):
                    assert change.offset not in seen
                    seen[change.offset] = change.payload
    for cursor, seen in cursors.items():
        for change in drain(cursor):
            seen[change.offset] = change.payload
        assert list(seen) == sorted(seen)
        assert seen == {at: entries[at] for at in entries if at >= begins[cursor]}
    assert len(feed._offsets) < 10_000, "places of dropped entries are given back"


def test_a_snapshot_breaks_the_sequence_for_cursors_below_its_end_alone() -> None:
    feed = ChangeFeed()
    feed.extend([batch(0, b"a")], 1)
    below, ahead = feed.cursor(1), feed.cursor(9)
    feed.restart(7)
    assert below.is_lost
    assert below.is_replaced
    assert not ahead.is_lost
    feed.extend([batch(6, b"held by the snapshot"), batch(7, b"b", b"c", b"d")], 10)
    assert drain(ahead) == [Change(9, b"d")]
    assert feed.nbytes == 3 * (ENTRY_OVERHEAD_BYTES + 1), "what the snapshot holds is not kept"
    assert feed.cursor(6).is_lost
    assert drain(feed.cursor(7))[0] == Change(7, b"b")


def test_listeners_hear_when_the_end_moves_and_only_then() -> None:
    feed = ChangeFeed()
    heard: list[int] = []
    feed.subscribe(lambda: heard.append(feed.end_offset))
    feed.extend([batch(0, b"a", b"b")], 2)
    feed.extend([], 2)
    feed.restart(5)
    assert heard == [2, 5]

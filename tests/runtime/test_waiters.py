"""Callers that wait for an offset, a bounded number a turn, and the ring of committed entries.

Reads share rounds, of which one is under way and one forms.
"""

import asyncio
import random
from functools import partial

import pytest

from streammeta.controller.errors import NotLeaderError, OutcomeUnknownError
from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.runtime.quorum_errors import TooManyReadsError
from streammeta.controller.runtime.replication.waiters import (
    COMPLETED_PER_TURN,
    ROUND_REST_MS,
    FlushWaiters,
    OffsetWaiters,
    ReadRounds,
)
from streammeta.controller.runtime.writer.change_feed import (
    ENTRY_OVERHEAD_BYTES,
    Change,
    ChangeFeed,
    Cursor,
)
from tests.kit.seeds import seeds


async def test_answers_leave_when_the_high_watermark_passes_them() -> None:
    waiters = OffsetWaiters()
    first, second, third = waiters.until(5), waiters.until(5), waiters.until(9)

    waiters.release(4)
    assert not first.done()

    waiters.release(5)
    assert first.done()
    assert second.done()
    assert not third.done()
    assert len(waiters) == 1


async def test_later_offsets_may_be_waited_for_first() -> None:
    waiters = OffsetWaiters()
    far, near = waiters.until(9), waiters.until(5)

    waiters.release(5)

    assert near.done()
    assert not far.done()


async def test_who_gives_up_is_forgotten_and_the_others_stay() -> None:
    waiters = OffsetWaiters()
    gone, stays, later = waiters.until(7), waiters.until(3), waiters.until(5)

    waiters.forget(gone)
    assert len(waiters) == 2
    waiters.release(4)

    assert stays.done()
    assert not later.done()
    assert not gone.done()


async def test_lost_leadership_fails_every_waiting_answer() -> None:
    waiters = OffsetWaiters()
    waiting = [waiters.until(offset) for offset in (1, 2, 3)]

    waiters.fail_all(OutcomeUnknownError("gone"))

    for future in waiting:
        with pytest.raises(OutcomeUnknownError):
            await future
    assert len(waiters) == 0


async def test_a_cancelled_caller_does_not_disturb_the_others() -> None:
    waiters = OffsetWaiters()
    gone, stays = waiters.until(1), waiters.until(1)
    gone.cancel()

    waiters.release(1)

    assert stays.done()
    assert not stays.cancelled()


async def test_a_turn_of_the_event_loop_completes_a_bounded_number_in_order() -> None:
    waiters, woken = OffsetWaiters(), list[int]()

    async def wait(number: int, future: asyncio.Future[None]) -> None:
        await future
        woken.append(number)

    tasks = [
        asyncio.create_task(wait(number, waiters.until(number // 100))) for number in range(1_000)
    ]
    await asyncio.sleep(0)
    waiters.release(4)
    waiters.release(9)
    before = 0
    while len(woken) < 1_000:
        await asyncio.sleep(0)
        assert len(woken) - before <= COMPLETED_PER_TURN
        before = len(woken)
    assert woken == sorted(woken)
    await asyncio.gather(*tasks)


async def test_what_was_released_is_answered_though_leadership_is_lost_before_its_turn() -> None:
    waiters = OffsetWaiters()
    waiting = [waiters.until(1 + number // 100) for number in range(200)]
    waiters.release(1)
    waiters.fail_all(OutcomeUnknownError("gone"))
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert outcomes[:100] == [None] * 100, "committed before"
    assert all(isinstance(outcome, OutcomeUnknownError) for outcome in outcomes[100:])
    assert len(waiters) == 0


async def test_a_read_never_joins_the_round_under_way() -> None:
    rounds = ReadRounds(10)
    before = rounds.join()
    first = rounds.begin(0)
    assert first is not None

    after = rounds.join()
    rounds.proven(first, EndOffset(5))

    assert before.result() == 5
    assert not after.done(), "the voters may have echoed that round before this read arrived"
    second = rounds.begin(0)
    assert second is not None
    rounds.proven(second, EndOffset(7))
    assert after.result() == 7


async def test_all_reads_that_arrive_during_a_round_share_the_next_one() -> None:
    rounds = ReadRounds(100)
    first_read = rounds.join()
    first = rounds.begin(0)
    assert first is not None
    reads = [rounds.join() for _ in range(63)]
    assert rounds.begin(0) is None, "one is under way"

    rounds.proven(first, EndOffset(1))
    second = rounds.begin(0)
    assert second == first + 1, "a round of one read is followed by the next at once"
    rounds.proven(second, EndOffset(2))

    assert first_read.result() == 1
    assert sum(read.done() for read in reads) == COMPLETED_PER_TURN, "the others in later turns"
    assert set(await asyncio.gather(*reads)) == {2}
    assert rounds.begin(0) is None, "no read waits"


@pytest.mark.parametrize(("count", "rest_ms"), [(2, 1), (5, 2), (8, ROUND_REST_MS)])
async def test_behind_a_round_of_several_reads_the_next_one_gathers_more(
    count: int, rest_ms: int
) -> None:
    rounds = ReadRounds(100)
    for _ in range(count):
        rounds.join()
    first = rounds.begin(100)
    assert first is not None
    rounds.proven(first, EndOffset(1))
    assert rounds.rest_ms(100) is None, "no read waits"

    reads = [rounds.join()]
    assert rounds.rest_ms(100) == rest_ms
    assert rounds.begin(100 + rest_ms - 1) is None
    reads.append(rounds.join())
    second = rounds.begin(100 + rest_ms)
    assert second is not None
    rounds.proven(second, EndOffset(2))
    assert [read.result() for read in reads] == [2, 2]


async def test_a_round_of_very_many_reads_rests_no_longer() -> None:
    rounds = ReadRounds(100)
    for _ in range(100):
        rounds.join()
    first = rounds.begin(100)
    assert first is not None
    rounds.proven(first, EndOffset(1))
    await asyncio.sleep(0)
    rounds.join()
    assert rounds.begin(100 + ROUND_REST_MS) is not None


async def test_a_round_without_proof_fails_its_reads_and_no_others() -> None:
    rounds = ReadRounds(10)
    gone, stays = rounds.join(), rounds.join()
    gone.cancel()
    first = rounds.begin(0)
    assert first is not None
    later = rounds.join()

    rounds.refused(first, NotLeaderError())
    rounds.proven(first, EndOffset(3))  # over already

    with pytest.raises(NotLeaderError):
        await stays
    assert not later.done()
    rounds.refuse_forming(NotLeaderError())
    with pytest.raises(NotLeaderError):
        await later


async def test_the_reads_that_wait_are_bounded() -> None:
    rounds = ReadRounds(2)
    reads = [rounds.join()]
    rounds.begin(0)
    reads.append(rounds.join())
    with pytest.raises(TooManyReadsError, match="2"):
        rounds.join()
    rounds.close(NotLeaderError())
    for read in reads:
        with pytest.raises(NotLeaderError):
            await read
    rounds.join()


def test_a_flush_is_told_by_its_offset_and_nothing_is_remembered_of_it() -> None:
    waiters, told = FlushWaiters(), list[int]()
    for end in (10, 11, 20):
        waiters.tell(end, 10, partial(told.append, end))
    assert told == [10]
    waiters.release(19)
    assert told == [10, 11]
    # The log of another term is shorter.
    waiters.tell(15, 12, partial(told.append, 15))
    assert told == [10, 11]
    waiters.forget_all()
    waiters.release(20)
    assert told == [10, 11]


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


@pytest.mark.parametrize("seed", seeds(2, slow=1))
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

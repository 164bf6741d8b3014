"""Hashes at one offset are equal on members with equal logs, wherever they are asked."""

import asyncio
import io

import pytest

from streammeta.controller.errors import InvalidRequestError, LimitExceededError, OffsetPassedError
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.runtime.persistence import state_hashes
from streammeta.controller.runtime.writer.controller import MetadataController
from tests.kit.memory_log import (
    REGISTER,
    MemoryLog,
    committed,
    create,
    leading,
    new_controller,
    new_follower,
    submit,
)


def feed(follower: MetadataController, log: MemoryLog, start: int, end: int) -> None:
    """Deliver what lies in [start, end); each append is a batch of the memory log."""
    batches: list[Batch] = [
        batch for batch in log.batches if start <= batch.base_offset and batch.end_offset <= end
    ]
    follower.on_committed(batches, end)


def test_the_rolling_hash_tells_order_offsets_and_payloads_apart() -> None:
    def of(*entries: tuple[int, bytes]) -> bytes:
        chain = state_hashes.RollingHash()
        for offset, payload in entries:
            chain.extend(offset, payload)
        return chain.value

    values = [
        *(of(), of((1, b"a")), of((2, b"a")), of((1, b"a"), (2, b"b")), of((1, b"b"), (2, b"a"))),
        *(of((1, b"ab")), of((1, b"a"), (3, b"b"))),
    ]
    assert len(set(values)) == len(values)
    assert values[0] == state_hashes.EMPTY_LOG_HASH
    assert all(len(value) == 16 for value in values)


def test_undone_entries_leave_no_trace_in_the_rolling_hash() -> None:
    chain = state_hashes.RollingHash()
    chain.extend(1, b"a")
    chain.forget_undo(2)
    kept = chain.value
    chain.extend(2, b"b")
    chain.extend(5, b"c")
    chain.undo_to(2)
    assert chain.value == kept


def test_a_hash_that_is_not_known_stays_unknown() -> None:
    chain = state_hashes.RollingHash(state_hashes.UNKNOWN_LOG_HASH)
    chain.extend(1, b"a")
    assert chain.value == state_hashes.UNKNOWN_LOG_HASH


async def test_members_have_equal_hashes_at_one_offset_ahead_while_writes_go_on() -> None:
    """The leader answers for an offset it passes at once, the follower in the middle of a batch."""
    leader, log = new_controller()
    follower = new_follower(log)
    log.lead()
    await committed(log, leader.write(REGISTER))
    feed(follower, log, 0, log.committed)
    target = log.next_offset + 2
    asked = [await submit(each.state_hash(target)) for each in (leader, follower)]
    writes = [await submit(leader.write(create(f"r{number}"))) for number in range(5)]
    assert not any(each.done() for each in asked), "nothing of it is committed"
    log.commit()
    at_leader = await asked[0]
    assert not asked[1].done()
    feed(follower, log, 2, log.committed)
    at_follower = await asked[1]
    assert at_leader == at_follower
    assert at_leader.offset == target
    now = await leader.state_hash(None)
    assert now.offset == log.committed
    assert now.digest != at_leader.digest
    assert now.log_hash != at_leader.log_hash
    assert now == await follower.state_hash(None)
    await asyncio.gather(*writes)


async def test_what_is_passed_is_refused_and_the_present_end_is_not() -> None:
    leader, log = await leading()
    await committed(log, leader.write(create("a")))
    with pytest.raises(OffsetPassedError, match="at_offset"):
        await leader.state_hash(log.committed - 1)
    assert (await leader.state_hash(log.committed)).offset == log.committed
    for bad in (-1, log.committed + state_hashes.AHEAD_MAX + 1):
        with pytest.raises(InvalidRequestError, match="at_offset"):
            await leader.state_hash(bad)


async def test_records_of_the_quorum_change_no_hash_and_reach_offsets() -> None:
    leader, log = await leading()
    before = await leader.state_hash(None)
    ahead = await submit(leader.state_hash(log.next_offset + 1))
    log.lose_leadership(truncate=False)
    log.lead()  # appends a control record, and nothing else
    after = await ahead
    assert after.offset == before.offset + 1
    assert (after.digest, after.log_hash) == (before.digest, before.log_hash)


async def test_an_offset_that_a_record_of_the_quorum_reaches_is_seen_before_the_next_entry() -> (
    None
):
    leader, log = await leading()
    before = await leader.state_hash(None)
    asked = await submit(leader.state_hash(log.next_offset + 1))
    log._add(BatchKind.CONTROL, (b"voters",))
    leader.submit((create("a"),))
    log.commit()
    seen = await asked
    assert (seen.digest, seen.log_hash) == (before.digest, before.log_hash)


@pytest.mark.parametrize("turns", [0, 5])
async def test_a_view_of_what_is_undone_is_never_answered(turns: int) -> None:
    """Leadership is lost at once when the offset is reached, or when who asked waits for it."""
    leader, log = await leading()
    target = log.next_offset + 1
    asked = await submit(leader.state_hash(target))
    leader.submit((create("lost"),))  # reaches the offset, uncommitted
    for _ in range(turns):
        await asyncio.sleep(0)
    log.lose_leadership(truncate=True)
    log.lead()
    follower = new_follower(log)
    feed(follower, log, 0, log.committed)
    seen = await asked
    assert seen.offset == target
    assert seen == await follower.state_hash(target)


async def test_a_snapshot_carries_the_rolling_hash_on() -> None:
    leader, log = await leading()
    file, point = io.BytesIO(), log.snapshot_point()
    leader.freeze(point)(file)
    loaded = new_follower(log)
    waiting = await submit(loaded.state_hash(1))
    beyond = await submit(loaded.state_hash(log.committed + 1))
    loaded.load(file, point.snapshot_id)()
    with pytest.raises(OffsetPassedError):
        await waiting
    assert await loaded.state_hash(None) == await leader.state_hash(None)
    await committed(log, leader.write(create("a")))
    feed(loaded, log, point.snapshot_id.end_offset, log.committed)
    assert await beyond == await leader.state_hash(log.committed)
    assert (await beyond).log_hash not in (
        state_hashes.EMPTY_LOG_HASH,
        state_hashes.UNKNOWN_LOG_HASH,
    )


async def test_few_wait_at_a_time_and_who_gives_up_makes_room() -> None:
    leader, log = await leading()
    waiting = [
        await submit(leader.state_hash(log.committed + 1)) for _ in range(state_hashes.WAITING_MAX)
    ]
    with pytest.raises(LimitExceededError):
        await leader.state_hash(log.committed + 1)
    waiting[0].cancel()
    await asyncio.wait({waiting[0]})
    last = await submit(leader.state_hash(log.committed + 1))
    await committed(log, leader.write(create("a")))
    assert {(await each).offset for each in (*waiting[1:], last)} == {log.committed}

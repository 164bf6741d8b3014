"""Answers leave when committed, lost leadership undoes, and equal logs have equal hashes."""

import asyncio
import io

import pytest

from streammeta.controller import errors
from streammeta.controller.errors import InvalidRequestError, LimitExceededError, OffsetPassedError
from streammeta.controller.ids import EndOffset, SnapshotId
from streammeta.controller.metadata.api.answers import CreateStreamsAnswer, DescribeStreamsAnswer
from streammeta.controller.metadata.api.requests import DescribeStreams, PrepareObjects
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.runtime.persistence import state_hashes
from streammeta.controller.runtime.quorum_errors import NoDiskSpaceError, NotCaughtUpError
from streammeta.controller.runtime.writer.controller import Answered, MetadataController
from tests.kit.memory_log import (
    NODE,
    REGISTER,
    MemoryLog,
    committed,
    create,
    leading,
    new_controller,
    new_follower,
    submit,
)
from tests.kit.waiting import ManualClock


async def test_an_answer_waits_for_its_commit() -> None:
    controller, log = new_controller()
    log.lead()
    task = await submit(controller.write(REGISTER))
    assert not task.done()

    log.commit()

    answered = await task
    assert answered.answer.error == errors.ErrorCode.NONE
    assert answered.offset == log.committed


async def test_an_answer_that_changes_nothing_waits_for_what_it_was_decided_on() -> None:
    """A repeated create is answered from uncommitted state: not before that state is committed."""
    controller, log = await leading()
    first = await submit(controller.write(create("a")))
    repeated = await submit(controller.write(create("a")))
    assert log.next_offset == log.committed + 1
    assert not repeated.done()

    log.commit()

    assert (
        await first
        == await repeated
        == Answered(
            CreateStreamsAnswer(error=errors.ErrorCode.NONE, stream_ids=(0,)), log.committed
        )
    )


async def test_an_answer_that_changes_nothing_is_given_by_the_leader_alone() -> None:
    """A leader that was deposed and does not know refuses by a state that is no longer the last."""
    controller, log = await leading()
    await committed(log, controller.write(create("a")))
    log.is_deposed = True
    with pytest.raises(errors.NotLeaderError):
        await controller.write(create("a"))


async def test_a_read_is_answered_by_the_leader_alone() -> None:
    """A leader that was deposed and does not know may lack what its successor has acknowledged."""
    controller, log = await leading()
    log.is_deposed = True
    with pytest.raises(errors.NotLeaderError):
        await controller.read(DescribeStreams())


async def test_with_a_full_disk_a_read_does_not_wait_for_what_may_never_be_committed() -> None:
    controller, log = await leading()
    await committed(log, controller.write(create("a")))
    log.is_short_of_space = True
    waiting = [await submit(controller.write(create(name))) for name in "bc"]

    read = await controller.read(DescribeStreams())

    assert read.offset == log.committed
    assert [stream.stream_id for stream in read.answer.streams] == [0]  # type: ignore[attr-defined]
    log.commit()
    created = [(await task).answer for task in waiting]
    assert [answer.stream_ids for answer in created] == [(1,), (2,)]
    replica, _ = new_controller()
    replica.on_committed(log.batches, log.committed)
    digests = [it.cluster_metadata.freeze().digest() for it in (controller, replica)]
    assert digests[0] == digests[1]


async def test_reads_that_wait_when_disks_become_full_are_answered_from_what_is_committed() -> None:
    controller, log = await leading()
    writing = await submit(controller.write(create("a")))
    read = await submit(controller.read(DescribeStreams()))
    session = await submit(controller.read(DescribeStreams(), at_least=log.committed))
    log.is_short_of_space = True
    controller.on_writes_refused()

    for waiting in (read, session):
        answered = await waiting
        assert (answered.offset, answered.answer.total) == (log.committed, 0)
    with pytest.raises(NoDiskSpaceError):
        await controller.write(create("a"))  # as decided before, which is not committed
    assert not writing.done()
    controller.on_writes_held_up()
    with pytest.raises(errors.OutcomeUnknownError):
        await writing
    log.is_short_of_space = False
    log.commit()
    assert (await controller.write(create("a"))).answer.stream_ids == (0,)  # type: ignore[attr-defined]


async def test_a_read_never_shows_what_is_not_committed() -> None:
    controller, log = await leading()
    await submit(controller.write(create("a")))
    read = await submit(controller.read(DescribeStreams()))
    assert not read.done()

    log.commit()

    answer = (await read).answer
    assert isinstance(answer, DescribeStreamsAnswer)
    assert answer.total == 1


@pytest.mark.parametrize("truncate", [True, False])
async def test_lost_leadership_undoes_what_was_not_committed(truncate: bool) -> None:
    controller, log = await leading()
    before = controller.cluster_metadata.state_hash()
    doubtful = await submit(controller.write(create("a", 3)))

    log.lose_leadership(truncate=truncate)

    with pytest.raises(errors.OutcomeUnknownError):
        await doubtful
    assert controller.cluster_metadata.state_hash() == before
    with pytest.raises(errors.NotLeaderError):
        await controller.write(create("b"))
    log.lead()
    answer = await committed(log, controller.write(create("a", 3)))
    assert answer.answer.stream_ids == (0, 1, 2)
    assert controller.cluster_metadata.size().streams == 3


async def test_a_follower_reaches_the_leaders_state() -> None:
    controller, log = new_controller()
    follower = MetadataController(ClusterMetadata(), ManualClock())
    log.lead()
    await committed(log, controller.write(REGISTER))
    await committed(log, controller.write(create("a", 5)))

    follower.on_committed(log.batches, log.committed)

    assert follower.cluster_metadata.state_hash() == controller.cluster_metadata.state_hash()


async def test_a_refused_append_leaves_no_trace() -> None:
    controller, log = await leading()
    before = controller.cluster_metadata.state_hash()
    log.refuse_appends = True

    with pytest.raises(errors.LimitExceededError):
        await controller.write(create("a"))

    assert controller.cluster_metadata.state_hash() == before
    assert log.next_offset == log.committed


async def test_a_malformed_request_appends_nothing_and_leadership_stands() -> None:
    controller, log = await leading()
    bad = PrepareObjects(request_id="p", node=NODE, count=0, ttl_ms=60_000)

    with pytest.raises(errors.InvalidRequestError, match="count"):
        await controller.write(bad)

    assert log.next_offset == log.committed
    assert controller.is_active


async def test_freezing_waits_for_the_tail_and_holds_no_write_back() -> None:
    controller, log = await leading()
    under_way = await submit(controller.write(create("a")))
    freezing = await submit(controller.frozen())
    end_offset = log.next_offset
    at_freezing = controller.cluster_metadata.state_hash()
    later = await submit(controller.write(create("b")))
    assert log.next_offset == end_offset + 1, "the write was appended while the freeze waits"
    assert not freezing.done()

    log.commit()

    frozen = await freezing
    assert frozen.id == SnapshotId(EndOffset(end_offset), log.epoch)
    assert frozen.view.digest() == at_freezing
    await under_way
    await later


async def test_a_view_is_refused_when_leadership_is_lost_before_it_is_committed() -> None:
    controller, log = await leading()
    await submit(controller.write(create("a")))
    freezing = await submit(controller.frozen())

    log.lose_leadership(truncate=True)

    with pytest.raises(errors.NotLeaderError):
        await freezing


async def test_a_session_read_waits_for_its_offset_on_any_controller() -> None:
    controller, log = new_controller()
    follower = new_follower(log)
    log.lead()
    await committed(log, controller.write(REGISTER))
    written = await committed(log, controller.write(create("a")))
    reading = await submit(follower.read(DescribeStreams(), at_least=written.offset))
    assert not reading.done()

    follower.on_committed(log.batches, log.committed)

    answered = await reading
    assert answered.answer.total == 1
    assert answered.offset == written.offset


async def test_a_session_read_that_would_wait_too_long_says_how_far_this_controller_is() -> None:
    controller, log = new_controller()
    log.lead()

    with pytest.raises(NotCaughtUpError, match=r"99.*1") as caught:
        await controller.read(DescribeStreams(), at_least=99, timeout_ms=1)

    assert (caught.value.wanted, caught.value.applied) == (99, 1)
    assert len(controller._session_reads) == 0, "who has given up is forgotten"
    with pytest.raises(errors.InvalidRequestError, match="at_least"):
        await controller.read(DescribeStreams(), at_least=-1)


@pytest.mark.parametrize("truncate", [True, False])
async def test_a_session_read_on_a_leader_never_shows_what_is_not_committed(truncate: bool) -> None:
    controller, log = await leading()
    doubtful = await submit(controller.write(create("a")))
    reading = await submit(controller.read(DescribeStreams(), at_least=log.committed))
    assert not reading.done()

    log.lose_leadership(truncate=truncate)

    answered = await reading
    assert (answered.answer.total, answered.offset) == (0, log.committed)
    with pytest.raises(errors.OutcomeUnknownError):
        await doubtful


async def test_the_state_hash_of_a_leader_is_of_committed_state_only() -> None:
    controller, log = await leading()
    before = controller.cluster_metadata.state_hash()
    await submit(controller.write(create("a")))
    hashing = await submit(controller.state_hash(None))
    assert not hashing.done()

    log.lose_leadership(truncate=True)

    hashed = await hashing
    assert (hashed.offset, hashed.digest) == (log.committed, before)


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
    asked = [await submit(controller.state_hash(target)) for controller in (leader, follower)]
    writes = [await submit(leader.write(create(f"r{number}"))) for number in range(5)]
    assert not any(task.done() for task in asked), "nothing of it is committed"
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
    assert {(await task).offset for task in (*waiting[1:], last)} == {log.committed}

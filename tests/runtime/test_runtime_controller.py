"""Answers leave when committed, lost leadership undoes, errors change nothing."""

import pytest

from streammeta.controller import errors
from streammeta.controller.ids import EndOffset, SnapshotId
from streammeta.controller.metadata.api.answers import CreateStreamsAnswer, DescribeStreamsAnswer
from streammeta.controller.metadata.api.requests import DescribeStreams, PrepareObjects
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.runtime.quorum_errors import NoDiskSpaceError, NotCaughtUpError
from streammeta.controller.runtime.writer.controller import Answered, MetadataController
from tests.kit.clock import ManualClock
from tests.kit.memory_log import (
    NODE,
    REGISTER,
    committed,
    create,
    leading,
    new_controller,
    new_follower,
    submit,
)


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

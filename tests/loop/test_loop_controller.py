"""Answers leave when committed, lost leadership undoes, errors change nothing."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from controller.errors import (
    ErrorCode,
    InvalidRequestError,
    LimitExceededError,
    NotLeaderError,
    OutcomeUnknownError,
)
from controller.loop.controller import MetadataController
from controller.metadata.answers import CreateStreamsAnswer, DescribeStreamsAnswer
from controller.metadata.cluster_map import ClusterMap
from controller.metadata.requests import (
    CreateStreams,
    DescribeStreams,
    NewStream,
    PrepareObjects,
    RegisterNode,
)
from controller.metadata.values import NodeIdentity
from tests.loop.memory_log import MemoryLog

NODE = NodeIdentity(7, 1)
REGISTER = RegisterNode(node=NODE)


class StillClock:
    """Time that stands where the test puts it."""

    now_ms = 1_000_000

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.now_ms


def create(request_id: str, count: int = 1) -> CreateStreams:
    return CreateStreams(request_id=request_id, node=NODE, streams=(NewStream(),) * count)


def new_controller() -> tuple[MetadataController, MemoryLog]:
    controller = MetadataController(ClusterMap(), StillClock())
    log = MemoryLog(controller)
    controller.bind(log)
    return controller, log


async def submit(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a request and let it run until it waits."""
    task = asyncio.create_task(work)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def committed(log: MemoryLog, work: Coroutine[Any, Any, Any]) -> Any:
    task = await submit(work)
    log.commit()
    return await task


def test_an_answer_waits_for_its_commit() -> None:
    async def scenario() -> None:
        controller, log = new_controller()
        log.lead()
        task = await submit(controller.write(REGISTER))
        assert not task.done()

        log.commit()

        assert (await task).error == ErrorCode.NONE

    asyncio.run(scenario())


def test_an_answer_that_changes_nothing_waits_for_what_it_was_decided_on() -> None:
    """A repeated create is answered from uncommitted state: not before that state is committed."""

    async def scenario() -> None:
        controller, log = new_controller()
        log.lead()
        await committed(log, controller.write(REGISTER))
        first = await submit(controller.write(create("a")))
        repeated = await submit(controller.write(create("a")))
        assert log.next_offset == log.committed + 1
        assert not repeated.done()

        log.commit()

        assert (
            await first
            == await repeated
            == CreateStreamsAnswer(error=ErrorCode.NONE, stream_ids=(0,))
        )

    asyncio.run(scenario())


def test_a_read_never_shows_what_is_not_committed() -> None:
    async def scenario() -> None:
        controller, log = new_controller()
        log.lead()
        await committed(log, controller.write(REGISTER))
        await submit(controller.write(create("a")))
        read = await submit(controller.read(DescribeStreams()))
        assert not read.done()

        log.commit()

        answer = await read
        assert isinstance(answer, DescribeStreamsAnswer)
        assert answer.total == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("truncate", [True, False])
def test_lost_leadership_undoes_what_was_not_committed(truncate: bool) -> None:
    async def scenario() -> None:
        controller, log = new_controller()
        log.lead()
        await committed(log, controller.write(REGISTER))
        before = controller.cluster_map.state_hash()
        doubtful = await submit(controller.write(create("a", 3)))

        log.lose_leadership(truncate=truncate)

        with pytest.raises(OutcomeUnknownError):
            await doubtful
        assert controller.cluster_map.state_hash() == before
        with pytest.raises(NotLeaderError):
            await controller.write(create("b"))
        log.lead()
        answer = await committed(log, controller.write(create("a", 3)))
        assert answer.stream_ids == (0, 1, 2)
        assert controller.cluster_map.size().streams == 3

    asyncio.run(scenario())


def test_a_follower_reaches_the_leaders_state() -> None:
    async def scenario() -> None:
        controller, log = new_controller()
        follower = MetadataController(ClusterMap(), StillClock())
        log.lead()
        await committed(log, controller.write(REGISTER))
        await committed(log, controller.write(create("a", 5)))

        follower.on_committed(log.batches, log.committed)

        assert follower.cluster_map.state_hash() == controller.cluster_map.state_hash()

    asyncio.run(scenario())


def test_a_refused_append_leaves_no_trace() -> None:
    async def scenario() -> None:
        controller, log = new_controller()
        log.lead()
        await committed(log, controller.write(REGISTER))
        before = controller.cluster_map.state_hash()
        log.refuse_appends = True

        with pytest.raises(LimitExceededError):
            await controller.write(create("a"))

        assert controller.cluster_map.state_hash() == before
        assert log.next_offset == log.committed

    asyncio.run(scenario())


def test_a_malformed_request_appends_nothing_and_leadership_stands() -> None:
    async def scenario() -> None:
        controller, log = new_controller()
        log.lead()
        await committed(log, controller.write(REGISTER))
        bad = PrepareObjects(request_id="p", node=NODE, count=0, ttl_ms=60_000)

        with pytest.raises(InvalidRequestError, match="count"):
            await controller.write(bad)

        assert log.next_offset == log.committed
        assert controller.is_active

    asyncio.run(scenario())


def test_freezing_waits_for_the_tail_and_holds_new_writes_back() -> None:
    async def scenario() -> None:
        controller, log = new_controller()
        log.lead()
        await committed(log, controller.write(REGISTER))
        under_way = await submit(controller.write(create("a")))
        freezing = await submit(controller.frozen())
        held_back = await submit(controller.write(create("b")))
        end_offset = log.next_offset
        assert not freezing.done()

        log.commit()

        frozen, epoch = await freezing
        assert (frozen.end_offset, epoch) == (end_offset, log.epoch)
        await under_way
        await committed(log, asyncio.wait_for(held_back, 5))

    asyncio.run(scenario())

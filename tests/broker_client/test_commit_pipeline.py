"""Each upload gets its own verdict, once, whatever happens to messages and leaders."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from streammeta.client import errors, model
from streammeta.client.commits import messages
from streammeta.client.commits.core import MESSAGES_IN_FLIGHT
from streammeta.client.commits.pipeline import CommitPipeline
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.v1 import objects_pb2
from streammeta.v1.common_pb2 import (
    ERROR_CODE_NONE,
    ERROR_CODE_OFFSET_NOT_MATCHED,
    ON_CONFLICT_REJECT_ALL,
    NodeIdentity,
)
from tests.kit.fake_cluster import FakePipelineCluster, abort
from tests.kit.waiting import until

NODE = model.NodeIdentity(1000, 1)
NODE_MESSAGE = NodeIdentity(node_id=1000, node_epoch=1)


def upload(object_id: int, stream_id: int, start: int, rows: int = 1) -> messages.Upload:
    """`rows` streams from `stream_id` on, 10 offsets each."""
    streams = range(stream_id, stream_id + rows)
    return messages.Upload(object_id, 100, streams, [start] * rows, [start + 10] * rows, [1] * rows)


def commit(object_id: int, stream_id: int, start: int) -> objects_pb2.CommitStreamSetObjectRequest:
    return objects_pb2.CommitStreamSetObjectRequest(
        node=NODE_MESSAGE,
        on_conflict=ON_CONFLICT_REJECT_ALL,
        object_id=object_id,
        ranges=objects_pb2.RangeColumns(
            stream_id=[stream_id], start_offset=[start], end_offset=[start + 10]
        ),
    )


@dataclass(frozen=True)
class Plain:
    """A commit whose verdict is the answer itself."""

    message: objects_pb2.CommitStreamSetObjectRequest

    def request(self, node: NodeIdentity) -> objects_pb2.CommitStreamSetObjectRequest:
        assert node == self.message.node
        return self.message

    @staticmethod
    def verdict(
        answer: objects_pb2.CommitStreamSetObjectResponse,
    ) -> objects_pb2.CommitStreamSetObjectResponse:
        return answer


@asynccontextmanager
async def piped(
    members: int = 1, *, deadline: float = 10.0, attempt: float = 0.5
) -> AsyncIterator[tuple[FakePipelineCluster, CommitPipeline]]:
    """Yield a cluster and a pipeline to it."""
    async with (
        FakePipelineCluster(members) as cluster,
        ControllerClient(
            cluster.endpoints, deadline_s=deadline, attempt_timeout_s=attempt, rng=random.Random(11)
        ) as client,
        CommitPipeline(client, NODE) as pipeline,
    ):
        yield cluster, pipeline


async def test_what_waits_travels_together() -> None:
    """While as many messages as may be are under way, the rest waits for one of them."""
    async with piped(attempt=30.0) as (cluster, pipeline):
        release = asyncio.Event()

        async def wait(*_: Any) -> None:
            await release.wait()

        cluster.answer_hook = wait
        futures = []
        for number in range(100):
            futures.append(await pipeline.upload(upload(number, 0, 10 * number)))
            await until(lambda: len(cluster.messages) > 0, "first message")
            # Time in which more messages than may be could leave; too little would hide them.
            await asyncio.sleep(0.002)
        release.set()
        assert await asyncio.gather(*futures) == [messages.COMMITTED] * 100
        assert len(cluster.messages) <= MESSAGES_IN_FLIGHT + 1
        assert cluster.ends == {0: 1000}
        assert set(cluster.applied.values()) == {1}


async def test_each_upload_has_its_own_verdict() -> None:
    async with piped() as (cluster, pipeline):
        cluster.ends[6] = 3
        futures = [
            await pipeline.upload(submission)
            for submission in (upload(1, 0, 0, rows=2), upload(2, 5, 0, rows=3), upload(3, 0, 10))
        ]
        refused = messages.UploadVerdict(
            ERROR_CODE_OFFSET_NOT_MATCHED,
            [ERROR_CODE_NONE, ERROR_CODE_OFFSET_NOT_MATCHED, ERROR_CODE_NONE],
        )
        assert await asyncio.gather(*futures) == [messages.COMMITTED, refused, messages.COMMITTED]


async def test_commits_and_uploads_are_judged_in_the_order_they_came() -> None:
    async with piped() as (cluster, pipeline):
        futures: list[asyncio.Future[Any]] = []
        for number in range(0, 40, 2):
            futures.append(await pipeline.upload(upload(number, 0, 10 * number)))
            futures.append(await pipeline.commit(Plain(commit(number + 1, 0, 10 * number + 10))))
        answers = await asyncio.gather(*futures)
        assert [answer.error for answer in answers] == [ERROR_CODE_NONE] * 40
        assert cluster.ends == {0: 400}


async def test_a_leader_that_dies_with_answers_unsent() -> None:
    """What was applied and not answered is sent again, in order, and applied once."""
    async with piped(3) as (cluster, pipeline):
        dies = asyncio.Event()

        async def die(member: int, message: objects_pb2.CommitPipelineRequest, _: Any) -> None:
            if member == 0 and sum(cluster.applied.values()) >= 20:
                dies.set()
                await asyncio.Event().wait()

        cluster.answer_hook = die
        futures = []
        for number in range(200):
            futures.append(await pipeline.upload(upload(number, number % 7, 10 * (number // 7))))
            if number % 10 == 0:
                await asyncio.sleep(0.001)
        await dies.wait()
        cluster.move_leader(2)
        await cluster.kill(0)
        assert await asyncio.gather(*futures) == [messages.COMMITTED] * 200
        assert len(cluster.applied) == 200
        assert set(cluster.applied.values()) == {1}


async def test_a_leader_that_hangs_is_left_for_the_next() -> None:
    async with piped(2) as (cluster, pipeline):

        async def hang(member: int, message: objects_pb2.CommitPipelineRequest, _: Any) -> None:
            if member == 0:
                cluster.move_leader(1)
                await asyncio.Event().wait()

        cluster.hook = hang
        assert await (await pipeline.upload(upload(1, 0, 0))) == messages.COMMITTED
        assert pipeline._client.leader == cluster.endpoints[1]


async def test_a_bad_upload_fails_no_other() -> None:
    async with piped() as (cluster, pipeline):

        async def refuse(_: int, message: objects_pb2.CommitPipelineRequest, context: Any) -> None:
            if 13 in message.uploads.object_id:
                where = {"field": "ranges", "sequence": str(message.sequence)}
                await abort(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", where)

        cluster.hook = refuse
        bad = upload(13, 99, 0)
        good = [upload(100 + number, 0, 10 * number) for number in range(49)]
        uploads = [*good[:13], bad, *good[13:]]
        futures = [await pipeline.upload(submission) for submission in uploads]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(outcomes.pop(13), errors.InvalidRequestError)
        assert outcomes == [messages.COMMITTED] * 49, "the others are judged in the order they came"


async def test_without_a_leader_the_deadline_ends_it() -> None:
    async with piped(2, deadline=0.4) as (cluster, pipeline):
        cluster.move_leader(-1)
        future = await pipeline.upload(upload(1, 0, 0))
        with pytest.raises(errors.ControllerUnavailableError, match="NOT_LEADER") as raised:
            await future
        assert set(raised.value.tried) == set(cluster.endpoints)
        cluster.move_leader(1)
        assert await (await pipeline.upload(upload(1, 0, 0))) == messages.COMMITTED


async def test_controllers_without_the_call_are_said_to_be_so() -> None:
    async with piped() as (cluster, pipeline):

        async def refuse(_: int, message: objects_pb2.CommitPipelineRequest, context: Any) -> None:
            await abort(context, grpc.StatusCode.UNIMPLEMENTED, "NOT_BUILT", {})

        cluster.hook = refuse
        futures = [await pipeline.upload(upload(number, number, 0)) for number in range(9)]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [errors.UnsupportedError] * 9


async def test_an_answer_to_another_message_is_a_violation() -> None:
    async with piped() as (cluster, pipeline):

        async def misnumber(_: int, message: objects_pb2.CommitPipelineRequest, __: Any) -> None:
            message.sequence += 1

        cluster.hook = misnumber
        with pytest.raises(errors.ProtocolViolationError):
            await (await pipeline.upload(upload(1, 0, 0)))


async def test_close_waits_for_what_was_handed_in_and_takes_no_more() -> None:
    async with piped() as (_, pipeline):
        futures = [await pipeline.upload(upload(number, 0, 10 * number)) for number in range(20)]
        await pipeline.close()
        assert [future.result() for future in futures] == [messages.COMMITTED] * 20
        with pytest.raises(errors.WriterClosedError):
            await pipeline.upload(upload(20, 0, 200))


async def test_an_upload_that_nobody_waits_for_harms_nobody() -> None:
    async with piped() as (_, pipeline):
        futures = [await pipeline.upload(upload(number, number, 0)) for number in range(5)]
        futures[2].cancel()
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(outcomes.pop(2), asyncio.CancelledError)
        assert outcomes == [messages.COMMITTED] * 4


async def test_messages_stay_within_their_bounds() -> None:
    loop = asyncio.get_running_loop()
    queue = messages.CommitQueue()
    rows = [1, 19_999, 1, 1, messages.MESSAGE_ROWS_MAX, 1]
    for number, count in enumerate(rows):
        one = upload(number, 0, 0, count)
        queue.add(messages.PendingUpload.of(one, loop.create_future(), 0.0))
    taken = [[submission.rows for submission in queue.take().uploads] for _ in range(4)]
    assert taken == [[1, 19_999], [1, 1], [messages.MESSAGE_ROWS_MAX], [1]]
    assert not queue


async def test_what_can_not_share_a_message_does_not() -> None:
    """An id twice, epochs beside none, and a commit behind uploads each begin a new message."""
    loop = asyncio.get_running_loop()
    queue = messages.CommitQueue()
    without_epochs = messages.Upload(2, 1, [0], [0], [1])
    for submission in (upload(1, 0, 0), upload(1, 0, 0), without_epochs):
        queue.add(messages.PendingUpload.of(submission, loop.create_future(), 0.0))
    queue.add(messages.PendingCommit(commit(3, 0, 0), Plain.verdict, loop.create_future(), 0.0))
    queue.add(messages.PendingUpload.of(upload(4, 0, 0), loop.create_future(), 0.0))
    taken = [queue.take() for _ in range(4)]
    assert [(len(message.commits), len(message.uploads)) for message in taken] == [
        (0, 1),
        (0, 1),
        (0, 1),
        (1, 1),
    ]
    halves = queue.halves(taken[3])
    assert [(len(halve.commits), len(halve.uploads)) for halve in halves] == [(1, 0), (0, 1)]


async def test_a_message_is_what_the_contract_says() -> None:
    loop = asyncio.get_running_loop()
    queue = messages.CommitQueue()
    queue.add(messages.PendingCommit(commit(3, 9, 5), Plain.verdict, loop.create_future(), 0.0))
    for submission in (upload(1, 4, 0, rows=2), upload(2, 0, 0)):
        queue.add(messages.PendingUpload.of(submission, loop.create_future(), 0.0))
    message = objects_pb2.CommitPipelineRequest.FromString(queue.take().encode(NODE_MESSAGE))
    assert list(message.commits) == [commit(3, 9, 5)]
    assert message.uploads == objects_pb2.UploadColumns(
        node=NODE_MESSAGE,
        object_id=[1, 2],
        object_size=[100, 100],
        range_count=[2, 1],
        ranges=objects_pb2.RangeColumns(
            stream_id=[4, 5, 0],
            stream_epoch=[1, 1, 1],
            start_offset=[0, 0, 0],
            end_offset=[10, 10, 10],
        ),
    )


@pytest.mark.parametrize(
    "columns",
    [
        ([], [], []),
        ([1], [0], [1, 2]),
        ([1], [0], [1], [1, 2]),
        (range(20_001), range(20_001), range(20_001)),
    ],
)
def test_columns_that_no_message_can_hold_are_refused_at_once(columns: Any) -> None:
    with pytest.raises(ValueError, match="object 5"):
        messages.Upload(5, 1, *columns)


PLAIN = messages.Upload(1, 100, [5], [0], [10], [1])


async def sent(*uploads: messages.Upload) -> objects_pb2.UploadColumns:
    """Return what a message of these uploads says in the words of the contract."""
    done = asyncio.get_running_loop().create_future
    message = messages.CommitMessage(
        1, uploads=[messages.PendingUpload.of(submission, done(), 1.0) for submission in uploads]
    )
    return objects_pb2.CommitPipelineRequest.FromString(message.encode(NODE_MESSAGE)).uploads


async def test_uploads_with_and_without_facts_share_a_message() -> None:
    timed = replace(PLAIN, object_id=2, min_timestamp_ms=0, max_timestamp_ms=2**63 - 1)
    checked = replace(PLAIN, object_id=3, crc32c=2**32 - 1)
    columns = await sent(PLAIN, timed, checked)
    assert list(columns.object_id) == [1, 2, 3]
    assert list(columns.min_timestamp_ms) == [-1, 0, -1]
    assert list(columns.max_timestamp_ms) == [-1, 2**63 - 1, -1]
    assert list(columns.crc32c) == [-1, -1, 2**32 - 1]


async def test_what_is_not_known_of_any_upload_is_left_out() -> None:
    columns = await sent(PLAIN, replace(PLAIN, object_id=2, crc32c=0))
    assert list(columns.crc32c) == [-1, 0]
    for name in ("min_timestamp_ms", "max_timestamp_ms"):
        assert not getattr(columns, name), name
    assert not (await sent(PLAIN)).crc32c


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"min_timestamp_ms": 5}, "from 5 to -1 ms"),
        ({"max_timestamp_ms": 5}, "from -1 to 5 ms"),
        ({"min_timestamp_ms": 5, "max_timestamp_ms": 4}, "from 5 to 4 ms"),
        ({"min_timestamp_ms": -2, "max_timestamp_ms": 4}, "from -2 to 4 ms"),
        ({"min_timestamp_ms": 0, "max_timestamp_ms": 2**63}, "ms, expected"),
        ({"crc32c": 2**32}, "CRC-32C 4294967296"),
        ({"crc32c": -2}, "CRC-32C -2"),
    ],
)
def test_unacceptable_commits_are_refused_unsent(facts: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(PLAIN, **facts)

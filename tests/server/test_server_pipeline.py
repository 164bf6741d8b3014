"""CommitPipeline over a real gRPC server and a log whose high watermark the test moves."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import pytest_asyncio

from streammeta.controller.metadata.api.requests import OpenStreams, PrepareObjects, StreamToOpen
from streammeta.controller.rpc.calls.interceptors import CallPipeline
from streammeta.controller.rpc.services import pipeline_core
from streammeta.controller.rpc.services.commit_pipeline import CommitPipeline
from streammeta.controller.rpc.services.contract import service_handler
from streammeta.controller.rpc.services.pipeline_core import ROWS_A_COMMIT, ROWS_A_PART
from streammeta.controller.runtime.writer import group_commit
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.controller.runtime.writer.submission import CommitTally
from streammeta.controller.trust.authenticator import Authenticator
from streammeta.rpc.connections import client_channel
from streammeta.rpc.failures import read_failure
from streammeta.v1 import common_pb2, objects_pb2
from tests.kit.grpc_servers import served
from tests.kit.memory_log import NODE, MemoryLog, committed, create, leading
from tests.kit.waiting import until

PATH = "/streammeta.v1.ObjectService/CommitPipeline"
SERVICE = objects_pb2.DESCRIPTOR.services_by_name["ObjectService"]
STREAMS = 4
READ_AHEAD = 3


@dataclass
class Scene:
    controller: MetadataController
    log: MemoryLog
    channel: Any
    call: Any
    ends: dict[int, int] = field(default_factory=dict)

    async def send(self, message: objects_pb2.CommitPipelineRequest) -> None:
        await self.call.write(message.SerializeToString())

    async def receive(self) -> objects_pb2.CommitPipelineResponse:
        data = await self.call.read()
        assert data is not grpc.aio.EOF
        return objects_pb2.CommitPipelineResponse.FromString(data)

    async def committed_answer(self) -> objects_pb2.CommitPipelineResponse:
        """Receive an answer while whatever is appended gets committed."""
        answer = asyncio.create_task(self.receive())
        while not answer.done():
            self.log.commit()
            await asyncio.wait([answer], timeout=0.01)
        return await answer

    async def refusal(self) -> tuple[str, str, dict[str, str]]:
        """Read until the stream ends; return its status, reason and metadata."""
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.call.read()
        failure = read_failure(raised.value)
        return failure.code.name, failure.reason, dict(failure.metadata)

    def another(self) -> "Scene":
        """Open another stream to the same leader."""
        return Scene(self.controller, self.log, self.channel, self.channel.stream_stream(PATH)())

    async def appended(self, payloads: int) -> None:
        """Wait until so many entries are in the log beyond what is committed."""
        await until(
            lambda: self.log.next_offset >= self.log.committed + payloads, f"{payloads} entries"
        )


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    """Yield a stream of messages to a leader with open streams 0.. and prepared objects 0..99."""
    controller, log = await leading()
    created = await committed(log, controller.write(create("streams", STREAMS)))
    assert created.answer.stream_ids == tuple(range(STREAMS))
    streams = tuple(StreamToOpen(stream_id, 1) for stream_id in range(STREAMS))
    await committed(log, controller.write(OpenStreams(node=NODE, streams=streams)))
    prepare = PrepareObjects(request_id="objects", node=NODE, count=100, ttl_ms=60_000)
    assert (await committed(log, controller.write(prepare))).answer.first_object_id == 0
    handle = CommitPipeline(controller, READ_AHEAD).handle
    services = service_handler(
        SERVICE,
        CallPipeline(Authenticator("test")),
        {},
        {},
        {"CommitPipeline": handle},
        unserved=[method.name for method in SERVICE.methods],
    )
    async with served(services) as endpoint, client_channel(endpoint) as channel:
        call: Any = channel.stream_stream(PATH)()
        yield Scene(controller, log, channel, call)
        call.cancel()


OWNER = common_pb2.NodeIdentity(node_id=NODE.node_id, node_epoch=NODE.node_epoch)
NONE, NOT_MATCHED = common_pb2.ERROR_CODE_NONE, common_pb2.ERROR_CODE_OFFSET_NOT_MATCHED


def uploads(sequence: int, *rows: tuple[int, int, int]) -> objects_pb2.CommitPipelineRequest:
    """One upload of 10 offsets for each (object id, stream id, start)."""
    return objects_pb2.CommitPipelineRequest(
        sequence=sequence,
        uploads=objects_pb2.UploadColumns(
            node=OWNER,
            object_id=[row[0] for row in rows],
            object_size=[100] * len(rows),
            range_count=[1] * len(rows),
            ranges=objects_pb2.RangeColumns(
                stream_id=[row[1] for row in rows],
                start_offset=[row[2] for row in rows],
                end_offset=[row[2] + 10 for row in rows],
            ),
        ),
    )


def commit(object_id: int, stream_id: int, start: int) -> objects_pb2.CommitStreamSetObjectRequest:
    return objects_pb2.CommitStreamSetObjectRequest(
        node=OWNER,
        on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
        object_id=object_id,
        order_id=object_id,
        object_size=100,
        ranges=objects_pb2.RangeColumns(
            stream_id=[stream_id], start_offset=[start], end_offset=[start + 10]
        ),
    )


async def test_answers_come_in_order_and_only_when_committed(scene: Scene) -> None:
    await scene.send(uploads(7, (0, 0, 0), (1, 1, 0)))
    await scene.send(uploads(8, (2, 0, 10)))
    await scene.appended(2)
    early = asyncio.create_task(scene.receive())
    done, _ = await asyncio.wait([early], timeout=0.05)
    assert not done

    scene.log.commit()

    first, second = await early, await scene.receive()
    assert (first.sequence, second.sequence) == (7, 8)
    assert first.HasField("uploads")
    assert not first.uploads.errors
    assert not second.uploads.range_errors


async def test_commits_are_judged_before_uploads_of_the_same_message(scene: Scene) -> None:
    message = uploads(1, (0, 0, 10))
    message.commits.extend([commit(1, 0, 0), commit(2, 0, 50)])
    await scene.send(message)

    answer = await scene.committed_answer()

    assert [outcome.error for outcome in answer.commits] == [NONE, NOT_MATCHED]
    assert list(answer.commits[1].range_errors) == [NOT_MATCHED]
    assert not answer.uploads.errors


async def test_a_bad_upload_rejects_itself_alone(scene: Scene) -> None:
    await scene.send(uploads(1, (0, 0, 0), (1, 1, 5), (2, 2, 0)))
    answer = await scene.committed_answer()
    assert list(answer.uploads.errors) == [NONE, NOT_MATCHED, NONE]
    await until(
        lambda: scene.controller.commits == CommitTally(accepted=2, refused=1),
        "the commits to be counted behind their answer",
    )
    assert sum(scene.controller.commits.times) >= 1
    assert list(answer.uploads.range_errors) == [NONE, NOT_MATCHED, NONE]


async def test_a_repeated_upload_gets_the_first_answer(scene: Scene) -> None:
    for sequence in (1, 2):
        await scene.send(uploads(sequence, (0, 0, 0)))
    for sequence in (1, 2):
        answer = await scene.committed_answer()
        assert answer.sequence == sequence
        assert not answer.uploads.errors


async def test_a_deposed_leader_confirms_no_repetition(scene: Scene) -> None:
    """An answer that appends nothing is given by a proven leader only."""
    await scene.send(uploads(1, (0, 0, 0)))
    await scene.committed_answer()
    scene.log.is_deposed = True
    await scene.send(uploads(2, (0, 0, 0)))
    code, reason, metadata = await scene.refusal()
    assert (code, reason, metadata["sequence"]) == ("UNAVAILABLE", "NOT_LEADER", "2")


async def test_reads_no_further_than_the_bound(scene: Scene) -> None:
    """Back-pressure: what is not answered is bounded, whatever the caller sends."""
    for sequence in range(READ_AHEAD + 5):
        await scene.send(uploads(sequence, (sequence, 0, 10 * sequence)))
    await scene.appended(READ_AHEAD)
    await asyncio.sleep(0.05)
    assert scene.log.next_offset == scene.log.committed + READ_AHEAD
    for sequence in range(READ_AHEAD + 5):
        answer = await scene.committed_answer()
        assert answer.sequence == sequence
        assert not answer.uploads.errors


async def test_a_malformed_message_ends_the_stream_after_the_answers_before_it(
    scene: Scene,
) -> None:
    await scene.send(uploads(1, (0, 0, 0)))
    bad = uploads(2, (1, 1, 0))
    bad.uploads.range_count[0] = 2
    await scene.send(bad)
    await scene.send(uploads(3, (2, 2, 0)))
    await scene.appended(1)
    scene.log.commit()

    assert (await scene.receive()).sequence == 1
    code, reason, metadata = await scene.refusal()

    assert (code, reason, metadata["sequence"]) == ("INVALID_ARGUMENT", "INVALID_FIELD", "2")
    assert "range_count" in metadata["field"]
    assert scene.log.next_offset == scene.log.committed
    assert scene.controller.is_active


async def test_a_message_that_can_not_be_read_changes_nothing(scene: Scene) -> None:
    message = uploads(4, (1, 1, 0))
    message.commits.extend([commit(0, 0, 0), commit(2, 2, 0)])
    message.commits[1].on_conflict = 9  # type: ignore[assignment]
    await scene.send(message)
    where = {"field": "commits[1].on_conflict", "sequence": "4"}
    assert await scene.refusal() == ("INVALID_ARGUMENT", "INVALID_FIELD", where)
    assert scene.log.next_offset == scene.log.committed


async def test_bytes_that_are_no_message(scene: Scene) -> None:
    await scene.call.write(b"\xff\xff\xff")
    wanted = ("INVALID_ARGUMENT", "INVALID_FIELD", {"field": "message"})
    assert await scene.refusal() == wanted


async def test_lost_leadership_ends_the_stream(scene: Scene) -> None:
    await scene.send(uploads(1, (0, 0, 0)))
    await scene.send(uploads(2, (1, 1, 0)))
    await scene.appended(2)
    scene.log.lose_leadership(truncate=True)
    assert await scene.refusal() == ("ABORTED", "OUTCOME_UNKNOWN", {"sequence": "1"})


async def test_a_follower_sends_the_caller_on(scene: Scene) -> None:
    scene.log.lose_leadership(truncate=False)
    await scene.send(uploads(5, (0, 0, 0)))
    code, reason, metadata = await scene.refusal()
    assert (code, reason) == ("UNAVAILABLE", "NOT_LEADER")
    assert metadata.keys() == {"leader_id", "leader_endpoint", "epoch", "sequence"}


async def test_a_full_log_is_said_and_leaves_the_leader_alone(scene: Scene) -> None:
    scene.log.refuse_appends = True
    await scene.send(uploads(1, (0, 0, 0)))
    assert await scene.refusal() == ("RESOURCE_EXHAUSTED", "BUSY", {"sequence": "1"})
    assert scene.controller.is_active


async def test_the_stream_ends_well_when_the_caller_is_done(scene: Scene) -> None:
    await scene.send(uploads(1, (0, 0, 0)))
    await scene.call.done_writing()
    assert (await scene.committed_answer()).sequence == 1
    assert await scene.call.read() is grpc.aio.EOF
    assert await scene.call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("limit", "place"),
    [("PIPELINES_PER_CONNECTION", "this connection"), ("PIPELINES_MAX", "this controller")],
)
async def test_open_pipelines_are_limited_and_those_that_are_open_stay(
    scene: Scene, limit: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_core, limit, 1)
    await scene.send(uploads(1, (0, 0, 0)))
    assert (await scene.committed_answer()).sequence == 1
    second = scene.another().call
    with pytest.raises(grpc.aio.AioRpcError, match=place) as raised:
        await second.read()
    failure = read_failure(raised.value)
    assert (failure.code.name, failure.reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_PIPELINES")
    await scene.send(uploads(2, (1, 1, 0)))
    assert (await scene.committed_answer()).sequence == 2

    scene.call.cancel()
    while True:  # the first one's place is free once the controller has noticed
        third = scene.another()
        try:
            await third.send(uploads(3, (2, 2, 0)))  # fails too if it is refused at once
            assert (await third.committed_answer()).sequence == 3
        except grpc.aio.AioRpcError:
            continue
        third.call.cancel()
        return


async def test_messages_that_arrive_together_on_many_pipelines_share_turns(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No turn of the event loop decides all of them, and each is answered once."""
    calls = [scene.another() for _ in range(60)]
    decided: list[int] = [0]
    submit = scene.controller.submit

    def counting(*submitted: Any) -> Any:
        decided[-1] += 1
        return submit(*submitted)

    async def count_turns() -> None:
        while True:
            await asyncio.sleep(0)
            decided.append(0)

    monkeypatch.setattr(scene.controller, "submit", counting)
    counting_turns = asyncio.create_task(count_turns())
    for number, call in enumerate(calls):
        await call.send(uploads(number, (number, 0, 10 * number)))
    answers = await asyncio.gather(*(call.committed_answer() for call in calls))
    counting_turns.cancel()
    assert sorted(answer.sequence for answer in answers) == list(range(60))
    assert sum(decided) == 60
    assert max(decided) <= ROWS_A_PART // ROWS_A_COMMIT
    for call in calls:
        call.call.cancel()


class Rests:
    """Numbers of batches that asked for a rest, of rests that are over, of messages done with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = self.over = self.done = 0
        over, answered = (
            group_commit.GroupCommitDelay.wait,
            group_commit.GroupCommitDelay.record_answer,
        )

        async def counted(rests: group_commit.GroupCommitDelay) -> None:
            self.asked += 1
            await over(rests)
            self.over += 1

        def counted_answer(rests: group_commit.GroupCommitDelay, size: int) -> None:
            self.done += 1
            answered(rests, size)

        monkeypatch.setattr(group_commit.GroupCommitDelay, "record_answer", counted_answer)
        monkeypatch.setattr(group_commit, "REST_S", 3600.0)
        monkeypatch.setattr(group_commit.GroupCommitDelay, "wait", counted)

    async def begin(self, asked: int) -> None:
        """Wait until the last of so many batches rests."""
        await until(lambda: self.asked == asked, f"{asked} batches")
        assert self.over == asked - 1


async def test_messages_behind_one_that_is_not_committed_rest_and_are_decided_together(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests = Rests(monkeypatch)
    behind = scene.another()
    await scene.send(uploads(1, (0, 0, 0)))
    await scene.appended(1)
    await behind.send(uploads(1, (1, 1, 0)))
    await rests.begin(asked=1)
    assert scene.log.next_offset == scene.log.committed + 1

    many = [(object_id, 2, 10 * at) for at, object_id in enumerate(range(2, 40))]
    await scene.send(uploads(2, *many))  # enough for a batch

    await scene.appended(3)
    assert not (await behind.committed_answer()).uploads.errors
    assert [(await scene.receive()).sequence for _ in range(2)] == [1, 2]


async def test_a_message_that_comes_alone_is_replicated_without_a_turn_for_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes: list[int] = []
    monkeypatch.setattr(scene.log, "flush", lambda: flushes.append(scene.log.next_offset))
    for number in range(3):
        await scene.send(uploads(number, (number, number, 0)))
        await scene.appended(1)
        assert flushes.pop() == scene.log.next_offset
        assert (await scene.committed_answer()).sequence == number
    behind = scene.another()
    await scene.send(uploads(3, (3, 3, 0)))
    await scene.appended(1)
    await behind.send(uploads(0, (4, 0, 10)))
    await scene.appended(2)
    assert len(flushes) == 1
    assert not (await behind.committed_answer()).uploads.errors


async def test_messages_of_a_caller_that_has_gone_keep_no_others_waiting(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests = Rests(monkeypatch)
    gone = scene.another()
    await gone.send(uploads(1, (0, 0, 0)))
    await scene.appended(1)
    await gone.send(uploads(2, (1, 1, 0)))
    await rests.begin(asked=1)
    gone.call.cancel()
    await until(lambda: rests.done == 2, "both messages to be given up")
    for sequence in (1, 2):  # the first may come after a batch that was shared
        await scene.send(uploads(sequence, (1 + sequence, sequence, 0)))
    await scene.appended(3)
    assert (await scene.committed_answer()).sequence == 1


async def test_a_commit_whose_caller_goes_while_it_is_answered_is_counted(scene: Scene) -> None:
    class Gone:
        """A context whose caller has gone by the time of the answer."""

        auth_context = staticmethod(lambda: {"transport_security_type": [b"insecure"]})
        peer = staticmethod(lambda: "here")

        async def write(self, _: bytes) -> None:
            raise asyncio.CancelledError

    async def messages() -> AsyncIterator[bytes]:
        yield uploads(1, (0, 0, 0)).SerializeToString()

    handle: Any = CallPipeline(Authenticator("here")).wrap(
        "streammeta.v1.ObjectService.CommitPipeline", CommitPipeline(scene.controller).handle
    )
    serving = asyncio.create_task(handle(messages(), Gone()))
    await scene.appended(1)
    scene.log.commit()
    await asyncio.wait([serving], timeout=60)
    assert serving.cancelled()
    assert scene.controller.commits == CommitTally(accepted=1, refused=0)


async def test_a_message_is_answered_before_the_next_of_its_caller_can_come(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one comes alone, even if it is there before the write of the answer returns."""
    rests = Rests(monkeypatch)
    told, appended = asyncio.Event(), asyncio.Event()

    class Told:
        """A context whose write returns once the next message is in the log."""

        auth_context = staticmethod(lambda: {"transport_security_type": [b"insecure"]})
        peer = staticmethod(lambda: "here")

        async def write(self, _: bytes) -> None:
            told.set()
            await appended.wait()

    async def messages() -> AsyncIterator[bytes]:
        yield uploads(1, (0, 0, 0)).SerializeToString()
        await told.wait()
        yield uploads(2, (1, 1, 0)).SerializeToString()

    handle: Any = CallPipeline(Authenticator("here")).wrap(
        "streammeta.v1.ObjectService.CommitPipeline", CommitPipeline(scene.controller).handle
    )
    serving = asyncio.create_task(handle(messages(), Told()))
    await scene.appended(1)
    scene.log.commit()
    await until(lambda: told.is_set() and rests.done == 1, "the first to be answered")
    await scene.appended(1)
    appended.set()
    scene.log.commit()
    await asyncio.wait_for(serving, 60)
    assert rests.over == rests.asked

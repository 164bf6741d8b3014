"""Commits with values to put and streams to trim, over gRPC: unary, in a pipeline, of merges."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from streammeta.client import ValueToPut
from streammeta.client.commits.effects import EffectsCommit
from streammeta.client.errors import ProtocolViolationError
from streammeta.client.parts import StreamTrim, Upload, UploadWithEffects
from streammeta.controller.metadata.api.requests import SetFeatureLevel
from streammeta.rpc.failures import read_failure
from streammeta.v1 import common_pb2, kv_pb2, objects_pb2
from streammeta.v1.common_pb2 import (
    ERROR_CODE_KEY_EXIST,
    ERROR_CODE_NONE,
    ERROR_CODE_STREAM_INNER_ERROR,
)
from tests.server.rpc_server import NODE, Rpcs, serving

PIPELINE = "/streammeta.v1.ObjectService/CommitPipeline"
KEY = ValueToPut(namespace="ledgers", key="7", value=b"1")


@pytest_asyncio.fixture
async def rpcs() -> AsyncIterator[Rpcs]:
    async with serving() as leader:
        yield leader


async def begin(rpcs: Rpcs) -> tuple[int, int]:
    """Return a stream and the first of five prepared ids, at feature level 3."""
    (stream_id,), first = await rpcs.begin(streams=1, objects=5)
    await rpcs.controller.write(SetFeatureLevel(level=3))
    return stream_id, first


def effects(*parts: Any, **others: Any) -> EffectsCommit:
    return EffectsCommit(UploadWithEffects(*parts, **others))


def upload(object_id: int, stream_id: int, start: int) -> Upload:
    return Upload(object_id, 100, [stream_id], [start], [start + 10], [1])


async def stored(rpcs: Rpcs) -> kv_pb2.KVResult:
    key = kv_pb2.KVKey(namespace=KEY.namespace, key=KEY.key)
    answer: kv_pb2.GetKVsResponse = await rpcs.ask(kv_pb2.GetKVsRequest(keys=[key]))
    return answer.results[0]


async def through_pipeline(
    rpcs: Rpcs, *commits: objects_pb2.CommitStreamSetObjectRequest
) -> list[objects_pb2.CommitStreamSetObjectResponse]:
    message = objects_pb2.CommitPipelineRequest(sequence=1, commits=commits)
    sent: Any = iter([message.SerializeToString()])
    call: Any = rpcs.channel.stream_stream(PIPELINE)(sent)
    answers = [objects_pb2.CommitPipelineResponse.FromString(data) async for data in call]
    return list(answers[0].commits)


async def test_a_unary_commit_and_its_repeat(rpcs: Rpcs) -> None:
    stream_id, first = await begin(rpcs)
    commit = effects(upload(first, stream_id, 0), [KEY], [StreamTrim(stream_id, 1, 4)])
    request = commit.request(NODE)
    verdict = commit.verdict(await rpcs.ask(request))
    assert (verdict.error, list(verdict.trim_errors)) == (ERROR_CODE_NONE, [ERROR_CODE_NONE])
    found = await stored(rpcs)
    assert (found.value, found.version) == (b"1", verdict.put_results[0].version)
    assert commit.verdict(await rpcs.ask(request)) == verdict


async def test_commits_of_a_message_are_judged_in_order(rpcs: Rpcs) -> None:
    stream_id, first = await begin(rpcs)
    own = effects(upload(first, stream_id, 0), [KEY])
    taken = effects(upload(first + 1, stream_id, 10), [KEY])
    fenced = effects(upload(first + 1, stream_id, 10), trims=[StreamTrim(stream_id, 2, 4)])
    plain = effects(upload(first + 2, stream_id, 10))
    commits = (own, taken, fenced, plain)
    answers = await through_pipeline(rpcs, *(commit.request(NODE) for commit in commits))
    verdicts = [commit.verdict(answer) for commit, answer in zip(commits, answers, strict=True)]
    errors = [verdict.error for verdict in verdicts]
    refused = [ERROR_CODE_KEY_EXIST, ERROR_CODE_STREAM_INNER_ERROR]
    assert errors == [ERROR_CODE_NONE, *refused, ERROR_CODE_NONE]
    assert verdicts[1].put_results[0].value == b"1"
    assert list(verdicts[2].trim_errors) == [ERROR_CODE_STREAM_INNER_ERROR]


async def test_below_the_feature_level_a_commit_with_effects_is_refused(rpcs: Rpcs) -> None:
    (stream_id,), first = await rpcs.begin(streams=1, objects=5)
    request = effects(upload(first, stream_id, 0), [KEY]).request(NODE)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rpcs.ask(request)
    failure = read_failure(raised.value)
    assert (failure.reason, failure.metadata["level"]) == ("FEATURE_LEVEL", "3")
    assert not (await stored(rpcs)).found


async def test_a_merge_of_stream_objects_puts_values(rpcs: Rpcs) -> None:
    stream_id, first = await begin(rpcs)
    alone = objects_pb2.CommitStreamSetObjectRequest(
        node=NODE,
        on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
        stream_objects=objects_pb2.StreamObjectColumns(
            object_id=[first], object_size=[7], stream_id=[stream_id],
            start_offset=[0], end_offset=[10],
        ),
    )  # fmt: skip
    assert (await rpcs.ask(alone)).error == ERROR_CODE_NONE
    merge = objects_pb2.CommitStreamObjectRequest(
        node=NODE,
        object_id=first + 1,
        object_size=7,
        stream_id=stream_id,
        stream_epoch=1,
        start_offset=0,
        end_offset=10,
        source_object_ids=[first],
        operations=[objects_pb2.SOURCE_OPERATION_DELETE],
        kv_puts=[kv_pb2.KVToPut(namespace=KEY.namespace, key=KEY.key, value=KEY.value)],
    )
    answer = await rpcs.ask(merge)
    assert (answer.error, len(answer.kv_results)) == (ERROR_CODE_NONE, 1)
    found = await stored(rpcs)
    assert (found.value, found.version) == (b"1", answer.kv_results[0].version)


async def test_a_bad_part_is_named(rpcs: Rpcs) -> None:
    stream_id, first = await begin(rpcs)
    request = effects(upload(first, stream_id, 0), [KEY, KEY]).request(NODE)
    refused = await rpcs.refusal("ObjectService/CommitStreamSetObject", request)
    assert refused == ("INVALID_ARGUMENT", "INVALID_FIELD", {"field": "kv_puts.key"})
    request = effects(upload(first, stream_id, 0), [], []).request(NODE)
    request.trims.add(stream_id=stream_id, new_start_offset=1)
    refused = await rpcs.refusal("ObjectService/CommitStreamSetObject", request)
    assert refused == ("INVALID_ARGUMENT", "INVALID_FIELD", {"field": "trims[0].stream_epoch"})


def test_an_answer_of_a_leader_that_knows_no_effects_is_not_taken_for_done() -> None:
    commit = effects(upload(1, 1, 0), [KEY])
    with pytest.raises(ProtocolViolationError, match="level 3"):
        commit.verdict(objects_pb2.CommitStreamSetObjectResponse(error=ERROR_CODE_NONE))
    refused = objects_pb2.CommitStreamSetObjectResponse(error=ERROR_CODE_STREAM_INNER_ERROR)
    assert commit.verdict(refused).error == ERROR_CODE_STREAM_INNER_ERROR

"""Commits and uploads that arrive together: one batch of the log, the answers of each alone."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streammeta.controller import errors
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.answers import CommitStreamSetObjectAnswer
from streammeta.controller.metadata.api.upload_batches import join_uploads, split_answers
from streammeta.controller.metadata.tables import values as v
from streammeta.controller.metadata.tables.values import NodeIdentity, RangeColumns
from streammeta.controller.runtime.writer import group_commit
from streammeta.controller.runtime.writer.controller import Answered, MetadataController
from streammeta.controller.runtime.writer.unary_batching import CommitBatcher
from tests.kit.memory_log import NODE, MemoryLog, committed, create, leading
from tests.kit.seeds import seeds
from tests.kit.waiting import until

STREAMS = 40
OTHER = v.NodeIdentity(8, 1)


async def prepared() -> tuple[MetadataController, MemoryLog]:
    """Return a leader with open streams 0 to `STREAMS` - 1 and a hundred prepared objects."""
    controller, log = await leading()
    await committed(log, controller.write(r.RegisterNode(node=OTHER)))
    await committed(log, controller.write(create("streams", STREAMS)))
    streams = tuple(r.StreamToOpen(stream_id=stream, stream_epoch=1) for stream in range(STREAMS))
    await committed(log, controller.write(r.OpenStreams(node=NODE, streams=streams)))
    ids = r.PrepareObjects(request_id="ids", node=NODE, count=100, ttl_ms=60_000)
    await committed(log, controller.write(ids))
    return controller, log


def upload(object_id: int, *streams: int, start: int = 0, end: int = 10) -> r.CommitStreamSetObject:
    count = len(streams)
    return r.CommitStreamSetObject(
        node=NODE,
        object_id=object_id,
        order_id=object_id,
        object_size=1_000 + object_id,
        ranges=v.RangeColumns(
            stream_id=np.array(streams, dtype=np.int64),
            stream_epoch=np.ones(count, dtype=np.int64),
            start_offset=np.full(count, start),
            end_offset=np.full(count, end),
        ),
    )


async def joined(
    controller: MetadataController, log: MemoryLog, *uploads: r.CommitStreamSetObject
) -> list[Answered | BaseException]:
    """Make calls that arrive together; commit all that they append."""
    joiner = CommitBatcher(controller)
    calls = [asyncio.ensure_future(joiner.write(joined_upload)) for joined_upload in uploads]
    while not all(call.done() for call in calls):
        await asyncio.sleep(0)
        if log.next_offset > log.committed:
            log.commit()
    return [call.exception() or call.result() for call in calls]


def verdict(answered: Answered | BaseException) -> tuple[int, list[int]]:
    assert isinstance(answered, Answered)
    assert isinstance(answered.answer, CommitStreamSetObjectAnswer)
    return int(answered.answer.error), answered.answer.range_errors.tolist()


async def test_calls_that_arrive_together_are_one_entry_of_the_log() -> None:
    controller, log = await prepared()
    before = log.next_offset
    answers = await joined(controller, log, *(upload(stream, stream) for stream in range(20)))
    assert [verdict(answer) for answer in answers] == [(0, [0])] * 20
    assert log.next_offset == before + 1


async def test_calls_that_come_one_by_one_behind_a_batch_share_the_next() -> None:
    controller, log = await prepared()
    joiner = CommitBatcher(controller)
    before = log.next_offset
    calls = []
    for stream_id in range(6):
        calls.append(asyncio.ensure_future(joiner.write(upload(stream_id, stream_id))))
        for _ in range(4):
            await asyncio.sleep(0)
    assert log.next_offset == before + 1, "the first went alone, the others wait for its commit"
    while not all(call.done() for call in calls):
        if log.next_offset > log.committed:
            log.commit()
        await asyncio.sleep(0)
    assert log.next_offset == before + 2
    assert [verdict(call.result()) for call in calls] == [(0, [0])] * 6


async def test_few_calls_behind_many_rest_until_most_have_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A commit may be quicker than its callers come again; each batch would hold one or two."""
    monkeypatch.setattr(group_commit, "REST_S", 3600.0)
    controller, log = await prepared()
    joiner = CommitBatcher(controller)

    def asked(*ids: int) -> list[asyncio.Future[Answered]]:
        return [asyncio.ensure_future(joiner.write(upload(stream, stream))) for stream in ids]

    async def appended() -> None:
        await until(lambda: log.next_offset > log.committed, "an entry")

    many = asked(*range(10))
    await appended()
    few = asked(10, 11)
    await asyncio.sleep(0)
    log.commit()
    await asyncio.gather(*many)
    for _ in range(50):
        await asyncio.sleep(0)
    assert log.next_offset == log.committed
    few += asked(*range(12, 19))
    await appended()
    assert log.next_offset == log.committed + 1
    log.commit()
    await asyncio.gather(*few)


async def test_a_call_behind_a_lone_one_is_decided_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, log = await prepared()
    flushes: list[int] = []
    monkeypatch.setattr(log, "flush", lambda: flushes.append(log.next_offset))
    joiner = CommitBatcher(controller)
    await committed(log, joiner.write(upload(0, 0)))
    assert flushes == [], "others might have come with the first"
    before = log.next_offset
    lone = joiner.write(upload(1, 1))
    lone.send(None)  # no turn of the event loop passes
    assert (log.next_offset, flushes) == (before + 1, [before + 1])
    behind = [asyncio.ensure_future(joiner.write(upload(stream, stream))) for stream in (2, 3)]
    for _ in range(4):
        await asyncio.sleep(0)
    assert log.next_offset == before + 1, "calls behind it wait for its commit together"
    while not all(call.done() for call in behind):
        log.commit()
        await asyncio.sleep(0)
    assert log.next_offset == before + 2
    after_many = asyncio.ensure_future(joiner.write(upload(4, 4)))
    await asyncio.sleep(0)
    assert log.next_offset == before + 2, "where several came, others may join"
    after_many.cancel()
    lone.close()


@pytest.mark.parametrize("seed", seeds(6, slow=14))
async def test_joined_commits_end_like_commits_alone(seed: int) -> None:
    rng = random.Random(seed)
    streams = rng.sample(range(STREAMS), 30)
    uploads = [
        upload(index, *sorted(streams[3 * index : 3 * index + rng.randint(1, 3)]))
        for index in range(10)
    ]
    for index in rng.sample(range(10), rng.randint(0, 4)):
        changes = rng.choice(
            (
                {"ranges": replace(uploads[index].ranges, start_offset=np.full(1, 5))},
                {"object_id": 5_000 + index, "order_id": 5_000 + index},
                {"node": OTHER},
                {"on_conflict": v.OnConflict.ACCEPT_VALID},
                {"min_timestamp_ms": 3, "max_timestamp_ms": 4, "crc32c": 7},
                {"attributes": 4},
            )
        )
        if "ranges" in changes:
            uploads[index] = upload(index, streams[3 * index], start=5, end=9)
        else:
            uploads[index] = replace(uploads[index], **changes)
    together, its_log = await prepared()
    answers = await joined(together, its_log, *uploads)
    alone, log = await prepared()
    expected = [await committed(log, alone.write(joined_upload)) for joined_upload in uploads]
    assert [verdict(answer) for answer in answers] == [verdict(answer) for answer in expected]
    assert together.cluster_metadata.freeze().digest() == alone.cluster_metadata.freeze().digest()


async def test_a_repeat_in_flight_gets_the_first_answer() -> None:
    controller, log = await prepared()
    answers = await joined(controller, log, upload(1, 1), upload(1, 1), upload(2, 2))
    assert [verdict(answer) for answer in answers] == [(0, [0])] * 3


async def test_another_content_under_one_id_is_refused() -> None:
    controller, log = await prepared()
    first, second = await joined(controller, log, upload(1, 1), upload(1, 2))
    assert verdict(first) == (0, [0])
    assert verdict(second)[0] == errors.ErrorCode.OBJECT_CONTENT_MISMATCH


async def test_a_malformed_commit_fails_alone() -> None:
    controller, log = await prepared()
    bad, good = await joined(controller, log, upload(1, 1, start=9, end=9), upload(2, 2))
    assert isinstance(bad, errors.InvalidRequestError)
    assert bad.field == "ranges.end_offset[0]"
    assert verdict(good) == (0, [0])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"object_size": -1}, "object_size"),
        ({"ranges": v.RangeColumns(stream_id=np.array([1]))}, "ranges.start_offset"),
        ({"ranges": v.RangeColumns()}, "ranges"),
        ({"stream_objects": v.StreamObjectColumns(object_id=np.array([7]))}, "stream_objects"),
        ({"min_timestamp_ms": 5, "max_timestamp_ms": 4}, "max_timestamp_ms"),
        ({"crc32c": 1 << 32}, "crc32c"),
        ({"node": v.NodeIdentity(-1, 1)}, "node.node_id"),
    ],
)
async def test_what_is_malformed_is_refused_as_if_it_were_alone(
    changes: dict[str, Any], field: str
) -> None:
    controller, log = await prepared()
    bad = replace(upload(1, 1), **changes)
    refusal, *others = await joined(controller, log, bad, upload(2, 2), upload(3, 3))
    assert isinstance(refusal, errors.InvalidRequestError)
    assert refusal.field.startswith(field)
    with pytest.raises(errors.InvalidRequestError) as alone:
        await controller.write(bad)
    assert str(refusal) == str(alone.value)
    assert [verdict(answer) for answer in others] == [(0, [0])] * 2


async def test_columns_that_fit_only_together_are_refused() -> None:
    controller, log = await prepared()
    long = replace(upload(1, 1), ranges=replace(upload(1, 1).ranges, end_offset=np.array([1, 2])))
    short = replace(upload(2, 2), ranges=replace(upload(2, 2).ranges, end_offset=np.array([])))
    answers = await joined(controller, log, long, short)
    assert all(isinstance(answer, errors.InvalidRequestError) for answer in answers)


async def test_commits_beyond_one_request_wait_for_the_next() -> None:
    controller, log = await prepared()
    wide = [upload(stream_id, stream_id) for stream_id in range(4)]
    rows = 12_000
    wide = [
        replace(
            commit,
            ranges=v.RangeColumns(
                stream_id=np.arange(rows) + 1_000,
                stream_epoch=np.ones(rows, dtype=np.int64),
                start_offset=np.zeros(rows, dtype=np.int64),
                end_offset=np.ones(rows, dtype=np.int64),
            ),
        )
        for commit in wide
    ]
    answers = await joined(controller, log, *wide)
    assert {verdict(answer)[0] for answer in answers} == {errors.ErrorCode.STREAM_NOT_EXIST}


async def test_leadership_lost_before_the_decision_fails_all() -> None:
    controller, log = await prepared()
    joiner = CommitBatcher(controller)
    calls = [asyncio.ensure_future(joiner.write(upload(stream, stream))) for stream in range(3)]
    log.lose_leadership(truncate=True)
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, errors.NotLeaderError) for result in results)


async def test_leadership_lost_before_the_commit_leaves_the_outcome_unknown() -> None:
    controller, log = await prepared()
    joiner = CommitBatcher(controller)
    calls = [asyncio.ensure_future(joiner.write(upload(stream, stream))) for stream in range(3)]
    before = log.next_offset
    for _ in range(3):
        await asyncio.sleep(0)
    assert log.next_offset > before
    log.lose_leadership(truncate=True)
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, errors.OutcomeUnknownError) for result in results)


async def test_a_caller_that_goes_disturbs_no_other() -> None:
    controller, log = await prepared()
    joiner = CommitBatcher(controller)
    calls = [asyncio.ensure_future(joiner.write(upload(stream, stream))) for stream in range(3)]
    await asyncio.sleep(0)
    calls[1].cancel()
    while not all(call.done() for call in calls):
        await asyncio.sleep(0)
        if log.next_offset > log.committed:
            log.commit()
    assert calls[1].cancelled()
    assert [verdict(calls[stream_id].result()) for stream_id in (0, 2)] == [(0, [0])] * 2


UPLOADS_TO = 6
OBJECTS = 200


async def with_objects() -> tuple[MetadataController, MemoryLog]:
    controller, log = await leading()
    await committed(log, controller.write(create("streams", UPLOADS_TO)))
    streams = tuple(r.StreamToOpen(stream_id=id_, stream_epoch=1) for id_ in range(UPLOADS_TO))
    await committed(log, controller.write(r.OpenStreams(node=NODE, streams=streams)))
    ids = r.PrepareObjects(request_id="ids", node=NODE, count=OBJECTS, ttl_ms=60_000)
    await committed(log, controller.write(ids))
    return controller, log


def uploads(*objects: tuple[int, dict[int, tuple[int, int]]], **changes: Any) -> r.CommitUploads:
    """Return uploads of (object id, offsets by stream)."""
    rows = [(stream, *at) for _, ranges in objects for stream, at in sorted(ranges.items())]
    streams, starts, ends = (np.array(column) for column in zip(*rows, strict=True))
    columns: dict[str, Any] = {
        "node": NODE,
        "object_id": np.array([object_id for object_id, _ in objects]),
        "object_size": np.array([100 + object_id for object_id, _ in objects]),
        "range_count": np.array([len(ranges) for _, ranges in objects]),
        "ranges": RangeColumns(
            stream_id=streams,
            stream_epoch=np.ones_like(streams),
            start_offset=starts,
            end_offset=ends,
        ),
    }
    return r.CommitUploads(**(columns | changes))


def random_messages(rng: random.Random) -> list[r.CommitUploads]:
    """Return messages most of whose uploads continue their streams."""
    ends = dict.fromkeys(range(UPLOADS_TO), 0)
    used: list[int] = []
    messages = []
    for _ in range(rng.randint(2, 5)):
        objects = []
        for _ in range(rng.randint(1, 4)):
            object_id = rng.randrange(OBJECTS + 2)
            if object_id in used:
                continue
            used.append(object_id)
            ranges = {}
            for stream in rng.sample(range(UPLOADS_TO), rng.randint(1, 3)):
                start = ends[stream] + (rng.random() < 0.1)
                ranges[stream] = (start, start + rng.randint(1, 9))
            if rng.random() < 0.9 and object_id < OBJECTS:
                ends |= {stream: end for stream, (_, end) in ranges.items()}
            objects.append((object_id, ranges))
        if objects:
            known = {
                "min_timestamp_ms": np.full(len(objects), 3),
                "max_timestamp_ms": np.full(len(objects), 5),
            }
            messages.append(uploads(*objects, **(known if rng.random() < 0.3 else {})))
    return messages


@pytest.mark.parametrize("seed", seeds(20, slow=40))
async def test_joined_messages_end_like_messages_alone(seed: int) -> None:
    rng = random.Random(seed)
    messages = random_messages(rng)
    together, its_log = await with_objects()
    alone, log = await with_objects()
    for _ in range(2):  # the second time all of them are repeats
        joined = join_uploads(messages)
        assert joined is not None
        answered = await committed(its_log, together.write(joined))
        answers = split_answers(answered.answer, messages)
        for message, answer in zip(messages, answers, strict=True):
            expected = (await committed(log, alone.write(message))).answer
            assert answer.errors.tolist() == expected.errors.tolist()
            assert answer.range_errors.tolist() == expected.range_errors.tolist()
        assert (
            together.cluster_metadata.freeze().digest() == alone.cluster_metadata.freeze().digest()
        )


def test_messages_that_may_change_each_other_are_not_joined() -> None:
    one = uploads((1, {1: (0, 5)}))
    two = uploads((2, {2: (0, 5)}))
    assert join_uploads([one, two]) is not None
    others = {
        "an object twice": one,
        "another node": uploads((3, {3: (0, 5)}), node=NodeIdentity(9, 1)),
        "a column too short": uploads((3, {3: (0, 5)}), object_size=np.array([], dtype=np.int64)),
        "counts of other rows": uploads((3, {3: (0, 5)}), range_count=np.array([2])),
        "facts of other objects": uploads((3, {3: (0, 5)}), crc32c=np.array([1, 2])),
    }
    for what, other in others.items():
        assert join_uploads([one, two, other]) is None, what

"""Uploads of several pipelined messages decided as one: the answers and the map of each alone."""

import random
from typing import Any

import numpy as np
import pytest

from streammeta.controller.metadata.api.requests import (
    CommitUploads,
    OpenStreams,
    PrepareObjects,
    StreamToOpen,
)
from streammeta.controller.metadata.api.upload_batches import join_uploads, split_answers
from streammeta.controller.metadata.tables.values import NodeIdentity, RangeColumns
from streammeta.controller.runtime.writer.controller import MetadataController
from tests.kit.memory_log import NODE, MemoryLog, committed, create, leading

STREAMS = 6
OBJECTS = 200


async def prepared() -> tuple[MetadataController, MemoryLog]:
    controller, log = await leading()
    await committed(log, controller.write(create("streams", STREAMS)))
    streams = tuple(StreamToOpen(stream_id=each, stream_epoch=1) for each in range(STREAMS))
    await committed(log, controller.write(OpenStreams(node=NODE, streams=streams)))
    ids = PrepareObjects(request_id="ids", node=NODE, count=OBJECTS, ttl_ms=60_000)
    await committed(log, controller.write(ids))
    return controller, log


def uploads(*objects: tuple[int, dict[int, tuple[int, int]]], **changes: Any) -> CommitUploads:
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
    return CommitUploads(**(columns | changes))


def random_messages(rng: random.Random) -> list[CommitUploads]:
    """Return messages most of whose uploads continue their streams."""
    ends = dict.fromkeys(range(STREAMS), 0)
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
            for stream in rng.sample(range(STREAMS), rng.randint(1, 3)):
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


@pytest.mark.parametrize("seed", range(60))
async def test_joined_messages_end_like_messages_alone(seed: int) -> None:
    rng = random.Random(seed)
    messages = random_messages(rng)
    together, its_log = await prepared()
    alone, log = await prepared()
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

"""Checkpoints come when due, and a snapshot takes the place of the whole metadata."""

import asyncio
import io
from typing import Any

import pytest

from streammeta.controller.ids import EndOffset, SnapshotId
from streammeta.controller.metadata.api.requests import DeleteKVs, GetKVs, KVKey, KVToPut, PutKVs
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.runtime.persistence import checkpointer
from streammeta.controller.runtime.writer.controller import Answered, MetadataController
from streammeta.controller.snapshot.checkpoint_file import CheckpointError
from tests.kit.memory_log import MemoryLog, committed, create, leading, new_follower, submit
from tests.kit.waiting import ManualClock

LIMITS = checkpointer.CheckpointLimits(log_bytes=100, interval_ms=1_000, retry_ms=50)


def test_bytes_make_one_due_at_once() -> None:
    schedule = checkpointer.CheckpointSchedule(LIMITS, now_ms=0)
    schedule.record_committed(99)
    assert not schedule.is_due(10)
    schedule.record_committed(1)
    assert schedule.is_due(10)


def test_a_checkpoint_waits_for_as_much_log_as_the_last_one_is_large() -> None:
    schedule = checkpointer.CheckpointSchedule(LIMITS, now_ms=0)
    schedule.record_start(0)
    schedule.record_written(500)
    schedule.record_committed(499)
    assert not schedule.is_due(10)
    schedule.record_committed(1)
    assert schedule.is_due(10)
    schedule.record_start(10)
    schedule.record_written(20)
    schedule.record_committed(100)
    assert schedule.is_due(10)


@pytest.mark.parametrize(
    ("size", "log_bytes"),
    [
        (checkpointer.WHOLE_SIZE_MAX, checkpointer.WHOLE_SIZE_MAX),
        (checkpointer.WHOLE_SIZE_MAX + 2, checkpointer.WHOLE_SIZE_MAX),
        (4 * checkpointer.WHOLE_SIZE_MAX, 2 * checkpointer.WHOLE_SIZE_MAX),
    ],
)
def test_a_large_checkpoint_waits_for_half_its_size_of_log(size: int, log_bytes: int) -> None:
    schedule = checkpointer.CheckpointSchedule(LIMITS, now_ms=0)
    schedule.record_start(0)
    schedule.record_written(size)
    schedule.record_committed(log_bytes - 1)
    assert not schedule.is_due(10)
    schedule.record_committed(1)
    assert schedule.is_due(10)


def test_time_makes_one_due_only_with_something_new() -> None:
    schedule = checkpointer.CheckpointSchedule(LIMITS, now_ms=0)
    assert schedule.deadline() is None
    assert not schedule.is_due(10_000)
    schedule.record_committed(1)
    assert schedule.deadline() == 1_000
    assert not schedule.is_due(999)
    assert schedule.is_due(1_000)
    schedule.record_start(1_000)
    assert schedule.deadline() is None


def test_a_failed_one_is_still_owed_after_a_pause() -> None:
    schedule = checkpointer.CheckpointSchedule(LIMITS, now_ms=0)
    schedule.record_committed(100)
    schedule.record_start(5)
    schedule.record_failure(10)
    assert schedule.deadline() == 60
    schedule.record_committed(1_000)
    assert not schedule.is_due(59)
    assert schedule.is_due(60)


def test_a_request_does_not_wait_for_the_pause() -> None:
    schedule = checkpointer.CheckpointSchedule(LIMITS, now_ms=0)
    schedule.record_failure(10)
    schedule.request(11)
    assert schedule.is_due(11)


@pytest.mark.parametrize("name", ["log_bytes", "interval_ms", "retry_ms"])
def test_limits_that_would_never_or_always_be_due_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: 0"):
        checkpointer.CheckpointLimits(**{name: 0})


def put(key: str) -> PutKVs:
    return PutKVs(items=(KVToPut(key=key, value=b"v"),))


def found(answered: Answered) -> list[bool]:
    answer: Any = answered.answer
    return [result.found for result in answer.results]


def checkpoint_of(controller: MetadataController, log: MemoryLog) -> tuple[SnapshotId, io.BytesIO]:
    file = io.BytesIO()
    point = log.snapshot_point()
    controller.freeze(point)(file)
    return point.snapshot_id, file


async def test_a_loaded_snapshot_replaces_everything_stale_keys_too() -> None:
    controller, log = await leading()
    await committed(log, controller.write(put("stale")))
    behind = new_follower(log)
    behind.on_committed(log.batches, log.committed)
    await committed(log, controller.write(DeleteKVs(keys=(KVKey(key="stale"),))))
    await committed(log, controller.write(put("fresh")))
    snapshot_id, file = checkpoint_of(controller, log)
    both = GetKVs(keys=(KVKey(key="stale"), KVKey(key="fresh")))
    reading = await submit(behind.read(both, at_least=log.committed))

    exchange = behind.load(file, snapshot_id)
    assert found(await behind.read(both, at_least=0)) == [True, False], "nothing changed yet"
    assert not reading.done()
    exchange()

    answered = await reading
    assert (found(answered), answered.offset) == ([False, True], snapshot_id.end_offset)
    assert behind.cluster_metadata.state_hash() == controller.cluster_metadata.state_hash()


@pytest.mark.parametrize("appends", [0, 1, 2])
async def test_one_record_after_a_loaded_snapshot_survives_lost_leadership(appends: int) -> None:
    """An exclusive end taken for a last offset would make exactly this record vanish."""
    source, source_log = await leading()
    snapshot_id, file = checkpoint_of(source, source_log)
    await committed(source_log, source.write(create("a")))
    assert source_log.committed == snapshot_id.end_offset + 1
    loaded = MetadataController(ClusterMetadata(), ManualClock())
    log = MemoryLog(loaded)
    loaded.bind(log)
    loaded.load(file, snapshot_id)()
    loaded.on_committed(source_log.batches[-1:], source_log.committed)
    log.next_offset = log.committed = source_log.committed
    loaded.on_leadership_claimed(2)
    doubtful = [await submit(loaded.write(create(f"b{i}"))) for i in range(appends)]
    assert loaded.cluster_metadata.size().streams == 1 + appends

    loaded.on_leadership_lost()

    assert loaded.cluster_metadata.size().streams == 1
    assert loaded.cluster_metadata.state_hash() == source.cluster_metadata.state_hash()
    await asyncio.gather(*doubtful, return_exceptions=True)


async def test_a_view_frozen_before_leadership_was_lost_differs_from_what_is_left() -> None:
    """What must never be published: it holds a write that will never be committed."""
    controller, log = await leading()
    doubtful = await submit(controller.write(create("a")))
    snapshot_id, file = checkpoint_of(controller, log)
    log.lose_leadership(truncate=True)
    other = MetadataController(ClusterMetadata(), ManualClock())
    other.load(file, snapshot_id)()
    assert other.cluster_metadata.size().streams == 1
    assert controller.cluster_metadata.size().streams == 0
    await asyncio.gather(doubtful, return_exceptions=True)


async def test_another_checkpoint_than_the_one_wanted_is_refused() -> None:
    controller, log = await leading()
    snapshot_id, file = checkpoint_of(controller, log)
    wanted = SnapshotId(EndOffset(snapshot_id.end_offset + 1), snapshot_id.epoch)
    with pytest.raises(CheckpointError):
        controller.load(file, wanted)

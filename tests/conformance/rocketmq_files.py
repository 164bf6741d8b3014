"""Scenarios about segments, flat files and the files of a queue of RocketMQ's shape."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from typing import Any

from streammeta.brokers.rocketmq.file_segment import (
    AppendResult,
    FileSegment,
    SegmentReadError,
)
from streammeta.brokers.rocketmq.flat_file import (
    FlatFile,
    FlatFilePlace,
    MemoryKeeper,
    NoSegmentError,
)
from streammeta.brokers.rocketmq.message import physical_offset_of, queue_offset_of
from streammeta.brokers.rocketmq.message_file import CommitLogFile, FileSizes, MessageFile
from streammeta.brokers.rocketmq.metadata import Queue
from streammeta.brokers.rocketmq.names import SegmentType
from streammeta.brokers.rocketmq.storage import (
    MemorySegment,
    MemorySegmentStore,
    SegmentWriteError,
    TimeBounds,
)
from tests.conformance.rocketmq_formats import plain
from tests.conformance.scenario_args import Args
from tests.conformance.shape_answers import Runner, Said
from tests.kit.clock import ManualClock

NOW_MS = 1_700_000_000_000
QUEUE = Queue("broker", "TopicTest", 0)


class FailingSegment(MemorySegment):
    """A segment whose writes fail on demand, after or before they have happened."""

    fails = False
    keeps_bytes = False
    size_known = True

    def __init__(self, data: bytes = b"") -> None:
        super().__init__(data)
        self.waits: asyncio.Event | None = None
        self.began = asyncio.Event()

    async def size(self) -> int | None:
        return await super().size() if self.size_known else None

    async def write(self, position: int, data: bytes, times: TimeBounds) -> None:
        self.began.set()
        if self.waits is not None:
            await self.waits.wait()
        if not self.fails or self.keeps_bytes:
            await super().write(position, data, times)
        if self.fails:
            raise SegmentWriteError("told to fail")


@dataclass
class FileWorld:
    """Flat files in memory."""

    clock: ManualClock = field(default_factory=lambda: ManualClock(NOW_MS))
    store: MemorySegmentStore = field(default_factory=MemorySegmentStore)
    keeper: MemoryKeeper = field(default_factory=MemoryKeeper)

    @property
    def place(self) -> FlatFilePlace:
        return FlatFilePlace(self.store, self.keeper, lambda: self.clock.now_ms)

    def flat_file(self, max_size: int) -> FlatFile:
        return FlatFile(self.place, QUEUE.path, SegmentType.CONSUME_QUEUE, max_size)

    def commit_log(self, max_size: int = 1 << 20) -> CommitLogFile:
        return CommitLogFile(self.place, QUEUE.path, SegmentType.COMMIT_LOG, max_size)

    def message_file(self) -> MessageFile:
        return MessageFile(self.place, QUEUE, FileSizes(1 << 20, 20 * 1000))


# ---- segments ----


def _attributes(given: Args) -> dict[str, Any]:
    kind = SegmentType[given.take("type")]
    segment = FileSegment(kind, given.take("base_offset"), MemorySegment())
    return {
        "expect": {
            "commit_position": segment.commit_position,
            "append_position": segment.append_position,
            "commit_offset": segment.commit_offset,
            "append_offset": segment.append_offset,
            "min_timestamp": segment.min_timestamp_ms,
            "max_timestamp": segment.max_timestamp_ms,
            "closed": segment.closed,
        }
    }


def _type_codes(given: list[str]) -> dict[str, Any]:
    return {"expect": [SegmentType[name].value for name in given]}


async def _commit_log_segment(given: Args) -> dict[str, Any]:
    base, size = given.take("base_offset"), given.take("max_size")
    given.take("steps")
    segment = FileSegment(SegmentType.COMMIT_LOG, base, MemorySegment(), size)
    facts: dict[str, Any] = {"need_commit_before": segment.needs_commit}
    for _ in range(2):
        segment.append(plain(), 0)
    segment.hold()
    facts["commit_while_locked"] = await segment.commit()
    segment.release()
    segment.append(plain(100), NOW_MS)
    facts["append_offset"] = segment.append_offset
    facts["min_timestamp"] = segment.min_timestamp_ms
    facts["max_timestamp"] = Said(now=segment.max_timestamp_ms == NOW_MS)
    await segment.commit()
    facts["after_commit"] = {
        "need_commit": segment.needs_commit,
        "commit_offset": segment.commit_offset,
    }
    facts["physical_offsets_read"] = await _physical_offsets(segment)
    return {"expect": facts}


async def _physical_offsets(segment: FileSegment, start: int = 0) -> list[int]:
    places = range(start, segment.commit_position, 123)
    return [physical_offset_of(await segment.read(at, 123)) for at in places]


async def _refusals(given: Args) -> dict[str, Any]:
    given.take("after")
    found: list[Any] = []
    for said in given.take("cases"):
        segment = FileSegment(SegmentType.COMMIT_LOG, 1000, MemorySegment(), 2000)
        if (match := re.match(r"buffers waiting = (\d+) = configured", said)) is not None:
            segment.max_buffers = int(match[1])
            for _ in range(segment.max_buffers):
                segment.append(plain(), 0)
        elif (match := re.match(r"append position = (\d+) - (\d+) \+ (\d+)", said)) is not None:
            segment.append_position = int(match[1]) - int(match[2]) + int(match[3])
        elif said.startswith("closed"):
            segment.append(plain(), 0)
            segment.close()
        else:
            raise ValueError(f"case is {said!r}")
        done = await segment.commit() if said.endswith("commit") else segment.append(plain(), 0)
        found.append(done.value if isinstance(done, AppendResult) else done)
    return {"expect": found}


async def _read_arguments(given: Args) -> dict[str, Any]:
    match = re.match(r"positions (\d+)\.\.(\d+)", given.take("committed"))
    if match is None:
        raise ValueError("committed is something else")
    first, end = int(match[1]), int(match[2])
    storage = MemorySegment(bytes(end))
    segment = FileSegment(SegmentType.CONSUME_QUEUE, 0, storage, start_size=end)
    del first  # what is asked for begins there or before the segment
    found = []
    for position, length in given.take("reads"):
        try:
            found.append(f"{len(await segment.read(position, length))} bytes")
        except SegmentReadError as error:
            found.append(error.code)
    return {"expect": found}


async def _failed_but_stored(given: Args) -> dict[str, Any]:
    start = given.take("start_size")
    given.take("steps")
    storage = FailingSegment(bytes(start))
    segment = FileSegment(
        SegmentType.COMMIT_LOG, given.take("base_offset"), storage, start_size=start
    )
    for _ in range(2):
        segment.append(plain(), 0)
    storage.fails = storage.keeps_bytes = True
    storage.waits = asyncio.Event()
    commit = asyncio.create_task(segment.commit())
    await storage.began.wait()
    segment.append(plain(), 0)
    storage.waits.set()
    await commit
    storage.fails = False
    await segment.commit()
    return {
        "expect": {
            "commit_position": segment.commit_position,
            "commit_offset": segment.commit_offset,
            "append_offset": segment.append_offset,
            "physical_offsets": await _physical_offsets(segment, start),
        }
    }


async def _fails_repeatedly(given: Args) -> dict[str, Any]:
    start = given.take("start_size")
    given.take("steps")
    storage = FailingSegment(bytes(start))
    segment = FileSegment(
        SegmentType.COMMIT_LOG, given.take("base_offset"), storage, start_size=start
    )
    for _ in range(2):
        segment.append(plain(), 0)
    storage.fails, storage.waits = True, asyncio.Event()
    first = asyncio.create_task(segment.commit())
    await storage.began.wait()
    segment.append(plain(), 0)
    others = [await segment.commit() for _ in range(2)]
    storage.waits.set()
    commits = [await first, *others]
    storage.size_known = False
    commits.append(await segment.commit())
    positions = [segment.commit_position]
    storage.size_known, storage.fails = True, False
    for _ in range(2):
        await segment.commit()
        positions.append(segment.commit_position)
    return {
        "expect": {
            "commits": commits,
            "commit_position_after": positions,
            "append_offset": segment.append_offset,
        }
    }


# ---- flat files ----


async def _recovers(given: Args) -> dict[str, Any]:
    world, size = FileWorld(), given.take("max_size")
    given.take("steps")
    file = world.flat_file(size)
    await file.roll(500)
    await file.append(bytes(1000), 1)
    await file.commit()
    file.writable().close()
    await file.roll(file.append_offset)
    await file.append(bytes(200), 1)
    await file.commit()
    again = world.flat_file(size)
    await again.open()
    noted = world.keeper.table.segments_of(file.path, file.kind)
    return {
        "expect": {
            "metadata": [
                {"base": one.base_offset, "size": one.size, "seal_timestamp": one.seal_ms}
                for one in noted
            ],
            "segments_after_open": len(again.segments),
        }
    }


async def _rolls_when_full(given: Args) -> dict[str, Any]:
    file = FileWorld().flat_file(given.take("max_size"))
    given.take("steps")
    facts: dict[str, Any] = {}
    try:
        file.writable()
    except NoSegmentError as error:
        facts["first"] = error.code
    await file.roll(0)
    await file.append(bytes(1000), 1)
    facts["after_append"] = {
        "min": file.min_offset,
        "commit": file.commit_offset,
        "append": file.append_offset,
        "min_timestamp": file.min_timestamp_ms,
        "max_timestamp": file.max_timestamp_ms,
    }
    await file.commit()
    facts["after_commit"] = {"commit": file.commit_offset}
    for _ in range(2):
        await file.append(bytes(1000), 1)
    await file.commit()
    facts["segments_at_end"] = len(file.segments)
    return {"expect": facts}


async def _reads_across(given: Args) -> dict[str, Any]:
    file = FileWorld().flat_file(given.take("max_size"))
    given.take("steps")
    await file.roll(500)
    found: list[Any] = [Said(ok=await file.append(bytes(1000), 1) is AppendResult.SUCCESS)]
    try:
        await file.read(500, 200)
    except SegmentReadError as error:
        found.append(error.code)
    await file.commit()
    found.append(len(await file.read(500, 200)))
    await file.append(bytes(1500), 1)
    await file.commit()
    found.append(f"{len(file.segments)} segments")
    found.append(f"{len(await file.read(1000, 1000))} bytes")
    return {"expect": found}


async def _rolls_by_age(given: Args) -> dict[str, Any]:
    given.take("steps")
    world = FileWorld()
    file = world.commit_log()
    await file.roll(0)
    rolled = []
    for at in range(3):
        await file.append(plain(), at)
        world.clock.now_ms += 2
        rolled.append(await file.try_roll(1, 123))
    rolled.append(await file.try_roll(1000, 123))
    return {"expect": {"rolled": rolled, "segments": len(file.segments)}}


async def _min_queue_offset(given: Args) -> dict[str, Any]:
    match = re.match(
        r"queue offsets (\d+)\.\.(\d+), timestamp = offset; committed and rolled before (\d+)",
        given.take("messages"),
    )
    if match is None:
        raise ValueError("messages are others")
    first, last, roll = (int(one) for one in match.groups())
    file = FileWorld().commit_log()
    await file.roll(0)
    facts: dict[str, Any] = {}
    for offset in range(first, last + 1):
        if offset == roll:
            facts["before_first_commit"] = await file.min_queue_offset()
            await file.seal()
            await file.roll(file.append_offset)
        await file.append(plain(offset), offset)
    await file.commit()
    facts["after_commit"] = await file.min_queue_offset()
    before = given.take("expire_before")
    for name in ("after_expiry", "after_second_expiry"):
        await file.expire(before)
        facts[name] = await file.min_queue_offset()
    return {"expect": facts}


# ---- queues ----


async def append_stored(file: MessageFile, offset: int, stored_ms: int, tags_code: int = 0) -> None:
    data = plain(offset, stored_ms)
    if await file.append(data, tags_code) is not AppendResult.SUCCESS:
        raise AssertionError(f"offset {offset} was not appended")


async def _message_file(given: Args) -> dict[str, Any]:
    file = FileWorld().message_file()
    await file.init_offset(given.take("first_offset"))
    match = re.match(r"(\d+) times MSG", given.take("messages"))
    if match is None:
        raise ValueError("messages are others")
    for _ in range(int(match[1])):
        await append_stored(file, 6, 11)
    facts: dict[str, Any] = {"before_commit": await _offsets(file)}
    await file.commit()
    facts["after_commit"] = await _offsets(file)
    (one,) = await file.read(100, 1)
    facts["message_at_100"] = {"size": len(one.data), "queue_offset": queue_offset_of(one.data)}
    log = file.commit_log
    facts["timestamps"] = [log.min_timestamp_ms, log.max_timestamp_ms]
    return {"expect": facts}


async def _offsets(file: MessageFile) -> dict[str, Any]:
    log = file.commit_log
    return {
        "first_message_offset": await log.min_queue_offset(),
        "commit_log": [log.min_offset, log.commit_offset, log.append_offset],
        "consume_queue": [file.min_offset, file.commit_offset, file.append_offset],
    }


async def _time_lookup(given: Args) -> dict[str, Any]:
    file = FileWorld().message_file()
    await file.init_offset(given.take("first_offset"))
    for offset, stored in given.take("store_timestamps"):
        await append_stored(file, offset, stored)
    await file.commit()
    queries = given.take("queries")
    return {
        "expect": {
            "lower": [await file.offset_at(one) for one in queries],
            "upper": [await file.offset_at(one, upper=True) for one in queries],
        }
    }


RUNNERS: dict[str, Runner] = {
    "segment_new_attributes": _attributes,
    "segment_type_codes": _type_codes,
    "segment_commit_log": _commit_log_segment,
    "segment_append_refusals": _refusals,
    "segment_read_arguments": _read_arguments,
    "segment_upload_failed_but_stored": _failed_but_stored,
    "segment_upload_fails_repeatedly": _fails_repeatedly,
    "append_file_recovers": _recovers,
    "append_file_rolls_when_full": _rolls_when_full,
    "append_file_reads_across_segments": _reads_across,
    "commit_log_rolls_by_age": _rolls_by_age,
    "commit_log_min_queue_offset": _min_queue_offset,
    "message_file_offsets": _message_file,
    "message_file_time_lookup": _time_lookup,
}

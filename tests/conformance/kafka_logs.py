"""Shapes of a partition of Kafka's shape: its map in a stream, and its log on streams in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from streammeta.brokers.partition.errors import (
    MetaStreamClosedError,
    OffsetOutOfRangeError,
    PartitionClosedError,
    PartitionFailedError,
    SegmentError,
)
from streammeta.brokers.partition.log import LogConfig, PartitionLog
from streammeta.brokers.partition.meta_map import MetaMap
from streammeta.brokers.partition.meta_stream import MetaStream
from streammeta.brokers.partition.opening import create_meta_stream, open_log
from streammeta.brokers.partition.record_batch import read_batches
from streammeta.brokers.partition.segments import Retention, Segment, SegmentLimits, rolled
from streammeta.brokers.partition.time_search import offset_by_time
from streammeta.client.errors import StreamFencedError
from streammeta.storage.inspection.kafka_batch import decode_kafka_records
from tests.conformance.kafka_formats import linear, text_bytes
from tests.conformance.shape_facts import Done
from tests.conformance.shape_sentences import Clause, number_of, range_of
from tests.conformance.shape_vocabulary import Answer, Given, Shape, take_steps
from tests.conformance.shape_worlds import NotOfferedError, World, attempt, run_steps, verb
from tests.kit.kafka_batches import Rec, make_batch
from tests.kit.memory_streams import MemoryStreams, StreamTable
from tests.kit.waiting import ManualClock

_TRANSACTIONS = re.compile(
    r"transact|abort|commit marker|\btxn|coordinator|hand-?off|handover", re.IGNORECASE
)

# ---- the map ----


class MapWorld(World):
    """The map of one partition, in a stream of its own."""

    errors = (OSError, ValueError, MetaStreamClosedError)

    def __init__(self) -> None:
        self.streams = MemoryStreams()
        self.stream_id = 0
        self.meta: MetaStream

    async def begin(self) -> None:
        (self.stream_id,) = await self.streams.create_streams([{}])
        await self.streams.open_streams({self.stream_id: 0})
        self.meta = await MetaStream.replay(self.streams, self.stream_id, 0, 0)

    async def facts(self) -> Mapping[str, Any]:
        stream = self.streams.table.streams[self.stream_id]
        found = MetaMap()
        for record in stream.records:
            found.apply(record.base_offset, record.payload)
        kept = sorted(found.live.values(), key=lambda item: item[0])
        named = [(at, entry.key.removeprefix("test."), entry.raw.hex()) for at, entry in kept]
        return {
            "end": stream.end,
            "next_offset": stream.end,
            "start": stream.start,
            "records": len(stream.records),
            "kept": [list(item) for item in named],
            "state": {key: raw for _, key, raw in named},
            "keys": [key for _, key, _ in named],
            "live_offsets": [at for at, _, _ in named],
        }

    def inside(self, first: int, end: int) -> int:
        records = self.streams.table.streams[self.stream_id].records
        return sum(first <= record.base_offset < end for record in records)

    @verb(r"compacts?|compaction|trims?", "compact")
    async def compact(self, clause: Clause) -> None:
        at_close = clause.take(r"at close|(?:when|while) (?:it )?clos\w+")
        forced = clause.take(r"forced|by force|trim") is not None or at_close is not None
        await (self.meta.close() if at_close else self.meta.compact(is_forced=forced))

    @verb(r"close[sd]?|freezes?|frozen", "close")
    async def close(self, clause: Clause) -> None:
        clause.skip(r"map|stream|it")
        await self.meta.close()

    @verb(r"replays?|reopens?|opens?", "replay")
    async def replay(self, clause: Clause) -> None:
        stream = self.streams.table.streams[self.stream_id]
        self.meta = await MetaStream.replay(self.streams, self.stream_id, stream.start, stream.end)

    @verb(r"appends?|puts?|writes?", "append [LOG, 01]")
    async def append(self, clause: Clause) -> None:
        found = clause.take(r"[(\[]\s*(\w+)\s*,\s*'?([0-9a-fA-F]*)'?\s*[)\]]") or clause.take(
            r"\b([A-Z_]+)\b(?: ([0-9a-f]+))?"
        )
        key, value = (found[1], found[2] or "") if found else ("A", "")
        await self.meta.put({f"test.{key}": bytes.fromhex(value)})


async def _map(given: Given) -> Any:
    world = MapWorld()
    await world.begin()
    if given.has("handoff"):
        raise NotOfferedError
    rows = given.first("appends", "stream", "records", default=[])
    for key, value in [row for row in rows if isinstance(row, list)]:
        # values of scenarios are no real ones: keys that are not decoded stand for them
        await world.meta.put({f"test.{key}": bytes.fromhex(str(value))})
    course = await run_steps(world, take_steps(given, MapWorld))
    for name in map(str, given.stated):
        found = re.fullmatch(r"records_in_(\d+)_to_(\d+)", name)
        if found is not None:
            course.extra[name] = world.inside(int(found[1]), int(found[2]))
    return course


def _are_map_steps(value: Any, _: Any) -> bool:
    words = re.compile(r"(close|append|trim|compact|freeze|put|replay)\b")
    return (
        bool(value)
        and all(isinstance(item, str) and words.match(item) for item in value)
        and not any("roll" in str(item) or re.search(r"\d", str(item)) for item in value)
    )


# ---- the log ----


class LogWorld(World):
    """The log of one partition; a broker that ends without closing leaves its streams."""

    errors = (
        OSError,
        ValueError,
        SegmentError,
        OffsetOutOfRangeError,
        PartitionClosedError,
        PartitionFailedError,
        StreamFencedError,
    )

    def __init__(self, config: LogConfig | None = None) -> None:
        self.table = StreamTable()
        self.clock = ManualClock(1_700_000_000_000)
        self.config = config or LogConfig()
        self.streams = MemoryStreams(self.table)
        self.log: PartitionLog
        self.epoch = 0
        self._meta_id = 0

    async def begin(self) -> None:
        self._meta_id = await create_meta_stream(self.streams, "topic", 0)
        await self.open_log()

    async def open_log(self) -> None:
        self.streams = MemoryStreams(self.table)
        self.log = await open_log(
            self.streams, self._meta_id, self.epoch, {}, self.config, lambda: self.clock.now_ms
        )
        self.epoch += 1

    def conditions(self, sentence: str) -> str:
        if _TRANSACTIONS.search(sentence):
            raise NotOfferedError
        return sentence

    def _map(self) -> MetaMap:
        found = MetaMap()
        for record in self.table.streams[self._meta_id].records:
            found.apply(record.base_offset, record.payload)
        return found

    async def facts(self) -> Mapping[str, Any]:
        log, found = self.log, self._map()
        entry = found.entry("PARTITION")
        value = entry.value if entry is not None and isinstance(entry.value, Mapping) else {}
        segments = log.segments
        return {
            "end": log.high_watermark,
            "next_offset": log.high_watermark,
            "high_watermark": log.high_watermark,
            "start": log.start_offset,
            "log_start": log.start_offset,
            "start_offset": log.start_offset,
            "recovery_point": value.get("r"),
            "clean_shutdown": value.get("cs"),
            "segments": len(segments),
            "bases": [segment.base_offset for segment in segments],
            "base_offsets": [segment.base_offset for segment in segments],
            "new_base": segments[-1].base_offset,
            "active_base": segments[-1].base_offset,
            "sizes": [segment.size for segment in segments],
            "meta_keys": [key for key in ("LOG", "PARTITION") if key in found.live],
            "writable": log.is_writable,
            "leader_epoch": log.epoch,
        }

    async def append_records(self, records: list[Rec]) -> int:
        appended = await self.log.append(make_batch(records))
        await appended.durable
        return appended.base_offset

    async def records(self, offset: int, max_bytes: int = 1 << 20) -> list[Any]:
        data = await self.log.read(offset, max_bytes)
        batches = read_batches(data) if data else []
        return [kafka_record for batch in batches for kafka_record in decode_kafka_records(batch)]

    @verb(r"rolls?|rolled", "roll")
    async def roll(self, clause: Clause) -> None:
        at = clause.take(r"(?:at|to) (?:offset )?(\d+)")
        clause.skip(r"segments?")
        if at is not None and int(at[1]) < self.log.segments[-1].base_offset:
            rolled(self.log.segments, int(at[1]), 0, 1)
        await self.log.roll()

    @verb(r"appends?|writes?|produces?", "append 3 records")
    async def append(self, clause: Clause) -> Any:
        key_value = clause.take(r"\[(\w+), ?(\w+)\]")
        time = clause.take(r"(?:with |at )?time(?:stamp)? (\d+)")
        sized = clause.take(r"(?:of )?(\d+) bytes(?: each)?")
        batches = clause.take(r"(?:in )?(\d+) batch(?:es)?(?: of (\d+)(?: records)?)?")
        counted = clause.take(r"\b(\d+|one|two|three|a)\b(?: (?:more )?records?)?")
        if counted is None and (listed := clause.take(r"(\d+(?:, ?\d+)+)")) is not None:
            count = len(listed[1].split(","))
        else:
            count = number_of(counted[1]) if counted else 1
        body = bytes(int(sized[1])) if sized else None
        rec = Rec(
            int(time[1]) if time else self.clock.now_ms,
            text_bytes(key_value[1]) if key_value else None,
            text_bytes(key_value[2]) if key_value else body,
        )
        base = -1
        for _ in range(int(batches[1]) if batches else 1):
            base = await self.append_records(
                [rec] * (int(batches[2]) if batches and batches[2] else count)
            )
        return Done(base)

    @verb(r"reads?|fetch(?:es)?", "read from 5")
    async def read(self, clause: Clause) -> Any:
        span = clause.pair()
        first = (
            span[0]
            if span
            else clause.number(r"(?:from |at |offset )?(-?\d+)", self.log.start_offset)
        )
        end = span[1] if span else clause.number(r"(?:to|until|up to) (\d+)", 1 << 62)
        clause.skip(r"all|everything")
        found = [row.offset for row in await self.records(first) if first <= row.offset < end]
        return Done(found)

    @verb(r"close[sd]?|shuts? down", "close")
    async def close(self, clause: Clause) -> None:
        clause.skip(r"cleanly|log|partition")
        await self.log.close()

    @verb(r"reopens?|opens?|recovers?|restarts?|crash(?:es)?|kills?|killed", "reopen")
    async def reopen(self, clause: Clause) -> None:
        clause.skip(
            r"log|partition|broker|without closing|uncleanly|reopens?|opens?|recovers?|restarts?"
        )
        epoch = clause.take(r"epoch (\d+)")
        self.epoch = max(self.epoch, int(epoch[1])) if epoch else self.epoch
        await self.open_log()

    @verb(
        r"deletes? records|trims?|deletes?|(?:raise|advance)s? (?:the )?(?:log )?start|"
        r"increments? (?:the )?(?:log )?start(?: offset)?",
        "delete records before 5",
    )
    async def trim(self, clause: Clause) -> Any:
        return await self.log.trim(clause.number(r"(?:before |below |to |at )?(\d+)"))

    @verb(r"retains?|retention|deletes? old(?: segments)?|clean(?:s|up)?", "retention")
    async def retain(self, clause: Clause) -> Any:
        clause.skip(r"runs?|segments?|applied|apply")
        return await self.log.retain()

    @verb(r"waits?|sleeps?|passes?", "wait 10 ms")
    def wait(self, clause: Clause) -> None:
        found = clause.take(r"(\d+) ?(ms|s|seconds|minutes|min|hours|days)?")
        assert found is not None
        unit = {
            "ms": 1,
            "s": 1000,
            "seconds": 1000,
            "minutes": 60_000,
            "min": 60_000,
            "hours": 3_600_000,
            "days": 86_400_000,
        }
        self.clock.now_ms += int(found[1]) * unit[found[2] or "ms"]

    @verb(r"flush(?:es)?|checkpoints?", "flush")
    def flush(self, clause: Clause) -> None:
        """Do nothing: what was appended is durable."""


def _config(given: Given) -> LogConfig:
    limits: dict[str, int] = {}
    size, age = given.first("segment_bytes", "segment_size"), given.take("segment_ms", None)
    limits |= {"bytes": size} if size is not None else {}
    limits |= {"age_ms": age} if age is not None else {}
    kept_bytes, kept_ms = given.take("retention_bytes", None), given.take("retention_ms", None)
    retention = Retention(
        Retention().age_ms if kept_ms is None else kept_ms, -1 if kept_bytes is None else kept_bytes
    )
    return LogConfig(segment=SegmentLimits(**limits), retention=retention)


async def _log(given: Given) -> Any:
    world = LogWorld(_config(given))
    await world.begin()
    before = await world.records(0)
    if given.has("appended"):
        return await _below(given, world)
    records = given.take("records", [])
    steps = take_steps(given, LogWorld)
    for key, value in records:
        await world.append_records([Rec(1, text_bytes(key), text_bytes(value))])
    course = await run_steps(world, steps)
    read = None
    if "read" in given.stated and not any(moment.verb == "read" for moment in course.moments):
        read = await world.records(world.log.start_offset)
        course.extra["read"] = [
            [(record.key or b"").decode(), (record.value or b"").decode()] for record in read
        ]
    course.extra["read_before"] = before
    return course


async def _below(given: Given, world: LogWorld) -> Any:
    """Roll at an offset that is said, of segments after some appends."""
    segments = [Segment(base_offset=0, created_ms=1)]
    if given.take("rolled", False):
        segments = rolled(segments, given.take("appended"), 0, 1)
    end = given.first("end_set_to", "roll_at", default=given.take("appended"))

    async def roll() -> int:
        return len(rolled(segments, end, 0, 1))

    outcome = await attempt(roll(), SegmentError)
    del world
    return {
        "roll": Done() if isinstance(outcome, Done) else outcome,
        "segments": getattr(outcome, "value", len(segments)),
    }


def _are_log_steps(value: Any, _: Any) -> bool:
    words = re.compile(
        r"(roll|append|reopen|open|close|delete|trim|read|retention|wait|kill|crash|recover|restart|flush)\b"
    )
    strings = bool(value) and all(isinstance(item, str) and words.match(item) for item in value)
    said = " ".join(map(str, value))
    return (
        strings
        and ("roll" in said or re.search(r"append \d|record|retention|delete", said) is not None)
        and not re.search(r"epoch|seq|snapshot", said)
    )


async def _offset_by_time(given: Given) -> Any:
    world = LogWorld()
    await world.begin()
    base, said = given.first("base", "base_offset", default=0), given.take("records")
    for _ in range(base):
        await world.append_records([Rec(0)])
    await world.log.trim(base)
    if isinstance(said, list):
        for _, time in said:
            await world.append_records([Rec(time)])
    else:
        span, times = range_of(str(said)), linear(str(said), "timestamp")
        for offset in span or ():
            product = re.search(r"timestamp (\d+) \* offset", str(said))
            await world.append_records(
                [Rec(int(product[1]) * offset if product else times[0] + times[1] * offset)]
            )
    found = [
        await offset_by_time(world.log, time) for time in given.first("search", "times", "lookups")
    ]
    listed = [None if entry is None else entry[1] for entry in found]
    return Answer(
        {
            "offsets": listed,
            "found": listed,
            "timestamps": [None if entry is None else entry[0] for entry in found],
        },
        listed,
    )


async def _read_across(given: Given) -> Any:
    """Read batches back one by one, in a process that has none of them in memory."""
    if given.has("batch"):
        raise NotOfferedError  # batches with gaps come of compaction by key
    world = LogWorld()
    await world.begin()
    said = given.take("batches")
    if isinstance(said, str):
        found = re.search(r"(\w+) (?:batches )?of (\w+) records?", said)
        counts = [number_of(found[2])] * number_of(found[1]) if found else []
    else:
        counts = [count if isinstance(count, int) else count[1] - count[0] + 1 for count in said]
    for count in counts:
        await world.append_records([Rec(1)] * count)
    await world.open_log()
    start, end = given.take("read")
    offsets, asked = list[int](), list[int]()
    begin = start
    while start < end:
        asked.append(start)
        for batch in read_batches(await world.log.read(start, 1)):
            offsets += [
                one.offset for one in decode_kafka_records(batch) if begin <= one.offset < end
            ]
            start = batch.last_offset + 1
    return {
        "records": len(offsets),
        "offsets": offsets,
        "stream_fetch_offsets": asked,
        "stream_fetches": len(asked),
    }


SHAPES = (
    Shape(
        "kafka map",
        _map,
        "appends | stream then | steps | stream steps | stream handoff | stream",
        "end|kept|next_offset|records_in_.*|state|keys|start|unknown|partition|after_.*|"
        "live_offsets",
        "MetaStreamTest",
        fits=_are_map_steps,
        world=MapWorld,
        words=r"(?-i:\b[A-Z_]+\b)",
    ),
    Shape(
        "kafka log",
        _log,
        "records | appended end_set_to | appended roll_at | steps | segment_bytes steps | "
        "retention_ms steps | retention_bytes steps",
        "next_offset|end|recovery_point|read.*|segments.*|new_base|bases?|roll|meta_keys|"
        "clean_shutdown|start.*|high_watermark|.*_base|after_.*|before_.*|log_start|error",
        "Elastic(?:Unified)?LogTest|ElasticLogSegmentTest",
        keys="rolled then segment_size segment_ms",
        fits=_are_log_steps,
        world=LogWorld,
        words=r"\brecords?\b|batch|leader epoch|retention",
    ),
    Shape(
        "kafka offset by time",
        _offset_by_time,
        "records search | records times | records lookups",
        "offsets|found|timestamps",
        "ElasticLogSegmentTest",
        keys="base base_offset",
    ),
    Shape(
        "kafka reads over batches",
        _read_across,
        "batches read | batch read",
        "records|offsets|stream_fetch.*",
        "ElasticLogFileRecordsTest",
    ),
)

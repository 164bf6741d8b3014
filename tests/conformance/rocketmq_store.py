"""Scenarios about RocketMQ's shape as a whole: dispatch, fetch, two tiers, metadata, chunks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from streammeta.brokers.rocketmq import tiered_view
from streammeta.brokers.rocketmq.chunked_segment import (
    ChunkedSegment,
    ChunkLayoutError,
    IllegalOffsetError,
    SegmentSealedError,
)
from streammeta.brokers.rocketmq.dispatch import Dispatcher, LocalMessage
from streammeta.brokers.rocketmq.fetch import Fetcher, FetchResult, FetchStatus, ReadAhead
from streammeta.brokers.rocketmq.key_index import TimeRange
from streammeta.brokers.rocketmq.key_index_service import (
    IndexSizes,
    KeyIndexService,
    MemoryShelf,
)
from streammeta.brokers.rocketmq.message import java_hash
from streammeta.brokers.rocketmq.message_file import MISSING, MessageFile, StoredMessage
from streammeta.brokers.rocketmq.metadata import (
    METADATA_FILE,
    MetadataTable,
    Queue,
    QueueMetadata,
    SegmentMetadata,
)
from streammeta.brokers.rocketmq.names import SegmentType
from streammeta.brokers.rocketmq.tiered_view import StorageLevel
from tests.conformance.rocketmq_files import NOW_MS, QUEUE, FileWorld, append_stored
from tests.conformance.rocketmq_formats import plain
from tests.conformance.scenario_args import Args
from tests.conformance.shape_answers import Runner, Said
from tests.kit.memory_store import MemoryObjectStore

STORED_MS = 11
"""Time at which the messages of these scenarios were stored."""
_TIMES = (STORED_MS, STORED_MS)
UNKNOWN = Queue("broker", "Unknown", 0)


@dataclass
class LocalStore:
    """A local queue whose messages are all alike but for their offset."""

    min_offset: int
    max_offset: int
    key: str = ""

    def offset_at(self, timestamp_ms: int) -> int:
        return self.min_offset if timestamp_ms <= STORED_MS else self.max_offset

    def read(self, offset: int, count: int) -> Sequence[LocalMessage]:
        keys = frozenset({self.key} - {""})
        end = min(offset + count, self.max_offset)
        return [LocalMessage(plain(at, STORED_MS), 0, keys) for at in range(offset, end)]


# ---- dispatch ----


@dataclass
class DispatchWorld:
    """One queue, dispatched from a local store."""

    local: LocalStore
    files: FileWorld = field(default_factory=FileWorld)

    async def dispatcher(self) -> Dispatcher:
        clock = self.files.clock
        clock.now_ms = STORED_MS
        index = await KeyIndexService.open(
            "broker/rmq_sys_INDEX/0",
            self.files.store,
            MemoryShelf(),
            lambda: clock.now_ms,
            IndexSizes(5, 1000),
        )
        file = self.files.message_file()
        return Dispatcher(self.local, file, index, 7, lambda: clock.now_ms)


def _triple(file: MessageFile) -> list[int]:
    return [file.min_offset, file.commit_offset, file.append_offset]


async def _dispatch(given: Args) -> dict[str, Any]:
    queue = given.within("local_queue")
    given.take("message"), given.take("steps")
    world = DispatchWorld(LocalStore(queue.take("min"), queue.take("max"), "uk"))
    one = await world.dispatcher()
    states = []
    for _ in range(2):
        await one.dispatch(force=True)
        states.append(_triple(one.file))
    found = {
        f"found_max_{limit}": len(await one.index.query(QUEUE.topic, "uk", limit))
        for limit in (32, 120)
    }
    return {"expect": {"consume_queue": states, "index": {"key": "uk", **found}}}


async def _dispatch_refused(given: Args) -> dict[str, Any]:
    given.take("as"), given.take("then")
    one = await DispatchWorld(LocalStore(100, 200, "uk")).dispatcher()
    await one.dispatch(force=True)
    segment = one.file.commit_log.writable()
    segment.hold()
    await one.dispatch(force=True)
    kept = None if one.context is None else {"end_offset": one.context.end_offset}
    if await one.index.query(QUEUE.topic, "uk", 32):
        kept = {"end_offset": MISSING}  # keys before their messages
    segment.release()
    await one.commit()
    await one.dispatch(force=True)
    return {"expect": {"context_kept": kept, "context_after_success": one.context}}


# ---- fetch ----


async def _stored(given: Args, limits: ReadAhead | None = None, tags: int = 0) -> Fetcher:
    """Return a fetcher of one queue that holds messages of the offsets given."""
    first, end = given.take("stored")
    world = FileWorld()
    file = world.message_file()
    await file.init_offset(first)
    for offset in range(first, end):
        await append_stored(file, offset, STORED_MS, offset % tags if tags else 0)
    await file.commit()
    index = await KeyIndexService.open(
        "broker/rmq_sys_INDEX/0", world.store, MemoryShelf(), lambda: NOW_MS, IndexSizes(5, 20)
    )
    return Fetcher({QUEUE: file}, index, lambda: world.clock.now_ms, limits)


def _fetch_facts(result: FetchResult) -> dict[str, Any]:
    return {
        "status": result.status.value,
        "min": result.min_offset,
        "max": result.max_offset,
        "next": result.next_offset,
        "messages": len(result.messages),
    }


async def _statuses(given: Args) -> dict[str, Any]:
    fetcher, found = await _stored(given), []
    for request in given.each("requests"):
        queue = UNKNOWN if request.take("queue", "") == "unknown" else QUEUE
        result = await fetcher.fetch(queue, request.take("offset", 0), request.take("max", 32))
        found.append(_fetch_facts(result))
    return {"expect": found}


async def _thresholds(given: Args) -> dict[str, Any]:
    request, found = given.within("request"), []
    for one in given.each("thresholds"):
        count, extra = re.match(r"(\d+) messages \+ (\d+)", one.take("bytes")).groups()  # type: ignore[union-attr]
        limits = ReadAhead(one.take("count", 4096), int(count) * len(plain()) + int(extra))
        fetcher = await _stored(given, limits)
        result = await fetcher.fetch(QUEUE, request.take("offset"), request.take("max"))
        found.append(_fetch_facts(result))
    return {"expect": found}


async def _by_code(given: Args) -> dict[str, Any]:
    match = re.match(r"offset % (\d+)", given.take("tags_code"))
    fetcher, found = await _stored(given, tags=int(match[1]) if match else 0), []
    file = fetcher.file(QUEUE)
    for one in given.each("requests"):
        offset, limit, codes = one.take("offset"), one.take("max"), one.take("codes")
        found.append(_fetch_facts(await fetcher.read_matching(file, offset, limit, codes)))
    return {"expect": found}


def _two_steps(given: Args) -> dict[str, Any]:
    tags = re.findall(r"Tag\d+", given.take("messages"))
    messages = [StoredMessage(at, plain(at), java_hash(tag)) for at, tag in enumerate(tags)]
    result = FetchResult(FetchStatus.FOUND, 0, 3, 3, messages)
    found = []
    for one in given.each("filters"):
        code, content = one.take("by_code"), one.take("by_message")
        codes = None if code == "none" else {java_hash(code)}
        accepts = {"none": None, "all": lambda _: True}[content]
        found.append(len(result.filtered(codes, accepts)))
    return {"expect": found}


async def _times(given: Args) -> dict[str, Any]:
    if given.take("store_timestamp_of_all") != STORED_MS:
        raise ValueError("messages of these scenarios were stored at 11")
    fetcher = await _stored(given)
    times = []
    for said in given.take("time_of"):
        if said == "earliest":
            times.append(await fetcher.earliest_timestamp(QUEUE))
        elif said == "unknown queue":
            times.append(await fetcher.earliest_timestamp(UNKNOWN))
        else:
            times.append(await fetcher.timestamp_of(QUEUE, int(said.removeprefix("offset "))))
    asked = given.take("offset_by_time")
    return {
        "expect": {
            "times": times,
            "lower": [await fetcher.offset_at(QUEUE, one) for one in asked],
            "upper": [await fetcher.offset_at(QUEUE, one, upper=True) for one in asked],
            "unknown_queue": await fetcher.offset_at(UNKNOWN, asked[0]),
        }
    }


# ---- two tiers ----


def _levels(given: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "expect": [
            tiered_view.reads_tiered(
                StorageLevel[one["level"]],
                on_disk=one.get("on_disk", True),
                in_memory=one.get("in_memory", False),
            )
            for one in given
        ]
    }


def _min_offsets(given: list[dict[str, Any]]) -> dict[str, Any]:
    pairs = [(one["local"], one["tiered"]) for one in given]
    return {
        "expect": [
            tiered_view.min_offset(local, None if tiered == "none" else tiered)
            for local, tiered in pairs
        ]
    }


def _query_split(given: Args) -> dict[str, Any]:
    earliest, hits = given.take("local_earliest"), []
    per_tier = (given.take("tiered_hits"), given.take("local_hits"))
    for begin, end in given.take("ranges"):
        asked = tiered_view.split_query(TimeRange(begin, end), earliest)
        hits.append(sum(count for count, times in zip(per_tier, asked, strict=True) if times))
    return {"expect": hits}


async def _delete_topics(given: list[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for _ in given:
        world = FileWorld()
        file, table = world.message_file(), world.keeper.table
        table.add_topic(QUEUE.topic)
        await file.init_offset(0)
        await append_stored(file, 0, STORED_MS)
        await file.commit()
        await file.expire(0)
        await file.destroy()
        table.delete_topic(QUEUE.topic)
        facts = {
            "flat_file": file if file.is_initialised or table.segments else None,
            "topic_metadata": table.topics.get(QUEUE.topic),
            "queue_metadata": table.queues.get(QUEUE),
        }
    return {"expect": facts}


def _topic_filter(given: list[str]) -> dict[str, Any]:
    found = []
    for said in given:
        topic, _, excluded = said.partition(" after it was put on the ")
        found.append(tiered_view.stays_local(topic, {topic} if excluded else frozenset()))
    return {"expect": found}


# ---- metadata ----


def _metadata_topics(given: Args) -> dict[str, Any]:
    given.take("steps")
    table = MetadataTable()
    topics = [table.add_topic(f"t{at}", reserve) for at, reserve in enumerate((2, 1, 2))]
    new_status = topics[0].status
    iterated = len(table.topics)
    table.delete_topic("t2")
    return {
        "expect": {
            "topic_ids": [one.topic_id for one in topics],
            "new_status": new_status,
            "iterated": iterated,
            "left": len(table.topics),
        }
    }


def _metadata_segments(given: Args) -> dict[str, Any]:
    given.take("steps")
    table, kind = MetadataTable(), SegmentType.COMMIT_LOG
    for base in (0, 100):
        table.put_segment(SegmentMetadata("p", kind, base))
    new = table.segments_of("p", kind)[0]
    table.put_segment(new.sealed(NOW_MS))
    sealed = table.segments_of("p", kind)[0]
    for path in ("p1", "p2"):
        for at in range(10):
            table.put_segment(SegmentMetadata(path, kind, at * 1_000_000))
    table.delete_segments("p1", kind)
    counts = [len(table.segments_of("p1", kind))]
    for at in range(5):
        table.delete_segments("p2", kind, at * 1_000_000)
    counts.append(len(table.segments_of("p2", kind)))
    counts.append(len(table.segments_of("p1", kind) + table.segments_of("p2", kind)))
    return {
        "expect": {
            "new": {"status": int(new.status), "seal_timestamp": new.seal_ms},
            "sealed": {"status": int(sealed.status), "seal_timestamp_set": sealed.seal_ms > 0},
            "counts_after_delete": counts,
        }
    }


def _metadata_reload(given: Args) -> dict[str, Any]:
    table = MetadataTable()
    for topic, reserve in given.take("topics").items():
        table.add_topic(topic, reserve)
    for topic, number, end in given.take("queues"):
        queue = Queue("broker", topic, number)
        table.queues[queue] = QueueMetadata(queue, 0, end)
    for base in given.take("segments"):
        for kind in SegmentType:
            table.put_segment(SegmentMetadata("broker/t/0", kind, base))
    text = table.encode()
    shape = json.loads(re.sub(r"(?<=[{,])(-?\d+)(?=:)", r'"\1"', text))
    unquoted = re.search(r"[{,]100:\{", text) is not None and '"100"' not in text
    return {
        "expect": {"all_found_after_load": MetadataTable.decode(text) == table},
        "derived": {
            "json_shape": _json_shape(shape),
            "number_keys": Said.of({"written without quotes: not strict JSON": unquoted}),
            "files": [METADATA_FILE, f"{METADATA_FILE}.bak"],
        },
    }


def _json_shape(shape: dict[str, Any]) -> dict[str, Any]:
    """Return what the scenarios say of the file where it holds of it."""
    (topic, *_), (queues, *_) = (
        shape["topicMetadataTable"].values(),
        shape["queueMetadataTable"].values(),
    )
    segment = shape["commitLogFileSegmentTable"]["broker/t/0"]["100"]
    queue = next(iter(queues.values()))
    tables = ("commitLogFileSegmentTable", "consumeQueueFileSegmentTable", "indexFileSegmentTable")
    alike = len({json.dumps(list(shape[name]["broker/t/0"])) for name in tables}) == 1
    same = Said(same=alike)
    words = {
        "topicSerialNumber": ("last id, -1 when none", shape["topicSerialNumber"] == 1),
        "topicMetadataTable": (
            "{topic: {topicId, topic, status, reserveTime, updateTimestamp}}",
            topic.keys() == {"topicId", "topic", "status", "reserveTime", "updateTimestamp"},
        ),
        "queueMetadataTable": (
            (
                "{topic: {queue id: {queue: {brokerName, queueId, topic}, minOffset, maxOffset,"
                " updateTimestamp}}}"
            ),
            queue.keys() == {"queue", "minOffset", "maxOffset", "updateTimestamp"}
            and queue["queue"].keys() == {"brokerName", "queueId", "topic"},
        ),
        "commitLogFileSegmentTable": (
            (
                "{path: {base: {path, type, baseOffset, status, size, createTimestamp,"
                " beginTimestamp, endTimestamp, sealTimestamp}}}"
            ),
            segment.keys()
            == {"path", "type", "baseOffset", "status", "size"}
            | {f"{one}Timestamp" for one in ("create", "begin", "end", "seal")},
        ),
    }
    facts: dict[str, Any] = {name: Said.of({said: holds}) for name, (said, holds) in words.items()}
    return facts | dict.fromkeys(tables[1:], same)


# ---- chunks ----


async def _chunk_commits(given: Args) -> dict[str, Any]:
    match = re.match(r'(\d+) bytes "(\w+)" at position (\d+)', given.take("commit"))
    if match is None:
        raise ValueError("commit is something else")
    given.take("then")
    store = MemoryObjectStore()
    segment = await ChunkedSegment.open(store, "s")
    facts: dict[str, Any] = {"new_size": await segment.size()}
    await segment.write(int(match[3]), match[2].encode(), _TIMES)
    facts |= await _chunk_facts(segment)
    facts["after_open"] = await _chunk_facts(await ChunkedSegment.open(store, "s"))
    return {"expect": facts}


async def _chunk_facts(segment: ChunkedSegment) -> dict[str, Any]:
    size = segment.end
    return {
        "start": 0 if size else -1,
        "end": size - 1,
        "size": size,
        "read": (await segment.read(0, size)).decode(),
    }


async def _two_segments(given: Args) -> dict[str, Any]:
    store = MemoryObjectStore()
    for name in given.take("segments"):
        store.put(f"s/segment/{name}", b"x")
    try:
        await ChunkedSegment.open(store, "s")
    except ChunkLayoutError:
        return {"expect": {"open": "error"}}
    return {"expect": {"open": "ok"}}


async def _backward(given: Args) -> dict[str, Any]:
    segment = await ChunkedSegment.open(MemoryObjectStore(), "s")
    for position, text in given.take("commits"):
        await segment.write(position, text.encode(), _TIMES)
    facts: dict[str, Any] = {
        "reads": [(await segment.read(*one)).decode() for one in given.take("reads")]
    }
    position, text = given.take("bad_commit")
    try:
        await segment.write(position, text.encode(), _TIMES)
    except IllegalOffsetError as error:
        facts |= {"error": error.code, "position": error.position}
    return {"expect": facts}


async def _seal(given: Args) -> dict[str, Any]:
    store = MemoryObjectStore()
    segment = await ChunkedSegment.open(store, "s")
    wanted = b""
    for at, chunk in enumerate(given.each("chunks")):
        data = bytes([at + 1]) * chunk.take("size")
        await segment.write(chunk.take("at"), data, _TIMES)
        wanted += data
    await segment.seal()
    again = await ChunkedSegment.open(store, "s")
    is_whole = await again.read(0, len(wanted)) == wanted
    facts: dict[str, Any] = {
        "sealed": again.is_sealed and is_whole,
        "chunk_count": len(again.chunks) + len(list(store.list_objects("s/chunk/"))),
        "start": 0,
        "end": again.end - 1,
        "size": again.end,
    }
    try:
        await again.write(again.end, b"x", _TIMES)
    except SegmentSealedError as error:
        facts["commit_after_seal"] = error.code
    return {"expect": facts}


async def _list_chunks(given: Args) -> dict[str, Any]:
    match = re.match(
        r"chunk-(\d+), chunk-(\d+) \.\. chunk-(\d+), (\d+) bytes", given.take("chunks")
    )
    if match is None:
        raise ValueError("chunks are others")
    first, second, last, size = (int(one) for one in match.groups())
    starts = list(range(first, last + 1, second - first))
    store = MemoryObjectStore()
    for start in reversed(starts):
        store.put(f"s/chunk/chunk-{start}", bytes(size))
    segment = await ChunkedSegment.open(store, "s")
    listed = [(one.start, one.size) for one in segment.chunks]
    in_order = listed == [(start, size) for start in starts]
    said = (
        f"{len(starts)}, in order of position, each with name, start = number in its name,"
        f" size {size}"
    )
    await segment.destroy()
    return {
        "expect": {
            "listed": Said.of({said: in_order}),
            "undeleted": [one.key for one in store.list_objects("s/")],
            "listed_after": len((await ChunkedSegment.open(store, "s")).chunks),
        }
    }


RUNNERS: dict[str, Runner] = {
    "dispatch_from_commit_log": _dispatch,
    "dispatch_commit_refused": _dispatch_refused,
    "fetch_statuses": _statuses,
    "fetch_size_threshold": _thresholds,
    "fetch_tag_filter_by_code": _by_code,
    "fetch_two_step_filter": _two_steps,
    "fetch_times": _times,
    "store_levels": _levels,
    "store_min_offset": _min_offsets,
    "store_query_split_at_local_start": _query_split,
    "store_delete_topics": _delete_topics,
    "topic_filter": _topic_filter,
    "metadata_topics": _metadata_topics,
    "metadata_segments": _metadata_segments,
    "metadata_reload": _metadata_reload,
    "s3_commit_and_restart": _chunk_commits,
    "s3_two_segments_refused": _two_segments,
    "s3_backward_commit": _backward,
    "s3_seal_merges_chunks": _seal,
    "s3_list_and_delete_chunks": _list_chunks,
}

"""Shapes of RocketMQ's two tiers, its metadata, its topics, and the chunks of its S3 backend."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from streammeta.brokers.rocketmq import tiered_view
from streammeta.brokers.rocketmq.formats import metadata
from streammeta.brokers.rocketmq.formats.key_index import TimeRange
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.segments.chunked_segment import (
    ChunkedSegment,
    ChunkLayoutError,
    IllegalOffsetError,
    SegmentSealedError,
)
from streammeta.brokers.rocketmq.segments.file_segment import SegmentReadError
from streammeta.brokers.rocketmq.segments.storage import SegmentWriteError
from streammeta.brokers.rocketmq.tiered_view import StorageLevel
from tests.conformance.rocketmq_files import QUEUE, FileWorld
from tests.conformance.rocketmq_flat_files import append_stored
from tests.conformance.shape_facts import FAILED, AnyOf, Done, Keyed, Words
from tests.conformance.shape_sentences import Clause, numbers_in, size_of
from tests.conformance.shape_vocabulary import Answer, Given, Shape
from tests.conformance.shape_worlds import Course, World, attempt, run_steps, verb
from tests.kit.memory_store import MemoryObjectStore

_TIMES = (11, 11)


# ---- two tiers ----


def _level(given: Given) -> Answer:
    level = given.take("level")
    found = tiered_view.reads_tiered(
        StorageLevel(level) if isinstance(level, int) else StorageLevel[level],
        on_disk=given.take("on_disk", True),
        in_memory=given.first("in_memory", "in_mem", default=False),
    )
    return Answer({"tiered": found, "reads_tiered": found}, found)


def _min_offset(given: Given) -> Answer:
    local, tiered = given.take("local"), given.take("tiered")
    found = tiered_view.min_offset(local, None if tiered in ("none", None) else tiered)
    return Answer({"min": found, "min_offset": found}, found)


def _time_of_tiers(given: Given) -> Answer:
    """Return the time that one tier answers: the one that reads of a level go to."""
    level = given.take("level")
    goes_up = tiered_view.reads_tiered(
        StorageLevel(level) if isinstance(level, int) else StorageLevel[level],
        on_disk=given.take("on_disk", True),
        in_memory=given.first("in_memory", "in_mem", default=True),
    )
    local, tiered = given.take("local"), given.take("tiered")
    found = tiered if goes_up else local
    return Answer({"time": found, "timestamp": found, "found": found}, found)


def _split_query(given: Given) -> Answer:
    earliest, hits, asked_tiers = given.take("local_earliest"), [], []
    per_tier = (given.take("tiered_hits"), given.take("local_hits"))
    for begin, end in given.take("ranges"):
        asked = tiered_view.split_query(TimeRange(begin, end), earliest)
        hits.append(sum(count for count, times in zip(per_tier, asked, strict=True) if times))
        asked_tiers.append(
            [None if times is None else [times.begin_ms, times.end_ms] for times in asked]
        )
    return Answer({"hits": hits, "found": hits, "asked": asked_tiers}, hits)


class TopicWorld(World):
    """A topic with one queue that holds a message."""

    def __init__(self, files: FileWorld) -> None:
        self.files = files
        self.file = files.message_file()

    async def prepare(self) -> None:
        self.file = self.files.message_file()
        self.files.keeper.table.add_topic(QUEUE.topic)
        await self.file.init_offset(0)
        await append_stored(self.file, 0, 11)
        await self.file.commit()
        await self.file.expire(0)

    async def facts(self) -> Mapping[str, Any]:
        table = self.files.keeper.table
        topic, queue = table.topics.get(QUEUE.topic), table.queues.get(QUEUE)
        kept = Words({"kept|there": True})
        return {
            "flat_file": kept if self.file.is_initialised or table.segments else None,
            "topic_metadata": kept if topic else None,
            "queue_metadata": kept if queue else None,
            "topics": len(table.topics),
            "queues": len(table.queues),
        }

    @verb(r"deletes?|destroys?|cleans? up|removes?", "delete the topic")
    async def delete(self, clause: Clause) -> None:
        used = clause.take(
            r"(?:with|and) (?:a |an |the )?(?:empty )?set of topics in use(?: "
            r"\[?(?P<names>[\w, ]*)\]?)?"
        )
        clause.skip(r"topics?|unused|in use")
        if used is not None and "empty" not in used[0]:
            return
        await self.file.destroy()
        self.files.keeper.table.delete_topic(QUEUE.topic)


async def _topics(given: Given) -> Course:
    """Run each step on a topic of its own: each deletes all of it."""
    courses = []
    for step in given.take("input"):
        world = TopicWorld(FileWorld())
        await world.prepare()
        courses.append(await run_steps(world, [step]))
    course = courses[0]
    for other in courses[1:]:
        for name in course.end:
            ours, theirs = course.end[name], other.end[name]
            if repr(ours) != repr(theirs):
                course.extra[name] = Words({})
        course.mismatches += other.mismatches
    return course


def _are_topic_steps(value: Any, _: Any) -> bool:
    return all(
        isinstance(item, str) and re.search(r"\b(delete|clean up|destroy)\b.*topics?\b", item)
        for item in value
    )


def _topic_filter(given: Given) -> Answer:
    found, excluded = [], set[str]()
    listed = given.first("black_list", "excluded", default=[])
    excluded |= set(listed)
    for said in given.first("topics", "input"):
        topic, _, after = str(said).partition(" after ")
        own = excluded | ({topic} if re.search(r"black|exclud|filter", after) else set())
        found.append(tiered_view.stays_local(topic, own))
    return Answer(
        {"filtered": found, "stays_local": found, "tiered": [not one for one in found]}, found
    )


def _are_topics(value: Any, stated: Any) -> bool:
    is_text = all(isinstance(item, str) for item in value)
    named = any(
        item == "" or item.startswith("rmq_sys_") or "Topic" in item
        for item in value
        if isinstance(item, str)
    )
    said = isinstance(stated, list) and all(isinstance(item, bool) for item in stated)
    return is_text and named and said


def _metadata_reload(given: Given) -> Any:
    table = metadata.MetadataTable()
    for topic, reserve in given.take("topics", {}).items():
        table.add_topic(topic, reserve)
    for topic, number, end in given.take("queues", []):
        queue = metadata.Queue("broker", topic, number)
        table.queues[queue] = metadata.QueueMetadata(queue, 0, end)
    for base in given.take("segments", []):
        for kind in SegmentType:
            table.put_segment(metadata.SegmentMetadata("broker/t/0", kind, base))
    text = table.encode()
    shape = json.loads(re.sub(r"(?<=[{,])(-?\d+)(?=:)", r'"\1"', text))
    unquoted = re.search(r"[{,]\d+:\{", text) is not None and re.search(r'"\d+":', text) is None
    again = metadata.MetadataTable.decode(text)
    return {
        "all_found_after_load": again == table,
        "all_found": again == table,
        "topics": len(again.topics),
        "queues": len(again.queues),
        "segments": len(again.segments),
        "json_shape": _json_shape(shape),
        "number_keys": Words({"written without quotes(?:: not strict json)?": unquoted}),
        "files": [metadata.METADATA_FILE, f"{metadata.METADATA_FILE}.bak"],
    }


def _json_shape(shape: dict[str, Any]) -> Keyed:
    """Return what may be said of the file's tables: their keys, as a map that is written out."""
    tables = ("commitLogFileSegmentTable", "consumeQueueFileSegmentTable", "indexFileSegmentTable")

    def said(value: Any, depth: int) -> Words:
        for _ in range(depth):
            value = next(iter(value.values()), {})
        wanted = set(_nested_names(value))
        return Words(
            {
                r"(\{.*\})": lambda found: (
                    set(
                        re.findall(
                            r"[a-z]\w+",
                            found[1].rpartition(": {")[2]
                            if depth < 2
                            else found[1].split("{", depth + 1)[-1],
                        )
                    )
                    == {word.lower() for word in wanted}
                )
            }
        )

    alike = len({json.dumps([list(row) for row in _rows(shape[name])]) for name in tables}) == 1
    same = Words({"same": alike})
    last = shape["topicSerialNumber"] == len(shape["topicMetadataTable"]) - 1
    return Keyed(
        {
            "topicSerialNumber": Words({"last id, -1 when none": last}),
            "topicMetadataTable": said(shape["topicMetadataTable"], 1),
            "queueMetadataTable": _queue_words(shape["queueMetadataTable"]),
            tables[0]: said(shape[tables[0]], 2),
            **dict.fromkeys(tables[1:], same),
        }
    )


def _rows(table: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    return [row for rows in table.values() for row in rows.values()]


def _nested_names(value: Any) -> list[str]:
    return list(value) if isinstance(value, Mapping) else []


def _queue_words(table: Any) -> Words:
    row: dict[str, Any] = next(iter(_rows(table)), {})
    wanted = {*row, *row.get("queue", {})}
    return Words(
        {
            r"\{topic: \{queue id: (\{.*\})\}\}": lambda found: (
                set(re.findall(r"[a-z]\w+", found[1])) == {word.lower() for word in wanted}
            )
        }
    )


# ---- chunks ----


class ChunkWorld(World):
    """A segment of chunks in a bucket."""

    errors = (OSError, ValueError, SegmentReadError, SegmentWriteError, ChunkLayoutError)

    def __init__(self) -> None:
        self.store = MemoryObjectStore()
        self.segment: ChunkedSegment
        self.wanted = b""

    async def facts(self) -> Mapping[str, Any]:
        size = self.segment.end
        read = await self.segment.read(0, size) if 0 < size <= 64 else b""
        listed = list(self.store.list_objects("s/chunk/"))
        whole = size == len(self.wanted) and (
            not size or await self.segment.read(0, size) == self.wanted
        )
        return {
            "new_size": size,
            "start": 0 if size else -1,
            "end": size - 1,
            "size": size,
            "position": size,
            "read": AnyOf(read.decode(errors="replace"), Words({"|".join(FAILED): not size})),
            "sealed": self.segment.is_sealed and whole,
            "chunk_count": len(self.segment.chunks) + len(listed)
            if self.segment.is_sealed
            else len(self.segment.chunks),
            "chunks": len(self.segment.chunks),
            "undeleted": [object_.key for object_ in self.store.list_objects("s/")],
        }

    @verb(r"opens?|reopens?|restarts?", "open again")
    async def open(self, clause: Clause) -> None:
        clause.skip(r"segment")
        self.segment = await ChunkedSegment.open(self.store, "s")

    @verb(r"commits?|writes?|appends?", 'commit 5 bytes "hello" at position 0')
    async def commit(self, clause: Clause) -> None:
        at = clause.take(r"(?:at|to) (?:position )?(-?\d+)")
        text = clause.take(r"\"([^\"]*)\"|'([^']*)'")
        count = clause.take(r"(\d+) bytes")
        pair = clause.take(r"\((-?\d+), ?([^)]*)\)")
        data = (
            (text[1] or text[2] or "").encode()
            if text
            else pair[2].encode()
            if pair
            else bytes(int(count[1]) if count else 0)
        )
        position = int(at[1]) if at else int(pair[1]) if pair else self.segment.end
        await self.segment.write(position, data, _TIMES)
        self.wanted += data

    @verb(r"seals?|merges?", "seal")
    async def seal(self, clause: Clause) -> None:
        clause.skip(r"segment|chunks")
        await self.segment.seal()

    @verb(r"reads?", "read (0, 5)")
    async def read(self, clause: Clause) -> Any:
        place = clause.pair()
        return Done(await self.segment.read(*(place or (0, self.segment.end))))

    @verb(r"deletes?|destroys?", "delete")
    async def delete(self, clause: Clause) -> None:
        clause.skip(r"segment|chunks?|objects?")
        await self.segment.destroy()
        self.wanted = b""


async def _chunks(given: Given) -> Any:
    world = ChunkWorld()
    opened = await _put_objects(world, given)
    if opened is not None and not opened.holds("ok"):
        return {"open": opened, "error": opened}
    starts = [] if opened is None else [(chunk.start, chunk.size) for chunk in world.segment.chunks]
    begin = await world.facts()
    extra: dict[str, Any] = {
        "new_size": begin["new_size"],
        "open": opened,
        "listed": _listed(given, starts),
    }
    steps, commits = given.steps(), given.take("commits", [])
    if isinstance(given.take("commit", None), str):
        steps = [f"commit {given.take('commit')}", *steps]
    for at, text in commits:
        await world.segment.write(at, str(text).encode(), _TIMES)
        world.wanted += str(text).encode()
    if given.has("reads"):
        extra["reads"] = [Done(await world.segment.read(*place)) for place in given.take("reads")]
    if given.has("bad_commit"):
        at, text = given.take("bad_commit")
        refused = await attempt(world.segment.write(at, text.encode(), _TIMES), SegmentWriteError)
        error = getattr(refused, "error", None)
        extra |= {"error": refused, "bad_commit": refused}
        extra["position"] = (
            error.position if isinstance(error, IllegalOffsetError) else world.segment.end
        )
    if given.has("chunks") and "listed_after" in given.stated:
        steps = [*steps, "delete"]
    elif given.has("chunks") and any(
        name.startswith(("sealed", "commit_after_seal")) for name in given.stated
    ):
        steps = [*steps, "seal", "open again"]
    course = await run_steps(world, steps)
    if world.segment.is_sealed:
        extra["commit_after_seal"] = await attempt(
            world.segment.write(world.segment.end, b"x", _TIMES), SegmentSealedError
        )
    if "listed_after" in given.stated:
        extra["listed_after"] = len((await ChunkedSegment.open(world.store, "s")).chunks)
    course.extra = extra
    return course


async def _put_objects(world: ChunkWorld, given: Given) -> Any:
    """Put objects that are there before the segment is opened; return how the opening went."""
    for name in given.take("segments", []):
        world.store.put(f"s/segment/{name}", b"x")
    chunks = given.take("chunks", None)
    for start, data in _chunks_of(chunks):
        world.store.put(f"s/chunk/chunk-{start}", data)
    world.wanted = b"".join(data for _, data in sorted(_chunks_of(chunks)))

    async def opened() -> None:
        world.segment = await ChunkedSegment.open(world.store, "s")

    return await attempt(opened(), ChunkLayoutError)


def _chunks_of(said: Any) -> list[tuple[int, bytes]]:
    if isinstance(said, list):
        return [_chunk_of(chunk, bytes([number % 250 + 1])) for number, chunk in enumerate(said)]
    names = [int(number) for number in re.findall(r"chunk-(\d+)", str(said or ""))]
    size = re.search(r"(\d+ (?:bytes|[KMG]i?B))", str(said or ""))
    if ".." in str(said) and len(names) > 2:
        names = [*range(names[0], names[-1] + 1, names[1] - names[0])]
    return [(start, bytes(size_of(size[1]) if size else 1)) for start in reversed(names)]


def _chunk_of(said: Any, filler: bytes) -> tuple[int, bytes]:
    """Return position and bytes of a chunk: {at, size}, [0, hello], "chunk-0 of 5 bytes"."""
    if isinstance(said, Mapping):
        names = ("at", "position", "start", "offset", "name")
        at, content = next(said[name] for name in names if name in said), said.get("data")
        at = int(re.findall(r"\d+", str(at))[-1])
        content = said.get("size", said.get("length", 1)) if content is None else content
    elif isinstance(said, str):
        found = re.match(r"chunk-(\d+)(?:,? (?:of|with)? ?)?(.*)", said)
        if found is None:
            raise ValueError(f"chunk is {said!r}, expected such as chunk-0 of 5 bytes")
        at, content = int(found[1]), found[2] or "1 byte"
        content = size_of(content) if re.match(r"\d+ ", content) else content
    else:
        at, content = said
    if isinstance(content, int):
        return at, filler * content
    return at, str(content).encode()


def _listed(given: Given, found: list[tuple[int, int]]) -> Words:
    wanted = sorted((start, len(data)) for start, data in _chunks_of(given.take("chunks", None)))

    def fits(said: re.Match[str]) -> bool:
        numbers = numbers_in(said[0])
        return (
            numbers[0] == len(found)
            and found == wanted
            and all(size == numbers[-1] for _, size in found)
        )

    return Words(
        {
            r"\d+, in order of position, each with name, start = number in its name,"
            r" size \d+": fits,
            r"\d+(?: chunks?)?(?:, in order)?(?:, size \d+)?": lambda m: (
                numbers_in(m[0])[0] == len(found) and found == wanted
            ),
        }
    )


SHAPES = (
    Shape(
        "rocketmq level",
        _level,
        "level",
        "tiered|reads_tiered",
        "TieredMessageStoreTest",
        keys="on_disk in_memory in_mem",
    ),
    Shape(
        "rocketmq smallest offset",
        _min_offset,
        "local tiered",
        "min|min_offset",
        "TieredMessageStoreTest",
    ),
    Shape(
        "rocketmq time of two tiers",
        _time_of_tiers,
        "level local tiered",
        "time|timestamp|found",
        "TieredMessageStoreTest",
        keys="on_disk in_memory in_mem",
    ),
    Shape(
        "rocketmq query of two tiers",
        _split_query,
        "local_earliest ranges",
        "hits|found|asked",
        "TieredMessageStoreTest",
        keys="tiered_hits local_hits",
    ),
    Shape("rocketmq topic deletion", _topics, fits=_are_topic_steps),
    Shape(
        "rocketmq topic filter",
        _topic_filter,
        "topics black_list | topics excluded",
        "filtered|tiered|stays_local",
        "MessageStoreTopicFilterTest",
        fits=_are_topics,
    ),
    Shape(
        "rocketmq metadata file",
        _metadata_reload,
        "topics queues | topics segments",
        "all_found.*|json_shape|number_keys|files|topics|queues|segments",
        "DefaultMetadataStoreTest",
    ),
    Shape(
        "rocketmq chunks",
        _chunks,
        "commit | commits | segments | chunks",
        "new_size|start|end|size|read.*|after_.*|open|error|position|sealed|chunk.*|commit.*|"
        "listed.*|undeleted",
        "S3FileSegmentTest|TieredStorageS3ClientTest",
        keys="reads bad_commit steps then change",
        world=ChunkWorld,
        words="chunk|seal",
    ),
)

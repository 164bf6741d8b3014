"""Shapes of RocketMQ's flat files: segments that follow each other, and the files of a queue."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from streammeta.brokers.rocketmq.formats import message
from streammeta.brokers.rocketmq.formats.metadata import MetadataTable, Queue, SegmentMetadata
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.message_file import CommitLogFile, MessageFile
from streammeta.brokers.rocketmq.segments.file_segment import AppendResult, SegmentReadError
from streammeta.brokers.rocketmq.segments.flat_file import FlatFile, NoSegmentError
from tests.conformance.rocketmq_files import NOW_MS, QUEUE, FileWorld
from tests.conformance.rocketmq_formats import plain
from tests.conformance.rocketmq_segments import bytes_of, time_of
from tests.conformance.shape_facts import AnyOf, Done, Keyed, Refused
from tests.conformance.shape_sentences import Clause, ordinal_of, range_of
from tests.conformance.shape_vocabulary import Answer, Given, Shape, take_steps
from tests.conformance.shape_worlds import World, run_steps, verb


class FlatFileWorld(World):
    """One flat file; a commit log rolls by age and knows its smallest queue offset."""

    errors = (OSError, ValueError, NoSegmentError)

    def __init__(self, files: FileWorld, max_size: int | None, *, is_commit_log: bool) -> None:
        self.files = files
        self._max_size = max_size
        self._is_commit_log = is_commit_log
        self._min_size = 0
        self.file = self._new()
        self.appended = bytearray()

    def _new(self) -> FlatFile:
        if self._is_commit_log:
            return self.files.commit_log(self._max_size)
        return self.files.flat_file(self._max_size)

    async def facts(self) -> Mapping[str, Any]:
        file = self.file
        noted = self.files.keeper.table.segments_of(file.path, file.kind)
        found: dict[str, Any] = {
            "min": file.min_offset,
            "commit": file.commit_offset,
            "append": file.append_offset,
            "min_offset": file.min_offset,
            "commit_offset": file.commit_offset,
            "append_offset": file.append_offset,
            "min_timestamp": file.min_timestamp_ms,
            "max_timestamp": file.max_timestamp_ms,
            "segments": len(file.segments),
            "files": len(file.segments),
            "bases": [segment.base_offset for segment in file.segments],
            "metadata": [
                {
                    "base": segment.base_offset,
                    "size": segment.size,
                    "seal_timestamp": segment.seal_ms,
                    "status": int(segment.status),
                    "begin_timestamp": segment.begin_ms,
                    "end_timestamp": segment.end_ms,
                }
                for segment in noted
            ],
        }
        if isinstance(file, CommitLogFile):
            first = await file.min_queue_offset()
            found |= dict.fromkeys(
                ("queue_offset", "min_queue_offset", "first_message_offset"), first
            )
        return found

    def conditions(self, sentence: str) -> str:
        found = re.search(r",?\s*(?:with )?(?:a )?minimum size (?:= |of )?(\d+)", sentence)
        if found is not None:
            self._min_size = int(found[1])
            sentence = sentence.replace(found[0], "")
        return sentence

    @verb(
        r"(?:tries|try|tried) (?:to |a )?roll(?:ing)?|(?:tries|try|tried)(?= with interval)|"
        r"roll(?:s|ing)? by age",
        "try to roll with interval 1 ms",
    )
    async def try_roll(self, clause: Clause) -> Any:
        size = clause.number(r"minimum size (?:= |of )?(\d+)", self._min_size)
        interval = clause.number(r"(?:an )?interval (?:of )?(\d+)(?: ms)?", 0)
        assert isinstance(self.file, CommitLogFile)
        return await self.file.try_roll(interval, size)

    @verb(r"waits?|sleeps?|passes?", "wait 2 ms")
    def wait(self, clause: Clause) -> None:
        found = clause.take(r"(\d+) ?(ms|s|milliseconds|seconds|minutes|min|hours|h)?")
        assert found is not None
        unit = {
            "s": 1000,
            "seconds": 1000,
            "minutes": 60_000,
            "min": 60_000,
            "hours": 3_600_000,
            "h": 3_600_000,
        }
        self.files.clock.now_ms += int(found[1]) * unit.get(found[2] or "ms", 1)

    @verb(r"asks? for|who (?:takes|accepts)", "ask for the segment to write")
    def ask(self, clause: Clause) -> None:
        clause.skip(r"(?:the )?(?:segment|file) to write(?: \(.*\))?")
        self.file.writable()

    @verb(
        r"expires?|expiry|clean(?:s|ed)?(?: up)?|destroy(?:s)? (?:the )?expired|delete(?:s)? "
        r"(?:what is )?(?:older|expired)",
        "expire before 3",
    )
    async def expire(self, clause: Clause) -> Any:
        clause.skip(r"segments?|files?")
        dropped = await self.file.expire(clause.number(r"(-?\d+)"))
        clause.skip(r"\((?:empty|nothing|kept|dropped).*\)|older than")
        return AnyOf(Done(), dropped)

    @verb(r"destroys?|deletes?|removes?", "destroy")
    async def destroy(self, clause: Clause) -> None:
        clause.skip(r"files?|flat|segments?|whole")
        await self.file.destroy()

    @verb(r"rolls?|rolling|rolled", "roll at 500")
    async def roll(self, clause: Clause) -> None:
        at = clause.take(r"(?:(?:at|to|from) )?(?:offset )?(\d+)")
        if self.file.segments and not at and not self.file.writable().closed:
            await self.file.seal()
        await self.file.roll(int(at[1]) if at else self.file.append_offset)

    @verb(r"opens?|reopens?|recovers?|loads?|restarts?", "open again")
    async def open(self, clause: Clause) -> None:
        clause.skip(r"files?|flat|from (?:the )?metadata")
        self.file = self._new()
        await self.file.open()

    @verb(
        r"writes? (?:the )?metadata|flush(?:es)? (?:the )?metadata|notes? (?:the )?metadata",
        "write metadata",
    )
    async def save(self, clause: Clause) -> None:
        clause.skip(r"segment|file")
        await self.files.keeper.save()

    @verb(r"commits?|committed|flush(?:es)?", "commit")
    async def commit(self, clause: Clause) -> Any:
        return await self.file.commit()

    @verb(r"reads?", "read (500, 200)")
    async def read(self, clause: Clause) -> Any:
        clause.skip(r"before the commit|across (?:the )?(?:two )?segments?")
        place = clause.pair()
        if place is None:
            length = clause.number(r"(\d+) bytes")
            place = clause.number(r"(?:at|from|offset) (\d+)"), length
        return Done(await self.file.read(*place))

    @verb(r"appends?|adds?|writes?", "append 1000 bytes with timestamp 2")
    async def append(self, clause: Clause) -> Any:
        at = time_of(clause, self.files.clock.now_ms, clause.index)
        results = [await self.file.append(one, 1 if at is None else at) for one in bytes_of(clause)]
        bad = [result for result in results if result is not AppendResult.SUCCESS]
        return Refused(None, bad[0].value) if bad else Done("SUCCESS")

    @verb(r"close[sd]?|seals?|sealed", "close")
    def close(self, clause: Clause) -> None:
        clause.skip(r"segments?|files?")
        self.file.writable().close()


async def _flat_file(given: Given) -> Any:
    kind = given.take("type", None)
    has_messages = given.has("messages")
    size = given.first("max_size", "segment_size", default=1 << 20)
    steps = take_steps(given, FlatFileWorld) if not has_messages else []
    said = " ".join(map(str, steps))
    is_log = kind == "COMMIT_LOG" or (kind is None and ("MSG" in said or has_messages))
    world = FlatFileWorld(FileWorld(), size, is_commit_log=is_log)
    if is_log:
        await world.file.roll(0)
    if given.has("messages"):
        return await _min_offset(given, world)
    return await run_steps(world, steps)


async def _min_offset(given: Given, world: FlatFileWorld) -> Any:
    """Append messages of a range of queue offsets, roll where it is said, and expire twice."""
    said = given.take("messages")
    offsets = range_of(said)
    roll = re.search(r"rolled (?:before|at) (\d+)", said)
    timed = re.search(
        r"timestamp (?:=|is|equals) (?:the )?(?:queue )?offset(?: ([+*]) (\d+))?", said
    )
    if offsets is None:
        raise ValueError(f"messages are {said!r}, expected a range of queue offsets")
    file = world.file
    assert isinstance(file, CommitLogFile)
    facts: dict[str, Any] = {"before_first_commit": await file.min_queue_offset()}
    for offset in offsets:
        if roll is not None and offset == int(roll[1]):
            await file.seal()
            await file.roll(file.append_offset)
        number = int(timed[2]) if timed and timed[2] else 0
        at = offset * number if timed and timed[1] == "*" else offset + number
        await file.append(plain(offset), at if timed else NOW_MS)
    await file.commit()
    facts["after_commit"] = await file.min_queue_offset()
    if given.has("expire_before"):
        before = given.take("expire_before")
        for name, limit in zip(
            ("after_expiry", "after_second_expiry"),
            before if isinstance(before, list) else [before] * 2,
            strict=False,
        ):
            await file.expire(limit)
            facts[name] = await file.min_queue_offset()
    return {**facts, "segments": len(file.segments), "end": file.append_offset}


# ---- queues ----


async def append_stored(file: MessageFile, offset: int, stored_ms: int, tags_code: int = 0) -> None:
    data = plain(offset, stored_ms)
    if await file.append(data, tags_code) is not AppendResult.SUCCESS:
        raise AssertionError(f"offset {offset} was not appended")


class QueueWorld(World):
    """The two flat files of a queue."""

    errors = (OSError, ValueError, NoSegmentError, SegmentReadError)

    def __init__(self, files: FileWorld, file: MessageFile) -> None:
        self.files = files
        self.file = file
        self._is_held = False

    async def facts(self) -> Mapping[str, Any]:
        file, log = self.file, self.file.commit_log
        return {
            "first_message_offset": await log.min_queue_offset(),
            "first_offset": await file.first_offset(),
            "min_offset": await file.first_offset(),
            "commit_log": [log.min_offset, log.commit_offset, log.append_offset],
            "consume_queue": [file.min_offset, file.commit_offset, file.append_offset],
            "timestamps": [log.min_timestamp_ms, log.max_timestamp_ms],
            "min_timestamp": log.min_timestamp_ms,
            "max_timestamp": log.max_timestamp_ms,
            "messages": file.commit_offset - file.min_offset,
            "committed": file.commit_offset,
            "end": file.append_offset,
            "initialised": file.is_initialised,
        }

    def conditions(self, sentence: str) -> str:
        held = re.compile(
            r"(?:while |with )?(?:the )?commit (?:lock|permit) (?:is )?(?:held|taken)", re.I
        )
        self._is_held = held.search(sentence) is not None
        if self._is_held:
            self.file.commit_log.writable().hold()
        return held.sub("", sentence)

    async def calm(self) -> None:
        if self._is_held:
            self.file.commit_log.writable().release()
        self._is_held = False

    @verb(r"appends?|adds?", "append MSG 5 times")
    async def append(self, clause: Clause) -> Any:
        found = clause.take(r"\(?(?:with )?queue offset (\d+)(?: inside)?\)?")
        stored = clause.take(r"\(?(?:with )?(?:store )?timestamp (\d+)\)?")
        clause.skip(r"\bMSG\b")
        counted = clause.take(r"\b(\d+) messages?")
        for _ in range(int(counted[1]) if counted else clause.times()):
            await append_stored(
                self.file, int(found[1]) if found else 6, int(stored[1]) if stored else 11
            )
        return Done("SUCCESS")

    @verb(
        r"(?:release[sd]?|gives? back|unlocks?)(?: the)?(?: commit)?(?: lock)?", "release the lock"
    )
    def release(self, clause: Clause) -> None:
        """Do nothing: a lock is held for one sentence."""

    @verb(r"commits?|committed", "commit")
    async def commit(self, clause: Clause) -> Any:
        clause.skip(r"commit log|consume queue")
        return await self.file.commit()

    @verb(r"opens?|reopens?|recovers?|loads?|restarts?", "open again")
    async def open(self, clause: Clause) -> None:
        self.file = self.files.message_file(self.file.queue)
        await self.file.open()

    @verb(r"expires?|cleans?(?: up)?", "expire before 12")
    async def expire(self, clause: Clause) -> None:
        await self.file.expire(clause.number(r"(\d+)"))

    @verb(r"destroys?|deletes?", "destroy")
    async def destroy(self, clause: Clause) -> None:
        clause.skip(r"files?|flat|queue")
        await self.file.destroy()

    @verb(r"reads?", "read 2 messages at 100")
    async def read(self, clause: Clause) -> Any:
        place = clause.pair()
        if place is None:
            count = clause.number(r"(\d+) messages?", 1)
            place = clause.number(r"(?:at|from|offset) (\d+)"), count
        return [message.queue_offset_of(decoded.data) for decoded in await self.file.read(*place)]


async def _queue(given: Given) -> Any:
    files = FileWorld()
    world = QueueWorld(files, files.message_file())
    first = given.first("first_offset", "init_offset", "offset", default=0)
    await world.file.init_offset(first)
    lock = given.take("commit_lock", None)
    said = given.take("messages", None)
    steps = take_steps(given, QueueWorld)
    if said is not None:
        commits = [] if any("commit" in str(step) for step in steps) else ["commit"]
        steps = [f"append {said}", *commits, *steps]
    elif lock is not None:
        steps = ["append MSG", f"commit while the commit lock is {lock}", *steps]
    course = await run_steps(world, steps)

    async def message_at(offset: int) -> Any:
        (one,) = await world.file.read(offset, 1)
        return {
            "size": len(one.data),
            "queue_offset": message.queue_offset_of(one.data),
            "physical_offset": message.physical_offset_of(one.data),
            "store_timestamp": message.store_timestamp_of(one.data),
        }

    for name in given.stated:
        found = re.fullmatch(r"message_at_(\d+)", str(name))
        if found is not None:
            course.extra[str(name)] = await message_at(int(found[1]))
    return course


async def _by_time(given: Given) -> Any:
    file = FileWorld().message_file()
    stored = given.take("store_timestamps")
    await file.init_offset(given.first("first_offset", default=stored[0][0] if stored else 0))
    for offset, at in stored:
        await append_stored(file, offset, at)
    await file.commit()
    queries = given.first("queries", "times")
    upper = [await file.offset_at(query, upper=True) for query in queries]
    lower = [await file.offset_at(query) for query in queries]
    times = {r"timestamp_at_(\d+)": lambda found: dict(stored).get(int(found[1]), -1)}
    return Answer(Keyed({"lower": lower, "upper": upper}, times), lower)


class StoreWorld(World):
    """The files of all queues of a broker, which a restart finds by their metadata."""

    def __init__(self, queues: Sequence[Sequence[Any]] = ()) -> None:
        self.files = FileWorld()
        self.open: dict[Queue, MessageFile] = {}
        self._named = [Queue(QUEUE.broker, str(topic), int(number)) for topic, number in queues]

    async def facts(self) -> Mapping[str, Any]:
        return {"files": len(self.open), "queues": [queue.queue_id for queue in self.open]}

    @verb(r"creates?|adds?|computes?", "create the files of 4 queues")
    async def create(self, clause: Clause) -> None:
        clause.skip(r"files?|flat|queues?|topic")
        count = clause.number(r"(\d+|\b(?:two|three|four|five)\b)", len(self._named))
        for number in range(count):
            queue = (
                self._named[number]
                if number < len(self._named)
                else Queue(QUEUE.broker, QUEUE.topic, number)
            )
            self.open[queue] = self.files.message_file(queue)
            await self.open[queue].init_offset(0)

    @verb(
        r"(?:shuts? ?down|stops?)(?:,| and)? ?(?:then )?(?:loads?|starts?|restarts?|opens?)?|"
        r"restarts?|loads?|reopens?|recovers?|opens?|starts?",
        "restart",
    )
    async def restart(self, clause: Clause) -> None:
        clause.skip(r"shut ?down|store|files?|again|loads?")
        paths = {path for path, _, _ in self.files.keeper.table.segments}
        queues = [
            Queue(broker, topic, int(number))
            for broker, topic, number in (path.split("/") for path in sorted(paths))
        ]
        self.open = {queue: self.files.message_file(queue) for queue in queues}
        for file in self.open.values():
            await file.open()

    @verb(r"destroys?|deletes?|removes?", "destroy queues 1 and 2")
    async def destroy(self, clause: Clause) -> None:
        found = clause.take(r"(?:files? of )?queues? ((?:\d+(?:, | and )*)+)")
        named = re.findall(r"[(\[] ?\w+, ?(\d+) ?[)\]]", clause.rest)
        numbers = [int(number) for number in re.findall(r"\d+", found[1])] if found else None
        if named:
            numbers, clause.rest = [int(number) for number in named], ""
        clause.skip(r"all|everything|store|files?|queues?")
        for queue in [file for file in self.open if numbers is None or file.queue_id in numbers]:
            await self.open.pop(queue).destroy()


async def _store(given: Given) -> Any:
    world = StoreWorld(given.take("queues", []))
    return await run_steps(world, take_steps(given, StoreWorld))


def _sorted_segments(given: Given) -> Any:
    """Return segments in the order of the metadata's list."""
    table = MetadataTable()
    listed = given.first("base_offsets", "bases", "segments")
    for base in [file["base_offset"] if isinstance(file, Mapping) else file for file in listed]:
        table.put_segment(SegmentMetadata("p", SegmentType.COMMIT_LOG, base))
    found = [segment.base_offset for segment in table.segments_of("p", SegmentType.COMMIT_LOG)]
    return Answer({"sorted": found, "order": found, "base_offsets": found, "bases": found}, found)


def _same_queues(given: Given) -> Any:
    files = FileWorld()
    queues = [
        files.message_file(Queue("broker", topic, number)).queue
        for topic, number in given.take("queues")
    ]
    equal = [queue == queues[0] for queue in queues]
    hashes = [hash(queue) == hash(queues[0]) for queue in queues]

    def compare(found: re.Match[str], values: Sequence[Any]) -> bool:
        first, second = ((ordinal_of(found[at]) or 1) - 1 for at in (1, 2))
        return bool(values[first] == values[second])

    words = r"(first|second|third)_(?:and|equals?|is|same_as|to)?_?(first|second|third)(?:_equal)?"
    every = list(map(hash, queues))
    return Keyed(
        {"equal": equal, "equal_to_first": equal, "same_hash": hashes},
        {
            rf"(?:equal_|same_)?{words}": lambda found: compare(found, queues),
            rf"(?:same_hash_|hash_){words}|{words}_hash": lambda found: compare(found, every),
        },
    )


SHAPES = (
    Shape(
        "rocketmq flat file",
        _flat_file,
        "max_size steps | steps | messages expire_before | segment_size steps | type steps",
        "metadata|segments.*|first|min.*|max_timestamp|commit.*|append.*|rolled|after_.*|"
        "before_.*|read.*|bases",
        "FlatAppendFileTest|FlatCommitLogFileTest",
        keys="then change",
        world=FlatFileWorld,
        words=r"\broll at|\bbytes|segments?|metadata|expire",
    ),
    Shape(
        "rocketmq queue",
        _queue,
        "first_offset messages | first_offset steps | commit_lock",
        r"before_.*|after_.*|message_at_\d+|timestamps|commit.*|consume_queue.*|first_.*|"
        ".*offset|read",
        "FlatMessageFileTest",
        keys="init_offset offset then change",
        world=QueueWorld,
        words=r"\bMSG\b|consume queue",
    ),
    Shape(
        "rocketmq queue by time",
        _by_time,
        "store_timestamps queries | store_timestamps times",
        "lower|upper",
        "FlatMessageFileTest",
        keys="first_offset",
    ),
    Shape(
        "rocketmq store",
        _store,
        "steps | queues steps",
        "files|queues",
        "FlatFileStoreTest",
        keys="then",
        world=StoreWorld,
        words=r"\bqueues\b|files of",
    ),
    Shape(
        "rocketmq segments in order",
        _sorted_segments,
        "base_offsets | bases",
        "sorted|order|bases|base_offsets",
        "FileSegmentTest",
    ),
    Shape("rocketmq queues", _same_queues, "queues", "equal.*|same_hash", "FlatMessageFileTest"),
)

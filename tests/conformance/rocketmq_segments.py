"""Shape of a segment of RocketMQ's files: appends, commits that fail in all ways, reads."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from streammeta.brokers.rocketmq.formats.consume_queue import (
    ITEM_SIZE,
    ConsumeQueueItem,
    encode_item,
)
from streammeta.brokers.rocketmq.formats.message import physical_offset_of
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.message_file import DEFAULT_SIZES
from streammeta.brokers.rocketmq.segments.file_segment import (
    AppendResult,
    FileSegment,
    SegmentReadError,
)
from streammeta.brokers.rocketmq.segments.storage import SegmentWriteError, TimeBounds
from tests.conformance.rocketmq_files import NOW_MS
from tests.conformance.rocketmq_formats import plain
from tests.conformance.shape_facts import AnyOf, Done, Fact, Number, Refused, Words
from tests.conformance.shape_sentences import Clause, numbers_in, range_of
from tests.conformance.shape_vocabulary import Answer, Given, Shape, take_steps
from tests.conformance.shape_worlds import Several, World, attempt, run_steps, verb
from tests.kit.memory_stores import MemorySegment

UNKNOWN_TIME = 2**63 - 1


class UncertainSegment(MemorySegment):
    """A segment whose writes fail on demand, after or before they have happened."""

    def __init__(self, data: bytes = b"") -> None:
        super().__init__(data)
        self.fails: Exception | None = None
        self.size_known = True
        self.during: Callable[[], Awaitable[None]] | None = None
        self.tried: tuple[int, bytes] = (0, b"")

    async def size(self) -> int | None:
        return await super().size() if self.size_known else None

    async def write(self, position: int, data: bytes, times: TimeBounds) -> None:
        self.tried = position, data
        during, self.during = self.during, None
        if during is not None:
            await during()
        if self.fails is not None:
            raise self.fails
        await super().write(position, data, times)

    def land(self, size: int | None = None) -> None:
        """Store what a failed write sent, up to a size of the segment."""
        position, data = self.tried
        self.data[position:] = data
        if size is not None:
            del self.data[size:]


def bytes_of(clause: Clause, index: int = 0) -> list[bytes]:
    """Take what an append is of: MSG, names of messages, items, or a number of bytes."""
    queue_offset = clause.take(r"\(?(?:with )?queue offset (\d+)\)?")
    if clause.take(r"\bMSG\b"):
        return [plain(int(queue_offset[1]) if queue_offset else 6)] * clause.times()
    counted_items = clause.take(
        r"\b(?:(\d+|one|two|three|four|five) )?(?:consume queue )?\bitems?\b"
    )
    if counted_items is not None:
        items = numbers_in(counted_items[1])[0] if counted_items[1] else clause.times()
        found = clause.take(
            r"\(?(?:at |of |with )?(?:commit log )?offsets? ((?:\d+(?:, | and )?)+)\)?"
        )
        offsets = numbers_in(found[1].replace(" and ", ",")) if found else [*range(items)]
        clause.skip(r"\b(?:three|two|four|\d+)\b")
        return [encode_item(ConsumeQueueItem(offset, 123, 3)) for offset in offsets]
    sized = clause.take(
        r"\b(\d[\d_]*)[ -]?(?:bytes?|B)\b|\b(\d[\d_]*)\b(?! (?:times|items?|messages?))"
    )
    if sized is not None:
        return [bytes(int((sized[1] or sized[2]).replace("_", "")))] * clause.times()
    if clause.take(r"\b(?:an? |the )?(?:empty|zero) (?:buffer|bytes?)\b"):
        return [b""]
    named = re.findall(r"(?<![A-Za-z])[A-Z](?![A-Za-z])", clause.rest)
    if named:
        clause.rest = re.sub(r"(?<![A-Za-z])[A-Z](?![A-Za-z])", " ", clause.rest)
        return [plain()] * len(named)
    counted = clause.take(
        r"\b(\d+|one|two|three|four|five) messages?\b|\bmessages?\b|\bempty\b|\bbuffers?\b"
    )
    count = numbers_in(counted[0]) if counted else []
    return [plain()] * (count[0] if count else clause.times())


def time_of(clause: Clause, now_ms: int, index: int = 0) -> int | None:
    """Take the time of what is appended: a number, "now", "i" of a loop; None if none is said."""
    found = clause.take(
        r"\(?(?:all |the |last |each )?(?:with |and |at |store )*(?:store "
        r")?time(?:stamp)?s? ?=? ?(now|i\b|-?\d+)\)?"
    )
    if found is None:
        return 0 if clause.take(r"\bold\b") else now_ms if clause.take(r"\bnow\b") else None
    return now_ms if found[1] == "now" else index if found[1] == "i" else int(found[1])


class SegmentWorld(World):
    """One segment over a backend that fails on demand."""

    errors = (OSError, SegmentReadError, SegmentWriteError)

    def __init__(self, segment: FileSegment, storage: UncertainSegment) -> None:
        self.segment = segment
        self.storage = storage
        self._meanwhile = ""
        self._is_held = False

    async def facts(self) -> Mapping[str, Any]:
        segment = self.segment
        times = segment.min_timestamp_ms, segment.max_timestamp_ms
        return {
            "base_offset": segment.base_offset,
            "commit_position": segment.commit_position,
            "append_position": segment.append_position,
            "commit_offset": AnyOf(
                segment.commit_offset,
                Words(
                    {
                        "append offset|as append_offset": segment.commit_offset
                        == segment.append_offset
                    }
                ),
            ),
            "append_offset": segment.append_offset,
            "min_timestamp": _time(times[0]),
            "max_timestamp": _time(times[1]),
            "timestamps": [_time(time_) for time_ in times],
            "closed": segment.closed,
            "need_commit": segment.needs_commit,
            "needs_commit": segment.needs_commit,
            "max_size": UNKNOWN_TIME if segment.max_size is None else segment.max_size,
            "size": len(self.storage.data),
            "stored_size": len(self.storage.data),
            "type": segment.kind.name,
            **await self._contents(),
        }

    async def _contents(self) -> dict[str, Any]:
        start, end = self.segment.start_size, self.segment.commit_position
        step = 123 if self.segment.kind is SegmentType.COMMIT_LOG else ITEM_SIZE
        parts = [bytes(self.storage.data[at : at + step]) for at in range(start, end, step)]
        whole = [part for part in parts if len(part) == step]
        if self.segment.kind is SegmentType.COMMIT_LOG:
            offsets = [physical_offset_of(message) for message in whole]
        else:
            offsets = [int.from_bytes(message[:8], "big") for message in whole]
        names = (
            "physical_offsets",
            "physical_offsets_read",
            "offsets_read",
            "commit_log_offsets",
            "commit_log_offsets_read",
        )
        return dict.fromkeys(names, offsets) | {"messages": len(whole), "items": len(whole)}

    def conditions(self, sentence: str) -> str:
        held = re.compile(
            r"(?:while |with )?(?:the )?commit (?:lock|permit) (?:is )?(?:held|taken)|while "
            r"(?:it is )?locked",
            re.I,
        )
        self._is_held = held.search(sentence) is not None
        if self._is_held:
            self.segment.hold()
        sentence = held.sub("", sentence)
        meanwhile = re.compile(
            r"\(?meanwhile,? (\w+) is appended\)?|\(?(\w+) (?:is )?appended meanwhile\)?", re.I
        )
        found = meanwhile.search(sentence)
        self._meanwhile = (found[1] or found[2]) if found else ""
        sentence = meanwhile.sub("", sentence)
        fails = re.compile(
            r"(?:while |but |and )?(?:the )?(?:upload|backend|store|write)s? (?:hangs and "
            r"then fails|reports (?:a )?failure|fails?|throws|raises)"
            r"(?: an?| with)*(?: (?P<kind>io|runtime|\w+exception))?(?: (?:error|exception))?"
            r"(?: without (?:a )?position)?(?: (?:that "
            r")?(?:carries|with|at)?(?: the)? ?position (?P<position>\d+))?",
            re.I,
        )
        error = fails.search(sentence)
        if error is not None:
            position = int(error["position"]) if error["position"] else None
            self.storage.fails = SegmentWriteError("told to fail", position)
        sentence = fails.sub("", sentence)
        unknown = re.compile(
            r"(?:with |while )?(?:the )?(?:real )?size (?:is )?unknown(?: \(-1\))?", re.I
        )
        self.storage.size_known = unknown.search(sentence) is None
        sentence = unknown.sub("", sentence)
        return re.sub(
            r"(?:the )?upload (?:recovers|works|succeeds)(?: again)?\s*[:,;]?",
            "",
            sentence,
            flags=re.I,
        )

    async def calm(self) -> None:
        self.storage.fails = self.storage.during = None
        self.storage.size_known = True
        if self._is_held:
            self.segment.release()
        self._is_held = False

    @verb(
        r"(?:found|lie|are) (?:stored|in (?:the )?(?:storage|backend|store))|landed",
        "A is found in storage",
    )
    def find_stored(self, clause: Clause) -> None:
        clause.skip(r"(?:both )?\b[A-Z]\b(?:\s*(?:and|,)\s*\b[A-Z]\b)*")
        size = clause.take(r"\(?(?:real )?size (\d+)\)?")
        self.storage.land(int(size[1]) if size else None)

    @verb(r"buffers waiting|waiting buffers", "buffers waiting = 3")
    def fill_buffers(self, clause: Clause) -> None:
        self.segment.max_buffers = clause.number(r"= (\d+)")
        clause.skip(r"=? ?(?:the )?(?:configured )?maximum")
        for _ in range(self.segment.max_buffers):
            self.segment.append(plain(), 0)

    @verb(r"append position|position", "append position = 2000 - 123 + 1")
    def move(self, clause: Clause) -> None:
        found = clause.take(r"= ([\d +-]+)")
        assert found is not None
        self.segment.append_position = sum(
            int(number.replace(" ", "")) for number in re.findall(r"[+-]? ?\d+", found[1])
        )

    @verb(r"appended|appends?|adds?|puts?|writes? into", "append MSG twice (timestamp 0)")
    def append(self, clause: Clause) -> Any:
        at = time_of(clause, NOW_MS, clause.index)
        results = [
            self.segment.append(data, NOW_MS if at is None else at) for data in bytes_of(clause)
        ]
        last = results[-1] if results else AppendResult.SUCCESS
        return Done("SUCCESS") if last is AppendResult.SUCCESS else Refused(None, last.value)

    @verb(r"commits?|committed|flush", "commit")
    async def commit(self, clause: Clause) -> Any:
        clause.skip(r"with (?:nothing|no buffers?)(?: waiting)?|without (?:any )?buffers?|nothing")
        counted = clause.take(r"\b(two|three|four|five|\d+)\b")
        count = numbers_in(counted[0])[0] if counted else clause.times()
        rest = list[bool]()

        async def meanwhile() -> None:
            if self._meanwhile:
                self.segment.append(plain(), NOW_MS)
            for _ in range(count - 1):
                rest.append(await self.segment.commit())

        self.storage.during = meanwhile
        done = [await self.segment.commit(), *rest]
        self.storage.during = None
        return Several([Done(value) for value in done]) if count > 1 else done[0]

    @verb(r"reads?", "read (100, 369)")
    async def read(self, clause: Clause) -> Any:
        if clause.take(r"\b(?:each|every|all|back)\b.*"):
            return Done()
        place = clause.pair()
        if place is None:
            length = clause.number(r"(\d+)(?: bytes)")
            place = clause.number(r"(?:at|from|position) (\d+)"), length
        return await self.segment.read(*place)

    @verb(r"closed?|closes|shut ?down|seals?|sealed", "close")
    def close(self, clause: Clause) -> None:
        self.segment.close()

    @verb(r"destroys?|deletes?", "destroy")
    async def destroy(self, clause: Clause) -> None:
        await self.storage.destroy()
        self.segment.close()


def _time(value: int) -> Fact:
    return AnyOf(
        Number(value),
        Words(
            {
                "now|the time of the append": value == NOW_MS,
                "unknown|none|long max": value == UNKNOWN_TIME,
            }
        ),
    )


def _new(given: Mapping[str, Any]) -> SegmentWorld:
    start, size = given["start"], given["max_size"]
    storage = UncertainSegment(bytes(start))
    segment = FileSegment(given["kind"], given["base"], storage, size, given["buffers"], start)
    return SegmentWorld(segment, storage)


def _kind_of(given: Given) -> str:
    """Return the kind of a segment that says none: bytes that are no messages are items."""
    said = str([given.peek("steps"), given.peek("append")])
    return "CONSUME_QUEUE" if "bytes" in said and "MSG" not in said else "COMMIT_LOG"


async def _segment(given: Given) -> Any:
    kind = SegmentType[given.first("type", "segment_type", default=_kind_of(given))]
    committed = given.take("committed", None)
    span = range_of(str(committed).replace("positions", "")) if committed is not None else None
    start = given.first("start_size", "init_position", "committed_size", default=0)
    made = {
        "kind": kind,
        "base": given.take("base_offset", 0),
        "max_size": given.first("max_size", default=_max_size(kind)),
        "start": span[-1] if span is not None else start,
        "buffers": given.first("max_buffers", "buffers", default=10_000),
    }
    world = _new(made)
    if given.has("cases"):
        given.steps()
        return await _cases(given.take("cases"), made)
    if given.has("uploads"):
        return await _uploads(given, made)
    if given.has("reads"):
        given.steps()
        found = [
            await attempt(world.segment.read(*place), OSError, SegmentReadError)
            for place in given.take("reads")
        ]
        return Answer({"reads": found, "results": found}, found)
    steps = take_steps(given, SegmentWorld)
    return await run_steps(world, steps)


async def _uploads(given: Given, made: Mapping[str, Any]) -> Answer:
    """Commit once for each way in which an upload ends, on a segment of its own."""
    found, mismatches = list[Any](), []
    appends = str(given.first("messages", "appended", default="MSG twice"))
    for said in given.take("uploads"):
        course = await run_steps(
            _new(made), [f"append {appends}", f"commit, upload {_failing(str(said))}"]
        )
        found.append(course.moments[-1])
        mismatches += course.mismatches
    return Answer({"commits": found, "results": found, "outcomes": found}, found, mismatches)


def _failing(said: str) -> str:
    return (
        said if re.search(r"fails|throws|raises|recovers|works|reports", said) else f"throws {said}"
    )


async def _cases(cases: list[str], made: Mapping[str, Any]) -> Answer:
    """Run each case on a segment of its own; without a call at its end it appends."""
    found, mismatches = list[Any](), []
    for said in cases:
        world = _new(made)
        world.segment.append(plain(), 0)
        course = await run_steps(world, [said])
        mismatches += course.mismatches
        if not course.moments or course.moments[-1].verb not in ("append", "commit", "read"):
            course = await run_steps(world, ["append MSG"])
        found.append(course.moments[-1])
    return Answer({"results": found, "outcomes": found, "commits": found}, found, mismatches)


def _max_size(kind: SegmentType) -> int | None:
    sizes = {
        SegmentType.COMMIT_LOG: DEFAULT_SIZES.commit_log,
        SegmentType.CONSUME_QUEUE: DEFAULT_SIZES.consume_queue,
    }
    return sizes.get(kind)


def _sizes(given: Given) -> Any:
    said = given.take("types")
    kinds = [SegmentType[name] for name in ([said] if isinstance(said, str) else said)]
    found = [UNKNOWN_TIME if _max_size(kind) is None else _max_size(kind) for kind in kinds]
    facts = {"max_size": found[0] if isinstance(said, str) else found, "max_sizes": found}
    return Answer(facts | {"sizes": found}, found[0] if isinstance(said, str) else found)


SHAPES = (
    Shape(
        "rocketmq segment",
        _segment,
        "base_offset type | steps | base_offset steps | base_offset start_size | "
        "base_offset cases | committed reads | type init_position | type steps | "
        "base_offset reads | base_offset uploads | uploads | start_size steps | "
        "init_position steps",
        "(commit|append)_(position|offset).*|.*timestamps?|closed|need.*|commits?|"
        "physical_offsets.*|after_.*|before_.*|.*_while_.*|offsets_read|reads?|size",
        "FileSegmentTest|MemoryFileSegmentTest",
        keys="segment_type max_size committed_size messages appended then max_buffers buffers "
        "change",
        world=SegmentWorld,
        words=r"\bMSG\b|upload|commit lock|buffers waiting|items?",
    ),
    Shape("rocketmq segment sizes", _sizes, "types", "max_sizes?|sizes", "FileSegmentTest"),
)

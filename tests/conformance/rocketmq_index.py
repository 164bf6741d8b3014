"""Shapes of RocketMQ's key index: one file, its bytes and queries, and the life of all files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from streammeta.brokers.rocketmq.formats import key_index
from streammeta.brokers.rocketmq.formats.key_index import (
    ALL_TIMES,
    IndexHeader,
    IndexItem,
    LocalIndex,
    PutResult,
    TimeRange,
    query_compacted,
)
from streammeta.brokers.rocketmq.key_index_service import IndexSizes, KeyIndexService
from tests.conformance.rocketmq_files import open_index
from tests.conformance.shape_facts import AnyOf, Done, Keyed, Number, Words
from tests.conformance.shape_sentences import Clause, numbers_in, range_of
from tests.conformance.shape_vocabulary import Answer, Given, Shape, take_steps
from tests.conformance.shape_worlds import World, run_steps, verb
from tests.kit.memory_stores import MemorySegmentStore, MemoryShelf
from tests.kit.waiting import ManualClock

BEGIN_MS = 1_700_000_000_000
SLOTS, ITEMS = 5, 20
"""Sizes of the sources' tests, where a scenario says none."""
KEY, TOPIC = "MessageKey", "TopicTest"


class IndexFile:
    """An index file that is filled, compacted and read again."""

    def __init__(self, begin_ms: int, slots: int, items: int) -> None:
        self.local = LocalIndex(begin_ms, slots, items)
        self.compacted: bytes | None = None
        self.results: list[Any] = []
        self.status = "UNSEALED"

    def put(self, topic: str | None, keys_: list[str] | None, **fields: int) -> PutResult:
        values = {
            "topic_id": 1,
            "queue_id": 0,
            "offset": 100,
            "size": 10,
            "timestamp": self.local.begin_ms + 1000,
        } | fields
        return self.local.put(
            topic,
            values["topic_id"],
            values["queue_id"],
            keys_,
            values["offset"],
            values["size"],
            values["timestamp"],
        )

    async def query(self, topic: str, key: str, limit: int, times: TimeRange = ALL_TIMES) -> int:
        if self.compacted is None:
            return len(self.local.query(topic, key, limit, times))
        data = self.compacted

        async def read(position: int, length: int) -> bytes:
            return data[position : position + length]

        begin = IndexHeader.decode(data).begin_ms
        return len(await query_compacted(read, self.local.slots, topic, key, limit, begin, times))

    def compact(self) -> None:
        self.compacted = self.local.compact()
        is_sealed = IndexHeader.decode(self.compacted).magic == key_index.END_MAGIC
        self.status = "SEALED" if is_sealed else "UNSEALED"

    def reopen(self) -> None:
        self.local = LocalIndex.decode(self.local.encode(), self.local.slots, self.local.max_items)

    def fill(self, said: Any) -> None:
        """Put what a scenario says: maps, or words such as "19 times the same key"."""
        for item in said if isinstance(said, list) else [said]:
            if isinstance(item, Mapping):
                fields = {
                    name: value
                    for name, value in item.items()
                    if name in ("topic_id", "queue_id", "offset", "size", "timestamp")
                }
                self.results.append(
                    self.put(item.get("topic", TOPIC), item.get("keys"), **fields).value
                )
            else:
                self.results.append(self._put_words(str(item)))

    def _put_words(self, said: str) -> Any:
        before = self.local.item_count
        if re.search(r"topics? (?:is )?(?:none|null|empty)", said):
            return self.put(None, [KEY]).value
        if re.search(r"keys? (?:is |are |set )?(?:an? )?(?:none|null|empty)", said):
            done = self.put(TOPIC, None if "empty" not in said else [])
            stored = "nothing" if self.local.item_count == before else "something"
            return AnyOf(done.value, f"{done.value} ({stored} stored)")
        topics = re.search(r"topics?,? (\w+?)(\d+) ?\.\. ?(?:[A-Za-z]*)(\d+)", said)
        if topics is not None:
            return self._put_topics(said, topics)
        keys_ = re.search(r"keys? (\w*?)(\d+) ?\.\. ?(?:[A-Za-z]*)(\d+)", said)
        if keys_ is not None:
            results = [
                self.put(TOPIC, [f"{keys_[1]}{at}"])
                for at in range(int(keys_[2]), int(keys_[3]) + 1)
            ]
            return _each(results)
        count = re.match(r"(\S+) (?:times|puts|keys|messages|items)", said) or re.match(
            r"(\S+) (?:more )?times?", said
        )
        if said.startswith(("once more", "one more")) or count is None:
            return self.put(TOPIC, [KEY]).value
        differs = re.search(r"different|distinct|own key", said) is not None
        number = numbers_in(count[1])[0]
        return _each([self.put(TOPIC, [f"{KEY}{at}" if differs else KEY]) for at in range(number)])

    def _put_topics(self, said: str, topics: re.Match[str]) -> Any:
        rest = said.replace(topics[0], "")
        key = re.search(r"key (\w+)", rest)
        counted = numbers_in(rest.replace(key[0], "") if key else rest)
        results = [
            self.put(f"{topics[1]}{topic}", [key[1] if key else KEY])
            for _ in range(counted[0] if counted else 1)
            for topic in range(int(topics[2]), int(topics[3]) + 1)
        ]
        return _each(results)


def _each(results: list[PutResult]) -> Any:
    names = "/".join(dict.fromkeys(result.value for result in results))
    return AnyOf(names, f"{names} each", [result.value for result in results])


def _times(query: Given) -> TimeRange:
    found = query.first("times", "time_range", "between")
    if found is not None:
        return TimeRange(*found)
    begin, end = query.first("begin", "from"), query.first("end", "to")
    return TimeRange(
        begin if begin is not None else ALL_TIMES.begin_ms,
        end if end is not None else ALL_TIMES.end_ms,
    )


async def _file(given: Given) -> Any:
    slots = given.first("slots", default=SLOTS)
    items = given.first("items", "max_items", default=ITEMS)
    index = IndexFile(given.first("created_ms", "begin_timestamp", default=BEGIN_MS), slots, items)
    is_new = index.local.end_ms == 0
    said = " ".join(map(str, given.steps()))
    index.fill(given.take("puts", []))
    counts = [index.local.item_count]
    if re.search(r"reopen|open|restart|recover|load|read again", said):
        index.reopen()
        counts.append(index.local.item_count)
    local_size = len(index.local.encode())
    compacts = re.search(r"compact|upload|seal", said) is not None
    stated = index.local.header()
    if compacts:
        index.compact()
    facts = _file_facts(given, index, stated)
    facts["item_count"] = AnyOf(stated.item_count, counts)
    facts |= {
        "item_count_before": counts[0],
        "item_count_after_open": counts[-1],
        "item_count_after_reopen": counts[-1],
    }
    facts["item_count_after_restart"] = facts["item_count_after_recovery"] = counts[-1]
    ends = stated.end_ms == (BEGIN_MS + 1000 if stated.item_count else 0)
    facts["end_timestamp"] = AnyOf(
        Number(stated.end_ms),
        Words({r"that of the puts(?:; 0 before the first)?": ends and is_new}),
    )
    if given.has("query") or given.has("queries"):
        queries = given.each("queries") if given.has("queries") else [given.within("query")]
        found = [
            await index.query(
                query.take("topic", TOPIC),
                query.take("key", KEY),
                query.first("max", "limit", default=64),
                _times(query),
            )
            for query in queries
        ]
        facts["items"] = facts["found"] = facts["count"] = (
            found if given.has("queries") else found[0]
        )
    data = index.compacted or b""
    size_fits = len(data) == 28 + slots * 8 + stated.item_count * 28
    facts |= {
        "uploaded_size_equals_compacted_size": bool(data) and size_fits,
        "local_size": local_size,
    }
    return Answer(Keyed(facts), facts.get("items", index.results))


def _file_facts(given: Given, index: IndexFile, header: IndexHeader) -> dict[str, Any]:
    local = index.local
    data = local.encode()
    end = key_index.item_position(local.slots, local.item_count + 1)
    compact = local.compact()
    sealed = IndexHeader.decode(compact).magic == key_index.END_MAGIC
    status = (
        "SEALED"
        if sealed and (index.compacted or "compacted" in str(given.path) or "hex" in given.stated)
        else index.status
    )
    return {
        "file_size": len(data),
        "used_part_hex": data[:end].hex(),
        "rest": Words({"zeros?": not any(data[end:])}),
        "hex": AnyOf(data.hex(), compact.hex()),
        "compacted_hex": compact.hex(),
        "compacted_size": len(compact),
        "size": AnyOf(len(compact), len(data)),
        "status": status,
        "used_slots": header.used_slots,
        "item_count": header.item_count,
        "begin_timestamp": header.begin_ms,
        "magic": hex(header.magic),
        "results": index.results,
        "full": local.is_full,
    }


def _constants(given: Given) -> Any:
    slots = given.take("slots", SLOTS)
    text = key_index.index_key(given.take("topic", TOPIC), given.take("key", KEY))
    local = LocalIndex(0, slots, 20)
    value = key_index.key_hash(text)

    class Positions(Keyed):
        def find(self, key: str, stated: object) -> Any:
            return (
                key_index.slot_position(int(key))
                if self is slot
                else key_index.item_position(slots, int(key))
            )

    slot, item = Positions({}), Positions({})
    return Keyed(
        {
            "key_string": text,
            "hash": value,
            "slot": value % slots,
            "header_size": key_index.HEADER_SIZE,
            "slot_size": key_index.slot_position(1) - key_index.slot_position(0),
            "item_size": key_index.item_position(slots, 1) - key_index.item_position(slots, 0),
            "slot_position": slot,
            "item_position": item,
            "begin_magic": hex(local.header().magic),
            "end_magic": hex(IndexHeader.decode(local.compact()).magic),
            "new_status": "UNSEALED" if local.header().magic == key_index.BEGIN_MAGIC else "SEALED",
            "status_after_compaction": "SEALED"
            if IndexHeader.decode(local.compact()).magic == key_index.END_MAGIC
            else "UNSEALED",
        }
    )


def _index_item(given: Given) -> Any:
    """Look at the bytes of one item, which the file of its own has as its last one."""
    names = ("hash", "topic_id", "queue_id", "offset", "size")
    if given.has("hex"):
        data = bytes.fromhex(given.take("hex"))
    else:
        values = [given.first(name, "hash_code" if name == "hash" else name) for name in names]
        seconds = given.first("time_diff", "time_diff_seconds", "seconds")
        previous = given.first("previous_item", "item_index", "previous", default=0)
        index = LocalIndex(0, 1, max(2, previous + 2))
        filler = IndexItem(0, 0, 0, 0, 0, 0)
        index._items = [
            *((filler, 0) for _ in range(previous)),
            (IndexItem(values[0], values[1], values[2], values[3], values[4], seconds), previous),
        ]
        at = key_index.item_position(1, previous + 1)
        data = index.encode()[at : at + 32]
    numbers = [
        int.from_bytes(data[at : at + size], "big", signed=True)
        for at, size in ((0, 4), (4, 4), (8, 4), (12, 8), (20, 4), (24, 4), (28, 4))
    ]
    facts = dict(zip((*names, "time_diff", "previous_item"), numbers, strict=True))
    facts |= {"item_index": numbers[-1], "time_diff_seconds": numbers[5], "hash_code": numbers[0]}
    return {
        **facts,
        "hex": data.hex(),
        "local_hex": data.hex(),
        "compacted_hex": data[:28].hex(),
        "item_size": len(data),
        "compacted_size": 28,
    }


# ---- all files ----


class ServiceWorld(World):
    """All index files of a broker."""

    def __init__(self, slots: int, items: int) -> None:
        self.store, self.shelf = MemorySegmentStore(), MemoryShelf()
        self._sizes = IndexSizes(slots, items)
        self.clock = ManualClock(BEGIN_MS)
        self.service: KeyIndexService
        self.firsts: list[int] = []

    async def open_again(self) -> None:
        self.service = await open_index(
            self.store, self.shelf, self._sizes, lambda: self.clock.now_ms
        )
        self.firsts.append(self.service.begins_ms[0])

    def fill(self, keys_: list[str], offset: int = 0, step: int = 1) -> None:
        for at, key in enumerate(keys_):
            done = self.service.put(TOPIC, 100, 0, [key], offset + at * step, 10, BEGIN_MS + 1000)
            if done is not PutResult.SUCCESS:
                raise AssertionError(f"put {at}: {done}")

    async def facts(self) -> Mapping[str, Any]:
        statuses = [status.name for status in self.service.statuses]
        same = len(set(self.firsts)) == 1
        return {
            "files": len(statuses),
            "status": statuses,
            "statuses": statuses,
            "first_status": statuses[0],
            "uploaded": statuses.count("UPLOAD"),
            "sealed": statuses.count("SEALED"),
            "first_key_same_after_each_restart": same,
            "first_key_same": same,
        }

    def conditions(self, sentence: str) -> str:
        return re.sub(r"(compacts?) and uploads?", r"\1", sentence)

    @verb(r"restarts?|reopens?|opens? again|shut ?down|stop", "restart")
    async def restart(self, clause: Clause) -> None:
        clause.skip(r"(?:and )?opens?|starts?|service")
        await self.service.flush()
        await self.open_again()

    @verb(r"waits?|until", "wait until the first file is uploaded")
    async def wait(self, clause: Clause) -> None:
        clause.skip(r"until .*|(?:the )?first file (?:is )?uploaded")
        await self.service.compact_oldest()

    @verb(r"runs?(?: the service)?|starts?", "run the service")
    async def run_all(self, clause: Clause) -> None:
        clause.skip(r"service|until nothing (?:is left )?to (?:do|compact)|background")
        while await self.service.compact_oldest():
            pass

    @verb(r"compacts?|uploads?", "compact and upload the oldest sealed file")
    async def compact(self, clause: Clause) -> Any:
        clause.skip(r"(?:the )?(?:oldest|first|next)?(?: sealed)? files?")
        clause.skip(r"uploads?|sealed|oldest")
        done = False
        for _ in range(clause.times()):
            done = await self.service.compact_oldest()
        return AnyOf(
            Done() if done else False,
            Words({"nothing to compact(?:[;,] states unchanged)?": not done}),
            done,
        )

    @verb(r"asks?", "ask again")
    async def ask(self, clause: Clause) -> Any:
        before = self.service.statuses
        done = await self.service.compact_oldest()
        same = before == self.service.statuses
        return Words(
            {"nothing to compact(?:[;,] states unchanged)?": not done and same, "nothing": not done}
        )

    @verb(r"puts?|adds?", "put 20 keys")
    def put(self, clause: Clause) -> None:
        self.fill([str(at) for at in range(clause.number(r"(\d+)(?: keys| puts| times)?"))])
        clause.skip(r"keys?|times")

    @verb(r"expires?|deletes?|destroys?|drops?", "expire before 1700000001001")
    async def expire(self, clause: Clause) -> Any:
        newest = BEGIN_MS + 1000
        said = clause.take(r"(?:the )?end of the (?:first|oldest)(?: file)?(?: ([+-]) ?(\d+))?")
        if said is not None:
            limit = newest + (int(f"{said[1]}{said[2]}") if said[1] else 0)
        else:
            limit = clause.number(r"(\d+)")
        return AnyOf(Done(), await self.service.expire(limit))


def _expanded(then: list[Any]) -> list[str]:
    """Cut what is done into single steps: one that is done twice is two."""
    found = list[str]()
    for said in then:
        for part in re.split(r",\s*(?:then\s+)?|;\s*", str(said)):
            if re.fullmatch(r"(?:twice|again|\w+ times)", part.strip()) and found:
                found += (
                    [found[-1]] * (2 if part == "twice" else 1)
                    if part == "again"
                    else [found[-1]] * ((numbers_in(part) or [2])[0] - 1)
                )
            elif part.strip():
                found.append(re.sub(r"^then ", "", part.strip()))
    return found


async def _service(given: Given) -> Any:
    items = given.first("items_per_file", "items", default=ITEMS)
    world = ServiceWorld(given.take("slots", SLOTS), items)
    await world.open_again()
    for number, part in enumerate(_puts(given.take("puts"))):
        world.fill(*part) if isinstance(part, tuple) else world.fill(
            [str(at) for at in range(part)]
        )
        del number
    course = await run_steps(world, _expanded(take_steps(given, ServiceWorld)))
    states = world.service.statuses
    course.extra["third_time"] = course.moments[-1] if len(course.moments) > 2 else None
    if given.has("query_key") or given.has("query"):
        key = (
            given.take("query_key") if given.has("query_key") else given.within("query").take("key")
        )
        limits = given.first("max", "limits", default=[64])
        times = given.first("times", "time_range")
        span = TimeRange(*times) if times else ALL_TIMES
        found = [
            len(await world.service.query(TOPIC, str(key), limit, span))
            for limit in (limits if isinstance(limits, list) else [limits])
        ]
        course.extra["found"] = found if isinstance(limits, list) else found[0]
    assert states == world.service.statuses
    return course


def _puts(said: Any) -> list[Any]:
    """Return counts of puts, or runs of keys with their first offset."""
    if isinstance(said, int):
        return [said]
    rounds = re.search(r"(\w+) (?:rounds|files|times)", str(said))
    span = range_of(str(said)[rounds.end() :] if rounds else str(said))
    if span is None:
        return [numbers_in(str(said))[0]]
    step = re.search(r"offset (\d+) ?\* ?round", str(said))
    count = numbers_in(rounds[1])[0] if rounds else 1
    keys_ = [str(at) for at in span]
    return [(keys_, (int(step[1]) if step else 1000) * number) for number in range(count)]


SHAPES = (
    Shape(
        "rocketmq index file",
        _file,
        "slots items puts | puts query | puts queries | puts created_ms | puts slots | "
        "puts then | puts steps | puts",
        "file_size|used_part_hex|rest|hex|status|results|used_slots|item_count.*|.*_timestamp|"
        "items|found|uploaded_size.*|compacted_.*|magic|full",
        "IndexStoreFileTest|IndexStoreFile",
        keys="max_items begin_timestamp change",
    ),
    Shape(
        "rocketmq index constants",
        _constants,
        "topic key",
        "key_string|hash|slot.*|.*_size|.*_position|.*_magic|.*status.*",
        "IndexStoreFileTest",
        keys="slots",
    ),
    Shape(
        "rocketmq index item",
        _index_item,
        "topic_id queue_id offset size hash | topic_id queue_id offset size hash_code | hex",
        "hash.*|topic_id|queue_id|offset|size|time_diff.*|previous_item|item_.*|hex|.*_hex|"
        "compacted_size",
        "IndexItemTest",
        keys="time_diff time_diff_seconds seconds previous_item item_index previous",
    ),
    Shape(
        "rocketmq index files",
        _service,
        "items_per_file puts | puts query_key | puts then | puts steps",
        "files.*|status.*|found|third_time|first_.*|.*_restart|after_.*|uploaded|sealed",
        "IndexStoreServiceTest",
        keys="items slots query max limits change times time_range",
        world=ServiceWorld,
        words="compact|upload",
    ),
)

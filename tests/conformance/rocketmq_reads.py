"""Shapes of RocketMQ's dispatch from a local store, and of reads by offset, tag, time and key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streammeta.brokers.rocketmq.dispatch import Dispatcher, GroupCommit, LocalMessage
from streammeta.brokers.rocketmq.fetch import Fetcher, FetchResult, FetchStatus, ReadAhead
from streammeta.brokers.rocketmq.formats.message import java_hash
from streammeta.brokers.rocketmq.formats.metadata import Queue
from streammeta.brokers.rocketmq.message_file import StoredMessage
from tests.conformance.rocketmq_files import QUEUE, FileWorld, open_index
from tests.conformance.rocketmq_flat_files import append_stored
from tests.conformance.rocketmq_formats import plain
from tests.conformance.shape_facts import AnyOf, Keyed
from tests.conformance.shape_sentences import Clause, number_of
from tests.conformance.shape_vocabulary import Answer, Given, Shape
from tests.conformance.shape_worlds import World, run_steps, verb

STORED_MS = 11
"""Time at which messages were stored, where a scenario says none."""
UNKNOWN = Queue("broker", "Unknown", 0)


@dataclass
class LocalStore:
    """A local queue whose messages are all alike but for their offset."""

    min_offset: int
    max_offset: int
    key: str = ""
    stored_ms: int = STORED_MS

    def offset_at(self, timestamp_ms: int) -> int:
        return self.min_offset if timestamp_ms <= self.stored_ms else self.max_offset

    def read(self, offset: int, count: int) -> Sequence[LocalMessage]:
        keys_ = frozenset({self.key} - {""})
        end = min(offset + count, self.max_offset)
        return [LocalMessage(plain(at, self.stored_ms), 0, keys_) for at in range(offset, end)]


class DispatchWorld(World):
    """One queue, dispatched from a local store."""

    errors = (OSError, ValueError)

    def __init__(self, local: LocalStore, dispatcher: Dispatcher) -> None:
        self.local = local
        self.dispatcher = dispatcher
        self._held: Any = None

    @classmethod
    async def begin(
        cls, local: LocalStore, groups: GroupCommit, *, filtered: bool
    ) -> DispatchWorld:
        files = FileWorld()
        files.clock.now_ms = local.stored_ms
        dispatcher = await files.dispatcher(local, groups, is_filtered=filtered)
        world = cls(local, dispatcher)
        world._clock = files.clock
        return world

    _clock: Any = None

    async def facts(self) -> Mapping[str, Any]:
        file, context = self.dispatcher.file, self.dispatcher.context
        return {
            "consume_queue": [file.min_offset, file.commit_offset, file.append_offset],
            "min_offset": file.min_offset,
            "committed": file.commit_offset,
            "end": file.append_offset,
            "context": None if context is None else {"end_offset": context.end_offset},
            "context_kept": None if context is None else {"end_offset": context.end_offset},
            "holes": [list(hole) for hole in self.dispatcher.holes],
            "initialised": file.is_initialised,
            "indexed": len(
                await self.dispatcher.index.query(QUEUE.topic, self.local.key or "uk", 1 << 20)
            ),
        }

    def conditions(self, sentence: str) -> str:
        held = re.compile(
            r"(?:but |while |with )?(?:the )?commit (?:lock|permit) (?:is |was )?(?:held|"
            r"taken)(?: (?:in|during|before) (?:the )?(?P<which>\w+)(?: dispatch)?)?",
            re.I,
        )
        if held.search(sentence) is not None and self.dispatcher.file.commit_log.segments:
            self._held = self.dispatcher.file.commit_log.writable()
            self._held.hold()
        return held.sub("", sentence)

    @verb(r"releases?|gives? back", "release the commit lock")
    def release(self, clause: Clause) -> None:
        clause.skip(r"(?:commit )?(?:lock|permit)")
        if self._held is not None:
            self._held.release()

    @verb(r"dispatch(?:es|ed)?|runs?|moves?", "first dispatch (forced)")
    async def dispatch(self, clause: Clause) -> Any:
        clause.skip(r"\b(?:first|second|third|fourth|last)\b")
        is_due = clause.take(r"not forced|unforced|without force") is None
        clause.skip(r"\(?forced\)?|dispatch(?:es)?|rounds?")
        done = False
        for _ in range(clause.times()):
            done = await self.dispatcher.dispatch(force=is_due)
        return done

    @verb(r"commits?", "commit")
    async def commit(self, clause: Clause) -> Any:
        return await self.dispatcher.commit()

    @verb(r"waits?|passes?|later", "wait 31 s")
    def wait(self, clause: Clause) -> None:
        found = clause.take(r"(\d+) ?(ms|s|seconds|minutes|min)?")
        assert found is not None
        self._clock.now_ms += int(found[1]) * {"ms": 1, "s": 1000, "seconds": 1000}.get(
            found[2] or "ms", 60_000
        )

    @verb(
        r"local (?:queue|store) (?:is|has|becomes|now)|local (?=min|max|range)|loses",
        "local queue is 150..300",
    )
    def change(self, clause: Clause) -> None:
        span = clause.take(r"\[?(\d+)(?:\.\.|, ?)(\d+)\]?")
        least, most = (
            clause.take(r"min(?:imum)?(?: is| =)? (\d+)"),
            clause.take(r"max(?:imum)?(?: is| =)? (\d+)"),
        )
        below = clause.take(r"(?:everything |all )?(?:below|before) (\d+)")
        if span is not None:
            self.local.min_offset, self.local.max_offset = int(span[1]), int(span[2])
        if least or below:
            self.local.min_offset = int((least or below)[1])  # type: ignore[index]
        if most:
            self.local.max_offset = int(most[1])

    @verb(r"destroys?|deletes?", "destroy the flat file")
    async def destroy(self, clause: Clause) -> None:
        clause.skip(r"flat|files?|queue")
        await self.dispatcher.file.destroy()
        self.dispatcher.context = None


async def _dispatch(given: Given) -> Any:
    queue = given.within("local_queue")
    said = str(given.take("message", ""))
    key = re.search(r"key (\w+)", said)
    stored = given.first("store_timestamp", default=STORED_MS)
    local = LocalStore(queue.take("min"), queue.take("max"), key[1] if key else "uk", stored)
    limits = given.within("group_commit", {})
    names = {"count": "count", "size": "size", "size_bytes": "size", "timeout_ms": "timeout_ms"}
    names |= {"bytes": "size", "max_count": "count", "max_size": "size"}
    groups = GroupCommit(**{names[name]: limits.take(name) for name in names if limits.has(name)})
    filtered = given.first("filtered", "topic_filtered", default=False)
    world = await DispatchWorld.begin(local, groups, filtered=filtered)
    change = given.take("change", "")
    steps = given.steps(DispatchWorld)
    if change:
        steps = _held_steps([step for step in steps if step != change], change)
    course = await run_steps(world, steps)
    index = world.dispatcher.index

    async def found(limit: int) -> int:
        return len(await index.query(QUEUE.topic, local.key, limit))

    limits_ = sorted(
        {
            int(number)
            for key_ in _keys_of(given.stated)
            for number in re.findall(r"found_max_(\d+)", key_)
        }
    )
    counts = {f"found_max_{limit}": await found(limit) for limit in limits_}
    course.extra["index"] = {"key": local.key, **counts}
    if change and "lock" in change:
        held = [moment for moment in course.moments if moment.facts["context"] is not None]
        kept = held[0].facts if held else {"context": None, "indexed": 0}
        course.extra["context_kept"] = (
            kept["context"] if not kept["indexed"] else {"end_offset": -1}
        )
        course.extra["context_after_success"] = course.end["context"]
    return course


def _keys_of(stated: Any) -> list[str]:
    if not isinstance(stated, Mapping):
        return []
    return [*map(str, stated), *(key for value in stated.values() for key in _keys_of(value))]


def _held_steps(steps: list[Any], change: str) -> list[Any]:
    """Return the steps of another scenario with the circumstance that is said about one of them."""
    which = re.search(r"in the (first|second|third|last)", change)
    number = {"first": 0, "second": 1, "third": 2, "last": -1}[which[1]] if which else 1
    steps = list(steps)
    own = [at for at, step in enumerate(steps) if "dispatch" in str(step)]
    at = own[min(number, len(own) - 1)]
    steps[at] = f"{steps[at]} while the commit lock is taken"
    return steps


# ---- reads ----


async def _fetcher(given: Given, limits: ReadAhead | None, tags: str) -> Fetcher:
    """Return a fetcher of one queue that holds messages of the offsets given."""
    first, end = given.take("stored")
    stored = given.first("store_timestamp_of_all", "store_timestamp", default=STORED_MS)
    queries = given.peek("queries")
    asked = [query.get("key") for query in queries or [] if isinstance(query, Mapping)]
    key = str(given.first("key", default="") or (asked or [""])[0] or "")
    world = FileWorld()
    file = world.message_file()
    await file.init_offset(first)
    index = await open_index(world.store)
    for offset in range(first, end):
        await append_stored(file, offset, stored, _tags_code(tags, offset, first))
        if key:
            place = file.commit_log.append_offset - len(plain())
            index.put(QUEUE.topic, 7, QUEUE.queue_id, [key], place, len(plain()), stored)
    await file.commit()
    return Fetcher({QUEUE: file}, index, lambda: world.clock.now_ms, limits)


def _tags_code(rule: str, offset: int, first: int) -> int:
    """Return what a rule such as "offset % 2", "offset - 100", "number" says of an offset."""
    rule = rule.strip()
    nested = re.fullmatch(r"\((.+)\) ?(//|/|%|\*) ?(\d+)", rule)
    if nested is not None:
        inner, by = _tags_code(nested[1], offset, first), int(nested[3])
        return inner * by if nested[2] == "*" else inner % by if nested[2] == "%" else inner // by
    found = re.fullmatch(r"(?:queue )?(offset|number|index|i)(?: ?([%+*-]|//?) ?(\d+))?", rule)
    if found is None:
        return int(rule) if re.fullmatch(r"-?\d+", rule) else 0
    value = offset if found[1] == "offset" else offset - first
    amount = int(found[3] or 0)
    return {
        "%": value % (amount or 1),
        "-": value - amount,
        "+": value + amount,
        "*": value * amount,
        "/": value // (amount or 1),
        "//": value // (amount or 1),
    }.get(found[2] or "+", value)


def _fetch_facts(result: FetchResult) -> Any:
    codes = [message.tags_code for message in result.messages]
    return Keyed(
        {
            "status": result.status.value,
            "min": result.min_offset,
            "max": result.max_offset,
            "next": result.next_offset,
            "messages": len(result.messages),
            "count": len(result.messages),
            "offsets": [message.queue_offset for message in result.messages],
            "codes": codes,
            "bytes": sum(len(message.data) for message in result.messages),
        }
    )


def _limits(one: Given) -> ReadAhead:
    size = one.first("bytes", "size")
    amount = 1 << 24
    if size is not None:
        found = re.match(r"(\w+) messages?(?: ([+-]) (\d+))?", str(size))
        extra = int(found[3]) if found and found[3] else 0
        amount = (
            int(size)
            if found is None
            else number_of(found[1]) * len(plain()) + (extra if found[2] != "-" else -extra)
        )
    return ReadAhead(one.take("count", 4096), amount)


async def _fetch(given: Given) -> Any:
    tags = str(given.take("tags_code", ""))
    facts: dict[str, Any] = {}
    listed: list[Any] = []
    if given.has("thresholds"):
        request = given.within("request")
        for clause in given.each("thresholds"):
            fetcher = await _fetcher(given, _limits(clause), tags)
            listed.append(
                _fetch_facts(
                    await fetcher.fetch(QUEUE, request.take("offset"), request.take("max", 32))
                )
            )
        return Answer({"results": listed}, listed)
    threshold = given.within("read_ahead", {})
    fetcher = await _fetcher(given, _limits(threshold), tags)
    if given.has("requests") or given.has("request"):
        single = not given.has("requests")
        asked = [given.within("request")] if single else given.each("requests")
        listed = [_fetch_facts(await _request(fetcher, offset, given)) for offset in asked]
        facts["results"] = listed
        if single:
            return Answer(listed[0], listed)
    if given.has("batch") or given.has("batch_size"):
        facts |= await _batches(fetcher, given)
    facts |= await _by_time(fetcher, given)
    if given.has("queries"):
        queries = given.each("queries")
        counts = [await _hits(fetcher, query) for query in queries]
        found = counts if len(counts) > 1 else AnyOf(counts, counts[0])
        return Answer(Keyed({**facts, "found": found, "messages": found}), counts)
    if given.has("key") or given.has("query_key"):
        key, limits = given.first("key", "query_key"), given.first("max", "limits", default=[64])
        many = limits if isinstance(limits, list) else [limits]
        items = [len(await fetcher._index.query(QUEUE.topic, key, count)) for count in many]
        facts["found"] = facts["messages"] = items if isinstance(limits, list) else items[0]
        listed = items
    return Answer(Keyed(facts), listed or facts)


async def _hits(fetcher: Fetcher, query: Given) -> int:
    """Return how many messages a query by key finds."""
    key, limit = str(query.take("key")), query.first("max", "limit", default=64)
    topic = query.take("topic", QUEUE.topic)
    return len(await fetcher._index.query(topic, key, limit))


async def _request(fetcher: Fetcher, one: Given, given: Given) -> FetchResult:
    queue = UNKNOWN if one.take("queue", "") == "unknown" else QUEUE
    offset, limit = one.take("offset", 0), one.first("max", "max_count", "count", default=32)
    codes = one.take("codes", given.first("codes"))
    if codes is None:
        return await fetcher.fetch(queue, offset, limit)
    return await fetcher.read_matching(fetcher.file(queue), offset, limit, codes)


async def _batches(fetcher: Fetcher, given: Given) -> dict[str, Any]:
    """Read to the end in batches of one size."""
    size, (first, end) = given.first("batch", "batch_size"), given.take("stored")
    offset, sizes = given.first("from", "start", default=first), list[int]()
    until = given.first("until", "to", default=end)
    while offset < until:
        result = await fetcher.fetch(QUEUE, offset, size)
        sizes.append(len(result.messages))
        offset = result.next_offset
    same = sizes[0] if len(set(sizes)) == 1 else sizes
    each = dict.fromkeys(("each", "per_read", "messages_each"), same)
    reads = dict.fromkeys(("reads", "times", "rounds"), len(sizes))
    return {**each, **reads, "messages": sum(sizes), "next": offset, "end": offset}


async def _by_time(fetcher: Fetcher, given: Given) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if given.has("time_of"):
        facts["times"] = [await _time_of(fetcher, str(said)) for said in given.take("time_of")]
    if given.has("offset_by_time"):
        asked = given.take("offset_by_time")
        facts["lower"] = [await fetcher.offset_at(QUEUE, time_ms) for time_ms in asked]
        facts["upper"] = [await fetcher.offset_at(QUEUE, time_ms, upper=True) for time_ms in asked]
        facts["unknown_queue"] = await fetcher.offset_at(UNKNOWN, asked[0])
    return facts


async def _time_of(fetcher: Fetcher, said: str) -> int:
    number = re.search(r"-?\d+", said)
    queue = UNKNOWN if "unknown" in said else QUEUE
    if number is None:
        return await fetcher.earliest_timestamp(queue)
    return await fetcher.timestamp_of(queue, int(number[0]))


def _two_steps(given: Given) -> Answer:
    said = given.take("messages")
    tags = re.findall(r"\b(?!tags?\b)[A-Z]\w*\d+\b", said) if isinstance(said, str) else list(said)
    messages = [StoredMessage(at, plain(at), java_hash(tag)) for at, tag in enumerate(tags)]
    result = FetchResult(FetchStatus.FOUND, 0, len(tags), len(tags), messages)
    found = []
    for clause in given.each("filters"):
        code, content = (
            clause.first("by_code", "code", default="none"),
            clause.first("by_message", "message", default="none"),
        )
        names = code if isinstance(code, list) else [code]
        codes = None if code in ("none", None) else {java_hash(name) for name in names}
        accepts = {"none": None, "all": lambda _: True, "nothing": lambda _: False}[
            str(content).lower()
        ]
        found.append(len(result.filter(codes, accepts)))
    return Answer({"messages": found, "found": found}, found)


SHAPES = (
    Shape(
        "rocketmq dispatch",
        _dispatch,
        "local_queue",
        "consume_queue|index|context.*|committed|end|holes|initialised|after_.*",
        "MessageStoreDispatcherImplTest",
        keys="message steps then change group_commit filtered topic_filtered store_timestamp",
        world=DispatchWorld,
        words="dispatch",
    ),
    Shape(
        "rocketmq fetch",
        _fetch,
        "stored",
        "status|next|messages.*|times|lower|upper|unknown_queue|found|reads|each|results",
        "MessageStoreFetcherImplTest",
        keys="requests request thresholds tags_code codes time_of offset_by_time "
        "store_timestamp_of_all store_timestamp key query_key max limits batch batch_size "
        "from start until to read_ahead queries",
    ),
    Shape(
        "rocketmq filters",
        _two_steps,
        "messages filters",
        "messages|found",
        "GetMessageResultExtTest",
    ),
)

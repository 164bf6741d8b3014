"""Shape of RocketMQ's metadata: topics, queues and segments that are added, changed and deleted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from streammeta.brokers.rocketmq.formats import metadata
from streammeta.brokers.rocketmq.formats.names import SegmentType
from tests.conformance.rocketmq_files import NOW_MS
from tests.conformance.shape_facts import AnyOf
from tests.conformance.shape_sentences import Clause, numbers_in, ordinal_of
from tests.conformance.shape_vocabulary import Given, Shape, take_steps
from tests.conformance.shape_worlds import World, run_steps, verb

_KIND = SegmentType.COMMIT_LOG
_NUMBER_WORD = r"(?:\d+|a|an|one|two|three|four|five|six|ten)"


class MetadataWorld(World):
    """The metadata of a broker."""

    def __init__(self) -> None:
        self.table = metadata.MetadataTable()
        self._topics: list[str] = []
        self._ids: list[int] = []
        self._iterated: int | None = None
        self._paths: list[str] = []
        self._new_status: int | None = None

    async def facts(self) -> Mapping[str, Any]:
        table = self.table
        kept = [table.segments_of(path, _KIND) for path in self._paths]
        every = [row for rows in kept for row in rows]
        counts = [len(rows) for rows in kept]
        single = table.segments_of("p", _KIND)
        facts: dict[str, Any] = {
            "topic_ids": list(self._ids),
            "new_status": self._new_status,
            "iterated": self._iterated,
            "left": AnyOf(len(table.topics), len(table.queues), len(table.segments)),
            "topics": len(table.topics),
            "queues": len(table.queues),
            "segments": len(table.segments),
            "statuses": [topic.status for topic in table.topics.values()],
            "counts_after_delete": [*counts, len(every)],
            "counts": counts,
        }
        for topic in table.topics.values():
            facts[topic.topic] = {"status": topic.status, "reserve_time": topic.reserve_time}
        for queue in table.queues.values():
            facts[f"queue_{queue.queue.queue_id}"] = _queue_facts(queue)
        if len(table.queues) == 1:
            facts["queue"] = facts["updated"] = _queue_facts(next(iter(table.queues.values())))
            facts |= _queue_facts(next(iter(table.queues.values())))
        elif not table.queues:
            facts["queue"] = None
        if len(single) > 1:
            facts["new"] = _segment_facts(single[-1])
        sealed = [segment for segment in single if int(segment.status) == 1]
        if sealed:
            facts["sealed"] = _segment_facts(sealed[0])
        return facts

    @verb(r"iterates?|lists?|visits?", "iterate")
    def iterate(self, clause: Clause) -> Any:
        clause.skip(r"topics?|queues?|over|all")
        self._iterated = len(self.table.queues) or len(self.table.topics)
        return self._iterated

    @verb(r"deletes?|removes?", "delete the third")
    def delete(self, clause: Clause) -> None:
        if clause.take(r"(?:the )?first path(?: whole)?|(?:the )?whole first path") is not None:
            self.table.delete_segments(self._paths[0], _KIND)
            return
        first = clause.take(
            rf"(?:the )?first ({_NUMBER_WORD}) of (?:the )?(?:other|second)(?: path)?"
        )
        if first is not None:
            for file in self.table.segments_of(self._paths[-1], _KIND)[: numbers_in(first[1])[0]]:
                self.table.delete_segments(file.path, _KIND, file.base_offset)
            return
        clause.rest = _plain_queue(clause.rest)
        base = clause.take(r"(?:the )?(?:segment )?(?:with |of )?base (\d+)")
        queue = clause.take(r"(?:the )?queue (\d+)")
        if base is not None:
            self.table.delete_segments("p", _KIND, int(base[1]))
        elif queue is not None:
            self.table.queues.pop(metadata.Queue("broker", "t", int(queue[1])), None)
        else:
            for topic in self._named(clause):
                self.table.delete_topic(topic)

    def _named(self, clause: Clause) -> list[str]:
        word = clause.take(r"\b(first|second|third|fourth|last)\b(?: topic)?|\btopic (\w+)")
        assert word is not None
        if word[2]:
            return [word[2]]
        ordinal = ordinal_of(word[1])
        assert ordinal is not None
        return [self._topics[ordinal - 1 if ordinal > 0 else -1]]

    @verb(r"marks?|seals?", "mark base 0 sealed")
    def seal(self, clause: Clause) -> None:
        base = clause.number(r"base (\d+)", 0)
        clause.skip(r"sealed|segment")
        row = next(file for file in self.table.segments_of("p", _KIND) if file.base_offset == base)
        self.table.put_segment(row.with_seal(NOW_MS))

    @verb(
        r"sets?|updates?|changes?|(?=second status|third status)",
        "set the first to status 1, reserve time 0",
    )
    def change(self, clause: Clause) -> None:
        clause.rest = _plain_queue(clause.rest)
        least, most = (
            clause.take(r"min(?:imum)?(?: offset)? (?:to )?(-?\d+)"),
            clause.take(r"max(?:imum)?(?: offset)? (?:to )?(-?\d+)"),
        )
        if least or most:
            self._change_queues(clause, *(int(one[1]) if one else None for one in (least, most)))
            return
        for part in re.split(r"[;,]\s*(?=(?:the )?(?:second|third|fourth|last)\b)", clause.rest):
            inner = Clause(part)
            (topic,) = self._named(inner)
            status, reserve = inner.take(r"status (\d+)"), inner.take(r"reserve time (-?\d+)")
            known = self.table.topics[topic]
            self.table.topics[topic] = replace(
                known,
                status=int(status[1]) if status else known.status,
                reserve_time=int(reserve[1]) if reserve else known.reserve_time,
            )
        clause.rest = ""

    def _change_queues(self, clause: Clause, least: int | None, most: int | None) -> None:
        number = clause.take(r"(?:of )?queue (\d+)")
        for queue, row in list(self.table.queues.items()):
            if number is None or queue.queue_id == int(number[1]):
                low = row.min_offset if least is None else least
                high = row.max_offset if most is None else most
                self.table.queues[queue] = metadata.QueueMetadata(queue, low, high, NOW_MS)

    @verb(r"adds?|creates?|puts?|(?=\w+ paths? of)", "add three topics (reserve times 2, 1, 2)")
    def add(self, clause: Clause) -> None:
        paths = clause.take(
            rf"({_NUMBER_WORD}) paths? of ({_NUMBER_WORD}) segments?(?: each)?(?:, bases "
            rf"i ?\* ?(\d+))?"
        )
        topics = clause.take(rf"({_NUMBER_WORD}) topics?(?: \(reserve times? ([-\d, ]+)\))?")
        clause.rest = _plain_queue(clause.rest)
        queue = clause.take(r"queue (\d+)(?: \(?(?:with )?(?:min )?offsets? (-?\d+)\)?)?")
        bases = clause.take(r"(?:segments? )?(?:with )?bases? ((?:\d+(?:, | and )?)+)")
        if paths is not None:
            count, size, step = numbers_in(paths[1])[0], numbers_in(paths[2])[0], int(paths[3] or 1)
            for number in range(count):
                self._paths.append(f"p{number}")
                for at in range(size):
                    self.table.put_segment(metadata.SegmentMetadata(f"p{number}", _KIND, at * step))
        elif topics is not None:
            reserves = numbers_in(topics[2]) if topics[2] else []
            for at in range(numbers_in(topics[1])[0]):
                self._add_topic(f"t{len(self._topics)}", reserves[at] if at < len(reserves) else -1)
        elif queue is not None:
            offset = int(queue[2]) if queue[2] else 0
            key = metadata.Queue("broker", "t", int(queue[1]))
            self.table.queues.setdefault(key, metadata.QueueMetadata(key, offset, offset))
        elif bases is not None:
            for base in numbers_in(bases[1].replace(" and ", ",")):
                self.table.put_segment(metadata.SegmentMetadata("p", _KIND, base))
        else:
            name = clause.take(r"topic (\w+)")
            reserve = clause.take(r"reserve time (-?\d+)")
            self._add_topic(
                name[1] if name else f"t{len(self._topics)}", int(reserve[1]) if reserve else -1
            )

    def _add_topic(self, name: str, reserve: int) -> None:
        row = self.table.add_topic(name, reserve)
        if name not in self._topics:
            self._topics.append(name)
        self._ids.append(row.topic_id)
        self._new_status = row.status if self._new_status is None else self._new_status


def _plain_queue(text: str) -> str:
    """Return text in which a queue is named by its number alone: [T, 0] is 0."""
    return re.sub(r"queue [(\[] ?\w+, ?(\d+) ?[)\]]", r"queue \1", text)


def _queue_facts(row: metadata.QueueMetadata) -> dict[str, Any]:
    names = {
        "min": row.min_offset,
        "max": row.max_offset,
        "min_offset": row.min_offset,
        "max_offset": row.max_offset,
    }
    return {**names, "update_timestamp_set": row.update_ms > 0}


def _segment_facts(row: metadata.SegmentMetadata) -> dict[str, Any]:
    return {
        "status": int(row.status),
        "seal_timestamp": row.seal_ms,
        "seal_timestamp_set": row.seal_ms > 0,
        "size": row.size,
        "base": row.base_offset,
    }


async def _metadata(given: Given) -> Any:
    steps = list[Any]()
    for step in take_steps(given, MetadataWorld):
        # what is set of several topics, and paths before a colon, is one step each
        steps += (
            re.split(
                r";\s*(?=iterate|delete|add|mark)|:\s*(?=delete)|(?<=sealed),\s*|(?<=whole), "
                r"(?:then )?the (?=first)",
                str(step),
            )
            if isinstance(step, str)
            else [step]
        )
    steps = [f"delete {step}" if str(step).startswith("first ") else step for step in steps]
    return await run_steps(MetadataWorld(), steps)


SHAPES = (
    Shape(
        "rocketmq metadata",
        _metadata,
        "steps",
        "topic_ids|new_status|iterated|left|new|sealed|counts.*|queue.*|topics?|after_.*|min.*|"
        "max.*|update_.*|segments",
        "DefaultMetadataStoreTest",
        keys="then",
        world=MetadataWorld,
        words=r"\btopics?\b|\bqueue \d|\bbase \d|paths?",
    ),
)

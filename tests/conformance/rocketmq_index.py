"""Scenarios about the key index of RocketMQ's shape: puts, queries, and the life of its files."""

from __future__ import annotations

import re
from typing import Any

from streammeta.brokers.rocketmq.key_index import (
    IndexHeader,
    LocalIndex,
    PutResult,
    query_compacted,
)
from streammeta.brokers.rocketmq.key_index_service import (
    IndexSizes,
    KeyIndexService,
    MemoryShelf,
)
from streammeta.brokers.rocketmq.storage import MemorySegmentStore
from tests.conformance.rocketmq_formats import index_constants
from tests.conformance.scenario_args import Args
from tests.conformance.shape_answers import Runner, Said
from tests.kit.clock import ManualClock

BEGIN_MS = 1_700_000_000_000
SLOTS, ITEMS = 5, 20
"""Sizes of their tests where a scenario gives none."""
KEY = "MessageKey"


def _put(index: LocalIndex, topic: str | None, keys: list[str] | None) -> PutResult:
    return index.put(topic, 1, 0, keys, 100, 10, BEGIN_MS + 1000)


def _put_rules(given: Args) -> dict[str, Any]:
    index = LocalIndex(BEGIN_MS, given.take("slots"), given.take("items"))
    ends_at_zero = index.end_ms == 0
    results: list[Any] = []
    for said in given.take("puts"):
        before = index.item_count
        match said:
            case "topic none":
                results.append(_put(index, None, [KEY]).value)
            case "keys none" | "keys empty set":
                done = _put(index, "TopicTest", None if said == "keys none" else [])
                stored = index.item_count != before
                results.append(f"{done} ({'something' if stored else 'nothing'} stored)")
            case "once more":
                results.append(_put(index, "TopicTest", [KEY]).value)
            case _:
                count = int(said.split()[0])
                done_all = {_put(index, "TopicTest", [KEY]) for _ in range(count)}
                results.append(f"{'/'.join(done_all)} each")
    header = index.header()
    end_of_puts = header.end_ms == BEGIN_MS + 1000 and ends_at_zero
    return {
        "expect": {
            "results": results,
            "used_slots": header.used_slots,
            "item_count": header.item_count,
            "end_timestamp": Said.of({"that of the puts; 0 before the first": end_of_puts}),
        }
    }


_TOPICS = re.compile(r"topics TopicTest0\.\.(?:TopicTest)?(\d+), three")


def _by_topics(said: str, slots: int = SLOTS, items: int = ITEMS) -> LocalIndex:
    """Return an index with three puts of one key in each of some topics."""
    match = _TOPICS.match(said)
    if match is None:
        raise ValueError(f"puts are {said!r}")
    index = LocalIndex(BEGIN_MS, slots, items)
    for _ in range(3):
        for topic in range(int(match[1]) + 1):
            _put(index, f"TopicTest{topic}", [KEY])
    return index


def _slots_by_topic(given: Args) -> dict[str, Any]:
    index = _by_topics(given.take("puts"), given.take("slots"), given.take("items"))
    return {"expect": {"used_slots": index.used_slots, "item_count": index.item_count}}


def _query_unsealed(given: Args) -> dict[str, Any]:
    query = given.within("query")
    index = _by_topics(given.take("puts"))
    found = index.query(query.take("topic"), query.take("key"), query.take("max"))
    return {"expect": {"items": len(found)}}


async def _query_uploaded(given: Args) -> dict[str, Any]:
    if given.take("puts") != "as index_query_unsealed, compacted and uploaded":
        raise ValueError("puts are others")
    data = _by_topics("topics TopicTest0..4, three each").compact()
    store = MemorySegmentStore()
    service = await _service(store, MemoryShelf(), SLOTS, ITEMS)
    reads: list[int] = []

    async def read(position: int, length: int) -> bytes:
        reads.append(length)
        return data[position : position + length]

    counts = []
    for query in given.each("queries"):
        begin = IndexHeader.decode(data).begin_ms
        topic, key = query.take("topic"), query.take("key")
        counts.append(len(await query_compacted(read, SLOTS, topic, key, 64, begin)))
    await _fill(service, [f"k{at}" for at in range(20)])
    await service.compact_oldest()
    (uploaded,) = store.segments.values()
    header = IndexHeader.decode(bytes(uploaded.data))
    expected = 28 + SLOTS * 8 + header.item_count * 28
    return {
        "expect": {
            "items": counts,
            "uploaded_size_equals_compacted_size": len(uploaded.data) == expected,
        }
    }


# ---- files ----


async def _service(
    store: MemorySegmentStore, shelf: MemoryShelf, slots: int, items: int
) -> KeyIndexService:
    clock = ManualClock(BEGIN_MS)
    sizes = IndexSizes(slots, items)
    return await KeyIndexService.open(
        "b/rmq_sys_INDEX/0", store, shelf, lambda: clock.now_ms, sizes
    )


async def _fresh(items: int) -> KeyIndexService:
    return await _service(MemorySegmentStore(), MemoryShelf(), SLOTS, items)


async def _fill(service: KeyIndexService, keys: list[str], offset: int = 0) -> None:
    for at, key in enumerate(keys):
        done = service.put("TopicTest", 100, 0, [key], offset + at, 10, BEGIN_MS + 1000)
        if done is not PutResult.SUCCESS:
            raise AssertionError(f"put {at}: {done}")


async def _constants(given: Args) -> dict[str, Any]:
    facts = index_constants(given)
    service = await _fresh(ITEMS)
    facts["expect"]["new_status"] = service.statuses[0].name
    await _fill(service, [f"k{at}" for at in range(ITEMS)])
    facts["expect"]["status_after_compaction"] = service.statuses[0].name
    return facts


async def _rolls(given: Args) -> dict[str, Any]:
    service = await _fresh(given.take("items_per_file"))
    await _fill(service, [str(at) for at in range(given.take("puts"))])
    return {"expect": {"files": len(service.statuses)}}


async def _across_files(given: Args) -> dict[str, Any]:
    match = re.match(r"(\d+) rounds of keys 0\.\.(\d+)", given.take("puts"))
    if match is None:
        raise ValueError("puts are others")
    service = await _fresh(ITEMS)
    for number in range(int(match[1])):
        keys = [str(at) for at in range(int(match[2]) + 1)]
        await _fill(service, keys, 100 * number)
    key = given.take("query_key")
    found = [len(await service.query("TopicTest", key, one)) for one in given.take("max")]
    return {"expect": {"files": len(service.statuses), "found": found}}


async def _compaction_order(given: Args) -> dict[str, Any]:
    service = await _fresh(given.take("items_per_file"))
    given.take("then")
    await _fill(service, [str(at) for at in range(given.take("puts"))])

    def statuses() -> list[str]:
        return [one.name for one in service.statuses]

    states = []
    for _ in range(2):
        await service.compact_oldest()
        states.append(statuses())
    has_more = await service.compact_oldest()
    nothing = not has_more and statuses() == states[1]
    return {
        "expect": {
            "files": len(states[0]),
            "status_after_first": states[0],
            "status_after_second": states[1],
            "third_time": Said.of({"nothing to compact; states unchanged": nothing}),
        }
    }


async def _restart(given: Args) -> dict[str, Any]:
    given.take("then")
    store, shelf = MemorySegmentStore(), MemoryShelf()
    service = await _service(store, shelf, SLOTS, ITEMS)
    await _fill(service, [str(at) for at in range(given.take("puts"))])
    firsts = [service.begins_ms[0]]
    for _ in range(2):
        await service.flush()
        service = await _service(store, shelf, SLOTS, ITEMS)
        firsts.append(service.begins_ms[0])
        if len(firsts) == 2:
            await service.compact_oldest()
    return {
        "expect": {
            "first_key_same_after_each_restart": len(set(firsts)) == 1,
            "files_after_second_restart": len(service.statuses),
            "first_status": service.statuses[0].name,
        }
    }


RUNNERS: dict[str, Runner] = {
    "index_constants_and_hash": _constants,
    "index_put_rules": _put_rules,
    "index_slots_by_topic": _slots_by_topic,
    "index_query_unsealed": _query_unsealed,
    "index_query_uploaded": _query_uploaded,
    "index_service_rolls": _rolls,
    "index_service_query_across_files": _across_files,
    "index_service_compaction_order": _compaction_order,
    "index_service_restart": _restart,
}

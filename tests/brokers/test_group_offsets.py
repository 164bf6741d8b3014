"""Committed offsets are written by one coordinator: a former one is refused."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from streammeta.brokers.kafka.cluster.keys import offset_key
from streammeta.brokers.kafka.groups.group_offsets import GroupOffsets
from tests.kit.seeds import seeds


class MemoryKeys:
    """Keys whose versions count all puts; `before_put` lets others act just before a put."""

    def __init__(self) -> None:
        self.stored: dict[str, tuple[Any, int]] = {}
        self.puts = 0
        self.before_put: Callable[[Mapping[str, Any]], Awaitable[None]] | None = None

    async def list(self, prefix: str) -> dict[str, tuple[Any, int]]:
        return {
            key.removeprefix(prefix): stored
            for key, stored in self.stored.items()
            if key.startswith(prefix)
        }

    async def put_at(self, values: Mapping[str, tuple[Any, int]]) -> dict[str, int] | None:
        if self.before_put is not None:
            await self.before_put(values)
        is_good = True
        for key, (value, version) in values.items():
            if self.stored.get(key, (None, 0))[1] == version:
                self.puts += 1
                self.stored[key] = (value, self.puts)
            else:
                is_good = False
        return {key: self.stored[key][1] for key in values} if is_good else None

    async def delete_at(self, versions: Mapping[str, int]) -> bool:
        good = [key for key, at in versions.items() if self.stored.get(key, (None, at))[1] == at]
        for key in good:
            self.stored.pop(key, None)
        return len(good) == len(versions)


FIRST, SECOND = (offset_key("g", "t", partition) for partition in range(2))


def _at(offset: int) -> Mapping[str, Any]:
    return {"offset": offset}


async def test_a_former_coordinator_is_refused_once_the_group_is_taken_over() -> None:
    keys = MemoryKeys()
    former, present = GroupOffsets(keys, "g"), GroupOffsets(keys, "g")
    assert await former.put({FIRST: _at(10)})
    assert await present.read() == {"t/0": _at(10)}
    assert not await former.put({FIRST: _at(5)})
    assert await present.put({FIRST: _at(20), SECOND: _at(1)})
    assert await present.read() == {"t/0": _at(20), "t/1": _at(1)}


@pytest.mark.parametrize("first", [{}, {FIRST: _at(10)}])
async def test_a_former_coordinator_commits_no_first_offset_of_a_partition(
    first: Mapping[str, Any],
) -> None:
    keys = MemoryKeys()
    former, present = GroupOffsets(keys, "g"), GroupOffsets(keys, "g")
    assert await former.put(first)
    seen = await present.read()
    assert not await former.put({SECOND: _at(99)}), "the key has no version that could refuse it"
    assert await present.read() == seen
    assert not await present.put({SECOND: _at(5)}), "the key has another version than it knows"
    assert await present.put({SECOND: _at(5)})
    assert (await present.read() or {})["t/1"] == _at(5)


async def test_a_first_offset_that_came_too_late_never_counts() -> None:
    """Neither for the coordinator that was there by then, nor for any that follows it."""
    keys = MemoryKeys()
    former, present = GroupOffsets(keys, "g"), GroupOffsets(keys, "g")
    assert await former.read() == {}
    assert await present.read() == {}
    assert not await former.put({FIRST: _at(99)})
    for _ in range(2):
        assert await GroupOffsets(keys, "g").read() == {}


async def test_a_first_offset_counts_if_it_came_before_the_successor_listed() -> None:
    """A takeover that ended half way takes nothing away: its successor reads what it had read."""
    keys = MemoryKeys()
    former, halfway = GroupOffsets(keys, "g"), GroupOffsets(keys, "g")
    assert await former.put({FIRST: _at(10), SECOND: _at(11)})

    async def end(values: Mapping[str, Any]) -> None:
        if FIRST in values:
            keys.before_put = None
            await keys.put_at({FIRST: values[FIRST]})
            raise OSError("the broker has ended")

    keys.before_put = end
    with pytest.raises(OSError, match="ended"):
        await halfway.read()
    assert await GroupOffsets(keys, "g").read() == {"t/0": _at(10), "t/1": _at(11)}


@pytest.mark.parametrize("seed", seeds(33, slow=67))
async def test_a_committed_offset_is_read_by_all_that_follow(seed: int) -> None:
    """Coordinators that do not know of each other act between any two puts of one of them."""
    rng = random.Random(seed)
    keys = MemoryKeys()
    coordinators = [GroupOffsets(keys, "g") for _ in range(3)]
    committed: dict[str, int] = {}
    offset = 0

    async def act(coordinator: GroupOffsets) -> None:
        nonlocal offset
        offset += 1
        key, own = rng.choice((FIRST, SECOND)), offset
        if rng.random() < 0.5:
            if await coordinator.put({key: _at(own)}):
                committed[key] = own
            return
        seen = await coordinator.read()
        if seen is not None:
            for place, least in committed.items():
                assert seen["t/" + place[-1]]["offset"] >= least

    async def interrupt(_: Mapping[str, Any]) -> None:
        if rng.random() < 0.2:
            idle = [
                coordinator for coordinator in coordinators if not coordinator._changing.locked()
            ]
            if idle:
                await act(rng.choice(idle))

    keys.before_put = interrupt
    for _ in range(100):
        await act(rng.choice(coordinators))
    keys.before_put = None
    final = await GroupOffsets(keys, "g").read() or {}
    assert final.keys() >= {"t/" + key[-1] for key in committed}


async def test_deleted_offsets_stay_deleted_whatever_a_former_coordinator_does() -> None:
    keys = MemoryKeys()
    former, present = GroupOffsets(keys, "g"), GroupOffsets(keys, "g")
    assert await former.put({FIRST: _at(10), SECOND: _at(11)})
    assert await present.delete({SECOND}) == (1, 1)
    assert await present.read() == {"t/0": _at(10)}
    assert await present.delete() == (1, 0)
    assert not await former.put({FIRST: _at(12)})
    assert await GroupOffsets(keys, "g").read() == {}
    assert await GroupOffsets(keys, "g").delete() == (0, 0)


async def test_a_former_coordinator_deletes_nothing() -> None:
    keys = MemoryKeys()
    former, present = GroupOffsets(keys, "g"), GroupOffsets(keys, "g")
    assert await former.put({FIRST: _at(10)})
    assert await present.read() == {"t/0": _at(10)}
    assert await former.delete() is None
    assert await present.put({FIRST: _at(11)})
    assert await GroupOffsets(keys, "g").read() == {"t/0": _at(11)}


async def test_offsets_of_an_older_broker_count() -> None:
    """It notes no term."""
    keys = MemoryKeys()
    assert await GroupOffsets(keys, "g").read() == {}
    await keys.put_at({FIRST: (_at(10), 0)})
    assert await GroupOffsets(keys, "g").read() == {"t/0": _at(10)}


async def test_offsets_of_other_groups_are_left_alone() -> None:
    keys = MemoryKeys()
    assert await GroupOffsets(keys, "other").put({offset_key("other", "t", 0): _at(7)})
    version = keys.stored[offset_key("other", "t", 0)]
    assert await GroupOffsets(keys, "g").put({FIRST: _at(1)})
    assert keys.stored[offset_key("other", "t", 0)] == version

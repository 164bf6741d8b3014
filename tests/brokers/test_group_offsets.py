"""Committed offsets are written by one coordinator: a former one is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streammeta.brokers.kafka.group_offsets import GroupOffsets
from streammeta.brokers.kafka.keys import offset_key


class MemoryKeys:
    """Keys whose versions count all puts."""

    def __init__(self) -> None:
        self.stored: dict[str, tuple[Any, int]] = {}
        self.puts = 0

    async def list(self, prefix: str) -> dict[str, tuple[Any, int]]:
        return {
            key.removeprefix(prefix): one
            for key, one in self.stored.items()
            if key.startswith(prefix)
        }

    async def put_at(self, values: Mapping[str, tuple[Any, int]]) -> dict[str, int] | None:
        is_good = True
        for key, (value, version) in values.items():
            if self.stored.get(key, (None, 0))[1] == version:
                self.puts += 1
                self.stored[key] = (value, self.puts)
            else:
                is_good = False
        return {key: self.stored[key][1] for key in values} if is_good else None


FIRST, SECOND = (offset_key("g", "t", partition) for partition in range(2))


async def test_a_former_coordinator_is_refused_once_the_group_is_taken_over() -> None:
    keys = MemoryKeys()
    former, present = GroupOffsets(keys, "g"), GroupOffsets(keys, "g")
    assert await former.put({FIRST: 10})
    assert await present.read() == {"t/0": 10}
    assert not await former.put({FIRST: 5})
    assert await present.put({FIRST: 20, SECOND: 1})
    assert await present.read() == {"t/0": 20, "t/1": 1}


async def test_a_key_that_a_former_coordinator_made_is_seen_and_taken_over() -> None:
    keys = MemoryKeys()
    former, present = GroupOffsets(keys, "g"), GroupOffsets(keys, "g")
    assert await former.read() == {}
    assert await present.read() == {}
    assert await former.put({FIRST: 10})
    assert not await present.put({FIRST: 20})
    assert await present.put({FIRST: 20})
    assert not await former.put({FIRST: 10})
    assert await present.read() == {"t/0": 20}


async def test_offsets_of_other_groups_are_left_alone() -> None:
    keys = MemoryKeys()
    assert await GroupOffsets(keys, "other").put({offset_key("other", "t", 0): 7})
    version = keys.stored[offset_key("other", "t", 0)]
    assert await GroupOffsets(keys, "g").put({FIRST: 1})
    assert keys.stored[offset_key("other", "t", 0)] == version

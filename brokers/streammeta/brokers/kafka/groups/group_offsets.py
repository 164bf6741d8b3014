"""Committed offsets of a group, which one coordinator writes.

A coordinator takes a group over before it answers for it. It puts the group's fence first, lists
the offsets second, and writes all of them again. A former coordinator then commits nothing more:

- It knows older versions of the keys that exist, so the controllers refuse its puts.
- A key that did not exist has no version. After it has made one, a coordinator reads the fence, and
  answers that the offset is committed only if the fence is still its own. Its successor put the
  fence before it listed the offsets, so it has seen that key.
- A key that a former coordinator makes after that stays in the map, but carries that coordinator's
  term. It is older than the last term whose takeover was completed, so nobody reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from streammeta.brokers.kafka.cluster.keys import fence_key, offset_key

_TERM = "term"
_COMPLETED = "completed"


class VersionedKeys(Protocol):
    """Keys with versions; `keys.Keys` offers them."""

    async def list(self, prefix: str) -> dict[str, tuple[Any, int]]:
        """Return values and versions by what follows the prefix."""

    async def put_at(self, values: Mapping[str, tuple[Any, int]]) -> dict[str, int] | None:
        """Put values at versions; return the new ones, None if one was refused."""

    async def delete_at(self, versions: Mapping[str, int]) -> bool:
        """Delete keys at versions; False if one has another version, and stays."""


class GroupOffsets:
    """Offsets of one group as its coordinator knows them.

    The term of a coordinator is the version of the fence with which its takeover began.
    """

    def __init__(self, keys: VersionedKeys, group: str) -> None:
        self._keys = keys
        self._prefix = offset_key(group)
        self._fence = fence_key(group)
        self._term = 0
        self._fence_version = 0
        self._versions: dict[str, int] | None = None
        self._changing = asyncio.Lock()

    async def put(self, values: Mapping[str, Mapping[str, Any]]) -> bool:
        """Put JSON objects by their keys; False if another coordinator has written meanwhile.

        Some may be put then. The next call takes the group over again.
        """
        async with self._changing:
            if self._versions is None and not await self._take_over():
                return False
            known, self._versions = self._versions or {}, None
            termed = {key: self._with_term(value) for key, value in values.items()}
            found = await self._keys.put_at(
                {key: (value, known.get(key, 0)) for key, value in termed.items()}
            )
            if found is None:
                return False
            if not values.keys() <= known.keys() and not await self._holds_fence():
                return False
            self._versions = known | found
            return True

    async def read(self) -> dict[str, Mapping[str, Any]] | None:
        """Return values by topic and partition; None if another coordinator writes meanwhile."""
        async with self._changing:
            if self._versions is None and not await self._take_over():
                return None
            listed = await self._keys.list(self._prefix)
            counting = {k: value for k, (value, _) in listed.items() if _counts(value, self._term)}
            return {key: _without_term(value) for key, value in counting.items()}

    async def delete(self, keys: Collection[str] | None = None) -> tuple[int, int] | None:
        """Delete values by their keys, by default all; None if another coordinator has written.

        Returns how many were deleted, and are left. The fence stays: it keeps former coordinators
        out.
        """
        async with self._changing:
            if self._versions is None and not await self._take_over():
                return None
            known, self._versions = self._versions or {}, None
            gone = {key: at for key, at in known.items() if keys is None or key in keys}
            if not await self._keys.delete_at(gone) or not await self._holds_fence():
                return None
            self._versions = {key: at for key, at in known.items() if key not in gone}
            return len(gone), len(self._versions)

    async def _take_over(self) -> bool:
        """Fence the coordinator before this one, then write all offsets that count again."""
        fence, version = await self._read_fence()
        completed = fence.get(_COMPLETED, 0)
        begun = await self._put_fence(completed, version)
        if begun is None:
            return False
        self._term = begun
        listed = await self._keys.list(self._prefix)
        written = await self._keys.put_at(
            {
                self._prefix + name: (self._taken_over(value, completed), at)
                for name, (value, at) in listed.items()
            }
        )
        ended = None if written is None else await self._put_fence(self._term, begun)
        if written is None or ended is None:
            return False
        self._versions, self._fence_version = written, ended
        return True

    def _taken_over(self, value: Mapping[str, Any], completed: int) -> Mapping[str, Any]:
        """Return a value with this term; as it is if it came too late to count.

        That is written again too, so that its former writer does not know its version any more.
        """
        return self._with_term(value) if _counts(value, completed) else value

    async def _holds_fence(self) -> bool:
        _, version = await self._read_fence()
        return version == self._fence_version

    async def _read_fence(self) -> tuple[Mapping[str, Any], int]:
        return (await self._keys.list(self._fence)).get("", ({}, 0))

    async def _put_fence(self, completed: int, version: int) -> int | None:
        """Put the fence at a version; return the new version, None if it had another."""
        put = await self._keys.put_at({self._fence: ({_COMPLETED: completed}, version)})
        return None if put is None else put[self._fence]

    def _with_term(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**value, _TERM: self._term}


def _without_term(value: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: said for name, said in value.items() if name != _TERM}


def _counts(value: Mapping[str, Any], since: int) -> bool:
    """Return whether a value was written in the term `since` or later; older brokers note none."""
    return int(value.get(_TERM, since)) >= since

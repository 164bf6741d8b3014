"""Committed offsets of a group, written by a single coordinator.

A coordinator takes a group over before it answers for the group. First it puts the group's fence,
then it lists the offsets, and then it writes all of them again. After that a former coordinator
can no longer commit:

- It knows outdated versions of the existing keys, so the controllers reject its puts.
- A key that did not exist has no version. After creating one, a coordinator reads the fence, and
  reports the offset as committed only if the fence is still its own. Its successor put the fence
  before it listed the offsets, so it has seen that key.
- A key created by a former coordinator after that stays in the metadata, but carries that
  coordinator's term. The term is older than the last completed takeover, so nobody reads the key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from streammeta.brokers.kafka.cluster.keys import fence_key, offset_key

_TERM = "term"
_COMPLETED = "completed"


class VersionedKeys(Protocol):
    """Keys with versions. `keys.Keys` implements them."""

    async def list(self, prefix: str) -> dict[str, tuple[Any, int]]:
        """Return values and versions by key, without the prefix."""

    async def put_at(self, values: Mapping[str, tuple[Any, int]]) -> dict[str, int] | None:
        """Put values at versions, and return the new versions, None if one was rejected."""

    async def delete_at(self, versions: Mapping[str, int]) -> bool:
        """Delete keys at versions. Return False if a key has another version and stays."""


class GroupOffsets:
    """Offsets of one group as known to its coordinator.

    A coordinator's term is the version of the fence at the start of its takeover.
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
        """Put JSON objects by key. Return False if another coordinator has written meanwhile.

        Some may have been put then. The next call takes the group over again.
        """
        async with self._changing:
            if self._versions is None and not await self._take_over():
                return False
            # Unknown until the put succeeds: an exception in between forces a new takeover.
            known, self._versions = self._versions or {}, None
            termed = {key: self._with_term(value) for key, value in values.items()}
            found = await self._keys.put_at(
                {key: (value, known.get(key, 0)) for key, value in termed.items()}
            )
            if found is None:
                return False
            # New keys have no version to compare, so the fence must still be ours. See the module's
            # docstring.
            if not values.keys() <= known.keys() and not await self._holds_fence():
                return False
            self._versions = known | found
            return True

    async def read(self) -> dict[str, Mapping[str, Any]] | None:
        """Return values by topic and partition, None if another coordinator has written."""
        async with self._changing:
            if self._versions is None and not await self._take_over():
                return None
            listed = await self._keys.list(self._prefix)
            # Values of older terms came too late to be acknowledged.
            counting = {k: value for k, (value, _) in listed.items() if _counts(value, self._term)}
            return {key: _without_term(value) for key, value in counting.items()}

    async def delete(self, keys: Collection[str] | None = None) -> tuple[int, int] | None:
        """Delete values by key, by default all. Return None if another coordinator has written.

        Otherwise return the numbers of deleted and of remaining values. The fence stays, because it
        rejects former coordinators.
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
        """Fence the previous coordinator, then write all valid offsets again."""
        fence, version = await self._read_fence()
        completed = fence.get(_COMPLETED, 0)
        begun = await self._put_fence(completed, version)
        if begun is None:
            return False

        # The list follows the fence, so it includes every put that the former coordinator
        # acknowledged.
        self._term = begun
        listed = await self._keys.list(self._prefix)
        written = await self._keys.put_at(
            {
                self._prefix + name: (self._renew_value(value, completed), at)
                for name, (value, at) in listed.items()
            }
        )
        # The second put of the fence completes the takeover: only now values of older terms are
        # void.
        ended = None if written is None else await self._put_fence(self._term, begun)
        if written is None or ended is None:
            return False

        self._versions, self._fence_version = written, ended

        return True

    def _renew_value(self, value: Mapping[str, Any], completed: int) -> Mapping[str, Any]:
        """Return a value with this term, or unchanged if it was written too late to be valid.

        The latter is written too, so that its former writer no longer knows the current version.
        """
        return self._with_term(value) if _counts(value, completed) else value

    async def _holds_fence(self) -> bool:
        _, version = await self._read_fence()
        return version == self._fence_version

    async def _read_fence(self) -> tuple[Mapping[str, Any], int]:
        return (await self._keys.list(self._fence)).get("", ({}, 0))

    async def _put_fence(self, completed: int, version: int) -> int | None:
        """Put the fence at a version, and return the new version, None if it had another one."""
        put = await self._keys.put_at({self._fence: ({_COMPLETED: completed}, version)})
        return None if put is None else put[self._fence]

    def _with_term(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**value, _TERM: self._term}


def _without_term(value: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: said for name, said in value.items() if name != _TERM}


def _counts(value: Mapping[str, Any], since: int) -> bool:
    """Return whether a value was written in term `since` or later. Older brokers record none."""
    return int(value.get(_TERM, since)) >= since

"""Committed offsets of a group, which one coordinator writes.

Each offset is put at the version that this coordinator knows of its key. Taking a group over writes
all of them anew, so a former coordinator, which knows older versions, can write no more: what it
wrote before was there when they were read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from streammeta.brokers.kafka.keys import offset_key


class VersionedKeys(Protocol):
    """Keys with versions; `keys.Keys` offers them."""

    async def list(self, prefix: str) -> dict[str, tuple[Any, int]]:
        """Return values and versions by what follows the prefix."""

    async def put_at(self, values: Mapping[str, tuple[Any, int]]) -> dict[str, int] | None:
        """Put values at versions; return the new ones, None if one was refused."""


class GroupOffsets:
    """Offsets of one group as its coordinator knows them."""

    def __init__(self, keys: VersionedKeys, group: str) -> None:
        self._keys = keys
        self._prefix = offset_key(group)
        self._versions: dict[str, int] | None = None
        self._changing = asyncio.Lock()

    async def put(self, values: Mapping[str, Any]) -> bool:
        """Put values by their keys; False if another coordinator has written meanwhile.

        Some may be put then. The next call takes the group over again.
        """
        async with self._changing:
            if self._versions is None and not await self._take_over():
                return False
            known = self._versions or {}
            found = await self._keys.put_at(
                {key: (value, known.get(key, 0)) for key, value in values.items()}
            )
            self._versions = None if found is None else known | found
            return found is not None

    async def read(self) -> dict[str, Any] | None:
        """Return values by topic and partition; None if another coordinator writes meanwhile."""
        async with self._changing:
            if self._versions is None and not await self._take_over():
                return None
            return {key: value for key, (value, _) in (await self._keys.list(self._prefix)).items()}

    async def _take_over(self) -> bool:
        listed = await self._keys.list(self._prefix)
        self._versions = await self._keys.put_at(
            {self._prefix + name: one for name, one in listed.items()}
        )
        return self._versions is not None

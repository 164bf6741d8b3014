"""Shelf of a broker's key index on a cluster: local files are named objects of a key.

A named object never changes, so each save of a file is an object of its own generation; the newest
one counts, and those before are deleted behind it. What is uploaded is in the broker's metadata.
"""

from __future__ import annotations

from dataclasses import replace

from streammeta.brokers.rocketmq.cluster.cluster_metadata import ClusterKeeper
from streammeta.brokers.rocketmq.formats.metadata import SegmentStatus
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.client import NamedObjects


class ClusterShelf:
    """Index files below `prefix` of names; those uploaded are segments of `path`."""

    def __init__(self, named: NamedObjects, keeper: ClusterKeeper, prefix: str, path: str) -> None:
        self._named = named
        self._keeper = keeper
        self._prefix = prefix
        self._path = path

    async def save(self, begin_ms: int, data: bytes) -> None:
        """Keep a local file, replacing what was kept of it."""
        before = await self._generations(begin_ms)
        generation = max(before, default=0) + 1
        await self._named.put(self._name(begin_ms, generation), data, owner=self._keeper.owner)
        await self._delete(begin_ms, before)

    async def load(self) -> dict[int, bytes]:
        """Return all local files."""
        newest: dict[int, int] = {}
        async for one in self._named.describe(prefix=self._prefix):
            begin, generation = self._place(one.name)
            newest[begin] = max(generation, newest.get(begin, 0))
        return {
            begin: await self._named.get(self._name(begin, generation))
            for begin, generation in newest.items()
        }

    async def remove(self, begin_ms: int) -> None:
        """Drop a local file; one that is not there counts as dropped."""
        await self._delete(begin_ms, await self._generations(begin_ms))

    async def uploaded(self) -> list[int]:
        """Return the begins of uploaded files."""
        found = self._keeper.table.segments_of(self._path, SegmentType.INDEX)
        return [one.base_offset for one in found if one.status is SegmentStatus.SEALED]

    async def note_uploaded(self, begin_ms: int) -> None:
        """Note that a file is uploaded; may be repeated."""
        table = self._keeper.table
        segment = table.segments[self._path, SegmentType.INDEX, begin_ms]
        if segment.status is not SegmentStatus.SEALED:
            table.put_segment(segment.sealed(segment.end_ms))
            await self._keeper.save()

    async def note_deleted(self, begin_ms: int) -> None:
        """Note that an uploaded file is deleted, before its bytes are."""
        table = self._keeper.table
        segment = table.segments[self._path, SegmentType.INDEX, begin_ms]
        table.put_segment(replace(segment, status=SegmentStatus.DELETED))
        await self._keeper.save()

    async def deleted(self) -> list[int]:
        """Return the begins of deleted files whose bytes may still be stored."""
        found = self._keeper.table.segments_of(self._path, SegmentType.INDEX)
        return [one.base_offset for one in found if one.status is SegmentStatus.DELETED]

    async def forget(self, begin_ms: int) -> None:
        """Forget a deleted file; may be repeated."""
        self._keeper.table.delete_segments(self._path, SegmentType.INDEX, begin_ms)
        await self._keeper.save()

    async def _delete(self, begin_ms: int, generations: list[int]) -> None:
        if generations:
            await self._named.delete([self._name(begin_ms, one) for one in generations])

    async def _generations(self, begin_ms: int) -> list[int]:
        prefix = f"{self._prefix}{begin_ms:020}/"
        return [self._place(one.name)[1] async for one in self._named.describe(prefix=prefix)]

    def _name(self, begin_ms: int, generation: int) -> str:
        return f"{self._prefix}{begin_ms:020}/{generation:010}"

    def _place(self, name: str) -> tuple[int, int]:
        begin, _, generation = name.removeprefix(self._prefix).partition("/")
        return int(begin), int(generation)

"""Store of a broker's key index on a cluster: local files are named objects of a key.

A named object never changes, so each save of a file creates an object of a new generation. The
newest one counts, and older ones are deleted after the save. Uploaded files are in the broker's
metadata.
"""

from __future__ import annotations

from dataclasses import replace

from streammeta.brokers.rocketmq.cluster.cluster_metadata import ClusterKeeper
from streammeta.brokers.rocketmq.formats.metadata import SegmentStatus
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.client import NamedObjects


class ClusterShelf:
    """Local index files below `prefix` of names. Uploaded ones are segments of `path`."""

    def __init__(self, named: NamedObjects, keeper: ClusterKeeper, prefix: str, path: str) -> None:
        self._named = named
        self._keeper = keeper
        self._prefix = prefix
        self._path = path

    async def save(self, begin_ms: int, data: bytes) -> None:
        """Store a local file, replacing its earlier form."""
        before = await self._generations(begin_ms)
        # The new generation is stored before older ones are deleted, so a crash loses nothing.
        generation = max(before, default=0) + 1
        await self._named.put(self._name(begin_ms, generation), data, owner=self._keeper.owner)
        await self._delete(begin_ms, before)

    async def load(self) -> dict[int, bytes]:
        """Return all local files."""
        newest: dict[int, int] = {}
        async for object_ in self._named.describe(prefix=self._prefix):
            begin, generation = self._place(object_.name)
            # A crash during a save may leave two generations.
            newest[begin] = max(generation, newest.get(begin, 0))
        return {
            begin: await self._named.get(self._name(begin, generation))
            for begin, generation in newest.items()
        }

    async def remove(self, begin_ms: int) -> None:
        """Drop a local file. A missing file counts as dropped."""
        await self._delete(begin_ms, await self._generations(begin_ms))

    async def list_uploaded(self) -> list[int]:
        """Return the begins of uploaded files."""
        found = self._keeper.table.segments_of(self._path, SegmentType.INDEX)
        return [segment.base_offset for segment in found if segment.status is SegmentStatus.SEALED]

    async def note_uploaded(self, begin_ms: int) -> None:
        """Note that a file is uploaded. May be repeated."""
        table = self._keeper.table
        segment = table.segments[self._path, SegmentType.INDEX, begin_ms]
        # A repetition must not save the metadata a second time.
        if segment.status is not SegmentStatus.SEALED:
            table.put_segment(segment.with_seal(segment.end_ms))
            await self._keeper.save()

    async def note_deleted(self, begin_ms: int) -> None:
        """Note that an uploaded file is deleted, before its bytes are."""
        table = self._keeper.table
        segment = table.segments[self._path, SegmentType.INDEX, begin_ms]
        table.put_segment(replace(segment, status=SegmentStatus.DELETED))
        await self._keeper.save()

    async def list_deleted(self) -> list[int]:
        """Return the begins of deleted files whose bytes may still be stored."""
        found = self._keeper.table.segments_of(self._path, SegmentType.INDEX)
        return [segment.base_offset for segment in found if segment.status is SegmentStatus.DELETED]

    async def forget(self, begin_ms: int) -> None:
        """Forget a deleted file. May be repeated."""
        self._keeper.table.delete_segments(self._path, SegmentType.INDEX, begin_ms)
        await self._keeper.save()

    async def _delete(self, begin_ms: int, generations: list[int]) -> None:
        if generations:
            await self._named.delete(
                [self._name(begin_ms, generation) for generation in generations]
            )

    async def _generations(self, begin_ms: int) -> list[int]:
        prefix = f"{self._prefix}{begin_ms:020}/"
        return [
            self._place(object_.name)[1] async for object_ in self._named.describe(prefix=prefix)
        ]

    def _name(self, begin_ms: int, generation: int) -> str:
        return f"{self._prefix}{begin_ms:020}/{generation:010}"

    def _place(self, name: str) -> tuple[int, int]:
        begin, _, generation = name.removeprefix(self._prefix).partition("/")
        return int(begin), int(generation)

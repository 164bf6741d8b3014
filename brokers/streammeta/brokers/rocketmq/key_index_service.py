"""The key index of a broker: files by their begin, of which the newest takes puts.

Sealed files are compacted and uploaded as one segment each, the oldest first. Local files are kept
in a shelf across restarts; a start opens a file of its own and seals those it found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from streammeta.brokers.rocketmq.formats.key_index import (
    ALL_TIMES,
    HEADER_SIZE,
    IndexHeader,
    IndexItem,
    LocalIndex,
    PutResult,
    TimeRange,
    query_compacted,
)
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.segments.file_segment import FileSegment, SegmentReadError
from streammeta.brokers.rocketmq.segments.storage import SegmentStore

_PUT_ATTEMPTS = 3


class IndexStatus(IntEnum):
    """Stages of an index file: written, full, uploaded."""

    UNSEALED = 0
    SEALED = 1
    UPLOAD = 2


class IndexShelf(Protocol):
    """Keeps local index files by their begin, in ms since 1970."""

    async def save(self, begin_ms: int, data: bytes) -> None:
        """Keep a local file, replacing what was kept of it."""
        ...

    async def load(self) -> dict[int, bytes]:
        """Return all local files."""
        ...

    async def remove(self, begin_ms: int) -> None:
        """Drop a local file; one that is not there counts as dropped."""
        ...

    async def uploaded(self) -> list[int]:
        """Return the begins of uploaded files."""
        ...

    async def note_uploaded(self, begin_ms: int) -> None:
        """Note that a file is uploaded; may be repeated."""
        ...

    async def note_deleted(self, begin_ms: int) -> None:
        """Note that an uploaded file is deleted, before its bytes are."""
        ...

    async def deleted(self) -> list[int]:
        """Return the begins of deleted files whose bytes may still be stored."""
        ...

    async def forget(self, begin_ms: int) -> None:
        """Forget a deleted file; may be repeated."""
        ...


@dataclass(slots=True)
class MemoryShelf:
    """Index files in memory, for tests and trials."""

    local: dict[int, bytes] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    marked: list[int] = field(default_factory=list)

    async def save(self, begin_ms: int, data: bytes) -> None:
        """Keep a local file."""
        self.local[begin_ms] = data

    async def load(self) -> dict[int, bytes]:
        """Return all local files."""
        return dict(self.local)

    async def remove(self, begin_ms: int) -> None:
        """Drop a local file."""
        self.local.pop(begin_ms, None)

    async def uploaded(self) -> list[int]:
        """Return the begins of uploaded files."""
        return list(self.done)

    async def note_uploaded(self, begin_ms: int) -> None:
        """Note that a file is uploaded."""
        self.done.append(begin_ms)

    async def note_deleted(self, begin_ms: int) -> None:
        """Note that an uploaded file is deleted."""
        self.done.remove(begin_ms)
        self.marked.append(begin_ms)

    async def deleted(self) -> list[int]:
        """Return the begins of deleted files."""
        return list(self.marked)

    async def forget(self, begin_ms: int) -> None:
        """Forget a deleted file."""
        self.marked.remove(begin_ms)


@dataclass(frozen=True, slots=True)
class IndexSizes:
    """Numbers of slots, and of places for items with the empty first one."""

    slots: int = 5_000_000
    max_items: int = 20_000_000


@dataclass(slots=True)
class _IndexFile:
    begin_ms: int
    status: IndexStatus
    end_ms: int
    local: LocalIndex | None = None
    segment: FileSegment | None = None

    @property
    def last_ms(self) -> int:
        return self.end_ms if self.local is None else self.local.end_ms


class KeyIndexService:
    """Puts and queries over all index files; make it with `open`."""

    def __init__(
        self,
        path: str,
        store: SegmentStore,
        shelf: IndexShelf,
        now_ms: Callable[[], int],
        sizes: IndexSizes,
    ) -> None:
        self._path = path
        self._store = store
        self._shelf = shelf
        self._now_ms = now_ms
        self._sizes = sizes
        self._files: dict[int, _IndexFile] = {}
        self._deleted: dict[int, FileSegment] = {}
        self._storing = asyncio.Lock()
        """Held by what writes or deletes stored files: one such work at a time."""

    @classmethod
    async def open(
        cls,
        path: str,
        store: SegmentStore,
        shelf: IndexShelf,
        now_ms: Callable[[], int],
        sizes: IndexSizes | None = None,
    ) -> KeyIndexService:
        """Take over the files of earlier runs and open a new one."""
        service = cls(path, store, shelf, now_ms, sizes or IndexSizes())
        for begin in await shelf.uploaded():
            segment = service._segment(begin)
            size = await segment.storage.size() or 0
            segment.commit_position = segment.append_position = size
            header = IndexHeader.decode(await segment.read(0, HEADER_SIZE))
            service._files[begin] = _IndexFile(
                begin, IndexStatus.UPLOAD, header.end_ms, segment=segment
            )
        for begin, data in (await shelf.load()).items():
            local = LocalIndex.decode(data, service._sizes.slots, service._sizes.max_items)
            service._files.setdefault(
                begin, _IndexFile(begin, IndexStatus.SEALED, local.end_ms, local)
            )
        service._open_file()
        return service

    def _segment(self, begin_ms: int) -> FileSegment:
        storage = self._store.segment(self._path, SegmentType.INDEX, begin_ms)
        return FileSegment(SegmentType.INDEX, begin_ms, storage)

    def _open_file(self) -> _IndexFile:
        begin = max(self._now_ms(), max(self._files, default=-1) + 1)
        local = LocalIndex(begin, self._sizes.slots, self._sizes.max_items)
        self._files[begin] = _IndexFile(begin, IndexStatus.UNSEALED, 0, local)
        return self._files[begin]

    @property
    def begins_ms(self) -> list[int]:
        """Begins of all files, ascending, in ms since 1970."""
        return sorted(self._files)

    @property
    def statuses(self) -> list[IndexStatus]:
        """Stages of all files, oldest first."""
        return [self._files[begin].status for begin in self.begins_ms]

    def put(
        self,
        topic: str | None,
        topic_id: int,
        queue_id: int,
        keys: Iterable[str] | None,
        offset: int,
        size: int,
        timestamp_ms: int,
    ) -> PutResult:
        """Index a message in the newest file, or in a new one if that is full.

        FILE_FULL: no file has room for so many keys.
        """
        keys = list(keys or ())
        current = self._files[max(self._files)]
        for _ in range(_PUT_ATTEMPTS):
            assert current.local is not None
            result = current.local.put(topic, topic_id, queue_id, keys, offset, size, timestamp_ms)
            if result is not PutResult.FILE_FULL or not current.local.item_count:
                return result
            current.status = IndexStatus.SEALED
            current = self._open_file()
        return PutResult.FILE_FULL

    async def query(
        self, topic: str, key: str, max_items: int, times: TimeRange = ALL_TIMES
    ) -> list[IndexItem]:
        """Return items of a key from all files that may hold messages of these times.

        Files are asked newest first. A message that two files hold, because it was dispatched
        again after a crash, is returned once.
        """
        found: dict[tuple[int, int, int], IndexItem] = {}
        for begin in reversed(self.begins_ms):
            one = self._files.get(begin)
            if one is None or begin > times.end_ms or one.last_ms < times.begin_ms:
                continue
            try:
                items = await self._query_file(one, topic, key, max_items, times)
            except SegmentReadError:
                if begin in self._files:
                    raise
                continue  # the file has expired meanwhile
            for item in items:
                found.setdefault((item.topic_id, item.queue_id, item.offset), item)
            if len(found) >= max_items:
                break
        return list(found.values())[:max_items]

    async def _query_file(
        self, one: _IndexFile, topic: str, key: str, max_items: int, times: TimeRange
    ) -> list[IndexItem]:
        if one.local is not None:
            return one.local.query(topic, key, max_items, times)
        assert one.segment is not None
        return await query_compacted(
            one.segment.read, self._sizes.slots, topic, key, max_items, one.begin_ms, times
        )

    async def compact_oldest(self) -> bool:
        """Compact and upload the oldest sealed file; False: there is none, or the upload failed."""
        async with self._storing:
            for begin in self.begins_ms:
                one = self._files[begin]
                if one.status is IndexStatus.SEALED and one.local is not None:
                    return await self._upload(one, one.local)
        return False

    async def _upload(self, one: _IndexFile, local: LocalIndex) -> bool:
        """Replace a local file by its compacted form: uploaded, noted, and only then removed."""
        segment = self._segment(one.begin_ms)
        await segment.storage.destroy()
        segment.append(local.compact(), local.end_ms)
        if not await segment.commit():
            return False
        await self._shelf.note_uploaded(one.begin_ms)
        await self._shelf.remove(one.begin_ms)
        one.end_ms = local.end_ms
        one.segment, one.local, one.status = segment, None, IndexStatus.UPLOAD
        return True

    async def expire(self, before_ms: int) -> int:
        """Delete files whose newest message, and whose begin, are older; return their number.

        The newest file stays. May be repeated after any failure.
        """
        async with self._storing:
            return await self._expire(before_ms)

    async def _expire(self, before_ms: int) -> int:
        for begin in self.begins_ms[:-1]:
            file = self._files[begin]
            if max(begin, file.last_ms) >= before_ms:
                continue
            if file.segment is not None:
                await self._shelf.note_deleted(begin)
                self._deleted[begin] = file.segment
            del self._files[begin]
            await self._shelf.remove(begin)

        deleted = 0
        for begin in await self._shelf.deleted():
            segment = self._deleted.get(begin) or self._segment(begin)
            await segment.delete()
            await self._shelf.forget(begin)
            self._deleted.pop(begin, None)
            deleted += 1
        return deleted

    async def flush(self) -> None:
        """Save the local files, so that the next start finds them."""
        async with self._storing:
            for one in list(self._files.values()):  # puts may open further ones meanwhile
                if one.local is not None:
                    await self._shelf.save(one.begin_ms, one.local.encode())

    async def compacted(self) -> list[tuple[int, int, bytes]]:
        """Return begin, end and compacted form of all files that have items, oldest first."""
        found = []
        for begin in self.begins_ms:
            one = self._files[begin]
            if one.local is not None and one.local.item_count:
                found.append((begin, one.local.end_ms, one.local.compact()))
            elif one.segment is not None:
                data = await one.segment.read(0, one.segment.commit_position)
                found.append((begin, one.end_ms, data))
        return found

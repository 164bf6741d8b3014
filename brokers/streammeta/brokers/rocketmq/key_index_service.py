"""Key index of a broker: files by their begin time. The newest file accepts puts.

Sealed files are compacted and uploaded as one segment each, the oldest first. A shelf stores local
files across restarts. A start opens a new file and seals the files of earlier runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from streammeta.brokers.rocketmq.formats import key_index
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.segments.file_segment import FileSegment, SegmentReadError
from streammeta.brokers.rocketmq.segments.storage import SegmentStore

# Each attempt opens a file. More of them would not make room for more keys than a file has places.
_PUT_ATTEMPTS = 3


class IndexStatus(IntEnum):
    """Stages of an index file: written, full, uploaded."""

    UNSEALED = 0
    SEALED = 1
    UPLOAD = 2


class IndexShelf(Protocol):
    """Store of local index files by their begin, in ms since 1970."""

    async def save(self, begin_ms: int, data: bytes) -> None:
        """Store a local file, replacing its earlier form."""
        ...

    async def load(self) -> dict[int, bytes]:
        """Return all local files."""
        ...

    async def remove(self, begin_ms: int) -> None:
        """Drop a local file. A missing file counts as dropped."""
        ...

    async def list_uploaded(self) -> list[int]:
        """Return the begins of uploaded files."""
        ...

    async def note_uploaded(self, begin_ms: int) -> None:
        """Note that a file is uploaded. May be repeated."""
        ...

    async def note_deleted(self, begin_ms: int) -> None:
        """Note that an uploaded file is deleted, before its bytes are."""
        ...

    async def list_deleted(self) -> list[int]:
        """Return the begins of deleted files whose bytes may still be stored."""
        ...

    async def forget(self, begin_ms: int) -> None:
        """Forget a deleted file. May be repeated."""
        ...


@dataclass(frozen=True, slots=True)
class IndexSizes:
    """Numbers of slots and of places for items, including the empty first place."""

    slots: int = 5_000_000
    max_items: int = 20_000_000


@dataclass(slots=True)
class _IndexFile:
    begin_ms: int
    status: IndexStatus
    end_ms: int
    local: key_index.LocalIndex | None = None
    segment: FileSegment | None = None

    @property
    def last_ms(self) -> int:
        return self.end_ms if self.local is None else self.local.end_ms


@dataclass(eq=False)
class KeyIndexService:
    """Puts and queries over all index files. Create it with `open`."""

    _path: str
    _store: SegmentStore
    _shelf: IndexShelf
    _now_ms: Callable[[], int]
    _sizes: IndexSizes
    _files: dict[int, _IndexFile] = field(default_factory=dict, init=False)
    _deleted: dict[int, FileSegment] = field(default_factory=dict, init=False)
    _storing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held while stored files are written or deleted, one change at a time."""

    @classmethod
    async def open(
        cls,
        path: str,
        store: SegmentStore,
        shelf: IndexShelf,
        now_ms: Callable[[], int],
        sizes: IndexSizes | None = None,
    ) -> KeyIndexService:
        """Load the files of earlier runs and open a new one."""
        service = cls(path, store, shelf, now_ms, sizes or IndexSizes())

        # Uploaded files are read first: a file that is also local was uploaded before a crash.
        for begin in await shelf.list_uploaded():
            segment = service._segment(begin)
            size = await segment.storage.size() or 0
            segment.commit_position = segment.append_position = size
            header = key_index.IndexHeader.decode(await segment.read(0, key_index.HEADER_SIZE))
            service._files[begin] = _IndexFile(
                begin, IndexStatus.UPLOAD, header.end_ms, segment=segment
            )

        for begin, data in (await shelf.load()).items():
            local = key_index.LocalIndex.decode(
                data, service._sizes.slots, service._sizes.max_items
            )
            service._files.setdefault(
                begin, _IndexFile(begin, IndexStatus.SEALED, local.end_ms, local)
            )
        service._open_file()
        return service

    def _segment(self, begin_ms: int) -> FileSegment:
        storage = self._store.segment(self._path, SegmentType.INDEX, begin_ms)
        return FileSegment(SegmentType.INDEX, begin_ms, storage)

    def _open_file(self) -> _IndexFile:
        # Begins identify files, so two files of one millisecond need different ones.
        begin = max(self._now_ms(), max(self._files, default=-1) + 1)
        local = key_index.LocalIndex(begin, self._sizes.slots, self._sizes.max_items)
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
    ) -> key_index.PutResult:
        """Index a message in the newest file, or in a new one if that is full.

        Returns FILE_FULL if no file has room for so many keys.
        """
        keys = list(keys or ())
        current = self._files[max(self._files)]
        for _ in range(_PUT_ATTEMPTS):
            assert current.local is not None
            result = current.local.put(topic, topic_id, queue_id, keys, offset, size, timestamp_ms)
            if result is not key_index.PutResult.FILE_FULL or not current.local.item_count:
                return result

            current.status = IndexStatus.SEALED
            current = self._open_file()
        return key_index.PutResult.FILE_FULL

    async def query(
        self, topic: str, key: str, max_items: int, times: key_index.TimeRange = key_index.ALL_TIMES
    ) -> list[key_index.IndexItem]:
        """Return items of a key from all files that may contain messages of these times.

        Files are queried newest first. A message in two files, because it was dispatched twice
        around a crash, is returned once.
        """
        found: dict[tuple[int, int, int], key_index.IndexItem] = {}
        for begin in reversed(self.begins_ms):
            file = self._files.get(begin)
            # A file contains only messages between its begin and its last time.
            if file is None or begin > times.end_ms or file.last_ms < times.begin_ms:
                continue
            try:
                items = await self._query_file(file, topic, key, max_items, times)
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
        self, file: _IndexFile, topic: str, key: str, max_items: int, times: key_index.TimeRange
    ) -> list[key_index.IndexItem]:
        if file.local is not None:
            return file.local.query(topic, key, max_items, times)
        assert file.segment is not None
        return await key_index.query_compacted(
            file.segment.read, self._sizes.slots, topic, key, max_items, file.begin_ms, times
        )

    async def compact_oldest(self) -> bool:
        """Compact and upload the oldest sealed file. Return False without one, or on a failure."""
        async with self._storing:
            for begin in self.begins_ms:
                file = self._files[begin]
                if file.status is IndexStatus.SEALED and file.local is not None:
                    return await self._upload(file, file.local)
        return False

    async def _upload(self, file: _IndexFile, local: key_index.LocalIndex) -> bool:
        """Replace a local file with its compacted form: uploaded, noted, and only then removed."""
        segment = self._segment(file.begin_ms)
        # A failed upload may have left bytes, which would precede the new ones.
        await segment.storage.destroy()
        segment.append(local.compact(), local.end_ms)
        if not await segment.commit():
            return False

        # A crash before the removal leaves both forms, and a start prefers the uploaded one.
        await self._shelf.note_uploaded(file.begin_ms)
        await self._shelf.remove(file.begin_ms)
        file.end_ms = local.end_ms
        file.segment, file.local, file.status = segment, None, IndexStatus.UPLOAD
        return True

    async def expire(self, before_ms: int) -> int:
        """Delete files whose begin and newest message are older, and return their number.

        The newest file stays. May be repeated after any failure.
        """
        async with self._storing:
            return await self._expire(before_ms)

    async def _expire(self, before_ms: int) -> int:
        for begin in self.begins_ms[:-1]:
            file = self._files[begin]
            if max(begin, file.last_ms) >= before_ms:
                continue
            # Marked before the deletion, so that a crash leaves the rest to the next call.
            if file.segment is not None:
                await self._shelf.note_deleted(begin)
                self._deleted[begin] = file.segment
            del self._files[begin]
            await self._shelf.remove(begin)

        deleted = 0
        for begin in await self._shelf.list_deleted():
            segment = self._deleted.get(begin) or self._segment(begin)
            await segment.delete()
            await self._shelf.forget(begin)
            self._deleted.pop(begin, None)
            deleted += 1
        return deleted

    async def flush(self) -> None:
        """Save the local files, so that the next start finds them."""
        async with self._storing:
            # Puts may open further files during a save.
            for file in list(self._files.values()):
                if file.local is not None:
                    await self._shelf.save(file.begin_ms, file.local.encode())

    async def read_compacted(self) -> list[tuple[int, int, bytes]]:
        """Return begin, end and compacted form of all files that have items, oldest first."""
        found = []
        for begin in self.begins_ms:
            file = self._files[begin]
            if file.local is not None and file.local.item_count:
                found.append((begin, file.local.end_ms, file.local.compact()))
            elif file.segment is not None:
                data = await file.segment.read(0, file.segment.commit_position)
                found.append((begin, file.end_ms, data))
        return found

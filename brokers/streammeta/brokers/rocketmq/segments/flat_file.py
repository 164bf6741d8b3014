"""A flat file: segments that follow each other, of which the last one takes appends.

Knows nothing of messages. Every change of the segments is in the metadata before it is relied on;
the size of the last segment is the backend's to say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from streammeta.brokers.rocketmq.formats.metadata import (
    MetadataTable,
    SegmentMetadata,
    SegmentStatus,
)
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.segments.file_segment import (
    AppendResult,
    FileSegment,
    SegmentReadError,
)
from streammeta.brokers.rocketmq.segments.storage import SegmentStore


class SizeUnknownError(Exception):
    """The backend does not say how large the last segment is."""

    def __init__(self, path: str, base_offset: int) -> None:
        super().__init__(
            f"size of the segment at {base_offset} of {path} is not known now; open it again"
        )


class SegmentCutError(Exception):
    """The backend has fewer bytes of a segment than were committed."""

    def __init__(self, path: str, base_offset: int, size: int, wanted: int) -> None:
        super().__init__(
            f"segment at {base_offset} of {path} has {size} bytes, wanted {wanted}: committed bytes"
            " are lost; restore them, or destroy the topic"
        )


class NoSegmentError(Exception):
    """The flat file has no segment yet."""

    code = "IllegalState"

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} has no segment; set its first offset before appending")


class MetadataKeeper(Protocol):
    """Keeps the metadata of a broker durably."""

    table: MetadataTable

    async def save(self) -> None:
        """Make the table durable as it is now."""
        ...

    def require_owner(self) -> None:
        """Raise if the process is known to be replaced."""
        ...

    async def prove_owner(self) -> None:
        """Raise unless this is the newest process of its broker; note the store's time."""
        ...


@dataclass(slots=True)
class MemoryKeeper:
    """Metadata in memory, for tests and trials."""

    table: MetadataTable = field(default_factory=MetadataTable)
    saves: int = 0

    async def save(self) -> None:
        """Count the call: the table is all there is."""
        self.saves += 1

    def require_owner(self) -> None:
        """Do nothing: nobody else has the table."""

    async def prove_owner(self) -> None:
        """Save the time: nobody else has the table."""
        await self.save()


@dataclass(frozen=True, slots=True)
class FlatFilePlace:
    """What flat files of a broker share."""

    store: SegmentStore
    keeper: MetadataKeeper
    now_ms: Callable[[], int]
    max_buffers: int = 10_000


class FlatFile:
    """Segments of one kind of a queue; offsets are bytes."""

    smallest_append = 1
    """Smallest append in bytes: a segment with less room is full."""
    takes_larger = False
    """Whether an append that is larger than a segment gets a segment of its own."""

    def __init__(
        self, place: FlatFilePlace, path: str, kind: SegmentType, max_size: int | None
    ) -> None:
        self._place = place
        self.path = path
        self.kind = kind
        self.max_size = max_size
        self.segments: list[FileSegment] = []
        self._deleted: list[FileSegment] = []
        """Segments that the metadata says are deleted, and whose bytes may still be stored."""
        self._resume_offset = 0
        """Where a file without segments goes on."""

    async def open(self) -> None:
        """Take over the segments of the metadata.

        Raises:
            SizeUnknownError: the backend does not say the size of the last one.
            SegmentCutError: the backend has lost committed bytes of the last one.
        """
        noted = self._place.keeper.table.segments_of(self.path, self.kind)
        is_deleted = SegmentStatus.DELETED
        self._deleted = [
            self._segment(one.base_offset) for one in noted if one.status is is_deleted
        ]
        listed = [one for one in noted if one.status is not is_deleted]
        for number, one in enumerate(listed, start=1):
            segment = self._segment(one.base_offset)
            size: int | None = one.size
            if number == len(listed) and one.status is SegmentStatus.NEW:
                size = await segment.storage.size()
            if size is None:
                raise SizeUnknownError(self.path, one.base_offset)
            if size < one.size:
                raise SegmentCutError(self.path, one.base_offset, size, one.size)
            segment.commit_position = segment.append_position = size
            segment.min_timestamp_ms, segment.max_timestamp_ms = one.begin_ms, one.end_ms
            if size != one.size:  # times of the rest were never noted: as late as they can be
                segment.max_timestamp_ms = self._place.now_ms()
                segment.min_timestamp_ms = min(one.begin_ms, segment.max_timestamp_ms)
            segment.closed = one.status is SegmentStatus.SEALED
            self.segments.append(segment)
        await self._seal_full()

    async def _seal_full(self) -> None:
        """Seal a last segment that takes no further append: a crash came before it was sealed."""
        if self.segments and self.max_size is not None:
            last = self.segments[-1]
            if not last.closed and last.commit_position + self.smallest_append > self.max_size:
                await self.seal()

    def _segment(self, base_offset: int) -> FileSegment:
        storage = self._place.store.segment(self.path, self.kind, base_offset)
        return FileSegment(self.kind, base_offset, storage, self.max_size, self._place.max_buffers)

    @property
    def min_offset(self) -> int:
        """First offset that a segment has."""
        return self.segments[0].base_offset if self.segments else self._resume_offset

    @property
    def commit_offset(self) -> int:
        """End of what is committed."""
        return self.segments[-1].commit_offset if self.segments else self._resume_offset

    @property
    def append_offset(self) -> int:
        """End of what was appended."""
        return self.segments[-1].append_offset if self.segments else self._resume_offset

    @property
    def min_timestamp_ms(self) -> int:
        """Time of the first message, -1 without segments."""
        return self.segments[0].min_timestamp_ms if self.segments else -1

    @property
    def max_timestamp_ms(self) -> int:
        """Latest time of the last segment, -1 without segments."""
        return self.segments[-1].max_timestamp_ms if self.segments else -1

    def writable(self) -> FileSegment:
        """Return the segment that takes appends; raise `NoSegmentError` without one."""
        if not self.segments:
            raise NoSegmentError(self.path)
        return self.segments[-1]

    def resume_at(self, offset: int) -> None:
        """Let a file without segments continue at this offset."""
        if not self.segments:
            self._resume_offset = offset

    async def init_offset(self, offset: int) -> None:
        """Begin a file without segments at this offset."""
        if not self.segments:
            await self.roll(offset)

    async def roll(self, base_offset: int) -> None:
        """Add a segment that begins here; raise `ValueError` if it would overlap the last one."""
        if base_offset < self.append_offset:
            raise ValueError(
                f"segment of {self.path} begins at {base_offset}, wanted {self.append_offset} or"
                " more"
            )
        segment = self._segment(base_offset)
        self._place.keeper.table.put_segment(
            SegmentMetadata(self.path, self.kind, base_offset, create_ms=self._place.now_ms())
        )
        await self._place.keeper.save()
        self.segments.append(segment)

    async def append(self, data: bytes, timestamp_ms: int) -> AppendResult:
        """Append bytes, in a new segment if the last one is full; see `make_room` for refusals."""
        result = await self.make_room(len(data))
        if result is not AppendResult.SUCCESS:
            return result
        return self.writable().append(data, timestamp_ms)

    async def make_room(self, size: int) -> AppendResult:
        """Add a segment unless the last one has room for so many bytes.

        UNKNOWN_ERROR: the last one is full and can't be committed now; FILE_FULL: no segment takes
        so much. Raises `NoSegmentError`.
        """
        if not self.segments and self._resume_offset:
            await self.roll(self._resume_offset)
        result = self._check_room(size)
        if result not in (AppendResult.FILE_FULL, AppendResult.FILE_CLOSED):
            return result
        if self.max_size is not None and size > self.max_size and not self.takes_larger:
            return AppendResult.FILE_FULL
        if not self.writable().closed and not await self.seal():
            return AppendResult.UNKNOWN_ERROR
        await self.roll(self.append_offset)
        return self._check_room(size)

    def _check_room(self, size: int) -> AppendResult:
        """Return whether the last segment has room; an empty one may grow for one larger append."""
        segment = self.writable()
        if self.takes_larger and not segment.append_position and segment.max_size is not None:
            segment.max_size = max(segment.max_size, size)
        return segment.check_append(size)

    async def seal(self) -> bool:
        """Commit the last segment and let it take nothing more; False if it can't be committed."""
        segment = self.writable()
        while segment.needs_commit:
            if not await segment.commit():
                return False
        segment.close()
        self._note(segment)
        await self._place.keeper.save()
        await segment.storage.seal()
        return True

    async def commit(self) -> bool:
        """Upload what waits, then note the sizes; False: not all of it is committed."""
        if not self.segments:
            return True
        segment = self.segments[-1]
        if segment.closed:
            return True
        before = segment.commit_position
        done = await segment.commit()
        if segment.commit_position != before:
            self._note(segment)
            await self._place.keeper.save()
        return done

    def _note(self, segment: FileSegment) -> None:
        table = self._place.keeper.table
        known = table.segments[self.path, self.kind, segment.base_offset]
        noted = replace(
            known,
            size=segment.commit_position,
            begin_ms=segment.min_timestamp_ms,
            end_ms=segment.max_timestamp_ms,
        )
        is_new = known.status is SegmentStatus.NEW
        table.put_segment(
            noted.sealed(self._place.now_ms()) if segment.closed and is_new else noted
        )

    @property
    def has_other_writer(self) -> bool:
        """Whether another process has written where the last segment is to be continued."""
        return bool(self.segments) and self.segments[-1].has_other_writer

    async def reload(self) -> None:
        """Take over the stored bytes of the last segment, and drop bytes that wait.

        Raises `SizeUnknownError`.
        """
        if not self.segments or self.segments[-1].closed:
            return
        former = self.segments[-1]
        size = await former.storage.reload()
        if size is None:
            raise SizeUnknownError(self.path, former.base_offset)
        segment = self._segment(former.base_offset)
        segment.commit_position = segment.append_position = size
        if size:
            segment.max_timestamp_ms = self._place.now_ms()
            segment.min_timestamp_ms = min(former.min_timestamp_ms, segment.max_timestamp_ms)
        self.segments[self.segments.index(former)] = segment
        self._note(segment)
        await self._place.keeper.save()

    async def read(self, offset: int, length: int) -> bytes:
        """Return committed bytes from an offset on, over as many segments as they lie in.

        Raises:
            SegmentReadError: the offset is not committed, or no byte is asked for.
        """
        parts: list[bytes] = []
        for segment in tuple(self.segments):  # the first ones may expire meanwhile
            if offset < segment.base_offset or offset >= segment.commit_offset:
                continue
            part = await segment.read(offset - segment.base_offset, length)
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
            if length <= 0:
                break
        if not parts:
            raise SegmentReadError(offset, length, self.commit_offset)
        return b"".join(parts)

    def next_offset(self, offset: int) -> int:
        """Return the smallest committed offset from `offset` on, behind a hole; or the end."""
        for segment in self.segments:
            if offset < segment.commit_offset:
                return max(offset, segment.base_offset)
        return self.commit_offset

    def has_expired(self, before_ms: int, created_before_ms: int | None = None) -> bool:
        """Whether the first segment is due: its newest message is older.

        With `created_before_ms` the segment must have been created before that too, so that
        messages with wrong times are kept as long. The last segment stays while bytes wait in it;
        an empty one that another follows is always due.
        """
        if not self.segments:
            return False
        head, is_last = self.segments[0], len(self.segments) == 1
        if is_last and head.needs_commit:
            return False
        if not is_last and not head.append_position:
            return True
        noted = self._noted(head)
        created_ms = 0 if noted is None else noted.create_ms
        if created_before_ms is not None and created_ms >= created_before_ms:
            return False
        return head.max_timestamp_ms < before_ms

    async def expire(self, before_ms: int, created_before_ms: int | None = None) -> int:
        """Delete first segments that are due, see `has_expired`; return the number of them."""
        deleted = await self.finish_deletions()
        while self.has_expired(before_ms, created_before_ms):
            deleted += await self.delete_first()
        return deleted

    async def destroy(self) -> None:
        """Delete all segments, and what waits with them."""
        await self.finish_deletions()
        while self.segments:
            await self.delete_first()
        self._resume_offset = 0

    async def delete_first(self) -> int:
        """Delete the first segment; return 1.

        The metadata says that it is deleted before a byte is, and forgets it last. So a crash or a
        failure leaves it to `finish_deletions`, here or after a restart.
        """
        segment = self.segments[0]
        segment.close()
        noted = self._noted(segment)
        if noted is not None:
            deleted = replace(noted, status=SegmentStatus.DELETED)
            self._place.keeper.table.put_segment(deleted)
            await self._place.keeper.save()
        if segment in self.segments:
            self._resume_offset = segment.append_offset
            self.segments.remove(segment)
            self._deleted.append(segment)
        return await self.finish_deletions()

    async def finish_deletions(self) -> int:
        """Delete the bytes of segments marked as deleted; return the number of segments."""
        finished = 0
        for segment in tuple(self._deleted):
            await segment.delete()
            self._place.keeper.table.delete_segments(self.path, self.kind, segment.base_offset)
            await self._place.keeper.save()
            if segment in self._deleted:  # another call may have finished it meanwhile
                self._deleted.remove(segment)
                finished += 1
        return finished

    def _noted(self, segment: FileSegment) -> SegmentMetadata | None:
        return self._place.keeper.table.segments.get((self.path, self.kind, segment.base_offset))

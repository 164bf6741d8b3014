"""Flat file: consecutive segments, of which the last one accepts appends.

Knows nothing of messages. Every change of the segments is saved in the metadata before it is relied
on. The size of the last segment comes from the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
            f"size of the segment at {base_offset} of {path} is unknown now. Open it again"
        )


class SegmentCutError(Exception):
    """The backend has fewer bytes of a segment than were committed."""

    def __init__(self, path: str, base_offset: int, size: int, wanted: int) -> None:
        super().__init__(
            f"segment at {base_offset} of {path} has {size} bytes, expected {wanted}:"
            " committed bytes are lost. Restore them, or destroy the topic"
        )


class NoSegmentError(Exception):
    """The flat file has no segment yet."""

    code = "IllegalState"

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} has no segment. Set its first offset before appending")


class MetadataKeeper(Protocol):
    """Durable store of a broker's metadata."""

    table: MetadataTable

    async def save(self) -> None:
        """Save the current table durably."""
        ...

    def require_owner(self) -> None:
        """Raise if the process is known to be replaced."""
        ...

    async def prove_owner(self) -> None:
        """Raise unless this is the newest process of its broker, and note the store's time."""
        ...


@dataclass(frozen=True, slots=True)
class FlatFilePlace:
    """Objects that the flat files of a broker share."""

    store: SegmentStore
    keeper: MetadataKeeper
    now_ms: Callable[[], int]
    max_buffers: int = 10_000


class FlatFile:
    """Segments of one kind of a queue. Offsets are bytes."""

    smallest_append = 1
    """Smallest append in bytes: a segment with less room is full."""
    takes_larger = False
    """Whether an append that is larger than a segment gets a separate segment."""

    def __init__(
        self, place: FlatFilePlace, path: str, kind: SegmentType, max_size: int | None
    ) -> None:
        self._place = place
        self.path = path
        self.kind = kind
        self.max_size = max_size
        self.segments: list[FileSegment] = []
        self._deleted: list[FileSegment] = []
        """Segments marked as deleted in the metadata, whose bytes may still be stored."""
        self._resume_offset = 0
        """Offset at which a file without segments continues."""

    async def open(self) -> None:
        """Load the segments of the metadata.

        Raises:
            SizeUnknownError: the backend does not say the size of the last one.
            SegmentCutError: the backend has lost committed bytes of the last one.
        """
        noted = self._place.keeper.table.segments_of(self.path, self.kind)
        is_deleted = SegmentStatus.DELETED
        self._deleted = [
            self._segment(metadata.base_offset)
            for metadata in noted
            if metadata.status is is_deleted
        ]

        listed = [metadata for metadata in noted if metadata.status is not is_deleted]
        for number, metadata in enumerate(listed, start=1):
            segment = self._segment(metadata.base_offset)
            size: int | None = metadata.size
            # Only an unsealed last segment can have grown after its metadata was saved.
            if number == len(listed) and metadata.status is SegmentStatus.NEW:
                size = await segment.storage.size()
            # Guessing a size could overwrite committed bytes.
            if size is None:
                raise SizeUnknownError(self.path, metadata.base_offset)
            if size < metadata.size:
                raise SegmentCutError(self.path, metadata.base_offset, size, metadata.size)
            segment.commit_position = segment.append_position = size
            segment.min_timestamp_ms, segment.max_timestamp_ms = metadata.begin_ms, metadata.end_ms
            if size != metadata.size:  # times of the rest were never noted: as late as they can be
                segment.max_timestamp_ms = self._place.now_ms()
                segment.min_timestamp_ms = min(metadata.begin_ms, segment.max_timestamp_ms)
            segment.closed = metadata.status is SegmentStatus.SEALED
            self.segments.append(segment)
        await self._seal_full()

    async def _seal_full(self) -> None:
        """Seal a full last segment, for which a crash came before its seal."""
        if self.segments and self.max_size is not None:
            # Other segments were sealed before a later one was added.
            last = self.segments[-1]
            if not last.closed and last.commit_position + self.smallest_append > self.max_size:
                await self.seal()

    def _segment(self, base_offset: int) -> FileSegment:
        storage = self._place.store.segment(self.path, self.kind, base_offset)
        return FileSegment(self.kind, base_offset, storage, self.max_size, self._place.max_buffers)

    @property
    def min_offset(self) -> int:
        """First offset of the first segment."""
        return self.segments[0].base_offset if self.segments else self._resume_offset

    @property
    def commit_offset(self) -> int:
        """End of the committed bytes."""
        return self.segments[-1].commit_offset if self.segments else self._resume_offset

    @property
    def append_offset(self) -> int:
        """End of the appended bytes."""
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
        """Return the segment that accepts appends. Raise `NoSegmentError` without one."""
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
        """Add a segment that begins here. Raise `ValueError` if it would overlap the last one."""
        if base_offset < self.append_offset:
            raise ValueError(
                f"segment of {self.path} begins at {base_offset}, expected"
                f" {self.append_offset} or more"
            )

        segment = self._segment(base_offset)
        self._place.keeper.table.put_segment(
            SegmentMetadata(self.path, self.kind, base_offset, create_ms=self._place.now_ms())
        )
        await self._place.keeper.save()
        # Appended only after the save: the metadata never misses a segment with bytes.
        self.segments.append(segment)

    async def append(self, data: bytes, timestamp_ms: int) -> AppendResult:
        """Append bytes, in a new segment if the last one is full (see `make_room` for failures)."""
        result = await self.make_room(len(data))
        if result is not AppendResult.SUCCESS:
            return result
        return self.writable().append(data, timestamp_ms)

    async def make_room(self, size: int) -> AppendResult:
        """Add a segment unless the last one has room for so many bytes.

        Returns UNKNOWN_ERROR if the last one is full and can't be committed now, and FILE_FULL if
        no segment is large enough. Raises `NoSegmentError`.
        """
        # All segments have expired. The file continues at its old end.
        if not self.segments and self._resume_offset:
            await self.roll(self._resume_offset)
        result = self._check_room(size)
        if result not in (AppendResult.FILE_FULL, AppendResult.FILE_CLOSED):
            return result
        # No segment is large enough, so a new one would not help.
        if self.max_size is not None and size > self.max_size and not self.takes_larger:
            return AppendResult.FILE_FULL
        if not self.writable().closed and not await self.seal():
            return AppendResult.UNKNOWN_ERROR

        await self.roll(self.append_offset)
        return self._check_room(size)

    def _check_room(self, size: int) -> AppendResult:
        """Return whether the last segment has room. An empty one may grow for one larger append."""
        segment = self.writable()
        if self.takes_larger and not segment.append_position and segment.max_size is not None:
            segment.max_size = max(segment.max_size, size)
        return segment.check_append(size)

    async def seal(self) -> bool:
        """Commit the last segment and close it. Return False if it can't be committed."""
        segment = self.writable()
        # A commit may upload only the rest of an earlier body, so commit until none waits.
        while segment.needs_commit:
            if not await segment.commit():
                return False
        # Closed before the save, so that no append follows the noted size.
        segment.close()
        self._note(segment)
        await self._place.keeper.save()
        await segment.storage.seal()
        return True

    async def commit(self) -> bool:
        """Upload appended bytes, then note the sizes. Return False if some are not committed."""
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
        # Status and creation time stay as they are noted.
        known = table.segments[self.path, self.kind, segment.base_offset]
        noted = replace(
            known,
            size=segment.commit_position,
            begin_ms=segment.min_timestamp_ms,
            end_ms=segment.max_timestamp_ms,
        )
        is_new = known.status is SegmentStatus.NEW
        table.put_segment(
            noted.with_seal(self._place.now_ms()) if segment.closed and is_new else noted
        )

    @property
    def has_other_writer(self) -> bool:
        """Whether another process has written at the end of the last segment."""
        return bool(self.segments) and self.segments[-1].has_other_writer

    async def reload(self) -> None:
        """Load the stored bytes of the last segment, and drop pending bytes.

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
        # Times of another process's messages are unknown, so the segment expires from now on.
        if size:
            segment.max_timestamp_ms = self._place.now_ms()
            segment.min_timestamp_ms = min(former.min_timestamp_ms, segment.max_timestamp_ms)

        self.segments[self.segments.index(former)] = segment
        self._note(segment)
        await self._place.keeper.save()

    async def read(self, offset: int, length: int) -> bytes:
        """Return committed bytes from an offset on, across segments.

        Raises:
            SegmentReadError: the offset is not committed, or no byte is requested.
        """
        parts: list[bytes] = []
        # The first segments may expire during a read, so iterate over a copy.
        for segment in tuple(self.segments):
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
        """Return the smallest committed offset from `offset` on, after a hole, or the end."""
        for segment in self.segments:
            if offset < segment.commit_offset:
                return max(offset, segment.base_offset)
        return self.commit_offset

    def has_expired(self, before_ms: int, created_before_ms: int | None = None) -> bool:
        """Whether the first segment is due: its newest message is older.

        With `created_before_ms` the segment must also have been created before that time, so that
        messages with wrong times are kept equally long. The last segment stays while it has pending
        bytes. An empty segment before another one is always due.
        """
        if not self.segments:
            return False

        head, is_last = self.segments[0], len(self.segments) == 1
        if is_last and head.needs_commit:
            return False
        if not is_last and not head.append_position:
            return True

        noted = self._find_metadata(head)
        created_ms = 0 if noted is None else noted.create_ms
        if created_before_ms is not None and created_ms >= created_before_ms:
            return False
        return head.max_timestamp_ms < before_ms

    async def expire(self, before_ms: int, created_before_ms: int | None = None) -> int:
        """Delete due first segments (see `has_expired`) and return their number."""
        deleted = await self.finish_deletions()
        while self.has_expired(before_ms, created_before_ms):
            deleted += await self.delete_first()
        return deleted

    async def destroy(self) -> None:
        """Delete all segments with their pending bytes."""
        await self.finish_deletions()
        while self.segments:
            await self.delete_first()
        self._resume_offset = 0

    async def delete_first(self) -> int:
        """Delete the first segment and return the number of deleted segments.

        The metadata marks it as deleted before the first byte is deleted, and forgets it last.
        After a crash or a failure `finish_deletions` completes it, here or after a restart.
        """
        segment = self.segments[0]
        segment.close()
        noted = self._find_metadata(segment)
        if noted is not None:
            deleted = replace(noted, status=SegmentStatus.DELETED)
            self._place.keeper.table.put_segment(deleted)
            await self._place.keeper.save()

        # A concurrent call may have removed it during the save.
        if segment in self.segments:
            self._resume_offset = segment.append_offset
            self.segments.remove(segment)
            self._deleted.append(segment)
        return await self.finish_deletions()

    async def finish_deletions(self) -> int:
        """Delete the bytes of segments marked as deleted. Return the number of segments."""
        finished = 0
        for segment in tuple(self._deleted):
            await segment.delete()
            self._place.keeper.table.delete_segments(self.path, self.kind, segment.base_offset)
            await self._place.keeper.save()
            # Another call may have finished it meanwhile.
            if segment in self._deleted:
                self._deleted.remove(segment)
                finished += 1
        return finished

    def _find_metadata(self, segment: FileSegment) -> SegmentMetadata | None:
        return self._place.keeper.table.segments.get((self.path, self.kind, segment.base_offset))

"""Handle of a shared stream, to which every broker may append."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from streammeta.client.api.stream import Stream
from streammeta.client.errors import StreamKindMismatchError
from streammeta.client.writing.shared_batches import SHARED_EPOCH, Producer


class SharedStream(Stream):
    """One shared stream: it has no owner, and the commit of a batch assigns its offsets.

    It is read, trimmed and deleted like another stream. It is never opened or closed, and its next
    offset is not known before an append: both raise `StreamKindMismatchError`, as does an append
    to a stream that is not shared.
    """

    @property
    def epoch(self) -> int:
        """The epoch of every shared stream, 0."""
        return SHARED_EPOCH

    @property
    def next_offset(self) -> NoReturn:
        """Raises `StreamKindMismatchError`. `describe` returns the present end."""
        raise self._mismatch("next offset", "the commit of an append assigns its offsets")

    async def append(
        self,
        record: bytes | Sequence[bytes],
        count: int = 1,
        *,
        producer: Producer | None = None,
        timestamp_ms: int | None = None,
        max_timestamp_ms: int | None = None,
    ) -> int:
        """Append a record of `count` offsets, or a sequence of records. Return the first offset.

        Returns once the object with them is committed. Records of one sequence get consecutive
        offsets. Concurrent appends to any shared streams share objects and commits. A batch of a
        `producer` that was committed before returns its first offset. For the rest, see
        `SharedWriter.append`.
        """
        future = await self._client.shared_writer.append(
            self.id,
            record,
            count,
            producer=producer,
            timestamp_ms=timestamp_ms,
            max_timestamp_ms=max_timestamp_ms,
        )
        return await future

    async def trim(self, new_start: int) -> int:
        """Move the first visible offset forward. Return the new one.

        Raises `RejectedError` for an offset below the present start or above the end.
        """
        trims = self._client.session.trim_streams({self.id: SHARED_EPOCH}, {self.id: new_start})
        return (await trims).require_all()[self.id]

    async def close(self) -> None:
        """Raise `StreamKindMismatchError`: there is nothing to close."""
        raise self._mismatch("close", "it is never open")

    async def delete(self) -> None:
        """Delete the stream with all its records."""
        (await self._client.delete_streams([self.id])).require_all()

    def _mismatch(self, subject: str, reason: str) -> StreamKindMismatchError:
        return StreamKindMismatchError(f"{subject} of shared stream {self.id}", detail=reason)

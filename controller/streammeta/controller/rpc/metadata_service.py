"""MetadataService: the whole map as one checkpoint file, streamed in chunks, and its changes."""

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from typing import BinaryIO

from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.metadata.requests import HoldDeletions
from streammeta.controller.rpc.door import StreamHandler
from streammeta.controller.rpc.status import Context, abort
from streammeta.controller.rpc.watch import WatchHandler
from streammeta.controller.runtime.admission import RequestClass
from streammeta.controller.runtime.controller import MetadataController
from streammeta.v1 import metadata_pb2 as pb

HOLD_MS_MAX = 604_800_000
"""A week: how long at most the bytes of a snapshot's objects are kept for its reader."""

CHUNK_BYTES_MAX = 1 << 20


class MetadataHandlers:
    """Writes a frozen map to a temporary file in a thread and sends it from there."""

    def __init__(
        self, controller: MetadataController, on_copied: Callable[[], None] = lambda: None
    ) -> None:
        """Call `on_copied` whenever a copy of the map was made for a caller."""
        self._controller = controller
        self._on_copied = on_copied
        self._watch = WatchHandler(controller.changes)

    def streams(self) -> Mapping[str, StreamHandler]:
        """Return the handlers by method name."""
        return {"GetSnapshot": self._get_snapshot, "Watch": self._watch.watch}

    async def _get_snapshot(self, request: pb.GetSnapshotRequest, context: Context) -> None:
        with tempfile.TemporaryFile() as file:
            try:
                # Few copies are made at a time; how slowly they are read is nobody else's concern.
                gate = self._controller.gate
                async with gate.admitted(RequestClass.SNAPSHOT, context.time_remaining()):
                    await self._require_offset(request.not_before_offset)
                    await self._hold_deletions(request.hold_ms)
                    frozen = await self._controller.frozen()
                    self._on_copied()
                    total = await asyncio.to_thread(frozen.write, file)
            except Exception as error:  # noqa: BLE001 - every failure of a call is a status
                await abort(context, error)
            for position in range(0, total, CHUNK_BYTES_MAX):
                chunk = pb.GetSnapshotResponse(
                    end_offset=frozen.id.end_offset,
                    epoch=frozen.id.epoch,
                    total_bytes=total,
                    position=position,
                    data=await asyncio.to_thread(_read_at, file, position),
                )
                await context.write(chunk)

    async def _require_offset(self, wanted: int) -> None:
        """Before anything is done: a refused call leaves no hold behind."""
        if wanted <= self._controller.committed_end:
            return
        end_offset = (await self._controller.frozen()).id.end_offset  # the newest, by a majority
        if wanted > end_offset:
            raise InvalidRequestError(
                "not_before_offset", f"{wanted}; the log is committed up to {end_offset} only"
            )

    async def _hold_deletions(self, hold_ms: int) -> None:
        """Before the copy is made, so that nothing it names can lose its bytes after it."""
        if not 0 <= hold_ms <= HOLD_MS_MAX:
            raise InvalidRequestError("hold_ms", f"{hold_ms}; wanted 0 to {HOLD_MS_MAX}, a week")
        if hold_ms:
            await self._controller.write(HoldDeletions(hold_ms=hold_ms))


def _read_at(file: BinaryIO, position: int) -> bytes:
    file.seek(position)
    return file.read(CHUNK_BYTES_MAX)

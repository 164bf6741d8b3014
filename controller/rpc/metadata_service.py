"""MetadataService: the whole map as one checkpoint file, streamed in chunks."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from typing import BinaryIO

from controller.errors import InvalidRequestError
from controller.loop.controller import MetadataController
from controller.rpc.routes import StreamHandler
from controller.rpc.status import Context, abort
from proto import metadata_pb2 as pb

CHUNK_BYTES_MAX = 1 << 20


class MetadataHandlers:
    """Writes a frozen map to a temporary file in a thread and sends it from there."""

    def __init__(self, controller: MetadataController) -> None:
        self._controller = controller

    def streams(self) -> Mapping[str, StreamHandler]:
        """Return the handlers by method name."""
        return {"GetSnapshot": self._get_snapshot}

    async def _get_snapshot(
        self, request: pb.GetSnapshotRequest, context: Context
    ) -> AsyncIterator[pb.SnapshotChunk]:
        try:
            frozen = await self._controller.frozen()
            _require_offset(request.not_before_offset, frozen.id.end_offset)
        except Exception as error:  # noqa: BLE001 - every failure of a call is a status
            await abort(context, error)
        with tempfile.TemporaryFile() as file:
            total = await asyncio.to_thread(frozen.write, file)
            for position in range(0, total, CHUNK_BYTES_MAX):
                yield pb.SnapshotChunk(
                    end_offset=frozen.id.end_offset,
                    epoch=frozen.id.epoch,
                    total_bytes=total,
                    position=position,
                    data=await asyncio.to_thread(_read_at, file, position),
                )


def _read_at(file: BinaryIO, position: int) -> bytes:
    file.seek(position)
    return file.read(CHUNK_BYTES_MAX)


def _require_offset(wanted: int, end_offset: int) -> None:
    if wanted > end_offset:
        raise InvalidRequestError(
            "not_before_offset", f"{wanted}; the log is committed up to {end_offset} only"
        )

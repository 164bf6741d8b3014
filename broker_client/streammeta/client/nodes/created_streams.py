"""Check that streams were created shared. Controllers of older versions create owned ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.errors import RejectedError, SharedStreamsUnsupportedError


class Deletions(Protocol):
    """Outcomes of deletions."""

    @property
    def failed(self) -> Mapping[int, RejectedError]:
        """Failures by stream id."""
        ...


async def require_shared(
    client: ControllerClient,
    created: Sequence[int],
    delete: Callable[[Mapping[int, int | None]], Awaitable[Deletions]],
) -> None:
    """Delete the created streams, by id and epoch, if one of them is owned.

    Raises `SharedStreamsUnsupportedError` then.
    """
    described = [stream async for stream in client.describe_streams(created)]
    if all(stream.is_shared for stream in described):
        return
    failed = (await delete({stream.stream_id: stream.epoch for stream in described})).failed
    left = f", and streams {sorted(failed)} can't be deleted" if failed else ""
    raise SharedStreamsUnsupportedError(
        f"creation of {len(created)} shared streams", detail=f"the leader made owned ones{left}"
    )

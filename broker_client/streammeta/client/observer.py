"""Seeing an upload go through its stages, for metrics, write-ahead logs and demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from streammeta.storage.object_format.index_block import StreamRange


class UploadObserver(Protocol):
    """What a `StreamWriter` tells about its uploads; every call is awaited before it goes on.

    Calls about one batch come in the order of the methods below; a batch whose objects expired
    starts over with new ids. What an observer raises is logged and changes nothing.
    """

    async def on_prepared(self, object_ids: Sequence[int], deadline_ms: int) -> None:
        """Learn that a batch has ids; uncommitted ones expire at `deadline_ms`, leader's clock."""

    async def on_uploaded(self, keys: Sequence[str]) -> None:
        """Learn that the objects with these keys are in the store, and not yet in the map."""

    async def on_committed(self, object_ids: Sequence[int], ranges: Sequence[StreamRange]) -> None:
        """Learn that the map holds these objects and, of them, these ranges."""

    async def on_refused(self, object_ids: Sequence[int], error: Exception) -> None:
        """Learn that these objects are not known to be committed; else they expire as garbage."""


class SilentObserver:
    """Looks at nothing."""

    async def on_prepared(self, object_ids: Sequence[int], deadline_ms: int) -> None:
        """Do nothing."""

    async def on_uploaded(self, keys: Sequence[str]) -> None:
        """Do nothing."""

    async def on_committed(self, object_ids: Sequence[int], ranges: Sequence[StreamRange]) -> None:
        """Do nothing."""

    async def on_refused(self, object_ids: Sequence[int], error: Exception) -> None:
        """Do nothing."""

"""Reading of what compaction needs of its sources for their checksums alone.

Blocks that have expired, or that the store copies by itself, are not fetched to be moved. Without
them a source can't be compared with its recorded checksum, and damage in the other blocks would
enter the new object, whose own checksum vouches for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from streammeta.client.compaction.report import Figures, SourceError
from streammeta.client.compaction.store_calls import StoreCalls
from streammeta.storage.compaction.verification import SourceChecks
from streammeta.storage.errors import (
    ObjectNotFoundError,
    RangeNotSatisfiableError,
    StorageError,
)
from streammeta.storage.object_format.checksum import ObjectChecksum

PIECE_BYTES = 4 * 1024 * 1024
"""Bytes that are in memory at a time."""


async def read_gaps(
    checks: SourceChecks,
    calls: StoreCalls,
    key_of: Callable[[int], str],
    sources: Iterable[int],
    figures: Figures,
) -> None:
    """Read and add what `checks` does not have yet of these sources; count it in `figures`.

    Raises `SourceError` for a source that is missing, or ends before its index says.
    """
    wanted = set(sources)
    for object_id, gaps in checks.gaps().items():
        if object_id not in wanted:
            continue
        for start, end in gaps:
            for at in range(start, end, PIECE_BYTES):
                size = min(PIECE_BYTES, end - at)
                checks.add(object_id, at, size, await _read(calls, key_of, object_id, at, size))
                figures.add_reads(1, size)


async def damaged_source(
    checks: SourceChecks, calls: StoreCalls, key_of: Callable[[int], str], figures: Figures
) -> SourceError | None:
    """Return the error of a source whose bytes are not those of its upload, if there is one.

    It may pass if the source is sound at a second reading: then only a transfer was torn.
    """
    damaged = await calls.compute(checks.damaged)
    for object_id, reason in damaged.items():
        again = checks.afresh(object_id)
        await read_gaps(again, calls, key_of, [object_id], figures)
        is_torn = not await calls.compute(again.damaged)
        return SourceError(object_id, reason, passing=is_torn)
    return None


async def _read(
    calls: StoreCalls, key_of: Callable[[int], str], object_id: int, at: int, size: int
) -> int:
    """Return the checksum of some bytes of a source."""

    def fetch() -> tuple[int, int]:
        data = calls.store.get_range(key_of(object_id), at, at + size)
        return len(data), ObjectChecksum.of(data).value

    try:
        got, crc32c = await calls.read(size, fetch)
    except (ObjectNotFoundError, RangeNotSatisfiableError) as error:
        raise SourceError(object_id, str(error)) from error
    except StorageError as error:
        raise SourceError(object_id, str(error), passing=error.may_pass) from error
    if got != size:
        raise SourceError(object_id, f"bytes [{at}, {at + size}) were asked for, {got} are there")
    return crc32c

"""Reads of compaction that only serve the sources' checksums.

Expired blocks, and blocks that the store copies itself, are not fetched for the output. Without
them a source can't be compared with its recorded checksum, and damage in the other blocks would
enter the new object, whose checksum would then confirm it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from streammeta.client.compaction.report import Figures, SourceError
from streammeta.client.compaction.store_calls import StoreCalls
from streammeta.storage import errors as storage_errors
from streammeta.storage.compaction.verification import SourceChecks
from streammeta.storage.object_format.checksum import ObjectChecksum

PIECE_BYTES = 4 * 1024 * 1024
"""Bytes in memory at a time."""


async def read_gaps(
    checks: SourceChecks,
    calls: StoreCalls,
    key_of: Callable[[int], str],
    sources: Iterable[int],
    figures: Figures,
) -> None:
    """Read the bytes of these sources that `checks` has not seen and count them in `figures`.

    Raises `SourceError` for a source that is missing, or smaller than its index says.
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


async def find_damaged_source(
    checks: SourceChecks, calls: StoreCalls, key_of: Callable[[int], str], figures: Figures
) -> SourceError | None:
    """Return the error of a source whose bytes differ from its upload, if there is one.

    It may pass if a second reading of the source matches: then only a transfer was torn.
    """
    damaged = await calls.compute(checks.damaged)
    for object_id, reason in damaged.items():
        again = checks.restart(object_id)
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
    except (storage_errors.ObjectNotFoundError, storage_errors.RangeNotSatisfiableError) as error:
        raise SourceError(object_id, str(error)) from error
    except storage_errors.StorageError as error:
        raise SourceError(object_id, str(error), passing=error.may_pass) from error
    if got != size:
        raise SourceError(object_id, f"bytes [{at}, {at + size}) were requested, {got} exist")
    return crc32c

"""Sweep: removes claims, seals and marks of recovered logs that no process needs.

A seal fences a possibly stalled process for as long as the seal exists, so no wall clock decides
its removal. Two looks at the bucket, `WATCH_S` apart by the sweeping process's elapsed time, must
both show that the log is recovered. The retention is measured between two times of the store. The
newest log of a node is never swept: its claim, or its mark, reserves its epoch.

First a mark is written that a log and all earlier ones are swept. It stays, so a late object, or
one that a listing left out, never looks like a damaged log. The claims are deleted next, before any
seal: a stalled process checks its claim before it acknowledges again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from streammeta.client.wal.bucket.bucket_slots import SlotStore
from streammeta.client.wal.bucket.reading import FoundLog, list_logs
from streammeta.storage.object_log.slot import (
    LOG_ID_SIZE,
    LogName,
    Sealer,
    Slot,
    SlotKind,
    sealer_body,
)

WATCH_S = 600.0
"""Seconds between the two looks of a sweep, many times the lease of a log's process."""

_log = logging.getLogger(__name__)


async def sweep_logs(
    slots: SlotStore, own: LogName, earlier: Mapping[int, FoundLog], retention_ms: int
) -> None:
    """Remove the logs that may be swept. `earlier` is a look made `WATCH_S` ago."""
    found = await list_logs(slots, own.namespace, own.node_id)
    last = last_to_sweep(earlier, found, own.node_epoch, retention_ms)
    if last is None:
        return
    name = found[last].name
    by = Sealer(own.node_id, own.node_epoch)
    mark = Slot(name, bytes(LOG_ID_SIZE), 0, 0, 0, SlotKind.RECOVERED, body=sealer_body(by))
    await slots.put(name.swept_key, mark.encode())

    swept = [log for epoch, log in found.items() if epoch <= last]
    claims = [log.name.slot_key(0) for log in swept if 0 in log.sequences]
    others = [log.name.slot_key(at) for log in swept for at in log.sequences if at]
    marks = [log.name.recovered_key for log in swept if log.recovered_ms is not None]
    earlier_marks = [log.name.swept_key for log in swept[:-1] if log.has_swept_mark]
    # The order of the three deletions matters, see the module.
    await _delete(slots, claims)
    await _delete(slots, others)
    await _delete(slots, [*marks, *earlier_marks])
    _log.info("write-ahead logs of node %d up to process %d were swept", own.node_id, last)


def last_to_sweep(
    earlier: Mapping[int, FoundLog],
    found: Mapping[int, FoundLog],
    own_epoch: int,
    retention_ms: int,
) -> int | None:
    """Return the epoch up to which logs may be swept, None if there is nothing to remove.

    The store's time of this log's claim serves as the present: it is never in the future.
    """
    own = found.get(own_epoch)
    if own is None or own.claimed_ms is None:
        # The listing leaves out an existing slot, so it proves nothing.
        return None

    last = None
    for epoch in sorted(earlier.keys() | found.keys()):
        log, before = found.get(epoch), earlier.get(epoch)
        # Logs are swept in order: a mark covers all earlier ones.
        if epoch >= own_epoch or log is None:
            break
        # A swept log may have leftovers, which need no second look.
        if not log.is_swept:
            if before is None or before.recovered_ms is None or log.recovered_ms is None:
                break
            if own.claimed_ms - log.recovered_ms <= retention_ms:
                break
        last = epoch

    if last is None or not any(
        log.sequences or log.recovered_ms is not None
        for epoch, log in found.items()
        if epoch <= last
    ):
        return None

    return last


async def _delete(slots: SlotStore, keys: Sequence[str]) -> None:
    if keys:
        await slots.delete(keys)

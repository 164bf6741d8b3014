"""Scenarios about AutoMQ's write-ahead log in a bucket: its reservation, gaps, and recovery.

The log is read for inspection only, so what a running one does with its buffers is not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streammeta.storage.inspection.automq_log import (
    ALIGNMENT,
    Reservation,
    continuous_ranges,
    decode_reservation,
    recoverable,
)


def _reservation(given: list[list[Any]], _: object) -> list[bool | str]:
    held = b""
    outcomes: list[bool | str] = []
    for call, node_id, node_epoch, failover in given:
        asked = Reservation(node_id, node_epoch, failover)
        if call == "acquire":
            held = asked.encode()
            outcomes.append("ok")
        else:
            outcomes.append(decode_reservation(held, "reservation") == asked)
    return outcomes


def _continuous(given: list[Mapping[str, Any]], _: object) -> list[list[list[int]]]:
    return [
        [list(one) for one in continuous_ranges(map(tuple, case["objects"]), case["trim"])]
        for case in given
    ]


def _lost_object(given: Mapping[str, Any], _: object) -> dict[str, list[int]]:
    """Four objects with a record each, of which the third is lost."""
    assert given["lost"] == "the third"
    held = {(at * ALIGNMENT, (at + 1) * ALIGNMENT): 100 + at for at in range(4) if at != 2}
    return {"records": [held[one] for one in continuous_ranges(held)]}


def _keeps_continuous(given: list[Mapping[str, Any]], _: object) -> list[dict[str, list[int]]]:
    found = []
    for case in given:
        ends = {int(stream_id): end for stream_id, end in case["stream_ends"].items()}
        kept = recoverable(map(tuple, case["records"]), ends)
        found.append({str(stream_id): offsets for stream_id, offsets in kept.items()})
    return found


AUTOMQ_LOG_CHECKS: Mapping[str, Callable[[Any, Any], Any]] = {
    "wal_reservation": _reservation,
    "wal_continuous_objects": _continuous,
    "wal_recover_after_lost_object": _lost_object,
    "wal_recovery_keeps_continuous": _keeps_continuous,
}
"""Checks by name; a log that runs, over epochs and with trim markers, is not offered."""

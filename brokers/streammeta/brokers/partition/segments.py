"""Segments of a partition: units of retention, each a range of its log and time index streams.

Owns when a segment ends, which ones are past retention, and the JSON value LOG that lists them.
Stream offsets of the log are Kafka offsets, those of the time index are byte positions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from streammeta.brokers.partition.errors import SegmentError

OPEN_END = -1
_OFFSET_SPAN_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SegmentLimits:
    """When a segment is followed by the next; bytes, and ms since its first batch."""

    bytes: int = 1024**3
    age_ms: int = 7 * 86_400_000


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept at least; -1: without bound. Ms since the newest record, and bytes."""

    age_ms: int = 7 * 86_400_000
    bytes: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of the log from `base_offset` on; an end of `OPEN_END` is that of the stream.

    `last_time` is the largest timestamp and its offset; times are ms since 1970, 0 for none.
    """

    base_offset: int
    created_ms: int
    modified_ms: int = 0
    size: int = 0
    end_offset: int = OPEN_END
    time_start: int = 0
    time_end: int = OPEN_END
    first_batch_time: int = 0
    last_time: tuple[int, int] = (0, 0)

    def aged_from(self, latest_ms: int) -> int:
        """Return the time from which the segment ages: that of its newest record.

        Records have their producers' times. Without one, or with one beyond `latest_ms`, the
        segment ages from its last append.
        """
        newest_ms = max(self.last_time[0], self.first_batch_time)
        if 0 < newest_ms <= latest_ms:
            return newest_ms
        return max(self.modified_ms, self.created_ms)

    def grown(self, size: int, max_timestamp: int, offset: int, now_ms: int) -> Segment:
        """Return the segment with one more batch, whose last offset is `offset`."""
        last_time = max(self.last_time, (max_timestamp, offset), key=lambda entry: entry[0])
        return replace(
            self,
            size=self.size + size,
            modified_ms=now_ms,
            first_batch_time=self.first_batch_time or max(max_timestamp, 0),
            last_time=last_time,
        )


def must_roll(
    active: Segment, batch_bytes: int, last_offset: int, now_ms: int, limits: SegmentLimits
) -> bool:
    """Whether a batch that ends at `last_offset` belongs into a new segment."""
    if last_offset - active.base_offset > _OFFSET_SPAN_MAX:
        return True
    if active.size == 0:
        return False
    if active.size + batch_bytes > limits.bytes:
        return True
    return now_ms - active.created_ms > limits.age_ms


def rolled(
    segments: Sequence[Segment], offset: int, time_position: int, now_ms: int
) -> list[Segment]:
    """Return the segments with a new active one that begins at `offset`.

    An empty active segment is replaced. Raises `SegmentError` below the active one's base.
    """
    active = segments[-1]
    if offset < active.base_offset:
        raise SegmentError(
            f"a segment can't begin at {offset}, before the active one at {active.base_offset}"
        )
    closed = replace(active, end_offset=offset, time_end=time_position)
    kept = [*segments[:-1], closed] if offset > active.base_offset else list(segments[:-1])
    return [*kept, Segment(base_offset=offset, created_ms=now_ms, time_start=time_position)]


def cut(segments: Sequence[Segment], offset: int, time_position: int, now_ms: int) -> list[Segment]:
    """Return the segments of a log that ends at `offset`, before what they say.

    An active one begins there, with nothing of the time index: rows of it may be of lost batches.
    """
    kept = [one for one in segments if one.base_offset < offset]
    if not kept:
        return [Segment(base_offset=offset, created_ms=now_ms, time_start=time_position)]
    return rolled(kept, offset, time_position, now_ms)


def retained_from(
    segments: Sequence[Segment], now_ms: int, retention: Retention, latest_ms: int = 2**63 - 1
) -> int:
    """Return the base of the first segment that is kept; the active one always is.

    No time of a record beyond `latest_ms` is believed.
    """
    excess = sum(one.size for one in segments) - retention.bytes
    for one in segments[:-1]:
        is_old = 0 <= retention.age_ms < now_ms - one.aged_from(latest_ms)
        is_excess = retention.bytes >= 0 and excess >= one.size
        if not (is_old or is_excess):
            return one.base_offset
        excess -= one.size
    return segments[-1].base_offset


def without_head(segments: Sequence[Segment], start_offset: int) -> list[Segment]:
    """Return the segments that hold anything from `start_offset` on, the active one at least."""
    return [one for one in segments[:-1] if one.end_offset > start_offset] + [segments[-1]]


def encode_log(streams: dict[str, int], segments: Sequence[Segment]) -> bytes:
    """Return the value LOG: stream ids by name, -1 for none, and the segments."""
    value = {"streamMap": streams, "segmentMetas": [_document(one) for one in segments]}
    return json.dumps(value, separators=(",", ":")).encode()


def decode_log(value: Any) -> tuple[dict[str, int], list[Segment]]:
    """Read the parsed value LOG. Raises `KeyError` or `TypeError` when a field is missing."""
    return dict(value["streamMap"]), [_segment(one) for one in value["segmentMetas"]]


def _document(one: Segment) -> dict[str, Any]:
    return {
        "bo": one.base_offset,
        "ct": one.created_ms,
        "lmt": one.modified_ms,
        "s": "",
        "lsz": one.size,
        "ls": {"s": one.base_offset, "e": one.end_offset},
        "ts": {"s": one.time_start, "e": one.time_end},
        "txs": {"s": -1, "e": -1},
        "fbt": one.first_batch_time,
        "tle": {"t": one.last_time[0], "o": one.last_time[1]},
    }


def _segment(one: Any) -> Segment:
    return Segment(
        base_offset=one["bo"],
        created_ms=one["ct"],
        modified_ms=one["lmt"],
        size=one["lsz"],
        end_offset=one["ls"]["e"],
        time_start=one["ts"]["s"],
        time_end=one["ts"]["e"],
        first_batch_time=one["fbt"],
        last_time=(one["tle"]["t"], one["tle"]["o"]),
    )

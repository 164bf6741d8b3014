"""Segments of a partition: units of retention, each a range of its log and time index streams.

Owns the end of a segment, retention, and the JSON value LOG, which lists the segments. Stream
offsets of the log are Kafka offsets, stream offsets of the time index are byte positions.
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
    """Limits after which a new segment starts: bytes, and ms since its first batch."""

    bytes: int = 1024**3
    age_ms: int = 7 * 86_400_000


@dataclass(frozen=True, slots=True)
class Retention:
    """Minimum to keep: ms since the newest record, and bytes. -1 means unbounded."""

    age_ms: int = 7 * 86_400_000
    bytes: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of the log from `base_offset` on. The end `OPEN_END` means the stream's end.

    `last_time` is the largest timestamp and its offset. Times are in ms since 1970, 0 for none.
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
        """Return the time at which the segment's age begins: its newest record's time.

        Records have their producers' times. Without a time, or with one after `latest_ms`, the age
        begins at the last append.
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
    """Whether a batch that ends at `last_offset` needs a new segment."""
    # Rows of the time index store offsets as 32-bit differences.
    if last_offset - active.base_offset > _OFFSET_SPAN_MAX:
        return True
    # An empty segment accepts a batch of any size and age, otherwise it would roll forever.
    if active.size == 0:
        return False
    if active.size + batch_bytes > limits.bytes:
        return True
    return now_ms - active.created_ms > limits.age_ms


def rolled(
    segments: Sequence[Segment], offset: int, time_position: int, now_ms: int
) -> list[Segment]:
    """Return the segments with a new active one that begins at `offset`.

    An empty active segment is replaced. Raises `SegmentError` below the active segment's base.
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
    """Return the segments of a log that ends at `offset`, before their recorded end.

    An active one begins there, without entries of the time index, because they may belong to lost
    batches.
    """
    kept = [segment for segment in segments if segment.base_offset < offset]
    if not kept:
        return [Segment(base_offset=offset, created_ms=now_ms, time_start=time_position)]
    return rolled(kept, offset, time_position, now_ms)


def retained_from(
    segments: Sequence[Segment], now_ms: int, retention: Retention, latest_ms: int = 2**63 - 1
) -> int:
    """Return the base of the first retained segment. The active one is always retained.

    A record's time after `latest_ms` is ignored.
    """
    excess = sum(segment.size for segment in segments) - retention.bytes
    for segment in segments[:-1]:
        is_old = 0 <= retention.age_ms < now_ms - segment.aged_from(latest_ms)
        # A segment goes only as a whole, so that at least `retention.bytes` remain.
        is_excess = retention.bytes >= 0 and excess >= segment.size
        # The first retained segment ends the search: a log has no holes.
        if not (is_old or is_excess):
            return segment.base_offset
        excess -= segment.size
    return segments[-1].base_offset


def without_head(segments: Sequence[Segment], start_offset: int) -> list[Segment]:
    """Return the segments with records from `start_offset` on, at least the active one."""
    return [segment for segment in segments[:-1] if segment.end_offset > start_offset] + [
        segments[-1]
    ]


def encode_log(streams: dict[str, int], segments: Sequence[Segment]) -> bytes:
    """Return the value LOG: stream ids by name, -1 for none, and the segments."""
    value = {"streamMap": streams, "segmentMetas": [_document(segment) for segment in segments]}
    return json.dumps(value, separators=(",", ":")).encode()


def decode_log(value: Any) -> tuple[dict[str, int], list[Segment]]:
    """Decode the parsed value LOG. Raises `KeyError` or `TypeError` for a missing field."""
    return dict(value["streamMap"]), [_segment(segment) for segment in value["segmentMetas"]]


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

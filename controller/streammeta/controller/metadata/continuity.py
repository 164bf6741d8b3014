"""Judges rows of an upload: whether each continues its stream, and whether the node may do it.

A row continues its stream at the stream's end, or at what the node still owes of it after a fast
close. What lies below the stream's start, or belongs to a stream that was deleted, is accepted
without effect, because its bytes are in the object anyway. A verdict is an `ErrorCode` number.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.pending_uploads import NO_SPANS, StreamSpans
from streammeta.controller.metadata.streams import DELETED, Streams
from streammeta.controller.metadata.values import EMPTY_COLUMN, Int64Column, StreamState

Mask = npt.NDArray[np.bool_]

# Members of an enum are slow to look up; these are looked up for every commit.
_OPENED = int(StreamState.OPENED)
_STREAM_NOT_EXIST = int(ErrorCode.STREAM_NOT_EXIST)


@dataclass(frozen=True, slots=True, eq=False)
class UploadRows:
    """What is offered: ranges of streams, no stream twice; `epoch` is empty if none was given."""

    stream_id: Int64Column
    start: Int64Column
    end: Int64Column
    epoch: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)

    def take(self, rows: Mask | slice) -> "UploadRows":
        """Return some of the rows."""
        epoch = self.epoch[rows] if len(self.epoch) else self.epoch
        return UploadRows(self.stream_id[rows], self.start[rows], self.end[rows], epoch)


@dataclass(slots=True, eq=False)
class Ahead:
    """How the uploads before this one in its batch, if any, changed what it is judged by.

    `owed` is the node's list of pending uploads; `ends` has the streams whose end they raised.
    """

    owed: StreamSpans = NO_SPANS
    ends: dict[int, int] = field(default_factory=dict)


class Continuity:
    """Judges rows against the streams."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def all_continue(self, node_id: int, rows: UploadRows, *, repeats: bool) -> bool:
        """Whether every row continues a stream of a node that owes nothing.

        With `repeats` a stream may have several rows, each to continue the one before.
        """
        streams, ids = self._streams, rows.stream_id
        if np.maximum.reduce(ids) >= len(streams):
            return False
        ends = streams["end_offset"][ids]
        good = (streams["state"][ids] == _OPENED) & (streams["node_id"][ids] == node_id)
        if len(rows.epoch):
            good &= streams["epoch"][ids] == rows.epoch
        if np.count_nonzero(good) < len(ids):
            return False
        if repeats:
            return _chains(rows, ends)
        return bool(np.count_nonzero(rows.start == ends) == len(ids))

    def judge(self, node_id: int, rows: UploadRows, ahead: Ahead) -> Int64Column:
        """Return one verdict a row."""
        ids = rows.stream_id
        if not len(ids):
            return EMPTY_COLUMN
        issued = ids < len(self._streams)
        if np.count_nonzero(issued) == len(ids):
            return self._judge_issued(node_id, rows, ahead)
        # A stream that was never created is an error; one that is gone is not.
        verdicts = np.full(len(ids), _STREAM_NOT_EXIST)
        verdicts[issued] = self._judge_issued(node_id, rows.take(issued), ahead)
        return verdicts

    def _judge_issued(self, node_id: int, rows: UploadRows, ahead: Ahead) -> Int64Column:
        streams, at = self._streams, rows.stream_id
        state, owner, epochs = streams["state"][at], streams["node_id"][at], streams["epoch"][at]
        low, high = streams["start_offset"][at], streams["end_offset"][at]
        if ahead.ends:
            pairs = zip(at.tolist(), high.tolist(), strict=True)
            high = np.array([ahead.ends.get(stream, end) for stream, end in pairs], np.int64)
        given = rows.epoch if len(rows.epoch) else epochs
        crosses_trim = (high == low) & (rows.start < low)
        # The last one that holds is the verdict.
        return _last_of(
            (~((rows.start == high) | crosses_trim), ErrorCode.OFFSET_NOT_MATCHED),
            (owner != node_id, ErrorCode.STREAM_FENCED),
            (state != _OPENED, ErrorCode.STREAM_NOT_OPENED),
            (epochs < given, ErrorCode.STREAM_INNER_ERROR),
            (epochs > given, ErrorCode.STREAM_FENCED),
            *self._owed_cases(rows, low, ahead.owed),
            ((state == DELETED) | (rows.end <= low), ErrorCode.NONE),
        )

    def _owed_cases(
        self, rows: UploadRows, low: Int64Column, owed: StreamSpans
    ) -> tuple[tuple[Mask, ErrorCode], ...]:
        """What the node owes of a stream it may upload, whoever has the stream now."""
        if not len(owed):
            return ()
        at = owed.row_of(rows.stream_id)
        first, end = owed.start_offset[at], owed.end_offset[at]
        active = (at >= 0) & (np.maximum(low, first) < end)
        formed_before_trim = (first <= low) & (rows.start < low)
        right = (rows.start == np.maximum(low, first)) | formed_before_trim
        right &= rows.end <= end
        return (
            (active & ~right, ErrorCode.OFFSET_NOT_MATCHED),
            (active & right, ErrorCode.NONE),
        )

    def owed_after(
        self, owed: StreamSpans, stream_id: Int64Column, end: Int64Column
    ) -> StreamSpans:
        """Return what a node owes once it uploaded streams up to `end`.

        Same rows; those with nothing left to upload are empty.
        """
        at = owed.row_of(stream_id)
        live = self._streams.live_starts(owed)
        moved = (at >= 0) & (end > self._streams["start_offset"][np.where(at >= 0, stream_id, 0)])
        starts = owed.start_offset.copy()
        starts[at[moved]] = end[moved]
        over = live >= owed.end_offset
        starts[over] = owed.end_offset[over]
        return StreamSpans(owed.stream_id, starts, owed.end_offset)


def has_twins(ids: Int64Column) -> bool:
    """Whether some id is there twice."""
    ordered = np.sort(ids)
    return bool(np.count_nonzero(ordered[1:] == ordered[:-1]))


def _chains(rows: UploadRows, ends: Int64Column) -> bool:
    """Whether each row continues the row of its stream before it, and the first one the stream."""
    if not has_twins(rows.stream_id):
        return bool(np.count_nonzero(rows.start == ends) == len(ends))
    order = np.argsort(rows.stream_id, kind="stable")
    ids, expected = rows.stream_id[order], ends[order]
    again = ids[1:] == ids[:-1]
    expected[1:][again] = rows.end[order[:-1]][again]
    return bool(np.count_nonzero(rows.start[order] == expected) == len(ids))


def _last_of(*cases: tuple[Mask, ErrorCode]) -> Int64Column:
    verdicts = np.zeros(len(cases[0][0]), dtype=np.int64)
    for rows, error in cases:
        verdicts[rows] = int(error)
    return verdicts

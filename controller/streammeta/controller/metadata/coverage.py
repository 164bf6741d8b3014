"""Whether compacted ranges hold exactly what their sources hold.

Works on live parts alone: what lies above the start of a stream that exists. Live ranges of objects
never overlap, nor do outputs, so a stream's ranges are contiguous if their lengths add up to the
distance from the first start to the last end; that is checked without sorting them.
"""

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from streammeta.controller.metadata.pending_uploads import StreamSpans
from streammeta.controller.metadata.values import Int64Column

_INT64_MAX = 2**63 - 1


def judge(outputs: StreamSpans, sources: StreamSpans) -> tuple[npt.NDArray[np.bool_], bool]:
    """Return which outputs reach beyond a contiguous run of the sources, and whether all is held.

    Both are live parts. Outputs are sorted by stream id, and those of a stream overlap none of the
    others; sources are in any order. All is held if the outputs cover every source.
    """
    if not len(outputs):
        return np.zeros(0, dtype=np.bool_), not len(sources)
    first = np.flatnonzero(np.concatenate(([True], np.diff(outputs.stream_id) > 0)))
    streams = outputs.stream_id[first]
    at = np.minimum(streams.searchsorted(sources.stream_id), len(streams) - 1)
    if np.array_equal(streams[at], sources.stream_id):
        low, high, held = _extents(at, sources, len(streams))
        exact = low == np.minimum.reduceat(outputs.start_offset, first)
        exact &= high == np.maximum.reduceat(outputs.end_offset, first)
        exact &= held == np.add.reduceat(outputs.end_offset - outputs.start_offset, first)
        exact &= held == high - low
        if np.count_nonzero(exact) == len(streams):
            return np.zeros(len(outputs), dtype=np.bool_), True
    return _judge_by_runs(outputs, sources)


def _extents(
    owner: Int64Column, spans: StreamSpans, owners: int
) -> tuple[Int64Column, Int64Column, Int64Column]:
    """Return each owner's lowest start, highest end and length of all its spans."""
    low = np.full(owners, _INT64_MAX, dtype=np.int64)
    high = np.zeros(owners, dtype=np.int64)
    held = np.zeros(owners, dtype=np.int64)
    np.minimum.at(low, owner, spans.start_offset)
    np.maximum.at(high, owner, spans.end_offset)
    np.add.at(held, owner, spans.end_offset - spans.start_offset)
    return low, high, held


def _judge_by_runs(
    outputs: StreamSpans, sources: StreamSpans
) -> tuple[npt.NDArray[np.bool_], bool]:
    """Do what `judge` does where a stream is in several pieces, or to say what does not fit."""
    order = np.lexsort((sources.start_offset, sources.stream_id))
    runs: dict[int, list[tuple[int, int]]] = {}
    missing = 0
    for stream_id, low, high in sources.take(order).merged().rows():
        runs.setdefault(stream_id, []).append((low, high))
        missing += high - low
    outside = np.zeros(len(outputs), dtype=np.bool_)
    for row, (stream_id, start, end) in enumerate(outputs.rows()):
        of_stream = runs.get(stream_id, [])
        place = bisect_right(of_stream, start, key=lambda run: run[0]) - 1
        outside[row] = place < 0 or end > of_stream[place][1]
        missing -= end - start
    # Outputs that overlap nothing and lie within the sources cover them if they are as long.
    return outside, not missing and not outside.any()

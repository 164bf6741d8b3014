"""Whether compacted ranges hold exactly what their sources hold.

Works on live parts alone: what lies above the start of a stream that exists. Live ranges of objects
never overlap, so a stream's ranges are contiguous if their lengths add up to the distance from the
first start to the last end; that is checked without sorting them.
"""

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from controller.metadata.pending_uploads import StreamSpans
from controller.metadata.values import Int64Column

_INT64_MAX = 2**63 - 1


def judge(outputs: StreamSpans, sources: StreamSpans) -> tuple[npt.NDArray[np.bool_], bool]:
    """Return which outputs reach beyond a contiguous run of the sources, and whether all is held.

    Both are live parts. No stream has two outputs, and they are sorted by stream id; sources are
    in any order. All is held if the outputs cover every source.
    """
    if not len(outputs):
        return np.zeros(0, dtype=np.bool_), not len(sources)
    at = np.minimum(outputs.stream_id.searchsorted(sources.stream_id), len(outputs) - 1)
    unknown = outputs.stream_id[at] != sources.stream_id
    if not np.count_nonzero(unknown):
        low, high, held = _extents(at, sources, len(outputs))
        exact = (low == outputs.start_offset) & (high == outputs.end_offset) & (held == high - low)
        if np.count_nonzero(exact) == len(outputs):
            return ~exact, True
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
    """Do what `judge` does where something does not fit, to say what."""
    order = np.lexsort((sources.start_offset, sources.stream_id))
    runs: dict[int, list[tuple[int, int]]] = {}
    for stream_id, low, high in sources.take(order).merged().rows():
        runs.setdefault(stream_id, []).append((low, high))
    outside = np.zeros(len(outputs), dtype=np.bool_)
    covered = 0
    for row, (stream_id, start, end) in enumerate(outputs.rows()):
        of_stream = runs.get(stream_id, [])
        place = bisect_right(of_stream, start, key=lambda run: run[0]) - 1
        outside[row] = place < 0 or end > of_stream[place][1]
        # One output covers a stream's sources if they are one run, and it is that run.
        covered += of_stream == [(start, end)]
    return outside, covered == len(runs)

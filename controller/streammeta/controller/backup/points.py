"""Points in time of a backup: the segments that were committed by then.

The bucket's times decide, because a leader's clock may have been wrong. A copy of a backup has
other times in its bucket, and then the leaders' times in its manifests decide.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import median

from streammeta.controller.runtime.replication.log_time import JUMP_MS
from streammeta.storage.cluster_files.backup_files import FileName, SegmentManifest, SegmentName

SAMPLE = 9
"""Number of segments whose times by leaders are compared with the bucket's."""


def count_committed_by(
    segments: Sequence[SegmentName],
    to_ms: int,
    written_ms: Mapping[FileName, int],
    manifest_of: Callable[[SegmentName], SegmentManifest],
) -> int:
    """Return how many of the segments, in the order of their ends, were committed by a time."""
    sample = segments[:: max(1, len(segments) // SAMPLE)]
    apart = [abs(written_ms[name] - manifest_of(name).last_ms) for name in sample]
    # The median ignores a few segments that were uploaded late.
    if not apart or median(apart) > JUMP_MS:
        return bisect_right(segments, to_ms, key=lambda name: manifest_of(name).last_ms)

    # A segment was committed before its successors, even if a wrong clock stamped it later.
    newest_first = (written_ms[name] for name in reversed(segments))
    times = list(accumulate(newest_first, min))[::-1]
    return bisect_right(times, to_ms)

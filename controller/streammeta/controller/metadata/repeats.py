"""Repeats of commits: which are known, whether their content is the same, and the first answer.

An object remembers the digest of the commit it came with, also after it was compacted away and, for
a bounded number of them, after it was removed. Verdicts of rows that a commit left out are
remembered beside it. Objects whose digest is not known were committed by a version that kept none:
their repeats are taken for honest.
"""

from collections.abc import Iterable
from enum import Enum

import numpy as np

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.answers import CommitStreamSetObjectAnswer
from streammeta.controller.metadata.columns import Undo
from streammeta.controller.metadata.commit_digests import NO_DIGEST
from streammeta.controller.metadata.objects import Objects
from streammeta.controller.metadata.request_log import REJECTED_ROWS_MAX, Window
from streammeta.controller.metadata.requests import CommitStreamSetObject
from streammeta.controller.metadata.values import Int64Column, OnConflict
from streammeta.controller.records.record import CommitRowsRejected


class Repeat(Enum):
    """Relation of a commit to those made before."""

    NEW = 0
    SAME = 1
    OTHER_CONTENT = 2


class Repeats:
    """Commits that were made before, by the ids of their objects."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.rejected: Window[tuple[int, int], int] = Window(REJECTED_ROWS_MAX)

    def judge(self, object_ids: Iterable[int], digest: int) -> Repeat:
        """Compare a commit with those that committed any of these objects.

        One equal digest suffices: an object that the first commit left out may have come with
        another commit since.
        """
        found = [self._objects.commit_digest(object_id) for object_id in object_ids]
        known = {made_with for made_with in found if made_with is not None}
        if not known:
            return Repeat.NEW
        return Repeat.SAME if digest in known or NO_DIGEST in known else Repeat.OTHER_CONTENT

    def first_answer(self, request: CommitStreamSetObject) -> CommitStreamSetObjectAnswer:
        """Return what this commit was answered when it was made.

        REJECT_ALL can't have been the policy if rows were left out: it is another commit then.
        """
        rows = request.stream_objects
        owners = np.full(len(request.ranges.stream_id), request.object_id)
        ranges = self.verdicts(owners, request.ranges.stream_id)
        others = self.verdicts(rows.object_id, rows.stream_id)
        if request.on_conflict is OnConflict.REJECT_ALL and (ranges.any() or others.any()):
            return failed_commit(request, ErrorCode.OBJECT_CONTENT_MISMATCH)
        return CommitStreamSetObjectAnswer(
            error=ErrorCode.NONE, range_errors=ranges, stream_object_errors=others
        )

    def verdicts(self, object_id: Int64Column, stream_id: Int64Column) -> Int64Column:
        """Return the `ErrorCode` number that each row of a commit was answered first."""
        if not len(self.rejected):
            return np.zeros(len(object_id), dtype=np.int64)
        keys = zip(object_id.tolist(), stream_id.tolist(), strict=True)
        return np.array([self.rejected.get(key) or 0 for key in keys], dtype=np.int64)

    def replay_rejected(self, record: CommitRowsRejected, undo: Undo) -> None:
        """See `CommitRowsRejected`."""
        for object_id, stream_id, error in zip(
            record.object_id.tolist(), record.stream_id.tolist(), record.error.tolist(), strict=True
        ):
            self.rejected.put((object_id, stream_id), error, undo)


def failed_commit(request: CommitStreamSetObject, error: ErrorCode) -> CommitStreamSetObjectAnswer:
    """Return the answer to a commit that failed before its rows were looked at."""
    return CommitStreamSetObjectAnswer(
        error=error,
        range_errors=np.full(len(request.ranges.stream_id), int(error)),
        stream_object_errors=np.full(len(request.stream_objects.stream_id), int(error)),
    )

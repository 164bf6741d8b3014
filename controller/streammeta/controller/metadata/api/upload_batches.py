"""Several uploads as one `CommitUploads`, which is decided by vector operations.

A single upload is plain if `CommitUploads` can express it completely. Joined uploads are decided
in order, as they would be alone. A single upload that is not simply accepted is decided again
alone, because the answer to its kind of request is more detailed.
"""

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter

import numpy as np

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api.answers import (
    CommitStreamSetObjectAnswer,
    CommitUploadsAnswer,
)
from streammeta.controller.metadata.api.commit_validation import COMMIT_ROWS_MAX
from streammeta.controller.metadata.api.requests import CommitStreamSetObject, CommitUploads
from streammeta.controller.metadata.tables.object_facts import UNKNOWN
from streammeta.controller.metadata.tables.values import (
    EMPTY_COLUMN,
    Int64Column,
    OnConflict,
    RangeColumns,
    SharedRowColumns,
    StreamObjectColumns,
)
from streammeta.controller.records.record import FACT_COLUMNS
from streammeta.rpc.method_facts import BATCH_MAX


def is_plain(request: CommitStreamSetObject) -> bool:
    """Return whether an upload may be joined with others.

    It need not be well-formed, but its columns must have equal lengths, because joined columns are
    checked together.
    """
    ranges = request.ranges
    rows = len(ranges.stream_id)
    return (
        # Each condition excludes something that `CommitUploads` cannot express.
        0 < rows <= COMMIT_ROWS_MAX
        and rows == len(ranges.stream_epoch) == len(ranges.start_offset) == len(ranges.end_offset)
        and request.object_id >= 0
        and request.order_id in (UNKNOWN, request.object_id)
        and not request.attributes
        and not request.failover
        and request.recoverer is None
        and request.on_conflict is OnConflict.REJECT_ALL
        and not len(request.compacted_object_ids)
        and not request.kv_puts
        and not request.trims
        and not any(map(len, _columns(request.stream_objects)))
        and not any(map(len, _shared_columns(request.shared_rows)))
    )


_columns = attrgetter(*(field.name for field in fields(StreamObjectColumns)))
_shared_columns = attrgetter(*(field.name for field in fields(SharedRowColumns)))
_facts = attrgetter(*FACT_COLUMNS)


class UploadBatch:
    """Plain uploads of one node, to be committed together."""

    def __init__(self) -> None:
        self._uploads: dict[int, CommitStreamSetObject] = {}
        self._rows = 0

    def __len__(self) -> int:
        return len(self._uploads)

    def add(self, upload: CommitStreamSetObject) -> bool:
        """Add an upload and return False if it needs another batch.

        A batch has a limited size and contains an object once: a repeat is decided later.
        """
        rows = len(upload.ranges.stream_id)
        is_full = len(self._uploads) == BATCH_MAX or self._rows + rows > COMMIT_ROWS_MAX

        if is_full or upload.object_id in self._uploads:
            return False
        self._uploads[upload.object_id] = upload
        self._rows += rows
        return True

    def request(self) -> CommitUploads:
        """Return all uploads as one request."""
        uploads = tuple(self._uploads.values())
        return CommitUploads(
            node=uploads[0].node,
            object_id=np.array([upload.object_id for upload in uploads]),
            object_size=np.array([upload.object_size for upload in uploads]),
            range_count=np.array([len(upload.ranges.stream_id) for upload in uploads]),
            ranges=_join_ranges([upload.ranges for upload in uploads]),
            **_join_facts(uploads),
        )

    def answers(self, answer: CommitUploadsAnswer) -> dict[int, CommitStreamSetObjectAnswer]:
        """Return the answers of the accepted uploads, by object id."""
        accepted: dict[int, CommitStreamSetObjectAnswer] = {}
        stop = 0
        errors, range_errors = answer.errors.tolist(), answer.range_errors

        for upload, error in zip(self._uploads.values(), errors, strict=True):
            start, stop = stop, stop + len(upload.ranges.stream_id)
            verdicts = range_errors[start:stop]
            # The others are decided again alone, for their detailed answers.
            if error == ErrorCode.NONE and not np.count_nonzero(verdicts):
                accepted[upload.object_id] = CommitStreamSetObjectAnswer(
                    error=ErrorCode.NONE,
                    range_errors=verdicts,
                    stream_object_errors=EMPTY_COLUMN,
                )

        return accepted


def join_uploads(requests: Sequence[CommitUploads]) -> CommitUploads | None:
    """Join requests of one node in their order and return None if that may change an answer.

    Each request must have complete columns. Together they must fit into one request, in which no
    object appears twice.
    """
    ids = [request.object_id for request in requests]
    object_id = np.concatenate(ids)
    count = len(object_id)
    rows = sum(len(request.ranges.stream_id) for request in requests)
    if count > BATCH_MAX or rows > COMMIT_ROWS_MAX or len(set(object_id.tolist())) < count:
        return None

    # A column that is too short would shift the rows of the following requests.
    if not all(request.node == requests[0].node and _is_whole(request) for request in requests):
        return None

    return CommitUploads(
        node=requests[0].node,
        object_id=object_id,
        object_size=np.concatenate([request.object_size for request in requests]),
        range_count=np.concatenate([request.range_count for request in requests]),
        ranges=_join_ranges([request.ranges for request in requests]),
        **_join_fact_columns(requests),
    )


def split_answers(
    answer: CommitUploadsAnswer, requests: Sequence[CommitUploads]
) -> list[CommitUploadsAnswer]:
    """Return the answer to each joined request."""
    answers, upload, row = [], 0, 0
    for request in requests:
        upload_stop = upload + len(request.object_id)
        row_stop = row + len(request.ranges.stream_id)
        answers.append(
            CommitUploadsAnswer(
                errors=answer.errors[upload:upload_stop],
                range_errors=answer.range_errors[row:row_stop],
            )
        )
        upload, row = upload_stop, row_stop
    return answers


def _is_whole(request: CommitUploads) -> bool:
    """Return whether each column has its own rows and borrows none of another request."""
    ranges, rows = request.ranges, len(request.ranges.stream_id)
    return (
        len(request.object_id) == len(request.object_size) == len(request.range_count)
        and rows == len(ranges.stream_epoch) == len(ranges.start_offset) == len(ranges.end_offset)
        and rows == int(np.add.reduce(request.range_count))
        and all(len(column) in (0, len(request.object_id)) for column in _facts(request))
    )


def _join_fact_columns(requests: Sequence[CommitUploads]) -> dict[str, Int64Column]:
    if not any(len(column) for request in requests for column in _facts(request)):
        return {}

    # Requests without facts get rows of unknowns, so that the joined columns stay aligned.
    parts = [
        [
            column if len(column) else np.full_like(request.object_id, UNKNOWN)
            for column in _facts(request)
        ]
        for request in requests
    ]
    return {
        name: np.concatenate(columns)
        for name, columns in zip(FACT_COLUMNS, zip(*parts, strict=True), strict=True)
    }


def _join_ranges(parts: Sequence[RangeColumns]) -> RangeColumns:
    return RangeColumns(
        stream_id=np.concatenate([part.stream_id for part in parts]),
        stream_epoch=np.concatenate([part.stream_epoch for part in parts]),
        start_offset=np.concatenate([part.start_offset for part in parts]),
        end_offset=np.concatenate([part.end_offset for part in parts]),
    )


def _join_facts(uploads: Sequence[CommitStreamSetObject]) -> dict[str, Int64Column]:
    """Return the columns of known facts, or none if all facts are unknown."""
    columns = {name: [getattr(upload, name) for upload in uploads] for name in FACT_COLUMNS}
    if all(value == UNKNOWN for values in columns.values() for value in values):
        return {}
    return {name: np.array(values) for name, values in columns.items()}

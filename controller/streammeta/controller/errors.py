"""Errors raised by the controller's packages, and the codes of per-item outcomes.

An `ApiError` is an answer: the request cannot be satisfied, and nothing was changed. An
`InvariantError` is a defect: a state that must not exist. Per-item outcomes of a request are not
exceptions but `ErrorCode` values in the reply. This module does not depend on gRPC.
"""

from collections.abc import Sequence
from enum import IntEnum


class ErrorCode(IntEnum):
    """Per-item outcomes. The protobuf enum of the same name has the same numbers."""

    NONE = 0
    INVALID_REQUEST = 42
    STREAM_NOT_EXIST = 502
    STREAM_FENCED = 503
    OBJECT_NOT_EXIST = 504
    STREAM_NOT_OPENED = 505
    STREAM_NOT_CLOSED = 506
    COMPACTED_OBJECTS_NOT_FOUND = 508
    OFFSET_NOT_MATCHED = 509
    NODE_EPOCH_EXPIRED = 510
    NODE_EPOCH_NOT_EXIST = 511
    KEY_EXIST = 512
    KEY_NOT_EXIST = 513
    NODE_FENCED = 514
    NODE_LOCKED = 515
    OBJECT_NOT_COMMITTED = 516
    STREAM_INNER_ERROR = 599
    OBJECT_CONTENT_MISMATCH = 700
    STREAM_KIND_MISMATCH = 701
    DUPLICATE_BATCH = 702
    OUT_OF_ORDER_SEQUENCE = 703
    PRODUCER_FENCED = 704
    STREAM_ROWS_REJECTED = 705
    OFFSETS_UNKNOWN = 706


class ApiError(Exception):
    """A request that fails as a whole. Nothing was changed."""


class InvalidRequestError(ApiError):
    """The request is malformed: `field` names the part, the message names the valid values."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class LimitExceededError(ApiError):
    """The request, or the state after it, exceeds a limit, and is rejected before any append."""

    def __init__(self, message: str, field: str = "", limit: int = 0) -> None:
        """`field` names the limited part of the request or answer, `limit` is its maximum.

        Without a field the message names the limit.
        """
        super().__init__(message)
        self.field = field
        self.limit = limit


class QuotaExceededError(LimitExceededError):
    """The metadata has reached one of its limits. Waiting does not help."""

    def __init__(self, quota: str, limit: int, used: int, added: int) -> None:
        super().__init__(
            f"{quota}: {used} of {limit} are used, {added} more are too many: delete some, or "
            f"raise the limit on all controllers (--max-{quota.replace('_', '-')})"
        )
        self.quota = quota
        self.limit = limit
        self.used = used


class RateExceededError(LimitExceededError):
    """A caller exceeded its rate. The same request is accepted after `retry_after_ms`."""

    def __init__(self, principal: str, quota: str, limit: int, retry_after_ms: int) -> None:
        super().__init__(
            f"{quota}: {principal} has used up its {limit} per second, retry in {retry_after_ms} ms"
        )
        self.quota = quota
        self.limit = self.used = limit
        self.retry_after_ms = retry_after_ms


class BusyError(LimitExceededError):
    """The controller is overloaded. Nothing was changed, and a retry may succeed.

    `retry_after_ms` is the suggested delay, if known.
    """

    def __init__(self, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class MemoryHighError(BusyError):
    """The process uses so much memory that calls like this one are rejected for now."""

    quota = "memory"

    def __init__(self, limit: int, used: int, retry_after_ms: int) -> None:
        super().__init__(
            f"memory: the controller uses {used} bytes, its limit is {limit}: retry later, "
            "send or request less at once, or raise the limit (--memory-limit-mb)",
            retry_after_ms,
        )
        self.limit = limit
        self.used = used


class SlowReaderError(BusyError):
    """A caller was cut off because it read an answer too slowly."""


class TooManyPipelinesError(BusyError):
    """The maximum number of commit pipelines is open, on the connection or the controller."""


class AuditUnavailableError(ApiError):
    """A call must be audited, and the audit log cannot be written."""

    def __init__(self, why: str, *, took_effect: bool = False) -> None:
        """`took_effect`: the call was decided before writing its outcome failed."""
        self.why = why
        what = "it may have taken effect" if took_effect else "nothing was changed"
        super().__init__(f"{why}: {what}, repair the audit log of this controller")


class NotLeaderError(ApiError):
    """Another controller leads. `leader_id` is -1 and `leader_endpoint` empty if unknown.

    `token_endpoint` is the leader's address for callers with tokens. Empty means none, or unknown.
    """

    def __init__(
        self,
        leader_id: int = -1,
        leader_endpoint: str = "",
        epoch: int = -1,
        token_endpoint: str = "",
    ) -> None:
        where = f"controller {leader_id} at {leader_endpoint}" if leader_id >= 0 else "unknown yet"
        super().__init__(f"this controller is not the leader, the leader is {where}")
        self.leader_id = leader_id
        self.leader_endpoint = leader_endpoint
        self.epoch = epoch
        self.token_endpoint = token_endpoint


class OutcomeUnknownError(ApiError):
    """Leadership was lost while the request was replicated: it may or may not take effect.

    Retrying it with the same request id or object id is safe.
    """


class FeatureLevelError(ApiError):
    """The cluster cannot change to a feature level. `blocked_by` controllers do not support it.

    Also raised for a new voter that does not support the present level.
    """

    def __init__(self, level: int, why: str, blocked_by: Sequence[int] = ()) -> None:
        super().__init__(why)
        self.level = level
        self.blocked_by = tuple(blocked_by)


class OffsetPassedError(ApiError):
    """The metadata is past the offset whose hash was requested, and cannot go back."""

    def __init__(self, at_offset: int, end_offset: int) -> None:
        super().__init__(
            f"at_offset: {at_offset}, but the metadata is already at {end_offset}, "
            "request an offset above that"
        )
        self.at_offset = at_offset
        self.end_offset = end_offset


class ObjectIdsNotReadyError(ApiError):
    """Object ids are not claimed in the bucket yet, or temporarily cannot be. Retry later."""

    def __init__(self, why: str) -> None:
        super().__init__(f"no object ids can be issued yet: {why}, retry")


class BucketRejectedError(ApiError):
    """The bucket belongs to another cluster, or its marker is unreadable. An operator must act."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"no object ids are issued, no change is acknowledged and nothing is deleted: {why}"
        )


class SupersededError(ApiError):
    """Another cluster, restored or recovered from this one, has taken over its bucket."""

    def __init__(self, cluster_id: str) -> None:
        super().__init__(
            f"nothing is written or deleted: cluster {cluster_id!r} was restored from a backup of "
            "this one, or recovered from one of its disks, and owns the bucket now: connect to its "
            "controllers, and stop these"
        )
        self.cluster_id = cluster_id


class MarkerUnseenError(ApiError):
    """The controller has not seen its cluster's marker in the bucket for the length of a lease."""

    def __init__(self, age_ms: int | None, why: str) -> None:
        since = "since it started" if age_ms is None else f"for {age_ms / 1000:.0f} s"
        super().__init__(
            "nothing was changed: this controller has not seen its cluster's marker in the bucket "
            f"{since}, and another cluster may own the bucket by now: {why}. Retry, and check "
            "that the controllers can reach the bucket"
        )


class FencePendingError(ApiError):
    """The cluster was restored or recovered, and its predecessor may still acknowledge changes."""

    def __init__(self, left_ms: int) -> None:
        super().__init__(
            "nothing was changed: controllers of the cluster before this one may acknowledge "
            f"changes for another {left_ms / 1000:.0f} s, retry after that time"
        )


class RecoveringError(ApiError):
    """The cluster was restored, and objects written since the backup are not adopted yet."""

    def __init__(self) -> None:
        super().__init__(
            "the cluster was restored from a backup and is in recovery mode: nothing was changed, "
            "retry once an operator has run `streammeta restore adopt` and `streammeta "
            "restore finish`"
        )


class MetadataOlderThanBucketError(ApiError):
    """The metadata was restored to an earlier state than the bucket's claim."""

    def __init__(self, issued_below: int, claimed: int) -> None:
        super().__init__(
            "no object ids are issued and nothing is deleted: the metadata is older than the "
            f"bucket. It may have issued object ids below {issued_below}, but the bucket contains "
            f"a claim on ids below {claimed}. The controllers were restored to an earlier state, "
            "or another copy of this cluster uses the bucket. Start the controllers with their "
            "newest data directories, see docs/operations/bucket.md"
        )
        self.issued_below = issued_below
        self.claimed = claimed


class NewerLogError(Exception):
    """A log entry needs a newer version. The process stops.

    Log and directory are intact, and the newer version continues with them.
    """


class LogOfBeforeError(Exception):
    """The log is older than a recovery from the loss of a majority. The process stops.

    The directory is intact, and may contain commits that the recovered cluster has lost.
    """

    def __init__(self, sender: int, end_offset: int) -> None:
        super().__init__(
            f"controller {sender} belongs to a cluster recovered from the loss of a majority: "
            f"the log here, which ends at {end_offset}, is older than that and cannot continue"
        )


class InvariantError(Exception):
    """A state that must not exist, which is a defect. The process stops."""


class DamagedMetadataError(Exception):
    """Sections of a checkpoint are inconsistent, or contain impossible values.

    `section` and `field` name the place, `row` is the row, counted from 0. -1 is the whole column.
    """

    def __init__(self, section: str, row: int, field: str, got: object, wanted: str) -> None:
        place = f"row {row}, " if row >= 0 else ""
        super().__init__(f"section {section!r}, {place}{field}: got {got}, must be {wanted}")
        self.section = section
        self.row = row
        self.field = field
        self.got = got
        self.wanted = wanted

    def moved(self, rows: int) -> "DamagedMetadataError":
        """Return the same error for a row further down by `rows`."""
        row = self.row + rows if self.row >= 0 else self.row
        return DamagedMetadataError(self.section, row, self.field, self.got, self.wanted)

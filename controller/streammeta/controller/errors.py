"""Errors that the controller's packages raise, and the codes of per-item outcomes.

An `ApiError` is an answer: the caller's request can't be met and nothing was changed. An
`InvariantError` is a defect of ours: a state that must not exist. Per-item outcomes of a request
are not exceptions at all but `ErrorCode` values in the reply. Nothing here knows gRPC.
"""

from collections.abc import Sequence
from enum import IntEnum


class ErrorCode(IntEnum):
    """Per-item outcomes; the numbers are those of the protobuf enum of the same name."""

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


class ApiError(Exception):
    """A request that is answered with a failure as a whole; nothing was changed."""


class InvalidRequestError(ApiError):
    """The request is malformed: `field` names what is wrong, the message what would be right."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class LimitExceededError(ApiError):
    """The request, or what it would add to, is larger than a limit; refused before any append."""

    def __init__(self, message: str, field: str = "", limit: int = 0) -> None:
        """`field` names the limited part of the request or answer, `limit` is the most it may be.

        Without a field the message alone says what is limited.
        """
        super().__init__(message)
        self.field = field
        self.limit = limit


class QuotaExceededError(LimitExceededError):
    """The map holds as much of something as it may; waiting does not help."""

    def __init__(self, quota: str, limit: int, used: int, added: int) -> None:
        super().__init__(
            f"{quota}: {used} of {limit} are used, {added} more are too many; delete some, or "
            f"raise the limit on all controllers (--max-{quota.replace('_', '-')})"
        )
        self.quota = quota
        self.limit = limit
        self.used = used


class RateExceededError(LimitExceededError):
    """A caller has asked too much of late; the same request is taken after `retry_after_ms`."""

    def __init__(self, principal: str, quota: str, limit: int, retry_after_ms: int) -> None:
        super().__init__(
            f"{quota}: {principal} has used up its {limit} a second; "
            f"try again in {retry_after_ms} ms"
        )
        self.quota = quota
        self.limit = limit
        self.retry_after_ms = retry_after_ms


class BusyError(LimitExceededError):
    """Too much is under way; nothing was changed, and the same request may be taken later.

    `retry_after_ms` says when, as far as that is known.
    """

    def __init__(self, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class MemoryHighError(BusyError):
    """The process holds so much memory that calls like this one are refused for now."""

    def __init__(self, limit: int, used: int, retry_after_ms: int) -> None:
        super().__init__(
            f"memory: the controller holds {used} bytes, its limit is {limit}; try again later, "
            "send or ask for less at once, or raise the limit (--memory-limit-mb)",
            retry_after_ms,
        )
        self.limit = limit
        self.used = used


class SlowReaderError(BusyError):
    """A caller took so long to read an answer that it was cut off."""


class TooManyPipelinesError(BusyError):
    """As many commit pipelines are open as may be, on the connection or on the controller."""


class AuditUnavailableError(ApiError):
    """A call must be on record, and the audit log can't be written."""

    def __init__(self, why: str, *, took_effect: bool = False) -> None:
        """`took_effect` is True if the call was decided before its outcome could not be written."""
        self.why = why
        what = "it may have taken effect" if took_effect else "nothing was changed"
        super().__init__(f"{why}: {what}; mend the audit log of this controller")


class NotLeaderError(ApiError):
    """Another controller leads. `leader_id` is -1 and `leader_endpoint` empty if unknown.

    `token_endpoint` is the leader's address for callers with tokens; empty: none, or unknown.
    """

    def __init__(
        self,
        leader_id: int = -1,
        leader_endpoint: str = "",
        epoch: int = -1,
        token_endpoint: str = "",
    ) -> None:
        where = f"controller {leader_id} at {leader_endpoint}" if leader_id >= 0 else "unknown yet"
        super().__init__(f"this controller does not lead; the leader is {where}")
        self.leader_id = leader_id
        self.leader_endpoint = leader_endpoint
        self.epoch = epoch
        self.token_endpoint = token_endpoint


class OutcomeUnknownError(ApiError):
    """Leadership was lost while the request was being replicated: it may or may not take effect.

    Repeating it with the same request id or object id is safe.
    """


class FeatureLevelError(ApiError):
    """The cluster can't go to a feature level; `blocked_by` are the controllers that lack it.

    Also of a new voter that can't run at the level in force.
    """

    def __init__(self, level: int, why: str, blocked_by: Sequence[int] = ()) -> None:
        super().__init__(why)
        self.level = level
        self.blocked_by = tuple(blocked_by)


class OffsetPassedError(ApiError):
    """The map is beyond the offset that its hash was asked for, and can't go back."""

    def __init__(self, at_offset: int, end_offset: int) -> None:
        super().__init__(
            f"at_offset: {at_offset}; the map is at {end_offset} already, "
            "ask for an offset that lies ahead"
        )
        self.at_offset = at_offset
        self.end_offset = end_offset


class ObjectIdsNotReadyError(ApiError):
    """Object ids are not claimed in the bucket yet, or for the moment can't be; try again."""

    def __init__(self, why: str) -> None:
        super().__init__(f"no object ids can be issued yet: {why}; try again")


class BucketRefusedError(ApiError):
    """The bucket is not this cluster's, or its marker can't be read; an operator has to act."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"no object ids are issued, no change is acknowledged and nothing is deleted: {why}"
        )


class SupersededError(ApiError):
    """Another cluster, restored or recovered from this one, has taken its bucket over."""

    def __init__(self, cluster_id: str) -> None:
        super().__init__(
            f"nothing is written or deleted: cluster {cluster_id!r} was restored from a backup of "
            "this one, or recovered from one of its disks, and owns the bucket now; connect to its "
            "controllers, and stop these"
        )
        self.cluster_id = cluster_id


class MarkerUnseenError(ApiError):
    """The controller has not seen its cluster's marker in the bucket for the length of a lease."""

    def __init__(self, age_ms: int | None, why: str) -> None:
        since = "since it started" if age_ms is None else f"for {age_ms / 1000:.0f} s"
        super().__init__(
            "nothing was changed: this controller has not seen its cluster's marker in the bucket "
            f"{since}, and another cluster may own the bucket by now: {why}; try again, and check "
            "that the controllers can reach the bucket"
        )


class FencePendingError(ApiError):
    """The cluster was restored or recovered, and the one before may still acknowledge changes."""

    def __init__(self, left_ms: int) -> None:
        super().__init__(
            "nothing was changed: controllers of the cluster before this one may acknowledge "
            f"changes for another {left_ms / 1000:.0f} s; try again after that time"
        )


class RecoveringError(ApiError):
    """The cluster was restored, and what brokers wrote since the backup is not adopted yet."""

    def __init__(self) -> None:
        super().__init__(
            "the cluster was restored from a backup and is in recovery mode: nothing was changed; "
            "try again once an operator has run `streammeta restore adopt` and `streammeta "
            "restore finish`"
        )


class MapOlderThanBucketError(ApiError):
    """The map was restored to an earlier state: the bucket knows of ids issued after it."""

    def __init__(self, issued_below: int, claimed: int) -> None:
        super().__init__(
            "no object ids are issued and nothing is deleted: the map is older than the bucket, "
            f"as it may have issued object ids below {issued_below}, and the bucket holds a claim "
            f"on ids below {claimed}; the controllers were restored to an earlier state, or "
            "another copy of this cluster uses the bucket. Start the controllers with their "
            "newest data directories; see docs/operations/bucket.md"
        )
        self.issued_below = issued_below
        self.claimed = claimed


class NewerLogError(Exception):
    """An entry of the log holds what only a newer version can read: the process stops.

    Nothing is wrong with log or directory; the newer version goes on with them.
    """


class LogOfBeforeError(Exception):
    """The log here is of before a recovery from the loss of a majority: the process stops.

    Nothing is wrong with the directory, and it may hold commits that the recovered cluster lacks.
    """

    def __init__(self, sender: int, end_offset: int) -> None:
        super().__init__(
            f"controller {sender} is of a cluster that was recovered from the loss of a majority; "
            f"the log here, which ends at {end_offset}, is of before that and can't be continued"
        )


class InvariantError(Exception):
    """A state that must not exist: a defect of ours. The process stops rather than go on."""


class DamagedMapError(Exception):
    """Sections of a checkpoint that contradict each other, or hold what no map can.

    `section` and `field` say where, `row` in which row, counted from 0; -1 is the whole column.
    """

    def __init__(self, section: str, row: int, field: str, got: object, wanted: str) -> None:
        place = f"row {row}, " if row >= 0 else ""
        super().__init__(f"section {section!r}, {place}{field}: got {got}, must be {wanted}")
        self.section = section
        self.row = row
        self.field = field
        self.got = got
        self.wanted = wanted

    def moved(self, rows: int) -> "DamagedMapError":
        """Return the same error of a row that many rows further down."""
        row = self.row + rows if self.row >= 0 else self.row
        return DamagedMapError(self.section, row, self.field, self.got, self.wanted)

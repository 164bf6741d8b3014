"""Whole-call failures as gRPC statuses with `google.rpc.ErrorInfo`, alone in naming status codes.

The reason is stable and meant for programs, the message for people. Clients in any language read
the details from the standard `grpc-status-details-bin` trailer.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import grpc
import structlog

from streammeta.controller.errors import (
    ApiError,
    BucketRefusedError,
    BusyError,
    InvalidRequestError,
    LimitExceededError,
    MapOlderThanBucketError,
    NotLeaderError,
    ObjectIdsNotReadyError,
    OffsetPassedError,
    OutcomeUnknownError,
    TooManyPipelinesError,
)
from streammeta.controller.quorum.messages import QuorumError
from streammeta.controller.runtime.change_feed import WatcherTooSlowError
from streammeta.controller.runtime.quorum_errors import (
    NoDiskSpaceError,
    NotCaughtUpError,
    SnapshotFailedError,
    TransferRefusedError,
    VoterChangeError,
)
from streammeta.rpc.failures import Reason, details_trailer

_DEADLINE_PASSED = (
    "no answer within the call's deadline; the outcome of a write is unknown, it may still take "
    "effect: repeat it with the same request id or object id"
)
_VOTER_CHANGE_CODES = {
    QuorumError.REQUEST_TIMED_OUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    QuorumError.DUPLICATE_VOTER: grpc.StatusCode.ALREADY_EXISTS,
    QuorumError.VOTER_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
}

Context = grpc.aio.ServicerContext[Any, Any]

_log = structlog.get_logger(component="rpc")


async def abort(
    context: Context,
    error: Exception,
    extra: Mapping[str, str] | None = None,
) -> NoReturn:
    """End the call with the status that `error` stands for; `extra` joins its metadata."""
    code, reason, metadata = classify(error)
    metadata = {**metadata, **(extra or {})}
    message = str(error) or (_DEADLINE_PASSED if isinstance(error, TimeoutError) else "")
    if code is grpc.StatusCode.INTERNAL:
        _log.error("request_failed", exc_info=error)
        message = f"defect in the controller ({type(error).__name__}); nothing was changed"
    await context.abort(code, message, details_trailer(code, message, reason, metadata))
    raise AssertionError("abort returned")


def classify(error: Exception) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Map an exception to (status code, stable reason, metadata for programs)."""
    if (known := _classify_quorum(error) or _classify_bucket(error)) is not None:
        return known
    match error:
        case NotLeaderError():
            where = {
                "leader_id": str(error.leader_id),
                "leader_endpoint": error.leader_endpoint,
                "epoch": str(error.epoch),
            }
            return grpc.StatusCode.UNAVAILABLE, Reason.NOT_LEADER, where
        case InvalidRequestError():
            return grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD, {"field": error.field}
        case TooManyPipelinesError():
            return grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.TOO_MANY_PIPELINES, {}
        case BusyError():
            return grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.BUSY, {}
        case LimitExceededError():
            return grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.LIMIT_EXCEEDED, {}
        case WatcherTooSlowError():
            resume = {"from_offset": str(error.from_offset)}
            return grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.WATCHER_TOO_SLOW, resume
        case OffsetPassedError():
            end = {"end_offset": str(error.end_offset)}
            return grpc.StatusCode.FAILED_PRECONDITION, Reason.OFFSET_PASSED, end
        case OutcomeUnknownError():
            return grpc.StatusCode.ABORTED, Reason.OUTCOME_UNKNOWN, {}
        case ApiError():
            return grpc.StatusCode.FAILED_PRECONDITION, Reason.REFUSED, {}
        case TimeoutError():
            return grpc.StatusCode.DEADLINE_EXCEEDED, Reason.DEADLINE, {}
        case _:
            return grpc.StatusCode.INTERNAL, Reason.DEFECT, {}


def _classify_quorum(error: Exception) -> tuple[grpc.StatusCode, str, dict[str, str]] | None:
    match error:
        case NoDiskSpaceError():
            return grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.DISK_FULL, {}
        case VoterChangeError() if error.error is QuorumError.NOT_LEADER:
            return grpc.StatusCode.ABORTED, Reason.OUTCOME_UNKNOWN, {}
        case VoterChangeError():
            code = _VOTER_CHANGE_CODES.get(error.error, grpc.StatusCode.FAILED_PRECONDITION)
            return code, error.error.name, {}
        case NotCaughtUpError():
            far = {"wanted": str(error.wanted), "applied": str(error.applied)}
            return grpc.StatusCode.UNAVAILABLE, Reason.NOT_CAUGHT_UP, far
        case TransferRefusedError():
            return grpc.StatusCode.FAILED_PRECONDITION, Reason.TRANSFER_REFUSED, {}
        case SnapshotFailedError():
            return grpc.StatusCode.FAILED_PRECONDITION, Reason.SNAPSHOT_FAILED, {}
        case _:
            return None


def _classify_bucket(error: Exception) -> tuple[grpc.StatusCode, str, dict[str, str]] | None:
    match error:
        case ObjectIdsNotReadyError():
            return grpc.StatusCode.UNAVAILABLE, Reason.OBJECT_IDS_NOT_READY, {}
        case BucketRefusedError():
            return grpc.StatusCode.FAILED_PRECONDITION, Reason.WRONG_BUCKET, {}
        case MapOlderThanBucketError():
            bounds = {"issued_below": str(error.issued_below), "claimed": str(error.claimed)}
            return grpc.StatusCode.FAILED_PRECONDITION, Reason.MAP_OLDER_THAN_BUCKET, bounds
        case _:
            return None

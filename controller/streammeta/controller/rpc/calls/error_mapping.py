"""Request guard: deadlines of calls, their failures as statuses, and session reads.

Names every status code that a controller answers with. Knows no particular request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError, Message

from streammeta.controller import errors
from streammeta.controller.quorum.messages import QuorumError
from streammeta.controller.runtime import quorum_errors
from streammeta.controller.runtime.writer.change_feed import WatcherTooSlowError
from streammeta.controller.trust import refusals
from streammeta.controller.trust.audit.auditor import current_record, note_failure, note_offset
from streammeta.controller.trust.authenticator import came_by_token
from streammeta.rpc.failures import Reason, details_trailer

_DEADLINE_PASSED = (
    "no answer within the call's deadline. A write may still take effect: "
    "repeat it with the same request id or object id"
)
_VOTER_CHANGE_CODES = {
    QuorumError.REQUEST_TIMED_OUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    QuorumError.DUPLICATE_VOTER: grpc.StatusCode.ALREADY_EXISTS,
    QuorumError.VOTER_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
}

Context = grpc.aio.ServicerContext[Any, Any]

_log = structlog.get_logger(component="rpc")

refused: Counter[str] = Counter(dict.fromkeys(map(str, Reason), 0))
"""Calls that ended with an error in this process, by reason."""


MESSAGE_BYTES_MAX = 1_024
VALUE_BYTES_MAX = 512
"""Maximum sizes of a status's message and of each value of its metadata, in bytes.

Clients of gRPC accept trailers of 8 KiB, and a message may quote its caller. It travels twice, each
byte as three and as four thirds at most.
"""


async def abort(
    context: Context,
    error: Exception,
    extra: Mapping[str, str] | None = None,
) -> NoReturn:
    """End the call with the status of `error`. `extra` is added to the status's metadata."""
    code, reason, metadata = classify(error)
    # Before anything can fail, so that the audit line has the reason.
    note_failure(code.name, reason)
    refused[reason] += 1
    metadata = {
        key: _shorten(value, VALUE_BYTES_MAX)
        for key, value in {**metadata, **(extra or {})}.items()
    }
    if isinstance(error, errors.NotLeaderError) and came_by_token():
        metadata["leader_endpoint"] = error.token_endpoint  # the other asks for a certificate

    message = str(error) or (_DEADLINE_PASSED if isinstance(error, TimeoutError) else "")
    if code is grpc.StatusCode.INTERNAL:
        _log.error("request_failed", exc_info=error)
        message = f"defect in the controller ({type(error).__name__}), nothing was changed"

    message = _shorten(message, MESSAGE_BYTES_MAX)
    retry_after_ms = None
    if isinstance(error, errors.BusyError | errors.RateExceededError):
        retry_after_ms = error.retry_after_ms

    details = details_trailer(code, message, reason, metadata, retry_after_ms)
    await context.abort(code, message, details)
    # gRPC raises in abort. For the type checker: the call ends here.
    raise AssertionError("abort returned")


def _shorten(text: str, bytes_max: int) -> str:
    """Return a text, its middle left out if it is too long: its end says what would be right."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= bytes_max:
        return text
    # Cut as bytes, because the limit of a trailer is in bytes. Half a character is dropped.
    part = (bytes_max - 3) // 2
    return f"{raw[:part].decode(errors='ignore')}...{raw[-part:].decode(errors='ignore')}"


_Code = grpc.StatusCode

STATUSES: Mapping[type[Exception], tuple[grpc.StatusCode, str, str]] = {
    # ABORTED and not UNAVAILABLE: generic clients repeat the latter without looking.
    errors.OutcomeUnknownError: (_Code.ABORTED, Reason.OUTCOME_UNKNOWN, ""),
    errors.NotLeaderError: (
        _Code.UNAVAILABLE,
        Reason.NOT_LEADER,
        "leader_id leader_endpoint epoch",
    ),
    errors.InvalidRequestError: (_Code.INVALID_ARGUMENT, Reason.INVALID_FIELD, "field"),
    errors.OffsetPassedError: (_Code.FAILED_PRECONDITION, Reason.OFFSET_PASSED, "end_offset"),
    errors.FeatureLevelError: (_Code.FAILED_PRECONDITION, Reason.FEATURE_LEVEL, "level blocked_by"),
    errors.ApiError: (_Code.FAILED_PRECONDITION, Reason.REFUSED, ""),
    # The caller sees its own deadline. This one comes slightly earlier and has a reason.
    TimeoutError: (_Code.DEADLINE_EXCEEDED, Reason.DEADLINE, ""),
    Exception: (_Code.INTERNAL, Reason.DEFECT, ""),
    # Limits.
    errors.TooManyPipelinesError: (_Code.RESOURCE_EXHAUSTED, Reason.TOO_MANY_PIPELINES, ""),
    errors.MemoryHighError: (_Code.RESOURCE_EXHAUSTED, Reason.BUSY, "quota limit used"),
    errors.BusyError: (_Code.RESOURCE_EXHAUSTED, Reason.BUSY, ""),
    errors.QuotaExceededError: (
        _Code.RESOURCE_EXHAUSTED,
        Reason.QUOTA_EXCEEDED,
        "quota limit used",
    ),
    errors.RateExceededError: (_Code.RESOURCE_EXHAUSTED, Reason.QUOTA_EXCEEDED, "quota limit used"),
    errors.LimitExceededError: (_Code.RESOURCE_EXHAUSTED, Reason.LIMIT_EXCEEDED, "field limit"),
    WatcherTooSlowError: (_Code.RESOURCE_EXHAUSTED, Reason.WATCHER_TOO_SLOW, "from_offset"),
    # The quorum.
    quorum_errors.NoDiskSpaceError: (_Code.RESOURCE_EXHAUSTED, Reason.DISK_FULL, ""),
    quorum_errors.NotCaughtUpError: (_Code.UNAVAILABLE, Reason.NOT_CAUGHT_UP, "wanted applied"),
    quorum_errors.TransferRefusedError: (_Code.FAILED_PRECONDITION, Reason.TRANSFER_REFUSED, ""),
    quorum_errors.SnapshotFailedError: (_Code.FAILED_PRECONDITION, Reason.SNAPSHOT_FAILED, ""),
    # The bucket.
    errors.ObjectIdsNotReadyError: (_Code.UNAVAILABLE, Reason.OBJECT_IDS_NOT_READY, ""),
    errors.BucketRejectedError: (_Code.FAILED_PRECONDITION, Reason.WRONG_BUCKET, ""),
    errors.SupersededError: (_Code.FAILED_PRECONDITION, Reason.SUPERSEDED, "cluster_id"),
    errors.MarkerUnseenError: (_Code.UNAVAILABLE, Reason.MARKER_UNSEEN, ""),
    errors.FencePendingError: (_Code.UNAVAILABLE, Reason.FENCE_PENDING, ""),
    errors.RecoveringError: (_Code.UNAVAILABLE, Reason.RECOVERING, ""),
    errors.MetadataOlderThanBucketError: (
        _Code.FAILED_PRECONDITION,
        Reason.MAP_OLDER_THAN_BUCKET,
        "issued_below claimed",
    ),
    # Callers.
    errors.AuditUnavailableError: (_Code.UNAVAILABLE, Reason.AUDIT_UNAVAILABLE, ""),
    refusals.NoIdentityError: (_Code.UNAUTHENTICATED, Reason.NO_IDENTITY, ""),
    refusals.BadTokenError: (_Code.UNAUTHENTICATED, Reason.NO_IDENTITY, "shown"),
    refusals.RoleLacksCallError: (
        _Code.PERMISSION_DENIED,
        Reason.ROLE_LACKS_CALL,
        "principal needs",
    ),
    refusals.NotYourNodeError: (_Code.PERMISSION_DENIED, Reason.NOT_YOUR_NODE, "principal needs"),
    refusals.NotYourNamespaceError: (
        _Code.PERMISSION_DENIED,
        Reason.NOT_YOUR_NAMESPACE,
        "principal needs",
    ),
}
"""Status codes, stable reasons, and the names of attributes for programs, by class of error."""


def classify(error: Exception) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Map an exception to (status code, stable reason, metadata for programs)."""
    if isinstance(error, quorum_errors.VoterChangeError):
        # Leadership was lost after the change was appended, so the next leader may commit it.
        if error.error is QuorumError.NOT_LEADER:
            return _Code.ABORTED, Reason.OUTCOME_UNKNOWN, {}
        code = _VOTER_CHANGE_CODES.get(error.error, _Code.FAILED_PRECONDITION)
        return code, error.error.name, {}

    # The most specific class decides.
    known = next(kind for kind in type(error).__mro__ if kind in STATUSES)
    code, reason, names = STATUSES[known]
    return code, reason, {name: _as_text(getattr(error, name)) for name in names.split()}


def _as_text(part: object) -> str:
    return ",".join(map(str, part)) if isinstance(part, tuple) else str(part)


TIMEOUT_S_MAX = 60.0
"""Maximum time that a call may wait here, in seconds, whatever its deadline."""

_ANSWER_BEFORE_S = 0.05
"""Time reserved for the answer to travel, in seconds, so that the caller receives the reason."""
_SHARE_OF_DEADLINE = 0.95
"""Share of a short deadline after which a call is answered."""

UnaryHandler = Callable[[Any, Context], Awaitable[Message | bytes]]
"""Answers with a message, or with its bytes."""

StreamHandler = Callable[[Any, Context], Awaitable[None]]
"""Answers one request with many messages, each by `context.write`."""

_Result = TypeVar("_Result")


def guarded(handler: UnaryHandler) -> UnaryHandler:
    """Wrap a unary handler: exceptions become statuses, and the caller's deadline is kept."""

    async def call(request: Message, context: Context) -> Message | bytes:
        remaining = context.time_remaining()
        timeout_s = TIMEOUT_S_MAX
        if remaining is not None:
            # Long deadlines keep 50 ms for the answer, and short ones 5 percent.
            answer_by = max(remaining - _ANSWER_BEFORE_S, remaining * _SHARE_OF_DEADLINE)
            timeout_s = min(answer_by, TIMEOUT_S_MAX)
        try:
            async with asyncio.timeout(timeout_s):
                return await handler(request, context)
        except Exception as error:  # noqa: BLE001 - the one place that answers for every defect
            await abort(context, error)

    return call


def parsed(
    handler: Callable[[Any, Context], Awaitable[_Result]], parse: Callable[[bytes], Message]
) -> Callable[[bytes, Context], Awaitable[_Result]]:
    """Wrap a handler: reject bytes that do not parse as an invalid request."""

    async def call(data: bytes, context: Context) -> _Result:
        try:
            message = parse(data)
        except DecodeError:
            malformed = f"{len(data)} bytes that do not parse as a message of this call"
            await abort(context, errors.InvalidRequestError("message", malformed))
        except errors.InvalidRequestError as error:
            await abort(context, error)
        # After parsing, because the audit line names the objects of the request.
        if (record := current_record()) is not None:
            try:
                await record.parsed(message)
            except errors.AuditUnavailableError as error:
                await abort(context, error)
        return await handler(message, context)

    return call


READ_AFTER_KEY = "streammeta-read-after"
"""Metadata of a read: a decimal offset. The answer contains at least everything below it."""

OFFSET_KEY = "streammeta-offset"
"""Trailing metadata of an answer: the offset it holds at, decimal."""

OFFSET_MAX = (1 << 63) - 1

_SHARE_OF_DEADLINE = 0.9
"""Share of a caller's deadline that a session read may wait, so that a refusal still arrives."""

_WAIT_MS_DEFAULT = 5_000
_WAIT_MS_MAX = 60_000


def read_after(context: Context) -> int | None:
    """Return the minimum offset of a read, None for a linearizable read.

    Raises:
        InvalidRequestError: the value is not an offset, or is given twice.
    """
    metadata = context.invocation_metadata() or ()
    # gRPC joins nothing: a repeated key arrives as several pairs.
    values = [value for key, value in metadata if key == READ_AFTER_KEY]
    if not values:
        return None
    text = str(values[0])
    if len(values) > 1:
        raise errors.InvalidRequestError(READ_AFTER_KEY, f"given {len(values)} times; give it once")
    # Python accepts digits of other scripts, and numbers of any length cost time to parse.
    if not (text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) <= OFFSET_MAX):
        raise errors.InvalidRequestError(
            READ_AFTER_KEY,
            f"{text[:40]!r}, must be an offset, 0 to {OFFSET_MAX}, in decimal digits",
        )
    return int(text)


def longest_wait_ms(context: Context) -> int:
    """Return how long a session read may wait for its offset."""
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return _WAIT_MS_DEFAULT
    return min(_WAIT_MS_MAX, max(0, int(remaining_s * 1000 * _SHARE_OF_DEADLINE)))


def quote_offset(context: Context, offset: int) -> None:
    """Set the offset at which the answer holds as trailing metadata."""
    context.set_trailing_metadata(((OFFSET_KEY, str(offset)),))
    note_offset(offset)

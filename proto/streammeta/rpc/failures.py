"""Failed calls as statuses with `google.rpc.ErrorInfo`: the only writer and the only reader.

The reason is stable and meant for programs, the message for people. Clients in any language read
the details from the standard trailer `grpc-status-details-bin`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "streammeta"
"""Domain of every `ErrorInfo` that a controller writes. Others are ignored."""

_DETAILS_TRAILER = "grpc-status-details-bin"

_CLOSED = "Socket closed"
"""gRPC's wording for a connection that the other side has closed."""

TOO_MANY_CALLS = "Concurrent RPC limit exceeded"
"""Message of a controller that rejects a call unread because too many are in progress."""

_MAY_BE_REFUSED = (
    ". Over TLS this may mean that the controller rejects the certificate: see the controller's log"
)


class Reason(StrEnum):
    """Reason why a call failed as a whole. docs/protocol.md lists status and metadata of each.

    Rejected voter changes add the names of the quorum's errors.
    """

    NOT_LEADER = "NOT_LEADER"
    OUTCOME_UNKNOWN = "OUTCOME_UNKNOWN"
    NOT_CAUGHT_UP = "NOT_CAUGHT_UP"
    DEADLINE = "DEADLINE"
    INVALID_FIELD = "INVALID_FIELD"
    REFUSED = "REFUSED"
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    BUSY = "BUSY"
    TOO_MANY_PIPELINES = "TOO_MANY_PIPELINES"
    WATCHER_TOO_SLOW = "WATCHER_TOO_SLOW"
    DISK_FULL = "DISK_FULL"
    OFFSET_PASSED = "OFFSET_PASSED"
    TRANSFER_REFUSED = "TRANSFER_REFUSED"
    FEATURE_LEVEL = "FEATURE_LEVEL"
    SNAPSHOT_FAILED = "SNAPSHOT_FAILED"
    OBJECT_IDS_NOT_READY = "OBJECT_IDS_NOT_READY"
    AUDIT_UNAVAILABLE = "AUDIT_UNAVAILABLE"
    WRONG_BUCKET = "WRONG_BUCKET"
    SUPERSEDED = "SUPERSEDED"
    MARKER_UNSEEN = "MARKER_UNSEEN"
    FENCE_PENDING = "FENCE_PENDING"
    RECOVERING = "RECOVERING"
    MAP_OLDER_THAN_BUCKET = "MAP_OLDER_THAN_BUCKET"
    NO_IDENTITY = "NO_IDENTITY"
    ROLE_LACKS_CALL = "ROLE_LACKS_CALL"
    NOT_YOUR_NODE = "NOT_YOUR_NODE"
    NOT_YOUR_NAMESPACE = "NOT_YOUR_NAMESPACE"
    DEFECT = "DEFECT"


@dataclass(frozen=True, slots=True)
class RpcFailure:
    """Status of a failed call. `reason` and `metadata` are empty unless a controller set them.

    A call that the local gRPC rejected because too many were in progress has the reason `BUSY` too.
    `reason` is a `Reason`, or one that this version does not know.
    """

    code: grpc.StatusCode
    message: str
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: float = 0.0
    """Seconds to wait before the same request is sent again, 0 if unspecified."""

    @property
    def text(self) -> str:
        """Code and message, for people."""
        return f"{self.code.name} {self.message}".strip()


def read_failure(error: grpc.RpcError, *, over_tls: bool = False) -> RpcFailure:
    """Return the status of a failed call, with a controller's `ErrorInfo` if it has one.

    `over_tls` adds a possible cause of a closed connection: TLS 1.3 hides from its holder why a
    certificate was rejected.
    """
    call: Any = error
    # Some errors of gRPC have no status.
    if not hasattr(call, "code"):
        return RpcFailure(grpc.StatusCode.UNKNOWN, str(error))

    info, retry_after_s = None, 0.0
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_TRAILER:
            info, retry_after_s = _parse_details(value)

    if info is None:
        message = call.details() or ""
        # The server rejects such calls before it reads them, and adds no reason.
        if call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and TOO_MANY_CALLS in message:
            return RpcFailure(call.code(), message, Reason.BUSY)
        is_closed = call.code() is grpc.StatusCode.UNAVAILABLE and _CLOSED in message
        return RpcFailure(
            call.code(), message + (_MAY_BE_REFUSED if over_tls and is_closed else "")
        )

    metadata = dict(info.metadata)
    return RpcFailure(call.code(), call.details() or "", info.reason, metadata, retry_after_s)


def details_trailer(
    code: grpc.StatusCode,
    message: str,
    reason: str,
    metadata: Mapping[str, str],
    retry_after_ms: int | None = None,
) -> tuple[tuple[str, bytes]]:
    """Return the trailing metadata that carries a failure's reason and metadata.

    With `retry_after_ms` it states, as `google.rpc.RetryInfo`, when to send the same request again.
    """
    number: int = code.value[0]
    # The trailer repeats code and message, as its standard requires.
    status = status_pb2.Status(code=number, message=message)
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)
    status.details.add().Pack(info)
    if retry_after_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(retry_after_ms)
        status.details.add().Pack(retry)
    return ((_DETAILS_TRAILER, status.SerializeToString()),)


def _parse_details(trailer: bytes) -> tuple[error_details_pb2.ErrorInfo | None, float]:
    """Return the controller's details, None without any, and the wait in seconds."""
    try:
        details = status_pb2.Status.FromString(trailer).details
    except DecodeError:
        return None, 0.0  # not written by a controller
    found = None
    retry_after_s = 0.0
    for detail in details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        # Details of others, such as a proxy, have another domain.
        if detail.Unpack(info) and info.domain == DOMAIN:
            found = info
        elif detail.Unpack(retry):
            retry_after_s = max(0.0, retry.retry_delay.ToTimedelta().total_seconds())
    return found, retry_after_s

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
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "streammeta"
"""The domain of every `ErrorInfo` that a controller writes; others are ignored."""

_DETAILS_TRAILER = "grpc-status-details-bin"

_CLOSED = "Socket closed"
"""What gRPC says of a connection that the other side has closed."""

_MAY_BE_REFUSED = (
    "; over TLS this may mean that the controller refuses the certificate: look at the controller's"
    " log, and check the files by `streammeta certs show`"
)


class Reason(StrEnum):
    """Why a call failed as a whole; docs/protocol.md gives status and metadata of each.

    Refused voter changes add the names of the quorum's errors.
    """

    NOT_LEADER = "NOT_LEADER"
    OUTCOME_UNKNOWN = "OUTCOME_UNKNOWN"
    NOT_CAUGHT_UP = "NOT_CAUGHT_UP"
    DEADLINE = "DEADLINE"
    INVALID_FIELD = "INVALID_FIELD"
    REFUSED = "REFUSED"
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
    BUSY = "BUSY"
    TOO_MANY_PIPELINES = "TOO_MANY_PIPELINES"
    WATCHER_TOO_SLOW = "WATCHER_TOO_SLOW"
    DISK_FULL = "DISK_FULL"
    OFFSET_PASSED = "OFFSET_PASSED"
    TRANSFER_REFUSED = "TRANSFER_REFUSED"
    SNAPSHOT_FAILED = "SNAPSHOT_FAILED"
    OBJECT_IDS_NOT_READY = "OBJECT_IDS_NOT_READY"
    AUDIT_UNAVAILABLE = "AUDIT_UNAVAILABLE"
    WRONG_BUCKET = "WRONG_BUCKET"
    MAP_OLDER_THAN_BUCKET = "MAP_OLDER_THAN_BUCKET"
    NO_IDENTITY = "NO_IDENTITY"
    ROLE_LACKS_CALL = "ROLE_LACKS_CALL"
    NOT_YOUR_NODE = "NOT_YOUR_NODE"
    NOT_YOUR_NAMESPACE = "NOT_YOUR_NAMESPACE"
    DEFECT = "DEFECT"


@dataclass(frozen=True, slots=True)
class RpcFailure:
    """The status of a failed call; `reason` and `metadata` are empty unless a controller set them.

    `reason` is a `Reason`, or one that this version does not know.
    """

    code: grpc.StatusCode
    message: str
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Code and message, for people."""
        return f"{self.code.name} {self.message}".strip()


def read_failure(error: grpc.RpcError, *, over_tls: bool = False) -> RpcFailure:
    """Return the status of a failed call, with a controller's `ErrorInfo` if it has one.

    `over_tls` adds what a connection that is closed may mean there: TLS 1.3 hides why a certificate
    was refused from who showed it.
    """
    call: Any = error
    if not hasattr(call, "code"):
        return RpcFailure(grpc.StatusCode.UNKNOWN, str(error))
    info = None
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_TRAILER:
            info = _parse_details(value)
    if info is None:
        message = call.details() or ""
        is_closed = call.code() is grpc.StatusCode.UNAVAILABLE and _CLOSED in message
        return RpcFailure(
            call.code(), message + (_MAY_BE_REFUSED if over_tls and is_closed else "")
        )
    return RpcFailure(call.code(), call.details() or "", info.reason, dict(info.metadata))


def details_trailer(
    code: grpc.StatusCode, message: str, reason: str, metadata: Mapping[str, str]
) -> tuple[tuple[str, bytes]]:
    """Return the trailing metadata that carries a failure's reason and metadata."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata))
    number: int = code.value[0]
    status = status_pb2.Status(code=number, message=message, details=[detail])
    return ((_DETAILS_TRAILER, status.SerializeToString()),)


def _parse_details(trailer: bytes) -> error_details_pb2.ErrorInfo | None:
    try:
        details = status_pb2.Status.FromString(trailer).details
    except DecodeError:
        return None  # not written by a controller
    for detail in details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return info
    return None

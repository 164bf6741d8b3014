"""The operator's client: blocking calls to the leader, and failures in words for operators.

A call may reach a controller more than once, which the contract allows for all of them. No
`grpc.RpcError` leaves a client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import click
import grpc
from google.protobuf.message import Message

from streammeta.controller.errors import ApiError
from streammeta.rpc.advice import advice, is_refusal
from streammeta.rpc.blocking_client import BlockingClient, LeaderCallError
from streammeta.rpc.failures import Reason, RpcFailure
from streammeta.rpc.leader_router import FailureKind
from streammeta.tls.files import CallerFiles

DEADLINE_S = 10.0

_HINTS = {
    "INVALID_ARGUMENT": "correct what the message names; nothing was changed",
    "RESOURCE_EXHAUSTED": "ask for less at once",
    "FAILED_PRECONDITION": "nothing was changed; the message says what stands in the way",
    "ALREADY_EXISTS": "nothing was changed; `streammeta quorum describe` lists the voters",
    "NOT_FOUND": "nothing was changed; `streammeta quorum describe` lists the voters",
    "PERMISSION_DENIED": "ask the cluster's owner for access",
    "UNAUTHENTICATED": "give a certificate of this cluster, by --tls-ca, --tls-cert and --tls-key",
    "UNIMPLEMENTED": "run the same version of streammeta here as on the controllers",
    "DEADLINE_EXCEEDED": "see the controller's log for what holds it up, or raise --timeout",
    "ABORTED": "repeat the command: doing so is safe",
    "INTERNAL": "see the controller's log and report the defect",
}

_HINTS_BY_REASON: dict[str, str] = {
    Reason.BUSY: "nothing was changed; repeat the command in a moment",
    Reason.DISK_FULL: "nothing was changed; make room on the disks that are full, as "
    "`streammeta quorum describe` shows, then repeat",
    Reason.FEATURE_LEVEL: "nothing was changed; `streammeta features describe` shows the versions "
    "of all controllers",
    Reason.RECOVERING: "nothing was changed; `streammeta restore finish` ends recovery mode",
    Reason.MARKER_UNSEEN: "nothing was changed; let the controllers reach the bucket, then repeat",
    Reason.FENCE_PENDING: "nothing was changed; repeat the command after the time that is named",
    Reason.QUOTA_EXCEEDED: "nothing was changed; delete what is not needed, or raise the limit "
    "that the message names, on all controllers",
    Reason.AUDIT_UNAVAILABLE: "nothing was changed; make the controllers' audit log writable, then "
    "repeat",
}

_REPEATED = frozenset({FailureKind.UNREACHABLE, FailureKind.NOT_LEADER})
"""Failures after which a call is repeated; all others are reported at once."""

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Answer = TypeVar("Answer")


class CallError(ApiError):
    """A call that failed: `code` is stable and for programs, `hint` says what to do next."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


def call_error(failure: RpcFailure, endpoint: str, *, over_tls: bool = False) -> CallError:
    """Return the error that operators see."""
    code = failure.code.name
    hint = (
        advice(failure, over_tls=over_tls)
        or _HINTS_BY_REASON.get(failure.reason)
        or _HINTS.get(code, "see the controller's log")
    )
    message = f"{endpoint}: {failure.message}"
    if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = f"{endpoint} did not answer in time"
    return CallError(failure.reason or code, message, hint)


class ControllerClient(BlockingClient):
    """The operator's client of a cluster: every failure leaves it as `CallError`.

    `endpoints` are `host:port` of some of its controllers, at least one; `timeout_s` bounds each
    call with all its redirects and retries. Without `tls` it speaks plain text.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        timeout_s: float = DEADLINE_S,
        tls: CallerFiles | None = None,
    ) -> None:
        super().__init__(endpoints, _REPEATED, waits_for_cluster=False, tls=tls)
        self.timeout_s = timeout_s

    def call(
        self,
        method: Callable[[grpc.Channel], grpc.UnaryUnaryMultiCallable[Request, Response]],
        request: Request,
    ) -> Response:
        """Send `request` to the leader and return its answer.

        `method` picks the method of a stub, as in
        `client.call(lambda channel: AdminServiceStub(channel).TakeSnapshot, request)`.
        Raises `CallError`.
        """
        return self.ask(lambda channel, left_s: method(channel)(request, timeout=left_s))

    def ask(self, send: Callable[[grpc.Channel, float], Answer]) -> Answer:
        """Return what `send` returns; it takes the leader's channel and the seconds left.

        Raises `CallError`.
        """
        try:
            return self.call_leader(send, self.timeout_s)
        except LeaderCallError as error:
            raise _explained(error, over_tls=self.tls is not None) from error


def _explained(error: LeaderCallError, *, over_tls: bool) -> CallError:
    has_failed_before = error.endpoint in error.search.tried
    is_late = error.failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
    # A timeout at an endpoint that failed before means: the time for the search is over.
    if error.is_final and not (is_late and has_failed_before):
        return call_error(error.failure, error.endpoint, over_tls=over_tls)
    tried = error.search.tried
    claims = {
        endpoint: failure.metadata.get("leader_endpoint", "")
        for endpoint, failure in tried.items()
        if failure.reason == Reason.NOT_LEADER
    }
    if not claims:
        hint = "start one with `streammeta dev`, or correct --connect"
        return no_controller_error(tried, hint, over_tls=over_tls)
    return CallError(
        "NO_LEADER",
        f"no leader was found: {'; '.join(_claim_text(*claim, tried) for claim in claims.items())}",
        "see that a majority of the controllers runs and can be reached from here, then repeat",
    )


def no_controller_error(
    silent: Mapping[str, RpcFailure], hint: str, *, over_tls: bool
) -> CallError:
    """Return the error for controllers of which none answers; `silent` is by endpoint.

    `hint` is for failures that have nothing to do with certificates.
    """
    for endpoint, failure in silent.items():
        if is_refusal(failure):
            return call_error(failure, endpoint, over_tls=over_tls)
    advices = (advice(failure, over_tls=over_tls) for failure in silent.values())
    hint = next(filter(None, advices), hint)
    why = "; ".join(dict.fromkeys(failure.message for failure in silent.values()))
    where = ", ".join(silent)
    message = f"no controller answers at {where}: is it running? ({why})"
    return CallError("NO_CONTROLLER", message, hint)


def _claim_text(asked: str, leader: str, tried: Mapping[str, RpcFailure]) -> str:
    if not leader:
        return f"{asked} knows no leader"
    claim = f"{asked} says {leader} leads"
    if leader in tried and tried[leader].reason != Reason.NOT_LEADER:
        claim += f", but from here it is out of reach ({tried[leader].message})"
    return claim


Command = Callable[..., None]
"""A command's function; click calls it with arguments by name."""

store_option = click.option(
    "--store",
    required=True,
    metavar="URI",
    help="s3://BUCKET?endpoint=URL&region=R&pathStyle=true or file:///DIR. Give credentials in"
    " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
)
"""Adds `--store`: argument `store: str`, the address of a bucket."""

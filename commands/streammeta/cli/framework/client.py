"""The operator's client: blocking calls to the leader, and failures explained for operators.

A retried call may reach a controller twice, which the contract allows for all methods. A client
never raises `grpc.RpcError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TypeVar

import click
import grpc

from streammeta.controller.errors import ApiError
from streammeta.rpc import blocking_client, failures, leader_router
from streammeta.rpc.advice import advice, is_refusal
from streammeta.tls.files import CallerFiles
from streammeta.v1 import quorum_pb2, quorum_pb2_grpc
from streammeta.v1.admin_pb2 import DescribeClusterRequest, DescribeClusterResponse
from streammeta.v1.admin_pb2_grpc import AdminServiceStub

DEADLINE_S = 10.0

_HINTS = {
    "INVALID_ARGUMENT": "nothing was changed. Correct the named field",
    "RESOURCE_EXHAUSTED": "request fewer items at once",
    "FAILED_PRECONDITION": "nothing was changed. The message names the conflict",
    "ALREADY_EXISTS": "nothing was changed. `streammeta quorum describe` lists the voters",
    "NOT_FOUND": "nothing was changed. `streammeta quorum describe` lists the voters",
    "PERMISSION_DENIED": "ask the owner of the cluster for access",
    "UNAUTHENTICATED": "use a certificate of this cluster: --tls-ca, --tls-cert and --tls-key",
    "UNIMPLEMENTED": "run the same version of streammeta here as on the controllers",
    "DEADLINE_EXCEEDED": "see the controller's log for the cause of the delay, or raise --timeout",
    "ABORTED": "repeat the command. Repeating it is safe",
    "INTERNAL": "see the controller's log and report the defect",
}

_HINTS_BY_REASON: dict[str, str] = {
    failures.Reason.BUSY: "nothing was changed. Repeat the command in a moment",
    failures.Reason.DISK_FULL: "nothing was changed. Free space on the full disks that `streammeta"
    " quorum describe` lists, then repeat",
    failures.Reason.FEATURE_LEVEL: "nothing was changed. `streammeta features describe` shows"
    " the versions of all controllers",
    failures.Reason.RECOVERING: "nothing was changed. `streammeta restore finish` ends recovery"
    " mode",
    failures.Reason.MARKER_UNSEEN: "nothing was changed. Restore the controllers' access to the"
    " bucket, then repeat",
    failures.Reason.FENCE_PENDING: "nothing was changed. Repeat the command after the named time",
    failures.Reason.QUOTA_EXCEEDED: "nothing was changed. Delete unused entries, or raise the named"
    " limit on all controllers",
    failures.Reason.AUDIT_UNAVAILABLE: "nothing was changed. Make the controllers' audit log"
    " writable, then repeat",
}

_REPEATED = frozenset({leader_router.FailureKind.UNREACHABLE, leader_router.FailureKind.NOT_LEADER})
"""Failures after which a call is retried. All others are reported at once."""

Answer = TypeVar("Answer")


class CallError(ApiError):
    """Failed call: `code` is stable and for programs, `hint` names the next step."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


def call_error(failure: failures.RpcFailure, endpoint: str, *, over_tls: bool = False) -> CallError:
    """Return the error to show to operators."""
    code = failure.code.name
    hint = (
        # The most specific advice wins: certificates first, then the reason, then the status code.
        advice(failure, over_tls=over_tls)
        or _HINTS_BY_REASON.get(failure.reason)
        or _HINTS.get(code, "see the controller's log")
    )
    # gRPC's own text for a timeout names no cause and no endpoint.
    message = f"{endpoint}: {failure.message}"
    if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = f"{endpoint} did not answer in time"
    # Reasons are stable and more precise than status codes, but not every failure has one.
    return CallError(failure.reason or code, message, hint)


class ControllerClient(blocking_client.BlockingClient):
    """The operator's client of a cluster. Every failure is a `CallError`.

    `endpoints` are `host:port` of at least one controller. `timeout_s` bounds each call including
    its redirects and retries. Without `tls` the client uses plain text.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        timeout_s: float = DEADLINE_S,
        tls: CallerFiles | None = None,
    ) -> None:
        # A command does not wait for a cluster that is down: people want to know at once.
        super().__init__(endpoints, _REPEATED, waits_for_cluster=False, tls=tls)
        self.timeout_s = timeout_s

    def call(
        self,
        method: blocking_client.UnaryMethod[blocking_client.Request, blocking_client.Response],
        request: blocking_client.Request,
    ) -> blocking_client.Response:
        """Send `request` to the leader and return its answer.

        `method` selects the method of a stub, as in `client.call(lambda channel:
        AdminServiceStub(channel).TakeSnapshot, request)`. Raises `CallError`.
        """
        return self.ask(lambda channel, left_s: method(channel)(request, timeout=left_s))

    def ask(self, send: Callable[[grpc.Channel, float], Answer]) -> Answer:
        """Return the result of `send`, called with the leader's channel and the remaining seconds.

        Raises `CallError`.
        """
        try:
            return self.call_leader(send, self.timeout_s)
        except blocking_client.LeaderCallError as error:
            raise _explain(error, over_tls=self.tls is not None) from error


def _explain(error: blocking_client.LeaderCallError, *, over_tls: bool) -> CallError:
    has_failed_before = error.endpoint in error.search.tried
    # A final failure comes from a controller that was reached. It explains more than the search.
    is_late = error.failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
    # A timeout at an endpoint that failed before means: the time for the search is over.
    if error.is_final and not (is_late and has_failed_before):
        return call_error(error.failure, error.endpoint, over_tls=over_tls)
    tried = error.search.tried
    # Without any controller that answered "not leader", nobody knows the cluster's state.
    claims = {
        endpoint: failure.metadata.get("leader_endpoint", "")
        for endpoint, failure in tried.items()
        if failure.reason == failures.Reason.NOT_LEADER
    }
    if not claims:
        hint = "start one with `streammeta dev`, or correct --connect"
        return no_controller_error(tried, hint, over_tls=over_tls)

    return CallError(
        "NO_LEADER",
        f"no leader found: {'; '.join(_claim_text(*claim, tried) for claim in claims.items())}",
        "check that a majority of the controllers runs and is reachable from here, then repeat",
    )


def no_controller_error(
    silent: Mapping[str, failures.RpcFailure], hint: str, *, over_tls: bool
) -> CallError:
    """Return the error for controllers that do not answer. `silent` is by endpoint.

    `hint` is for failures that certificates do not cause.
    """
    # A controller that rejects the caller is running. The others' silence matters less.
    for endpoint, failure in silent.items():
        if is_refusal(failure):
            return call_error(failure, endpoint, over_tls=over_tls)
    advices = (advice(failure, over_tls=over_tls) for failure in silent.values())
    hint = next(filter(None, advices), hint)
    # Controllers often fail in the same way. Name each cause once.
    why = "; ".join(dict.fromkeys(failure.message for failure in silent.values()))
    where = ", ".join(silent)
    message = f"no controller answers at {where}: is it running? ({why})"
    return CallError("NO_CONTROLLER", message, hint)


def _claim_text(asked: str, leader: str, tried: Mapping[str, failures.RpcFailure]) -> str:
    if not leader:
        # A leader that is known but unreachable from here is usually a wrong --advertise.
        return f"{asked} knows no leader"
    claim = f"{asked} says {leader} leads"
    if leader in tried and tried[leader].reason != failures.Reason.NOT_LEADER:
        claim += f", which is unreachable from here ({tried[leader].message})"
    return claim


def describe_cluster(client: ControllerClient) -> DescribeClusterResponse:
    """Return the cluster as its leader describes it. Raises CallError."""
    return client.call(
        lambda channel: AdminServiceStub(channel).DescribeCluster, DescribeClusterRequest()
    )


def leaders_view(client: ControllerClient) -> quorum_pb2.DescribeQuorumResponse:
    """Return the quorum as its leader sees it. Raises CallError.

    Its `high_watermark` is the committed end of the log. Other controllers lag behind it, and one
    that has just started knows no end at all. A new leader answers once it has committed.
    """
    return client.call(
        lambda channel: quorum_pb2_grpc.QuorumServiceStub(channel).DescribeQuorum,
        quorum_pb2.DescribeQuorumRequest(leader_only=True),
    )


Command = Callable[..., None]
"""Function of a command. click calls it with arguments by name."""


def add_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds these options, in the order of the help text."""
    # Reversed: click shows options in the reverse order of their decoration.
    return lambda command: reduce(lambda done, option: option(done), reversed(options), command)


store_option = click.option(
    "--store",
    required=True,
    metavar="URI",
    help="s3://BUCKET?endpoint=URL&region=R&pathStyle=true or file:///DIR. Set credentials"
    " in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
)
"""Adds `--store`: argument `store: str`, the address of a bucket."""

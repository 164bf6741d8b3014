"""The operator's gRPC client: blocking, and always in search of the controller that leads.

A call is sent to the last known leader, else to each given endpoint in turn; a controller that does
not lead says who does. A call may therefore reach a controller more than once, which the contract
allows for all of them. Every failure leaves here as `CallError`; no `grpc.RpcError` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import click
import grpc
from google.protobuf.message import Message

from streammeta.controller.config import ConfigError, check_endpoint
from streammeta.controller.errors import ApiError
from streammeta.rpc.connections import operator_channel
from streammeta.rpc.failures import Reason, RpcFailure, read_failure

DEADLINE_S = 10.0
RETRY_PAUSE_S = 0.1

_HINTS = {
    "INVALID_ARGUMENT": "correct what the message names; nothing was changed",
    "RESOURCE_EXHAUSTED": "ask for less at once",
    "FAILED_PRECONDITION": "nothing was changed; the message says what stands in the way",
    "ALREADY_EXISTS": "nothing was changed; `streammeta quorum describe` shows who votes",
    "NOT_FOUND": "nothing was changed; `streammeta quorum describe` shows who votes",
    "PERMISSION_DENIED": "ask the cluster's owner for access",
    "UNIMPLEMENTED": "run the same version of streammeta here as on the controllers",
    "DEADLINE_EXCEEDED": "see the controller's log for what holds it up, or raise --timeout",
    "ABORTED": "repeat the command: doing so is safe",
    "INTERNAL": "see the controller's log and report the defect",
}

_HINTS_BY_REASON: dict[str, str] = {
    Reason.BUSY: "nothing was changed; repeat the command in a moment",
    Reason.DISK_FULL: "nothing was changed; make room on the disks that are full, as "
    "`streammeta quorum describe` shows, then repeat",
}

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


class CallError(ApiError):
    """A call that failed: `code` is stable and for programs, `hint` says what to do next."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


def call_error(failure: RpcFailure, endpoint: str) -> CallError:
    """Return the error that operators see."""
    code = failure.code.name
    hint = _HINTS_BY_REASON.get(failure.reason, _HINTS.get(code, "see the controller's log"))
    message = f"{endpoint}: {failure.message}"
    if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = f"{endpoint} did not answer in time"
    return CallError(failure.reason or code, message, hint)


class ControllerClient:
    """Calls the leader of a cluster. Not for use by several threads at a time.

    `endpoints` are `host:port` of some of its controllers, at least one; `timeout_s` bounds each
    call with all its redirects and retries. Close it, or use it in a `with` statement.
    """

    def __init__(self, endpoints: Sequence[str], timeout_s: float = DEADLINE_S) -> None:
        self._endpoints = tuple(endpoints)
        self._timeout_s = timeout_s
        self._leader = ""
        self._channels: dict[str, grpc.Channel] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; calls are no longer possible."""
        for channel in self._channels.values():
            channel.close()

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
        deadline = time.monotonic() + self._timeout_s
        search = _LeaderSearch(self._endpoints)
        while True:
            search.begin_round(self._leader)
            while endpoint := search.next_endpoint():
                timeout_s = max(0, deadline - time.monotonic())
                try:
                    response = method(self._channel(endpoint))(request, timeout=timeout_s)
                except grpc.RpcError as error:
                    self._leader = ""
                    search.on_failure(endpoint, read_failure(error))
                else:
                    self._leader = endpoint
                    return response
            pause_s = min(RETRY_PAUSE_S, deadline - time.monotonic())
            if pause_s <= 0 or not search.is_worth_repeating:
                raise search.error()
            time.sleep(pause_s)

    def _channel(self, endpoint: str) -> grpc.Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = operator_channel(endpoint)
        return self._channels[endpoint]


class _LeaderSearch:
    """Whom to ask next, round after round, and what was learned on the way."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._endpoints = endpoints
        self._waiting: list[str] = []
        self._asked: set[str] = set()
        self._silent: dict[str, RpcFailure] = {}
        self._claims: dict[str, str] = {}  # who was asked -> whom it takes for the leader

    @property
    def is_worth_repeating(self) -> bool:
        """Whether some controller lives, so that a leader may yet be found."""
        return bool(self._claims)

    def begin_round(self, leader: str) -> None:
        """Ask everybody once more, first the leader if it is known."""
        self._waiting = list(dict.fromkeys(filter(None, [leader, *self._endpoints])))
        self._asked.clear()

    def next_endpoint(self) -> str:
        """An endpoint not asked in this round, or the empty string."""
        if not self._waiting:
            return ""
        endpoint = self._waiting.pop(0)
        self._asked.add(endpoint)
        return endpoint

    def on_failure(self, endpoint: str, failure: RpcFailure) -> None:
        """Learn from a failed call. Raises `CallError` if another controller won't do better."""
        if failure.reason == Reason.NOT_LEADER:
            leader = failure.metadata.get("leader_endpoint", "")
            self._claims[endpoint] = leader
            self._silent.pop(endpoint, None)
            if leader and leader not in self._asked:
                self._waiting = [leader, *(other for other in self._waiting if other != leader)]
        elif failure.code is grpc.StatusCode.UNAVAILABLE and not failure.reason:
            self._silent[endpoint] = failure
        elif failure.code is grpc.StatusCode.DEADLINE_EXCEEDED and (
            endpoint in self._claims or endpoint in self._silent
        ):
            # More is known of it than that the last moment was too short: it has answered before,
            # so that the election is what takes too long, or could not be reached.
            raise self.error()
        else:
            raise call_error(failure, endpoint)

    def error(self) -> CallError:
        """Why the round found no leader."""
        if not self._claims:
            where = ", ".join(self._silent)
            why = "; ".join(dict.fromkeys(failure.message for failure in self._silent.values()))
            return CallError(
                "NO_CONTROLLER",
                f"no controller answers at {where}: is it running? ({why})",
                "start one with `streammeta dev`, or correct --connect",
            )
        claims = "; ".join(self._claim_text(*claim) for claim in self._claims.items())
        return CallError(
            "NO_LEADER",
            f"no leader was found: {claims}",
            "see that a majority of the controllers runs and can be reached from here, then repeat",
        )

    def _claim_text(self, asked: str, leader: str) -> str:
        if not leader:
            return f"{asked} knows no leader"
        claim = f"{asked} says {leader} leads"
        if leader in self._silent:
            claim += f", but from here it is out of reach ({self._silent[leader].message})"
        return claim


def parse_endpoints(
    _context: click.Context, _parameter: click.Parameter, value: str
) -> tuple[str, ...]:
    """Read HOST:PORT,HOST:PORT... for an option `--connect`; click's callback."""
    endpoints = tuple(part.strip() for part in value.split(","))
    for endpoint in endpoints:
        try:
            check_endpoint("--connect", endpoint)
        except ConfigError as error:
            raise click.BadParameter(str(error)) from error
    return endpoints


Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def connection_options(command: Decorated) -> Decorated:
    """Add `--connect` and `--timeout`: arguments `connect: tuple[str, ...]`, `timeout_s: float`."""
    return connect_option(timeout_option(DEADLINE_S)(command))


def connect_option(command: Decorated) -> Decorated:
    """Add `--connect`: argument `connect: tuple[str, ...]`, at least one `host:port`."""
    return click.option(
        "--connect",
        required=True,
        envvar="STREAMMETA_CONNECT",
        show_envvar=True,
        metavar="HOST:PORT[,HOST:PORT...]",
        callback=parse_endpoints,
        help="Some controllers of the cluster; the leader is found from there.",
    )(command)


def timeout_option(default_s: float) -> Callable[[Decorated], Decorated]:
    """Return what adds `--timeout`: argument `timeout_s: float`, above 0."""
    return click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=default_s,
        show_default=True,
        metavar="SECONDS",
        help="How long a call may take.",
    )

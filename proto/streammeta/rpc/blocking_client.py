"""Blocking calls to the leader of a cluster, for commands, jobs and Spark executors.

Owns the channels and the clock. The router chooses the next endpoint. Failed calls raise
`LeaderCallError`, which callers translate.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from streammeta.rpc.connections import operator_channel
from streammeta.rpc.failures import RpcFailure, read_failure
from streammeta.rpc.leader_router import FailureKind, LeaderRouter, LeaderSearch
from streammeta.tls.files import CallerFiles

_Answer = TypeVar("_Answer")
Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
UnaryMethod: TypeAlias = "Callable[[grpc.Channel], grpc.UnaryUnaryMultiCallable[Request, Response]]"
"""Method of a stub, by the channel of the stub. A call has one request and one response."""


class LeaderCallError(Exception):
    """Call that failed at `endpoint` permanently, or for too long.

    `is_final` states that a retry would fail too. `search` contains the answers of others.
    """

    def __init__(
        self, search: LeaderSearch, endpoint: str, failure: RpcFailure, *, is_final: bool
    ) -> None:
        super().__init__(f"{endpoint} answered {failure.code.name}: {failure.message}")
        self.search = search
        self.endpoint = endpoint
        self.failure = failure
        self.is_final = is_final


class BlockingClient:
    """Calls the leader, one call at a time. It belongs to the process and thread that created it.

    `endpoints` are HOST:PORT of at least one controller. The first is asked first. `repeats` are
    the failures after which a call is retried. With `waits_for_cluster` False a call fails as soon
    as no endpoint is reachable. Without `tls` it uses plain text. Close it, or use it in a `with`
    statement.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        repeats: Collection[FailureKind] = frozenset(FailureKind),
        *,
        waits_for_cluster: bool = True,
        tls: CallerFiles | None = None,
    ) -> None:
        # The router rejects an endpoint that is given twice.
        different = tuple(dict.fromkeys(endpoints))
        self._router = LeaderRouter(different, random.Random(), different[0])
        self._repeats = repeats
        self._waits_for_cluster = waits_for_cluster
        self._tls = tls
        self._channels: dict[str, grpc.Channel] = {}
        self._heard_at = 0.0

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
        """Close all connections. Later calls fail."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Configured endpoints, in order."""
        return self._router.endpoints

    @property
    def tls(self) -> CallerFiles | None:
        """TLS files, None for plain text."""
        return self._tls

    @property
    def leader(self) -> str | None:
        """Endpoint that answered last, None before the first answer and after a failure."""
        return self._router.leader

    def channel(self, endpoint: str) -> grpc.Channel:
        """Return the connection to `endpoint`, opened on first use.

        Raises:
            TlsError: the TLS files are invalid.
        """
        if endpoint not in self._channels:
            self._channels[endpoint] = operator_channel(endpoint, self._tls)
        return self._channels[endpoint]

    def heard(self) -> None:
        """Restart the timeout of the current call, because its answer makes progress."""
        self._heard_at = time.monotonic()

    def call_leader(
        self, send: Callable[[grpc.Channel, float], _Answer], timeout_s: float
    ) -> _Answer:
        """Return the result of `send`, called with the channel and the remaining seconds.

        Raises:
            LeaderCallError: the failure is final, or no attempt succeeded within `timeout_s`.
        """
        search = LeaderSearch(self._router, self._repeats)
        # The limit counts from here, and again from every sign of progress.
        self.heard()

        while True:
            endpoint = search.endpoint
            try:
                answer = send(self.channel(endpoint), self._time_left(timeout_s))
            except grpc.RpcError as error:
                failure = read_failure(error, over_tls=self._tls is not None)
                # The router learns of every failure, also of one that ends this call.
                wait = search.record_failure(failure)
                # Jobs wait for a cluster that is down. People want to know at once.
                is_given_up = search.is_unreachable and not self._waits_for_cluster
                if wait is None or is_given_up or not self._time_left(timeout_s):
                    raise LeaderCallError(
                        search, endpoint, failure, is_final=wait is None
                    ) from error
                # Never beyond the limit, so that the caller's timeout holds.
                time.sleep(min(wait, self._time_left(timeout_s)))
            else:
                search.record_answer()
                return answer

    def _time_left(self, timeout_s: float) -> float:
        return max(0.0, self._heard_at + timeout_s - time.monotonic())

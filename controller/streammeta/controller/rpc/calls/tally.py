"""Counts of calls by method and result, durations of unary calls, and connections without calls.

gRPC does not report failed handshakes: plain text, a foreign certificate, an incomplete handshake.
It reports every connection that begins and the connection of every call, so connections without
calls can be counted. Their reasons and origins are unknown.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from streammeta.controller.timings import Times

_Input = TypeVar("_Input")
_Result = TypeVar("_Result")
_Handler = Callable[[_Input, Any], Awaitable[_Result]]

RESULTS = ("answered", "failed", "abandoned")
"""Results of a call. An abandoned call was cancelled by its caller, or this controller stopped."""


@dataclass(slots=True)
class MethodTally:
    """Calls of one method since the start."""

    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RESULTS, 0))
    under_way: int = 0
    times: Times | None = None
    """Durations of calls with any result. None for methods with long calls."""


class RequestTally:
    """Tallies of all methods that were wrapped, by their names without the package."""

    def __init__(self) -> None:
        self._methods: dict[str, MethodTally] = {}

    @property
    def methods(self) -> Mapping[str, MethodTally]:
        """Tallies by Service.Method."""
        return self._methods

    def wrap(
        self, method: str, handler: _Handler[_Input, _Result], *, lasts: bool
    ) -> _Handler[_Input, _Result]:
        """Return a handler whose calls are counted. With `lasts` they are not timed."""
        # A watch lasts for hours, and its duration says nothing about latency.
        tally = MethodTally(times=None if lasts else Times())
        self._methods[".".join(method.split(".")[-2:])] = tally

        async def counted(data: _Input, context: Any) -> _Result:
            # Assumed until the handler returns, so that every exception counts as a failure.
            result, began = "failed", time.perf_counter()
            tally.under_way += 1
            try:
                answer = await handler(data, context)
                result = "answered"
                return answer
            except asyncio.CancelledError:
                result = "abandoned"
                raise
            finally:
                tally.under_way -= 1
                tally.ended[result] += 1
                if tally.times is not None:
                    tally.times.add(time.perf_counter() - began)

        return counted


INTERVAL_S = 60.0
"""Time between two lines of the log, in seconds."""

KNOWN_MAX = 16_384
"""Maximum number of remembered connections, far more than may be open.

The oldest is dropped first.
"""

_log = structlog.get_logger(component="rpc")


class UncalledConnections:
    """Counts connections over TLS by which no call has come.

    One whose first call is still to come counts until it does, so that the number is right only
    for as many as are not in that state.
    """

    def __init__(self, begun: Callable[[], int]) -> None:
        """`begun` returns the number of handshakes that have begun since the start."""
        self._begun = begun
        self._known: dict[str, None] = {}
        self._called = 0
        self._told = 0

    def called(self, peer: str) -> None:
        """Note that a call came from an address and port."""
        if peer in self._known:
            return
        self._called += 1
        # Address and port identify one connection, and its later calls must not count.
        self._known[peer] = None
        if len(self._known) > KNOWN_MAX:
            # Dicts keep the order of insertion. A dropped connection that calls again counts twice,
            # which only hides one.
            del self._known[next(iter(self._known))]

    def look(self) -> int:
        """Return the number of uncalled connections that are new since the last look."""
        uncalled = self._begun() - self._called
        # A call may be counted after the look in which its handshake was reported.
        new = max(0, uncalled - self._told)
        self._told += new
        return new

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            if new := self.look():
                _log.info("client_connections_without_call", connections=new, seconds=INTERVAL_S)

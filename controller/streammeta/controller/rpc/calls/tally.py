"""Counts of calls by method and result, and durations of unary calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

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

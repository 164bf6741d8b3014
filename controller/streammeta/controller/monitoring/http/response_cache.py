"""Cache of page answers, which bounds the work that pages cause.

Answers are reused for a moment, and few are computed at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

KEPT_S = 1.0
"""Time for which an answer is reused, in seconds: ten open pages cost as much as one."""

AT_A_TIME = 4
"""Maximum number of answers computed at a time. Further ones wait."""

ANSWERS_MAX = 64
"""Maximum number of cached answers."""

_T = TypeVar("_T")


class ResponseCache(Generic[_T]):
    """Cached answers by request."""

    def __init__(self, kept_s: float = KEPT_S) -> None:
        self._kept_s = kept_s
        self._answers: dict[Hashable, tuple[float, asyncio.Future[_T]]] = {}
        self._turns = asyncio.Semaphore(AT_A_TIME)

    async def get(self, asked: Hashable, make: Callable[[], Awaitable[_T]]) -> _T:
        """Return a recent answer, or the result of `make`, which concurrent callers share.

        Its exception is raised to all of them and is not cached.
        """
        found = self._answers.get(asked)
        # An answer in flight is shared even when it is older than the limit.
        if found is None or (found[1].done() and time.monotonic() >= found[0] + self._kept_s):
            self._answers.pop(asked, None)
            # Queries are chosen by callers. The oldest entry goes first: dicts keep the order of
            # insertion.
            while len(self._answers) >= ANSWERS_MAX:
                self._answers.pop(next(iter(self._answers)))
            found = (time.monotonic(), asyncio.ensure_future(self._made(asked, make)))
            self._answers[asked] = found
        # A caller that leaves must not cancel the answer for the others.
        return await asyncio.shield(found[1])

    async def _made(self, asked: Hashable, make: Callable[[], Awaitable[_T]]) -> _T:
        try:
            async with self._turns:
                return await make()
        # Also on cancellation, or the key would return a cancelled future for a second.
        except BaseException:
            self._answers.pop(asked, None)
            raise
